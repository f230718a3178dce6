"""amqtt's client, MQTT 3.1.1 for asyncio, over TCP and WebSocket. Driver: asyncio."""

import asyncio
import gc
import warnings
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

from amqtt.client import MQTTClient
from amqtt.errors import ConnectError

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 30
CONFIG: dict[str, Any] = {"auto_reconnect": False, "keep_alive": 60}


@asynccontextmanager
async def connected(
    url: str, name: str | None = None, *, lasting: bool = False, **config: Any
) -> AsyncIterator[MQTTClient]:
    client = MQTTClient(client_id=name, config=CONFIG | config)
    await client.connect(url, cleansession=not lasting)
    try:
        yield client
    finally:
        await client.disconnect()


async def take(client: MQTTClient, count: int) -> list[bytes]:
    came: list[bytes] = []
    for _ in range(count):
        message = await client.deliver_message(timeout_duration=WAIT_SECONDS)
        assert message is not None
        came.append(bytes(message.data))
    return came


def in_asyncio(show: Callable[[Broker], Coroutine[Any, Any, None]]) -> Callable[[Broker], None]:
    async def in_time(broker: Broker) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await show(broker)

    return lambda broker: asyncio.run(in_time(broker))


def at_qos(qos: int) -> Callable[[Broker], Coroutine[Any, Any, None]]:
    async def show(broker: Broker) -> None:
        """From TCP to WebSocket."""
        async with connected(broker.ws_url) as reader, connected(broker.mqtt_url) as writer:
            assert await reader.subscribe([(f"amqtt/{qos}/#", qos)]) == [qos]
            for number in range(50):
                await writer.publish(f"amqtt/{qos}/a", b"%d" % number, qos=qos)
            assert await take(reader, 50) == [b"%d" % number for number in range(50)]

    return show


async def retained(broker: Broker) -> None:
    async with connected(broker.mqtt_url) as writer, connected(broker.mqtt_url) as reader:
        await writer.publish("amqtt/kept/a", b"1", qos=1, retain=True)
        await reader.subscribe([("amqtt/kept/+", 1)])
        message = await reader.deliver_message(timeout_duration=WAIT_SECONDS)
        assert message is not None and (message.data, message.retain) == (b"1", True)
        await writer.publish("amqtt/kept/a", b"", qos=1, retain=True)


async def session(broker: Broker) -> None:
    """Away while messages are published and the broker is killed."""
    async with connected(broker.mqtt_url, "amqtt-sleeper", lasting=True) as sleeper:
        assert await sleeper.subscribe([("amqtt/session", 2)]) == [2]
    async with connected(broker.mqtt_url) as writer:
        for number in range(10):
            await writer.publish("amqtt/session", b"%d" % number, qos=1 + number % 2)
    await asyncio.to_thread(broker.restart)
    async with connected(broker.mqtt_url, "amqtt-sleeper", lasting=True) as sleeper:
        assert sorted(await take(sleeper, 10)) == [b"%d" % number for number in range(10)]


async def refused(broker: Broker) -> None:
    """A wrong password is refused, with the reason."""
    try:
        async with connected(broker.mqtt_url.replace("//", "//guest:wrong@")):
            raise AssertionError("a wrong password was taken")
    except ConnectError as answer:
        assert answer.return_code in (4, 5)


def error(broker: Broker) -> None:
    in_asyncio(refused)(broker)
    # The client leaves a connection that was refused to the collector, which would tell whoever comes next.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


CLIENT = Driven(
    "amqtt's client",
    python_version("amqtt"),
    {
        Feature.QOS_0: in_asyncio(at_qos(0)),
        Feature.QOS_1: in_asyncio(at_qos(1)),
        Feature.QOS_2: in_asyncio(at_qos(2)),
        Feature.RETAINED: in_asyncio(retained),
        Feature.SESSION: in_asyncio(session),
        Feature.ERROR: error,
    },
    nullcontext,
)
