"""One filter's way through one lane: its records, wherever they stand between those of others. Machine.

A scan has a place: below it, every record in its order was tested, and is not wanted, or is gone. What came back since
it passed is `untested` again. So a backlog is gone through once for each filter, not once for each delivery, and what
nobody wants stays where it is and counts. The logs are read from where the scan is; what others have taken is left out.
Invariant: a ready record below `seq` and not in `untested` does not match. Neighbours: lane.py keeps the records,
queue.py has one scan for each filter of its consumers and lane.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol

from headrace.core_log.intervals import Intervals
from headrace.core_log.record import RecordBatch
from headrace.core_log.summary import Sieve
from headrace.gateways.delivery.lane import TAKE_BYTES, Extent, Lane, Stretch
from headrace.gateways.delivery.ports import Source

READ_BYTES: Final = 512 * 1024


class Wants(Sieve, Protocol):
    """What a scan looks for: an expression over tags, or more than that."""

    def spans(self, batch: RecordBatch, first: int, last: int, /) -> Sequence[tuple[int, int]]:
        """The index ranges of wanted records among first..last-1, in order."""


class Patience:
    """How much may be looked at in one turn, in bytes of batches; others wait meanwhile."""

    __slots__ = ("left",)

    def __init__(self, left: int) -> None:
        self.left = left


class _Piece:
    """Neighbours of one batch that are the lane's: records index..last-1, the first of them with sequence seq."""

    __slots__ = ("batch", "index", "last", "seq", "source")

    def __init__(self, source: Source, batch: RecordBatch, index: int, last: int, seq: int) -> None:
        self.source = source
        self.batch = batch
        self.index = index
        self.last = last
        self.seq = seq


class Scan:
    def __init__(self, lane: Lane, wants: Wants) -> None:
        self.wants = wants
        self.untested = Intervals()
        self._lane = lane
        self.seq = lane.ready_from
        for first, end in lane.returned():
            self.untested.add(first, end)
        # What was read and not tested yet, from `seq` on; valid while nothing moves.
        self._pieces: deque[_Piece] = deque()
        self._moves = lane.moves
        # Where reading goes on: the lane's next record in this log at this offset or behind it has sequence _read_seq.
        self._source: Source | None = None
        self._offset = self._read_seq = 0
        lane.scans.append(self)

    def close(self) -> None:
        self._lane.scans.remove(self)

    @property
    def is_done(self) -> bool:
        """Everything was tested."""
        return not self.untested.count and max(self.seq, self._lane.ready_from) >= self._lane.next_seq

    def judged(self, seq: int, count: int) -> int:
        """How many records from this sequence on are known not to be wanted."""
        first, end = next(self.untested.missing(seq, min(seq + count, self.seq)), (seq, seq))
        return end - seq if first == seq else 0

    def take(self, count_max: int, *, early: bool, patience: Patience) -> Stretch | None:
        """Hand out up to so many neighbours that are wanted, the first there are; None: there are none to be seen now,
        or no patience is left."""
        lane = self._lane
        while True:
            self.seq = max(self.seq, lane.ready_from)
            lane.scanned_below = max(lane.scanned_below, self.seq)
            came_back = next(iter(self.untested), None)
            if came_back is not None and came_back[0] <= self.seq:
                stretch = self._take_returned(came_back[0], came_back[1], count_max)
                if stretch is not None:
                    return stretch
                continue
            if self.seq >= lane.next_seq or patience.left <= 0:
                return None
            if not self._read(early, patience):
                return None
            stretch = self._take_next(lane.next_seq if came_back is None else came_back[0], count_max)
            if stretch is not None:
                return stretch

    # -- what came back -----------------------------------------------------------------------------------------

    def _take_returned(self, seq: int, end: int, count_max: int) -> Stretch | None:
        stretch = self._lane.returned_at(seq)
        if stretch is None:
            # Somebody has it, or it is settled.
            following = self._lane.returned_from(seq)
            self.untested.remove(seq, end if following is None else min(end, following))
            return None
        skip = seq - stretch.seq
        first = stretch.index + skip
        last = min(stretch.index + stretch.count, first + end - seq)
        spans = self.wants.spans(stretch.loaded(), first, last)
        if not spans:
            self.untested.remove(seq, seq + last - first)
            return None
        low, high = spans[0]
        count = min(high - low, count_max)
        self.untested.remove(seq, seq + low - first + count)
        return self._lane.claim_returned(stretch, skip + low - first, count)

    # -- what stands in its order -------------------------------------------------------------------------------

    def _take_next(self, end: int, count_max: int) -> Stretch | None:
        """Of the first piece that was read, the first records that are wanted; those before them are tested."""
        piece = self._pieces[0]
        if piece.seq < self.seq:
            skip = min(self.seq - piece.seq, piece.last - piece.index)
            piece.index += skip
            piece.seq += skip
        lane = self._lane
        piece_end = piece.seq + piece.last - piece.index
        for low, high in lane.ready_parts(piece.seq, min(piece_end, end)):
            index = piece.index + low - piece.seq
            spans = self.wants.spans(piece.batch, index, index + high - low)
            if not spans:
                continue
            first, last = spans[0]
            batch = piece.batch
            by_size = max(1, TAKE_BYTES * len(batch.values) // max(batch.byte_count, 1))
            count = min(last - first, count_max, by_size)
            seq = low + first - index
            taken = Stretch(lane, seq, count, piece.source, batch.base_offset + first, batch, first)
            self.seq = seq + count
            lane.scanned_below = max(lane.scanned_below, self.seq)
            if self.seq >= piece_end:
                self._pieces.popleft()
            lane.claim(taken)
            return taken
        self.seq = max(self.seq, min(piece_end, end))
        if self.seq >= piece_end:
            self._pieces.popleft()
        return None

    def _read(self, early: bool, patience: Patience) -> bool:
        """Have a piece that reaches beyond `seq`; False: nothing more may be seen, or patience is at its end."""
        lane, pieces = self._lane, self._pieces
        if self._moves != lane.moves:
            pieces.clear()
            self._moves, self._source = lane.moves, None
        while pieces and pieces[0].seq + pieces[0].last - pieces[0].index <= self.seq:
            pieces.popleft()
        while not pieces:
            extent = lane.extent_from(self.seq)
            if extent is None:
                self.seq = lane.next_seq
                return False
            self.seq = max(self.seq, extent.seq)
            self._enter(extent)
            source = extent.source
            visible = min(extent.end, source.early_end if early else source.high_watermark)
            if self._offset >= visible:
                if visible < extent.end:
                    lane.hidden_in = source
                    return False
                # Fewer were there than it was said to hold.
                self.seq = max(self.seq, extent.seq + extent.count)
                self._source = None
                if self.seq >= lane.next_seq:
                    return False
                continue
            if patience.left <= 0:
                return False
            self._read_on(extent, visible, patience)
            while pieces and pieces[0].seq + pieces[0].last - pieces[0].index <= self.seq:
                pieces.popleft()
        return True

    def _enter(self, extent: Extent) -> None:
        """Go on where reading ended, or begin with this extent."""
        source = extent.source
        known = self._source is source and max(extent.first, source.log_start) <= self._offset <= extent.end
        # At its first record it begins: the same log may be gone through again (rewind.py).
        if known and extent.seq < self._read_seq <= extent.seq + extent.count:
            return
        self._source, self._offset, self._read_seq = source, extent.first, extent.seq
        if extent.first < source.log_start:
            # What is left of an extent are the last of its records.
            start = min(source.log_start, extent.end)
            self._offset = start
            self._read_seq = extent.seq + extent.count - self._lane.count_left(extent, start)
            self.seq = max(self.seq, self._read_seq)

    def _read_on(self, extent: Extent, visible: int, patience: Patience) -> None:
        lane, source, wants = self._lane, extent.source, self.wants
        if extent.count == extent.end - extent.first:
            reached, is_candidate = source.pass_over(self._offset, wants, end=visible)
            if reached > self._offset:
                # It takes as long as to read so much.
                patience.left -= READ_BYTES
                self._read_seq += reached - self._offset
                self._offset = reached
                # Nothing below is wanted, and what came back there is known.
                self.seq = max(self.seq, self._read_seq)
            if not is_candidate:
                return
        for run in source.read(self._offset, bytes_max=READ_BYTES, end=visible):
            batch = run.batch
            patience.left -= batch.byte_count + 64 * (run.last - run.first)
            if batch.gap is not None:
                self._read_seq = extent.seq + extent.count - lane.count_left(extent, int(batch.next_offset))
                self._offset = min(int(batch.next_offset), extent.end)
                continue
            spans = ((run.first, run.last),) if extent.exact else lane.spans(batch, run.first, run.last)
            for first, last in spans:
                self._pieces.append(_Piece(source, batch, first, last, self._read_seq))
                self._read_seq += last - first
            self._offset = min(int(batch.base_offset) + run.last, extent.end)
            if run.last == batch.count and batch.next_offset <= visible:
                self._offset = int(batch.next_offset)
