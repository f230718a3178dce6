"""Time passes as the test says: in order, with everything done that is due, and no waiting for it."""

from datetime import UTC, datetime, timedelta

import pytest
import trio

from headrace.testing.clock import VirtualClock


class Driven:
    """A clock on the loop of the test itself."""

    def __init__(self, nursery: trio.Nursery, *, frozen: bool = False) -> None:
        self.clock = VirtualClock(frozen=frozen)
        self.story: list[str] = []
        self.nursery = nursery

    def after(self, seconds: float, name: str, then: float | None = None) -> None:
        async def wait() -> None:
            await self.clock.sleep_until(due_s)
            self.story.append(name)
            if then is not None:
                self.after(then, f"{name}, then")

        due_s = self.clock.monotonic() + seconds
        self.nursery.start_soon(wait)

    async def advance(self, seconds: float, *, silent: bool = False) -> None:
        await self.clock._advance(seconds, silent)


@pytest.fixture(params=[False, True], ids=["running", "frozen"])
async def driven(request: pytest.FixtureRequest, nursery: trio.Nursery) -> Driven:
    return Driven(nursery, frozen=request.param)


async def test_what_is_due_is_done_in_order_and_nothing_else_is(driven: Driven, nursery: trio.Nursery) -> None:
    driven.after(86_400, "a day")
    driven.after(3600, "an hour")
    driven.after(10 * 86_400, "ten days")
    await driven.advance(2 * 86_400)
    assert driven.story == ["an hour", "a day"]
    nursery.cancel_scope.cancel()


async def test_what_follows_from_something_is_due_counted_from_it(driven: Driven) -> None:
    driven.after(3600, "an hour", then=3600)
    await driven.advance(3 * 3600)
    assert driven.story == ["an hour", "an hour, then"]


async def test_a_short_pause_holds_nobody_up_and_a_long_one_is_no_reason_to_stop(
    driven: Driven, nursery: trio.Nursery
) -> None:
    rounds: list[float] = []

    async def sweep() -> None:
        while True:
            await driven.clock.sleep(1)
            rounds.append(driven.clock.monotonic())

    async def gather() -> None:
        await driven.clock.sleep(0.2)
        driven.story.append("gathered")

    nursery.start_soon(sweep)
    nursery.start_soon(gather)
    await driven.advance(86_400)
    assert driven.story == ["gathered"]
    assert 1 <= len(rounds) < 100
    nursery.cancel_scope.cancel()


async def test_in_silence_every_sweep_comes_round(driven: Driven, nursery: trio.Nursery) -> None:
    rounds: list[float] = []

    async def sweep() -> None:
        while True:
            await driven.clock.sleep(1)
            rounds.append(driven.clock.monotonic())

    nursery.start_soon(sweep)
    await driven.advance(30, silent=True)
    assert 29 <= len(rounds) <= 31
    nursery.cancel_scope.cancel()


async def test_a_frozen_clock_shows_exactly_what_was_added(nursery: trio.Nursery) -> None:
    driven = Driven(nursery, frozen=True)
    before_s, before_us = driven.clock.monotonic(), driven.clock.wall_us()
    await driven.advance(0.5)
    await driven.advance(86_400)
    assert driven.clock.monotonic() - before_s == pytest.approx(86_400.5, abs=1e-6)
    assert driven.clock.wall_us() - before_us == pytest.approx(86_400_500_000, abs=1)


async def test_a_frozen_clock_lets_pauses_end_and_nothing_be_due(nursery: trio.Nursery) -> None:
    driven = Driven(nursery, frozen=True)
    driven.after(0.001, "due")
    await driven.clock.sleep(0.01)
    assert driven.story == []
    await driven.advance(0.002)
    assert driven.story == ["due"]


async def test_a_running_clock_goes_with_real_time_besides(nursery: trio.Nursery) -> None:
    driven = Driven(nursery)
    driven.after(0.001, "due")
    with trio.fail_after(30):
        while not driven.story:
            await trio.sleep(0.001)


def test_without_a_broker_time_passes_too() -> None:
    clock = VirtualClock()
    before = clock.now()
    clock.advance(days=3, hours=1)
    assert clock.now() - before >= timedelta(days=3, hours=1)
    assert before - datetime.now(UTC) < timedelta(minutes=1)


def test_time_does_not_go_back() -> None:
    with pytest.raises(ValueError, match="does not go back"):
        VirtualClock().advance(-1)
