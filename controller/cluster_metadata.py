"""The metadata on a node of a cluster: as the controller tells them, and commits by way of it. Driver (trio).

The snapshot is the last that was heard of, so the data path goes on with it while controller or database are away; it
is kept on the disk for the next start. A commit goes to the controller and returns once its version has come back from
there and the listeners were told. Without a controller it waits for one, for `commit_s`, and is refused then: nothing
was changed. One that was lost on its way is OutcomeUnknown; nobody guesses.

View ids are given out from blocks that were reserved by a commit, so that two nodes never give out the same one.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from uuid import UUID

import trio

from headrace.controller import errors
from headrace.controller.changes import (
    Change,
    PutBinding,
    PutExchange,
    PutPermission,
    PutPolicy,
    PutQueue,
    PutTopic,
    PutTopicPermission,
    PutUser,
    PutUserLimits,
    PutVhost,
    PutVhostLimits,
    ReserveViews,
    decode_changes,
    encode_changes,
)
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Version
from headrace.controller.errors import Changed, OutcomeUnknown, Unreachable
from headrace.controller.messages import Commit, Delta, Message, Operate, Outcome
from headrace.controller.metadata import Metadata
from headrace.controller.passwords import DEFAULT_COST, HashCost
from headrace.controller.snapshot import Snapshot, apply
from headrace.controller.snapshot_form import difference
from headrace.core_log.errors import DiskFull, HeadraceError, Refused
from headrace.core_log.ids import ViewId

_log = logging.getLogger(__name__)

Send = Callable[[Message], None]

# What may come back from the controller by its name. Whatever it calls otherwise is a refusal all the same.
_ERRORS: dict[str, type[HeadraceError]] = {
    kind.__name__: kind
    for kind in (
        errors.Invalid,
        errors.NotFound,
        errors.AlreadyExists,
        errors.Changed,
        errors.InUse,
        errors.LimitReached,
        errors.Unreachable,
        errors.OutcomeUnknown,
        DiskFull,
        Refused,
    )
}
# What was created by a version that the store has forgotten is offered to it again; deletions are not (E8).
_CREATIONS = (
    PutVhost,
    PutUser,
    PutPermission,
    PutTopicPermission,
    PutExchange,
    PutQueue,
    PutBinding,
    PutTopic,
    PutPolicy,
    PutVhostLimits,
    PutUserLimits,
)


class _Request:
    def __init__(self, make: Callable[[int], Message]) -> None:
        self.make = make
        self.done = trio.Event()
        self.is_sent = False
        self.version: Version | None = None
        self.failure: HeadraceError | None = None


class ClusterMetadata(Metadata):
    def __init__(
        self,
        config: ClusterConfig,
        *,
        new_uuid: Callable[[], UUID],
        hash_cost: HashCost = DEFAULT_COST,
        hashing: trio.CapacityLimiter | None = None,
    ) -> None:
        super().__init__(new_uuid=new_uuid, hash_cost=hash_cost, hashing=hashing)
        self._config = config
        # To the controller; None: there is none.
        self._send: Send | None = None
        self._requests: dict[int, _Request] = {}
        self._number = 0
        # View ids that are ours to give out.
        self._next_view = self._views_end = 0
        self._few_views = trio.Event()
        self.has_views = trio.Event()

    # -- from the controller ------------------------------------------------------------------------------------

    def begin(self, snapshot: Snapshot) -> None:
        """What was kept, or read from the store at start: nobody listens yet."""
        self._snapshot = snapshot

    def take_whole(self, snapshot: Snapshot, *, is_older: bool) -> list[Change]:
        """All of it. `is_older`: the store went back in time; returns what was created here since, then. That is shown
        here as if it had never been lost, since it is put back: nobody lets go of the records of a queue meanwhile."""
        before = self.snapshot
        lost: list[Change] = []
        if is_older:
            lost = [change for change in difference(snapshot, before) if isinstance(change, _CREATIONS)]
            # A user who is there has the password that is there.
            lost = [one for one in lost if not (isinstance(one, PutUser) and one.user.name in snapshot.users)]
            with suppress(Refused):
                snapshot = apply(snapshot, lost, snapshot.version)
        self._publish(snapshot, difference(before, snapshot))
        return lost

    def take_delta(self, delta: Delta) -> None:
        """Raises Refused when it does not follow on what is here."""
        changes = decode_changes(delta.changes)
        if delta.version != self.snapshot.version + 1:
            raise Refused(f"metadata version {delta.version} does not follow on {self.snapshot.version}")
        self._publish(apply(self.snapshot, changes, Version(delta.version)), changes)

    def take_outcome(self, outcome: Outcome) -> None:
        request = self._requests.get(outcome.number)
        if request is None:
            return
        if outcome.version is not None:
            request.version = Version(outcome.version)
        elif outcome.error == Unreachable.__name__:
            # Nothing was changed: it is asked again, as long as there is time.
            request.is_sent = False
            return
        else:
            request.failure = _ERRORS.get(outcome.error, Refused)(outcome.text)
        request.done.set()

    def linked(self, send: Send) -> None:
        """There is a controller, and its snapshot is here."""
        self._send = send
        for number, request in self._requests.items():
            self._ask(number, request)

    def _ask(self, number: int, request: _Request) -> None:
        if self._send is not None and not request.is_sent:
            request.is_sent = True
            self._send(request.make(number))

    def dismissed(self) -> None:
        """The controller has stepped down: what it has not answered was not done, and the next one is asked."""
        for request in self._requests.values():
            if not request.done.is_set():
                request.is_sent = False

    def unlinked(self) -> None:
        """The controller is gone, and with it the answers to what it was asked."""
        self._send = None
        for request in self._requests.values():
            if request.is_sent and not request.done.is_set():
                request.failure = OutcomeUnknown(
                    "the controller of the cluster was lost while it made this change: it may count, or not"
                )
                request.done.set()

    # -- to the controller --------------------------------------------------------------------------------------

    async def commit(self, *changes: Change) -> Version:
        text = encode_changes(changes)
        return await self._request(lambda number: Commit(number, text))

    async def operate(self, name: str, arguments: dict[str, int | str | bool | list[int]]) -> Version:
        """What an operator wants of the controller (reign.py has the names)."""
        return await self._request(lambda number: Operate(number, name, arguments))

    async def _request(self, make: Callable[[int], Message]) -> Version:
        self._number += 1
        number = self._number
        request = self._requests[number] = _Request(make)
        try:
            with trio.move_on_after(self._config.commit_s):
                while not request.done.is_set():
                    self._ask(number, request)
                    with trio.move_on_after(self._config.heartbeat_s):
                        await request.done.wait()
        finally:
            del self._requests[number]
        if request.failure is not None:
            raise request.failure
        if request.version is not None:
            return request.version
        if request.is_sent:
            raise OutcomeUnknown("the controller of the cluster has not answered: the change may count, or not")
        raise Unreachable("no controller, or it cannot reach the metadata store; nothing was changed. Try again later")

    # -- views --------------------------------------------------------------------------------------------------

    def new_view(self) -> ViewId:
        if self._next_view >= self._views_end:
            raise Unreachable("no view ids are left while the cluster has no controller to reserve more of them")
        view = ViewId(self._next_view)
        self._next_view += 1
        if self._views_end - self._next_view < self._config.views // 2:
            self._few_views.set()
        return view

    async def reserve_views(self) -> None:
        """Keep enough of them at hand. Runs for as long as the node does."""
        while True:
            if self._views_end - self._next_view >= self._config.views // 2:
                await self._few_views.wait()
                self._few_views = trio.Event()
            first = self.snapshot.next_view
            try:
                await self.commit(ReserveViews(first, self._config.views))
            except Changed:
                # Another node was faster, and this one has not heard of it yet.
                await trio.sleep(self._config.heartbeat_s / 10)
            except (Refused, DiskFull, OutcomeUnknown):
                await trio.sleep(self._config.heartbeat_s)
            else:
                # What is left of the block before is given up: ids are many.
                self._next_view, self._views_end = first, first + self._config.views
                self.has_views.set()

    # -- a store that went back in time -------------------------------------------------------------------------

    async def offer(self, creations: Sequence[Change]) -> None:
        """Put back what the store has forgotten, one by one; what does not fit any more is told, and left."""
        for change in creations:
            try:
                await self.commit(change)
                _log.warning("the metadata store had forgotten this, and has it again: %s", _named(change))
            except (Refused, DiskFull, OutcomeUnknown) as error:
                _log.error("the metadata store has forgotten this: %s (%s)", _named(change), error)

    def _is_fresh(self) -> bool:
        return not self.snapshot.vhosts and not self.snapshot.users


def _named(change: Change) -> str:
    """What it is about, without its secrets: the dataclasses hide those."""
    return repr(change)
