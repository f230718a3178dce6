"""Claims: a large partition opens at once after a clean stop, after a crash in the time of one segment. Driver: files.

1 GB by default; `make bench FULL=1` writes 10 GB, which is what is promised. The crash is a log that nobody closed;
it is opened beside one that has only a last segment of the same size, because that is all that recovery may read.
"""

import os
import time
from pathlib import Path

from bench.claim import Better, Claim
from bench.scratch import commit, new_logs, open_directory, random_values, scratch_folder
from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory

FULL = os.environ.get("FULL", "") not in ("", "0")
BYTES = 10_000_000_000 if FULL else 1_000_000_000
LAST_SEGMENT = 0.9  # how full it is when the power goes
CONFIG = LogConfig(compression="none", durability="interval")


def fill(directory: LogDirectory, size: int) -> None:
    """One partition of about this size, whose last segment is nearly full; committed and not closed."""
    (log,) = new_logs(directory, 1, CONFIG)
    lists = random_values(10, size=250)
    keys, properties = [b"orders.eu"] * len(lists[0]), [b""] * len(lists[0])
    written = number = 0
    while written < size or not log.segments or log.segments[-1].end_position < LAST_SEGMENT * CONFIG.segment_bytes:
        log.append(keys, properties, lists[number % len(lists)], timestamp_us=number)
        log.seal()
        written += 250_000
        number += 1
        if number % 40 == 0:
            commit(log)
    commit(log)


def opened(folder: Path, *, clean: bool) -> tuple[float, LogDirectory]:
    begun = time.perf_counter()
    directory = open_directory(folder, clean=clean)
    return time.perf_counter() - begun, directory


def claim() -> list[Claim]:
    with scratch_folder() as large, scratch_folder() as small:
        fill(open_directory(large), BYTES)
        fill(open_directory(small), 0)
        crashed, directory = opened(large, clean=False)
        one_segment, _ = opened(small, clean=False)
        directory.close_now()
        clean, directory = opened(large, clean=True)
        ((log,),) = [stream.partitions for stream in directory.streams.values()]
        begun = time.perf_counter()
        assert log.read(0)[0].batch.count
        first_read = time.perf_counter() - begun
        segments, size = len(log.segments), log.byte_count / 1e9
    what = f"a partition of {size:.0f} GB in {segments} segments"
    promise = "" if FULL else "; FULL=1 for the 10 GB of the promise"
    return [
        Claim(
            "open after a clean stop",
            clean,
            1.0,
            Better.LESS,
            "s",
            f"{what}; the first read {first_read * 1e3:.1f} ms{promise}",
        ),
        Claim(
            "open after a crash beside a log of one segment",
            crashed / one_segment,
            2.0,
            Better.LESS,
            detail=f"{what}: {crashed:.2f} s against {one_segment:.2f} s",
        ),
    ]
