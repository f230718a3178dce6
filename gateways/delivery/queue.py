"""A queue: a view with consumers. Machine; AMQP's and MQTT's doors hand it consumers and settle what it gave them.

The view's records are in lanes: one, one for each priority, or one for each part of the keys (groups.py). `dispatch`
deals them to consumers that have room, in runs; what a consumer holds is its own affair until it settles, rejects or
gives back. Limits (length, bytes, time, deliveries) are applied here; what falls out of the queue goes to `transfer`,
which dead-letters it or drops it. Those who only read are beside all that (reading.py).
Invariant (Q1): arrived = ready + unacked + settled, each counted once.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Protocol, TypeAlias

from xxhash import xxh3_64_intdigest

from headrace.controller.table import EMPTY, Table
from headrace.core_log.errors import DiskFull
from headrace.core_log.ids import StreamId
from headrace.core_log.record import PRIORITY_MASK, PRIORITY_SHIFT, RecordBatch
from headrace.filtering.expression import Expression
from headrace.gateways.delivery.attachment import Attachment
from headrace.gateways.delivery.filters import Filters, Unmatched
from headrace.gateways.delivery.groups import LaneGroup
from headrace.gateways.delivery.history import History
from headrace.gateways.delivery.lane import Lane, Stretch, spans_of
from headrace.gateways.delivery.logsettings import NOTHING_ASKED, LogSettings
from headrace.gateways.delivery.ports import Source
from headrace.gateways.delivery.reading import ReadingView
from headrace.gateways.delivery.retry import RetryPolicy

# One turn of dispatch hands a consumer at most so many records, so that others get theirs and buffers stay small.
CHUNK_COUNT_MAX = 512
# Several consumers are dealt a small part of their share at a time, one by one when so few are ready for each, so that
# what they get is as even as in RabbitMQ.
FAIR_COUNT = 32
# The same for the owner of a lane, who may have others.
LANE_CHUNK_COUNT = 64
UNLIMITED = 1 << 62
# So many are let go of in one turn when very many expire together (some 20 us each when they are dead-lettered); the
# queue's timer goes on with the rest.
EXPIRED_PER_TURN = 1024
# The same for what no filter wants.
UNMATCHED_PER_TURN = 1024


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
    # No death: somebody sends it back to where it died (redrive.py).
    REDRIVEN = "redriven"
    # Not RabbitMQ's: no consumer's filter wants it (x-filter-unmatched).
    UNMATCHED = "unmatched"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What arguments and policy together ask of a queue."""

    message_ttl_ms: int | None = None
    expires_ms: int | None = None
    length_max: int | None = None
    length_bytes_max: int | None = None
    overflow: Overflow = Overflow.DROP_HEAD
    priority_max: int | None = None
    # Lanes for keys, each for one consumer at a time.
    partition_count: int | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    # A dead letter for which there is no way stays until there is one.
    at_least_once: bool = False
    # What fails is tried again before it is dead.
    retry: RetryPolicy | None = None
    delivery_limit: int | None = None
    # How long a consumer may keep a delivery without settling it; None: as long as the door allows.
    consumer_timeout_ms: int | None = None
    single_active_consumer: bool = False
    committed_dispatch: bool = False
    # Its consumers are told how often a delivery failed before, as RabbitMQ's quorum queues do.
    tells_failures: bool = False
    # Read by reading views only, and kept for so long rather than until it is settled.
    stream: bool = False
    max_age_ms: int | None = None
    # What becomes of records that no consumer's filter wants.
    filter_unmatched: Unmatched = Unmatched.STAY
    # How its own log is kept.
    log: LogSettings = NOTHING_ASKED


class Consumer(Protocol):
    """Somebody who takes records."""

    tag: str
    no_ack: bool
    priority: int
    exclusive: bool

    def room(self) -> int:
        """How many records it may be handed now."""

    def deliver(self, queue: "View", stretch: Stretch) -> None:
        """Take these; settle, reject or give them back later (unless no_ack: they are settled already)."""

    def cancel(self) -> None:
        """The queue is gone."""


# What a consumer is served by, and what it settles with.
View: TypeAlias = "Queue | ReadingView"

# Records leave the queue for this reason: the receiver transfers them and settles them when that is safe. If it raises
# DiskFull, the stretch holds what was not transferred.
Transfer = Callable[["Queue", Stretch, Reason], None]
# The key by which a record of a batch is put into a lane.
KeyAt = Callable[[RecordBatch, int], bytes]


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
        key_at: KeyAt = lambda batch, index: batch.keys[index],
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
        # When somebody last declared, consumed or got from it (monotonic), for x-expires.
        self.used_s = 0.0
        # Some of its records may have a time of their own, besides the queue's.
        self.timed = False
        self.view_id = view_id
        self.settings = settings
        self.durable = durable
        self.deleted = False
        self.byte_count = 0
        # Bindings to the past, and how far they went (past.py).
        self.attached: list[Attachment] = []
        self.consumers: list[Consumer] = []
        self._filters: Filters[Consumer] = Filters()
        # There is more to look at, by a filter, than one turn has time for.
        self.is_unfinished = False
        # Those who only read, each with a place of its own.
        self.readers: dict[Consumer, ReadingView] = {}
        self.history = History(
            journalled=durable,
            is_stream=settings.stream,
            bytes_max=settings.length_bytes_max if settings.stream else None,
        )
        self.unmatched_count = 0
        self.expired_count = self.dropped_count = self.delivered_count = self.acked_count = self.returned_count = 0
        self._transfer = transfer
        self._changed = changed
        self._now_us = now_us
        self._turn = 0
        self._dispatching = False
        self._lost_count = 0
        # Who takes from which lane, where lanes are for keys and not for priorities.
        self.group: LaneGroup[Consumer] | None = None
        self._key_at = key_at
        if settings.stream:
            # Nothing is ever taken out of a stream.
            count = 0
        elif settings.partition_count is not None:
            count = settings.partition_count
            self.group = LaneGroup(count)
        elif settings.priority_max is not None:
            count = settings.priority_max + 1
        else:
            count = 1
        self.lanes = [Lane(self._finder(place), place=place, lane_count=count) for place in range(count)]

    def _finder(self, lane: int) -> Callable[[RecordBatch, int, int], Iterable[tuple[int, int]]]:
        if self.group is None and self.settings.priority_max is None:
            return partial(spans_of, view_id=self.view_id)
        return partial(self._spans_of_lane, lane=lane)

    def _spans_of_lane(self, batch: RecordBatch, first: int, last: int, *, lane: int) -> Iterator[tuple[int, int]]:
        for low, high in spans_of(batch, first, last, self.view_id):
            for place, start, end in self._by_lane(batch, low, high):
                if place == lane:
                    yield start, end

    def _by_lane(self, batch: RecordBatch, first: int, last: int) -> Iterator[tuple[int, int, int]]:
        """(lane, from, to) pieces that cover records first..last-1."""
        if self.group is not None:
            start, place = first, self.lane_at(batch, first)
            for index in range(first + 1, last):
                other = self.lane_at(batch, index)
                if other != place:
                    yield place, start, index
                    start, place = index, other
            yield place, start, last
            return
        top = self.settings.priority_max
        assert top is not None
        for attributes, low, high in batch.attributes.spans(first, last):
            yield min((attributes & PRIORITY_MASK) >> PRIORITY_SHIFT, top), low, high

    # -- counts -------------------------------------------------------------------------------------------------

    @property
    def ready_count(self) -> int:
        if self.settings.stream:
            return self.history.count
        return sum(lane.ready_count for lane in self.lanes)

    @property
    def unacked_count(self) -> int:
        return sum(lane.unacked_count for lane in self.lanes)

    @property
    def message_count(self) -> int:
        return self.ready_count + self.unacked_count

    @property
    def consumer_count(self) -> int:
        return len(self.consumers) + len(self.readers)

    @property
    def is_unused(self) -> bool:
        return not self.consumers and not self.readers

    # -- arrivals -----------------------------------------------------------------------------------------------

    def admits(self, count: int, byte_count: int) -> bool:
        """False when reject-publish says that these must not come in."""
        settings = self.settings
        if settings.overflow is Overflow.DROP_HEAD:
            return True
        if settings.length_max is not None and self.ready_count + count > settings.length_max:
            return False
        if settings.length_bytes_max is None:
            return True
        self._count_lost()
        return self.byte_count + byte_count <= settings.length_bytes_max

    def arrive(self, source: Source, batch: RecordBatch, first: int, last: int) -> None:
        """Records were routed here. The caller dispatches when its turn is over."""
        self.history.arrive(source, batch, first, last)
        if self.settings.stream:
            self._changed(self)
            return
        if len(self.lanes) == 1:
            self.lanes[0].arrive(source, batch, first, last)
        else:
            for place, low, high in self._by_lane(batch, first, last):
                self.lanes[place].arrive(source, batch, low, high)
        if self.settings.length_bytes_max is not None:
            self.byte_count += sum(map(len, batch.values[first:last]))
        self._changed(self)

    def attach(self, lane: int, source: Source, first: int, end: int, newest_us: int, byte_count: int) -> None:
        """Copies for this queue lie in first..end-1 of its log: they have arrived. See `lane_at`."""
        self.history.arrive_copied(source, first, end, newest_us, byte_count)
        if not self.settings.stream:
            self.lanes[lane].extend(source, end - first, first, end, exact=True)
            if self.settings.length_bytes_max is not None:
                self.byte_count += byte_count
        self._changed(self)

    def lane_at(self, batch: RecordBatch, index: int) -> int:
        """The lane that a record belongs to."""
        if self.group is not None:
            return xxh3_64_intdigest(self._key_at(batch, index)) % len(self.lanes)
        if self.settings.stream or self.settings.priority_max is None:
            return 0
        return min((batch.attributes.at(index) & PRIORITY_MASK) >> PRIORITY_SHIFT, self.settings.priority_max)

    def due_us(self, batch: RecordBatch, index: int) -> int | None:
        """When a record's time is over in this queue; None: never."""
        return next(self._dues(batch, index, index + 1))[0]

    def keep_limits(self) -> None:
        """Drop from the head what is beyond the length limits, after consumers had their turn. Where a full queue
        refuses publishes, nothing that is in it is dropped: what comes back to it may take it over its limits."""
        settings = self.settings
        if not self.consumers:
            self._note_offered()
        if settings.overflow is not Overflow.DROP_HEAD:
            return
        if settings.length_max is not None and (excess := self.ready_count - settings.length_max) > 0:
            self._drop(excess)
        if settings.length_bytes_max is not None:
            self._count_lost()
            while self.byte_count > settings.length_bytes_max and self.ready_count:
                self._drop(1)

    def _drop(self, count: int) -> None:
        # From the head, where the highest priority stands; so does RabbitMQ.
        while count > 0 and self.group is not None and (oldest := self._oldest_lane()) is not None:
            # Of lanes that are equals, one record at a time from whichever has the oldest.
            for stretch in oldest.drop_head(1):
                count -= 1
                self.dropped_count += 1
                self._leave(stretch)
                self._let_go(stretch, Reason.MAXLEN)
        for lane in reversed(self.lanes):
            for stretch in lane.drop_head(count):
                count -= stretch.count
                self.dropped_count += stretch.count
                self._leave(stretch)
                self._let_go(stretch, Reason.MAXLEN)
            if count <= 0:
                return

    def _let_go(self, stretch: Stretch, reason: Reason) -> None:
        parts = deque(stretch.lane.in_batches(stretch))
        try:
            while parts:
                self._transfer(self, parts[0], reason)
                parts.popleft()
        except DiskFull:
            # What found no room elsewhere stays here.
            for part in parts:
                if part.count:
                    if self.settings.length_bytes_max is not None:
                        self.byte_count += _byte_count(part)
                    if reason in (Reason.REJECTED, Reason.DELIVERY_LIMIT):
                        # Somebody has seen it, and is told so when it comes again.
                        part.lane.give_back(part, failed=False)
                    else:
                        part.lane.put_back(part)
            raise

    def _leave(self, stretch: Stretch) -> None:
        if self.settings.length_bytes_max is not None:
            self.byte_count -= _byte_count(stretch)

    def _count_lost(self) -> None:
        """What a lane could not read any more left without saying how long it was."""
        lost_count = sum(lane.lost_count for lane in self.lanes)
        if lost_count != self._lost_count:
            self._lost_count = lost_count
            self.count_bytes()

    def apply(self, settings: QueueSettings) -> None:
        """Take on other settings (a policy). Limits hold with the next `keep_limits`."""
        before, self.settings = self.settings, settings
        if settings.stream:
            self.history.keep_within(settings.length_bytes_max)
        if settings.length_bytes_max is not None and before.length_bytes_max is None:
            self.count_bytes()

    def count_bytes(self) -> None:
        """Count what is ready anew, where a limit needs it: bytes are not kept in the journal."""
        if self.settings.length_bytes_max is not None:
            self.byte_count = sum(
                sum(map(len, batch.values[first:last]))
                for lane in self.lanes
                for batch, first, last in lane.ready_runs()
            )

    # -- consumers ----------------------------------------------------------------------------------------------

    def add_consumer(self, consumer: Consumer, wants: Expression | None = None) -> None:
        """`wants`: it is given only what this filter lets through. Raises TooManyFilters."""
        if wants is not None:
            self._filters.add(consumer, wants)
        self._filters.forget_away(consumer)
        # A single active consumer stays active, whoever else comes.
        first = 1 if self.settings.single_active_consumer and self.consumers else 0
        place = next(
            (at for at, other in enumerate(self.consumers) if at >= first and other.priority < consumer.priority),
            len(self.consumers),
        )
        self.consumers.insert(place, consumer)
        if place < self._turn:
            self._turn += 1
        self.had_consumers = True
        if self.group is not None:
            self.group.share_out(self.consumers)

    def note_away(self, consumer: Consumer, wants: Expression | None) -> None:
        """It is no consumer now, and will be: what it wants does not leave as unmatched."""
        self._filters.note_away(consumer, wants)

    def forget_away(self, consumer: Consumer) -> None:
        self._filters.forget_away(consumer)

    def add_reader(self, consumer: Consumer, start: int, wants: Expression | None = None) -> ReadingView:
        """Somebody who reads from this number on, and takes nothing away."""
        view = self.readers[consumer] = ReadingView(self, consumer, start, wants)
        self.had_consumers = True
        return view

    def serves(self, consumer: Consumer) -> bool:
        return consumer in self.readers or consumer in self.consumers

    @property
    def wants_to_be_alone(self) -> bool:
        """Whoever takes from it relies on nobody else being given anything."""
        return self.settings.single_active_consumer or (bool(self.consumers) and self.consumers[0].exclusive)

    def remove_consumer(self, consumer: Consumer) -> None:
        if self.readers.pop(consumer, None) is not None:
            return
        place = self.consumers.index(consumer)
        del self.consumers[place]
        self._filters.remove(consumer)
        # Whoever is left says for itself whether there is more to look at.
        self.is_unfinished = False
        if place < self._turn:
            self._turn -= 1
        if self.group is not None:
            self.group.share_out(self.consumers)

    def dispatch(self) -> None:
        """Deal out what is ready to whoever has room."""
        if self._dispatching or self.deleted:
            return
        self._dispatching = True
        filtered = bool(self._filters)
        if filtered:
            self.is_unfinished = False
            self._filters.begin_turn()
        for lane in self.lanes:
            lane.hidden_in = None
        try:
            patience = self.expired_count + EXPIRED_PER_TURN
            if self.group is None and filtered:
                self._deal_filtered(patience)
            elif self.group is None:
                self._deal(patience)
            else:
                while self._deal_lanes(self.group, patience):
                    pass
            if filtered:
                self.is_unfinished = self._filters.is_tired
                if self.settings.filter_unmatched is not Unmatched.STAY:
                    self._leave_unmatched()
            if self.expired_count < patience:
                self._note_offered()
                self.expire_heads()
        finally:
            self._dispatching = False

    def _deal(self, expired_max: int) -> None:
        while self.consumers and self.ready_count:
            turn = self._turn
            consumer = self._next_consumer()
            if consumer is None:
                break
            stretch = self._take(self._chunk(consumer.room()), offering=True, expired_max=expired_max)
            if stretch is None:
                # Nothing may be seen yet: it is still this one's turn.
                self._turn = turn
                break
            self._hand_to(consumer, stretch)

    def _deal_filtered(self, expired_max: int) -> None:
        """The same where some want only part of it: those who find nothing more leave the round."""
        dry: set[Expression | None] = set()
        while self.ready_count:
            turn = self._turn
            consumer = self._next_consumer(dry)
            if consumer is None:
                break
            wants = self._filters.of(consumer)
            count = self._chunk(consumer.room())
            stretch = self._take(count, offering=True, expired_max=expired_max, wants=wants)
            if stretch is None:
                self._turn = turn
                dry.add(wants)
            else:
                self._hand_to(consumer, stretch)

    def _leave_unmatched(self) -> None:
        """Let go of what every filter has seen and none wants; the rest waits until all have seen it."""
        patience = UNMATCHED_PER_TURN
        for lane in self.lanes:
            unmatched = self._filters.unmatched(lane, self._takers())
            while patience > 0 and lane.ready_count and (head := lane.head()) is not None:
                count = unmatched(head)
                if not count:
                    break
                stretch = lane.take(min(count, patience))
                assert stretch is not None
                patience -= stretch.count
                self._leave(stretch)
                self.unmatched_count += stretch.count
                if self.settings.filter_unmatched is Unmatched.DEAD_LETTER:
                    self._let_go(stretch, Reason.UNMATCHED)
                else:
                    lane.settle(stretch.seq, stretch.count)
                self._changed(self)
        self.is_unfinished = self.is_unfinished or patience <= 0

    def _takers(self) -> list[Consumer]:
        """Who may be given records, now or when a lane moves to them."""
        return self.consumers[:1] if self.settings.single_active_consumer else self.consumers

    def _deal_lanes(self, group: LaneGroup[Consumer], expired_max: int) -> bool:
        """Each lane once, a few records to its owner; False when nobody got anything."""
        dealt = False
        for place in list(group.turn()):
            lane, consumer = self.lanes[place], group.owners[place]
            if consumer is None or not lane.ready_count or not group.may_take(place, consumer):
                continue
            room = consumer.room()
            if room <= 0:
                continue
            stretch = self._take_from(
                lane,
                min(room, LANE_CHUNK_COUNT),
                offering=True,
                expired_max=expired_max,
                wants=self._filters.of(consumer),
            )
            if stretch is not None:
                if not consumer.no_ack:
                    group.note_taken(place, consumer, stretch.count)
                self._hand_to(consumer, stretch)
                dealt = True
        return dealt

    def _hand_to(self, consumer: Consumer, stretch: Stretch) -> None:
        self.delivered_count += stretch.count
        if consumer.no_ack:
            stretch.lane.settle(stretch.seq, stretch.count)
            self.acked_count += stretch.count
            self._changed(self)
        consumer.deliver(self, stretch)

    def _oldest_lane(self) -> Lane | None:
        """Of the lanes that have something ready, the one whose head is the oldest."""
        heads = [(lane, head) for lane in self.lanes if (head := lane.head(early=True)) is not None]
        found = min(heads, key=lambda one: one[1].loaded().timestamps.at(one[1].index), default=None)
        return None if found is None else found[0]

    def _note_offered(self) -> None:
        """Consumers had their chance of everything, except of what they may not see before a commit."""
        for lane in self.lanes:
            if self._filters and not self._filters.is_done(lane):
                continue
            if lane.hidden_in is None or not self.consumers:
                lane.offered_below = lane.next_seq

    def _chunk(self, room: int) -> int:
        count = min(room, CHUNK_COUNT_MAX)
        if len(self.consumers) > 1:
            count = min(count, max(1, self.ready_count // (FAIR_COUNT * len(self.consumers))))
        return count

    def _next_consumer(self, dry: Container[Expression | None] = ()) -> Consumer | None:
        """The next in turn among those of the highest priority that have room, and whose filter is none of these."""
        consumers = self.consumers
        count = len(consumers)
        if count == 1 or self.settings.single_active_consumer:
            first = consumers[0]
            return first if first.room() > 0 and (not dry or self._filters.of(first) not in dry) else None
        best: Consumer | None = None
        for step in range(count):
            place = (self._turn + step) % count
            consumer = consumers[place]
            if dry and self._filters.of(consumer) in dry:
                continue
            if (best is None or consumer.priority > best.priority) and consumer.room() > 0:
                best = consumer
                turn = place + 1
        if best is not None:
            self._turn = turn % count
        return best

    def _take(
        self,
        count_max: int,
        *,
        offering: bool = False,
        expired_max: int = UNLIMITED,
        wants: Expression | None = None,
    ) -> Stretch | None:
        """The next that live. `offering`: what no consumer was offered yet may have its chance although its time is
        over, since a time to live of 0 means now or never."""
        for lane in reversed(self.lanes):
            stretch = self._take_from(lane, count_max, offering=offering, expired_max=expired_max, wants=wants)
            if stretch is not None:
                return stretch
        return None

    def _take_from(
        self, lane: Lane, count_max: int, *, offering: bool, expired_max: int, wants: Expression | None = None
    ) -> Stretch | None:
        early = not self.settings.committed_dispatch
        while self.expired_count < expired_max:
            if wants is None:
                taken = lane.take(count_max, early=early)
            else:
                taken = self._filters.take(lane, wants, count_max, early=early)
            if taken is None:
                break
            if not self._has_times(taken):
                self._leave(taken)
                return taken
            living = self._living(taken, offering)
            if living is not None:
                self._leave(living)
                return living
        return None

    def _living(self, taken: Stretch, offering: bool) -> Stretch | None:
        """The living ones at the front of what was taken, without the expired before them; the rest goes back."""
        lane = taken.lane
        expired = self._expired_in(taken, offering)
        if expired:
            gone = taken.split(expired)
            self._expire(gone)
        if not taken.count:
            return None
        living = self._living_in(taken, offering)
        if living == taken.count:
            return taken
        front = taken.split(living)
        lane.put_back(taken)
        return front

    def get(self) -> Stretch | None:
        """One record for basic.get; unacked until it is settled or given back."""
        stretch = self._take(1) if self.group is None else self._take_free(self.group)
        if stretch is not None:
            self.delivered_count += 1
        return stretch

    def _take_free(self, group: LaneGroup[Consumer]) -> Stretch | None:
        """One record of a lane of which nobody holds anything."""
        for place in list(group.turn()):
            if self.lanes[place].ready_count and group.may_take(place, None):
                stretch = self._take_from(self.lanes[place], 1, offering=False, expired_max=UNLIMITED)
                if stretch is not None:
                    group.note_taken(place, None, 1)
                    return stretch
        return None

    # -- settling -----------------------------------------------------------------------------------------------

    def settle(self, stretch: Stretch) -> None:
        """Acked (or transferred, or dropped): done with for good."""
        stretch.lane.settle(stretch.seq, stretch.count)
        self.acked_count += stretch.count
        self._note_done(stretch)
        self._changed(self)

    def _note_done(self, stretch: Stretch) -> None:
        """Somebody to whom it was handed is done with it."""
        if self.group is not None:
            self.group.note_done(stretch.lane.place, stretch.count)

    def reject(self, stretch: Stretch) -> None:
        """Rejected without requeue."""
        self._note_done(stretch)
        self._let_go(stretch, Reason.REJECTED)
        self._changed(self)

    def give_back(self, stretches: Iterable[Stretch], *, failed: bool = True) -> None:
        """Back to their places; past the delivery limit they leave instead. `failed` counts as a delivery attempt."""
        limit = self.settings.delivery_limit
        remember = self.durable and (limit is not None or self.settings.tells_failures)
        for stretch in stretches:
            self.returned_count += stretch.count
            self._note_done(stretch)
            if limit is not None and failed and stretch.failures >= limit:
                self._let_go(stretch, Reason.DELIVERY_LIMIT)
                continue
            for part in (stretch,) if self.settings.length_bytes_max is None else stretch.lane.in_batches(stretch):
                if self.settings.length_bytes_max is not None:
                    self.byte_count += _byte_count(part)
                part.lane.give_back(part, failed=failed, remember=remember)
        self._changed(self)

    def purge(self) -> int:
        count = sum(lane.purge() for lane in self.lanes)
        self.byte_count = 0
        self._changed(self)
        return count

    # -- time ---------------------------------------------------------------------------------------------------

    def expire_heads(self) -> None:
        """Let go of expired records at the heads; one behind a head that lives stays, as in RabbitMQ. When there are
        very many, of the first ones: `next_expiry_us` then says that more are due."""
        patience = EXPIRED_PER_TURN
        for lane in self.lanes:
            while patience > 0 and lane.ready_count and (head := lane.head()) is not None:
                count = self._expired_in(head) if self._has_times(head) else 0
                if not count:
                    break
                stretch = lane.take(min(count, patience))
                assert stretch is not None
                patience -= stretch.count
                self._expire(stretch)

    def _expire(self, stretch: Stretch) -> None:
        self._leave(stretch)
        self.expired_count += stretch.count
        self._let_go(stretch, Reason.EXPIRED)

    def _has_times(self, stretch: Stretch) -> bool:
        """Some record of its batch may expire."""
        if self.settings.message_ttl_ms is not None:
            return True
        expiries = stretch.loaded().expiries.values
        return len(expiries) > 1 or expiries[0] != 0

    def _expired_in(self, stretch: Stretch, offering: bool = False) -> int:
        """How many records at the front of a stretch are past their time."""
        now_us = self._now_us()
        first = stretch.index
        last = first + stretch.count
        if offering:
            last = min(last, max(first, first + stretch.lane.offered_below - stretch.seq))
        for due_us, low, _high in self._dues(stretch.loaded(), first, last):
            if due_us is None or due_us > now_us:
                return low - first
        return last - first

    def _living_in(self, stretch: Stretch, offering: bool) -> int:
        """How many records at the front of a stretch may be handed out."""
        now_us = self._now_us()
        first = stretch.index
        last = first + stretch.count
        if offering:
            last = min(last, max(first, first + stretch.lane.offered_below - stretch.seq))
        for due_us, low, _high in self._dues(stretch.loaded(), first, last):
            if due_us is not None and due_us <= now_us:
                return low - first
        return stretch.count

    def _dues(self, batch: RecordBatch, first: int, last: int) -> Iterator[tuple[int | None, int, int]]:
        """(when its time is over, from, to) for each run of records first..last-1 with the same time."""
        ttl_ms = self.settings.message_ttl_ms
        for expiry_us, low, high in batch.expiries.spans(first, last):
            if ttl_ms is None:
                yield expiry_us or None, low, high
                continue
            for timestamp_us, start, end in batch.timestamps.spans(low, high):
                due_us = timestamp_us + ttl_ms * 1000
                yield min(due_us, expiry_us) if expiry_us else due_us, start, end

    def next_expiry_us(self) -> int | None:
        """When the head that expires first does; None when no head has a time."""
        found: int | None = None
        for lane in self.lanes:
            head = lane.head()
            if head is not None and self._has_times(head):
                due = next(self._dues(head.loaded(), head.index, head.index + 1))[0]
                if due is not None and (found is None or due < found):
                    found = due
        return found


def _byte_count(stretch: Stretch) -> int:
    """Bytes of the bodies, which are all that limits in bytes count."""
    batch = stretch.loaded()
    return sum(map(len, batch.values[stretch.index : stretch.index + stretch.count]))
