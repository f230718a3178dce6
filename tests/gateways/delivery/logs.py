"""Logs in memory for tests of views: real partitions without a disk, a thread or a clock that moves by itself."""

from collections.abc import Callable
from random import Random
from typing import TypeVar
from uuid import UUID

from headrace.core_log.config import LogConfig
from headrace.core_log.env import Env
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog, Shared
from headrace.core_log.pool import SegmentPool
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.tail import TailCache

T = TypeVar("T")
START_US = 1_700_000_000_000_000
# Segments of a few batches, and offsets reserved so scarcely that early dispatch is held up now and then.
SMALL = LogConfig(segment_bytes_max=2000, batch_bytes_max=600, index_interval_bytes=256, offsets_reserved=40)


class Clock:
    """Stands still until it is told to go on; whoever sleeps goes on at once."""

    def __init__(self) -> None:
        self.now_us = START_US

    def monotonic(self) -> float:
        return self.now_us / 1e6

    def wall_us(self) -> int:
        return self.now_us

    async def sleep(self, seconds: float) -> None:
        self.now_us += int(seconds * 1e6)


class Ids:
    def __init__(self, random: Random) -> None:
        self._random = random

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def salt(self) -> int:
        return self._random.getrandbits(64) | 1


class Here:
    """A worker without threads."""

    async def run(self, call: Callable[[], T]) -> T:
        return call()


def env_on(storage: Storage, clock: Clock, random: Random) -> Env:
    return Env(clock=clock, storage=storage, worker=Here(), ids=Ids(random), random=random)


class Logs:
    """A few partitions that share a storage, as those of one data directory do."""

    def __init__(self, seed: int = 1, *, config: LogConfig = SMALL, tail_bytes: int = 4000) -> None:
        self.config = config
        self.clock = Clock()
        self.storage = MemoryStorage()
        self._ids = Ids(Random(seed))
        self._tail_bytes = tail_bytes
        self._shared = self._share()

    def _share(self) -> Shared:
        return Shared(
            storage=self.storage,
            clock=self.clock,
            ids=self._ids,
            tails=TailCache(self._tail_bytes),
            pool=SegmentPool(self.storage, 2),
        )

    def create(self) -> PartitionLog:
        stream = StreamId(self._ids.uuid())
        log = PartitionLog.create(self._shared, f"streams/{stream}/0", stream, 0, self.config)
        for folder in ("", "streams", f"streams/{stream}"):
            self.storage.sync_dir(folder)
        return log

    def lose_power(self, *logs: PartitionLog) -> list[PartitionLog]:
        """Whatever was not synced is gone; the logs as the next start finds them."""
        self.storage = self.storage.after_power_loss(lambda change: False)
        self._shared = self._share()
        return [
            PartitionLog.open(self._shared, log.folder, log.stream_id, log.partition, self.config, clean=False)
            for log in logs
        ]


def commit(log: PartitionLog) -> None:
    log.seal()
    job = log.begin_sync()
    if job is not None:
        log.run_sync(job)
        log.finish_sync(job)
