"""Delayed publishes of one connection: gathered while they go the same way, parked in one append. Machine.

They are answered as others are: a mandatory one that has no queue now is returned and not parked; a confirm of a
persistent one comes when the parked message is safe. What asks for a time that makes no sense or is too far away is
refused by 406, with confirms too, as a bad `expiration` is: a nack would not say why, and be sent again for ever.
Neighbours: publishing.py calls, delaying.py reads the headers, delivery/delayed.py parks.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.core_log.record import Producer
from headrace.delay.parked import DelayRefused
from headrace.gateways.amqp.delaying import Asked, asked_of, first_delay
from headrace.gateways.amqp.errors import ReplyCode, amqp_error
from headrace.gateways.amqp.fields import FieldTable
from headrace.gateways.amqp.methods import Publish
from headrace.gateways.amqp.shapes import Integers
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.vhost import Target

_PUBLISH = (60, 40)


@dataclass(slots=True)
class Parcel:
    """Publishes to one exchange and key, with equal attributes and tags, that are due later."""

    publish: Publish
    target: Target
    attributes: int
    # Of an idempotent producer: the number of the first.
    producer: Producer | None = None
    props: list[bytes] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    due_us: "array[int]" = field(default_factory=lambda: array("q"))
    # None: nobody gave one.
    ids: list[bytes | None] | None = None

    def goes_on_with(self, publish: Publish, target: Target, attributes: int, producer: Producer | None) -> bool:
        if publish is not self.publish or attributes != self.attributes or target.tags != self.target.tags:
            return False
        if target.route is not self.target.route:
            return False
        if self.producer is None or producer is None:
            return self.producer is producer
        return producer == self.producer._replace(first_sequence=self.producer.first_sequence + len(self.bodies))

    def add(
        self,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        due_us: Sequence[int],
        ids: Sequence[bytes | None] | None = None,
    ) -> None:
        if self.ids is None and ids is not None and any(ids):
            self.ids = [None] * len(self.bodies)
        if self.ids is not None:
            self.ids += ids if ids is not None else [None] * len(bodies)
        self.props += props
        self.bodies += bodies
        self.due_us.extend(due_us)


class Parking:
    def __init__(self, broker: Broker, vhost: str) -> None:
        self._delayed = broker.delayed
        self._now_us = broker.env.clock.wall_us
        self._vhost = vhost

    @property
    def _limit_ms(self) -> int:
        return self._delayed.config.delay_s_max * 1000

    def asked(self, headers: FieldTable) -> Asked | None:
        """When a publish with these headers is due; None: now. Raises 406."""
        try:
            now_us = self._now_us()
            asked = asked_of(headers, now_us)
            if asked is not None:
                self._delayed.check(asked.due_us, now_us)
            return asked
        except DelayRefused as error:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *_PUBLISH) from error

    def dues_of(self, delays_ms: Integers) -> tuple[Integers, npt.NDArray[np.bool_]]:
        """When publishes with these delays are due; and which of them are, later than now and not too far away."""
        later = (delays_ms > 0) & (delays_ms <= self._limit_ms)
        return self._now_us() + np.where(later, delays_ms, 0) * 1000, later

    def quick_due(self, props: bytes) -> int | None:
        """When one publish is due, if a quick look tells; None: it has to be decoded."""
        found = first_delay(props)
        if found is None or not 0 < found[1] <= self._limit_ms:
            return None
        return self._now_us() + found[1] * 1000

    def park(self, parcel: Parcel) -> int:
        """Returns what `when_parked` waits for. SequenceRefused: a number may not be confirmed, and none was taken."""
        publish = parcel.publish
        return self._delayed.park(
            Duty(DutyKind.PUBLISH, self._vhost, publish.exchange),
            [publish.routing_key_bytes] * len(parcel.bodies),
            parcel.props,
            parcel.bodies,
            due_us=parcel.due_us,
            ids=parcel.ids,
            attributes=parcel.attributes,
            tags=parcel.target.tags,
            producer=parcel.producer,
        )

    def when_parked(self, reached: int, done: Callable[[], None]) -> None:
        self._delayed.when_parked(reached, done)
