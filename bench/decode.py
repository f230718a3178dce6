"""Claims: the decoder of readers without a broker (headrace.read, Spark), one core, files in the page cache. Driver.

Values of 1 KB that lz4 packs to about two thirds, as text does; every hash is checked and Kafka's columns are made.
Large batches are of 256 KB, small ones of 16 KB: the same records, the same bytes. What is wanted by tag is 1 % of the
records: in runs of a few batches, as a tenant's or an hour's records lie, and, beside it, dealt out evenly, where every
batch holds some and has to be unpacked. The bare side reads the same files in blocks, and unpacks nothing.
"""

import os
from pathlib import Path
from random import Random

from bench.claim import Better, Claim
from bench.scratch import commit, interleaved, new_logs, open_directory, scratch_folder
from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog
from headrace.spark.access import open_access
from headrace.spark.decode import read
from headrace.spark.fields import KAFKA_COLUMNS
from headrace.spark.plan import Task, plan

RECORDS = 160_000
VALUE_BYTES = 1024
LARGE, SMALL = 256, 16
ROUNDS = 7
BLOCK = 4 << 20


def values(count: int) -> list[bytes]:
    """Unique, and about a third of each repeats."""
    random = Random(7)
    pad = b'{"customer": "0000000000", "currency": "EUR", "state": "accepted", "items": [], "note": ""}' * 4
    rest = VALUE_BYTES - 350
    return [random.randbytes(rest) + pad[:350] for _ in range(count)]


def fill(log: PartitionLog, each: int, *, even: bool = False) -> None:
    pool = values(4096)
    for number in range(RECORDS // each):
        first = number * each % len(pool)
        batch = (pool[first : first + each] + pool)[:each]
        keys = [b"customer-%06d" % (number * each + place) for place in range(each)]
        # 1 %: four batches of 400, or two or three records of each batch.
        if even:
            cut = each - max(each // 100, 1)
            log.append(keys[:cut], [b""] * cut, batch[:cut], timestamp_us=number, tags=("eu",))
            log.append(keys[cut:], [b""] * (each - cut), batch[cut:], timestamp_us=number, tags=("vip",))
        else:
            tag = "vip" if number % 400 < 4 else "eu"
            log.append(keys, [b""] * each, batch, timestamp_us=number, tags=(tag,))
        commit(log)
    log.note_watermark()


def tasks(folder: Path, partition: int) -> list[Task]:
    access = open_access(path=str(folder))
    ends = access.topic("bench").partitions[partition]
    return plan(access, {("bench", partition): (ends.start, ends.high_watermark)})


def decoded(found: list[Task], columns: tuple[str, ...] = KAFKA_COLUMNS, tags: str | None = None) -> int:
    return sum(int(batch.num_rows) for task in found for batch in read(task, columns=columns, tags=tags))


def bare(folder: Path, log: PartitionLog) -> None:
    for segment in log.segments:
        number = os.open(folder / segment.path, os.O_RDONLY)
        left = segment.end_position
        while left > 0:
            left -= len(os.read(number, min(BLOCK, left)))
        os.close(number)


def claim() -> list[Claim]:
    with scratch_folder() as folder:
        directory = open_directory(folder)
        config = LogConfig(durability="sync", compression="lz4", batch_bytes_max=1 << 30)
        large, small, even = new_logs(directory, 3, config)
        fill(large, LARGE)
        fill(small, SMALL)
        fill(even, LARGE, even=True)
        stored = sum(segment.end_position for segment in large.segments)
        of_large, of_small, of_even = (tasks(folder, number) for number in range(3))
        assert decoded(of_large) == decoded(of_small) == decoded(of_even) == RECORDS // LARGE * LARGE
        wanted = decoded(of_large, tags="vip"), decoded(of_even, tags="vip")
        assert all(0.005 * RECORDS < count < 0.02 * RECORDS for count in wanted), wanted
        whole, joined, narrow, tagged, whole_even, tagged_even, blocks = interleaved(
            [
                lambda: decoded(of_large),
                lambda: decoded(of_small),
                lambda: decoded(of_large, columns=("timestamp", "offset")),
                lambda: decoded(of_large, tags="vip"),
                lambda: decoded(of_even),
                lambda: decoded(of_even, tags="vip"),
                lambda: bare(folder, large),
            ],
            ROUNDS,
        )
    gigabytes = RECORDS * VALUE_BYTES / 1e9
    read_bare = f"bare read of the files {stored / 1e9 / blocks:.1f} GB/s"
    return [
        Claim(
            "decode lz4 batches of 256 KB",
            gigabytes / whole,
            1.0,
            unit="GB/s",
            detail=f"of values, packed to {stored / (gigabytes * 1e9):.2f}, hashes checked; {read_bare}",
        ),
        Claim(
            "batches of 16 KB beside those of 256 KB",
            joined / whole,
            1.3,
            unit="times the cost",
            better=Better.LESS,
            detail=f"{gigabytes / joined:.2f} GB/s of values",
        ),
        Claim(
            "1 % by tag, in runs of batches, beside all of it",
            whole / tagged,
            5.0,
            detail="batches that cannot hold one are passed over by their summary",
        ),
        Claim(
            "1 % by tag, some in every batch, beside all of it",
            whole_even / tagged_even,
            None,
            detail="every batch is read, checked and unpacked; what is saved is the rows",
        ),
        Claim(
            "two columns of fixed size beside all of Kafka's",
            whole / narrow,
            None,
            detail="the larger block of each batch stays packed",
        ),
    ]
