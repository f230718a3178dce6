"""The metadata as the rest of a node sees them: a snapshot, who listens to changes, and commits. Driver (trio).

A node alone writes them itself (service.py); in a cluster they come from the controller (cluster_metadata.py). What the
configuration file names is seeded by either, in the same way.
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
from headrace.controller.errors import AlreadyExists
from headrace.controller.passwords import (
    DEFAULT_COST,
    HashCost,
    hash_password,
    matches_rabbitmq_hash,
    needs_rehash,
    verify_password,
    wrap_rabbitmq_hash,
)
from headrace.controller.snapshot import Snapshot
from headrace.controller.verifiers import SALT_BYTES, scram_of
from headrace.core_log.ids import StreamId, ViewId

Listener = Callable[[Snapshot, Sequence[Change]], None]

# Hashing a password takes a core for tens of milliseconds and some memory.
HASHING_THREADS_MAX = 2

DEFAULT_VHOST = "/"
GUEST = UserDefinition("guest", ("administrator",), password="guest")


class Metadata:
    def __init__(
        self,
        *,
        new_uuid: Callable[[], UUID],
        hash_cost: HashCost = DEFAULT_COST,
        hashing: trio.CapacityLimiter | None = None,
    ) -> None:
        """`hashing` is shared with whoever else hashes passwords."""
        self._new_uuid = new_uuid
        self._hash_cost = hash_cost
        self._hashing = hashing or trio.CapacityLimiter(HASHING_THREADS_MAX)
        self._listeners: list[Listener] = []
        self._snapshot: Snapshot | None = None

    @property
    def snapshot(self) -> Snapshot:
        """The newest committed one that this node knows. There is one as soon as `run` has started."""
        assert self._snapshot is not None, "the metadata service has not started"
        return self._snapshot

    def listen(self, listener: Listener) -> None:
        """Call `listener(snapshot, changes)` with every new snapshot, before any caller of `commit` goes on."""
        self._listeners.append(listener)

    def unlisten(self, listener: Listener) -> None:
        """Call it no more, as what it serves is being torn down. One that is not there (any more) is fine."""
        with suppress(ValueError):
            self._listeners.remove(listener)

    def _publish(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        self._snapshot = snapshot
        # A listener may leave, or bring others, while it is told.
        for listener in tuple(self._listeners):
            listener(snapshot, changes)

    async def commit(self, *changes: Change) -> Version:
        """All of `changes` or none, in one version, which the snapshot has when this returns.

        A refusal (errors.py) is definite: nothing was changed. A cancelled caller does not know.
        """
        raise NotImplementedError

    def new_view(self) -> ViewId:
        """An id for the next PutQueue. It counts from the commit of that queue on; until then nothing may be routed to
        it."""
        raise NotImplementedError

    def new_stream(self) -> StreamId:
        return StreamId(self._new_uuid())

    def new_salt(self) -> bytes:
        """For a verifier. Hashed, since some bits of a UUID are always the same: by them a salt of a user who exists
        could be told from one that was made up."""
        return sha256(self._new_uuid().bytes).digest()[:SALT_BYTES]

    def _is_fresh(self) -> bool:
        """Nobody has ever put anything there."""
        raise NotImplementedError

    async def seed(self, definitions: Definitions) -> None:
        """Create or update what the configuration file names, in one transaction, and leave the rest alone; do nothing
        if it is all there already. A fresh store also gets vhost `/` and the user guest."""
        while True:
            fresh = self._is_fresh()
            wanted = definitions.users
            if fresh and GUEST.name not in (user.name for user in wanted):
                wanted = (GUEST, *wanted)
            users = [await self._defined(user) for user in wanted]
            changes = self._seeds(definitions, users, fresh)
            # Another node of the cluster may have been faster: then there is less to do.
            with suppress(AlreadyExists):
                if changes:
                    await self.commit(*changes)
                return

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
