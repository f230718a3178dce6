"""Where in a partition records with wanted keys are, by the key indexes of its sealed segments. Reads files; no clock.

A reader that wants few of many keys asks, segment by segment, which batches can hold one, and passes over the others
without reading them. Where there is no index (the active segment, one that was sealed just now) it must read.
Neighbours: key_index.py is the file, log.py has the segments, the MQTT door wakes its sessions with this.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.core_log.key_index import KeyIndex
from headrace.core_log.log import PartitionLog
from headrace.core_log.segment import Segment
from headrace.core_log.storage.contract import Storage

# Indexes kept in memory, the last used last.
INDEXES_MAX = 4
# A wish that more keys than this could fulfil is not worth the look at each of them.
KEYS_MAX = 10_000


class Wish(NamedTuple):
    """Keys that somebody wants: one, or those with a beginning that `accepts`."""

    prefix: bytes
    accepts: Callable[[bytes], bool] | None = None


class Found(NamedTuple):
    """What is known of the log up to `end_offset`: the offsets (from, to) that must be read, rising; None: all."""

    ranges: list[tuple[int, int]] | None
    end_offset: int


class KeyScan:
    def __init__(self, storage: Storage, log: PartitionLog) -> None:
        self._storage = storage
        self._log = log
        self._loaded: dict[int, KeyIndex] = {}

    def find(self, offset: int, wishes: Sequence[Wish]) -> Found:
        """For the segment that holds an offset."""
        segments = self._log.segments
        place = bisect_right(segments, offset, key=lambda one: one.base_offset) - 1
        if place < 0 or place == len(segments) - 1:
            return Found(None, int(self._log.end))
        segment = segments[place]
        end = int(segments[place + 1].base_offset)
        index = self._index(segment)
        if index is None:
            return Found(None, end)
        numbers: set[int] = set()
        for wish in wishes:
            if wish.accepts is None:
                numbers.update(index.batches_of(wish.prefix))
                continue
            for count, key in enumerate(index.keys_from(wish.prefix)):
                if count >= KEYS_MAX:
                    return Found(None, end)
                if wish.accepts(key):
                    numbers.update(index.batches_of(key))
        starts = [*index.base_offsets, end]
        return Found([(starts[number], starts[number + 1]) for number in sorted(numbers)], end)

    def _index(self, segment: Segment) -> KeyIndex | None:
        base = int(segment.base_offset)
        index = self._loaded.pop(base, None) or KeyIndex.maybe_load(self._storage, segment)
        if index is None:
            return None
        self._loaded[base] = index
        if len(self._loaded) > INDEXES_MAX:
            del self._loaded[next(iter(self._loaded))]
        return index
