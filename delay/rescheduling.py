"""Records that were given another due time, on their way back to the intake. Driver.

A rescheduled record is decided first, and then appended to the intake again with the outbox's next number, so it is
there exactly once whatever happens in between; it keeps its id. In between it is pending and stands nowhere: whoever
looks for its id waits. Neighbours: delays.py decides, core_log/outbox.py has the numbers.
"""

from collections import deque

import trio

from headrace.core_log.errors import DiskFull
from headrace.delay.bodies import Bodies
from headrace.delay.engine import Engine
from headrace.delay.ledger import Move

FULL_DISK_PAUSE_S = 1.0


class Rescheduling:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # In the order of their numbers; those that an earlier life left come first.
        self._queue: deque[Move] = deque()
        self._wake = trio.Event()
        # Ids of what stands nowhere, by the number of the move.
        self._ids: dict[int, bytes] = {}
        # Set, and made anew, when something has arrived.
        self.arrived = trio.Event()

    def is_on_the_way(self, id: bytes) -> bool:
        return id in self._ids.values()

    def send(self, move: Move, id: bytes) -> None:
        """It is decided; durable or not yet."""
        self._ids[move.number] = id
        self._queue.append(move)
        self._wake.set()

    async def arrival(self, id: bytes) -> None:
        """Wait until nothing under this id is on its way."""
        while self.is_on_the_way(id):
            await self.arrived.wait()

    async def resume(self) -> None:
        """What an earlier life decided and did not know to have arrived."""
        for move in self._engine.ledger.moves.values():
            if move.due_us is not None:
                bodies = await self._engine.bodies(move.places)
                self.send(move, bodies.id(0))

    async def run(self) -> None:
        engine = self._engine
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._queue:
                move = self._queue[0]
                bodies = await engine.bodies(move.places)
                # What was never written down is never appended.
                await engine.decided()
                try:
                    self._append(move, bodies)
                except DiskFull:
                    await engine.env.clock.sleep(FULL_DISK_PAUSE_S)
                else:
                    self._queue.popleft()

    def _append(self, move: Move, bodies: Bodies) -> None:
        engine, ledger = self._engine, self._engine.ledger
        producer = ledger.producer(move)
        assert producer is not None and move.due_us is not None
        headers = bodies.headers[0]
        appended = engine.intake.append_dense(
            producer,
            bodies.keys,
            bodies.properties,
            bodies.values,
            settled=ledger.settled_below(move),
            timestamp_us=int(bodies.timestamps[0]),
            expiry_us=move.due_us,
            attributes=int(bodies.attributes[0]),
            origin=int(bodies.numbers[0]) + 1,
            tags=bodies.tag_sets[int(bodies.tags[0])],
            headers=[headers] if headers else None,
        )
        engine.committer.urgent(engine.intake)
        engine.intake.when_committed(int(appended.next_offset), lambda: self._note_arrival(move))

    def _note_arrival(self, move: Move) -> None:
        del self._ids[move.number]
        # The copy counts from now on; this commit is about to be taken note of.
        self._engine.settled.append(move.number)
        self._engine.settle()
        self.arrived.set()
        self.arrived = trio.Event()
