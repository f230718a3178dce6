"""The delay engine as its users meet it: parked records arrive once and in time, and can be found meanwhile."""

import os
from collections import Counter
from dataclasses import replace

import pytest
import trio

from headrace.core_log.errors import CorruptLog, Refused
from headrace.core_log.record import Producer
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.decisions import Merged
from headrace.delay.delays import DelayRefused, Outcome
from headrace.delay.parked import made_id

from .house import DAY_US, SMALL, Clock, house


async def test_record_arrives_when_it_is_due_and_not_before(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=5)
        assert it.delays.count() == 1
        assert await it.values_by(4.9) == []
        assert await it.values_by(0.2) == [b"a"]
        assert it.delays.count() == 0 and it.target.early == []


async def test_record_due_in_days_goes_through_a_bucket(autojump_clock: object) -> None:
    async with house() as it:
        (id,) = await it.park(b"a", in_s=3 * 86400)
        await it.sort()
        assert [(one.name, one.pending) for one in it.delays.buckets()] == [("near", 0), ("day", 1)]
        found = await it.delays.inspect(id)
        assert found is not None and found.value == b"a" and found.target == b"t"
        it.clock.step(3 * DAY_US - 1_000_000)
        assert await it.values_by(0.9) == []
        assert await it.values_by(0.5) == [b"a"]
        assert await it.delays.cancel(id) == Outcome.ALREADY_FIRED
        assert await it.delays.cancel(made_id(999)) == Outcome.UNKNOWN


async def test_cancelled_record_never_arrives_and_both_answers_are_definite(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", b"b", in_s=5, ids=[b"one", b"two"])
        assert await it.delays.cancel(b"one") == Outcome.DONE
        assert await it.delays.cancel(b"one") == Outcome.ALREADY_CANCELLED
        assert await it.delays.reschedule(b"one", 0) == Outcome.ALREADY_CANCELLED
        assert it.delays.count() == 1 and it.delays.count(b"t") == 1
        assert await it.values_by(6) == [b"b"]
        assert await it.delays.cancel(b"two") == Outcome.ALREADY_FIRED
        assert await it.delays.reschedule(b"two", 0) == Outcome.ALREADY_FIRED


async def test_rescheduled_record_keeps_its_id_and_everything_else(autojump_clock: object) -> None:
    async with house() as it:
        headers = [((b"h", b"v"),)]
        (id,) = await it.park(b"a", in_s=5, tags=("red", "blue"), headers=headers, attributes=7)
        later_us = it.clock.wall_us() + 40 * DAY_US
        assert await it.delays.reschedule(id, later_us) == Outcome.DONE
        await it.sort()
        assert await it.values_by(10) == []
        found = await it.delays.inspect(id)
        assert found is not None
        assert (found.id, found.due_us, found.tags, found.headers) == (id, later_us, ("red", "blue"), headers[0])
        assert await it.delays.reschedule(id, 0) == Outcome.DONE
        await it.values_by(1)
        (record,) = it.target.records()
        assert (record.key, record.properties, record.value) == (b"k", b"p", b"a")
        assert (record.attributes, record.tags, record.headers) == (7, ("red", "blue"), headers[0])


async def test_id_used_twice_names_both(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", b"b", in_s=9, ids=[b"same", b"same"])
        assert it.delays.count() == 2
        assert await it.delays.reschedule(b"same", it.clock.wall_us()) == Outcome.DONE
        assert sorted(await it.values_by(1)) == [b"a", b"b"]
        await it.park(b"c", b"d", in_s=9, ids=[b"again", b"again"])
        assert await it.delays.cancel(b"again") == Outcome.DONE
        assert it.delays.count() == 0


async def test_list_goes_by_due_time_page_by_page_and_filters(autojump_clock: object) -> None:
    async with house() as it:
        now_us = it.clock.wall_us()
        dues = [now_us + (1 + 7 * number % 40) * DAY_US for number in range(40)]
        values = [b"%02d" % number for number in range(40)]
        await it.park_at(dues[:20], values[:20], target=b"x", keys=[b"even", b"odd"] * 10)
        await it.sort()
        await it.park_at(dues[20:], values[20:], target=b"y", tags=("red",))
        seen: list[bytes] = []
        cursor = None
        while True:
            page = await it.delays.list(after=cursor, limit=7)
            seen += [one.value for one in page.records]
            if (cursor := page.cursor) is None:
                break
        assert seen == [value for _due, value in sorted(zip(dues, values, strict=True))]
        assert {one.value for one in (await it.delays.list(target=b"x")).records} == set(values[:20])
        assert {one.value for one in (await it.delays.list(key=b"odd")).records} == set(values[1:20:2])
        assert {one.value for one in (await it.delays.list(tag="red")).records} == set(values[20:])
        soon = await it.delays.list(due_from_us=now_us, due_until_us=now_us + 5 * DAY_US)
        assert [one.due_us for one in soon.records] == sorted(due for due in dues if due < now_us + 5 * DAY_US)
        with pytest.raises(Refused, match="cursor"):
            await it.delays.list(after="elsewhere")


async def test_due_beyond_ten_years_is_refused_and_nothing_is_taken(autojump_clock: object) -> None:
    async with house() as it:
        far_us = it.clock.wall_us() + 3651 * DAY_US
        with pytest.raises(DelayRefused, match="limit"):
            await it.park_at([it.clock.wall_us(), far_us], [b"a", b"b"])
        (id,) = await it.park(b"c", in_s=60)
        with pytest.raises(DelayRefused):
            await it.delays.reschedule(id, far_us)
        assert it.delays.count() == 1
        assert it.delays.park(b"t", [], [], [], due_us=[]) == it.delays.intake.end


async def test_t1_clock_set_back_holds_everything_and_set_forth_fires_it_once(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=5)
        it.clock.step(-3600 * 1_000_000)
        assert await it.values_by(20) == []
        it.clock.step(3600 * 1_000_000)
        assert await it.values_by(1) == [b"a"]
        it.clock.step(-3600 * 1_000_000)
        assert await it.values_by(20) == [b"a"]
        assert it.target.early == []


async def test_clock_set_back_leaves_room_for_what_is_due_by_it(autojump_clock: object) -> None:
    async with house(config=replace(SMALL, prefetch_bytes=1)) as it:
        await it.park(b"later", in_s=0.3)
        await it.values_by(0.2)
        it.clock.step(-3600 * 1_000_000)
        await it.park(b"now")
        assert await it.values_by(1) == [b"now"]
        it.clock.step(3600 * 1_000_000)
        assert await it.values_by(1) == [b"now", b"later"]


async def test_t2_everything_is_there_after_a_restart_and_counts_are_exact(autojump_clock: object) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock) as it:
        await it.park(b"soon", in_s=30)
        await it.park(b"late", b"gone", in_s=3 * 86400, ids=[b"late", b"gone"], target=b"u")
        await it.sort()
        assert await it.delays.cancel(b"gone") == Outcome.DONE
        wall_us = clock.wall_us()
    clock.shift_us += wall_us - clock.wall_us()
    async with house(storage.process_crash(), clock=clock, seed=1, clean=True) as it:
        assert (it.delays.count(), dict(it.delays.counts())) == (2, {b"t": 1, b"u": 1})
        assert await it.delays.cancel(b"gone") == Outcome.ALREADY_CANCELLED
        assert await it.values_by(31) == [b"soon"]
        clock.step(3 * DAY_US)
        assert await it.values_by(1) == [b"soon", b"late"]
        assert await it.delays.inspect(b"late") is None


async def test_run_files_that_are_lost_are_made_again_from_the_buckets(autojump_clock: object) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock) as it:
        (id,) = await it.park(b"a", in_s=3 * 86400)
        await it.sort()
    storage = storage.process_crash()
    for name in storage.list("delay"):
        storage.remove(f"delay/{name}")
    async with house(storage, clock=clock, seed=1) as it:
        found = await it.delays.inspect(id)
        assert found is not None and found.value == b"a"
        clock.step(3 * DAY_US)
        assert await it.values_by(1) == [b"a"]


async def test_pending_records_that_stand_in_no_run_file_are_found_in_the_buckets(autojump_clock: object) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock) as it:
        await it.park(b"a", in_s=3 * 86400)
        await it.sort()
        engine = it.delays._engine
        engine.decide(Merged(sorted(engine.ledger.runs), 0))
        await engine.decided()
    async with house(storage.process_crash(), clock=clock, seed=1) as it:
        assert [one.value for one in (await it.delays.list()).records] == [b"a"]


async def test_run_file_that_is_damaged_stops_the_engine_and_is_made_again_at_the_next_start(
    autojump_clock: object,
) -> None:
    storage, clock = MemoryStorage(), Clock()
    async with house(storage, clock=clock) as it:
        await it.park(b"a", in_s=3 * 86400)
        await it.sort()
    storage = storage.process_crash()
    (name,) = storage.list("delay")
    storage.flip_bit(f"delay/{name}", 60)
    with pytest.raises(ExceptionGroup) as raised:
        async with house(storage, clock=clock, seed=1, stop=False) as it:
            clock.step(3 * DAY_US)
            await it.values_by(1)
    assert raised.group_contains(CorruptLog, match="run file")
    async with house(storage.process_crash(), clock=clock, seed=2) as it:
        assert await it.values_by(1) == [b"a"]


async def test_bucket_that_is_empty_goes_with_its_files(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=3 * 86400)
        await it.sort()
        assert len(it.delays._engine.bucket_streams()) == 1
        it.clock.step(3 * DAY_US)
        await it.values_by(10)
        assert it.delays._engine.bucket_streams() == []
        assert it.directory.env.storage.list("delay") == []
        assert [one.name for one in it.delays.buckets()] == ["near"]


async def test_duty_without_a_log_is_done_and_counted(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=1, target=b"duty: expire")
        await it.values_by(2)
        assert it.target.duties == [(b"duty: expire", b"a")]
        assert it.delays.count() == 0 and it.delays.counters.fired == 1


async def test_parked_under_a_producers_numbers_once(autojump_clock: object) -> None:
    async with house() as it:
        producer = Producer(b"p" * 16, 1, 0)
        for _ in range(2):
            await it.park(b"a", b"b", in_s=5, producer=producer)
        assert it.delays.count() == 2
        assert await it.values_by(6) == [b"a", b"b"]


async def test_t4_cancel_and_fire_at_the_same_tick_add_up(autojump_clock: object) -> None:
    """Each record is cancelled by somebody at the very moment it is due; RACES=10000 for the whole claim."""
    count = int(os.environ.get("RACES", 300))
    async with house() as it:
        due_us = it.clock.wall_us() + 5_000_000
        ids: list[bytes | None] = [b"%d" % number for number in range(count)]
        for low in range(0, count, 20):
            part = ids[low : low + 20]
            await it.park_at([due_us] * len(part), [one for one in part if one is not None], ids=part)
        outcomes: Counter[Outcome] = Counter()

        async def cancel(some: list[bytes]) -> None:
            await it.clock.sleep((due_us - it.clock.wall_us()) / 1e6)
            for id in some:
                outcomes[await it.delays.cancel(id)] += 1

        async with trio.open_nursery() as nursery:
            for first in range(50):
                nursery.start_soon(cancel, [one for one in ids[first::50] if one is not None])
        arrived = await it.values_by(2)
        assert len(arrived) == len(set(arrived))
        assert len(arrived) + outcomes[Outcome.DONE] == count
        assert outcomes[Outcome.ALREADY_FIRED] == len(arrived) and Outcome.UNKNOWN not in outcomes
        assert it.delays.count() == 0
