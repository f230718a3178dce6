"""A data directory without threads and without time: calls are made at once, in this thread. Driver for tests.

What the log core's tests share: an Env whose clock moves only when somebody sleeps and whose ids come from a seed, and
the few calls that most tests begin with.
"""

from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, TypeVar
from uuid import UUID

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.log import PartitionLog
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.contract import Storage

T = TypeVar("T")


class Clock:
    """Stands still unless moved. Whoever sleeps moves it, and may free the disk."""

    def __init__(self) -> None:
        self.now_us = 1_700_000_000_000_000
        self.on_sleep: Callable[[], None] = lambda: None

    def monotonic(self) -> float:
        return self.now_us / 1e6

    def wall_us(self) -> int:
        return self.now_us

    async def sleep(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)
        self.on_sleep()


class SeededIds:
    def __init__(self, random: Random) -> None:
        self._random = random

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def salt(self) -> int:
        return self._random.randrange(1, 2**64)


class InlineWorker:
    """Runs the call at once; `around` says what the loop does before, during and after it."""

    def __init__(self) -> None:
        self.around: Callable[[Callable[[], Any]], Any] = lambda call: call()

    async def run(self, call: Callable[[], T]) -> T:
        result: T = self.around(call)
        return result


def drive(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a coroutine waits although everything answers at once")


def env_on(storage: Storage, seed: int = 0) -> Env:
    random = Random(seed)
    return Env(clock=Clock(), storage=storage, worker=InlineWorker(), ids=SeededIds(random), random=random)


def open_directory(storage: Storage, *, clean: bool = False, config: DirectoryConfig | None = None) -> LogDirectory:
    return LogDirectory.open_now(env_on(storage), config or DirectoryConfig(), clean=clean)


def create_logs(directory: LogDirectory, count: int, config: LogConfig | None = None) -> list[PartitionLog]:
    spec = StreamSpec(
        id=UUID(int=len(directory.streams) + 1),
        name="s",
        kind="topic",
        partition_count=count,
        config=config or LogConfig(),
    )
    return directory.create_now(spec).partitions


def append(log: PartitionLog, *values: bytes) -> int:
    """Plain records without key and properties; returns the offset behind them."""
    return log.append([b""] * len(values), [b""] * len(values), values, timestamp_us=1).next_offset


def commit(directory: LogDirectory, *logs: PartitionLog) -> None:
    drive(directory.committer.commit(logs))


def values_of(log: PartitionLog) -> dict[int, bytes]:
    """Every record from the log start to the high watermark."""
    found: dict[int, bytes] = {}
    offset = int(log.log_start)
    while offset < log.high_watermark:
        for batch, first, last in log.read(offset):
            found |= {batch.offset_at(index): batch.values[index] for index in range(first, last)}
            offset = batch.next_offset
    return found
