"""Real files under one directory, for reading only: beside a running broker, or on a disk that nobody may write.

Driver: os. It takes no lock, creates nothing and opens every file O_RDONLY; each change the contract knows is
refused. A file is open as long as somebody holds it, so what it reads survives a rename or a removal. Neighbours:
disk.py is the broker's own; inspection.py makes sense of what is read.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from headrace.core_log.errors import StorageError
from headrace.core_log.storage.contract import Buffer, Storage, relative


@contextmanager
def _translated(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise StorageError(f"{path or '.'}: {error.strerror or error}") from error


def _refuse(path: str) -> NoReturn:
    raise StorageError(f"{path or '.'}: the directory is open for reading only")


class ReadOnlyFile:
    __slots__ = ("_number", "path")

    def __init__(self, path: str, number: int) -> None:
        self.path = path
        self._number = number

    def __del__(self) -> None:
        os.close(self._number)

    def read(self, position: int, length: int) -> bytes:
        with _translated(self.path):
            data = os.pread(self._number, length, position)
            while len(data) < length:
                more = os.pread(self._number, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        return data

    def size(self) -> int:
        with _translated(self.path):
            return os.fstat(self._number).st_size

    def fileno(self) -> int:
        return self._number

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        _refuse(self.path)

    def sync(self) -> None:
        _refuse(self.path)

    def truncate(self, size: int) -> None:
        _refuse(self.path)


class ReadOnlyStorage(Storage):
    def __init__(self, root: Path) -> None:
        self._root = os.fspath(root.absolute())
        if not os.path.isdir(self._root):
            raise StorageError(f"{self._root}: there is no such directory")

    def open(self, path: str, *, create: bool = False) -> ReadOnlyFile:
        if create:
            _refuse(path)
        return self._opened(path, ReadOnlyFile)

    def _opened(self, path: str, make: Callable[[str, int], ReadOnlyFile]) -> ReadOnlyFile:
        path = relative(path)
        with _translated(path):
            return make(path, os.open(f"{self._root}/{path}", os.O_RDONLY | os.O_CLOEXEC))

    def exists(self, path: str) -> bool:
        path = relative(path)
        try:
            os.stat(f"{self._root}/{path}")
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise StorageError(f"{path}: {error.strerror or error}") from error
        return True

    def list(self, path: str) -> list[str]:
        path = relative(path)
        with _translated(path):
            return sorted(os.listdir(f"{self._root}/{path}"))

    def read_file(self, path: str) -> bytes:
        path = relative(path)
        with _translated(path), open(f"{self._root}/{path}", "rb") as file:
            return file.read()

    def free_bytes(self) -> int:
        with _translated(""):
            status = os.statvfs(self._root)
        return status.f_bavail * status.f_frsize

    @property
    def poisoned(self) -> bool:
        return False

    def make_dir(self, path: str) -> None:
        _refuse(path)

    def rename(self, old: str, new: str) -> None:
        _refuse(old)

    def remove(self, path: str) -> None:
        _refuse(path)

    def remove_dir(self, path: str) -> None:
        _refuse(path)

    def sync_dir(self, path: str) -> None:
        _refuse(path)

    def replace_file(self, path: str, data: bytes) -> None:
        _refuse(path)

    def lock(self) -> None:
        _refuse("lock")

    def unlock(self) -> None:
        _refuse("lock")
