"""The time wheel: by story, then against a heap over 150,000 calls with a clock that steps both ways."""

from heapq import heappop, heappush
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.delay.wheel import Timer, Wheel


def test_fires_when_due_and_not_before() -> None:
    wheel: Wheel[str] = Wheel(now_ms=1_000)
    wheel.add(1_005, "a")
    assert wheel.advance(1_004) == []
    assert wheel.advance(1_005) == ["a"]
    assert wheel.advance(1_006) == []


@pytest.mark.parametrize("delay_ms", [1, 255, 256, 257, 65_535, 65_536, 65_537, 10**9, 10 * 366 * 86_400_000])
def test_fires_to_the_millisecond_across_ring_borders(delay_ms: int) -> None:
    for now_ms in (0, 1, 255, 256, 1_700_000_000_123):
        wheel: Wheel[str] = Wheel(now_ms=now_ms)
        wheel.add(now_ms + delay_ms, "a")
        assert wheel.advance(now_ms + delay_ms - 1) == []
        assert wheel.advance(now_ms + delay_ms) == ["a"]


def test_order_is_by_due_time_then_by_adding() -> None:
    wheel: Wheel[str] = Wheel()
    for due_ms, item in [(70_000, "e"), (300, "b"), (5, "a"), (300, "c"), (70_000, "f"), (301, "d")]:
        wheel.add(due_ms, item)
    assert wheel.advance(10**6) == ["a", "b", "c", "d", "e", "f"]


def test_ties_keep_the_order_of_adding_when_some_came_from_an_outer_ring() -> None:
    wheel: Wheel[str] = Wheel()
    wheel.add(70_000, "first")
    wheel.advance(69_900)
    wheel.add(70_000, "second")
    wheel.advance(69_999)
    wheel.add(70_000, "third")
    assert wheel.advance(70_000) == ["first", "second", "third"]


def test_what_is_due_already_fires_with_the_next_advance_in_due_order() -> None:
    wheel: Wheel[str] = Wheel(now_ms=1_000)
    wheel.add(1_001, "d")
    wheel.add(1_000, "c")
    wheel.add(-5, "a")
    wheel.add(500, "b")
    assert wheel.advance(1_001) == ["a", "b", "c", "d"]


def test_coarse_tick_rounds_up_so_nothing_is_early() -> None:
    wheel: Wheel[str] = Wheel(tick_ms=100)
    wheel.add(101, "a")
    wheel.add(200, "b")
    assert wheel.advance(199) == []
    assert wheel.next_due_ms() == 200
    assert wheel.advance(200) == ["a", "b"]


def test_cancelled_timer_does_not_fire() -> None:
    wheel: Wheel[str] = Wheel()
    gone, kept = wheel.add(300, "gone"), wheel.add(300, "kept")
    assert wheel.cancel(gone)
    assert len(wheel) == 1
    assert wheel.advance(300) == ["kept"]
    assert not wheel.cancel(kept), "it has fired"
    assert not wheel.cancel(gone), "it was cancelled before"


def test_cancelling_the_last_timer_leaves_nothing_due() -> None:
    wheel: Wheel[str] = Wheel(now_ms=10)
    timers = [wheel.add(due_ms, "x") for due_ms in (5, 20, 3_000, 10**8)]
    for timer in timers:
        assert wheel.cancel(timer)
    assert wheel.next_due_ms() is None
    assert len(wheel) == 0


def test_overdue_timer_can_be_cancelled() -> None:
    wheel: Wheel[str] = Wheel(now_ms=100)
    assert wheel.cancel(wheel.add(50, "a"))
    assert wheel.advance(200) == []


def test_clock_set_back_fires_nothing_twice_and_nothing_early() -> None:
    wheel: Wheel[str] = Wheel(now_ms=10_000)
    wheel.add(10_500, "before the step")
    wheel.add(11_500, "after the step")
    assert wheel.advance(11_000) == ["before the step"]
    assert wheel.advance(5_000) == []
    wheel.add(6_000, "added meanwhile")
    assert wheel.next_due_ms() == 6_000
    assert wheel.advance(5_999) == []
    assert wheel.advance(6_000) == ["added meanwhile"]
    assert wheel.advance(11_499) == []
    assert wheel.advance(11_500) == ["after the step"]


def test_clock_set_forward_fires_all_that_was_passed_in_due_order() -> None:
    wheel: Wheel[int] = Wheel()
    dues = [3, 77, 300, 4_000, 70_000, 10**7, 10**10]
    for due_ms in reversed(dues):
        wheel.add(due_ms, due_ms)
    assert wheel.advance(10**10) == dues


def test_next_due_is_exact_nearby_and_never_late_far_out() -> None:
    wheel: Wheel[str] = Wheel()
    assert wheel.next_due_ms() is None
    due_ms = 5_000_000
    wheel.add(due_ms, "far")
    looks = 0
    while True:
        now_ms = wheel.next_due_ms()
        assert now_ms is not None
        assert now_ms <= due_ms
        if wheel.advance(now_ms):
            break
        looks += 1
    assert now_ms == due_ms
    assert looks <= 2, "one look per ring between"


def test_bounded_work_spreads_a_crowd_over_calls_in_order() -> None:
    wheel: Wheel[int] = Wheel()
    for number in range(1_000):
        wheel.add(70_000 + number // 500, number)
    fired: list[int] = []
    calls = 0
    while (due_ms := wheel.next_due_ms()) is not None and due_ms <= 80_000:
        answer = wheel.advance(80_000, work_max=64)
        assert len(answer) <= 64
        fired += answer
        calls += 1
    assert fired == list(range(1_000))
    # Each timer moves inward at most twice and fires once.
    assert calls <= 3 * 1_000 / 64 + 3


def test_what_is_added_while_a_slot_is_half_emptied_keeps_its_turn() -> None:
    wheel: Wheel[int] = Wheel()
    for number in range(10):
        wheel.add(65_536, number)
    fired = wheel.advance(65_536, work_max=3)
    wheel.add(65_536, 10)
    wheel.add(65_537, 12)
    wheel.add(65_536, 11)
    while len(wheel):
        fired += wheel.advance(65_537, work_max=3)
    assert fired == list(range(13))


def test_clock_set_back_while_a_slot_is_half_emptied_fires_nothing_early() -> None:
    wheel: Wheel[int] = Wheel()
    for number in range(10):
        wheel.add(65_536, number)
    assert wheel.advance(65_536, work_max=3) == [0, 1, 2]
    assert wheel.advance(65_535) == []
    wheel.add(65_536, 10)
    assert wheel.advance(65_536) == [3, 4, 5, 6, 7, 8, 9, 10]


@pytest.mark.parametrize(("tick_ms", "now_ms"), [(0, 0), (-1, 0), (1, -1)])
def test_senseless_setting_is_refused(tick_ms: int, now_ms: int) -> None:
    with pytest.raises(ValueError, match="_ms is"):
        Wheel(tick_ms=tick_ms, now_ms=now_ms)


class HeapOracle:
    """The same calls on a heap."""

    def __init__(self, tick_ms: int) -> None:
        self.tick_ms = tick_ms
        self.heap: list[tuple[int, int]] = []
        self.waiting: set[int] = set()

    def add(self, due_ms: int, number: int) -> None:
        rounded = (due_ms + self.tick_ms - 1) // self.tick_ms * self.tick_ms
        heappush(self.heap, (rounded, number))
        self.waiting.add(number)

    def cancel(self, number: int) -> bool:
        if number not in self.waiting:
            return False
        self.waiting.remove(number)
        return True

    def advance(self, now_ms: int) -> list[int]:
        fired = []
        while self.heap and self.heap[0][0] <= now_ms:
            _, number = heappop(self.heap)
            if number in self.waiting:
                self.waiting.remove(number)
                fired.append(number)
        return fired

    def next_due_ms(self) -> int | None:
        while self.heap and self.heap[0][1] not in self.waiting:
            heappop(self.heap)
        return self.heap[0][0] if self.heap else None


class Pair:
    """A wheel and its oracle, called alike and compared at every call."""

    def __init__(self, tick_ms: int, now_ms: int) -> None:
        self.now_ms = now_ms
        self.tick_ms = tick_ms
        self.wheel: Wheel[int] = Wheel(tick_ms=tick_ms, now_ms=now_ms)
        self.oracle = HeapOracle(tick_ms)
        self.timers: list[Timer[int]] = []

    def add(self, delay_ms: int) -> None:
        number = len(self.timers)
        self.timers.append(self.wheel.add(self.now_ms + delay_ms, number))
        self.oracle.add(self.now_ms + delay_ms, number)

    def cancel(self, which: int) -> None:
        if self.timers:
            which %= len(self.timers)
            assert self.wheel.cancel(self.timers[which]) == self.oracle.cancel(which)

    def advance(self, step_ms: int, work_max: int | None) -> None:
        self.now_ms = max(0, self.now_ms + step_ms)
        fired = self.wheel.advance(self.now_ms, work_max=work_max)
        if work_max is not None:
            assert len(fired) <= work_max
            while (due_ms := self.wheel.next_due_ms()) is not None and due_ms <= self.now_ms:
                fired += self.wheel.advance(self.now_ms, work_max=work_max)
        assert fired == self.oracle.advance(self.now_ms)
        self.check()
        due_ms = self.wheel.next_due_ms()
        assert due_ms is None or due_ms > self.now_ms - self.tick_ms

    def advance_partly(self, step_ms: int, work_max: int) -> None:
        """One bounded call: what it fires is the beginning of what is due."""
        self.now_ms = max(0, self.now_ms + step_ms)
        for number in self.wheel.advance(self.now_ms, work_max=work_max):
            due_ms = self.oracle.next_due_ms()
            assert due_ms is not None
            assert due_ms <= self.now_ms
            assert self.oracle.heap[0][1] == number
            self.oracle.cancel(number)
        self.check()

    def check(self) -> None:
        assert len(self.wheel) == len(self.oracle.waiting)
        exact, told = self.oracle.next_due_ms(), self.wheel.next_due_ms()
        assert (told is None) == (exact is None)
        assert told is None or exact is None or told <= exact


# Uniform below one of these: near, within a ring, across rings, years.
SCALES_MS = (2, 300, 70_000, 20_000_000, 5_000_000_000)


@pytest.mark.parametrize(("tick_ms", "seed"), [(1, 1), (1, 2), (1, 3), (10, 4), (7, 5)])
def test_wheel_agrees_with_a_heap_over_many_calls(tick_ms: int, seed: int) -> None:
    random = Random(seed)
    pair = Pair(tick_ms, now_ms=random.choice([0, 1_700_000_000_000]))
    for _ in range(30_000):
        scale_ms = random.choice(SCALES_MS)
        match random.randrange(10):
            case 0 | 1 | 2 | 3 | 4:
                pair.add(random.randrange(-scale_ms // 20, scale_ms))
            case 5 | 6:
                pair.cancel(random.randrange(1 << 30))
            case 7 | 8:
                pair.advance(random.randrange(random.choice(SCALES_MS[:3])), random.choice([None, None, 1, 5]))
            case _:
                pair.advance_partly(random.randrange(-scale_ms, scale_ms), random.randrange(1, 10))
    pair.advance(10**15, None)
    assert len(pair.wheel) == 0


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([1, 3]),
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(-300, 70_000)),
            st.tuples(st.just("cancel"), st.integers(0, 50)),
            st.tuples(st.just("advance"), st.integers(-1_000, 70_000)),
            st.tuples(st.just("partly"), st.integers(-300, 70_000)),
        ),
        max_size=60,
    ),
)
def test_wheel_agrees_with_a_heap_on_every_short_story(tick_ms: int, calls: list[tuple[str, int]]) -> None:
    pair = Pair(tick_ms, now_ms=65_000)
    for verb, number in calls:
        match verb:
            case "add":
                pair.add(number)
            case "cancel":
                pair.cancel(number)
            case "advance":
                pair.advance(number, None)
            case _:
                pair.advance_partly(number, work_max=2)
