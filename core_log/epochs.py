"""Which leader stint wrote from which offset on. Machine; pure.

An epoch's identity is (epoch, leader id): after a regression of the metadata store the same number may be
given out twice, so the pair is compared, never the number alone (C7). Derived from the batches' headers;
the file `epochs` of a partition only saves reading them all again.
Invariant: epochs and first offsets both rise from entry to entry (first offsets never fall).

    file `epochs`: text, a line `epoch leader first-offset` for each stint, then `hash` and the lines' xxh3-64 in hex
"""

from collections.abc import Sequence
from typing import NamedTuple

import xxhash


class EpochStart(NamedTuple):
    epoch: int
    leader_id: int
    first_offset: int


class EpochHistory:
    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[EpochStart] = ()) -> None:
        self._entries: list[EpochStart] = []
        for entry in entries:
            self.note(*entry)

    @property
    def entries(self) -> tuple[EpochStart, ...]:
        return tuple(self._entries)

    @property
    def latest(self) -> EpochStart:
        return self._entries[-1] if self._entries else EpochStart(0, 0, 0)

    def note(self, epoch: int, leader_id: int, first_offset: int) -> bool:
        """A batch of this stint begins here; True if the stint is new. A lower epoch is our own mistake."""
        if self._entries:
            last = self._entries[-1]
            if (epoch, leader_id) == last[:2]:
                return False
            if epoch < last.epoch or first_offset < last.first_offset:
                raise ValueError(f"epoch {epoch} at {first_offset} after epoch {last.epoch} at {last.first_offset}")
            if first_offset == last.first_offset:
                # The stint before wrote nothing.
                self._entries.pop()
        self._entries.append(EpochStart(epoch, leader_id, first_offset))
        return True

    def epoch_at(self, offset: int) -> EpochStart:
        """The stint that wrote this offset."""
        found = EpochStart(0, 0, 0)
        for entry in self._entries:
            if entry.first_offset > offset:
                break
            found = entry
        return found

    def end_of(self, epoch: int, leader_id: int, log_end: int) -> int | None:
        """Where this stint's records end, or None if it is not in this history."""
        for place, entry in enumerate(self._entries):
            if (entry.epoch, entry.leader_id) == (epoch, leader_id):
                return self._entries[place + 1].first_offset if place + 1 < len(self._entries) else log_end
        return None

    def divergence(self, log_end: int, other: "EpochHistory", other_end: int) -> int:
        """The first offset at which this log and the other may differ (E3): walk back to a common stint."""
        for entry in reversed(self._entries):
            theirs = other.end_of(entry.epoch, entry.leader_id, other_end)
            if theirs is not None:
                ours = self.end_of(entry.epoch, entry.leader_id, log_end)
                assert ours is not None
                return min(ours, theirs)
        return 0

    def cut_from(self, offset: int) -> None:
        """Records from this offset on are gone."""
        self._entries = [entry for entry in self._entries if entry.first_offset < offset]

    def encode(self) -> bytes:
        lines = "".join(f"{epoch} {leader} {first}\n" for epoch, leader, first in self._entries).encode()
        return lines + b"hash %016x\n" % xxhash.xxh3_64_intdigest(lines)

    @classmethod
    def decode(cls, data: bytes) -> "EpochHistory":
        """Raises ValueError when these bytes are no history; the caller then reads the log instead."""
        lines, mark, digest = data.rpartition(b"hash ")
        if not mark or digest != b"%016x\n" % xxhash.xxh3_64_intdigest(lines):
            raise ValueError("its hash is missing or wrong")
        return cls([EpochStart(*map(int, line.split())) for line in lines.decode("ascii").splitlines()])
