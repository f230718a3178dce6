"""Binding a queue to the past of an exchange: `x-from`. Driver.

The binding's filter runs once over the exchange's log, from where it was asked to the end of the log, and what matches
is copied into the queue's own log (relocation.py). Most of it happens while everybody works on; the last piece, telling
the queue, and the binding itself are one step without a pause, so no record is missed or taken twice at the seam. What
the queue has got already, by its routes or by an earlier binding of this kind, is left out: the same bind again, after
a crash or at each start of an application, attaches only what is new. Whoever unbinds forgets that, and may replay.
Neighbours: vhost.py calls, attachment.py says how far it went.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import trio

from headrace.controller.errors import Invalid
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PROTOCOL_MASK, Protocol, RecordBatch
from headrace.gateways.delivery.attachment import Attachment
from headrace.gateways.delivery.history import ENTRY_COUNT_MAX
from headrace.gateways.delivery.lane import spans_of
from headrace.gateways.delivery.ports import Source
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.relocation import copy_records
from headrace.gateways.delivery.routing import Exchange, ExchangeKind, Router

READ_BYTES = 1024 * 1024
# What came while the rest was copied: so little can be copied without a pause. A log that grows faster than it is
# copied is caught up with after so many rounds, however much it is.
LAST_COUNT_MAX = 4096
ROUNDS_MAX = 16

# Headers and copy keys (CC) in the properties of a record, as its protocol has them.
FieldsOf = Callable[[bytes], tuple[Mapping[str, object], Sequence[str]]]
# Where in a log to begin.
StartOf = Callable[[PartitionLog], int]


@dataclass(slots=True)
class _Piece:
    """Copies for one lane, one behind the other in the queue's log."""

    lane: int
    first: int
    end: int
    newest_us: int
    byte_count: int


class Past:
    """One binding's way through the log behind it."""

    def __init__(
        self,
        queue: Queue,
        exchange: Exchange,
        source: PartitionLog,
        target: PartitionLog,
        attachment: Attachment,
        start: int,
        *,
        fields_of: FieldsOf,
        now_us: int,
    ) -> None:
        if exchange.kind is ExchangeKind.CONSISTENT_HASH:
            raise Invalid(
                "x-from is not possible with an x-consistent-hash exchange: its bindings divide what is to come"
            )
        self.source = source
        self.target = target
        self._queue = queue
        self._exchange = exchange
        self._attachment = attachment
        self._start = self._position = start
        self._fields_of = fields_of
        self._now_us = now_us
        self._pieces: list[_Piece] = []
        self._first_copy = int(target.end)
        self._timed = False
        self._matches = self._matcher(attachment)
        self._others = [
            (one.ranges, self._matcher(one))
            for one in queue.attached
            if one is not attachment and one.stream == attachment.stream
        ]

    @property
    def pins(self) -> dict[Source, int]:
        """What retention must leave alone meanwhile."""
        return {self.source: self._position, self.target: self._first_copy}

    def _matcher(self, attachment: Attachment) -> Callable[[RecordBatch, int], bool]:
        exchange = self._exchange
        router: Router[str] = Router(lambda name: None, name_of=str)
        router.put_exchange(exchange.name, exchange.kind, arguments=exchange.arguments)
        router.bind_queue(exchange.name, "", attachment.key, attachment.arguments)
        asks_headers = exchange.kind is ExchangeKind.HEADERS

        def matches(batch: RecordBatch, index: int) -> bool:
            keys = [batch.keys[index].decode("utf-8", "surrogateescape")]
            headers: Mapping[str, object] = {}
            properties = batch.properties[index]
            is_amqp = batch.attributes.at(index) & PROTOCOL_MASK == Protocol.AMQP
            if is_amqp and (asks_headers or b"CC" in properties):
                headers, copies = self._fields_of(properties)
                keys += copies
            return bool(router.route(exchange.name, keys, headers, tags=batch.tags_at(index)).queues)

        return matches

    async def copy_most(self, committed: Callable[[PartitionLog], object]) -> None:
        """Come near the end of the log, a piece at a time; `committed` is told of the log that was written to."""
        for _round in range(ROUNDS_MAX):
            end = int(self.source.end)
            while self._position < end:
                self._copy(end)
                committed(self.target)
                await trio.lowlevel.checkpoint()
            if self.source.end - end <= LAST_COUNT_MAX:
                return

    def finish(self) -> None:
        """Copy the rest and give everything to the queue. The caller binds before anybody can publish again."""
        while self._position < self.source.end:
            self._copy(self.source.end)
        for piece in self._pieces:
            self._queue.attach(piece.lane, self.target, piece.first, piece.end, piece.newest_us, piece.byte_count)
        self._queue.timed = self._queue.timed or self._timed
        self._attachment.ranges.add(self._start, int(self.source.end))

    def _copy(self, end: int) -> None:
        position = self._attachment.ranges.first_missing(max(self._position, int(self.source.log_start)))
        if position >= end:
            self._position = end
            return
        for run in self.source.read(position, bytes_max=READ_BYTES, end=end):
            batch = run.batch
            base = int(batch.base_offset)
            for low, high in self._attachment.ranges.missing(base + run.first, base + run.last):
                self._copy_wanted(batch, low - base, high - base)
            self._position = min(int(batch.next_offset), end)

    def _copy_wanted(self, batch: RecordBatch, first: int, last: int) -> None:
        queue = self._queue
        routed = spans_of(batch, first, last, queue.view_id)
        wanted: dict[int, list[int]] = {}
        skip = iter((*routed, (last, last)))
        low, high = next(skip)
        for index in range(first, last):
            if index >= high:
                low, high = next(skip)
            if low <= index < high or not self._wants(batch, index):
                continue
            wanted.setdefault(queue.lane_at(batch, index), []).append(index)
        for lane, indices in wanted.items():
            for start, end in _ranges(indices):
                self._copy_range(lane, batch, start, end)

    def _wants(self, batch: RecordBatch, index: int) -> bool:
        due_us = self._queue.due_us(batch, index)
        if due_us is not None and due_us <= self._now_us:
            return False
        if not self._matches(batch, index):
            return False
        offset = batch.offset_at(index)
        return not any(offset in ranges and matches(batch, index) for ranges, matches in self._others)

    def _copy_range(self, lane: int, batch: RecordBatch, first: int, last: int) -> None:
        start, end = copy_records(self.target, self.source, batch, first, last, self._exchange.name.encode())
        newest_us = max(value for value, _low, _high in batch.timestamps.spans(first, last))
        byte_count = sum(map(len, batch.values[first:last]))
        pieces = self._pieces
        self._timed = self._timed or any(value for value, _low, _high in batch.expiries.spans(first, last))
        if pieces and pieces[-1].lane == lane and pieces[-1].end == start and end - pieces[-1].first <= ENTRY_COUNT_MAX:
            newest = pieces[-1]
            newest.end = end
            newest.newest_us = max(newest.newest_us, newest_us)
            newest.byte_count += byte_count
        else:
            pieces.append(_Piece(lane, start, end, newest_us, byte_count))


def _ranges(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Neighbours of a rising list, as (first, end)."""
    ranges: list[tuple[int, int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return ranges
