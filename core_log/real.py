"""The real world as an Env: this machine's clock, disk, threads and randomness. Driver: trio, time, secrets.

The only file besides storage/disk.py that touches them. Neighbours: env.py says what each must do.
"""

import secrets
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeVar
from uuid import UUID, uuid4

import trio

from headrace.core_log.env import Env
from headrace.core_log.storage.disk import DiskStorage

T = TypeVar("T")


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


class SystemIds:
    def uuid(self) -> UUID:
        return uuid4()

    def salt(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1


class ThreadWorker:
    """Runs blocking calls in at most `threads_max` threads. A call that has begun is waited for, cancelled or not."""

    def __init__(self, threads_max: int = 8) -> None:
        self._limiter = trio.CapacityLimiter(threads_max)

    async def run(self, call: Callable[[], T]) -> T:
        return await trio.to_thread.run_sync(call, limiter=self._limiter)


def real_env(data: Path, *, handles_max: int = 512) -> Env:
    """The broker's own Env on the data directory `data`."""
    return Env(
        clock=SystemClock(),
        storage=DiskStorage(data, handles_max=handles_max),
        worker=ThreadWorker(),
        ids=SystemIds(),
        random=Random(secrets.randbits(128)),
    )
