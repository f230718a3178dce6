"""Claim: dead letters that are numbered and journalled cost little more than those that are not. Driver: files.

A chain of queues with a time to live, each with the next one's exchange as its dead-letter exchange (as kombu's delayed
delivery is built), once of durable queues and once of queues that have no journal; and rejects of single messages.
`python -m bench.dead_letters 20000 4 100`: so many messages, levels of the chain, and messages in one turn of the loop.
"""

import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Protocol, TypeAlias
from uuid import UUID

import trio

from bench.claim import Better, Claim
from bench.scratch import scratch_folder
from headrace.controller.config import Definitions
from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.passwords import HashCost
from headrace.controller.service import MetadataService
from headrace.controller.store import MemoryStore
from headrace.controller.table import Table
from headrace.core_log.config import DirectoryConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.real import real_env
from headrace.core_log.record import PERSISTENT
from headrace.core_log.record import Protocol as Vocabulary
from headrace.gateways.amqp.deaths import stamp
from headrace.gateways.amqp.settings import settings_of
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.vhost import VirtualHost

BODY = b"x" * 100
ATTRIBUTES = int(Vocabulary.AMQP) | PERSISTENT
TTL_MS = 50
LATENCY_COUNT = 200

# Messages, levels of the chain, messages in one turn.
Scale: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Scene:
    broker: Broker
    count: int
    levels: int
    turn: int

    @property
    def host(self) -> VirtualHost:
        return self.broker.vhosts["/"]

    async def exchange(self, name: str) -> None:
        await self.host.declare_exchange(name, "topic", durable=True, auto_delete=False, internal=False)

    async def queue(self, name: str, exchange: str = "", *, durable: bool = True, **arguments: str | int) -> Queue:
        table = Table({f"x-{key.replace('_', '-')}": value for key, value in arguments.items()})
        settings = self.broker.settings_of("/", name, table)
        queue = await self.host.declare_queue(name, settings, durable=durable, arguments=table)
        if exchange:
            await self.host.bind(Binding("/", exchange, DestinationKind.QUEUE, name, "#"))
        return queue

    def publish(self, exchange: str, key: str, count: int) -> None:
        target = self.host.target(exchange, key.encode(), [key])
        self.broker.publish(target, [b"\0\0"] * count, [BODY] * count, attributes=ATTRIBUTES)


class Act(Protocol):
    __name__: str

    def __call__(self, scene: Scene, *, durable: bool) -> Awaitable[float]: ...


async def chain(scene: Scene, *, durable: bool) -> float:
    """Messages moved per CPU second."""
    names = [*(f"x{level}" for level in range(scene.levels)), "end"]
    for name in names:
        await scene.exchange(name)
    for name, following in pairwise(names):
        await scene.queue(name, name, durable=durable, message_ttl=TTL_MS, dead_letter_exchange=following)
    end = await scene.queue("end", "end", durable=durable)
    begun = time.process_time()
    for number in range(scene.count // scene.turn):
        scene.publish("x0", f"a.{number}", scene.turn)
        scene.broker.dispatch()
        await trio.sleep(0)
    while end.ready_count < scene.count:
        await trio.sleep(0.005)
    return scene.count * scene.levels / (time.process_time() - begun)


async def rejects(scene: Scene, *, durable: bool) -> float:
    """The same for messages that are rejected one by one."""
    await scene.exchange("dlx")
    dead = await scene.queue("dead", "dlx")
    work = await scene.queue("work", durable=durable, dead_letter_exchange="dlx")
    for _ in range(scene.count // scene.turn):
        scene.publish("", "work", scene.turn)
    await scene.broker.committed()
    begun = time.process_time()
    for number in range(scene.count):
        stretch = work.get()
        assert stretch is not None
        work.reject(stretch)
        if number % scene.turn == 0:
            scene.broker.dispatch()
            await trio.sleep(0)
    while dead.ready_count < scene.count:
        await trio.sleep(0.002)
    return scene.count / (time.process_time() - begun)


async def latency(scene: Scene, *, durable: bool) -> float:
    """Milliseconds from a reject to its arrival, one at a time; the median."""
    await scene.exchange("dlx")
    dead = await scene.queue("dead", "dlx")
    work = await scene.queue("work", durable=durable, dead_letter_exchange="dlx")
    times = []
    for number in range(LATENCY_COUNT):
        scene.publish("", "work", 1)
        await scene.broker.committed()
        stretch = work.get()
        assert stretch is not None
        begun = time.perf_counter()
        work.reject(stretch)
        while dead.ready_count <= number:
            await trio.sleep(0.0002)
        times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


async def run(folder: Path, act: Callable[[Scene], Awaitable[float]], scale: Scale) -> float:
    env = real_env(folder)
    metadata = MetadataService(
        lambda: MemoryStore(UUID(int=1)), new_uuid=env.ids.uuid, hash_cost=HashCost(memory_kib=8, passes=1)
    )
    async with trio.open_nursery() as nursery:
        await nursery.start(metadata.run)
        await metadata.seed(Definitions())
        directory = await LogDirectory.open(env, DirectoryConfig(), clean=False)
        broker = Broker(env, directory, metadata, settings_of=settings_of, stamp=stamp, clean=False)
        await broker.load()
        broker.on_ready = broker.dispatch
        nursery.start_soon(directory.run)
        nursery.start_soon(broker.run)
        figure = await act(Scene(broker, *scale))
        await broker.close()
        await directory.close()
        nursery.cancel_scope.cancel()
    return figure


def claim(count: int = 20_000, levels: int = 4, turn: int = 100) -> list[Claim]:
    def measured(act: Act, *, durable: bool) -> float:
        with scratch_folder() as folder:
            return trio.run(run, folder, partial(act, durable=durable), (count, levels, turn))

    claims = []
    for act in (chain, rejects):
        ours, bare = measured(act, durable=True), measured(act, durable=False)
        detail = f"{ours:,.0f} per CPU second, {bare:,.0f} without a journal"
        claims.append(Claim(f"dead letters, {act.__name__}, beside unjournalled", ours / bare, 0.67, detail=detail))
    wait = measured(latency, durable=True)
    return [*claims, Claim("from a reject to its arrival, median", wait, None, Better.LESS, "ms")]


if __name__ == "__main__":
    for one in claim(*map(int, sys.argv[1:])):
        print(f"{one.name}: {one.figure:.2f} {one.unit}  {one.detail}")
