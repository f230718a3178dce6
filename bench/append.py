"""Claims: appending to a partition beside bare os.write of the same bytes, in one interleaved run. Driver: files.

Batches of 1,000 records of 100 B, hashed, not synced. The bare side joins each list of values and writes it, as the
least that any log must do. `columns ready` is what a follower or a copy does: the batch is encoded already.
"""

import os
from itertools import cycle

from bench.claim import Claim
from bench.scratch import (
    RECORDS,
    VALUE_BYTES,
    interleaved,
    new_logs,
    open_directory,
    random_values,
    scratch_folder,
    warm_memory,
)
from headrace.core_log.config import LogConfig
from headrace.core_log.format import encode, stamp
from headrace.core_log.record import RecordBatch

BATCHES = 50
ROUNDS = 41


def claim() -> list[Claim]:
    lists = random_values(20)
    keys, properties = [b"orders.eu"] * RECORDS, [b""] * RECORDS
    ready = RecordBatch(0, 1)
    ready.add(keys, properties, lists[0], timestamp_us=1)
    body = encode(ready)
    with scratch_folder() as folder:
        warm_memory(folder, 4 * BATCHES * ROUNDS * RECORDS * VALUE_BYTES)
        directory = open_directory(folder)
        log, copy = new_logs(directory, 2, LogConfig(durability="os"))
        copy.append(keys, properties, lists[0], timestamp_us=1)
        copy.seal()
        segment = copy.segments[0]
        bare = os.open(folder / "bare", os.O_CREAT | os.O_WRONLY)
        turns = [cycle(lists) for _ in range(2)]

        def append() -> None:
            for values in (next(turns[0]) for _ in range(BATCHES)):
                log.append(keys, properties, values, timestamp_us=1)
                log.seal()

        def append_ready() -> None:
            for _ in range(BATCHES):
                offset = segment.end_offset
                buffers = stamp(body, salt=segment.salt, base_offset=offset, leader_epoch=1, durable_offset=0)
                segment.append(buffers, body.size, offset + body.span, body.max_timestamp)

        def write() -> None:
            for values in (next(turns[1]) for _ in range(BATCHES)):
                os.write(bare, b"".join(values))

        try:
            ours, copied, floor = interleaved([append, append_ready, write], ROUNDS)
        finally:
            os.close(bare)
    megabytes = BATCHES * RECORDS * VALUE_BYTES / 1e6
    beside = f"MB/s of values; bare os.write of the joined lists {megabytes / floor:,.0f}"
    return [
        Claim("append from lists", floor / ours, 0.2, detail=f"{megabytes / ours:,.0f} {beside}"),
        Claim("append, columns ready", floor / copied, 0.5, detail=f"{megabytes / copied:,.0f} {beside}"),
    ]
