"""Calls that are due are made, in order, never early, by one task that sleeps in between. On a virtual clock."""

from collections.abc import AsyncIterator

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from headrace.gateways.delivery.timers import CALLS_PER_TURN, Timers


class VirtualClock:
    """Trio's own time, which the tests move."""

    def __init__(self) -> None:
        self.sleep_count = 0

    def monotonic(self) -> float:
        return trio.current_time()

    def wall_us(self) -> int:
        raise AssertionError("timers do not look at the wall clock")

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("timers wait for a certain time")

    async def sleep_until(self, monotonic_s: float) -> None:
        self.sleep_count += 1
        await trio.sleep_until(monotonic_s)


class Bench:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.timers = Timers(self.clock)
        self.story: list[str] = []

    def after(self, seconds: float, name: str) -> None:
        self.timers.after(seconds, lambda: self.story.append(name))

    async def pass_time(self, seconds: float) -> None:
        """A millisecond more: the wheel's grain."""
        await trio.sleep(seconds + 0.001)


@pytest.fixture
async def bench(autojump_clock: MockClock, nursery: trio.Nursery) -> AsyncIterator[Bench]:
    bench = Bench()
    nursery.start_soon(bench.timers.run)
    await trio.testing.wait_all_tasks_blocked()
    yield bench
    nursery.cancel_scope.cancel()


async def test_calls_are_made_when_due_and_in_order(bench: Bench, autojump_clock: MockClock) -> None:
    bench.after(10, "late")
    bench.after(0.5, "soon")
    await bench.pass_time(0.5)
    assert bench.story == ["soon"]
    await bench.pass_time(9)
    assert bench.story == ["soon"]
    await bench.pass_time(0.5)
    assert bench.story == ["soon", "late"]


@pytest.mark.parametrize("delay_s", [0.0, 0.0001, 0.0104, 0.9999, 1.0, 100.00051])
async def test_nothing_is_called_early(bench: Bench, autojump_clock: MockClock, delay_s: float) -> None:
    start = trio.current_time()
    called: list[float] = []
    bench.timers.after(delay_s, lambda: called.append(trio.current_time()))
    await bench.pass_time(delay_s)
    assert len(called) == 1 and called[0] - start > delay_s - 2e-6


async def test_an_earlier_timer_wakes_the_task_from_its_sleep(bench: Bench, autojump_clock: MockClock) -> None:
    bench.after(3600, "hour")
    await bench.pass_time(1)
    bench.after(1, "second")
    await bench.pass_time(1)
    assert bench.story == ["second"]
    await bench.pass_time(3600)
    assert bench.story == ["second", "hour"]


async def test_a_later_timer_does_not_disturb_the_sleep(bench: Bench, autojump_clock: MockClock) -> None:
    bench.after(1, "first")
    await trio.testing.wait_all_tasks_blocked()
    slept = bench.clock.sleep_count
    for number in range(100):
        bench.after(2 + number, "later")
    await trio.testing.wait_all_tasks_blocked()
    assert bench.clock.sleep_count == slept


async def test_cancelled_timers_are_not_called(bench: Bench, autojump_clock: MockClock) -> None:
    timer = bench.timers.after(1, lambda: bench.story.append("never"))
    assert bench.timers.cancel(timer)
    assert not bench.timers.cancel(timer)
    assert len(bench.timers) == 0
    await bench.pass_time(2)
    assert bench.story == []


async def test_a_call_may_set_the_next_one(bench: Bench, autojump_clock: MockClock) -> None:
    def again() -> None:
        bench.story.append(f"{trio.current_time():.0f}")
        bench.timers.after(2, again)

    start = trio.current_time()
    bench.timers.after(2, again)
    await bench.pass_time(7)
    assert bench.story == [f"{start + after:.0f}" for after in (2, 4, 6)]


async def test_others_have_their_turn_while_very_many_are_due(
    bench: Bench, autojump_clock: MockClock, nursery: trio.Nursery
) -> None:
    for _ in range(10 * CALLS_PER_TURN):
        bench.after(1, "call")

    async def onlooker() -> None:
        await trio.sleep(1)
        while len(bench.story) < 10 * CALLS_PER_TURN:
            seen.append(len(bench.story))
            await trio.lowlevel.checkpoint()

    seen: list[int] = []
    nursery.start_soon(onlooker)
    await bench.pass_time(1)
    assert len(seen) > 5
