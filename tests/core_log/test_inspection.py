"""A data directory is read without a broker, and every way in which it can be wrong is found."""

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.epochs import EpochHistory, EpochStart
from headrace.core_log.errors import StorageError
from headrace.core_log.format import SEGMENT_HEAD_SIZE
from headrace.core_log.inspection import (
    Damage,
    Finding,
    Level,
    Partition,
    Tally,
    Whole,
    batches,
    decode_whole,
    partition_of,
    read_journal,
    streams,
    verify,
)
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Gap, Record
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.storage.readonly import ReadOnlyStorage

from .directories import (
    MANY_ROUTES,
    SMALL,
    add_stream,
    append,
    commit,
    fill,
    filled_directory,
    only_log,
    open_directory,
)


def partitions(storage: Storage) -> list[Partition]:
    journal = read_journal(storage)
    return [
        partition_of(storage, found.spec, number, journal)
        for found in streams(storage)
        if found.spec is not None
        for number in range(found.spec.partition_count)
    ]


def findings(storage: Storage, tally: Tally | None = None) -> list[Finding]:
    tally = Tally() if tally is None else tally
    return [finding for partition in partitions(storage) for finding in verify(partition, tally)]


def problems(storage: Storage) -> list[Finding]:
    return [finding for finding in findings(storage) if finding.level is Level.PROBLEM]


def notes(storage: Storage) -> list[Finding]:
    return [finding for finding in findings(storage) if finding.level is Level.NOTE]


def one_log(storage: Storage, config: LogConfig = SMALL) -> tuple[LogDirectory, PartitionLog]:
    directory = open_directory(storage)
    (log,) = add_stream(directory, "one", config).partitions
    return directory, log


def records(storage: Storage) -> list[Record]:
    (partition,) = partitions(storage)
    found = []
    for segment, item in batches(partition):
        assert isinstance(item, Whole)
        found += decode_whole(partition, segment, item).records()
    return found


# -- nothing is wrong -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_whole_directory_has_no_problem_and_everything_is_counted(closed: bool) -> None:
    storage = MemoryStorage()
    directory = filled_directory(storage)
    if closed:
        directory.close_now()
    tally = Tally()
    assert findings(storage, tally) == []
    logs = [log for stream in directory.streams.values() for log in stream.partitions]
    assert (tally.partitions, tally.segments) == (3, sum(len(log.segments) for log in logs))
    assert tally.records == sum(log.high_watermark for log in logs)
    assert tally.segments > 6


def test_empty_partition_and_one_that_was_emptied_have_no_problem() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    assert findings(storage) == []
    append(log, 5)
    commit(log)
    log.delete_before(log.end)
    commit(log)
    assert findings(storage) == []
    directory.close_now()
    assert findings(storage) == []


def test_directory_is_whole_after_an_unclean_start_and_its_gap() -> None:
    storage = MemoryStorage()
    _directory, log = one_log(storage)
    fill(log)
    heir = storage.process_crash()
    directory = open_directory(heir, seed=2)
    append(only_log(directory), 2)
    commit(only_log(directory))
    assert problems(heir) == []


def test_reading_needs_no_trio() -> None:
    code = (
        "import sys, headrace.core_log.inspection, headrace.core_log.storage.readonly; sys.exit('trio' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# -- reading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("closed", [True, False])
def test_records_read_without_a_broker_are_those_of_the_log(closed: bool) -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    for _ in range(3):
        fill(log)
    if closed:
        directory.close_now()
    expected: list[Record] = []
    while len(expected) < log.high_watermark:
        expected += [run.batch.record(at) for run in log.read(len(expected)) for at in range(run.first, run.last)]
    assert records(storage) == expected
    assert MANY_ROUTES in {record.route_set for record in expected}


def test_reading_begins_and_ends_with_the_batches_that_hold_the_offsets() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    for _ in range(3):
        fill(log)
    directory.close_now()
    (partition,) = partitions(storage)
    headers = [item.header for _, item in batches(partition) if isinstance(item, Whole)]
    for first in range(0, int(log.end), 3):
        for end in range(first, int(log.end), 4):
            wanted = [one.base_offset for one in headers if one.next_offset > first and one.base_offset < end]
            found = [item.header.base_offset for _, item in batches(partition, first, end) if isinstance(item, Whole)]
            assert found == wanted


def test_nothing_above_the_watermark_is_read() -> None:
    storage = MemoryStorage()
    _directory, log = one_log(storage)
    append(log, 3)
    commit(log)
    append(log, 3)
    log.seal()
    assert [record.offset for record in records(storage)] == [0, 1, 2]


def test_reading_goes_on_behind_damage() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage, LogConfig())
    fill(log)
    directory.close_now()
    (partition,) = partitions(storage)
    items = [item for _, item in batches(partition)]
    second = items[1]
    assert isinstance(second, Whole)
    storage.flip_bit(log.segments[0].path, second.position + 200)
    again = [item for _, item in batches(partition)]
    assert isinstance(again[1], Damage)
    assert (again[1].offset, again[1].next_offset) == (second.header.base_offset, second.header.next_offset)
    assert [item.header for item in again if isinstance(item, Whole)] == [
        item.header for item in items if isinstance(item, Whole) and item is not second
    ]


def test_everything_whole_is_read_when_the_watermark_is_lost() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    for _ in range(2):
        fill(log)
    end = log.end
    directory.close_now()
    storage.remove(f"{log.folder}/watermark")
    assert [record.offset for record in records(storage)] == list(range(end))


# -- a flipped bit ----------------------------------------------------------------------------------------------


def test_flip_of_any_byte_in_the_used_part_of_the_active_segment_is_found() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage, LogConfig(compression="none"))
    fill(log)
    directory.close_now()
    (segment,) = log.segments
    random = Random(1)
    for position in range(segment.end_position):
        bit = random.randrange(8)
        storage.flip_bit(segment.path, position, bit)
        assert problems(storage), (position, bit)
        storage.flip_bit(segment.path, position, bit)
    assert findings(storage) == []


def test_flip_of_any_byte_in_the_used_part_of_a_sealed_segment_is_found() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    fill(log)
    fill(log)
    directory.close_now()
    sealed = log.segments[0]
    random = Random(2)
    for position in range(sealed.end_position):
        bit = random.randrange(8)
        storage.flip_bit(sealed.path, position, bit)
        found = problems(storage)
        assert found and found[0].path == sealed.path, (position, bit)
        storage.flip_bit(sealed.path, position, bit)
    assert findings(storage) == []


def test_flip_tells_file_position_and_offset_and_only_the_batch_it_is_in() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage, LogConfig())
    fill(log)
    directory.close_now()
    (segment,) = log.segments
    wholes = list(segment.headers())
    for position, header in wholes:
        # Not the ones that others refer to: losing a definition is two problems.
        if header.base_offset == 7:
            continue
        storage.flip_bit(segment.path, position + header.size - 1)
        (found,) = problems(storage)
        assert (found.path, found.position, found.offset) == (segment.path, position, header.base_offset)
        assert f"offsets {header.base_offset} to {header.next_offset - 1} cannot be read" in found.what
        storage.flip_bit(segment.path, position + header.size - 1)


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".keys"])
def test_flip_of_any_byte_in_a_derived_file_is_found(suffix: str) -> None:
    storage = MemoryStorage()
    filled_directory(storage, rounds=1).close_now()
    partition = next(one for one in partitions(storage) if len(one.bases) > 1)
    path = partition.path(partition.bases[0]).removesuffix(".log") + suffix
    for position in range(len(storage.read_file(path))):
        storage.flip_bit(path, position, position % 8)
        found = problems(storage)
        assert path in {finding.path for finding in found}
        storage.flip_bit(path, position, position % 8)


def test_two_flips_are_two_problems() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    for _ in range(3):
        fill(log)
    directory.close_now()
    for segment in (log.segments[0], log.segments[2]):
        storage.flip_bit(segment.path, SEGMENT_HEAD_SIZE + 150)
    assert [finding.path for finding in problems(storage)] == [log.segments[0].path, log.segments[2].path]


def test_lost_route_definition_is_told_for_the_batch_that_refers_to_it() -> None:
    storage = MemoryStorage()
    directory, log = one_log(storage, LogConfig())
    fill(log)
    directory.close_now()
    (segment,) = log.segments
    position = next(at for at, header in segment.headers() if header.base_offset == 7)
    storage.flip_bit(segment.path, position + 130)
    assert [finding.offset for finding in problems(storage)] == [7, 8]


# -- what is missing --------------------------------------------------------------------------------------------


def closed_log(rounds: int = 3) -> tuple[MemoryStorage, PartitionLog]:
    storage = MemoryStorage()
    directory, log = one_log(storage)
    for _ in range(rounds):
        fill(log)
    directory.close_now()
    assert len(log.segments) >= 3
    return storage, log


@pytest.mark.parametrize("place", [0, 1, -1])
def test_missing_segment_is_found_wherever_it_was(place: int) -> None:
    storage, log = closed_log()
    gone = log.segments[place]
    storage.remove(gone.path)
    (found,) = problems(storage)
    assert str(gone.base_offset) in found.what or found.offset == gone.base_offset


def test_sealed_segment_that_ends_too_early_is_found() -> None:
    storage, log = closed_log()
    last = list(log.segments[0].headers())[-1]
    storage.open(log.segments[0].path).truncate(last[0] + 10)
    (found,) = problems(storage)
    assert (found.path, found.position, found.offset) == (log.segments[0].path, last[0], last[1].base_offset)


def test_missing_and_unreadable_watermarks_are_found() -> None:
    storage, log = closed_log()
    data = storage.read_file(f"{log.folder}/watermark")
    for content in (b"", bytes(1024), b"x" + data[1:512] + b"x" + data[513:]):
        storage.replace_file(f"{log.folder}/watermark", content)
        assert [finding.path for finding in problems(storage)] == [f"{log.folder}/watermark"]
    storage.remove(f"{log.folder}/watermark")
    assert [finding.path for finding in problems(storage)] == [f"{log.folder}/watermark"]


def test_active_segment_below_the_watermark_is_found() -> None:
    storage, log = closed_log()
    active = log.segments[-1]
    storage.open(active.path).truncate(active.end_position - 1)
    (found,) = problems(storage)
    assert found.path == active.path


def test_segment_of_another_partition_is_found() -> None:
    storage = MemoryStorage()
    directory = filled_directory(storage)
    directory.close_now()
    first, second = next(stream for stream in directory.streams.values() if stream.spec.kind == "topic").partitions
    base = first.segments[1].base_offset
    assert base == second.segments[1].base_offset
    foreign = storage.read_file(second.segments[1].path)
    storage.replace_file(first.segments[1].path, foreign)
    found = problems(storage)
    assert found[0].path == first.segments[1].path
    assert "belongs to partition 1" in found[0].what


def test_epochs_and_producers_that_cannot_be_read_are_found() -> None:
    storage, log = closed_log()
    storage.replace_file(f"{log.folder}/epochs", b"1 0\n")
    storage.replace_file(f"{log.folder}/producers", b"HRprod01" + bytes(40))
    assert {finding.path for finding in problems(storage)} == {f"{log.folder}/epochs", f"{log.folder}/producers"}


def test_epoch_file_that_says_something_else_than_the_batches_is_found() -> None:
    storage, log = closed_log()
    storage.replace_file(f"{log.folder}/epochs", EpochHistory([EpochStart(2, 0, 0)]).encode())
    found = problems(storage)[0]
    assert found.path == f"{log.folder}/epochs"
    assert "says epoch 2 of leader 0" in found.what


def test_unreadable_stream_json_is_told_and_the_other_streams_are_read() -> None:
    storage = MemoryStorage()
    directory = filled_directory(storage)
    bad = next(iter(directory.streams.values())).spec.id
    storage.replace_file(f"streams/{bad}/stream.json", b"{}")
    found = {one.id: one for one in streams(storage)}
    assert len(found) == 2
    problem = found[str(bad)].problem
    assert problem is not None and problem.path == f"streams/{bad}/stream.json"


def test_directory_without_streams_is_refused() -> None:
    with pytest.raises(StorageError, match="not a data directory"):
        streams(MemoryStorage())


# -- above the watermark ----------------------------------------------------------------------------------------


def torn(cut: int) -> tuple[MemoryStorage, PartitionLog]:
    storage = MemoryStorage()
    _directory, log = one_log(storage)
    append(log, 3)
    commit(log)
    append(log, 3)
    log.seal()
    active = log.segments[-1]
    storage.open(active.path).truncate(active.end_position - cut)
    return storage, log


def test_torn_tail_above_the_watermark_is_a_note() -> None:
    storage, _log = torn(1)
    (note,) = findings(storage)
    assert note.level is Level.NOTE
    assert note.offset == 3
    assert "torn tail above the watermark" in note.what


def test_whole_batches_above_the_watermark_are_nothing_to_speak_of() -> None:
    storage, _log = torn(0)
    assert findings(storage) == []


def test_damage_above_the_watermark_is_a_problem_when_a_later_batch_says_it_was_committed() -> None:
    storage = MemoryStorage()
    _directory, log = one_log(storage, LogConfig())
    for _ in range(3):
        append(log, 3)
        log.seal()
        job = log.begin_sync()
        assert job is not None
        log.run_sync(job)
        log.finish_sync(job)
    (partition,) = partitions(storage)
    assert partition.checkpoint is not None and partition.checkpoint.offset == 3
    positions = [at for at, _ in log.segments[0].headers()]
    storage.flip_bit(log.segments[0].path, positions[1] + 140)
    (found,) = problems(storage)
    assert (found.position, found.offset) == (positions[1], 3)
    assert "everything below offset 6 was committed" in found.what


def test_segment_that_was_begun_when_the_power_went_is_a_note() -> None:
    storage, log = closed_log()
    file = storage.open(f"{log.folder}/{10_000:020d}.log", create=True)
    file.write(0, [bytes(1000)])
    (note,) = findings(storage)
    assert note.level is Level.NOTE


def test_old_batches_in_a_recycled_file_are_not_a_torn_tail() -> None:
    storage, log = closed_log()
    active = log.segments[-1]
    old = storage.read_file(log.segments[0].path)
    storage.open(active.path).write(active.end_position, [old[70:3000]])
    assert findings(storage) == []


# -- the journal ------------------------------------------------------------------------------------------------


async def journalled() -> tuple[MemoryStorage, list[PartitionLog]]:
    """Four partitions whose first batches were synced and whose second ones only the journal keeps safe."""
    storage = MemoryStorage()
    directory = open_directory(storage)
    logs = add_stream(directory, "many", SMALL, partitions=4).partitions
    for _ in range(2):
        for log in logs:
            append(log, 3)
        await directory.committer.commit(logs)
    for log in logs:
        log.note_watermark()
    assert directory.committer.journalled_count >= 1
    return storage, logs


async def test_bytes_that_only_the_journal_holds_are_a_note_and_can_be_read() -> None:
    storage, logs = await journalled()
    for log in logs:
        (segment,) = log.segments
        position = list(segment.headers())[-1][0]
        storage.open(segment.path).write(position, [bytes(segment.end_position - position)])
    assert problems(storage) == []
    assert len(notes(storage)) == 4
    for partition in partitions(storage):
        assert [item.header.base_offset for _, item in batches(partition) if isinstance(item, Whole)] == [0, 3]


async def test_closed_directory_has_an_empty_journal_so_that_it_hides_no_damage() -> None:
    storage, logs = await journalled()
    assert read_journal(storage) != []
    directory = open_directory(storage, seed=2)
    directory.close_now()
    assert read_journal(storage) == []
    storage.flip_bit(logs[0].segments[0].path, 200)
    assert len(problems(storage)) == 1


# -- beside a running broker ------------------------------------------------------------------------------------


def test_real_files_are_read_beside_a_running_broker_and_nothing_is_changed(tmp_path: Path) -> None:
    broker = DiskStorage(tmp_path)
    broker.lock()
    directory = filled_directory(broker)
    before = {path: path.stat() for path in tmp_path.rglob("*")}
    reader = ReadOnlyStorage(tmp_path)
    assert findings(reader) == []
    for path, status in before.items():
        assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert set(tmp_path.rglob("*")) == set(before)
    append(next(iter(directory.streams.values())).partitions[0], 1)
    broker.unlock()


def test_segment_that_retention_takes_meanwhile_is_no_problem() -> None:
    storage, log = closed_log()
    directory = open_directory(storage, clean=True)
    log = only_log(directory)
    (partition,) = partitions(storage)
    append(log, 1)
    log.delete_before(log.segments[2].base_offset)
    commit(log)
    commit(log)
    assert not storage.exists(partition.path(partition.bases[0]))
    assert list(verify(partition, Tally())) == []


def test_segment_that_vanishes_for_no_reason_is_a_problem() -> None:
    storage, log = closed_log()
    (partition,) = partitions(storage)
    storage.remove(log.segments[1].path)
    assert [finding.what for finding in verify(partition, Tally())] == ["the segment is gone"]


def test_gap_is_read_as_a_batch_without_records() -> None:
    storage = MemoryStorage()
    _directory, log = one_log(storage)
    fill(log)
    heir = storage.process_crash()
    open_directory(heir, seed=2).close_now()
    (partition,) = partitions(heir)
    gaps = [decode_whole(partition, segment, item) for segment, item in batches(partition) if isinstance(item, Whole)]
    assert [batch.gap for batch in gaps if batch.count == 0] == [Gap.UNCLEAN_START]
