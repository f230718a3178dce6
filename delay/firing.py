"""From ring 0 to the target: bodies are read ahead, firing is decided a moment ahead, and done when it is due. Driver.

    ring 0 -> stage (bodies read) -> decide, one append for many -> durable, due -> Fire -> committed there -> settled

The decision is made up to DECIDE_AHEAD_US before the due time, so that it is on the disk when the time has come and
only the target has to be synced then. Never early: it is handed over when the clock by which it was decided has
reached its due time; a clock that is set back in between holds what is not decided. Exactly once: the decision has the
outbox's numbers, and what was decided and is not settled is handed over again after a start, with the same numbers and
before anything new. Records of one partition are handed over in the order of their numbers.
Neighbours: engine.py has what is shared, fire.py is the other side.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import trio
import xxhash

from headrace.core_log.env import Clock
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
# Firing is decided so long before it is due, for all that is due by then, when the first is due within the other: two
# syncs of a slow disk, and not a decision for each tick. Lateness p99 at 1,000 due/s: bench/delay.py.
DECIDE_AHEAD_US = 40_000
DECIDE_WITHIN_US = 25_000
# So many are read, or decided, before others on the loop get a turn.
STAGE_COUNT_MAX = 4096
DECIDE_COUNT_MAX = 1024
# So many are handed over in one step: their target may have to look at each.
HAND_OVER_COUNT_MAX = 512
# What falls due meanwhile is handed over together: a commit takes longer than this on most disks.
HAND_OVER_PAUSE_US = 2_000
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
    """What one decision fires, by due time; those before `head` are handed over, and `left` are not committed yet."""

    move: Move
    bodies: Bodies
    ids: list[bytes]
    where: TargetPartition | None
    # The commit of the decision log that it has to wait for.
    end: int
    # Bytes of a record, on average.
    size: int
    # The wall clock by which it was decided, ahead of the monotonic one.
    ahead_us: int
    left: int
    head: int = 0


class Firing:
    def __init__(self, engine: Engine, fire: Fire) -> None:
        self._engine = engine
        self._fire = fire
        self._staged: deque[_Staged] = deque()
        # What was decided and is not all handed over, for each partition in the order of the numbers.
        self._handing: dict[TargetPartition | None, deque[_HandOver]] = {}
        # Bodies in memory, until they are settled.
        self._byte_count = 0
        # Something was settled, or is due sooner; something was staged; a decision is durable.
        self._stage_wake = trio.Event()
        self._decide_wake = trio.Event()
        self._hand_wake = trio.Event()

    async def run(self) -> None:
        await self._resume()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._stage_forever)
            nursery.start_soon(self._decide_forever)
            nursery.start_soon(self._hand_over_forever)

    async def _resume(self) -> None:
        """What an earlier life decided and did not know to be done is handed over again, first of all."""
        clock = self._engine.env.clock
        for move in list(self._engine.ledger.moves.values()):
            if move.due_us is None:
                bodies = await self._engine.bodies(move.places)
                where = None if move.transfer is None else move.transfer.target
                # If the clock was set back since, it waits as long as it can have had to wait when it was decided.
                seen_us = max(clock.wall_us(), int(bodies.dues.max()) - DECIDE_AHEAD_US)
                self._hand(_HandOver(move, bodies, bodies.ids(), where, 0, 0, seen_us - _now_us(clock), len(bodies)))

    def _hand(self, one: _HandOver) -> None:
        self._handing.setdefault(one.where, deque()).append(one)

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

    async def _decide_forever(self) -> None:
        engine = self._engine
        while True:
            self._decide_wake = trio.Event()
            now_us = engine.env.clock.wall_us()
            due_us = min((one.next_due_us for one in self._staged), default=None)
            wait_us = LOOK_S * 1e6 if due_us is None else due_us - DECIDE_WITHIN_US - now_us
            try:
                if wait_us <= 0 and self.decide(now_us + DECIDE_AHEAD_US):
                    engine.journal.when_committed(int(engine.journal.end), self._wake_hand_over)
                    await trio.lowlevel.checkpoint()
                    continue
            except DiskFull:
                await engine.env.clock.sleep(FULL_DISK_PAUSE_S)
                continue
            await self._sleep(self._decide_wake, wait_us / 1e6)

    def _wake_hand_over(self) -> None:
        self._hand_wake.set()

    def decide(self, until_us: int) -> int:
        """Decide that what is staged and due until then fires; returns how many were looked at: there may be more."""
        looked_at = 0
        for staged in list(self._staged):
            due = int(np.searchsorted(staged.bodies.dues[staged.head :], until_us, side="right"))
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
        end = engine.decide(*made) if made else 0
        self._byte_count -= (count - len(still)) * staged.size
        clock = engine.env.clock
        ahead_us = clock.wall_us() - _now_us(clock)
        for decision, (bodies, where) in zip(made, parts, strict=True):
            move = engine.ledger.moves[decision.number]
            ids = bodies.ids()
            engine.remember(map(xxhash.xxh3_64_intdigest, ids), State.FIRED)
            self._hand(_HandOver(move, bodies, ids, where, end, staged.size, ahead_us, len(bodies)))

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

    async def _hand_over_forever(self) -> None:
        while True:
            self._hand_wake = trio.Event()
            try:
                wait_us = await self.hand_over()
            except DiskFull:
                await self._engine.env.clock.sleep(FULL_DISK_PAUSE_S)
                continue
            await self._sleep(self._hand_wake, max(wait_us, HAND_OVER_PAUSE_US) / 1e6)

    async def hand_over(self) -> float:
        """Do what was decided, is durable and due, in order; returns how long nothing else is due.

        DiskFull: the first of what is left was not done.
        """
        waits_us = [LOOK_S * 1e6]
        for where in list(self._handing):
            lane = self._handing[where]
            if where is not None:
                await self._engine.learn_numbers(where)
            while lane and self.is_durable(lane[0]):
                one = lane[0]
                due = self._due_count(one)
                if due:
                    self._fire.fire(self._due_run(one, due), self._done(one, due))
                    one.head += due
                    if one.head == len(one.bodies):
                        lane.popleft()
                    await trio.lowlevel.checkpoint()
                else:
                    waits_us.append(self._until_due_us(one))
                    break
            if not lane:
                del self._handing[where]
        return min(waits_us)

    def is_durable(self, one: _HandOver) -> bool:
        """If it is not, its commit wakes us."""
        return one.end <= self._engine.journal.high_watermark

    def _clock_us(self, one: _HandOver) -> int:
        """The clock by which it was decided, or the one there is now if that has passed it."""
        clock = self._engine.env.clock
        return max(clock.wall_us(), _now_us(clock) + one.ahead_us)

    def _due_count(self, one: _HandOver) -> int:
        """Of those that are left. Due times are rounded up to whole ticks."""
        now_us = self._clock_us(one)
        now_us -= now_us % (self._engine.config.tick_ms * 1000)
        due = one.bodies.dues[one.head : one.head + HAND_OVER_COUNT_MAX]
        return int(np.searchsorted(due, now_us, side="right"))

    def _until_due_us(self, one: _HandOver) -> int:
        tick_us = self._engine.config.tick_ms * 1000
        return -(-int(one.bodies.dues[one.head]) // tick_us) * tick_us - self._clock_us(one)

    def _due_run(self, one: _HandOver, count: int) -> DueRun:
        """The next so many."""
        first, last = one.head, one.head + count
        bodies, ledger = one.bodies, self._engine.ledger
        headers = [bodies.headers_of(index) for index in range(first, last)] if any(bodies.headers) else None
        producer = ledger.producer(one.move)
        # Runs of a partition are handed over in order: what is missing there before this one was dropped, because what
        # it was for is gone.
        before = 0
        if producer is not None:
            before = producer.first_sequence + first
            producer = producer._replace(first_sequence=before)
        return DueRun(
            target=one.move.target,
            where=one.where,
            producer=producer,
            settled=max(ledger.settled_below(one.move), before),
            ids=one.ids[first:last],
            due_us=bodies.dues[first:last].tolist(),
            keys=bodies.keys[first:last],
            properties=bodies.properties[first:last],
            values=bodies.values[first:last],
            attributes=int(bodies.attributes[0]),
            tags=bodies.tags_of(0),
            headers=headers if headers is not None and any(headers) else None,
        )

    def _done(self, one: _HandOver, count: int) -> Callable[[], None]:
        dues = one.bodies.dues[one.head : one.head + count]

        def done() -> None:
            engine = self._engine
            engine.counters.note_fired(dues, engine.env.clock.wall_us())
            self._byte_count -= len(dues) * one.size
            one.left -= len(dues)
            if not one.left:
                engine.settled.append(one.move.number)
            self._stage_wake.set()

        return done


def _now_us(clock: Clock) -> int:
    return round(clock.monotonic() * 1e6)


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
