"""The service: batches, refusals, failures, seeds."""

import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from headrace.controller.changes import Change, DeleteQueue, PutBinding, PutQueue, PutUser, create_vhost
from headrace.controller.config import Definitions, UserDefinition
from headrace.controller.entities import (
    Binding,
    DestinationKind,
    Permission,
    Policy,
    Queue,
    TopicPermission,
    User,
    UserLimits,
    Version,
    Vhost,
    VhostLimits,
)
from headrace.controller.errors import AlreadyExists, Invalid, MetadataLost, NotFound
from headrace.controller.passwords import HashCost, hash_password, verify_password
from headrace.controller.service import MetadataService
from headrace.controller.snapshot import Snapshot
from headrace.controller.sqlite_store import SqliteStore
from headrace.controller.store import Committed, Fault, Lost, MemoryStore, MetaStore, Unknown
from headrace.controller.table import Table
from headrace.controller.verifiers import derive, parse
from headrace.core_log.errors import DiskFull, Poisoned, Refused, StorageError, UnknownFormat
from headrace.core_log.ids import StreamId, ViewId

CHEAP = HashCost(memory_kib=8, passes=1)
EXPORTED = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"
SHA256 = "rabbit_password_hashing_sha256"
CANARY = "canary-0f3e"


class GatedStore(MemoryStore):
    """Holds each commit until it is let through, so that a test can see what gathers behind it."""

    def __init__(self) -> None:
        super().__init__(uuid4())
        self.gate = threading.Semaphore(0)
        self.entered = 0
        self.threads_max = 0
        self._inside = 0

    def commit(self, seen: Version, changes: Sequence[Change], txn: UUID) -> Committed | Lost | Unknown:
        self.entered += 1
        self._inside += 1
        self.threads_max = max(self.threads_max, self._inside)
        self.gate.acquire()
        try:
            return super().commit(seen, changes, txn)
        finally:
            self._inside -= 1


@asynccontextmanager
async def running(store: MetaStore | Callable[[], MetaStore]) -> AsyncIterator[MetadataService]:
    service = MetadataService(
        store if callable(store) else lambda: store,
        new_uuid=uuid4,
        hash_cost=CHEAP,
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        yield service
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def seeded(definitions: Definitions | None = None) -> AsyncIterator[MetadataService]:
    async with running(MemoryStore(uuid4())) as service:
        await service.seed(definitions or Definitions())
        yield service


def queue(service: MetadataService, name: str, vhost: str = "/") -> PutQueue:
    return PutQueue(Queue(vhost, name, service.new_view(), service.new_stream()))


async def test_commit_returns_the_version_that_the_snapshot_then_has() -> None:
    async with seeded() as service:
        before = service.snapshot
        version = await service.commit(queue(service, "q"))
        assert version == service.snapshot.version == before.version + 1
        assert ("/", "q") in service.snapshot.queues
        assert ("/", "q") not in before.queues


async def test_whatever_waits_becomes_one_transaction_in_one_thread() -> None:
    store = GatedStore()
    async with running(store) as service, trio.open_nursery() as nursery:
        store.gate.release()
        await service.commit(*create_vhost("/", service.new_stream))
        versions: list[Version] = []

        async def declare(name: str) -> None:
            versions.append(await service.commit(queue(service, name)))

        nursery.start_soon(declare, "first")
        with trio.fail_after(10):
            while store.entered < 2:
                await trio.lowlevel.checkpoint()
        for number in range(50):
            nursery.start_soon(declare, f"q{number}")
        await wait_all_tasks_blocked()
        for _ in range(2):
            store.gate.release()
        with trio.fail_after(10):
            while len(versions) < 51:
                await trio.lowlevel.checkpoint()
        assert versions == [2] + [3] * 50
        assert store.entered == 3
        assert store.threads_max == 1


async def test_unlawful_request_is_refused_alone_and_the_rest_of_its_batch_goes_on() -> None:
    async with seeded() as service:
        outcomes: dict[str, object] = {}

        async def attempt(name: str, *changes: Change) -> None:
            try:
                outcomes[name] = await service.commit(*changes)
            except Exception as error:
                outcomes[name] = type(error)

        start = service.snapshot.version
        async with trio.open_nursery() as nursery:
            nursery.start_soon(attempt, "good", queue(service, "a"))
            nursery.start_soon(attempt, "nowhere", queue(service, "b", "none"))
            nursery.start_soon(attempt, "half", queue(service, "c"), DeleteQueue("/", "none", ViewId(1)))
            nursery.start_soon(attempt, "also good", queue(service, "d"))
        assert outcomes == {"good": start + 1, "nowhere": NotFound, "half": NotFound, "also good": start + 1}
        assert [name for _, name in service.snapshot.queues] == ["a", "d"]


async def test_x3_two_racing_declares_make_one_queue() -> None:
    async with seeded() as service:
        refused: list[bool] = []

        async def declare() -> None:
            try:
                await service.commit(queue(service, "q"))
            except AlreadyExists:
                refused.append(("/", "q") in service.snapshot.queues)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(declare)
            nursery.start_soon(declare)
        assert refused == [True]
        assert len(service.snapshot.queues) == 1


async def test_later_request_of_a_batch_sees_the_earlier_ones() -> None:
    async with seeded() as service:
        made = queue(service, "q")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.commit, made)
            await wait_all_tasks_blocked()
            nursery.start_soon(service.commit, PutBinding(Binding("/", "amq.topic", DestinationKind.QUEUE, "q", "k")))
        assert len(service.snapshot.bindings_of("/", "amq.topic")) == 1


async def test_batch_of_nothing_but_refusals_moves_no_version() -> None:
    async with seeded() as service:
        version = service.snapshot.version
        with pytest.raises(NotFound):
            await service.commit(DeleteQueue("/", "none", ViewId(1)))
        assert service.snapshot.version == version


async def test_listeners_hear_before_the_caller_goes_on() -> None:
    heard: list[tuple[Version, int]] = []
    async with seeded() as service:
        service.listen(lambda snapshot, changes: heard.append((snapshot.version, len(changes))))
        version = await service.commit(queue(service, "q"), queue(service, "p"))
        assert heard == [(version, 2)]


async def test_cancelled_before_its_turn_is_never_committed() -> None:
    store = GatedStore()
    async with running(store) as service, trio.open_nursery() as nursery:
        nursery.start_soon(service.commit, *create_vhost("/", service.new_stream))
        with trio.fail_after(10):
            while store.entered < 1:
                await trio.lowlevel.checkpoint()
        with trio.CancelScope() as scope:
            nursery.start_soon(wait_then_cancel, scope)
            await service.commit(PutUser(User("never")))
        assert scope.cancelled_caught
        store.gate.release(2)
        await service.commit(PutUser(User("later")))
        assert list(service.snapshot.users) == ["later"]


async def wait_then_cancel(scope: trio.CancelScope) -> None:
    await wait_all_tasks_blocked()
    scope.cancel()


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_AND_COMMITTED, Fault.UNKNOWN_AND_NOT])
async def test_lost_answer_is_resolved_and_the_change_counts_once(fault: Fault) -> None:
    store = MemoryStore(uuid4())
    async with running(store) as service:
        await service.commit(*create_vhost("/", service.new_stream))
        store.next_fault = fault
        assert await service.commit(queue(service, "q")) == 2
        assert service.snapshot == store.snapshot()


async def test_x5_full_disk_refuses_the_transaction_and_nothing_more() -> None:
    store = MemoryStore(uuid4())
    async with running(store) as service:
        await service.commit(*create_vhost("/", service.new_stream))
        store.next_fault = Fault.FULL
        refused: list[type[Exception]] = []

        async def declare() -> None:
            try:
                await service.commit(queue(service, "q"))
            except Refused as error:
                refused.append(type(error))
            except DiskFull as error:
                refused.append(type(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(declare)
            nursery.start_soon(declare)
        assert refused == [DiskFull, DiskFull]
        assert ("/", "q") not in service.snapshot.queues
        await service.commit(queue(service, "q"))


async def test_d6_failed_store_ends_the_service_loudly_and_nothing_is_acknowledged() -> None:
    store = MemoryStore(uuid4())
    service = MetadataService(lambda: store, new_uuid=uuid4)
    failures: list[type[Exception]] = []

    async def attempt() -> None:
        try:
            await service.commit(*create_vhost("/", service.new_stream))
        except Poisoned as error:
            failures.append(type(error))

    with pytest.RaisesGroup(pytest.RaisesExc(StorageError, match="ordered fault")):
        async with trio.open_nursery() as nursery:
            await nursery.start(service.run)
            store.next_fault = Fault.BROKEN
            async with trio.open_nursery() as attempts:
                attempts.start_soon(attempt)
                attempts.start_soon(attempt)
    assert failures == [Poisoned, Poisoned]
    with pytest.raises(Poisoned, match="ordered fault"):
        await service.commit(PutUser(User("ann")))
    assert not service.snapshot.vhosts


async def test_writer_that_was_overtaken_steps_down() -> None:
    store = MemoryStore(uuid4())
    with pytest.RaisesGroup(MetadataLost):
        async with running(store) as service:
            store.commit(Version(0), [PutUser(User("other"))], uuid4())
            with pytest.raises(Poisoned):
                await service.commit(PutUser(User("ann")))


async def test_stopped_service_leaves_nobody_waiting() -> None:
    async with seeded() as service:
        pass
    with pytest.raises(Poisoned, match="stopped"):
        await service.commit(PutUser(User("ann")))


async def test_store_that_cannot_be_opened_is_loud_and_leaves_nobody_waiting() -> None:
    def broken() -> MetaStore:
        raise UnknownFormat("from a newer release")

    service = MetadataService(broken, new_uuid=uuid4)
    failures: list[str] = []

    async def attempt() -> None:
        try:
            await service.commit(PutUser(User("ann")))
        except Poisoned as error:
            failures.append(str(error))

    with pytest.RaisesGroup(UnknownFormat):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(service.run)
            with trio.CancelScope(shield=True):
                await attempt()
    assert len(failures) == 1
    assert "newer release" in failures[0]


async def test_view_ids_are_never_given_twice_not_even_after_delete_and_restart(tmp_path: Path) -> None:
    def store() -> MetaStore:
        return SqliteStore(tmp_path / "meta.sqlite", new_uuid=uuid4)

    async with running(store) as service:
        await service.seed(Definitions())
        made = queue(service, "q")
        await service.commit(made)
        await service.commit(DeleteQueue("/", "q", made.queue.view))
    async with running(store) as service:
        assert service.new_view() == made.queue.view + 1
        assert service.new_view() == made.queue.view + 2


async def test_foreign_view_id_is_refused() -> None:
    async with seeded() as service:
        made = queue(service, "q")
        await service.commit(made)
        with pytest.raises(Invalid):
            await service.commit(PutQueue(replace(made.queue, name="p", stream=StreamId(uuid4()))))


# Seeds.


def guest_password(snapshot: Snapshot) -> str:
    return snapshot.users["guest"].password_hash


async def test_fresh_store_has_a_vhost_its_exchanges_and_guest() -> None:
    async with seeded() as service:
        snapshot = service.snapshot
        assert list(snapshot.vhosts) == ["/"]
        assert [name for _, name in snapshot.exchanges] == [
            "",
            "amq.direct",
            "amq.fanout",
            "amq.headers",
            "amq.match",
            "amq.topic",
        ]
        assert snapshot.users["guest"].tags == ("administrator",)
        assert verify_password(guest_password(snapshot), "guest")
        assert snapshot.permissions["guest", "/"] == Permission("guest", "/", ".*", ".*", ".*")
        assert snapshot.version == 1


async def test_guest_that_was_deleted_or_changed_does_not_come_back(tmp_path: Path) -> None:
    def store() -> MetaStore:
        return SqliteStore(tmp_path / "meta.sqlite", new_uuid=uuid4)

    async with running(store) as service:
        await service.seed(Definitions())
        await service.commit(PutUser(User("guest", hash_password("other", CHEAP))))
        changed = guest_password(service.snapshot)
    async with running(store) as service:
        await service.seed(Definitions())
        assert guest_password(service.snapshot) == changed


async def test_guest_of_the_file_is_taken_as_the_file_says() -> None:
    definitions = Definitions(
        users=(UserDefinition("guest", password="other"),),
        permissions=(Permission("guest", "/", "", "", ".*"),),
    )
    async with seeded(definitions) as service:
        assert verify_password(guest_password(service.snapshot), "other")
        assert service.snapshot.users["guest"].tags == ()
        assert service.snapshot.permissions["guest", "/"].configure == ""


FULL = Definitions(
    vhosts=(Vhost("/"), Vhost("shop")),
    users=(
        UserDefinition("ann", ("monitoring",), password="secret"),
        UserDefinition("imported", password_hash=EXPORTED, hashing_algorithm=SHA256),
        UserDefinition("certified"),
        UserDefinition("hashed", password_hash=hash_password("h", CHEAP)),
    ),
    permissions=(Permission("ann", "shop", "", ".*", ".*"),),
    topic_permissions=(TopicPermission("ann", "shop", "amq.topic", ".*", ".*"),),
    policies=(Policy("shop", "p", ".*", Table({"max-length": 5})),),
    vhost_limits=(VhostLimits("shop", 10, 10),),
    user_limits=(UserLimits("ann", 5, 5),),
)


async def test_seeding_twice_changes_nothing_the_second_time() -> None:
    async with seeded(FULL) as service:
        before = service.snapshot
        assert before.version == 1
        await service.seed(FULL)
        assert service.snapshot is before
        assert verify_password(before.users["ann"].password_hash, "secret")
        assert verify_password(before.users["imported"].password_hash, "test12")
        assert verify_password(before.users["hashed"].password_hash, "h")
        assert before.users["certified"].password_hash == ""
        assert ("shop", "amq.topic") in before.exchanges


async def test_seed_updates_what_the_file_changed_and_leaves_the_rest_alone() -> None:
    async with seeded(FULL) as service:
        await service.commit(queue(service, "q", "shop"), PutUser(User("made by hand", "x")))
        before = service.snapshot
        await service.seed(
            Definitions(
                users=(UserDefinition("ann", (), password="new secret"), UserDefinition("certified", ("t",))),
                policies=(Policy("shop", "p", ".*", Table({"max-length": 6})),),
            )
        )
        after = service.snapshot
        assert after.version == before.version + 1
        assert verify_password(after.users["ann"].password_hash, "new secret")
        assert after.users["ann"].tags == ()
        assert after.users["certified"].tags == ("t",)
        policy = after.policy("shop", "p")
        assert policy is not None and policy.definition["max-length"] == 6
        for kept in ("permissions", "queues", "exchanges", "vhost_limits", "user_limits"):
            assert getattr(after, kept) == getattr(before, kept)
        assert after.users["made by hand"] == before.users["made by hand"]


async def test_password_of_the_file_gets_a_scram_verifier_that_goes_with_it() -> None:
    async with seeded(FULL) as service:
        first = parse(service.snapshot.users["ann"].scram)
        assert first == derive("secret", first.salt)
        await service.seed(Definitions(users=(UserDefinition("ann", password="new secret"),)))
        second = parse(service.snapshot.users["ann"].scram)
        assert second == derive("new secret", second.salt)
        assert second.salt != first.salt
        # A hash says nothing that a verifier could be made from.
        await service.seed(Definitions(users=(UserDefinition("ann", password_hash=hash_password("h", CHEAP)),)))
        assert service.snapshot.users["ann"].scram == ""


async def test_salts_have_no_bits_that_are_always_the_same() -> None:
    async with seeded() as service:
        salts = [int.from_bytes(service.new_salt()) for _ in range(200)]
        ones = zeros = (1 << 128) - 1
        for salt in salts:
            ones, zeros = ones & salt, zeros & ~salt
        assert (ones, zeros) == (0, 0)
        assert all(salt < 1 << 128 for salt in salts)


async def test_user_without_a_verifier_gets_one_from_the_password_in_the_file() -> None:
    async with seeded(FULL) as service:
        await service.commit(PutUser(replace(service.snapshot.users["ann"], scram="")))
        await service.seed(FULL)
        assert service.snapshot.users["ann"].scram


async def test_verifier_of_the_file_is_kept_as_it_is() -> None:
    given = str(derive("pencil", b"salt", 4096))
    async with seeded(Definitions(users=(UserDefinition("ann", scram=given),))) as service:
        assert (service.snapshot.users["ann"].scram, service.snapshot.users["ann"].password_hash) == (given, "")
        version = service.snapshot.version
        await service.seed(Definitions(users=(UserDefinition("ann"),)))
        assert service.snapshot.users["ann"].scram == given
        assert service.snapshot.version == version


async def test_user_without_password_in_the_file_keeps_the_one_it_has() -> None:
    async with seeded(FULL) as service:
        await service.commit(PutUser(User("certified", "by hand")))
        await service.seed(FULL)
        assert service.snapshot.users["certified"].password_hash == "by hand"


async def test_seed_that_names_an_unknown_user_changes_nothing_and_says_who() -> None:
    async with seeded() as service:
        before = service.snapshot
        with pytest.raises(NotFound, match="'nobody'"):
            await service.seed(
                Definitions(vhosts=(Vhost("new"),), permissions=(Permission("nobody", "new", "", "", ""),))
            )
        assert service.snapshot is before


async def test_no_password_in_logs_reprs_or_errors(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    definitions = Definitions(
        users=(UserDefinition("ann", password=CANARY),),
        permissions=(Permission("nobody", "/", "", "", ""),),
    )
    async with running(lambda: SqliteStore(tmp_path / "meta.sqlite", new_uuid=uuid4)) as service:
        with pytest.raises(NotFound) as refused:
            await service.seed(definitions)
        await service.seed(replace(definitions, permissions=()))
        stored = service.snapshot.users["ann"].password_hash
        seen = caplog.text + repr(refused.value) + repr(definitions) + repr(service.snapshot)
    assert CANARY not in seen
    assert stored not in seen
    for file in tmp_path.iterdir():
        assert CANARY.encode() not in file.read_bytes()
