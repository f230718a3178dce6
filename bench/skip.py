"""Claims: finding the few batches that may hold a tag, by the summaries in their headers. Driver: files.

One of 10,000 batches holds the tag. The same log is read whole beside it, record lists and all, and filtered.
"""

from bench.claim import Claim
from bench.scratch import commit, interleaved, new_logs, open_directory, scratch_folder
from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog
from headrace.core_log.summary import tag_hash

BATCHES = 10_000
RECORDS = 100
VALUE = b"v" * 100
WANTED = 7_777
ROUNDS = 5


def fill(log: PartitionLog) -> None:
    keys, properties, values = [b"orders.eu"] * RECORDS, [b""] * RECORDS, [VALUE] * RECORDS
    for number in range(BATCHES):
        tag = "wanted" if number == WANTED else f"tag {number % 100}"
        log.append(keys, properties, values, timestamp_us=number, tags=("eu", tag))
        log.seal()
    commit(log)


def skip_scan(log: PartitionLog) -> int:
    found = 0
    for batch in log.scan(0, [tag_hash("wanted")]):
        found += sum("wanted" in batch.tags_at(index) for index in range(batch.count))
    return found


def read_all(log: PartitionLog) -> int:
    found = offset = 0
    while offset < log.high_watermark:
        for run in log.read(offset):
            batch = run.batch
            places = {place for place, tags in enumerate(batch.tag_sets) if "wanted" in tags}
            found += sum(last - first for place, first, last in batch.tags.spans(0, batch.count) if place in places)
            offset = int(batch.next_offset)
    return found


def claim() -> list[Claim]:
    with scratch_folder() as folder:
        directory = open_directory(folder)
        (log,) = new_logs(directory, 1, LogConfig(durability="interval", compression="none"))
        fill(log)
        directory.close_now()
        directory = open_directory(folder, clean=True)
        ((log,),) = [stream.partitions for stream in directory.streams.values()]
        assert skip_scan(log) == read_all(log) == RECORDS
        skipping, reading = interleaved([lambda: skip_scan(log), lambda: read_all(log)], ROUNDS)
    batches = f"{BATCHES:,} batches of {RECORDS} records"
    detail = f"{batches}: {skipping * 1e3:.0f} ms against {reading * 1e3:.0f} ms for reading all"
    return [Claim("skip-scan by tag summary beside reading all", reading / skipping, 10.0, detail=detail)]
