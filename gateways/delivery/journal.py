"""What a durable view writes to the stream `__views`, and how it is read back. Format; pure.

A record's key is the view's id (8 bytes, big-endian) and its value the view's whole state, so the last record of a
key is the truth and compaction may drop what came before. Records whose key begins with "log:" say up to which
offset of a log every view's state has been written; what lies behind is found again from the routes in the batches.
A view's history (history.py) has keys of its own ("run:", view id, number of a block), since most of it never changes.
"""

from collections.abc import Callable, Iterable
from uuid import UUID

import msgspec

from headrace.controller.table import Table
from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.attachment import Attachment
from headrace.gateways.delivery.history import Block, Entry, History
from headrace.gateways.delivery.ports import Source

STREAM_NAME = "__views"


class LaneState(msgspec.Struct, frozen=True, array_like=True):
    next_seq: int
    floor: int
    settled: list[tuple[int, int]]
    # (seq, count, stream, partition, first offset, end offset)
    arrivals: list[tuple[int, int, bytes, int, int, int]]
    # (stream, partition, end offset)
    applied: list[tuple[bytes, int, int]]
    # What was handed out once has sequences below this.
    delivered_below: int = 0
    # Places in `arrivals` of those that hold every record of their range, whatever its routes.
    exact: list[int] = []
    # (how often handed out in vain, first sequence, end)
    failures: list[tuple[int, int, int]] = []


class HistoryState(msgspec.Struct, frozen=True, array_like=True):
    """What is not in the history's blocks."""

    first_seq: int
    next_seq: int
    newest_us: int
    byte_count: int
    # (stream, partition, end offset)
    applied: list[tuple[bytes, int, int]]


class BlockState(msgspec.Struct, frozen=True, array_like=True):
    ordinal: int
    # (seq, stream (empty: it is gone), partition, first offset, end offset, newest time before, bytes before, exact)
    entries: list[tuple[int, bytes, int, int, int, int, int, bool]]


class MovingState(msgspec.Struct, frozen=True, array_like=True):
    """Neighbours of a lane that are leaving for another log (transfers.py)."""

    # The number of the first; -1: they have none, since they have no way.
    first: int
    lane: int
    seq: int
    reason: str
    # Where they are: (stream, partition, offset, count)
    places: list[tuple[bytes, int, int, int]]


class OutboxState(msgspec.Struct, frozen=True, array_like=True):
    """A view's numbers in one target."""

    stream: bytes
    partition: int
    next_number: int
    # In the order of their numbers.
    moving: list[MovingState]


class ViewState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    lanes: list[LaneState]
    # Some records may have a time of their own: the head must be looked at after a restart.
    timed: bool = False
    history: HistoryState | None = None
    # Bindings to the past: (stream, routing key, arguments as text, offsets that are done)
    attached: list[tuple[bytes, str, str, list[tuple[int, int]]]] = []
    outbox: list[OutboxState] = []
    waiting: list[MovingState] = []


FORMAT = 1
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(ViewState)
_block_decoder = msgspec.msgpack.Decoder(BlockState)
_LOG = b"log:"
_BLOCK = b"run:"


def view_key(view_id: int) -> bytes:
    return view_id.to_bytes(8, "big")


def log_key(stream_id: StreamId, partition: int) -> bytes:
    return _LOG + stream_id.bytes + partition.to_bytes(4, "big")


def encode_view(state: ViewState) -> bytes:
    return _encoder.encode(state)


def block_key(view_id: int, number: int) -> bytes:
    return _BLOCK + view_id.to_bytes(8, "big") + number.to_bytes(8, "big")


def encode_block(block: Block) -> bytes:
    return _encoder.encode(BlockState(block.ordinal, [_entry_state(entry) for entry in block.entries]))


def _entry_state(entry: Entry) -> tuple[int, bytes, int, int, int, int, int, bool]:
    stream, partition = (b"", 0) if entry.source is None else (entry.source.stream_id.bytes, entry.source.partition)
    return entry.seq, stream, partition, entry.first, entry.end, entry.newest_us, entry.bytes_before, entry.exact


def history_state(history: History) -> HistoryState:
    applied = [(source.stream_id.bytes, source.partition, end) for source, end in history.applied.items()]
    return HistoryState(history.first_seq, history.next_seq, history.newest_us, history.byte_count, applied)


def attached_state(attached: Iterable[Attachment]) -> list[tuple[bytes, str, str, list[tuple[int, int]]]]:
    return [(one.stream.bytes, one.key, one.arguments.text, list(one.ranges)) for one in attached]


def restored_attachments(state: ViewState) -> list[Attachment]:
    attached = [Attachment(UUID(bytes=stream), key, Table.parse(text)) for stream, key, text, _done in state.attached]
    for attachment, (_stream, _key, _text, done) in zip(attached, state.attached, strict=True):
        for first, end in done:
            attachment.ranges.add(first, end)
    return attached


def restore_history(
    history: History,
    state: HistoryState,
    blocks: Iterable[BlockState],
    source_of: Callable[[bytes, int], Source | None],
) -> None:
    """`source_of` finds a log by stream and partition; None: it is gone, and what it held of the history with it."""
    found = [(source_of(stream, partition), end) for stream, partition, end in state.applied]
    history.restore(
        first_seq=state.first_seq,
        next_seq=state.next_seq,
        newest_us=state.newest_us,
        byte_count=state.byte_count,
        applied={source: end for source, end in found if source is not None},
        blocks=[
            Block(
                block.ordinal,
                [
                    Entry(seq, source_of(stream, partition) if stream else None, first, end, newest_us, before, exact)
                    for seq, stream, partition, first, end, newest_us, before, exact in block.entries
                ],
            )
            for block in blocks
        ],
    )


def encode_applied(offset: int) -> bytes:
    return offset.to_bytes(8, "big")


class Restored:
    """The last state of every view and log that the journal speaks of."""

    def __init__(self, entries: Iterable[tuple[int, bytes, bytes]]) -> None:
        """`entries`: (offset, key, value) in log order. Raises CorruptLog for what cannot be read."""
        self.views: dict[int, ViewState] = {}
        self.applied: dict[tuple[UUID, int], int] = {}
        # The blocks of each view's history.
        self.blocks: dict[int, list[BlockState]] = {}
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
                if key.startswith(_BLOCK):
                    blocks = self.blocks.setdefault(int.from_bytes(key[4:12], "big"), [])
                    blocks.append(_block_decoder.decode(value))
                    continue
                state = _decoder.decode(value)
            except msgspec.DecodeError as error:
                raise CorruptLog(STREAM_NAME, 0, offset, f"a view's state cannot be read ({error})") from error
            if state.format != FORMAT:
                raise CorruptLog(STREAM_NAME, 0, offset, f"a view's state has the unknown format {state.format}")
            self.views[int.from_bytes(key, "big")] = state

    def applied_to(self, stream_id: UUID, partition: int, otherwise: int) -> int:
        return self.applied.get((stream_id, partition), otherwise)
