"""Where the metadata is kept, as the controller sees it. Values, the contract, and a memory twin for tests. Machine.

`MetaStore` is all that a controller may do to a store; calls block, and service.py makes them in a worker thread, one
at a time. A commit names the version it was decided on; if the store has another one by now, nothing is changed and the
answer is Lost. Each transaction moves the version by one and leaves its uuid behind, so that after a lost answer
`resolve` can tell whether it counted.

The lease only chooses who tries to be the controller; what counts is decided by comparing (`Ballot`, version): a commit
with a ballot counts only while the store still has that one. One node alone commits without.

Neighbours: sqlite_store.py for one node, postgres_store.py for a cluster, sql_store.py for what the two have in common.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol
from uuid import UUID

from headrace.controller.changes import Change, replaces_secret
from headrace.controller.entities import Version
from headrace.controller.errors import Unreachable
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.core_log.errors import DiskFull, Poisoned, StorageError
from headrace.core_log.ids import ViewId
from headrace.core_log.replication.assignment import NO_BALLOT, Ballot

# A reader of the feed that is further behind takes a whole snapshot instead.
FEED_VERSIONS_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Committed:
    version: Version


@dataclass(frozen=True, slots=True)
class NotCommitted:
    """Certain: nothing of it counts, now or later."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Somebody else has moved the metadata; nothing of this commit counts."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """The answer was lost on its way. Ask `resolve`."""


@dataclass(frozen=True, slots=True)
class Generation:
    """Which database, and which of its lives: one that was promoted in place of another has a higher timeline."""

    database: str
    timeline: int


@dataclass(frozen=True, slots=True)
class Lease:
    """Who was chosen last, and how often that was renewed. Whoever sees no renewal for the lease's time may try."""

    ballot: Ballot
    node: int
    token: int
    version: Version
    generation: Generation


class MetaStore(Protocol):
    """Raises Unreachable when the store cannot be asked: nothing was changed, unless the call says otherwise."""

    def snapshot(self) -> Snapshot:
        """Everything, as of one version."""

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        """All of `changes` as version `seen` + 1, or nothing. They have been applied to the snapshot of `seen`."""

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        """What became of the commit of `txn` on `seen`."""

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        """The versions above `after`, each with its changes; None if some of them have been trimmed."""

    def observe(self) -> Lease:
        """Who holds the lease, as far as the store knows."""

    def acquire(self, seen: Lease, node: int, incarnation: int, txn: UUID) -> Lease | Lost:
        """Take over from whoever was seen there; Lost: somebody renewed it or was faster. After Unreachable it may
        have been taken: `observe` tells."""

    def renew(self, held: Lease) -> Lease | Lost:
        """Say that one is still there; Lost: step down at once. After Unreachable, `observe` tells."""

    def risk(self) -> str:
        """What the store may lose although it was committed; empty: nothing."""

    def close(self) -> None: ...


class Fault(Enum):
    """What the next commit of a MemoryStore does instead of its work."""

    UNKNOWN_AND_COMMITTED = "it counts, but the answer is lost"
    UNKNOWN_AND_NOT = "it does not count, and the answer is lost"
    FULL = "no space; nothing is changed"
    BROKEN = "the disk fails; the store is unusable from now on"
    UNREACHABLE = "it cannot be asked; nothing is changed"


class MemoryStore:
    """A store for tests and simulations. A restart is another user of the same object."""

    def __init__(self, cluster: UUID, *, feed_versions_max: int = FEED_VERSIONS_MAX) -> None:
        self._snapshot = load(cluster, Version(0), ViewId(1))
        self._last_txn = UUID(int=0)
        self._feed: dict[Version, tuple[Change, ...]] = {}
        self._feed_versions_max = feed_versions_max
        self._broken = False
        self._lease = Lease(NO_BALLOT, 0, 0, Version(0), Generation(str(cluster), 0))
        self.next_fault: Fault | None = None

    def snapshot(self) -> Snapshot:
        self._check()
        return self._snapshot

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        self._check()
        fault, self.next_fault = self.next_fault, None
        match fault:
            case Fault.FULL:
                raise DiskFull("no space left for the metadata; nothing was changed")
            case Fault.BROKEN:
                self._broken = True
                raise StorageError("the metadata store failed: ordered fault")
            case Fault.UNREACHABLE:
                raise Unreachable("the metadata store cannot be reached: ordered fault")
            case Fault.UNKNOWN_AND_NOT:
                return Unknown()
        if self._snapshot.version != seen or ballot not in (None, self._lease.ballot):
            return Lost()
        self._move(apply(self._snapshot, changes), changes, txn)
        return Unknown() if fault is Fault.UNKNOWN_AND_COMMITTED else Committed(self._snapshot.version)

    def _move(self, after: Snapshot, changes: Sequence[Change], txn: UUID) -> None:
        self._snapshot = after
        self._last_txn = txn
        self._feed[after.version] = tuple(changes)
        kept = after.version if replaces_secret(changes) else after.version - self._feed_versions_max + 1
        self._feed = {number: found for number, found in self._feed.items() if number >= kept}

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        self._check()
        return resolved(seen, txn, self._snapshot.version, self._last_txn)

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        self._check()
        found = [(version, changes) for version, changes in self._feed.items() if version > after]
        return found if len(found) == self._snapshot.version - after else None

    def observe(self) -> Lease:
        self._check()
        return replace(self._lease, version=self._snapshot.version)

    def acquire(self, seen: Lease, node: int, incarnation: int, txn: UUID) -> Lease | Lost:
        self._check()
        if (seen.ballot, seen.token) != (self._lease.ballot, self._lease.token):
            return Lost()
        ballot = Ballot(seen.ballot.epoch + 1, incarnation)
        self._move(apply(self._snapshot, ()), (), txn)
        self._lease = replace(self._lease, ballot=ballot, node=node, token=seen.token + 1)
        return self.observe()

    def renew(self, held: Lease) -> Lease | Lost:
        self._check()
        now = self.observe()
        if (held.ballot, held.version) != (now.ballot, now.version):
            return Lost()
        self._lease = replace(self._lease, token=now.token + 1)
        return self.observe()

    def risk(self) -> str:
        return ""

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._broken:
            raise Poisoned("an earlier failure ended this store")


def resolved(seen: Version, txn: UUID, version: Version, last: UUID) -> Committed | NotCommitted | Lost:
    if last == txn:
        return Committed(version)
    return NotCommitted() if version == seen else Lost()
