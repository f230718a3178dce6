"""Members of consumer groups in a simulated cluster: they join, work, fall silent, and say what is out of date. Driver
for tests.

Each reads nothing; it commits places of what it holds, in the generation that it was told last, or, as one that was
away does, in one before. What is checked is what anybody could see: nobody commits in a generation that is over (G1),
no place that was confirmed is behind one confirmed before, and after the last fault they are all there (G3).
Neighbours: clients.py publishes to the queues that they read; a member asks whoever serves the vhost.
"""

from contextlib import suppress
from random import Random
from typing import TYPE_CHECKING

import trio
from tests.simulation.cluster.node import Life

from headrace.core_log.errors import DiskFull, Refused
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.consumer_groups import Standing
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_coordinator import GroupCoordinator
from headrace.gateways.delivery.consumer_groups_journal import GroupName

if TYPE_CHECKING:
    from tests.simulation.cluster.clients import Clients

USER = "guest"
# So long a member waits for an answer.
PATIENCE_S = 2.0


class Progress:
    """What the members of one group know between them."""

    def __init__(self, clients: "Clients", vhost: str, queues: list[str]) -> None:
        self.clients = clients
        self.world = clients.world
        self.name = GroupName(vhost, "readers")
        self.vhost = vhost
        self.queues = queues
        # The generation since which somebody was told to hold a slot.
        self.told: dict[Slot, int] = {}
        # Confirmed to whoever committed it.
        self.reached: dict[Slot, int] = {}

    def coordinator(self, life: Life) -> GroupCoordinator | None:
        service = life.service(self.vhost)
        return None if service is None else service.http.groups

    def streams(self, life: Life) -> frozenset[StreamId]:
        service = life.service(self.vhost)
        assert service is not None
        queues = service.broker.vhosts[self.vhost].queues
        return frozenset(queues[name].stream_id for name in self.queues if name in queues)

    def confirmed(self, slot: Slot, offset: int, generation: int, *, told: int, reached: int) -> None:
        """`told`, `reached`: what was known when it was asked for."""
        self.world.counts["offsets committed"] += 1
        self.world.mark("committed", slot, offset, generation)
        if generation < told:
            self.world.violated(
                f"G1: {slot} is held since generation {told}, and a commit of generation {generation} is accepted"
            )
        if offset < reached:
            self.world.violated(f"G1: {slot} was committed to {reached}, and a commit of {offset} is accepted")
        self.reached[slot] = max(offset, self.reached.get(slot, 0))

    def problem_of_rest(self) -> str | None:
        """None: whoever serves the group has all that was confirmed (G3)."""
        for life in self.clients.serving(self.vhost):
            coordinator = self.coordinator(life)
            group = None if coordinator is None else coordinator.groups.get(self.name)
            for slot, offset in self.reached.items():
                found = None if group is None else group.committed.get(slot)
                if found is None or found.offset < offset:
                    return f"G3: {slot} of {self.vhost} was committed to {offset}, and is at {found and found.offset}"
                assert coordinator is not None
                log = coordinator.log_at(slot)
                if found.offset > (0 if log is None else log.high_watermark):
                    return f"G3: {slot} of {self.vhost} is committed to {found.offset}, beyond the end of its log"
        return None


class GroupMember:
    def __init__(self, progress: Progress, name: str) -> None:
        self.progress = progress
        self.world = progress.world
        self.random: Random = self.world.dice(name)
        self.id: str | None = None
        self.standing: Standing | None = None
        self.generations: list[int] = []
        self._is_busy = False
        self.world.after(self.random.random(), self._turn)

    def _turn(self) -> None:
        clients = self.progress.clients
        if clients.is_over:
            return
        # One that falls silent for long enough is put out of the group.
        self.world.after(self.random.choice((0.3, 0.5, 0.5, 2.5)), self._turn)
        lives = clients.serving(self.progress.vhost)
        if lives and not self._is_busy:
            self._is_busy = True
            life = self.random.choice(lives)
            life.post(lambda: self._act(life))
            # It may never hear: that node may be gone.
            self.world.after(2 * PATIENCE_S, self._give_up)

    def _give_up(self) -> None:
        self._is_busy = False

    async def _act(self, life: Life) -> None:
        coordinator = self.progress.coordinator(life)
        if coordinator is None or self.world.is_over:
            return
        with suppress(Refused, DiskFull), trio.move_on_after(PATIENCE_S):
            if self.id is None:
                await self._join(life, coordinator)
            elif self.random.random() < 0.1:
                await self._leave(coordinator)
            elif self.random.random() < 0.5:
                await self._hear(coordinator)
            else:
                await self._commit(coordinator)
            self._is_busy = False

    async def _join(self, life: Life, coordinator: GroupCoordinator) -> None:
        member, standing = await coordinator.join(
            self.progress.name, USER, self.progress.streams(life), session_ms=2000, rebalance_ms=1000
        )
        self.id, self.generations = member, []
        self._is_told(standing)

    async def _leave(self, coordinator: GroupCoordinator) -> None:
        assert self.id is not None
        member, self.id, self.standing = self.id, None, None
        await coordinator.leave(self.progress.name, member, USER)

    async def _hear(self, coordinator: GroupCoordinator) -> None:
        member = self.id
        assert member is not None and self.standing is not None
        try:
            standing = await coordinator.heartbeat(self.progress.name, member, USER, self.standing.generation)
        except Refused:
            if self.id == member:
                self.id = None
            raise
        if self.id == member:
            self._is_told(standing)

    def _is_told(self, standing: Standing) -> None:
        self.standing = standing
        self.generations.append(standing.generation)
        for slot, since in standing.holds:
            self.progress.told[slot] = max(since, self.progress.told.get(slot, 0))

    async def _commit(self, coordinator: GroupCoordinator) -> None:
        assert self.id is not None and self.standing is not None
        known = self.progress
        slots = [held.slot for held in self.standing.holds] or sorted(known.told)
        if not slots:
            return
        slot = self.random.choice(slots)
        # Mostly the last one it was told of; else one that may be over.
        generation = self.standing.generation if self.random.random() < 0.6 else self.random.choice(self.generations)
        log = coordinator.log_at(slot)
        reached, told = known.reached.get(slot, 0), known.told.get(slot, 0)
        end = 0 if log is None else int(log.high_watermark)
        offset = self.random.randint(min(reached, end), end)
        await coordinator.commit(known.name, {slot: offset}, member_id=self.id, user=USER, generation=generation)
        known.confirmed(slot, offset, generation, told=told, reached=reached)
