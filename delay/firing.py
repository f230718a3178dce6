"""From ring 0 to the target: bodies are read a little ahead, firing is decided, and only then is it done. Driver.

    ring 0 -> stage (bodies read) -> due: decide, one append for many -> durable -> Fire -> committed there -> settled

Never early: a record is decided when the wall clock has reached its due time, whatever the clock did before. Exactly
once: the decision has the outbox's numbers, and what was decided and is not settled is handed over again after a start,
with the same numbers and before anything new.
Neighbours: engine.py has what is shared, fire.py is the other side.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from headrace.core_log.errors import DiskFull
from headrace.core_log.outbox import TargetPartition
from headrace.delay.bodies import Bodies
from headrace.delay.decisions import Fired, pack
from headrace.delay.engine import Engine
from headrace.delay.fire import DueRun, Fire
from headrace.delay.ledger import Move
from headrace.delay.marks import Places, State

# Bodies are read between so long and half of it before they are due: some at a time, not each by itself.
AHEAD_US = 400_000
# So many are read, or decided, before others on the loop get a turn.
STAGE_COUNT_MAX = 4096
DECIDE_COUNT_MAX = 2048
# A wall clock that steps forward is noticed within this.
LOOK_S = 0.2
FULL_DISK_PAUSE_S = 1.0


@dataclass(slots=True, eq=False)
class _Staged:
    """Bodies by due time, of which those before `head` are decided."""

    bodies: Bodies
    places: Places
    # Bytes of a record, on average.
    size: int
    head: int = 0

    @property
    def next_due_us(self) -> int:
        return int(self.bodies.dues[self.head])


@dataclass(slots=True, eq=False)
class _HandOver:
    move: Move
    bodies: Bodies
    ids: list[bytes]
    where: TargetPartition | None
    # The commit of the decision log that it has to wait for.
    end: int
    byte_count: int


class Firing:
    def __init__(self, engine: Engine, fire: Fire) -> None:
        self._engine = engine
        self._fire = fire
        self._staged: deque[_Staged] = deque()
        self._handing: deque[_HandOver] = deque()
        # Bodies in memory, until they are settled.
        self._byte_count = 0
        # Something was settled, or is due sooner; something was staged.
        self._stage_wake = trio.Event()
        self._decide_wake = trio.Event()

    async def run(self) -> None:
        await self._resume()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stage_forever)
            nursery.start_soon(self._fire_forever)

    async def _resume(self) -> None:
        """What an earlier life decided and did not know to be done is handed over again, first of all."""
        for move in list(self._engine.ledger.moves.values()):
            if move.due_us is None:
                bodies = await self._engine.bodies(move.places)
                where = None if move.transfer is None else move.transfer.target
                self._handing.append(_HandOver(move, bodies, bodies.ids(), where, 0, 0))

    # -- reading ahead ------------------------------------------------------------------------------------------

    async def _stage_forever(self) -> None:
        engine = self._engine
        while True:
            self._stage_wake = engine.sooner = trio.Event()
            now_us = engine.env.clock.wall_us()
            self._put_back(now_us)
            places = self._next_places(now_us)
            if len(places):
                bodies = await engine.bodies(places)
                size = bodies.byte_count // len(places) + 1
                self._byte_count += size * len(places)
                self._staged.append(_Staged(bodies, places, size))
                self._decide_wake.set()
                continue
            await self._sleep(self._stage_wake, self._until_stage(now_us))

    def _put_back(self, now_us: int) -> None:
        """What is not due for long, since the clock was set back, makes room for what is."""
        for staged in list(self._staged):
            if staged.next_due_us > now_us + 2 * AHEAD_US:
                self._staged.remove(staged)
                left = staged.places[staged.head :]
                self._byte_count -= len(left) * staged.size
                self._engine.ring.add(staged.bodies.dues[staged.head :], left)

    def _next_places(self, now_us: int) -> Places:
        if self._until_stage(now_us) > 0:
            return np.zeros(0, dtype=np.int64)
        dues, places = self._engine.ring.take(now_us + AHEAD_US, STAGE_COUNT_MAX)
        return places[self._engine.ledger.states(places) == State.PENDING] if len(dues) else places

    def _until_stage(self, now_us: int) -> float:
        if self._byte_count >= self._engine.config.prefetch_bytes:
            return LOOK_S
        due_us = self._engine.ring.next_due_us()
        return LOOK_S if due_us is None else (due_us - AHEAD_US // 2 - now_us) / 1e6

    async def _sleep(self, wake: trio.Event, seconds: float) -> None:
        """Until woken, or so long, or until the clock may have been set."""
        await trio.lowlevel.checkpoint()
        if seconds > 0 and not wake.is_set():
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_cancel_when, wake, scope)
                    await self._engine.env.clock.sleep(min(seconds, LOOK_S))
                    scope.cancel()

    # -- deciding -----------------------------------------------------------------------------------------------

    async def _fire_forever(self) -> None:
        """Decide for all that is due, wait until that is durable, do it; what falls due meanwhile is the next group."""
        engine = self._engine
        while True:
            self._decide_wake = trio.Event()
            now_us = engine.env.clock.wall_us()
            try:
                if self.decide(now_us) or self._handing:
                    await engine.decided()
                    await self.hand_over()
                    continue
            except DiskFull:
                await engine.env.clock.sleep(FULL_DISK_PAUSE_S)
                continue
            due_us = min((one.next_due_us for one in self._staged), default=None)
            wait = LOOK_S if due_us is None else (self._tick_after(due_us) - now_us) / 1e6
            await self._sleep(self._decide_wake, wait)

    def _tick_after(self, due_us: int) -> int:
        """Due times are rounded up to whole ticks."""
        tick_us = self._engine.config.tick_ms * 1000
        return -(-due_us // tick_us) * tick_us

    def decide(self, now_us: int) -> int:
        """Decide that what is staged and due fires; returns how many were looked at, for there may be more."""
        engine = self._engine
        now_us -= now_us % (engine.config.tick_ms * 1000)
        looked_at = 0
        for staged in list(self._staged):
            due = int(np.searchsorted(staged.bodies.dues[staged.head :], now_us, side="right"))
            due = min(due, DECIDE_COUNT_MAX - looked_at)
            if due > 0:
                self._decide(staged, due)
                looked_at += due
                staged.head += due
                if staged.head == len(staged.places):
                    self._staged.remove(staged)
        return looked_at

    def _decide(self, staged: _Staged, count: int) -> None:
        engine = self._engine
        first = staged.head
        places = staged.places[first : first + count]
        # Cancelled, rescheduled or sorted into a bucket since: then it is no longer ours, or stands elsewhere.
        still = np.flatnonzero(engine.ledger.states(places) == State.PENDING) + first
        made: list[Fired] = []
        parts: list[tuple[Bodies, TargetPartition | None]] = []
        numbers: dict[TargetPartition, int] = {}
        for which in _alike(staged.bodies, still):
            bodies = staged.bodies.take(which)
            target = bodies.target(0)
            for where, of_them in _by_place(self._fire.places(target, bodies.keys)):
                one = bodies if of_them is None else bodies.take(of_them)
                at = staged.places[which if of_them is None else which[of_them]]
                made.append(self._fired(engine.ledger.next_number + len(made), target, where, at, numbers))
                parts.append((one, where))
        self._byte_count -= (count - len(still)) * staged.size
        if not made:
            return
        end = engine.decide(*made)
        for decision, (bodies, where) in zip(made, parts, strict=True):
            move = engine.ledger.moves[decision.number]
            ids = bodies.ids()
            engine.remember(map(xxhash.xxh3_64_intdigest, ids), State.FIRED)
            self._handing.append(_HandOver(move, bodies, ids, where, end, len(bodies) * staged.size))

    def _fired(
        self,
        number: int,
        target: bytes,
        where: TargetPartition | None,
        places: Places,
        numbers: dict[TargetPartition, int],
    ) -> Fired:
        if where is None:
            return Fired(number, target, b"", 0, 0, pack(places))
        first = numbers.get(where, self._engine.ledger.outbox.next_number(where))
        numbers[where] = first + len(places)
        return Fired(number, target, where.stream.bytes, where.partition, first, pack(places))

    # -- doing --------------------------------------------------------------------------------------------------

    async def hand_over(self) -> None:
        """Do what was decided and is durable, in order. DiskFull: the first of what is left was not done."""
        engine = self._engine
        while self._handing and self._handing[0].end <= engine.journal.high_watermark:
            one = self._handing[0]
            self._fire.fire(self._due_run(one), self._done(one))
            self._handing.popleft()
            await trio.lowlevel.checkpoint()

    def _due_run(self, one: _HandOver) -> DueRun:
        bodies, ledger = one.bodies, self._engine.ledger
        headers = [bodies.headers_of(index) for index in range(len(bodies))] if any(bodies.headers) else None
        producer = ledger.producer(one.move)
        # Runs of a partition are handed over in order: what is missing there before this one was dropped, because what
        # it was for is gone.
        before = 0 if producer is None else producer.first_sequence
        return DueRun(
            target=one.move.target,
            where=one.where,
            producer=producer,
            settled=max(ledger.settled_below(one.move), before),
            ids=one.ids,
            due_us=bodies.dues.tolist(),
            keys=bodies.keys,
            properties=bodies.properties,
            values=bodies.values,
            attributes=int(bodies.attributes[0]),
            tags=bodies.tags_of(0),
            headers=headers if headers is not None and any(headers) else None,
        )

    def _done(self, one: _HandOver) -> Callable[[], None]:
        def done() -> None:
            engine = self._engine
            engine.counters.note_fired(one.bodies.dues, engine.env.clock.wall_us())
            engine.settled.append(one.move.number)
            self._byte_count -= one.byte_count
            self._stage_wake.set()

        return done


async def _cancel_when(wake: trio.Event, scope: trio.CancelScope) -> None:
    await wake.wait()
    scope.cancel()


def _alike(bodies: Bodies, which: npt.NDArray[np.intp]) -> list[npt.NDArray[np.intp]]:
    """Cut into runs of one target, one set of tags and the same attributes, each target's in the order it has."""
    if len(which) == 0:
        return []
    tags, attributes = bodies.tags[which], bodies.attributes[which]
    if bool((tags == tags[0]).all()) and bool((attributes == attributes[0]).all()):
        return [which]
    targets = {tag_set[:1]: place for place, tag_set in reversed(list(enumerate(bodies.tag_sets)))}
    by_target = np.array([targets[tag_set[:1]] for tag_set in bodies.tag_sets])[tags]
    order = np.argsort(by_target, kind="stable")
    which, tags, attributes = which[order], tags[order], attributes[order]
    bounds = np.flatnonzero((tags[1:] != tags[:-1]) | (attributes[1:] != attributes[:-1])) + 1
    return np.split(which, bounds)


def _by_place(
    where: Sequence[TargetPartition | None],
) -> list[tuple[TargetPartition | None, npt.NDArray[np.intp] | None]]:
    """Who goes where; None: all of them."""
    if all(one == where[0] for one in where):
        return [(where[0], None)]
    by: dict[TargetPartition | None, list[int]] = {}
    for index, one in enumerate(where):
        by.setdefault(one, []).append(index)
    return [(one, np.array(indices, dtype=np.intp)) for one, indices in by.items()]
