"""The newest batches of every partition, still as lists of bytes. Machine; bounded in memory for the whole node.

Whoever reads near the end is served from here and nothing is decoded. Evicted in the order of arrival.
"""

from collections import deque

from headrace.core_log.record import RecordBatch

# What a record costs beside its bytes: three bytes objects and their places in three lists.
RECORD_OVERHEAD_BYTES = 120

Tail = deque[RecordBatch]


class TailCache:
    __slots__ = ("_bytes_max", "_order", "byte_count")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._order: deque[tuple[Tail, RecordBatch, int]] = deque()
        self.byte_count = 0

    def push(self, tail: Tail, batch: RecordBatch) -> None:
        """Put a sealed batch at the end of a partition's tail; the oldest of all make room."""
        cost = batch.byte_count + RECORD_OVERHEAD_BYTES * batch.count
        tail.append(batch)
        self._order.append((tail, batch, cost))
        self.byte_count += cost
        while self.byte_count > self._bytes_max:
            oldest, evicted, freed = self._order.popleft()
            self.byte_count -= freed
            # A tail that was cleared (truncated, closed) has lost the batch already.
            if oldest and oldest[0] is evicted:
                oldest.popleft()
