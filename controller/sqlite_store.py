"""The metadata of one node in one file. Driver, synchronous, no trio.

WAL with synchronous=FULL, so a commit that returned has been synced. Any error of the disk is final: after a failed
sync nothing that the file says can be believed until it is opened anew (D6). Only a full disk is not an error of that
kind: the transaction has not happened, and the next may.
"""

import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from sqlalchemy import Connection, create_engine, delete, event, select, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import StaticPool

from headrace.controller.changes import Change, PutQueue, ReserveViews
from headrace.controller.entities import Version
from headrace.controller.errors import MetadataRegressed, Unreachable
from headrace.controller.models import ClusterRow, MetadataLogRow
from headrace.controller.sql_store import SqlStore
from headrace.controller.store import FEED_VERSIONS_MAX, Committed, Generation, Lost, Unknown
from headrace.core_log.errors import DiskFull, Poisoned, StorageError, UnknownFormat
from headrace.core_log.ids import ViewId
from headrace.core_log.replication.assignment import Ballot

# The directory is locked by the node, so nobody should be waiting for nobody; a look by hand may hold it for a moment.
BUSY_TIMEOUT_S = 5.0


class SqliteStore(SqlStore):
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
        super().__init__(str(path), feed_versions_max)
        self._path = path
        self._failed: BaseException | None = None
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
            self._create(connection, new_uuid)
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

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        outcome = super().commit(seen, changes, txn, ballot)
        if isinstance(outcome, Committed):
            for change in changes:
                match change:
                    case PutQueue(queue):
                        self._next_view = ViewId(max(self._next_view, queue.view + 1))
                    case ReserveViews(first, count):
                        self._next_view = ViewId(max(self._next_view, first + count))
            self._write_mark(outcome.version)
        return outcome

    def _write_mark(self, version: Version) -> None:
        try:
            self._mark.write(version, self._next_view)
        except OSError as error:
            self._failed = error
            raise StorageError(f"{self._path}: cannot write the version mark: {error}") from error

    def _generation(self, connection: Connection) -> Generation:
        return Generation(str(connection.execute(select(ClusterRow.cluster_uuid)).scalar_one()), 0)

    def _unreachable(self, error: BaseException) -> Unreachable:
        return Unreachable(f"{self._path}: the metadata store did not answer: {error}")

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
