"""What the log asks of a disk. Format: protocols only.

Paths are relative to the data directory, with `/` between names. All calls are synchronous; a driver
chooses the thread. A write is visible to reads at once and survives a crash of the process; it survives a
loss of power only after `sync` of the file. A created, renamed or removed name survives a loss of power
only after `sync_dir` of its folder.

Errors: OSError never escapes. `DiskFull` for no space, `Poisoned` for any sync after a failed one,
`StorageError` otherwise, FileNotFoundError (a lawful answer) for a name that is not there.
"""

from collections.abc import Sequence
from typing import Protocol

Buffer = bytes | bytearray | memoryview


class File(Protocol):
    """One open file. Closing it is the storage's affair: handles are bounded and reopened when needed."""

    path: str

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        """Write all the buffers one after the other from `position`, return the bytes written (all of them)."""

    def read(self, position: int, length: int) -> bytes:
        """Up to `length` bytes from `position`; shorter only at the end of the file."""

    def size(self) -> int: ...

    def sync(self) -> None:
        """fdatasync: everything written to this file so far survives. A failure poisons the storage for good."""

    def truncate(self, size: int) -> None: ...

    def fileno(self) -> int:
        """A descriptor for sendfile, valid until the next call on the storage; -1 where there is none."""


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

    def sync_dir(self, path: str) -> None: ...

    def read_file(self, path: str) -> bytes: ...

    def replace_file(self, path: str, data: bytes) -> None:
        """Write a small file so that a crash leaves the old or the new content: temp, sync, rename, sync_dir."""

    def free_bytes(self) -> int: ...

    def lock(self) -> None:
        """Take the exclusive lock of the directory for this process's life, or raise DirectoryInUse."""

    def unlock(self) -> None: ...

    @property
    def poisoned(self) -> bool:
        """True once a sync has failed."""
