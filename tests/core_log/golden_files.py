"""What the golden files hold, made by the present code. `python -m tests.core_log.golden_files` writes them anew.

The files are the format: they were written once and are kept, so that a change of the code that changes bytes on the
disk cannot pass unnoticed. Rewrite them only together with a new version number in the format, and keep those of
the old one: what was written by an earlier release is still read (the folder version-1).
"""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from headrace.core_log.checkpoint import Checkpoint, CheckpointFile
from headrace.core_log.config import LogConfig
from headrace.core_log.epochs import EpochHistory, EpochStart
from headrace.core_log.format import SEGMENT_HEAD_SIZE, SegmentHead, encode, encode_segment_head, stamp
from headrace.core_log.index import SparseIndex
from headrace.core_log.journal import PATH, CommitJournal
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.producers import ProducerTable
from headrace.core_log.record import (
    PERSISTENT,
    RETAIN,
    Gap,
    Producer,
    Protocol,
    RecordBatch,
    RouteReference,
    RouteSet,
    gap_batch,
)
from headrace.core_log.segment import Segment
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.memory import MemoryStorage

from .directories import MANY_ROUTES, NOW_US, open_directory

FOLDER = Path(__file__).parent / "golden"
SALT = 0x0123_4567_89AB_CDEF
CONFIG = LogConfig(compression="none", retention_bytes=10**9)


def plain() -> RecordBatch:
    batch = RecordBatch(5, 1)
    batch.add([b"orders.eu"] * 3, [b""] * 3, [b"one", b"two", b"3"], timestamp_us=NOW_US)
    return batch


def every_column() -> RecordBatch:
    batch = RecordBatch(2**33, 7, Producer(bytes(range(16)), 3, 1000))
    batch.add(
        [b"a.b", b"a.c"],
        [b"\x01\x02", b""],
        [b"first", b""],
        timestamp_us=NOW_US,
        attributes=Protocol.AMQP | PERSISTENT | 5 << 16,
        expiry_us=NOW_US + 60_000_000,
        route_set=(1, 2, 3),
        tags=("eu", "größe"),
        headers=[((b"trace", b"\x00\xff"), (b"x", b"")), ()],
    )
    batch.add(
        [b"a.b"],
        [b"p"],
        [b"third"],
        timestamp_us=NOW_US - 1,
        attributes=Protocol.MQTT_5 | RETAIN | 1 << 5,
        route_set=MANY_ROUTES,
        origin=42,
        tags=("eu",),
    )
    batch.route_sets.append(RouteReference(2**33 - 9, 1))
    batch.add([b"z"], [b""], [b"4"], timestamp_us=NOW_US)
    batch.routes.values[-1] = len(batch.route_sets) - 1
    return batch


def compacted() -> RecordBatch:
    batch = RecordBatch(100, 2)
    batch.add([b"k1", b"k2"], [b"", b""], [b"last of k1", b"last of k2"], timestamp_us=NOW_US)
    batch.offsets = [103, 170]
    batch.span = 80
    return batch


def compressible() -> RecordBatch:
    batch = RecordBatch(0, 1)
    values = [b"a value like its neighbours"] * 40
    batch.add([b"key"] * 40, [b"properties"] * 40, values, timestamp_us=NOW_US, tags=("eu", "größe"))
    return batch


def stored(batch: RecordBatch, compress: str = "none") -> bytes:
    place = {"base_offset": int(batch.base_offset), "leader_epoch": int(batch.epoch), "leader_id": 2}
    return b"".join(stamp(encode(batch, compress=compress), salt=SALT, durable_offset=4, **place))


STREAM = UUID("6513270e-269e-4d37-b2a7-4de452e6b438")
END_OFFSET = 16


def batches() -> list[RecordBatch]:
    """What the golden segment holds: contiguous, with a large route set spelled out and then referred to."""
    first = RecordBatch(0, 1)
    first.add([b"a", b"b"], [b"", b"p"], [b"v" * 150, b"w"], timestamp_us=NOW_US, tags=("eu", "vip"))
    spelled = RecordBatch(2, 1)
    spelled.add([b"a"], [b""], [b"x" * 200], timestamp_us=NOW_US + 2, route_set=MANY_ROUTES)
    referring = RecordBatch(3, 1)
    referring.add([b"c"] * 2, [b""] * 2, [b"y" * 90, b"z" * 90], timestamp_us=NOW_US + 1, route_set=MANY_ROUTES)
    gap = gap_batch(5, 15, 2, Gap.UNCLEAN_START)
    last = RecordBatch(15, 3, Producer(b"p" * 16, 1, 7))
    last.add([b"\xfe\xff"], [b""], [b"last"], timestamp_us=NOW_US + 9, headers=[((b"h", b"\x00"),)])
    return [first, spelled, referring, gap, last]


def pieces() -> list[bytes]:
    """The segment's head and its batches."""
    found = [encode_segment_head(SegmentHead(SALT, 0, STREAM.bytes, 0))]
    known: dict[RouteSet, RouteReference] = {}
    for batch in batches():
        body = encode(batch, known_sets=known)
        place = {"base_offset": int(batch.base_offset), "leader_epoch": int(batch.epoch)}
        found.append(b"".join(stamp(body, salt=SALT, durable_offset=0, first_of_segment=len(found) == 1, **place)))
        known |= {one: RouteReference(int(batch.base_offset), entry) for one, entry in body.defined.items()}
    return found


def segment_in(storage: MemoryStorage, folder: str, data: bytes) -> Segment:
    storage.make_dir(folder)
    segment = Segment(storage, folder, 0, END_OFFSET)
    storage.replace_file(segment.path, data)
    return segment


def index_file(suffix: str) -> bytes:
    storage = MemoryStorage()
    index = SparseIndex(0, SEGMENT_HEAD_SIZE, 256)
    for batch, data in zip(batches(), pieces()[1:], strict=True):
        newest = None if batch.gap is not None else max(batch.timestamps.values)
        index.add(int(batch.next_offset), len(data), newest)
    index.save(storage, "00", SALT)
    return storage.read_file("00" + suffix)


def keys() -> bytes:
    storage = MemoryStorage()
    segment = segment_in(storage, "p", b"".join(pieces()))
    KeyIndex.build(storage, segment)
    return storage.read_file(segment.stem + ".keys")


CHECKPOINTS = (
    Checkpoint(0, 0, 10, 500, 1000, 1, 0),
    Checkpoint(7, 20, 2**40, 2**33, 2**40 + 1000, 3, 2),
)


def watermark() -> bytes:
    storage = MemoryStorage()
    file = CheckpointFile(storage, "watermark")
    file.create(CHECKPOINTS[0])
    file.write(CHECKPOINTS[1], sync=True)
    return storage.read_file("watermark")


def table() -> ProducerTable:
    made = ProducerTable(expiry_us=10**12, count_max=10)
    made.note(Producer(b"a" * 16, 1, 0), 5, NOW_US)
    made.note(Producer(b"a" * 16, 1, 10), 2, NOW_US + 1)
    made.note(Producer(b"b" * 16, 9, 2**40), 1, NOW_US)
    made.next_offset = 77
    return made


def producers() -> bytes:
    return table().encode(NOW_US)


class FixedIds:
    def uuid(self) -> UUID:
        return STREAM

    def salt(self) -> int:
        return SALT + 1


def journal() -> bytes:
    """Two batches of the golden segment, as one commit of two partitions wrote them."""
    storage = MemoryStorage()
    segment = segment_in(storage, "p", b"".join(pieces()))
    positions = [position for position, _ in segment.headers()]
    jobs: list[Any] = [
        SimpleNamespace(
            log=SimpleNamespace(stream_id=STREAM, partition=number),
            writes=[(segment, positions[number], [pieces()[1 + number][:100], pieces()[1 + number][100:]])],
            segments=[segment],
        )
        for number in range(2)
    ]
    CommitJournal(storage, FixedIds(), 2048).commit(jobs)
    return storage.read_file(PATH)


def epochs() -> bytes:
    return EpochHistory([EpochStart(1, 0, 0), EpochStart(4, 2, 13)]).encode()


def stream_json() -> bytes:
    storage = MemoryStorage()
    spec = StreamSpec(id=STREAM, name="golden", kind="topic", created_us=NOW_US, config=CONFIG)
    open_directory(storage).create_now(spec)
    return storage.read_file(f"streams/{STREAM}/stream.json")


GOLDEN: dict[str, Callable[[], bytes]] = {
    "batch-plain": lambda: stored(plain()),
    "batch-every-column": lambda: stored(every_column()),
    "batch-compacted": lambda: stored(compacted()),
    "batch-lz4": lambda: stored(compressible(), "lz4"),
    "batch-gap": lambda: stored(gap_batch(50, 2**32, 3, Gap.UNCLEAN_START)),
    "batch-gap-of-an-election": lambda: stored(gap_batch(50, 1_000_050, 3, Gap.UNCLEAN_ELECTION)),
    "segment": lambda: b"".join(pieces()),
    "index": lambda: index_file(".index"),
    "timeindex": lambda: index_file(".timeindex"),
    "keys": keys,
    "watermark": watermark,
    "producers": producers,
    "journal": journal,
    "epochs": epochs,
    "stream.json": stream_json,
}


def path_of(name: str, version: int = 2) -> Path:
    folder = FOLDER if version == 2 else FOLDER / f"version-{version}"
    return folder / (name if "." in name else f"{name}.bin")


if __name__ == "__main__":
    for name, make in GOLDEN.items():
        path_of(name).write_bytes(make())
    print(f"{len(GOLDEN)} golden files written; a diff in them is a change of the format on the disk")
