"""Rewinding a work queue: what it received is ready once more, in order, once, and after a crash too."""

from random import Random
from typing import Any

import pytest
import trio
from tests.gateways.delivery.house import House, Running, Taker

from headrace.controller.entities import Binding, DestinationKind
from headrace.core_log.errors import Refused
from headrace.core_log.record import PERSISTENT, PRIORITY_SHIFT, Protocol
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.rewind import Rewind


async def rewind(running: Running, queue: Queue, seq: int) -> int:
    return await Rewind(running.broker, queue, seq).run()


def numbers(first: int, end: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, end)]


async def test_settled_messages_are_ready_again_from_a_number_on_in_their_order() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 10))
        assert running.bodies("q") == numbers(0, 10)
        assert await rewind(running, queue, 4) == 6
        assert running.bodies("q") == numbers(4, 10)
        assert queue.ready_count == queue.unacked_count == 0
        assert await rewind(running, queue, 0) == 10
        assert running.bodies("q") == numbers(0, 10)


async def test_what_was_ready_comes_once() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 6))
        for _ in range(3):
            stretch = queue.get()
            assert stretch is not None
            queue.settle(stretch)
        assert await rewind(running, queue, 1) == 5
        await running.publish("q", b"new")
        assert running.bodies("q") == [*numbers(1, 6), b"new"]


async def test_what_a_consumer_holds_comes_again_and_its_ack_counts() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 3))
        held = queue.get()
        assert held is not None
        assert await rewind(running, queue, 0) == 3
        queue.settle(held)
        assert running.bodies("q") == numbers(0, 3)
        assert queue.message_count == 0


async def test_number_before_the_first_is_the_first_and_one_behind_the_last_leaves_nothing() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        assert await rewind(running, queue, 0) == 0
        await running.publish("q", *numbers(0, 3))
        assert await rewind(running, queue, -5) == 3
        assert await rewind(running, queue, 100) == 0
        assert running.bodies("q") == []


async def test_messages_of_an_exchange_and_of_the_queue_s_own_log_come_in_the_order_of_their_arrival() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        other = await running.declare("other")
        await running.host.declare_exchange("e", "direct", durable=True, auto_delete=False, internal=False)
        for name, key in (("q", "a"), ("other", "b")):
            await running.host.bind(Binding("/", "e", DestinationKind.QUEUE, name, key))

        def publish(key: str, body: bytes) -> None:
            target = running.host.target("e", key.encode(), [key])
            running.broker.publish(target, [b"\0\0"], [body], attributes=int(Protocol.AMQP) | PERSISTENT)

        for number in range(20):
            publish("a", b"e%d" % number)
            publish("b", b"not for q")
            if number % 5 == 0:
                await running.publish("q", b"q%d" % number)
        await running.broker.committed()
        arrived = running.bodies("q")
        assert len(arrived) == 24
        assert await rewind(running, queue, 7) == 17
        assert running.bodies("q") == arrived[7:]
        assert other.ready_count == 20


@pytest.mark.parametrize("clean", [True, False])
async def test_rewound_queue_is_the_same_after_a_restart(clean: bool) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 10))
        running.bodies("q")
        await rewind(running, queue, 3)
        stretch = queue.get()
        assert stretch is not None
        queue.settle(stretch)
        await running.publish("q", *numbers(10, 12))
    async with house.broker(clean=clean) as running:
        queue = running.host.queue("q")
        assert queue.ready_count == 8
        assert running.bodies("q") == numbers(4, 12)
        assert await rewind(running, queue, 0) == 12
        assert running.bodies("q") == numbers(0, 12)
    async with house.broker(clean=clean) as running:
        assert running.bodies("q") == []


@pytest.mark.parametrize("arguments", [{"max_priority": 3}, {"partitions": 4}])
async def test_queue_with_lanes_is_rewound_lane_by_lane(arguments: dict[str, Any]) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("q", **arguments)
        for number in range(40):
            target = running.host.target("", b"q", ["q"])
            attributes = int(Protocol.AMQP) | PERSISTENT | (number % 4) << PRIORITY_SHIFT
            keys = [b"k%d" % (number % 7)]
            running.broker.publish(target, [b"\0\0"], [b"%d" % number], attributes=attributes, keys=keys)
        await running.broker.committed()
        first = running.consume(queue, Taker()).got
        running.leave(queue, queue.consumers[0])
        assert len(first) == 40
        assert await rewind(running, queue, 10) == 30
    async with house.broker(clean=False) as running:
        queue = running.host.queue("q")
        again = running.consume(queue, Taker()).got
        assert sorted(again) == sorted(numbers(10, 40))
        if "max_priority" in arguments:
            assert again == [body for body in first if int(body) >= 10]
        for key in range(7):
            mine = [int(body) for body in again if int(body) % 7 == key]
            assert "max_priority" in arguments or mine == sorted(mine)


async def test_what_retention_took_is_left_out() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 10))
        running.bodies("q")
        await running.broker.write_journal()
        log = running.broker.own_log(queue, "/")
        log.delete_before(6)
        assert await rewind(running, queue, 2) == 4
        assert running.bodies("q") == numbers(6, 10)


async def test_rewound_messages_are_held_back_from_retention() -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", *numbers(0, 10))
        running.bodies("q")
        await running.broker.write_journal()
        log = running.broker.own_log(queue, "/")
        pinned = running.broker.directory.pinned_from
        assert pinned(log) in (None, 10)
        await rewind(running, queue, 3)
        assert pinned(log) == 3


async def test_message_whose_own_time_is_over_leaves_again(autojump_clock: Any) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", b"short", ttl_ms=1000)
        await running.publish("q", b"long", ttl_ms=100_000)
        assert running.bodies("q") == [b"short", b"long"]
        await trio.sleep(5)
        await rewind(running, queue, 0)
        assert running.bodies("q") == [b"long"]
        assert queue.message_count == 0


async def test_limit_in_bytes_counts_what_came_back() -> None:
    async with House().broker() as running:
        queue = await running.declare("q", max_length_bytes=1000)
        await running.publish("q", *[b"x" * 100] * 5)
        running.bodies("q")
        await rewind(running, queue, 2)
        assert queue.byte_count == 300


@pytest.mark.parametrize("arguments", [{}, {"max_priority": 2}])
async def test_what_has_expired_is_left_out_and_dead_lettered_no_second_time(
    autojump_clock: Any, arguments: dict[str, Any]
) -> None:
    house = House()
    async with house.broker() as running:
        dead = await running.declare("dead")
        names = {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
        queue = await running.declare("q", message_ttl=60_000, **names, **arguments)
        await running.publish("q", *numbers(0, 3))
        await running.publish("q", *numbers(3, 5), ttl_ms=1000)
        await trio.sleep(30)
        await running.publish("q", *numbers(5, 9))
        await running.publish("q", b"brief", ttl_ms=1000)
        await running.publish("q", b"last")
        await trio.sleep(40)
        running.bodies("q")
        # What has just expired is on its way.
        await trio.sleep(2)
        dead_before = dead.ready_count
        assert dead_before == 6
        assert await rewind(running, queue, 1) == 5
        assert running.bodies("q") == [*numbers(5, 9), b"last"]
        assert await rewind(running, queue, 7) == 3
        await trio.sleep(2)
        assert dead.ready_count == dead_before
    async with house.broker(clean=False) as running:
        assert running.bodies("q") == [b"7", b"8", b"last"]


@pytest.mark.parametrize("seed", range(8))
async def test_any_mix_of_publishes_takings_rewinds_and_crashes_loses_and_doubles_nothing(
    autojump_clock: Any, seed: int
) -> None:
    random, house = Random(seed), House(seed)
    arguments = [{}, {"max_priority": 2}, {"partitions": 3}, {"dead_letter_exchange": "nowhere"}][seed % 4]
    arrived: list[bytes] = []
    async with house.broker() as running:
        await running.declare("q", **arguments)
        await running.host.declare_exchange("e", "fanout", durable=True, auto_delete=False, internal=False)
        await running.host.bind(Binding("/", "e", DestinationKind.QUEUE, "q", ""))
    for _life in range(3):
        async with house.broker(clean=random.random() < 0.5) as running:
            queue = running.host.queue("q")
            for _step in range(25):
                match random.choice(["publish", "publish", "take", "rewind"]):
                    case "publish":
                        target = running.host.target(random.choice(["", "e"]), b"q", ["q"])
                        for _ in range(random.randint(1, 5)):
                            arrived.append(b"%d" % len(arrived))
                            attributes = int(Protocol.AMQP) | PERSISTENT | random.randint(0, 2) << PRIORITY_SHIFT
                            keys = [b"k%d" % random.randint(0, 5)]
                            running.broker.publish(target, [b"\0\0"], arrived[-1:], attributes=attributes, keys=keys)
                    case "take":
                        for _ in range(random.randint(1, 6)):
                            if (stretch := queue.get()) is not None:
                                queue.settle(stretch)
                    case "rewind":
                        place = random.randint(0, len(arrived))
                        assert await rewind(running, queue, place) == len(arrived) - place
            place = random.randint(0, len(arrived))
            await rewind(running, queue, place)
        async with house.broker(clean=random.random() < 0.5) as running:
            found = list(running.bodies("q"))
            if len(running.host.queue("q").lanes) == 1:
                assert found == arrived[place:]
            assert sorted(found) == sorted(arrived[place:])


async def test_stream_is_refused() -> None:
    async with House().broker() as running:
        stream = await running.declare("s", queue_type="stream")
        with pytest.raises(Refused, match="is a stream"):
            Rewind(running.broker, stream, 0)
