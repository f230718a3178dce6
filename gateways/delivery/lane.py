"""One ordered sub-sequence of a view: what is ready, what was handed out, what is settled. Machine.

A lane numbers the records routed to it 0, 1, 2... (K2). Three places hold what is not settled yet:

    backlog   extents: so many records in this range of that log. No memory per record; read again when needed.
    ready     a window of stretches that point into batches in memory, next to be handed out.
    returned  stretches that came back (requeue, lost consumer), each at its place in the order.

A stretch is a few neighbours of one batch: sequences seq..seq+count-1 at offsets offset..offset+count-1. Arrivals
go to the window while it has room and nothing is in the backlog, else they only lengthen the last extent, so memory
is bounded for any backlog and counts stay exact.
Invariant: floor <= every unsettled sequence < next_seq; ready_count + unacked_count + settled + floor = next_seq.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from headrace.core_log.intervals import Intervals
from headrace.core_log.record import RecordBatch, RouteReference
from headrace.gateways.delivery.ports import Source

WINDOW_BYTES_MAX = 4 * 1024 * 1024
WINDOW_COUNT_MAX = 20_000
REFILL_BYTES = 512 * 1024
TAKE_BYTES = 256 * 1024
# Beyond this many extents, sources are no longer kept interleaved as they arrived (order per source stays).
EXTENTS_MAX = 10_000
ANCHORS_MAX = 4096

# The index ranges of a batch, within first..last-1, that belong to a lane.
SpanFinder = Callable[[RecordBatch, int, int], Iterable[tuple[int, int]]]
_sequence = attrgetter("seq")


class Stretch:
    """Neighbouring records of one batch. `batch` is None while nobody needs the bytes."""

    __slots__ = ("batch", "count", "deliveries", "index", "lane", "offset", "seq", "source")

    def __init__(
        self,
        lane: "Lane",
        seq: int,
        count: int,
        source: Source,
        offset: int,
        batch: RecordBatch | None,
        index: int,
        deliveries: int = 0,
    ) -> None:
        self.lane = lane
        self.seq = seq
        self.count = count
        self.source = source
        self.offset = offset
        self.batch = batch
        self.index = index
        # How often these were handed out before.
        self.deliveries = deliveries

    def split(self, count: int) -> "Stretch":
        """Cut the first `count` records off and return them as a stretch of their own."""
        head = Stretch(self.lane, self.seq, count, self.source, self.offset, self.batch, self.index, self.deliveries)
        self.seq += count
        self.offset += count
        self.index += count
        self.count -= count
        return head

    def loaded(self) -> RecordBatch:
        """The batch that holds the records; read again if it was let go."""
        if self.batch is None:
            runs = self.source.read(self.offset, bytes_max=1, end=self.offset + self.count)
            self.batch = runs[0].batch
            self.index = self.batch.index_of(self.offset)
        return self.batch

    def __repr__(self) -> str:
        return f"Stretch(seq={self.seq}, count={self.count}, offset={self.offset}, deliveries={self.deliveries})"


class Extent:
    """`count` of this lane's records lie in first..end-1 of a log; the first of them has sequence `seq`."""

    __slots__ = ("count", "end", "first", "seq", "source")

    def __init__(self, seq: int, count: int, source: Source, first: int, end: int) -> None:
        self.seq = seq
        self.count = count
        self.source = source
        self.first = first
        self.end = end


class _Anchor:
    """Sequences seq..end-1 stand at offsets offset.. of a log, without a gap."""

    __slots__ = ("end", "offset", "seq", "source")

    def __init__(self, seq: int, source: Source, offset: int, end: int) -> None:
        self.seq = seq
        self.source = source
        self.offset = offset
        self.end = end


class Lane:
    def __init__(self, spans: SpanFinder) -> None:
        self._spans = spans
        self.next_seq = 0
        self.floor = 0
        self.ready_count = 0
        self.unacked_count = 0
        # Sequences below this were perhaps handed out before the last start; they are flagged redelivered.
        self.delivered_below = 0
        # The log whose commit the head waits for, when `head` found it not yet visible.
        self.hidden_in: Source | None = None
        self.settled = Intervals()
        self._ready: deque[Stretch] = deque()
        self._returned: list[Stretch] = []
        self._backlog: deque[Extent] = deque()
        # Everything that arrived from the floor on, and a few exact places in it (seq, source, offset): what a
        # restart needs to find the unsettled records again.
        self._arrivals: deque[Extent] = deque()
        self._anchors: list[_Anchor] = []
        # For each log, the offset up to which this lane has taken its records in.
        self.applied: dict[Source, int] = {}
        self._window_bytes = 0
        self._window_count = 0

    # -- arrivals -----------------------------------------------------------------------------------------------

    def arrive(self, source: Source, batch: RecordBatch, first: int, last: int) -> None:
        """Records first..last-1 of a batch have been routed here."""
        count = last - first
        offset = batch.base_offset + first
        seq = self.next_seq
        self.next_seq = seq + count
        self.ready_count += count
        _append(self._arrivals, seq, count, source, offset, offset + count)
        self.applied[source] = offset + count
        if self._backlog or self._window_bytes > WINDOW_BYTES_MAX or self._window_count > WINDOW_COUNT_MAX:
            self._extend_backlog(seq, count, source, offset, offset + count)
            return
        self._window_bytes += batch.byte_count * count // len(batch.values)
        self._window_count += count
        ready = self._ready
        if ready:
            newest = ready[-1]
            if newest.batch is batch and newest.index + newest.count == first:
                newest.count += count
                return
        ready.append(Stretch(self, seq, count, source, offset, batch, first))

    def extend(self, source: Source, count: int, first: int, end: int) -> None:
        """`count` records in this range of a log have been found to be this lane's (recovery, x-from)."""
        _append(self._arrivals, self.next_seq, count, source, first, end)
        self.applied[source] = end
        self._extend_backlog(self.next_seq, count, source, first, end)
        self.next_seq += count
        self.ready_count += count

    def _extend_backlog(self, seq: int, count: int, source: Source, first: int, end: int) -> None:
        _append(self._backlog, seq, count, source, first, end)
        if len(self._backlog) > EXTENTS_MAX:
            self._fold_backlog()

    def _fold_backlog(self) -> None:
        """Put each source's extents together behind the first one; sequences are dealt out anew in that order."""
        folded: dict[int, Extent] = {}
        start = seq = self._backlog[0].seq
        for extent in self._backlog:
            known = folded.get(id(extent.source))
            if known is None:
                folded[id(extent.source)] = extent
            else:
                known.count += extent.count
                known.end = extent.end
        for extent in folded.values():
            extent.seq = seq
            seq += extent.count
        self._backlog = deque(folded.values())
        while self._arrivals and self._arrivals[-1].seq >= start:
            self._arrivals.pop()
        if self._arrivals:
            # The newest of what is left may reach into the backlog.
            newest = self._arrivals[-1]
            newest.count = min(newest.count, start - newest.seq)
        for extent in folded.values():
            self._arrivals.append(Extent(extent.seq, extent.count, extent.source, extent.first, extent.end))

    # -- handing out --------------------------------------------------------------------------------------------

    def head(self, *, early: bool = True) -> Stretch | None:
        """The next stretch to be handed out, loaded, or None when nothing may be seen."""
        while True:
            if not self._ready and self._backlog:
                self._refill()
            stretch = self._next()
            if stretch is None:
                return None
            visible = stretch.source.early_end if early else stretch.source.high_watermark
            if stretch.offset >= visible:
                self.hidden_in = stretch.source
                return None
            return stretch

    def _next(self) -> Stretch | None:
        ready, returned = self._ready, self._returned
        if returned and (not ready or returned[0].seq < ready[0].seq):
            return returned[0]
        return ready[0] if ready else None

    def take(self, count_max: int, *, early: bool = True) -> Stretch | None:
        """Hand out up to count_max neighbours from the head (about TAKE_BYTES); they are unacked from now on."""
        stretch = self.head(early=early)
        if stretch is None:
            return None
        visible = stretch.source.early_end if early else stretch.source.high_watermark
        batch = stretch.loaded()
        by_size = max(1, TAKE_BYTES * len(batch.values) // max(batch.byte_count, 1))
        count = min(stretch.count, count_max, by_size, visible - stretch.offset)
        taken = self._remove_head(stretch, count)
        self._note_anchor(taken)
        self.ready_count -= taken.count
        self.unacked_count += taken.count
        return taken

    def _remove_head(self, stretch: Stretch, count: int) -> Stretch:
        returned = self._returned
        from_returned = bool(returned) and returned[0] is stretch
        if count < stretch.count:
            taken = stretch.split(count)
        else:
            taken = stretch
            if from_returned:
                del returned[0]
            else:
                self._ready.popleft()
        if not from_returned:
            self._window_count -= taken.count
            batch = taken.batch
            if not self._ready:
                self._window_bytes = 0
            elif batch is not None:
                self._window_bytes -= batch.byte_count * taken.count // len(batch.values)
        return taken

    def _note_anchor(self, taken: Stretch) -> None:
        anchors = self._anchors
        end = taken.seq + taken.count
        if anchors:
            newest = anchors[-1]
            if newest.end > taken.seq:
                return
            if newest.source is taken.source and taken.seq - newest.seq == taken.offset - newest.offset:
                # Nothing of other views lies between: one place says it all.
                newest.end = end
                return
        anchors.append(_Anchor(taken.seq, taken.source, taken.offset, end))
        if len(anchors) > ANCHORS_MAX:
            del anchors[1:-1:2]

    def _refill(self) -> None:
        """Read the next records of the backlog into the window; what is settled already is passed over."""
        while self._backlog and not self._ready:
            extent = self._backlog[0]
            runs = extent.source.read(
                max(extent.first, extent.source.log_start), bytes_max=REFILL_BYTES, end=extent.end
            )
            if not runs:
                # Retention took the rest: these records are gone, and counted as settled.
                self._give_up(extent)
                continue
            for run in runs:
                for first, last in self._spans(run.batch, run.first, run.last):
                    self._admit(extent, run.batch, first, last)
                extent.first = min(run.batch.next_offset, extent.end)
            if extent.first >= extent.end:
                if extent.count:
                    self._give_up(extent)
                else:
                    self._backlog.popleft()

    def _admit(self, extent: Extent, batch: RecordBatch, first: int, last: int) -> None:
        last = min(last, first + extent.count)
        seq = extent.seq
        extent.seq += last - first
        extent.count -= last - first
        for low, high in self.settled.missing(max(seq, self.floor), seq + last - first):
            index = first + low - seq
            count = high - low
            self._ready.append(Stretch(self, low, count, extent.source, batch.base_offset + index, batch, index))
            self._window_bytes += batch.byte_count * count // len(batch.values)
            self._window_count += count

    def _give_up(self, extent: Extent) -> None:
        end = extent.seq + extent.count
        missing = sum(high - low for low, high in self.settled.missing(max(extent.seq, self.floor), end))
        self.ready_count -= missing
        self._mark_settled(extent.seq, extent.seq + extent.count)
        self._backlog.popleft()

    # -- settling -----------------------------------------------------------------------------------------------

    def settle(self, seq: int, count: int) -> None:
        """Handed-out records are done with for good."""
        self.unacked_count -= count
        self._mark_settled(seq, seq + count)

    def _mark_settled(self, first: int, end: int) -> None:
        if first == self.floor and not self.settled.count:
            self.floor = end
            return
        self.settled.add(first, end)
        if first <= self.floor:
            self.floor = self.settled.first_missing(self.floor)
            self.settled.cut_below(self.floor)

    def give_back(self, stretch: Stretch) -> None:
        """Handed-out records are ready again, at their old place."""
        self.unacked_count -= stretch.count
        self.ready_count += stretch.count
        stretch.deliveries += 1
        stretch.batch = None
        place = bisect_left(self._returned, stretch.seq, key=_sequence)
        self._returned.insert(place, stretch)

    def drop_head(self, count: int) -> Iterator[Stretch]:
        """Take up to `count` ready records out of the lane; the caller settles or transfers each stretch."""
        while count > 0:
            stretch = self.take(count)
            if stretch is None:
                return
            count -= stretch.count
            yield stretch

    def purge(self) -> int:
        """Settle everything that is ready; returns how many."""
        count = self.ready_count
        for stretch in (*self._returned, *self._ready):
            self._mark_settled(stretch.seq, stretch.seq + stretch.count)
        for extent in self._backlog:
            self._mark_settled(extent.seq, extent.seq + extent.count)
        self._returned.clear()
        self._ready.clear()
        self._backlog.clear()
        self._window_bytes = self._window_count = 0
        self.ready_count = 0
        return count

    # -- what is kept -------------------------------------------------------------------------------------------

    def arrivals(self) -> list[tuple[int, int, Source, int, int]]:
        """(seq, count, source, first, end) of everything from the floor on, for the journal."""
        floor = self.floor
        arrivals, anchors = self._arrivals, self._anchors
        while arrivals and arrivals[0].seq + arrivals[0].count <= floor:
            arrivals.popleft()
        keep = bisect_right(anchors, floor, key=_sequence) - 1
        if keep > 0:
            del anchors[:keep]
        if arrivals and anchors:
            head, anchor = arrivals[0], anchors[0]
            seq = min(floor, anchor.end)
            offset = anchor.offset + seq - anchor.seq
            if anchor.source is head.source and head.seq < seq and head.first < offset <= head.end:
                head.count -= seq - head.seq
                head.seq, head.first = seq, offset
        return [(one.seq, one.count, one.source, one.first, one.end) for one in arrivals]

    def spans(self, batch: RecordBatch, first: int, last: int) -> Iterable[tuple[int, int]]:
        """The index ranges of a batch that belong here."""
        return self._spans(batch, first, last)

    def restore(
        self, next_seq: int, floor: int, settled: Iterable[tuple[int, int]], arrivals: Iterable[Extent]
    ) -> None:
        """Take up a journalled state: everything unsettled is ready, and in the backlog."""
        self.next_seq = next_seq
        self.floor = floor
        for first, end in settled:
            self.settled.add(first, end)
        for extent in arrivals:
            self._arrivals.append(extent)
            self._backlog.append(Extent(extent.seq, extent.count, extent.source, extent.first, extent.end))
        self.ready_count = next_seq - floor - self.settled.count

    def lowest_offsets(self) -> dict[Source, int]:
        """For each log, the lowest offset that this lane may still read."""
        lowest: dict[Source, int] = {}
        for _seq, _count, source, first, _end in self.arrivals():
            lowest[source] = min(first, lowest.get(source, first))
        return lowest


def _append(extents: deque[Extent], seq: int, count: int, source: Source, first: int, end: int) -> None:
    """Lengthen the newest extent when it is of the same log, else begin another."""
    if extents:
        newest = extents[-1]
        if newest.source is source and newest.end <= first:
            newest.count += count
            newest.end = end
            return
    extents.append(Extent(seq, count, source, first, end))


def spans_of(batch: RecordBatch, first: int, last: int, view_id: int) -> Iterator[tuple[int, int]]:
    """The index ranges of a batch, within first..last-1, that are routed to a view."""
    if first >= last:
        return
    wanted = {
        place for place, ids in enumerate(batch.route_sets) if not isinstance(ids, RouteReference) and view_id in ids
    }
    if not wanted:
        return
    start: int | None = None
    end = first
    for place, low, high in batch.routes.spans(first, last):
        if place in wanted:
            if start is None:
                start = low
            end = high
        elif start is not None:
            yield start, end
            start = None
    if start is not None:
        yield start, end
