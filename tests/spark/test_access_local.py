"""A data directory read without a broker: never past the watermark, never another segment's bytes, loud otherwise."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core_log.errors import CorruptLog, StorageError
from headrace.core_log.format import SEGMENT_HEAD_SIZE
from headrace.core_log.journal import CommitJournal
from headrace.spark.access import Access, DataLoss, TopicNotFound, open_access
from headrace.spark.access_local import LocalAccess
from headrace.spark.decode import read
from headrace.spark.plan import plan

from .directories import Written, commit


@pytest.fixture
def written(tmp_path: Path) -> Written:
    return Written(tmp_path / "data")


def offsets(access: Access, start: int, end: int, topic: str = "t") -> list[int]:
    tasks = plan(access, {(topic, 0): (start, end)})
    return [row["offset"] for task in tasks for batch in read(task, columns=("offset",)) for row in batch.to_pylist()]


def test_everything_below_the_watermark_is_read_over_all_segments(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    assert len(log.segments) > 2
    access = LocalAccess(written.path)
    (ends,) = access.topic("t").partitions
    assert (ends.start, ends.high_watermark) == (0, 500)
    assert offsets(access, 0, 500) == list(range(500))
    assert offsets(access, 123, 321) == list(range(123, 321))


def test_data_above_the_watermark_is_never_read(written: Written) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 3)
    seen = LocalAccess(written.path)
    # Committed, but no reader outside was told of it.
    written.add(log, b"later")
    assert seen.topic("t").partitions[0].high_watermark == 30
    with pytest.raises(ValueError, match="above the watermark 30"):
        seen.slices("t", 0, 0, 31)
    (one,) = seen.slices("t", 0, 0, 30)
    assert one.next_offset == 30
    log.note_watermark()
    assert offsets(seen, 0, 31) == list(range(31))


def test_torn_tail_above_the_watermark_is_not_met(written: Written) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 3)
    end = log.segments[-1].end_position
    with written.segment_paths(log)[-1].open("r+b") as file:
        file.seek(end)
        file.write(b"HRb1" + os.urandom(300))
    assert offsets(LocalAccess(written.path), 0, 30) == list(range(30))


@pytest.mark.parametrize("byte", [SEGMENT_HEAD_SIZE + 200, SEGMENT_HEAD_SIZE + 2000])
def test_flipped_bit_below_the_watermark_raises(written: Written, byte: int) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 3)
    with written.segment_paths(log)[0].open("r+b") as file:
        file.seek(byte)
        flipped = bytes([file.read(1)[0] ^ 1])
        file.seek(byte)
        file.write(flipped)
    with pytest.raises(CorruptLog):
        offsets(LocalAccess(written.path), 0, 30)


def test_file_that_ends_below_the_watermark_is_corrupt_and_not_its_end(written: Written) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 3)
    os.truncate(written.segment_paths(log)[0], log.segments[0].end_position - 10)
    with pytest.raises(CorruptLog):
        offsets(LocalAccess(written.path), 0, 30)


@pytest.mark.parametrize("lost", [slice(0, 1), slice(-1, None), slice(7, 12), slice(None)], ids=str)
def test_batches_that_only_the_journal_holds_since_the_power_went_are_read(written: Written, lost: slice) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    written.fill(log, 20)
    path = written.segment_paths(log)[0]
    segment, data = log.segments[0], bytearray(path.read_bytes())
    batches = [(position, bytes(data[position : position + header.size])) for position, header in segment.headers()]
    journalled = [(segment, position, [batch]) for position, batch in batches[lost]]
    job: Any = SimpleNamespace(log=log, writes=journalled, segments=[])
    env = written.directory.env
    CommitJournal(env.storage, env.ids, 10**6).commit([job])
    for _, position, (batch,) in journalled:
        data[position : position + len(batch)] = bytes(len(batch))
    path.write_bytes(data)
    assert offsets(LocalAccess(written.path), 0, 200) == list(range(200))
    # What no journal holds is corrupt as before.
    data[batches[3][0] + 200] ^= 1
    data[batches[9][0] + 200] ^= 1
    path.write_bytes(data)
    if lost != slice(None):
        with pytest.raises(CorruptLog):
            offsets(LocalAccess(written.path), 0, 200)


def test_without_a_watermark_nothing_is_known_to_be_committed(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 3)
    (written.folder / log.folder / "watermark").write_bytes(b"")
    (ends,) = LocalAccess(written.path).topic("t").partitions
    assert ends.start == ends.high_watermark == 0


def test_empty_topic_has_nothing_to_read(written: Written) -> None:
    written.topic()
    access = LocalAccess(written.path)
    (ends,) = access.topic("t").partitions
    assert (ends.start, ends.high_watermark) == (0, 0)
    assert plan(access, {("t", 0): (0, 0)}) == []
    assert access.offset_at("t", 0, 0) is None


def test_reader_that_retention_has_overtaken_hears_so(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    access = LocalAccess(written.path)
    tasks = plan(access, {("t", 0): (0, 500)}, bytes_each=1)
    log.delete_before(log.segments[2].base_offset)
    commit(log)
    # Renamed files are still there for who is about to read them.
    assert next(read(tasks[0], columns=("offset",))).num_rows
    log.recycle(1 << 60)
    log.note_watermark()
    with pytest.raises(DataLoss, match="is not there any more"):
        list(read(tasks[0], columns=("offset",)))
    start = access.topic("t").partitions[0].start
    assert start == log.log_start > 0
    with pytest.raises(DataLoss, match=f"begin at {start}"):
        access.slices("t", 0, 0, 500)
    rows = [row for task in tasks for batch in read(task, check_contiguous=False) for row in batch.to_pylist()]
    assert [row["offset"] for row in rows] == list(range(start, 500))


def test_file_that_is_used_again_beneath_a_reader_is_data_loss_and_not_its_new_records(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    access = LocalAccess(written.path)
    first = plan(access, {("t", 0): (0, 500)}, bytes_each=1)[0]
    file = first.slices[0].locations[0].open()
    log.delete_before(log.segments[1].base_offset)
    commit(log)
    log.recycle(1 << 60)
    before = {path.name for path in written.segment_paths(log)}
    written.fill(log, 40)
    assert {path.name for path in written.segment_paths(log)} > before
    with pytest.raises(DataLoss, match="another segment's file now"):
        file.check()


def test_topic_that_was_created_again_is_another_one(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 5)
    access = LocalAccess(written.path)
    known = access.topic("t")
    tasks = plan(access, {("t", 0): (0, 50)})
    stream = written.directory.streams.pop(written.id_of(log))
    (written.folder / f"streams/{stream.spec.id}").rename(written.folder / f"trash/{stream.spec.id}.1")
    (again,) = written.topic()
    written.fill(again, 8)
    assert access.topic("t").id != known.id
    with pytest.raises(DataLoss, match="deleted and created again"):
        plan(access, {("t", 0): (0, 50)}, ids={"t": known.id})
    with pytest.raises(DataLoss):
        list(read(tasks[0], columns=("offset",)))


def test_names_lead_where_the_broker_leads_and_never_to_other_files(written: Written) -> None:
    written.topic("orders")
    written.topic("orders", kind="queue")
    written.topic("__views", kind="internal")
    access = LocalAccess(written.path)
    assert access.topics() == ["orders", "queue:orders"]
    assert access.topic("orders").id != access.topic("queue:orders").id
    for name in ("../orders", "/etc/passwd", "..", "__views", "exchange:orders", "other|orders", ""):
        with pytest.raises(TopicNotFound):
            access.topic(name)


def test_first_record_of_a_time_is_found(written: Written) -> None:
    (log,) = written.topic()
    written.fill(log, 50)
    access = LocalAccess(written.path)
    assert access.offset_at("t", 0, 0) == 0
    assert access.offset_at("t", 0, 1_000_000 + 170) == 170
    assert access.offset_at("t", 0, 1_000_000 + 171) == 180
    assert access.offset_at("t", 0, 2_000_000) is None


def test_growing_segment_is_walked_on_from_where_it_was_known(written: Written) -> None:
    (log,) = written.topic(segment_bytes_max=10**7)
    access = LocalAccess(written.path)
    for round_ in range(1, 4):
        written.fill(log, 2)
        assert offsets(access, 0, round_ * 20) == list(range(round_ * 20))


def test_folder_that_is_no_data_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StorageError):
        LocalAccess(str(tmp_path / "nothing"))
    with pytest.raises(StorageError, match="not a data directory"):
        LocalAccess(str(tmp_path)).topics()


def test_options_that_do_not_say_where_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="say where"):
        open_access()
    with pytest.raises(ValueError, match="needs 'url'"):
        open_access(access="http", path=str(tmp_path))
    with pytest.raises(ValueError, match="access is"):
        open_access(access="ftp", path=str(tmp_path))
