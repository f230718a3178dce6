"""E7: after an election by force each log says where records may be lost, and no offset is given out twice."""

from dataclasses import replace
from uuid import UUID

import pytest
import trio

from headrace.core_log.directory import Stream
from headrace.core_log.errors import NotLed
from headrace.core_log.record import Gap
from headrace.core_log.replication import shard as shard_module
from headrace.core_log.storage.memory import MemoryStorage

from .cluster import QUICK, SMALL, Cluster, cluster, until

RESERVED = SMALL.offsets_reserved


async def lose(three: Cluster, *numbers: int) -> None:
    """These nodes are gone with their disks, and others come in their place."""
    for number in numbers:
        await three.kill(number)
        node = three.nodes[number]
        node.storage, node.disk = MemoryStorage(), UUID(int=node.disk.int + 100)
    three.cut_off.clear()


async def two_behind(three: Cluster) -> Stream:
    """Node 2 has two records of a topic, and the others five, committed; then the others are gone."""
    await three.found()
    stream = await three.create()
    await three.write(stream, b"1", b"2").wait()
    await until(lambda: three.ends_equal(stream))
    await without_2(three, stream, b"3", b"4", b"5")
    await lose(three, 0, 1)
    return stream


async def without_2(three: Cluster, stream: Stream, *values: bytes) -> None:
    """Written and committed while nobody reaches node 2."""
    three.disconnect(2)
    await three.write(stream, *values).wait()
    assert three.row.in_sync_nodes == {0, 1}


async def test_e7_the_first_entry_of_a_forced_stint_says_where_records_may_be_lost() -> None:
    async with cluster() as three:
        stream = await two_behind(three)
        await three.force(2)
        done = three.write(stream, b"after")
        await three.start(0)
        await three.order()
        await done.wait()
        await until(lambda: three.ends_equal(stream, 0, 2))
        for number in (0, 2):
            assert three.gaps(number, stream) == [(2, 2 + RESERVED, Gap.UNCLEAN_ELECTION)]
            assert three.log(number, stream).epochs.latest == (three.row.epoch, 2, 2)
            assert three.values(number, stream) == [b"1", b"2", b"after"]
        assert three.batches(0, stream) == three.batches(2, stream)


async def test_e7_delivery_opens_behind_the_gap() -> None:
    async with cluster() as three:
        stream = await two_behind(three)
        await three.force(2)
        await until(lambda: three.log(2, stream).synced_end == 2 + RESERVED)
        assert not three.nodes[2].served
        await three.start(0)
        await three.order()
        await until(lambda: bool(three.nodes[2].served))
        assert three.log(2, stream).high_watermark == 2 + RESERVED


async def test_e7_offsets_that_the_new_leader_had_heard_of_are_not_given_out_again() -> None:
    async with cluster(config=replace(QUICK, throttle_bytes_s=5000)) as three:
        await three.found()
        stream = await three.create()
        await until(lambda: all(stream.spec.id in node.shard.directory.streams for node in three.nodes))
        await without_2(three, stream, b"1")
        for number in range(RESERVED):
            await three.write(stream, b"%d" % number * 500, b"", b"").wait()
        committed = three.log(0, stream).high_watermark
        assert committed > 2 * RESERVED
        # Little comes over at a time: it is told how far the others are long before it has all of it.
        three.cut_off.clear()
        await until(lambda: three.log(2, stream).written_end > 0)
        await lose(three, 0, 1)
        ends_at = int(three.log(2, stream).written_end)
        assert ends_at < committed
        await three.force(2)
        assert int(three.log(2, stream).written_end) == committed + RESERVED
        assert three.log(2, stream).epochs.latest.first_offset == ends_at


async def test_e7_a_gap_that_a_crash_took_is_written_by_the_next_stint() -> None:
    async with cluster() as three:
        stream = await two_behind(three)
        # The order reaches a life of the node that ends before it can act on it.
        three.disconnect(2)
        await three.force(2)
        three.cut_off.clear()
        await three.kill(2)
        await three.start(2)
        await three.elect(2)
        assert three.row.epoch > three.row.forced_epoch
        await three.start(0)
        await three.order()
        await until(lambda: three.ends_equal(stream, 0, 2))
        assert three.gaps(0, stream) == [(2, 2 + RESERVED, Gap.UNCLEAN_ELECTION)]


async def test_e7_what_is_created_after_it_has_lost_nothing_and_later_leaders_tell_nothing_new() -> None:
    async with cluster() as three:
        stream = await two_behind(three)
        await three.force(2)
        await three.start(0)
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 2})
        empty = await three.create("empty")
        directory = three.leader.directory
        await directory.grow_stream(directory.streams[stream.spec.id], 2)
        await until(lambda: three.ends_equal(empty, 0, 2) and three.ends_equal(stream, 0, 2))
        await until(lambda: len(three.nodes[0].shard.directory.streams[stream.spec.id].partitions) == 2)
        await three.elect(0)
        await three.write(stream, b"later").wait()
        assert three.log(0, empty).written_end == 0
        assert three.log(0, stream, 1).written_end == 0
        assert three.gaps(0, stream) == [(2, 2 + RESERVED, Gap.UNCLEAN_ELECTION)]


async def one_empty(three: Cluster) -> Stream:
    """Node 2 knows of a topic, and lacks its only record; the others are gone."""
    await three.found()
    stream = await three.create()
    await until(lambda: all(stream.spec.id in node.shard.directory.streams for node in three.nodes))
    await without_2(three, stream, b"1")
    await lose(three, 0, 1)
    return stream


async def test_e7_an_empty_log_of_before_is_marked_too() -> None:
    async with cluster() as three:
        stream = await one_empty(three)
        await three.force(2)
        await three.start(1)
        await three.order()
        await until(lambda: three.ends_equal(stream, 1, 2))
        assert three.gaps(1, stream) == [(0, RESERVED, Gap.UNCLEAN_ELECTION)]


async def test_e7_on_a_full_disk_the_gap_waits_and_nothing_comes_before_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shard_module, "FULL_DISK_PAUSE_S", 0.01)
    async with cluster() as three:
        stream = await one_empty(three)
        storage = three.nodes[2].storage
        assert isinstance(storage, MemoryStorage)
        storage.capacity_bytes = 0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(three.force, 2)
            await until(lambda: "what was lost cannot be noted" in caplog.text)
            with pytest.raises(NotLed):
                three.write(stream, b"too early")
            storage.capacity_bytes = None
        await three.start(0)
        await three.order()
        await until(lambda: three.ends_equal(stream, 0, 2))
        assert three.gaps(0, stream) == [(0, RESERVED, Gap.UNCLEAN_ELECTION)]


async def test_an_election_in_good_order_leaves_no_gap() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        await three.elect(1)
        await three.write(stream, b"2").wait()
        assert three.gaps(1, stream) == []
        assert three.log(1, stream).written_end == 2
