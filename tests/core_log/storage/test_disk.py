"""Real files: descriptors, threads, permissions, locks between processes, and what a failing kernel call does."""

import errno
import gc
import os
import resource
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.core_log.errors import DirectoryInUse, DiskFull, Poisoned, StorageError
from headrace.core_log.storage.disk import DiskStorage


def open_files(root: Path) -> list[str]:
    """The names of the files under `root` of which this process has a descriptor."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith(f"{root}/"):
            found.append(target[len(f"{root}/") :])
    return sorted(found)


class Calls:
    """Stands in front of a function of os: counts its calls, and may fail or hold them up."""

    def __init__(self, patch: pytest.MonkeyPatch, name: str) -> None:
        self.count = 0
        self.error: int | None = None
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._real: Callable[..., object] = getattr(os, name)
        patch.setattr(os, name, self)

    def __call__(self, *arguments: object) -> object:
        self.count += 1
        self.entered.set()
        self.go_on.wait()
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        return self._real(*arguments)


@pytest.fixture
def fdatasync(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch, "fdatasync")


# -- permissions


@contextmanager
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    try:
        yield
    finally:
        os.umask(before)


def test_everything_is_for_the_owner_alone_whatever_the_umask(tmp_path: Path) -> None:
    root = tmp_path / "new" / "data"
    with open_umask():
        storage = DiskStorage(root)
        storage.make_dir("one/two")
        storage.open("one/a", create=True)
        storage.replace_file("one/two/b", b"")
        storage.lock()
    modes = {path.relative_to(tmp_path): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {
        Path("new"): 0o700,
        Path("new/data"): 0o700,
        Path("new/data/lock"): 0o600,
        Path("new/data/one"): 0o700,
        Path("new/data/one/a"): 0o600,
        Path("new/data/one/two"): 0o700,
        Path("new/data/one/two/b"): 0o600,
    }


def test_new_root_is_synced_into_every_parent_it_was_made_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = Calls(monkeypatch, "fsync")
    DiskStorage(tmp_path / "one" / "two")
    assert fsync.count == 2
    DiskStorage(tmp_path / "one" / "two")
    assert fsync.count == 2


def test_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with pytest.raises(StorageError, match="data: File exists"):
        DiskStorage(tmp_path / "data")


# -- descriptors


def test_handle_cap_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="handles_max"):
        DiskStorage(tmp_path, handles_max=0)


def test_descriptors_stay_under_the_cap(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, handles_max=4)
    files = [storage.open(f"{number}", create=True) for number in range(20)]
    for file in files:
        assert file.read(0, 1) == b""
        assert len(open_files(tmp_path)) <= 4
        file.write(0, [b"x"])
        assert len(open_files(tmp_path)) <= 4


def test_file_in_use_keeps_its_descriptor_when_others_pass_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DiskStorage(tmp_path, handles_max=3)
    opens = Calls(monkeypatch, "open")
    busy = storage.open("busy", create=True)
    for number in range(20):
        storage.open(f"{number}", create=True)
        busy.read(0, 1)
    # 21 names, and once the busy file had to go because every other was as new.
    assert opens.count <= 22


def test_unsynced_file_keeps_its_descriptor_while_another_can_give_one_up(tmp_path: Path, fdatasync: Calls) -> None:
    storage = DiskStorage(tmp_path, handles_max=3)
    unsynced = storage.open("unsynced", create=True)
    unsynced.write(0, [b"x"])
    for number in range(20):
        storage.open(f"{number}", create=True).read(0, 1)
        assert "unsynced" in open_files(tmp_path)
    assert fdatasync.count == 0
    unsynced.sync()
    for number in range(3):
        storage.open(f"more{number}", create=True)
    assert "unsynced" not in open_files(tmp_path)
    assert fdatasync.count == 1


def test_unsynced_file_is_synced_before_it_loses_its_descriptor(tmp_path: Path, fdatasync: Calls) -> None:
    storage = DiskStorage(tmp_path, handles_max=2)
    files = [storage.open(f"{number}", create=True) for number in range(5)]
    for file in files:
        file.write(0, [b"x"])
    assert len(open_files(tmp_path)) == 2
    assert fdatasync.count == 3


def test_sync_that_fails_to_make_room_poisons_but_lets_the_reader_read(tmp_path: Path, fdatasync: Calls) -> None:
    storage = DiskStorage(tmp_path, handles_max=1)
    reader = storage.open("reader", create=True)
    reader.write(0, [b"data"])
    reader.sync()
    storage.open("writer", create=True).write(0, [b"x"])
    fdatasync.error = errno.EIO
    assert reader.read(0, 9) == b"data"
    assert storage.poisoned
    with pytest.raises(Poisoned, match="writer: sync failed: Input/output error"):
        reader.write(0, [b"x"])


def test_poisoned_storage_makes_room_for_its_readers_without_another_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fdatasync: Calls
) -> None:
    storage = DiskStorage(tmp_path, handles_max=2)
    files = [storage.open(f"{number}", create=True) for number in range(4)]
    for number, file in enumerate(files):
        file.write(0, [b"%d" % number])
    Calls(monkeypatch, "fsync").error = errno.EIO
    with pytest.raises(Poisoned):
        storage.sync_dir("")
    synced = fdatasync.count
    assert [file.read(0, 9) for file in files] == [b"0", b"1", b"2", b"3"]
    assert fdatasync.count == synced
    assert len(open_files(tmp_path)) == 2


def test_file_renamed_onto_itself_stays_the_one_file_of_that_name(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    file = storage.open("a", create=True)
    storage.rename("a", "a")
    assert storage.open("a") is file


def test_removed_file_gives_its_descriptor_back_with_its_last_holder(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    file = storage.open("a", create=True)
    storage.remove("a")
    assert open_files(tmp_path) == ["a (deleted)"]
    del file
    gc.collect()
    assert open_files(tmp_path) == []


def test_dropped_storage_closes_everything(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.lock()
    for number in range(5):
        storage.open(f"{number}", create=True).write(0, [b"x"])
    del storage
    gc.collect()
    assert open_files(tmp_path) == []
    DiskStorage(tmp_path).lock()


def test_directory_that_is_given_up_holds_no_descriptor_though_its_files_are_still_known(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.lock()
    files = [storage.open(f"{number}", create=True) for number in range(5)]
    assert len(open_files(tmp_path)) == 6
    storage.unlock()
    assert open_files(tmp_path) == []
    assert [file.size() for file in files] == [0] * 5, "whoever looks all the same opens it anew"


# -- threads


def test_threads_share_few_descriptors_without_mixing_up_files(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path, handles_max=2)
    turns = 60

    def work(worker: int) -> None:
        own = [storage.open(f"{worker}-{number}", create=True) for number in range(3)]
        for turn in range(turns):
            for number, file in enumerate(own):
                file.write(turn * 8, [b"%2d%2d%4d" % (worker, number, turn)])
                if turn % 7 == number:
                    file.sync()
                assert file.read(turn * 8, 8) == b"%2d%2d%4d" % (worker, number, turn)
                if turn % 20 == 19:
                    storage.rename(file.path, f"{worker}-{number}-{turn}")
        for number, file in enumerate(own):
            assert file.read(0, 8 * turns) == b"".join(b"%2d%2d%4d" % (worker, number, turn) for turn in range(turns))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(work, worker) for worker in range(4)]:
                done.result()
    finally:
        sys.setswitchinterval(before)
    assert len(open_files(tmp_path)) <= 2


def test_writes_to_the_same_file_go_on_during_its_sync(tmp_path: Path, fdatasync: Calls) -> None:
    storage = DiskStorage(tmp_path, handles_max=1)
    file = storage.open("a", create=True)
    fdatasync.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        syncing = pool.submit(file.sync)
        fdatasync.entered.wait()
        file.write(0, [b"during"])
        assert file.read(0, 9) == b"during"
        fdatasync.go_on.set()
        syncing.result()
    # That sync did not cover the write, so the file still has to be synced before its descriptor goes.
    storage.open("b", create=True)
    assert fdatasync.count == 2


def test_of_two_syncs_at_once_on_a_failing_disk_neither_succeeds(tmp_path: Path, fdatasync: Calls) -> None:
    file = DiskStorage(tmp_path).open("a", create=True)
    file.write(0, [b"x"])
    fdatasync.go_on.clear()
    fdatasync.error = errno.EIO
    with ThreadPoolExecutor(2) as pool:
        syncing = [pool.submit(file.sync) for _ in range(2)]
        fdatasync.entered.wait()
        fdatasync.go_on.set()
        assert [type(done.exception()) for done in syncing] == [Poisoned, Poisoned]
    # The kernel reports a lost page once; a second call would have been told that all is well.
    assert fdatasync.count == 1


# -- errors of the kernel


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_any_error_of_a_sync_poisons_and_is_never_retried(tmp_path: Path, fdatasync: Calls, number: int) -> None:
    storage = DiskStorage(tmp_path)
    file = storage.open("a", create=True)
    fdatasync.error = number
    for _ in range(3):
        with pytest.raises(Poisoned, match=f"a: sync failed: {os.strerror(number)}"):
            file.sync()
    assert fdatasync.count == 1


@pytest.mark.parametrize(
    ("number", "kind"), [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EIO, StorageError)]
)
def test_error_of_a_write_is_named_by_its_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[StorageError]
) -> None:
    file = DiskStorage(tmp_path).open("a", create=True)
    Calls(monkeypatch, "pwritev").error = number
    with pytest.raises(StorageError, match=f"a: {os.strerror(number)}") as caught:
        file.write(0, [b"x"])
    assert type(caught.value) is kind


def test_short_writes_are_taken_up_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskStorage(tmp_path).open("a", create=True)
    real_vector, real_plain = os.pwritev, os.pwrite
    monkeypatch.setattr(os, "pwritev", lambda number, buffers, at: real_vector(number, [buffers[0][:2]], at))
    monkeypatch.setattr(os, "pwrite", lambda number, data, at: real_plain(number, data[:3], at))
    assert file.write(1, [b"one", b"two", b"three"]) == 11
    assert file.read(0, 99) == b"\0onetwothree"


def test_short_reads_are_taken_up_where_they_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = DiskStorage(tmp_path).open("a", create=True)
    file.write(0, [b"0123456789"])
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda number, length, at: real(number, min(length, 3), at))
    assert file.read(1, 8) == b"12345678"
    assert file.read(5, 99) == b"56789"


def test_write_across_the_process_limit_is_an_error_not_a_short_count(tmp_path: Path) -> None:
    file = DiskStorage(tmp_path).open("a", create=True)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(StorageError, match="a: File too large"):
            file.write(90, [b"x" * 20])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.size() == 100


def test_closed_off_folder_is_an_error_not_an_absence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = DiskStorage(tmp_path)
    Calls(monkeypatch, "stat").error = errno.EACCES
    with pytest.raises(StorageError, match="a: Permission denied"):
        storage.exists("a")


# -- the lock between processes


HOLDER = """
import sys, pathlib
from headrace.core_log.storage.disk import DiskStorage

storage = DiskStorage(pathlib.Path(sys.argv[1]))
storage.lock()
print("locked", flush=True)
sys.stdin.read()
"""


def test_second_process_is_told_who_holds_the_directory_until_that_one_dies(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    (tmp_path / "lock").write_text("999999999999\n")  # of a process long gone
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(DirectoryInUse, match=f"{tmp_path} is in use by process {holder.pid}$"):
            storage.lock()
        holder.kill()
    storage.lock()
    assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_directory_in_use_here_is_refused_to_a_second_process(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.lock()
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    second = subprocess.run(command, input="", capture_output=True, text=True, check=False)
    assert second.returncode == 1
    assert f"DirectoryInUse: {tmp_path} is in use by process {os.getpid()}" in second.stderr
