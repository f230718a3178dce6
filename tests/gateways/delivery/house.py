"""A whole broker in memory for tests: real log, real metadata, real views, and a clock that the test moves.

Runs on trio's mock clock: a test that asks for `autojump_clock` lets time pass with `trio.sleep`.
"""

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

import trio
from trio.testing import MockClock

from headrace.controller.changes import PutPolicy
from headrace.controller.config import Definitions
from headrace.controller.entities import Policy
from headrace.controller.passwords import HashCost
from headrace.controller.service import MetadataService
from headrace.controller.store import MemoryStore
from headrace.controller.table import Table
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.record import PERSISTENT, Protocol
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.amqp.deaths import mark, stamp
from headrace.gateways.amqp.settings import settings_of
from headrace.gateways.delivery.broker import RELEASE_BYTES_MIN, Broker
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import UNLIMITED, Queue
from headrace.gateways.delivery.vhost import VirtualHost

T = TypeVar("T")
START_US = 1_700_000_000_000_000
# The flags word of a content header that has none.
NO_PROPERTIES = b"\0\0"


class Clock:
    """Trio's time; the wall clock can be set besides."""

    wall_look_s = 60.0

    def __init__(self) -> None:
        self.set_by_us = 0

    def monotonic(self) -> float:
        return trio.current_time()

    def wall_us(self) -> int:
        return START_US + self.set_by_us + round(trio.current_time() * 1e6)

    async def sleep(self, seconds: float) -> None:
        await trio.sleep(seconds)

    async def sleep_until(self, monotonic_s: float) -> None:
        await trio.sleep_until(monotonic_s)


class Ids:
    def __init__(self, random: Random) -> None:
        self._random = random

    def uuid(self) -> UUID:
        return UUID(int=self._random.getrandbits(128), version=4)

    def nonce(self) -> str:
        return f"{self._random.getrandbits(144):036x}"

    def salt(self) -> int:
        return self._random.getrandbits(64) | 1


class Here:
    """A worker without threads: the mock clock would run away while they work."""

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return call()


async def _here(call: Callable[..., T], *arguments: object, **_options: object) -> T:
    await trio.lowlevel.checkpoint()
    return call(*arguments)


class Taker:
    """A consumer that takes everything, and settles when told to."""

    def __init__(self, *, no_ack: bool = True) -> None:
        self.tag = "taker"
        self.no_ack = no_ack
        self.priority = 0
        self.exclusive = False
        self.cancelled = False
        self.got: list[bytes] = []
        self.held: list[Stretch] = []

    def room(self) -> int:
        return UNLIMITED

    def deliver(self, queue: Queue, stretch: Stretch) -> None:
        self.got += stretch.loaded().values[stretch.index : stretch.index + stretch.count]
        if not self.no_ack:
            self.held.append(stretch)

    def cancel(self) -> None:
        self.cancelled = True


class House:
    """What outlives a restart: the disk and the metadata."""

    def __init__(
        self, seed: int = 1, *, log_config: LogConfig | None = None, release_bytes_min: int = RELEASE_BYTES_MIN
    ) -> None:
        self.clock = Clock()
        self.random = Random(seed)
        # May be replaced between two brokers.
        self.storage: Storage = MemoryStorage()
        self.store = MemoryStore(UUID(int=seed))
        self.log_config = log_config
        self.release_bytes_min = release_bytes_min

    @property
    def env(self) -> Env:
        return Env(clock=self.clock, storage=self.storage, worker=Here(), ids=Ids(self.random), random=self.random)

    @asynccontextmanager
    async def broker(self, *, clean: bool = True) -> AsyncIterator["Running"]:
        # The metadata's thread, too: a mock clock does not wait for it.
        mocked = isinstance(trio.lowlevel.current_clock(), MockClock)
        with patch("trio.to_thread.run_sync", _here) if mocked else nullcontext():
            async with self._broker(clean) as running:
                yield running

    @asynccontextmanager
    async def _broker(self, clean: bool) -> AsyncIterator["Running"]:
        env = self.env
        metadata = MetadataService(
            lambda: self.store, new_uuid=env.ids.uuid, hash_cost=HashCost(memory_kib=8, passes=1)
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(metadata.run)
            await metadata.seed(Definitions())
            directory = await LogDirectory.open(env, DirectoryConfig(), clean=clean)
            broker = Broker(
                env,
                directory,
                metadata,
                settings_of=settings_of,
                stamp=stamp,
                clean=clean,
                log_config=self.log_config,
                release_bytes_min=self.release_bytes_min,
            )
            broker.transfers.marks = {Protocol.AMQP: mark}
            await broker.load()
            broker.follow_metadata()
            broker.on_ready = broker.dispatch
            nursery.start_soon(directory.run)
            nursery.start_soon(broker.run)
            yield Running(broker, metadata)
            await broker.close()
            await directory.close()
            nursery.cancel_scope.cancel()


class Running:
    def __init__(self, broker: Broker, metadata: MetadataService) -> None:
        self.broker = broker
        self.metadata = metadata

    @property
    def host(self) -> VirtualHost:
        return self.broker.vhosts["/"]

    async def policy(self, definition: dict[str, Any], pattern: str = ".*", **more: Any) -> None:
        settings = {"vhost": "/", "name": "p", "pattern": pattern, "definition": Table(definition)} | more
        await self.metadata.commit(PutPolicy(Policy(**settings)))

    async def declare(self, name: str, *, durable: bool = True, **arguments: Any) -> Queue:
        """Arguments as in AMQP, with `_` for `-` and without `x-`: `message_ttl=1000`."""
        table = Table({f"x-{key.replace('_', '-')}": value for key, value in arguments.items()})
        settings = self.broker.settings_of("/", name, table)
        return await self.host.declare_queue(name, settings, durable=durable, arguments=table)

    async def publish(self, queue: str, *bodies: bytes, ttl_ms: int | None = None, persistent: bool = True) -> None:
        """Returns when it may be seen by everybody."""
        target = self.host.target("", queue.encode(), [queue])
        expiry_us = 0 if ttl_ms is None else self.broker.env.clock.wall_us() + ttl_ms * 1000
        attributes = int(Protocol.AMQP) | (PERSISTENT if persistent else 0)
        self.broker.publish(target, [NO_PROPERTIES] * len(bodies), bodies, attributes=attributes, expiry_us=expiry_us)
        self.broker.dispatch()
        await self.broker.committed()

    def consume(self, queue: Queue, taker: Taker) -> Taker:
        queue.add_consumer(taker)
        self.broker.touch(queue)
        self.broker.wake(queue)
        self.broker.dispatch()
        return taker

    def leave(self, queue: Queue, taker: Taker) -> None:
        queue.remove_consumer(taker)
        self.broker.touch(queue)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait for what a thread of the metadata takes part in; the clock stands still meanwhile."""
        limit = time.monotonic() + 30
        while not holds():
            assert time.monotonic() < limit, "it did not happen"
            await trio.lowlevel.checkpoint()

    def bodies(self, name: str) -> Sequence[bytes]:
        """Everything ready, taken out."""
        queue = self.host.queue(name)
        found = []
        while (stretch := queue.get()) is not None:
            found.append(stretch.loaded().values[stretch.index])
            queue.settle(stretch)
        return found
