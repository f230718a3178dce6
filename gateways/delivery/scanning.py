"""Queues whose filters have more to look at than one turn has time for: they go on in the next. Driver.

A filter that wants little of a large backlog would keep everybody else waiting. So queues and readers look at so much
in one turn (filters.py, reading.py), and those that have not finished are dispatched again once others had theirs.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from headrace.gateways.delivery.queue import Queue


class Scanning:
    def __init__(self, wake: "Callable[[Queue], None]", on_ready: Callable[[], None]) -> None:
        """`wake` marks a queue for the next dispatch, `on_ready` asks for one."""
        self._wake = wake
        self._on_ready = on_ready
        self._unfinished: dict[Queue, None] = {}
        self._came = trio.Event()

    def add(self, queue: "Queue") -> None:
        self._unfinished[queue] = None
        self._came.set()

    async def run(self) -> None:
        while True:
            await self._came.wait()
            self._came = trio.Event()
            # Whoever has something to do is ahead of it.
            await trio.lowlevel.checkpoint()
            queues, self._unfinished = self._unfinished, {}
            for queue in queues:
                if not queue.deleted:
                    self._wake(queue)
            self._on_ready()
