"""Claims: one group commit over many dirty partitions beside a commit of one. Driver: a loop, threads, files.

Dirty: a batch is written to the partition's segment and nobody has synced it. Measured is the time from there, through
the committer and its worker thread, until everything is safe and every ticket has been called, on a real disk. Beside
it the time from the append on, which has the encoding of every batch in it, and a bare fdatasync.
"""

import os
import statistics
import time

import trio

from bench.claim import Better, Claim
from bench.scratch import new_logs, open_directory, scratch_folder
from headrace.core_log.committer import Committer
from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog

MANY = 50
ROUNDS = 100
WARM_UP = 5  # segments and the journal are created
RECORDS = 10


async def measure() -> tuple[list[float], list[float], float]:
    """Median seconds (from dirty, from the append) of a commit of one partition and of many; of a bare sync."""
    with scratch_folder() as folder:
        directory = open_directory(folder)
        logs = new_logs(directory, MANY + 1, LogConfig())
        bare = os.open(folder / "bare", os.O_CREAT | os.O_RDWR)
        os.write(bare, bytes(1 << 20))
        os.fdatasync(bare)
        one, many, floor = [], [], []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(directory.committer.run)
            for round_number in range(WARM_UP + ROUNDS):
                alone = await committed(directory.committer, logs[:1])
                together = await committed(directory.committer, logs[1:])
                begun = time.perf_counter()
                os.pwrite(bare, bytes(RECORDS * 120), 0)
                os.fdatasync(bare)
                if round_number >= WARM_UP:
                    one.append(alone)
                    many.append(together)
                    floor.append(time.perf_counter() - begun)
            nursery.cancel_scope.cancel()
        os.close(bare)
    return medians(one), medians(many), statistics.median(floor)


def medians(times: list[tuple[float, float]]) -> list[float]:
    return [statistics.median(column) for column in zip(*times, strict=True)]


async def committed(committer: Committer, logs: list[PartitionLog]) -> tuple[float, float]:
    """Seconds from dirty, and from the append, until all is safe and told."""
    done = trio.Event()
    waiting = len(logs)

    def tell() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            done.set()

    begun = time.perf_counter()
    for log in logs:
        appended = log.append([b"key"] * RECORDS, [b""] * RECORDS, [b"v" * 100] * RECORDS, timestamp_us=1)
        log.when_committed(appended.next_offset, tell)
        log.seal()
        committer.urgent(log)
    # The committer runs when this task waits, and not before.
    dirty = time.perf_counter()
    await done.wait()
    now = time.perf_counter()
    return now - dirty, now - begun


def claim() -> list[Claim]:
    one, many, floor = trio.run(measure)
    names = (f"commit of {MANY} dirty partitions beside one", "the same from the append on")
    bare = f"bare fdatasync of a preallocated file {floor * 1e3:.2f} ms"
    return [
        Claim(
            name,
            many[place] / one[place],
            target,
            Better.LESS,
            detail=f"{many[place] * 1e3:.2f} ms against {one[place] * 1e3:.2f} ms; {bare}",
        )
        for place, (name, target) in enumerate(zip(names, (2.0, None), strict=True))
    ]
