"""All streams of a data directory: what a start finds, what maintenance does, what a deleted stream leaves."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar
from uuid import UUID

import pytest
import trio

from headrace.core_log import directory as directory_module
from headrace.core_log import segment
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import MAINTENANCE_S, TRASH, LogDirectory
from headrace.core_log.errors import CorruptLog, Refused, UnknownFormat
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.real import real_env
from headrace.core_log.spec import SPEC, STREAMS, folder_of, list_streams
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.storage.tree import Change

from .power.inline import Clock, append, commit, create_logs, drive, env_on, open_directory, values_of

T = TypeVar("T")
SMALL = LogConfig(segment_bytes_max=1024, compression="none", retention_ms=None)


def lost(_change: Change) -> bool:
    return False


# -- streams


def test_d8_created_stream_survives_at_once() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    stream = drive(directory.create_stream("orders", kind="topic", vhost="shop", partition_count=3, config=SMALL))
    again = open_directory(storage.after_power_loss(lost))
    (found,) = again.streams.values()
    assert found.spec == stream.spec
    assert (found.spec.name, found.spec.vhost, len(found.partitions)) == ("orders", "shop", 3)


def test_stream_that_is_made_in_another_thread_appears_on_the_loop_only() -> None:
    """Where streams are gone through, one by one, none may come in between."""
    directory = open_directory(MemoryStorage())
    seen: list[int] = []

    class Worker:
        async def run(self, call: Callable[[], T]) -> T:
            result = call()
            seen.append(len(directory.streams))
            return result

    directory.env = replace(directory.env, worker=Worker())
    drive(directory.create_stream("orders", kind="topic", config=SMALL))
    assert (seen, len(directory.streams)) == ([0], 1)


def test_stream_without_partitions_is_refused() -> None:
    directory = open_directory(MemoryStorage())
    with pytest.raises(Refused, match="at least one partition"):
        drive(directory.create_stream("orders", kind="topic", partition_count=0))
    assert directory.streams == {}


def test_folder_without_a_spec_is_no_stream() -> None:
    storage = MemoryStorage()
    create_logs(open_directory(storage), 1)
    storage.make_dir(folder_of(UUID(int=9), 0))
    assert [spec.id for spec in list_streams(storage)] == [UUID(int=1)]
    assert set(open_directory(storage).streams) == {UUID(int=1)}


@pytest.mark.parametrize("content", [b"", b"{}", b'{"format": 1', b'{"id": "x"}'])
def test_spec_that_cannot_be_read_is_refused_by_name(content: bytes) -> None:
    storage = MemoryStorage()
    create_logs(open_directory(storage), 1)
    storage.replace_file(f"{folder_of(UUID(int=1))}/{SPEC}", content)
    with pytest.raises(UnknownFormat, match=SPEC):
        open_directory(storage)


def test_spec_of_a_later_release_is_refused() -> None:
    storage = MemoryStorage()
    create_logs(open_directory(storage), 1)
    path = f"{folder_of(UUID(int=1))}/{SPEC}"
    storage.replace_file(path, storage.read_file(path).replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(UnknownFormat, match="format 2"):
        open_directory(storage)


def test_missing_partition_is_damage_and_not_an_empty_log() -> None:
    storage = MemoryStorage()
    create_logs(open_directory(storage), 2)
    folder = folder_of(UUID(int=1), 1)
    for name in storage.list(folder):
        storage.remove(f"{folder}/{name}")
    storage.remove_dir(folder)
    with pytest.raises(CorruptLog, match="folder is gone"):
        open_directory(storage)


def test_grown_stream_keeps_its_records_and_cannot_shrink() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    (log,) = create_logs(directory, 1)
    append(log, b"a")
    commit(directory, log)
    (stream,) = directory.streams.values()
    drive(directory.grow_stream(stream, 3))
    assert len(stream.partitions) == 3
    with pytest.raises(Refused, match="cannot shrink"):
        drive(directory.grow_stream(stream, 2))
    again = open_directory(storage.after_power_loss(lost)).streams[UUID(int=1)]
    assert [list(values_of(one).values()) for one in again.partitions] == [[b"a"], [], []]


def test_growth_that_was_cut_short_can_be_done_again() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    create_logs(directory, 1)
    storage.make_dir(folder_of(UUID(int=1), 1))
    storage.open(f"{folder_of(UUID(int=1), 1)}/watermark", create=True)
    (stream,) = directory.streams.values()
    drive(directory.grow_stream(stream, 2))
    append(stream.partitions[1], b"a")
    commit(directory, stream.partitions[1])
    again = open_directory(storage.after_power_loss(lost)).streams[UUID(int=1)]
    assert values_of(again.partitions[1]) == {0: b"a"}


def test_settings_hold_from_now_on_and_after_a_start() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    (log,) = create_logs(directory, 1)
    (stream,) = directory.streams.values()
    drive(directory.configure_stream(stream, SMALL))
    assert log.config == stream.spec.config == SMALL
    (again,) = open_directory(storage.after_power_loss(lost)).streams.values()
    assert again.spec.config == again.partitions[0].config == SMALL


class LateWorker:
    """Threads that take their time: of two calls at once the second is made first."""

    def __init__(self) -> None:
        self._waiting: list[trio.Event] = []

    async def run(self, call: Callable[[], T]) -> T:
        turn = trio.Event()
        self._waiting.append(turn)
        if len(self._waiting) == 2:
            for one in reversed(self._waiting):
                one.set()
        await turn.wait()
        if turn is self._waiting[0]:
            for _ in range(10):
                await trio.lowlevel.checkpoint()
        return call()


async def test_of_two_changes_to_a_stream_at_once_neither_is_lost() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    create_logs(directory, 1)
    (stream,) = directory.streams.values()
    directory.env = replace(directory.env, worker=LateWorker())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.grow_stream, stream, 2)
        nursery.start_soon(directory.configure_stream, stream, SMALL)
    (again,) = open_directory(storage.after_power_loss(lost)).streams.values()
    assert (len(again.partitions), again.spec.config) == (2, SMALL)
    assert stream.spec == again.spec


def test_deleted_stream_lies_in_the_trash_for_a_day_and_is_then_gone() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    logs = create_logs(directory, 2, SMALL)
    for log in logs:
        append(log, bytes(700))
        append(log, bytes(700))
    commit(directory, *logs)
    drive(directory.delete_stream(directory.streams[UUID(int=1)]))
    assert directory.streams == {}
    assert open_directory(storage.after_power_loss(lost)).streams == {}
    clock = directory.env.clock
    assert isinstance(clock, Clock)
    drive(directory.maintain())
    assert len(storage.list(TRASH)) == 1
    clock.now_us += 24 * 3600 * 1_000_000
    drive(directory.maintain())
    assert storage.list(TRASH) == []


def test_same_stream_id_is_not_found_in_the_trash() -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    create_logs(directory, 1)
    drive(directory.delete_stream(directory.streams[UUID(int=1)]))
    (log,) = create_logs(directory, 1)
    append(log, b"new")
    commit(directory, log)
    assert values_of(open_directory(storage.after_power_loss(lost)).streams[UUID(int=1)].partitions[0]) == {0: b"new"}


# -- maintenance


def filled(
    storage: MemoryStorage, config: LogConfig, *, removal_delay_ms: int = 60_000, recycled_count_max: int = 8
) -> LogDirectory:
    """One partition with five segments."""
    limits = DirectoryConfig(removal_delay_ms=removal_delay_ms, recycled_count_max=recycled_count_max)
    directory = open_directory(storage, config=limits)
    (log,) = create_logs(directory, 1, config)
    for number in range(5):
        log.append([b"k%d" % number], [b""], [bytes(700)], timestamp_us=directory.env.clock.wall_us())
        commit(directory, log)
    return directory


def test_maintenance_takes_what_is_too_old_unless_it_is_pinned() -> None:
    directory = filled(MemoryStorage(), replace(SMALL, retention_ms=1000))
    (log,) = directory.streams[UUID(int=1)].partitions
    clock = directory.env.clock
    assert isinstance(clock, Clock)
    clock.now_us += 10_000_000
    directory.pinned_from = lambda one: 2
    drive(directory.maintain())
    assert log.log_start == 2
    directory.pinned_from = lambda one: 4
    drive(directory.maintain())
    assert log.log_start == 4
    directory.pinned_from = lambda one: None
    drive(directory.maintain())
    assert log.log_start == 5


def test_removed_segments_are_kept_for_readers_and_then_recycled(monkeypatch: pytest.MonkeyPatch) -> None:
    # Files of about the size that these small segments ask for.
    monkeypatch.setattr(segment, "GROWTH_BYTES_MIN", 1024)
    storage = MemoryStorage()
    directory = filled(storage, SMALL)
    (log,) = directory.streams[UUID(int=1)].partitions
    clock = directory.env.clock
    assert isinstance(clock, Clock)
    reader = log.segments[0].file
    before = reader.read(0, 1000)
    log.delete_before(log.high_watermark)
    commit(directory, log)
    drive(directory.maintain())
    assert reader.read(0, 1000) == before
    assert storage.list("recycled") == []
    clock.now_us += 61_000_000
    drive(directory.maintain())
    assert len(storage.list("recycled")) == 5
    assert [name for name in storage.list(log.folder) if name.endswith(".removed")] == []
    for _ in range(2):
        append(log, bytes(700))
        commit(directory, log)
    assert len(storage.list("recycled")) == 4


def test_removed_segments_that_the_pool_has_no_room_for_go_at_once_and_leave_their_readers_alone() -> None:
    storage = MemoryStorage()
    directory = filled(storage, SMALL, recycled_count_max=2)
    (log,) = directory.streams[UUID(int=1)].partitions
    reader = log.segments[0].file
    before = reader.read(0, 1000)
    log.delete_before(log.high_watermark)
    commit(directory, log)
    drive(directory.maintain())
    assert len([name for name in storage.list(log.folder) if name.endswith(".removed")]) == 2
    assert reader.read(0, 1000) == before


def test_removed_segments_of_an_earlier_life_are_recycled_too() -> None:
    storage = MemoryStorage()
    directory = filled(storage, SMALL)
    (log,) = directory.streams[UUID(int=1)].partitions
    log.delete_before(log.high_watermark)
    commit(directory, log)
    limits = DirectoryConfig(removal_delay_ms=0, recycled_count_max=8)
    again = open_directory(storage.process_crash(), config=limits)
    drive(again.maintain())
    assert len(again.env.storage.list("recycled")) == 5


def test_sealed_segments_get_their_key_index() -> None:
    storage = MemoryStorage()
    directory = filled(storage, SMALL)
    (log,) = directory.streams[UUID(int=1)].partitions
    drive(directory.maintain())
    assert [KeyIndex.exists(storage, one) for one in log.segments] == [True] * 4 + [False]
    assert KeyIndex.load(storage, log.segments[2]).keys == [b"k2"]


def test_log_that_goes_without_a_key_index_gets_none() -> None:
    storage = MemoryStorage()
    directory = filled(storage, replace(SMALL, key_index=False))
    (log,) = directory.streams[UUID(int=1)].partitions
    drive(directory.maintain())
    assert not any(KeyIndex.exists(storage, one) for one in log.segments)


def test_x5_full_disk_stops_no_maintenance_of_other_logs() -> None:
    storage = MemoryStorage()
    directory = filled(storage, replace(SMALL, cleanup="compact"))
    (other,) = create_logs(directory, 1, replace(SMALL, retention_ms=1))
    for _ in range(3):
        other.append([b""], [b""], [bytes(700)], timestamp_us=1)
        commit(directory, other)
    storage.capacity_bytes = 0
    drive(directory.maintain())
    assert other.log_start == 3


def test_stream_deleted_during_its_maintenance_ends_nothing() -> None:
    storage = MemoryStorage()
    directory = filled(storage, replace(SMALL, cleanup="compact"))
    (stream,) = directory.streams.values()
    deleted = False

    async def run(call: Callable[[], object]) -> object:
        nonlocal deleted
        if not deleted:
            deleted = True
            await directory.delete_stream(stream)
        return call()

    directory.env.worker.run = run  # type: ignore[method-assign, assignment]
    drive(directory.maintain())
    assert deleted
    assert open_directory(storage.after_power_loss(lost)).streams == {}


# -- life and death


@pytest.mark.parametrize("clean", [True, False])
def test_closed_directory_opens_with_everything_either_way(clean: bool) -> None:
    storage = MemoryStorage()
    directory = open_directory(storage)
    logs = create_logs(directory, 4, SMALL)
    for log in logs:
        append(log, b"a" * 700)
        append(log, b"b" * 700)
    directory.close_now()
    left = storage.after_power_loss(lost)
    again = open_directory(left, clean=clean)
    for log in again.streams[UUID(int=1)].partitions:
        assert values_of(log) == {0: b"a" * 700, 1: b"b" * 700}
        assert (log.end, log.epoch) == (2, 1)


def test_clean_start_reads_no_segment() -> None:
    storage = MemoryStorage()
    directory = filled(storage, SMALL)
    directory.close_now()
    heir = storage.process_crash()
    for name in heir.list(f"{STREAMS}/{UUID(int=1)}/0"):
        if name.endswith(".log"):
            heir.fail("read", path=f"{STREAMS}/{UUID(int=1)}/0/{name}", times=1000)
    (log,) = open_directory(heir, clean=True).streams[UUID(int=1)].partitions
    assert log.end == 5


@asynccontextmanager
async def running(directory: LogDirectory) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run)
        yield
        nursery.cancel_scope.cancel()


async def test_others_have_their_turns_while_many_logs_are_looked_after(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory_module, "LOGS_IN_ONE_STEP", 2)
    directory = open_directory(MemoryStorage())
    logs = create_logs(directory, 10, SMALL)
    for log in logs:
        append(log, b"a")
        commit(directory, log)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await trio.lowlevel.checkpoint()
            turns += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        await directory.maintain()
        await directory.retain()
        nursery.cancel_scope.cancel()
    assert turns >= 6


async def test_stream_that_goes_while_its_logs_are_looked_after_is_left_alone() -> None:
    directory = filled(MemoryStorage(), replace(SMALL, retention_ms=1000), removal_delay_ms=0)
    (stream,) = directory.streams.values()
    (log,) = stream.partitions
    log.delete_before(2)
    commit(directory, log)

    class Worker:
        async def run(self, call: Callable[[], T]) -> T:
            directory.streams.pop(stream.spec.id, None)
            return call()

    directory.env = replace(directory.env, worker=Worker())
    clock = directory.env.clock
    assert isinstance(clock, Clock)
    clock.now_us += 10_000_000
    await directory.retain()
    assert log.log_start == 2


async def test_directory_on_real_files_commits_maintains_closes_and_opens_again(tmp_path: Path) -> None:
    env = real_env(tmp_path)
    directory = await LogDirectory.open(env, DirectoryConfig(), clean=False)
    told: list[int] = []
    async with running(directory):
        stream = await directory.create_stream("orders", kind="topic", partition_count=4, config=SMALL)
        for number in range(20):
            for log in stream.partitions:
                log.when_committed(append(log, b"%d" % number * 100), lambda number=number: told.append(number))  # type: ignore[misc]
                directory.committer.urgent(log)
            await directory.committer.flush()
        await directory.maintain()
        await directory.close()
    assert told == sorted(number for number in range(20) for _ in range(4))
    again = await LogDirectory.open(real_env(tmp_path), DirectoryConfig(), clean=True)
    for log in again.streams[stream.spec.id].partitions:
        assert list(values_of(log).values()) == [b"%d" % number * 100 for number in range(20)]
    unclean = await LogDirectory.open(real_env(tmp_path), DirectoryConfig(), clean=False)
    for log in unclean.streams[stream.spec.id].partitions:
        assert list(values_of(log).values()) == [b"%d" % number * 100 for number in range(20)]


async def test_retention_does_not_wait_for_the_rest_of_the_maintenance() -> None:
    directory = filled(MemoryStorage(), replace(SMALL, retention_bytes=1000))
    (log,) = directory.streams[UUID(int=1)].partitions
    directory.maintain = trio.sleep_forever  # type: ignore[method-assign]
    async with running(directory):
        with trio.fail_after(10):
            while log.log_start == 0:
                await trio.lowlevel.checkpoint()
    assert log.log_start == 4


async def test_run_maintains_every_so_often() -> None:
    storage = MemoryStorage()
    directory = filled(storage, SMALL)
    rounds = 0

    async def maintain() -> None:
        nonlocal rounds
        rounds += 1
        await trio.lowlevel.checkpoint()
        if rounds == 3:
            nursery.cancel_scope.cancel()

    directory.maintain = maintain  # type: ignore[method-assign]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(directory.run)
    clock = directory.env.clock
    assert isinstance(clock, Clock)
    assert clock.now_us >= env_on(storage).clock.wall_us() + 3 * MAINTENANCE_S * 1e6
