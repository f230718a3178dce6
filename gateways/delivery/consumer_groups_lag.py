"""How many records lie between two offsets of a log. Machine over the log; reads no more than a few batches.

Offsets are not records: after an unclean start a log goes on above its reserved ceiling (K3), behind a gap of up to a
million offsets that hold nothing. A stint begins with that gap, so the history of epochs says where to look.
"""

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Gap


class Gaps:
    """Where the gaps of unclean starts lie, remembered: they never change."""

    def __init__(self) -> None:
        # By log, the first offset of a stint -> the end of the gap that it begins with (the same offset: none).
        self._ends: dict[PartitionLog, dict[int, int]] = {}

    def records_between(self, log: PartitionLog, first: int, end: int) -> int:
        """Records from the offset `first` on and below `end`; what retention took does not count."""
        first = max(first, log.log_start)
        missing = 0
        for entry in log.epochs.entries[1:]:
            low = entry.first_offset
            if log.log_start <= low < end:
                missing += max(min(self._end_of(log, low), end) - max(low, first), 0)
        return max(end - first - missing, 0)

    def _end_of(self, log: PartitionLog, low: int) -> int:
        known = self._ends.setdefault(log, {})
        if low not in known:
            end = low
            for run in log.read(low):
                if run.batch.gap is not Gap.UNCLEAN_START or run.batch.base_offset != end:
                    break
                end = int(run.batch.next_offset)
            if low == log.high_watermark:
                # Nothing of the stint is committed yet.
                return low
            known[low] = end
        return known[low]

    def forget(self, log: PartitionLog) -> None:
        """The log is gone."""
        self._ends.pop(log, None)
