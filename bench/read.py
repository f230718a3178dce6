"""Claims: reading a partition in order, every hash checked, beside the bare read of the same file. Driver: files.

Into (keys, properties, values) lists, as a consumer that replays gets them, from batches of 1,000 records of 100 B;
the bare side reads the same bytes in the same sizes. Into Arrow columns, as Spark and its like get them, from batches
of the size that a log writes under load. Everything is in the page cache: what is measured is what we add to it.
"""

import os
from pathlib import Path

from bench.claim import Claim
from bench.scratch import (
    RECORDS,
    VALUE_BYTES,
    commit,
    interleaved,
    new_logs,
    open_directory,
    random_values,
    scratch_folder,
)
from headrace.core_log.arrow import Stored, record_batches
from headrace.core_log.config import LogConfig
from headrace.core_log.inspection import Whole, batches, partition_of, streams
from headrace.core_log.log import PartitionLog
from headrace.core_log.storage.readonly import ReadOnlyStorage

BATCHES = 2_000
BLOCK = 1 << 20
ROUNDS = 9
MEGABYTES = BATCHES * RECORDS * VALUE_BYTES / 1e6


def fill(log: PartitionLog, runs_per_batch: int) -> None:
    lists = random_values(20)
    keys, properties = [b"orders.eu"] * RECORDS, [b""] * RECORDS
    for number in range(BATCHES):
        log.append(keys, properties, lists[number % len(lists)], timestamp_us=number)
        if number % runs_per_batch == runs_per_batch - 1:
            commit(log)
    commit(log)
    log.note_watermark()


def read_bare(folder: Path, log: PartitionLog, block: int) -> None:
    for segment in log.segments:
        number = os.open(folder / segment.path, os.O_RDONLY)
        left = segment.end_position
        while left > 0:
            left -= len(os.read(number, min(block, left)))
        os.close(number)


def read_lists(log: PartitionLog) -> int:
    offset = count = 0
    while offset < log.high_watermark:
        for run in log.read(offset):
            count += len(run.batch.keys) + len(run.batch.properties) + len(run.batch.values)
            offset = int(run.batch.next_offset)
    return count // 3


def read_arrow(folder: Path, number: int) -> int:
    storage = ReadOnlyStorage(folder)
    (found,) = streams(storage)
    assert found.spec is not None
    wholes = (item for _, item in batches(partition_of(storage, found.spec, number)) if isinstance(item, Whole))
    outputs = record_batches(Stored(item.data, item.at, item.header) for item in wholes)
    return sum(int(output.num_rows) for output in outputs)


def claim() -> list[Claim]:
    with scratch_folder() as folder:
        directory = open_directory(folder)
        log, large = new_logs(directory, 2, LogConfig(durability="sync", compression="none"))
        fill(log, 1)
        fill(large, 3)
        directory.close_now()
        directory = open_directory(folder, clean=True)
        ((log, large),) = [stream.partitions for stream in directory.streams.values()]
        for segment in (*log.segments, *large.segments):
            segment.locate(segment.base_offset, log.config.index_interval_bytes)
        expected = BATCHES * RECORDS
        assert read_lists(log) == read_arrow(folder, 0) == read_arrow(folder, 1) == expected
        batch = next(iter(log.segments[0].headers()))[1].size
        lists, bare, columns, blocks = interleaved(
            [
                lambda: read_lists(log),
                lambda: read_bare(folder, log, batch),
                lambda: read_arrow(folder, 1),
                lambda: read_bare(folder, large, BLOCK),
            ],
            ROUNDS,
        )
    gigabytes = MEGABYTES / 1e3
    in_blocks = f"{gigabytes / blocks:.1f} in blocks of 1 MiB"
    return [
        Claim(
            "read into lists beside the bare read",
            bare / lists,
            0.2,
            detail=f"{gigabytes / lists:.2f} GB/s of values; bare {gigabytes / bare:.1f} batch by batch, {in_blocks}",
        ),
        Claim(
            "read into Arrow columns",
            gigabytes / columns,
            1.0,
            unit="GB/s",
            detail=f"uncompressed values, all columns, no copy of the values; bare {in_blocks}",
        ),
    ]
