"""A broker over restarts: every durable queue comes back with exactly what it had not settled, in order, each once.

A list beside the broker says what may and what must be there after a clean stop, a crash of the process and a loss of
power at any moment. Real log, real metadata; the disk is in memory and can lose power.
"""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from random import Random
from typing import TypeVar
from uuid import UUID

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.config import Definitions
from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.passwords import HashCost
from headrace.controller.service import MetadataService
from headrace.controller.store import MemoryStore
from headrace.controller.table import Table
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import StorageError
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, Protocol
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.amqp.deaths import stamp
from headrace.gateways.amqp.settings import settings_of
from headrace.gateways.delivery import broker as brokers
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.release import Release

from . import house as houses
from .house import House
from .logs import Clock, env_on

T = TypeVar("T")
CHEAP = HashCost(memory_kib=8, passes=1)
NO_PROPERTIES = b"\0\0"
# Everything that is settled is deleted as soon as its segment is full.
SHORT = LogConfig(
    segment_bytes_max=1500, batch_bytes_max=600, index_interval_bytes=256, offsets_reserved=100, retention_ms=0
)


class Slow:
    """A worker without threads that lets others have some turns first."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def run(self, call: Callable[[], T]) -> T:
        for _ in range(self._turns):
            await trio.lowlevel.checkpoint()
        return call()


class Machine:
    """What outlives a broker: its disk and its metadata."""

    def __init__(self, seed: int = 1, *, log_config: LogConfig = SHORT, turns: int = 0) -> None:
        self.random = Random(seed)
        self.turns = turns
        self.clock = Clock()
        self.storage = MemoryStorage()
        self.log_config = log_config
        self._store = MemoryStore(UUID(int=seed + 1))
        self._clean = True

    @asynccontextmanager
    async def start(self) -> AsyncIterator["Running"]:
        """A broker that ends as `crash`, `lose_power` or (by default) a clean stop."""
        # The ids of segments and streams differ from start to start.
        env = replace(env_on(self.storage, self.clock, Random(self.random.getrandbits(64))), worker=Slow(self.turns))
        try:
            async with self._serve(env) as running:
                yield running
        except* StorageError:
            # Whatever was under way in the dead process.
            if self.storage is env.storage:
                raise

    @asynccontextmanager
    async def _serve(self, env: Env) -> AsyncIterator["Running"]:
        metadata = MetadataService(lambda: self._store, new_uuid=env.ids.uuid, hash_cost=CHEAP)
        clean, self._clean = self._clean, False
        async with trio.open_nursery() as nursery:
            await nursery.start(metadata.run)
            await metadata.seed(Definitions())
            directory = LogDirectory.open_now(env, DirectoryConfig(journal_bytes_max=64 * 1024), clean=clean)
            broker = Broker(
                env,
                directory,
                metadata,
                settings_of=settings_of,
                stamp=stamp,
                clean=clean,
                log_config=self.log_config,
            )
            await broker.load()
            nursery.start_soon(directory.committer.run)
            yield Running(broker, nursery)
            if self.storage is env.storage:
                await broker.write_journal()
                await directory.close()
                self._clean = True
            nursery.cancel_scope.cancel()

    def crash(self) -> None:
        """The process ends here; what it wrote is there, what it only gathered is not."""
        self.storage = self.storage.process_crash()

    def lose_power(self) -> None:
        self.storage = self.storage.power_loss(self.random)


class Running:
    def __init__(self, broker: Broker, nursery: trio.Nursery) -> None:
        self.broker = broker
        self.nursery = nursery

    @property
    def logs(self) -> list[PartitionLog]:
        return [log for stream in self.broker.directory.streams.values() for log in stream.partitions]

    def log(self, name: str) -> PartitionLog:
        (found,) = [one for one in self.broker.directory.streams.values() if one.spec.name == name]
        return found.partitions[0]

    def queue(self, name: str) -> Queue:
        return self.broker.vhosts["/"].queue(name)

    async def declare(self, name: str, *, durable: bool = True, **arguments: object) -> Queue:
        """Arguments as in AMQP, with `_` for `-` and without `x-`."""
        table = Table({f"x-{key.replace('_', '-')}": value for key, value in arguments.items()})  # type: ignore[misc]
        settings = self.broker.settings_of("/", name, table)
        return await self.broker.vhosts["/"].declare_queue(name, settings, durable=durable, arguments=table)

    async def exchange(self, name: str, kind: str = "fanout", *, durable: bool = True) -> None:
        await self.broker.vhosts["/"].declare_exchange(name, kind, durable=durable, auto_delete=False, internal=False)

    async def bind(self, exchange: str, queue: str, key: str = "") -> None:
        await self.broker.vhosts["/"].bind(
            Binding(
                vhost="/", source=exchange, destination_kind=DestinationKind.QUEUE, destination=queue, routing_key=key
            )
        )

    def publish(
        self,
        exchange: str,
        key: str,
        *bodies: bytes,
        persistent: bool = True,
        properties: bytes = NO_PROPERTIES,
        tags: tuple[str, ...] = (),
    ) -> tuple[PartitionLog | None, int]:
        """Returns the log and the offset that confirms it."""
        target = self.broker.vhosts["/"].target(exchange, key.encode(), [key], tags=tags)
        attributes = int(Protocol.AMQP) | (PERSISTENT if persistent else 0)
        reached = self.broker.publish(target, [properties] * len(bodies), bodies, attributes=attributes)
        self.broker.dispatch()
        return target.log, reached or 0

    async def commit(self) -> None:
        await self.broker.directory.committer.flush()

    async def maintain(self) -> None:
        """Retention and compaction, as every second, and retired streams."""
        await self.broker.directory.maintain()
        await self.commit()

    def ready(self, name: str) -> list[bytes]:
        """What a queue would hand out, left where it is."""
        return [
            value
            for lane in reversed(self.queue(name).lanes)
            for batch, first, last in lane.ready_runs()
            for value in batch.values[first:last]
        ]

    def take(self, name: str) -> Stretch:
        stretch = self.queue(name).get()
        assert stretch is not None
        return stretch

    def settle(self, name: str, count: int = 1) -> list[bytes]:
        """Get and ack so many; returns them."""
        found = []
        for _ in range(count):
            stretch = self.take(name)
            found.append(stretch.loaded().values[stretch.index])
            self.queue(name).settle(stretch)
        return found


def bodies(count: int, first: int = 0) -> list[bytes]:
    return [b"%d" % number for number in range(first, first + count)]


# -- one thing at a time ----------------------------------------------------------------------------------------


async def test_clean_stop_keeps_everything_unsettled_transient_or_not() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q")
        running.publish("", "q", *bodies(3))
        running.publish("", "q", b"transient", persistent=False)
        await running.commit()
        assert running.settle("q") == [b"0"]
        running.take("q")
    async with machine.start() as running:
        assert running.ready("q") == [b"1", b"2", b"transient"]
        assert running.queue("q").ready_count == 3


@pytest.mark.parametrize("end", ["crash", "lose_power"])
async def test_confirmed_records_outlive_whatever_ends_the_broker(end: str) -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("e")
        await running.declare("a")
        await running.declare("b")
        await running.bind("e", "a")
        await running.bind("e", "b")
        running.publish("e", "", *bodies(20))
        await running.commit()
        getattr(machine, end)()
    async with machine.start() as running:
        assert running.ready("a") == running.ready("b") == bodies(20)
        assert all(lane.delivered_below == 20 for lane in running.queue("a").lanes)


@pytest.mark.parametrize("end", ["crash", "lose_power"])
async def test_settled_and_journalled_records_do_not_return(end: str) -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q")
        running.publish("", "q", *bodies(10))
        await running.commit()
        assert running.settle("q", 4) == bodies(4)
        held = running.take("q")
        running.settle("q", 2)
        await running.broker.write_journal()
        running.queue("q").settle(held)
        getattr(machine, end)()
    async with machine.start() as running:
        assert running.ready("q") == [b"4", b"7", b"8", b"9"]


async def test_settlement_of_a_record_that_the_power_took_takes_no_other_record_with_it() -> None:
    """Early dispatch, ack and journal overtake the commit; the next record must not be swallowed (K3)."""
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q")
        running.publish("", "q", b"first")
        await running.commit()
        running.publish("", "q", b"lost")
        running.settle("q", 2)
        # Nothing of the journal may be on the disk before the record is.
        running.broker._views_log.seal()
        machine.storage = machine.storage.after_power_loss(lambda change: False)
    async with machine.start() as running:
        running.publish("", "q", b"next")
        await running.commit()
        assert running.ready("q") == [b"first", b"next"]


async def test_records_found_again_at_a_start_are_kept_over_the_next_crash_too() -> None:
    """The journal must not say that a log is applied while a quiet queue's part of it was never written."""
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("e", "direct")
        await running.declare("quiet")
        await running.declare("busy")
        await running.bind("e", "quiet", "quiet")
        await running.bind("e", "busy", "busy")
        running.publish("e", "quiet", b"0")
        await running.commit()
        machine.crash()
    async with machine.start() as running:
        running.publish("e", "busy", b"1")
        await running.commit()
        await running.broker.write_journal()
        machine.crash()
    async with machine.start() as running:
        assert (running.ready("quiet"), running.ready("busy")) == ([b"0"], [b"1"])


async def test_journal_waits_for_logs_whose_publishers_already_wait_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(turns=5)
    async with machine.start() as running:
        for name in "abcd":
            await running.declare(name)
            running.publish("", name, b"0")
            await running.commit()
        # Nobody commits these for now.
        monkeypatch.setattr(running.broker.directory.committer, "lazy", lambda log: None)
        for name in "abcd":
            running.publish("", name, b"1", persistent=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.broker.write_journal)
            while running.broker._dirty:
                await trio.lowlevel.checkpoint()
            for number in range(2, 12):
                await trio.lowlevel.checkpoint()
                for name in "abcd":
                    log, reached = running.publish("", name, b"%d" % number)
                    assert log is not None and reached > log.high_watermark
                    log.when_committed(reached, lambda: None)
        await running.commit()
        machine.crash()
    async with machine.start() as running:
        assert [running.ready(name) for name in "abcd"] == [bodies(12)] * 4


async def test_journal_that_is_given_up_half_way_is_written_by_the_next() -> None:
    machine = Machine(turns=5)
    async with machine.start() as running:
        await running.declare("q")
        running.publish("", "q", *bodies(3))
        await running.commit()
        running.settle("q", 2)
        running.publish("", "q", b"3")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.broker.write_journal)
            while running.broker._dirty:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        await running.broker.write_journal()
        machine.lose_power()
    async with machine.start() as running:
        assert running.ready("q") == [b"2", b"3"]


async def test_broker_ends_although_its_journal_waits_for_a_disk_that_fails() -> None:
    """A failed sync ends the committer; whoever waits for it must let the process end (D6)."""
    machine = Machine()
    failed = False
    with trio.fail_after(30):
        try:
            async with machine.start() as running:
                await running.declare("q")
                running.publish("", "q", b"0")
                machine.storage.fail("sync")
                running.nursery.start_soon(running.broker.write_journal)
                await trio.sleep_forever()
        except* Exception:
            failed = True
    assert failed


async def test_retention_takes_nothing_that_a_queue_has_not_settled() -> None:
    """MUT23: one unsettled record far behind pins what lies above it, and no more than that."""
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("e", "direct")
        await running.declare("rare")
        await running.declare("often")
        await running.bind("e", "rare", "rare")
        await running.bind("e", "often", "often")
        for number in range(30):
            running.publish("e", "often", b"%d" % number * 20)
            await running.commit()
            running.settle("often")
        log = running.log("e")
        await running.broker.write_journal()
        running.publish("e", "rare", b"kept")
        for number in range(60):
            running.publish("e", "often", b"%d" % number * 20)
            await running.commit()
            running.settle("often")
        await running.broker.write_journal()
        machine.clock.now_us += 1_000_000
        await running.maintain()
        assert 0 < log.log_start <= 30
        machine.crash()
    async with machine.start() as running:
        assert running.ready("rare") == [b"kept"]
        assert running.settle("rare") == [b"kept"]
        await running.broker.write_journal()
        await running.maintain()
        assert running.log("e").log_start > 30


async def test_retention_waits_for_the_journal_not_only_for_the_settlement() -> None:
    """What is settled in memory only comes back after a crash, so its record must still be there."""
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q")
        for number in range(40):
            running.publish("", "q", b"%02d" % number * 20)
            await running.commit()
        await running.broker.write_journal()
        running.settle("q", 40)
        machine.clock.now_us += 1_000_000
        await running.maintain()
        machine.crash()
    async with machine.start() as running:
        assert running.ready("q") == [b"%02d" % number * 20 for number in range(40)]


async def test_stream_of_a_deleted_exchange_stays_until_nobody_needs_it() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("e")
        await running.declare("q")
        await running.bind("e", "q")
        running.publish("e", "", *bodies(3))
        await running.commit()
        await running.broker.vhosts["/"].delete_exchange("e")
        await running.broker.write_journal()
        await running.broker._drop_retired()
        machine.crash()
    async with machine.start() as running:
        assert running.ready("q") == bodies(3)
        streams = set(running.broker.directory.streams)
        assert running.settle("q", 3) == bodies(3)
        # Settled in memory only: a crash would bring the records back, and with them the need for the stream.
        await running.broker._drop_retired()
        assert set(running.broker.directory.streams) == streams
        machine.crash()
    async with machine.start() as running:
        assert running.settle("q", 3) == bodies(3)
        await running.broker.write_journal()
        await running.broker._drop_retired()
        assert len(running.broker.directory.streams) == len(streams) - 1
        running.publish("", "q", b"later")
        await running.commit()
        machine.crash()
    async with machine.start() as running:
        assert running.ready("q") == [b"later"]


async def test_same_name_after_a_deletion_is_another_exchange() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("e")
        await running.declare("q")
        await running.bind("e", "q")
        running.publish("e", "", b"old")
        await running.broker.vhosts["/"].delete_exchange("e")
        await running.exchange("e")
        running.publish("e", "", b"nobody's")
        await running.bind("e", "q")
        running.publish("e", "", b"new")
        await running.commit()
        machine.lose_power()
    async with machine.start() as running:
        assert sorted(running.ready("q")) == [b"new", b"old"]


async def test_what_a_queue_got_through_an_exchange_that_is_not_durable_survives_with_the_queue() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("passing", durable=False)
        await running.declare("q")
        await running.bind("passing", "q")
        running.publish("passing", "", b"0")
        await running.commit()
        machine.crash()
    async with machine.start() as running:
        assert running.broker.vhosts["/"].router.exchange("passing") is None
        assert running.settle("q") == [b"0"]
        await running.broker.write_journal()
        count = len(running.broker.directory.streams)
        await running.broker._drop_retired()
        assert len(running.broker.directory.streams) == count - 1


async def test_deleted_queue_is_forgotten_with_its_own_log() -> None:
    machine = Machine()
    async with machine.start() as running:
        queue = await running.declare("q")
        running.publish("", "q", b"0")
        await running.commit()
        await running.broker.write_journal()
        count = len(running.broker.directory.streams)
        await running.broker.vhosts["/"].delete_queue(queue)
        await running.broker._drop_retired()
        assert len(running.broker.directory.streams) == count - 1
        await running.declare("q")
        machine.crash()
    async with machine.start() as running:
        assert running.ready("q") == []


async def test_limits_in_bytes_hold_over_a_restart() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q", max_length_bytes=100)
        running.publish("", "q", b"a" * 40, b"b" * 30)
        await running.commit()
        running.take("q")
        await running.broker.write_journal()
        running.publish("", "q", b"c" * 20)
        await running.commit()
        machine.crash()
    async with machine.start() as running:
        assert running.queue("q").byte_count == 90


async def test_flag_of_what_was_handed_out_before_survives_a_clean_stop() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("q")
        running.publish("", "q", *bodies(4))
        await running.commit()
        stretch = running.take("q")
        running.queue("q").give_back([stretch])
    async with machine.start() as running:
        (lane,) = running.queue("q").lanes
        assert lane.delivered_below == 1


# -- everything at once -----------------------------------------------------------------------------------------


class State(Enum):
    READY = auto()
    UNACKED = auto()
    # Settled in memory; a crash may bring it back.
    SETTLED = auto()
    # Settled and journalled.
    GONE = auto()


@dataclass(slots=True)
class Known:
    """One record in one queue."""

    value: bytes
    log: PartitionLog
    end: int
    state: State = State.READY
    # A record that is being dead-lettered is in its queue or in the graveyard, and never in both.
    moving: bool = False

    @property
    def is_confirmed(self) -> bool:
        return self.end <= self.log.high_watermark

    @property
    def is_written(self) -> bool:
        return self.end <= self.log.written_end


@dataclass
class Walk:
    random: Random
    machine: Machine
    known: dict[str, list[Known]] = field(default_factory=lambda: {name: [] for name in QUEUES})
    number: int = 0
    # The original and the copy of what was rejected in this life.
    moved: list[tuple[Known, Known]] = field(default_factory=list)

    async def run(self, starts: int, steps: int) -> None:
        for start in range(starts):
            async with self.machine.start() as running:
                self.running = running
                self.held: list[tuple[str, Stretch, Known]] = []
                self.moved = []
                if start == 0:
                    await self.declare()
                for _ in range(self.random.randrange(steps)):
                    await self.step()
                ending = self.random.choice((self.stop, self.crash, self.crash, self.lose_power, self.lose_power))
                await ending()
            async with self.machine.start() as running:
                self.running = running
                # What was on its way goes on.
                await running.broker.write_journal()
                await running.commit()
                self.check()

    async def declare(self) -> None:
        running = self.running
        await running.exchange("fan")
        await running.exchange("one", "direct")
        await running.exchange("dead")
        for name in QUEUES:
            arguments: dict[str, object] = {}
            if name == "work":
                arguments = {"dead_letter_exchange": "dead"}
            if name == "ranked":
                arguments = {"max_priority": 3}
            await running.declare(name, **arguments)
        for exchange, name, key in BINDINGS:
            await running.bind(exchange, name, key)

    # -- steps --------------------------------------------------------------------------------------------------

    async def step(self) -> None:
        kind = self.random.randrange(21)
        if kind == 20:
            await self.release()
        elif kind < 8:
            self.publish()
        elif kind < 12:
            self.settle()
        elif kind < 14:
            self.take()
        elif kind == 14:
            self.give_back()
        elif kind == 15:
            self.reject()
        elif kind == 16:
            if self.random.random() < 0.2:
                await self.replace_exchange()
            else:
                self.random.choice(self.running.logs).seal()
        elif kind == 17:
            await self.running.commit()
        elif kind == 18:
            await self.running.broker.write_journal()
            self.journalled()
        else:
            self.machine.clock.now_us += 1_000_000
            await self.running.maintain()
            await self.running.broker._drop_retired()

    async def release(self) -> None:
        """Some queue's unsettled records of some log are copied into its own; perhaps that gets no further."""
        queue = self.running.queue(self.random.choice(QUEUES))
        sources = [
            log for log in self.running.logs if log.segments and any(log in lane.applied for lane in queue.lanes)
        ]
        if not sources:
            return
        release = Release(queue.lanes, self.random.choice(sources))
        if self.random.random() < 0.3:
            self.running.nursery.start_soon(self.running.broker.releases._carry_out, queue, "/", release)
            for _ in range(self.random.randrange(8)):
                await trio.lowlevel.checkpoint()
        else:
            await self.running.broker.releases._carry_out(queue, "/", release)

    async def replace_exchange(self) -> None:
        """The same name again is another exchange; what went through the old one stays where it is."""
        replaced = self.random.choice(("fan", "dead"))
        await self.running.broker.vhosts["/"].delete_exchange(replaced)
        await self.running.exchange(replaced)
        for exchange, name, key in BINDINGS:
            if exchange == replaced:
                await self.running.bind(exchange, name, key)

    def publish(self) -> None:
        exchange, key = self.random.choice((("fan", ""), ("one", "a"), ("one", "b"), ("one", "none"), ("", "work")))
        count = self.random.choice((1, 1, 4))
        values = []
        for _ in range(count):
            self.number += 1
            values.append(b"%d " % self.number * self.random.choice((1, 20)))
        running = self.running
        queues = running.broker.vhosts["/"].target(exchange, key.encode(), [key]).queues
        log, reached = running.publish(exchange, key, *values, persistent=self.random.random() < 0.8)
        assert log is not None
        self.note([queue.name for queue in queues], values, log, reached)

    def note(self, names: Iterable[str], values: list[bytes], log: PartitionLog, end: int) -> None:
        for name in names:
            for place, value in enumerate(values):
                self.known[name].append(Known(value, log, end - len(values) + place + 1))

    def _take(self) -> tuple[str, Stretch, Known] | None:
        name = self.random.choice(QUEUES)
        stretch = self.running.queue(name).get()
        if stretch is None:
            return None
        value = stretch.loaded().values[stretch.index]
        one = next(one for one in self.known[name] if one.value == value and one.state is State.READY)
        one.state = State.UNACKED
        return name, stretch, one

    def take(self) -> None:
        if found := self._take():
            self.held.append(found)

    def _held(self) -> tuple[str, Stretch, Known] | None:
        if not self.held:
            return self._take()
        return self.held.pop(self.random.randrange(len(self.held)))

    def settle(self) -> None:
        if found := self._held():
            name, stretch, one = found
            one.state = State.SETTLED
            self.running.queue(name).settle(stretch)

    def give_back(self) -> None:
        if found := self._held():
            name, stretch, one = found
            one.state = State.READY
            self.running.queue(name).give_back([stretch])

    def reject(self) -> None:
        if found := self._held():
            name, stretch, one = found
            one.state = State.SETTLED
            if name == "work":
                one.moving = True
                copy = Known(one.value, self.running.broker.transient_log, 0, moving=True)
                self.known["graveyard"].append(copy)
                self.moved.append((one, copy))
            self.running.queue(name).reject(stretch)

    def journalled(self) -> None:
        for name in QUEUES:
            # What is being moved is settled by the commit that the journal waited for, or by a later one.
            unacked = self.running.queue(name).unacked_count
            held = sum(one.state is State.UNACKED for one in self.known[name])
            for one in self.known[name]:
                if one.state is State.SETTLED and not one.moving:
                    one.state = State.GONE
            assert unacked >= held

    # -- ends ---------------------------------------------------------------------------------------------------

    async def stop(self) -> None:
        self.was_clean = True
        await self.running.commit()
        for records in self.known.values():
            for one in records:
                if one.state is State.SETTLED:
                    one.state = State.GONE
        self.must = {
            name: [one.value for one in records if one.state is not State.GONE and not one.moving]
            for name, records in self.known.items()
        }
        self.must_move = {original.value for original, _copy in self.moved}

    async def crash(self) -> None:
        await self._half_way()
        self._note_must(lambda one: one.is_written)
        self.machine.crash()

    async def lose_power(self) -> None:
        await self._half_way()
        self._note_must(lambda one: one.is_confirmed)
        self.machine.lose_power()

    async def _half_way(self) -> None:
        """A journal may be under way, and is as far as it comes in a few turns of the loop."""
        self.was_clean = False
        if self.random.random() < 0.5:
            self.running.nursery.start_soon(self.running.broker.write_journal)
            for _ in range(self.random.randrange(8)):
                await trio.lowlevel.checkpoint()

    def _note_must(self, is_safe: object) -> None:
        assert callable(is_safe)
        self.must = {
            name: [
                one.value
                for one in records
                if is_safe(one) and one.state in (State.READY, State.UNACKED) and not one.moving
            ]
            for name, records in self.known.items()
        }
        self.must_move = {original.value for original, _copy in self.moved if is_safe(original)}

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._check_moved()
        for name in QUEUES:
            found = self.running.ready(name)
            records = self.known[name]
            may = [one.value for one in records if one.state is not State.GONE]
            assert len(found) == self.running.queue(name).ready_count
            assert len(set(found)) == len(found)
            assert Counter(self.must[name]) <= Counter(found) <= Counter(may)
            if self.was_clean and name not in ("ranked", "graveyard"):
                assert found == self.must[name]
            if name not in ("graveyard", "ranked"):
                self._check_order(name, found)
            (log_of, end_of) = ({one.value: one.log for one in records}, {one.value: one.end for one in records})
            by_stream = {log.stream_id: log for log in self.running.logs}
            # A log may be gone when everything was copied out of it.
            self.known[name] = [
                Known(value, by_stream.get(log_of[value].stream_id, log_of[value]), end_of[value]) for value in found
            ]

    def _check_moved(self) -> None:
        """Each dead letter is there once: in its queue still, or in the graveyard, unless it was settled there."""
        left, arrived = set(self.running.ready("work")), set(self.running.ready("graveyard"))
        for original, copy in self.moved:
            value = original.value
            assert not (value in left and value in arrived)
            if self.was_clean:
                assert value not in left
            if copy.state in (State.SETTLED, State.GONE):
                assert value not in left
            elif value in self.must_move:
                assert value in left or value in arrived

    def _check_order(self, name: str, found: list[bytes]) -> None:
        """Along each log; over several logs only the journal knows, and it may not have been written."""
        place = {one.value: (one.log.stream_id, one.end) for one in self.known[name]}
        for stream in {stream for stream, _end in place.values()}:
            ends = [place[value][1] for value in found if place[value][0] == stream]
            assert ends == sorted(ends)


QUEUES = ("all", "work", "picky", "ranked", "graveyard")
BINDINGS = (
    ("fan", "all", ""),
    ("one", "all", "a"),
    ("one", "all", "b"),
    ("one", "picky", "b"),
    ("one", "work", "a"),
    ("fan", "ranked", ""),
    ("dead", "graveyard", ""),
)


@pytest.mark.parametrize("seed", range(100))
async def test_queues_come_back_with_exactly_what_they_had_not_settled(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = Random(seed)
    if random.random() < 0.5:
        monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 3)
        monkeypatch.setattr(lanes, "REFILL_BYTES", 100)
        monkeypatch.setattr(lanes, "EXTENT_GAP_MAX", 2)
    # The journal's own log is compacted all the time.
    views = LogConfig(
        cleanup="compact", retention_ms=None, segment_bytes_max=2000, batch_bytes_max=600, offsets_reserved=50
    )
    monkeypatch.setattr(brokers, "VIEWS_CONFIG", views)
    await Walk(random, Machine(seed, turns=random.choice((0, 1, 5)))).run(starts=3, steps=60)


async def test_records_of_a_queue_that_the_metadata_have_forgotten_stay_for_a_day(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulator of clusters: a store that went back to before a queue's creation lost what was confirmed to it, as
    the shard's next leader deleted what nobody named (E8)."""
    monkeypatch.setattr(brokers, "ORPHANED_S", 20.0)
    monkeypatch.setattr(brokers, "ORPHANS_PERIOD_S", 1.0)
    house = House()
    async with house.broker() as running:
        before = house.store._snapshot
        queue = await running.declare("orders")
        await running.publish("orders", b"1", b"2")
    known, house.store._snapshot = house.store._snapshot, replace(before, version=house.store._snapshot.version)
    monkeypatch.setattr(houses, "DirectoryConfig", lambda: DirectoryConfig(replica_count=2))
    async with house.broker(clean=False) as running:
        await trio.sleep(brokers.ORPHANED_S / 2)
        assert queue.stream_id in running.broker.directory.streams
    house.store._snapshot = known
    async with house.broker(clean=False) as running:
        assert running.bodies("orders") == [b"1", b"2"]
        await trio.sleep(2 * brokers.ORPHANED_S)
        assert queue.stream_id in running.broker.directory.streams, "it is somebody's again"
    house.store._snapshot = replace(before, version=known.version)
    async with house.broker(clean=False) as running:
        await trio.sleep(2 * brokers.ORPHANED_S)
        assert queue.stream_id not in running.broker.directory.streams
