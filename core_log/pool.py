"""Segment files that nobody needs any more, kept for the next segments. Driver: a lock over the storage contract.

A recycled file is already allocated and written once, so the first syncs of a new segment move data only. What
it held before has another salt and is never mistaken for the new segment's batches. Any thread may give and take.
"""

from threading import Lock

from headrace.core_log.storage.contract import Storage

FOLDER = "recycled"


class SegmentPool:
    __slots__ = ("_bytes", "_coming", "_count_max", "_lock", "_names", "_next", "_storage")

    def __init__(self, storage: Storage, count_max: int) -> None:
        self._storage = storage
        self._count_max = count_max
        storage.make_dir(FOLDER)
        self._names = storage.list(FOLDER)
        self._bytes = {name: storage.open(f"{FOLDER}/{name}").size() for name in self._names}
        self._next = 1 + max((int(name) for name in self._names), default=0)
        # Files that have a name and are not there yet.
        self._coming = 0
        # Held to look at and change what is above, never while the disk is waited for.
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._names)

    @property
    def room(self) -> int:
        """How many more it would keep."""
        return max(self._count_max - len(self._names) - self._coming, 0)

    def take(self, bytes_min: int, bytes_max: int) -> str | None:
        """The path of a file of a fitting size for the taker to rename, or None."""
        with self._lock:
            for name in self._names:
                if bytes_min <= self._bytes[name] <= bytes_max:
                    self._names.remove(name)
                    del self._bytes[name]
                    return f"{FOLDER}/{name}"
        return None

    def give(self, path: str) -> None:
        """Keep a file that is not needed, or remove it when there are enough."""
        with self._lock:
            has_room = self.room > 0
            if has_room:
                name = f"{self._next:010d}"
                self._next += 1
                self._coming += 1
        if not has_room:
            self._storage.remove(path)
            return
        try:
            self._storage.rename(path, f"{FOLDER}/{name}")
            size = self._storage.open(f"{FOLDER}/{name}").size()
            with self._lock:
                self._names.append(name)
                self._bytes[name] = size
        finally:
            with self._lock:
                self._coming -= 1
