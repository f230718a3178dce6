"""Filters with far to go: they get there in several turns, by themselves, while others are served."""

from collections.abc import Sequence

import pytest
import trio
from trio.testing import MockClock

from headrace.core_log.record import PERSISTENT, Protocol
from headrace.filtering.expression import parse
from headrace.gateways.delivery import filters, reading, scan
from headrace.gateways.delivery.rewind import Rewind

from .house import NO_PROPERTIES, House, Running, Taker

ATTRIBUTES = int(Protocol.AMQP) | PERSISTENT


async def publish(running: Running, queue: str, tagged: Sequence[str]) -> None:
    for number, tag in enumerate(tagged):
        target = running.host.target("", queue.encode(), [queue], tags=(tag,))
        running.broker.publish(target, [NO_PROPERTIES], [b"%d %s" % (number, tag.encode())], attributes=ATTRIBUTES)
        if number % 20 == 0:
            # So that there are many batches.
            await running.broker.committed()
    running.broker.dispatch()
    await running.broker.committed()


async def test_filter_of_a_work_queue_goes_on_by_itself(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filters, "TURN_BYTES", 4000)
    monkeypatch.setattr(scan, "READ_BYTES", 500)
    async with House().broker() as running:
        queue = await running.declare("q")
        await publish(running, "q", ["us"] * 500 + ["eu"])
        turns = 0

        def ready() -> None:
            nonlocal turns
            turns += 1
            running.broker.dispatch()

        running.broker.on_ready = ready
        taker = Taker()
        queue.add_consumer(taker, parse("eu"))
        running.broker.wake(queue)
        running.broker.dispatch()
        assert not taker.got
        await running.until(lambda: bool(taker.got))
        assert taker.got == [b"500 eu"]
        assert turns > 2
        assert queue.ready_count == 500


@pytest.mark.parametrize("stream", [True, False])
async def test_filter_of_a_reader_goes_on_by_itself(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(reading, "TURN_COUNT_MAX", 50)
    monkeypatch.setattr(reading, "LOOK_COUNT_MAX", 10)
    async with House().broker() as running:
        queue = await running.declare("q", **({"queue_type": "stream"} if stream else {}))
        await publish(running, "q", [*["us"] * 300, "eu", *["us"] * 300, "eu"])
        await running.broker.write_journal()
        running.broker.on_ready = running.broker.dispatch
        taker = Taker(no_ack=False)
        view = queue.add_reader(taker, 0, parse("eu"))
        running.broker.wake(queue)
        running.broker.dispatch()
        assert view.is_unfinished
        await running.until(lambda: len(taker.got) == 2)
        assert taker.got == [b"300 eu", b"601 eu"]
        assert [stretch.seq for stretch in taker.held] == [300, 601]
        for stretch in taker.held:
            view.settle(stretch)
        assert view.lane.floor == 602


async def test_rewound_queue_is_filtered_again(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        taker = Taker()
        queue.add_consumer(taker, parse("eu"))
        await publish(running, "q", ["eu", "us", "eu"])
        assert taker.got == [b"0 eu", b"2 eu"]
        await Rewind(running.broker, queue, 1).run()
        running.broker.dispatch()
        await trio.lowlevel.checkpoint()
        assert taker.got == [b"0 eu", b"2 eu", b"2 eu"]
        assert queue.ready_count == 1


async def test_search_ends_with_its_consumer(autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filters, "TURN_BYTES", 4000)
    monkeypatch.setattr(scan, "READ_BYTES", 500)
    async with House().broker() as running:
        queue = await running.declare("q")
        await publish(running, "q", ["us"] * 500)
        turns = 0

        def ready() -> None:
            nonlocal turns
            turns += 1
            running.broker.dispatch()

        running.broker.on_ready = ready
        taker, other = Taker(), Taker(no_ack=False)
        queue.add_consumer(taker, parse("eu"))
        running.broker.wake(queue)
        running.broker.dispatch()
        assert queue.is_unfinished
        queue.remove_consumer(taker)
        queue.add_consumer(other)
        running.broker.wake(queue)
        running.broker.dispatch()
        await trio.sleep(1)
        assert len(other.got) == 500
        assert turns < 5
