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
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING

from headrace.core_log.intervals import Intervals
from headrace.core_log.record import RecordBatch, RouteReference
from headrace.gateways.delivery.ports import Source

if TYPE_CHECKING:
    from headrace.filtering.expression import Expression
    from headrace.gateways.delivery.scan import Scan

WINDOW_BYTES_MAX = 4 * 1024 * 1024
WINDOW_COUNT_MAX = 20_000
REFILL_BYTES = 512 * 1024
# What a lane has at least, however many there are.
WINDOW_BYTES_MIN = 64 * 1024
REFILL_BYTES_MIN = 16 * 1024
TAKE_BYTES = 256 * 1024
# Beyond this many extents, sources are no longer kept interleaved as they arrived (order per source stays).
EXTENTS_MAX = 10_000
# A stretch of a log without any record of the lane that is longer than this is not read again to be passed over.
EXTENT_GAP_MAX = 10_000
ANCHORS_MAX = 4096

# The index ranges of a batch, within first..last-1, that belong to a lane.
SpanFinder = Callable[[RecordBatch, int, int], Iterable[tuple[int, int]]]
_sequence = attrgetter("seq")


class Stretch:
    """Neighbouring records of one batch. `batch` is None while nobody needs the bytes."""

    __slots__ = ("batch", "count", "deliveries", "failures", "index", "lane", "offset", "seq", "source")

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
        failures: int = 0,
    ) -> None:
        self.lane = lane
        self.seq = seq
        self.count = count
        self.source = source
        self.offset = offset
        self.batch = batch
        self.index = index
        # How often these were handed out before, and how often of that in vain (delivery limit).
        self.deliveries = deliveries
        self.failures = failures

    def split(self, count: int) -> "Stretch":
        """Cut the first `count` records off and return them as a stretch of their own."""
        head = Stretch(
            self.lane,
            self.seq,
            count,
            self.source,
            self.offset,
            self.batch,
            self.index,
            self.deliveries,
            self.failures,
        )
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
    """`count` of this lane's records lie in first..end-1 of a log; the first of them has sequence `seq`.

    Which ones they are, their routes say; in an `exact` extent it is every record, whatever its routes (copies).
    """

    __slots__ = ("count", "end", "exact", "first", "seq", "source")

    def __init__(self, seq: int, count: int, source: Source, first: int, end: int, *, exact: bool = False) -> None:
        assert not exact or count == end - first
        self.exact = exact
        self.seq = seq
        self.count = count
        self.source = source
        self.first = first
        self.end = end

    def copy(self) -> "Extent":
        return Extent(self.seq, self.count, self.source, self.first, self.end, exact=self.exact)


class _Anchor:
    """Sequences seq..end-1 stand at offsets offset.. of a log, without a gap."""

    __slots__ = ("end", "offset", "seq", "source")

    def __init__(self, seq: int, source: Source, offset: int, end: int) -> None:
        self.seq = seq
        self.source = source
        self.offset = offset
        self.end = end


class _Window:
    """Stretches in memory, and what they weigh: a batch is held whole, for one record of it as for all."""

    __slots__ = ("_held", "_newest", "byte_count", "count", "stretches")

    def __init__(self) -> None:
        self.stretches: deque[Stretch] = deque()
        self.count = 0
        self.byte_count = 0
        # For each batch, how many stretches point into it and how many bytes it was counted with.
        self._held: dict[RecordBatch, list[int]] = {}
        # A log's newest batch may be open and grow; it is weighed again when the next one begins.
        self._newest: dict[Source, RecordBatch] = {}

    def append(self, stretch: Stretch, batch: RecordBatch) -> None:
        self.stretches.append(stretch)
        self.count += stretch.count
        held = self._held.get(batch)
        if held is not None:
            held[0] += 1
            return
        weight = batch.byte_count
        source = stretch.source
        if source in self._newest:
            grown = self._newest[source]
            before = self._held.get(grown)
            if before is not None:
                self.byte_count += grown.byte_count - before[1]
                before[1] = grown.byte_count
        self._newest[source] = batch
        self._held[batch] = [1, weight]
        self.byte_count += weight

    def lengthen(self, count: int) -> None:
        """The newest stretch got some more records."""
        self.stretches[-1].count += count
        self.count += count

    def take(self, count: int) -> Stretch:
        """The first records, at most as many as the first stretch has."""
        first = self.stretches[0]
        if count < first.count:
            self.count -= count
            return first.split(count)
        self.stretches.popleft()
        if not self.stretches:
            self.clear()
            return first
        self.count -= count
        batch = first.batch
        assert batch is not None
        held = self._held[batch]
        held[0] -= 1
        if not held[0]:
            self.byte_count -= self._held.pop(batch)[1]
        return first

    def cut(self, count: int) -> None:
        """Let the first records be a stretch of their own."""
        first = self.stretches[0]
        assert first.batch is not None
        self.stretches.appendleft(first.split(count))
        self._held[first.batch][0] += 1

    def clear(self) -> None:
        self.stretches.clear()
        self._held.clear()
        self._newest.clear()
        self.count = self.byte_count = 0


class Lane:
    def __init__(self, spans: SpanFinder, *, place: int = 0, lane_count: int = 1) -> None:
        """The `place`-th of the lanes that share a view's memory."""
        self._spans = spans
        self.place = place
        self._window_bytes_max = max(WINDOW_BYTES_MAX // lane_count, min(WINDOW_BYTES_MIN, WINDOW_BYTES_MAX))
        self._refill_bytes = max(REFILL_BYTES // lane_count, min(REFILL_BYTES_MIN, REFILL_BYTES))
        self.next_seq = 0
        self.floor = 0
        self.ready_count = 0
        self.unacked_count = 0
        # Sequences below this were perhaps handed out before the last start; they are flagged redelivered.
        self.delivered_below = 0
        # Sequences below this were offered to consumers, or came so long ago that their time may be over.
        self.offered_below = 0
        # The log whose commit the head waits for, when `head` found it not yet visible.
        self.hidden_in: Source | None = None
        self.settled = Intervals()
        # What retention or a repair took before it was handed out.
        self.lost_count = 0
        self._window = _Window()
        self._ready = self._window.stretches
        self._returned: list[Stretch] = []
        self._backlog: deque[Extent] = deque()
        # Everything that arrived from the floor on, and a few exact places in it (seq, source, offset): what a
        # restart needs to find the unsettled records again.
        self._arrivals: deque[Extent] = deque()
        self._anchors: list[_Anchor] = []
        # For each log, the offset up to which this lane has taken its records in.
        self.applied: dict[Source, int] = {}
        # Sequences below this came from the journal, or were copied or are being copied (release.py). Their extents are
        # never lengthened nor folded: part of them may be settled, or not have outlived a crash, so what comes later
        # must not be counted among them.
        self._fixed_below = 0
        # Of what came from the journal, those that were leaving for another log: the backlog passes over them.
        self._withdrawn = Intervals()
        # By how often, which sequences were handed out in vain, where that counts: a restart must not begin anew.
        self._failed: dict[int, Intervals] = {}
        # Some records lie elsewhere than when they were handed out.
        self._has_moved = False
        self._backlog_fold_at = self._arrivals_trim_at = EXTENTS_MAX
        # Filters that look for their records here (scan.py); sequences below this were looked at by one of them.
        self.scans: list[Scan] = []
        self.scanned_below = 0
        # How often places have changed other than by arrivals.
        self.moves = 0
        # Batches without any record that this filter wants are passed over unread: for lanes of one reader.
        self.sieve: Expression | None = None
        # Set when there is more to be passed over than was in one go.
        self.is_passing = False

    # -- arrivals -----------------------------------------------------------------------------------------------

    def arrive(self, source: Source, batch: RecordBatch, first: int, last: int) -> None:
        """Records first..last-1 of a batch have been routed here."""
        count = last - first
        offset = batch.base_offset + first
        seq = self.next_seq
        self.next_seq = seq + count
        self.ready_count += count
        self._note_arrival(seq, count, source, offset, offset + count)
        window = self._window
        if self._backlog or window.count > WINDOW_COUNT_MAX or window.byte_count > self._window_bytes_max:
            self._extend_backlog(seq, count, source, offset, offset + count)
            return
        ready = self._ready
        if ready:
            newest = ready[-1]
            if newest.batch is batch and newest.index + newest.count == first:
                window.lengthen(count)
                return
        window.append(Stretch(self, seq, count, source, offset, batch, first), batch)

    def extend(self, source: Source, count: int, first: int, end: int, *, exact: bool = False) -> None:
        """`count` records in this range of a log have been found to be this lane's (recovery), or are copies for it."""
        seq = self.next_seq
        self.next_seq = self.offered_below = seq + count
        self.ready_count += count
        self._note_arrival(seq, count, source, first, end, exact)
        self._extend_backlog(seq, count, source, first, end, exact)

    def skip(self, count: int) -> None:
        """The next numbers have no record that could be read."""
        seq = self.next_seq
        self.next_seq = seq + count
        self._mark_settled(seq, seq + count)

    def _note_arrival(self, seq: int, count: int, source: Source, first: int, end: int, exact: bool = False) -> None:
        # Copies are told of once they are safe; others may have arrived behind them meanwhile.
        self.applied[source] = max(end, self.applied.get(source, 0)) if exact else end
        arrivals = self._arrivals
        if self._lengthen(arrivals, seq, count, source, first, end, exact):
            return
        arrivals.append(Extent(seq, count, source, first, end, exact=exact))
        if len(arrivals) > self._arrivals_trim_at:
            # Logs that alternate: what is settled need not be found again, be it below the floor or above.
            missing = self.settled.missing
            self._arrivals = deque(
                one for one in arrivals if any(missing(max(one.seq, self.floor), one.seq + one.count))
            )
            self._arrivals_trim_at = len(self._arrivals) + EXTENTS_MAX

    def _lengthen(
        self, extents: deque[Extent], seq: int, count: int, source: Source, first: int, end: int, exact: bool
    ) -> bool:
        """Let the newest extent take these in, if they follow it in the same log and not too far away."""
        if not extents:
            return False
        newest = extents[-1]
        if newest.source is not source or newest.seq < self._fixed_below or newest.seq + newest.count != seq:
            return False
        if newest.exact is not exact or not 0 <= first - newest.end <= (0 if exact else EXTENT_GAP_MAX):
            return False
        newest.count += count
        newest.end = end
        return True

    def _extend_backlog(self, seq: int, count: int, source: Source, first: int, end: int, exact: bool = False) -> None:
        backlog = self._backlog
        if self._lengthen(backlog, seq, count, source, first, end, exact):
            return
        backlog.append(Extent(seq, count, source, first, end, exact=exact))
        if len(backlog) > self._backlog_fold_at:
            self._fold_backlog()
            self._backlog_fold_at = len(self._backlog) + EXTENTS_MAX

    def _fold_backlog(self) -> None:
        """Put each source's extents together behind the first one; sequences are dealt out anew in that order."""
        folded: dict[tuple[Source, int], Extent] = {}
        # What lies between exact extents is not this lane's, and what came behind one stays behind it.
        part: dict[Source, int] = {}
        kept: deque[Extent] = deque()
        for extent in self._backlog:
            # These have their places in the order already.
            if extent.seq < max(self._fixed_below, self.scanned_below):
                kept.append(extent)
                continue
            source = extent.source
            if extent.exact:
                part[source] = part.get(source, 0) + 1
            known = folded.setdefault((source, part.get(source, 0)), extent)
            if extent.exact:
                part[source] += 1
            if known is not extent:
                known.count += extent.count
                known.end = extent.end
        if not folded:
            return
        self.moves += 1
        first = next(iter(folded.values()))
        start = seq = first.seq
        for extent in folded.values():
            extent.seq = seq
            seq += extent.count
        self._backlog = kept + deque(folded.values())
        arrivals = self._arrivals
        while arrivals and arrivals[-1].seq >= start:
            arrivals.pop()
        if arrivals:
            # The newest of what is left may reach into what was folded; then that begins with its next record.
            newest = arrivals[-1]
            if newest.seq + newest.count > start:
                newest.count = start - newest.seq
                newest.end = first.first
        arrivals.extend(one.copy() for one in folded.values())

    # -- handing out --------------------------------------------------------------------------------------------

    def head(self, *, early: bool = True) -> Stretch | None:
        """The next stretch to be handed out, loaded, or None when nothing may be seen."""
        stretch = self._first()
        if stretch is not None:
            source = stretch.source
            if stretch.offset >= (source.early_end if early else source.high_watermark):
                self.hidden_in = source
                return None
        return stretch

    def _first(self) -> Stretch | None:
        """The first of all that is ready, loaded, visible or not."""
        while True:
            if self._withdrawn.count:
                self._pass_withdrawn()
            if not self._ready and self._backlog:
                self._refill()
            ready, returned = self._ready, self._returned
            if not returned:
                return ready[0] if ready else None
            if ready and ready[0].seq < returned[0].seq:
                return ready[0]
            if returned[0].batch is not None or self._reload():
                return returned[0]

    def _reload(self) -> bool:
        """Read the first of what came back again; False if its log has let go of it."""
        returned = self._returned
        first = returned[0]
        lost = min(first.source.log_start - first.offset, first.count)
        if lost > 0:
            gone = first.split(lost)
            if not first.count:
                del returned[0]
            self.ready_count -= lost
            self.lost_count += lost
            self._mark_settled(gone.seq, gone.seq + lost)
            return False
        batch = first.loaded()
        inside = batch.count - first.index
        if inside < first.count:
            # Copies of neighbours may lie in two batches.
            returned.insert(0, first.split(inside))
            first.batch = None
        # Neighbours that came back one by one share what was read.
        for other in islice(returned, 1, None):
            if other.source is not first.source or other.offset < batch.base_offset:
                break
            if other.offset + other.count > batch.next_offset:
                break
            other.batch, other.index = batch, batch.index_of(other.offset)
        return True

    def take(self, count_max: int, *, early: bool = True) -> Stretch | None:
        """Hand out up to count_max neighbours from the head (about TAKE_BYTES); they are unacked from now on."""
        stretch = self._first()
        if stretch is None:
            return None
        source = stretch.source
        visible = (source.early_end if early else source.high_watermark) - stretch.offset
        if visible <= 0:
            self.hidden_in = source
            return None
        return self._hand_out(stretch, min(count_max, visible))

    def _hand_out(self, stretch: Stretch, count_max: int) -> Stretch:
        batch = stretch.loaded()
        by_size = max(1, TAKE_BYTES * len(batch.values) // max(batch.byte_count, 1))
        count = min(stretch.count, count_max, by_size)
        returned = self._returned
        if returned and returned[0] is stretch:
            taken = stretch.split(count) if count < stretch.count else returned.pop(0)
        else:
            taken = self._window.take(count)
        self._note_anchor(taken)
        self.ready_count -= count
        self.unacked_count += count
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
            start = extent.source.log_start
            if extent.first < start:
                self._skip_lost(extent, start)
            if not extent.count:
                self._backlog.popleft()
                continue
            if self.sieve is not None and self._pass_over(extent, self.sieve):
                self.is_passing = True
                return
            for run in extent.source.read(extent.first, bytes_max=self._refill_bytes, end=extent.end):
                if run.batch.gap is not None:
                    self._skip_lost(extent, run.batch.next_offset)
                    break
                spans = ((run.first, run.last),) if extent.exact else self._spans(run.batch, run.first, run.last)
                for first, last in spans:
                    self._admit(extent, run.batch, first, last)
                extent.first = min(run.batch.next_offset, extent.end)
            if extent.first >= extent.end:
                self._lose(extent.seq, extent.seq + extent.count)
                self._backlog.popleft()

    def _pass_over(self, extent: Extent, sieve: "Expression") -> bool:
        """Leave out what the summaries of batches say that nobody here wants. True: that was all for one go."""
        if extent.count != extent.end - extent.first:
            # Which of them are this lane's must be read.
            return False
        reached, is_candidate = extent.source.pass_over(extent.first, sieve, end=extent.end)
        count = reached - extent.first
        if count:
            self.ready_count -= count
            self._mark_settled(extent.seq, extent.seq + count)
            extent.seq += count
            extent.count -= count
            extent.first = reached
        return not is_candidate

    def _admit(self, extent: Extent, batch: RecordBatch, first: int, last: int) -> None:
        last = min(last, first + extent.count)
        seq = extent.seq
        extent.seq += last - first
        extent.count -= last - first
        for start, end in self._in_backlog(seq, seq + last - first):
            for low, high, failures in self._by_failures(start, end):
                index = first + low - seq
                offset = batch.base_offset + index
                self._window.append(
                    Stretch(self, low, high - low, extent.source, offset, batch, index, failures, failures), batch
                )

    def _by_failures(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(first, end, how often in vain) parts of a range of sequences."""
        found = [
            (max(low, first), min(high, end), count)
            for count, those in self._failed.items()
            for low, high in those
            if low < end and high > first
        ]
        for low, high, count in sorted(found):
            if first < low:
                yield first, low, 0
            yield low, high, count
            first = high
        if first < end:
            yield first, end, 0

    def _in_backlog(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts (first, end) of a range of sequences that are ready, if they are in the backlog."""
        unsettled = self.unsettled(first, end)
        if not self._withdrawn.count:
            return unsettled
        return (part for low, high in unsettled for part in self._withdrawn.missing(low, high))

    def _skip_lost(self, extent: Extent, offset: int) -> None:
        """Nothing below the offset can be read any more. What is left of an extent are the last of its records."""
        offset = min(offset, extent.end)
        if extent.count == extent.end - extent.first:
            left = extent.end - offset
        else:
            left = min(self._count(extent.source, offset, extent.end), extent.count)
        lost = extent.count - left
        self._lose(extent.seq, extent.seq + lost)
        extent.seq += lost
        extent.count = left
        extent.first = offset

    def _count(self, source: Source, offset: int, end: int) -> int:
        """How many records of this lane lie in offset..end-1."""
        count = 0
        while offset < end:
            for run in source.read(offset, end=end):
                count += sum(last - first for first, last in self._spans(run.batch, run.first, run.last))
                offset = run.batch.next_offset
        return count

    def _lose(self, first: int, end: int) -> None:
        """Ready records that cannot be read any more count as settled."""
        for low, high in list(self._in_backlog(first, end)):
            self._note_lost(low, high)

    def _note_lost(self, first: int, end: int) -> None:
        self.ready_count -= end - first
        self.lost_count += end - first
        self._mark_settled(first, end)

    # -- settling -----------------------------------------------------------------------------------------------

    def settle(self, seq: int, count: int) -> None:
        """Handed-out records are done with for good."""
        self.unacked_count -= count
        self._mark_settled(seq, seq + count)

    def _mark_settled(self, first: int, end: int) -> None:
        if self._failed:
            self._forget_failures(first, end)
        if first == self.floor and not self.settled.count:
            self.floor = end
            return
        self.settled.add(first, end)
        if first <= self.floor:
            self.floor = self.settled.first_missing(self.floor)
            self.settled.cut_below(self.floor)

    def give_back(self, stretch: Stretch, *, failed: bool = True, remember: bool = False) -> None:
        """Handed-out records are ready again, at their old place. `failed`: it counts for the delivery limit.
        `remember`: it still does after a restart."""
        stretch.deliveries += 1
        stretch.failures += failed
        stretch.batch = None
        if remember and failed:
            self._forget_failures(stretch.seq, stretch.seq + stretch.count)
            self.note_failures(stretch.failures, stretch.seq, stretch.seq + stretch.count)
        self.put_back(stretch)

    def note_failures(self, count: int, first: int, end: int) -> None:
        """These were handed out in vain so often."""
        self._failed.setdefault(count, Intervals()).add(first, end)

    def _forget_failures(self, first: int, end: int) -> None:
        for count, those in list(self._failed.items()):
            those.remove(first, end)
            if not those.count:
                del self._failed[count]

    def failures(self) -> list[tuple[int, int, int]]:
        """(how often in vain, first, end) of unsettled sequences, for the journal."""
        return [(count, first, end) for count, those in self._failed.items() for first, end in those]

    def put_back(self, stretch: Stretch) -> None:
        """The same for records that nobody saw."""
        self.unacked_count -= stretch.count
        self.ready_count += stretch.count
        for part in self._placed(stretch):
            place = bisect_left(self._returned, part.seq, key=_sequence)
            self._returned.insert(place, part)
            for scan in self.scans:
                scan.untested.add(part.seq, part.seq + part.count)

    def drop_head(self, count: int) -> Iterator[Stretch]:
        """Take from the head what must leave, visible or not; the caller settles."""
        while count > 0:
            stretch = self._first()
            if stretch is None:
                return
            taken = self._hand_out(stretch, count)
            count -= taken.count
            yield taken

    def purge(self) -> int:
        """Settle everything that is ready; returns how many."""
        count = self.ready_count
        self._sweep()
        for stretch in (*self._returned, *self._ready):
            self._mark_settled(stretch.seq, stretch.seq + stretch.count)
        for extent in self._backlog:
            for low, high in list(self._in_backlog(extent.seq, extent.seq + extent.count)):
                self._mark_settled(low, high)
        self._returned.clear()
        self._window.clear()
        self._backlog.clear()
        self.ready_count = 0
        return count

    def ready_runs(self) -> Iterator[tuple[RecordBatch, int, int]]:
        """(batch, first, last) of everything ready. Reads the backlog, and leaves the lane as it is."""
        for one in self.ready_stretches():
            yield one.loaded(), one.index, one.index + one.count

    def ready_stretches(self) -> Iterator[Stretch]:
        """The same with where they lie; not to be changed."""
        twin = Lane(self._spans, place=self.place)
        backlog = [one.copy() for one in self._backlog]
        twin.restore(self.next_seq, self.floor, self.settled, backlog)
        twin._withdrawn = self._withdrawn
        twin._returned = [
            Stretch(twin, one.seq, one.count, one.source, one.offset, one.batch, one.index) for one in self._returned
        ]
        self._sweep()
        yield from self._ready
        while (stretch := twin._first()) is not None:
            yield twin._hand_out(stretch, stretch.count)

    def unsettled_stretches(self, first: int = 0) -> Iterator[Stretch]:
        """Everything ready or unacked from this sequence on, in order. Leaves the lane as it is; not to be changed."""
        twin = Lane(self._spans, place=self.place)
        floor = max(self.floor, first)
        settled = [(max(low, floor), high) for low, high in self.settled if high > floor]
        twin.restore(self.next_seq, floor, settled, [one.copy() for one in self.arrivals()])
        while (stretch := twin._first()) is not None:
            yield twin._hand_out(stretch, stretch.count)

    # -- out of order, by filters (scan.py) ---------------------------------------------------------------------

    @property
    def ready_from(self) -> int:
        """What is ready at this sequence or behind it stands in its order; what is before it has come back."""
        if self._ready:
            return self._ready[0].seq
        return self._backlog[0].seq if self._backlog else self.next_seq

    def extent_from(self, seq: int) -> Extent | None:
        """Where the first record with this sequence or a later one is to be looked for; not to be changed."""
        arrivals = self._arrivals
        place = max(bisect_right(arrivals, seq, key=_sequence) - 1, 0)
        while place < len(arrivals):
            if seq < arrivals[place].seq + arrivals[place].count:
                return arrivals[place]
            place += 1
        return None

    def ready_parts(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts (first, end) of a range of sequences, from `ready_from` on, that are ready in their order."""
        return self._in_backlog(max(first, self.ready_from), end)

    def claim(self, stretch: Stretch) -> None:
        """Hand out records that stand in their order, from wherever they are."""
        self._withdrawn.add(stretch.seq, stretch.seq + stretch.count)
        self.ready_count -= stretch.count
        self.unacked_count += stretch.count
        self._note_anchor(stretch)
        self._pass_withdrawn()
        backlog = self._backlog
        while backlog and not self._ready:
            extent = backlog[0]
            free = next((low for low, _high in self._in_backlog(extent.seq, extent.seq + extent.count)), None)
            if free is None:
                backlog.popleft()
                continue
            if free > extent.seq:
                self.advance(extent, free)
            break
        self._withdrawn.cut_below(self.ready_from)

    def returned_at(self, seq: int) -> Stretch | None:
        """What came back and begins with this sequence or holds it, and can be read."""
        place = bisect_right(self._returned, seq, key=_sequence) - 1
        found = self._returned[place] if place >= 0 else None
        if found is None or seq >= found.seq + found.count or found.offset < found.source.log_start:
            return None
        batch = found.loaded()
        inside = batch.count - found.index
        if inside < found.count:
            self._returned.insert(place, found.split(inside))
            found.batch = None
            return self.returned_at(seq)
        return found

    def returned(self) -> Iterator[tuple[int, int]]:
        """The sequences (first, end) of what came back."""
        return ((one.seq, one.seq + one.count) for one in self._returned)

    def returned_from(self, seq: int) -> int | None:
        """The first sequence from this one on that came back and can be read."""
        for one in islice(self._returned, max(bisect_right(self._returned, seq, key=_sequence) - 1, 0), None):
            if one.seq + one.count > seq and one.offset >= one.source.log_start:
                return max(one.seq, seq)
        return None

    def count_left(self, extent: Extent, offset: int) -> int:
        """How many records of an extent are at this offset or behind it."""
        if extent.exact or extent.count == extent.end - extent.first:
            return max(0, min(extent.end - offset, extent.count))
        return min(self._count(extent.source, offset, extent.end), extent.count)

    def claim_returned(self, stretch: Stretch, skip: int, count: int) -> Stretch:
        """Hand out `count` records of what came back, without the first so many of them."""
        place = bisect_left(self._returned, stretch.seq, key=_sequence)
        if skip:
            self._returned.insert(place, stretch.split(skip))
            place += 1
        taken = stretch.split(count) if count < stretch.count else self._returned.pop(place)
        self.ready_count -= count
        self.unacked_count += count
        return taken

    def _pass_withdrawn(self) -> None:
        """Take from the front of the window what somebody has already."""
        window, ready = self._window, self._ready
        while ready:
            head = ready[0]
            free = next(self._withdrawn.missing(head.seq, head.seq + head.count), None)
            if free is None:
                window.take(head.count)
                continue
            low, high = free
            if low > head.seq:
                window.take(low - head.seq)
            if high < head.seq + head.count:
                window.cut(high - low)
            return

    def _sweep(self) -> None:
        """The same for the whole window."""
        if not self._withdrawn.count or not self._ready:
            return
        window = _Window()
        for one in self._ready:
            batch = one.loaded()
            for low, high in self._withdrawn.missing(one.seq, one.seq + one.count):
                skip = low - one.seq
                part = Stretch(self, low, high - low, one.source, one.offset + skip, batch, one.index + skip)
                window.append(part, batch)
        self._window, self._ready = window, window.stretches

    # -- what is kept -------------------------------------------------------------------------------------------

    def arrivals(self) -> list[Extent]:
        """Everything from the floor on, for the journal; not to be changed."""
        floor = self.floor
        arrivals, anchors = self._arrivals, self._anchors
        while arrivals and arrivals[0].seq + arrivals[0].count <= floor:
            arrivals.popleft()
        keep = bisect_right(anchors, floor, key=_sequence) - 1
        if keep > 0:
            del anchors[:keep]
        if arrivals:
            self.advance(arrivals[0], floor)
            if len(arrivals) > 1 and self.settled.count:
                self._pass_over_settled()
        return list(arrivals)

    def _pass_over_settled(self) -> None:
        """Of each log, let go of what is settled before the first record that is not: nobody looks for it again."""
        seen: set[Source] = set()
        settled: set[Extent] = set()
        for extent in self._arrivals:
            if extent.source in seen:
                continue
            first = self.first_unsettled(extent.seq, extent.seq + extent.count)
            if first is None:
                settled.add(extent)
            else:
                seen.add(extent.source)
                self.advance(extent, first)
        if settled:
            self._arrivals = deque(one for one in self._arrivals if one not in settled)

    def advance(self, extent: Extent, seq: int) -> None:
        """Let an extent begin with this sequence or, if that one's place is not known, as near before it as can be."""
        first = extent.first
        if extent.exact:
            seq = max(min(seq, extent.seq + extent.count), extent.seq)
            first += seq - extent.seq
        else:
            place = bisect_right(self._anchors, seq, key=_sequence) - 1
            if place < 0:
                return
            anchor = self._anchors[place]
            seq = min(seq, anchor.end)
            first = anchor.offset + seq - anchor.seq
            if anchor.source is not extent.source or seq <= extent.seq or not extent.first < first <= extent.end:
                return
        extent.count -= seq - extent.seq
        extent.seq, extent.first = seq, first

    def spans(self, batch: RecordBatch, first: int, last: int) -> Iterable[tuple[int, int]]:
        """The index ranges of a batch that belong here."""
        return self._spans(batch, first, last)

    def restore(
        self, next_seq: int, floor: int, settled: Iterable[tuple[int, int]], arrivals: Iterable[Extent]
    ) -> None:
        """Take up a journalled state: everything unsettled is ready, and in the backlog."""
        self.next_seq = self._fixed_below = self.offered_below = next_seq
        self.floor = floor
        for first, end in settled:
            self.settled.add(first, end)
        for extent in arrivals:
            self._arrivals.append(extent)
            self._backlog.append(extent.copy())
        self.ready_count = next_seq - floor - self.settled.count

    def withdraw(self, seq: int, count: int) -> None:
        """Of what was restored, these are not ready: somebody has them, as if they had been handed out."""
        self._withdrawn.add(seq, seq + count)
        self.ready_count -= count
        self.unacked_count += count

    @property
    def handed_out_below(self) -> int:
        """Every sequence that was ever handed out is below this."""
        return max(self.delivered_below, self._anchors[-1].end if self._anchors else 0)

    def lowest_offsets(self) -> dict[Source, int]:
        """For each log, the lowest offset that this lane may still read."""
        lowest: dict[Source, int] = {}
        for one in self.arrivals():
            lowest[one.source] = min(one.first, lowest.get(one.source, one.first))
        return lowest

    # -- moving to another log ----------------------------------------------------------------------------------

    def unsettled(self, first: int, end: int) -> Iterator[tuple[int, int]]:
        """The parts (first, end) of a range of sequences that are ready or unacked."""
        return self.settled.missing(max(first, self.floor), end)

    def first_unsettled(self, first: int, end: int) -> int | None:
        return next((low for low, _high in self.unsettled(first, end)), None)

    def count_unsettled(self, source: Source) -> int:
        """How many records of a log are ready or unacked."""
        return sum(
            high - low
            for one in self._arrivals
            if one.source is source
            for low, high in self.unsettled(one.seq, one.seq + one.count)
        )

    def extents_in(self, source: Source, end: int) -> list[Extent]:
        """Where unsettled records below this offset of a log are to be looked for; the caller's own."""
        return [
            one.copy()
            for one in self.arrivals()
            if one.source is source
            and one.first < end
            and self.first_unsettled(one.seq, one.seq + one.count) is not None
        ]

    def hold_places(self) -> int:
        """Whatever arrived until now keeps its sequence until it is settled; returns the next sequence."""
        self._fixed_below = self.next_seq
        return self.next_seq

    def move(
        self,
        source: Source,
        end: int,
        below: int,
        target: Source,
        moved: Iterable[tuple[int, int, int]],
        rests: Sequence[Extent],
    ) -> None:
        """Records of a log, with offsets below `end` and sequences below `below`, lie in another one from now on.

        `moved` has (sequence, count, offset in the target) for all that are unsettled; `rests` what is at `end` or
        behind it of extents that begin before it.
        """
        copies = [
            Extent(low, high - low, target, offset + low - seq, offset + high - seq, exact=True)
            for seq, count, offset in moved
            for low, high in self.unsettled(seq, seq + count)
        ]
        self._has_moved = True
        if copies:
            self.applied[target] = max(copies[-1].end, self.applied.get(target, 0))

        def leaves(one: Extent) -> bool:
            return one.source is source and one.seq < below and one.first < end

        stays = [one for one in self._arrivals if not leaves(one)]
        # An extent that was passed over as far as its rest meanwhile speaks for itself.
        begun = [one.seq for one in stays if one.source is source and one.seq < below]
        left = [one.copy() for one in rests if not any(0 <= seq - one.seq < one.count for seq in begun)]
        self._arrivals = deque(sorted((*stays, *copies, *left), key=_sequence))
        parts = sorted((*copies, *rests), key=_sequence)
        backlog: deque[Extent] = deque()
        for one in self._backlog:
            backlog.extend(_within(one, parts) if leaves(one) else (one,))
        self._backlog = backlog
        self._move_ready(source, end, below)

    def _move_ready(self, source: Source, end: int, below: int) -> None:
        """What is in memory is read again from where it lies now; its order is that of the sequences, as before."""
        self._sweep()
        self.moves += 1

        def leaves(one: Stretch) -> bool:
            return one.source is source and one.seq < below and one.offset < end

        window = _Window()
        leaving = []
        for stretch in self._ready:
            if leaves(stretch):
                leaving.append(stretch)
            else:
                window.append(stretch, stretch.loaded())
        if leaving:
            self._window, self._ready = window, window.stretches
        if leaving or any(map(leaves, self._returned)):
            parts = [part for one in (*leaving, *self._returned) for part in self._placed(one)]
            self._returned = sorted(parts, key=_sequence)
            for scan in self.scans:
                for part in self._returned:
                    scan.untested.add(part.seq, part.seq + part.count)

    def _placed(self, stretch: Stretch) -> Iterator[Stretch]:
        """A stretch as it was handed out, in pieces that are neighbours where they lie now."""
        while self._has_moved and stretch.count:
            place = bisect_right(self._arrivals, stretch.seq, key=_sequence) - 1
            extent = self._arrivals[place] if place >= 0 else None
            if extent is None or not extent.exact or stretch.seq >= extent.seq + extent.count:
                break
            offset = extent.first + stretch.seq - extent.seq
            inside = min(stretch.count, extent.seq + extent.count - stretch.seq)
            if extent.source is stretch.source and offset == stretch.offset and inside == stretch.count:
                break
            part = stretch.split(inside)
            if (part.source, part.offset) != (extent.source, offset):
                part.source, part.offset, part.batch = extent.source, offset, None
            yield part
        if stretch.count:
            yield stretch

    def where(self, stretch: Stretch) -> Iterator[Stretch]:
        """Where the records of a stretch that was handed out lie now; the stretch stays as it is."""
        found = Stretch(self, stretch.seq, stretch.count, stretch.source, stretch.offset, None, 0)
        return self._placed(found)

    def in_batches(self, stretch: Stretch) -> Iterator[Stretch]:
        """A stretch as it was handed out, in pieces that can be loaded."""
        if not self._has_moved:
            yield stretch
            return
        for part in self._placed(stretch):
            while (inside := part.loaded().count - part.index) < part.count:
                yield part.split(inside)
                part.batch = None
            yield part


def _within(extent: Extent, parts: Sequence[Extent]) -> Iterator[Extent]:
    """The unsettled records of an extent by where they lie now; `parts` are in the order of their sequences."""
    end = extent.seq + extent.count
    for part in islice(parts, max(bisect_right(parts, extent.seq, key=_sequence) - 1, 0), None):
        if part.seq >= end:
            return
        low, high = max(part.seq, extent.seq), min(part.seq + part.count, end)
        if low < high:
            first = part.first + low - part.seq if part.exact else part.first
            last = first + high - low if part.exact else min(part.end, extent.end)
            yield Extent(low, high - low, part.source, first, last, exact=part.exact)


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
