"""What the log asks of a disk. Format: protocols, and the two rules that every storage shares.

Paths are relative to the data directory, with `/` between names; `""` or `.` is the directory itself. All calls
are synchronous; a driver chooses the thread. A write is visible to reads at once and survives a crash of the
process; it survives a loss of power only after `sync` of the file. A created, renamed or removed name survives a
loss of power only after `sync_dir` of its folder (of the new folder, when a rename goes from one to another).

Errors: OSError never escapes. `DiskFull` for no space; `Poisoned` for a sync that failed and for every change or
sync after it (reads go on); `StorageError` otherwise; FileNotFoundError (a lawful answer) for a name that is not
there.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core_log.errors import DiskFull, StorageError

Buffer = bytes | bytearray | memoryview  # a memoryview is one of bytes: its len is its size


def relative(path: str) -> str:
    """The one spelling of a path, `""` for the root; StorageError if it leads out of the data directory."""
    names = path.split("/")
    if path.startswith("/") or ".." in names or "\0" in path:
        raise StorageError(f"{path!r} does not stay inside the data directory")
    return "/".join(name for name in names if name not in ("", "."))


class File(Protocol):
    """One open file. Closing it is the storage's affair: handles are bounded and reopened when needed.

    It follows its file: `path` changes with a rename, and after a removal it still reads and writes what has no
    name any more. Two opens of one name share one file.
    """

    @property
    def path(self) -> str: ...

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Write all the buffers one after the other from `position`, return the bytes written (all of them).

        A gap behind the old end reads as zeros. After an error any part of it may have been written.
        """

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; shorter only at the end of the file."""

    def size(self) -> int: ...

    def sync(self) -> None:
        """fdatasync: everything written to this file so far survives. A failure poisons the storage for good."""

    def truncate(self, size: int) -> None:
        """Cut, or extend with zeros; a change like a write, durable after `sync`."""

    def fileno(self) -> int:
        """A descriptor for sendfile, valid until the next call on the storage (dup it); -1 where there is none."""


class Storage(Protocol):
    """A data directory."""

    def open(self, path: str, *, create: bool = False) -> File:
        """An existing file, or (create) a new empty one; FileNotFoundError / StorageError if it is the other way."""

    def exists(self, path: str) -> bool: ...

    def list(self, path: str) -> list[str]:
        """Names in a folder, sorted; FileNotFoundError when there is no such folder."""

    def make_dir(self, path: str) -> None:
        """Create a folder and its parents where missing; durable after sync_dir of each parent."""

    def rename(self, old: str, new: str) -> None:
        """Atomic; replaces `new`."""

    def remove(self, path: str) -> None:
        """Remove a file."""

    def remove_dir(self, path: str) -> None:
        """Remove an empty folder."""

    def sync_dir(self, path: str) -> None:
        """fsync of a folder: the names in it survive. A failure poisons the storage for good."""

    def read_file(self, path: str) -> bytes: ...

    def replace_file(self, path: str, data: bytes) -> None:
        """Write a small file so that a crash leaves the old or the new content: temp, sync, rename, sync_dir.

        One caller at a time for one path. A crash may leave `<path>.tmp` behind; the next call replaces it.
        """
        path = relative(path)
        temporary = f"{path}.tmp"
        if self.exists(temporary):
            self.remove(temporary)
        file = self.open(temporary, create=True)
        try:
            file.write(0, [data])
            file.sync()
        except DiskFull:
            self.remove(temporary)
            raise
        self.rename(temporary, path)
        self.sync_dir(path.rpartition("/")[0])

    def free_bytes(self) -> int: ...

    def lock(self) -> None:
        """Take the exclusive lock of the directory for this process's life, or raise DirectoryInUse."""

    def unlock(self) -> None:
        """Nobody uses the directory any more: another may lock it, and descriptors of its files are closed."""

    @property
    def poisoned(self) -> bool:
        """True once a sync has failed."""
