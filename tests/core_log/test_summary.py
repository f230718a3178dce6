"""The small Bloom filter of a batch: its numbers are fixed, and it never denies what is inside."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import CorruptLog
from headrace.core_log.log import PartitionLog
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.summary import ENTRIES_MAX, key_hash, may_hold, may_hold_any, summarise, tag_hash

from .directories import add_stream, commit, only_log, open_directory

hashes = st.sets(st.integers(0, 2**64 - 1), max_size=60)


@given(hashes)
def test_what_is_inside_is_never_denied(entries: set[int]) -> None:
    summary = summarise(entries)
    assert all(may_hold(summary, entry) for entry in entries)


@given(hashes)
def test_order_of_entries_does_not_matter(entries: set[int]) -> None:
    assert summarise(sorted(entries)) == summarise(sorted(entries, reverse=True))


@pytest.mark.parametrize(("count", "bits"), [(0, 64), (1, 64), (8, 64), (9, 128), (17, 256), (512, 4096)])
def test_size_is_a_power_of_two_with_eight_bits_for_each(count: int, bits: int) -> None:
    assert 8 * len(summarise([key_hash(str(number).encode()) for number in range(count)])) == bits


def test_too_many_entries_give_no_summary_and_nothing_is_denied() -> None:
    assert summarise(range(ENTRIES_MAX + 1)) == b""
    assert may_hold(b"", 12345)


def test_most_of_what_is_not_inside_is_denied() -> None:
    summary = summarise([tag_hash(f"tag {number}") for number in range(512)])
    wrong = sum(may_hold(summary, tag_hash(f"other {number}")) for number in range(10_000))
    # Four probes at eight bits for each entry: 2.4 % by theory.
    assert wrong < 400


def test_numbers_of_the_format_are_fixed() -> None:
    assert tag_hash("eu") == 0xD7B3_9D21_8FF2_F1AF
    assert key_hash(b"eu") == 0xD58A_B842_EB27_AC93
    # Bits 5, 8, 11 and 14: the lower half says where to begin, the upper half (made odd) how far to step.
    assert summarise([0x0000_0002_0000_0005]).hex() == "2049000000000000"


@given(hashes, hashes)
def test_any_of_many_is_as_each_of_them(inside: set[int], asked: set[int]) -> None:
    summary = summarise(inside)
    assert may_hold_any(summary, asked) == any(may_hold(summary, entry) for entry in asked)


# -- passing over batches unread --------------------------------------------------------------------------------


def tagged_log(seed: int) -> tuple[MemoryStorage, PartitionLog]:
    """Small and large batches, some tagged, over several segments, with a gap in between."""
    random = Random(seed)
    storage = MemoryStorage()
    directory = open_directory(storage)
    config = LogConfig(segment_bytes_max=300_000, compression="none", offsets_reserved=50)
    (log,) = add_stream(directory, "tagged", config).partitions
    for number in range(60):
        if number == 30:
            storage = storage.process_crash()
            log = only_log(open_directory(storage, seed=2))
        size = random.choice([1, 50, 40_000])
        count = random.randrange(1, 4)
        tags = random.choice([(), ("a",), ("a", "b"), ("c",)])
        key = random.choice([b"k1", b"k2"])
        log.append([key] * count, [b""] * count, [bytes(size)] * count, timestamp_us=number, tags=tags)
        commit(log)
    return storage, log


def reading_all(log: PartitionLog, tag: str, start: int, end: int) -> set[int]:
    """Offsets of the batches that hold the tag and have an offset in start..end-1."""
    found = set()
    offset = start
    while offset < end:
        for run in log.read(offset, end=end):
            offset = int(run.batch.next_offset)
            if any(tag in run.batch.tags_at(index) for index in range(run.batch.count)):
                found.add(int(run.batch.base_offset))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_scan_finds_every_batch_that_reading_all_finds_wherever_it_begins_and_ends(seed: int) -> None:
    _storage, log = tagged_log(seed)
    random = Random(seed)
    assert len(log.segments) > 3
    for _ in range(20):
        start = random.randrange(log.high_watermark)
        end = random.randrange(start, log.high_watermark + 1)
        for tag in ("a", "b", "nobody"):
            found = list(log.scan(start, [tag_hash(tag)], end=end))
            offsets = [int(batch.base_offset) for batch in found]
            assert offsets == sorted(set(offsets))
            assert reading_all(log, tag, start, end) <= set(offsets)
            assert all(batch.next_offset > start and batch.base_offset < end for batch in found)
    assert list(log.scan(0, [tag_hash("nobody")])) == []
    both = {int(batch.base_offset) for batch in log.scan(0, [tag_hash("b"), key_hash(b"k1")])}
    assert reading_all(log, "b", 0, int(log.high_watermark)) < both


def test_scan_over_damage_is_refused_and_not_passed_over() -> None:
    storage, log = tagged_log(1)
    position = list(log.segments[0].headers())[3][0]
    storage.flip_bit(log.segments[0].path, position + 9)
    with pytest.raises(CorruptLog, match="no batch where one must be"):
        list(log.scan(0, [tag_hash("nobody")]))
