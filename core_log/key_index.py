"""Which keys a sealed segment holds, and in which batches. Format; rebuildable from the segment.

A wildcard filter runs over the distinct keys, not over the records, and then reads only the batches that hold a
match. Keys stand sorted, so a filter with a literal beginning looks at a slice of them.

    | magic "HRkeys01" | salt u64 | end offset u64 | keys u32 | batches u32 | postings u32 | key bytes u32 |
    | batch positions u64 | batch base offsets u64 | key ends u32 | posting ends u32 | postings u32 (batch numbers) |
    | keys | hash u64 |
"""

import struct
from bisect import bisect_left
from collections.abc import Callable, Iterator

import numpy as np
import xxhash

from headrace.core_log.format import FLAG_GAP, cut, decode_columns
from headrace.core_log.segment import Segment
from headrace.core_log.storage.contract import Storage

_MAGIC = b"HRkeys01"
_HEAD = struct.Struct("<8sQQIIII")
SUFFIX = ".keys"


class KeyIndex:
    __slots__ = ("_postings", "base_offsets", "keys", "positions")

    def __init__(
        self, positions: list[int], base_offsets: list[int], keys: list[bytes], postings: list[list[int]]
    ) -> None:
        self.positions = positions
        self.base_offsets = base_offsets
        self.keys = keys
        self._postings = postings

    @staticmethod
    def exists(storage: Storage, segment: Segment) -> bool:
        return storage.exists(segment.stem + SUFFIX)

    def batches_of(self, key: bytes) -> list[int]:
        """Numbers of the batches that hold this key; `positions` and `base_offsets` say where they are."""
        place = bisect_left(self.keys, key)
        return self._postings[place] if place < len(self.keys) and self.keys[place] == key else []

    def keys_from(self, prefix: bytes) -> Iterator[bytes]:
        """The keys that begin with a prefix, in order."""
        for place in range(bisect_left(self.keys, prefix), len(self.keys)):
            if not self.keys[place].startswith(prefix):
                return
            yield self.keys[place]

    def batches_matching(self, wanted: Callable[[bytes], bool], prefix: bytes = b"") -> list[int]:
        """Numbers of the batches with a key that is wanted, rising."""
        found: set[int] = set()
        for key in self.keys_from(prefix):
            if wanted(key):
                found.update(self.batches_of(key))
        return sorted(found)

    @classmethod
    def build(cls, storage: Storage, segment: Segment) -> "KeyIndex":
        """Read the segment's keys and write the index beside it."""
        positions: list[int] = []
        base_offsets: list[int] = []
        found: dict[bytes, list[int]] = {}
        for position, header in segment.headers():
            if header.flags & FLAG_GAP:
                continue
            _header, data = segment.read_whole(position, header)
            columns = decode_columns(data, 0, header)
            keys = cut(columns.keys, columns.key_sizes, 1 if columns.key_shared else header.record_count, False)
            for key in sorted(set(keys)):
                found.setdefault(key, []).append(len(positions))
            positions.append(position)
            base_offsets.append(header.base_offset)
        ordered = sorted(found)
        index = cls(positions, base_offsets, ordered, [found[key] for key in ordered])
        name = segment.stem + SUFFIX
        file = storage.open(name, create=not storage.exists(name))
        file.truncate(0)
        file.write(0, [index.encode(segment.salt, segment.end_offset)])
        return index

    @classmethod
    def load(cls, storage: Storage, segment: Segment) -> "KeyIndex":
        """The saved index, or a fresh one when it is missing or does not fit the segment."""
        return cls.maybe_load(storage, segment) or cls.build(storage, segment)

    @classmethod
    def maybe_load(cls, storage: Storage, segment: Segment) -> "KeyIndex | None":
        """The saved index, or None when it is missing or does not fit the segment."""
        try:
            data = storage.read_file(segment.stem + SUFFIX)
        except FileNotFoundError:
            return None
        return cls._maybe_decode(data, segment.salt, segment.end_offset)

    def encode(self, salt: int, end_offset: int) -> bytes:
        key_ends = np.cumsum([len(key) for key in self.keys], dtype="<u4")
        posting_ends = np.cumsum([len(one) for one in self._postings], dtype="<u4")
        postings = [batch for one in self._postings for batch in one]
        blob = b"".join(self.keys)
        data = b"".join(
            (
                _HEAD.pack(_MAGIC, salt, end_offset, len(self.keys), len(self.positions), len(postings), len(blob)),
                np.asarray(self.positions, dtype="<u8").tobytes(),
                np.asarray(self.base_offsets, dtype="<u8").tobytes(),
                key_ends.tobytes(),
                posting_ends.tobytes(),
                np.asarray(postings, dtype="<u4").tobytes(),
                blob,
            )
        )
        return data + struct.pack("<Q", xxhash.xxh3_64_intdigest(data))

    @classmethod
    def _maybe_decode(cls, data: bytes, salt: int, end_offset: int) -> "KeyIndex | None":
        if len(data) < _HEAD.size + 8 or struct.unpack("<Q", data[-8:])[0] != xxhash.xxh3_64_intdigest(data[:-8]):
            return None
        magic, found_salt, found_end, keys, batches, postings, blob_size = _HEAD.unpack_from(data)
        if (magic, found_salt, found_end) != (_MAGIC, salt, end_offset):
            return None
        at = _HEAD.size

        def column(dtype: str, count: int) -> list[int]:
            nonlocal at
            values: list[int] = np.frombuffer(data, dtype=dtype, count=count, offset=at).tolist()
            at += count * int(dtype[-1])
            return values

        positions, base_offsets = column("<u8", batches), column("<u8", batches)
        key_ends, posting_ends = column("<u4", keys), column("<u4", keys)
        numbers = column("<u4", postings)
        blob = data[at : at + blob_size]
        return cls(
            positions,
            base_offsets,
            [blob[low:high] for low, high in zip([0, *key_ends], key_ends, strict=False)],
            [numbers[low:high] for low, high in zip([0, *posting_ends], posting_ends, strict=False)],
        )
