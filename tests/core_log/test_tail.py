"""The newest batches in memory, bounded over all partitions."""

from collections import deque

from headrace.core_log.record import RecordBatch
from headrace.core_log.tail import RECORD_OVERHEAD_BYTES, Tail, TailCache


def batch(base: int, size: int) -> RecordBatch:
    made = RecordBatch(base, 1)
    made.add([b""], [b""], [bytes(size)], timestamp_us=0)
    return made


def test_oldest_of_all_partitions_make_room() -> None:
    cache = TailCache(3 * (100 + RECORD_OVERHEAD_BYTES))
    one: Tail = deque()
    other: Tail = deque()
    for number in range(2):
        cache.push(one, batch(number, 100))
        cache.push(other, batch(number, 100))
    assert [kept.base_offset for kept in one] == [1]
    assert [kept.base_offset for kept in other] == [0, 1]


def test_memory_is_bounded_whatever_comes() -> None:
    cache = TailCache(1000)
    tail: Tail = deque()
    for number in range(50):
        cache.push(tail, batch(number, 50 * number))
        assert cache.byte_count <= 1000
        assert sum(kept.byte_count for kept in tail) <= 1000


def test_batch_larger_than_the_cache_is_not_kept() -> None:
    cache = TailCache(10)
    tail: Tail = deque()
    cache.push(tail, batch(0, 100))
    assert (len(tail), cache.byte_count) == (0, 0)


def test_tail_that_was_cleared_gives_its_memory_back_in_its_turn() -> None:
    cache = TailCache(2 * (100 + RECORD_OVERHEAD_BYTES))
    one: Tail = deque()
    other: Tail = deque()
    cache.push(one, batch(0, 100))
    one.clear()
    cache.push(one, batch(5, 100))
    cache.push(other, batch(0, 100))
    assert [kept.base_offset for kept in one] == [5]
    assert len(other) == 1
