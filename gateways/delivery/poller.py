"""Plain TCP connections that are read without a task switch for each read. Driver: one epoll of our own.

A task that waits for its socket costs some 30 us for each read, before the first byte of it is looked at: trio arms the
descriptor anew, finds the task again and steps into it. That is nothing for a read of 500 messages, and most of the
cost of a read of one, which is what thousands of devices send. So a connection that has nothing to wait for but its
next octets is *watched*: it is registered here once, and its task sleeps. Whenever octets have come, from whomever, all
of them are worked off in one turn: `ready` is called for each connection, a plain call that reads once and must not
raise, and the turn ends for all of them together.

Rules:
- One read for each connection and turn, at most READS_PER_TURN reads in a turn: what is left is found again by the
  next one (the epoll is level-triggered and goes round), behind everybody else on the loop.
- Who has to wait for something else (a login, an alarm, its own reader, whatever needs an await) is not watched
  meanwhile: `hand_over` takes it out and wakes its task, which comes back when it is done. So back-pressure is what it
  always was: nobody reads.
- A pause before the next look gathers about GATHERED reads into one turn and one commit. It is made only while many
  connections send that were silent before: a device that speaks a few times a second does not notice PAUSE_MAX_S, and
  one that waits for answers, or sends without end, is read at once. A wake and a commit cost half a millisecond of
  CPU, however little they are for (docs/decisions/0017-many-reads-in-one-turn.md).

Neighbours: inbox.py reads, turn.py is what ends, the clients of the doors are what is watched. TLS and WebSocket hold
octets of their own, which no descriptor tells of; such connections keep to their tasks.
"""

import select
from collections.abc import Callable

import trio

from headrace.core_log.env import Clock
from headrace.gateways.delivery.turn import Turn

READS_PER_TURN = 256
# A turn of so many reads is followed by another look without waiting for the descriptor: there will be more.
MANY = 8
# Silent for so long before it sent: such a connection waits for no answer that a pause would hold up.
SILENT_S = 0.05
# A pause is long enough for so many reads, at the rate at which they come, but not longer than that.
GATHERED = 160
PAUSE_MAX_S = 0.016
# Pauses are made while at least so many reads of silent connections come in each window.
WINDOW_S = 0.04
SILENT_MIN = 80

Ready = Callable[[], None]


def is_available() -> bool:
    """Not on every system; without it, each connection is read by its task."""
    return hasattr(select, "epoll")


class Poller:
    def __init__(self, turn: Turn, clock: Clock) -> None:
        self._turn = turn
        self._clock = clock
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Ready, trio.lowlevel.Task]] = {}
        # When the reads of this turn were found.
        self.now = clock.monotonic()
        # Reads of this window by connections that were silent before; whoever reads counts them.
        self.silent_count = 0
        self._window_end = self.now
        # 0: none is made.
        self._pause_s = 0.0

    def __len__(self) -> int:
        return len(self._watched)

    async def watch(self, descriptor: int, ready: Ready) -> None:
        """Call `ready` whenever something has come, until it is handed over."""
        self._watched[descriptor] = (ready, trio.lowlevel.current_task())
        self._epoll.register(descriptor, select.EPOLLIN)

        def abort(_raise_cancel: Callable[[], None]) -> trio.lowlevel.Abort:
            self._forget(descriptor)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def hand_over(self, descriptor: int) -> None:
        """Its task goes on from `watch`; nothing is read until it comes back."""
        task = self._forget(descriptor)
        if task is not None:
            trio.lowlevel.reschedule(task)

    def _forget(self, descriptor: int) -> trio.lowlevel.Task | None:
        watched = self._watched.pop(descriptor, None)
        if watched is None:
            return None
        if not self._epoll.closed:
            self._epoll.unregister(descriptor)
        return watched[1]

    async def run(self) -> None:
        """Read whatever comes, until cancelled: whoever is watched then is cancelled too."""
        try:
            while True:
                count = self._work_off()
                if self._pause_s:
                    await self._clock.sleep(self._pause_s)
                elif count >= MANY:
                    await trio.lowlevel.checkpoint()
                else:
                    await trio.lowlevel.wait_readable(self._epoll.fileno())
        finally:
            self._epoll.close()

    def _work_off(self) -> int:
        """One turn; returns how many were read in it."""
        found = self._epoll.poll(0, READS_PER_TURN)
        self.now = self._clock.monotonic()
        if found:
            turn, watched = self._turn, self._watched
            turn.running = True
            for descriptor, _events in found:
                # One that another one's packets have ended is not there any more.
                entry = watched.get(descriptor)
                if entry is not None:
                    entry[0]()
            turn.end()
        if self.now >= self._window_end:
            # A machine that is too busy to look in time has nothing to gather.
            late_s = self.now - self._window_end
            self._pause_s = 0.0
            if self.silent_count >= SILENT_MIN and late_s < WINDOW_S and len(found) < READS_PER_TURN:
                self._pause_s = min(PAUSE_MAX_S, GATHERED / self.silent_count * (WINDOW_S + late_s))
            self._window_end = self.now + WINDOW_S
            self.silent_count = 0
        return len(found)
