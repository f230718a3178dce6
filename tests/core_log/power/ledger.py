"""What one partition has promised, and whether it kept it. Machine: the oracle of the power-loss test.

The rules are those of docs/rules.md, said as facts about offsets:

- `must`: a record that was acknowledged, or seen below the high watermark, on a stream that syncs; or that was there
  after a start (a start makes safe what it found). It stays, with the same bytes at the same offset (D1, D2).
- `soft`: acknowledged on a stream that promises less. It outlives the process, not a loss of power.
- `shown`: seen by anybody, early readers too. Its offset never shows another value (O1): the same or a typed gap.
- `end_shown`: an end that was seen. The log never ends below it, so no offset is issued twice (K3).
- deletes: the log start is never below a delete that was committed and never above one that was asked for.
- sequences: once acknowledged, (producer, epoch, sequence) is in the log once, at one offset, or below its start (O4).

Weaker by design: a compacted stream may drop a record once a later one with its key is in the log; after a loss of
power an uncommitted delete may or may not count, and an unacknowledged record may be there or not.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NoReturn

from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog, Run
from headrace.core_log.record import Gap


class Broken(AssertionError):
    """A promise was not kept."""


@dataclass(frozen=True, slots=True)
class Row:
    """One record as a reader sees it. Values differ between any two appends, so one names its record."""

    key: bytes
    properties: bytes
    value: bytes


Sequence = tuple[int, int, int]  # producer, epoch, sequence


@dataclass(slots=True)
class Ledger:
    name: str
    compacted: bool = False
    syncs: bool = True
    must: dict[int, Row] = field(default_factory=dict)
    soft: dict[int, Row] = field(default_factory=dict)
    shown: dict[int, Row] = field(default_factory=dict)
    issued: dict[bytes, set[int]] = field(default_factory=dict)
    # Sent, and answered by an error that leaves open whether and where it was written.
    perhaps: set[bytes] = field(default_factory=set)
    sequence_of: dict[bytes, Sequence] = field(default_factory=dict)
    acked: dict[Sequence, int | None] = field(default_factory=dict)
    # Every acknowledged sequence that was ever seen in the log, and where.
    safe: dict[Sequence, int] = field(default_factory=dict)
    # Acknowledged with less than a sync before a loss of power: it may be known or not.
    unsure: set[Sequence] = field(default_factory=set)
    end_shown: int = 0
    epoch: int = 0
    deleted_to: int = 0
    asked_to: int = 0
    # Of damage to the medium (D7): records from here on may be lost, because nothing tells them from a torn tail.
    excused_from: int | None = None

    def promise(self, config: LogConfig) -> None:
        """What the stream's settings promise from now on."""
        self.syncs = config.durability == "sync"
        self.compacted = config.cleanup == "compact"

    def fail(self, what: str) -> NoReturn:
        kind = "sync" if self.syncs else "unsynced"
        raise Broken(f"{self.name} ({kind}{', compacted' if self.compacted else ''}): {what}")

    # -- what happens in a life ----------------------------------------------------------------------------------

    def note_issued(self, offset: int, row: Row, sequence: Sequence | None = None) -> None:
        self.issued.setdefault(row.value, set()).add(offset)
        if sequence is not None:
            if sequence in self.acked:
                self.fail(f"sequence {sequence} was acknowledged and is written again at {offset}")
            self.sequence_of[row.value] = sequence

    def note_acked(self, rows: Iterable[tuple[int, Row]]) -> None:
        kept = self.must if self.syncs else self.soft
        for offset, row in rows:
            self._show(offset, row)
            kept[offset] = row

    def note_acked_sequence(self, sequence: Sequence, found: int | None, log_start: int) -> None:
        """Acknowledged; `found`: where the log holds it now."""
        self.acked.setdefault(sequence, found)
        if found is not None:
            self.safe.setdefault(sequence, found)
            return
        if sequence in self.unsure:
            return
        written = [self.issued[value] for value, known in self.sequence_of.items() if known == sequence]
        if any(offset < log_start for offsets in written for offset in offsets):
            # Written by somebody who was never told so, and deleted since: it counts as published (O4).
            return
        offset = self.safe.get(sequence)
        if offset is None or (offset >= log_start and not self.compacted):
            self.fail(f"sequence {sequence} is acknowledged and nowhere in the log")

    def note_read(self, log: PartitionLog, start: int, runs: list[Run], *, committed: bool) -> None:
        """Somebody read this."""
        for offset, row in self._rows(log, start, runs):
            self._show(offset, row)
            if committed and self.syncs:
                self.must[offset] = row

    def note_ends(self, log: PartitionLog) -> None:
        self.end_shown = max(self.end_shown, log.early_end, log.high_watermark)

    def note_epoch(self, log: PartitionLog) -> None:
        """An epoch counts once something of it is safe."""
        if log.synced_end:
            self.epoch = max(self.epoch, log.epochs.epoch_at(log.synced_end - 1).epoch)

    def _show(self, offset: int, row: Row) -> None:
        before = self.shown.setdefault(offset, row)
        if before != row:
            self.fail(f"offset {offset} showed {before.value[:24]!r} and now {row.value[:24]!r}")
        if offset not in self.issued.get(row.value, ()) and row.value not in self.perhaps:
            self.fail(f"offset {offset} holds {row.value[:24]!r}, which nobody wrote there")

    def _rows(self, log: PartitionLog, start: int, runs: list[Run]) -> Iterable[tuple[int, Row]]:
        """The records of a read, after asking that the read left nothing out."""
        expected = start
        for batch, first, last in runs:
            if not batch.base_offset <= expected < batch.next_offset:
                self.fail(f"a read goes on at {batch.base_offset}..{batch.next_offset}, not at {expected}")
            if batch.gap is None and batch.offsets is None and batch.count != batch.span:
                self.fail(f"the batch at {batch.base_offset} has a gap without a reason")
            if batch.gap is not None and not isinstance(batch.gap, Gap):
                self.fail(f"the gap at {batch.base_offset} has no type")
            expected = batch.next_offset
            for index in range(first, last):
                yield batch.offset_at(index), Row(batch.keys[index], batch.properties[index], batch.values[index])

    # -- ends of lives -------------------------------------------------------------------------------------------

    def lose_power(self) -> None:
        self.soft.clear()
        if not self.syncs:
            self.unsure.update(self.acked)
            self.acked.clear()

    def close(self, log: PartitionLog, written: dict[int, Row]) -> None:
        """A clean close keeps everything, on every kind of stream."""
        for offset, row in written.items():
            if offset >= log.log_start:
                self.must[offset] = row

    def check(self, log: PartitionLog) -> dict[int, Row]:
        """After a start: everything promised is there. Returns what there is."""
        start, end = log.log_start, log.high_watermark
        if end != log.end or log.synced_end != end:
            self.fail(f"opened with end {log.end}, synced {log.synced_end}, high watermark {end}")
        if end < self.end_shown:
            self.fail(f"the log ends at {end}, below {self.end_shown} that was seen")
        if log.epoch < self.epoch:
            self.fail(f"epoch {log.epoch} after epoch {self.epoch}")
        if not self.deleted_to <= start <= max(self.asked_to, self.deleted_to):
            self.fail(f"the log starts at {start}; deletes committed {self.deleted_to}, asked for {self.asked_to}")
        present = dict(self._scan(log, start, end))
        self._check_kept(present, start, end)
        self._check_sequences(present, start)
        for offset, row in present.items():
            self._show(offset, row)
        self.must = present.copy()
        self.soft.clear()
        self.deleted_to = start
        self.epoch = log.epoch
        self.note_ends(log)
        return present

    def _scan(self, log: PartitionLog, start: int, end: int) -> Iterable[tuple[int, Row]]:
        offset, epoch = start, 0
        while offset < end:
            runs = log.read(offset, bytes_max=2000)
            if not runs:
                self.fail(f"nothing to read at {offset}, below the end {end}")
            for batch, _first, _last in runs:
                if batch.epoch < epoch:
                    self.fail(f"epoch {batch.epoch} at {batch.base_offset} after epoch {epoch}")
                epoch = batch.epoch
            yield from self._rows(log, offset, runs)
            offset = runs[-1].batch.next_offset
        if offset != end:
            self.fail(f"the last batch ends at {offset}, the log at {end}")
        if epoch > log.epoch:
            self.fail(f"the log is in epoch {log.epoch}, its last batch in {epoch}")

    def _check_kept(self, present: dict[int, Row], start: int, end: int) -> None:
        newest = {row.key: offset for offset, row in present.items()}
        for kept in (self.must, self.soft):
            for offset, row in kept.items():
                if offset < start or present.get(offset) == row:
                    continue
                if self.compacted and offset not in present and newest.get(row.key, -1) > offset:
                    continue
                if self.excused_from is not None and offset >= self.excused_from:
                    continue
                found = present.get(offset)
                what = "nothing" if found is None else repr(found.value[:24])
                self.fail(f"offset {offset} held {row.value[:24]!r}, was promised, and holds {what} (end {end})")

    def _check_sequences(self, present: dict[int, Row], start: int) -> None:
        seen: dict[Sequence, int] = {}
        for offset, row in present.items():
            sequence = self.sequence_of.get(row.value)
            if sequence is None:
                continue
            if sequence in seen:
                self.fail(f"sequence {sequence} is in the log at {seen[sequence]} and at {offset}")
            seen[sequence] = offset
        self.safe |= seen
        for sequence, known in self.acked.items():
            found = seen.get(sequence)
            if found is None:
                continue
            if known is None:
                self.acked[sequence] = found
            elif known != found:
                self.fail(f"sequence {sequence} was acknowledged at {known} and is now at {found}")
