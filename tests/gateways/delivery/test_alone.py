"""Queues whose consumer must be alone are held back while another node might serve one, and go on by themselves."""

import pytest
import trio
from trio.testing import MockClock

from headrace.core_log.record import PERSISTENT, Protocol

from .house import NO_PROPERTIES, House, Running, Taker

ATTRIBUTES = int(Protocol.AMQP) | PERSISTENT


async def publish(running: Running, queue: str, value: bytes) -> None:
    target = running.host.target("", queue.encode(), [queue])
    running.broker.publish(target, [NO_PROPERTIES], [value], attributes=ATTRIBUTES)
    await running.broker.committed()
    running.broker.dispatch()


@pytest.mark.parametrize("is_exclusive", [True, False])
async def test_one_that_must_be_alone_waits_until_nobody_else_may_be_served(
    autojump_clock: MockClock, is_exclusive: bool
) -> None:
    async with House().broker() as running:
        may = False
        running.broker.alone.may_dispatch = lambda: may
        running.broker.on_ready = running.broker.dispatch
        alone = await running.declare("alone", single_active_consumer=not is_exclusive)
        shared = await running.declare("shared")
        lonely, social = Taker(), Taker()
        lonely.exclusive = is_exclusive
        alone.add_consumer(lonely)
        shared.add_consumer(social)
        for queue in (alone, shared):
            await publish(running, queue.name, b"1")
        assert (lonely.got, social.got) == ([], [b"1"])
        may = True
        await trio.sleep(1)
        assert lonely.got == [b"1"]
        may = False
        await publish(running, "alone", b"2")
        assert lonely.got == [b"1"]
        alone.remove_consumer(lonely)
        may = True
        await publish(running, "alone", b"3")
        assert alone.ready_count == 2
