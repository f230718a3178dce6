"""The real world as an Env: this machine's clock, disk, threads and randomness. Driver: trio, time, secrets.

The only file besides storage/disk.py that touches them. Neighbours: env.py says what each must do.
"""

import secrets
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from threading import Lock, Thread
from typing import Any, TypeVar
from uuid import UUID, uuid4

import outcome
import trio

from headrace.core_log.env import Env
from headrace.core_log.storage.disk import DiskStorage

T = TypeVar("T")
_Job = tuple[Callable[[], Any], trio.lowlevel.Task, trio.lowlevel.TrioToken]


class SystemClock:
    wall_look_s = 60.0

    def monotonic(self) -> float:
        return time.monotonic()

    def wall_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def sleep_until(self, monotonic_s: float) -> None:
        await trio.sleep(max(0.0, monotonic_s - time.monotonic()))


class SystemIds:
    def uuid(self) -> UUID:
        return uuid4()

    def nonce(self) -> str:
        return secrets.token_urlsafe(18)

    def salt(self) -> int:
        return secrets.randbelow(2**64 - 1) + 1


class _Seat:
    """Where a thread waits for its next job."""

    __slots__ = ("called", "job")

    def __init__(self) -> None:
        self.job: _Job
        # Released while a job lies here.
        self.called = Lock()
        self.called.acquire()

    def give(self, job: _Job) -> None:
        self.job = job
        self.called.release()


class ThreadWorker:
    """Runs blocking calls in at most `threads_max` threads. A call that has begun is waited for, cancelled or not.

    Threads of its own rather than trio.to_thread: a group commit is one hop there and back, and at a low rate the hop
    is most of its cost (A5-1k: 20 % less CPU per message, bench/amqp_throughput.py). A job wakes one thread, the one
    that worked last, and no other: those that wait at one queue would be woken one after the other for each job, and
    take the interpreter's lock from the loop to find nothing there.
    """

    def __init__(self, threads_max: int = 8) -> None:
        self._threads_max = threads_max
        self._thread_count = 0
        # Held for both of these, which the loop and the threads share.
        self._lock = Lock()
        self._idle: list[_Seat] = []
        self._waiting: deque[_Job] = deque()

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        self._hand_over((call, trio.lowlevel.current_task(), trio.lowlevel.current_trio_token()))
        result: T = await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: trio.lowlevel.Abort.FAILED)
        return result

    def _hand_over(self, job: _Job) -> None:
        with self._lock:
            if self._idle:
                self._idle.pop().give(job)
            elif self._thread_count < self._threads_max:
                self._thread_count += 1
                seat = _Seat()
                seat.give(job)
                name = f"headrace-worker-{self._thread_count}"
                Thread(target=self._work, args=(seat,), name=name, daemon=True).start()
            else:
                self._waiting.append(job)

    def _work(self, seat: _Seat) -> None:
        while True:
            seat.called.acquire()
            call, task, token = seat.job
            del seat.job
            result = outcome.capture(call)
            with self._lock:
                if self._waiting:
                    seat.give(self._waiting.popleft())
                else:
                    self._idle.append(seat)
            # A run that has ended waits for nobody.
            with suppress(trio.RunFinishedError):
                token.run_sync_soon(trio.lowlevel.reschedule, task, result)
            del call, task, token, result


def real_env(data: Path, *, handles_max: int = 512) -> Env:
    """The broker's own Env on the data directory `data`."""
    return Env(
        clock=SystemClock(),
        storage=DiskStorage(data, handles_max=handles_max),
        worker=ThreadWorker(),
        ids=SystemIds(),
        random=Random(secrets.randbits(128)),
    )
