"""Random walks over a shard of two logs and three replicas, a store that may go back in time, and controllers that
outlive their term. The replicas and the decisions are the real ones (core_log/replication, controller/elections); logs,
disks, the store and the network are drawn here, one step at a time, from a seed.

    python -m tests.simulation.partition_walk 30000            the protocol as it is: no walk may end in a loss
    python -m tests.simulation.partition_walk 30000 no_sweep   a planted mistake: the first walk that finds it
    python -m tests.simulation.partition_stories               all of them, each within its budget

A walk checks at every step: who becomes leader has all that was acknowledged; nobody acknowledges what a later leader
does not have; two replicas never commit different records at one offset; no log is cut below its high watermark; what
is committed is synced by all that are in sync, on the disks that are (D1, E6); and nobody is in sync for what another
life of it has told (E5). What walks meet too rarely is told as a story, step by step (partition_stories.py).
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import ClassVar, NamedTuple
from unittest.mock import patch
from uuid import UUID

from headrace.controller import elections
from headrace.controller.elections import (
    Verdict,
    altered,
    answers_needed,
    elected,
    fencing_epoch,
    judge,
    recovered,
    without_disk,
)
from headrace.core_log.epochs import EpochHistory, EpochStart
from headrace.core_log.replication.assignment import Assignment, Ballot, Member, RowVersion, Stint
from headrace.core_log.replication.messages import AlterIsr, Answer, Fetch, LogId, Report
from headrace.core_log.replication.replica import CutBelowWatermark, Kept, Replica

NODES = range(3)
MIN_ISR = 2
STEPS = 220
LOGS = [LogId(UUID(int=1), 0), LogId(UUID(int=2), 0)]


class Violation(Exception):
    """Something acknowledged is lost, or two replicas disagree about it."""


class Entry(NamedTuple):
    stint: Stint
    value: int


class MemoryLog:
    """Records with their stints; a crash keeps what was synced and any part of the rest."""

    replica_start = 0

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.synced_end = 0
        self.high_watermark = 0

    @property
    def written_end(self) -> int:
        return len(self.entries)

    @property
    def epochs(self) -> EpochHistory:
        history = EpochHistory()
        for offset, entry in enumerate(self.entries[self.replica_start :], self.replica_start):
            history.note(*entry.stint, offset)
        return history

    def cut(self, offset: int) -> None:
        del self.entries[offset:]
        self.synced_end = min(self.synced_end, offset)

    def advance_to(self, reached: int) -> None:
        self.high_watermark = max(self.high_watermark, reached)

    def begin_stint(self, epoch: int, leader_id: int) -> None:
        pass


def empty_logs() -> dict[LogId, MemoryLog]:
    return {log: MemoryLog() for log in LOGS}


@dataclass(frozen=True, slots=True)
class Stored:
    """The store's one row, and the nodes that are registered."""

    row: Assignment
    members: tuple[Member, ...]
    ballot: Ballot
    version: int

    @property
    def active(self) -> dict[int, Member]:
        return {member.node: member for member in self.members}


@dataclass(slots=True)
class Controller:
    """One who holds, or believes to hold, the lease."""

    ballot: Ballot
    version: int
    mode: str = "new"  # new -> ok | recover; dead


@dataclass(slots=True)
class Node:
    replica: Replica
    disk: UUID
    incarnation: int = 1
    is_up: bool = True


@dataclass(slots=True)
class Budget:
    """How often each thing may happen in one walk."""

    values: int = 6
    crashes: int = 3
    wipes: int = 0
    elections: int = 5
    controllers: int = 3
    regressions: int = 1


@dataclass(slots=True)
class Mistakes:
    """A planted mistake: another replica, and what the controllers leave out."""

    replica: type[Replica] = Replica
    sweeps: bool = True
    sweep_promises: bool = True
    alters_before_sweep: bool = False
    answers_needed: Callable[[Assignment], int] | None = None
    names_life_at_commit: bool = False
    recovers: Callable[..., Assignment | None] = recovered


@dataclass(slots=True)
class Walk:
    random: Random
    mistakes: Mistakes
    budget: Budget
    nodes: list[Node] = field(default_factory=list)
    history: list[Stored] = field(default_factory=list)
    orders: list[tuple[Ballot, Assignment]] = field(default_factory=list)
    requests: list[AlterIsr] = field(default_factory=list)
    fetches: list[Fetch] = field(default_factory=list)
    controllers: list[Controller] = field(default_factory=list)
    acked: dict[int, Stint] = field(default_factory=dict)
    committed: dict[tuple[LogId, int], Entry] = field(default_factory=dict)
    value_count: int = 0
    disk_count: int = 0

    stored: Stored = field(init=False)

    _first: ClassVar[Ballot] = Ballot(1, 0)

    def __post_init__(self) -> None:
        version = RowVersion(1, self._first)
        members = []
        for node in NODES:
            member = Member(node, 1, self._new_disk())
            members.append(member)
        isr = tuple(member.copy for member in members)
        row = Assignment(tuple(NODES), 0, 1, 1, isr, version, MIN_ISR)
        self.stored = Stored(row, tuple(members), self._first, 1)
        self.controllers.append(Controller(self._first, 1, "ok"))
        for member in members:
            replica = self.mistakes.replica(member, empty_logs())
            replica.obey(self._first, row)
            self.nodes.append(Node(replica, member.disk))

    def _new_disk(self) -> UUID:
        self.disk_count += 1
        return UUID(int=self.disk_count)

    # -- what may happen ----------------------------------------------------------------------------------------

    def steps(self) -> Iterator[tuple[float, Callable[[], None]]]:
        budget = self.budget
        registered = self.stored.active
        for place, node in enumerate(self.nodes):
            replica = node.replica
            if not node.is_up:
                yield 3, lambda place=place: self.restart(place)
                continue
            for log in replica.logs.values():
                if log.synced_end < log.written_end:
                    yield 6, lambda log=log: self.sync(log)
            if budget.crashes:
                yield 0.5, lambda node=node: self.crash(node)
            if budget.wipes:
                yield 0.5, lambda node=node: self.wipe(node)
            if self.orders:
                yield 5, lambda node=node: self.order(node)
            if registered[place] != replica.member:
                yield 3, lambda node=node: self.register(node)
            if replica.is_leader:
                if self.value_count < budget.values:
                    yield 5, lambda node=node: self.produce(node)
                yield 5, lambda node=node: self.acknowledge(node)
                if replica.pending is None and replica.assignment is not None:
                    for copy in replica.assignment.isr:
                        if copy.node != place and len(replica.assignment.isr) > 1:
                            yield 0.5, lambda replica=replica, other=copy.node: self.ask(replica.shrink(other))
                    for other in replica.caught_up():
                        yield 4, lambda replica=replica, other=other: self.ask(replica.expand(other))
            elif replica.leader is not None:
                for logs in ([LOGS[0]], [LOGS[1]], LOGS):
                    fetch = replica.fetch(logs)
                    assert fetch is not None
                    yield 4, lambda node=node, fetch=fetch: self.exchange(node, fetch)
                yield 1, lambda fetch=fetch: self.fetches.append(fetch)
        if self.fetches:
            yield 1, self.late_fetch
        if self.requests:
            yield 4, self.deliver
        for controller in self.controllers:
            if controller.mode == "new":
                yield 3, lambda controller=controller: self.sweep(controller)
            if controller.mode in ("ok", "recover") and budget.elections:
                yield 0.6, lambda controller=controller: self.elect(controller)
        if budget.controllers:
            yield 0.4, self.take_over
        if budget.regressions and self.history:
            yield 0.5, self.regress

    def run(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            choices = list(self.steps())
            (step,) = self.random.choices([step for _, step in choices], [weight for weight, _ in choices])
            step()

    # -- a node -------------------------------------------------------------------------------------------------

    def produce(self, node: Node) -> None:
        log = self.random.choice(list(node.replica.logs.values()))
        log.entries.append(Entry(node.replica.kept.stint, self.value_count))
        self.value_count += 1

    def sync(self, log: MemoryLog) -> None:
        log.synced_end = log.written_end

    def crash(self, node: Node) -> None:
        self.budget.crashes -= 1
        node.is_up = False
        for log in node.replica.logs.values():
            log.cut(self.random.randint(log.synced_end, log.written_end))
            log.synced_end = log.written_end
            log.high_watermark = min(log.high_watermark, log.written_end)

    def wipe(self, node: Node) -> None:
        self.budget.wipes -= 1
        node.is_up = False
        node.disk = self._new_disk()
        node.replica = self.mistakes.replica(node.replica.member, empty_logs(), Kept(is_blank=True))

    def restart(self, place: int) -> None:
        node = self.nodes[place]
        node.is_up = True
        node.incarnation += 1
        member = Member(place, node.incarnation, node.disk)
        node.replica = self.mistakes.replica(member, node.replica.logs, node.replica.kept)

    def acknowledge(self, node: Node) -> None:
        replica = node.replica
        for log_id in replica.advance():
            self.check_synced(replica, log_id)
        stint = replica.kept.stint
        self.note_committed(node)
        for _stint, value in [one for log in replica.logs.values() for one in log.entries[: log.high_watermark]]:
            if value in self.acked:
                continue
            self.acked[value] = stint
            for other in self.nodes:
                later = other.replica
                if later.is_leader and later.kept.stint.epoch > stint.epoch and not holds(later, value):
                    raise Violation(f"epoch {stint} acknowledged {value} after {later.kept.stint}, which has it not")

    def check_synced(self, leader: Replica, log_id: LogId) -> None:
        """What has just been committed is synced wherever it has to be."""
        row, pending = leader.assignment, leader.pending
        assert row is not None
        for copy in {*row.isr, *(() if pending is None else pending.isr)}:
            node, told = self.nodes[copy.node], leader._followers.get(copy.node)
            if copy.node != leader.member.node and (told is None or told.member.disk != copy.disk):
                raise Violation(f"E6: {copy} is in sync, and what counts was told of another disk")
            log = node.replica.logs[log_id]
            if node.disk == copy.disk and log.synced_end < leader.logs[log_id].high_watermark:
                raise Violation(f"D1: {copy} is in sync, and has synced {log.synced_end} of what is committed")

    def note_committed(self, node: Node) -> None:
        for name, log in node.replica.logs.items():
            for offset, entry in enumerate(log.entries[: log.high_watermark]):
                if self.committed.setdefault((name, offset), entry) != entry:
                    raise Violation(f"offset {offset} is {entry} on {node.replica.member.node}, and elsewhere another")

    # -- replication --------------------------------------------------------------------------------------------

    def exchange(self, node: Node, fetch: Fetch) -> None:
        leader = self.nodes[fetch.stint.leader]
        if not leader.is_up:
            return
        answer = leader.replica.serve(fetch)
        replica = node.replica
        if not isinstance(answer, Answer):
            return
        try:
            taken = replica.take(answer)
        except CutBelowWatermark as error:
            raise Violation(str(error)) from error
        if taken is None:
            return
        assert not taken.begins, "nothing is deleted here"
        for cut in taken.cuts:
            replica.logs[cut.log].cut(cut.offset)
        for go in taken.goes:
            log = replica.logs[go.log]
            end = log.written_end
            log.entries += leader.replica.logs[go.log].entries[end : end + 1]
            replica.follow_watermark(answer.stint, go)
        self.note_committed(node)

    def late_fetch(self) -> None:
        """A request that was under way for long; its answer is lost."""
        fetch = self.random.choice(self.fetches)
        leader = self.nodes[fetch.stint.leader]
        if leader.is_up:
            leader.replica.serve(fetch)

    def ask(self, request: AlterIsr) -> None:
        self.requests.append(request)

    def order(self, node: Node) -> None:
        recent = self.orders[-6:] if self.random.random() < 0.8 else self.orders
        self.obey(node, *self.random.choice(recent))

    def obey(self, node: Node, ballot: Ballot, row: Assignment) -> None:
        replica, led = node.replica, node.replica.kept.stint if node.replica.is_leader else None
        replica.obey(ballot, row)
        stint = replica.kept.stint
        if replica.is_leader and stint != led:
            missing = [
                value
                for value, acked_in in self.acked.items()
                if (acked_in.epoch < stint.epoch or (acked_in.epoch == stint.epoch and acked_in != stint))
                and not holds(replica, value)
            ]
            if missing:
                raise Violation(f"the leader of {stint} has not {missing}")

    # -- the store and its controllers --------------------------------------------------------------------------

    def commit(self, controller: Controller, **changes: object) -> bool:
        now = self.stored
        if (now.ballot, now.version) != (controller.ballot, controller.version):
            controller.mode = "dead"
            return False
        self.history.append(now)
        self.stored = replace(now, version=now.version + 1, **changes)
        controller.version += 1
        assert elections.is_orderly(self.stored.row)
        self.orders.append((controller.ballot, self.stored.row))
        return True

    def deliver(self) -> None:
        request = self.random.choice(self.requests)
        controller = self.random.choice(self.controllers)
        if controller.mode != "ok" and not (self.mistakes.alters_before_sweep and controller.mode == "new"):
            return
        self.alter(controller, request)
        # Some requests arrive twice.
        if self.random.random() < 0.5:
            self.requests.remove(request)

    def alter(self, controller: Controller, request: AlterIsr) -> None:
        if controller.mode != "ok" and not (self.mistakes.alters_before_sweep and controller.mode == "new"):
            return
        active, before = self.stored.active, self.stored.row
        if self.mistakes.names_life_at_commit and request.joining is not None:
            now = active[request.joining.node]
            joined = tuple(sorted({copy for copy in request.isr if copy.node != now.node} | {now.copy}))
            row = altered(before, request._replace(joining=now, isr=joined), active, controller.ballot)
        else:
            row = altered(before, request, active, controller.ballot)
        if row is not None and self.commit(controller, row=row):
            for copy in set(row.isr) - set(before.isr):
                if request.joining != active[copy.node]:
                    raise Violation(f"E5: {active[copy.node]} is in sync now, for what {request.joining} has told")

    def register(self, node: Node) -> None:
        controller = self.random.choice(self.controllers)
        self.enrol(controller, node)

    def enrol(self, controller: Controller, node: Node) -> None:
        if controller.mode != "ok":
            return
        member, now = node.replica.member, self.stored
        members = tuple(member if one.node == member.node else one for one in now.members)
        row = now.row
        if now.active[member.node].disk != member.disk:
            row = without_disk(row, member.node, controller.ballot)
        self.commit(controller, members=members, row=row)

    def take_over(self) -> None:
        self.budget.controllers -= 1
        now = self.stored
        ballot = Ballot(now.ballot.epoch + 1, len(self.controllers))
        self.history.append(now)
        self.stored = replace(now, ballot=ballot, version=now.version + 1)
        mode = "new" if self.mistakes.sweeps else "ok"
        self.controllers.append(Controller(ballot, self.stored.version, mode))

    def sweep(self, controller: Controller) -> None:
        self.ask_all(controller, [node for node in self.nodes if node.is_up and self.random.random() <= 0.75])

    def ask_all(self, controller: Controller, answering: Sequence[Node]) -> None:
        reports: list[Report] = []
        for node in answering:
            if self.mistakes.sweep_promises:
                report = node.replica.promise(controller.ballot)
            else:
                report = node.replica.report() if node.replica.kept.ballot <= controller.ballot else None
            if report is not None:
                reports.append(report)
        match judge(self.stored.row, reports):
            case Verdict.PROVEN:
                controller.mode = "ok"
            case Verdict.CONTRADICTED:
                controller.mode = "recover"
            case Verdict.UNPROVEN:
                pass

    def elect(self, controller: Controller) -> None:
        self.budget.elections -= 1
        now = self.stored
        if controller.mode == "ok":
            up = {place: node.replica.member for place, node in enumerate(self.nodes) if node.is_up}
            active = {place: member for place, member in now.active.items() if up.get(place) == member}
            preferred = self.random.sample(NODES, len(NODES))
            # The one who led may be up, and only out of reach.
            if self.random.random() < 0.5 and now.row.leader in active and len(active) > 1:
                del active[now.row.leader]
            self.lead(controller, active, preferred)
            return
        self.recover(controller, [node for node in self.nodes if node.is_up and self.random.random() < 0.8])

    def lead(self, controller: Controller, active: Mapping[int, Member], prefer: Sequence[int]) -> None:
        row = elected(self.stored.row, active, controller.ballot, prefer=prefer)
        if row is not None:
            self.commit(controller, row=row)

    def recover(self, controller: Controller, reached: Sequence[Node]) -> None:
        now = self.stored
        fence = fencing_epoch(now.row, [node.replica.report() for node in reached])
        replies = [reply for node in reached if (reply := node.replica.fence(controller.ballot, fence)) is not None]
        there = {reply.member.node: reply.member for reply in replies}
        row = self.mistakes.recovers(now.row, replies, fence, controller.ballot, there)
        if row is not None and self.commit(controller, row=row):
            controller.mode = "ok"

    def regress(self) -> None:
        self.budget.regressions -= 1
        for _ in range(self.random.randint(1, min(4, len(self.history)))):
            self.stored = self.history.pop()


def holds(replica: Replica, value: int) -> bool:
    return any(entry.value == value for log in replica.logs.values() for entry in log.entries)


# -- planted mistakes ---------------------------------------------------------------------------------------------


class CountsUnderAnyVersion(Replica):
    def _counts(self, node, follower):
        return follower.member.disk == self._disks.get(node)


class CountsAnyDisk(Replica):
    def _counts(self, node, follower):
        return follower.version == self.kept.version


class TakesOldStamps(Replica):
    def take(self, answer):
        taken = super().take(answer)
        if taken is not None and answer.version > self.kept.version:
            self._keep_row(answer.version, answer.isr, answer.eligible)
        return taken


class ComparesEpochNumbersOnly(Replica):
    def _same_to(self, position, log):
        def numbers(history):
            found = EpochHistory()
            for entry in history.entries:
                found.note(entry.epoch, 0, entry.first_offset)
            return found

        assert position.history is not None
        theirs = numbers(EpochHistory([EpochStart(*entry) for entry in position.history]))
        return theirs.divergence(position.end, numbers(log.epochs), log.written_end)


class ObeysOldControllers(Replica):
    def obey(self, ballot, assignment):
        return super().obey(max(ballot, self.kept.ballot), assignment)


class ObeysForItsFormerLife(Replica):
    def obey(self, ballot, assignment):
        if assignment.leader == self.member.node:
            assignment = replace(assignment, leader_incarnation=self.member.incarnation)
        return super().obey(ballot, assignment)


class AcknowledgesBeforeSync(Replica):
    def _position(self, log_id):
        found = super()._position(log_id)
        return found._replace(synced_end=found.end)

    def _committed_to(self, log_id, log, counted):
        return min([log.written_end, *(one.synced.get(log_id, 0) for one in counted)])


class CutsToItsWatermark(Replica):
    def _begin(self, assignment):
        super()._begin(assignment)
        if not self.is_leader:
            for log in self.logs.values():
                log.cut(log.high_watermark)


class TrustsAKnownLeader(Replica):
    """Does not look for divergence when the leader is the one it followed before."""

    followed = None

    def fetch(self, logs=None):
        found = super().fetch(logs)
        if found is not None and self.followed == found.stint.leader:
            return found._replace(positions=tuple(one._replace(history=()) for one in found.positions))
        return found

    def take(self, answer):
        taken = super().take(answer)
        if taken is not None and taken.goes:
            self.followed = answer.stint.leader
        return taken

    def _same_to(self, position, log):
        return min(position.end, log.written_end) if position.history == () else super()._same_to(position, log)


class IgnoresWhoIsAboutToJoin(Replica):
    def _counted(self):
        pending, self.pending = self.pending, None
        try:
            return super()._counted()
        finally:
            self.pending = pending


class ShrinksBeforeTheCommit(Replica):
    def _counted(self):
        before = self.assignment
        if before is not None and self.pending is not None:
            self.assignment = replace(before, isr=tuple(copy for copy in before.isr if copy in self.pending.isr))
        try:
            return super()._counted()
        finally:
            self.assignment = before


class TakesOneLogForAll(Replica):
    """A follower that caught up in one log of the shard is taken for in sync."""

    def _is_above(self, follower, floors):
        return any(follower.synced.get(log_id, 0) >= floor for log_id, floor in floors.items())


class SkipsLogsItHasNotHeardOf(Replica):
    """A log that a follower has not told of counts as one that it has."""

    def _committed_to(self, log_id, log, counted):
        return min([log.synced_end, *(one.synced[log_id] for one in counted if log_id in one.synced)])


def longest(row, replies, fence, ballot, there):
    """The recovery that is right for a shard of one log: the longest leads."""
    sound = [one for one in replies if not one.is_blank and not one.is_corrupt]
    if len(sound) < answers_needed(row):
        return None
    best = max(sound, key=lambda one: (one.last, one.end, -one.member.node))
    return replace(
        row,
        leader=best.member.node,
        leader_incarnation=best.member.incarnation,
        epoch=fence + 1,
        isr=(best.member.copy,),
        eligible=(),
        version=RowVersion(max([row.version.number, *(one.version.number for one in replies)]) + 1, ballot),
    )


BUDGETS = {
    "": Budget(),
    "wipe": Budget(wipes=1, crashes=2),
    "twice": Budget(regressions=2, controllers=4),
}


class Planted(NamedTuple):
    """A mistake, the walks that may meet it, and within how many one does (0: it is told as a story)."""

    mistakes: Mistakes
    budget: str
    walks: int
    # Its number in the list of known mistakes, or the rule that it breaks.
    known: str


MISTAKES: dict[str, Planted] = {
    "acknowledges_before_sync": Planted(Mistakes(AcknowledgesBeforeSync), "", 500, "MUT1"),
    "cuts_to_its_watermark": Planted(Mistakes(CutsToItsWatermark), "", 500, "MUT2"),
    "trusts_a_known_leader": Planted(Mistakes(TrustsAKnownLeader), "", 3000, "MUT3"),
    "ignores_who_is_about_to_join": Planted(Mistakes(IgnoresWhoIsAboutToJoin), "", 5000, "MUT4"),
    "shrinks_before_the_commit": Planted(Mistakes(ShrinksBeforeTheCommit), "", 1000, "MUT5"),
    "names_the_life_at_commit": Planted(Mistakes(names_life_at_commit=True), "wipe", 20000, "MUT7"),
    "no_sweep": Planted(Mistakes(sweeps=False), "", 0, "MUT8, 11b"),
    "one_answer_proves": Planted(Mistakes(answers_needed=lambda row: 1), "", 0, "MUT11b"),
    "answers_promise_nothing": Planted(Mistakes(sweep_promises=False), "", 0, "MUT11"),
    "alters_before_the_sweep": Planted(Mistakes(alters_before_sweep=True), "", 0, "MUT10"),
    "obeys_for_its_former_life": Planted(Mistakes(ObeysForItsFormerLife), "wipe", 500, "MUT11c"),
    "obeys_old_controllers": Planted(Mistakes(ObeysOldControllers), "", 0, "C3"),
    "counts_under_any_version": Planted(Mistakes(CountsUnderAnyVersion), "", 0, "MUT11d"),
    "takes_old_stamps": Planted(Mistakes(TakesOldStamps), "", 0, "MUT11d"),
    "compares_epoch_numbers_only": Planted(Mistakes(ComparesEpochNumbersOnly), "", 0, "C7"),
    "counts_any_disk": Planted(Mistakes(CountsAnyDisk), "wipe", 5000, "MUT6"),
    "takes_one_log_for_all": Planted(Mistakes(TakesOneLogForAll), "", 0, ""),
    "skips_logs_it_has_not_heard_of": Planted(Mistakes(SkipsLogsItHasNotHeardOf), "", 1000, ""),
    "the_longest_recovers": Planted(Mistakes(recovers=longest), "twice", 0, ""),
}


@contextmanager
def planted(mistakes: Mistakes) -> Iterator[None]:
    if mistakes.answers_needed is None:
        yield
    else:
        with patch.object(elections, "answers_needed", mistakes.answers_needed):
            yield


def walk(seed: int, mistakes: Mistakes | None = None, budget: Budget | None = None, steps: int = STEPS) -> Walk:
    """Raises Violation."""
    found = Walk(Random(seed), mistakes or Mistakes(), replace(budget or Budget()))
    with planted(found.mistakes):
        found.run(steps)
    return found


def first_violation(name: str, walks: int) -> tuple[int, str] | None:
    """(seed, what was lost) of the first walk that a planted mistake goes wrong in."""
    mistakes, budget = MISTAKES[name][:2]
    for seed in range(walks):
        try:
            walk(seed, mistakes, BUDGETS[budget])
        except Violation as violation:
            return seed, str(violation)
    return None


def main() -> None:
    walks = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    for name in sys.argv[2:]:
        print(f"{name}: {first_violation(name, walks) or f'not found in {walks} walks'}", flush=True)
    if len(sys.argv) > 2:
        return
    for name, budget in BUDGETS.items():
        acked = 0
        for seed in range(walks):
            acked += len(walk(seed, budget=budget).acked)
        print(
            f"{name or 'plain'}: {walks} walks, none lost anything; {acked / walks:.1f} acknowledged in each",
            flush=True,
        )


if __name__ == "__main__":
    main()
