"""The keys of a sealed segment: each leads to exactly the batches that hold it."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.config import LogConfig
from headrace.core_log.key_index import SUFFIX, KeyIndex
from headrace.core_log.segment import Segment
from headrace.core_log.storage.memory import MemoryStorage

from .directories import add_stream, commit, open_directory

CONFIG = LogConfig(segment_bytes_max=1 << 20)
key = st.sampled_from([b"", b"a", b"a.b", b"a.b.c", b"ab", b"b", b"\xff\xff", b"\xff"])
batches_of_keys = st.lists(st.lists(key, min_size=1, max_size=6), min_size=1, max_size=8)


def segment_with(batches: list[list[bytes]]) -> tuple[MemoryStorage, Segment]:
    storage = MemoryStorage()
    (log,) = add_stream(open_directory(storage), "keys", CONFIG).partitions
    for keys in batches:
        log.append(keys, [b""] * len(keys), [b"v"] * len(keys), timestamp_us=1)
        commit(log)
    return storage, log.segments[0]


@given(batches_of_keys)
def test_each_key_leads_to_the_batches_that_hold_it(batches: list[list[bytes]]) -> None:
    storage, segment = segment_with(batches)
    index = KeyIndex.build(storage, segment)
    assert index.keys == sorted({one for keys in batches for one in keys})
    headers = list(segment.headers())
    assert index.positions == [position for position, _ in headers]
    assert index.base_offsets == [header.base_offset for _, header in headers]
    for one in index.keys:
        assert index.batches_of(one) == [place for place, keys in enumerate(batches) if one in keys]
    assert index.batches_of(b"nobody") == []


@given(batches_of_keys, key)
def test_prefix_and_filter_find_what_a_walk_over_all_keys_finds(batches: list[list[bytes]], prefix: bytes) -> None:
    storage, segment = segment_with(batches)
    index = KeyIndex.build(storage, segment)
    assert list(index.keys_from(prefix)) == [one for one in index.keys if one.startswith(prefix)]
    wanted = {place for place, keys in enumerate(batches) if any(one.startswith(prefix) for one in keys)}
    assert index.batches_matching(lambda one: True, prefix) == sorted(wanted)
    assert index.batches_matching(lambda one: one.endswith(b"b")) == [
        place for place, keys in enumerate(batches) if any(one.endswith(b"b") for one in keys)
    ]


def same(one: KeyIndex, other: KeyIndex) -> bool:
    return one.encode(1, 2) == other.encode(1, 2)


@given(batches_of_keys)
def test_saved_index_is_loaded_as_it_was(batches: list[list[bytes]]) -> None:
    storage, segment = segment_with(batches)
    built = KeyIndex.build(storage, segment)
    loaded = KeyIndex.maybe_load(storage, segment)
    assert loaded is not None and same(loaded, built)


def test_missing_index_is_built_when_it_is_asked_for() -> None:
    storage, segment = segment_with([[b"a"], [b"b"]])
    assert not KeyIndex.exists(storage, segment)
    assert KeyIndex.maybe_load(storage, segment) is None
    built = KeyIndex.load(storage, segment)
    assert KeyIndex.exists(storage, segment)
    assert same(built, KeyIndex.load(storage, segment))


def test_index_that_does_not_fit_is_built_again() -> None:
    storage, segment = segment_with([[b"a"], [b"b"]])
    right = KeyIndex.build(storage, segment)
    name = segment.stem + SUFFIX
    data = storage.read_file(name)
    for position in range(len(data)):
        storage.flip_bit(name, position, position % 8)
        assert KeyIndex.maybe_load(storage, segment) is None, position
        assert same(KeyIndex.load(storage, segment), right)
        assert storage.read_file(name) == data
    for length in range(len(data)):
        storage.replace_file(name, data[:length])
        assert KeyIndex.maybe_load(storage, segment) is None, length
    storage.replace_file(name, right.encode(segment.salt + 1, segment.end_offset))
    assert KeyIndex.maybe_load(storage, segment) is None
    storage.replace_file(name, right.encode(segment.salt, segment.end_offset + 1))
    assert KeyIndex.maybe_load(storage, segment) is None


def test_gaps_hold_no_keys_and_are_left_out() -> None:
    storage, segment = segment_with([[b"a"]])
    heir = storage.process_crash()
    (log,) = next(iter(open_directory(heir, seed=2).streams.values())).partitions
    index = KeyIndex.build(heir, log.segments[0])
    assert len(list(log.segments[0].headers())) == 2
    assert index.positions == [64]
    assert segment.base_offset == 0
