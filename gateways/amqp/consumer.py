"""An AMQP consumer: a queue hands it stretches, it makes basic.deliver of them. Machine over an outbox."""

import struct
from collections.abc import Sequence

from pamqp import commands

from headrace.core_log.record import RecordBatch
from headrace.gateways.amqp import properties
from headrace.gateways.amqp.channel import Channel, HeldBy
from headrace.gateways.amqp.frames import encode_deliver_run, encode_method
from headrace.gateways.amqp.methods import make
from headrace.gateways.delivery.broker import Broker, is_all_amqp
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.queue import UNLIMITED, Queue, View

# A field value: a signed 64-bit integer.
_NUMBER = struct.Struct(">cq")
ROUTING_KEY_BYTES_MAX = 255


class AmqpConsumer(HeldBy):
    def __init__(
        self,
        broker: Broker,
        channel: Channel,
        outbox: Outbox,
        queue: Queue,
        tag: str,
        *,
        no_ack: bool,
        exclusive: bool,
        priority: int,
        prefetch: int,
        frame_max: int,
        notify_cancel: bool,
    ) -> None:
        super().__init__()
        self.tag = tag
        self.queue = queue
        self.no_ack = no_ack
        self.exclusive = exclusive
        self.priority = priority
        self.channel = channel
        self._broker = broker
        self._outbox = outbox
        self._prefetch = prefetch
        self._frame_max = frame_max
        self._tag_bytes = tag.encode("utf-8", "surrogateescape")
        self._notify_cancel = notify_cancel

    def room(self) -> int:
        channel = self.channel
        if self._outbox.is_full or not channel.flowing or not channel.open:
            return 0
        if self.no_ack:
            return UNLIMITED
        room = channel.room()
        return min(room, self._prefetch - self.outstanding) if self._prefetch else room

    def deliver(self, queue: View, stretch: Stretch) -> None:
        batch = stretch.loaded()
        first, count = stretch.index, stretch.count
        last = first + count
        channel = self.channel
        tag = channel.skip(count) if self.no_ack else channel.hold(queue, stretch, self)
        again = stretch.deliveries > 0 or stretch.seq < stretch.lane.delivered_below
        self._outbox.put(
            encode_deliver_run(
                channel.number,
                self._tag_bytes,
                tag,
                [again] * count,
                self._broker.exchanges_of(stretch),
                short_keys(batch, first, last),
                self._properties(queue, stretch),
                batch.values[first:last],
                self._frame_max,
            )
        )
        stretch.batch = None

    def _properties(self, view: View, stretch: Stretch) -> list[bytes]:
        return properties_of(self._broker, view, stretch)

    def cancel(self) -> None:
        """The queue is gone: tell the client, if it said that it understands."""
        self.channel.consumers.pop(self.tag, None)
        if self._notify_cancel:
            self._outbox.put(
                encode_method(self.channel.number, make(commands.Basic.Cancel, consumer_tag=self.tag, nowait=True))
            )


def short_keys(batch: RecordBatch, first: int, last: int) -> Sequence[bytes]:
    """Topics of MQTT may be longer than a routing key can be; the header x-mqtt-topic has all of such a one."""
    keys = batch.keys[first:last]
    if is_all_amqp(batch) or len(max(keys, key=len)) <= ROUTING_KEY_BYTES_MAX:
        return keys
    return [key[:ROUTING_KEY_BYTES_MAX].decode("utf-8", "ignore").encode() for key in keys]


def properties_of(broker: Broker, view: View, stretch: Stretch) -> list[bytes]:
    """The properties of a delivery: as they came, or with the count of failed deliveries where the queue tells it."""
    found = broker.properties_of(stretch.loaded(), stretch.index, stretch.index + stretch.count)
    if stretch.failures and view.settings.tells_failures:
        return [properties.with_headers(props, {"x-delivery-count": stretch.failures}) for props in found]
    return found


class ReadingConsumer(AmqpConsumer):
    """One that reads a stream, or beside a queue: each delivery says which number it has."""

    def _properties(self, view: View, stretch: Stretch) -> list[bytes]:
        last: bytes | None = None
        before = behind = b""
        numbered: list[bytes] = []
        for number, props in enumerate(super()._properties(view, stretch), stretch.seq):
            if props is not last:
                before, behind = properties.around_header(props, "x-stream-offset", _NUMBER.size)
                last = props
            numbered.append(before + _NUMBER.pack(b"l", number) + behind)
        return numbered
