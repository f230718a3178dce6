"""The storage in memory: crashes, ordered faults and planted mistakes."""

from collections.abc import Callable
from random import Random

import pytest

from headrace.core_log.errors import DirectoryInUse, DiskFull, Poisoned, StorageError
from headrace.core_log.storage.memory import SECTOR_BYTES, MemoryStorage, Planted


def with_file(content: bytes = b"") -> MemoryStorage:
    """A storage with one durable file `a`."""
    storage = MemoryStorage()
    file = storage.open("a", create=True)
    file.write(0, [content])
    file.sync()
    storage.sync_dir("")
    return storage


# -- crashes


def test_process_crash_loses_nothing_written_and_makes_nothing_durable() -> None:
    storage = with_file(b"old")
    storage.open("a").write(0, [b"new"])
    storage.open("b", create=True).write(0, [b"b"])
    after = storage.process_crash()
    assert after.read_file("a") == b"new"
    assert after.read_file("b") == b"b"
    lost = after.after_power_loss(lambda _: False)
    assert lost.list("") == ["a"]
    assert lost.read_file("a") == b"old"


@pytest.mark.parametrize("crash", [MemoryStorage.process_crash, lambda storage: storage.power_loss(Random(1))])
def test_storage_is_dead_after_its_crash(crash: Callable[[MemoryStorage], MemoryStorage]) -> None:
    storage = with_file(b"data")
    file = storage.open("a")
    after = crash(storage)
    calls: list[Callable[[], object]] = [
        lambda: file.write(0, [b"x"]),
        lambda: file.read(0, 1),
        file.size,
        lambda: file.truncate(0),
        file.sync,
        file.fileno,
        lambda: storage.open("a"),
        lambda: storage.open("b", create=True),
        lambda: storage.exists("a"),
        lambda: storage.list(""),
        lambda: storage.make_dir("d"),
        lambda: storage.rename("a", "b"),
        lambda: storage.remove("a"),
        lambda: storage.remove_dir("d"),
        lambda: storage.sync_dir(""),
        lambda: storage.read_file("a"),
        lambda: storage.replace_file("a", b""),
        storage.free_bytes,
        storage.lock,
        storage.unlock,
        storage.process_crash,
        lambda: storage.power_loss(Random(1)),
    ]
    for call in calls:
        with pytest.raises(StorageError, match="crashed"):
            call()
    assert after.read_file("a") == b"data"


@pytest.mark.parametrize("crash", [MemoryStorage.process_crash, lambda storage: storage.power_loss(Random(1))])
def test_next_start_is_unlocked_unpoisoned_and_without_the_old_faults(
    crash: Callable[[MemoryStorage], MemoryStorage],
) -> None:
    storage = with_file()
    storage.lock()
    storage.fail("read", times=9)
    storage.fail("sync")
    with pytest.raises(Poisoned):
        storage.open("a").sync()
    after = crash(storage)
    assert not after.poisoned
    after.lock()
    after.open("a").sync()
    assert after.read_file("a") == b""
    with pytest.raises(DirectoryInUse):
        after.lock()


def outcomes(make: Callable[[], MemoryStorage], runs: int = 400) -> set[tuple[tuple[str, bytes], ...]]:
    found = set()
    for seed in range(runs):
        after = make().power_loss(Random(seed))
        found.add(tuple((name, after.read_file(name)) for name in after.list("")))
    return found


def test_power_loss_draws_every_combination_of_kept_and_lost() -> None:
    def make() -> MemoryStorage:
        storage = with_file(b"..")
        storage.open("a").write(0, [b"1"])
        storage.open("a").write(1, [b"2"])
        storage.open("b", create=True)
        return storage

    contents = (b"..", b"1.", b".2", b"12")
    expected = {(("a", content), *name) for content in contents for name in ((), (("b", b""),))}
    assert outcomes(make) == expected


def test_power_loss_tears_at_bytes_at_sectors_and_to_the_size_alone() -> None:
    length = 3 * SECTOR_BYTES
    start = SECTOR_BYTES // 2

    def make() -> MemoryStorage:
        storage = with_file()
        storage.open("a").write(start, [b"x" * length])
        return storage

    found = {dict(files)["a"] for files in outcomes(make, 10_000)}
    data = bytes(start) + b"x" * length
    heads = [content for content in found if content == data[: len(content)] and start < len(content) < len(data)]
    tails = [content for content in found if content.lstrip(b"\0") == b"x" * len(content.lstrip(b"\0"))]
    assert any(len(content) % SECTOR_BYTES for content in heads)
    assert any(len(content) % SECTOR_BYTES == 0 for content in heads)
    assert any(content.find(b"x") % SECTOR_BYTES not in (0, start) for content in tails if b"x" in content)
    assert bytes(start + length) in found
    sectors = {tuple(content[place : place + 1] == b"x" for place in (300, 600, 1200, 1700)) for content in found}
    assert len(sectors) == 16


def test_power_loss_is_the_same_for_the_same_seed() -> None:
    def run(seed: int) -> list[bytes]:
        storage, random, found = MemoryStorage(), Random(seed), []
        for turn in range(20):
            for number in range(4):
                name = f"{number}"
                file = storage.open(name, create=not storage.exists(name))
                file.write(turn * 7, [b"%d" % turn * 100])
                if number == turn % 5:
                    file.sync()
                    storage.sync_dir("")
            storage = storage.power_loss(random)
            found += [storage.read_file(name) for name in storage.list("")]
        return found

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_recycled_file_shows_its_old_content_where_the_new_is_lost() -> None:
    storage = with_file(b"old" * 1000)
    storage.rename("a", "b")
    storage.sync_dir("")
    storage.open("b").write(300, [b"new" * 300])
    after = storage.after_power_loss(lambda _: ((0, 212), (724, 900)))
    assert (
        after.read_file("b")
        == (b"old" * 1000)[:300]
        + (b"new" * 300)[:212]
        + (b"old" * 1000)[512:1024]
        + (b"new" * 300)[724:]
        + (b"old" * 1000)[1200:]
    )


# -- ordered faults


def test_nth_sync_fails_and_those_before_it_hold() -> None:
    storage = with_file()
    file = storage.open("a")
    storage.fail("sync", nth=3)
    for turn in range(2):
        file.write(turn, [b"x"])
        file.sync()
    file.write(2, [b"x"])
    with pytest.raises(Poisoned, match="a: sync failed: Input/output error"):
        file.sync()
    assert storage.after_power_loss(lambda _: False).read_file("a") == b"xx"


def test_refused_sync_dooms_nothing() -> None:
    storage = with_file()
    storage.open("b", create=True).write(0, [b"b"])
    storage.sync_dir("")
    storage.fail("sync", path="a")
    for name in ("a", "b"):
        with pytest.raises(Poisoned):
            storage.open(name).sync()
    after = storage.process_crash()
    after.open("b").sync()
    assert after.after_power_loss(lambda _: False).read_file("b") == b"b"


def test_fault_of_one_path_leaves_the_others_alone() -> None:
    storage = with_file(b"a")
    storage.replace_file("b", b"b")
    storage.fail("read", path="./a", times=2)
    assert storage.read_file("b") == b"b"
    for _ in range(2):
        with pytest.raises(StorageError, match="a: Input/output error"):
            storage.read_file("a")
    assert storage.read_file("a") == b"a"


def test_two_orders_count_the_same_calls() -> None:
    storage = with_file(b"a")
    storage.fail("read", nth=1)
    storage.fail("read", nth=2)
    for _ in range(2):
        with pytest.raises(StorageError):
            storage.read_file("a")
    assert storage.read_file("a") == b"a"


def test_failed_write_changes_nothing() -> None:
    storage = with_file(b"data")
    file = storage.open("a")
    storage.fail("write", times=2)
    with pytest.raises(StorageError):
        file.write(0, [b"x"])
    with pytest.raises(StorageError):
        file.truncate(0)
    assert file.read(0, 9) == b"data"
    assert storage.unsynced() == []


def test_write_on_a_full_disk_lands_as_far_as_it_fits() -> None:
    storage = with_file(b"1234")
    storage.capacity_bytes = 10
    file = storage.open("a")
    assert storage.free_bytes() == 6
    with pytest.raises(DiskFull):
        file.write(2, [b"abcdefghijkl"])
    assert file.read(0, 99) == b"12abcdefgh"
    assert storage.free_bytes() == 0
    file.write(0, [b"fits in pl"])
    with pytest.raises(DiskFull):
        file.write(20, [b"x"])
    assert file.size() == 10
    storage.capacity_bytes = None
    assert file.write(10, [b"more"]) == 4


def test_removed_file_gives_its_space_back() -> None:
    storage = with_file(b"1234")
    storage.capacity_bytes = 4
    storage.remove("a")
    assert storage.free_bytes() == 4


def test_flipped_bit_is_read_and_outlives_the_power() -> None:
    storage = with_file(b"\0\0\0")
    storage.flip_bit("a", 1, 7)
    assert storage.read_file("a") == b"\0\x80\0"
    assert storage.power_loss(Random(1)).read_file("a") == b"\0\x80\0"


# -- planted mistakes


@pytest.mark.parametrize(
    ("planted", "left"),
    [(None, [("a", b"x")]), ("no-sync", [("a", b"")]), ("no-dir-sync", []), ("no-poison", [("a", b"x")])],
)
def test_planted_mistake_takes_the_promise_of_its_sync_away(
    planted: Planted | None, left: list[tuple[str, bytes]]
) -> None:
    storage = MemoryStorage(planted=planted)
    file = storage.open("a", create=True)
    file.write(0, [b"x"])
    file.sync()
    storage.sync_dir("")
    after = storage.after_power_loss(lambda _: False)
    assert [(name, after.read_file(name)) for name in after.list("")] == left
    assert after.planted == planted


def test_without_poison_a_second_sync_lies() -> None:
    storage = MemoryStorage(planted="no-poison")
    file = storage.open("a", create=True)
    storage.sync_dir("")
    file.write(0, [b"x"])
    storage.fail("sync")
    with pytest.raises(Poisoned):
        file.sync()
    assert not storage.poisoned
    file.sync()
    assert storage.after_power_loss(lambda _: False).read_file("a") == b""
