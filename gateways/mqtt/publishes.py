"""What MQTT clients of one vhost publish, on its way into the log of `amq.topic`. Driver.

Neighbours that go the same way for the same time are one append, however many clients they come from (intake.py); a
full queue that refuses is left out of the route, and whoever published is told. What is appended comes back by way of
the broker's tap (fan_out.py). Neighbours: publisher.py and wills.py publish, keeping.py writes down what was received.
"""

from collections.abc import Iterable, Mapping, Sequence

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, QOS_SHIFT, RETAIN, Producer
from headrace.core_log.record import Protocol as Vocabulary
from headrace.filtering.tags import NO_TAGS, Tags, is_small
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.vhost import Target, VirtualHost
from headrace.gateways.mqtt.intake import Intake
from headrace.gateways.mqtt.interest import KNOWN_TOPIC_BYTES_MAX, TOPICS_MAX
from headrace.gateways.mqtt.keeping import SessionStates
from headrace.gateways.mqtt.origin import publisher, with_ids
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.session import Session
from headrace.gateways.mqtt.shared import EXCHANGE, Shared
from headrace.gateways.mqtt.tally import Tally


class Publishes:
    def __init__(
        self, shared: Shared, host: VirtualHost, log: PartitionLog, states: SessionStates, tally: Tally
    ) -> None:
        self.shared = shared
        self.host = host
        self.broker = shared.broker
        self.log = log
        self.states = states
        self.tally = tally
        # By key; with tags, by both.
        self._targets: dict[bytes | tuple[bytes, Tags], Target] = {}
        # What clients publish with QoS 0 and 1, until the turn ends.
        self.intake = Intake(self.publish, log.when_committed, shared.before_end)

    def publish(
        self,
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        qos: int,
        retain: bool,
        version: Version,
        origin: int | Sequence[int] = 0,
        refused: list[int] | None = None,
    ) -> int | None:
        """Append messages, behind what was gathered before; returns the offset that a commit must pass before they may
        be acknowledged.

        `origin`: of all, or of each. `refused` gets the places of those that a full queue did not take
        (reject-publish); everybody else has them.
        """
        self.intake.flush()
        vocabulary = Vocabulary.MQTT_5 if version is Version.V5 else Vocabulary.MQTT_3
        attributes = int(vocabulary) | qos << QOS_SHIFT | (RETAIN if retain else 0) | (PERSISTENT if qos else 0)
        keys = self.shared.keys.keys_of(topics)
        reached: int | None = None
        for first, last, target, expiry_us in self._groups(keys, blobs, attributes):
            if target.byte_limits:
                for index in range(first, last):
                    full = [queue for queue in target.byte_limits if not queue.admits(1, len(payloads[index]))]
                    one = origin if isinstance(origin, int) else origin[index]
                    reached = self.broker.publish(
                        _not_for(target, full) if full else target,
                        blobs[index : index + 1],
                        payloads[index : index + 1],
                        attributes=attributes,
                        expiry_us=expiry_us,
                        keys=keys[index : index + 1],
                        # What is refused was not received: its identifier is free.
                        origin=publisher(one) if full else one,
                    )
                    for queue in full:
                        restated = self.broker.restated(keys[index], blobs[index], attributes)
                        self.broker.refuse(self.host, queue, target, restated, payloads[index])
                    if full and refused is not None:
                        refused.append(index)
                continue
            whole = last - first == len(keys)
            reached = self.broker.publish(
                target,
                blobs if whole else blobs[first:last],
                payloads if whole else payloads[first:last],
                attributes=attributes,
                expiry_us=expiry_us,
                keys=keys if whole else keys[first:last],
                origin=origin if whole or isinstance(origin, int) else origin[first:last],
            )
        self.tally.published += len(keys)
        return reached

    def publish_once(
        self,
        session: Session,
        packet_ids: Sequence[int],
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        retain: bool,
        version: Version,
        refused: list[int],
    ) -> None:
        """The same with QoS 2, for identifiers that are free: they are taken with that, also after a crash."""
        self.intake.flush()
        self.states.noted_to = int(self.log.end)
        try:
            origin = with_ids(session.origin, packet_ids) if session.outlives else session.origin
            self.publish(topics, blobs, payloads, qos=2, retain=retain, version=version, origin=origin, refused=refused)
            end = int(self.log.end)
            session.incoming.update(zip(packet_ids, range(end - len(packet_ids), end), strict=True))
            for place in refused:
                del session.incoming[packet_ids[place]]
        finally:
            self.states.noted_to = None
        if session.outlives:
            self.states.changed(session)

    def _groups(
        self, keys: Sequence[bytes], blobs: Sequence[bytes], attributes: int
    ) -> Iterable[tuple[int, int, Target, int]]:
        """Neighbours that go the same way for the same time."""
        count = len(keys)
        if keys[-1] is keys[0] and keys.count(keys[0]) == count and blobs.count(blobs[0]) == count:
            return ((0, count, self._target(keys[0], blobs[0], attributes), self._expiry_us(blobs[0])),)
        groups: list[tuple[int, int, Target, int]] = []
        start, target, expiry_us = 0, self._target(keys[0], blobs[0], attributes), self._expiry_us(blobs[0])
        for index in range(1, count):
            other = self._target(keys[index], blobs[index], attributes)
            other_us = self._expiry_us(blobs[index])
            if other.route_set != target.route_set or other_us != expiry_us or other.tags != target.tags:
                groups.append((start, index, target, expiry_us))
                start, target, expiry_us = index, other, other_us
        groups.append((start, count, target, expiry_us))
        return groups

    def _expiry_us(self, blob: bytes) -> int:
        if not blob:
            return 0
        seconds = self.shared.scans.of(blob).message_expiry_interval
        return 0 if seconds is None else self.broker.env.clock.wall_us() + seconds * 1_000_000

    def _target(self, key: bytes, blob: bytes, attributes: int) -> Target:
        tags = self.shared.scans.of(blob).tags if blob else NO_TAGS
        known = (key, tags) if tags else key
        target = self._targets.get(known)
        if target is None or not self.host.is_current(target):

            def headers() -> Mapping[str, object]:
                return self.broker.fields_of(self.broker.restated(key, blob, attributes))[0]

            target = self.host.target(EXCHANGE, key, [key.decode("utf-8", "surrogateescape")], headers, tags=tags)
            if target.route.reads_message or len(key) > KNOWN_TOPIC_BYTES_MAX or not is_small(tags):
                return target
            if len(self._targets) >= TOPICS_MAX:
                self._targets.clear()
            self._targets[known] = target
        return target

    def publish_numbered(
        self, producer: Producer, topic: bytes, blob: bytes, payload: bytes, *, qos: int, retain: bool
    ) -> None:
        """One message that may come up again after a crash; the log takes it once."""
        attributes = int(Vocabulary.MQTT_5) | qos << QOS_SHIFT | (RETAIN if retain else 0) | (PERSISTENT if qos else 0)
        target = self._target(self.shared.keys.key_of(topic), blob, attributes)
        full = [queue for queue in target.byte_limits if not queue.admits(1, len(payload))]
        self.broker.publish_once(
            _not_for(target, full) if full else target,
            producer,
            [blob],
            [payload],
            attributes=attributes,
            expiry_us=self._expiry_us(blob),
        )
        self.tally.published += 1


def _not_for(target: Target, full: Sequence[Queue]) -> Target:
    return target.only(tuple(queue for queue in target.queues if queue not in full))
