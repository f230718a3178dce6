"""The one writer of the metadata on this node. Driver (trio): the store runs in a worker thread, one call at a time.

Whatever waits while a transaction is under way becomes the next one: one transaction, one version, one sync (X1). Each
request in it is checked against the snapshot that the requests before it lead to; what does not fit is refused alone,
and the rest goes on. When the store has committed, the new snapshot is published, the listeners are told in the same
turn of the loop, and only then do the callers of `commit` go on.

A failure of the store ends the service: `run` raises, whoever waits gets `Poisoned`, and what became of the last
transaction is known after the next start (D6). A full disk refuses the transaction and nothing more (X5).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from uuid import UUID

import trio

from headrace.controller.changes import (
    Change,
    PutPermission,
    PutPolicy,
    PutTopicPermission,
    PutUser,
    PutUserLimits,
    PutVhostLimits,
    create_vhost,
)
from headrace.controller.config import Definitions, UserDefinition
from headrace.controller.entities import Permission, User, Version
from headrace.controller.errors import MetadataLost
from headrace.controller.passwords import (
    DEFAULT_COST,
    HashCost,
    hash_password,
    matches_rabbitmq_hash,
    needs_rehash,
    verify_password,
    wrap_rabbitmq_hash,
)
from headrace.controller.snapshot import Snapshot, apply
from headrace.controller.store import Committed, Lost, MetaStore, NotCommitted, Unknown
from headrace.controller.verifiers import SALT_BYTES, scram_of
from headrace.core_log.errors import DiskFull, Poisoned, Refused, StorageError
from headrace.core_log.ids import StreamId, ViewId

Listener = Callable[[Snapshot, Sequence[Change]], None]

# How many changes are applied to memory before others on the loop get a turn (some 10 us each).
_CHANGES_PER_TURN = 50
# Hashing a password takes a core for tens of milliseconds and some memory.
HASHING_THREADS_MAX = 2

DEFAULT_VHOST = "/"
GUEST = UserDefinition("guest", ("administrator",), password="guest")


class _Request:
    def __init__(self, changes: Sequence[Change]) -> None:
        self.changes = changes
        self.done = trio.Event()
        self.version: Version | None = None
        self.failure: Exception | None = None

    def succeed(self, version: Version) -> None:
        self.version = version
        self.done.set()

    def fail(self, failure: Exception) -> None:
        self.failure = failure
        self.done.set()


class MetadataService:
    def __init__(
        self,
        open_store: Callable[[], MetaStore],
        *,
        new_uuid: Callable[[], UUID],
        hash_cost: HashCost = DEFAULT_COST,
        hashing: trio.CapacityLimiter | None = None,
    ) -> None:
        """`open_store` is called in the worker thread, since it may have to migrate. `hashing` is shared with whoever
        else hashes passwords."""
        self._open_store = open_store
        self._new_uuid = new_uuid
        self._hash_cost = hash_cost
        self._hashing = hashing or trio.CapacityLimiter(HASHING_THREADS_MAX)
        self._thread = trio.CapacityLimiter(1)
        self._waiting: list[_Request] = []
        self._wake = trio.Event()
        self._listeners: list[Listener] = []
        self._snapshot: Snapshot | None = None
        self._next_view = ViewId(1)
        self._ended: str | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The newest committed one. There is one as soon as `run` has started."""
        assert self._snapshot is not None, "the metadata service has not started"
        return self._snapshot

    def listen(self, listener: Listener) -> None:
        """Call `listener(snapshot, changes)` with every new snapshot, before any caller of `commit` goes on."""
        self._listeners.append(listener)

    def new_view(self) -> ViewId:
        """An id for the next PutQueue. It counts from the commit of that queue on; until then nothing may be routed to
        it, since a restart gives it out again."""
        view = self._next_view
        self._next_view = ViewId(view + 1)
        return view

    def new_stream(self) -> StreamId:
        return StreamId(self._new_uuid())

    def new_salt(self) -> bytes:
        """For a verifier. Hashed, since some bits of a UUID are always the same: by them a salt of a user who exists
        could be told from one that was made up."""
        return sha256(self._new_uuid().bytes).digest()[:SALT_BYTES]

    async def commit(self, *changes: Change) -> Version:
        """All of `changes` or none, in one version, which the snapshot has when this returns.

        A refusal (errors.py) is definite: nothing was changed. A cancelled caller does not know.
        """
        if self._ended is not None:
            raise Poisoned(self._ended)
        request = _Request(changes)
        self._waiting.append(request)
        self._wake.set()
        try:
            await request.done.wait()
        except trio.Cancelled:
            with suppress(ValueError):
                self._waiting.remove(request)
            raise
        if request.failure is not None:
            raise request.failure
        assert request.version is not None
        return request.version

    async def run(self, *, task_status: "trio.TaskStatus[Snapshot]" = trio.TASK_STATUS_IGNORED) -> None:
        """Open the store, report its snapshot, and commit what comes, until cancelled or the store fails."""
        store: MetaStore | None = None
        batch: list[_Request] = []
        try:
            store = await trio.to_thread.run_sync(self._open_store, limiter=self._thread)
            self._snapshot = await trio.to_thread.run_sync(store.snapshot, limiter=self._thread)
            self._next_view = self._snapshot.next_view
            task_status.started(self._snapshot)
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                batch, self._waiting = self._waiting, []
                await self._commit_batch(store, batch)
        except StorageError as error:
            self._ended = f"the metadata store has failed: {error}"
            raise
        finally:
            self._ended = self._ended or "the metadata service has stopped"
            for request in (*batch, *self._waiting):
                if not request.done.is_set():
                    request.fail(Poisoned(self._ended))
            if store is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(store.close, limiter=self._thread)

    async def _commit_batch(self, store: MetaStore, batch: Sequence[_Request]) -> None:
        seen = self.snapshot
        version = Version(seen.version + 1)
        after = seen
        accepted: list[_Request] = []
        # Told when the batch has been committed: a refusal may rest on a request before it, and whoever is refused will
        # look at the snapshot for it.
        refused: list[tuple[_Request, Refused]] = []
        changes: list[Change] = []
        pause = _CHANGES_PER_TURN
        for request in batch:
            try:
                after = apply(after, request.changes, version)
            except Refused as refusal:
                refused.append((request, refusal))
            else:
                accepted.append(request)
                changes += request.changes
            pause -= len(request.changes)
            if pause <= 0:
                pause = _CHANGES_PER_TURN
                await trio.lowlevel.checkpoint()
        if accepted:
            try:
                await self._commit(store, seen.version, changes)
            except DiskFull as full:
                for request in batch:
                    request.fail(DiskFull(str(full)))
                return
            self._snapshot = after
            self._next_view = ViewId(max(self._next_view, after.next_view))
            for listener in self._listeners:
                listener(after, changes)
        for request in accepted:
            request.succeed(version)
        for request, reason in refused:
            request.fail(reason)

    async def _commit(self, store: MetaStore, seen: Version, changes: Sequence[Change]) -> None:
        while True:
            txn = self._new_uuid()
            outcome: Committed | NotCommitted | Lost | Unknown = await trio.to_thread.run_sync(
                store.commit, seen, changes, txn, limiter=self._thread
            )
            if isinstance(outcome, Unknown):
                outcome = await trio.to_thread.run_sync(store.resolve, seen, txn, limiter=self._thread)
            match outcome:
                case Committed():
                    return
                case Lost():
                    raise MetadataLost(
                        f"the metadata has moved on from version {seen} without this node: somebody else writes it"
                    )
                case NotCommitted():
                    continue

    async def seed(self, definitions: Definitions) -> None:
        """Create or update what the configuration file names, in one transaction, and leave the rest alone; do nothing
        if it is all there already. A fresh store also gets vhost `/` and the user guest."""
        fresh = self.snapshot.version == 0
        wanted = definitions.users
        if fresh and GUEST.name not in (user.name for user in wanted):
            wanted = (GUEST, *wanted)
        users = [await self._defined(user) for user in wanted]
        changes = self._seeds(definitions, users, fresh)
        if changes:
            await self.commit(*changes)

    async def _defined(self, definition: UserDefinition) -> User:
        """The user as the file wants it. A password that is right already keeps its hash, and its SCRAM verifier."""
        existing = self.snapshot.users.get(definition.name)
        stored, verifier = (existing.password_hash, existing.scram) if existing else ("", "")
        salt = self.new_salt()

        def hashed() -> tuple[str, str]:
            cost = self._hash_cost
            if definition.password is not None:
                known = bool(stored) and verify_password(stored, definition.password)
                scram = verifier if known and verifier else scram_of(definition.password, salt)
                if known and not needs_rehash(stored, cost):
                    return stored, scram
                return hash_password(definition.password, cost), scram
            renewed = rehashed(cost)
            if definition.scram is not None:
                return renewed, definition.scram
            return renewed, verifier if renewed == stored else ""

        def rehashed(cost: HashCost) -> str:
            if definition.password_hash is not None and definition.hashing_algorithm is not None:
                exported, algorithm = definition.password_hash, definition.hashing_algorithm
                if stored and matches_rabbitmq_hash(stored, exported, algorithm) and not needs_rehash(stored, cost):
                    return stored
                return wrap_rabbitmq_hash(exported, algorithm, cost)
            return definition.password_hash if definition.password_hash is not None else stored

        password_hash, scram = await trio.to_thread.run_sync(hashed, limiter=self._hashing)
        return User(definition.name, password_hash, definition.tags, scram=scram)

    def _seeds(self, definitions: Definitions, users: Sequence[User], fresh: bool) -> list[Change]:
        """What differs between the file and the metadata."""
        now = self.snapshot
        changes: list[Change] = []
        vhosts = [vhost.name for vhost in definitions.vhosts]
        permissions = list(definitions.permissions)
        if fresh:
            vhosts = [DEFAULT_VHOST, *(name for name in vhosts if name != DEFAULT_VHOST)]
            if (GUEST.name, DEFAULT_VHOST) not in ((right.user, right.vhost) for right in permissions):
                permissions.append(Permission(GUEST.name, DEFAULT_VHOST, ".*", ".*", ".*"))
        for name in vhosts:
            if name not in now.vhosts:
                changes += create_vhost(name, self.new_stream)
        for user in users:
            existing = now.users.get(user.name)
            if existing is None or replace(existing, version=user.version) != user:
                changes.append(PutUser(user))
        changes += [
            PutPermission(right) for right in permissions if now.permissions.get((right.user, right.vhost)) != right
        ]
        changes += [
            PutTopicPermission(right)
            for right in definitions.topic_permissions
            if now.topic_permissions.get((right.user, right.vhost, right.exchange)) != right
        ]
        changes += [
            PutPolicy(policy) for policy in definitions.policies if now.policy(policy.vhost, policy.name) != policy
        ]
        changes += [
            PutVhostLimits(limits)
            for limits in definitions.vhost_limits
            if now.vhost_limits.get(limits.vhost) != limits
        ]
        changes += [
            PutUserLimits(limits) for limits in definitions.user_limits if now.user_limits.get(limits.user) != limits
        ]
        return changes
