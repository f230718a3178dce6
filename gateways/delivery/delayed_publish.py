"""Delayed messages are published when they are due: routed as the topology is then, to live from then on. Driver.

What was parked is the message as it came. When it fires, the words of its protocol say what its readers get (RabbitMQ's
plugin negates `x-delay`), where else it goes (CC, BCC) and how long it lives, counted from now. A message that nobody
wants any more is treated as one that was published now: the alternate exchange gets it, else it stays in the exchange's
log unrouted and is counted. If the exchange itself, or with the default exchange the queue, is gone, it is dropped and
counted, as by the plugin. A queue that is full and refuses publishes is left out.
Neighbours: delayed.py calls, broker.py appends.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import PROTOCOL_MASK, Headers, Protocol
from headrace.delay.fire import DueRun
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE, Fields
from headrace.gateways.delivery.vhost import Target, VirtualHost

_log = logging.getLogger(__name__)

# The header of a parked record that has the origin of an MQTT message, for subscriptions that do not want their own.
ORIGIN = b"origin"


@dataclass(frozen=True, slots=True)
class Fired:
    """What a protocol makes of a message whose time has come."""

    properties: bytes
    # Keys to route with besides the routing key.
    copies: Sequence[str] = ()
    headers: Fields = None
    fields: Fields = None
    # How long it lives from now on; None: for ever.
    expiration_us: int | None = None


# Key, properties and attributes of a parked message -> what is published.
Words = Callable[[bytes, bytes, int], Fired]


def neutral(key: bytes, properties: bytes, attributes: int) -> Fired:
    return Fired(properties)


def origin_headers(origin: int) -> Headers:
    return ((ORIGIN, origin.to_bytes(8, "big")),) if origin else ()


class DelayedPublishes:
    """The carrier of messages."""

    def __init__(self, broker: Broker, words: Mapping[Protocol, Words]) -> None:
        self._broker = broker
        # By protocol.
        self.words = {int(protocol): found for protocol, found in words.items()}

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        log = self._log(duty, key)
        return None if log is None else TargetPartition(log.stream_id, log.partition)

    def _log(self, duty: Duty, key: bytes) -> PartitionLog | None:
        host = self._broker.vhosts.get(duty.vhost)
        if host is None:
            return None
        if duty.name != DEFAULT_EXCHANGE:
            return None if host.router.exchange(duty.name) is None else host.exchange_log(duty.name)
        queue = host.queues.get(key.decode("utf-8", "surrogateescape"))
        if queue is None:
            return None
        return self._broker.own_log(queue, host.name) if queue.durable else self._broker.transient_log

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        host = self._broker.vhosts.get(duty.vhost)
        if host is None or host.router.exchange(duty.name) is None:
            self._drop(duty, run, len(run))
            done()
            return
        waiting = _Waiting(done)
        for first, last, target, expiry_us, properties in self._groups(host, duty, run):
            if target.log is None:
                self._drop(duty, run, last - first)
            else:
                self._publish(host, run, first, last, target, expiry_us, properties, waiting)
        waiting.begun()
        self._broker.on_ready()

    def _drop(self, duty: Duty, run: DueRun, count: int) -> None:
        self._broker.delayed.dropped_count += count
        _log.warning(
            "delayed messages were dropped: where they were to go is gone",
            extra={"vhost": duty.vhost, "exchange": duty.name, "key": run.keys[0], "count": count},
        )

    def _groups(
        self, host: VirtualHost, duty: Duty, run: DueRun
    ) -> Sequence[tuple[int, int, Target, int, Sequence[bytes]]]:
        """Neighbours that go the same way for the same time, each with the properties they are published with."""
        words = self.words.get(run.attributes & PROTOCOL_MASK, neutral)
        now_us = self._broker.env.clock.wall_us()
        targets: dict[bytes, Target] = {}
        ways: list[tuple[Target, int]] = []
        properties: list[bytes] = []
        starts: list[int] = []
        for index, (key, parked) in enumerate(zip(run.keys, run.properties, strict=True)):
            fired = words(key, parked, run.attributes)
            properties.append(fired.properties)
            target = targets.get(key)
            if target is None or fired.copies:
                keys = [key.decode("utf-8", "surrogateescape"), *fired.copies]
                target = host.target(duty.name, key, keys, fired.headers, fired.fields, run.tags)
                if not (target.route.reads_message or fired.copies):
                    targets[key] = target
            expiry_us = 0 if fired.expiration_us is None else now_us + fired.expiration_us
            if not ways or (expiry_us, target.log) != (ways[-1][1], ways[-1][0].log) or not _alike(target, ways[-1][0]):
                starts.append(index)
                ways.append((target, expiry_us))
        ends = pairwise([*starts, len(run)])
        return [(low, high, *way, properties[low:high]) for (low, high), way in zip(ends, ways, strict=True)]

    def _publish(
        self,
        host: VirtualHost,
        run: DueRun,
        first: int,
        last: int,
        target: Target,
        expiry_us: int,
        properties: Sequence[bytes],
        waiting: "_Waiting",
    ) -> None:
        if target.byte_limits:
            for index in range(first, last):
                full = [queue for queue in target.byte_limits if not queue.admits(1, len(run.values[index]))]
                left = target
                if full:
                    left = target.only(tuple(queue for queue in target.queues if queue not in full))
                is_new = self._append(run, index, index + 1, left, expiry_us, properties[index - first :][:1], waiting)
                for queue in full if is_new else ():
                    restated = properties[index - first]
                    if run.attributes & PROTOCOL_MASK in (Protocol.MQTT_3, Protocol.MQTT_5):
                        restated = self._broker.restated(run.keys[index], restated, run.attributes)
                    self._broker.refuse(host, queue, target, restated, run.values[index])
        else:
            self._append(run, first, last, target, expiry_us, properties, waiting)

    def _append(
        self,
        run: DueRun,
        first: int,
        last: int,
        target: Target,
        expiry_us: int,
        properties: Sequence[bytes],
        waiting: "_Waiting",
    ) -> bool:
        """False: it was there already, from a life that ended before anybody knew."""
        log = target.log
        assert log is not None
        origins = {_origin(run.headers[index]) for index in range(first, last)} if run.headers is not None else {0}
        if len(origins) > 1:
            parts = [
                self._append(run, index, index + 1, target, expiry_us, properties[index - first :][:1], waiting)
                for index in range(first, last)
            ]
            return any(parts)
        (origin,) = origins
        before = log.end
        if run.producer is None or run.where != TargetPartition(log.stream_id, log.partition):
            # The log that the numbers are for is gone, and another has taken its place.
            reached = self._broker.publish(
                target,
                properties,
                run.values[first:last],
                attributes=run.attributes,
                expiry_us=expiry_us,
                keys=run.keys[first:last],
                origin=origin,
            )
        else:
            producer = run.producer._replace(first_sequence=run.producer.first_sequence + first)
            reached = self._broker.publish_dense(
                target,
                producer,
                run.keys[first:last],
                properties,
                run.values[first:last],
                # Runs come in the order of their numbers: what is missing before this one was dropped.
                settled=max(run.settled, producer.first_sequence),
                attributes=run.attributes,
                expiry_us=expiry_us,
                origin=origin,
            )
        if reached is not None:
            log.when_committed(reached, waiting.expect())
        return log.end > before


def _alike(one: Target, other: Target) -> bool:
    return one is other or (one.route_set, one.through) == (other.route_set, other.through)


def _origin(headers: Headers) -> int:
    return next((int.from_bytes(value, "big") for name, value in headers if name == ORIGIN), 0)


class _Waiting:
    """Calls `done` when everything it was told to expect has come."""

    __slots__ = ("_count", "_done")

    def __init__(self, done: Callable[[], None]) -> None:
        self._done = done
        # One for `begun`.
        self._count = 1

    def expect(self) -> Callable[[], None]:
        self._count += 1
        return self._came

    def begun(self) -> None:
        """No more will be expected."""
        self._came()

    def _came(self) -> None:
        self._count -= 1
        if not self._count:
            self._done()
