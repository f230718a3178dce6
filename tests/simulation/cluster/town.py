"""One run: a cluster, its clients and its faults, from founding to the last check. Driver for tests."""

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from unittest.mock import patch

from tests.simulation.cluster.checks import History, Watch, check_logs, check_queues, problem_of_rest
from tests.simulation.cluster.clients import Clients
from tests.simulation.cluster.database import Database
from tests.simulation.cluster.faults import Faults
from tests.simulation.cluster.loop import deterministic
from tests.simulation.cluster.net import Net
from tests.simulation.cluster.node import Machine, Shape
from tests.simulation.cluster.world import Violation, World

from headrace.config import Config, load_config
from headrace.controller.cluster_config import ClusterConfig
from headrace.core_log import directory
from headrace.core_log.replication.config import ReplicationConfig
from headrace.delay import delays, firing, sorter
from headrace.gateways.delivery import broker as broker_module

FOUNDING_S = 60.0
# So long after the last fault everything is at rest.
REST_S = 120.0
ACKED_MIN = 50
# So long a story that is told when the time of faults is over may take to its end.
STORY_S = 20.0
# So long they may go on after the last fault to have published as much.
BUSY_S = 40.0


@dataclass(frozen=True, slots=True)
class Result:
    seed: int
    trace_hash: str
    counts: Counter[str]
    seconds: float
    violation: str | None
    tail: Sequence[str]

    @property
    def is_vacuous(self) -> bool:
        return self.counts["acked"] < ACKED_MIN or not self.counts["leader changes"]


@cache
def _base() -> Config:
    return load_config(None, {}, {})


class Town:
    def __init__(self, seed: int, *, keep_trace: bool = False, kinds: Sequence[str] = ()) -> None:
        self.kinds = kinds
        self.world = world = World(seed, keep_trace=keep_trace)
        random = world.dice("shape")
        self.node_count = random.choice((1, 3, 3, 3, 3, 3, 3, 3, 3, 5))
        self.shards = random.choice((1, 1, 1, 1, 1, 2))
        replicas, self.min_isr = {1: (1, 1), 3: (3, 2), 5: random.choice(((3, 2), (5, 3)))}[self.node_count]
        base = _base()
        storage = replace(
            base.storage,
            segment_bytes=random.choice((1024, 4096, 16384)),
            compression="none",
        )
        self.net = Net(world)
        self.database = Database(world)
        scale = random.choice((0.7, 1.0))
        timing = ClusterConfig(
            shards=self.shards,
            replicas=replicas,
            min_isr=self.min_isr,
            lease_ttl_s=5 * scale,
            renew_s=1 * scale,
            self_deadline_s=3 * scale,
            heartbeat_s=0.8 * scale,
            session_s=4 * scale,
            grace_s=2.5 * scale,
            commit_s=8 * scale,
            balance_s=random.choice((5.0, 30.0)),
            start_s=5 * scale,
            views=64,
        )
        replication = ReplicationConfig(
            lag_s=4 * scale,
            gone_s=1 * scale,
            wait_s=1.5,
            silence_s=3.0,
            watermark_s=0.02,
            retry_s=0.1,
            tick_s=0.4 * scale,
            alter_s=1 * scale,
            fetch_bytes_max=random.choice((1, 2000, 1 << 20)),
        )
        shape = Shape(replace(base, storage=storage), timing, replication)
        self.machines = [
            Machine(world, self.net, self.database, number + 1, shape) for number in range(self.node_count)
        ]
        self.history = History(world)
        self.watch = Watch(world, self.machines, self.history)
        vhosts = ["/", "b"][: self.shards]
        self.clients = Clients(world, self.machines, self.history, vhosts)
        self.views_segment = random.choice((2048, 1 << 20))
        # How often who looks does so: as in production, or less often, which is cheaper.
        look_s = random.choice((0.2, 2.0))
        self.periods = (
            (broker_module, "JOURNAL_PERIOD_S", random.choice((0.2, 0.6))),
            (firing, "LOOK_S", look_s),
            (sorter, "LOOK_S", look_s),
            (delays, "KEEP_S", look_s),
            (directory, "MAINTENANCE_S", random.choice((1.0, 4.0))),
        )
        self.fault_s = random.choice((4.0, 8.0))

    def run(self) -> Result:
        world = self.world
        violation: str | None = None
        logging.disable(logging.CRITICAL)
        try:
            with ExitStack() as stack:
                stack.enter_context(deterministic(world.dice("trio")))
                stack.enter_context(self.watch.in_place())
                views = replace(broker_module.VIEWS_CONFIG, segment_bytes_max=self.views_segment)
                stack.enter_context(patch.object(broker_module, "VIEWS_CONFIG", views))
                for place, name, seconds in self.periods:
                    stack.enter_context(patch.object(place, name, seconds))
                self._live()
        except Violation as found:
            violation = str(found)
        finally:
            logging.disable(logging.NOTSET)
            world.is_over = True
            for machine in self.machines:
                for life in [*machine.buried, *([machine.life] if machine.life is not None else [])]:
                    life.die("since the world ends")
                    life.loop.bury()
        return Result(world.seed, world.trace_hash, world.counts, world.now, violation, tuple(world.tail))

    def _live(self) -> None:
        world = self.world
        for machine in self.machines:
            machine.start()
        self.clients.found()
        if not world.run_until(FOUNDING_S, lambda: self.clients.is_founded):
            raise Violation("the cluster was not founded")
        self.database.remember()
        self.clients.begin()
        faults = Faults(
            world,
            self.machines,
            self.net,
            self.database,
            min_isr=self.min_isr,
            seconds=self.fault_s,
            kinds=self.kinds,
        )
        faults.begin()
        world.run_until(world.now + self.fault_s)
        world.run_until(world.now + STORY_S, lambda: faults.is_done)
        if not world.counts["leader changes"]:
            faults.change_a_leader()
        faults.stop()
        world.note("faults have stopped")
        world.run_until(world.now + BUSY_S, lambda: world.counts["acked"] >= ACKED_MIN)
        self.clients.finish()
        end = world.now + REST_S
        self._rest(end, lambda: problem_of_rest(self.machines, self.shards))
        check_logs(world, self.machines, self.history, self.shards)
        world.raise_violation()
        self.clients.drain()
        self._rest(max(end, self.clients.last_due_s) + REST_S, self.clients.problem_of_rest)
        check_queues(world, self.history)
        world.raise_violation()

    def _rest(self, end: float, problem: object) -> None:
        """Until there is no problem twice over, or the time is up."""
        assert callable(problem)
        world, calm = self.world, 0
        found = None
        while world.now < end:
            found = problem()
            calm = calm + 1 if found is None else 0
            if calm == 2:
                return
            world.run_until(world.now + 0.6)
        raise Violation(f"not at rest {REST_S:g} s after the last fault: {found}")


def run(seed: int, *, keep_trace: bool = False) -> Result:
    return Town(seed, keep_trace=keep_trace).run()
