"""Segment files between two uses."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from headrace.core_log.pool import FOLDER, SegmentPool
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage


def make(storage: MemoryStorage, name: str, size: int) -> str:
    storage.open(name, create=True).write(0, [bytes(size)])
    return name


def test_given_file_is_taken_by_size() -> None:
    storage = MemoryStorage()
    pool = SegmentPool(storage, 3)
    pool.give(make(storage, "small", 10))
    pool.give(make(storage, "large", 1000))
    assert len(pool) == 2
    taken = pool.take(500, 1500)
    assert taken is not None
    assert storage.open(taken).size() == 1000
    assert pool.take(500, 1500) is None
    assert len(pool) == 1


def test_one_more_than_the_pool_holds_is_removed() -> None:
    storage = MemoryStorage()
    pool = SegmentPool(storage, 1)
    pool.give(make(storage, "first", 10))
    pool.give(make(storage, "second", 10))
    assert len(pool) == 1
    assert not storage.exists("second")
    assert len(storage.list(FOLDER)) == 1


@pytest.mark.parametrize("count_max", [0, 1, 5])
def test_pool_finds_its_files_after_a_start_and_gives_no_name_twice(count_max: int) -> None:
    storage = MemoryStorage()
    pool = SegmentPool(storage, 5)
    for number in range(3):
        pool.give(make(storage, f"file{number}", 10 + number))
    again = SegmentPool(storage, count_max)
    assert len(again) == 3
    assert again.take(12, 12) is not None
    again.give(make(storage, "another", 99))
    assert len(storage.list(FOLDER)) == (4 if count_max == 5 else 3)


def test_threads_that_give_and_take_at_once_share_no_name_and_keep_to_the_bound(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    pool = SegmentPool(storage, 10)
    names = [f"{thread}-{number}" for thread in range(4) for number in range(50)]
    for name in names:
        storage.open(name, create=True).write(0, [name.encode()])
    taken: list[str] = []

    def work(thread: int) -> None:
        for number in range(50):
            pool.give(f"{thread}-{number}")
            path = pool.take(0, 100)
            if path is not None:
                taken.append(storage.read_file(path).decode())
                storage.remove(path)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    left = [storage.read_file(f"{FOLDER}/{name}").decode() for name in storage.list(FOLDER)]
    assert len(left) == len(pool) <= 10
    assert len({*taken, *left}) == len(taken) + len(left)
    assert {*taken, *left} <= set(names)
