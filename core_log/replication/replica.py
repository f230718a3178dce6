"""One shard on one node: what it promises, follows, leads and counts. Machine; no clock, no socket, no file.

A driver hands in what comes from the controller and from other replicas, and carries out what is answered, in this
order: whatever is in `kept` is on the disk before anything that this call answered leaves the node. The logs of the
shard are handed in; the driver appends to them (clients' records as a leader, the leader's as a follower), syncs and
cuts them.
One stint, one row and one set of promises hold for all logs of the shard; how far a log is committed, and where two
replicas of it part, is each log's own. A log that a follower has not told of counts as empty there.

The rules are those of docs/replication.md: only orders of a controller are obeyed, of the highest ballot promised (C1,
C3), and only by the life of the node that they name (C4); a follower's position counts towards the high watermark up to
what it has synced (D1), on the disk that is in the in-sync set (E6), and under a version of the row that it has itself
kept (C5); versions are taken over only from a ballot not below the one promised (C6); a change of the in-sync set
counts at once where it adds and only when committed where it removes (E4); a log is cut by lineage only (E3).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol
from uuid import UUID

from headrace.core_log.epochs import EpochHistory
from headrace.core_log.errors import Refused
from headrace.core_log.ids import Offset
from headrace.core_log.replication.assignment import (
    NO_BALLOT,
    NO_STINT,
    NO_VERSION,
    NOBODY,
    Assignment,
    Ballot,
    Copy,
    Member,
    RowVersion,
    Stint,
)
from headrace.core_log.replication.messages import (
    AlterIsr,
    Answer,
    Begin,
    Cut,
    Explain,
    Fenced,
    Fetch,
    Go,
    LogId,
    Position,
    Report,
    Stale,
)


class ReplicaLog(Protocol):
    """What a replica asks of one of its logs."""

    @property
    def replica_start(self) -> int:
        """Where its records begin."""

    @property
    def written_end(self) -> int: ...
    @property
    def synced_end(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def epochs(self) -> EpochHistory: ...

    def advance_to(self, reached: Offset) -> None:
        """The high watermark is here, unless it was further on already."""

    def begin_stint(self, epoch: int, leader_id: int) -> None:
        """What is appended from now on was written by this leader."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a replica must never forget, and has on the disk before it acts on it (E1)."""

    ballot: Ballot = NO_BALLOT
    stint: Stint = NO_STINT
    version: RowVersion = NO_VERSION
    # Of the row of that version.
    isr: tuple[Copy, ...] = ()
    eligible: tuple[Copy, ...] = ()
    # Its disk came without what it once held, and no in-sync set has it since: its word proves nothing.
    is_blank: bool = False


class CutBelowWatermark(Refused):
    """A log would lose what was committed: a mistake of ours, or the metadata went back in time. Stop and tell (E3)."""


class Taken(NamedTuple):
    """What a follower does with an answer: first the cuts and beginnings, then appends to the other logs."""

    goes: tuple[Go, ...]
    cuts: tuple[Cut, ...]
    begins: tuple[Begin, ...]


@dataclass(slots=True)
class _Follower:
    """What a follower has told, in one life of it."""

    member: Member
    version: RowVersion
    # Of logs whose records are known to be the same as ours: how far they are synced there.
    synced: dict[LogId, int] = field(default_factory=dict)


class Replica:
    def __init__(
        self, member: Member, logs: Mapping[LogId, ReplicaLog], kept: Kept = Kept(), *, is_corrupt: bool = False
    ) -> None:
        """A restarted node leads nothing until it is elected anew, whatever it kept. `logs` may grow and shrink."""
        self.member = member
        self.logs = logs
        self.is_corrupt = is_corrupt
        self.kept = kept if kept.stint.leader != member.node else replace(kept, stint=Stint(kept.stint.epoch, NOBODY))
        self.is_leader = False
        # Of a leader: the row that it leads by, and the change it has asked for.
        self.assignment: Assignment | None = None
        self.pending: AlterIsr | None = None
        self._followers: dict[int, _Follower] = {}
        # The disk whose positions count, for each node of the in-sync set or about to be.
        self._disks: dict[int, UUID] = {}
        # Of a follower: logs of which the leader of this stint knows whose records we hold.
        self._explained: set[LogId] = set()
        # Of logs that were behind: how far they were committed, as their leaders told.
        self._heard: dict[LogId, int] = {}

    # -- the controller speaks ----------------------------------------------------------------------------------

    def promise(self, ballot: Ballot) -> Report | None:
        """A controller has come to power and asks; None: a higher one was promised."""
        if ballot < self.kept.ballot:
            return None
        self.kept = replace(self.kept, ballot=ballot)
        return self.report()

    def report(self) -> Report:
        kept = self.kept
        last = max((log.epochs.latest for log in self.logs.values()), default=None)
        return Report(
            self.member,
            kept.stint,
            kept.version,
            NO_STINT if last is None else Stint(last.epoch, last.leader_id),
            sum(log.written_end for log in self.logs.values()),
            kept.is_blank,
            self.is_corrupt,
            kept.isr,
            kept.eligible,
        )

    def fence(self, ballot: Ballot, epoch: int) -> Report | None:
        """Before an election that trusts no row: nothing below this epoch is followed, led or served any more."""
        if ballot < self.kept.ballot:
            return None
        before = self.report()
        if epoch > self.kept.stint.epoch:
            self._step_down(Stint(epoch, NOBODY))
        self.kept = replace(self.kept, ballot=ballot)
        return before

    def obey(self, ballot: Ballot, assignment: Assignment) -> bool:
        """An order. False: it was refused, since a later controller was promised (the sender steps down)."""
        if ballot < self.kept.ballot:
            return False
        self.kept = replace(self.kept, ballot=ballot)
        me = self.member
        if assignment.leader == me.node and assignment.leader_incarnation != me.incarnation:
            # Meant for an earlier life of this node (C4).
            return True
        if assignment.leader != NOBODY and assignment.epoch > self.kept.stint.epoch:
            self._begin(assignment)
        elif self.is_leader and assignment.stint == self.kept.stint and assignment.version > self.kept.version:
            self._take_row(assignment)
        if self.kept.is_blank and me.copy in assignment.isr:
            self.kept = replace(self.kept, is_blank=False)
        return True

    def _begin(self, assignment: Assignment) -> None:
        self._step_down(assignment.stint)
        self._keep_row(assignment.version, assignment.isr, assignment.eligible)
        if assignment.leader == self.member.node:
            self.is_leader = True
            for log in self.logs.values():
                log.begin_stint(*assignment.stint)
            self._take_row(assignment)

    def _take_row(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.pending = None
        self._disks = dict(assignment.isr)
        self._keep_row(assignment.version, assignment.isr, assignment.eligible)

    def _keep_row(self, version: RowVersion, isr: tuple[Copy, ...], eligible: tuple[Copy, ...]) -> None:
        self.kept = replace(self.kept, version=version, isr=isr, eligible=eligible)

    def _step_down(self, stint: Stint) -> None:
        self.kept = replace(self.kept, stint=stint)
        self.is_leader = False
        self.assignment = self.pending = None
        self._followers, self._disks = {}, {}
        self._explained = set()

    # -- following ----------------------------------------------------------------------------------------------

    @property
    def leader(self) -> int | None:
        """Whom to follow."""
        stint = self.kept.stint
        if self.is_leader or stint.leader in (NOBODY, self.member.node) or self.is_corrupt:
            return None
        return stint.leader

    def fetch(self, logs: Collection[LogId] | None = None) -> Fetch | None:
        """What to ask the leader, and to tell of these logs (of all, unless said otherwise); None: there is none to
        follow."""
        if self.leader is None:
            return None
        positions = tuple(self._position(log) for log in (self.logs if logs is None else logs) if log in self.logs)
        return Fetch(self.member, self.kept.stint, self.kept.version, positions)

    def _position(self, log_id: LogId) -> Position:
        log = self.logs[log_id]
        history = None if log_id in self._explained else log.epochs.entries
        return Position(log_id, log.replica_start, log.written_end, log.synced_end, history)

    def explain_again(self) -> None:
        """A new connection: what was said on the one before may not have arrived."""
        self._explained = set()

    def take(self, answer: Answer) -> Taken | None:
        """The leader's answer: what may be done with it. None: nothing, it is of an older stint."""
        if answer.stint != self.kept.stint or self.is_leader:
            return None
        goes, cuts, begins = [], [], []
        for one in answer.logs:
            log = self.logs.get(one.log)
            if log is None:
                continue
            match one:
                case Go(log_id):
                    self._explained.add(log_id)
                    goes.append(one)
                case Explain(log_id):
                    self._explained.discard(log_id)
                case Cut(log_id, offset):
                    self._refuse_loss(log_id, log, offset)
                    self._explained.discard(log_id)
                    cuts.append(one)
                case Begin(log_id, offset):
                    if offset < log.written_end and log.replica_start < log.written_end:
                        self._refuse_loss(log_id, log, log.replica_start)
                    self._explained.discard(log_id)
                    begins.append(one)
        if answer.version > self.kept.version and answer.version.ballot >= self.kept.ballot:
            self._keep_row(answer.version, answer.isr, answer.eligible)
        return Taken(tuple(goes), tuple(cuts), tuple(begins))

    def _refuse_loss(self, log_id: LogId, log: ReplicaLog, offset: int) -> None:
        if offset < log.high_watermark:
            raise CutBelowWatermark(
                f"stream {log_id.stream} partition {log_id.partition}: the leader of epoch {self.kept.stint.epoch} has "
                f"other records from offset {offset} on, and those below {log.high_watermark} were committed here"
            )

    def follow_watermark(self, stint: Stint, go: Go) -> None:
        """The records of an answer were appended: what its leader had committed is committed here too."""
        log = self.logs.get(go.log)
        if stint == self.kept.stint and not self.is_leader and log is not None:
            if go.high_watermark > log.written_end:
                self._heard[go.log] = max(go.high_watermark, self._heard.get(go.log, 0))
            log.advance_to(Offset(min(go.high_watermark, log.written_end)))

    # -- leading ------------------------------------------------------------------------------------------------

    def serve(self, fetch: Fetch) -> Answer | Fenced | Stale:
        """A follower asks. What it says of itself counts towards the high watermark (see `advance`). Logs that are not
        known here are not answered."""
        stint = self.kept.stint
        if fetch.stint.epoch > stint.epoch:
            return Stale(stint)
        if not self.is_leader or fetch.stint != stint:
            return Fenced(stint)
        node = fetch.member.node
        follower = self._followers.get(node)
        if follower is None or follower.member != fetch.member:
            follower = self._followers[node] = _Follower(fetch.member, fetch.version)
        follower.version = fetch.version
        logs = tuple(self._serve_log(follower, one) for one in fetch.positions if one.log in self.logs)
        kept = self.kept
        return Answer(stint, kept.version, kept.isr, kept.eligible, logs)

    def _serve_log(self, follower: _Follower, position: Position) -> Go | Cut | Begin | Explain:
        log_id = position.log
        log = self.logs[log_id]
        if position.history is None and log_id not in follower.synced:
            return Explain(log_id)
        if position.end < log.replica_start or (position.start == position.end > log.written_end):
            # Without records there is nothing that could be others, only a place that is not in this log.
            return Begin(log_id, log.replica_start)
        if position.history is not None and position.start < position.end:
            same_to = self._same_to(position, log)
            if same_to < position.end:
                follower.synced.pop(log_id, None)
                if position.end == log.replica_start:
                    # All that it has was deleted here, and with it the history by which it could be told apart.
                    return Begin(log_id, log.replica_start)
                return Cut(log_id, max(same_to, position.start, log.replica_start))
        if position.end > log.written_end:
            # It claims more than there is, of records that it got from us: another log.
            follower.synced.pop(log_id, None)
            return Cut(log_id, max(log.written_end, position.start))
        # What a late message tells was true once, and in one stint a follower that was explained is not cut.
        follower.synced[log_id] = max(follower.synced.get(log_id, 0), position.synced_end)
        return Go(log_id, log.high_watermark)

    def _same_to(self, position: Position, log: ReplicaLog) -> int:
        assert position.history is not None
        return EpochHistory(position.history).divergence(position.end, log.epochs, log.written_end)

    def lost_ends(self, born_in: Callable[[LogId], int]) -> dict[LogId, int]:
        """Of a leader: logs that were there when somebody was made leader by force, and in which nobody has noted yet
        that their end may be lost (E7). For each, how far it certainly had come."""
        forced = 0 if self.assignment is None else self.assignment.forced_epoch
        return {
            log_id: max(log.written_end, self._heard.get(log_id, 0))
            for log_id, log in self.logs.items()
            if max(log.epochs.latest.epoch, born_in(log_id)) < forced
        }

    def forget(self, log_id: LogId) -> None:
        """It was deleted."""
        self._heard.pop(log_id, None)

    def advance(self, logs: Iterable[LogId] | None = None) -> list[LogId]:
        """Move the high watermarks, of all logs unless said otherwise, after something was synced here or told by a
        follower. Returns those that moved."""
        counted = self._counted()
        if counted is None:
            return []
        moved = []
        for log_id in self.logs if logs is None else logs:
            log = self.logs[log_id]
            reached = self._committed_to(log_id, log, counted)
            if reached > log.high_watermark:
                log.advance_to(Offset(reached))
                moved.append(log_id)
        return moved

    def _counted(self) -> list[_Follower] | None:
        """The followers that hold whatever is committed; None: nothing can be."""
        if not self.is_leader or self.assignment is None:
            return None
        sets = [self.assignment.isr] if self.pending is None else [self.assignment.isr, self.pending.isr]
        if min(map(len, sets)) < self.assignment.min_isr:
            return None
        found = []
        for node in sorted({copy.node for copies in sets for copy in copies} - {self.member.node}):
            follower = self._followers.get(node)
            if follower is None or not self._counts(node, follower):
                return None
            found.append(follower)
        return found

    def _counts(self, node: int, follower: _Follower) -> bool:
        return follower.version == self.kept.version and follower.member.disk == self._disks.get(node)

    def _committed_to(self, log_id: LogId, log: ReplicaLog, counted: list[_Follower]) -> int:
        lowest = log.synced_end
        for follower in counted:
            lowest = min(lowest, follower.synced.get(log_id, 0))
        return lowest

    def position(self, node: int, log: LogId) -> int:
        """How far a follower has synced a log, as it told last; 0 where it has told nothing."""
        follower = self._followers.get(node)
        return 0 if follower is None else follower.synced.get(log, 0)

    def caught_up(self) -> list[int]:
        """Followers that may join the in-sync set: they hold, in every log, what was committed, or would be by now.
        Moves nothing: who waits for a watermark is told by whoever calls `advance`."""
        if not self.is_leader or self.assignment is None or self.pending is not None:
            return []
        in_sync = self.assignment.in_sync_nodes
        outside = [node for node in sorted(self._followers) if node not in in_sync and node in self.assignment.replicas]
        if not outside:
            return []
        counted = self._counted()
        floors = {
            log_id: max(self._floor(log), 0 if counted is None else self._committed_to(log_id, log, counted))
            for log_id, log in self.logs.items()
        }
        return [node for node in outside if self._is_above(self._followers[node], floors)]

    def _is_above(self, follower: _Follower, floors: Mapping[LogId, int]) -> bool:
        return all(follower.synced.get(log_id, 0) >= floor for log_id, floor in floors.items())

    def _floor(self, log: ReplicaLog) -> int:
        """What was committed, also by leaders before this one: they may have told clients more than we know of."""
        latest = log.epochs.latest
        has_written = Stint(latest.epoch, latest.leader_id) == self.kept.stint
        return max(log.high_watermark, latest.first_offset if has_written else log.written_end)

    def expand(self, node: int) -> AlterIsr:
        """Ask for a follower that caught up. It counts from now on, as the one whose position justified it (E5)."""
        assert self.assignment is not None and node in self.caught_up(), "only who caught up may join"
        member = self._followers[node].member
        self._disks[node] = member.disk
        return self._propose((*self.assignment.isr, member.copy), member)

    def shrink(self, *nodes: int) -> AlterIsr:
        """Ask to leave out some that do not keep up. They count until that is committed."""
        assert self.assignment is not None and self.pending is None and self.member.node not in nodes
        return self._propose(tuple(copy for copy in self.assignment.isr if copy.node not in nodes), None)

    def _propose(self, isr: tuple[Copy, ...], joining: Member | None) -> AlterIsr:
        self.pending = AlterIsr(
            self.kept.stint, self.member.incarnation, self.kept.version, tuple(sorted(isr)), joining
        )
        return self.pending
