"""Everything that was decided about parked records: which count, which go where, which are under way. Machine; pure.

The same `apply` makes each decision hold, when it is appended to the decision log and when that log is read again after
a start. What the intake holds is counted by whoever reads it (`count_intake`), after the decisions have been read.

Invariants: a place is decided once; targets[t] is the pending records of t in all sources, and those on their way back
to the intake; a source is dropped only when nothing of it is pending or unsettled.
Neighbours: decisions.py is the format, core_log/outbox.py the numbers, delays.py the driver.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import assert_never
from uuid import UUID

import numpy as np

from headrace.core_log.intervals import Intervals
from headrace.core_log.outbox import Outbox, TargetPartition, Transfer
from headrace.core_log.record import Producer
from headrace.delay.decisions import (
    Cancelled,
    Decision,
    Dropped,
    Fired,
    Merged,
    Opened,
    Rescheduled,
    Settled,
    Snapshot,
    Sorted,
    SourceState,
    Trimmed,
    pack,
    unpack,
)
from headrace.delay.marks import INTAKE, OFFSET_MASK, Marks, Places, State, States, by_source

# So many run files are made in one stint of a leader at most.
STINT_BITS = 32


@dataclass(slots=True, eq=False)
class Source:
    """One log that holds parked records: the intake, or a partition of a bucket."""

    number: int
    stream: UUID
    partition: int
    start_us: int = 0
    span_us: int = 0
    # Pending records of each target that has any here.
    targets: Counter[bytes] = field(default_factory=Counter)
    pending: int = 0
    marks: Marks = field(default_factory=Marks)
    # Offsets that a pass has written down; what else lies in the log was left by a pass that came to nothing.
    extents: Intervals = field(default_factory=Intervals)
    # Transfers that still need a record of this source.
    unsettled: int = 0

    @property
    def end_us(self) -> int:
        return self.start_us + self.span_us


@dataclass(slots=True, eq=False)
class Move:
    """A transfer under way: fired into a target, or (with a due time) rescheduled into the intake."""

    number: int
    target: bytes
    places: Places
    transfer: Transfer["Move"] | None
    due_us: int | None = None

    @property
    def sources(self) -> list[int]:
        return [number for number, _which in by_source(self.places)]


class Ledger:
    def __init__(self, owner: bytes, intake: TargetPartition) -> None:
        self.intake_partition = intake
        self.intake = Source(INTAKE, intake.stream, intake.partition)
        self.sources: dict[int, Source] = {INTAKE: self.intake}
        self.outbox: Outbox[Move] = Outbox(owner)
        # By number, in the order in which they were decided.
        self.moves: dict[int, Move] = {}
        # (first, end, edge): of these intake offsets, what is due from the edge on was sorted into buckets.
        self.passes: list[tuple[int, int, int]] = []
        # Everything in the intake below this offset has moved on or was decided.
        self.floor = 0
        self.runs: set[int] = set()
        self.targets: Counter[bytes] = Counter()
        self.total = 0
        self.next_source = 1
        self.next_run = 1
        self.next_number = 1
        # How often records have got another place: who looked for one meanwhile may have missed it.
        self.relocation_count = 0
        # Whether the intake's records are counted yet.
        self._counted = False

    # -- asking -------------------------------------------------------------------------------------------------

    def states(self, places: Places) -> States:
        """What was decided about each; what lay in a source that is gone has fired, or was cancelled."""
        found = np.zeros(len(places), dtype=np.uint8)
        for number, which in by_source(places):
            found[which] = self._states_in(number, places[which])
        return found

    def _states_in(self, number: int, places: Places) -> States:
        source = self.sources.get(number)
        if source is None:
            return np.full(len(places), State.FIRED, dtype=np.uint8)
        states = source.marks.get(places & OFFSET_MASK)
        if number == INTAKE:
            # Their marks are forgotten, and they are long decided, or stand elsewhere.
            states[(places & OFFSET_MASK) < self.floor] = State.MOVED
        return states

    def state(self, place: int) -> State:
        return State(int(self.states(np.array([place], dtype=np.int64))[0]))

    def producer(self, move: Move) -> Producer | None:
        return None if move.transfer is None else self.outbox.producer(move.transfer)

    def settled_below(self, move: Move) -> int:
        return 0 if move.transfer is None else self.outbox.settled_below(move.transfer.target)

    def idle_sources(self) -> list[Source]:
        """Buckets in which nothing is pending or under way."""
        return [
            source
            for source in self.sources.values()
            if source.number != INTAKE and not source.pending and not source.unsettled
        ]

    # -- counting what the intake holds -------------------------------------------------------------------------

    def count_intake(self, targets: Counter[bytes]) -> None:
        """These pending records of the intake are known from now on."""
        for target, count in targets.items():
            self._count(self.intake, target, count)

    def begin(self, stint: int) -> None:
        """The decision log has been read; what the intake holds is counted next.

        `stint`: the epoch in which a replica leads. A pass of an earlier one may have left a run file here whose
        decision was never committed, and another replica may have given its number to another file: so none is given
        twice.
        """
        self._counted = True
        self.next_run = max(self.next_run, stint << STINT_BITS)

    def _count(self, source: Source, target: bytes, count: int, *, leaves: bool = False) -> None:
        """More or fewer pending records of a target in a source; `leaves`: it is still pending, but not there."""
        if source is self.intake and not self._counted:
            if leaves:
                self._count_total(target, -count)
            return
        source.pending += count
        left = source.targets[target] + count
        assert left >= 0 and source.pending >= 0, "no record is counted out twice"
        if left:
            source.targets[target] = left
        else:
            del source.targets[target]
        if not leaves:
            self._count_total(target, count)

    def _count_total(self, target: bytes, count: int) -> None:
        self.total += count
        left = self.targets[target] + count
        if left:
            self.targets[target] = left
        else:
            del self.targets[target]

    # -- deciding -----------------------------------------------------------------------------------------------

    def apply(self, decision: Decision) -> None:
        match decision:
            case Fired():
                self._fire(decision)
            case Rescheduled():
                self._reschedule(decision)
            case Settled():
                for number in decision.numbers:
                    self._settle(number)
            case Cancelled():
                self._decide(unpack(decision.places), State.CANCELLED, decision.target)
            case Opened():
                self._open(decision)
            case Dropped():
                for number in decision.sources:
                    del self.sources[number]
            case Sorted():
                self._sort(decision)
            case Trimmed():
                self.floor = decision.floor
                self.intake.marks.forget_below(decision.floor)
                self.passes = [one for one in self.passes if one[1] > decision.floor]
            case Merged():
                self.runs -= set(decision.removed)
                if decision.run:
                    self.runs.add(decision.run)
                    self.next_run = max(self.next_run, decision.run + 1)
            case Snapshot():
                raise AssertionError("a snapshot is a new ledger, not a change to one")
            case _:
                assert_never(decision)

    def _decide(self, places: Places, state: State, target: bytes, *, leaves: bool = False) -> None:
        for number, which in by_source(places):
            source = self.sources[number]
            offsets = places[which] & OFFSET_MASK
            assert not source.marks.get(offsets).any(), "a place is decided once"
            source.marks.set(offsets, int(state))
            self._count(source, target, -len(offsets), leaves=leaves)

    def _fire(self, decision: Fired) -> None:
        places = unpack(decision.places)
        self._decide(places, State.FIRED, decision.target)
        self._begin_move(decision, places, self._partition_of(decision), None)

    def _partition_of(self, decision: Fired) -> TargetPartition | None:
        return TargetPartition(UUID(bytes=decision.stream), decision.partition) if decision.stream else None

    def _reschedule(self, decision: Rescheduled) -> None:
        self.relocation_count += 1
        places = np.array([decision.place], dtype=np.int64)
        self._decide(places, State.MOVED, decision.target, leaves=True)
        self._begin_move(decision, places, self.intake_partition, decision.due_us)

    def _begin_move(
        self, decision: Fired | Rescheduled, places: Places, where: TargetPartition | None, due_us: int | None
    ) -> None:
        move = Move(decision.number, decision.target, places, None, due_us)
        if where is not None:
            move.transfer = self.outbox.assign(where, len(places), move)
            assert move.transfer.first == decision.first, "numbers are dense"
        self._note_move(move)

    def _note_move(self, move: Move) -> None:
        self.moves[move.number] = move
        self.next_number = max(self.next_number, move.number + 1)
        for number in move.sources:
            self.sources[number].unsettled += 1

    def _settle(self, number: int) -> None:
        move = self.moves.pop(number)
        if move.transfer is not None:
            self.outbox.settle(move.transfer)
        for one in move.sources:
            self.sources[one].unsettled -= 1
        if move.due_us is not None:
            # The copy in the intake counts in its place.
            self._count_total(move.target, -1)

    def _open(self, decision: Opened) -> None:
        self.sources[decision.source] = Source(
            decision.source, UUID(bytes=decision.stream), decision.partition, decision.start_us, decision.span_us
        )
        self.next_source = max(self.next_source, decision.source + 1)

    def _sort(self, decision: Sorted) -> None:
        self.relocation_count += 1
        self.passes.append((decision.first, decision.end, decision.edge_us))
        if decision.run:
            self.runs.add(decision.run)
            self.next_run = max(self.next_run, decision.run + 1)
        for moved in decision.moved:
            source = self.sources[moved.source]
            source.extents.add(moved.first, moved.first + moved.count)
            for target, count in moved.targets.items():
                self._count(source, target, count)
                self._count(self.intake, target, -count)
        decided, states = unpack(decision.decided), np.frombuffer(decision.states, dtype=np.uint8)
        for number, which in by_source(decided):
            self.sources[number].marks.set(decided[which] & OFFSET_MASK, states[which])

    # -- snapshots ----------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        return Snapshot(
            owner=self.outbox.owner,
            intake=self.intake_partition.stream.bytes,
            floor=self.floor,
            intake_marks=self.intake.marks.encode(),
            passes=self.passes,
            sources=[
                SourceState(
                    source.number,
                    source.stream.bytes,
                    source.partition,
                    source.start_us,
                    source.span_us,
                    dict(source.targets),
                    source.marks.encode(),
                    list(source.extents),
                )
                for source in self.sources.values()
                if source is not self.intake
            ],
            runs=sorted(self.runs),
            numbers=[(one.stream.bytes, one.partition, self.outbox.next_number(one)) for one in self.outbox.targets],
            unsettled=[_as_decided(move) for move in self.moves.values()],
            next_source=self.next_source,
            next_run=self.next_run,
            next_number=self.next_number,
        )

    @classmethod
    def restored(cls, snapshot: Snapshot) -> "Ledger":
        """As it was when the snapshot was taken, but for what the intake holds."""
        ledger = cls(snapshot.owner, TargetPartition(UUID(bytes=snapshot.intake)))
        ledger._take(snapshot)
        return ledger

    def _take(self, snapshot: Snapshot) -> None:
        self.floor = snapshot.floor
        self.intake.marks = Marks.decode(snapshot.intake_marks)
        self.passes = list(snapshot.passes)
        for state in snapshot.sources:
            source = Source(state.source, UUID(bytes=state.stream), state.partition, state.start_us, state.span_us)
            source.marks = Marks.decode(state.marks)
            for first, end in state.extents:
                source.extents.add(first, end)
            self.sources[source.number] = source
            for target, count in state.targets.items():
                self._count(source, target, count)
        self.runs = set(snapshot.runs)
        moves: dict[TargetPartition, list[tuple[int, int, Move]]] = {}
        for one in snapshot.unsettled:
            if isinstance(one, Fired):
                move, where = Move(one.number, one.target, unpack(one.places), None), self._partition_of(one)
            else:
                place = np.array([one.place], dtype=np.int64)
                move, where = Move(one.number, one.target, place, None, one.due_us), self.intake_partition
                self._count_total(one.target, 1)
            self._note_move(move)
            if where is not None:
                moves.setdefault(where, []).append((one.first, len(move.places), move))
        for stream, partition, following in snapshot.numbers:
            where = TargetPartition(UUID(bytes=stream), partition)
            self.outbox.restore(where, following, moves.get(where, ()))
        for transfer in self.outbox.pending():
            transfer.what.transfer = transfer
        self.next_source = snapshot.next_source
        self.next_run = snapshot.next_run
        self.next_number = snapshot.next_number


def _as_decided(move: Move) -> Fired | Rescheduled:
    """The decision that a move under way came from."""
    transfer = move.transfer
    if move.due_us is not None:
        assert transfer is not None
        return Rescheduled(move.number, move.target, int(move.places[0]), move.due_us, transfer.first)
    if transfer is None:
        return Fired(move.number, move.target, b"", 0, 0, pack(move.places))
    where = transfer.target
    return Fired(move.number, move.target, where.stream.bytes, where.partition, transfer.first, pack(move.places))
