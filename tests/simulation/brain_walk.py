"""Random walks over the controller's brain: nodes that come, go and lose their disks, controllers that follow each
other, a store that forgets. Replicas keep their word and hold no records. Driver for tests.

    python -m tests.simulation.brain_walk 5000            as it is: no walk may break a rule
    python -m tests.simulation.brain_walk 5000 born_blindly   a planted mistake: the first walk that finds it

A walk checks at every order: a stint of a shard begins once; whoever is made leader was in sync, or kept all that was
committed, by the row before; no row is written and no order given for a shard that the same controller has
not proven; and that in the end, with everybody there, each shard that can be led is led.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any
from unittest.mock import patch
from uuid import UUID

from headrace.controller import brain as brain_module
from headrace.controller import elections
from headrace.controller.brain import Arrival, Brain, Note, ToAsk, ToFence, ToOrder, Trust
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Shard, Version
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.core_log.ids import ViewId
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
from headrace.core_log.replication.messages import AlterIsr, Report

NODES = (1, 2, 3)
CONFIG = ClusterConfig(shards=2, replicas=3, min_isr=2)


class Violation(Exception):
    """A rule of the controller does not hold."""


@dataclass(slots=True)
class Kept:
    """What one node's disk holds of one shard."""

    ballot: Ballot = NO_BALLOT
    stint: Stint = NO_STINT
    row: Assignment | None = None
    is_blank: bool = True


@dataclass(slots=True)
class Machine:
    number: int
    disk: UUID
    life: int = 1
    is_up: bool = True
    # The node's snapshot, and its shards' promises.
    snapshot: Snapshot | None = None
    shards: dict[int, Kept] = field(default_factory=dict)

    @property
    def member(self) -> Member:
        return Member(self.number, self.life, self.disk)

    def kept(self, shard: int) -> Kept:
        return self.shards.setdefault(shard, Kept())

    def report(self, shard: int) -> Report:
        kept = self.kept(shard)
        row = kept.row
        version, isr, eligible = (row.version, row.isr, row.eligible) if row else (NO_VERSION, (), ())
        return Report(self.member, kept.stint, version, kept.stint, 0, kept.is_blank, False, isr, eligible)


@dataclass(slots=True)
class Walk:
    random: Random
    snapshot: Snapshot = field(init=False)
    machines: dict[int, Machine] = field(init=False)
    brain: Brain | None = None
    epoch: int = 0
    now_s: float = 0.0
    disk_count: int = 10
    history: list[Snapshot] = field(default_factory=list)
    leaders: dict[tuple[int, Stint], tuple[Member, RowVersion]] = field(default_factory=dict)
    regressions: int = 2
    wipes: int = 1

    def __post_init__(self) -> None:
        self.snapshot = load(UUID(int=1), Version(0), ViewId(1))
        self.machines = {number: Machine(number, UUID(int=number)) for number in NODES}

    # -- steps --------------------------------------------------------------------------------------------------

    def run(self, steps: int = 150) -> None:
        for _ in range(steps):
            self.random.choice(
                [self.take_over, self.come, self.go, self.step, self.step, self.step, self.step, self.ask, self.mishap]
            )()
        self.heal()

    def heal(self) -> None:
        self.take_over()
        for _ in range(60):
            self.come()
            self.step()
            self.now_s += CONFIG.grace_s
        shards = self.snapshot.shards
        for number, shard in shards.items():
            row = shard.assignment
            possible = any(copy in self.copies() for copy in (*row.isr, *row.eligible))
            if possible and row.leader not in NODES:
                raise Violation(f"shard {number} is led by nobody, though it could be: {row}")

    def copies(self) -> set[Copy]:
        return {machine.member.copy for machine in self.machines.values()}

    def take_over(self) -> None:
        self.epoch += 1
        self.commit(apply(self.snapshot, ()))
        self.brain = Brain(Ballot(self.epoch, self.random.randint(1, 9)), self.snapshot, CONFIG, self.now_s)

    def come(self) -> None:
        for machine in self.machines.values():
            if not machine.is_up:
                machine.is_up, machine.life = True, machine.life + 1
            known = self.brain is not None and machine.number in self.brain.sessions
            if self.brain is not None and not known and self.random.random() < 0.7:
                seen = machine.snapshot
                self.brain.joined(
                    Arrival(
                        machine.member,
                        version=seen.version if seen else 0,
                        next_view=seen.next_view if seen else 1,
                        shards=tuple(seen.shards.values()) if seen else (),
                    ),
                    self.now_s,
                )

    def go(self) -> None:
        machine = self.random.choice(list(self.machines.values()))
        machine.is_up = self.random.random() < 0.3
        if self.brain is not None:
            self.brain.left(machine.number, self.now_s)
        if not machine.is_up:
            for kept in machine.shards.values():
                if kept.stint.leader == machine.number:
                    kept.stint = Stint(kept.stint.epoch, NOBODY)

    def mishap(self) -> None:
        if self.regressions and self.history and self.random.random() < 0.2:
            self.regressions -= 1
            for _ in range(self.random.randint(1, min(3, len(self.history)))):
                self.snapshot = self.history.pop()
            # The living controller's next compare-and-set fails: it is over.
            self.brain = None
        elif self.wipes and self.random.random() < 0.1:
            self.wipes -= 1
            machine = self.random.choice(list(self.machines.values()))
            if self.brain is not None:
                self.brain.left(machine.number, self.now_s)
            self.disk_count += 1
            self.machines[machine.number] = Machine(machine.number, UUID(int=self.disk_count), machine.life, False)

    def ask(self) -> None:
        """A leader leaves one out, or takes one in."""
        if self.brain is None:
            return
        for machine in self.machines.values():
            for number, kept in machine.shards.items():
                row = kept.row
                if not machine.is_up or row is None or kept.stint != row.stint or row.leader != machine.number:
                    continue
                other = self.machines[self.random.choice(NODES)]
                inside = other.member.copy in row.isr
                if other is machine or (inside and len(row.isr) < 2):
                    continue
                isr = {copy for copy in row.isr if copy.node != other.number}
                joining = None if inside else other.member
                if joining is not None:
                    isr.add(joining.copy)
                asked = AlterIsr(row.stint, machine.life, row.version, tuple(sorted(isr)), joining)
                self.brain.alter(number, asked)

    def step(self) -> None:
        if self.brain is None:
            return
        self.now_s += 1
        self.send()
        if self.brain is None:
            return
        changes = self.brain.decide(self.now_s)
        if changes:
            self.check_rows(self.brain, [change.shard for change in changes if hasattr(change, "shard")])
            self.commit(apply(self.snapshot, changes))
            self.brain.committed(self.snapshot)
        self.send()

    def commit(self, after: Snapshot) -> None:
        self.history.append(self.snapshot)
        self.snapshot = after
        if self.brain is not None:
            for number in self.brain.sessions:
                if self.random.random() < 0.8:
                    self.machines[number].snapshot = after

    def check_rows(self, brain: Brain, shards: list[Shard]) -> None:
        for shard in shards:
            old, new = self.snapshot.shards.get(shard.number), shard.assignment
            if old is None or old.assignment == new:
                continue
            if brain.trust(shard.number) is Trust.ASKING:
                raise Violation(f"a row was written before the sweep: {new}")
            before = old.assignment
            if brain.trust(shard.number) is Trust.PROVEN and new.epoch > before.epoch:
                fit = {copy.node for copy in (*before.isr, *before.eligible)}
                if new.leader not in fit:
                    raise Violation(f"{new.leader} leads, and was not in sync by {before}")

    # -- what is sent -------------------------------------------------------------------------------------------

    def send(self) -> None:
        brain = self.brain
        while brain is not None and brain is self.brain and (effects := brain.effects()):
            for effect in effects:
                if isinstance(effect, Note):
                    continue
                machine = self.machines[effect.node]
                if not machine.is_up or self.random.random() < 0.1:
                    brain.left(effect.node, self.now_s)
                    continue
                kept = machine.kept(effect.shard)
                if brain.ballot < kept.ballot:
                    # It steps down.
                    self.brain = None
                    return
                kept.ballot = brain.ballot
                self.deliver(brain, machine, kept, effect)

    def deliver(self, brain: Brain, machine: Machine, kept: Kept, effect: ToAsk | ToFence | ToOrder) -> None:
        match effect:
            case ToAsk(_, shard):
                brain.reported(shard, machine.report(shard))
            case ToFence(_, shard, epoch):
                before = machine.report(shard)
                if epoch > kept.stint.epoch:
                    kept.stint = Stint(epoch, NOBODY)
                brain.fenced(shard, epoch, before)
            case ToOrder(_, shard, row):
                if brain.trust(shard) is not Trust.PROVEN:
                    raise Violation(f"shard {shard} was ordered before it was proven")
                self.obey(machine, kept, shard, row)

    def obey(self, machine: Machine, kept: Kept, shard: int, row: Assignment) -> None:
        if row.leader == machine.number and row.leader_incarnation != machine.life:
            return
        if row.leader != NOBODY and row.epoch > kept.stint.epoch:
            kept.stint, kept.row = row.stint, row
            if row.leader == machine.number:
                # The same number may be given to two after a store forgot, but no stint to two lives or rows (C7).
                begun = (machine.member, row.version)
                first = self.leaders.setdefault((shard, row.stint), begun)
                if first != begun:
                    raise Violation(f"{row.stint} of shard {shard} was begun by {first} and by {begun}")
        elif kept.row is not None and kept.stint == row.stint and row.version > kept.row.version:
            kept.row = row
        if machine.member.copy in row.isr:
            kept.is_blank = False


def walk(seed: int, steps: int = 150) -> Walk:
    found = Walk(Random(seed))
    found.run(steps)
    return found


# -- planted mistakes ---------------------------------------------------------------------------------------------


def _elects_anybody(
    row: Assignment, active: Mapping[int, Member], ballot: Ballot, *, prefer: Sequence[int] = ()
) -> Assignment | None:
    everybody = tuple(sorted(member.copy for node, member in active.items() if node in row.replicas))
    return elections.elected(replace(row, isr=everybody), active, ballot, prefer=prefer)


# What is put in place of what; each is found by a walk.
MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "unclean_election": (brain_module, "elected", _elects_anybody),
    "born_blindly": (Brain, "_is_nothing_there", lambda brain, nodes: True),
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    if name is None:
        yield
        return
    place, attribute, mistake = MISTAKES[name]
    with patch.object(place, attribute, mistake):
        yield


def first_violation(walks: int, mistake: str | None = None) -> tuple[int, Exception] | None:
    with planted(mistake):
        for seed in range(walks):
            try:
                walk(seed)
            except (Violation, AssertionError) as error:
                return seed, error
    return None


if __name__ == "__main__":
    outcome = first_violation(int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
    print("no walk broke a rule" if outcome is None else f"seed {outcome[0]}: {outcome[1]!r}")
