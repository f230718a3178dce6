"""A shard that this node leads: what serves its vhosts, from the election until the node steps down. Driver.

It is begun when all that the shard's logs held at the election is committed (core_log/replication/shard.py): a view
that skipped a record which is committed a moment later would have lost it. Stepping down is not a close: nothing more
is written, and what was under way is the next leader's.
Neighbours: service.py opens the same for a node alone; shards.py says when.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import trio

from headrace.controller.changes import Change
from headrace.controller.entities import Version
from headrace.controller.frozenmap import FrozenMap
from headrace.controller.metadata import Metadata
from headrace.controller.snapshot import Snapshot
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.ids import StreamId, ViewId
from headrace.gateways.delivery.meter import Watch
from headrace.service import Commons, Service, open_service

_log = logging.getLogger(__name__)

DISMISS_SECONDS_MAX = 2.0
FORCED = "forced-election"


class ShardMetadata(Metadata):
    """The metadata with the vhosts of one shard only, and with listeners that all leave together."""

    def __init__(self, whole: Metadata, shard: int) -> None:
        self._whole = whole
        self._shard = shard
        self._listeners = []
        self._snapshot = part_of(whole.snapshot, shard)
        whole.listen(self._changed)

    def leave(self) -> None:
        """Hear of nothing any more."""
        self._whole.unlisten(self._changed)

    def _changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        self._publish(part_of(snapshot, self._shard), changes)

    async def commit(self, *changes: Change) -> Version:
        return await self._whole.commit(*changes)

    def new_view(self) -> ViewId:
        return self._whole.new_view()

    def new_stream(self) -> StreamId:
        return self._whole.new_stream()

    def new_salt(self) -> bytes:
        return self._whole.new_salt()


def part_of(snapshot: Snapshot, shard: int) -> Snapshot:
    """What iterates over vhosts and topics sees those of the shard; the rest is asked for by a vhost's name."""
    names = {name for name, vhost in snapshot.vhosts.items() if vhost.shard == shard}
    if len(names) == len(snapshot.vhosts):
        return snapshot
    return replace(
        snapshot,
        vhosts=FrozenMap((name, vhost) for name, vhost in snapshot.vhosts.items() if name in names),
        topics=FrozenMap((place, topic) for place, topic in snapshot.topics.items() if place[0] in names),
    )


class ShardWatch(Watch):
    """The node's alarms, with listeners that all leave together."""

    def __init__(self, whole: Watch) -> None:
        self._whole = whole
        self.alarms = whole.alarms
        self._listeners = []
        whole.listen(self.tell)

    def leave(self) -> None:
        self._whole.unlisten(self.tell)


class LedShard:
    def __init__(
        self,
        number: int,
        commons: Commons,
        env: Env,
        directory: LogDirectory,
        unwritable: Callable[[], str | None],
        may_dispatch_alone: Callable[[], bool],
    ) -> None:
        """`env`: with the shard's own storage. `unwritable`: why nothing can be confirmed at the moment, if so.
        `may_dispatch_alone`: nobody else gives anything to single active or exclusive consumers now."""
        self.number = number
        self._directory = directory
        self._unwritable = unwritable
        self._may_dispatch_alone = may_dispatch_alone
        self._metadata = ShardMetadata(commons.metadata, number)
        self._watch = ShardWatch(commons.watch)
        self._commons = commons.part(env, self._metadata, self._watch)
        self._scope = trio.CancelScope()
        self._ended = trio.Event()
        # Of a close that waits for others to have what was settled.
        self._closing = trio.CancelScope()
        self._closed = trio.Event()
        self._closed.set()
        # None until clients are served, and again when they no longer are.
        self.service: Service | None = None

    async def run(self, serving: Callable[["LedShard"], None]) -> None:
        """Serve until `step_down`, or until cancelled; `serving` is called when clients may come."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    # Who consumed under the last leader may hold deliveries that nobody here knows of.
                    service = await open_service(self._commons, self._directory, nursery, clean=False)
                    service.broker.unwritable = self._unwritable
                    service.broker.alone.may_dispatch = self._may_dispatch_alone
                    nursery.start_soon(self._note_force, service)
                    self.service = service
                    _log.info("shard %d is served", self.number)
                    serving(self)
        finally:
            self.service = None
            self._metadata.leave()
            self._watch.leave()
            self._ended.set()

    async def _note_force(self, service: Service) -> None:
        """That somebody chose to lose records is in the audit of what was lost from, once (E7)."""
        shard = self._metadata.snapshot.shards.get(self.number)
        if shard is None or not shard.forced_epoch:
            return
        audit, before = service.broker.audit, None
        while True:
            page = await audit.page(FORCED, before=before)
            if any(one.about.get("epoch") == shard.forced_epoch for one in page.events):
                return
            if page.before is None:
                break
            before = page.before
        about = {"shard": self.number, "node": shard.assignment.leader, "epoch": shard.forced_epoch}
        await audit.noted(FORCED, "", about)

    async def step_down(self, reason: str) -> None:
        """Another node leads, or nobody: clients are told, and nothing of this shard is touched when this returns. A
        close that is under way ends where it is: what it would write belongs to a stint that is over."""
        service, self.service = self.service, None
        self._closing.cancel()
        await self._closed.wait()
        if service is not None:
            with trio.move_on_after(DISMISS_SECONDS_MAX):
                await service.dismiss(reason)
        self._scope.cancel()
        await self._ended.wait()

    async def close(self) -> None:
        """The node stops in good order: what was settled is safe when this returns, unless it steps down meanwhile."""
        service, self.service = self.service, None
        if service is not None:
            self._closed = trio.Event()
            try:
                with self._closing:
                    await service.close()
            finally:
                self._closed.set()
        self._scope.cancel()
        await self._ended.wait()
