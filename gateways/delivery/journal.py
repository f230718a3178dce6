"""What a durable view writes to the stream `__views`, and how it is read back. Format; pure.

A record's key is the view's id (8 bytes, big-endian) and its value the view's whole state, so the last record of a
key is the truth and compaction may drop what came before. Records whose key begins with "log:" say up to which
offset of a log every view's state has been written; what lies behind is found again from the routes in the batches.
"""

from collections.abc import Iterable
from uuid import UUID

import msgspec

from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import StreamId

STREAM_NAME = "__views"


class LaneState(msgspec.Struct, frozen=True, array_like=True):
    next_seq: int
    floor: int
    settled: list[tuple[int, int]]
    # (seq, count, stream, partition, first offset, end offset)
    arrivals: list[tuple[int, int, bytes, int, int, int]]
    # (stream, partition, end offset)
    applied: list[tuple[bytes, int, int]]


class ViewState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    byte_count: int
    lanes: list[LaneState]
    # Some records may have a time of their own: the head must be looked at after a restart.
    timed: bool = False


FORMAT = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ViewState)
_LOG = b"log:"


def view_key(view_id: int) -> bytes:
    return view_id.to_bytes(8, "big")


def log_key(stream_id: StreamId, partition: int) -> bytes:
    return _LOG + stream_id.bytes + partition.to_bytes(4, "big")


def encode_view(state: ViewState) -> bytes:
    return _encoder.encode(state)


def encode_applied(offset: int) -> bytes:
    return offset.to_bytes(8, "big")


class Restored:
    """The last state of every view and log that the journal speaks of."""

    def __init__(self, entries: Iterable[tuple[int, bytes, bytes]]) -> None:
        """`entries`: (offset, key, value) in log order. Raises CorruptLog for what cannot be read."""
        self.views: dict[int, ViewState] = {}
        self.applied: dict[tuple[UUID, int], int] = {}
        latest: dict[bytes, tuple[int, bytes]] = {}
        for offset, key, value in entries:
            latest[key] = (offset, value)
        for key, (offset, value) in latest.items():
            if not value:
                continue
            if key.startswith(_LOG):
                self.applied[UUID(bytes=key[4:20]), int.from_bytes(key[20:], "big")] = int.from_bytes(value, "big")
                continue
            try:
                state = _decoder.decode(value)
            except msgspec.DecodeError as error:
                raise CorruptLog(STREAM_NAME, 0, offset, f"a view's state cannot be read ({error})") from error
            if state.format != FORMAT:
                raise CorruptLog(STREAM_NAME, 0, offset, f"a view's state has the unknown format {state.format}")
            self.views[int.from_bytes(key, "big")] = state

    def applied_to(self, stream_id: UUID, partition: int, otherwise: int) -> int:
        return self.applied.get((stream_id, partition), otherwise)
