"""A delay engine on a data directory in memory, on a virtual clock, with one log as its target. Driver for tests.

The clock is trio's own, which jumps when everybody sleeps; the wall clock is a shift of it that a test may change at
any time. `Target` keeps to the contract of delay/fire.py with one partition, and says what arrived there.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random
from typing import TypeVar
from uuid import UUID

import trio

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import Record
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.config import DelayConfig
from headrace.delay.delays import Delays
from headrace.delay.fire import DueRun

T = TypeVar("T")
START_US = 1_700_000_000_000_000
SECOND_US = 1_000_000
DAY_US = 24 * 3600 * SECOND_US
TARGET_NAME = "target"
SMALL = DelayConfig(horizon_s=60, sort_interval_s=30, sort_bytes=1 << 30)


class Clock:
    """Monotonic time is trio's; the wall can be set."""

    wall_look_s = 0.1

    def __init__(self) -> None:
        self.shift_us = START_US

    def monotonic(self) -> float:
        return trio.current_time()

    def wall_us(self) -> int:
        return self.shift_us + round(trio.current_time() * 1e6)

    def step(self, by_us: int) -> None:
        self.shift_us += by_us

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def sleep_until(self, monotonic_s: float) -> None:
        await trio.sleep_until(monotonic_s)


class SeededIds:
    def __init__(self, random: Random) -> None:
        self._random = random

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def nonce(self) -> str:
        return f"{self._random.getrandbits(128):x}"

    def salt(self) -> int:
        return self._random.randrange(1, 2**64)


class InlineWorker:
    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return call()


class Target:
    """Whatever is fired is appended to one log. With `delay_s` its commit is asked for later."""

    def __init__(self, directory: LogDirectory, clock: Clock) -> None:
        self._directory = directory
        self._clock = clock
        found = [one for one in directory.streams.values() if one.spec.name == TARGET_NAME]
        if not found:
            spec = StreamSpec(
                id=directory.env.ids.uuid(), name=TARGET_NAME, kind="topic", config=LogConfig(retention_ms=None)
            )
            found = [directory.create_now(spec)]
        self.log: PartitionLog = found[0].partitions[0]
        self.where = TargetPartition(found[0].spec.id)
        self.early: list[bytes] = []
        self.runs: list[DueRun] = []
        # Duties that have no log, by their targets.
        self.duties: list[tuple[bytes, bytes]] = []

    def places(self, target: bytes, keys: Sequence[bytes]) -> Sequence[TargetPartition | None]:
        return [None if target.startswith(b"duty") else self.where] * len(keys)

    def fire(self, run: DueRun, done: Callable[[], None]) -> None:
        now_us = self._clock.wall_us()
        self.early += [value for value, due in zip(run.values, run.due_us, strict=True) if due > now_us]
        self.runs.append(run)
        if run.producer is None:
            self.duties += [(run.target, value) for value in run.values]
            return done()
        appended = self.log.append_dense(
            run.producer,
            run.keys,
            run.properties,
            run.values,
            settled=run.settled,
            timestamp_us=now_us,
            attributes=run.attributes,
            tags=run.tags,
            headers=run.headers,
        )
        self._directory.committer.urgent(self.log)
        self.log.when_committed(appended.next_offset, done)

    def records(self) -> list[Record]:
        return [batch.record(index) for batch, first, last in self.log.runs() for index in range(first, last)]

    def values(self) -> list[bytes]:
        return [record.value for record in self.records()]


class House:
    def __init__(self, directory: LogDirectory, delays: Delays, target: Target, clock: Clock) -> None:
        self.directory = directory
        self.delays = delays
        self.target = target
        self.clock = clock

    async def park(self, *values: bytes, in_s: float = 0, target: bytes = b"t", **more: object) -> list[bytes]:
        """Park and wait for the commit; returns what the ids would be if the broker made them."""
        due_us = self.clock.wall_us() + round(in_s * 1e6)
        return await self.park_at([due_us] * len(values), values, target=target, **more)

    async def park_at(
        self, due_us: Sequence[int], values: Sequence[bytes], *, target: bytes = b"t", **more: object
    ) -> list[bytes]:
        columns = {"keys": [b"k"] * len(values), "properties": [b"p"] * len(values)} | more
        end = self.delays.park(target, values=values, due_us=due_us, **columns)  # type: ignore[arg-type]
        done = trio.Event()
        self.delays.intake.when_committed(end, done.set)
        await done.wait()
        return [b"hd-%016x" % offset for offset in range(end - len(values), end)]

    async def sort(self) -> None:
        """Make the sorter do everything that waits for it."""
        waiting = self.delays._engine.waiting
        while (block := waiting.first_unsorted()) is not None:
            await self.delays._sorter.sort(block)

    async def values_by(self, seconds: float) -> list[bytes]:
        """What has arrived when so much time has passed."""
        await trio.sleep(seconds)
        return self.target.values()


def env_on(storage: Storage, clock: Clock, seed: int = 0) -> Env:
    random = Random(seed)
    return Env(clock=clock, storage=storage, worker=InlineWorker(), ids=SeededIds(random), random=random)


@asynccontextmanager
async def house(
    storage: Storage | None = None,
    *,
    clock: Clock | None = None,
    config: DelayConfig = SMALL,
    seed: int = 0,
    clean: bool = False,
    stop: bool = True,
) -> AsyncIterator[House]:
    """A running engine. `stop`: it is closed in good order behind the body; otherwise it just ends."""
    clock = clock or Clock()
    env = env_on(storage or MemoryStorage(), clock, seed)
    directory = LogDirectory.open_now(env, DirectoryConfig(), clean=clean)
    target = Target(directory, clock)
    delays = Delays(env, directory, config, target)
    await delays.load()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run)
        async with trio.open_nursery() as inner:
            inner.start_soon(delays.run)
            yield House(directory, delays, target, clock)
            inner.cancel_scope.cancel()
        if stop:
            await delays.close()
            await directory.committer.flush()
        nursery.cancel_scope.cancel()
    if stop:
        directory.close_now()
