"""Staging: a batch is published whole and once, however often it is tried, over restarts and losses of power."""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from random import Random
from uuid import UUID

import pytest
import trio
from tests.gateways.delivery.house import NO_PROPERTIES, House, Running
from trio.testing import MockClock

from headrace.controller.errors import InUse, Invalid, LimitReached, NotFound
from headrace.controller.table import EMPTY
from headrace.core_log.errors import HeadraceError, Refused, StorageError
from headrace.core_log.record import PERSISTENT, Protocol
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.amqp.delaying import fired
from headrace.gateways.delivery.delayed_duty import DutyKind
from headrace.gateways.delivery.delayed_publish import DelayedPublishes
from headrace.gateways.delivery.staging import LOOK_S, QueueFull, Staging
from headrace.gateways.delivery.staging_config import StagingConfig
from headrace.gateways.delivery.staging_state import BY_KEY, Chunk, Stage
from headrace.gateways.delivery.topics import Topics, parse_name

PARTITIONS = 3
BATCHES = 8


def chunk(values: Sequence[bytes], *, key: bytes = b"", partition: int = BY_KEY, amqp: bool = False) -> Chunk:
    count = len(values)
    return Chunk(
        keys=[key] * count,
        properties=[NO_PROPERTIES if amqp else b""] * count,
        values=list(values),
        headers=[[]] * count,
        tags=[[]] * count,
        attributes=[PERSISTENT | int(Protocol.AMQP if amqp else Protocol.NEUTRAL)] * count,
        partitions=[partition] * count,
        due_us=[0] * count,
        ids=[b""] * count,
    )


class Stages:
    """Staging in a broker, and the topic `t`."""

    def __init__(self, running: Running, config: StagingConfig | None) -> None:
        self.running = running
        self.broker = running.broker
        self.topics = Topics(running.broker)
        self.staging = Staging(running.broker, self.topics, config)

    async def stage(self, *values: bytes, batch: int = 0, topic: str = "t", query: str = "q", **more: object) -> UUID:
        stage = await self.staging.stage(
            "eve",
            query,
            batch,
            self.topics.resolve(parse_name(topic)),
            [chunk(values, amqp=topic != "t", **more)],  # type: ignore[arg-type]
            partition=0,
            attempt=0,
        )
        return stage.id

    async def commit(self, *stages: UUID, batch: int = 0, query: str = "q") -> tuple[int, bool]:
        done = await self.staging.commit("eve", query, batch, stages)
        return done.count, done.repeated

    def published(self) -> list[bytes]:
        """Everything in the topic, a partition after the other."""
        place = self.topics.resolve(parse_name("t"))
        return [value for log in self.topics.logs_of(place.stream_id) for _, _, value in log.entries()]


@asynccontextmanager
async def opened(house: House, *, clean: bool = True, config: StagingConfig | None = None) -> AsyncIterator[Stages]:
    async with house.broker(clean=clean) as running:
        stages = Stages(running, config)
        await stages.topics.load()
        if ("/", "t") not in running.metadata.snapshot.topics:
            await stages.topics.create("/", "t", PARTITIONS, EMPTY)
        running.broker.delayed.carry(DutyKind.PUBLISH, DelayedPublishes(running.broker, {Protocol.AMQP: fired}))
        await stages.staging.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(stages.staging.run)
            yield stages
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def doomed(house: House, *, clean: bool = True) -> AsyncIterator[Stages]:
    """A broker that loses its power in the middle of whatever it does."""
    left = storage = house.storage
    assert isinstance(storage, MemoryStorage)
    try:
        async with opened(house, clean=clean) as stages:
            yield stages
            left = storage.power_loss(house.random)
    except* StorageError:
        if left is storage:
            raise
    house.storage = left


@pytest.fixture
async def stages() -> AsyncIterator[Stages]:
    async with opened(House()) as found:
        yield found


async def test_what_is_staged_is_seen_by_nobody_before_its_commit(stages: Stages) -> None:
    one, two = await stages.stage(b"a", b"b"), await stages.stage(b"c")
    assert stages.published() == []
    assert await stages.commit(one, two) == (3, False)
    assert sorted(stages.published()) == [b"a", b"b", b"c"]
    assert (stages.staging.stage_count, stages.staging.byte_count) == (0, 0)


async def test_batch_that_was_committed_is_not_published_again_nor_are_earlier_ones(stages: Stages) -> None:
    await stages.commit(await stages.stage(b"a", batch=7), batch=7)
    for batch in (7, 6, 0):
        assert await stages.commit(await stages.stage(b"again", batch=batch), batch=batch) == (0, True)
    assert await stages.commit(await stages.stage(b"b", batch=8), batch=8) == (1, False)
    assert sorted(stages.published()) == [b"a", b"b"]
    assert stages.staging.stage_count == 0


async def test_queries_count_their_batches_each_for_itself(stages: Stages) -> None:
    for query in ("q", "r"):
        assert await stages.commit(await stages.stage(b"a", query=query), query=query) == (1, False)
    assert stages.published() == [b"a", b"a"]


async def test_empty_batch_counts_as_committed(stages: Stages) -> None:
    assert await stages.commit(batch=3) == (0, False)
    assert await stages.commit(batch=3) == (0, True)


async def test_two_commits_of_a_batch_at_once_publish_it_once(stages: Stages) -> None:
    outcomes: list[tuple[int, bool]] = []
    made = [await stages.stage(b"a"), await stages.stage(b"a")]

    async def commit(stage: UUID) -> None:
        outcomes.append(await stages.commit(stage))

    async with trio.open_nursery() as nursery:
        for one in made:
            nursery.start_soon(commit, one)
    assert sorted(outcomes) == [(0, True), (1, False)]
    assert stages.published() == [b"a"]


async def test_keys_decide_partitions_unless_one_was_given(stages: Stages) -> None:
    keyed = [await stages.stage(b"%d" % n, key=b"k%d" % n) for n in range(20)]
    given = [await stages.stage(b"x", key=b"k%d" % n, partition=2) for n in range(5)]
    await stages.commit(*keyed, *given)
    place = stages.topics.resolve(parse_name("t"))
    for log in stages.topics.logs_of(place.stream_id):
        for _, key, value in log.entries():
            assert log.partition == (2 if value == b"x" else stages.topics.partition_for(place, key))
    assert len(stages.published()) == 25


async def test_commit_to_a_queue_is_delivered_as_any_publish(stages: Stages) -> None:
    await stages.running.declare("jobs")
    stage = await stages.stage(b"a", b"b", topic="queue:jobs", key=b"jobs")
    assert stages.running.host.queue("jobs").ready_count == 0
    await stages.commit(stage)
    assert stages.running.bodies("jobs") == [b"a", b"b"]


async def test_commit_without_room_in_a_queue_that_refuses_is_refused_whole(stages: Stages) -> None:
    await stages.running.declare("small", max_length=2, overflow="reject-publish")
    much = await stages.stage(b"a", b"b", b"c", topic="queue:small", key=b"small")
    other = await stages.stage(b"d")
    with pytest.raises(QueueFull, match="'small' has no room for 3 messages"):
        await stages.commit(other, much)
    assert stages.published() == [] and stages.running.bodies("small") == []
    with pytest.raises(NotFound):
        stages.staging.query("eve", "q")
    # The stages wait on: a commit that fits takes them.
    assert await stages.commit(other) == (1, False)


async def test_delayed_messages_are_parked_by_the_commit_and_come_when_due(autojump_clock: MockClock) -> None:
    async with opened(House()) as stages:
        await stages.running.declare("jobs")
        later = chunk([b"later"], key=b"jobs", amqp=True)
        later.due_us = [stages.broker.env.clock.wall_us() + 60_000_000]
        later.ids = [b"one"]
        place = stages.topics.resolve(parse_name("queue:jobs"))
        made = await stages.staging.stage("eve", "q", 0, place, [later], partition=0, attempt=0)
        assert stages.broker.delayed.delays.count() == 0
        await stages.commit(made.id)
        assert stages.broker.delayed.delays.count() == 1
        assert stages.running.bodies("jobs") == []
        await trio.sleep(61)
        assert stages.running.bodies("jobs") == [b"later"]


async def test_what_a_commit_may_not_name_is_refused_and_nothing_is_published(stages: Stages) -> None:
    mine = await stages.stage(b"a")
    with pytest.raises(NotFound, match="no stage"):
        await stages.commit(mine, UUID(int=5))
    with pytest.raises(NotFound, match="of query 'other'"):
        await stages.commit(mine, query="other")
    with pytest.raises(NotFound):
        await stages.staging.commit("mallory", "q", 0, [mine])
    with pytest.raises(Invalid, match="is of batch 0, not 1"):
        await stages.commit(mine, batch=1)
    with pytest.raises(Invalid, match="twice"):
        await stages.commit(mine, mine)
    assert stages.published() == []
    assert await stages.commit(mine) == (1, False)


async def test_right_that_was_taken_back_is_asked_for_again(stages: Stages) -> None:
    mine = await stages.stage(b"a")

    def refuse(stage: Stage, key: bytes) -> None:
        raise Refused("no more")

    with pytest.raises(Refused, match="no more"):
        await stages.staging.commit("eve", "q", 0, [mine], refuse)
    assert stages.published() == []


async def test_topic_that_was_deleted_meanwhile_refuses_the_commit(stages: Stages) -> None:
    mine = await stages.stage(b"a")
    await stages.topics.delete("/", "t")
    await stages.topics.create("/", "t", 1, EMPTY)
    with pytest.raises(NotFound, match="was deleted since"):
        await stages.commit(mine)
    assert stages.published() == []


async def test_aborted_stages_are_gone_and_others_stay(stages: Stages) -> None:
    one, two = await stages.stage(b"a"), await stages.stage(b"b")
    assert stages.staging.abort("mallory", [one]) == 0
    assert stages.staging.abort("eve", [one, UUID(int=5)]) == 1
    with pytest.raises(NotFound):
        await stages.commit(one)
    assert await stages.commit(two) == (1, False)


async def test_stages_and_queries_are_let_go_of_in_time(autojump_clock: MockClock) -> None:
    config = StagingConfig(expiry_ms=300_000, queries_retention_ms=600_000)
    async with opened(House(), config=config) as stages:
        await stages.commit(await stages.stage(b"a"))
        old = await stages.stage(b"old", batch=1)
        await trio.sleep(300 - LOOK_S)
        young = await stages.stage(b"young", batch=1)
        await trio.sleep(3 * LOOK_S)
        assert [one.id for one in stages.staging.stages("eve")] == [young]
        with pytest.raises(NotFound, match="expired"):
            await stages.commit(old, batch=1)
        assert stages.staging.query("eve", "q").last_batch == 0
        await trio.sleep(600)
        with pytest.raises(NotFound):
            stages.staging.query("eve", "q")
        assert stages.staging.counts["expired"] == 2
        assert stages.staging.byte_count == 0


async def test_limits_of_bytes_stages_and_queries_are_told() -> None:
    config = StagingConfig(bytes_max=2_000, stage_count_max=2, query_count_max=1)
    async with opened(House(), config=config) as stages:
        one = await stages.stage(bytes(1_500))
        with pytest.raises(LimitReached, match=r"staging\.bytes_max = 2000"):
            await stages.stage(bytes(1_500))
        await stages.stage(b"b")
        with pytest.raises(LimitReached, match="2 stages wait"):
            await stages.stage(b"c")
        await stages.commit(one)
        with pytest.raises(LimitReached, match="1 queries"):
            await stages.commit(query="r")
        await stages.stage(bytes(1_500))


async def test_forgotten_query_can_commit_its_batch_again(stages: Stages) -> None:
    await stages.commit(await stages.stage(b"a"))
    await stages.staging.forget("eve", "q")
    assert await stages.commit(await stages.stage(b"a")) == (1, False)
    assert stages.published() == [b"a", b"a"]
    with pytest.raises(NotFound):
        await stages.staging.forget("mallory", "q")


async def test_query_at_a_commit_is_not_forgotten(stages: Stages) -> None:
    await stages.commit()
    async with stages.staging._queries["eve", "q"].lock:
        with pytest.raises(InUse):
            await stages.staging.forget("eve", "q")


async def test_stages_and_last_batches_outlive_a_restart_and_numbers_go_on() -> None:
    house = House()
    async with opened(house) as stages:
        await stages.commit(await stages.stage(b"a"))
        left = await stages.stage(b"b", batch=1)
    async with opened(house) as stages:
        assert await stages.commit(await stages.stage(b"a")) == (0, True)
        assert await stages.commit(left, batch=1) == (1, False)
        assert sorted(stages.published()) == [b"a", b"b"]
    async with opened(house) as stages:
        assert await stages.commit(await stages.stage(b"b", batch=1), batch=1) == (0, True)
        assert sorted(stages.published()) == [b"a", b"b"]


async def test_data_of_stages_that_are_gone_is_let_go_of(autojump_clock: MockClock) -> None:
    async with opened(House()) as stages:
        for batch in range(3):
            await stages.commit(await stages.stage(bytes(1000), batch=batch), batch=batch)
        kept = await stages.stage(b"kept", batch=3)
        await trio.sleep(2 * LOOK_S)
        (log,) = [one.partitions[0] for one in stages.broker.directory.streams.values() if one.spec.name == "__staged"]
        assert log.log_start == log.end - 1
        assert await stages.commit(kept, batch=3) == (1, False)


class Driver:
    """Brings each batch until it is told that it is committed; its rows fall to other tasks each time."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.done = 0
        self._calls_left = 0
        self._last = trio.Event()

    async def live(self, stages: Stages) -> None:
        """Until the broker has got so many calls, and is at work on the last of them."""
        self._last = trio.Event()
        self._calls_left = self.random.randrange(2, 14)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._drive, stages)
            await self._last.wait()
            for _ in range(self.random.randrange(20)):
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()

    async def _drive(self, stages: Stages) -> None:
        try:
            while self.done < BATCHES:
                await self._bring(stages, self.done)
                self.done += 1
        except HeadraceError:
            await trio.sleep_forever()
        self._last.set()

    async def _bring(self, stages: Stages, batch: int) -> None:
        rows = [b"%d-%d" % (batch, row) for row in range(10)]
        self.random.shuffle(rows)
        made = []
        for part in (rows[:5], rows[5:]):
            self._count()
            made.append(await stages.stage(*part, batch=batch, key=part[0]))
            self._count()
            made.append(await stages.stage(*part, batch=batch, topic="queue:jobs", key=b"jobs"))
        self._count()
        await stages.commit(*made, batch=batch)

    def _count(self) -> None:
        self._calls_left -= 1
        if self._calls_left == 0:
            self._last.set()


@pytest.mark.parametrize("seed", range(12))
async def test_every_batch_is_there_once_over_any_loss_of_power(seed: int, autojump_clock: MockClock) -> None:
    house = House(seed)
    driver = Driver(Random(seed))
    lives = 0
    while driver.done < BATCHES:
        lives += 1
        async with doomed(house, clean=lives == 1) as stages:
            if "jobs" not in stages.running.host.queues:
                await stages.running.declare("jobs")
            await driver.live(stages)
    async with opened(house, clean=False) as stages:
        # Whatever was decided is carried out before another batch is.
        await stages.commit(batch=BATCHES)
        wanted = Counter(b"%d-%d" % (batch, row) for batch in range(BATCHES) for row in range(10))
        assert Counter(stages.published()) == wanted
        assert Counter(stages.running.bodies("jobs")) == wanted
