"""Binding to the past when the store or the process fails in the middle of it."""

from dataclasses import dataclass

import pytest
from trio.testing import MockClock

from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.store import Fault
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import RELOCATED
from headrace.gateways.delivery import past as pasts
from headrace.gateways.delivery.ports import Source

from .house import House, Running


@dataclass(frozen=True, eq=False)
class Holder:
    pins: dict[Source, int]


async def exchange_with_past(running: Running, count: int = 5) -> None:
    await running.host.declare_exchange("x", "topic", durable=True, auto_delete=False, internal=False)
    await running.declare("q")
    await publish(running, 0, count)


async def publish(running: Running, first: int, end: int) -> None:
    for number in range(first, end):
        target = running.host.target("x", b"k", ["k"])
        running.broker.publish(target, [b"\0\0"], [b"%d" % number], attributes=1)
    await running.broker.committed()


async def bind(running: Running) -> None:
    await running.host.bind_from(Binding("/", "x", DestinationKind.QUEUE, "q", "#"), start)


def start(log: PartitionLog) -> int:
    return int(log.log_start)


def numbered(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def test_bind_that_the_store_refused_is_undone_and_goes_on_when_it_is_tried_again(
    autojump_clock: MockClock,
) -> None:
    house = House()
    async with house.broker() as running:
        await exchange_with_past(running)
        house.store.next_fault = Fault.FULL
        with pytest.raises(DiskFull):
            await bind(running)
        await publish(running, 5, 7)
        assert running.host.queue("q").ready_count == 5
        await bind(running)
        await publish(running, 7, 8)
        assert running.bodies("q") == numbered(0, 8)


async def test_bind_that_was_journalled_before_a_crash_is_not_attached_again(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await exchange_with_past(running)
        house.store.next_fault = Fault.FULL
        with pytest.raises(DiskFull):
            await bind(running)
    async with house.broker(clean=False) as running:
        assert running.host.queue("q").ready_count == 5
        await publish(running, 5, 7)
        await bind(running)
        assert running.bodies("q") == numbered(0, 7)


async def test_copies_that_nobody_was_told_of_are_seen_by_nobody(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    house = House()
    async with house.broker() as running:
        await exchange_with_past(running)

        def crash(past: pasts.Past) -> None:
            raise DiskFull("crashed before the queue was told")

        with monkeypatch.context() as patched:
            patched.setattr(pasts.Past, "finish", crash)
            with pytest.raises(DiskFull):
                await bind(running)
    async with house.broker(clean=False) as running:
        assert running.host.queue("q").ready_count == 0
        await bind(running)
        assert running.bodies("q") == numbered(0, 5)


async def test_copies_say_where_they_came_from(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await exchange_with_past(running)
        await bind(running)
        queue = running.host.queue("q")
        (own,) = running.broker.directory.streams[queue.stream_id].partitions
        (source,) = (one for one in running.broker.directory.streams.values() if one.spec.name == "x")
        record = next(own.read(2)[0].batch.records())
        original = next(source.partitions[0].read(2)[0].batch.records())
        assert (record.key, record.value, record.timestamp_us) == (original.key, original.value, original.timestamp_us)
        assert record.attributes & RELOCATED and record.route_set == ()
        assert dict(record.headers) == {
            b"x-origin-stream": str(source.spec.id).encode(),
            b"x-origin-partition": b"0",
            b"x-origin-offset": b"%d" % original.offset,
            b"x-origin-exchange": b"x",
        }


async def test_retention_waits_for_who_is_copying(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await exchange_with_past(running)
        (source,) = (one.partitions[0] for one in running.broker.directory.streams.values() if one.spec.name == "x")
        await running.broker.write_journal()
        assert running.broker.directory.pinned_from(source) is None

        with running.broker.holding(Holder({source: 3})):
            assert running.broker.directory.pinned_from(source) == 3
        assert running.broker.directory.pinned_from(source) is None
