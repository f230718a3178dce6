"""Records and queues expire on time though nobody looks. On a virtual clock, with a real log and real metadata."""

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.store import Fault
from headrace.gateways.delivery.queue import EXPIRED_PER_TURN

from .house import Clock, House, Taker

SECOND_US = 1_000_000


async def test_the_head_of_a_queue_without_consumers_is_dead_lettered_on_time(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.declare("dead")
        await running.declare("waiting", message_ttl=5000, dead_letter_exchange="", dead_letter_routing_key="dead")
        await running.publish("waiting", b"one")
        await trio.sleep(2)
        await running.publish("waiting", b"two")
        await trio.sleep(2.9)
        assert running.host.queue("dead").ready_count == 0
        await trio.sleep(0.2)
        assert running.bodies("dead") == [b"one"]
        await trio.sleep(2)
        assert running.bodies("dead") == [b"two"]
        assert running.host.queue("waiting").message_count == 0


async def test_a_time_of_the_message_itself_counts_too(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("waiting")
        await running.publish("waiting", b"short", ttl_ms=1000)
        await running.publish("waiting", b"lasting")
        await trio.sleep(0.9)
        assert queue.ready_count == 2
        await trio.sleep(0.2)
        assert queue.ready_count == 1 and queue.expired_count == 1
        assert running.bodies("waiting") == [b"lasting"]


async def test_what_expires_behind_a_living_head_goes_when_the_head_is_gone(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("waiting")
        await running.publish("waiting", b"lasting")
        await running.publish("waiting", b"short", ttl_ms=1000)
        await running.publish("waiting", b"longer", ttl_ms=10_000)
        await trio.sleep(2)
        assert queue.ready_count == 3
        stretch = queue.get()
        assert stretch is not None
        running.broker.touch(queue)
        running.broker.dispatch()
        await trio.sleep(0.01)
        assert queue.ready_count == 1, "the short one went as soon as it was the head"
        await trio.sleep(9)
        assert queue.ready_count == 0


async def test_an_earlier_head_brings_the_timer_forward(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("waiting")
        await running.publish("waiting", b"first", ttl_ms=1000)
        await running.publish("waiting", b"second", ttl_ms=100_000)
        first = queue.get()
        assert first is not None
        running.broker.touch(queue)
        running.broker.dispatch()
        queue.give_back([first])
        running.broker.wake(queue)
        running.broker.dispatch()
        await trio.sleep(1.1)
        assert queue.ready_count == 1


async def test_a_queue_has_one_timer_however_many_messages_it_holds(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.declare("waiting", message_ttl=60_000)
        before = len(running.broker.timers)
        for number in range(500):
            await running.publish("waiting", b"%d" % number)
        assert len(running.broker.timers) == before + 1


async def test_a_wall_clock_set_forward_expires_what_it_has_passed(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("waiting", message_ttl=3_600_000)
        await running.publish("waiting", b"old")
        await trio.sleep(1)
        house.clock.set_by_us = 2 * 3600 * SECOND_US
        await trio.sleep(Clock.wall_look_s)
        assert queue.ready_count == 0


async def test_a_wall_clock_set_back_makes_nothing_expire_early(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("waiting", message_ttl=10_000)
        await running.publish("waiting", b"old")
        house.clock.set_by_us = -50 * SECOND_US
        await trio.sleep(30)
        assert queue.ready_count == 1
        await trio.sleep(31)
        assert queue.ready_count == 0


@pytest.mark.parametrize("clean", [True, False])
async def test_what_is_due_after_a_restart_expires_then(clean: bool, autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await running.declare("own", dead_letter_exchange="", dead_letter_routing_key="dead")
        await running.declare("queue's", message_ttl=5000)
        await running.declare("dead")
        await running.publish("own", b"own time", ttl_ms=5000)
        await running.publish("queue's", b"queue's time")
        await running.broker.committed()
    async with house.broker(clean=clean) as running:
        await trio.sleep(1)
        assert [running.host.queue(name).ready_count for name in ("own", "queue's", "dead")] == [1, 1, 0]
        await trio.sleep(4.1)
        assert [running.host.queue(name).ready_count for name in ("own", "queue's", "dead")] == [0, 0, 1]


async def test_a_queue_that_is_gone_is_not_waited_for(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        before = len(running.broker.timers)
        queue = await running.declare("waiting", durable=False, message_ttl=60_000, expires=90_000)
        await running.publish("waiting", b"one")
        assert len(running.broker.timers) == before + 2
        await running.host.delete_queue(queue)
        assert len(running.broker.timers) == before


@pytest.mark.parametrize("durable", [True, False])
async def test_a_queue_that_nobody_uses_is_deleted(durable: bool, autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.declare("leased", durable=durable, expires=10_000)
        await trio.sleep(9.9)
        assert "leased" in running.host.queues
        await trio.sleep(0.2)
        await running.until(lambda: "leased" not in running.host.queues)
        assert ("/", "leased") not in running.metadata.snapshot.queues


async def test_use_renews_the_lease(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("leased", expires=10_000)
        for _ in range(5):
            await trio.sleep(7)
            running.broker.touch(queue)
        await trio.sleep(9.9)
        assert not queue.deleted
        await trio.sleep(0.2)
        await running.until(lambda: queue.deleted)


async def test_a_queue_with_a_consumer_lives_and_its_lease_begins_when_the_last_one_leaves(
    autojump_clock: MockClock,
) -> None:
    async with House().broker() as running:
        queue = await running.declare("leased", expires=10_000)
        taker = running.consume(queue, Taker())
        await trio.sleep(35)
        assert not queue.deleted
        running.leave(queue, taker)
        await trio.sleep(9.9)
        assert not queue.deleted
        await trio.sleep(0.2)
        await running.until(lambda: queue.deleted)


async def test_messages_do_not_keep_an_unused_queue(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("leased", expires=10_000)
        for number in range(12):
            await running.publish("leased", b"%d" % number)
            await trio.sleep(1)
        await running.until(lambda: queue.deleted)


async def test_a_lease_begins_anew_with_a_restart(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await running.declare("leased", expires=10_000)
        await trio.sleep(9)
    async with house.broker() as running:
        await trio.sleep(9)
        assert "leased" in running.host.queues
        await trio.sleep(1.1)
        await running.until(lambda: "leased" not in running.host.queues)


async def test_a_deletion_that_finds_the_disk_full_is_tried_again(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("leased", expires=1000)
        house.store.next_fault = Fault.FULL
        await trio.sleep(1.5)
        assert not queue.deleted
        await trio.sleep(5)
        await running.until(lambda: queue.deleted)


async def test_very_many_that_expire_together_leave_others_their_turn(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("waiting", message_ttl=1000)
        await running.publish("waiting", *(b"" for _ in range(5 * EXPIRED_PER_TURN)))
        seen: list[int] = []
        running.broker.on_ready = lambda: seen.append(queue.ready_count)
        await trio.sleep(1.1)
        assert seen == [step * EXPIRED_PER_TURN for step in (4, 3, 2, 1, 0)]


async def test_nothing_expires_any_more_once_the_broker_is_closed(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("waiting", message_ttl=1000, expires=2000)
        await running.publish("waiting", b"one")
        await running.broker.close()
        await trio.sleep(5)
        running.broker.wake(queue)
        running.broker.dispatch()
        assert queue.ready_count == 1 and not queue.deleted
