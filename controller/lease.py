"""Who tries to be the controller of a cluster. Driver: the store, on a connection of its own, through the worker.

The lease only chooses who tries; what counts is decided by ballots and by comparing versions, so that two who both
believe to hold it do no harm. Nobody's clock is compared with another's: a lease is over when it was not renewed for
its time by the clock of the one who watches it, and its holder counts from before it asked for the renewal.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import trio

from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.errors import Unreachable
from headrace.controller.snapshot import Snapshot
from headrace.controller.store import Lease, Lost, MetaStore
from headrace.core_log.env import Env
from headrace.core_log.errors import StorageError

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LeaseWatch:
    def __init__(
        self, env: Env, open_store: Callable[[], MetaStore], node: int, incarnation: int, config: ClusterConfig
    ) -> None:
        self._env = env
        self._open_store = open_store
        self._node = node
        self._incarnation = incarnation
        self._config = config
        self._store: MetaStore | None = None
        # One call at a time.
        self._turn = trio.Lock()
        # What was seen last, and since when it has not changed.
        self.seen: Lease | None = None
        self._since_s = 0.0
        # A holder at whose door nobody answers.
        self._doubted: tuple[int, int] | None = None
        # Why the store cannot be asked; empty: it can.
        self.problem = "it was not asked yet"
        # What it may lose although it was committed; empty: nothing, as far as is known.
        self.risk = ""
        self.looked = trio.Event()

    async def snapshot(self) -> Snapshot:
        """For a node that starts with nothing. Raises Unreachable."""
        return await self._ask(lambda store: store.snapshot())

    async def win(self, look_again: Callable[[], trio.Event]) -> tuple[Lease, float]:
        """Wait until the lease is ours; returns it, and from when on it counts. Looks every so often, and whenever
        the event is set."""
        while True:
            try:
                taken = await self._try()
                if taken is not None:
                    return taken
            except Unreachable:
                pass
            self.looked.set()
            self.looked = trio.Event()
            with trio.move_on_after(self._config.renew_s):
                await look_again().wait()

    async def _try(self) -> tuple[Lease, float] | None:
        now_s = self._env.clock.monotonic()
        seen = await self._ask(lambda store: store.observe())
        if self.seen is None or self.seen.generation != seen.generation:
            await self._look_at_risk()
        if self.seen is None or (seen.ballot, seen.token) != (self.seen.ballot, self.seen.token):
            self._since_s = now_s
        self.seen = seen
        if not self._may_try(seen, now_s):
            return None
        txn = self._env.ids.uuid()
        sent_s = self._env.clock.monotonic()
        taken = await self._ask(lambda store: store.acquire(seen, self._node, self._incarnation, txn))
        if isinstance(taken, Lost):
            return None
        self.seen, self._since_s = taken, sent_s
        return taken, sent_s

    async def _look_at_risk(self) -> None:
        """At the start, and whenever another server may have taken over."""
        risk = await self._ask(lambda store: store.risk())
        if risk and risk != self.risk:
            _log.warning("metadata RPO > 0: %s", risk)
        self.risk = risk

    def _may_try(self, seen: Lease, now_s: float) -> bool:
        silent_s = now_s - self._since_s
        if seen.ballot.epoch == 0 or seen.node == self._node:
            # Nobody ever had it, or we did: in an earlier life, or until we stepped down.
            return True
        if self._doubted == (seen.node, seen.ballot.epoch) and silent_s >= 2 * self._config.renew_s:
            return True
        return silent_s >= self._config.lease_ttl_s

    def doubt(self, node: int) -> None:
        """Nobody listens at the door of this node: its process is gone, so its lease need not run out."""
        if self.seen is not None and self.seen.node == node:
            self._doubted = (node, self.seen.ballot.epoch)

    async def renew(self, held: Lease) -> Lease | Lost:
        """Raises Unreachable."""
        renewed = await self._ask(lambda store: store.renew(held))
        if isinstance(renewed, Lease):
            self.seen, self._since_s = renewed, self._env.clock.monotonic()
        return renewed

    async def _ask(self, question: Callable[[MetaStore], T]) -> T:
        async with self._turn:
            try:
                if self._store is None:
                    self._store = await self._env.worker.run(self._open_store)
                store = self._store
                answer = await self._env.worker.run(lambda: question(store))
            except (Unreachable, StorageError) as error:
                self.problem = str(error)
                raise Unreachable(str(error)) from error
            self.problem = ""
            return answer

    async def aclose(self) -> None:
        if self._store is not None:
            with trio.CancelScope(shield=True):
                await self._env.worker.run(self._store.close)
