"""gmqtt, an MQTT 5 client for asyncio with callbacks, which connects again by itself. Driver: asyncio."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import gmqtt
from gmqtt.mqtt.handler import MQTTConnectError

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 30
LASTING_SECONDS = 600
RECONNECT_SECONDS = 0.1


class Peer:
    """One client; what its callbacks are told waits in queues."""

    def __init__(self, name: str | None, settings: dict[str, Any]) -> None:
        self.client = gmqtt.Client(name, **settings)
        self.client.set_config(
            {"reconnect_delay": RECONNECT_SECONDS, "reconnect_retries": gmqtt.constants.UNLIMITED_RECONNECTS}
        )
        self.messages: asyncio.Queue[tuple[str, bytes, int, dict[str, Any]]] = asyncio.Queue()
        self.connects: asyncio.Queue[int] = asyncio.Queue()
        self._subacks: asyncio.Queue[int] = asyncio.Queue()
        self.client.on_message = self._came
        self.client.on_connect = lambda client, flags, reason, told: self.connects.put_nowait(flags)
        self.client.on_subscribe = lambda client, mid, reasons, told: self._subacks.put_nowait(mid)

    def _came(self, client: gmqtt.Client, topic: str, payload: bytes, qos: int, told: dict[str, Any]) -> int:
        self.messages.put_nowait((topic, payload, qos, told))
        return 0

    async def subscribe(self, topic: str, qos: int, **settings: Any) -> None:
        self.client.subscribe(topic, qos=qos, **settings)
        await self._subacks.get()

    async def payloads(self, count: int) -> list[bytes]:
        return [(await self.messages.get())[1] for _ in range(count)]


@asynccontextmanager
async def connected(
    broker: Broker, name: str | None = None, *, lasting: bool = False, **settings: Any
) -> AsyncIterator[Peer]:
    options: dict[str, Any] = {"clean_session": not lasting}
    if lasting:
        options["session_expiry_interval"] = LASTING_SECONDS
    peer = Peer(name, options | settings)
    await peer.client.connect("127.0.0.1", broker.ports["mqtt"], keepalive=60)
    try:
        yield peer
    finally:
        await peer.client.disconnect()


def in_asyncio(show: Callable[[Broker], Coroutine[Any, Any, None]]) -> Callable[[Broker], None]:
    async def in_time(broker: Broker) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            await show(broker)

    return lambda broker: asyncio.run(in_time(broker))


def at_qos(qos: int) -> Callable[[Broker], Coroutine[Any, Any, None]]:
    async def show(broker: Broker) -> None:
        async with connected(broker) as reader, connected(broker) as writer:
            await reader.subscribe(f"gmqtt/{qos}", qos)
            for number in range(100):
                writer.client.publish(f"gmqtt/{qos}", number, qos=qos)
            came = [await reader.messages.get() for _ in range(100)]
            assert [payload for _, payload, _, _ in came] == [b"%d" % number for number in range(100)]
            assert {(topic, granted) for topic, _, granted, _ in came} == {(f"gmqtt/{qos}", qos)}

    return show


async def retained(broker: Broker) -> None:
    async with connected(broker) as writer, connected(broker) as reader:
        writer.client.publish("gmqtt/kept/a", "1", qos=1, retain=True)
        await reader.subscribe("gmqtt/kept/#", 1)
        assert await reader.payloads(1) == [b"1"]
        writer.client.publish("gmqtt/kept/a", "", qos=1, retain=True)
        assert await reader.payloads(1) == [b""]


async def will(broker: Broker) -> None:
    """When the same name takes over, and begins a new session."""
    last = gmqtt.Message("gmqtt/will", "gone", qos=1, will_delay_interval=0)
    async with connected(broker) as reader:
        await reader.subscribe("gmqtt/will", 1)
        async with connected(broker, "gmqtt-mortal", will_message=last) as mortal:
            mortal.client.stop_reconnect()
            async with connected(broker, "gmqtt-mortal"):
                assert await reader.payloads(1) == [b"gone"]


async def session(broker: Broker) -> None:
    async with connected(broker, "gmqtt-sleeper", lasting=True) as sleeper:
        assert await sleeper.connects.get() == 0
        await sleeper.subscribe("gmqtt/session", 2)
    async with connected(broker) as writer:
        for number in range(10):
            writer.client.publish("gmqtt/session", number, qos=2)
        # Acknowledged, all of them.
        await writer.client._persistent_storage.wait_empty()
    await asyncio.to_thread(broker.restart)
    async with connected(broker, "gmqtt-sleeper", lasting=True) as sleeper:
        assert await sleeper.connects.get() == 1
        assert await sleeper.payloads(10) == [b"%d" % number for number in range(10)]


async def shared(broker: Broker) -> None:
    async with connected(broker) as one, connected(broker) as two, connected(broker) as writer:
        for member in (one, two):
            await member.subscribe("$share/workers/gmqtt/jobs", 1)
        for number in range(20):
            writer.client.publish("gmqtt/jobs", number, qos=1)
        came = await one.payloads(10) + await two.payloads(10)
        assert sorted(came, key=int) == [b"%d" % number for number in range(20)]


async def message_properties(broker: Broker) -> None:
    async with connected(broker) as peer:
        await peer.subscribe("gmqtt/properties", 1, subscription_identifier=5)
        peer.client.publish(
            "gmqtt/properties",
            "x",
            qos=1,
            content_type="text/plain",
            response_topic="gmqtt/answers",
            correlation_data=b"c",
            message_expiry_interval=60,
            user_property=[("a", "1"), ("a", "2")],
        )
        *_, told = await peer.messages.get()
        assert told["content_type"] == ["text/plain"]
        assert told["response_topic"] == ["gmqtt/answers"]
        assert told["correlation_data"] == [b"c"]
        assert told["user_property"] == [("a", "1"), ("a", "2")]
        assert told["subscription_identifier"] == [5]
        assert 0 < told["message_expiry_interval"][0] <= 60


async def error(broker: Broker) -> None:
    peer = Peer(None, {})
    peer.client.set_auth_credentials("guest", "wrong")
    peer.client.stop_reconnect()
    try:
        await peer.client.connect("127.0.0.1", broker.ports["mqtt"])
    except MQTTConnectError:
        pass
    else:
        raise AssertionError("a wrong password was taken")
    finally:
        await peer.client.disconnect()


async def restart(broker: Broker) -> None:
    """kill -9: the client comes back to its session by itself, and publishes again what was not acknowledged."""
    async with (
        connected(broker, "gmqtt-reader", lasting=True) as reader,
        connected(broker, "gmqtt-writer", lasting=True) as writer,
    ):
        for peer in (reader, writer):
            await peer.connects.get()
        await reader.subscribe("gmqtt/restart", 1)
        writer.client.publish("gmqtt/restart", "before", qos=1)
        assert await reader.payloads(1) == [b"before"]
        await asyncio.to_thread(broker.restart)
        assert await reader.connects.get() == 1
        await writer.connects.get()
        writer.client.publish("gmqtt/restart", "after", qos=1)
        while await reader.payloads(1) != [b"after"]:
            pass


CLIENT = Driven(
    "gmqtt",
    python_version("gmqtt"),
    {
        Feature.QOS_0: in_asyncio(at_qos(0)),
        Feature.QOS_1: in_asyncio(at_qos(1)),
        Feature.QOS_2: in_asyncio(at_qos(2)),
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
