"""Group commit: who is told, when, in which order, and what a failed sync or a full disk does to it."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from random import Random
from typing import TypeVar
from unittest.mock import patch
from uuid import UUID

import pytest
import trio
from trio.testing import MockClock

from headrace.core_log import committer as committer_module
from headrace.core_log.committer import FULL_DISK_PAUSE_S
from headrace.core_log.config import DirectoryConfig, Durability, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull, Poisoned
from headrace.core_log.log import PartitionLog
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.memory import MemoryStorage

from .power.inline import SeededIds, append, values_of

T = TypeVar("T")


class TrioClock:
    def monotonic(self) -> float:
        return trio.current_time()

    def wall_us(self) -> int:
        return int(trio.current_time() * 1e6)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)


class GatedWorker:
    """Calls wait at the gate while it is shut, as they would for a slow disk."""

    def __init__(self) -> None:
        self._open = trio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open = trio.Event()

    def open(self) -> None:
        self._open.set()

    async def run(self, call: Callable[[], T]) -> T:
        await self._open.wait()
        await trio.lowlevel.checkpoint()
        return call()


class Bench:
    def __init__(self, *, interval_ms: int = 100) -> None:
        self.storage = MemoryStorage()
        self.worker = GatedWorker()
        random = Random(1)
        env = Env(clock=TrioClock(), storage=self.storage, worker=self.worker, ids=SeededIds(random), random=random)
        self.directory = LogDirectory.open_now(env, DirectoryConfig(interval_ms=interval_ms), clean=False)
        self.committer = self.directory.committer
        self.told: list[str] = []

    def logs(self, count: int, config: LogConfig | None = None) -> list[PartitionLog]:
        number = UUID(int=len(self.directory.streams) + 1)
        spec = StreamSpec(id=number, name="s", kind="topic", partition_count=count, config=config or LogConfig())
        return self.directory.create_now(spec).partitions

    def publish(self, log: PartitionLog, name: str) -> None:
        log.when_committed(append(log, name.encode()), lambda: self.told.append(name))
        self.committer.urgent(log)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.committer.run)
            yield
            nursery.cancel_scope.cancel()

    def left(self) -> list[list[bytes]]:
        """What is in each log after a loss of power that takes all it may."""
        storage = self.storage.after_power_loss(lambda _: False)
        again = LogDirectory.open_now(replace(self.directory.env, storage=storage), DirectoryConfig(), clean=False)
        return [list(values_of(log).values()) for stream in again.streams.values() for log in stream.partitions]


async def test_everything_that_came_during_a_sync_is_the_next_group(autojump_clock: MockClock) -> None:
    bench = Bench()
    (log,) = bench.logs(1)
    async with bench.running():
        bench.worker.shut()
        bench.publish(log, "first")
        await trio.sleep(1)
        for number in range(5):
            bench.publish(log, f"next {number}")
        await trio.sleep(1)
        assert bench.told == []
        bench.worker.open()
        await bench.committer.flush()
    assert bench.told == ["first", *(f"next {number}" for number in range(5))]
    assert bench.committer.group_count == 2


async def test_o3_tickets_of_a_log_are_told_in_the_order_of_appends_by_plain_calls(autojump_clock: MockClock) -> None:
    bench = Bench()
    logs = bench.logs(4)
    random = Random(7)
    sent: dict[int, list[str]] = {number: [] for number in range(4)}
    async with bench.running():
        for count in range(200):
            number = random.randrange(4)
            sent[number].append(f"{number}:{count}")
            bench.publish(logs[number], f"{number}:{count}")
            if random.random() < 0.3:
                await trio.sleep(random.random() / 100)
        await bench.committer.flush()
    for number, names in sent.items():
        assert [name for name in bench.told if name.startswith(f"{number}:")] == names
    assert 1 < bench.committer.group_count < 200


async def test_others_have_their_turns_while_what_many_logs_gathered_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(committer_module, "STEP_BYTES", 1)
    bench = Bench()
    logs = bench.logs(10)
    for number, log in enumerate(logs):
        bench.publish(log, str(number))
    seen: list[int] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bench.committer.commit, logs)
        while len(bench.told) < 10:
            seen.append(sum(log.written_end for log in logs))
            await trio.lowlevel.checkpoint()
    assert len(set(range(1, 10)) & set(seen)) >= 4
    assert (bench.told, bench.committer.group_count) == ([str(number) for number in range(10)], 1)


async def test_d1_nobody_is_told_before_the_bytes_are_safe(autojump_clock: MockClock) -> None:
    bench = Bench()
    logs = bench.logs(3)

    def check() -> None:
        assert all(name.encode() in values for name, values in zip(names, bench.left(), strict=True))
        bench.told.append("checked")

    async with bench.running():
        for round_ in range(4):
            names = [f"{number}:{round_}" for number in range(3)]
            for log, name in zip(logs, names, strict=True):
                log.when_committed(append(log, name.encode()), check)
                bench.committer.urgent(log)
            await bench.committer.flush()
    assert len(bench.told) == 12
    assert bench.committer.journalled_count >= 2


async def test_a_commit_does_not_stall_who_appends_meanwhile(autojump_clock: MockClock) -> None:
    bench = Bench()
    (log,) = bench.logs(1)
    async with bench.running():
        bench.publish(log, "first")
        await bench.committer.flush()
        bench.worker.shut()
        bench.publish(log, "second")
        await trio.sleep(1)
        # The sync hangs, and appends, seals and early reads go on.
        for number in range(50):
            bench.publish(log, f"{number}")
            log.seal()
        assert log.early_end == 52
        assert len(log.read(2, end=52)) == 50
        bench.worker.open()
        await bench.committer.flush()
    assert len(bench.told) == 52


@contextmanager
def raises_in_group(kind: type[BaseException]) -> Iterator[None]:
    with pytest.raises(BaseExceptionGroup) as caught:
        yield
    assert caught.group_contains(kind)


@pytest.mark.parametrize("where", ["sync", "sync_dir"])
@pytest.mark.parametrize("count", [1, 4])
async def test_d6_failed_sync_tells_nobody_ends_the_committer_and_every_later_write(
    autojump_clock: MockClock, where: str, count: int
) -> None:
    bench = Bench()
    logs = bench.logs(count)
    with raises_in_group(Poisoned):
        async with bench.running():
            for log in logs:
                bench.publish(log, "first")
            bench.storage.fail("sync" if where == "sync" else "sync_dir")
            await trio.sleep(60)
    assert bench.told == []
    assert bench.storage.poisoned
    for log in logs:
        assert log.high_watermark == 0
        append(log, b"later")
        with pytest.raises(Poisoned):
            log.seal()
    with pytest.raises(Poisoned):
        bench.directory.close_now()
    assert bench.told == []


async def test_d6_failed_sync_of_the_journal_tells_nobody_of_the_group(autojump_clock: MockClock) -> None:
    bench = Bench()
    logs = bench.logs(3)
    with raises_in_group(Poisoned):
        async with bench.running():
            for log in logs:
                bench.publish(log, "first")
            await bench.committer.flush()
            bench.storage.fail("sync", path="journal", nth=2)
            for log in logs:
                bench.publish(log, "second")
            await trio.sleep(60)
    assert bench.told == ["first"] * 3


async def test_x5_full_disk_makes_publishers_wait_and_loses_nothing(autojump_clock: MockClock) -> None:
    bench = Bench()
    (log, other) = bench.logs(2, LogConfig(segment_bytes_max=70_000, compression="none"))
    async with bench.running():
        bench.publish(log, "first")
        await bench.committer.flush()
        bench.storage.capacity_bytes = 0
        bench.publish(log, "x" * 100_000)
        await trio.sleep(5)
        assert bench.told == ["first"]
        full = [bench.committer.disk_full]
        # No room for a first segment either.
        bench.publish(other, "other")
        await trio.sleep(5)
        assert bench.told == ["first"]
        bench.storage.capacity_bytes = None
        await trio.sleep(5)
        assert sorted(bench.told) == ["first", "other", "x" * 100_000]
        full.append(bench.committer.disk_full)
        assert full == [True, False]
    assert bench.left() == [[b"first", b"x" * 100_000], [b"other"]]


async def test_x5_full_disk_in_the_middle_of_a_commit_is_waited_for(autojump_clock: MockClock) -> None:
    bench = Bench()
    logs = bench.logs(3)
    async with bench.running():
        for log in logs:
            bench.publish(log, "first")
        await bench.committer.flush()
        # The segments have room, the journal that has to be made has not.
        bench.storage.capacity_bytes = 0
        for log in logs:
            bench.publish(log, "second")
        await trio.sleep(5)
        assert bench.told == ["first"] * 3
        bench.storage.capacity_bytes = None
        await trio.sleep(5)
    assert bench.told == ["first"] * 3 + ["second"] * 3
    assert bench.left() == [[b"first", b"second"]] * 3


@pytest.mark.parametrize(("begins_anew", "nth"), [(False, 1), (False, 2), (True, 1)])
async def test_x5_a_cut_on_a_full_disk_is_made_again_when_there_is_room(
    begins_anew: bool, nth: int, autojump_clock: MockClock
) -> None:
    """The simulator of clusters, seed 2104: it ended the node. Each file that a cut writes anew finds no room once."""
    bench = Bench()
    (log,) = bench.logs(1, LogConfig(segment_bytes_max=1024, replica_count=2, compression="none"))
    async with bench.running():
        for number in range(20):
            append(log, b"%d" % number * 100)
            await bench.committer.synced(log)
        replace_file, calls = bench.storage.replace_file, 0

        def replace_file_if_there_is_room(path: str, data: bytes) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise DiskFull(f"{path}: no room")
            replace_file(path, data)

        began = trio.current_time()
        with patch.object(bench.storage, "replace_file", replace_file_if_there_is_room), trio.fail_after(60):
            if begins_anew:
                await bench.committer.begin_at(log, 100)
            else:
                await bench.committer.cut(log, 7)
        assert calls > nth and trio.current_time() - began >= FULL_DISK_PAUSE_S
        end = 100 if begins_anew else 7
        assert (log.written_end, log.synced_end, log.high_watermark) == (end, end, end if begins_anew else 0)
        append(log, b"other")
        await bench.committer.synced(log)
        assert not bench.committer.disk_full
    kept = [] if begins_anew else [b"%d" % number * 100 for number in range(7)]
    log.advance_to(log.written_end)
    assert list(values_of(log).values()) == [*kept, b"other"]


async def test_interval_stream_is_told_when_written_and_synced_by_the_interval(autojump_clock: MockClock) -> None:
    bench = Bench(interval_ms=200)
    (log,) = bench.logs(1, LogConfig(durability="interval"))
    async with bench.running():
        # The first of a log is synced in any case: the promise not to issue its offset again.
        bench.publish(log, "first")
        await trio.sleep(1)
        bench.publish(log, "second")
        await trio.sleep(0.1)
        assert bench.told == ["first", "second"]
        assert bench.left() == [[b"first"]]
        await trio.sleep(0.2)
        assert bench.left() == [[b"first", b"second"]]


async def test_streams_that_are_only_written_do_not_wait_for_the_syncs_of_others(autojump_clock: MockClock) -> None:
    bench = Bench()
    (safe,) = bench.logs(1)
    (quick,) = bench.logs(1, LogConfig(durability="os"))
    async with bench.running():
        bench.publish(quick, "first")
        await trio.sleep(1)
        bench.worker.shut()
        bench.publish(safe, "safe")
        bench.publish(quick, "quick")
        await trio.sleep(1)
        assert bench.told == ["first", "quick"]
        bench.worker.open()
        await bench.committer.flush()
        assert bench.told == ["first", "quick", "safe"]


async def test_os_stream_is_told_when_written_and_synced_for_its_checkpoint_only(autojump_clock: MockClock) -> None:
    bench = Bench()
    (log,) = bench.logs(1, LogConfig(durability="os"))
    async with bench.running():
        bench.publish(log, "first")
        await trio.sleep(1)
        groups = bench.committer.group_count
        for number in range(5):
            bench.publish(log, f"{number}")
            await trio.sleep(1)
        assert bench.told == ["first", *"01234"]
        assert bench.committer.group_count == groups


async def test_x5_os_stream_on_a_full_disk_is_tried_again_without_another_publish(autojump_clock: MockClock) -> None:
    bench = Bench()
    (log,) = bench.logs(1, LogConfig(durability="os", segment_bytes_max=70_000, compression="none"))
    async with bench.running():
        bench.publish(log, "first")
        await trio.sleep(1)
        bench.storage.capacity_bytes = 0
        bench.publish(log, "x" * 100_000)
        await trio.sleep(5)
        assert bench.told == ["first"]
        bench.storage.capacity_bytes = None
        await trio.sleep(5)
    assert bench.told == ["first", "x" * 100_000]


@pytest.mark.parametrize("durability", ["sync", "interval", "os"])
async def test_whoever_asks_for_it_gets_a_log_synced_whatever_it_promises(
    autojump_clock: MockClock, durability: Durability
) -> None:
    bench = Bench(interval_ms=1_000_000)
    (log,) = bench.logs(1, LogConfig(durability=durability))
    async with bench.running():
        append(log, b"first")
        await bench.committer.synced(log)
        append(log, b"second")
        await bench.committer.synced(log)
        assert bench.left() == [[b"first", b"second"]]
        await bench.committer.synced(log)


async def test_flush_waits_for_urgent_and_lazy_records_and_for_a_group_under_way(autojump_clock: MockClock) -> None:
    bench = Bench()
    (one, other) = (bench.logs(1)[0], bench.logs(1, LogConfig(durability="os"))[0])
    flushed = trio.Event()

    async def flush() -> None:
        await bench.committer.flush()
        flushed.set()

    async with bench.running(), trio.open_nursery() as nursery:
        bench.worker.shut()
        bench.publish(one, "one")
        bench.publish(other, "other")
        nursery.start_soon(flush)
        await trio.sleep(1)
        assert not flushed.is_set()
        bench.worker.open()
        await flushed.wait()
        assert sorted(bench.told) == ["one", "other"]
        assert bench.left() == [[b"one"], [b"other"]]


async def test_flush_of_nothing_returns_at_once(autojump_clock: MockClock) -> None:
    bench = Bench()
    work: Awaitable[None] = bench.committer.flush()
    await work
