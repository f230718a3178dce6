"""aiomqtt, paho's client for asyncio. Driver: asyncio."""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from typing import Any

import aiomqtt
from aiomqtt import Client, Message, ProtocolVersion, Will
from paho.mqtt.packettypes import PacketTypes

from interop.broker import Broker
from interop.client import Driven, Feature, python_version
from interop.mqtt.paho_threads import LASTING_SECONDS, properties

WAIT_SECONDS = 30


def connect(broker: Broker, name: str | None = None, *, lasting: bool = False, **settings: Any) -> Client:
    options: dict[str, Any] = {"identifier": name, "protocol": ProtocolVersion.V5, "timeout": WAIT_SECONDS}
    if lasting:
        expiry = properties(PacketTypes.CONNECT, SessionExpiryInterval=LASTING_SECONDS)
        options |= {"clean_start": False, "properties": expiry}
    return Client("127.0.0.1", broker.ports["mqtt"], **(options | settings))


def in_asyncio(show: Callable[[Broker], Coroutine[Any, Any, None]]) -> Callable[[Broker], None]:
    async def in_time(broker: Broker) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await show(broker)

    return lambda broker: asyncio.run(in_time(broker))


async def take(client: Client, count: int) -> list[Message]:
    came: list[Message] = []
    async for message in client.messages:
        came.append(message)
        if len(came) == count:
            break
    return came


def at_qos(qos: int) -> Callable[[Broker], Coroutine[Any, Any, None]]:
    async def show(broker: Broker) -> None:
        """Many publishes wait for their acknowledgement at the same time."""
        async with connect(broker) as reader, connect(broker) as writer:
            await reader.subscribe(f"aiomqtt/{qos}/+", qos=qos)
            await asyncio.gather(*(writer.publish(f"aiomqtt/{qos}/{n}", n, qos=qos) for n in range(100)))
            came = await take(reader, 100)
            assert sorted(int(message.payload) for message in came) == [*range(100)]
            assert all(str(message.topic) == f"aiomqtt/{qos}/{int(message.payload)}" for message in came)
            assert {message.qos for message in came} == {qos}

    return show


async def wildcards(broker: Broker) -> None:
    async with connect(broker) as reader, connect(broker) as writer:
        await reader.subscribe([("aiomqtt/+/temp", 1), ("aiomqtt/all/#", 1)])
        for topic in ("aiomqtt/hall/temp", "aiomqtt/hall/light", "aiomqtt/all", "aiomqtt/all/a/b"):
            await writer.publish(topic, topic, qos=1)
        came = await take(reader, 3)
        assert [str(message.topic) for message in came] == ["aiomqtt/hall/temp", "aiomqtt/all", "aiomqtt/all/a/b"]
        assert came[0].topic.matches("aiomqtt/+/temp")


async def retained(broker: Broker) -> None:
    async with connect(broker) as writer, connect(broker) as reader:
        await writer.publish("aiomqtt/kept/a", "1", qos=1, retain=True)
        await reader.subscribe("aiomqtt/kept/#")
        (message,) = await take(reader, 1)
        assert (message.payload, message.retain) == (b"1", True)
        await writer.publish("aiomqtt/kept/a", None, qos=1, retain=True)
    async with connect(broker) as reader, connect(broker) as writer:
        await reader.subscribe("aiomqtt/kept/#")
        await writer.publish("aiomqtt/kept/b", "end", qos=1)
        assert [message.payload for message in await take(reader, 1)] == [b"end"]


async def will(broker: Broker) -> None:
    """A connection whose session is taken over ends without a DISCONNECT of its own."""
    async with connect(broker) as reader:
        await reader.subscribe("aiomqtt/will", qos=1)
        try:
            async with connect(broker, "aiomqtt-mortal", will=Will("aiomqtt/will", b"gone", qos=1)) as mortal:
                async with connect(broker, "aiomqtt-mortal"):
                    (message,) = await take(reader, 1)
                await take(mortal, 1)
        except aiomqtt.MqttError:
            pass
        else:
            raise AssertionError("the older connection lives")
        assert message.payload == b"gone"


async def session(broker: Broker) -> None:
    """Away while messages are published and the broker is killed."""
    async with connect(broker, "aiomqtt-sleeper", lasting=True) as sleeper:
        await sleeper.subscribe("aiomqtt/session", qos=2)
    async with connect(broker) as writer:
        for number in range(10):
            await writer.publish("aiomqtt/session", number, qos=2)
    await asyncio.to_thread(broker.restart)
    async with connect(broker, "aiomqtt-sleeper", lasting=True) as sleeper:
        assert [int(message.payload) for message in await take(sleeper, 10)] == [*range(10)]
        await sleeper.unsubscribe("aiomqtt/session")


async def shared(broker: Broker) -> None:
    async with connect(broker) as one, connect(broker) as two, connect(broker) as writer:
        for member in (one, two):
            await member.subscribe("$share/workers/aiomqtt/jobs", qos=1)
        readers = [asyncio.create_task(take(member, 10)) for member in (one, two)]
        for number in range(20):
            await writer.publish("aiomqtt/jobs", number, qos=1)
        came = [int(message.payload) for reader in readers for message in await reader]
        assert sorted(came) == [*range(20)]


async def message_properties(broker: Broker) -> None:
    told = properties(PacketTypes.PUBLISH, ContentType="text/plain", UserProperty=[("a", "b"), ("a", "c")])
    async with connect(broker) as client:
        await client.subscribe("aiomqtt/properties", qos=1)
        await client.publish("aiomqtt/properties", "x", qos=1, properties=told)
        (message,) = await take(client, 1)
        assert message.properties is not None
        assert message.properties.ContentType == "text/plain"
        assert message.properties.UserProperty == [("a", "b"), ("a", "c")]


async def error(broker: Broker) -> None:
    try:
        async with connect(broker, username="guest", password="wrong"):
            raise AssertionError("a wrong password was taken")
    except aiomqtt.MqttError as refused:
        assert "uthor" in str(refused) or "password" in str(refused), refused


async def restart(broker: Broker) -> None:
    """The loop of its documentation: an error of the connection, and again."""
    ready = asyncio.Event()
    came: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen() -> None:
        while True:
            try:
                async with connect(broker, "aiomqtt-listener", lasting=True) as client:
                    await client.subscribe("aiomqtt/restart", qos=2)
                    ready.set()
                    async for message in client.messages:
                        await came.put(bytes(message.payload))
            except aiomqtt.MqttError:
                await asyncio.sleep(0.05)

    listener = asyncio.create_task(listen())
    await ready.wait()
    async with connect(broker) as writer:
        await writer.publish("aiomqtt/restart", "before", qos=2)
    assert await came.get() == b"before"
    await asyncio.to_thread(broker.restart)
    async with connect(broker) as writer:
        await writer.publish("aiomqtt/restart", "end", qos=2)
    assert await came.get() == b"end"
    listener.cancel()
    await asyncio.gather(listener, return_exceptions=True)


CLIENT = Driven(
    "aiomqtt",
    python_version("aiomqtt"),
    {
        Feature.QOS_0: in_asyncio(at_qos(0)),
        Feature.QOS_1: in_asyncio(at_qos(1)),
        Feature.QOS_2: in_asyncio(at_qos(2)),
        Feature.WILDCARDS: in_asyncio(wildcards),
        Feature.RETAINED: in_asyncio(retained),
        Feature.WILL: in_asyncio(will),
        Feature.SESSION: in_asyncio(session),
        Feature.SHARED: in_asyncio(shared),
        Feature.PROPERTIES: in_asyncio(message_properties),
        Feature.ERROR: in_asyncio(error),
        Feature.RESTART: in_asyncio(restart),
    },
    nullcontext,
)
