"""A node's disk: one memory storage, seen from its folders, that may stop dead in the middle of anything. Driver for
tests.

What a loss of power leaves is core_log/storage/memory.py's affair. Here are the folders of a data directory as storages
of their own, the moment of death inside of a call (`Fuse`), and the worker: blocking calls take a while of the world's
time, and the loop goes on meanwhile, as with threads.
"""

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING, TypeVar

import outcome
import trio

from headrace.controller.errors import Unreachable
from headrace.core_log.storage.contract import Buffer, File, Storage, relative
from headrace.core_log.storage.memory import MemoryStorage

if TYPE_CHECKING:
    from tests.simulation.cluster.node import Life

T = TypeVar("T")


class Dead(BaseException):
    """The process was killed inside of a call to its disk."""


class Fuse:
    """After so many more changes of the disk the process is dead; None: it lives."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.is_blown = False

    def spend(self) -> None:
        if self.is_blown:
            raise Dead
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                self.is_blown = True
                raise Dead


class FolderFile:
    __slots__ = ("_cut", "_file", "_fuse")

    def __init__(self, file: File, fuse: Fuse, cut: int) -> None:
        self._file = file
        self._fuse = fuse
        self._cut = cut

    @property
    def path(self) -> str:
        return self._file.path[self._cut :]

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        self._fuse.spend()
        return self._file.write(position, buffers)

    def read(self, position: int, length: int) -> bytes:
        return self._file.read(position, length)

    def size(self) -> int:
        return self._file.size()

    def sync(self) -> None:
        self._fuse.spend()
        self._file.sync()

    def truncate(self, size: int) -> None:
        self._fuse.spend()
        self._file.truncate(size)

    def fileno(self) -> int:
        return -1


class FolderStorage(Storage):
    """A folder of a disk, as the root of a storage."""

    def __init__(self, disk: MemoryStorage, fuse: Fuse, folder: str = "") -> None:
        self._disk = disk
        self._fuse = fuse
        self._prefix = f"{relative(folder)}/" if folder else ""
        if folder:
            disk.make_dir(folder)
            # As DiskStorage does: the folder itself is there for good.
            parent = relative(folder)
            while parent:
                parent = parent.rpartition("/")[0]
                disk.sync_dir(parent)

    def _at(self, path: str) -> str:
        return self._prefix + relative(path)

    def open(self, path: str, *, create: bool = False) -> FolderFile:
        if create:
            self._fuse.spend()
        return FolderFile(self._disk.open(self._at(path), create=create), self._fuse, len(self._prefix))

    def exists(self, path: str) -> bool:
        return self._disk.exists(self._at(path))

    def list(self, path: str) -> list[str]:
        return self._disk.list(self._at(path))

    def make_dir(self, path: str) -> None:
        self._fuse.spend()
        self._disk.make_dir(self._at(path))

    def rename(self, old: str, new: str) -> None:
        self._fuse.spend()
        self._disk.rename(self._at(old), self._at(new))

    def remove(self, path: str) -> None:
        self._fuse.spend()
        self._disk.remove(self._at(path))

    def remove_dir(self, path: str) -> None:
        self._fuse.spend()
        self._disk.remove_dir(self._at(path))

    def sync_dir(self, path: str) -> None:
        self._fuse.spend()
        self._disk.sync_dir(self._at(path))

    def read_file(self, path: str) -> bytes:
        return self._disk.read_file(self._at(path))

    def free_bytes(self) -> int:
        return self._disk.free_bytes()

    def lock(self) -> None:
        self._disk.lock()

    def unlock(self) -> None:
        self._disk.unlock()

    @property
    def poisoned(self) -> bool:
        return self._disk.poisoned


class Speed:
    """How long calls to a disk take."""

    def __init__(self, random: Random) -> None:
        self.typical_s = random.choice((0.0002, 0.001, 0.004))
        self.factor = 1.0
        # Until then nothing comes back: a stalled sync.
        self.stalled_until = 0.0


class SimWorker:
    """Where a node's blocking calls go. A call has its effect at one moment between its beginning and its end."""

    def __init__(self, life: "Life", speed: Speed, random: Random) -> None:
        self._life = life
        self._speed = speed
        self._random = random

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        task = trio.lowlevel.current_task()
        life, world = self._life, self._life.world
        seconds = self._speed.typical_s * self._speed.factor * (0.5 + self._random.random())
        begin = max(world.now + seconds * self._random.random(), self._speed.stalled_until)

        def act() -> None:
            if life.is_dead:
                return
            if life.is_paused:
                life.when_resumed(act)
                return
            try:
                result = outcome.capture(call)
            except Dead:
                life.die("in the middle of a call to its disk")
                return
            wait = seconds
            if isinstance(result, outcome.Error):
                if isinstance(result.error, Dead):
                    life.die("in the middle of a call to its disk")
                    return
                if isinstance(result.error, Unreachable):
                    wait += self._random.choice((0.0, 0.05, 0.5, 2.0))
            world.after(wait, lambda: life.reschedule(task, result))

        world.at(begin, act)
        answer: T = await trio.lowlevel.wait_task_rescheduled(lambda _raise_cancel: trio.lowlevel.Abort.FAILED)
        return answer
