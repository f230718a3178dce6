"""Three replicas of a shard: what is committed when, who is cut, who catches up, what streams followers know."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio

from headrace.core_log.directory import Stream
from headrace.core_log.env import Worker
from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.replication import shard as shard_module
from headrace.core_log.replication.assignment import Ballot, Stint
from headrace.core_log.replication.leader import INLINE_BYTES
from headrace.core_log.replication.status import Role
from headrace.core_log.storage.contract import File
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage

from .cluster import BALLOT, QUICK, SMALL, Cluster, cluster, until, without_gone


async def test_a_record_is_committed_once_the_in_sync_set_has_synced_it() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1", b"2").wait()
        assert [three.log(number, stream).synced_end for number in range(3)] == [2, 2, 2]
        three.disconnect(2)
        done = three.write(stream, b"3")
        await until(lambda: three.log(1, stream).synced_end == 3)
        assert not done.is_set()
        assert three.log(0, stream).high_watermark == 2
        three.cut_off.clear()
        await done.wait()
        assert three.values(2, stream) == [b"1", b"2", b"3"]


async def test_replicas_hold_the_same_batches_over_real_sockets_and_disks(tmp_path: Path) -> None:
    storages = [DiskStorage(tmp_path / str(number)) for number in range(3)]
    for number in range(3):
        (tmp_path / str(number)).mkdir(exist_ok=True)
    async with cluster(storages=storages, sockets=True) as three:
        await three.found()
        streams = [await three.create(name, partitions=2) for name in ("orders", "bills")]
        for number in range(40):
            done = [three.write(one, b"%d " % number * 100, partition=number % 2) for one in streams]
            if number % 10 == 9:
                for one in done:
                    await one.wait()
        await until(lambda: all(three.ends_equal(one) for one in streams))
        for stream in streams:
            for partition in range(2):
                one = three.batches(0, stream, partition)
                assert one
                await until(lambda: three.batches(1, stream, partition) == one)  # noqa: B023
                await until(lambda: three.batches(2, stream, partition) == one)  # noqa: B023
        assert len(three.log(1, streams[0]).segments) > 1


async def test_a_new_leader_serves_what_was_committed_and_the_old_one_is_cut_by_lineage() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"committed").wait()
        await until(lambda: three.ends_equal(stream))
        three.disconnect(0)
        lost = three.write(stream, b"never", b"confirmed", number=0)
        await until(lambda: three.log(0, stream).synced_end == 3)
        await three.elect(1)
        await until(lambda: three.nodes[1].served == [Stint(2, 1)])
        await three.write(stream, b"new").wait()
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.values(0, stream) == [b"committed", b"new"])
        assert not lost.is_set()
        assert three.nodes[0].stepped_down_count == 1
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await three.write(stream, b"all").wait()
        await until(lambda: three.ends_equal(stream))
        assert three.batches(0, stream) == three.batches(1, stream) == three.batches(2, stream)


async def test_delivery_is_torn_down_before_a_log_is_touched() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"committed").wait()
        await until(lambda: three.nodes[0].served == [Stint(1, 0)])
        three.disconnect(0)
        three.write(stream, b"lost", number=0)
        await until(lambda: three.log(0, stream).synced_end == 2)
        await three.elect(2)
        seen: list[int] = []
        three.nodes[0].on_step_down = lambda: seen.append(int(three.log(0, stream).written_end))
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.log(0, stream).written_end == 1)
        assert seen == [2]


async def test_v2_a_new_leader_opens_only_when_all_that_it_took_over_is_committed() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        three.disconnect(2)
        three.write(stream, b"2")
        await until(lambda: three.log(1, stream).synced_end == 2)
        await three.kill(0)
        row = three.row
        three.row = replace(row, leader=1, leader_incarnation=1, epoch=2, version=row.version._replace(number=2))
        await three.order()
        await trio.sleep(0.05)
        assert three.nodes[1].served == []
        three.cut_off.clear()
        three.row = replace(three.row, isr=three.row.isr[1:], version=row.version._replace(number=3))
        await three.order()
        await until(lambda: three.nodes[1].served == [Stint(2, 1)])
        assert three.log(1, stream).high_watermark == 2
        assert three.values(2, stream) == [b"1", b"2"]


async def test_e1_a_restarted_replica_keeps_its_promises_and_its_records() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        later = BALLOT._replace(epoch=5)
        assert await three.nodes[1].shard.promise(later) is not None
        await three.kill(1)
        await three.start(1)
        assert not await three.nodes[1].shard.obey(BALLOT, three.row)
        report = await three.nodes[1].shard.promise(later)
        assert report is not None and report.end == 1 and not report.is_blank
        assert report.isr == three.row.isr
        assert await three.nodes[1].shard.promise(BALLOT) is None


async def test_a_leader_that_restarts_leads_nothing() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        await three.kill(0)
        await three.start(0)
        await three.nodes[0].shard.obey(BALLOT, three.row)
        assert three.nodes[0].shard.role is Role.WAITING
        assert three.nodes[0].shard.writable() == "this node does not lead shard 0"
        await three.elect(1)
        await until(lambda: three.nodes[1].served != [])
        await three.write(stream, b"2").wait()
        await until(lambda: three.values(0, stream) == [b"1", b"2"])


async def test_a_replica_without_its_disk_is_blank_and_gets_everything_again() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, *[b"%d" % number for number in range(50)]).wait()
        await three.kill(2)
        await three.write(stream, b"more").wait()
        assert three.row.in_sync_nodes == {0, 1}
        node = three.nodes[2]
        node.storage, node.disk = MemoryStorage(), node.disk.__class__(int=99)
        await three.start(2)
        report = await node.shard.promise(BALLOT)
        assert report is not None and report.is_blank
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await until(lambda: three.ends_equal(stream))
        assert three.batches(2, stream) == three.batches(0, stream)
        await until(lambda: not node.shard.replica.kept.is_blank)


async def test_a_follower_that_is_gone_leaves_the_in_sync_set_and_comes_back() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        three.disconnect(2)
        await three.write(stream, b"2").wait()
        assert three.row.in_sync_nodes == {0, 1}
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await until(lambda: three.ends_equal(stream))


async def test_a_follower_that_only_lags_leaves_too() -> None:
    async with cluster(config=replace(QUICK, gone_s=1000)) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        three.disconnect(2)
        done = three.write(stream, b"2")
        await done.wait()
        assert three.row.in_sync_nodes == {0, 1}


async def test_a_request_is_repeated_until_an_order_settles_it() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        three.grants = False
        three.disconnect(2)
        done = three.write(stream, b"2")
        await until(lambda: len(three.requests) > 3)
        assert len(set(three.requests)) == 1
        assert not done.is_set(), "who is to leave counts until that is committed"
        three.grants = True
        await done.wait()


async def test_v3_too_few_in_sync_refuse_writes_with_the_reason() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        assert three.leader.writable() is None
        three.disconnect(1)
        three.disconnect(2)
        done = three.write(stream, b"2")
        await until(lambda: three.row.in_sync_nodes == {0})
        await until(lambda: three.leader.writable() == "shard 0 has 1 replicas in sync, of at least 2")
        assert not done.is_set()
        three.cut_off.clear()
        await three.order()
        await done.wait()
        assert three.leader.writable() is None


async def test_streams_that_come_grow_change_and_go_do_so_at_every_replica() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        other = await three.create("other")
        await three.write(stream, b"1").wait()
        directory = three.leader.directory
        await directory.grow_stream(stream, 3)
        await directory.configure_stream(stream, replace(SMALL, retention_bytes=123_456))
        await directory.rename_stream(stream, kind="topic", vhost="/", name="invoices")
        await three.write(stream, b"2", partition=2).wait()
        await directory.delete_stream(other)
        for number in (1, 2):
            streams = three.nodes[number].shard.directory.streams
            await until(lambda: set(streams) == {stream.spec.id} and streams[stream.spec.id].spec == stream.spec)  # noqa: B023
            assert three.values(number, stream, 2) == [b"2"]
            assert three.log(number, stream).config.retention_bytes == 123_456


async def test_e8_a_replica_that_was_away_hears_of_a_deletion_and_deletes_nothing_else() -> None:
    async with cluster() as three:
        await three.found()
        kept, gone = await three.create("kept"), await three.create("gone")
        await three.write(kept, b"1").wait()
        await three.write(gone, b"1").wait()
        orphan = await three.create("orphan")
        await three.write(orphan, b"1").wait()
        await three.kill(2)
        # Nobody has said of this one that it was deleted, and yet it is not there.
        for number in (0, 1):
            del three.nodes[number].shard.directory.streams[orphan.spec.id]
        await three.leader.directory.delete_stream(gone)
        # Taking them away by hand looks like a deletion, too: what was noted of it is forgotten when nobody notes more.
        await until(lambda: three.nodes[1].shard.deletions.streams == {gone.spec.id, orphan.spec.id})
        await three.kill(0)
        three.nodes[1].shard.deletions.forget([orphan.spec.id])
        await three.start(0)
        await three.start(2)
        await three.elect(1)
        await until(lambda: three.nodes[1].served != [])
        done = three.write(kept, b"2")
        await done.wait()
        streams = three.nodes[2].shard.directory.streams
        await until(lambda: set(streams) == {kept.spec.id, orphan.spec.id})
        assert gone.spec.id in three.nodes[2].shard.deletions.streams


async def test_what_the_leader_deletes_by_retention_goes_everywhere_and_a_blank_one_begins_behind_it() -> None:
    async with cluster() as three:
        await three.found()
        stream = await three.create()
        for number in range(60):
            await three.write(stream, b"%d " % number * 100).wait()
        three.disconnect(2)
        for number in range(60, 120):
            await three.write(stream, b"%d " % number * 100).wait()
        log = three.log(0, stream)
        log.delete_before(110)
        three.leader.directory.committer.urgent(log)
        await until(lambda: log.replica_start > 60)
        await until(lambda: three.log(1, stream).log_start == 110)
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await until(lambda: three.ends_equal(stream))
        assert three.values(2, stream)[-10:] == three.values(0, stream)
        assert three.log(2, stream).replica_start == log.replica_start


async def test_a_follower_far_behind_catches_up_in_large_steps_and_with_a_throttle() -> None:
    config = replace(QUICK, fetch_bytes_max=20_000, throttle_bytes_s=2_000_000)
    async with cluster(config=config) as three:
        await three.found(isr=(0, 1))
        three.disconnect(2)
        stream = await three.create(config=replace(SMALL, segment_bytes_max=100_000))
        for number in range(100):
            done = three.write(stream, b"%d " % number * 1000)
            if number % 10 == 9:
                await done.wait()
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        assert three.batches(2, stream) == three.batches(0, stream)
        status = three.leader.status()
        assert status.role is Role.LEADER
        assert [one.record_lag for one in status.followers] == [0, 0]
        assert three.nodes[2].shard.status().received_bytes > 100_000


async def test_a_compacted_log_catches_up_from_the_middle_of_what_is_one_batch_now() -> None:
    config = replace(SMALL, cleanup="compact", segment_bytes_max=1500, retention_ms=None)
    async with cluster() as three:
        await three.found()
        stream = await three.create(config=config)
        for number in range(5):
            await three.write(stream, b"%d" % number).wait()
        await until(lambda: three.ends_equal(stream))
        three.disconnect(2)
        for number in range(5, 60):
            await three.write(stream, b"%d " % number * 30).wait()
        log = three.log(0, stream)
        log.note_watermark()
        await until(lambda: log.compacted_to > 5)
        assert len(three.values(0, stream)) < 60
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        assert three.values(2, stream)[-1] == three.values(0, stream)[-1]
        assert three.log(2, stream).written_end == 60


async def test_after_a_clean_stop_the_watermark_file_says_what_is_committed() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        three.disconnect(1)
        three.write(stream, b"2")
        await until(lambda: three.log(0, stream).synced_end == 2)
        await three.nodes[0].shard.close()
        await three.kill(0)
        await three.start(0, clean=True)
        log = three.log(0, stream)
        assert (log.high_watermark, log.written_end) == (1, 2)


async def test_a_shard_without_its_promises_is_not_opened() -> None:
    async with cluster() as three:
        await three.found()
        await three.create()
        await three.kill(0)
        three.nodes[0].storage.remove("kept")
        with pytest.raises(UnknownFormat, match="promised"):
            await three.start(0)


async def test_on_a_full_disk_a_promise_waits_and_the_replica_lives(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The simulator of clusters, seeds 55 and 66: the leader's process died of it."""
    monkeypatch.setattr(shard_module, "FULL_DISK_PAUSE_S", 0.005)
    storages = [MemoryStorage() for _ in range(3)]
    async with cluster(config=without_gone(), storages=list(storages)) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        await until(lambda: three.ends_equal(stream))
        storages[1].capacity_bytes = 0
        promised = trio.Event()

        async def promise() -> None:
            assert await three.nodes[1].shard.promise(Ballot(BALLOT.epoch + 1, 1)) is not None
            promised.set()

        three.nursery.start_soon(promise)
        await until(lambda: caplog.text.count("what was promised cannot be kept") > 2)
        assert not promised.is_set()
        assert not three.nodes[1].ended.is_set()
        storages[1].capacity_bytes = None
        await promised.wait()
        await three.write(stream, b"2").wait()
        await until(lambda: three.values(1, stream) == [b"1", b"2"])


async def test_a_fenced_replica_follows_and_serves_nobody() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        report = await three.leader.fence(BALLOT, 7)
        assert report is not None and report.stint == Stint(1, 0)
        done = three.write(stream, b"2")
        await until(lambda: three.nodes[0].stepped_down_count == 1)
        assert three.nodes[0].shard.role is Role.WAITING
        assert not done.is_set()


async def test_what_is_committed_beside_the_groups_is_on_the_replicas_too() -> None:
    async with cluster(config=without_gone()) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        log, committer = three.log(0, stream), three.leader.directory.committer
        log.append([b"k"], [b""], [b"2"], timestamp_us=1)
        log.seal()
        with trio.fail_after(20):
            await committer.commit_apart([log])
        assert three.values(1, stream) == [b"1", b"2"]
        assert [three.log(number, stream).synced_end for number in range(3)] == [2, 2, 2]


async def thirty_that_2_lacks(three: Cluster) -> Stream:
    await three.found(isr=(0, 1))
    await three.kill(2)
    stream = await three.create()
    for number in range(30):
        await three.write(stream, b"%d" % number * 300).wait()
    return stream


async def test_d7_a_leader_whose_follower_cannot_take_a_batch_looks_at_its_own_and_ends() -> None:
    ended: list[CorruptLog] = []
    async with cluster(ended=ended) as three:
        stream = await thirty_that_2_lacks(three)
        log = three.log(0, stream)
        storage = three.nodes[0].storage
        assert isinstance(storage, MemoryStorage)
        path = log.segments[0].path
        storage.flip_bit(path, storage.read_file(path).index(b"5555"))
        await three.start(2)
        await three.order()
        await until(lambda: ended)
        assert ended[0].path == path
        assert three.log(2, stream).written_end < 30


@asynccontextmanager
async def behind_by_slices(
    three: Cluster, meanwhile: Callable[[PartitionLog, Stream], Awaitable[None]]
) -> AsyncIterator[PartitionLog]:
    """Node 2 comes back to what is sent as it lies on the leader's disk; something happens just before the first slice
    is."""
    await three.found(isr=(0, 1))
    await three.kill(2)
    large = replace(SMALL, segment_bytes_max=4 * INLINE_BYTES, batch_bytes_max=2 * INLINE_BYTES)
    stream = await three.create(config=large)
    for number in range(12):
        await three.write(stream, b"%d" % number * INLINE_BYTES).wait()
    log, send_followed_by = three.log(0, stream), PeerLink.send_followed_by
    first = log.segments[0]
    happened = False

    async def send(self: PeerLink, kind: int, payload: bytes, octets: Any, worker: Worker) -> None:
        nonlocal happened
        if not happened and any(isinstance(one, RawSlice) and one.segment is first for one in octets):
            happened = True
            await meanwhile(log, stream)
        await send_followed_by(self, kind, payload, octets, worker)

    with patch.object(PeerLink, "send_followed_by", send):
        await three.start(2)
        await three.order()
        await until(lambda: happened)
        yield log


def refuse_reads(three: Cluster, path: str) -> None:
    storage = three.nodes[0].storage
    assert isinstance(storage, MemoryStorage)
    storage.fail("read", path=path, times=10_000)


async def test_d7_a_leader_whose_disk_gives_back_an_error_ends_and_its_node_does_not() -> None:
    ended: list[CorruptLog] = []
    async with cluster(ended=ended) as three:
        stream = await thirty_that_2_lacks(three)
        path = three.log(0, stream).segments[0].path
        refuse_reads(three, path)
        await three.start(2)
        await three.order()
        await until(lambda: ended)
        assert "cannot be read" in str(ended[0]) and path in str(ended[0])
        assert three.log(2, stream).written_end == 0


async def test_d7_a_leader_whose_file_ends_before_what_it_wrote_a_moment_ago_ends() -> None:
    ended: list[CorruptLog] = []
    async with cluster(ended=ended) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        await three.write(stream, b"2").wait()
        file = three.log(0, stream).segments[0].file
        read = type(file).read

        def ends(self: File, position: int, length: int) -> bytes:
            return read(self, position, length)[: -1 if self is file else None]

        with patch.object(type(file), "read", ends):
            three.write(stream, b"3")
            await until(lambda: ended)
        assert "ends before byte" in str(ended[0])


async def test_d7_a_slice_that_cannot_be_sent_is_looked_at_and_is_damage() -> None:
    ended: list[CorruptLog] = []
    async with cluster(ended=ended) as three:

        async def rots(log: PartitionLog, _stream: Stream) -> None:
            refuse_reads(three, log.segments[0].path)

        async with behind_by_slices(three, rots) as log:
            await until(lambda: ended)
        assert "cannot be read" in str(ended[0]) and log.segments[0].path in str(ended[0])


async def test_a_slice_that_retention_took_while_it_was_sent_is_no_damage() -> None:
    ended: list[CorruptLog] = []
    async with cluster(ended=ended) as three:

        async def goes(log: PartitionLog, stream: Stream) -> None:
            first = log.segments[0]
            log.delete_before(first.end_offset)
            three.write(stream, b"one more")
            await until(lambda: log.replica_start == first.end_offset)
            refuse_reads(three, first.path)

        async with behind_by_slices(three, goes) as log:
            await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
            assert log.replica_start > 0
        assert not ended


async def test_q5_a_paused_leader_and_a_new_one_never_both_serve_who_must_be_alone() -> None:
    async with cluster(config=replace(QUICK, promise_s=0.6)) as three:
        await three.found()
        stream = await three.create()
        await three.write(stream, b"1").wait()
        old, new = three.nodes[0].shard, three.nodes[1].shard
        await until(old.may_dispatch_alone)
        assert not new.may_dispatch_alone()
        three.disconnect(0)
        await three.elect(1)
        # Asked in this order: one that is allowed to was allowed to a moment before.
        while not new.may_dispatch_alone():
            await trio.sleep(0.005)
        assert not old.may_dispatch_alone()
        # It comes back, and leads again: nothing is waited for, since the other follows.
        three.cut_off.clear()
        await three.order()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await three.elect(0)
        await until(old.may_dispatch_alone)
        assert not new.may_dispatch_alone()


async def test_q5_a_follower_that_is_gone_is_left_out_when_its_promise_is_missed() -> None:
    async with cluster(config=replace(QUICK, promise_s=0.3)) as three:
        await three.found()
        await until(three.leader.may_dispatch_alone)
        await three.kill(2)
        # Nothing is written, but somebody waits.
        await until(lambda: three.leader.may_dispatch_alone() and three.row.in_sync_nodes == {0, 1})
