"""One partition on one node: what it promises, follows, leads and counts. Machine; no clock, no socket, no file.

A driver hands in what comes from the controller and from other replicas, and carries out what is answered, in this
order: whatever is in `kept` is on the disk before anything that this call answered leaves the node. The log is handed
in; the driver appends to it (clients' records as a leader, the leader's as a follower) and syncs it.

The rules are those of docs/replication.md: only orders of a controller are obeyed, of the highest ballot promised (C1,
C3), and only by the life of the node that they name (C4); a follower's position counts towards the high watermark up to
what it has synced (D1), on the disk that is in the in-sync set (E6), and under a version of the row that it has itself
kept (C5); versions are taken over only from a ballot not below the one promised (C6); a change of the in-sync set
counts at once where it adds and only when committed where it removes (E4); a log is cut by lineage only (E3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol
from uuid import UUID

from headrace.core_log.epochs import EpochHistory
from headrace.core_log.errors import Refused
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
from headrace.core_log.replication.messages import AlterIsr, Answer, Cut, Explain, Fenced, Fetch, Report, Stale


class ReplicaLog(Protocol):
    """What a replica asks of its log."""

    @property
    def end(self) -> int: ...
    @property
    def synced_end(self) -> int: ...
    @property
    def epochs(self) -> EpochHistory: ...

    high_watermark: int

    def cut(self, offset: int) -> None:
        """Records from here on are gone, and so is the claim that they were synced."""

    def begin_stint(self, stint: Stint) -> None:
        """What is appended from now on was written by this leader."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What a replica must never forget, and has on the disk before it acts on it (E1)."""

    ballot: Ballot = NO_BALLOT
    stint: Stint = NO_STINT
    version: RowVersion = NO_VERSION
    # Its disk came without what it once held, and no in-sync set has it since: its word proves nothing.
    is_blank: bool = False


class CutBelowWatermark(Refused):
    """A log would lose what was committed: a mistake of ours, or the metadata went back in time. Stop and tell (E3)."""


class _Position(NamedTuple):
    """What a follower said last."""

    member: Member
    version: RowVersion
    # Synced there, and the same as here.
    synced_end: int


class Replica:
    def __init__(self, member: Member, log: ReplicaLog, kept: Kept = Kept(), *, is_corrupt: bool = False) -> None:
        """A restarted node leads nothing until it is elected anew, whatever it kept."""
        self.member = member
        self.log = log
        self.is_corrupt = is_corrupt
        self.kept = kept if kept.stint.leader != member.node else replace(kept, stint=Stint(kept.stint.epoch, NOBODY))
        self.is_leader = False
        # Of a leader: the row that it leads by, and the change it has asked for.
        self.assignment: Assignment | None = None
        self.pending: AlterIsr | None = None
        self._positions: dict[int, _Position] = {}
        # Followers whose records are known to be the same as ours up to what they said; by node, which life of it.
        self._explained: dict[int, Member] = {}
        # The disk whose positions count, for each node of the in-sync set or about to be.
        self._disks: dict[int, UUID] = {}
        # Of a follower: the leader of this stint knows whose records we hold.
        self._is_explained = False

    # -- the controller speaks ----------------------------------------------------------------------------------

    def promise(self, ballot: Ballot) -> Report | None:
        """A controller has come to power and asks; None: a higher one was promised."""
        if ballot < self.kept.ballot:
            return None
        self.kept = replace(self.kept, ballot=ballot)
        return self.report()

    def report(self) -> Report:
        kept, last = self.kept, self.log.epochs.latest
        return Report(
            self.member,
            kept.stint,
            kept.version,
            Stint(last.epoch, last.leader_id),
            self.log.end,
            kept.is_blank,
            self.is_corrupt,
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
        self.kept = replace(self.kept, version=assignment.version)
        if assignment.leader == self.member.node:
            self.is_leader = True
            self.log.begin_stint(assignment.stint)
            self._take_row(assignment)

    def _take_row(self, assignment: Assignment) -> None:
        self.assignment = assignment
        self.pending = None
        self._disks = dict(assignment.isr)
        self.kept = replace(self.kept, version=assignment.version)

    def _step_down(self, stint: Stint) -> None:
        self.kept = replace(self.kept, stint=stint)
        self.is_leader = False
        self.assignment = self.pending = None
        self._positions, self._explained, self._disks = {}, {}, {}
        self._is_explained = False

    # -- following ----------------------------------------------------------------------------------------------

    def fetch(self) -> Fetch | None:
        """What to ask the leader; None: there is none to follow."""
        stint = self.kept.stint
        if self.is_leader or stint.leader in (NOBODY, self.member.node) or self.is_corrupt:
            return None
        log = self.log
        history = None if self._is_explained else log.epochs.entries
        return Fetch(self.member, stint, self.kept.version, log.end, log.synced_end, history)

    def take(self, answer: Answer | Cut | Explain) -> bool:
        """The leader's answer; True: records may be appended, those of this answer. Others are of an older stint."""
        if answer.stint != self.kept.stint or self.is_leader:
            return False
        match answer:
            case Explain():
                self._is_explained = False
                return False
            case Cut(_stint, offset):
                if offset < self.log.high_watermark:
                    raise CutBelowWatermark(
                        f"the leader of epoch {answer.stint.epoch} has other records from offset {offset} on, and "
                        f"those below {self.log.high_watermark} were committed here"
                    )
                self.log.cut(offset)
                return False
            case Answer(_stint, version, _watermark):
                self._is_explained = True
                if version > self.kept.version and version.ballot >= self.kept.ballot:
                    self.kept = replace(self.kept, version=version)
                return True

    def follow_watermark(self, answer: Answer) -> None:
        """The records of an answer were appended: what its leader had committed is committed here too."""
        if answer.stint == self.kept.stint and not self.is_leader:
            self.log.high_watermark = max(self.log.high_watermark, min(answer.high_watermark, self.log.end))

    # -- leading ------------------------------------------------------------------------------------------------

    def serve(self, fetch: Fetch) -> Answer | Cut | Explain | Fenced | Stale:
        """A follower asks. What it says of itself counts towards the high watermark (see `advance`)."""
        stint = self.kept.stint
        if fetch.stint.epoch > stint.epoch:
            return Stale(stint)
        if not self.is_leader or fetch.stint != stint:
            return Fenced(stint)
        node = fetch.member.node
        if fetch.history is not None:
            same_to = self._same_to(fetch)
            if same_to < fetch.end:
                return Cut(stint, same_to)
            self._explained[node] = fetch.member
        elif self._explained.get(node) != fetch.member:
            return Explain(stint)
        if fetch.end > self.log.end:
            # It claims more than there is, of records that it got from us: another log.
            return Cut(stint, self.log.end)
        self._positions[node] = _Position(fetch.member, fetch.version, fetch.synced_end)
        return Answer(stint, self.kept.version, self.log.high_watermark)

    def _same_to(self, fetch: Fetch) -> int:
        assert fetch.history is not None
        return EpochHistory(fetch.history).divergence(fetch.end, self.log.epochs, self.log.end)

    def advance(self) -> int:
        """The high watermark, after something was synced here or told by a follower."""
        self.log.high_watermark = max(self.log.high_watermark, self._committed_to())
        return self.log.high_watermark

    def _committed_to(self) -> int:
        if not self.is_leader or self.assignment is None:
            return 0
        sets = [self.assignment.isr] if self.pending is None else [self.assignment.isr, self.pending.isr]
        if min(map(len, sets)) < self.assignment.min_isr:
            return 0
        lowest = self.log.synced_end
        for node in {copy.node for copies in sets for copy in copies} - {self.member.node}:
            position = self._positions.get(node)
            if position is None or not self._counts(node, position):
                return 0
            lowest = min(lowest, position.synced_end)
        return lowest

    def _counts(self, node: int, position: _Position) -> bool:
        return position.version == self.kept.version and position.member.disk == self._disks.get(node)

    @property
    def positions(self) -> Mapping[int, int]:
        """How far each follower has synced, as it told last."""
        return {node: position.synced_end for node, position in self._positions.items()}

    def caught_up(self) -> list[int]:
        """Followers that may join the in-sync set."""
        if not self.is_leader or self.assignment is None or self.pending is not None:
            return []
        in_sync = self.assignment.in_sync_nodes
        floor = self._floor()
        return sorted(
            node
            for node, position in self._positions.items()
            if node not in in_sync and node in self.assignment.replicas and position.synced_end >= floor
        )

    def _floor(self) -> int:
        """What was committed, also by leaders before this one: they may have told clients more than we know of."""
        return max(self.advance(), self.log.epochs.latest.first_offset if self._has_written() else self.log.end)

    def _has_written(self) -> bool:
        latest = self.log.epochs.latest
        return Stint(latest.epoch, latest.leader_id) == self.kept.stint

    def expand(self, node: int) -> AlterIsr:
        """Ask for a follower that caught up. It counts from now on, as the one whose position justified it (E5)."""
        assert self.assignment is not None and node in self.caught_up(), "only who caught up may join"
        member = self._positions[node].member
        self._disks[node] = member.disk
        return self._propose((*self.assignment.isr, member.copy), member)

    def shrink(self, node: int) -> AlterIsr:
        """Ask to leave out one that does not keep up. It counts until that is committed."""
        assert self.assignment is not None and self.pending is None and node != self.member.node
        return self._propose(tuple(copy for copy in self.assignment.isr if copy.node != node), None)

    def _propose(self, isr: tuple[Copy, ...], joining: Member | None) -> AlterIsr:
        self.pending = AlterIsr(
            self.kept.stint, self.member.incarnation, self.kept.version, tuple(sorted(isr)), joining
        )
        return self.pending
