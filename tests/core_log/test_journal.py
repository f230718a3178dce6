"""The commit journal: one sync for many files, and its entries back in their segments after a crash."""

from uuid import UUID

import pytest

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.errors import DiskFull
from headrace.core_log.journal import PATH, CommitJournal, entries, replay
from headrace.core_log.log import PartitionLog
from headrace.core_log.spec import folder_of
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.storage.tree import Change

from .power.inline import append, commit, create_logs, open_directory, values_of

STREAM = UUID(int=1)


def opened(storage: MemoryStorage, *, bytes_max: int = 100_000, clean: bool = False) -> LogDirectory:
    return open_directory(storage, clean=clean, config=DirectoryConfig(journal_bytes_max=bytes_max))


def three_logs(storage: MemoryStorage, *, bytes_max: int = 100_000) -> tuple[LogDirectory, list[PartitionLog]]:
    """Three partitions with a segment each, so that the next commit of all is journalled."""
    directory = opened(storage, bytes_max=bytes_max)
    logs = create_logs(directory, 3, LogConfig(compression="none"))
    for log in logs:
        append(log, b"first")
    commit(directory, *logs)
    return directory, logs


def write(directory: LogDirectory, logs: list[PartitionLog], value: bytes) -> None:
    for log in logs:
        append(log, value)
    commit(directory, *logs)


def lost(_change: Change) -> bool:
    return False


def contents(directory: LogDirectory) -> list[list[bytes]]:
    return [list(values_of(log).values()) for log in directory.streams[STREAM].partitions]


def test_k4_commit_of_three_files_syncs_the_journal_alone() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs, b"second")
    unsynced = {str(change).split()[1] for change in storage.unsynced() if str(change).startswith("write")}
    assert {log.segments[0].path for log in logs} <= unsynced
    assert directory.committer.journalled_count == 1


def test_entries_are_put_back_after_a_loss_of_power() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs, b"second")
    write(directory, logs, b"third")
    again = opened(storage.after_power_loss(lost))
    assert again.replayed_count == 6
    assert contents(again) == [[b"first", b"second", b"third"]] * 3


def test_commit_of_fewer_files_syncs_them_as_they_are() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs[:2], b"second")
    assert directory.committer.journalled_count == 0
    assert contents(opened(storage.after_power_loss(lost))) == [[b"first", b"second"]] * 2 + [[b"first"]]


def test_os_stream_in_a_journalled_group_is_synced_by_itself() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    (loose,) = create_logs(directory, 1, LogConfig(durability="os", offsets_reserved=1))
    for round_ in range(3):
        append(loose, b"loose %d" % round_)
        write(directory, [*logs, loose], b"more")
    again = opened(storage.after_power_loss(lost))
    assert len(values_of(again.streams[UUID(int=2)].partitions[0])) == 6


def test_full_journal_starts_over_when_its_segments_are_safe() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage, bytes_max=2000)
    for number in range(10):
        write(directory, logs, b"%d" % number * 20)
        assert sum(1 for _ in entries(storage)) <= 9
        left = contents(opened(storage.after_power_loss(lost), bytes_max=2000))
        assert left == [[b"first", *(b"%d" % one * 20 for one in range(number + 1))]] * 3


def test_group_larger_than_the_journal_makes_it_grow() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage, bytes_max=1000)
    write(directory, logs, b"x" * 5000)
    assert contents(opened(storage.after_power_loss(lost))) == [[b"first", b"x" * 5000]] * 3


def test_torn_group_is_replayed_up_to_its_tear() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs, b"second")
    whole = list(entries(storage))
    at = storage.read_file(PATH).index(whole[1].data.tobytes())
    storage.flip_bit(PATH, at + 5)
    assert len(list(entries(storage))) == 1


def test_entry_of_a_removed_or_recycled_segment_is_passed_over() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs, b"second")
    other, gone = logs[0].segments[0].path, logs[1].segments[0].path
    content = storage.read_file(other)
    storage.flip_bit(other, 9)
    storage.remove(gone)
    assert replay(storage, lambda stream, partition: folder_of(stream, partition)) == 1
    assert replay(storage, lambda stream, partition: None) == 0
    assert storage.read_file(other)[64:] == content[64:]


def test_closed_journal_is_empty_and_what_it_held_is_safe() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage)
    write(directory, logs, b"second")
    directory.close_now()
    assert list(entries(storage)) == []
    assert contents(opened(storage.after_power_loss(lost), clean=True)) == [[b"first", b"second"]] * 3


@pytest.mark.parametrize("content", [b"", b"short", bytes(64), b"HRjourn1" + bytes(200)])
def test_file_that_is_no_journal_has_no_entries(content: bytes) -> None:
    storage = MemoryStorage()
    assert list(entries(storage)) == []
    storage.open(PATH, create=True).write(0, [content])
    assert list(entries(storage)) == []


def test_full_disk_leaves_no_journal_that_entries_could_go_to() -> None:
    storage = MemoryStorage()
    directory, logs = three_logs(storage, bytes_max=1 << 20)
    for log in logs:
        append(log, b"second")
        log.seal()
    jobs = [job for log in logs if (job := log.begin_sync()) is not None]
    storage.capacity_bytes = 1 << 19
    journal = CommitJournal(storage, directory.env.ids, 1 << 20)
    for _ in range(2):
        with pytest.raises(DiskFull):
            journal.commit(jobs)
        assert list(entries(storage)) == []
    storage.capacity_bytes = None
    journal.commit(jobs)
    assert len(list(entries(storage))) == 3
