"""A damaged replica keeps its word and its files, until others have all that it had."""

from random import Random
from uuid import UUID

import pytest
from tests.core_log.power.inline import Clock, InlineWorker, SeededIds

from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.replication.assignment import Assignment, Ballot, Copy, Member, RowVersion, Stint
from headrace.core_log.replication.damaged import (
    ASIDE,
    DISK,
    MARK,
    DamagedReplica,
    aside_count,
    read_disk,
    read_mark,
    remove_aside,
)
from headrace.core_log.replication.kept import read_kept, write_kept
from headrace.core_log.replication.replica import Kept
from headrace.core_log.storage.memory import MemoryStorage

ME = Member(2, 7, UUID(int=2))
BALLOT = Ballot(3, 1)
ERROR = CorruptLog("streams/x/0/00.log", 64, 9, "a batch fails its hash")
WITH_ME = tuple(Copy(node, UUID(int=node)) for node in (1, 2, 3))
ROW = Assignment((1, 2, 3), 1, 5, 4, WITH_ME, RowVersion(8, BALLOT), 2)
WITHOUT_ME = Assignment((1, 2, 3), 1, 5, 4, (WITH_ME[0], WITH_ME[2]), RowVersion(9, BALLOT), 2)


def env(storage: MemoryStorage, clock: Clock | None = None) -> Env:
    random = Random(1)
    return Env(clock or Clock(), storage, InlineWorker(), SeededIds(random), random)  # type: ignore[arg-type]


async def damaged(storage: MemoryStorage) -> DamagedReplica:
    write_kept(storage, Kept(BALLOT, Stint(4, 1), RowVersion(8, BALLOT), WITH_ME))
    storage.make_dir("streams/x")
    storage.replace_file("streams/x/0", b"damaged")
    for folder in ("streams/x", "streams", ""):
        storage.sync_dir(folder)
    found = DamagedReplica(env(storage), 0, ME, ERROR)
    await found.open()
    return found


async def test_it_is_known_after_a_loss_of_power_and_reported_as_corrupt() -> None:
    storage = MemoryStorage()
    one = await damaged(storage)
    again = storage.after_power_loss(lambda _: False)
    assert str(read_mark(again)) == str(ERROR)
    report = await one.promise(Ballot(5, 1))
    assert report is not None and report.is_corrupt and report.version == RowVersion(8, BALLOT)
    kept = read_kept(storage)
    assert kept is not None and kept.ballot == Ballot(5, 1)
    assert await one.promise(BALLOT) is None
    assert not await one.obey(BALLOT, ROW)


async def test_its_files_stay_while_a_row_counts_on_them_or_nobody_leads() -> None:
    one = await damaged(MemoryStorage())
    assert await one.obey(BALLOT, ROW)
    assert not one.is_superfluous
    assert await one.obey(BALLOT, Assignment((1, 2, 3), -1, 0, 4, WITHOUT_ME.isr, RowVersion(9, BALLOT), 2))
    assert not one.is_superfluous
    with pytest.raises(AssertionError):
        await one.set_aside()


async def test_set_aside_it_is_a_blank_replica_on_another_disk_that_remembers_its_promises() -> None:
    storage = MemoryStorage()
    one = await damaged(storage)
    await one.promise(Ballot(5, 1))
    assert await one.obey(Ballot(5, 1), WITHOUT_ME)
    assert one.is_superfluous
    await one.set_aside()
    kept = read_kept(storage)
    assert kept is not None and kept.is_blank and (kept.ballot, kept.stint) == (Ballot(5, 1), Stint(4, 1))
    assert read_disk(storage) not in (None, ME.disk)
    assert read_mark(storage) is None
    assert not storage.exists("streams")
    (name,) = storage.list(ASIDE)
    assert storage.read_file(f"{ASIDE}/{name}/streams/x/0") == b"damaged"
    assert aside_count(storage) == 1
    remove_aside(storage, int(name) - 1)
    assert aside_count(storage) == 1
    remove_aside(storage, int(name))
    assert aside_count(storage) == 0


async def test_x5_on_a_full_disk_it_waits_for_room_with_its_mark_its_promises_and_what_it_sets_aside() -> None:
    storage, clock = MemoryStorage(), Clock()
    write_kept(storage, Kept(BALLOT, Stint(4, 1), RowVersion(8, BALLOT), WITH_ME))
    waits = 0

    def has_room_again() -> None:
        nonlocal waits
        waits += 1
        storage.capacity_bytes = None if waits % 2 == 0 else storage.capacity_bytes

    def fill() -> None:
        storage.capacity_bytes = len(storage.read_file("kept"))

    clock.on_sleep = has_room_again
    one = DamagedReplica(env(storage, clock), 0, ME, ERROR)
    fill()
    await one.open()
    assert (waits, str(read_mark(storage))) == (2, str(ERROR))
    fill()
    assert await one.promise(Ballot(5, 1)) is not None
    kept = read_kept(storage)
    assert (waits, None if kept is None else kept.ballot) == (4, Ballot(5, 1))
    assert await one.obey(Ballot(5, 1), WITHOUT_ME)
    fill()
    await one.set_aside()
    assert (waits, read_mark(storage)) == (6, None)
    assert read_disk(storage) not in (None, ME.disk)


class Watched(MemoryStorage):
    """Keeps what a loss of power may leave after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[MemoryStorage] = []
        self._random = Random(3)

    def _look(self) -> None:
        for share in (0.0, 0.5, 1.0):
            self.left.append(self.after_power_loss(lambda _: self._random.random() < share))  # noqa: B023

    def rename(self, old: str, new: str) -> None:
        super().rename(old, new)
        self._look()

    def remove(self, path: str) -> None:
        super().remove(path)
        self._look()

    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self._look()


async def test_whatever_a_loss_of_power_leaves_of_it_is_damaged_still_or_begins_anew() -> None:
    storage = Watched()
    one = await damaged(storage)
    await one.obey(BALLOT, WITHOUT_ME)
    storage.left = []
    await one.set_aside()
    assert len(storage.left) > 20
    for left in storage.left:
        kept = read_kept(left)
        assert kept is not None and kept.ballot == BALLOT
        if read_mark(left) is None:
            assert kept.is_blank and read_disk(left) is not None and not left.exists("streams")
        elif kept.is_blank:
            assert read_disk(left) is not None


def test_what_cannot_be_read_is_never_taken_for_nothing() -> None:
    storage = MemoryStorage()
    storage.replace_file(DISK, b"x")
    storage.replace_file(MARK, b"x")
    with pytest.raises(UnknownFormat, match="disk"):
        read_disk(storage)
    with pytest.raises(UnknownFormat, match="damaged"):
        read_mark(storage)
