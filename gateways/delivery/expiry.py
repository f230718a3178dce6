"""When records and queues of a node expire without anybody looking at them. Driver over the node's timers.

*Heads.* A queue has at most one timer, for the head that expires first. It is set when the queue was dispatched and no
earlier one is set; a timer whose head has gone meanwhile looks at the new head and waits on. So a queue costs a timer,
never a message, and a queue without consumers lets go of its head on time. Expiry is wall time and the timers are not:
a wait is cut into pieces, so that a clock that was set forward is noticed.

*Leases.* A queue with `x-expires` is deleted once nobody has consumed from it, declared it or got from it for so long.
Whoever uses it only notes the time (`touch`); the timer looks at it when it fires. After a restart a lease begins anew,
as in RabbitMQ. A deletion that the metadata refuses for now is tried again.

Neighbours: queue.py says what has expired, timers.py when to look, broker.py calls.
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial

import trio

from headrace.core_log.env import Clock
from headrace.core_log.errors import DiskFull, Refused
from headrace.delay.wheel import Timer
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.timers import Call, Timers

_log = logging.getLogger(__name__)

RETRY_S = 5.0

# Deletes the queue if it is still unused; the answer of the second call decides, in the moment of the deletion.
Delete = Callable[[Queue, Callable[[], bool]], Awaitable[object]]


class Expiry:
    def __init__(self, timers: Timers, clock: Clock, ready: Callable[[Queue], None]) -> None:
        """`ready` is called when records have left a queue: others may have got them, and what is behind them may be
        handed out."""
        self._timers = timers
        self._clock = clock
        self._ready = ready
        # By queue: the wall time its timer is for, and the timer.
        self._heads: dict[Queue, tuple[int, Timer[Call]]] = {}
        self._leases: dict[Queue, Timer[Call]] = {}
        self._overdue: dict[Queue, Delete] = {}
        self._wake = trio.Event()

    def forget(self, queue: Queue) -> None:
        """The queue is gone."""
        head = self._heads.pop(queue, None)
        if head is not None:
            self._timers.cancel(head[1])
        self._end_lease(queue)
        self._overdue.pop(queue, None)

    # -- heads --------------------------------------------------------------------------------------------------

    def watch_head(self, queue: Queue) -> None:
        """The head of a queue may have changed."""
        due_us = None if queue.deleted else queue.next_expiry_us()
        if due_us is None:
            return
        known = self._heads.get(queue)
        if known is not None:
            if known[0] <= due_us:
                return
            self._timers.cancel(known[1])
        wait_s = min(max(0.0, (due_us - self._clock.wall_us()) / 1e6), self._clock.wall_look_s)
        self._heads[queue] = (due_us, self._timers.after(wait_s, partial(self._look, queue)))

    def look_soon(self, queue: Queue) -> None:
        """A queue that came back with a restart: its head is looked at when others had their turn."""
        self._heads[queue] = (0, self._timers.after(0, partial(self._look, queue)))

    def _look(self, queue: Queue) -> None:
        del self._heads[queue]
        expired = queue.expired_count
        queue.expire_heads()
        self.watch_head(queue)
        if queue.expired_count != expired:
            self._ready(queue)

    # -- leases -------------------------------------------------------------------------------------------------

    def lease(self, queue: Queue, delete: Delete) -> None:
        """A new queue, or one with another `x-expires`: its lease begins now."""
        self.touch(queue)
        self._end_lease(queue)
        if queue.settings.expires_ms is not None:
            self._wait(queue, delete, queue.settings.expires_ms / 1000)

    def touch(self, queue: Queue) -> None:
        """The queue is in use, or was until now."""
        queue.used_s = self._clock.monotonic()

    def _end_lease(self, queue: Queue) -> None:
        timer = self._leases.pop(queue, None)
        if timer is not None:
            self._timers.cancel(timer)

    def _wait(self, queue: Queue, delete: Delete, seconds: float) -> None:
        self._leases[queue] = self._timers.after(seconds, partial(self._lease_over, queue, delete))

    def _left_s(self, queue: Queue) -> float:
        """How long the lease lasts at least; 0 when it is over."""
        expires_ms = queue.settings.expires_ms
        assert expires_ms is not None
        if not queue.is_unused:
            return expires_ms / 1000
        left = queue.used_s + expires_ms / 1000 - self._clock.monotonic()
        # What is less than the grain of the timers is nothing.
        return left if left > 1e-6 else 0.0

    def _is_over(self, queue: Queue) -> bool:
        return queue.settings.expires_ms is not None and not self._left_s(queue)

    def _lease_over(self, queue: Queue, delete: Delete) -> None:
        del self._leases[queue]
        left_s = self._left_s(queue)
        if left_s:
            self._wait(queue, delete, left_s)
        else:
            self._overdue[queue] = delete
            self._wake.set()

    async def run(self) -> None:
        """Delete queues whose lease is over, until cancelled."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._overdue:
                queue = next(iter(self._overdue))
                await self._delete(queue, self._overdue.pop(queue))

    async def _delete(self, queue: Queue, delete: Delete) -> None:
        try:
            await delete(queue, partial(self._is_over, queue))
        except (Refused, DiskFull) as error:
            _log.warning("a queue that has expired cannot be deleted yet", extra={"queue": queue.name, "why": error})
            if not queue.deleted:
                self._wait(queue, delete, RETRY_S)
            return
        if queue.deleted:
            _log.info("queue expired", extra={"queue": queue.name})
        elif queue.settings.expires_ms is not None:
            self._wait(queue, delete, self._left_s(queue))
