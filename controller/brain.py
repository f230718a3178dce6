"""What the controller of a cluster decides: who is registered, who leads, where replicas lie. Machine: no clock.

Events come in (`joined`, `left`, `reported`, `fenced`, `alter`, what operators want), `decide` says what is to be
committed next, and once the store has it (`committed`), or a sweep is over, `effects` says what goes to which node. It
is asked again and again, and decides on what is: a commit that failed is simply decided anew.

    shard:   ASKING --- enough have answered, none knows better ---> PROVEN <-.
                \\--- one knows of something later ---> RECOVERING --- elected-'

- Nothing is ordered and no row written for a shard that is not proven (C1, C2, L5); but a forced election, which an
  operator orders, trusts nobody, and is recorded (E7).
- A node counts as there while it has a session *and* its life is the registered one (C4, E5).
- A node without the disk that the rows know, or not sure of what it holds, leaves every in-sync set in the transaction
  that registers it (E6).
- What nodes kept of the rows is evidence, too: a row that is later than the store's means that the store went back in
  time, wherever the replicas have moved meanwhile.

Neighbours: elections.py decides about one row, placement.py about where replicas lie, cluster.py carries it all out.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeAlias

from headrace.controller.changes import Change, DeleteNode, PutNode, PutShard, PutVhost, ReserveViews
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.elections import (
    Verdict,
    altered,
    elected,
    fencing_epoch,
    is_orderly,
    judge,
    recovered,
    without_disk,
)
from headrace.controller.entities import Endpoint, Node, NodeState, Shard, Vhost
from headrace.controller.errors import Invalid, NotFound
from headrace.controller.placement import Placement
from headrace.controller.snapshot import Snapshot
from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Member, RowVersion
from headrace.core_log.replication.messages import AlterIsr, OwnCopy, Report


class Trust(Enum):
    """How far a shard's row is believed."""

    ASKING = "its replicas are being asked"
    PROVEN = "it is the latest that anybody acted on"
    RECOVERING = "the store has forgotten something: its replicas are being fenced"


@dataclass(frozen=True, slots=True)
class ToAsk:
    node: int
    shard: int


@dataclass(frozen=True, slots=True)
class ToFence:
    node: int
    shard: int
    epoch: int


@dataclass(frozen=True, slots=True)
class ToOrder:
    node: int
    shard: int
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Note:
    """For the log, and whoever operates the cluster."""

    text: str


Effect: TypeAlias = ToAsk | ToFence | ToOrder | Note


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a node says of itself when its session begins."""

    member: Member
    endpoints: tuple[tuple[str, Endpoint], ...] = ()
    clean: bool = True
    # What it has applied of the metadata.
    version: int = 0
    next_view: int = 1
    shards: tuple[Shard, ...] = ()
    # Of shards that are damaged there, or lie on a disk of their own.
    copies: tuple[OwnCopy, ...] = ()


@dataclass(slots=True)
class _Session:
    arrival: Arrival
    since_s: float
    copies: dict[int, OwnCopy] = field(default_factory=dict)

    def member(self, shard: int) -> Member:
        """This life of the node, on the disk that it has the shard on."""
        own = self.copies.get(shard)
        member = self.arrival.member
        return member if own is None else member._replace(disk=own.disk)

    def is_damaged(self, shard: int) -> bool:
        own = self.copies.get(shard)
        return own is not None and own.is_damaged


@dataclass(slots=True)
class _Watch:
    """One shard, since this controller came to power."""

    trust: Trust = Trust.ASKING
    # By node: what it reported, and what it replied to being fenced.
    reports: dict[int, Report] = field(default_factory=dict)
    replies: dict[int, Report] = field(default_factory=dict)
    fence: int = 0
    # The latest row that some node kept.
    evidence: Assignment | None = None
    request: AlterIsr | None = None
    # The highest epoch that a replica was fenced for, or led in, beside the row's: below it, or in it, that one follows
    # nobody.
    stranded: int = 0
    # Nobody can be elected: said once.
    is_offline: bool = False


class Brain:
    def __init__(self, ballot: Ballot, snapshot: Snapshot, config: ClusterConfig, now_s: float) -> None:
        self.ballot = ballot
        self.snapshot = snapshot
        self._config = config
        self._sessions: dict[int, _Session] = {}
        self._watches: dict[int, _Watch] = {number: _Watch() for number in snapshot.shards}
        self._effects: list[Effect] = []
        # Nodes that may only not have heard of this controller yet, until when.
        self._expected = set(snapshot.nodes)
        self._expected_until_s = now_s + config.grace_s
        # Since when a node is away.
        self._away_since_s: dict[int, float] = dict.fromkeys(snapshot.nodes, now_s)
        # Whoever should lead is made to at once.
        self._balances_now: set[int] = set()
        self._next_view_min = 0
        # Before the shards are born: what nodes have of them, which must be nothing. By shard and node.
        self._findings: dict[tuple[int, int], Report] = {}
        self._searched: set[tuple[int, Member]] = set()
        self._is_birth_refused = False

    # -- who is there -------------------------------------------------------------------------------------------

    def joined(self, arrival: Arrival, now_s: float) -> str | None:
        """A session begins. Not None: why it does not."""
        member = arrival.member
        known = self.snapshot.nodes.get(member.node)
        here = self._sessions.get(member.node)
        if here is not None and here.arrival.member.disk != member.disk:
            return f"node {member.node} is here already, on another disk: is its number used twice?"
        if known is not None and known.disk == member.disk and known.incarnation > member.incarnation:
            return (
                f"node {member.node} has lived since: life {known.incarnation} is registered, not {member.incarnation}"
            )
        self._sessions[member.node] = _Session(arrival, now_s)
        self.copied(member.node, arrival.copies)
        self._expected.discard(member.node)
        self._away_since_s.pop(member.node, None)
        self._next_view_min = max(self._next_view_min, arrival.next_view)
        if arrival.version > self.snapshot.version:
            self._note(
                f"the metadata went back in time: node {member.node} has applied version {arrival.version}, "
                f"and the store has {self.snapshot.version}"
            )
        for kept in arrival.shards:
            self._take_evidence(kept)
        for number, watch in self._watches.items():
            row = self._latest(number, watch)
            if row is not None and member.node in row.replicas:
                self._greet(number, member)
        return None

    def copied(self, node: int, copies: Iterable[OwnCopy]) -> None:
        """What a node has of some shards is damaged, or was set aside and begins anew on a disk of its own (D7)."""
        session = self._sessions.get(node)
        if session is None:
            return
        before, session.copies = session.copies, {one.shard: one for one in copies}
        for number in session.copies:
            if session.is_damaged(number) and not (number in before and before[number].is_damaged):
                self._note(f"shard {number}: the replica of node {node} is damaged, and counts no longer")
                watch = self._watches.get(number)
                if watch is not None:
                    watch.is_offline = False

    def _take_evidence(self, kept: Shard) -> None:
        stored = self.snapshot.shards.get(kept.number)
        watch = self._watches.setdefault(kept.number, _Watch())
        if watch.trust is Trust.PROVEN:
            return
        latest = [row for row in (stored.assignment if stored else None, watch.evidence) if row is not None]
        if all(kept.assignment.version.age > row.version.age for row in latest):
            watch.evidence = kept.assignment

    def _greet(self, number: int, member: Member) -> None:
        watch = self._watches[number]
        match watch.trust:
            case Trust.ASKING:
                before = watch.reports.get(member.node)
                if before is not None and before.member.disk != self._sessions[member.node].member(number).disk:
                    del watch.reports[member.node]
                self._effects.append(ToAsk(member.node, number))
            case Trust.RECOVERING:
                self._effects.append(ToFence(member.node, number, watch.fence))
            case Trust.PROVEN:
                self._order(number, self.snapshot.shards[number].assignment, {member.node})
                # It may have been fenced for an election that was never held.
                self._effects.append(ToAsk(member.node, number))

    def left(self, node: int, now_s: float) -> None:
        """A session has ended, or none can be had: nobody answers there."""
        self._expected.discard(node)
        self._sessions.pop(node, None)
        self._away_since_s.setdefault(node, now_s)
        self._searched = {(number, member) for number, member in self._searched if member.node != node}

    @property
    def active(self) -> dict[int, Member]:
        """The nodes that are there, in the lives that are registered."""
        nodes = self.snapshot.nodes
        return {
            number: session.arrival.member
            for number, session in self._sessions.items()
            if number in nodes and nodes[number].member == session.arrival.member
        }

    def _fit(self, shard: int) -> dict[int, Member]:
        """The nodes that are there with a sound copy of a shard, or none, on the disks that they have it on."""
        sessions = self._sessions
        return {node: sessions[node].member(shard) for node in self.active if not sessions[node].is_damaged(shard)}

    # -- what replicas answer -----------------------------------------------------------------------------------

    def reported(self, shard: int, report: Report) -> None:
        watch = self._watches.get(shard)
        if watch is None and self._is_present(shard, report.member):
            self._findings[shard, report.member.node] = report
        if watch is None or not self._is_present(shard, report.member):
            return
        if watch.trust is Trust.PROVEN:
            row = self.snapshot.shards[shard].assignment
            if report.stint.epoch >= row.epoch and report.stint != row.stint:
                watch.stranded = max(watch.stranded, report.stint.epoch)
        if watch.trust is not Trust.ASKING:
            return
        watch.reports[report.member.node] = report
        self._judge(shard, watch)

    def _judge(self, number: int, watch: _Watch) -> None:
        row = self._latest(number, watch)
        if row is None:
            return
        stored = self.snapshot.shards.get(number)
        verdict = judge(row, watch.reports.values())
        if stored is None or stored.assignment != row:
            verdict = Verdict.CONTRADICTED
        match verdict:
            case Verdict.PROVEN:
                watch.trust = Trust.PROVEN
                watch.evidence = None
                self._order(number, row, row.replicas)
            case Verdict.CONTRADICTED:
                self._note(f"shard {number}: the store has forgotten its latest row; its replicas elect anew")
                self._begin_recovery(number, watch, row)
            case Verdict.UNPROVEN:
                pass

    def _latest(self, number: int, watch: _Watch) -> Assignment | None:
        stored = self.snapshot.shards.get(number)
        rows = [row for row in (stored.assignment if stored else None, watch.evidence) if row is not None]
        return max(rows, key=lambda row: row.version.age, default=None)

    def _begin_recovery(self, number: int, watch: _Watch, row: Assignment) -> None:
        watch.trust = Trust.RECOVERING
        watch.replies = {}
        watch.fence = max(watch.fence, fencing_epoch(row, watch.reports.values()))
        for node in row.replicas:
            if node in self._sessions:
                self._effects.append(ToFence(node, number, watch.fence))

    def fenced(self, shard: int, epoch: int, report: Report) -> None:
        """A replica has given up all below `epoch`, and tells what it had."""
        watch = self._watches.get(shard)
        if watch is None or watch.trust is not Trust.RECOVERING or not self._is_present(shard, report.member):
            return
        watch.reports[report.member.node] = report
        row = self._latest(shard, watch)
        if row is None or epoch != watch.fence:
            return
        if report.stint.epoch > epoch or (report.stint.epoch == epoch and report.stint.leader != NOBODY):
            # It has seen a later epoch than anybody told of so far, and has not given that up.
            self._begin_recovery(shard, watch, row)
        else:
            before = watch.replies.get(report.member.node)
            if before is None:
                watch.replies[report.member.node] = report
            elif before.member != report.member:
                # It has died since. What it knew of the row is not forgotten with it, wherever its disk has gone.
                knew = max(before, report, key=lambda one: one.version.age)
                watch.replies[report.member.node] = report._replace(
                    version=knew.version, isr=knew.isr, eligible=knew.eligible
                )

    def _is_present(self, shard: int, member: Member) -> bool:
        session = self._sessions.get(member.node)
        return session is not None and session.member(shard) == member

    def alter(self, shard: int, request: AlterIsr) -> None:
        """A leader asks for another in-sync set; it asks again until an order settles that (E4)."""
        watch = self._watches.get(shard)
        if watch is not None and watch.trust is Trust.PROVEN:
            watch.request = request

    # -- what operators want ------------------------------------------------------------------------------------

    def drain(self, node: int) -> list[Change]:
        return self._with_state(node, NodeState.DRAINING)

    def undrain(self, node: int) -> list[Change]:
        return self._with_state(node, NodeState.ACTIVE)

    def _with_state(self, number: int, state: NodeState) -> list[Change]:
        return [PutNode(replace(self._node(number), state=state))]

    def remove(self, number: int) -> list[Change]:
        """A node that holds nothing any more is forgotten."""
        if number in self._sessions:
            raise Invalid(f"node {number} is up: stop it first")
        return [DeleteNode(self._node(number).id)]

    def move(self, number: int, nodes: Sequence[int]) -> list[Change]:
        """The replicas of a shard go to these nodes; the first leads."""
        shard = self._shard(number)
        for node in nodes:
            if self._node(node).state is NodeState.DRAINING:
                raise Invalid(f"node {node} is being drained")
        if len(nodes) < shard.assignment.min_isr:
            raise Invalid(f"shard {number} needs {shard.assignment.min_isr} nodes or more, not {len(nodes)}")
        self._refuse_unproven(number)
        return [PutShard(replace(shard, target=tuple(nodes)))]

    def balance(self) -> list[Change]:
        """Even shares for all nodes that are there."""
        placed = Placement(self._usable(), self._wanted())
        placed.repair()
        placed.spread()
        placed.lead_evenly()
        self._balances_now = set(self.snapshot.shards)
        return self._targets(placed)

    def force(self, number: int, node: int) -> list[Change]:
        """Let a node lead that may lack what was confirmed, because nobody who has it will come back (E7)."""
        shard = self._shard(number)
        if node not in self.active:
            raise Invalid(f"node {node} is not there, and cannot lead")
        member = self._fit(number).get(node)
        if member is None:
            raise Invalid(
                f"the replica of node {node} is damaged, and cannot lead: repair it, or let another node lead"
            )
        row = self._latest(number, self._watches[number])
        assert row is not None
        if node not in row.replicas:
            raise Invalid(f"node {node} has no replica of shard {number}")
        watch = self._watches[number]
        told = [*watch.reports.values(), *watch.replies.values()]
        epoch = fencing_epoch(row, told) + 1
        version = RowVersion(max([row.version.number, *(one.version.number for one in told)]) + 1, self.ballot)
        led = replace(
            row,
            leader=node,
            leader_incarnation=member.incarnation,
            epoch=epoch,
            isr=(member.copy,),
            eligible=(),
            version=version,
            forced_epoch=epoch,
        )
        self._note(
            f"shard {number}: by order of an operator node {node} leads epoch {epoch}; what was confirmed and it does "
            "not have is lost"
        )
        return [PutShard(replace(shard, assignment=led, target=(), forced_epoch=epoch))]

    def _node(self, number: int) -> Node:
        node = self.snapshot.nodes.get(number)
        if node is None:
            raise NotFound(f"no node {number}")
        return node

    def _shard(self, number: int) -> Shard:
        shard = self.snapshot.shards.get(number)
        if shard is None:
            raise NotFound(f"no shard {number}")
        return shard

    def _refuse_unproven(self, number: int) -> None:
        if self._watches[number].trust is not Trust.PROVEN:
            raise Invalid(f"shard {number} cannot be changed now: {self._watches[number].trust.value}")

    def placed(self, changes: Iterable[Change]) -> list[Change]:
        """The changes of a client: each new vhost goes to the shard that has the fewest, and old ones stay."""
        counts = dict.fromkeys(self.snapshot.shards or range(self._config.shards), 0)
        for vhost in self.snapshot.vhosts.values():
            counts[vhost.shard] = counts.get(vhost.shard, 0) + 1
        made: dict[str, int] = {}
        result: list[Change] = []
        for change in changes:
            if isinstance(change, PutVhost):
                name = change.vhost.name
                known = self.snapshot.vhosts.get(name)
                if known is not None:
                    shard = known.shard
                elif name not in made:
                    shard = 0 if name == "/" else min(counts, key=lambda number: (counts[number], number))
                    made[name] = shard
                    counts[shard] += 1
                else:
                    shard = made[name]
                change = PutVhost(Vhost(name, shard))
            result.append(change)
        return result

    # -- deciding -----------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> list[Change]:
        """What is to be committed next; nothing: all is as it should be, as far as it can be."""
        if now_s >= self._expected_until_s:
            self._expected.clear()
        changes = self._registrations()
        if self._next_view_min > self.snapshot.next_view:
            first = self.snapshot.next_view
            changes.append(ReserveViews(first, self._next_view_min - first))
        if changes:
            # Who leads is decided on who is there then.
            return changes
        changes = self._births() or self._repairs(now_s)
        written = {change.shard.number for change in changes if isinstance(change, PutShard)}
        for number, watch in sorted(self._watches.items()):
            if number not in written:
                changes += [PutShard(found) for found in self._next_row(number, watch, now_s)]
        for change in changes:
            assert not isinstance(change, PutShard) or is_orderly(change.shard.assignment), change
        return changes

    def _registrations(self) -> list[Change]:
        changes: list[Change] = []
        rows = {number: shard.assignment for number, shard in self.snapshot.shards.items()}
        touched: set[int] = set()
        for number, session in sorted(self._sessions.items()):
            arrival = session.arrival
            known = self.snapshot.nodes.get(number)
            state = known.state if known is not None else NodeState.ACTIVE
            node = Node(
                number, arrival.member.incarnation, arrival.member.disk, state, arrival.endpoints, arrival.clean
            )
            if known == node:
                continue
            is_new_life = known is None or known.member != arrival.member
            leaving = [
                shard
                for shard, row in rows.items()
                if any(
                    copy.node == number
                    and (copy.disk != session.member(shard).disk or (is_new_life and not arrival.clean))
                    for copy in (*row.isr, *row.eligible)
                )
            ]
            # All of its rows in one transaction, so that it waits until each may be written. Those that are being
            # recovered are not waited for: they are replaced whole, maybe by one that this very life leads.
            if any(self._watches[shard].trust is Trust.ASKING for shard in leaving):
                continue
            for shard in leaving:
                if self._watches[shard].trust is Trust.PROVEN:
                    rows[shard] = without_disk(rows[shard], number, self.ballot)
                    touched.add(shard)
            changes.append(PutNode(node))
        changes += [PutShard(replace(self.snapshot.shards[shard], assignment=rows[shard])) for shard in sorted(touched)]
        return changes

    def _births(self) -> list[Change]:
        """The shards of a new cluster, as soon as there are nodes enough."""
        if self.snapshot.shards or self._watches:
            return []
        nodes = [number for number in self.active if self.snapshot.nodes[number].state is NodeState.ACTIVE]
        if len(nodes) < self._config.replicas or not self._is_nothing_there(nodes):
            return []
        placed: Placement[int] = Placement(nodes)
        placed.place(range(self._config.shards), self._config.replicas)
        placed.lead_evenly()
        return [PutShard(self._born(number, replicas)) for number, replicas in sorted(placed.replicas.items())]

    def _is_nothing_there(self, nodes: Collection[int]) -> bool:
        """A store may have forgotten that there were shards: what replicas have of them is not to be led anew from
        nothing. All that are there are asked, and promise, as in a sweep."""
        findings = []
        for number in range(self._config.shards):
            for node in nodes:
                member = self._sessions[node].member(number)
                found = self._findings.get((number, node))
                if found is not None and found.member == member:
                    findings.append(found)
                elif (number, member) not in self._searched:
                    self._searched.add((number, member))
                    self._effects.append(ToAsk(node, number))
        if any(found.stint.epoch or not found.is_blank for found in findings):
            if not self._is_birth_refused:
                self._is_birth_refused = True
                self._note("the store has forgotten the shards, and nodes have records of them: none is created anew")
            return False
        return len(findings) == self._config.shards * len(nodes)

    def _born(self, number: int, replicas: tuple[int, ...]) -> Shard:
        members = [self._sessions[node].member(number) for node in replicas]
        return Shard(
            number,
            Assignment(
                replicas,
                replicas[0],
                members[0].incarnation,
                1,
                tuple(sorted(member.copy for member in members)),
                RowVersion(1, self.ballot),
                self._config.min_isr,
            ),
        )

    def _usable(self) -> list[int]:
        """Nodes that may get something."""
        return [number for number in self.active if self.snapshot.nodes[number].state is NodeState.ACTIVE]

    def _wanted(self) -> dict[int, tuple[int, ...]]:
        """Where the replicas of each shard are, or are going."""
        return {number: shard.target or shard.assignment.replicas for number, shard in self.snapshot.shards.items()}

    def _repairs(self, now_s: float) -> list[Change]:
        """What lies on nodes that are being drained, or away for long, goes to others, if there are any."""
        lost = {node for node, since in self._away_since_s.items() if now_s - since >= self._config.lost_s}
        draining = {number for number, node in self.snapshot.nodes.items() if node.state is NodeState.DRAINING}
        leaving = lost | draining
        wanted = self._wanted()
        if not any(leaving.intersection(replicas) for replicas in wanted.values()):
            return []
        # Nodes that are away for a moment keep what they have, but get nothing.
        staying = (set(self.snapshot.nodes) - leaving) & ({*self.active} | set(self._away_since_s))
        placed = Placement(staying, wanted)
        placed.repair()
        return self._targets(placed)

    def _targets(self, placed: Placement[int]) -> list[Change]:
        """Where they are to be from now on. A shard never gets fewer replicas, nor one on a node that is not there."""
        changes: list[Change] = []
        for number, replicas in sorted(placed.replicas.items()):
            shard = self.snapshot.shards[number]
            now = shard.target or shard.assignment.replicas
            added = set(replicas) - set(shard.assignment.replicas)
            if (
                replicas == now
                or len(replicas) < len(now)
                or not added <= self.active.keys()
                or self._watches[number].trust is not Trust.PROVEN
            ):
                continue
            target = () if replicas == shard.assignment.replicas else replicas
            changes.append(PutShard(replace(shard, target=target)))
        return changes

    # -- one shard ----------------------------------------------------------------------------------------------

    def _next_row(self, number: int, watch: _Watch, now_s: float) -> Iterable[Shard]:
        """At most one: the next step of this shard."""
        if watch.trust is Trust.RECOVERING:
            yield from self._recovered(number, watch)
        if watch.trust is not Trust.PROVEN:
            return
        shard = self.snapshot.shards[number]
        row = shard.assignment
        found = (
            self._without_lost_copies(number, row)
            or self._on_request(number, watch, row)
            or self._with_leader(number, watch, shard)
        )
        if found is not None:
            yield replace(shard, assignment=found)
            return
        if shard.target:
            moved = self._moved(shard)
            if moved is not None:
                yield moved
            return
        balanced = self._balanced(number, row, now_s)
        if balanced is not None:
            yield replace(shard, assignment=balanced)

    def _recovered(self, number: int, watch: _Watch) -> Iterable[Shard]:
        latest = self._latest(number, watch)
        assert latest is not None
        # The row names a life of its leader: one that replied, and is registered by now.
        led = recovered(latest, watch.replies.values(), watch.fence, self.ballot, self._fit(number))
        if led is not None:
            shard = self.snapshot.shards.get(number)
            yield Shard(number, led) if shard is None else replace(shard, assignment=led)

    def _without_lost_copies(self, number: int, row: Assignment) -> Assignment | None:
        counted = (*row.isr, *row.eligible)
        for copy in counted:
            session = self._sessions.get(copy.node)
            if session is None:
                continue
            if session.member(number).disk != copy.disk:
                return without_disk(row, copy.node, self.ballot)
            # While nobody else has all of it, it stays for an operator to repair.
            if session.is_damaged(number) and any(self._is_sound(number, other.node) for other in counted):
                return without_disk(row, copy.node, self.ballot)
        return None

    def _is_sound(self, number: int, node: int) -> bool:
        session = self._sessions.get(node)
        return session is None or not session.is_damaged(number)

    def _on_request(self, number: int, watch: _Watch, row: Assignment) -> Assignment | None:
        request = watch.request
        if request is None:
            return None
        found = altered(row, request, self._fit(number), self.ballot)
        if found is None:
            # It was decided on another row, which has passed: its leader is told of this one.
            watch.request = None
            self._order(number, row, {request.stint.leader})
        return found

    def _with_leader(self, number: int, watch: _Watch, shard: Shard) -> Assignment | None:
        row = shard.assignment
        active = self._fit(shard.number)
        leader = active.get(row.leader)
        is_led = leader is not None and leader.incarnation == row.leader_incarnation
        if is_led and self.snapshot.nodes[row.leader].state is NodeState.ACTIVE:
            watch.is_offline = False
            return self._above(row, watch.stranded)
        if not is_led and row.leader in self._expected:
            return None
        staying = {node: one for node, one in active.items() if self.snapshot.nodes[node].state is NodeState.ACTIVE}
        prefer = shard.target or row.replicas
        if is_led:
            return self._handed_over(row, staying, prefer)
        above = row if watch.stranded < row.epoch else replace(row, epoch=watch.stranded)
        found = elected(above, staying, self.ballot, prefer=prefer)
        if found is None:
            found = elected(above, active, self.ballot, prefer=prefer)
            if found is None and not watch.is_offline:
                watch.is_offline = True
                self._note(
                    f"shard {number} has no leader: none of nodes {_nodes(row)}, which have all of it, is there and "
                    "sound"
                )
        return found

    def _above(self, row: Assignment, stranded: int) -> Assignment | None:
        """The same leader in a later epoch, where a replica could not follow it in this one; None: all can."""
        if stranded < row.epoch:
            return None
        return replace(row, epoch=stranded + 1, version=RowVersion(row.version.number + 1, self.ballot))

    def _handed_over(self, row: Assignment, to: Mapping[int, Member], prefer: Sequence[int]) -> Assignment | None:
        """Another leads, though the one who does is there: one of the in-sync set, and nobody leaves that by it."""
        led = elected(row, to, self.ballot, prefer=prefer)
        if led is None or led.leader not in row.in_sync_nodes or led.leader == row.leader:
            return None
        return replace(led, isr=row.isr, eligible=row.eligible)

    def _moved(self, shard: Shard) -> Shard | None:
        """The next step to where its replicas are to be."""
        row, target, active = shard.assignment, shard.target, self._fit(shard.number)
        missing = [node for node in target if node not in row.replicas and node in active]
        if missing:
            away = [node for node in row.replicas if node not in target and node not in active]
            # One that is away makes room; else there is one more for a while, so that nothing is given up early.
            replicas = tuple(missing[0] if node == away[0] else node for node in row.replicas) if away else ()
            return replace(shard, assignment=self._with_replicas(row, replicas or (*row.replicas, missing[0])))
        if not set(target) <= row.in_sync_nodes:
            return None
        if row.leader != target[0]:
            there = {node: member for node, member in active.items() if node in target}
            led = self._handed_over(row, there, target)
            if led is not None:
                return replace(shard, assignment=led)
        if row.leader not in target:
            return None
        return replace(shard, assignment=self._with_replicas(row, target), target=())

    def _with_replicas(self, row: Assignment, replicas: tuple[int, ...]) -> Assignment:
        return replace(
            row,
            replicas=replicas,
            isr=tuple(copy for copy in row.isr if copy.node in replicas),
            eligible=tuple(copy for copy in row.eligible if copy.node in replicas),
            version=RowVersion(row.version.number + 1, self.ballot),
        )

    def _balanced(self, number: int, row: Assignment, now_s: float) -> Assignment | None:
        """Leadership comes back to whoever should have it, once that one is in sync and has been there for a while."""
        first = row.replicas[0]
        if row.leader == first or first not in row.in_sync_nodes or first not in self._usable():
            self._balances_now.discard(number)
            return None
        been_there_s = now_s - self._sessions[first].since_s
        if number not in self._balances_now and been_there_s < self._config.balance_s:
            return None
        self._balances_now.discard(number)
        return self._handed_over(row, self._fit(number), (first,))

    # -- what follows -------------------------------------------------------------------------------------------

    def committed(self, snapshot: Snapshot) -> None:
        """The store has what was decided (and what others wanted): it counts, and may be ordered."""
        before, known = self.snapshot, self.active
        self.snapshot = snapshot
        for number, shard in snapshot.shards.items():
            row = shard.assignment
            old = before.shards.get(number)
            if old is not None and old.assignment == row:
                continue
            watch = self._watches.setdefault(number, _Watch())
            # Whatever this controller wrote, it has proven first; a shard that was born, or forced, begins here.
            watch.trust = Trust.PROVEN
            watch.evidence = watch.request = None
            watch.reports, watch.replies = {}, {}
            self._order(number, row, {*row.replicas, *(old.assignment.replicas if old is not None else ())})
        for node, member in self.active.items():
            if known.get(node) != member:
                for number, shard in snapshot.shards.items():
                    if node in shard.assignment.replicas and self._watches[number].trust is Trust.PROVEN:
                        self._order(number, shard.assignment, {node})

    def _order(self, number: int, row: Assignment, nodes: Collection[int]) -> None:
        # Not to a life that is not registered: the row may name another one, on another disk (C4, E6).
        active = self.active
        self._effects += [ToOrder(node, number, row) for node in sorted(nodes) if node in active]

    def _note(self, text: str) -> None:
        self._effects.append(Note(text))

    def effects(self) -> list[Effect]:
        """What is to be sent, each once, in this order."""
        found, self._effects = self._effects, []
        return found

    # -- for who looks ------------------------------------------------------------------------------------------

    def trust(self, shard: int) -> Trust:
        return self._watches[shard].trust

    @property
    def trusts(self) -> Mapping[int, Trust]:
        return {number: watch.trust for number, watch in self._watches.items()}

    @property
    def sessions(self) -> Collection[int]:
        return self._sessions.keys()


def _nodes(row: Assignment) -> str:
    return ", ".join(str(copy.node) for copy in (*row.isr, *row.eligible))
