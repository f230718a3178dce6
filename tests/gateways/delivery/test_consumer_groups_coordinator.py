"""Groups over a real log: what members are given, read and commit, and what a restart and a crash leave of it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
import trio
from trio.testing import MockClock

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import Refused, StorageError
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, Gap
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.delivery.consumer_groups import (
    Fenced,
    GroupInUse,
    Member,
    NotHeld,
    OffsetBehind,
    Start,
    UnknownMember,
)
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_config import GroupsConfig
from headrace.gateways.delivery.consumer_groups_coordinator import (
    RESET,
    SWEEP_PERIOD_S,
    GroupCoordinator,
    Missing,
    Polled,
)
from headrace.gateways.delivery.consumer_groups_journal import GroupName

from .house import House, Running

GROUP = GroupName("/", "billing")
TOPIC = StreamId(UUID(int=77))
SESSION_MS = 10_000


class Groups:
    """A coordinator, a topic of two partitions, and members of one user."""

    def __init__(self, running: Running, config: GroupsConfig | None) -> None:
        self.broker = running.broker
        self.coordinator = GroupCoordinator(self.broker, self.logs_of, config)

    def logs_of(self, stream: StreamId) -> list[PartitionLog | None]:
        found = self.broker.directory.streams.get(stream)
        return [] if found is None else [*found.partitions]

    async def create(self, count: int = 2, config: LogConfig | None = None) -> None:
        await self.broker.directory.create_stream(
            "orders", kind="topic", partition_count=count, stream_id=TOPIC, config=config
        )

    async def publish(self, partition: int, *bodies: bytes) -> None:
        log = self.logs_of(TOPIC)[partition]
        assert log is not None
        empty = [b""] * len(bodies)
        log.append(empty, empty, bodies, timestamp_us=self.broker.env.clock.wall_us(), attributes=PERSISTENT)
        await self.broker.wait_committed(log, log.end)

    async def join(self, user: str = "eve", **more: Any) -> "Client":
        settings = {"session_ms": SESSION_MS, "rebalance_ms": 60_000} | more
        member_id, standing = await self.coordinator.join(GROUP, user, frozenset([TOPIC]), **settings)
        return Client(self.coordinator, member_id, user, standing.generation)

    def lag(self) -> list[int]:
        return [one.lag for one in self.coordinator.progress(GROUP)]

    def committed(self) -> dict[int, int]:
        return {slot.partition: one.offset for slot, one in self.coordinator.groups[GROUP].committed.items()}


class Client:
    """A member that acts upon what it is told, and remembers what it has received."""

    def __init__(self, coordinator: GroupCoordinator, member_id: str, user: str, generation: int) -> None:
        self.coordinator = coordinator
        self.id = member_id
        self.user = user
        self.generation = generation
        self.after: int | None = None
        # Read and not committed.
        self.places: dict[Slot, int] = {}

    async def beat(self) -> list[int]:
        """The partitions it holds."""
        told = await self.coordinator.heartbeat(GROUP, self.id, self.user, self.generation)
        self.generation = told.generation
        return [held.slot.partition for held in told.holds]

    async def poll(self, **more: Any) -> Polled:
        polled = await self.coordinator.poll(GROUP, self.id, self.user, self.generation, **more)
        self.generation, self.after = polled.standing.generation, polled.number
        return polled

    async def bodies(self, **more: Any) -> list[bytes]:
        return [one.batch.values[one.at] for one in (await self.poll(**more)).records]

    async def commit(self, *offsets: int) -> None:
        """Of the first partitions."""
        where = {Slot(TOPIC, number): offset for number, offset in enumerate(offsets)}
        await self.coordinator.commit(GROUP, where, member_id=self.id, user=self.user, generation=self.generation)

    async def leave(self) -> None:
        await self.coordinator.leave(GROUP, self.id, self.user)


@pytest.fixture
def house() -> House:
    return House()


@asynccontextmanager
async def opened(house: House, *, clean: bool = True, config: GroupsConfig | None = None) -> AsyncIterator[Groups]:
    async with house.broker(clean=clean) as running:
        groups = Groups(running, config)
        await groups.coordinator.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(groups.coordinator.run)
            yield groups
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def doomed(house: House, end: str, *, clean: bool = True) -> AsyncIterator[Groups]:
    """A broker that ends in the middle of whatever it does."""
    left = storage = house.storage
    assert isinstance(storage, MemoryStorage)
    try:
        async with opened(house, clean=clean) as groups:
            yield groups
            left = storage.process_crash() if end == "crash" else storage.power_loss(house.random)
    except* StorageError:
        if left is storage:
            raise
    house.storage = left


@pytest.fixture
async def groups(house: House) -> AsyncIterator[Groups]:
    async with opened(house) as found:
        await found.create()
        yield found


# -- reading ----------------------------------------------------------------------------------------------------


async def test_poll_begins_at_what_is_committed_however_often_it_is_asked(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b", b"c")
    client = await groups.join()
    assert await client.bodies() == [b"a", b"b", b"c"]
    assert await client.bodies() == [b"a", b"b", b"c"]
    await client.commit(2)
    assert await client.bodies() == [b"c"]


async def test_poll_goes_on_behind_the_answer_that_was_received(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b", b"c")
    client = await groups.join()
    assert await client.bodies(count_max=1) == [b"a"]
    assert await client.bodies(count_max=1, after=client.after) == [b"b"]
    assert await client.bodies(after=client.after) == [b"c"]
    assert await client.bodies(after=client.after) == []
    assert groups.committed() == {0: 0, 1: 0}


async def test_answer_that_got_lost_is_given_again(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b", b"c")
    client = await groups.join()
    await client.poll(count_max=1)
    received = client.after
    assert await client.bodies(count_max=1, after=received) == [b"b"]
    assert await client.bodies(count_max=1, after=received) == [b"b"]
    assert await client.bodies(count_max=1, after=client.after) == [b"c"]


async def test_number_that_nobody_knows_leads_back_to_what_is_committed(groups: Groups) -> None:
    await groups.publish(0, b"a")
    client = await groups.join()
    assert await client.bodies(after=12345) == [b"a"]


async def test_places_of_an_answer_can_be_committed(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b")
    await groups.publish(1, b"c")
    client = await groups.join()
    polled = await client.poll()
    await client.commit(*(polled.places[Slot(TOPIC, number)].offset for number in (0, 1)))
    assert groups.committed() == {0: 2, 1: 1}
    assert groups.lag() == [0, 0]


async def test_answer_holds_no_more_than_was_asked_for_but_at_least_one(groups: Groups) -> None:
    await groups.publish(0, b"x" * 100, b"y" * 100)
    client = await groups.join()
    assert await client.bodies(bytes_max=1) == [b"x" * 100]
    assert await client.bodies(bytes_max=101) == [b"x" * 100, b"y" * 100]


async def test_partitions_take_turns_so_that_none_starves(groups: Groups) -> None:
    for partition in (0, 1):
        await groups.publish(partition, *(b"%d" % partition for _ in range(10)))
    client = await groups.join()
    first, second = await client.bodies(count_max=5), await client.bodies(count_max=5, after=client.after)
    assert {first[0], second[0]} == {b"0", b"1"}


async def test_filter_passes_over_what_is_not_wanted_for_good(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b", b"a")
    client = await groups.join()

    def only_b(_slot: Slot, batch: Any, first: int, last: int) -> list[int]:
        return [index for index in range(first, last) if batch.values[index] == b"b"]

    polled = await client.poll(select=only_b)
    assert [one.batch.values[one.at] for one in polled.records] == [b"b"]
    assert polled.places[Slot(TOPIC, 0)].offset == 3


async def test_long_poll_ends_with_the_first_record(groups: Groups, autojump_clock: MockClock) -> None:
    client = await groups.join()
    found: list[bytes] = []

    async def wait() -> None:
        found.extend(await client.bodies(wait_s=4))

    before = trio.current_time()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(1)
        await groups.publish(1, b"late")
    assert found == [b"late"]
    assert trio.current_time() - before < 2


async def test_long_poll_ends_empty_when_its_time_is_over(groups: Groups, autojump_clock: MockClock) -> None:
    client = await groups.join()
    before = trio.current_time()
    assert await client.bodies(wait_s=3) == []
    assert trio.current_time() - before == pytest.approx(3, abs=0.1)


async def test_long_poll_ends_when_the_member_must_give_something_up(groups: Groups, autojump_clock: MockClock) -> None:
    client = await groups.join()
    told: list[Polled] = []

    async def wait() -> None:
        told.append(await client.poll(wait_s=4))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(1)
        await groups.join()
    assert told[0].standing.give_up == (Slot(TOPIC, 1),)


async def test_later_poll_of_a_member_takes_over_from_the_one_that_waits(
    groups: Groups, autojump_clock: MockClock
) -> None:
    client = await groups.join()
    answers: list[int] = []

    async def wait() -> None:
        answers.append(len(await client.bodies(wait_s=4)))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(1)
        assert await client.bodies() == []
        await trio.sleep(0.5)
        assert answers == [0]
    await groups.publish(0, b"a")
    assert await client.bodies(after=client.after) == [b"a"]


async def test_member_that_waits_for_records_is_not_taken_for_gone(groups: Groups, autojump_clock: MockClock) -> None:
    client = await groups.join(session_ms=2_000)
    for _ in range(5):
        await client.poll(wait_s=60)
    assert await client.beat() == [0, 1]


# -- sharing ----------------------------------------------------------------------------------------------------


async def test_partition_goes_over_with_what_is_committed(groups: Groups) -> None:
    await groups.publish(1, b"a", b"b", b"c")
    one = await groups.join()
    await one.poll()
    await one.commit(0, 2)
    two = await groups.join()
    assert await two.beat() == []
    assert await one.beat() == [0]
    assert await two.beat() == []
    assert await one.beat() == [0]
    assert await two.beat() == [1]
    assert await two.bodies() == [b"c"]
    with pytest.raises(NotHeld):
        await one.commit(0, 3)


async def test_member_that_falls_silent_loses_its_partitions_and_its_voice(
    groups: Groups, autojump_clock: MockClock
) -> None:
    one, two = await groups.join(), await groups.join()
    for _ in range(2):
        await one.beat()
    for _ in range(5):
        await trio.sleep(SESSION_MS / 1000 / 3)
        await two.beat()
    assert await two.beat() == [0, 1]
    with pytest.raises(UnknownMember):
        await one.commit(0)
    with pytest.raises(UnknownMember):
        await one.poll()


async def test_who_leaves_makes_room_at_once(groups: Groups) -> None:
    one, two = await groups.join(), await groups.join()
    await one.leave()
    assert await two.beat() == [0, 1]
    with pytest.raises(UnknownMember):
        await one.leave()


async def test_member_of_another_user_is_nobody(groups: Groups) -> None:
    client = await groups.join(user="eve")
    client.user = "mallory"
    for request in (client.beat, client.poll, client.commit, client.leave):
        with pytest.raises(UnknownMember):
            await request()


async def test_added_partitions_are_shared_out_and_read_from_their_first_record(groups: Groups) -> None:
    client = await groups.join(start=Start.NEXT)
    await groups.broker.directory.grow_stream(groups.broker.directory.streams[TOPIC], 3)
    await groups.publish(2, b"new")
    assert await client.beat() == [0, 1, 2]
    assert await client.bodies() == [b"new"]


async def test_new_group_may_begin_behind_what_is_there_and_misses_nothing_from_then_on(groups: Groups) -> None:
    await groups.publish(0, b"old")
    client = await groups.join(start=Start.NEXT)
    await groups.publish(0, b"new")
    await client.leave()
    assert await (await groups.join(start=Start.NEXT)).bodies() == [b"new"]


async def test_session_timeout_that_makes_no_sense_is_refused(groups: Groups) -> None:
    with pytest.raises(Refused, match=r"session timeout of 5 ms is outside 1000\.\.1800000 ms"):
        await groups.join(session_ms=5)
    assert groups.coordinator.groups == {}


# -- offsets ----------------------------------------------------------------------------------------------------


async def test_commit_beyond_the_end_is_refused(groups: Groups) -> None:
    await groups.publish(0, b"a")
    client = await groups.join()
    with pytest.raises(Refused, match=r"offset 2 of partition 0 is outside 0\.\.1"):
        await client.commit(2)
    with pytest.raises(OffsetBehind):
        await client.commit(1)
        await client.commit(0)


async def test_reset_is_refused_while_members_read_unless_forced_and_then_they_begin_anew(groups: Groups) -> None:
    await groups.publish(0, b"a", b"b")
    client = await groups.join()
    await client.poll()
    await client.commit(2)
    back = {Slot(TOPIC, 0): 0}
    with pytest.raises(GroupInUse):
        await groups.coordinator.reset(GROUP, back, by="eve")
    await groups.coordinator.reset(GROUP, back, by="eve", force=True)
    with pytest.raises(Fenced):
        await client.commit(2)
    assert await client.bodies(after=client.after) == [b"a", b"b"]
    await client.leave()
    await groups.coordinator.reset(GROUP, {Slot(TOPIC, 0): 1}, by="ann")
    assert await (await groups.join()).bodies() == [b"b"]
    noted = reversed((await groups.broker.audit.page(RESET)).events)
    told = [(one.who, one.about["group"], one.about["offsets"][0]["was"]) for one in noted]
    assert told == [("eve", GROUP.name, 2), ("ann", GROUP.name, 0)]


async def test_reader_without_membership_commits_where_nobody_reads(groups: Groups) -> None:
    await groups.publish(0, b"a")
    await groups.coordinator.commit_from_outside(GROUP, {Slot(TOPIC, 0): 1})
    assert groups.committed() == {0: 1}
    await groups.join()
    with pytest.raises(GroupInUse):
        await groups.coordinator.commit_from_outside(GROUP, {Slot(TOPIC, 0): 1})


async def test_what_retention_took_is_told_as_a_gap_and_counted_once(groups: Groups) -> None:
    log = groups.logs_of(TOPIC)[0]
    assert log is not None
    await groups.publish(0, b"a", b"b", b"c")
    client = await groups.join()
    log.delete_before(2)
    start = int(log.log_start)
    assert start > 0, "a retention that takes whole batches must have taken something"
    for _ in range(2):
        polled = await client.poll()
        assert polled.missing == [Missing(Slot(TOPIC, 0), 0, start, None)]
    assert groups.coordinator.lost_count == start
    (first, _second) = groups.coordinator.progress(GROUP)
    assert (first.lost, first.lag) == (start, 3 - start)


async def test_offsets_of_a_dead_group_are_forgotten_in_the_end(house: House, autojump_clock: MockClock) -> None:
    config = GroupsConfig(offsets_retention_ms=120_000)
    async with opened(house, config=config) as groups:
        await groups.create()
        client = await groups.join()
        await trio.sleep(9)
        await client.leave()
        await trio.sleep(120 - SWEEP_PERIOD_S)
        assert GROUP in groups.coordinator.groups
        await trio.sleep(3 * SWEEP_PERIOD_S)
        assert groups.coordinator.groups == {}
    async with opened(house, config=config) as groups:
        assert groups.coordinator.groups == {}


async def test_offsets_of_a_deleted_topic_are_forgotten(groups: Groups) -> None:
    client = await groups.join()
    await groups.broker.directory.delete_stream(groups.broker.directory.streams[TOPIC])
    assert await client.beat() == []
    groups.coordinator.sweep()
    assert groups.committed() == {}


# -- lasting ----------------------------------------------------------------------------------------------------


async def test_members_and_offsets_outlive_a_restart(house: House) -> None:
    async with opened(house) as groups:
        await groups.create()
        await groups.publish(0, b"a", b"b")
        client = await groups.join()
        await client.poll()
        await client.commit(1)
    async with opened(house) as groups:
        await check_taken_up(groups, client)


async def test_nobody_is_told_of_what_is_not_on_the_disk_yet(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    client = await groups.join()
    committed = groups.broker.wait_committed

    async def meanwhile_another_joins(log: PartitionLog, end: int) -> None:
        await committed(log, end)
        group = groups.coordinator.groups[GROUP]
        group.join(Member("other", "eve", frozenset([TOPIC]), 10_000, 10_000), {TOPIC: 2}, 0)

    monkeypatch.setattr(groups.broker, "wait_committed", meanwhile_another_joins)
    assert await client.beat() == [0, 1]
    assert client.generation == 1


@pytest.mark.parametrize("end", ["crash", "power loss"])
@pytest.mark.parametrize("seed", range(5))
async def test_what_somebody_was_told_outlives_a_crash(end: str, seed: int) -> None:
    house = House(seed)
    async with doomed(house, end) as groups:
        await groups.create()
        await groups.publish(0, b"a", b"b")
        client = await groups.join()
        await client.poll()
        await client.commit(1)
    async with opened(house, clean=False) as groups:
        await check_taken_up(groups, client)


async def check_taken_up(groups: Groups, client: Client) -> None:
    """It is the same member in the same generation, and goes on at what it has committed."""
    client.coordinator = groups.coordinator
    generation = client.generation
    assert await client.beat() == [0, 1]
    assert client.generation == generation
    assert await client.bodies(after=client.after) == [b"b"]
    await client.commit(2)
    with pytest.raises(OffsetBehind):
        await client.commit(1)


async def test_gap_of_an_unclean_start_is_no_lag_and_is_told(house: House) -> None:
    async with doomed(house, "crash") as groups:
        await groups.create(1)
        await groups.publish(0, b"a", b"b")
    async with opened(house, clean=False) as groups:
        await groups.publish(0, b"c")
        log = groups.logs_of(TOPIC)[0]
        assert log is not None
        assert log.high_watermark > 1_000_000
        client = await groups.join()
        polled = await client.poll()
        assert [one.batch.values[one.at] for one in polled.records] == [b"a", b"b", b"c"]
        assert polled.missing == [Missing(Slot(TOPIC, 0), 2, int(log.high_watermark) - 1, Gap.UNCLEAN_START)]
        assert groups.lag() == [3]
        await client.commit(3)
        assert groups.lag() == [1]


async def test_e7_gap_of_an_election_by_force_is_no_lag_and_is_told_also_where_a_log_begins_with_it(
    house: House,
) -> None:
    async with opened(house) as groups:
        await groups.create(1)
        log = groups.logs_of(TOPIC)[0]
        assert log is not None
        log.begin_stint(7, 3)
        log.pass_over_lost(1000)
        await groups.publish(0, b"a", b"b")
        client = await groups.join()
        polled = await client.poll()
        assert [one.batch.values[one.at] for one in polled.records] == [b"a", b"b"]
        assert polled.missing == [Missing(Slot(TOPIC, 0), 0, 1000, Gap.UNCLEAN_ELECTION)]
        assert groups.lag() == [2]


async def test_member_that_does_not_come_back_after_a_restart_is_missed(
    house: House, autojump_clock: MockClock
) -> None:
    async with opened(house) as groups:
        await groups.create()
        await groups.join()
    async with opened(house) as groups:
        assert len(groups.coordinator.groups[GROUP].members) == 1
        await trio.sleep(SESSION_MS / 1000 + 1)
        assert groups.coordinator.groups[GROUP].members == {}
