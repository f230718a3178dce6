"""A mapping that never changes; a changed copy shares nearly all of its memory with the old one. Value.

The entries are spread by hash over about sqrt(n) small dicts. A change copies the list of dicts and the one dict it
touches: a few microseconds at 100,000 entries, where copying a plain dict takes milliseconds. Readers of the old map,
in whatever thread, never notice. Iteration is in key order, so that nothing depends on Python's hash seed; keys of one
map must therefore be comparable with each other.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

# Doubling the dicts when there are more than this many entries for each square of their number keeps both copies
# (the list, one dict) of the same order: 256 dicts of about 400 entries at 100,000.
_GROW = 2


class FrozenMap(Mapping[K, V], Generic[K, V]):
    __slots__ = ("_count", "_mask", "_shards")

    _shards: tuple[dict[K, V], ...]
    _mask: int
    _count: int

    def __init__(self, entries: Mapping[K, V] | Iterable[tuple[K, V]] = ()) -> None:
        whole = dict(entries)
        width = 1
        while len(whole) > _GROW * width * width:
            width *= 2
        shards: tuple[dict[K, V], ...] = tuple({} for _ in range(width))
        for key, value in whole.items():
            shards[hash(key) & (width - 1)][key] = value
        self._shards = shards
        self._mask = width - 1
        self._count = len(whole)

    def __getitem__(self, key: K) -> V:
        return self._shards[hash(key) & self._mask][key]

    def __contains__(self, key: object) -> bool:
        return key in self._shards[hash(key) & self._mask]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[K]:
        keys: list[Any] = [key for shard in self._shards for key in shard]
        keys.sort()
        return iter(keys)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenMap):
            return self is other or (self._count == other._count and all(other._has(key, self[key]) for key in self))
        return NotImplemented

    def _has(self, key: K, value: V) -> bool:
        return key in self and self[key] == value

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"FrozenMap({dict(self.items())!r})"

    def put(self, key: K, value: V) -> "FrozenMap[K, V]":
        return self.changed({key: value})

    def drop(self, *keys: K) -> "FrozenMap[K, V]":
        return self.changed({}, keys)

    def changed(self, put: Mapping[K, V], drop: Iterable[K] = ()) -> "FrozenMap[K, V]":
        """A copy without `drop`, then with `put`. Keys to drop may be absent. Copies each touched dict once."""
        shards = list(self._shards)
        fresh: set[int] = set()
        count = self._count
        for key in drop:
            place = hash(key) & self._mask
            if key in shards[place]:
                if place not in fresh:
                    shards[place] = shards[place].copy()
                    fresh.add(place)
                del shards[place][key]
                count -= 1
        for key, value in put.items():
            place = hash(key) & self._mask
            if place not in fresh:
                shards[place] = shards[place].copy()
                fresh.add(place)
            count += key not in shards[place]
            shards[place][key] = value
        if count > _GROW * len(shards) * len(shards):
            return FrozenMap((key, value) for shard in shards for key, value in shard.items())
        result: FrozenMap[K, V] = FrozenMap.__new__(FrozenMap)
        result._shards = tuple(shards)
        result._mask = self._mask
        result._count = count
        return result
