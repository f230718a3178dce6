"""Everything on a node that waits for a time, on one wheel and in one task. Driver of delay/wheel.py.

A timer is a plain call, made once, never early, in the task of `run`: it must not block. Time is the monotonic clock's,
so nothing here fires because somebody set the wall clock; whoever waits for a wall time looks again when called.
Setting and cancelling cost a few dict operations and wake the task only if it would have slept too long.
Neighbours: the broker keeps expiry of messages and queues here, the doors heartbeats and other patience with clients.
"""

from collections.abc import Callable
from math import ceil, floor

import trio

from headrace.core_log.env import Clock
from headrace.delay.wheel import Timer, Wheel

Call = Callable[[], None]

# So many calls are made before others on the loop get a turn.
CALLS_PER_TURN = 256
# A second as a float is not exactly 1000 ms: below this, two times are the same.
GRAIN_MS = 1e-3


class Timers:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._wheel: Wheel[Call] = Wheel(now_ms=self._now_ms())
        # What the task sleeps in, and until when; None while it is awake and will look at the wheel anyway.
        self._sleep: trio.CancelScope | None = None
        self._sleeps_until_ms: float = 0

    def __len__(self) -> int:
        return len(self._wheel)

    def after(self, seconds: float, call: Call) -> Timer[Call]:
        """Call it once, as soon as so much time has passed."""
        due_ms = ceil((self._clock.monotonic() + seconds) * 1000 - GRAIN_MS)
        if self._sleep is not None and due_ms < self._sleeps_until_ms:
            self._sleep.cancel()
            self._sleep = None
        return self._wheel.add(due_ms, call)

    def cancel(self, timer: Timer[Call]) -> bool:
        """Whether it was still to come."""
        return self._wheel.cancel(timer)

    def _now_ms(self) -> int:
        return floor(self._clock.monotonic() * 1000 + GRAIN_MS)

    async def run(self) -> None:
        """Make the calls that are due, until cancelled."""
        while True:
            now_ms = self._now_ms()
            for call in self._wheel.advance(now_ms, work_max=CALLS_PER_TURN):
                call()
            due_ms = self._wheel.next_due_ms()
            if due_ms is not None and due_ms <= now_ms:
                await trio.lowlevel.checkpoint()
            else:
                await self._sleep_until(due_ms)

    async def _sleep_until(self, due_ms: int | None) -> None:
        self._sleeps_until_ms = float("inf") if due_ms is None else due_ms
        with trio.CancelScope() as self._sleep:
            if due_ms is None:
                await trio.sleep_forever()
            else:
                await self._clock.sleep_until(due_ms / 1000)
        self._sleep = None
