"""The one writer of the metadata of a node alone. Driver (trio): the store runs in a worker thread, one call at a time.

Whatever waits while a transaction is under way becomes the next one: one transaction, one version, one sync (X1). Each
request in it is checked against the snapshot that the requests before it lead to; what does not fit is refused alone,
and the rest goes on. When the store has committed, the new snapshot is published, the listeners are told in the same
turn of the loop, and only then do the callers of `commit` go on.

A failure of the store ends the service: `run` raises, whoever waits gets `Poisoned`, and what became of the last
transaction is known after the next start (D6). A full disk refuses the transaction and nothing more (X5).
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

import trio

from headrace.controller.changes import Change
from headrace.controller.entities import Version
from headrace.controller.errors import MetadataLost
from headrace.controller.metadata import Metadata
from headrace.controller.passwords import DEFAULT_COST, HashCost
from headrace.controller.snapshot import Snapshot, apply
from headrace.controller.store import Committed, Lost, MetaStore, NotCommitted, Unknown
from headrace.core_log.errors import DiskFull, Poisoned, Refused, StorageError
from headrace.core_log.ids import ViewId

# How many changes are applied to memory before others on the loop get a turn (some 10 us each).
_CHANGES_PER_TURN = 50


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


class MetadataService(Metadata):
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
        super().__init__(new_uuid=new_uuid, hash_cost=hash_cost, hashing=hashing)
        self._open_store = open_store
        self._thread = trio.CapacityLimiter(1)
        self._waiting: list[_Request] = []
        self._wake = trio.Event()
        self._next_view = ViewId(1)
        self._ended: str | None = None

    def new_view(self) -> ViewId:
        """A restart gives out again what was never committed."""
        view = self._next_view
        self._next_view = ViewId(view + 1)
        return view

    def _is_fresh(self) -> bool:
        return self.snapshot.version == 0

    async def commit(self, *changes: Change) -> Version:
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
            self._next_view = ViewId(max(self._next_view, after.next_view))
            self._publish(after, changes)
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
