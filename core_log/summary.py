"""The small Bloom filter in a batch header: which tags and keys may be inside. Format; pure.

Hashes are xxh3-64 of the text, seed 0 for tags and 1 for keys. A summary of m bits (a power of two, 64 to
4,096, at least eight per distinct entry) sets bit (h + i * ((h >> 32) | 1)) mod m for i = 0..3; bit b is in
byte b >> 3 at position b & 7. More than 512 distinct entries: no summary, which means anything may be inside.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import repeat
from typing import Protocol

import xxhash

TAG_SEED = 0
KEY_SEED = 1
ENTRIES_MAX = 512
PROBES = 4


class Sieve(Protocol):
    """A filter, as the log asks it about a batch that is not decoded; False is for certain."""

    def may_match(self, summary: bytes) -> bool:
        """Whether a batch with this summary may hold a record that is wanted."""

    def may_hold(self, tag_hashes: Sequence[int], tag_sets: Iterable[Sequence[int]]) -> bool:
        """The same by the hashes of its tags, and sets of places among them, one set for each record or more."""


def tag_hash(tag: str) -> int:
    return int(xxhash.xxh3_64_intdigest(tag.encode(), TAG_SEED))


def key_hash(key: bytes) -> int:
    return int(xxhash.xxh3_64_intdigest(key, KEY_SEED))


def summarise(hashes: Collection[int]) -> bytes:
    """The summary of distinct hashes; empty when there are too many to be worth it."""
    if len(hashes) > ENTRIES_MAX:
        return b""
    bits = 64
    while bits < 8 * len(hashes):
        bits *= 2
    summary = bytearray(bits // 8)
    mask = bits - 1
    for entry in hashes:
        step = (entry >> 32) | 1
        for _ in range(PROBES):
            bit = entry & mask
            summary[bit >> 3] |= 1 << (bit & 7)
            entry += step
    return bytes(summary)


def may_hold_any(summary: bytes, entries: Collection[int]) -> bool:
    """False only if none of the entries is in the batch."""
    return any(map(may_hold, repeat(summary), entries))


def may_hold(summary: bytes, entry: int) -> bool:
    """False only if an entry with this hash is certainly not in the batch."""
    if not summary:
        return True
    mask = len(summary) * 8 - 1
    step = (entry >> 32) | 1
    for _ in range(PROBES):
        bit = entry & mask
        if not summary[bit >> 3] >> (bit & 7) & 1:
            return False
        entry += step
    return True
