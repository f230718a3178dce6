"""Queues whose consumer must be alone: held back while another node might still give records to one. Driver.

In a cluster two nodes may both believe to lead for a moment. Neither can commit for the other, but a single active
consumer, or an exclusive one, relies on nobody else being given anything. So what `may_dispatch` says is asked before
each turn of such a queue (core_log/replication/promises.py), and those that were held back get theirs as soon as it
says yes. All other queues go on meanwhile.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import trio

from headrace.core_log.env import Clock

if TYPE_CHECKING:
    from headrace.gateways.delivery.queue import Queue

LOOK_S = 0.05


class Alone:
    def __init__(self, wake: "Callable[[Queue], None]", on_ready: Callable[[], None], clock: Clock) -> None:
        """`wake` marks a queue for the next dispatch, `on_ready` asks for one."""
        # A node by itself has no rival.
        self.may_dispatch: Callable[[], bool] = lambda: True
        self._wake = wake
        self._on_ready = on_ready
        self._clock = clock
        self._held: dict[Queue, None] = {}
        self._came = trio.Event()

    def holds(self, queue: "Queue") -> bool:
        """It gets nothing now, and a turn when it may."""
        if not queue.wants_to_be_alone or self.may_dispatch():
            return False
        self._held[queue] = None
        self._came.set()
        return True

    async def run(self) -> None:
        while True:
            await self._came.wait()
            while not self.may_dispatch():
                await self._clock.sleep(LOOK_S)
            self._came = trio.Event()
            queues, self._held = self._held, {}
            for queue in queues:
                if not queue.deleted:
                    self._wake(queue)
            self._on_ready()
