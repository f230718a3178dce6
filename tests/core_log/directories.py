"""Small data directories for tests: every kind of batch, several segments, seeded and without threads."""

from collections.abc import Callable
from random import Random
from typing import TypeVar
from uuid import UUID

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory, Stream
from headrace.core_log.env import Env
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, Producer, Protocol
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.contract import Storage

T = TypeVar("T")
NOW_US = 1_700_000_000_000_000
# More ids than are spelled out in every batch.
MANY_ROUTES = tuple(range(1000, 1100))


class Clock:
    def monotonic(self) -> float:
        return NOW_US / 1e6

    def wall_us(self) -> int:
        return NOW_US

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


class Ids:
    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def salt(self) -> int:
        return self._random.getrandbits(64) | 1


class Here:
    async def run(self, call: Callable[[], T]) -> T:
        return call()


def env_on(storage: Storage, seed: int = 1) -> Env:
    return Env(clock=Clock(), storage=storage, worker=Here(), ids=Ids(seed), random=Random(seed))


def open_directory(storage: Storage, *, clean: bool = False, seed: int = 1) -> LogDirectory:
    return LogDirectory.open_now(env_on(storage, seed), DirectoryConfig(), clean=clean)


def add_stream(
    directory: LogDirectory, name: str, config: LogConfig, *, partitions: int = 1, kind: str = "topic", vhost: str = "/"
) -> Stream:
    spec = StreamSpec(
        id=directory.env.ids.uuid(), name=name, kind=kind, vhost=vhost, partition_count=partitions, config=config
    )
    stream = directory.streams[spec.id] = directory.create_now(spec)
    return stream


def commit(log: PartitionLog) -> None:
    log.seal()
    job = log.begin_sync()
    if job is not None:
        log.run_sync(job)
        log.finish_sync(job)
    log.note_watermark()


def append(log: PartitionLog, count: int, *, size: int = 40, first: int | None = None, **more: object) -> None:
    """`count` records whose values say which they are."""
    start = int(log.end) if first is None else first
    values = [f"value {start + number} ".encode().ljust(size, b".") for number in range(count)]
    keys = [f"key.{(start + number) % 7}".encode() for number in range(count)]
    log.append(keys, [b""] * count, values, timestamp_us=NOW_US + start, **more)  # type: ignore[arg-type]


def fill(log: PartitionLog) -> None:
    """One batch of each kind, each committed: plain, tags, headers, expiry, large routes twice, a producer's."""
    append(log, 3)
    commit(log)
    append(log, 2, tags=("eu", "vip"), attributes=Protocol.AMQP | PERSISTENT)
    append(log, 2, tags=("us",), headers=[((b"trace", b"\xff\x00"),), ()], expiry_us=NOW_US + 5)
    commit(log)
    append(log, 1, route_set=MANY_ROUTES)
    commit(log)
    append(log, 2, route_set=MANY_ROUTES)
    commit(log)
    log.append_once(Producer(b"p" * 16, 1, 7), [b"k"], [b"pp"], [b"once"], timestamp_us=NOW_US)
    commit(log)
    log.append([b"\xfe\xff", b""], [b"a\x1b[2J", b""], [b"\x00\x9b", b""], timestamp_us=NOW_US + 9, origin=77)
    commit(log)


SMALL = LogConfig(segment_bytes_max=1500, batch_bytes_max=4096, index_interval_bytes=256, offsets_reserved=1000)


def filled_directory(storage: Storage, *, config: LogConfig = SMALL, rounds: int = 4) -> LogDirectory:
    """`orders` with two partitions of several segments each, and a queue of the same name in another vhost."""
    directory = open_directory(storage)
    orders = add_stream(directory, "orders", config, partitions=2)
    for log in orders.partitions:
        for _ in range(rounds):
            fill(log)
        for segment in log.segments[:-1]:
            KeyIndex.build(storage, segment)
    (queue,) = add_stream(directory, "orders", config, kind="queue", vhost="shop").partitions
    append(queue, 5)
    commit(queue)
    return directory


def only_log(directory: LogDirectory) -> PartitionLog:
    (stream,) = directory.streams.values()
    return stream.partitions[0]
