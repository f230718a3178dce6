"""The storage contract: one suite that real files and faulty memory both pass."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.core_log.errors import DirectoryInUse, DiskFull, Poisoned, StorageError
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.crash import TracingStorage
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage


class OnDisk:
    """Real files, with failing system calls put in front of them."""

    def __init__(self, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.storage: Storage = DiskStorage(root, handles_max=3)
        self._patch = patch

    def fail_next_sync(self) -> None:
        self._fail_once("fdatasync", errno.EIO)

    def fail_next_dir_sync(self) -> None:
        self._fail_once("fsync", errno.EIO)

    def fail_next_read(self) -> None:
        self._fail_once("pread", errno.EIO)

    def fail_next_write(self) -> None:
        self._fail_once("pwritev", errno.EIO)

    def fill_up(self) -> None:
        self._fail_once("pwritev", errno.ENOSPC)

    def _fail_once(self, call: str, number: int) -> None:
        real: Callable[..., object] = getattr(os, call)

        def failing(*arguments: object) -> object:
            self._patch.setattr(os, call, real)
            raise OSError(number, os.strerror(number))

        self._patch.setattr(os, call, failing)


class InMemory:
    """Memory, with the faults it can be given; traced or not."""

    def __init__(self, *, traced: bool) -> None:
        self._memory = MemoryStorage()
        self.storage: Storage = TracingStorage(self._memory) if traced else self._memory

    def fail_next_sync(self) -> None:
        self._memory.fail("sync")

    def fail_next_dir_sync(self) -> None:
        self._memory.fail("sync_dir")

    def fail_next_read(self) -> None:
        self._memory.fail("read")

    def fail_next_write(self) -> None:
        self._memory.fail("write")

    def fill_up(self) -> None:
        self._memory.capacity_bytes = 0


Place = OnDisk | InMemory


@pytest.fixture(params=["disk", "memory", "traced"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "disk":
        return OnDisk(tmp_path / "data", monkeypatch)
    return InMemory(traced=request.param == "traced")


@pytest.fixture
def storage(place: Place) -> Storage:
    return place.storage


def content(storage: Storage, path: str) -> bytes:
    file = storage.open(path)
    return file.read(0, file.size())


# -- one file


def test_new_file_is_empty(storage: Storage) -> None:
    file = storage.open("a", create=True)
    assert file.path == "a"
    assert file.size() == 0
    assert file.read(0, 10) == b""


def test_write_returns_all_bytes_and_is_read_back_at_once(storage: Storage) -> None:
    file = storage.open("a", create=True)
    assert file.write(0, [b"one", bytearray(b"two"), memoryview(b"three")]) == 11
    assert file.read(0, 100) == b"onetwothree"
    assert file.size() == 11


def test_write_in_place_overwrites_only_its_range(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123456789"])
    file.write(3, [b"ab", b"c"])
    assert file.read(0, 100) == b"012abc6789"


def test_write_across_the_end_extends_the_file(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123"])
    file.write(2, [b"abcd"])
    assert file.read(0, 100) == b"01abcd"


def test_gap_behind_the_end_reads_as_zeros(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(4, [b"x"])
    assert file.read(0, 100) == b"\0\0\0\0x"


def test_write_of_nothing_writes_nothing(storage: Storage) -> None:
    file = storage.open("a", create=True)
    assert file.write(0, []) == 0
    assert file.write(0, [b"", b""]) == 0
    assert file.size() == 0


@pytest.mark.parametrize("count", [1, 2, 63, 64, 65, 1023, 1024, 1025, 5000])
def test_write_of_any_number_of_buffers_keeps_their_order(storage: Storage, count: int) -> None:
    buffers = [b"%d," % number for number in range(count)]
    file = storage.open("a", create=True)
    assert file.write(1, buffers) == len(b"".join(buffers))
    assert file.read(1, file.size()) == b"".join(buffers)


def test_later_change_of_a_written_buffer_does_not_reach_the_file(storage: Storage) -> None:
    buffer = bytearray(b"before")
    file = storage.open("a", create=True)
    file.write(0, [buffer])
    buffer[:] = b"after!"
    assert file.read(0, 6) == b"before"


def test_read_is_short_only_at_the_end(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123456789"])
    assert file.read(2, 3) == b"234"
    assert file.read(8, 3) == b"89"
    assert file.read(10, 3) == b""
    assert file.read(99, 3) == b""
    assert file.read(2, 0) == b""


def test_truncate_cuts(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123456789"])
    file.truncate(4)
    assert file.size() == 4
    assert file.read(0, 100) == b"0123"


def test_truncate_extends_with_zeros_also_over_what_was_cut(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123"])
    file.truncate(2)
    file.truncate(5)
    assert file.read(0, 100) == b"01\0\0\0"


@pytest.mark.parametrize("position", [-1, -100])
def test_negative_position_is_refused(storage: Storage, position: int) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"0123"])
    with pytest.raises(StorageError, match="a: "):
        file.write(position, [b"x"])
    with pytest.raises(StorageError, match="a: "):
        file.read(position, 1)
    with pytest.raises(StorageError, match="a: "):
        file.truncate(position)
    assert file.read(0, 100) == b"0123"


def test_negative_length_is_refused(storage: Storage) -> None:
    file = storage.open("a", create=True)
    with pytest.raises(StorageError, match="a: "):
        file.read(0, -1)


def test_sync_leaves_content_as_it_is(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.sync()
    file.write(0, [b"data"])
    file.sync()
    assert file.read(0, 100) == b"data"


def test_fileno_reads_the_same_bytes_or_is_absent(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"data"])
    number = file.fileno()
    assert number == -1 or os.pread(number, 10, 0) == b"data"


# -- names


def test_open_of_a_missing_file_says_so(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open("a")
    with pytest.raises(FileNotFoundError):
        storage.open("folder/a", create=True)


def test_create_of_an_existing_name_is_refused(storage: Storage) -> None:
    storage.open("a", create=True).write(0, [b"kept"])
    storage.make_dir("folder")
    with pytest.raises(StorageError, match="a: "):
        storage.open("a", create=True)
    with pytest.raises(StorageError, match="folder: "):
        storage.open("folder", create=True)
    assert content(storage, "a") == b"kept"


def test_two_opens_of_one_name_see_each_other(storage: Storage) -> None:
    first = storage.open("a", create=True)
    second = storage.open("a")
    first.write(0, [b"first"])
    second.write(5, [b"second"])
    assert first.read(0, 100) == b"firstsecond"
    assert first.size() == second.size() == 11


def test_folder_is_no_file(storage: Storage) -> None:
    storage.make_dir("folder")
    for call in (storage.open, storage.read_file, storage.remove):
        with pytest.raises(StorageError, match="folder: "):
            call("folder")


def test_file_is_no_folder(storage: Storage) -> None:
    storage.open("a", create=True)
    for call in (storage.list, storage.make_dir, storage.remove_dir, storage.sync_dir):
        with pytest.raises(StorageError, match="a: "):
            call("a")
    with pytest.raises(StorageError, match="a/b: "):
        storage.open("a/b", create=True)
    below = (storage.open, storage.list, storage.make_dir, storage.remove, storage.remove_dir, storage.read_file)
    for refuse in below:
        with pytest.raises(StorageError, match=r"a(/b)?: "):
            refuse("a/b")
    assert not storage.exists("a/b")


def test_exists_tells_files_and_folders_from_nothing(storage: Storage) -> None:
    storage.make_dir("folder")
    storage.open("folder/a", create=True)
    assert storage.exists("folder")
    assert storage.exists("folder/a")
    assert storage.exists("")
    assert not storage.exists("folder/b")
    assert not storage.exists("other/b")


def test_list_is_sorted_and_holds_files_and_folders(storage: Storage) -> None:
    storage.make_dir("folder/inner")
    for name in ("b", "c", "a"):
        storage.open(f"folder/{name}", create=True)
    assert storage.list("folder") == ["a", "b", "c", "inner"]
    assert storage.list("folder/inner") == []
    assert storage.list("") == storage.list(".") == ["folder"]


def test_list_of_a_missing_folder_says_so(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.list("folder")


def test_make_dir_makes_parents_and_minds_no_existing_folder(storage: Storage) -> None:
    storage.make_dir("a/b/c")
    storage.make_dir("a/b/c")
    storage.make_dir("a/b/d")
    storage.make_dir("")
    assert storage.list("a/b") == ["c", "d"]


@pytest.mark.parametrize("path", ["/a", "..", "../a", "a/../../b", "a/..", "a\0b"])
def test_path_that_leaves_the_directory_is_refused_everywhere(storage: Storage, path: str) -> None:
    storage.open("a", create=True)
    calls: list[Callable[[], object]] = [
        lambda: storage.open(path),
        lambda: storage.open(path, create=True),
        lambda: storage.exists(path),
        lambda: storage.list(path),
        lambda: storage.make_dir(path),
        lambda: storage.rename(path, "b"),
        lambda: storage.rename("a", path),
        lambda: storage.remove(path),
        lambda: storage.remove_dir(path),
        lambda: storage.sync_dir(path),
        lambda: storage.read_file(path),
        lambda: storage.replace_file(path, b""),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="inside the data directory"):
            call()


def test_root_stays_where_it_is(storage: Storage) -> None:
    calls: list[Callable[[], object]] = [
        lambda: storage.open(""),
        lambda: storage.open("", create=True),
        lambda: storage.remove(""),
        lambda: storage.remove_dir(""),
        lambda: storage.rename("", "b"),
        lambda: storage.rename("a", ""),
    ]
    for call in calls[:4]:
        with pytest.raises(StorageError):
            call()
    storage.make_dir("a")
    for call in calls:
        with pytest.raises(StorageError):
            call()
    assert storage.list("") == ["a"]


def test_spellings_of_one_path_name_one_file(storage: Storage) -> None:
    storage.make_dir("folder")
    file = storage.open("folder/a", create=True)
    storage.open("./folder//a").write(0, [b"same"])
    assert file.read(0, 10) == b"same"
    assert storage.open("./folder//a").path == "folder/a"


def test_remove_takes_the_name_away(storage: Storage) -> None:
    storage.open("a", create=True)
    storage.remove("a")
    assert not storage.exists("a")
    with pytest.raises(FileNotFoundError):
        storage.open("a")
    with pytest.raises(FileNotFoundError):
        storage.remove("a")


def test_removed_file_still_serves_whoever_holds_it(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"old"])
    storage.remove("a")
    storage.open("a", create=True).write(0, [b"new"])
    touch_many_files(storage)
    assert file.read(0, 10) == b"old"
    file.write(3, [b"er"])
    file.sync()
    assert file.read(0, 10) == b"older"
    assert content(storage, "a") == b"new"


def test_remove_dir_takes_only_empty_folders(storage: Storage) -> None:
    storage.make_dir("folder")
    storage.open("folder/a", create=True)
    with pytest.raises(StorageError, match="folder: "):
        storage.remove_dir("folder")
    storage.remove("folder/a")
    storage.remove_dir("folder")
    assert not storage.exists("folder")
    with pytest.raises(FileNotFoundError):
        storage.remove_dir("folder")


def test_sync_dir_of_a_missing_folder_says_so(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.sync_dir("folder")
    assert not storage.poisoned


def test_sync_dir_takes_the_root_and_folders(storage: Storage) -> None:
    storage.make_dir("folder")
    storage.open("folder/a", create=True)
    storage.sync_dir("folder")
    storage.sync_dir("")
    assert storage.list("folder") == ["a"]


# -- rename


def test_open_file_follows_its_rename(storage: Storage) -> None:
    storage.make_dir("other")
    file = storage.open("a", create=True)
    file.write(0, [b"one"])
    storage.rename("a", "other/b")
    assert file.path == "other/b"
    file.write(3, [b"two"])
    file.sync()
    touch_many_files(storage)
    file.write(6, [b"three"])
    assert content(storage, "other/b") == b"onetwothree"
    assert not storage.exists("a")


def test_old_name_can_be_used_again_after_a_rename(storage: Storage) -> None:
    moved = storage.open("a", create=True)
    moved.write(0, [b"moved"])
    storage.rename("a", "b")
    fresh = storage.open("a", create=True)
    fresh.write(0, [b"fresh"])
    assert moved.read(0, 10) == content(storage, "b") == b"moved"
    assert fresh.read(0, 10) == content(storage, "a") == b"fresh"


def test_rename_replaces_the_target_and_its_holder_keeps_the_old_content(storage: Storage) -> None:
    target = storage.open("a", create=True)
    target.write(0, [b"old"])
    target.sync()
    touch_many_files(storage)
    storage.open("b", create=True).write(0, [b"new"])
    storage.rename("b", "a")
    touch_many_files(storage, again=True)
    assert content(storage, "a") == storage.read_file("a") == b"new"
    assert target.read(0, 10) == b"old"
    assert not storage.exists("b")


def test_rename_onto_itself_changes_nothing(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"data"])
    storage.rename("a", "a")
    file.write(4, [b"more"])
    assert content(storage, "a") == b"datamore"


def test_renamed_folder_takes_its_open_files_along(storage: Storage) -> None:
    storage.make_dir("old/inner")
    file = storage.open("old/inner/a", create=True)
    file.write(0, [b"one"])
    file.sync()
    other = storage.open("older", create=True)
    storage.rename("old", "new")
    touch_many_files(storage)
    assert file.path == "new/inner/a"
    assert other.path == "older"
    file.write(3, [b"two"])
    assert content(storage, "new/inner/a") == b"onetwo"
    assert storage.list("") == ["many", "new", "older"]


@pytest.mark.parametrize("new", ["b", "folder/b"])
def test_rename_of_a_missing_name_says_so_and_changes_nothing(storage: Storage, new: str) -> None:
    storage.make_dir("folder")
    kept = storage.open(new, create=True)
    kept.write(0, [b"kept"])
    with pytest.raises(FileNotFoundError):
        storage.rename("a", new)
    kept.write(4, [b"!"])
    assert content(storage, new) == b"kept!"


def test_rename_into_a_missing_folder_says_so_and_changes_nothing(storage: Storage) -> None:
    file = storage.open("a", create=True)
    with pytest.raises(FileNotFoundError):
        storage.rename("a", "folder/a")
    file.write(0, [b"kept"])
    assert content(storage, "a") == b"kept"


def test_rename_between_file_and_folder_is_refused(storage: Storage) -> None:
    storage.open("a", create=True).write(0, [b"kept"])
    storage.make_dir("folder")
    with pytest.raises(StorageError, match="a: "):
        storage.rename("a", "folder")
    with pytest.raises(StorageError, match="folder: "):
        storage.rename("folder", "a")
    assert content(storage, "a") == b"kept"


def test_folder_replaces_only_an_empty_folder(storage: Storage) -> None:
    storage.make_dir("full/inner")
    storage.make_dir("empty")
    storage.make_dir("a/b")
    with pytest.raises(StorageError, match="a: "):
        storage.rename("a", "full")
    storage.rename("a", "empty")
    assert storage.list("empty") == ["b"]
    with pytest.raises(StorageError, match="full: "):
        storage.rename("full", "full/inner/deeper")


# -- small files


def test_replaced_file_reads_back_old_then_new(storage: Storage) -> None:
    storage.make_dir("folder")
    storage.replace_file("folder/a", b"old")
    assert storage.read_file("folder/a") == b"old"
    storage.replace_file("folder/a", b"new and longer")
    assert storage.read_file("folder/a") == b"new and longer"
    assert storage.list("folder") == ["a"]


def test_replace_never_writes_into_the_old_file(storage: Storage) -> None:
    storage.replace_file("a", b"old")
    holder = storage.open("a")
    storage.replace_file("a", b"new")
    assert holder.read(0, 10) == b"old"
    assert content(storage, "a") == b"new"


def test_replace_passes_over_what_an_earlier_crash_left(storage: Storage) -> None:
    storage.open("a.tmp", create=True).write(0, [b"half a file, longer than the next"])
    storage.replace_file("a", b"new")
    assert storage.read_file("a") == b"new"
    assert not storage.exists("a.tmp")


def test_replace_on_a_full_disk_keeps_the_old_file_and_leaves_no_other(place: Place) -> None:
    place.storage.replace_file("a", b"old")
    place.fill_up()
    with pytest.raises(DiskFull):
        place.storage.replace_file("a", b"new")
    assert place.storage.read_file("a") == b"old"
    assert place.storage.list("") == ["a"]


@pytest.mark.parametrize("fault", ["fail_next_sync", "fail_next_dir_sync"])
def test_replace_with_a_failing_sync_raises(place: Place, fault: str) -> None:
    place.storage.replace_file("a", b"old")
    getattr(place, fault)()
    with pytest.raises(Poisoned):
        place.storage.replace_file("a", b"new")
    assert place.storage.read_file("a") == (b"old" if fault == "fail_next_sync" else b"new")


def test_read_file_of_a_missing_name_says_so(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.read_file("a")
    with pytest.raises(FileNotFoundError):
        storage.replace_file("folder/a", b"")


# -- many files


def touch_many_files(storage: Storage, *, again: bool = False) -> None:
    """More files than any handle cap of this suite, each left with unsynced bytes."""
    if not again:
        storage.make_dir("many")
    for number in range(8):
        storage.open(f"many/{number}", create=not again).write(0, [b"%d" % number])


def test_files_beyond_the_handle_cap_are_all_written_and_read(storage: Storage) -> None:
    files = [storage.open(f"{number}", create=True) for number in range(20)]
    for turn in range(3):
        for number, file in enumerate(files):
            file.write(turn * 10, [b"%10d" % (number * 100 + turn)])
    for number, file in enumerate(files):
        assert file.read(0, 100) == b"".join(b"%10d" % (number * 100 + turn) for turn in range(3))
        assert file.size() == 30
        file.sync()


# -- faults


def test_failed_sync_poisons_every_change_but_no_read(place: Place) -> None:
    storage = place.storage
    storage.make_dir("folder")
    other = storage.open("b", create=True)
    file = storage.open("a", create=True)
    file.write(0, [b"data"])
    place.fail_next_sync()
    with pytest.raises(Poisoned, match="a: sync failed"):
        file.sync()
    assert storage.poisoned
    changes: list[Callable[[], object]] = [
        file.sync,
        other.sync,
        lambda: file.write(0, [b"x"]),
        lambda: other.write(0, [b"x"]),
        lambda: other.truncate(9),
        lambda: storage.sync_dir(""),
        lambda: storage.open("c", create=True),
        lambda: storage.make_dir("d"),
        lambda: storage.rename("a", "c"),
        lambda: storage.remove("a"),
        lambda: storage.remove_dir("folder"),
        lambda: storage.replace_file("c", b""),
    ]
    for change in changes:
        with pytest.raises(Poisoned, match="a: sync failed"):
            change()
    assert file.read(0, 10) == content(storage, "a") == storage.read_file("a") == b"data"
    assert other.size() == 0
    assert storage.list("") == ["a", "b", "folder"]


def test_failed_sync_dir_poisons_too(place: Place) -> None:
    file = place.storage.open("a", create=True)
    place.fail_next_dir_sync()
    with pytest.raises(Poisoned, match="sync failed"):
        place.storage.sync_dir("")
    assert place.storage.poisoned
    with pytest.raises(Poisoned):
        file.sync()


def test_full_disk_is_named_and_poisons_nothing(place: Place) -> None:
    file = place.storage.open("a", create=True)
    file.write(0, [b"data"])
    place.fill_up()
    with pytest.raises(DiskFull, match="a: No space left"):
        file.write(4, [b"more"])
    assert not place.storage.poisoned
    file.write(0, [b"DATA"])
    file.sync()
    assert file.read(0, 4) == b"DATA"


def test_failed_read_and_write_are_named_and_poison_nothing(place: Place) -> None:
    file = place.storage.open("a", create=True)
    file.write(0, [b"data"])
    place.fail_next_read()
    with pytest.raises(StorageError, match="a: Input/output error"):
        file.read(0, 4)
    assert file.read(0, 4) == b"data"
    place.fail_next_write()
    with pytest.raises(StorageError, match="a: Input/output error"):
        file.write(0, [b"lost"])
    assert not place.storage.poisoned
    assert file.write(0, [b"kept"]) == 4


def test_free_bytes_is_a_count(storage: Storage) -> None:
    assert storage.free_bytes() > 0


# -- lock


def test_directory_has_one_holder_at_a_time(storage: Storage) -> None:
    storage.lock()
    with pytest.raises(DirectoryInUse, match="in use"):
        storage.lock()
    storage.unlock()
    storage.lock()
    storage.unlock()
    storage.unlock()


def test_lock_leaves_the_files_alone(storage: Storage) -> None:
    file = storage.open("a", create=True)
    file.write(0, [b"data"])
    storage.lock()
    assert storage.list("") == ["a", "lock"]
    storage.unlock()
    assert file.read(0, 4) == b"data"
