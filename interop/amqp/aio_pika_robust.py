"""aio-pika's robust connection, which is meant to live through the broker's death. Driver: asyncio."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import aio_pika
from aio_pika import DeliveryMode, ExchangeType, Message
from aio_pika.abc import AbstractIncomingMessage, AbstractRobustConnection
from aio_pika.exceptions import ChannelNotFoundEntity, DeliveryError
from aio_pika.patterns import RPC

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 30
# Long enough to miss two beats of a second.
BEAT_SECONDS = 3.5
# After this the client tries again to connect.
RECONNECT_SECONDS = 0.2


def connect(broker: Broker, **settings: Any) -> Coroutine[Any, Any, AbstractRobustConnection]:
    return aio_pika.connect_robust(broker.url, reconnect_interval=RECONNECT_SECONDS, **settings)


def in_asyncio(show: Callable[[Broker], Coroutine[Any, Any, None]]) -> Callable[[Broker], None]:
    async def in_time(broker: Broker) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await show(broker)

    return lambda broker: asyncio.run(in_time(broker))


async def confirms(broker: Broker) -> None:
    """Confirms are on by default; many publishes wait for theirs at the same time."""
    async with await connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("aio.confirms", durable=True)
        messages = [Message(b"%d" % number, delivery_mode=DeliveryMode.PERSISTENT) for number in range(500)]
        await asyncio.gather(*(channel.default_exchange.publish(message, queue.name) for message in messages))
        # A channel that knows the queue would answer from memory.
        looking = await connection.channel()
        assert (await looking.declare_queue(queue.name, passive=True)).declaration_result.message_count == 500


async def prefetch(broker: Broker) -> None:
    """What the first left, by the iterator that most applications use."""
    async with await connect(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        queue = await channel.get_queue("aio.confirms")
        done: list[int] = []
        async with queue.iterator() as messages:
            async for message in messages:
                async with message.process():
                    done.append(int(message.body))
                if len(done) == 500:
                    break
        assert sorted(done) == list(range(500))
        await queue.delete()


async def requeue(broker: Broker) -> None:
    """A handler that raises gives its message back."""
    async with await connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("aio.requeue", auto_delete=True)
        seen: list[bool] = []
        done = asyncio.Event()

        async def handle(message: AbstractIncomingMessage) -> None:
            async with message.process(requeue=True, ignore_processed=True):
                seen.append(bool(message.redelivered))
                if len(seen) < 3:
                    await message.nack(requeue=True)
                    return
                done.set()

        await queue.consume(handle)
        await channel.default_exchange.publish(Message(b"again"), queue.name)
        await done.wait()
        assert seen == [False, True, True]


async def topic(broker: Broker) -> None:
    async with await connect(broker) as connection:
        channel = await connection.channel()
        exchange = await channel.declare_exchange("aio.topic", ExchangeType.TOPIC)
        queue = await channel.declare_queue("", exclusive=True)
        await queue.bind(exchange, "*.orange.*")
        await queue.bind(exchange, "lazy.#")
        for key in ("quick.orange.rabbit", "lazy.orange.elephant", "quick.brown.fox", "lazy"):
            await exchange.publish(Message(key.encode()), key)
        came = [(await queue.get(no_ack=True)).body for _ in range(3)]
        assert came == [b"quick.orange.rabbit", b"lazy.orange.elephant", b"lazy"]
        assert await queue.get(fail=False) is None


async def returns(broker: Broker) -> None:
    async with await connect(broker) as connection:
        channel = await connection.channel(on_return_raises=True)
        try:
            await channel.default_exchange.publish(Message(b"lost", message_id="m"), "aio.nobody")
        except DeliveryError as refused:
            assert refused.message is not None
            assert refused.message.header.properties.message_id == "m"
            assert refused.message.body == b"lost"
        else:
            raise AssertionError("an unroutable message was taken")


async def dead_letter(broker: Broker) -> None:
    async with await connect(broker) as connection:
        channel = await connection.channel()
        dead = await channel.declare_queue("aio.dead", auto_delete=True)
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "aio.dead"}
        queue = await channel.declare_queue("aio.mortal", arguments=arguments)
        # The client writes an expiration as milliseconds from seconds.
        await channel.default_exchange.publish(Message(b"late", expiration=0.1), queue.name)
        async with dead.iterator(no_ack=True) as messages:
            message = await anext(messages)
        (death,) = message.headers["x-death"]
        assert message.body == b"late"
        assert (death["queue"], death["reason"]) == ("aio.mortal", "expired")
        await queue.delete()


async def rpc(broker: Broker) -> None:
    """The client's own pattern: a results queue, a headers exchange for its dead letters, messages that expire."""
    async with await connect(broker) as connection:
        channel = await connection.channel()
        calls = await RPC.create(channel)

        async def multiply(*, x: int, y: int) -> int:
            return x * y

        async def fail() -> None:
            raise ValueError("no")

        await calls.register("aio.multiply", multiply, auto_delete=True)
        await calls.register("aio.fail", fail, auto_delete=True)
        answers = await asyncio.gather(*(calls.call("aio.multiply", {"x": x, "y": 2}) for x in range(20)))
        assert answers == [2 * x for x in range(20)]
        try:
            await calls.call("aio.fail")
        except ValueError as error:
            assert error.args == ("no",)
        else:
            raise AssertionError("an error did not come back")
        await calls.close()


async def headers(broker: Broker) -> None:
    told: dict[str, Any] = {
        "text": "šedá",
        "true": True,
        "int": -(2**31),
        "long": 2**40,
        "float": 0.5,
        "decimal": Decimal("3.14"),
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "none": None,
        "list": [1, "two", {"three": 3}],
        "table": {"a": {"b": {}}},
    }
    sent = Message(
        b"body",
        headers=told,
        content_type="text/plain",
        content_encoding="utf-8",
        delivery_mode=DeliveryMode.PERSISTENT,
        priority=7,
        correlation_id="c",
        reply_to="r",
        message_id="m",
        timestamp=datetime(2026, 1, 2, tzinfo=UTC),
        type="t",
        user_id="guest",
        app_id="a",
    )
    async with await connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("", exclusive=True)
        await channel.default_exchange.publish(sent, queue.name)
        came = await queue.get(no_ack=True)
        assert came.headers == told
        assert came.body == b"body"
        told_of = {name: value for name, value in sent.info().items() if value is not None}
        assert {name: came.info()[name] for name in told_of} == told_of


async def large_body(broker: Broker) -> None:
    body = bytes(range(256)) * 4 * 4096
    async with await connect(broker) as connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("", exclusive=True)
        await channel.default_exchange.publish(Message(body), queue.name)
        assert (await queue.get(no_ack=True)).body == body


async def error(broker: Broker) -> None:
    async with await connect(broker) as connection:
        channel = await connection.channel()
        try:
            await channel.get_queue("aio.nowhere")
        except ChannelNotFoundEntity:
            pass
        else:
            raise AssertionError("a queue that is not there was found")
        other = await connection.channel()
        await other.declare_queue("", exclusive=True)


async def heartbeat(broker: Broker) -> None:
    async with await connect(broker, heartbeat=1) as connection:
        channel = await connection.channel()
        await asyncio.sleep(BEAT_SECONDS)
        await channel.declare_queue("", exclusive=True)
        assert connection.connected.is_set()


async def restart(broker: Broker) -> None:
    """The consumer, its exclusive queue and its publisher go on after kill -9 as if nothing had happened."""
    async with await connect(broker) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=5)
        kept = await channel.declare_queue("aio.kept", durable=True)
        exchange = await channel.declare_exchange("aio.news", ExchangeType.FANOUT)
        own = await channel.declare_queue("aio.own", exclusive=True)
        await own.bind(exchange)
        came: asyncio.Queue[str] = asyncio.Queue()

        async def handle(message: AbstractIncomingMessage) -> None:
            async with message.process():
                await came.put(message.body.decode())

        for number in range(3):
            message = Message(b"before %d" % number, delivery_mode=DeliveryMode.PERSISTENT)
            await channel.default_exchange.publish(message, kept.name)
        reconnected = asyncio.Event()
        connection.reconnect_callbacks.add(lambda *_: reconnected.set())
        await own.consume(handle)
        await asyncio.to_thread(broker.restart)
        await reconnected.wait()
        await kept.consume(handle)
        assert [await came.get() for _ in range(3)] == ["before 0", "before 1", "before 2"]
        await exchange.publish(Message(b"after"), "")
        assert await came.get() == "after"
        # Once more, with the durable consumer in place.
        reconnected.clear()
        await asyncio.to_thread(broker.restart)
        await reconnected.wait()
        await channel.default_exchange.publish(Message(b"again", delivery_mode=DeliveryMode.PERSISTENT), kept.name)
        # An ack that was on its way when the broker died may have been lost, and then its message comes again.
        while await came.get() != "again":
            pass


CLIENT = Driven(
    "aio-pika robust",
    python_version("aio-pika"),
    {
        Feature.CONFIRMS: in_asyncio(confirms),
        Feature.PREFETCH: in_asyncio(prefetch),
        Feature.REQUEUE: in_asyncio(requeue),
        Feature.TOPIC: in_asyncio(topic),
        Feature.RETURN: in_asyncio(returns),
        Feature.DEAD_LETTER: in_asyncio(dead_letter),
        Feature.RPC: in_asyncio(rpc),
        Feature.HEADERS: in_asyncio(headers),
        Feature.BODY: in_asyncio(large_body),
        Feature.ERROR: in_asyncio(error),
        Feature.HEARTBEAT: in_asyncio(heartbeat),
        Feature.RESTART: in_asyncio(restart),
    },
    nullcontext,
)
