"""Rewinding a work queue: what it has received from a place on becomes ready once more, in its old order. Driver.

Nothing is copied. The queue's history (history.py) knows where its records lie; its lanes are told of them again, under
new numbers, and what was ready is settled in the same step, since it is among them. So a rewound queue has each record
once, but for those that consumers hold at that moment: they come again. Records that retention took meanwhile are left
out, and so is what has expired, where that would be dead-lettered once more. Numbers in the history stay as they are:
what readers know as `x-stream-offset` means the same afterwards, and a queue may be rewound again. All of it is one
entry of the journal: after a crash it has happened, or it has not.
Neighbours: history.py has the places, lane.py the order, broker.py the journal.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import trio

from headrace.core_log.errors import Refused
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.history import Piece
from headrace.gateways.delivery.lane import Lane, spans_of
from headrace.gateways.delivery.ports import Source
from headrace.gateways.delivery.queue import Queue


@dataclass(frozen=True, slots=True)
class _Part:
    """So many records of one lane lie in first..end-1 of a log."""

    lane: Lane
    source: Source
    count: int
    first: int
    end: int
    exact: bool

    def goes_on_with(self, lane: Lane, source: Source, offset: int, exact: bool) -> bool:
        return self.lane is lane and self.source is source and self.end == offset and self.exact is exact


class Rewind:
    """One rewind of one queue, to the record with this number. `pins` keeps retention away from it meanwhile."""

    def __init__(self, broker: Broker, queue: Queue, seq: int) -> None:
        if queue.settings.stream:
            raise Refused(
                f"queue '{queue.name}' is a stream: nothing is ever taken out of it, so read it from any offset"
            )
        self._broker = broker
        self._queue = queue
        self._next = max(seq, queue.history.first_seq)
        self._parts: list[_Part] = []
        self._now_us = broker.env.clock.wall_us()
        # What has expired would leave at once, and be dead-lettered once more.
        settings = queue.settings
        self._leaves_out = settings.message_ttl_ms is not None or settings.dead_letter_exchange is not None

    @property
    def pins(self) -> Mapping[Source, int]:
        lowest: dict[Source, int] = {}
        for part in self._parts:
            lowest[part.source] = min(part.first, lowest.get(part.source, part.first))
        return lowest

    async def run(self) -> int:
        """Returns how many are ready now; it is safe when this returns."""
        queue, history = self._queue, self._queue.history
        with self._broker.holding(self):
            # While everybody works on: with several lanes, or times, every record has to be looked at.
            while self._next < history.next_seq:
                self._take(next(history.pieces(self._next)))
                if len(queue.lanes) > 1 or self._leaves_out:
                    await trio.lowlevel.checkpoint()
            if queue.deleted:
                raise Refused(f"queue '{queue.name}' was deleted meanwhile")
            self._apply()
            await self._broker.write_journal()
        return queue.ready_count

    def _take(self, piece: Piece) -> None:
        """Note where the records of a piece lie, from the wanted one on."""
        wanted = self._next
        self._next = piece.seq + piece.count
        source = piece.source
        if source is None or piece.end <= source.log_start:
            return
        first = max(piece.first, int(source.log_start))
        skipped = max(wanted - piece.seq, 0)
        if len(self._queue.lanes) == 1 and not self._leaves_out:
            (lane,) = self._queue.lanes
            if piece.exact:
                first = max(first, piece.first + skipped)
                self._parts.append(_Part(lane, source, piece.end - first, first, piece.end, True))
                return
            if not skipped and first == piece.first:
                self._parts.append(_Part(lane, source, piece.count, first, piece.end, False))
                return
        # Numbers are certain from the end of a piece: what retention took was at its beginning.
        found = list(self._places(piece, source, first))[skipped - piece.count :]
        # Where some are left out, an extent must be of its very records.
        exact = piece.exact or self._leaves_out
        for its_lane, offset in found:
            if its_lane is None:
                continue
            newest = self._parts[-1] if self._parts else None
            if newest is not None and newest.goes_on_with(its_lane, source, offset, exact):
                self._parts[-1] = _Part(its_lane, source, newest.count + 1, newest.first, offset + 1, exact)
            else:
                self._parts.append(_Part(its_lane, source, 1, offset, offset + 1, exact))

    def _places(self, piece: Piece, source: Source, offset: int) -> Iterator[tuple[Lane | None, int]]:
        """(lane, offset) of every record, from an offset on; no lane for one whose time is over."""
        queue = self._queue
        while offset < piece.end:
            for run in source.read(offset, end=piece.end):
                batch = run.batch
                spans = [(run.first, run.last)]
                if not piece.exact:
                    spans = list(spans_of(batch, run.first, run.last, queue.view_id))
                for index in (index for low, high in spans for index in range(low, high)):
                    due_us = queue.due_us(batch, index) if self._leaves_out else None
                    is_over = due_us is not None and due_us <= self._now_us
                    yield None if is_over else queue.lanes[queue.lane_at(batch, index)], int(batch.offset_at(index))
                offset = int(batch.next_offset)

    def _apply(self) -> None:
        """In one step: nothing arrives or is handed out in between."""
        queue = self._queue
        queue.purge()
        for part in self._parts:
            lane = part.lane
            applied = max(lane.applied.get(part.source, 0), queue.history.applied.get(part.source, 0))
            lane.extend(part.source, part.count, part.first, part.end, exact=part.exact)
            # It has been told of what came later, too.
            lane.applied[part.source] = max(applied, lane.applied[part.source])
        for lane in queue.lanes:
            # They were handed out before, or may have been.
            lane.delivered_below = lane.next_seq
        # Some may have a time of their own.
        queue.timed = True
        queue.count_bytes()
        self._broker.note_change(queue)
        self._broker.wake(queue)
        self._broker.on_ready()
