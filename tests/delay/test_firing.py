"""Firing is decided a moment ahead: on the disk before it is due, done when it is, in order, and only once."""

import trio

from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.delays import Outcome
from headrace.delay.firing import DECIDE_AHEAD_US, DECIDE_WITHIN_US

from .house import Clock, house

AHEAD_S, WITHIN_S = DECIDE_AHEAD_US / 1e6, DECIDE_WITHIN_US / 1e6


async def test_can_be_cancelled_until_it_is_decided_and_not_from_then_on(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", b"b", in_s=5, ids=[b"one", b"two"])
        due_us = it.clock.wall_us() + 5_000_000
        await trio.sleep((due_us - it.clock.wall_us()) / 1e6 - AHEAD_S - 0.001)
        assert await it.delays.cancel(b"one") == Outcome.DONE
        await trio.sleep((due_us - it.clock.wall_us()) / 1e6 - WITHIN_S + 0.001)
        assert it.target.values() == []
        assert await it.delays.cancel(b"two") == Outcome.ALREADY_FIRED
        assert await it.values_by(1) == [b"b"]


async def test_one_decision_is_handed_over_as_its_records_fall_due(autojump_clock: object) -> None:
    async with house() as it:
        start_us = it.clock.wall_us() + 5_000_000
        dues = [start_us + step * 5_000 for step in range(4)]
        await it.park_at(dues, [b"0", b"1", b"2", b"3"])
        decided = it.delays._engine.journal.end
        await trio.sleep((start_us - it.clock.wall_us()) / 1e6 - WITHIN_S + 0.001)
        assert it.delays._engine.journal.end == decided + 1
        await trio.sleep(1)
        assert it.target.values() == [b"0", b"1", b"2", b"3"]
        assert len(it.target.runs) == 4 and it.target.early == []
        await trio.sleep(1)
        assert not it.delays._engine.ledger.moves


async def test_clock_set_back_behind_the_decision_holds_nothing_up(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"decided", in_s=5)
        await trio.sleep(5 - WITHIN_S / 2)
        it.clock.step(-3_600_000_000)
        await it.park(b"new", in_s=1)
        assert await it.values_by(WITHIN_S) == [b"decided"]
        assert await it.values_by(1.1) == [b"decided", b"new"]


async def test_what_is_decided_and_not_due_waits_after_a_crash_too(autojump_clock: object) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock, stop=False) as it:
        await it.park(b"a", in_s=5)
        await trio.sleep(5 - WITHIN_S + 0.005)
        assert it.delays._engine.ledger.moves and it.target.values() == []
    async with house(storage.process_crash(), clock=clock) as it:
        assert it.target.values() == []
        assert await it.values_by(1) == [b"a"]
        assert it.target.early == []


async def test_what_was_decided_by_a_clock_set_back_since_comes_within_a_moment(autojump_clock: object) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock, stop=False) as it:
        await it.park(b"a", in_s=5)
        await trio.sleep(5 - WITHIN_S + 0.005)
    clock.step(-3_600_000_000)
    async with house(storage.process_crash(), clock=clock) as it:
        assert await it.values_by(2 * AHEAD_S) == [b"a"]
