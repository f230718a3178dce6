"""The database of a simulated cluster: one for all nodes, which may be out of reach, lose answers, or go back in time.
Driver for tests.

Every transaction is kept, so that it can be restored to what it was some transactions ago: a standby that was promoted
and lacked them (with a higher timeline), or a backup (without).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from tests.simulation.cluster.world import World

from headrace.controller.changes import Change
from headrace.controller.entities import Version
from headrace.controller.errors import Unreachable
from headrace.controller.snapshot import Snapshot
from headrace.controller.store import Committed, Lease, Lost, MemoryStore, NotCommitted, Unknown
from headrace.core_log.replication.assignment import Ballot

CLUSTER = UUID(int=0xC1)
_STATE = ("_snapshot", "_last_txn", "_feed", "_lease")
KEPT_MAX = 24


class Database:
    def __init__(self, world: World) -> None:
        self.world = world
        self.random = world.dice("database")
        self.memory = MemoryStore(CLUSTER)
        # For nobody; for single nodes.
        self.is_away = False
        self.cut: set[int] = set()
        # How likely it is that an answer is lost, whether or not it was done.
        self.loses_answers = 0.0
        self.regressions = 0
        self._states: list[tuple[Any, ...]] = [self._state()]

    def _state(self) -> tuple[Any, ...]:
        return tuple(getattr(self.memory, name) for name in _STATE)

    def moved(self) -> None:
        state = self._state()
        if state[0].version != self._states[-1][0].version:
            self._states.append(state)
            del self._states[:-KEPT_MAX]

    def written(self, before: Snapshot, ballot: Ballot | None) -> None:
        """Somebody's changes are in it, made as the controller of this ballot; for who looks on."""
        self.moved()

    def remember(self) -> None:
        """What is known now is not forgotten."""
        self._states = [self._state()]

    def regress(self, count: int, *, promoted: bool) -> None:
        """It has forgotten its last transactions."""
        count = min(count, len(self._states) - 1)
        if count < 1:
            return
        before = self.memory.observe()
        del self._states[-count:]
        for name, value in zip(_STATE, self._states[-1], strict=True):
            setattr(self.memory, name, value)
        generation = before.generation
        if promoted:
            generation = replace(generation, timeline=generation.timeline + 1)
        self.memory._lease = replace(self.memory._lease, generation=generation)
        self._states[-1] = self._state()
        self.regressions += 1
        self.world.note(
            f"database: back from version {before.version} to {self.memory._snapshot.version}, "
            f"timeline {generation.timeline}"
        )

    def regress_until(self, is_so: Callable[[Snapshot], bool], *, promoted: bool) -> None:
        """It has forgotten whatever came after the last time that this was so; nothing, if that is not known."""
        for back, state in enumerate(reversed(self._states)):
            if is_so(state[0]):
                self.regress(back, promoted=promoted)
                return

    def open(self, node: int) -> "Connection":
        connection = Connection(self, node)
        connection.check()
        return connection


class Connection:
    """A MetaStore."""

    def __init__(self, database: Database, node: int) -> None:
        self._database = database
        self._node = node

    def check(self) -> MemoryStore:
        database = self._database
        if database.is_away or self._node in database.cut:
            raise Unreachable("the database is away")
        return database.memory

    def _is_unlucky(self) -> bool:
        database = self._database
        return database.loses_answers > 0 and database.random.random() < database.loses_answers

    def snapshot(self) -> Snapshot:
        return self.check().snapshot()

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        memory = self.check()
        if self._is_unlucky():
            is_done = self._database.random.random() < 0.5
            if is_done:
                self._commit(memory, seen, changes, txn, ballot)
            self._database.world.note(f"database: node {self._node} is not told whether it committed ({is_done})")
            self._database.world.counts["unknown commits"] += 1
            return Unknown()
        return self._commit(memory, seen, changes, txn, ballot)

    def _commit(
        self, memory: MemoryStore, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None
    ) -> Committed | Lost | Unknown:
        before = memory.snapshot()
        found = memory.commit(seen, changes, txn, ballot)
        if isinstance(found, Committed):
            self._database.written(before, ballot)
        return found

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        return self.check().resolve(seen, txn)

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        return self.check().feed(after)

    def observe(self) -> Lease:
        return self.check().observe()

    def acquire(self, seen: Lease, node: int, incarnation: int, txn: UUID) -> Lease | Lost:
        return self._unless_unlucky(lambda memory: memory.acquire(seen, node, incarnation, txn))

    def renew(self, held: Lease) -> Lease | Lost:
        return self._unless_unlucky(lambda memory: memory.renew(held))

    def risk(self) -> str:
        return self.check().risk()

    def _unless_unlucky(self, call: Callable[[MemoryStore], Lease | Lost]) -> Lease | Lost:
        memory = self.check()
        if not self._is_unlucky():
            found = call(memory)
            self._database.moved()
            return found
        if self._database.random.random() < 0.5:
            call(memory)
            self._database.moved()
        raise Unreachable("the answer of the database was lost")

    def close(self) -> None:
        pass
