"""Retained messages of one vhost, as they come and as subscriptions are answered with them. Driver.

Each change is in memory and in `__retained` in the same turn, and committed with the message itself or the next group.
Neighbours: retained.py finds, retained_log.py writes, fan_out.py tells of messages with the flag, subscriber.py of
subscriptions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from headrace.core_log.record import RecordBatch
from headrace.filtering.expression import parse
from headrace.filtering.tags import Tags
from headrace.gateways.delivery.ports import Tap
from headrace.gateways.mqtt.interest import identifiers_of
from headrace.gateways.mqtt.origin import publisher
from headrace.gateways.mqtt.packets import RetainHandling
from headrace.gateways.mqtt.retained import Retained, RetainedMessages
from headrace.gateways.mqtt.session import Extra, Interest, Session
from headrace.gateways.mqtt.shared import Shared
from headrace.gateways.mqtt.sys_topics import SysTopics

# Of AMQP messages; what it means is the mapping's to say.
RETAIN_HEADER = b"x-retain"


class Unattended:
    """Listens where nobody has spoken MQTT since the start: what AMQP clients publish to `amq.topic` concerns nobody
    yet, but for the messages that ask to be retained."""

    wants_copies = False

    def __init__(self, begin: Callable[[], Tap]) -> None:
        """`begin`: whoever takes messages from now on."""
        self._begin = begin

    def take(self, batch: RecordBatch, first: int, last: int) -> None:
        if any(RETAIN_HEADER in properties for properties in set(batch.properties[first:last])):
            self._begin().take(batch, first, last)

    def wants(self, key: bytes, tags: Tags) -> bool:
        return False


class Retaining:
    def __init__(self, shared: Shared, vhost: str, messages: RetainedMessages) -> None:
        self.shared = shared
        self.broker = shared.broker
        self.vhost = vhost
        self.messages = messages
        # By origin: user and client id of each session.
        self.publishers: dict[int, tuple[str, str]] = {}
        # What is retained without anybody having published it.
        self.sys_topics: SysTopics | None = None

    def retain(self, batch: RecordBatch, low: int, names: Sequence[bytes], blobs: Sequence[bytes], qos: int) -> None:
        """[MQTT-3.3.1-5] The last one of each topic is kept; one without a payload takes it away [MQTT-3.3.1-6]."""
        for place, (name, blob) in enumerate(zip(names, blobs, strict=True)):
            index = low + place
            origin = publisher(batch.origins.at(index))
            user, client_id = self.publishers.get(origin, (self.broker.speaker, ""))
            message = Retained(
                name,
                blob,
                batch.values[index],
                qos,
                batch.expiries.at(index),
                batch.timestamps.at(index),
                origin,
                batch.offset_at(index),
                batch.tags_at(index),
                user,
                client_id,
            )
            if not message.payload and not self.messages.remove(name):
                continue
            stored = self.shared.retained.append(self.vhost, message)
            if message.payload:
                self.messages.put(replace(message, stored=stored))
            # In the group of the message itself, or with the next one.
            committer, log = self.broker.directory.committer, self.shared.retained.log
            committer.urgent(log) if qos else committer.lazy(log)

    def send(self, session: Session, interest: Interest, *, is_new: bool, below: int) -> None:
        """What a subscription is answered with besides SUBACK: as it was at `below`, where the subscription stands in
        the log. What came behind that goes out as a message like others, and not twice."""
        if interest.retain_handling is RetainHandling.DO_NOT_SEND:
            return
        if interest.retain_handling is RetainHandling.SEND_IF_NEW and not is_new:
            return
        link = session.link
        if link is None:
            return
        identifiers = identifiers_of(interest, link.version)
        found = self.messages.matching(interest.filter, self.broker.env.clock.wall_us())
        if self.sys_topics is not None:
            found += self.sys_topics.matching(interest.filter, self.broker.env.clock.monotonic())
        for message in found:
            if message.offset >= below or (interest.no_local and message.origin == session.origin):
                continue
            if interest.wants and not parse(interest.wants).matches(message.tags):
                continue
            if message.user and not self._may_still_publish(message):
                continue
            session.offer_extra(
                Extra(
                    message.topic,
                    message.blob + identifiers,
                    message.payload,
                    min(message.qos, interest.qos),
                    True,
                    message.expiry_us,
                    load=None if message.is_loaded else partial(self.shared.retained.payload, self.vhost, message),
                )
            )
        session.pump()

    def _may_still_publish(self, message: Retained) -> bool:
        """M6: who has lost the right to publish there speaks to nobody new."""
        return self.shared.may_publish(message.user, self.vhost, message.topic.decode(), message.client_id)
