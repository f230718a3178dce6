"""A queue: a view with consumers. Machine; AMQP's and MQTT's doors hand it consumers and settle what it gave them.

The view's records are in lanes (one, or one for each priority). `dispatch` deals them to consumers that have room,
in runs; what a consumer holds is its own affair until it settles, rejects or gives back. Limits (length, bytes, time,
deliveries) are applied here; what falls out of the queue goes to `transfer`, which dead-letters it or drops it.
Invariant (Q1): arrived = ready + unacked + settled, each counted once.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol

from headrace.controller.table import EMPTY, Table
from headrace.core_log.ids import StreamId
from headrace.core_log.record import PRIORITY_MASK, PRIORITY_SHIFT, RecordBatch
from headrace.gateways.delivery.lane import Lane, Stretch, spans_of
from headrace.gateways.delivery.ports import Source

# One turn of dispatch hands a consumer at most so many records, so that others get theirs and buffers stay small.
CHUNK_COUNT_MAX = 512
# While so few are ready for each consumer, they are dealt out one by one, as RabbitMQ does.
FAIR_COUNT = 32
UNLIMITED = 1 << 62


class Overflow(StrEnum):
    DROP_HEAD = "drop-head"
    REJECT_PUBLISH = "reject-publish"
    REJECT_PUBLISH_DLX = "reject-publish-dlx"


class Reason(StrEnum):
    """Why a record left a queue other than by an ack; RabbitMQ's words, as they stand in x-death."""

    REJECTED = "rejected"
    EXPIRED = "expired"
    MAXLEN = "maxlen"
    DELIVERY_LIMIT = "delivery_limit"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What arguments and policy together ask of a queue."""

    message_ttl_ms: int | None = None
    expires_ms: int | None = None
    length_max: int | None = None
    length_bytes_max: int | None = None
    overflow: Overflow = Overflow.DROP_HEAD
    priority_max: int | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    delivery_limit: int | None = None
    single_active_consumer: bool = False
    committed_dispatch: bool = False
    stream: bool = False


class Consumer(Protocol):
    """Somebody who takes records."""

    tag: str
    no_ack: bool
    priority: int
    exclusive: bool

    def room(self) -> int:
        """How many records it may be handed now."""

    def deliver(self, queue: "Queue", stretch: Stretch) -> None:
        """Take these; settle, reject or give them back later (unless no_ack: they are settled already)."""

    def cancel(self) -> None:
        """The queue is gone."""


# Records leave the queue for this reason: the receiver transfers them and settles them when that is safe.
Transfer = Callable[["Queue", Stretch, Reason], None]


class Queue:
    def __init__(
        self,
        name: str,
        view_id: int,
        settings: QueueSettings,
        *,
        durable: bool,
        transfer: Transfer,
        changed: Callable[["Queue"], None],
        now_us: Callable[[], int],
        stream_id: StreamId,
        arguments: Table = EMPTY,
        auto_delete: bool = False,
        owner: object = None,
    ) -> None:
        self.name = name
        # Its own log, for the default exchange; the files are born with the first append.
        self.stream_id = stream_id
        self.arguments = arguments
        self.auto_delete = auto_delete
        # The connection that alone may use an exclusive queue.
        self.owner = owner
        # As its declarer said; an exclusive queue is never kept, durable or not.
        self.declared_durable = durable
        self.had_consumers = False
        # When somebody last declared, consumed or got from it.
        self.used_us = now_us()
        self.view_id = view_id
        self.settings = settings
        self.durable = durable
        self.deleted = False
        self.byte_count = 0
        self.consumers: list[Consumer] = []
        self.expired_count = self.dropped_count = self.delivered_count = self.acked_count = self.returned_count = 0
        self._transfer = transfer
        self._changed = changed
        self._now_us = now_us
        self._turn = 0
        self._dispatching = False
        count = 1 if settings.priority_max is None else settings.priority_max + 1
        self.lanes = [Lane(self._finder(place)) for place in range(count)]

    def _finder(self, lane: int) -> Callable[[RecordBatch, int, int], Iterable[tuple[int, int]]]:
        if self.settings.priority_max is None:
            return partial(spans_of, view_id=self.view_id)
        return partial(_spans_of_priority, view_id=self.view_id, priority=lane, top=self.settings.priority_max)

    # -- counts -------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        return sum(lane.ready_count for lane in self.lanes)

    @property
    def unacked_count(self) -> int:
        return sum(lane.unacked_count for lane in self.lanes)

    @property
    def message_count(self) -> int:
        return self.ready_count + self.unacked_count

    @property
    def is_unused(self) -> bool:
        return not self.consumers

    # -- arrivals -----------------------------------------------------------------------------------------------

    def admits(self, count: int, byte_count: int) -> bool:
        """False when reject-publish says that these must not come in."""
        settings = self.settings
        if settings.overflow is Overflow.DROP_HEAD:
            return True
        if settings.length_max is not None and self.ready_count + count > settings.length_max:
            return False
        return settings.length_bytes_max is None or self.byte_count + byte_count <= settings.length_bytes_max

    def arrive(self, source: Source, batch: RecordBatch, first: int, last: int) -> None:
        """Records were routed here. The caller dispatches when its turn is over."""
        if self.settings.priority_max is None:
            self.lanes[0].arrive(source, batch, first, last)
        else:
            top = self.settings.priority_max
            for attributes, low, high in batch.attributes.spans(first, last):
                self.lanes[min((attributes & PRIORITY_MASK) >> PRIORITY_SHIFT, top)].arrive(source, batch, low, high)
        if self.settings.length_bytes_max is not None:
            self.byte_count += sum(map(len, batch.values[first:last]))
        self._changed(self)

    def keep_limits(self) -> None:
        """Drop from the head what is beyond the length limits, after consumers had their turn."""
        settings = self.settings
        if settings.length_max is not None and (excess := self.ready_count - settings.length_max) > 0:
            self._drop(excess)
        if settings.length_bytes_max is not None:
            while self.byte_count > settings.length_bytes_max and self.ready_count:
                self._drop(1)

    def _drop(self, count: int) -> None:
        # The lowest priority goes first.
        for lane in self.lanes:
            for stretch in lane.drop_head(count):
                count -= stretch.count
                self.dropped_count += stretch.count
                self._leave(stretch)
                self._transfer(self, stretch, Reason.MAXLEN)
            if count <= 0:
                return

    def _leave(self, stretch: Stretch) -> None:
        if self.settings.length_bytes_max is not None:
            batch = stretch.loaded()
            self.byte_count -= sum(map(len, batch.values[stretch.index : stretch.index + stretch.count]))

    # -- consumers ----------------------------------------------------------------------------------------------

    def add_consumer(self, consumer: Consumer) -> None:
        place = next(
            (at for at, other in enumerate(self.consumers) if other.priority < consumer.priority), len(self.consumers)
        )
        self.consumers.insert(place, consumer)
        self.had_consumers = True

    def remove_consumer(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)

    def dispatch(self) -> None:
        """Deal out what is ready to whoever has room."""
        if self._dispatching or self.deleted:
            return
        self._dispatching = True
        try:
            self.expire_heads()
            while self.consumers and self.ready_count:
                consumer = self._next_consumer()
                if consumer is None:
                    break
                stretch = self._take(self._chunk(consumer.room()))
                if stretch is None:
                    break
                self.delivered_count += stretch.count
                if consumer.no_ack:
                    stretch.lane.settle(stretch.seq, stretch.count)
                    self._changed(self)
                consumer.deliver(self, stretch)
                if self.settings.message_ttl_ms is not None or stretch.batch is None:
                    self.expire_heads()
        finally:
            self._dispatching = False

    def _chunk(self, room: int) -> int:
        if len(self.consumers) > 1 and self.ready_count < FAIR_COUNT * len(self.consumers):
            return 1
        return min(room, CHUNK_COUNT_MAX)

    def _next_consumer(self) -> Consumer | None:
        """The next in turn among those of the highest priority that have room."""
        consumers = self.consumers
        if self.settings.single_active_consumer:
            return consumers[0] if consumers[0].room() > 0 else None
        count = len(consumers)
        if count == 1:
            return consumers[0] if consumers[0].room() > 0 else None
        best: Consumer | None = None
        for step in range(count):
            place = (self._turn + step) % count
            consumer = consumers[place]
            if (best is None or consumer.priority > best.priority) and consumer.room() > 0:
                best = consumer
                turn = place + 1
        if best is not None:
            self._turn = turn % count
        return best

    def _take(self, count_max: int) -> Stretch | None:
        early = not self.settings.committed_dispatch
        for lane in reversed(self.lanes):
            stretch = lane.take(count_max, early=early)
            if stretch is not None:
                self._leave(stretch)
                return stretch
        return None

    def get(self) -> Stretch | None:
        """One record for basic.get; unacked until it is settled or given back."""
        self.expire_heads()
        stretch = self._take(1)
        if stretch is not None:
            self.delivered_count += 1
        return stretch

    # -- settling -----------------------------------------------------------------------------------------------

    def settle(self, stretch: Stretch) -> None:
        """Acked (or transferred, or dropped): done with for good."""
        stretch.lane.settle(stretch.seq, stretch.count)
        self.acked_count += stretch.count
        self._changed(self)

    def reject(self, stretch: Stretch) -> None:
        """Rejected without requeue."""
        self._transfer(self, stretch, Reason.REJECTED)
        self._changed(self)

    def give_back(self, stretches: Iterable[Stretch], *, failed: bool = True) -> None:
        """Back to their places; past the delivery limit they leave instead. `failed` counts as a delivery attempt."""
        limit = self.settings.delivery_limit
        for stretch in stretches:
            self.returned_count += stretch.count
            if limit is not None and failed and stretch.deliveries >= limit:
                self._transfer(self, stretch, Reason.DELIVERY_LIMIT)
                continue
            stretch.lane.give_back(stretch)
            if self.settings.length_bytes_max is not None:
                batch = stretch.loaded()
                self.byte_count += sum(map(len, batch.values[stretch.index : stretch.index + stretch.count]))
        self._changed(self)

    def purge(self) -> int:
        count = sum(lane.purge() for lane in self.lanes)
        self.byte_count = 0
        self._changed(self)
        return count

    # -- time ---------------------------------------------------------------------------------------------------

    def expire_heads(self) -> None:
        """Let go of expired records at the heads; one behind a head that lives stays, as in RabbitMQ."""
        for lane in self.lanes:
            while True:
                head = lane.head()
                if head is None:
                    break
                count = self._expired_at(head)
                if not count:
                    break
                stretch = lane.take(count)
                assert stretch is not None
                self._leave(stretch)
                self.expired_count += stretch.count
                self._transfer(self, stretch, Reason.EXPIRED)

    def _expired_at(self, stretch: Stretch) -> int:
        """How many records at the front of a stretch are past their time."""
        batch = stretch.loaded()
        ttl_ms = self.settings.message_ttl_ms
        expiries = batch.expiries
        if ttl_ms is None and len(expiries.values) == 1 and not expiries.values[0]:
            return 0
        now_us = self._now_us()
        count = 0
        for index in range(stretch.index, stretch.index + stretch.count):
            due_us = self._due_us(batch, index)
            if due_us is None or due_us > now_us:
                break
            count += 1
        return count

    def _due_us(self, batch: RecordBatch, index: int) -> int | None:
        due: int | None = batch.expiries.at(index) or None
        if self.settings.message_ttl_ms is not None:
            by_queue = batch.timestamps.at(index) + self.settings.message_ttl_ms * 1000
            due = by_queue if due is None else min(due, by_queue)
        return due

    def next_expiry_us(self) -> int | None:
        """When the head that expires first does; None when no head has a time."""
        found: int | None = None
        for lane in self.lanes:
            head = lane.head()
            if head is not None:
                due = self._due_us(head.loaded(), head.index)
                if due is not None and (found is None or due < found):
                    found = due
        return found


def _spans_of_priority(
    batch: RecordBatch, first: int, last: int, *, view_id: int, priority: int, top: int
) -> Iterator[tuple[int, int]]:
    for low, high in spans_of(batch, first, last, view_id):
        for attributes, start, end in batch.attributes.spans(low, high):
            if min((attributes & PRIORITY_MASK) >> PRIORITY_SHIFT, top) == priority:
                yield start, end
