"""Logs on a disk for the claims about the log, gone when the claim is done. Driver: files.

They are opened without a node: what is measured is core_log and nothing above it.
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.log import PartitionLog
from headrace.core_log.real import real_env
from headrace.core_log.spec import StreamSpec

RECORDS = 1_000
VALUE_BYTES = 100


@contextmanager
def scratch_folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def open_directory(folder: Path, *, clean: bool = False, handles_max: int = 512) -> LogDirectory:
    return LogDirectory.open_now(real_env(folder, handles_max=handles_max), DirectoryConfig(), clean=clean)


def new_logs(directory: LogDirectory, count: int, config: LogConfig) -> list[PartitionLog]:
    spec = StreamSpec(id=directory.env.ids.uuid(), name="bench", kind="topic", partition_count=count, config=config)
    stream = directory.streams[spec.id] = directory.create_now(spec)
    return stream.partitions


def random_values(batches: int, *, seed: int = 1, size: int = VALUE_BYTES) -> list[list[bytes]]:
    """Lists of values that do not compress."""
    random = Random(seed)
    return [[random.randbytes(size) for _ in range(RECORDS)] for _ in range(batches)]


def commit(log: PartitionLog) -> None:
    """What the committer does for one log, in this thread."""
    log.seal()
    job = log.begin_sync()
    if job is not None:
        log.run_sync(job)
        log.finish_sync(job)


def warm_memory(folder: Path, size: int) -> None:
    """Fill and free so much page cache: a virtual machine may have to get the memory from its host first.

    That costs five times what writing does, and falls on whoever happens to be the first to ask for large pages.
    """
    path = folder / "warm"
    with path.open("wb") as file:
        for _ in range(size >> 22):
            file.write(bytes(1 << 22))
    path.unlink()


def interleaved(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """The median CPU seconds of each call; they take turns, so that a noisy moment falls on all of them.

    For calls that wait for nothing (no sync, files in the page cache): on a quiet machine it is the time they take, and
    on a shared one what others do is not counted.
    """
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for call, taken in zip(calls, times, strict=True):
            begun = time.process_time()
            call()
            taken.append(time.process_time() - begun)
    return [statistics.median(taken) for taken in times]
