"""A data directory in memory that can lose power and fail in the ways disks fail. Driver for tests: no I/O.

It keeps the contract; between two calls a test may crash the process, take the power away, order errors or let
bits rot. Deterministic: what survives depends on the calls and the Random given. Calls come from one thread at a
time, but a sync may overtake writes. Neighbours: tree.py says what survives, crash.py walks through all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal

from headrace.core_log.errors import DirectoryInUse, DiskFull, Poisoned, StorageError
from headrace.core_log.storage.contract import Buffer, Storage, relative
from headrace.core_log.storage.tree import Change, ContentChange, Fate, Fates, Folder, Inode, Node, Tree, files

SECTOR_BYTES = 512
FREE_BYTES_UNBOUNDED = 2**40

# Test switches only, each a mistake that a power-loss test has to find: `sync` or `sync_dir` that say yes and do
# nothing, and a storage that goes on after a failed sync as if a later one could make it good.
Planted = Literal["no-sync", "no-dir-sync", "no-poison"]


@dataclass(slots=True)
class _Fault:
    operation: str
    path: str | None
    nth: int
    times: int


class _InputOutputError(StorageError):
    """An ordered fault has come up; to callers a StorageError like any other."""


class MemoryFile:
    """One file; its descriptor is the inode."""

    __slots__ = ("_inode", "_storage")

    def __init__(self, storage: "MemoryStorage", inode: Inode) -> None:
        self._storage = storage
        self._inode = inode

    @property
    def path(self) -> str:
        return self._inode.path

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        self._storage._begin_change()
        self._storage._meet_fault("write", self.path)
        self._refuse_negative(position)
        data = b"".join(buffers)
        fitting = self._fitting(position, data)
        if fitting:
            self._inode.change(self._storage._tree.next_number(), position, fitting)
        if len(fitting) < len(data):
            raise DiskFull(f"{self.path}: No space left on device")
        return len(data)

    def read(self, position: int, length: int) -> bytes:
        self._storage._begin()
        self._storage._meet_fault("read", self.path)
        self._refuse_negative(position)
        self._refuse_negative(length)
        return bytes(self._inode.content[position : position + length])

    def size(self) -> int:
        self._storage._begin()
        return len(self._inode.content)

    def truncate(self, size: int) -> None:
        self._storage._begin_change()
        self._storage._meet_fault("write", self.path)
        self._refuse_negative(size)
        self._inode.change(self._storage._tree.next_number(), size, None)

    def sync(self) -> None:
        self._storage._begin_change()
        try:
            self._storage._meet_fault("sync", self.path)
        except _InputOutputError as error:
            self._inode.fail_sync()
            raise self._storage._poisoned_by(self.path) from error
        if self._storage.planted != "no-sync":
            self._inode.sync()

    def fileno(self) -> int:
        self._storage._begin()
        return -1

    def _fitting(self, position: int, data: bytes) -> bytes:
        growth = position + len(data) - len(self._inode.content)
        if growth <= 0 or self._storage.capacity_bytes is None:
            return data
        return data[: max(0, len(data) - max(0, growth - self._storage.free_bytes()))]

    def _refuse_negative(self, number: int) -> None:
        if number < 0:
            raise StorageError(f"{self.path}: Invalid argument")


class MemoryStorage(Storage):
    """A data directory; `capacity_bytes` (may be changed at any time) is what its files may hold together."""

    def __init__(self, *, capacity_bytes: int | None = None, planted: Planted | None = None) -> None:
        self.capacity_bytes = capacity_bytes
        self.planted = planted
        self._tree = Tree(Folder())
        self._faults: list[_Fault] = []
        self._poison: str | None = None
        self._locked = False
        self._crashed = False

    def fail(
        self,
        operation: Literal["read", "write", "sync", "sync_dir"],
        *,
        path: str | None = None,
        nth: int = 1,
        times: int = 1,
    ) -> None:
        """Order EIO for the nth such call from now (on that path), and for the `times` - 1 calls after it.

        After a failed `sync` the file's unsynced bytes still read back, also in the next process, and a sync there
        says yes; but they are not on the disk and never will be unless they are written again.
        """
        self._faults.append(_Fault(operation, None if path is None else relative(path), nth, times))

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Rot on the medium: the bit is wrong in what is read, and on the disk where that byte is durable."""
        inode = self._file(relative(path))
        inode.content[position] ^= 1 << bit
        if position < len(inode.durable):
            inode.durable[position] ^= 1 << bit

    def process_crash(self) -> "MemoryStorage":
        """What the next process finds: all that was written, as durable as it was. This storage is dead."""
        return self._bequeath(self._tree)

    def power_loss(self, random: Random) -> "MemoryStorage":
        """What the next start finds: one of the states that a loss of power may leave. This storage is dead."""
        # Not one even chance for every change: the states in which nearly all or nearly nothing is lost matter most.
        kept, torn = random.choice(((0.0, 0.0), (1.0, 0.0), (0.5, 0.0), (0.5, 0.3), (0.9, 0.1), (1.0, 0.3)))

        def fates(change: Change) -> Fate:
            if random.random() < torn and isinstance(change, ContentChange) and change.data is not None:
                return _tear(random, change.position, len(change.data))
            return random.random() < kept

        return self._bequeath(self._tree.survivor(fates))

    def after_power_loss(self, fates: Fates) -> "MemoryStorage":
        """The state in which each unsynced change has met its fate. This storage lives on."""
        return self._heir(self._tree.survivor(fates))

    def unsynced(self) -> list[Change]:
        """Every change that a loss of power may take, oldest first."""
        return self._tree.changes()

    def open(self, path: str, *, create: bool = False) -> MemoryFile:
        path = relative(path)
        if create:
            self._begin_change()
            return MemoryFile(self, self._create(path))
        self._begin()
        return MemoryFile(self, self._file(path))

    def exists(self, path: str) -> bool:
        self._begin()
        return self._tree.maybe_find(relative(path)) is not None

    def list(self, path: str) -> list[str]:
        self._begin()
        return sorted(self._folder(relative(path)).names)

    def make_dir(self, path: str) -> None:
        self._begin_change()
        path = relative(path)
        parent = path.rpartition("/")[0]
        if parent:
            self.make_dir(parent)
        if self._tree.maybe_find(path) is None:
            folder, name = self._place(path)
            self._tree.change_names(f"make folder {path}", folder, (folder, name, Folder()))
        self._folder(path)

    def rename(self, old: str, new: str) -> None:
        self._begin_change()
        old, new = relative(old), relative(new)
        node, target = self._find(old), self._tree.maybe_find(new)
        if node is target:
            return
        (folder, name), (new_folder, new_name) = self._place(old), self._place(new)
        if new.startswith(f"{old}/"):
            raise StorageError(f"{old}: Invalid argument")
        if isinstance(target, Folder) and isinstance(node, Inode):
            raise StorageError(f"{old}: Is a directory")
        if isinstance(target, Inode) and isinstance(node, Folder):
            raise StorageError(f"{old}: Not a directory")
        if isinstance(target, Folder) and target.names:
            raise StorageError(f"{old}: Directory not empty")
        effects = ((folder, name, None), (new_folder, new_name, node))
        self._tree.change_names(f"rename {old} to {new}", new_folder, *effects)
        for inode, path in files(node, new):
            inode.path = path

    def remove(self, path: str) -> None:
        self._begin_change()
        path = relative(path)
        self._file(path)
        self._drop(path)

    def remove_dir(self, path: str) -> None:
        self._begin_change()
        path = relative(path)
        if self._folder(path).names:
            raise StorageError(f"{path or '.'}: Directory not empty")
        self._drop(path)

    def sync_dir(self, path: str) -> None:
        self._begin_change()
        path = relative(path)
        folder = self._folder(path)
        try:
            self._meet_fault("sync_dir", path)
        except _InputOutputError as error:
            raise self._poisoned_by(path) from error
        if self.planted != "no-dir-sync":
            self._tree.sync_folder(folder)

    def read_file(self, path: str) -> bytes:
        file = self.open(path)
        return file.read(0, file.size())

    def free_bytes(self) -> int:
        self._begin()
        if self.capacity_bytes is None:
            return FREE_BYTES_UNBOUNDED
        return max(0, self.capacity_bytes - sum(len(inode.content) for inode, _ in files(self._tree.root, "")))

    def lock(self) -> None:
        self._begin()
        if self._locked:
            raise DirectoryInUse("the directory in memory is in use")
        self._locked = True
        if self._tree.maybe_find("lock") is None:
            self._create("lock")

    def unlock(self) -> None:
        self._begin()
        self._locked = False

    @property
    def poisoned(self) -> bool:
        return self._poison is not None

    def _begin(self) -> None:
        if self._crashed:
            raise StorageError("crashed")

    def _begin_change(self) -> None:
        self._begin()
        if self._poison is not None:
            raise Poisoned(self._poison)

    def _meet_fault(self, operation: str, path: str) -> None:
        due = False
        for fault in self._faults:
            if fault.operation == operation and fault.path in (None, path):
                fault.nth -= 1
                due |= -fault.times < fault.nth <= 0
        if due:
            raise _InputOutputError(f"{path or '.'}: Input/output error")

    def _poisoned_by(self, path: str) -> Poisoned:
        poison = f"{path or '.'}: sync failed: Input/output error"
        if self.planted != "no-poison":
            self._poison = poison
        return Poisoned(poison)

    def _heir(self, tree: Tree) -> "MemoryStorage":
        heir = MemoryStorage(capacity_bytes=self.capacity_bytes, planted=self.planted)
        heir._tree = tree
        return heir

    def _bequeath(self, tree: Tree) -> "MemoryStorage":
        # Dead first: nothing may be acknowledged on the strength of a call that comes after the crash.
        self._begin()
        self._crashed = True
        return self._heir(tree)

    def _create(self, path: str) -> Inode:
        folder, name = self._place(path)
        if name in folder.names:
            raise StorageError(f"{path}: File exists")
        inode = Inode(path, bytearray())
        self._tree.change_names(f"create {path}", folder, (folder, name, inode))
        return inode

    def _drop(self, path: str) -> None:
        folder, name = self._place(path)
        self._tree.change_names(f"remove {path}", folder, (folder, name, None))

    def _place(self, path: str) -> tuple[Folder, str]:
        """The folder that a name is in, and the name."""
        if not path:
            raise StorageError(".: the data directory itself stays")
        parent, _, name = path.rpartition("/")
        folder = self._find(parent)
        if isinstance(folder, Inode):
            raise StorageError(f"{path}: Not a directory")
        return folder, name

    def _find(self, path: str) -> Node:
        node = self._tree.maybe_find(path)
        if node is None:
            self._place(path)
            raise FileNotFoundError(f"{path}: No such file or directory")
        return node

    def _file(self, path: str) -> Inode:
        node = self._find(path)
        if isinstance(node, Folder):
            raise StorageError(f"{path or '.'}: Is a directory")
        return node

    def _folder(self, path: str) -> Folder:
        node = self._find(path)
        if isinstance(node, Inode):
            raise StorageError(f"{path}: Not a directory")
        return node


def _tear(random: Random, position: int, length: int) -> Fate:
    """Part of a write: up to or from any byte, some of its sectors, or only the size it gave the file."""
    match random.randrange(4):
        case 0:
            return ((0, random.randrange(length)),)
        case 1:
            return ((random.randrange(length), length),)
        case 2:
            borders = [0, *range(SECTOR_BYTES - position % SECTOR_BYTES, length, SECTOR_BYTES), length]
            return tuple(sector for sector in pairwise(borders) if random.random() < 0.5)
        case _:
            return ((length, length),)
