"""Queues that pin far more of a log than they want: what is copied when, and that nothing is lost or doubled by it."""

import logging
from collections.abc import Iterable

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.entities import Binding, DestinationKind
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import CorruptLog, DiskFull, StorageError
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, PRIORITY_SHIFT, RELOCATED, Protocol
from headrace.core_log.storage.crash import TracingStorage, crash_states
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery import release as releases
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue

from .house import NO_PROPERTIES, House, Running, Taker

# Segments of a few batches, and a retention that would keep about two of them.
SMALL = LogConfig(
    compression="none",
    segment_bytes_max=4000,
    batch_bytes_max=600,
    index_interval_bytes=256,
    offsets_reserved=1000,
    retention_bytes=8000,
)
FILLER = b"." * 200


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retention by bytes makes segments of 64 KiB at least; these are the sizes of a test."""
    monkeypatch.setattr(LogConfig, "segment_bytes", property(lambda config: config.segment_bytes_max))


def house() -> House:
    return House(log_config=SMALL)


async def exchange(running: Running, *queues: str, **arguments: object) -> None:
    """A direct exchange with durable queues, each bound by its own name."""
    await running.host.declare_exchange("x", "direct", durable=True, auto_delete=False, internal=False)
    for name in queues:
        await running.declare(name, **arguments)
        await bind(running, name)


async def bind(running: Running, queue: str, source: str = "x") -> None:
    await running.host.bind(Binding("/", source, DestinationKind.QUEUE, queue, queue))


async def publish(
    running: Running, key: str, *bodies: bytes, source: str = "x", priority: int = 0, expiry_us: int = 0
) -> None:
    target = running.host.target(source, key.encode(), [key])
    attributes = int(Protocol.AMQP) | PERSISTENT | priority << PRIORITY_SHIFT
    running.broker.publish(target, [NO_PROPERTIES] * len(bodies), bodies, attributes=attributes, expiry_us=expiry_us)
    running.broker.dispatch()
    await running.broker.committed()


async def pass_by(running: Running, count: int = 200, source: str = "x") -> None:
    """What others publish; of an own log too, that is what goes through and is settled."""
    for _ in range(count):
        await publish(running, "others", FILLER, source=source)


def log_of(running: Running, name: str) -> PartitionLog:
    (found,) = [one for one in running.broker.directory.streams.values() if one.spec.name == name]
    return found.partitions[0]


def own_log(running: Running, queue: str) -> PartitionLog:
    return running.broker.directory.streams[running.host.queue(queue).stream_id].partitions[0]


def value_of(stretch: Stretch | None) -> bytes:
    assert stretch is not None and stretch.count == 1
    return stretch.loaded().values[stretch.index]


def get(queue: Queue) -> Stretch:
    stretch = queue.get()
    assert stretch is not None
    stretch.loaded()
    # As a door does when it has sent it.
    stretch.batch = None
    return stretch


async def freed(running: Running, name: str = "x") -> int:
    """How much is left of a log when retention had its turn."""
    await running.broker.write_journal()
    await running.broker.directory.maintain()
    await running.broker.directory.committer.flush()
    await running.broker.directory.maintain()
    return log_of(running, name).byte_count


# -- what happens -----------------------------------------------------------------------------------------------------


async def test_one_unacked_message_no_longer_holds_the_log_of_its_exchange(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"kept")
        queue = running.host.queue("rare")
        held = get(queue)
        await pass_by(running)
        assert await freed(running) > 40_000
        with caplog.at_level(logging.INFO, logger="headrace.gateways.delivery.release"):
            await running.broker.releases.look()
        assert await freed(running) <= SMALL.retention_bytes + SMALL.segment_bytes_max
        (told,) = [one for one in caplog.records if "released" in one.message]
        assert (told.queue, told.vhost, told.stream, told.records) == ("rare", "/", "x", 1)  # type: ignore[attr-defined]
        assert (running.broker.releases.count, running.broker.releases.record_count) == (1, 1)
        # The one who holds it settles it as ever.
        queue.settle(held)
        assert queue.message_count == 0
        await running.broker.write_journal()
        assert running.broker.directory.pinned_from(own_log(running, "rare")) is None


async def test_queue_that_is_looked_at_every_second_is_released_by_itself(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"kept")
        await pass_by(running)
        await trio.sleep(5)
        assert running.broker.releases.count == 1
        assert log_of(running, "x").byte_count <= SMALL.retention_bytes + SMALL.segment_bytes_max
        assert running.bodies("rare") == [b"kept"]


async def test_what_a_release_copies_is_what_it_was(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        expiry_us = running.broker.env.clock.wall_us() + 3_600_000_000
        await publish(running, "rare", b"kept", priority=3, expiry_us=expiry_us)
        original = next(log_of(running, "x").read(0, end=1)[0].batch.records())
        await trio.sleep(100)
        await pass_by(running)
        await running.broker.releases.look()
        queue = running.host.queue("rare")
        stretch = queue.get()
        assert stretch is not None and stretch.source is own_log(running, "rare")
        copy = stretch.loaded().record(stretch.index)
        assert (copy.key, copy.properties, copy.value) == (original.key, original.properties, original.value)
        assert (copy.timestamp_us, copy.expiry_us) == (original.timestamp_us, expiry_us)
        assert copy.attributes == original.attributes | RELOCATED and copy.route_set == ()
        assert running.broker.exchanges_of(stretch) == [b"x"]
        assert stretch.deliveries == 0


async def test_queue_that_wants_what_it_pins_is_never_released(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "others", "fourth")
        for number in range(200):
            await publish(running, "fourth" if number % 4 == 0 else "others", FILLER)
        await running.broker.committed()
        await running.broker.releases.look()
        assert running.broker.releases.count == 0
        assert running.broker.maybe_log(running.host.queue("fourth").stream_id) is None
        assert running.host.queue("others").ready_count == 150


async def test_bytes_decide_and_not_the_number_of_messages(autojump_clock: MockClock) -> None:
    """Every third message, but hardly any byte: worth a copy. One message of forty, but half of the bytes: not."""
    async with house().broker() as running:
        await exchange(running, "small", "large")
        for number in range(600):
            await publish(running, "small" if number % 3 == 0 else "others", b"" if number % 3 == 0 else FILLER * 2)
        for number in range(200):
            await publish(
                running, "large" if number % 40 == 0 else "others", FILLER * 40 if number % 40 == 0 else FILLER
            )
        await running.broker.committed()
        await running.broker.releases.look()
        assert running.broker.releases.record_count == 200
        assert running.broker.maybe_log(running.host.queue("large").stream_id) is None


async def test_queue_found_to_want_too_much_is_weighed_again_when_it_wants_less(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house().broker() as running:
        await exchange(running, "some")
        for number in range(300):
            await publish(running, "some" if number % 4 == 0 else "others", FILLER)
        await running.broker.committed()
        looked = []
        weigh = releases.Releases._is_worth_it

        async def note(self: releases.Releases, one: Queue, release: releases.Release, pinned: int) -> bool:
            looked.append(pinned)
            return await weigh(self, one, release, pinned)

        monkeypatch.setattr(releases.Releases, "_is_worth_it", note)
        await running.broker.releases.look()
        await running.broker.releases.look()
        assert len(looked) == 1 and running.broker.releases.count == 0
        queue = running.host.queue("some")
        held = get(queue)
        for _ in range(70):
            queue.settle(get(queue))
        await running.broker.releases.look()
        assert len(looked) == 2 and running.broker.releases.count == 1
        queue.settle(held)
        assert queue.ready_count == 4


async def test_nothing_is_copied_where_retention_would_keep_it_anyway(autojump_clock: MockClock) -> None:
    """Or where there is less than the limit."""
    for one in (
        House(log_config=LogConfig(segment_bytes_max=4000, batch_bytes_max=600), release_bytes_min=1000),
        House(
            log_config=LogConfig(segment_bytes_max=4000, batch_bytes_max=600, retention_ms=1), release_bytes_min=10**6
        ),
    ):
        async with one.broker() as running:
            await exchange(running, "rare")
            await publish(running, "rare", b"kept")
            await pass_by(running)
            await running.broker.releases.look()
            assert running.broker.releases.count == 0


async def test_log_of_an_exchange_that_nobody_is_bound_to_is_let_go_of_too(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running)
        await pass_by(running)
        await trio.sleep(5)
        assert log_of(running, "x").byte_count <= SMALL.retention_bytes + SMALL.segment_bytes_max


async def test_release_by_age_needs_no_retention_by_bytes(autojump_clock: MockClock) -> None:
    config = LogConfig(segment_bytes_max=4000, batch_bytes_max=600, retention_ms=60_000, compression="none")
    async with House(log_config=config, release_bytes_min=20_000).broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"kept")
        await pass_by(running)
        await trio.sleep(30)
        assert running.broker.releases.count == 0
        await trio.sleep(60)
        assert running.broker.releases.count == 1
        assert running.bodies("rare") == [b"kept"]


class Steps(trio.abc.Instrument):
    """Counts how often the loop went from one task to another."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += 1


async def test_release_works_in_slices_and_others_have_their_turn_between_them(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    monkeypatch.setattr(releases, "COPY_COUNT", 2)
    async with house().broker() as running:
        await exchange(running, "rare")
        for number in range(10):
            await publish(running, "rare", *(b"%d %d" % (number, one) for one in range(5)))
            await pass_by(running, 20)
        steps = Steps()
        trio.lowlevel.add_instrument(steps)
        copied: list[tuple[int, int]] = []
        copy = releases.Release.copy

        def note(release: releases.Release, found: releases.Found) -> None:
            copied.append((steps.count, found.last - found.first))
            copy(release, found)

        monkeypatch.setattr(releases.Release, "copy", note)
        await running.broker.releases.look()
        trio.lowlevel.remove_instrument(steps)
        assert max(count for _step, count in copied) == 2
        assert sum(count for _step, count in copied) == running.broker.releases.record_count >= 40
        assert len({step for step, _count in copied}) == len(copied)


# -- whoever holds, returns, settles ----------------------------------------------------------------------------------


async def released(running: Running, name: str = "rare") -> None:
    await pass_by(running)
    before = running.broker.releases.count
    await running.broker.releases.look()
    assert running.broker.releases.count > before
    # The old places are gone for good.
    log = log_of(running, "x")
    await running.broker.write_journal()
    log.delete_before(log.segments[-1].base_offset)
    await running.broker.directory.committer.flush()
    assert running.host.queue(name).message_count > 0


async def test_what_is_returned_after_the_release_goes_back_to_its_place(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1", b"2", b"3", b"4")
        queue = running.host.queue("rare")
        first, second = get(queue), get(queue)
        await released(running)
        queue.give_back([second])
        queue.give_back([first], failed=False)
        again = [queue.get() for _ in range(4)]
        assert [value_of(one) for one in again] == [b"1", b"2", b"3", b"4"]
        assert [one and (one.deliveries, one.failures) for one in again] == [(1, 0), (1, 1), (0, 0), (0, 0)]


async def test_what_came_back_before_the_release_keeps_its_count(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1", b"2")
        queue = running.host.queue("rare")
        queue.give_back([get(queue)])
        await released(running)
        first, second = queue.get(), queue.get()
        assert first is not None and second is not None
        assert (value_of(first), first.deliveries) == (b"1", 1)
        assert (value_of(second), second.deliveries) == (b"2", 0)


async def test_rejected_after_the_release_is_dead_lettered_with_its_exchange(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare", dead_letter_exchange="", dead_letter_routing_key="dead")
        await running.declare("dead")
        await publish(running, "rare", b"1", b"2", b"3")
        queue = running.host.queue("rare")
        taker = running.consume(queue, Taker(no_ack=False))
        (held,) = taker.held
        held.batch = None
        await released(running)
        queue.reject(held)
        await trio.sleep(1)
        assert queue.message_count == 0
        found = running.host.queue("dead").get()
        assert found is not None
        batch = found.loaded()
        assert b"x-death" in batch.properties[found.index] and batch.values[found.index] == b"1"
        assert [value_of(running.host.queue("dead").get()) for _ in range(2)] == [b"2", b"3"]


async def test_stretch_whose_copies_lie_apart_is_returned_in_pieces(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody publishes to the queue itself between two slices of the copy."""
    monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    async with house().broker() as running:
        await exchange(running, "rare", max_length_bytes=100_000)
        queue = running.host.queue("rare")
        for number in range(12):
            await publish(running, "rare", *(b"%d " % (number * 10 + one) for one in range(10)))
        expected = [b"%d " % number for number in range(120)]
        taker = running.consume(queue, Taker(no_ack=False))
        held, byte_count = taker.held, queue.byte_count
        for stretch in held:
            stretch.batch = None
        copy = releases.Release.copy

        def interrupted(release: releases.Release, found: releases.Found) -> None:
            for first in range(found.first, found.last):
                copy(
                    release, releases.Found(found.lane, found.seq + first - found.first, found.batch, first, first + 1)
                )
                running.broker.own_log(queue, "/").append([b""], [b""], [b"orphan"], timestamp_us=1)

        monkeypatch.setattr(releases.Release, "copy", interrupted)
        await released(running)
        running.leave(queue, taker)
        queue.give_back(held)
        assert queue.byte_count == byte_count + sum(map(len, expected))
        assert running.bodies("rare") == expected


async def test_what_is_settled_while_it_is_copied_does_not_come_back(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1", b"2", b"3", b"4")
        queue = running.host.queue("rare")
        first, _second = get(queue), get(queue)
        finish = releases.Release.finish

        def settled_before(release: releases.Release) -> None:
            queue.settle(first)
            assert queue.purge() == 2
            finish(release)

        monkeypatch.setattr(releases.Release, "finish", settled_before)
        await released(running)
        assert (queue.ready_count, queue.unacked_count) == (0, 1)
        running_lane = queue.lanes[0]
        assert [(one.seq, one.count) for one in running_lane.arrivals()] == [(1, 1)]


async def test_queue_deleted_in_the_middle_of_its_release_is_gone(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1")
        queue = running.host.queue("rare")
        await pass_by(running)
        finish = releases.Release.copy

        def deleted(release: releases.Release, found: releases.Found) -> None:
            finish(release, found)
            running.host._forget_queue(queue)

        monkeypatch.setattr(releases.Release, "copy", deleted)
        await running.broker.releases.look()
        assert running.broker.releases.count == 0
        await running.broker.write_journal()
        await running.broker._drop_retired()
        assert queue.stream_id not in running.broker.directory.streams


async def test_queue_and_exchange_deleted_while_it_is_weighed_end_nothing(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    async with house().broker() as running:
        await exchange(running, "rare")
        for _ in range(5):
            await publish(running, "rare", b"1")
            await pass_by(running, 40)
        read = releases.Release.read
        slices = 0

        def deleted(release: releases.Release) -> list[releases.Found] | None:
            nonlocal slices
            slices += 1
            if slices == 2:
                running.host._forget_queue(running.host.queue("rare"))
                running.broker.retire(log_of(running, "x").stream_id)
            return read(release)

        monkeypatch.setattr(releases.Release, "read", deleted)
        await running.broker.releases.look()
        assert (slices, running.broker.releases.count) == (2, 0)
        await running.broker.releases.look()
        assert slices == 2


@pytest.mark.parametrize("error", [DiskFull("no room"), CorruptLog("x", 0, 0, "a batch fails its hash")], ids=str)
async def test_failure_leaves_everything_where_it_is_and_is_tried_again_later(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: StorageError
) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1")
        await pass_by(running)

        def fail(release: releases.Release, found: releases.Found) -> None:
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(releases.Release, "copy", fail)
            await running.broker.releases.look()
        assert [one.queue for one in caplog.records if "could not be released" in one.message] == ["rare"]  # type: ignore[attr-defined]
        await running.broker.releases.look()
        assert running.broker.releases.count == 0
        await trio.sleep(releases.RETRY_S + 2)
        assert running.broker.releases.count == 1
        assert running.bodies("rare") == [b"1"]


# -- queues of all kinds ----------------------------------------------------------------------------------------------


async def test_lanes_of_priorities_are_released_together_and_keep_their_order(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare", max_priority=3)
        for number in range(12):
            await publish(running, "rare", b"%d" % number, priority=number % 4)
        queue = running.host.queue("rare")
        held = get(queue)
        await released(running)
        queue.give_back([held])
        expected = [b"%d" % number for top in (3, 2, 1, 0) for number in range(top, 12, 4)]
        assert running.bodies("rare") == expected


async def test_queue_of_several_exchanges_keeps_the_order_of_arrival(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 5)
    async with house().broker() as running:
        await exchange(running, "rare")
        await running.host.declare_exchange("y", "direct", durable=True, auto_delete=False, internal=False)
        await bind(running, "rare", "y")
        for number in range(20):
            await publish(running, "rare", b"%d" % number, source=("x", "y", "")[number % 3])
        await released(running)
        await publish(running, "rare", b"20", source="y")
        lowest = running.host.queue("rare").lanes[0].lowest_offsets()
        assert log_of(running, "x") not in lowest and log_of(running, "y") in lowest
        assert running.bodies("rare") == [b"%d" % number for number in range(21)]


async def test_queue_holds_its_own_log_no_longer_than_that_of_an_exchange(autojump_clock: MockClock) -> None:
    """What goes through the default exchange is in the queue's own log: there the copies go to its end."""
    async with house().broker() as running:
        queue = await running.declare("work")
        await publish(running, "work", b"stuck", source="")
        stuck = get(queue)
        for round_ in range(3):
            for _ in range(200):
                await publish(running, "work", FILLER, source="")
            await running.broker.committed()
            while queue.ready_count:
                queue.settle(get(queue))
            await running.broker.releases.look()
            assert running.broker.releases.count == round_ + 1
            assert await freed(running, "work") <= SMALL.retention_bytes + 2 * SMALL.segment_bytes_max
        queue.give_back([stuck])
        assert running.bodies("work") == [b"stuck"]


async def test_queue_in_memory_is_released_into_the_log_of_all_such_queues(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await running.host.declare_exchange("x", "direct", durable=True, auto_delete=False, internal=False)
        queue = await running.declare("rare", durable=False)
        await bind(running, "rare")
        await publish(running, "rare", b"1", b"2")
        held = get(queue)
        await released(running)
        assert queue.lanes[0].lowest_offsets().keys() == {running.broker.transient_log}
        queue.give_back([held])
        assert running.bodies("rare") == [b"1", b"2"]


async def test_log_of_a_deleted_exchange_goes_when_its_queues_are_released(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1")
        await released(running)
        await running.host.delete_exchange("x")
        await running.broker.write_journal()
        await running.broker._drop_retired()
        assert [one.spec.name for one in running.broker.directory.streams.values() if one.spec.name == "x"] == []
        stretch = running.host.queue("rare").get()
        assert stretch is not None and running.broker.exchanges_of(stretch) == [b"x"]


async def test_what_arrives_after_a_release_and_is_settled_pins_nothing(autojump_clock: MockClock) -> None:
    """The stuck one keeps the floor where it is; what is settled above it must not hold the log again."""
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"stuck")
        queue = running.host.queue("rare")
        get(queue)
        await released(running)
        for _ in range(50):
            await publish(running, "rare", b"fine")
            await pass_by(running, 4)
            queue.settle(get(queue))
        await running.broker.write_journal()
        log = log_of(running, "x")
        pinned = running.broker.directory.pinned_from(log)
        assert pinned is None or pinned >= log.end - 5


async def test_time_to_live_goes_on_counting(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare", message_ttl=10_000)
        await publish(running, "rare", b"1")
        await trio.sleep(5)
        await released(running)
        await trio.sleep(4)
        assert running.host.queue("rare").ready_count == 1
        await trio.sleep(2)
        assert running.host.queue("rare").ready_count == 0


async def test_reader_beside_the_queue_passes_over_what_the_exchange_no_longer_has(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "rare")
        await publish(running, "rare", b"1", b"2")
        await released(running)
        await publish(running, "rare", b"3")
        await running.broker.committed()
        await running.broker.write_journal()
        queue = running.host.queue("rare")
        reader = Taker(no_ack=False)
        queue.add_reader(reader, 0)
        running.broker.wake(queue)
        running.broker.dispatch()
        assert reader.got == [b"3"]
        assert running.bodies("rare") == [b"1", b"2", b"3"]


async def test_those_who_hold_most_can_be_named(autojump_clock: MockClock) -> None:
    async with house().broker() as running:
        await exchange(running, "first", "later", "nothing")
        stream = await running.declare("stream", queue_type="stream")
        await bind(running, "stream")
        await publish(running, "first", b"1")
        await pass_by(running, 50)
        await publish(running, "stream", b"1")
        await pass_by(running, 50)
        await publish(running, "later", b"1")
        await pass_by(running, 50)
        found = running.broker.largest_holders(2)
        assert [(vhost, name) for _size, vhost, name in found] == [("/", "first"), ("/", "stream")]
        assert found[0][0] == log_of(running, "x").byte_count > running.broker.pinned_bytes(stream)
        assert [name for _size, _vhost, name in running.broker.largest_holders(10)] == ["first", "stream", "later"]


# -- crashes ----------------------------------------------------------------------------------------------------------


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def _journalled(one: House) -> None:
    """A queue with twelve records of which two were settled, and much that passed it by."""
    async with one.broker() as running:
        await exchange(running, "rare")
        for number in range(12):
            await publish(running, "rare", b"%d" % number)
            await pass_by(running, 20)
        queue = running.host.queue("rare")
        held = [get(queue) for _ in range(6)]
        for stretch in (held[1], held[4]):
            queue.settle(stretch)


def _left(settled: Iterable[int] = (1, 4)) -> list[bytes]:
    return [b"%d" % number for number in range(12) if number not in settled]


async def test_loss_of_power_at_any_point_of_a_release_leaves_every_record_once(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    one = house()
    await _journalled(one)
    assert isinstance(one.storage, MemoryStorage)
    traced = one.storage = TracingStorage(one.storage)
    async with one.broker() as running:
        traced.mark("begun", None)
        await running.broker.releases.look()
        assert running.broker.releases.record_count == 10
        await running.broker.write_journal()
        await running.broker.directory.maintain()
        await running.broker.directory.committer.flush()
        traced.mark("done", log_of(running, "x").log_start > 0)
    found_in = set()
    for state in crash_states(traced, limit_per_prefix=3):
        if not state.marked("begun"):
            continue
        one.storage = state.storage
        async with one.broker(clean=False) as running:
            queue = running.host.queue("rare")
            found_in |= {"own" if log is not log_of(running, "x") else "x" for log in queue.lanes[0].lowest_offsets()}
            assert running.bodies("rare") == _left(), state
        if state.marked("done"):
            break
    assert found_in == {"x", "own"}


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_crash_of_the_process_while_a_queue_is_released_and_used(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, turns: int
) -> None:
    """What was settled meanwhile may come again, and nothing else twice."""
    monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    one = house()
    await _journalled(one)
    storage = one.storage
    assert isinstance(storage, MemoryStorage)
    with trio.CancelScope() as scope:
        async with one.broker() as running, trio.open_nursery() as nursery:
            nursery.start_soon(running.broker.releases.look)
            queue = running.host.queue("rare")
            held = [get(queue) for _ in range(3)]
            for turn in range(turns):
                await trio.lowlevel.checkpoint()
                if turn % 7 == 6 and held:
                    queue.settle(held.pop())
                if turn % 20 == 19:
                    await running.broker.write_journal()
            one.storage = storage.after_power_loss(lambda change: True)
            scope.cancel()
    async with one.broker(clean=False) as running:
        found = list(running.bodies("rare"))
        assert len(set(found)) == len(found) and found == sorted(found, key=int)
        assert set(_left((0, 1, 2, 3, 4))) <= set(found) <= set(_left())
