"""Passing over what nobody wants: nothing wanted is passed over, and indexes are used where they are."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.config import LogConfig
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.key_scan import KEYS_MAX, KeyScan, Wish
from headrace.core_log.log import PartitionLog
from headrace.core_log.storage.memory import MemoryStorage

from .directories import add_stream, commit, open_directory

CONFIG = LogConfig(segment_bytes_max=1 << 20, compression="none")
key = st.sampled_from([b"", b"a", b"a.b", b"a.b.c", b"ab", b"b"])


def filled(batches: list[list[bytes]], *, per_segment: int = 3) -> tuple[MemoryStorage, PartitionLog]:
    """A log with some batches in each segment."""
    storage = MemoryStorage()
    (log,) = add_stream(open_directory(storage), "keys", CONFIG).partitions
    for number, keys in enumerate(batches):
        log.append(keys, [b""] * len(keys), [b"v"] * len(keys), timestamp_us=1)
        if number % per_segment == per_segment - 1:
            # One that nearly fills the segment, so that the next begins another.
            log.append([b"filler"], [b""], [b"x" * (1 << 20)], timestamp_us=1)
        commit(log)
    return storage, log


def build_indexes(storage: MemoryStorage, log: PartitionLog) -> None:
    for segment in log.segments[:-1]:
        KeyIndex.build(storage, segment)


def wanted_offsets(log: PartitionLog, wish: Wish) -> set[int]:
    found = set()
    for run in log.read(0, bytes_max=1 << 30):
        for index in range(run.first, run.last):
            one = run.batch.keys[index]
            if one == wish.prefix if wish.accepts is None else one.startswith(wish.prefix) and wish.accepts(one):
                found.add(run.batch.offset_at(index))
    return found


@given(st.lists(st.lists(key, min_size=1, max_size=4), min_size=4, max_size=10), key, st.booleans())
def test_nothing_wanted_is_passed_over(batches: list[list[bytes]], prefix: bytes, exact: bool) -> None:
    storage, log = filled(batches)
    build_indexes(storage, log)
    wish = Wish(prefix) if exact else Wish(prefix, lambda one: True)
    scan = KeyScan(storage, log)
    read: set[int] = set()
    offset = 0
    while offset < log.end:
        found = scan.find(offset, [wish])
        for start, end in [(offset, found.end_offset)] if found.ranges is None else found.ranges:
            read.update(range(start, end))
        assert found.end_offset > offset
        offset = found.end_offset
    assert wanted_offsets(log, wish) <= read


def test_segment_without_the_key_is_not_read() -> None:
    storage, log = filled([[b"a"], [b"b"], [b"c"], [b"a"]])
    build_indexes(storage, log)
    found = KeyScan(storage, log).find(0, [Wish(b"b")])
    assert found.ranges == [(1, 2)]
    assert KeyScan(storage, log).find(0, [Wish(b"zzz")]).ranges == []


def test_segment_without_an_index_is_read_as_a_whole() -> None:
    storage, log = filled([[b"a"], [b"b"], [b"c"], [b"a"]])
    assert KeyScan(storage, log).find(0, [Wish(b"zzz")]).ranges is None


def test_wish_that_very_many_keys_could_fulfil_is_not_looked_into() -> None:
    storage, log = filled([[b"%d" % number for number in range(KEYS_MAX + 1)], [b"b"], [b"c"], [b"d"]])
    build_indexes(storage, log)
    assert KeyScan(storage, log).find(0, [Wish(b"", lambda one: False)]).ranges is None
