"""Real files under one directory. Driver: os and fcntl; any thread may call.

Descriptors are bounded: a file borrows one and gets it back when it was taken away. Invariants: the ring holds
exactly the named files that have a descriptor; a descriptor is closed only when its last borrower lets go; a file
with unsynced writes keeps its descriptor, because the kernel reports a failed writeback once and only to
descriptors that were open. A failed sync poisons the directory and is never retried: the kernel marks the lost
pages clean, so that a second sync would succeed over them.

Locks are waited for in the order sync, write, storage; whoever holds a later one only tries an earlier one.
Neighbours: contract.py says what is promised; memory.py promises the same and can lose power.
"""

import fcntl
import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import EDQUOT, EINVAL, ENOSPC
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

from headrace.core_log.errors import DirectoryInUse, DiskFull, Poisoned, StorageError
from headrace.core_log.storage.contract import Buffer, Storage, relative

# Beyond this many buffers one copy is cheaper than one iovec each (64 x 100 B: 5.1 us as a vector, 3.6 us joined);
# IOV_MAX (1024) is never met.
VECTOR_MAX = 64


def _failure(error: OSError, path: str) -> StorageError:
    kind = DiskFull if error.errno in (ENOSPC, EDQUOT) else StorageError
    return kind(f"{path or '.'}: {error.strerror or error}")


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _failure(error, path) from error


class _Descriptor:
    """Closes itself when the last borrower lets go, so an eviction never closes it under another thread's call."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class DiskFile:
    """One file, by whatever name it has now; its descriptor comes and goes."""

    __slots__ = ("__weakref__", "_descriptor", "_storage", "_sync_lock", "_touched", "_unsynced", "_write_lock", "path")

    def __init__(self, storage: "DiskStorage", path: str, descriptor: _Descriptor) -> None:
        self.path = path
        self._storage = storage
        self._descriptor: _Descriptor | None = descriptor
        self._touched = True
        self._unsynced = False
        # Held for a write, so that nobody takes the descriptor between the write and the note that it is unsynced.
        self._write_lock = Lock()
        # Held for a sync: of two syncs at once on a failed disk, the kernel would tell only one.
        self._sync_lock = Lock()

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        if len(buffers) > VECTOR_MAX:
            buffers = [b"".join(buffers)]
        if position < 0:  # pwritev takes -1 for "where the descriptor stands"
            raise _failure(OSError(EINVAL, os.strerror(EINVAL)), self.path)
        size = sum(map(len, buffers))
        with self._write_lock:
            number = self._borrow_for_change().number
            try:
                written = os.pwritev(number, buffers, position)
                if written < size:
                    self._write_rest(number, position, memoryview(b"".join(buffers)), written)
            except OSError as error:
                raise _failure(error, self.path) from error
        return size

    def _write_rest(self, number: int, position: int, data: memoryview, written: int) -> None:
        while written < len(data):
            step = os.pwrite(number, data[written:], position + written)
            if step == 0:
                raise OSError(ENOSPC, os.strerror(ENOSPC))
            written += step

    def read(self, position: int, length: int) -> bytes:
        descriptor = self._borrow()
        try:
            data = more = os.pread(descriptor.number, length, position)
            while more and len(data) < length:
                more = os.pread(descriptor.number, length - len(data), position + len(data))
                data += more
        except OSError as error:
            raise _failure(error, self.path) from error
        return data

    def size(self) -> int:
        descriptor = self._borrow()
        with _translated(self.path):
            return os.fstat(descriptor.number).st_size

    def truncate(self, size: int) -> None:
        with self._write_lock, _translated(self.path):
            os.ftruncate(self._borrow_for_change().number, size)

    def sync(self) -> None:
        with self._sync_lock:
            with self._write_lock:
                descriptor = self._borrow_for_change()
                self._unsynced = False  # from here on a write is for the next sync
            self._flush(descriptor)

    def fileno(self) -> int:
        return self._borrow().number

    def _borrow(self) -> _Descriptor:
        self._touched = True
        return self._descriptor or self._storage._reopen(self)

    def _borrow_for_change(self) -> _Descriptor:
        descriptor = self._borrow()
        self._storage._refuse_if_poisoned()
        self._unsynced = True
        return descriptor

    def _flush(self, descriptor: _Descriptor) -> None:
        with self._storage._poison_on_error(self.path):
            os.fdatasync(descriptor.number)

    def _give_up_descriptor(self, *, sync_first: bool) -> bool:
        """Called by the storage, which holds its lock: False if this file needs the descriptor more than another."""
        if self._touched:
            self._touched = False
            return False
        if not self._write_lock.acquire(blocking=False):
            return False
        try:
            # Of a poisoned directory nothing more can be learnt, but it still has to be read.
            if self._unsynced and not self._storage.poisoned:
                if not sync_first or not self._sync_lock.acquire(blocking=False):
                    return False
                try:
                    self._unsynced = False
                    with suppress(Poisoned):  # whoever writes or syncs next is told; a reader goes on
                        self._flush(self._borrow())
                finally:
                    self._sync_lock.release()
            self._descriptor = None
            return True
        finally:
            self._write_lock.release()


class DiskStorage(Storage):
    """The data directory at `root`, created (and made durable) where missing."""

    def __init__(self, root: Path, *, handles_max: int = 512) -> None:
        if handles_max < 1:
            raise ValueError(f"handles_max is {handles_max}, at least one is needed")
        self._root = os.fspath(root.absolute())
        self._handles_max = handles_max
        self._lock = Lock()
        # Every live file by its present name: weak, so that only files somebody holds or that are open stay.
        self._files: WeakValueDictionary[str, DiskFile] = WeakValueDictionary()
        self._ring: deque[DiskFile] = deque()
        self._directory_lock: _Descriptor | None = None
        self._poison: str | None = None
        with _translated(self._root):
            self._make_durable_dir(self._root)

    def open(self, path: str, *, create: bool = False) -> DiskFile:
        path = relative(path)
        with self._lock:
            file = self._files.get(path)
            if file is not None and not create:
                return file
            if create:
                self._refuse_if_poisoned()
            file = DiskFile(self, path, self._open(path, os.O_CREAT | os.O_EXCL if create else 0))
            self._files[path] = file
            self._ring.append(file)
            return file

    def exists(self, path: str) -> bool:
        path = relative(path)
        try:
            os.stat(self._full(path))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise _failure(error, path) from error
        return True

    def list(self, path: str) -> list[str]:
        path = relative(path)
        with _translated(path):
            return sorted(os.listdir(self._full(path)))

    def make_dir(self, path: str) -> None:
        path = relative(path)
        self._refuse_if_poisoned()
        with _translated(path):
            for end in [place for place, letter in enumerate(f"{path}/") if letter == "/"]:
                self._make_one_dir(self._full(path[:end]))

    def rename(self, old: str, new: str) -> None:
        old, new = relative(old), relative(new)
        self._refuse_if_poisoned()
        with self._lock, _translated(old):
            replaced = self._outliving(new) if new != old else None
            os.rename(self._full(old), self._full(new))
            if replaced is not None:
                self._forget(replaced)
            moved = self._files.pop(old, None)
            if moved is not None:
                self._files[new] = moved
                moved.path = new
            elif os.path.isdir(self._full(new)):
                for inside in [name for name in self._files if name.startswith(f"{old}/")]:
                    file = self._files.pop(inside)
                    file.path = new + inside[len(old) :]
                    self._files[file.path] = file

    def remove(self, path: str) -> None:
        path = relative(path)
        self._refuse_if_poisoned()
        with self._lock, _translated(path):
            removed = self._outliving(path)
            os.unlink(self._full(path))
            if removed is not None:
                self._forget(removed)

    def remove_dir(self, path: str) -> None:
        path = relative(path)
        self._refuse_if_poisoned()
        if not path:
            raise StorageError(".: the data directory itself stays")
        with _translated(path):
            os.rmdir(self._full(path))

    def sync_dir(self, path: str) -> None:
        path = relative(path)
        self._refuse_if_poisoned()
        with _translated(path):
            folder = _Descriptor(os.open(self._full(path), os.O_RDONLY | os.O_DIRECTORY))
        with self._poison_on_error(path):
            os.fsync(folder.number)

    def read_file(self, path: str) -> bytes:
        path = relative(path)
        with _translated(path), open(self._full(path), "rb") as file:
            return file.read()

    def free_bytes(self) -> int:
        with _translated(""):
            status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    def lock(self) -> None:
        with _translated("lock"):
            descriptor = _Descriptor(os.open(self._full("lock"), os.O_RDWR | os.O_CREAT, 0o600))
            try:
                fcntl.flock(descriptor.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor.number, 32, 0).decode(errors="replace").strip()
                raise DirectoryInUse(f"{self._root} is in use by process {holder or '(unknown)'}") from None
            os.ftruncate(descriptor.number, 0)
            os.pwrite(descriptor.number, f"{os.getpid()}\n".encode(), 0)
        self._directory_lock = descriptor

    def unlock(self) -> None:
        # Whoever gives up the directory holds none of its files: in a process that goes on (headrace.testing), a
        # killed broker would keep hundreds of descriptors until the cycle collector comes by.
        with self._lock:
            for file in self._ring:
                file._descriptor = None
            self._ring.clear()
        self._directory_lock = None

    @property
    def poisoned(self) -> bool:
        return self._poison is not None

    def _refuse_if_poisoned(self) -> None:
        if self._poison is not None:
            raise Poisoned(self._poison)

    @contextmanager
    def _poison_on_error(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._poison = f"{path or '.'}: sync failed: {error.strerror or error}"
            raise Poisoned(self._poison) from error

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    def _open(self, path: str, flags: int) -> _Descriptor:
        self._make_room()
        with _translated(path):
            return _Descriptor(os.open(self._full(path), os.O_RDWR | flags, 0o600))

    def _reopen(self, file: DiskFile) -> _Descriptor:
        with self._lock:
            return self._descriptor_of(file)

    def _descriptor_of(self, file: DiskFile) -> _Descriptor:
        descriptor = file._descriptor
        if descriptor is None:
            descriptor = file._descriptor = self._open(file.path, 0)
            self._ring.append(file)
        return descriptor

    def _make_room(self) -> None:
        """Second chance: a lap clears `touched`, the next finds the idle; only then is an unsynced file synced for it.

        When every file is in the middle of a write or sync, the cap is exceeded for a moment.
        """
        for sync_first in (False, True):
            for _ in range(2 * len(self._ring)):
                if len(self._ring) < self._handles_max:
                    return
                file = self._ring.popleft()
                if not file._give_up_descriptor(sync_first=sync_first):
                    self._ring.append(file)

    def _outliving(self, path: str) -> DiskFile | None:
        """The live file of a name that is about to go, with a descriptor: it cannot be reopened later."""
        file = self._files.get(path)
        if file is not None:
            self._descriptor_of(file)
        return file

    def _forget(self, file: DiskFile) -> None:
        """A file without a name keeps its descriptor until its last holder drops it; the ring lets go."""
        del self._files[file.path]
        self._ring.remove(file)

    def _make_durable_dir(self, path: str) -> None:
        if not os.path.isdir(path):
            parent = os.path.dirname(path)
            self._make_durable_dir(parent)
            self._make_one_dir(path)
            folder = _Descriptor(os.open(parent, os.O_RDONLY | os.O_DIRECTORY))
            os.fsync(folder.number)

    def _make_one_dir(self, path: str) -> None:
        try:
            os.mkdir(path, 0o700)
        except FileExistsError:
            if not os.path.isdir(path):
                raise
