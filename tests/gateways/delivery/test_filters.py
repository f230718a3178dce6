"""A queue whose consumers filter: who gets what, what stays, leaves or comes back; any course against a naive queue."""

from dataclasses import dataclass, field
from random import Random

import pytest

from headrace.filtering.expression import parse
from headrace.gateways.delivery import filters, scan
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery.filters import FILTERS_MAX, TooManyFilters, Unmatched
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue, Reason

from .logs import commit
from .test_queue import MS, VIEW, House, Taker, values_of


class Tagged(House):
    def send(self, *pairs: tuple[str, str], ttl_ms: int | None = None, priority: int = 0) -> None:
        """(value, tags) each, one append for each of them."""
        for value, tags in pairs:
            self._append(value.encode(), tuple(sorted(tags.split())), (VIEW,), ttl_ms, priority)
        commit(self.log)

    def change_log(self) -> None:
        """What is sent from now on goes to the other of two logs."""
        if not hasattr(self, "other"):
            self.other = self.logs.create()
        self.log, self.other = self.other, self.log

    def send_to_others(self, count: int) -> None:
        """Records of the same log that are not this queue's."""
        for number in range(count):
            self._append(b"foreign %d" % number, ("eu",), (VIEW + 1,), None, 0)

    def _append(
        self, value: bytes, tags: tuple[str, ...], routes: tuple[int, ...], ttl_ms: int | None, priority: int
    ) -> None:
        run = self.log.append(
            [b"key"],
            [b""],
            [value],
            timestamp_us=self.clock.wall_us(),
            expiry_us=0 if ttl_ms is None else self.clock.wall_us() + ttl_ms * MS,
            attributes=priority << 16,
            route_set=routes,
            tags=tags,
        ).run
        assert run is not None
        if VIEW in routes:
            self.queue.arrive(self.log, run.batch, run.first, run.last)

    def consumer(self, wanted: str | None, **settings: object) -> Taker:
        taker = Taker(wanted or "all", **settings)  # type: ignore[arg-type]
        self.queue.add_consumer(taker, None if wanted is None else parse(wanted))
        return taker

    def turns(self) -> None:
        """Until nothing more is to be looked at."""
        self.turn()
        while self.queue.is_unfinished:
            self.turn()


MIXED = [("1", "eu"), ("2", "us"), ("3", "eu vip"), ("4", ""), ("5", "us vip")]


def test_consumer_gets_what_its_filter_lets_through_and_the_rest_stays_at_its_place_and_counts() -> None:
    house = Tagged()
    eu, us = house.consumer("eu"), house.consumer("us", no_ack=True)
    house.send(*MIXED)
    house.turns()
    assert eu.got == [b"1", b"3"]
    assert us.got == [b"2", b"5"]
    assert (house.queue.ready_count, house.queue.unacked_count) == (1, 2)
    every = house.consumer(None)
    house.turns()
    assert every.got == [b"4"]


def test_what_comes_back_is_tested_again_by_everybody_and_keeps_its_place() -> None:
    house = Tagged()
    house.send(*MIXED)
    eu, vip = house.consumer("eu", prefetch=1), house.consumer("vip", prefetch=1)
    house.turns()
    assert (eu.got, vip.got) == ([b"1"], [b"3"])
    vip.give_back_all(house.queue)
    house.queue.remove_consumer(vip)
    us = house.consumer("us")
    eu.give_back_all(house.queue)
    house.turns()
    assert us.got == [b"2", b"5"]
    assert eu.got == [b"1", b"1"]
    house.queue.settle(eu.held.pop())
    house.turns()
    assert eu.got[2:] == [b"3"]
    assert eu.held[0].deliveries == 1


def test_head_goes_past_what_filters_have_taken() -> None:
    house = Tagged()
    house.send(*MIXED)
    eu = house.consumer("eu")
    house.turns()
    for expected in (b"2", b"4", b"5"):
        got = house.queue.get()
        assert got is not None and values_of(got) == [expected]
    assert house.queue.get() is None
    eu.give_back_all(house.queue)
    got = house.queue.get()
    assert got is not None and values_of(got) == [b"1"]


def test_length_limit_and_purge_take_what_nobody_wanted() -> None:
    house = Tagged(length_max=2)
    eu = house.consumer("eu")
    house.send(*MIXED, *MIXED)
    house.turns()
    assert eu.got == [b"1", b"3", b"1", b"3"]
    assert [value for value, _reason in house.left] == [b"2", b"4", b"5", b"2"]
    assert house.queue.ready_count == 2
    assert house.queue.purge() == 2
    assert (house.queue.ready_count, house.queue.unacked_count) == (0, 4)


@pytest.mark.parametrize("unmatched", [Unmatched.DEAD_LETTER, Unmatched.DROP])
def test_what_no_filter_wants_leaves_when_all_have_seen_it(unmatched: Unmatched) -> None:
    house = Tagged(filter_unmatched=unmatched)
    house.send(*MIXED)
    house.turns()
    assert house.queue.ready_count == 5
    eu = house.consumer("eu")
    us = house.consumer("us", prefetch=1)
    house.turns()
    # `us` has not seen what is behind its first: only what is before its next can be judged.
    assert (eu.got, us.got) == ([b"1", b"3"], [b"2"])
    house.queue.settle(us.held.pop())
    house.turns()
    assert us.got == [b"2", b"5"]
    assert house.queue.ready_count == 0
    assert house.queue.unmatched_count == 1
    assert house.left == ([(b"4", Reason.UNMATCHED)] if unmatched is Unmatched.DEAD_LETTER else [])


def test_nothing_leaves_unmatched_while_somebody_takes_everything() -> None:
    house = Tagged(filter_unmatched=Unmatched.DROP)
    house.consumer("eu")
    every = house.consumer(None, prefetch=1)
    house.send(*MIXED)
    house.turns()
    assert len(every.got) == 1
    assert house.queue.unmatched_count == 0


def test_priorities_hold_for_what_a_filter_lets_through() -> None:
    house = Tagged(priority_max=2)
    for priority in (0, 2, 1):
        house.send((f"{priority}a", "eu"), (f"{priority}b", "us"), priority=priority)
    eu = house.consumer("eu")
    house.turns()
    assert eu.got == [b"2a", b"1a", b"0a"]
    assert house.queue.ready_count == 3


def test_consumers_of_higher_priority_come_first_among_those_who_want_it() -> None:
    house = Tagged()
    first, second = house.consumer("eu", priority=1, prefetch=1), house.consumer("eu || us")
    house.send(*MIXED)
    house.turns()
    assert first.got == [b"1"]
    assert second.got == [b"2", b"3", b"5"]


def test_single_active_consumer_alone_is_dealt_to() -> None:
    house = Tagged(single_active_consumer=True)
    active, waiting = house.consumer("eu"), house.consumer("us")
    house.send(*MIXED)
    house.turns()
    assert (active.got, waiting.got) == ([b"1", b"3"], [])
    house.queue.remove_consumer(active)
    house.turns()
    assert waiting.got == [b"2", b"5"]


def test_lanes_give_their_owner_what_it_wants() -> None:
    house = Tagged(partition_count=4)
    house.consumer("eu")
    house.send(*MIXED)
    house.turns()
    assert house.queue.unacked_count == 2
    assert house.queue.ready_count == 3


def test_expired_records_are_not_delivered_to_filters() -> None:
    house = Tagged()
    house.send(("1", "eu"), ttl_ms=10)
    house.send(("2", "us"), ("3", "eu"))
    house.turns()
    house.clock.now_us += 1000 * MS
    eu = house.consumer("eu")
    house.turns()
    assert eu.got == [b"3"]
    assert house.left == [(b"1", Reason.EXPIRED)]
    assert house.queue.ready_count == 1


def test_time_to_live_of_nothing_lets_a_filter_have_its_chance() -> None:
    house = Tagged(message_ttl_ms=0)
    eu = house.consumer("eu", no_ack=True)
    house.send(("1", "eu"), ("2", "us"))
    house.turns()
    assert eu.got == [b"1"]
    assert house.left == [(b"2", Reason.EXPIRED)]


def test_one_filter_too_many_is_refused_and_equal_ones_count_once() -> None:
    house = Tagged()
    takers = [house.consumer(f"t{number}") for number in range(FILTERS_MAX)]
    house.consumer("(t0) || t0")
    with pytest.raises(TooManyFilters, match="16 different filters"):
        house.consumer("another")
    assert len(house.queue.consumers) == FILTERS_MAX + 1
    house.queue.remove_consumer(takers[3])
    house.consumer("instead")
    house.consumer(None)


def test_long_backlog_without_a_match_is_gone_through_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "TURN_BYTES", 2000)
    monkeypatch.setattr(scan, "READ_BYTES", 500)
    monkeypatch.setattr("headrace.core_log.log.PASSED_OVER_MAX", 16)
    house = Tagged()
    for number in range(300):
        house.send((str(number), "us"))
    house.send(("last", "eu"))
    eu = house.consumer("eu")
    house.turn()
    assert house.queue.is_unfinished and not eu.got
    count = 1
    while house.queue.is_unfinished:
        house.turn()
        count += 1
    assert eu.got == [b"last"]
    assert count > 3
    house.send(("next", "eu"))
    house.turn()
    assert eu.got == [b"last", b"next"]


# -- any course ---------------------------------------------------------------------------------------------------


@dataclass
class One:
    value: bytes
    tags: tuple[str, ...]
    priority: int = 0
    log: object = None
    # Where it is: None, ready; else its consumer, or "gone".
    at: object = None
    came_back: bool = False


@dataclass
class Naive:
    records: dict[bytes, One] = field(default_factory=dict)

    def ready(self) -> list[One]:
        return [one for one in self.records.values() if one.at is None]


class Course:
    """Random steps on a queue and on a list, which must agree after every turn."""

    WANTED = ("eu", "us", "!eu", "eu && vip", "eu || us", None)

    def __init__(self, seed: int, **settings: object) -> None:
        self.random = Random(seed)
        self.house = Tagged(**settings)
        self.naive = Naive()
        self.takers: dict[Taker, str | None] = {}
        self.number = 0
        self.last_of: dict[tuple[Taker, int, object], int] = {}
        # Where order holds between logs: not where there are more extents than are kept.
        self.two_logs = False
        self.left_count = 0

    @property
    def queue(self) -> Queue:
        return self.house.queue

    def step(self) -> None:
        kinds = (
            ("publish",) * 4 + ("ack",) * 4 + ("nack", "reject", "join", "leave", "get", "foreign", "purge", "forget")
        )
        getattr(self, self.random.choice(kinds))()
        self.house.turns()
        self.check()

    def publish(self) -> None:
        for _ in range(self.random.randrange(1, 12)):
            tags = tuple(sorted(self.random.sample(("eu", "us", "vip"), self.random.randrange(0, 3))))
            value = b"%d" % self.number
            self.number += 1
            priority = self.random.randrange(3) if self.queue.settings.priority_max else 0
            if self.two_logs and self.random.random() < 0.5:
                self.house.change_log()
            self.naive.records[value] = One(value, tags, priority, self.house.log)
            self.house.send((value.decode(), " ".join(tags)), priority=priority)

    def foreign(self) -> None:
        self.house.send_to_others(self.random.randrange(1, 5))

    def join(self) -> None:
        if len(self.takers) < 6:
            wanted = self.random.choice(self.WANTED)
            taker = Taker(f"c{self.number}", prefetch=self.random.choice((1, 3, 100)))
            taker.on_deliver = lambda _queue, stretch: self.delivered(taker, stretch)
            self.takers[taker] = wanted
            self.queue.add_consumer(taker, None if wanted is None else parse(wanted))

    def delivered(self, taker: Taker, stretch: Stretch) -> None:
        wanted = self.takers[taker]
        for value in values_of(stretch):
            one = self.naive.records[value]
            assert one.at is None, f"{value!r} was delivered and is with {one.at}"
            assert wanted is None or parse(wanted).matches(one.tags), f"{value!r} {one.tags} for {wanted}"
            if not one.came_back:
                place = (taker, one.priority, one.log)
                assert int(value) > self.last_of.get(place, -1), f"{value!r} after {self.last_of[place]}"
                self.last_of[place] = int(value)
            one.at = taker

    def leave(self) -> None:
        if self.takers:
            taker = self.random.choice(list(self.takers))
            self.queue.remove_consumer(taker)
            self.returned([taker.held])
            taker.give_back_all(self.queue)
            del self.takers[taker]

    def returned(self, held: list[list[Stretch]]) -> None:
        for one in (self.naive.records[value] for some in held for stretch in some for value in values_of(stretch)):
            one.at, one.came_back = None, True

    def some_held(self) -> Stretch | None:
        holders = [taker for taker in self.takers if taker.held]
        if not holders:
            return None
        held = self.random.choice(holders).held
        stretch = held.pop(self.random.randrange(len(held)))
        if stretch.count > 1 and self.random.random() < 0.5:
            part = stretch.split(self.random.randrange(1, stretch.count))
            held.append(stretch)
            return part
        return stretch

    def ack(self) -> None:
        for _ in range(3):
            stretch = self.some_held()
            if stretch is not None:
                for value in values_of(stretch):
                    self.naive.records[value].at = "gone"
                self.queue.settle(stretch)

    def nack(self) -> None:
        stretch = self.some_held()
        if stretch is not None:
            self.returned([[stretch]])
            self.queue.give_back([stretch], failed=False)

    def reject(self) -> None:
        stretch = self.some_held()
        if stretch is not None:
            for value in values_of(stretch):
                self.naive.records[value].at = "gone"
            self.queue.reject(stretch)

    def get(self) -> None:
        stretch = self.queue.get()
        ready = self.naive.ready()
        if stretch is None:
            assert not ready
            return
        (value,) = values_of(stretch)
        if self.two_logs:
            ready = [one for one in ready if one.log is self.naive.records[value].log]
        assert value == max(ready, key=lambda one: (one.priority, -int(one.value))).value
        self.naive.records[value].at = "gone"
        self.queue.settle(stretch)

    def purge(self) -> None:
        if self.random.random() < 0.2:
            ready = self.naive.ready()
            assert self.queue.purge() == len(ready)
            for one in ready:
                one.at = "gone"

    def forget(self) -> None:
        """What is in memory of the log is gone: it is read from its files."""
        self.house.log._tail.clear()

    def note_unmatched(self) -> None:
        """What left because nobody wants it is wanted by nobody; and where all have seen everything, it has left."""
        wanted = set(self.takers.values())
        for value, reason in self.house.left[self.left_count :]:
            if reason is Reason.UNMATCHED:
                one = self.naive.records[value]
                assert wanted and not any(text is None or parse(text).matches(one.tags) for text in wanted)
                one.at = "gone"
        self.left_count = len(self.house.left)
        all_seen = wanted and None not in wanted and all(taker.room() > 0 for taker in self.takers)
        if all_seen and self.queue.settings.filter_unmatched is Unmatched.DEAD_LETTER:
            assert not self.naive.ready()

    def check(self) -> None:
        self.note_unmatched()
        ready = self.naive.ready()
        held = sum(1 for one in self.naive.records.values() if isinstance(one.at, Taker))
        assert (self.queue.ready_count, self.queue.unacked_count) == (len(ready), held)
        for taker, wanted in list(self.takers.items())[: 1 if self.queue.settings.single_active_consumer else None]:
            if taker.room() > 0:
                left = [one.value for one in ready if wanted is None or parse(wanted).matches(one.tags)]
                assert not left, f"{wanted} has room for {left}"
        for lane in self.queue.lanes:
            assert lane.next_seq == lane.floor + lane.settled.count + lane.ready_count + lane.unacked_count


@pytest.mark.parametrize("window", [20_000, 3])
@pytest.mark.parametrize("seed", range(25))
def test_any_course_of_filters_consumers_and_returns_is_that_of_a_naive_queue(
    seed: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", window)
    monkeypatch.setattr(lanes, "REFILL_BYTES", 200)
    monkeypatch.setattr(lanes, "REFILL_BYTES_MIN", 200)
    monkeypatch.setattr(scan, "READ_BYTES", 300)
    if seed % 2:
        monkeypatch.setattr(filters, "TURN_BYTES", 900)
    course = Course(seed)
    if seed % 3 == 0:
        monkeypatch.setattr(lanes, "EXTENTS_MAX", 4)
        course.queue.lanes[0]._backlog_fold_at = course.queue.lanes[0]._arrivals_trim_at = 4
        course.two_logs = True
    for _ in range(120):
        course.step()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    "settings",
    [
        {"priority_max": 2},
        {"single_active_consumer": True},
        {"filter_unmatched": Unmatched.DEAD_LETTER},
        {"filter_unmatched": Unmatched.DEAD_LETTER, "priority_max": 2},
    ],
    ids=str,
)
def test_any_course_holds_for_other_queues_too(
    seed: int, settings: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 5)
    monkeypatch.setattr(lanes, "REFILL_BYTES", 200)
    monkeypatch.setattr(lanes, "REFILL_BYTES_MIN", 200)
    monkeypatch.setattr(scan, "READ_BYTES", 300)
    course = Course(seed, **settings)
    for _ in range(80):
        course.step()


def test_what_somebody_who_is_away_wants_does_not_leave_as_unmatched() -> None:
    house = Tagged(filter_unmatched=Unmatched.DROP)
    away = Taker("away")
    house.queue.note_away(away, parse("us"))
    eu = house.consumer("eu")
    house.send(("0", "test"), *MIXED)
    house.turns()
    assert eu.got == [b"1", b"3"]
    assert house.queue.unmatched_count == 1
    assert house.queue.ready_count == 3
    house.queue.add_consumer(away, parse("us"))
    house.turns()
    assert away.got == [b"2", b"5"]
    assert house.queue.ready_count == 0
    house.queue.note_away(Taker("of everything"), None)
    house.send(("6", "test"))
    house.turns()
    assert house.queue.ready_count == 1


def test_filters_of_those_who_are_away_count_as_filters() -> None:
    house = Tagged()
    for number in range(FILTERS_MAX):
        house.queue.note_away(Taker(), parse(f"t{number}"))
    house.consumer("t3")
    with pytest.raises(TooManyFilters):
        house.consumer("another")
