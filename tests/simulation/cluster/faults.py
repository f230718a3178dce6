"""What goes wrong in a simulated cluster, drawn from the seed: a random set of kinds for each run, with quiet phases
between. Driver for tests.

What the protocol promises is respected: at most min ISR - 1 disks are lost for good. Everything else may happen at any
moment, and together. Neighbours: node.py, net.py, disk.py and database.py can do it; town.py says when it ends.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from tests.simulation.cluster.database import Database
from tests.simulation.cluster.net import Net
from tests.simulation.cluster.node import Life, Machine
from tests.simulation.cluster.world import World

from headrace.core_log.replication.shard import ShardReplica
from headrace.core_log.storage.tree import files

WALL_STEP_US = 300_000_000


class Faults:
    def __init__(
        self,
        world: World,
        machines: list[Machine],
        net: Net,
        database: Database,
        *,
        min_isr: int,
        seconds: float,
        kinds: Sequence[str] = (),
    ) -> None:
        """`kinds`: these and no others, for who looks for something certain."""
        self.world = world
        self.machines = machines
        self.net = net
        self.database = database
        self.random = world.dice("faults")
        self.is_over = False
        self.disks_to_lose = min_isr - 1
        self.kinds = list(kinds) or self._drawn()
        self._mean_s = self.random.choice((0.3, 0.6, 1.2))
        self._quiet_until = 0.0
        self._end = world.now + seconds
        # Whose processes stay away for now; how many stories are being told.
        self._kept_down: set[int] = set()
        self._stories = 0

    def _drawn(self) -> list[str]:
        known = sorted(name[5:] for name in dir(self) if name.startswith("_may_"))
        likely = self.random.choice((0.15, 0.3, 0.5))
        found = [name for name in known if self.random.random() < likely]
        # Something that makes leaders change.
        return found if {"kill", "power", "pause", "isolate", "straggler"} & set(found) else [*found, "kill"]

    def begin(self) -> None:
        self.world.note(f"faults: {' '.join(self.kinds)}")
        for machine in self.machines:
            machine.on_end = partial(self._back, machine)
        self._next()

    def _next(self) -> None:
        self.world.after(self._mean_s * self.random.expovariate(1.0) + 0.05, self._turn)

    def _turn(self) -> None:
        if self.is_over:
            return
        self._next()
        if self.world.now < self._quiet_until:
            return
        if self.random.random() < 0.06:
            self._quiet_until = self.world.now + self.random.uniform(1, 3)
            return
        kind = self.random.choice(self.kinds)
        if getattr(self, f"_may_{kind}")():
            self.world.counts[f"fault {kind}"] += 1

    def change_a_leader(self) -> None:
        """For a run in which no other fault has."""
        for machine in self.machines:
            if machine.life is not None and _leads(machine.life):
                machine.life.die("since it leads")
                return

    @property
    def is_done(self) -> bool:
        """No story is in the middle."""
        return not self._stories

    def stop(self) -> None:
        """Everything is as it should be again."""
        self.is_over = True
        self._kept_down.clear()
        self.net.cut.clear()
        self.net.slow.clear()
        self.net.mend()
        self.database.is_away = False
        self.database.cut.clear()
        self.database.loses_answers = 0.0
        for machine in self.machines:
            machine.speed.factor, machine.speed.stalled_until = 1.0, 0.0
            machine.disk.capacity_bytes = None
            machine.disk._faults.clear()
            machine.set_wall(0)
            life = machine.life
            if life is not None:
                life.resume()
                if life.fuse.left is not None:
                    life.die("at the end")
            if machine.life is None:
                machine.start()

    # -- helpers ------------------------------------------------------------------------------------------------

    def _living(self) -> Machine | None:
        """One whose process runs; rather one that matters."""
        lives = [machine for machine in self.machines if machine.life is not None and not machine.life.is_paused]
        if not lives:
            return None
        special = [machine for machine in lives if machine.life is not None and _matters(machine.life)]
        return self.random.choice(special if special and self.random.random() < 0.6 else lives)

    def _back(self, machine: Machine) -> None:
        """Its process is started again some time."""
        if self.is_over:
            self.world.after(0.5, lambda: self._start(machine))
            return
        self.world.after(
            self.random.choice((0.05, 0.5, 2.0, 8.0)) * (0.5 + self.random.random()), lambda: self._start(machine)
        )

    def _start(self, machine: Machine) -> None:
        if machine.number in self._kept_down:
            self.world.after(0.2, lambda: self._start(machine))
        elif machine.life is None and not self.world.is_over:
            machine.start()

    def _for_a_while(self, undo: Callable[[], None], *choices: float) -> None:
        def end() -> None:
            if not self.is_over:
                undo()

        self.world.after(self.random.choice(choices) * (0.5 + self.random.random()), end)

    # -- processes and power ------------------------------------------------------------------------------------

    def _may_kill(self) -> bool:
        machine = self._living()
        if machine is None or machine.life is None:
            return False
        life = machine.life
        if self.random.random() < 0.6:
            # In the middle of what it does with its disk next.
            life.fuse.left = self.random.choice((0, 1, 3, 10, 30))
            self.world.after(1.0, lambda: life.die("at last"))
        else:
            life.die("at once")
        return True

    def _may_power(self) -> bool:
        machine = self._living()
        if machine is None or machine.life is None:
            return False
        self._lose_power(machine)
        return True

    def _lose_power(self, machine: Machine) -> None:
        life = machine.life
        assert life is not None
        life.die("by a loss of power", silently=True)
        machine.disk = machine.disk.power_loss(self.random)

    def _may_blackout(self) -> bool:
        """All machines at once."""
        for machine in self.machines:
            if machine.life is not None:
                self._lose_power(machine)
        return True

    def _may_stop(self) -> bool:
        """A restart in good order."""
        machine = self._living()
        if machine is None or machine.life is None or not machine.life.is_serving:
            return False
        life = machine.life
        life.stop()
        # Whoever has too few others does not get to its end.
        self.world.after(15.0, lambda: life.die("since it does not stop"))
        return True

    def _may_pause(self) -> bool:
        machine = self._living()
        if machine is None or machine.life is None:
            return False
        life = machine.life
        life.pause()
        self._for_a_while(life.resume, 0.1, 1.0, 6.0, 20.0)
        return True

    def _may_wipe(self) -> bool:
        machine = self._living()
        if machine is None or machine.life is None or self.disks_to_lose < 1:
            return False
        self.disks_to_lose -= 1
        machine.life.die("and its disk with it")
        machine.wipe()
        return True

    # -- disks --------------------------------------------------------------------------------------------------

    def _may_badsync(self) -> bool:
        machine = self._living()
        if machine is None or machine.life is None:
            return False
        machine.disk.fail(self.random.choice(("sync", "sync", "sync_dir")), nth=self.random.randint(1, 10))
        return True

    def _may_full(self) -> bool:
        machine = self.random.choice(self.machines)
        disk = machine.disk
        if disk.capacity_bytes is not None:
            return False
        used = sum(len(inode.content) for inode, _ in files(disk._tree.root, ""))
        disk.capacity_bytes = used + self.random.choice((0, 500, 5000))

        def free() -> None:
            machine.disk.capacity_bytes = None

        self._for_a_while(free, 1.0, 4.0)
        return True

    def _may_slowdisk(self) -> bool:
        machine = self.random.choice(self.machines)
        machine.speed.factor = self.random.choice((10.0, 100.0))
        self._for_a_while(lambda: setattr(machine.speed, "factor", 1.0), 1.0, 5.0)
        return True

    def _may_stall(self) -> bool:
        machine = self.random.choice(self.machines)
        machine.speed.stalled_until = self.world.now + self.random.choice((1.0, 5.0, 12.0))
        return True

    # -- the network --------------------------------------------------------------------------------------------

    def _may_isolate(self) -> bool:
        """One node, rather the controller or a leader, from all others."""
        machine = self._living()
        if machine is None:
            return False
        others = [other.number for other in self.machines if other is not machine]
        self._cut({(machine.number, other) for other in others} | {(other, machine.number) for other in others})
        if self.random.random() < 0.3:
            self.database.cut.add(machine.number)
            self._for_a_while(lambda: self.database.cut.discard(machine.number), 1.0, 5.0, 15.0)
        return True

    def _may_oneway(self) -> bool:
        a, b = self.random.choice(self.machines).number, self.random.choice(self.machines).number
        if a == b:
            return False
        self._cut({(a, b)})
        return True

    def _may_halves(self) -> bool:
        numbers = [machine.number for machine in self.machines]
        self.random.shuffle(numbers)
        half = set(numbers[: len(numbers) // 2])
        rest = set(numbers) - half
        self._cut({(a, b) for a in half for b in rest} | {(b, a) for a in half for b in rest})
        return True

    def _may_straggler(self) -> bool:
        """A follower that its leader does not reach for a while, which the store may not hear of, and then maybe no
        leader: in-sync sets shrink and grow under way."""
        leaders = [machine for machine in self.machines if machine.life is not None and _leads(machine.life)]
        others = [machine.number for machine in self.machines if machine not in leaders[:1]]
        if not leaders or not others:
            return False
        leader, follower = leaders[0], self.random.choice(others)
        life = leader.life
        assert life is not None
        self._cut({(leader.number, follower), (follower, leader.number)})
        if self.random.random() < 0.5:
            self.database.is_away = True
            self._for_a_while(lambda: setattr(self.database, "is_away", False), 1.0, 4.0)
        if self.random.random() < 0.4:
            self._for_a_while(lambda: life.die("while its followers change"), 0.3, 1.5, 3.0)
        return True

    # -- stories: one thing after the other, each when the one before has had its effect ------------------------

    def _tell(self, *scenes: Callable[[], bool], patience_s: float) -> None:
        """Go on with the next when one is over (True), and leave it when it takes too long."""
        self._stories += 1
        left = deque(scenes)
        given_up_at = self.world.now + patience_s

        def look() -> None:
            while not self.is_over and left and left[0]():
                left.popleft()
            if self.is_over or not left or self.world.now > given_up_at:
                self._stories -= 1
                self._kept_down.clear()
            else:
                self.world.after(0.05, look)

        look()

    def _one_led(self) -> tuple[Machine, ShardReplica, Machine] | None:
        """Who leads a shard, and one of its followers that is in sync and up."""
        for machine in self.machines:
            if machine.life is None or not _leads(machine.life):
                continue
            replica = next(one for one in machine.life.replicas.values() if one.replica.is_leader)
            row = replica.replica.assignment
            assert row is not None
            found = [self.machines[node - 1] for node in sorted(row.in_sync_nodes - {machine.number})]
            found = [one for one in found if one.life is not None]
            if found:
                return machine, replica, self.random.choice(found)
        return None

    def _falls_out(self, replica: ShardReplica, follower: Machine) -> Callable[[], bool]:
        """It is killed, and stays away until the in-sync set is without it."""
        self._kept_down.add(follower.number)
        assert follower.life is not None
        follower.life.die("and falls behind")

        def scene() -> bool:
            row = replica.replica.assignment
            return row is not None and follower.number not in row.in_sync_nodes

        return scene

    def _may_rejoin(self) -> bool:
        """A follower comes back, and is out of reach again before the store has heard that it is in sync."""
        found = self._one_led()
        if found is None:
            return False
        leader, replica, follower = found

        def comes_back() -> bool:
            self.database.is_away = True
            self._kept_down.discard(follower.number)
            return True

        def joins() -> bool:
            pending = replica.replica.pending
            return pending is not None and pending.joining is not None

        def is_cut_off() -> bool:
            self._cut({(leader.number, follower.number), (follower.number, leader.number)})
            self._for_a_while(lambda: setattr(self.database, "is_away", False), 1.0, 3.0)
            return True

        self._tell(self._falls_out(replica, follower), comes_back, joins, is_cut_off, patience_s=5.0)
        return True

    def _may_depose(self) -> bool:
        """A leader that nobody reaches is followed by another, loses what only it has, and leads again."""
        found = self._one_led()
        if found is None:
            return False
        old, replica, _follower = found
        others = [machine for machine in self.machines if machine is not old]
        directions = {(old.number, other.number) for other in others} | {(other.number, old.number) for other in others}
        epoch = replica.replica.kept.stint.epoch
        self.world.note(f"node {old.number}: nobody reaches it, nor does it reach the database")
        self.net.cut |= directions
        self.database.cut.add(old.number)

        def successor() -> tuple[Machine, ShardReplica] | None:
            for machine in others:
                one = None if machine.life is None else machine.life.replicas.get(replica.shard)
                if one is not None and one.replica.is_leader and one.replica.kept.stint.epoch > epoch:
                    return machine, one
            return None

        def is_over() -> bool:
            if successor() is None:
                return False
            self.net.cut -= directions
            self.net.mend()
            self.database.cut.discard(old.number)
            return True

        def is_in_sync_again() -> bool:
            led = successor()
            row = None if led is None else led[1].replica.assignment
            if led is None or row is None or old.number not in row.in_sync_nodes:
                return False
            machine = led[0]
            assert machine.life is not None
            self._kept_down.add(machine.number)
            machine.life.die("and whom it deposed is there")
            return True

        def leads_again() -> bool:
            one = None if old.life is None else old.life.replicas.get(replica.shard)
            return one is not None and one.replica.is_leader and one.replica.kept.stint.epoch > epoch

        self._tell(is_over, is_in_sync_again, leads_again, patience_s=16.0)
        return True

    def _may_forget(self) -> bool:
        """The store forgets that a follower is not in sync any more, and that one is the first to be there again."""
        found = self._one_led()
        if found is None or self.database.regressions >= 2:
            return False
        _leader, replica, follower = found
        alone_s = self.random.choice((3.0, 8.0, 12.0))
        since_s = until_s = 0.0

        def begins_to_wait() -> bool:
            nonlocal since_s
            since_s = self.world.now
            return True

        def has_gone_on() -> bool:
            """Others have committed without it."""
            return self.world.now > since_s + 0.8

        def is_forgotten() -> bool:
            nonlocal until_s
            for machine in self.machines:
                if machine is not follower and machine.life is not None:
                    self._kept_down.add(machine.number)
                    machine.life.die("and those who were in sync are away")
            self.database.regress_until(
                lambda snapshot: follower.number in snapshot.shards[replica.shard].assignment.in_sync_nodes,
                promoted=self.random.random() < 0.5,
            )
            self._kept_down.discard(follower.number)
            until_s = self.world.now + alone_s
            return True

        def was_alone() -> bool:
            return self.world.now > until_s

        self._tell(
            self._falls_out(replica, follower),
            begins_to_wait,
            has_gone_on,
            is_forgotten,
            was_alone,
            patience_s=alone_s + 6.0,
        )
        return True

    def _cut(self, directions: set[tuple[int, int]]) -> None:
        self.world.note(f"net: cut {sorted(directions)}")
        self.net.cut |= directions

        def mend() -> None:
            self.world.note(f"net: open {sorted(directions)}")
            self.net.cut -= directions
            self.net.mend()

        self._for_a_while(mend, 0.3, 2.0, 6.0, 15.0)

    def _may_slownet(self) -> bool:
        number = self.random.choice(self.machines).number
        self.net.slow[number] = self.random.choice((0.05, 0.4, 1.5))
        self._for_a_while(lambda: self.net.slow.pop(number, None) and None, 1.0, 5.0)
        return True

    # -- the database -------------------------------------------------------------------------------------------

    def _may_nodatabase(self) -> bool:
        if self.random.random() < 0.5:
            machine = self._living()
            if machine is None:
                return False
            number = machine.number
            self.database.cut.add(number)
            self._for_a_while(lambda: self.database.cut.discard(number), 1.0, 5.0, 15.0)
        else:
            self.database.is_away = True
            self._for_a_while(lambda: setattr(self.database, "is_away", False), 1.0, 5.0, 15.0)
        return True

    def _may_unknown(self) -> bool:
        self.database.loses_answers = self.random.choice((0.2, 0.6))
        self._for_a_while(lambda: setattr(self.database, "loses_answers", 0.0), 1.0, 5.0)
        return True

    def _may_regress(self) -> bool:
        if self.database.regressions >= 2:
            return False
        self.database.regress(self.random.choice((1, 1, 2, 3, 8, 20)), promoted=self.random.random() < 0.5)
        return True

    # -- clocks -------------------------------------------------------------------------------------------------

    def _may_clock(self) -> bool:
        machine = self.random.choice(self.machines)
        offset_us = self.random.choice((0, self.random.randint(-WALL_STEP_US, WALL_STEP_US)))
        machine.set_wall(offset_us)
        self.world.note(f"node {machine.number}: its wall clock is off by {offset_us} us")
        return True


def _matters(life: Life) -> bool:
    if not life.is_serving:
        return False
    return life.agent.is_controller or _leads(life)


def _leads(life: Life) -> bool:
    return life.is_serving and any(one.replica.is_leader for one in life.replicas.values())
