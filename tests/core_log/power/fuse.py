"""A storage that stops dead in the middle of things, and lets others in between. Driver for tests: no I/O.

Everything is done on a MemoryStorage. After a given number of changes the fuse blows: the change under way is left
undone (of a write some first bytes may be there) and from then on every call raises Crash, which no `except
Exception` stops, because a killed process runs no handlers. `between` is called before single changes, for what
another thread does meanwhile.
"""

from collections.abc import Callable, Sequence
from random import Random

from headrace.core_log.storage.contract import Buffer, File, Storage
from headrace.core_log.storage.memory import MemoryStorage


class Crash(BaseException):
    """The process is gone."""


class FusedFile:
    __slots__ = ("_file", "_fuse")

    def __init__(self, fuse: "FusedStorage", file: File) -> None:
        self._fuse = fuse
        self._file = file

    @property
    def path(self) -> str:
        return self._file.path

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        try:
            self._fuse.spend()
        except Crash:
            if self._fuse.take_torn_write():
                data = b"".join(buffers)
                self._file.write(position, [data[: self._fuse.random.randrange(len(data) + 1)]])
            raise
        return self._file.write(position, buffers)

    def read(self, position: int, length: int) -> bytes:
        self._fuse.look()
        return self._file.read(position, length)

    def size(self) -> int:
        self._fuse.look()
        return self._file.size()

    def sync(self) -> None:
        self._fuse.spend()
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._fuse.spend()
        self._file.truncate(size)

    def fileno(self) -> int:
        return -1


class FusedStorage(Storage):
    """`left` changes are done, the next one crashes; None: as many as come."""

    def __init__(self, inner: MemoryStorage, random: Random) -> None:
        self.inner = inner
        self.random = random
        self.left: int | None = None
        self.blown = False
        self.spent = 0
        self.between: Callable[[], None] | None = None
        self._torn_write = False

    def look(self) -> None:
        if self.blown:
            raise Crash

    def spend(self) -> None:
        self.look()
        if self.between is not None:
            self.between()
            self.look()
        self.spent += 1
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.blown = True
                self._torn_write = self.random.random() < 0.3
                raise Crash

    def take_torn_write(self) -> bool:
        """Whether the write that blew the fuse was begun; True only once."""
        torn, self._torn_write = self._torn_write, False
        return torn

    def open(self, path: str, *, create: bool = False) -> File:
        if create:
            self.spend()
        else:
            self.look()
        return FusedFile(self, self.inner.open(path, create=create))

    def exists(self, path: str) -> bool:
        self.look()
        return self.inner.exists(path)

    def list(self, path: str) -> list[str]:
        self.look()
        return self.inner.list(path)

    def make_dir(self, path: str) -> None:
        self.spend()
        self.inner.make_dir(path)

    def rename(self, old: str, new: str) -> None:
        self.spend()
        self.inner.rename(old, new)

    def remove(self, path: str) -> None:
        self.spend()
        self.inner.remove(path)

    def remove_dir(self, path: str) -> None:
        self.spend()
        self.inner.remove_dir(path)

    def sync_dir(self, path: str) -> None:
        self.spend()
        self.inner.sync_dir(path)

    def read_file(self, path: str) -> bytes:
        self.look()
        return self.inner.read_file(path)

    def free_bytes(self) -> int:
        self.look()
        return self.inner.free_bytes()

    def lock(self) -> None:
        self.look()

    def unlock(self) -> None:
        self.look()

    @property
    def poisoned(self) -> bool:
        return self.inner.poisoned
