"""What serves a shard that this node leads: how it ends, whoever wants it to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import trio
import trio.testing

from headrace import led_shard
from headrace.led_shard import LedShard


class House:
    """A service of nothing, whose close waits for others before it writes something."""

    def __init__(self) -> None:
        self.others_have_it = trio.Event()
        self.is_closing = trio.Event()
        self.written = 0
        self.dismissed: list[str] = []
        self.broker = SimpleNamespace(alone=SimpleNamespace())

    async def close(self) -> None:
        self.is_closing.set()
        await self.others_have_it.wait()
        self.written += 1

    async def dismiss(self, reason: str) -> None:
        self.dismissed.append(reason)
        await trio.lowlevel.checkpoint()


@asynccontextmanager
async def led() -> AsyncIterator[tuple[LedShard, House]]:
    house = House()
    metadata = SimpleNamespace(
        snapshot=SimpleNamespace(vhosts={}, shards={}), listen=lambda _: None, unlisten=lambda _: None
    )
    watch = SimpleNamespace(alarms=None, listen=lambda _: None, unlisten=lambda _: None)
    commons = cast(Any, SimpleNamespace(metadata=metadata, watch=watch, part=lambda *_: None))
    env = directory = cast(Any, None)

    async def open_service(_commons: object, _directory: object, nursery: trio.Nursery, **_options: object) -> House:
        # What it serves with goes on until it is stepped down or closed.
        nursery.start_soon(trio.sleep_forever)
        await trio.lowlevel.checkpoint()
        return house

    shard = LedShard(3, commons, env, directory, lambda: None, lambda: True)
    served = trio.Event()
    with patch.object(led_shard, "open_service", open_service):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(shard.run, lambda _: served.set())
            await served.wait()
            yield shard, house


async def test_a_close_makes_safe_what_was_settled(autojump_clock: object) -> None:
    async with led() as (shard, house):
        house.others_have_it.set()
        await shard.close()
        assert house.written == 1 and not house.dismissed


async def test_who_steps_down_tells_the_clients_and_writes_nothing(autojump_clock: object) -> None:
    async with led() as (shard, house):
        await shard.step_down("another one leads")
        assert house.dismissed == ["another one leads"] and not house.written


async def test_o1_a_close_that_waits_ends_where_it_is_when_another_node_leads(autojump_clock: object) -> None:
    """The simulator of clusters, seed 3542: it wrote on when the others had caught up, as a follower, what passed for
    records of the leader."""
    async with led() as (shard, house), trio.open_nursery() as nursery:
        nursery.start_soon(shard.close)
        await house.is_closing.wait()
        with trio.fail_after(1):
            await shard.step_down("another one leads")
        house.others_have_it.set()
        await trio.testing.wait_all_tasks_blocked()
        assert not house.written
