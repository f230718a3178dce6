"""Records that members fail with: they come back to their group alone, or lie with its dead letters, each once."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.table import Table
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull, Refused, StorageError
from headrace.core_log.record import Headers, Protocol, Record
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.amqp import properties
from headrace.gateways.amqp.deaths import aparts
from headrace.gateways.delivery.consumer_groups import GroupInUse, GroupSettings, NotHeld, Start
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_config import GroupsConfig
from headrace.gateways.delivery.consumer_groups_coordinator import SWEEP_PERIOD_S
from headrace.gateways.delivery.consumer_groups_retries import FAILURES_MAX
from headrace.gateways.delivery.dead_letters import Wanted, read
from headrace.gateways.delivery.redrive import Request
from headrace.gateways.delivery.retry import Backoff, RetryPolicy, attempts_in
from headrace.gateways.plain import restated

from .house import START_US, House, Running
from .test_consumer_groups_coordinator import GROUP, TOPIC, Client, Groups

FIXED = GroupSettings(RetryPolicy(2, Backoff.FIXED, delay_ms=10_000))
ONCE = GroupSettings(RetryPolicy(0))
DEAD = "billing.dlq"


class Shop(Groups):
    """Groups at work, on a broker."""

    def __init__(self, running: Running) -> None:
        super().__init__(running, None)
        self.running = running
        self.retries = self.coordinator.retries
        self.retries.restate = restated
        self.broker.redrives.aparts = {Protocol.AMQP: aparts}

    async def worker(self, name: str = "eve") -> "Worker":
        joined = await self.join(name)
        return Worker(self, joined)

    def dead(self) -> list[Record]:
        queue = self.running.host.queues.get(DEAD)
        return [] if queue is None else [run.batch.record(run.index) for run in _ready(queue)]


class Worker:
    """A member that polls, works and commits, and fails with what it is told to."""

    def __init__(self, shop: Shop, client: Client) -> None:
        self.shop = shop
        self.client = client
        self.got: list[tuple[Slot, Record]] = []
        self.places: dict[Slot, int] = {}

    async def poll(self, wait_s: float = 0) -> list[bytes]:
        client = self.client
        polled = await self.shop.coordinator.poll(GROUP, client.id, client.user, client.generation, wait_s=wait_s)
        client.generation = polled.standing.generation
        self.got = [(slot, batch.record(index)) for slot, batch, index in polled.records]
        self.places = {slot: place.offset for slot, place in polled.places.items()}
        return [record.value for _slot, record in self.got]

    async def until(self, *values: bytes) -> None:
        """Poll until these come."""
        limit = trio.current_time() + 600
        while not (found := await self.poll(wait_s=3)):
            assert trio.current_time() < limit, "nothing came"
        assert sorted(found) == sorted(values)

    async def commit(self, *failing: bytes, reason: str = "timeout") -> None:
        """All that was polled; these have failed."""
        failed: dict[Slot, dict[int, str]] = {}
        for slot, record in self.got:
            if record.value in failing:
                failed.setdefault(slot, {})[int(record.offset)] = reason
        await self.fail(failed)

    async def fail(self, failed: dict[Slot, dict[int, str]]) -> None:
        client = self.client
        await self.shop.coordinator.commit(
            GROUP, self.places, member_id=client.id, user=client.user, generation=client.generation, failed=failed
        )

    def record(self, value: bytes) -> Record:
        return next(record for _slot, record in self.got if record.value == value)


def _ready(queue: Any) -> Any:
    for lane in reversed(queue.lanes):
        for stretch in lane.ready_stretches():
            batch = stretch.loaded()
            for index in range(stretch.index, stretch.index + stretch.count):
                yield _At(batch, index)


class _At:
    def __init__(self, batch: Any, index: int) -> None:
        self.batch, self.index = batch, index


@asynccontextmanager
async def shop_of(house: House, *, settings: GroupSettings | None = FIXED, clean: bool = True) -> AsyncIterator[Shop]:
    async with house.broker(clean=clean) as running:
        shop = Shop(running)
        await shop.coordinator.load()
        if TOPIC not in shop.broker.directory.streams:
            await shop.create(2)
            if settings is not None:
                await shop.coordinator.configure(GROUP, settings)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shop.coordinator.run)
            yield shop
            await shop.coordinator.close()


@asynccontextmanager
async def doomed(house: House, *, settings: GroupSettings, clean: bool) -> AsyncIterator[Shop]:
    """The power goes in the middle of whatever it does."""
    left = storage = house.storage
    assert isinstance(storage, MemoryStorage)
    try:
        async with shop_of(house, settings=settings, clean=clean) as shop:
            yield shop
            left = storage.power_loss(house.random)
    except* StorageError:
        if left is storage:
            raise
    house.storage = left


async def test_what_failed_comes_back_after_its_delay_with_its_attempt_origin_and_reason(
    autojump_clock: MockClock,
) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(1, b"a", b"b", b"c")
        await worker.until(b"a", b"b", b"c")
        await worker.commit(b"b")
        before = trio.current_time()
        await worker.until(b"b")
        assert 9.99 <= trio.current_time() - before < 11
        slot, record = worker.got[0]
        assert slot.stream != TOPIC
        notes = dict(record.headers)
        assert (notes[b"x-attempt"], notes[b"x-reason"]) == (b"2", b"timeout")
        assert (notes[b"x-origin-stream"], notes[b"x-origin-partition"]) == (str(TOPIC).encode(), b"1")
        assert notes[b"x-origin-offset"] == b"1"
        assert [why for _when, why in attempts_in(notes)] == ["timeout"]
        assert START_US <= record.timestamp_us < START_US + 1_000_000
        await worker.commit()
        assert shop.lag() == [0, 0, 0]
        assert await worker.poll(wait_s=60) == []
        assert (shop.retries.retried_count, shop.retries.returned_count) == (1, 1)


async def test_after_the_last_attempt_it_is_dead_with_its_history_and_goes_back_when_it_is_redriven(
    autojump_clock: MockClock,
) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"poison")
        for reason in ("timeout", "timeout", "schema"):
            await worker.until(b"poison")
            await worker.commit(b"poison", reason=reason)
        await trio.sleep(1)
        queue = shop.running.host.queue(DEAD)
        (found,) = [read(one.batch, one.index, shop.broker.redrives.headers_of) for one in _ready(queue)]
        assert found is not None
        assert (found.queue, found.is_of_group, found.reason, found.attempts) == ("billing", True, "schema", 3)
        assert [why for _when, why in found.history] == ["timeout", "timeout", "schema"]
        assert await worker.poll(wait_s=100) == []
        redrive = shop.broker.redrives.start(Request("/", DEAD, Wanted(reason="schema")), "eve")
        await worker.until(b"poison")
        assert (redrive.progress.moved, redrive.progress.by_queue) == (1, {"billing": 1})
        assert dict(worker.record(b"poison").headers).keys().isdisjoint({b"x-attempt", b"x-reason", b"died-in-group"})
        assert queue.message_count == 0
        await worker.commit(b"poison")
        await worker.until(b"poison")
        notes = dict(worker.record(b"poison").headers)
        assert notes[b"x-attempt"] == b"2"
        assert [why for _when, why in attempts_in(notes)] == ["timeout", "timeout", "schema", "timeout"]


async def test_headers_of_a_topics_record_are_told_as_before_and_cannot_fake_an_attempt(
    autojump_clock: MockClock,
) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        log = shop.logs_of(TOPIC)[0]
        assert log is not None
        headers: Headers = ((b"content-type", b"text/plain"), (b"x-attempt", b"99"), (b"timestamp", b"noon"))
        log.append([b"k"], [b""], [b"v"], timestamp_us=START_US, tags=("eu",), headers=[headers])
        await shop.broker.wait_committed(log, log.end)
        await worker.until(b"v")
        await worker.commit(b"v")
        await worker.until(b"v")
        record = worker.record(b"v")
        decoded = properties.decode(record.properties)
        assert decoded.content_type == "text/plain"
        told = decoded.headers or {}
        assert (told["timestamp"], told["x-attempt"], told["x-reason"]) == ("noon", 2, "timeout")
        assert (record.key, record.tags, dict(record.headers)[b"x-attempt"]) == (b"k", ("eu",), b"2")


async def test_dead_letter_exchange_sorts_the_dead_by_their_error(autojump_clock: MockClock) -> None:
    async with shop_of(House()) as shop:
        host = shop.running.host
        await host.declare_exchange("errors", "headers", durable=True, auto_delete=False, internal=False)
        await shop.running.declare("schemas")
        await host.bind(
            Binding(
                vhost="/",
                source="errors",
                destination_kind=DestinationKind.QUEUE,
                destination="schemas",
                routing_key="",
                arguments=Table({"x-match": "all-with-x", "x-reason": "schema"}),
            )
        )
        await shop.coordinator.configure(GROUP, GroupSettings(RetryPolicy(0), "errors"))
        worker = await shop.worker()
        await shop.publish(0, b"a", b"b")
        await worker.until(b"a", b"b")
        failed = {Slot(TOPIC, 0): {0: "schema", 1: "timeout"}}
        await worker.fail(failed)
        await trio.sleep(2)
        assert shop.running.bodies("schemas") == [b"a"]
        # What the exchange has no queue for is not lost.
        assert shop.running.bodies(DEAD) == [b"b"]


async def test_failing_is_fenced_as_commits_are(autojump_clock: MockClock) -> None:
    async with shop_of(House()) as shop:
        first = await shop.worker()
        await shop.publish(0, b"a")
        await shop.publish(1, b"b")
        await first.until(b"a", b"b")
        second = await shop.worker("eva")
        for _ in range(2):
            # The first time it is told what to give up; by naming that generation it gives it up.
            await first.poll()
        assert await second.poll() == [b"b"]
        with pytest.raises(NotHeld):
            first.places = {Slot(TOPIC, 0): 1, Slot(TOPIC, 1): 1}
            await first.fail({Slot(TOPIC, 0): {0: "late"}, Slot(TOPIC, 1): {0: "late"}})
        assert shop.coordinator.groups[GROUP].failures is None
        assert shop.committed() == {0: 0, 1: 0}


async def test_what_cannot_fail_is_refused_and_nothing_is_committed(autojump_clock: MockClock) -> None:
    async with shop_of(House(), settings=None) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a", b"b")
        await worker.until(b"a", b"b")
        slot = Slot(TOPIC, 0)
        with pytest.raises(Refused, match="the group has no retry policy"):
            await worker.fail({slot: {0: "x"}})
        await shop.coordinator.configure(GROUP, FIXED)
        with pytest.raises(Refused, match="offset 2 of partition 0 cannot fail: the commit is of 0 to 2"):
            await worker.fail({slot: {2: "x"}})
        with pytest.raises(Refused, match=f"more than {FAILURES_MAX} failed records"):
            await worker.fail({slot: _Many()})
        assert shop.committed() == {0: 0, 1: 0}
        await worker.commit()
        with pytest.raises(Refused, match="offset 1 of partition 0 cannot fail: the commit is of 2 to 2"):
            await worker.fail({slot: {1: "x"}})


class _Many(dict[int, str]):
    """Within the commit, and more than may be on their way."""

    def __len__(self) -> int:
        return FAILURES_MAX + 1


async def test_start_next_does_not_pass_over_what_came_back_while_nobody_was_there(autojump_clock: MockClock) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a")
        await worker.until(b"a")
        await worker.commit(b"a")
        await shop.coordinator.leave(GROUP, worker.client.id, "eve")
        await trio.sleep(60)
        later = Worker(shop, await shop.join("eve", start=Start.NEXT))
        await later.until(b"a")


async def test_full_dead_letter_queue_keeps_the_dead_waiting_and_nothing_is_lost(autojump_clock: MockClock) -> None:
    async with shop_of(House(), settings=ONCE) as shop:
        await shop.running.declare(DEAD, max_length=1, overflow="reject-publish")
        worker = await shop.worker()
        await shop.publish(0, b"a", b"b")
        await worker.until(b"a", b"b")
        await worker.commit(b"a", b"b")
        await trio.sleep(5)
        group = shop.coordinator.groups[GROUP]
        assert len(group.failures or ()) == 1
        (log,) = [log for log, lowest in shop.retries.pins.items() if lowest == 1]
        assert log is shop.logs_of(TOPIC)[0]
        assert shop.running.bodies(DEAD) == [b"a"]
        await trio.sleep(5)
        assert shop.running.bodies(DEAD) == [b"b"]
        assert len(group.failures or ()) == 0


async def test_deleted_group_takes_along_what_waits_and_leaves_its_dead_letters(autojump_clock: MockClock) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a", b"b")
        await worker.until(b"a", b"b")
        await worker.commit(b"a")
        await trio.sleep(1)
        assert shop.retries.waiting_count(GROUP) == 1
        with pytest.raises(GroupInUse):
            await shop.coordinator.delete(GROUP, by="eve")
        await shop.coordinator.leave(GROUP, worker.client.id, "eve")
        (back,) = shop.coordinator.groups[GROUP].returns.values()
        await shop.coordinator.delete(GROUP, by="eve")
        assert GROUP not in shop.coordinator.groups
        await trio.sleep(30)
        assert back.stream not in shop.broker.directory.streams
        assert shop.retries.dropped_count == 1
        again = await shop.worker()
        await again.until(b"a", b"b")


async def test_group_that_is_set_up_stays_and_a_deleted_topic_takes_its_retries_along(
    autojump_clock: MockClock,
) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a")
        await worker.until(b"a")
        await worker.commit(b"a")
        await trio.sleep(1)
        await shop.coordinator.leave(GROUP, worker.client.id, "eve")
        await shop.broker.directory.delete_stream(shop.broker.directory.streams[TOPIC])
        shop.coordinator.config = GroupsConfig(offsets_retention_ms=1000)
        await trio.sleep(3 * SWEEP_PERIOD_S)
        group = shop.coordinator.groups[GROUP]
        assert (group.settings, group.returns, group.committed) == (FIXED, {}, {})
        assert [one.spec.kind for one in shop.broker.directory.streams.values() if one.spec.kind == "retry"] == []
        assert shop.retries.dropped_count == 1


async def test_settings_streams_and_what_waits_are_there_after_a_restart(autojump_clock: MockClock) -> None:
    house = House()
    async with shop_of(house) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a")
        await worker.until(b"a")
        await worker.commit(b"a")
        await trio.sleep(1)
        returns = dict(shop.coordinator.groups[GROUP].returns)
        assert [one.number for one in returns.values()] == [0]
        client = worker.client
    async with shop_of(house) as shop:
        group = shop.coordinator.groups[GROUP]
        assert (group.settings, group.returns) == (FIXED, returns)
        client.coordinator = shop.coordinator
        worker = Worker(shop, client)
        await worker.until(b"a")


async def test_disk_that_is_full_delays_and_loses_nothing(autojump_clock: MockClock) -> None:
    async with shop_of(House()) as shop:
        worker = await shop.worker()
        await shop.publish(0, b"a", b"b")
        await worker.until(b"a", b"b")
        park, fulls = shop.broker.delayed.park, 3

        def full(*args: Any, **more: Any) -> int:
            nonlocal fulls
            fulls -= 1
            if fulls >= 0:
                raise DiskFull("no space")
            return park(*args, **more)

        shop.broker.delayed.park = full  # type: ignore[method-assign]
        await worker.commit(b"a", b"b")
        await worker.until(b"a", b"b")
        assert fulls == -1


@pytest.mark.parametrize("seed", range(12))
async def test_over_losses_of_power_each_failure_is_followed_by_one_attempt_or_one_death(
    seed: int, autojump_clock: MockClock
) -> None:
    """Whatever was answered: of each record the attempts are 1, 2, 3 without a gap, and then it is dead once."""
    house = House(seed, log_config=LogConfig())
    random = Random(seed)
    quick = GroupSettings(RetryPolicy(2, Backoff.FIXED, delay_ms=100))
    # The last attempt of each record that was committed as failed, and the one that may or may not have been.
    failed: dict[bytes, int] = {}
    maybe: dict[bytes, int] = {}
    done: set[bytes] = set()
    published = 0
    for life in range(6):
        async with doomed(house, settings=quick, clean=life == 0) as shop:
            for member_id in list(shop.coordinator.groups[GROUP].members):
                await shop.coordinator.leave(GROUP, member_id, "eve")
            worker = await shop.worker()
            for _ in range(random.randint(1, 5)):
                values = [b"%d" % number for number in range(published, published + random.randint(0, 3))]
                published += len(values)
                if values:
                    await shop.publish(random.randrange(2), *values)
                await worker.poll(wait_s=random.random())
                failing = set()
                for _slot, record in worker.got:
                    attempt = int(dict(record.headers).get(b"x-attempt", b"1"))
                    was = failed.get(record.value, 0)
                    # Nothing comes twice: an attempt follows the one before, if that was committed.
                    if record.value in maybe and attempt == maybe[record.value] + 1:
                        failed[record.value] = was = maybe.pop(record.value)
                    assert attempt == was + 1, (record.value, attempt, failed, maybe)
                    assert record.value not in done
                    if random.random() < 0.7:
                        failing.add(record.value)
                attempts = {
                    record.value: int(dict(record.headers).get(b"x-attempt", b"1")) for _slot, record in worker.got
                }
                maybe = {value: attempts[value] for value in failing}
                await worker.commit(*failing)
                failed.update(maybe)
                maybe = {}
                done |= attempts.keys() - failing
                if random.random() < 0.5:
                    await trio.sleep(random.random() / 5)
            # In the midst of what moves.
            for _ in range(random.randrange(20)):
                await trio.lowlevel.checkpoint()
    async with shop_of(house, clean=False) as shop:
        for member_id in list(shop.coordinator.groups[GROUP].members):
            await shop.coordinator.leave(GROUP, member_id, "eve")
        worker = await shop.worker()
        idle = 0
        while idle < 5:
            # Gaps and generations make answers without messages, too.
            idle = 0 if await worker.poll(wait_s=5) else idle + 1
            for _slot, record in worker.got:
                assert int(dict(record.headers).get(b"x-attempt", b"1")) == failed.get(record.value, 0) + 1
                assert record.value not in done
            done |= {record.value for _slot, record in worker.got}
            await worker.commit()
        dead = [record.value for record in shop.dead()]
        assert len(dead) == len(set(dead))
        assert done.isdisjoint(dead)
        assert {b"%d" % number for number in range(published)} - done - set(dead) == set()
        assert set(dead) == {value for value, attempt in failed.items() if attempt == 3}
