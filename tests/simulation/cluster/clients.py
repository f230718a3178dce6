"""Clients of a simulated cluster: they publish, consume, settle and give up, and note what they know. Driver for tests.

A client talks to whichever node says that it serves the vhost, so also to one that leads no longer and does not know
it. What it asks is done in a task of that node; what it is told counts at the moment at which the node says it.

    orders     consumed: acked, rejected to `dead`, given back, or held until the consumer crashes
    kept       published to with numbers by producers that try again, and consumed by nobody before the end
    dead       what was rejected
    later      published to with delays
"""

from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from random import Random

import trio
from tests.simulation.cluster.checks import History, Place
from tests.simulation.cluster.members import GroupMember, Progress
from tests.simulation.cluster.node import Life, Machine
from tests.simulation.cluster.world import EPOCH_US, World

from headrace.controller.changes import create_vhost
from headrace.controller.errors import OutcomeUnknown
from headrace.controller.table import FieldIn, Table
from headrace.core_log.errors import DiskFull, Refused, SequenceRefused
from headrace.core_log.record import PERSISTENT, Producer, Protocol
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import View

# The flags word of a content header that has none.
NO_PROPERTIES = b"\0\0"
ATTRIBUTES = int(Protocol.AMQP) | PERSISTENT
ORDERS, KEPT, DEAD, LATER = "orders", "kept", "dead", "later"
QUEUES: dict[str, dict[str, FieldIn]] = {
    ORDERS: {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD, "x-delivery-limit": 1000},
    KEPT: {},
    DEAD: {},
    LATER: {},
}


class Clients:
    def __init__(self, world: World, machines: list[Machine], history: History, vhosts: list[str]) -> None:
        self.world = world
        self.machines = machines
        self.history = history
        self.vhosts = vhosts
        self.random = world.dice("clients")
        self.is_over = False
        self.is_draining = False
        self.publishers: list[Publisher] = []
        self.consumers: list[Consumer] = []
        self.groups: list[Progress] = []
        self.members: list[GroupMember] = []
        # What was drained.
        self.seen: set[bytes] = set()

    def serving(self, vhost: str) -> list[Life]:
        return [
            machine.life
            for machine in self.machines
            if machine.life is not None and not machine.life.is_paused and machine.life.service(vhost) is not None
        ]

    # -- before it begins ---------------------------------------------------------------------------------------

    def found(self) -> None:
        """Create the vhosts and the queues, as an operator would."""
        self._create_vhosts()

    def _create_vhosts(self) -> None:
        life = self.machines[0].life
        if life is None or not life.is_serving:
            self.world.after(0.2, self._create_vhosts)
            return

        async def create() -> None:
            metadata = life.agent.metadata
            for vhost in self.vhosts:
                if vhost not in metadata.snapshot.vhosts:
                    try:
                        await metadata.commit(*create_vhost(vhost, metadata.new_stream))
                    except (Refused, OutcomeUnknown):
                        self.world.after(0.5, self._create_vhosts)
                        return
            self.world.after(0.1, self._create_queues)

        life.post(create)

    def _create_queues(self) -> None:
        for vhost in self.vhosts:
            lives = self.serving(vhost)
            if not lives:
                self.world.after(0.2, self._create_queues)
                return
            life = lives[0]
            if not all(queue in life.service(vhost).broker.vhosts[vhost].queues for queue in QUEUES):  # type: ignore[union-attr]
                life.post(self._declare(life, vhost))
                self.world.after(0.3, self._create_queues)
                return
        self.is_founded = True

    is_founded = False

    def _declare(self, life: Life, vhost: str) -> Callable[[], Awaitable[None]]:
        async def declare() -> None:
            service = life.service(vhost)
            if service is None:
                return
            broker = service.broker
            for name, arguments in QUEUES.items():
                table = Table(arguments)
                try:
                    await broker.vhosts[vhost].declare_queue(
                        name, broker.settings_of(vhost, name, table), durable=True, arguments=table
                    )
                except (Refused, OutcomeUnknown):
                    return

        return declare

    # -- at work ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        for number in range(2 * len(self.vhosts)):
            vhost = self.vhosts[number // 2]
            self.publishers.append(Publisher(self, f"p{number}", vhost, numbered=number % 2 == 1))
        for number, vhost in enumerate(self.vhosts):
            self.consumers.append(Consumer(self, f"c{number}", vhost, ORDERS))
            group = Progress(self, vhost, [ORDERS, KEPT])
            self.groups.append(group)
            self.members += [GroupMember(group, f"m{number}-{place}") for place in range(2)]

    def finish(self) -> None:
        """Nothing more is published."""
        self.is_over = True

    def drain(self) -> None:
        """Everything that is there is taken and acked."""
        self.is_draining = True
        for consumer in self.consumers:
            consumer.leave()
        self.consumers = [
            Consumer(self, f"d{number}-{queue}", vhost, queue)
            for number, vhost in enumerate(self.vhosts)
            for queue in QUEUES
        ]

    @property
    def last_due_s(self) -> float:
        """When nothing is delayed any more: a clock that was set may have made that late."""
        return (max(self.history.due_us.values(), default=EPOCH_US) - EPOCH_US) / 1e6

    def problem_of_rest(self) -> str | None:
        """None: all that is to be there has come, and every queue is empty."""
        for vhost in self.vhosts:
            for life in self.serving(vhost):
                service = life.service(vhost)
                assert service is not None
                for name in QUEUES:
                    queue = service.broker.vhosts[vhost].queues.get(name)
                    if queue is None:
                        return f"queue {name} of {vhost} is gone"
                    if queue.message_count:
                        return f"queue {name} of {vhost} holds {queue.ready_count} and {queue.unacked_count}"
        for group in self.groups:
            problem = group.problem_of_rest()
            if problem is not None:
                return problem
        for consumer in self.consumers:
            if consumer.is_busy:
                return f"consumer {consumer.name} is not done"
        if any(body in self.history.acked and body not in self.seen for body in self.history.due_us):
            return "something is not due yet"
        return None


class Publisher:
    def __init__(self, clients: Clients, name: str, vhost: str, *, numbered: bool) -> None:
        self.clients = clients
        self.world = clients.world
        self.history = clients.history
        self.name = name
        self.vhost = vhost
        self.numbered = numbered
        self.random: Random = clients.world.dice(name)
        self.producer = self.random.randbytes(16)
        self.sequence = 0
        self.count = 0
        self.period_s = self.random.choice((0.3, 0.6))
        # How likely it is that it tries again what is not confirmed before it goes on.
        self.tries_again = self.random.choice((0.3, 0.3, 0.02))
        # What was confirmed last, which it does not know when the answer is lost.
        self.before: deque[tuple[int, list[bytes]]] = deque(maxlen=4)
        # Of a numbered producer: what is not confirmed yet, in order.
        self.unconfirmed: dict[int, bytes] = {}
        self.world.after(self.random.random(), self._turn)

    def _turn(self) -> None:
        clients = self.clients
        if clients.is_over and not (self.numbered and self.unconfirmed):
            return
        self.world.after(self.period_s * self.random.expovariate(1.0) + 0.001, self._turn)
        lives = clients.serving(self.vhost)
        if lives:
            life = self.random.choice(lives)
            life.post(lambda: self._numbered(life) if self.numbered else self._plain(life))

    def _body(self) -> bytes:
        self.count += 1
        return b"%s:%d:%s" % (self.name.encode(), self.count, b"x" * self.random.choice((1, 20, 300)))

    def _broker(self, life: Life) -> Broker | None:
        service = life.service(self.vhost)
        if service is None or service.broker.unwritable() is not None:
            return None
        return service.broker

    async def _plain(self, life: Life) -> None:
        broker = self._broker(life)
        if broker is None or self.clients.is_over:
            return
        queue = ORDERS if self.random.random() < 0.85 else LATER
        bodies = [self._body() for _ in range(self.random.choice((1, 8, 16)))]
        host = broker.vhosts[self.vhost]
        if queue not in host.queues:
            return
        for body in bodies:
            self.history.attempt(self.name, self.vhost, queue, body)
        if queue == LATER:
            self._park(life, broker, bodies)
            return
        try:
            target = host.target("", queue.encode(), [queue])
            log = target.log
            assert log is not None
            end = broker.publish(target, [NO_PROPERTIES] * len(bodies), bodies, attributes=ATTRIBUTES)
        except DiskFull:
            self.history.refused.update(bodies)
            return
        assert end is not None

        def confirmed() -> None:
            if not life.is_dead:
                for index, body in enumerate(bodies):
                    self.history.confirmed(body, Place(log.stream_id, log.partition, end - len(bodies) + index))

        log.when_committed(end, confirmed)
        broker.on_ready()

    def _park(self, life: Life, broker: Broker, bodies: list[bytes]) -> None:
        due_us = broker.env.clock.wall_us() + self.random.choice((300, 2000, 6000)) * 1000
        try:
            reached = broker.delayed.park(
                Duty(DutyKind.PUBLISH, self.vhost, ""),
                [LATER.encode()] * len(bodies),
                [NO_PROPERTIES] * len(bodies),
                bodies,
                due_us=[due_us] * len(bodies),
                attributes=ATTRIBUTES,
            )
        except DiskFull:
            self.history.refused.update(bodies)
            return
        for body in bodies:
            self.history.due_us[body] = due_us

        def parked() -> None:
            if not life.is_dead:
                for body in bodies:
                    self.history.confirmed(body, None)

        broker.delayed.when_parked(reached, parked)
        broker.on_ready()

    async def _numbered(self, life: Life) -> None:
        """The next one, or all that is not confirmed once more, or what was confirmed once more."""
        broker = self._broker(life)
        if broker is None:
            return
        host = broker.vhosts[self.vhost]
        if KEPT not in host.queues:
            return
        if self.before and self.random.random() < 0.15:
            first, bodies = self.random.choice(self.before)
        elif not self.clients.is_over and (not self.unconfirmed or self.random.random() >= self.tries_again):
            first = self.sequence
            bodies = [self._body() for _ in range(self.random.choice((1, 5)))]
            for body in bodies:
                self.unconfirmed[self.sequence] = body
                self.sequence += 1
                self.history.numbered.add(body)
                self.history.attempt(self.name, self.vhost, KEPT, body)
            if self.random.random() < self.tries_again:
                first, bodies = self._oldest()
        elif self.unconfirmed:
            first, bodies = self._oldest()
        else:
            return
        try:
            target = host.target("", KEPT.encode(), [KEPT])
            log = target.log
            assert log is not None
            end = broker.publish_once(
                target,
                Producer(self.producer, 0, first),
                [NO_PROPERTIES] * len(bodies),
                bodies,
                attributes=ATTRIBUTES,
            )
        except (DiskFull, SequenceRefused):
            return
        assert end is not None

        def confirmed() -> None:
            if not life.is_dead:
                self.before.append((first, bodies))
                for number, body in enumerate(bodies, first):
                    if self.unconfirmed.pop(number, None) is not None:
                        self.history.confirmed(body, None)

        log.when_committed(end, confirmed)
        broker.on_ready()

    def _oldest(self) -> tuple[int, list[bytes]]:
        """The first that are not confirmed, as far as their numbers follow each other."""
        first = end = min(self.unconfirmed)
        while end in self.unconfirmed:
            end += 1
        return first, [self.unconfirmed[number] for number in range(first, end)]


class Consumer:
    """Consumes one queue, from whoever serves it."""

    def __init__(self, clients: Clients, name: str, vhost: str, queue: str) -> None:
        self.clients = clients
        self.world = clients.world
        self.history = clients.history
        self.name = name
        self.vhost = vhost
        self.queue = queue
        self.random: Random = clients.world.dice(name)
        self.session: _Session | None = None
        self.has_left = False
        self._turn()

    @property
    def is_busy(self) -> bool:
        return self.session is None or bool(self.session.held) or self.session.is_settling

    def _turn(self) -> None:
        if self.has_left:
            return
        session = self.session
        lives = self.clients.serving(self.vhost)
        if session is not None and (session.life not in lives or session.is_over or not session.is_served):
            # Its connection is gone, which the node learns when it runs again.
            session.life.post(session.crash)
            self.session = session = None
        if session is None and lives:
            life = self.random.choice(lives)
            found = self.session = _Session(self, life)
            life.post(found.attach)
        self.world.after(0.4, self._turn)

    def leave(self) -> None:
        self.has_left = True
        if self.session is not None:
            session, self.session = self.session, None
            session.life.post(session.crash)


class _Session:
    """A consumer's connection to one life of one node. The Consumer of a queue."""

    no_ack = False
    priority = 0
    exclusive = False

    def __init__(self, consumer: Consumer, life: Life) -> None:
        self.consumer = consumer
        self.tag = consumer.name
        self.life = life
        self.history = consumer.history
        self.held: list[Stretch] = []
        self.is_over = False
        self.is_attached = False
        self.is_settling = False
        self.prefetch = 1000 if consumer.clients.is_draining else consumer.random.choice((2, 10, 50))
        self._broker: Broker | None = None

    @property
    def is_served(self) -> bool:
        """Whether who served it still does."""
        service = self.life.service(self.consumer.vhost)
        return self._broker is None or (service is not None and service.broker is self._broker)

    async def attach(self) -> None:
        service = self.life.service(self.consumer.vhost)
        host = None if service is None else service.broker.vhosts.get(self.consumer.vhost)
        queue = None if host is None else host.queues.get(self.consumer.queue)
        if service is None or queue is None or self.is_over:
            self.is_over = True
            return
        broker = self._broker = service.broker
        shard = self.life.agent.shard_of(self.consumer.vhost)
        assert shard is not None
        self.epoch = self.life.replicas[shard].replica.kept.stint.epoch
        queue.add_consumer(self)
        self.is_attached = True
        broker.touch(queue)
        broker.wake(queue)
        broker.on_ready()

    def room(self) -> int:
        return 0 if self.is_over else max(0, self.prefetch - sum(one.count for one in self.held))

    def deliver(self, queue: View, stretch: Stretch) -> None:
        if self.life.is_dead:
            return
        batch = stretch.loaded()
        again = stretch.deliveries > 0 or stretch.seq < stretch.lane.delivered_below
        log = stretch.source
        for index in range(stretch.count):
            body = bytes(batch.values[stretch.index + index])
            place = Place(log.stream_id, log.partition, stretch.offset + index)
            self._check_due(body)
            self.history.delivered(self.key, body, place, self.epoch, redelivered=again)
        self.held.append(stretch)
        world = self.consumer.world
        wait = 0.01 if self.consumer.clients.is_draining else self.consumer.random.choice((0.0, 0.02, 0.5, 3.0))
        world.after(wait, lambda: self.life.post(lambda: self._settle(queue, stretch)))

    @property
    def key(self) -> str:
        return f"{self.consumer.vhost}/{self.consumer.queue}"

    def _check_due(self, body: bytes) -> None:
        due_us = self.history.due_us.get(body)
        if due_us is None:
            return
        # By the wall clock of whoever led when it was fired, which may be another one, and set back since.
        now_us = max(machine.wall_us_max for machine in self.consumer.clients.machines)
        if now_us < due_us:
            self.consumer.world.violated(f"T1: {body[:20]!r} is due at {due_us}, and came at {now_us}")

    def cancel(self) -> None:
        self.is_over = True

    async def _settle(self, queue: View, stretch: Stretch) -> None:
        if stretch not in self.held or self.is_over or not self.is_served or self._broker is None:
            return
        self.held.remove(stretch)
        broker, random = self._broker, self.consumer.random
        bodies = [bytes(value) for value in stretch.loaded().values[stretch.index : stretch.index + stretch.count]]
        keys = [(self.key, body) for body in bodies]
        if self.consumer.clients.is_draining:
            queue.settle(stretch)
            self.history.drained.update(keys)
            self.consumer.clients.seen.update(bodies)
        else:
            match random.random():
                case chance if chance < 0.6:
                    queue.settle(stretch)
                    self.history.maybe_settled.update(keys)
                    if random.random() < 0.5:
                        await self._until_safe(broker, keys)
                case chance if chance < 0.75:
                    # On a full disk it stays where it was.
                    with suppress(DiskFull):
                        queue.reject(stretch)
                        self.history.rejected.update(keys)
                        if random.random() < 0.5:
                            await broker.write_journal()
                case chance if chance < 0.9:
                    queue.give_back([stretch])
                case chance if chance < 0.95:
                    self.held.append(stretch)
                    await self.crash()
                case _:
                    self.held.append(stretch)
                    return
        if not self.is_over:
            broker.wake(queue)
            broker.on_ready()

    async def _until_safe(self, broker: Broker, keys: list[tuple[str, bytes]]) -> None:
        """As before the answer to the next synchronous method."""
        self.is_settling = True
        try:
            await broker.write_journal()
            if not self.life.is_dead:
                self.history.settled.update(dict.fromkeys(keys, self.epoch))
        finally:
            self.is_settling = False

    async def crash(self) -> None:
        """The connection is gone, with what it held."""
        self.is_over = True
        service = self.life.service(self.consumer.vhost)
        if self._broker is None or service is None or service.broker is not self._broker or not self.is_attached:
            return
        self.is_attached = False
        queue = self._broker.vhosts[self.consumer.vhost].queues.get(self.consumer.queue)
        if queue is None:
            return
        queue.remove_consumer(self)
        held, self.held = self.held, []
        queue.give_back(held)
        self._broker.touch(queue)
        self._broker.wake(queue)
        self._broker.on_ready()
        await trio.lowlevel.checkpoint()
