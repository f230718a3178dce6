"""What the delay engine writes down, in the order in which it holds: the records of `__delay.log`. Format; pure.

Each is one record of the log: its value is the MessagePack of one of the structs below. A record is fired or cancelled
by whichever decision stands first; the ledger makes no second one about the same place. A Snapshot stands for
everything before it. Columns are little-endian int64. Neighbours: ledger.py applies them, delays.py appends them.
"""

from typing import TypeAlias

import msgspec
import numpy as np

from headrace.core_log.errors import CorruptLog
from headrace.delay.marks import Places


class Fired(msgspec.Struct, tag="fired", array_like=True, frozen=True):
    """These places are due and go to their target, with these numbers of the outbox (none without a stream)."""

    number: int
    target: bytes
    stream: bytes
    partition: int
    first: int
    places: bytes


class Rescheduled(msgspec.Struct, tag="rescheduled", array_like=True, frozen=True):
    """This place is given up; its record goes back to the intake with another due time, by the outbox."""

    number: int
    target: bytes
    place: int
    due_us: int
    first: int


class Settled(msgspec.Struct, tag="settled", array_like=True, frozen=True):
    """What was fired or rescheduled with these numbers is committed where it went."""

    numbers: list[int]


class Cancelled(msgspec.Struct, tag="cancelled", array_like=True, frozen=True):
    target: bytes
    places: bytes


class Opened(msgspec.Struct, tag="opened", array_like=True, frozen=True):
    """A partition of a bucket: a source of this number from now on."""

    source: int
    stream: bytes
    partition: int
    start_us: int
    span_us: int


class Dropped(msgspec.Struct, tag="dropped", array_like=True, frozen=True):
    """Nothing of these sources is needed any more."""

    sources: list[int]


class Trimmed(msgspec.Struct, tag="trimmed", array_like=True, frozen=True):
    """Everything in the intake below this offset has moved on or was decided; the intake may let go of it."""

    floor: int


class Moved(msgspec.Struct, array_like=True, frozen=True):
    """Records that one pass put into one source: offsets first..first+count-1, and how many of each target count."""

    source: int
    first: int
    count: int
    targets: dict[bytes, int]


class Sorted(msgspec.Struct, tag="sorted", array_like=True, frozen=True):
    """One pass of the sorter: of intake offsets first..end-1 what is due from the edge on stands in buckets now.

    `decided` are places in buckets whose records were fired, cancelled or rescheduled while the pass was under way.
    """

    first: int
    end: int
    edge_us: int
    run: int
    moved: list[Moved]
    decided: bytes
    states: bytes


class Merged(msgspec.Struct, tag="merged", array_like=True, frozen=True):
    """Run files that another one replaces (0: none, they hold nothing that counts)."""

    removed: list[int]
    run: int


class SourceState(msgspec.Struct, array_like=True, frozen=True):
    source: int
    stream: bytes
    partition: int
    start_us: int
    span_us: int
    targets: dict[bytes, int]
    marks: list[tuple[int, bytes]]
    extents: list[tuple[int, int]]


class Snapshot(msgspec.Struct, tag="snapshot", array_like=True, frozen=True):
    """Everything that is known, but for what the intake itself says."""

    owner: bytes
    intake: bytes
    floor: int
    intake_marks: list[tuple[int, bytes]]
    passes: list[tuple[int, int, int]]
    sources: list[SourceState]
    runs: list[int]
    numbers: list[tuple[bytes, int, int]]
    unsettled: list[Fired | Rescheduled]
    next_source: int
    next_run: int
    next_number: int


Decision: TypeAlias = (
    Fired | Rescheduled | Settled | Cancelled | Opened | Dropped | Trimmed | Sorted | Merged | Snapshot
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Decision)


def encode(decision: Decision) -> bytes:
    return _encoder.encode(decision)


def decode(value: bytes, offset: int) -> Decision:
    try:
        decision: Decision = _decoder.decode(value)
        return decision
    except msgspec.DecodeError as error:
        raise CorruptLog("__delay.log", 0, offset, f"not a decision ({error})") from error


def pack(places: Places) -> bytes:
    return places.astype("<i8").tobytes()


def unpack(column: bytes) -> Places:
    return np.frombuffer(column, dtype="<i8").astype(np.int64)
