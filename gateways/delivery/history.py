"""What arrived in a view, in the order of its arrival: from a number to a place in a log. Machine.

A view numbers its records 0, 1, 2... as they arrive, whichever log they are in (K2); these numbers are what readers
know as `x-stream-offset`. An entry says that from `seq` on they lie in one log, from `first` on, up to `end`; it ends
where records come from another log, or when it has grown enough to be worth a new one. So a place is found by one
look-up and a short scan, and a view of one log costs an entry for thousands of records.

A number, once seen, stays with its record for ever. What the journal has is certain. What came later is found again in
the logs by its routes: first all that is in the log of the last journalled entry (`last_source`), then the others, in
an order that nobody knows beforehand. So readers are shown what is journalled, and behind it what came from that same
log before any other had something. Retention takes nothing that the journal does not know of.
Invariant: entries are in the order of seq and cover first_seq..next_seq-1. Neighbours: reading.py reads by it,
journal.py has its form on the disk, broker.py keeps it there.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import NamedTuple

from headrace.core_log.record import RecordBatch
from headrace.gateways.delivery.ports import Source

# An entry is closed when it holds so many records, or spans so many offsets: what a reader may have to scan.
ENTRY_COUNT_MAX = 4096
ENTRY_OFFSETS_MAX = 16_384
ENTRY_BYTES_MAX = 1024 * 1024
# What a queue remembers at most; the oldest go first. A stream forgets only what its retention gave up.
ENTRIES_MAX = 65_536
# Entries are journalled in blocks of so many.
BLOCK_COUNT = 256

_sequence = attrgetter("seq")
_newest = attrgetter("newest_us")


class Entry:
    """Records `seq` and following lie in first..end-1 of a log; None: that log is gone.

    Their routes say which ones they are; `exact`: it is every record there (copies).
    """

    __slots__ = ("bytes_before", "end", "exact", "first", "newest_us", "seq", "source")

    def __init__(
        self,
        seq: int,
        source: Source | None,
        first: int,
        end: int,
        newest_us: int,
        bytes_before: int,
        exact: bool = False,
    ) -> None:
        self.exact = exact
        self.seq = seq
        self.source = source
        self.first = first
        self.end = end
        # The highest time of all records before this entry, and their bytes.
        self.newest_us = newest_us
        self.bytes_before = bytes_before


@dataclass(frozen=True, slots=True)
class Piece:
    """`count` records of the view, from `seq` on, in first..end-1 of a log."""

    seq: int
    count: int
    source: Source | None
    first: int
    end: int
    exact: bool


class Block(NamedTuple):
    """Neighbouring entries; the first is the `ordinal`-th of its view."""

    ordinal: int
    entries: list[Entry]


class History:
    def __init__(self, *, journalled: bool, is_stream: bool = False, bytes_max: int | None = None) -> None:
        self.first_seq = 0
        self.next_seq = 0
        self.newest_us = 0
        # Bytes of all bodies that ever arrived; counted for streams only.
        self.byte_count = 0
        # For each log, the offset up to which its records have been taken in.
        self.applied: dict[Source, int] = {}
        self._journalled = journalled
        self._is_stream = is_stream
        self._entries: list[Entry] = []
        # How many entries there were before the first one here: it gives blocks their numbers.
        self._ordinal = 0
        self.keep_within(bytes_max)
        # How far the journal has it: numbers below, and where the last of them was taken from.
        self._kept_seq = self._kept_end = 0
        # Everything behind that came from the log of the last entry in the journal.
        self._certain = not journalled
        self._dirty_from = 0
        self._blocks_from = 0

    def __len__(self) -> int:
        return len(self._entries)

    def keep_within(self, bytes_max: int | None) -> None:
        """How large all of it may become: retention lets go of whole entries, so they must be small enough for it."""
        self._entry_bytes_max = ENTRY_BYTES_MAX if bytes_max is None else min(ENTRY_BYTES_MAX, bytes_max // 16)

    @property
    def count(self) -> int:
        return self.next_seq - self.first_seq

    # -- arrivals -----------------------------------------------------------------------------------------------

    def arrive(self, source: Source, batch: RecordBatch, first: int, last: int) -> None:
        """Records first..last-1 of a batch have been routed to the view."""
        end = batch.base_offset + last
        entries = self._entries
        newest = entries[-1] if entries else None
        if (
            newest is None
            or newest.source is not source
            or newest.exact
            or self.next_seq - newest.seq >= ENTRY_COUNT_MAX
            or end - newest.first > ENTRY_OFFSETS_MAX
            or self.byte_count - newest.bytes_before >= self._entry_bytes_max
        ):
            self._begin(source, batch.base_offset + first, end, exact=False)
        else:
            newest.end = end
        self.applied[source] = end
        self.next_seq += last - first
        self.newest_us = max(self.newest_us, batch.timestamps.at(last - 1))
        if self._is_stream:
            self.byte_count += sum(map(len, batch.values[first:last]))

    def arrive_copied(self, source: Source, first: int, end: int, newest_us: int, byte_count: int) -> None:
        """Copies for the view lie in first..end-1, all of them; they have the newest of their times and these bytes."""
        self._begin(source, first, end, exact=True)
        # Others may have arrived behind them before the view was told.
        self.applied[source] = max(end, self.applied.get(source, 0))
        self.next_seq += end - first
        self.newest_us = max(self.newest_us, newest_us)
        if self._is_stream:
            self.byte_count += byte_count

    def _begin(self, source: Source, first: int, end: int, *, exact: bool) -> None:
        entries = self._entries
        ordinal = self._ordinal + len(entries)
        if entries:
            # Copies carry no routes by which they could be found again.
            if entries[-1].source is not source or exact or entries[-1].exact:
                self._certain = not self._journalled
            # The end of the one before is final now.
            self._dirty_from = min(self._dirty_from, ordinal - 1)
        else:
            self._dirty_from = min(self._dirty_from, ordinal)
        entries.append(Entry(self.next_seq, source, first, end, self.newest_us, self.byte_count, exact))
        if not self._is_stream and ordinal % BLOCK_COUNT == 0:
            self.forget_lost()
            if len(entries) > ENTRIES_MAX:
                self._drop(len(entries) - ENTRIES_MAX)

    # -- reading ------------------------------------------------------------------------------------------------

    def piece(self, seq: int, resume: int | None) -> Piece | None:
        """What can be read from a number on, in one log; None when there is no more to be seen now.

        `resume` is the offset where a reader's last piece ended. Without it the piece begins with its entry, perhaps
        before `seq`.
        """
        entries = self._entries
        if seq >= self.next_seq or not entries:
            return None
        place = bisect_right(entries, seq, key=_sequence) - 1
        if place < 0:
            # Gone meanwhile: go on where there is something.
            place, resume = 0, None
        entry = entries[place]
        end_seq, end = self._end_of(place), entry.end
        if not self._certain and end_seq > self._kept_seq:
            end_seq, end = self._kept_seq, self._kept_end
        if end_seq <= seq:
            return None
        if seq <= entry.seq or resume is None:
            return Piece(entry.seq, end_seq - entry.seq, entry.source, entry.first, end, entry.exact)
        return Piece(seq, end_seq - seq, entry.source, resume, end, entry.exact)

    def pieces(self, seq: int) -> Iterator[Piece]:
        """Everything from the entry on that holds this number, whether readers may see it yet or not."""
        for place in range(max(bisect_right(self._entries, seq, key=_sequence) - 1, 0), len(self._entries)):
            entry = self._entries[place]
            count = self._end_of(place) - entry.seq
            yield Piece(entry.seq, count, entry.source, entry.first, entry.end, entry.exact)

    def _end_of(self, place: int) -> int:
        return self._entries[place + 1].seq if place + 1 < len(self._entries) else self.next_seq

    @property
    def end(self) -> int | None:
        """Where the newest record was taken from, for whoever starts behind it."""
        return self._entries[-1].end if self._entries else None

    def piece_before(self, time_us: int) -> Piece | None:
        """The piece in which the first record of this time or later must be, visible or not; None: it is to come."""
        entries = self._entries
        # The one before is the first to hold a record of that time.
        place = max(bisect_left(entries, time_us, key=_newest) - 1, 0)
        if not entries or self.newest_us < time_us:
            return None
        entry = entries[place]
        count = self._end_of(place) - entry.seq
        return Piece(entry.seq, count, entry.source, entry.first, entry.end, entry.exact)

    # -- letting go ---------------------------------------------------------------------------------------------

    @property
    def last_source(self) -> Source | None:
        """The log that must be looked at first for what arrived after the journal was written."""
        return self._entries[-1].source if self._entries else None

    def lowest_offset(self, source: Source) -> int | None:
        """From where on this view still needs a log."""
        return next((entry.first for entry in self._entries if entry.source is source), None)

    @property
    def sources(self) -> set[Source]:
        return {entry.source for entry in self._entries if entry.source is not None}

    def expire(self, *, before_us: int | None, bytes_max: int | None) -> bool:
        """Let go of the oldest entries, by age and by size, but for the newest; True if any went."""
        entries = self._entries
        count = 0
        while count + 1 < len(entries):
            old = before_us is not None and entries[count + 1].newest_us < before_us
            large = bytes_max is not None and self.byte_count - entries[count].bytes_before > bytes_max
            if not old and not large:
                break
            count += 1
        self._drop(count)
        return count > 0

    def forget_lost(self) -> None:
        """Let go of the oldest entries whose records are no longer in their logs."""
        count = 0
        for entry in self._entries:
            if entry.source is not None and entry.source.log_start < entry.end:
                break
            count += 1
        self._drop(count)

    def forget_source(self, source: Source) -> None:
        """A log is gone."""
        self.applied.pop(source, None)
        for place, entry in enumerate(self._entries):
            if entry.source is source:
                entry.source = None
                self._dirty_from = min(self._dirty_from, self._ordinal + place)

    def _drop(self, count: int) -> None:
        if count:
            del self._entries[:count]
            self._ordinal += count
            self.first_seq = self._entries[0].seq if self._entries else self.next_seq

    # -- what is kept -------------------------------------------------------------------------------------------

    def changed_blocks(self) -> list[tuple[int, Block | None]]:
        """(number, block) of those that are not in the journal as they are now; None is to be forgotten."""
        entries, ordinal = self._entries, self._ordinal
        first = ordinal // BLOCK_COUNT
        blocks: list[tuple[int, Block | None]] = [(number, None) for number in range(self._blocks_from, first)]
        self._blocks_from = first
        end = ordinal + len(entries)
        if self._dirty_from >= end:
            # The newest entry goes on growing, but how far it has is in the view's state.
            return blocks
        for number in range(max(self._dirty_from, ordinal) // BLOCK_COUNT, -(-end // BLOCK_COUNT)):
            low = max(number * BLOCK_COUNT - ordinal, 0)
            block = Block(ordinal + low, entries[low : (number + 1) * BLOCK_COUNT - ordinal])
            blocks.append((number, block))
        self._dirty_from = end
        return blocks

    @property
    def mark(self) -> tuple[int, int]:
        """How far it reaches: what `note_kept` is told once the journal has it."""
        return self.next_seq, self._entries[-1].end if self._entries else 0

    def note_kept(self, mark: tuple[int, int]) -> None:
        self._kept_seq, self._kept_end = mark
        # The entry that the mark lies in or ends, and those behind it.
        place = bisect_left(self._entries, mark[0], key=_sequence) - 1
        since = self._entries[place:] if place >= 0 else ()
        self._certain = len({entry.source for entry in since}) == 1 and not any(entry.exact for entry in since)

    @property
    def blocks(self) -> range:
        """Numbers of the blocks that the journal may have."""
        return range(self._blocks_from, -(-(self._ordinal + len(self._entries)) // BLOCK_COUNT))

    def restore(
        self,
        *,
        first_seq: int,
        next_seq: int,
        newest_us: int,
        byte_count: int,
        applied: Mapping[Source, int],
        blocks: Iterable[Block],
    ) -> None:
        """Take up what was journalled. Blocks may be newer than the rest, which then decides."""
        self.first_seq, self.next_seq = first_seq, next_seq
        self.newest_us, self.byte_count = newest_us, byte_count
        self.applied = dict(applied)
        in_order = sorted(blocks)
        self._ordinal = in_order[0].ordinal if in_order else 0
        self._blocks_from = self._ordinal // BLOCK_COUNT
        self._entries = [entry for block in in_order for entry in block.entries if entry.seq < next_seq]
        if self._entries:
            newest = self._entries[-1]
            if newest.exact:
                newest.end = newest.first + next_seq - newest.seq
            elif newest.source is not None:
                newest.end = applied.get(newest.source, newest.end)
        self._drop(max(bisect_right(self._entries, first_seq, key=_sequence) - 1, 0))
        self.first_seq = self._entries[0].seq if self._entries else next_seq
        self._dirty_from = self._ordinal + len(self._entries)
        self.note_kept(self.mark)

    def begin_at(self, next_seq: int) -> None:
        """For a view that has no history in the journal."""
        self.first_seq = self.next_seq = next_seq
