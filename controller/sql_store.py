"""What the stores in SQL have in common: the statements of the contract. Driver, synchronous, no trio.

Every transaction that changes something begins by moving the one row of `cluster`, which it thereby locks: all changes
are serial whatever the isolation. A database adds how it is opened, how its errors are told apart, and which of its
lives it is.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from uuid import UUID

from sqlalchemy import ColumnElement, Connection, delete, insert, select, update

from headrace.controller import migrations, rows
from headrace.controller.changes import Change, decode_changes, encode_changes, replaces_secret
from headrace.controller.entities import Version
from headrace.controller.models import FORMAT, ClusterRow, MetadataLogRow
from headrace.controller.snapshot import Snapshot
from headrace.controller.store import (
    FEED_VERSIONS_MAX,
    Committed,
    Generation,
    Lease,
    Lost,
    NotCommitted,
    Unknown,
    resolved,
)
from headrace.core_log.errors import UnknownFormat
from headrace.core_log.replication.assignment import Ballot


class AnswerLost(Exception):
    """The connection broke while it was being told that a transaction counts. Never leaves the store."""


class SqlStore:
    """`name` is how errors call it; it holds no secret."""

    def __init__(self, name: str, feed_versions_max: int = FEED_VERSIONS_MAX) -> None:
        self.name = name
        self._feed_versions_max = feed_versions_max

    def _transaction(self) -> AbstractContextManager[Connection]:
        """One that counts when the block ends. AnswerLost when it is not known whether it does."""
        raise NotImplementedError

    def _generation(self, connection: Connection) -> Generation:
        raise NotImplementedError

    def _create(self, connection: Connection, new_uuid: Callable[[], UUID]) -> None:
        """Migrate; a new store gets its row."""
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
                    controller_epoch=0,
                    controller_incarnation=0,
                    controller_node=0,
                    lease_token=0,
                )
            )
        elif found > FORMAT:
            raise UnknownFormat(
                f"{self.name} has metadata format {found}, and this release knows formats up to {FORMAT}: "
                "it was written by a newer release. Nothing was touched"
            )

    def snapshot(self) -> Snapshot:
        with self._transaction() as connection:
            return rows.read(connection)

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        try:
            with self._transaction() as connection:
                if not self._move(connection, seen, changes, txn, _held_by(ballot)):
                    return Lost()
                rows.write(connection, Version(seen + 1), changes)
        except AnswerLost:
            return Unknown()
        return Committed(Version(seen + 1))

    def _move(
        self,
        connection: Connection,
        seen: Version,
        changes: Sequence[Change],
        txn: UUID,
        conditions: Sequence[ColumnElement[bool]],
        **values: int,
    ) -> bool:
        """The compare-and-set that every transaction begins with; the feed gets what it is about."""
        version = Version(seen + 1)
        moved = connection.execute(
            update(ClusterRow)
            .where(ClusterRow.id == 1, ClusterRow.metadata_version == seen, *conditions)
            .values(metadata_version=version, last_txn=str(txn), **values)
        )
        if moved.rowcount != 1:
            return False
        connection.execute(insert(MetadataLogRow).values(version=version, change=encode_changes(changes)))
        kept = version if replaces_secret(changes) else version - self._feed_versions_max + 1
        connection.execute(delete(MetadataLogRow).where(MetadataLogRow.version < kept))
        return True

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        with self._transaction() as connection:
            version, last = connection.execute(select(ClusterRow.metadata_version, ClusterRow.last_txn)).one()
        return resolved(seen, txn, Version(version), UUID(last))

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        with self._transaction() as connection:
            version = connection.execute(select(ClusterRow.metadata_version)).scalar_one()
            found = connection.execute(
                select(MetadataLogRow.version, MetadataLogRow.change)
                .where(MetadataLogRow.version > after, MetadataLogRow.version <= version)
                .order_by(MetadataLogRow.version)
            ).all()
        if len(found) != version - after:
            return None
        return [(Version(number), decode_changes(text)) for number, text in found]

    # -- the lease ----------------------------------------------------------------------------------------------

    def observe(self) -> Lease:
        with self._transaction() as connection:
            return self._lease(connection)

    def _lease(self, connection: Connection) -> Lease:
        epoch, incarnation, node, token, version = connection.execute(
            select(
                ClusterRow.controller_epoch,
                ClusterRow.controller_incarnation,
                ClusterRow.controller_node,
                ClusterRow.lease_token,
                ClusterRow.metadata_version,
            )
        ).one()
        return Lease(Ballot(epoch, incarnation), node, token, Version(version), self._generation(connection))

    def acquire(self, seen: Lease, node: int, incarnation: int, txn: UUID) -> Lease | Lost:
        with self._telling_nothing(), self._transaction() as connection:
            now = self._lease(connection)
            conditions = [
                ClusterRow.controller_epoch == seen.ballot.epoch,
                ClusterRow.controller_incarnation == seen.ballot.incarnation,
                ClusterRow.lease_token == seen.token,
            ]
            taken = self._move(
                connection,
                now.version,
                (),
                txn,
                conditions,
                controller_epoch=seen.ballot.epoch + 1,
                controller_incarnation=incarnation,
                controller_node=node,
                lease_token=seen.token + 1,
            )
            return self._lease(connection) if taken else Lost()

    def renew(self, held: Lease) -> Lease | Lost:
        with self._telling_nothing(), self._transaction() as connection:
            renewed = connection.execute(
                update(ClusterRow)
                .where(ClusterRow.id == 1, ClusterRow.metadata_version == held.version, *_held_by(held.ballot))
                .values(lease_token=ClusterRow.lease_token + 1)
            )
            return self._lease(connection) if renewed.rowcount == 1 else Lost()

    def risk(self) -> str:
        return ""

    @contextmanager
    def _telling_nothing(self) -> Iterator[None]:
        """A lost answer about the lease is as good as none: `observe` tells what became of it."""
        try:
            yield
        except AnswerLost as lost:
            raise self._unreachable(lost) from lost.__cause__

    def _unreachable(self, error: BaseException) -> Exception:
        raise NotImplementedError


def _held_by(ballot: Ballot | None) -> list[ColumnElement[bool]]:
    if ballot is None:
        return []
    return [
        ClusterRow.controller_epoch == ballot.epoch,
        ClusterRow.controller_incarnation == ballot.incarnation,
    ]
