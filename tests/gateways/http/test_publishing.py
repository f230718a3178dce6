"""A large batch is published in slices between which others have their turn: what changes meanwhile counts."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

from msgspec import Raw
from tests.gateways.delivery.house import House, Running

from headrace.controller.changes import PutPermission
from headrace.controller.entities import Permission
from headrace.controller.table import EMPTY
from headrace.gateways.amqp.properties import routing_fields
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.topics import Topics, parse_name
from headrace.gateways.http.problems import Code
from headrace.gateways.http.publishing import Batch, NewMessage
from headrace.gateways.http.visitor import Visitor
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.plain import PlainWords

MESSAGES = [NewMessage(key=str(number), value=Raw(b'"v"')) for number in range(500)]


class Turn:
    """Does something once, when the first slice is published."""

    def __init__(self) -> None:
        self.then: Callable[[], object] = lambda: None

    def soon(self) -> None:
        then, self.then = self.then, lambda: None
        then()


@asynccontextmanager
async def batch_for(name: str) -> AsyncIterator[tuple[Running, Topics, Turn, Batch]]:
    async with House().broker() as running:
        running.broker.fields_of = routing_fields
        topics = Topics(running.broker)
        await topics.load()
        await topics.create("/", "t", 2, EMPTY)
        await running.declare("q")
        access = Access(running.metadata.snapshot)
        running.metadata.listen(lambda snapshot, changes: access.update(snapshot))
        turn = Turn()
        door: Any = SimpleNamespace(
            broker=running.broker, topics=topics, words=PlainWords(RoutingKeys()), turn=turn, access=access
        )
        yield running, topics, turn, Batch(door, Visitor("guest", access), topics.resolve(parse_name(name)))


async def test_batch_of_many_slices_has_a_result_for_each_message_in_their_order() -> None:
    async with batch_for("t") as (_running, topics, _turn, batch):
        ready = await batch.checked(MESSAGES)
        assert await batch.publish(ready) is None
        await batch.committed()
        place = topics.resolve(parse_name("t"))
        for message, result in zip(MESSAGES, batch.results, strict=True):
            assert result.partition is not None and result.offset is not None
            log = topics.log_at(place, result.partition)
            assert log is not None
            ((found, first, _last),) = log.read(result.offset, bytes_max=1)[:1]
            assert found.keys[first] == message.key.encode()


async def test_topic_deleted_between_two_slices_ends_the_batch_there() -> None:
    async with batch_for("t") as (_running, topics, turn, batch):
        ready = await batch.checked(MESSAGES)
        turn.then = lambda: setattr(topics, "is_there", lambda place: False)
        problem = await batch.publish(ready)
        assert problem is not None and problem.code is Code.NOT_FOUND
        assert sum(result.offset is not None for result in batch.results) == 200


async def test_right_taken_away_since_a_batch_was_looked_at_counts() -> None:
    async with batch_for("q") as (running, _topics, _turn, batch):
        ready = await batch.checked(MESSAGES)
        await running.metadata.commit(PutPermission(Permission("guest", "/", ".*", "", ".*")))
        problem = await batch.publish(ready)
        assert problem is not None and (problem.code, problem.index) == (Code.FORBIDDEN, 0)
        assert running.host.queue("q").ready_count == 0


async def test_queue_deleted_since_a_batch_was_looked_at_gets_nothing() -> None:
    async with batch_for("q") as (running, _topics, _turn, batch):
        queue = running.host.queue("q")
        ready = await batch.checked(MESSAGES)
        await running.host.delete_queue(queue)
        problem = await batch.publish(ready)
        assert problem is not None and problem.code is Code.NOT_FOUND
