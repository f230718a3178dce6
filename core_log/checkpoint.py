"""The file `watermark` of a partition: what is known to be safe. Format over a storage file.

Two slots of 512 bytes. A slot that was synced is never overwritten before the other one is synced, so a torn
write costs at most the newer, unsynced state. Offline readers (Spark, `headrace log`) take the valid slot with
the higher sequence and stop at its offset and byte position.

    | magic "HRwmark1" | sequence u64 | log start u64 | segment base u64 | offset u64 | position u64 |
    | ceiling u64 | epoch u32 | leader id u32 | hash u64 |
"""

import struct
from typing import NamedTuple

import xxhash

from headrace.core_log.storage.contract import File, Storage

_MAGIC = b"HRwmark1"
_SLOT = struct.Struct("<8sQQQQQQII")
_SLOT_BYTES = 512
FILE_BYTES = 2 * _SLOT_BYTES


class Checkpoint(NamedTuple):
    """`offset` lies at byte `position` of the segment `segment_base`; all below is synced and committed.

    Offsets below `ceiling` may have been seen by somebody: a log that was not closed cleanly goes on there.
    """

    log_start: int
    segment_base: int
    offset: int
    position: int
    ceiling: int
    epoch: int
    leader_id: int


def _encode(sequence: int, checkpoint: Checkpoint) -> bytes:
    packed = _SLOT.pack(_MAGIC, sequence, *checkpoint)
    return packed + struct.pack("<Q", xxhash.xxh3_64_intdigest(packed))


def _decode(data: bytes) -> tuple[int, Checkpoint] | None:
    packed = data[: _SLOT.size]
    if len(data) < _SLOT.size + 8 or packed[:8] != _MAGIC:
        return None
    if struct.unpack_from("<Q", data, _SLOT.size)[0] != xxhash.xxh3_64_intdigest(packed):
        return None
    _magic, sequence, *fields = _SLOT.unpack(packed)
    return sequence, Checkpoint(*fields)


def read_checkpoint(storage: Storage, path: str) -> Checkpoint | None:
    """The newest valid checkpoint in the file, or None if there is none. For readers."""
    found = _newest(storage, path)
    return None if found is None else found[1]


def _newest(storage: Storage, path: str) -> tuple[int, Checkpoint, int] | None:
    try:
        data = storage.read_file(path)
    except FileNotFoundError:
        return None
    best: tuple[int, Checkpoint, int] | None = None
    for slot in (0, 1):
        found = _decode(data[slot * _SLOT_BYTES : (slot + 1) * _SLOT_BYTES])
        if found is not None and (best is None or found[0] > best[0]):
            best = (*found, slot)
    return best


class CheckpointFile:
    """The writer's side. The folder must be synced once after `create`."""

    __slots__ = ("_anchored", "_file", "_loose_slot", "_sequence", "_storage", "path", "synced", "value")

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage = storage
        self.path = path
        self._file: File | None = None
        found = _newest(storage, path)
        self.value = None if found is None else found[1]
        self._sequence = 0 if found is None else found[0]
        # The slot that may be written now; the other one holds a synced state (or nothing yet).
        self._loose_slot = 0 if found is None else 1 - found[2]
        # What was read may have been left in the page cache by a process that crashed, perhaps of a failed sync.
        self._anchored = False
        # The newest state that survives a loss of power.
        self.synced: Checkpoint | None = None

    def create(self, value: Checkpoint) -> None:
        self._file = self._storage.open(self.path, create=True)
        self._file.write(0, [bytes(FILE_BYTES)])
        self.write(value, sync=True)

    def write(self, value: Checkpoint, *, sync: bool) -> None:
        """Unsynced writes go to the same slot again and again; a synced one turns to the other slot."""
        file = self.anchor()
        self._sequence += 1
        file.write(self._loose_slot * _SLOT_BYTES, [_encode(self._sequence, value)])
        self.value = value
        if sync:
            file.sync()
            self._loose_slot = 1 - self._loose_slot
            self.synced = value

    def anchor(self) -> File:
        """Make what was read at the start safe, before anything is built on it."""
        if self._file is None:
            self._file = self._storage.open(self.path)
        if not self._anchored:
            if self.value is not None:
                # Written anew: after a failed sync the kernel counts the page as clean, and no sync would write it.
                self._file.write((1 - self._loose_slot) * _SLOT_BYTES, [_encode(self._sequence, self.value)])
            self._file.sync()
            self._anchored = True
            self.synced = self.value
        return self._file
