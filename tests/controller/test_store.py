"""One contract for every metadata store, and what SQLite adds: files, migrations, crashes, full disks."""

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy.exc import IntegrityError
from tests.postgres_server import PostgresServer

from headrace.controller import migrations
from headrace.controller.changes import (
    CHANGES,
    Change,
    DeleteBinding,
    DeleteExchange,
    DeleteNode,
    DeletePermission,
    DeletePolicy,
    DeleteQueue,
    DeleteTopic,
    DeleteTopicPermission,
    DeleteUser,
    DeleteUserLimits,
    DeleteVhost,
    DeleteVhostLimits,
    PutBinding,
    PutExchange,
    PutNode,
    PutPermission,
    PutPolicy,
    PutQueue,
    PutShard,
    PutTopic,
    PutTopicPermission,
    PutUser,
    PutUserLimits,
    PutVhost,
    PutVhostLimits,
    ReserveViews,
    encode_changes,
)
from headrace.controller.entities import (
    ApplyTo,
    Binding,
    DestinationKind,
    Endpoint,
    Exchange,
    Node,
    NodeState,
    Permission,
    Policy,
    Queue,
    Shard,
    Topic,
    TopicPermission,
    User,
    UserLimits,
    Version,
    Vhost,
    VhostLimits,
)
from headrace.controller.errors import MetadataRegressed
from headrace.controller.postgres_store import PostgresStore
from headrace.controller.snapshot import Snapshot, apply
from headrace.controller.sqlite_store import SqliteStore
from headrace.controller.store import (
    Committed,
    Fault,
    Lease,
    Lost,
    MemoryStore,
    MetaStore,
    NotCommitted,
    Unknown,
)
from headrace.controller.table import Table
from headrace.core_log.errors import DiskFull, Poisoned, Refused, StorageError, UnknownFormat
from headrace.core_log.ids import StreamId, ViewId
from headrace.core_log.replication.assignment import NO_BALLOT, NOBODY, Assignment, Ballot, RowVersion

from .strategies import RICH
from .strategies import changes as any_change

VHOST = PutVhost(Vhost("/"))
CANARY = "canary-4c1b"


def queue(name: str, view: int) -> PutQueue:
    return PutQueue(Queue("/", name, ViewId(view), StreamId(UUID(int=view))))


def sqlite_store(path: Path, **options: object) -> SqliteStore:
    return SqliteStore(path, new_uuid=uuid4, **options)  # type: ignore[arg-type]


class Kept:
    """A store that can be closed and opened again."""

    def __init__(self, open_store: Callable[[], MetaStore]) -> None:
        self._open = open_store
        self.store = open_store()

    def reopen(self) -> MetaStore:
        self.store.close()
        self.store = self._open()
        return self.store


@pytest.fixture(params=["sqlite", "postgres", "memory"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    if request.param == "sqlite":
        kept = Kept(lambda: sqlite_store(tmp_path / "meta.sqlite", feed_versions_max=5))
    elif request.param == "postgres":
        url = request.getfixturevalue("postgres").emptied()
        kept = Kept(lambda: PostgresStore(url, new_uuid=uuid4, feed_versions_max=5))
    else:
        memory = MemoryStore(uuid4(), feed_versions_max=5)
        kept = Kept(lambda: memory)
    yield kept
    kept.store.close()


def commit(store: MetaStore, *changes: Change) -> Version:
    committed = store.commit(store.snapshot().version, changes, uuid4())
    assert isinstance(committed, Committed)
    return committed.version


# The contract.


def test_new_store_is_empty_at_version_zero(kept: Kept) -> None:
    snapshot = kept.store.snapshot()
    assert (snapshot.version, snapshot.next_view) == (0, 1)
    assert not snapshot.vhosts and not snapshot.users


def test_x1_many_changes_in_one_commit_are_one_version(kept: Kept) -> None:
    assert commit(kept.store, VHOST, queue("q", 1), queue("p", 2)) == 1
    assert kept.store.snapshot().version == 1


def test_what_was_committed_is_there_after_reopening(kept: Kept) -> None:
    commit(kept.store, VHOST, queue("q", 7))
    before = kept.store.snapshot()
    after = kept.reopen().snapshot()
    assert after == before
    assert after.next_view == 8


def test_next_view_survives_the_queue(kept: Kept) -> None:
    commit(kept.store, VHOST, queue("q", 7))
    commit(kept.store, DeleteQueue("/", "q", ViewId(7)))
    assert kept.reopen().snapshot().next_view == 8


def test_commit_on_a_version_that_has_passed_is_lost_and_changes_nothing(kept: Kept) -> None:
    commit(kept.store, VHOST)
    before = kept.store.snapshot()
    for seen in (0, 2):
        assert kept.store.commit(Version(seen), [queue("q", 1)], uuid4()) == Lost()
    assert kept.store.snapshot() == before


def test_resolve_tells_committed_from_not_committed_from_lost(kept: Kept) -> None:
    mine, other = uuid4(), uuid4()
    assert kept.store.resolve(Version(0), mine) == NotCommitted()
    kept.store.commit(Version(0), [VHOST], mine)
    assert kept.store.resolve(Version(0), mine) == Committed(Version(1))
    assert kept.store.resolve(Version(0), other) == Lost()
    kept.store.commit(Version(1), [queue("q", 1)], other)
    assert kept.store.resolve(Version(0), mine) == Lost()


def test_feed_replays_to_the_same_snapshot(kept: Kept) -> None:
    commit(kept.store, VHOST)
    start = kept.store.snapshot()
    commit(kept.store, queue("q", 1), queue("p", 2))
    commit(kept.store, DeleteQueue("/", "q", ViewId(1)))
    feed = kept.store.feed(start.version)
    assert feed is not None
    assert [version for version, _ in feed] == [2, 3]
    replayed = start
    for _, found in feed:
        replayed = apply(replayed, found)
    assert replayed == kept.store.snapshot()


def test_feed_is_trimmed_to_its_limit_and_says_so(kept: Kept) -> None:
    commit(kept.store, VHOST)
    for view in range(1, 7):
        commit(kept.store, queue(f"q{view}", view))
    assert kept.store.snapshot().version == 7
    assert kept.store.feed(Version(1)) is None
    assert len(kept.store.feed(Version(2)) or []) == 5
    assert kept.store.feed(Version(7)) == []
    assert kept.store.feed(Version(8)) is None


@pytest.mark.parametrize("change", [PutUser(User("ann", "new")), DeleteUser("ann")], ids=repr)
def test_feed_does_not_keep_a_password_hash_that_was_replaced(kept: Kept, change: Change) -> None:
    commit(kept.store, VHOST, PutUser(User("ann", CANARY)))
    commit(kept.store, change)
    assert kept.store.feed(Version(0)) is None
    feed = kept.store.feed(Version(1))
    assert feed is not None
    assert CANARY not in "".join(encode_changes(found) for _, found in feed)


def take(store: MetaStore, node: int, incarnation: int) -> Lease:
    lease = store.acquire(store.observe(), node, incarnation, uuid4())
    assert isinstance(lease, Lease)
    return lease


def test_lease_is_taken_by_one_of_those_who_saw_the_same(kept: Kept) -> None:
    seen = kept.store.observe()
    assert seen.ballot == NO_BALLOT
    lease = kept.store.acquire(seen, 3, 7, uuid4())
    assert isinstance(lease, Lease)
    assert (lease.ballot, lease.node, lease.version) == (Ballot(1, 7), 3, 1)
    assert kept.store.acquire(seen, 4, 8, uuid4()) == Lost()
    assert kept.reopen().observe() == lease


def test_lease_that_was_renewed_cannot_be_taken_by_who_saw_it_before(kept: Kept) -> None:
    lease = take(kept.store, 1, 7)
    renewed = kept.store.renew(lease)
    assert isinstance(renewed, Lease) and renewed.token == lease.token + 1
    assert kept.store.acquire(lease, 2, 8, uuid4()) == Lost()


def test_controller_that_was_followed_by_another_neither_renews_nor_commits(kept: Kept) -> None:
    first = take(kept.store, 1, 7)
    second = take(kept.store, 2, 8)
    assert second.ballot == Ballot(2, 8)
    assert kept.store.renew(first) == Lost()
    assert kept.store.commit(second.version, [VHOST], uuid4(), first.ballot) == Lost()
    assert kept.store.commit(second.version, [VHOST], uuid4(), second.ballot) == Committed(Version(3))


def test_ballot_is_compared_as_a_whole(kept: Kept) -> None:
    lease = take(kept.store, 1, 7)
    other_life = Ballot(lease.ballot.epoch, 6)
    assert kept.store.commit(lease.version, [VHOST], uuid4(), other_life) == Lost()
    assert kept.store.renew(replace(lease, ballot=other_life)) == Lost()


def test_renewal_fails_when_the_metadata_moved_without_the_controller(kept: Kept) -> None:
    lease = take(kept.store, 1, 7)
    commit(kept.store, VHOST)
    assert kept.store.renew(lease) == Lost()


def test_taking_the_lease_is_a_version_of_the_feed(kept: Kept) -> None:
    take(kept.store, 1, 7)
    assert kept.store.feed(Version(0)) == [(Version(1), ())]


def test_replaced_password_hash_is_gone_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, PutUser(User("ann", CANARY)))
    commit(store, PutUser(User("ann", "new")))
    store.close()
    assert CANARY.encode() not in path.read_bytes()


def test_our_own_mistake_is_loud_shows_no_secret_and_changes_nothing(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path / "meta.sqlite")
    unlawful = [PutUser(User("ann", CANARY)), PutPermission(Permission("ann", CANARY, CANARY, "", ""))]
    with pytest.raises(IntegrityError) as mistake:
        store.commit(Version(0), unlawful, uuid4())
    assert CANARY not in str(mistake.value) + repr(mistake.value)
    assert store.snapshot().version == 0
    commit(store, VHOST)
    store.close()


def test_rights_change_stamps_the_user_with_the_version(kept: Kept) -> None:
    commit(kept.store, VHOST, PutUser(User("ann")))
    commit(kept.store, queue("q", 1))
    assert kept.store.snapshot().users["ann"].version == 1
    commit(kept.store, PutPermission(Permission("ann", "/", "", "", "")))
    assert kept.store.snapshot().users["ann"].version == 3


class Walk:
    """Random lawful transactions on a store, with the snapshot they should lead to."""

    def __init__(self, store: MetaStore) -> None:
        self.store = store
        self.expected: Snapshot = store.snapshot()

    def step(self, transaction: Sequence[Change]) -> None:
        lawful: list[Change] = []
        after = self.expected
        for change in transaction:
            try:
                after = apply(after, [change], Version(self.expected.version + 1))
            except Refused:
                continue
            lawful.append(change)
        if not lawful:
            return
        assert self.store.commit(self.expected.version, lawful, uuid4()) == Committed(after.version)
        self.expected = after


EVERY_CHANGE: list[Change] = [
    PutVhost(Vhost("new")),
    DeleteVhost("/"),
    DeleteUser("ann"),
    PutUser(User("ann", "other", ("z",))),
    PutUser(User("new")),
    PutPermission(Permission("ann", "/", "x", "y", "z")),
    DeletePermission("ann", "/"),
    PutTopicPermission(TopicPermission("ann", "/", "e", "x", "y")),
    DeleteTopicPermission("ann", "/", "e"),
    PutExchange(Exchange("/", "new", "fanout", StreamId(UUID(int=7)), True, True, Table({"x": [None, {"y": 1.5}]}))),
    DeleteExchange("/", "e", StreamId(UUID(int=0))),
    PutQueue(Queue("/", "new", ViewId(9), StreamId(UUID(int=9)), "ann", True, Table({"x": b"\xff"}))),
    DeleteQueue("/", "q", ViewId(1)),
    PutBinding(Binding("/", "e", DestinationKind.QUEUE, "p", "ü", Table({"x": True}))),
    DeleteBinding(Binding("/", "e", DestinationKind.QUEUE, "q", "a.b", Table({"x-max-length": 3}))),
    PutTopic(Topic("/", "new", StreamId(UUID(int=8)), 3, Table({"x-retention-ms": 5}))),
    DeleteTopic("/", "t", StreamId(UUID(int=0))),
    PutPolicy(Policy("/", "p1", "^x", Table({"max-length-bytes": 7}), ApplyTo.STREAMS, -4)),
    DeletePolicy("/", "p1"),
    PutVhostLimits(VhostLimits("/", None, 7)),
    DeleteVhostLimits("/"),
    PutUserLimits(UserLimits("ann", 7, None)),
    DeleteUserLimits("ann"),
    ReserveViews(ViewId(4), 1000),
    PutNode(Node(2, 3, UUID(int=2), NodeState.DRAINING, (("amqp", Endpoint("host", 5672)),), False)),
    DeleteNode(2),
    PutShard(Shard(1, Assignment((1,), NOBODY, 0, 0, (), RowVersion(2, Ballot(3, 4)), 1), (1,), 7)),
]


def test_every_kind_of_change_is_among_them() -> None:
    assert {type(change) for change in EVERY_CHANGE} == set(CHANGES)


@pytest.mark.parametrize("change", EVERY_CHANGE, ids=lambda change: type(change).__name__)
def test_one_change_on_rich_metadata_reads_back_as_it_was_applied(change: Change, kept: Kept) -> None:
    walk = Walk(kept.store)
    walk.step([*RICH, PutNode(Node(2, 1, UUID(int=2)))])
    walk.step([change])
    assert walk.expected.version == 2
    assert kept.reopen().snapshot() == walk.expected


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(any_change, min_size=1, max_size=6), max_size=8))
def test_snapshot_after_changes_equals_snapshot_read_back(
    tmp_path: Path, postgres: PostgresServer, transactions: list[list[Change]]
) -> None:
    for store in (
        sqlite_store(tmp_path / f"{uuid4()}.sqlite"),
        PostgresStore(postgres.emptied(), new_uuid=uuid4),
        MemoryStore(uuid4()),
    ):
        try:
            walk = Walk(store)
            for transaction in [RICH, *transactions]:
                walk.step(transaction)
            assert store.snapshot() == walk.expected
        finally:
            store.close()


# SQLite alone.


def test_store_is_synced_by_the_rules(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path / "meta.sqlite")
    raw = store._sqlite
    assert raw.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert raw.execute("PRAGMA synchronous").fetchone() == (2,)
    assert raw.execute("PRAGMA foreign_keys").fetchone() == (1,)
    store.close()


def test_files_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    loose = tmp_path / "meta.sqlite"
    loose.touch(0o644)
    store = sqlite_store(loose)
    commit(store, VHOST)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    store.close()
    assert set(modes) >= {"meta.sqlite", "meta.sqlite-wal", "meta.version"}
    assert set(modes.values()) == {0o600}


def test_two_writers_on_one_file_never_overwrite_each_other(tmp_path: Path) -> None:
    one, two = sqlite_store(tmp_path / "meta.sqlite"), sqlite_store(tmp_path / "meta.sqlite")
    assert one.commit(Version(0), [VHOST], uuid4()) == Committed(Version(1))
    assert two.commit(Version(0), [VHOST], uuid4()) == Lost()
    one.close()
    two.close()


# What each schema added.
ADDED = {
    "0002": ["ALTER TABLE users DROP COLUMN scram"],
    "0003": ["DROP TABLE topics"],
    "0004": [
        f"ALTER TABLE cluster DROP COLUMN {name}"
        for name in ("controller_epoch", "controller_incarnation", "controller_node", "lease_token")
    ],
    "0005": ["DROP TABLE nodes", "DROP TABLE shards", "ALTER TABLE vhosts DROP COLUMN shard"],
}


def downgrade(path: Path, schema: str) -> None:
    """Make the store of an earlier release out of one of this."""
    with sqlite3.connect(path) as raw:
        for statement in (one for added, statements in ADDED.items() if added > schema for one in statements):
            raw.execute(statement)
        raw.execute("UPDATE alembic_version SET version_num = ?", (schema,))
    raw.close()


def test_users_of_the_first_schema_have_no_scram_verifier_yet(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, PutUser(User("ann", "hash", ("t",), scram="verifier")))
    assert store.snapshot().users["ann"].scram == "verifier"
    store.close()
    downgrade(path, "0001")
    again = sqlite_store(path)
    assert again.snapshot().users["ann"] == User("ann", "hash", ("t",), Version(1))
    again.close()


def test_store_from_before_there_were_topics_gets_room_for_them(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST)
    before = store.snapshot()
    store.close()
    downgrade(path, "0002")
    again = sqlite_store(path)
    assert again.snapshot() == before
    topic = Topic("/", "t", StreamId(UUID(int=1)), 4)
    assert again.commit(before.version, [PutTopic(topic)], uuid4()) == Committed(Version(before.version + 1))
    assert again.snapshot().topics["/", "t"] == topic
    again.close()


def test_store_from_before_there_was_a_lease_has_had_no_controller(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST)
    store.close()
    downgrade(path, "0003")
    again = sqlite_store(path)
    assert again.observe().ballot == NO_BALLOT
    again.close()


def test_vhosts_from_before_there_were_shards_are_in_the_first(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST)
    before = store.snapshot()
    store.close()
    downgrade(path, "0004")
    again = sqlite_store(path)
    assert again.snapshot() == before
    assert again.snapshot().vhosts["/"].shard == 0 and not again.snapshot().shards
    again.close()


def test_schema_of_a_newer_release_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST)
    store.close()
    with sqlite3.connect(path) as raw:
        (known,) = raw.execute("SELECT version_num FROM alembic_version").fetchone()
        raw.execute("UPDATE alembic_version SET version_num = '9999'")
        raw.execute("CREATE TABLE news (x)")
    raw.close()
    with pytest.raises(UnknownFormat, match="newer release"):
        sqlite_store(path)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)
        assert raw.execute("SELECT name FROM vhosts").fetchall() == [("/",)]
        raw.execute("UPDATE alembic_version SET version_num = ?", (known,))
    raw.close()
    again = sqlite_store(path)
    assert again.snapshot().version == 1
    again.close()


def test_format_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    sqlite_store(path).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE cluster SET format = 2")
    raw.close()
    with pytest.raises(UnknownFormat, match="format 2"):
        sqlite_store(path)


def test_foreign_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    with sqlite3.connect(path) as raw:
        raw.execute("CREATE TABLE theirs (x)")
    raw.close()
    with pytest.raises(UnknownFormat, match="not a metadata store"):
        sqlite_store(path)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    raw.close()


def test_file_that_is_no_database_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    path.write_bytes(b"something else entirely" * 100)
    with pytest.raises(StorageError):
        sqlite_store(path)
    assert path.read_bytes() == b"something else entirely" * 100


def test_migration_that_fails_half_way_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "meta.sqlite"
    whole = migrations.upgrade

    def broken(connection: object) -> None:
        whole(connection)  # type: ignore[arg-type]
        raise RuntimeError("half way")

    monkeypatch.setattr(migrations, "upgrade", broken)
    with pytest.raises(RuntimeError, match="half way"):
        sqlite_store(path)
    with sqlite3.connect(path) as raw:
        assert raw.execute("SELECT name FROM sqlite_master").fetchall() == []
    raw.close()
    monkeypatch.undo()
    sqlite_store(path).close()


def test_x2_older_copy_of_the_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST, queue("q", 1))
    store.close()
    shutil.copy(path, tmp_path / "backup")
    store = sqlite_store(path)
    commit(store, queue("p", 41))
    store.close()
    shutil.copy(tmp_path / "backup", path)
    with pytest.raises(MetadataRegressed) as refused:
        sqlite_store(path)
    assert (refused.value.found, refused.value.expected) == (1, 2)
    recovered = sqlite_store(path, recover=True)
    snapshot = recovered.snapshot()
    assert snapshot.version > 2
    assert snapshot.next_view == 42
    assert recovered.feed(Version(0)) is None
    recovered.close()
    sqlite_store(path).close()


def test_version_mark_lost_by_a_power_cut_is_no_obstacle(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    sqlite_store(path).close()
    for left in (b"", b"\0" * 42):
        (tmp_path / "meta.version").write_bytes(left)
        sqlite_store(path).close()
    (tmp_path / "meta.version").write_bytes(b"hello")
    with pytest.raises(UnknownFormat, match="version mark"):
        sqlite_store(path)


def test_x5_full_disk_refuses_and_the_store_goes_on(tmp_path: Path) -> None:
    store = sqlite_store(tmp_path / "meta.sqlite")
    commit(store, VHOST)
    before = store.snapshot()
    (pages,) = store._sqlite.execute("PRAGMA page_count").fetchone()
    store._sqlite.execute(f"PRAGMA max_page_count={pages}")
    many = [queue(f"q{number}" * 20, number) for number in range(1, 2_000)]
    with pytest.raises(DiskFull):
        store.commit(before.version, many, uuid4())
    assert store.snapshot() == before
    store._sqlite.execute("PRAGMA max_page_count=1000000")
    assert store.commit(before.version, many, uuid4()) == Committed(Version(2))
    store.close()


def test_d6_disk_error_is_final(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    store = sqlite_store(path)
    commit(store, VHOST)
    # Closes the descriptor under SQLite's feet: the next write fails as on a disk that has gone.
    for number in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{number}") == f"{path}-wal":
                os.close(int(number))
                held = os.open("/dev/full", os.O_RDONLY)
                assert held == int(number)
        except FileNotFoundError:
            continue
    with pytest.raises(StorageError) as failure:
        store.commit(Version(1), [PutUser(User("ann", CANARY))], uuid4())
    assert not isinstance(failure.value, DiskFull)
    assert CANARY not in str(failure.value) + repr(failure.value.__cause__)
    with pytest.raises(Poisoned):
        store.commit(Version(1), [queue("q", 1)], uuid4())
    with pytest.raises(Poisoned):
        store.snapshot()
    store.close()


KILLED_INSIDE = """
import sys, uuid
from pathlib import Path
from sqlalchemy import event
from headrace.controller.changes import *
from headrace.controller.entities import *
from headrace.controller.sqlite_store import SqliteStore

store = SqliteStore(Path(sys.argv[1]), new_uuid=uuid.uuid4)
queues = [PutQueue(Queue("/", f"q{n}", n, uuid.UUID(int=n))) for n in range(1, 50)]
store.commit(0, [PutVhost(Vhost("/")), *queues[:10]], uuid.uuid4())
print("committed", flush=True)

def stop(connection, cursor, statement, *rest):
    if statement.startswith("INSERT INTO metadata_log"):
        print("inside", flush=True)
        sys.stdin.read()

event.listen(store._engine, "after_cursor_execute", stop)
store.commit(1, queues[10:], uuid.uuid4())
"""


def test_process_killed_inside_a_commit_leaves_all_of_it_out_and_all_before_it_in(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", KILLED_INSIDE, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin and child.stdout
    assert child.stdout.readline() == b"committed\n"
    assert child.stdout.readline() == b"inside\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    store = sqlite_store(path)
    snapshot = store.snapshot()
    assert (snapshot.version, snapshot.next_view, len(snapshot.queues)) == (1, 11, 10)
    commit(store, queue("after", 11))
    store.close()


def test_d_nothing_acknowledged_is_lost_when_the_process_is_killed_between_commits(tmp_path: Path) -> None:
    path = tmp_path / "meta.sqlite"
    program = KILLED_INSIDE.split("store.commit(0")[0] + (
        'store.commit(0, [PutVhost(Vhost("/"))], uuid.uuid4())\n'
        "for number in range(1, 1_000_000):\n"
        '    made = PutQueue(Queue("/", f"k{number}", number, uuid.UUID(int=number)))\n'
        "    print(store.commit(number, [made], uuid.uuid4()).version, flush=True)\n"
    )
    child = subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE)
    assert child.stdout
    acknowledged = [int(child.stdout.readline()) for _ in range(20)]
    child.send_signal(signal.SIGKILL)
    acknowledged += [int(line) for line in child.stdout.read().split(b"\n") if line]
    child.wait()
    child.stdout.close()
    store = sqlite_store(path)
    snapshot = store.snapshot()
    assert acknowledged[-1] <= snapshot.version <= acknowledged[-1] + 1
    assert len(snapshot.queues) == snapshot.version - 1
    assert snapshot.next_view == snapshot.version
    store.close()


# MemoryStore alone.


def test_memory_store_loses_answers_to_order() -> None:
    store = MemoryStore(uuid4())
    first, second = uuid4(), uuid4()
    store.next_fault = Fault.UNKNOWN_AND_NOT
    assert store.commit(Version(0), [VHOST], first) == Unknown()
    assert store.resolve(Version(0), first) == NotCommitted()
    store.next_fault = Fault.UNKNOWN_AND_COMMITTED
    assert store.commit(Version(0), [VHOST], second) == Unknown()
    assert store.resolve(Version(0), second) == Committed(Version(1))


def test_memory_store_fails_to_order() -> None:
    store = MemoryStore(uuid4())
    store.next_fault = Fault.FULL
    with pytest.raises(DiskFull):
        store.commit(Version(0), [VHOST], uuid4())
    commit(store, VHOST)
    store.next_fault = Fault.BROKEN
    with pytest.raises(StorageError):
        store.commit(Version(1), [queue("q", 1)], uuid4())
    with pytest.raises(Poisoned):
        store.snapshot()
