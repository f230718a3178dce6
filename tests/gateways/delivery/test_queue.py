"""A queue: who gets what, what falls out and why, and that nothing is counted twice or not at all (Q1)."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from random import Random
from uuid import UUID

import pytest

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull
from headrace.core_log.ids import StreamId
from headrace.core_log.record import PRIORITY_SHIFT
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery import queue as queues
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import UNLIMITED, Overflow, Queue, QueueSettings, Reason

from .logs import Logs, commit

VIEW = 5
MS = 1000


def values_of(stretch: Stretch) -> list[bytes]:
    batch = stretch.loaded()
    return batch.values[stretch.index : stretch.index + stretch.count]


class Taker:
    """A consumer that remembers what it got."""

    def __init__(
        self, tag: str = "taker", *, prefetch: int = UNLIMITED, no_ack: bool = False, priority: int = 0
    ) -> None:
        self.tag = tag
        self.no_ack = no_ack
        self.priority = priority
        self.exclusive = False
        self.prefetch = prefetch
        self.held: list[Stretch] = []
        self.got: list[bytes] = []
        self.cancelled = False
        self.on_deliver: Callable[[Queue, Stretch], None] = lambda queue, stretch: None

    def room(self) -> int:
        return UNLIMITED if self.no_ack else self.prefetch - sum(one.count for one in self.held)

    def deliver(self, queue: Queue, stretch: Stretch) -> None:
        self.got += values_of(stretch)
        if not self.no_ack:
            self.held.append(stretch)
        self.on_deliver(queue, stretch)

    def cancel(self) -> None:
        self.cancelled = True

    def give_back_all(self, queue: Queue, *, failed: bool = True) -> None:
        held, self.held = self.held, []
        queue.give_back(held, failed=failed)


class House:
    """One queue on one log; what leaves it is settled at once, or when told."""

    def __init__(self, **settings: object) -> None:
        self.logs = Logs(config=LogConfig())
        self.clock = self.logs.clock
        self.log = self.logs.create()
        self.left: list[tuple[bytes, Reason]] = []
        self.queue = self.new_queue(QueueSettings(**settings))  # type: ignore[arg-type]

    def new_queue(self, settings: QueueSettings) -> Queue:
        return Queue(
            "orders",
            VIEW,
            settings,
            durable=True,
            transfer=self.transfer,
            changed=lambda queue: None,
            now_us=self.clock.wall_us,
            stream_id=StreamId(UUID(int=1)),
        )

    def transfer(self, queue: Queue, stretch: Stretch, reason: Reason) -> None:
        self.left += [(value, reason) for value in values_of(stretch)]
        stretch.lane.settle(stretch.seq, stretch.count)

    def publish(self, *values: bytes, ttl_ms: int | None = None, priority: int = 0, commits: bool = True) -> None:
        count = len(values)
        run = self.log.append(
            [b"key"] * count,
            [b""] * count,
            values,
            timestamp_us=self.clock.wall_us(),
            expiry_us=0 if ttl_ms is None else self.clock.wall_us() + ttl_ms * MS,
            attributes=priority << PRIORITY_SHIFT,
            route_set=(VIEW,),
        ).run
        assert run is not None
        self.queue.arrive(self.log, run.batch, run.first, run.last)
        if commits:
            commit(self.log)

    def turn(self) -> None:
        """What a door does at the end of its turn."""
        self.queue.dispatch()
        self.queue.keep_limits()

    def pass_ms(self, milliseconds: int) -> None:
        self.clock.now_us += milliseconds * MS

    def restart(self) -> None:
        """The queue as the journal would bring it back."""
        before, self.queue = self.queue, self.new_queue(self.queue.settings)
        for old, new in zip(before.lanes, self.queue.lanes, strict=True):
            new.restore(old.next_seq, old.floor, list(old.settled), [one.copy() for one in old.arrivals()])
            new.applied.update(old.applied)
        self.queue.count_bytes()

    def got(self, count: int = 1000) -> list[bytes]:
        """Whatever basic.get brings, without settling."""
        found = []
        while count and (stretch := self.queue.get()) is not None:
            found += values_of(stretch)
            count -= 1
        return found


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# -- consumers --------------------------------------------------------------------------------------------------


def test_consumers_of_equal_priority_get_records_in_turn() -> None:
    house = House()
    takers = [Taker("a"), Taker("b"), Taker("c")]
    for taker in takers:
        house.queue.add_consumer(taker)
    house.publish(*numbered(6))
    house.turn()
    assert [taker.got for taker in takers] == [[b"0", b"3"], [b"1", b"4"], [b"2", b"5"]]


def test_turns_go_on_where_they_stopped() -> None:
    house = House()
    takers = [Taker("a"), Taker("b")]
    for taker in takers:
        house.queue.add_consumer(taker)
    for number in range(4):
        house.publish(b"%d" % number)
        house.turn()
    assert [taker.got for taker in takers] == [[b"0", b"2"], [b"1", b"3"]]


def test_leaving_consumer_takes_nobody_elses_turn() -> None:
    house = House()
    takers = [Taker("a"), Taker("b"), Taker("c")]
    for taker in takers:
        house.queue.add_consumer(taker)
    house.publish(b"0", b"1")
    house.turn()
    house.queue.remove_consumer(takers[0])
    house.publish(b"2")
    house.turn()
    assert takers[2].got == [b"2"]


@pytest.mark.parametrize("count", [10, 600, 5000])
def test_many_ready_records_are_shared_evenly_between_equal_consumers(count: int) -> None:
    house = House()
    takers = [Taker("a"), Taker("b"), Taker("c")]
    for taker in takers:
        house.queue.add_consumer(taker)
    house.publish(*numbered(count))
    house.turn()
    shares = [len(taker.got) for taker in takers]
    assert sum(shares) == count
    assert max(shares) - min(shares) <= max(1, count // queues.FAIR_COUNT)


def test_prefetch_is_never_exceeded_and_an_ack_makes_room() -> None:
    house = House()
    taker = Taker(prefetch=2)
    house.queue.add_consumer(taker)
    house.publish(*numbered(5))
    house.turn()
    assert taker.got == [b"0", b"1"]
    for stretch in taker.held:
        house.queue.settle(stretch)
    taker.held.clear()
    house.turn()
    assert taker.got == [b"0", b"1", b"2", b"3"]


def test_consumer_without_room_holds_nobody_up() -> None:
    house = House()
    full, free = Taker("full", prefetch=1), Taker("free")
    house.queue.add_consumer(full)
    house.queue.add_consumer(free)
    house.publish(*numbered(5))
    house.turn()
    assert (full.got, free.got) == ([b"0"], [b"1", b"2", b"3", b"4"])


def test_consumer_of_higher_priority_gets_everything_until_it_is_full() -> None:
    house = House()
    low, high = Taker("low", priority=1), Taker("high", priority=5, prefetch=3)
    house.queue.add_consumer(low)
    house.queue.add_consumer(high)
    house.publish(*numbered(5))
    house.turn()
    assert (high.got, low.got) == ([b"0", b"1", b"2"], [b"3", b"4"])


def test_consumers_of_the_same_high_priority_take_turns() -> None:
    house = House()
    takers = [Taker("low"), Taker("one", priority=5), Taker("two", priority=5)]
    for taker in takers:
        house.queue.add_consumer(taker)
    house.publish(*numbered(4))
    house.turn()
    assert [taker.got for taker in takers] == [[], [b"0", b"2"], [b"1", b"3"]]


def test_single_active_consumer_stays_active_when_one_of_higher_priority_comes() -> None:
    house = House(single_active_consumer=True)
    first, second, important = Taker("first"), Taker("second"), Taker("important", priority=9)
    for taker in (first, second, important):
        house.queue.add_consumer(taker)
    house.publish(b"0")
    house.turn()
    assert first.got == [b"0"]
    house.queue.remove_consumer(first)
    house.publish(b"1")
    house.turn()
    assert (important.got, second.got) == ([b"1"], [])


def test_single_active_consumer_that_is_full_is_not_helped_by_the_others() -> None:
    house = House(single_active_consumer=True)
    active, waiting = Taker("active", prefetch=1), Taker("waiting")
    house.queue.add_consumer(active)
    house.queue.add_consumer(waiting)
    house.publish(b"0", b"1")
    house.turn()
    assert (active.got, waiting.got) == ([b"0"], [])


def test_what_the_active_consumer_held_goes_to_the_next_one_in_order() -> None:
    house = House(single_active_consumer=True)
    active, waiting = Taker("active", prefetch=2), Taker("waiting")
    house.queue.add_consumer(active)
    house.queue.add_consumer(waiting)
    house.publish(*numbered(4))
    house.turn()
    house.queue.remove_consumer(active)
    active.give_back_all(house.queue)
    house.turn()
    assert waiting.got == numbered(4)


def test_records_for_a_consumer_without_acks_are_settled_before_it_gets_them() -> None:
    house = House()
    taker = Taker(no_ack=True)
    taker.on_deliver = lambda queue, stretch: counts.append((queue.ready_count, queue.unacked_count))
    counts: list[tuple[int, int]] = []
    house.queue.add_consumer(taker)
    house.publish(b"0")
    house.turn()
    assert counts == [(0, 0)]
    house.restart()
    assert house.got() == []


def test_consumer_may_ack_while_it_is_being_given_records() -> None:
    house = House()
    taker = Taker(prefetch=1)

    def ack(queue: Queue, stretch: Stretch) -> None:
        taker.held.remove(stretch)
        queue.settle(stretch)
        queue.dispatch()

    taker.on_deliver = ack
    house.queue.add_consumer(taker)
    house.publish(*numbered(10))
    house.turn()
    assert taker.got == numbered(10)
    assert house.queue.message_count == 0


def test_consumer_may_leave_while_it_is_being_given_records() -> None:
    house = House()
    leaving, staying = Taker("leaving"), Taker("staying")

    def leave(queue: Queue, stretch: Stretch) -> None:
        queue.remove_consumer(leaving)
        leaving.give_back_all(queue)

    leaving.on_deliver = leave
    house.queue.add_consumer(leaving)
    house.queue.add_consumer(staying)
    house.publish(*numbered(3))
    house.turn()
    assert (leaving.got, staying.got) == ([b"0"], [b"0", b"1", b"2"])


def test_last_consumer_may_leave_while_it_is_being_given_records() -> None:
    house = House()
    taker = Taker(prefetch=1)
    taker.on_deliver = lambda queue, stretch: queue.remove_consumer(taker)
    house.queue.add_consumer(taker)
    house.publish(*numbered(3))
    house.turn()
    assert (taker.got, house.queue.ready_count) == ([b"0"], 2)


def test_queue_that_is_deleted_while_it_deals_out_deals_no_further() -> None:
    house = House()
    taker = Taker(prefetch=1)

    def delete(queue: Queue, stretch: Stretch) -> None:
        queue.deleted = True
        queue.consumers.clear()

    taker.on_deliver = delete
    house.queue.add_consumer(taker)
    house.publish(*numbered(3))
    house.turn()
    house.queue.dispatch()
    assert taker.got == [b"0"]


def test_committed_dispatch_waits_for_the_commit() -> None:
    house = House(committed_dispatch=True)
    house.publish(b"0")
    taker = Taker()
    house.queue.add_consumer(taker)
    house.turn()
    run = house.log.append([b"key"], [b""], [b"1"], timestamp_us=1, route_set=(VIEW,)).run
    assert run is not None
    house.queue.arrive(house.log, run.batch, run.first, run.last)
    house.turn()
    assert taker.got == [b"0"]
    commit(house.log)
    house.turn()
    assert taker.got == [b"0", b"1"]


def test_consumers_take_turns_also_when_each_record_is_waited_for() -> None:
    house = House(committed_dispatch=True)
    takers = [Taker("a"), Taker("b")]
    for taker in takers:
        house.queue.add_consumer(taker)
    for number in range(4):
        run = house.log.append([b"key"], [b""], [b"%d" % number], timestamp_us=1, route_set=(VIEW,)).run
        assert run is not None
        house.queue.arrive(house.log, run.batch, run.first, run.last)
        house.turn()
        commit(house.log)
        house.turn()
    assert [taker.got for taker in takers] == [[b"0", b"2"], [b"1", b"3"]]


# -- returns ----------------------------------------------------------------------------------------------------


def test_returned_records_come_again_at_their_place_and_flagged() -> None:
    house = House()
    taker = Taker(prefetch=2)
    house.queue.add_consumer(taker)
    house.publish(*numbered(4))
    house.turn()
    taker.give_back_all(house.queue)
    flags: list[int] = []
    taker.on_deliver = lambda queue, stretch: flags.append(stretch.deliveries)
    taker.prefetch = 10
    house.turn()
    assert taker.got == [b"0", b"1", b"0", b"1", b"2", b"3"]
    assert flags == [1, 0]


def test_record_beyond_its_delivery_limit_leaves_with_the_next_failure() -> None:
    """RabbitMQ lets a message be returned as often as the limit says, and no more."""
    house = House(delivery_limit=2)
    taker = Taker()
    house.queue.add_consumer(taker)
    house.publish(b"poison")
    for _ in range(5):
        house.turn()
        taker.give_back_all(house.queue)
    assert taker.got == [b"poison"] * 3
    assert house.left == [(b"poison", Reason.DELIVERY_LIMIT)]


def test_return_that_is_no_failure_does_not_count_for_the_delivery_limit() -> None:
    house = House(delivery_limit=1)
    taker = Taker()
    house.queue.add_consumer(taker)
    house.publish(b"fine")
    for _ in range(5):
        house.turn()
        taker.give_back_all(house.queue, failed=False)
    assert house.left == []
    house.turn()
    taker.give_back_all(house.queue)
    house.turn()
    taker.give_back_all(house.queue)
    assert house.left == [(b"fine", Reason.DELIVERY_LIMIT)]


def test_rejected_record_stays_unacked_until_its_receiver_has_settled_it() -> None:
    house = House()
    waiting: list[Stretch] = []
    house.queue._transfer = lambda queue, stretch, reason: waiting.append(stretch)
    house.publish(b"0")
    stretch = house.queue.get()
    assert stretch is not None
    house.queue.reject(stretch)
    assert (house.queue.ready_count, house.queue.unacked_count) == (0, 1)
    house.restart()
    assert house.got() == [b"0"]


def test_what_finds_no_room_elsewhere_stays_in_the_queue() -> None:
    house = House(length_bytes_max=100)

    def transfer(queue: Queue, stretch: Stretch, reason: Reason) -> None:
        moved = stretch.split(1)
        stretch.lane.settle(moved.seq, moved.count)
        raise DiskFull("no space left on device")

    house.queue._transfer = transfer
    house.publish(*numbered(3))
    stretch = house.queue.lanes[0].take(3)
    assert stretch is not None
    house.queue._leave(stretch)
    with pytest.raises(DiskFull):
        house.queue.reject(stretch)
    assert (house.queue.unacked_count, house.queue.byte_count) == (0, 2)
    # A consumer has seen them.
    again = house.queue.lanes[0].take(2)
    assert again is not None and again.deliveries == 1
    house.queue.lanes[0].put_back(again)
    assert house.got() == [b"1", b"2"]


# -- limits -----------------------------------------------------------------------------------------------------


def test_oldest_records_are_dropped_beyond_the_length_limit() -> None:
    house = House(length_max=3)
    house.publish(*numbered(5))
    house.turn()
    assert house.left == [(b"0", Reason.MAXLEN), (b"1", Reason.MAXLEN)]
    assert house.got() == [b"2", b"3", b"4"]


def test_consumer_with_room_gets_records_before_the_length_limit_drops_them() -> None:
    house = House(length_max=1)
    taker = Taker(prefetch=3)
    house.queue.add_consumer(taker)
    house.publish(*numbered(5))
    house.turn()
    assert taker.got == [b"0", b"1", b"2"]
    assert house.left == [(b"3", Reason.MAXLEN)]


def test_unacked_records_do_not_count_for_the_length_limit() -> None:
    house = House(length_max=2)
    house.publish(*numbered(2))
    house.turn()
    assert house.got(2) == numbered(2)
    house.publish(*numbered(2, 2))
    house.turn()
    assert house.left == []


def test_oldest_records_are_dropped_until_the_bytes_fit() -> None:
    house = House(length_bytes_max=10)
    house.publish(b"a" * 4, b"b" * 4, b"c" * 6)
    house.turn()
    assert [value for value, _reason in house.left] == [b"aaaa"]
    assert house.queue.byte_count == 10


def test_single_record_larger_than_the_byte_limit_leaves_at_once() -> None:
    house = House(length_bytes_max=10)
    house.publish(b"x" * 11)
    house.turn()
    assert house.left == [(b"x" * 11, Reason.MAXLEN)]
    assert house.queue.byte_count == 0


def test_length_limit_holds_before_the_first_commit_of_a_log() -> None:
    """Nobody may see the head yet; the queue must neither grow nor turn for ever."""
    house = House(length_bytes_max=2)
    run = house.log.append([b"k"] * 3, [b""] * 3, [b"1", b"2", b"3"], timestamp_us=1, route_set=(VIEW,)).run
    assert run is not None
    house.queue.arrive(house.log, run.batch, run.first, run.last)
    house.turn()
    assert house.left == [(b"1", Reason.MAXLEN)]


def test_head_of_a_queue_with_priorities_is_its_most_important_record_for_drops_too() -> None:
    house = House(priority_max=5, length_max=2)
    house.publish(b"low")
    house.publish(b"high", priority=5)
    house.publish(b"lower")
    house.turn()
    assert house.left == [(b"high", Reason.MAXLEN)]


@pytest.mark.parametrize("overflow", [Overflow.REJECT_PUBLISH, Overflow.REJECT_PUBLISH_DLX])
def test_full_queue_that_rejects_admits_exactly_what_fits(overflow: Overflow) -> None:
    house = House(length_max=3, length_bytes_max=10, overflow=overflow)
    assert house.queue.admits(3, 10)
    assert not house.queue.admits(4, 4)
    assert not house.queue.admits(1, 11)
    house.publish(b"four", b"four")
    assert house.queue.admits(1, 2)
    assert not house.queue.admits(2, 2)
    assert not house.queue.admits(1, 3)
    assert house.got(1) == [b"four"]
    assert house.queue.admits(2, 6)


def test_queue_that_drops_admits_everything() -> None:
    assert House(length_max=1).queue.admits(1000, 1 << 40)


def test_purge_leaves_what_consumers_hold() -> None:
    house = House(length_bytes_max=100)
    house.publish(*numbered(5))
    assert house.got(2) == numbered(2)
    assert house.queue.purge() == 3
    assert (house.queue.ready_count, house.queue.unacked_count, house.queue.byte_count) == (0, 2, 0)
    house.restart()
    assert house.got() == numbered(2)


def test_bytes_are_counted_anew_when_a_limit_comes_by_policy() -> None:
    house = House()
    house.publish(b"four", b"seven..")
    house.publish(b"ten.......")
    assert house.got(1) == [b"four"]
    house.queue.apply(replace(house.queue.settings, length_bytes_max=12))
    assert house.queue.byte_count == 17
    house.turn()
    assert house.left == [(b"seven..", Reason.MAXLEN)]


def test_bytes_of_records_that_a_log_lost_no_longer_count() -> None:
    house = House(length_bytes_max=100, overflow=Overflow.REJECT_PUBLISH)
    house.publish(b"x" * 60)
    house.publish(b"y" * 30)
    house.restart()
    house.log.delete_before(1)
    assert house.got(1) == [b"y" * 30]
    assert house.queue.admits(1, 100)


# -- priorities -------------------------------------------------------------------------------------------------


def test_important_records_come_first_and_in_order_among_equals() -> None:
    house = House(priority_max=3)
    for priority, value in ((0, b"a"), (2, b"b"), (1, b"c"), (2, b"d"), (0, b"e"), (200, b"f")):
        house.publish(value, priority=priority)
    house.turn()
    assert house.got() == [b"f", b"b", b"d", b"c", b"a", b"e"]


def test_priorities_are_found_again_after_a_restart() -> None:
    house = House(priority_max=3)
    for number in range(12):
        house.publish(b"%d" % number, priority=number % 4)
    assert house.got(2) == [b"3", b"7"]
    house.restart()
    assert house.got() == [b"%d" % number for rest in (3, 2, 1, 0) for number in range(12) if number % 4 == rest]


# -- time -------------------------------------------------------------------------------------------------------


def test_record_expires_at_the_earlier_of_its_own_time_and_the_queues() -> None:
    house = House(message_ttl_ms=100)
    house.publish(b"own", ttl_ms=50)
    house.publish(b"queue's", ttl_ms=500)
    assert house.queue.next_expiry_us() == house.clock.wall_us() + 50 * MS
    house.pass_ms(50)
    house.queue.expire_heads()
    assert house.left == [(b"own", Reason.EXPIRED)]
    assert house.queue.next_expiry_us() == house.clock.wall_us() + 50 * MS
    house.pass_ms(50)
    house.queue.expire_heads()
    assert house.left[1:] == [(b"queue's", Reason.EXPIRED)]
    assert house.queue.next_expiry_us() is None


def test_expired_record_behind_a_living_head_counts_but_is_never_handed_out() -> None:
    house = House()
    house.publish(b"alive")
    house.publish(b"expired", ttl_ms=10)
    house.publish(b"alive too")
    house.turn()
    house.pass_ms(10)
    house.queue.expire_heads()
    assert house.queue.ready_count == 3
    taker = Taker()
    house.queue.add_consumer(taker)
    house.turn()
    assert taker.got == [b"alive", b"alive too"]
    assert house.left == [(b"expired", Reason.EXPIRED)]


def test_what_nobody_saw_behind_an_expired_record_is_not_flagged_as_redelivered() -> None:
    house = House()
    house.publish(b"alive", commits=False)
    house.publish(b"expired", ttl_ms=10, commits=False)
    house.publish(b"alive too")
    house.turn()
    house.pass_ms(10)
    taker = Taker()
    flags: list[int] = []
    taker.on_deliver = lambda queue, stretch: flags.append(stretch.deliveries)
    house.queue.add_consumer(taker)
    house.turn()
    assert (taker.got, flags) == ([b"alive", b"alive too"], [0, 0])


def test_basic_get_passes_over_what_is_expired() -> None:
    house = House()
    house.publish(b"expired", ttl_ms=10)
    house.publish(b"alive")
    house.pass_ms(11)
    assert house.got() == [b"alive"]


def test_time_to_live_of_zero_means_now_or_never() -> None:
    house = House(message_ttl_ms=0)
    taker = Taker(prefetch=1)
    house.queue.add_consumer(taker)
    house.publish(b"now", b"never")
    house.turn()
    assert taker.got == [b"now"]
    assert house.left == [(b"never", Reason.EXPIRED)]


def test_returned_record_may_expire() -> None:
    house = House(message_ttl_ms=10)
    taker = Taker()
    house.queue.add_consumer(taker)
    house.publish(b"0")
    house.turn()
    house.pass_ms(20)
    taker.give_back_all(house.queue)
    house.turn()
    assert (taker.got, house.left) == ([b"0"], [(b"0", Reason.EXPIRED)])


def test_time_goes_on_over_a_restart() -> None:
    house = House(message_ttl_ms=100)
    house.publish(b"0")
    house.pass_ms(60)
    house.restart()
    house.pass_ms(40)
    assert house.got() == []
    assert house.left == [(b"0", Reason.EXPIRED)]


# -- everything at once -----------------------------------------------------------------------------------------


class State(Enum):
    READY = auto()
    UNACKED = auto()
    ACKED = auto()
    MOVING = auto()
    LEFT = auto()
    PURGED = auto()


@dataclass(slots=True)
class Known:
    number: int
    size: int
    priority: int
    due_us: int | None
    state: State = State.READY
    deliveries: int = 0
    failures: int = 0
    fresh: bool = True


@dataclass
class Walk(House):
    """Random steps over a queue, and a list that says what must come of them."""

    random: Random
    settings: QueueSettings
    known: dict[int, Known] = field(default_factory=dict)
    moving: list[Stretch] = field(default_factory=list)
    reasons: Counter[Reason] = field(default_factory=Counter)
    takers: list[Taker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.logs = Logs(self.random.randrange(1 << 30), tail_bytes=self.random.choice((500, 100_000)))
        self.clock = self.logs.clock
        self.sources = [self.logs.create() for _ in range(self.random.choice((1, 2)))]
        self.queue = self.new_queue(self.settings)

    def run(self, steps: int) -> None:
        kinds: dict[Callable[[], None], int] = {
            self.step_publish: 10,
            self.step_commit: 4,
            self.turn: 8,
            self.step_consumer: 3,
            self.step_leave: 1,
            self.step_ack: 6,
            self.step_return: 3,
            self.step_reject: 2,
            self.step_get: 2,
            self.step_time: 3,
            self.step_moved: 3,
            self.step_purge: self.random.choice((0, 1)),
            self.step_restart: self.random.choice((0, 1)),
        }
        for step in self.random.choices(list(kinds), list(kinds.values()), k=steps):
            step()
            self.check()

    # -- what the queue tells --------------------------------------------------------------------------------------

    def records(self, stretch: Stretch) -> list[Known]:
        return [self.known[int(value.split()[0])] for value in values_of(stretch)]

    def transfer(self, queue: Queue, stretch: Stretch, reason: Reason) -> None:
        for one in self.records(stretch):
            before = State.READY if reason in (Reason.EXPIRED, Reason.MAXLEN) else State.UNACKED
            assert one.state is before
            if reason is Reason.EXPIRED:
                assert one.due_us is not None and one.due_us <= self.clock.wall_us()
            if reason is Reason.DELIVERY_LIMIT:
                assert one.failures == self.settings.delivery_limit
            one.state = State.MOVING
        self.reasons[reason] += stretch.count
        # Safe at once (nobody wants it), or once its copy is committed.
        if self.random.random() < 0.5:
            self.finish_move(stretch)
        else:
            self.moving.append(stretch)

    def finish_move(self, stretch: Stretch) -> None:
        for one in self.records(stretch):
            one.state = State.LEFT
        stretch.lane.settle(stretch.seq, stretch.count)

    def take(self, stretch: Stretch, taker: Taker | None) -> None:
        for one in self.records(stretch):
            assert one.state is State.READY
            assert one.due_us is None or one.due_us > self.clock.wall_us() or (one.fresh and taker is not None)
            assert (one.deliveries, one.failures) == (stretch.deliveries, stretch.failures)
            better = [
                other
                for other in self.known.values()
                if other.state is State.READY and other.priority == one.priority and other.number < one.number
            ]
            # Only what is passed over because its time is over may be older.
            assert all(other.due_us is not None and other.due_us <= self.clock.wall_us() for other in better)
            one.state = State.ACKED if taker is not None and taker.no_ack else State.UNACKED

    # -- steps --------------------------------------------------------------------------------------------------

    def step_publish(self) -> None:
        count = self.random.choice((1, 1, 3, 10))
        priority = self.random.choice((0, 0, 1, 9))
        ttl_ms = self.random.choice((None, None, 0, 5, 50))
        size = self.random.choice((8, 8, 40))
        if not self.queue.admits(count, count * size):
            return
        now_us = self.clock.wall_us()
        dues = [] if ttl_ms is None else [now_us + ttl_ms * MS]
        if self.settings.message_ttl_ms is not None:
            dues.append(now_us + self.settings.message_ttl_ms * MS)
        top = self.settings.priority_max or 0
        first = len(self.known)
        values = []
        for number in range(first, first + count):
            self.known[number] = Known(number, size, min(priority, top), min(dues, default=None))
            values.append(f"{number} ".encode().ljust(size, b"."))
        log = self.random.choice(self.sources)
        run = log.append(
            [b"key"] * count,
            [b""] * count,
            values,
            timestamp_us=now_us,
            expiry_us=0 if ttl_ms is None else now_us + ttl_ms * MS,
            attributes=priority << PRIORITY_SHIFT,
            route_set=(VIEW,),
        ).run
        assert run is not None
        self.queue.arrive(log, run.batch, run.first, run.last)

    def step_commit(self) -> None:
        for log in self.sources:
            commit(log)

    def turn(self) -> None:
        super().turn()
        if not self.takers or all(log.end == log.high_watermark for log in self.sources):
            for one in self.known.values():
                one.fresh = False
        settings = self.settings
        if settings.length_max is not None:
            assert self.queue.ready_count <= settings.length_max
        if settings.length_bytes_max is not None:
            assert self.queue.byte_count <= settings.length_bytes_max

    def step_consumer(self) -> None:
        taker = Taker(
            f"{self.random.random()}",
            prefetch=self.random.choice((1, 2, 10)),
            no_ack=self.random.random() < 0.2,
            priority=self.random.choice((0, 0, 1)),
        )
        taker.on_deliver = lambda queue, stretch: self.delivered(taker, stretch)
        self.takers.append(taker)
        self.queue.add_consumer(taker)

    def delivered(self, taker: Taker, stretch: Stretch) -> None:
        assert taker.no_ack or taker.room() >= 0
        assert taker in self.takers
        if self.settings.single_active_consumer:
            assert taker is self.queue.consumers[0]
        self.take(stretch, taker)
        if not taker.no_ack and self.random.random() < 0.2:
            self.ack(taker, len(taker.held) - 1)
            self.queue.dispatch()
        elif self.random.random() < 0.05:
            self.leave(taker)

    def step_leave(self) -> None:
        if self.takers:
            self.leave(self.random.choice(self.takers))

    def leave(self, taker: Taker) -> None:
        self.takers.remove(taker)
        self.queue.remove_consumer(taker)
        held, taker.held = taker.held, []
        self.give_back(held, failed=True)

    def give_back(self, stretches: Sequence[Stretch], *, failed: bool) -> None:
        limit = self.settings.delivery_limit
        for stretch in stretches:
            for one in self.records(stretch):
                assert one.state is State.UNACKED
                if not (failed and limit is not None and one.failures >= limit):
                    one.state = State.READY
                    one.deliveries += 1
                    one.failures += failed
        self.queue.give_back(stretches, failed=failed)

    def ack(self, taker: Taker, place: int) -> None:
        stretch = taker.held.pop(place)
        for one in self.records(stretch):
            assert one.state is State.UNACKED
            one.state = State.ACKED
        self.queue.settle(stretch)

    def _holder(self) -> tuple[Taker, int] | None:
        holders = [taker for taker in self.takers if taker.held]
        if not holders:
            return None
        taker = self.random.choice(holders)
        return taker, self.random.randrange(len(taker.held))

    def step_ack(self) -> None:
        if found := self._holder():
            self.ack(*found)

    def step_return(self) -> None:
        if found := self._holder():
            taker, place = found
            stretch = taker.held.pop(place)
            if stretch.count > 1 and self.random.random() < 0.5:
                taker.held.append(stretch.split(1))
            self.give_back([stretch], failed=self.random.random() < 0.7)

    def step_reject(self) -> None:
        if found := self._holder():
            taker, place = found
            self.queue.reject(taker.held.pop(place))

    def step_get(self) -> None:
        stretch = self.queue.get()
        if stretch is not None:
            assert stretch.count == 1
            self.take(stretch, None)
            for one in self.records(stretch):
                one.state = State.ACKED
            self.queue.settle(stretch)

    def step_time(self) -> None:
        self.pass_ms(self.random.choice((1, 5, 20)))
        self.queue.expire_heads()

    def step_moved(self) -> None:
        if self.moving:
            self.finish_move(self.moving.pop(self.random.randrange(len(self.moving))))

    def step_purge(self) -> None:
        ready = [one for one in self.known.values() if one.state is State.READY]
        assert self.queue.purge() == len(ready)
        for one in ready:
            one.state = State.PURGED

    def step_restart(self) -> None:
        self.step_commit()
        self.restart()
        self.takers.clear()
        self.moving.clear()
        for one in self.known.values():
            if one.state in (State.UNACKED, State.MOVING):
                one.state = State.READY
            one.deliveries = one.failures = 0

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        states = Counter(one.state for one in self.known.values())
        queue = self.queue
        assert queue.ready_count == states[State.READY]
        assert queue.unacked_count == states[State.UNACKED] + states[State.MOVING]
        arrived = sum(lane.next_seq for lane in queue.lanes)
        settled = sum(lane.floor + lane.settled.count for lane in queue.lanes)
        assert arrived == len(self.known) == settled + queue.message_count
        assert settled == states[State.ACKED] + states[State.LEFT] + states[State.PURGED]
        if self.settings.length_bytes_max is not None:
            assert queue.byte_count == sum(one.size for one in self.known.values() if one.state is State.READY)
        held = Counter(one.number for taker in self.takers for stretch in taker.held for one in self.records(stretch))
        assert all(count == 1 for count in held.values())


def random_settings(random: Random) -> QueueSettings:
    return QueueSettings(
        message_ttl_ms=random.choice((None, None, 0, 10)),
        length_max=random.choice((None, None, 5)),
        length_bytes_max=random.choice((None, None, 100)),
        overflow=random.choice(list(Overflow)),
        priority_max=random.choice((None, None, 3)),
        delivery_limit=random.choice((None, 2)),
        single_active_consumer=random.random() < 0.2,
        committed_dispatch=random.random() < 0.2,
    )


@pytest.mark.parametrize("seed", range(200))
def test_every_record_is_in_one_place_and_counted_once(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    if random.random() < 0.5:
        monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 5)
        monkeypatch.setattr(lanes, "REFILL_BYTES", 100)
    Walk(random, random_settings(random)).run(80)
