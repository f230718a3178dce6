"""Parked messages of a shard: what one replica has sorted into buckets, the next leader has as well."""

from random import Random

import trio
from tests.core_log.replication.cluster import Cluster, cluster, until, without_gone

from headrace.core_log.env import Env
from headrace.core_log.real import SystemClock, SystemIds, ThreadWorker
from headrace.delay.config import DelayConfig
from headrace.delay.delays import Delays

from .house import Target

FAR_US = 5 * 86_400_000_000
CONFIG = DelayConfig(sort_interval_s=1 << 20, sort_bytes=1 << 30)


class Wall(SystemClock):
    """The clock of a test is moved by it."""

    def __init__(self) -> None:
        self.shift_us = 0

    def wall_us(self) -> int:
        return super().wall_us() + self.shift_us


async def engine_of(three: Cluster, number: int, clock: Wall) -> tuple[Delays, Target]:
    directory = three.nodes[number].shard.directory
    env = Env(clock, three.nodes[number].storage, ThreadWorker(2), SystemIds(), Random(number))
    target = Target(directory, clock)
    delays = Delays(env, directory, CONFIG, target)
    await delays.load()
    return delays, target


async def sort(delays: Delays, value: bytes, due_us: int) -> None:
    """Park it, and move it into its bucket."""
    parked = trio.Event()
    delays.intake.when_committed(delays.park(b"t", [b"k"], [b""], [value], due_us=[due_us]), parked.set)
    await parked.wait()
    block = delays._engine.waiting.first_unsorted()
    assert block is not None
    await delays._sorter.sort(block)


async def test_what_was_sorted_is_there_after_a_failover() -> None:
    clock = Wall()
    async with cluster(config=without_gone()) as three:
        await three.found()
        await until(lambda: bool(three.nodes[0].served))
        delays, _target = await engine_of(three, 0, clock)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(delays.run)
            # The second pass writes to the same bucket as the first.
            for value in (b"1", b"2"):
                await sort(delays, value, clock.wall_us() + FAR_US)
            assert [(one.name, one.pending) for one in delays.buckets()] == [("near", 0), ("day", 2)]
            nursery.cancel_scope.cancel()
        await three.kill(0)
        await three.elect(1)
        await until(lambda: bool(three.nodes[1].served))
        delays, target = await engine_of(three, 1, clock)
        assert delays.count() == 2
        async with trio.open_nursery() as nursery:
            nursery.start_soon(delays.run)
            assert [one.value for one in (await delays.list()).records] == [b"1", b"2"]
            clock.shift_us = FAR_US
            await until(lambda: target.log.high_watermark == 2)
            assert target.values() == [b"1", b"2"]
            nursery.cancel_scope.cancel()


async def test_a_run_file_that_was_never_decided_is_not_taken_for_that_of_another_leader() -> None:
    clock = Wall()
    async with cluster(config=without_gone()) as three:
        await three.found()
        for number, leader in enumerate((0, 1, 0)):
            if number:
                await three.kill(1 - leader)
                await three.start(1 - leader)
                await three.elect(leader)
            await until(lambda: len(three.nodes[leader].served) == 1 + number // 2)  # noqa: B023
            delays, _target = await engine_of(three, leader, clock)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(delays.run)
                if number == 0:
                    for day, value in enumerate((b"1", b"2")):
                        await sort(delays, value, clock.wall_us() + FAR_US + day * 86_400_000_000)
                    # As the next pass would leave one, were the node killed before its decision is committed.
                    engine = delays._engine
                    engine.write_run(engine.ledger.next_run, engine.runs[min(engine.runs)].all_rows([1]))
                assert [one.value for one in (await delays.list()).records] == [b"1", b"2"]
                nursery.cancel_scope.cancel()
