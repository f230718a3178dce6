"""Where the metadata is kept. Driver, synchronous, no trio: service.py calls it in a worker thread, one call at a time.

`MetaStore` is all that a controller may do to a store. A commit names the version it was decided on; if the store has
another one by now, nothing is changed and the answer is Lost. Each transaction moves the version by one and leaves its
uuid behind, so that after a lost answer `resolve` can tell whether it counted.

SqliteStore: one file, for one node. WAL with synchronous=FULL, so a commit that returned has been synced. Any error of
the disk is final: after a failed sync nothing that the file says can be believed until it is opened anew (D6). Only a
full disk is not an error of that kind: the transaction has not happened, and the next may.
MemoryStore: the same contract without a disk, with faults to order.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Protocol
from uuid import UUID

from sqlalchemy import Connection, create_engine, delete, event, insert, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from headrace.controller import migrations, rows
from headrace.controller.changes import Change, PutQueue, decode_changes, encode_changes, replaces_secret
from headrace.controller.entities import Version
from headrace.controller.errors import MetadataRegressed
from headrace.controller.models import FORMAT, ClusterRow, MetadataLogRow
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.core_log.errors import DiskFull, Poisoned, StorageError, UnknownFormat
from headrace.core_log.ids import ViewId

# A reader of the feed that is further behind takes a whole snapshot instead.
FEED_VERSIONS_MAX = 10_000
# The directory is locked by the node, so nobody should be waiting for nobody; a look by hand may hold it for a moment.
BUSY_TIMEOUT_S = 5.0


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


class MetaStore(Protocol):
    def snapshot(self) -> Snapshot:
        """Everything, as of one version."""

    def commit(self, seen: Version, changes: Sequence[Change], txn: UUID) -> Committed | Lost | Unknown:
        """All of `changes` as version `seen` + 1, or nothing. They have been applied to the snapshot of `seen`."""

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        """What became of the commit of `txn` on `seen`."""

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        """The versions above `after`, each with its changes; None if some of them have been trimmed."""

    def close(self) -> None: ...


class SqliteStore:
    """`path` and, beside it, `<stem>.version`: the last version (and next view id) this node has acted on. The latter
    is a hint against the former being replaced by an older copy, so it is written without a sync."""

    def __init__(
        self,
        path: Path,
        *,
        new_uuid: Callable[[], UUID],
        recover: bool = False,
        feed_versions_max: int = FEED_VERSIONS_MAX,
    ) -> None:
        """Open, or create; migrate. UnknownFormat for what a newer release wrote, MetadataRegressed for an older copy
        of the file unless `recover` says to go on with it."""
        self._path = path
        self._failed: BaseException | None = None
        self._feed_versions_max = feed_versions_max
        _create_private(path)
        self._engine = create_engine(
            "sqlite://",
            creator=self._connect,
            poolclass=StaticPool,
            # Parameters hold password hashes; they stay out of every error message and log.
            hide_parameters=True,
        )
        event.listen(self._engine, "begin", lambda connection: connection.exec_driver_sql("BEGIN IMMEDIATE"))
        try:
            self._migrate(new_uuid)
            self._mark = _VersionMark(path.with_suffix(".version"))
            try:
                self._check_regression(new_uuid, recover)
            except BaseException:
                self._mark.close()
                raise
        except BaseException:
            self._engine.dispose()
            raise

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self._path,
            timeout=BUSY_TIMEOUT_S,
            isolation_level=None,
            # One call at a time, but not always from the same thread.
            check_same_thread=False,
        )
        try:
            (mode,) = connection.execute("PRAGMA journal_mode=WAL").fetchone()
            if mode != "wal":
                raise StorageError(f"{self._path}: this file system does not allow SQLite's write-ahead log")
            connection.execute("PRAGMA synchronous=FULL")
            # Deleted password hashes are overwritten, not only unlinked.
            connection.execute("PRAGMA secure_delete=ON")
            # A migration changes a table by copying and dropping it, which foreign keys would forbid; they are checked
            # before it counts, and held from then on.
            connection.execute("PRAGMA foreign_keys=OFF")
        except BaseException:
            connection.close()
            raise
        self._sqlite = connection
        return connection

    def _migrate(self, new_uuid: Callable[[], UUID]) -> None:
        with self._transaction() as connection:
            migrations.upgrade(connection)
            found = connection.execute(select(ClusterRow.format)).scalar_one_or_none()
            if found is None:
                connection.execute(
                    insert(ClusterRow).values(
                        id=1,
                        cluster_uuid=str(new_uuid()),
                        metadata_version=0,
                        last_txn=str(new_uuid()),
                        format=FORMAT,
                        next_view_id=1,
                    )
                )
            elif found > FORMAT:
                raise UnknownFormat(
                    f"{self._path} has metadata format {found}, and this release knows formats up to {FORMAT}: "
                    "it was written by a newer release. Nothing was touched"
                )
            broken = connection.exec_driver_sql("PRAGMA foreign_key_check").all()
            if broken:
                raise StorageError(f"{self._path}: {len(broken)} rows point at what is not there; nothing was changed")
        self._sqlite.execute("PRAGMA foreign_keys=ON")

    def _check_regression(self, new_uuid: Callable[[], UUID], recover: bool) -> None:
        with self._transaction() as connection:
            found, next_view = connection.execute(select(ClusterRow.metadata_version, ClusterRow.next_view_id)).one()
            if self._mark.version > found:
                if not recover:
                    raise MetadataRegressed(str(self._path), found, self._mark.version)
                # Above everything that was ever acted on: no version and no view id is given out twice.
                found = self._mark.version + 1
                next_view = max(next_view, self._mark.next_view)
                connection.execute(
                    update(ClusterRow).values(metadata_version=found, next_view_id=next_view, last_txn=str(new_uuid()))
                )
                connection.execute(delete(MetadataLogRow))
        self._next_view = ViewId(next_view)
        self._write_mark(Version(found))

    def snapshot(self) -> Snapshot:
        with self._transaction() as connection:
            return rows.read(connection)

    def commit(self, seen: Version, changes: Sequence[Change], txn: UUID) -> Committed | Lost | Unknown:
        version = Version(seen + 1)
        with self._transaction() as connection:
            moved = connection.execute(
                update(ClusterRow)
                .where(ClusterRow.id == 1, ClusterRow.metadata_version == seen)
                .values(metadata_version=version, last_txn=str(txn))
            )
            if moved.rowcount != 1:
                return Lost()
            rows.write(connection, version, changes)
            connection.execute(insert(MetadataLogRow).values(version=version, change=encode_changes(changes)))
            kept = version if replaces_secret(changes) else version - self._feed_versions_max + 1
            connection.execute(delete(MetadataLogRow).where(MetadataLogRow.version < kept))
        for change in changes:
            if isinstance(change, PutQueue):
                self._next_view = ViewId(max(self._next_view, change.queue.view + 1))
        self._write_mark(version)
        return Committed(version)

    def _write_mark(self, version: Version) -> None:
        try:
            self._mark.write(version, self._next_view)
        except OSError as error:
            self._failed = error
            raise StorageError(f"{self._path}: cannot write the version mark: {error}") from error

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        with self._transaction() as connection:
            version, last = connection.execute(select(ClusterRow.metadata_version, ClusterRow.last_txn)).one()
        return _resolved(seen, txn, Version(version), UUID(last))

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        with self._transaction() as connection:
            version = connection.execute(select(ClusterRow.metadata_version)).scalar_one()
            found = connection.execute(
                select(MetadataLogRow.version, MetadataLogRow.change)
                .where(MetadataLogRow.version > after)
                .order_by(MetadataLogRow.version)
            ).all()
        if len(found) != version - after:
            return None
        return [(Version(number), decode_changes(text)) for number, text in found]

    def close(self) -> None:
        self._mark.close()
        self._engine.dispose()

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        if self._failed is not None:
            raise Poisoned(f"{self._path}: an earlier failure ended this store") from self._failed
        with self._guard(), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """The database's errors as ours. A constraint that failed is our own mistake and stays what it is."""
        try:
            yield
        except DBAPIError as error:
            code = getattr(error.orig, "sqlite_errorcode", None)
            if code == sqlite3.SQLITE_FULL:
                raise DiskFull(f"{self._path}: no space left for the metadata; nothing was changed") from error
            if isinstance(error.orig, sqlite3.IntegrityError | sqlite3.ProgrammingError | sqlite3.InterfaceError):
                raise
            self._failed = error
            raise StorageError(f"{self._path}: the metadata store failed: {error.orig}") from error


class _VersionMark:
    """Twenty digits of version, twenty of next view id; one small write each time."""

    def __init__(self, path: Path) -> None:
        _create_private(path)
        self._file = os.open(path, os.O_RDWR)
        # Zeros are what a loss of power may leave of a file that was never synced.
        text = os.pread(self._file, 64, 0).strip(b"\0").decode("ascii", "replace").split()
        if text and not (len(text) == 2 and all(word.isdigit() for word in text)):
            os.close(self._file)
            raise UnknownFormat(f"{path} is not a metadata version mark")
        self.version, self.next_view = (int(word) for word in text) if text else (0, 1)

    def write(self, version: Version, next_view: ViewId) -> None:
        os.pwrite(self._file, b"%020d %020d\n" % (version, next_view), 0)

    def close(self) -> None:
        os.close(self._file)


def _create_private(path: Path) -> None:
    """There, and readable by its owner only. SQLite gives its side files the same mode."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if os.fstat(descriptor).st_mode & 0o077:
            os.fchmod(descriptor, 0o600)
    finally:
        os.close(descriptor)


class Fault(Enum):
    """What the next commit of a MemoryStore does instead of its work."""

    UNKNOWN_AND_COMMITTED = "it counts, but the answer is lost"
    UNKNOWN_AND_NOT = "it does not count, and the answer is lost"
    FULL = "no space; nothing is changed"
    BROKEN = "the disk fails; the store is unusable from now on"


class MemoryStore:
    """A store for tests and simulations. A restart is another user of the same object."""

    def __init__(self, cluster: UUID, *, feed_versions_max: int = FEED_VERSIONS_MAX) -> None:
        self._snapshot = load(cluster, Version(0), ViewId(1))
        self._last_txn = UUID(int=0)
        self._feed: dict[Version, tuple[Change, ...]] = {}
        self._feed_versions_max = feed_versions_max
        self._broken = False
        self.next_fault: Fault | None = None

    def snapshot(self) -> Snapshot:
        self._check()
        return self._snapshot

    def commit(self, seen: Version, changes: Sequence[Change], txn: UUID) -> Committed | Lost | Unknown:
        self._check()
        fault, self.next_fault = self.next_fault, None
        match fault:
            case Fault.FULL:
                raise DiskFull("no space left for the metadata; nothing was changed")
            case Fault.BROKEN:
                self._broken = True
                raise StorageError("the metadata store failed: ordered fault")
            case Fault.UNKNOWN_AND_NOT:
                return Unknown()
        if self._snapshot.version != seen:
            return Lost()
        self._snapshot = apply(self._snapshot, changes)
        self._last_txn = txn
        version = self._snapshot.version
        self._feed[version] = tuple(changes)
        kept = version if replaces_secret(changes) else version - self._feed_versions_max + 1
        self._feed = {number: found for number, found in self._feed.items() if number >= kept}
        return Unknown() if fault is Fault.UNKNOWN_AND_COMMITTED else Committed(version)

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        self._check()
        return _resolved(seen, txn, self._snapshot.version, self._last_txn)

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        self._check()
        found = [(version, changes) for version, changes in self._feed.items() if version > after]
        return found if len(found) == self._snapshot.version - after else None

    def close(self) -> None:
        pass

    def _check(self) -> None:
        if self._broken:
            raise Poisoned("an earlier failure ended this store")


def _resolved(seen: Version, txn: UUID, version: Version, last: UUID) -> Committed | NotCommitted | Lost:
    if last == txn:
        return Committed(version)
    return NotCommitted() if version == seen else Lost()
