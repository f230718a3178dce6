"""How many records lie between two offsets of a log. Machine over the log; reads no more than a few batches.

Offsets are not records: after an unclean start a log goes on above its reserved ceiling (K3), behind a gap of up to a
million offsets that hold nothing, and after an election by force behind one that may be longer (E7). A stint begins
with that gap, so the history of epochs says where to look.
"""

from weakref import WeakKeyDictionary

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import SKIPPED


class Gaps:
    """Where the gaps of unclean starts and elections lie, remembered: they never change."""

    def __init__(self) -> None:
        # By log, the first offset of a stint -> the end of the gap that it begins with (the same offset: none).
        self._ends: WeakKeyDictionary[PartitionLog, dict[int, int]] = WeakKeyDictionary()

    def records_between(self, log: PartitionLog, first: int, end: int) -> int:
        """Records from the offset `first` on and below `end`; what retention took does not count."""
        first = max(first, int(log.log_start))
        missing = 0
        for entry in log.epochs.entries:
            low = entry.first_offset
            if low < end:
                missing += max(min(self._end_of(log, low), end) - max(low, first), 0)
        return max(end - first - missing, 0)

    def _end_of(self, log: PartitionLog, low: int) -> int:
        known = self._ends.setdefault(log, {})
        if low not in known:
            # Retention may have taken the gap, or the beginning of it.
            at = max(low, int(log.log_start))
            if at >= log.high_watermark:
                # Nothing of the stint is committed yet.
                return low
            end = at
            for run in log.read(at):
                if run.batch.gap not in SKIPPED or run.batch.epoch != log.epochs.epoch_at(low).epoch:
                    break
                end = int(run.batch.next_offset)
            known[low] = end
        return known[low]
