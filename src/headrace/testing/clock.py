"""The time of an embedded broker: this machine's, plus what the test has added. Driver (trio).

    advance(days=3):   now ---- due ------------ due ---------------- now + 3 days
                        settle   settle           settle               settle

Advancing goes from one moment at which something is due to the next, and at each lets the broker finish what it has to
do: so one thing that follows from another (a dead letter that expires in turn) happens at its own time, as if the days
had passed. What somebody waits for is due (`sleep_until`), and what is parked; what only comes round again (`sleep`: a
sweep, a pause) is not a reason to stop there. Short pauses do not hold anybody up meanwhile: they end at once.

Real time goes on besides, since sockets and disks have no other; a *frozen* clock shows none of it, so that exactly as
much time passes as the test says. Pauses then still end by real time, and whoever slept looks at the clock again; that
is the rule for everybody who sleeps.
"""

import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

import trio
import trio.testing

# A pause of the broker no longer than this is cut short while everybody waits for it to finish.
SHORT_S = 0.25
# So often must nobody have done anything new.
QUIET_ROUNDS = 2
# The grain of what is parked.
TICK_S = 0.001
# Added to a moment at which something is due: more than a float of seconds loses.
GRAIN_S = 2e-6


class _Pause(NamedTuple):
    end_s: float
    seconds: float
    task: trio.lowlevel.Task


class VirtualClock:
    """A Clock (core_log/env.py) for the broker, and `advance` and `now` for the test, from any thread."""

    # Its wall clock is never set alone.
    wall_look_s = float("inf")

    def __init__(self, *, frozen: bool = False) -> None:
        self.frozen = frozen
        self._added_s = 0.0
        self._started_s = time.monotonic()
        self._started_us = time.time_ns() // 1000
        # Who waits for a moment, and who pauses until one: in this clock's seconds.
        self._due: dict[trio.CancelScope, float] = {}
        self._pauses: dict[trio.CancelScope, _Pause] = {}
        # Runs something on the broker's loop; None while it is down.
        self.call: Callable[[Callable[[], Awaitable[None]]], None] | None = None
        # Waits until no thread works for the broker; how many calls they were given so far.
        self.threads_idle: Callable[[], Awaitable[int]] | None = None
        # When the next of what is parked is due, by the wall clock.
        self.parked_due_us: Callable[[], Awaitable[int | None]] | None = None

    # -- for the test -------------------------------------------------------------------------------------------

    def now(self) -> datetime:
        """What time it is for the broker, in UTC."""
        return datetime.fromtimestamp(self.wall_us() / 1e6, UTC)

    def advance(
        self,
        seconds: float = 0,
        *,
        minutes: float = 0,
        hours: float = 0,
        days: float = 0,
        weeks: float = 0,
        silent: bool = False,
    ) -> None:
        """So much time passes. Returns when everything that is due by then has been done.

        Connected clients count as heard of, however much time passes; `silent`: they have sent nothing all the while,
        so that keep alives and heartbeats run out. With the broker down, the time passes without it.
        """
        span = timedelta(seconds=seconds, minutes=minutes, hours=hours, days=days, weeks=weeks).total_seconds()
        if span < 0:
            raise ValueError(f"time does not go back, as {span} seconds would")
        if self.call is None:
            self._added_s += span
        else:
            self.call(lambda: self._advance(span, silent))

    # -- for the broker -----------------------------------------------------------------------------------------

    def monotonic(self) -> float:
        return (self._started_s if self.frozen else time.monotonic()) + self._added_s

    def wall_us(self) -> int:
        return self._started_us + round((self.monotonic() - self._started_s) * 1e6)

    async def sleep(self, seconds: float) -> None:
        with trio.CancelScope(deadline=trio.current_time() + seconds) as scope:
            self._pauses[scope] = _Pause(self.monotonic() + seconds, seconds, trio.lowlevel.current_task())
            try:
                await trio.sleep_forever()
            finally:
                del self._pauses[scope]

    async def sleep_until(self, monotonic_s: float) -> None:
        wait_s = monotonic_s - self.monotonic()
        deadline = float("inf") if self.frozen and wait_s > 0 else trio.current_time() + wait_s
        with trio.CancelScope(deadline=deadline) as scope:
            self._due[scope] = monotonic_s
            try:
                await trio.sleep_forever()
            finally:
                del self._due[scope]

    # -- advancing ----------------------------------------------------------------------------------------------

    async def _advance(self, span: float, silent: bool) -> None:
        end_s = self.monotonic() + span
        await self._settle()
        while (due_s := await self._next(silent)) < end_s:
            self._jump(max(0.0, due_s - self.monotonic()) + GRAIN_S)
            await self._settle()
        self._jump(max(0.0, end_s - self.monotonic()))
        await self._settle()

    async def _next(self, silent: bool) -> float:
        moments = [*self._due.values()]
        if silent:
            moments += [one.end_s for one in self._pauses.values()]
        parked_us = None if self.parked_due_us is None else await self.parked_due_us()
        if parked_us is not None:
            # What is due within a tick is due at its end. One that has passed waits for something else than time.
            wait_s = (parked_us - self.wall_us()) / 1e6 + TICK_S
            moments += [self.monotonic() + wait_s] if wait_s > 0 else []
        return min(moments, default=float("inf"))

    def _jump(self, seconds: float) -> None:
        self._added_s += seconds
        now_s, real_s = self.monotonic(), trio.current_time()
        for scope, end_s in self._due.items():
            if end_s <= now_s:
                scope.deadline = real_s
            elif not self.frozen:
                scope.deadline = real_s + end_s - now_s
        for scope, pause in self._pauses.items():
            scope.deadline = min(scope.deadline, real_s + max(0.0, pause.end_s - now_s))

    async def _settle(self) -> None:
        """Until the broker has nothing left to do but wait for clients and for time to pass.

        Some only look round, pause and look round again: it is done when nobody did anything else for a while.
        """
        quiet_count, before = 0, None
        while quiet_count < QUIET_ROUNDS:
            await trio.testing.wait_all_tasks_blocked()
            calls = 0 if self.threads_idle is None else await self.threads_idle()
            short = {scope: one for scope, one in self._pauses.items() if one.seconds <= SHORT_S}
            now = calls, {one.task for one in short.values()}
            quiet_count, before = quiet_count + 1 if now == before else 0, now
            if not short:
                return
            for scope in short:
                scope.deadline = trio.current_time()
