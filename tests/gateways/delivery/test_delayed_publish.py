"""Delayed messages are published when due: once, however often they are handed over, by the topology of that moment."""

from collections.abc import AsyncIterator, Sequence

import pytest

from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import PERSISTENT, Producer, Protocol
from headrace.delay.fire import DueRun
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, decode_duty, encode_duty
from headrace.gateways.delivery.delayed_publish import DelayedPublishes

from .house import NO_PROPERTIES, House, Running

OWNER = b"delay engine 16b"
DEFAULT = Duty(DutyKind.PUBLISH, "/", "")


class Firing:
    """The engine's side: places, numbers, and who was told."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.publishes = DelayedPublishes(running.broker, {})
        self.done_count = 0

    def run(self, duty: Duty, first: int, keys: Sequence[str], bodies: Sequence[bytes]) -> DueRun:
        where = self.publishes.place(duty, keys[0].encode())
        return DueRun(
            encode_duty(duty),
            where,
            None if where is None else Producer(OWNER, 0, first, dense=True),
            first,
            [b""] * len(keys),
            [0] * len(keys),
            [key.encode() for key in keys],
            [NO_PROPERTIES] * len(keys),
            bodies,
            int(Protocol.AMQP) | PERSISTENT,
            (),
            None,
        )

    async def fire(self, run: DueRun) -> None:
        self.publishes.fire(decode_duty(run.target), run, self._done)
        self.running.broker.dispatch()
        await self.running.broker.committed()

    def _done(self) -> None:
        self.done_count += 1


@pytest.fixture
async def firing() -> AsyncIterator[Firing]:
    async with House().broker() as running:
        yield Firing(running)


async def test_what_is_handed_over_again_is_there_once(firing: Firing) -> None:
    await firing.running.declare("orders")
    run = firing.run(DEFAULT, 0, ["orders"] * 3, [b"a", b"b", b"c"])
    for _ in range(3):
        await firing.fire(run)
    assert firing.done_count == 3
    assert firing.running.bodies("orders") == [b"a", b"b", b"c"]


async def test_the_rest_of_a_run_that_was_cut_short_is_published(firing: Firing) -> None:
    await firing.running.declare("orders")
    await firing.fire(firing.run(DEFAULT, 0, ["orders"] * 2, [b"a", b"b"]))
    await firing.fire(firing.run(DEFAULT, 0, ["orders"] * 4, [b"a", b"b", b"c", b"d"]))
    assert firing.running.bodies("orders") == [b"a", b"b", b"c", b"d"]


async def test_a_queue_that_went_meanwhile_leaves_no_gap_that_stops_others(firing: Firing) -> None:
    gone = await firing.running.declare("gone", durable=False)
    await firing.running.declare("there", durable=False)
    run = firing.run(DEFAULT, 0, ["gone", "there"], [b"dropped", b"kept"])
    await firing.running.host.delete_queue(gone)
    await firing.fire(run)
    assert firing.running.bodies("there") == [b"kept"]
    assert (firing.done_count, firing.running.broker.delayed.dropped_count) == (1, 1)
    await firing.fire(firing.run(DEFAULT, 2, ["there"], [b"next"]))
    assert firing.running.bodies("there") == [b"next"]


async def test_an_exchange_or_vhost_that_is_gone_holds_nobody_up(firing: Firing) -> None:
    for vhost, name in (("/", "nobody"), ("elsewhere", "")):
        duty = Duty(DutyKind.PUBLISH, vhost, name)
        assert firing.publishes.place(duty, b"key") is None
        await firing.fire(firing.run(duty, 0, ["key"], [b""]))
    assert (firing.done_count, firing.running.broker.delayed.dropped_count) == (2, 2)


async def test_one_that_came_anew_gets_it_though_the_numbers_are_for_another(firing: Firing) -> None:
    before = await firing.running.declare("orders")
    run = firing.run(DEFAULT, 5, ["orders"], [b"late"])
    await firing.running.host.delete_queue(before)
    await firing.running.declare("orders")
    await firing.fire(run)
    assert firing.running.bodies("orders") == [b"late"]


async def test_place_names_the_log_that_the_message_will_lie_in(firing: Firing) -> None:
    queue = await firing.running.declare("orders")
    await firing.running.declare("fleeting", durable=False)
    assert firing.publishes.place(DEFAULT, b"orders") == TargetPartition(queue.stream_id)
    transient = firing.running.broker.transient_log
    assert firing.publishes.place(DEFAULT, b"fleeting") == TargetPartition(transient.stream_id)
    assert firing.publishes.place(DEFAULT, b"nobody") is None
