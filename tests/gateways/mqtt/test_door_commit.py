"""What a client is told only once the disk has it: a node whose disk can be made to wait. Over the wire, in process."""

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import trio

from headrace.config import load_config
from headrace.core_log.env import Worker
from headrace.core_log.errors import DiskFull
from headrace.core_log.real import real_env
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.mqtt.cutter import AckRun, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Suback,
    Subscribe,
    Subscription,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version
from headrace.node import run_node

T = TypeVar("T")


class Gate:
    """A worker that does nothing while it is shut: no sync begins."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._open = trio.Event()
        self._open.set()

    def shut(self) -> None:
        self._open = trio.Event()

    def open(self) -> None:
        self._open.set()

    async def run(self, call: Callable[[], T]) -> T:
        await self._open.wait()
        return await self._worker.run(call)


class Client:
    def __init__(self, stream: trio.SocketStream, version: Version) -> None:
        self._stream = stream
        self._version = version
        self._cutter = PacketCutter(from_client=False, version=version)
        self._came: list[Packet] = []

    async def send(self, *packets: Packet) -> None:
        await self._stream.send_all(b"".join([encode_packet(one, self._version) for one in packets]))

    async def receive(self) -> Packet:
        while not self._came:
            data = await self._stream.receive_some()
            assert data, "the broker closed the connection"
            for event in self._cutter.receive(data):
                assert not isinstance(event, Violation | PublishRun | AckRun)
                self._came.append(event)
        return self._came.pop(0)

    async def expect_end(self) -> None:
        assert not self._came and await self._stream.receive_some() == b""

    async def close(self) -> None:
        await self._stream.aclose()

    async def seen(self) -> list[Packet]:
        """What came before the answer to a ping."""
        await self.send(Pingreq())
        found: list[Packet] = []
        while not isinstance(one := await self.receive(), Pingresp):
            found.append(one)
        return found


class House:
    def __init__(self, gate: Gate, port: int) -> None:
        self.gate = gate
        self._port = port
        self._clients: list[Client] = []

    async def client(
        self, client_id: str = "", *, lasting: bool = False, version: Version = Version.V5, resumes: bool = False
    ) -> Client:
        client = Client(await trio.open_tcp_stream("127.0.0.1", self._port), version)
        self._clients.append(client)
        expiry = 300 if lasting else 0
        told = Properties(session_expiry_interval=expiry)
        await client.send(Connect(client_id, version, clean_start=not resumes, properties=told))
        connack = await client.receive()
        assert isinstance(connack, Connack) and connack.session_present is resumes
        return client

    async def close(self) -> None:
        for client in self._clients:
            await client.close()

    async def reader(self, topic: str, *, lasting: bool = False) -> Client:
        client = await self.client("reader", lasting=lasting)
        await client.send(Subscribe(1, (Subscription(topic, QoS(2)),)))
        assert isinstance(await client.receive(), Suback)
        return client


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[House]:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    off = {f"doors.{name}": "off" for name in ("amqp", "ws", "http")}
    config = load_config(None, {}, off | {"doors.mqtt": "127.0.0.1:0", "node.data": str(data)})
    env = real_env(data)
    gate = Gate(env.worker)
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        doors = await nursery.start(partial(run_node, config, replace(env, worker=gate), stop=stop))
        house = House(gate, doors["mqtt"].port)
        yield house
        gate.open()
        await house.close()
        stop.set()


async def test_puback_and_pubrec_come_when_the_message_is_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        for lasting in (False, True):
            writer = await house.client(f"writer-{lasting}", lasting=lasting)
            # The log's files are made by the first message.
            await writer.send(Publish("t", b"first", QoS(1), packet_id=9))
            assert await writer.receive() == Puback(9)
            house.gate.shut()
            await writer.send(Publish("t", b"1", QoS(1), packet_id=1), Publish("t", b"2", QoS(2), packet_id=2))
            assert await writer.seen() == []
            house.gate.open()
            assert {type(await writer.receive()), type(await writer.receive())} == {Puback, Pubrec}


async def test_repeated_qos_2_publish_is_not_answered_before_the_first_is_committed(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        writer = await house.client("writer", lasting=True)
        house.gate.shut()
        await writer.send(Publish("t", b"x", QoS(2), packet_id=2))
        assert await writer.seen() == []
        await writer.send(Publish("t", b"x", QoS(2), dup=True, packet_id=2))
        assert await writer.seen() == []
        house.gate.open()
        assert [await writer.receive(), await writer.receive()] == [Pubrec(2), Pubrec(2)]


async def test_lasting_qos_2_publisher_is_answered_with_the_group_of_its_message(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        exact, other = await house.client("exact", lasting=True), await house.client()
        reader = await house.client("reader", lasting=True)
        await other.send(Publish("t", b"first", QoS(1), packet_id=9))
        assert await other.receive() == Puback(9)
        house.gate.shut()
        # This one is being synced, and all that follows is the next group, the log of sessions first in it.
        await other.send(Publish("t", b"0", QoS(1), packet_id=1))
        assert await other.seen() == []
        await reader.send(Subscribe(1, (Subscription("t"),)))
        assert await reader.seen() == []
        await exact.send(Publish("t", b"1", QoS(2), packet_id=1))
        assert await exact.seen() == []
        await other.send(Publish("t", b"2", QoS(1), packet_id=2))
        assert await other.seen() == []
        house.gate.open()
        assert await exact.receive() == Pubrec(1)
        assert [await other.receive(), await other.receive()] == [Puback(1), Puback(2)]


async def test_identifier_counts_after_a_crash_if_its_message_was_written(tmp_path: Path) -> None:
    """A copy of the files is what a kill -9 at that moment leaves."""
    async with running(tmp_path / "before") as house:
        writer = await house.client("writer", lasting=True)
        await writer.send(Publish("t", b"safe", QoS(2), packet_id=6))
        assert await writer.receive() == Pubrec(6)
        house.gate.shut()
        # While this one is being synced, what follows is not written.
        await writer.send(Publish("t", b"written", QoS(1), packet_id=1))
        assert await writer.seen() == []
        await writer.send(Publish("t", b"unwritten", QoS(2), packet_id=7))
        assert await writer.seen() == []
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    async with running(tmp_path / "after") as house:
        reader = await house.reader("t")
        writer = await house.client("writer", lasting=True, resumes=True)
        again = [
            Publish("t", payload, QoS(2), dup=True, packet_id=number)
            for number, payload in ((6, b"safe"), (7, b"unwritten"))
        ]
        await writer.send(*again)
        assert [await writer.receive(), await writer.receive()] == [Pubrec(6), Pubrec(7)]
        message = await reader.receive()
        assert isinstance(message, Publish) and message.payload == b"unwritten"
        assert await reader.seen() == []


async def test_subscription_of_a_lasting_session_is_acknowledged_when_it_is_kept(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        reader = await house.client("reader", lasting=True)
        house.gate.shut()
        await reader.send(Subscribe(1, (Subscription("t"),)))
        assert await reader.seen() == []
        house.gate.open()
        assert isinstance(await reader.receive(), Suback)


async def test_clean_start_is_answered_when_the_old_session_is_gone_for_good(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        await house.reader("t", lasting=True)
        house.gate.shut()
        async with trio.open_nursery() as nursery:
            answered = trio.Event()

            async def begin_anew() -> None:
                await house.client("reader")
                answered.set()

            nursery.start_soon(begin_anew)
            # Somebody who has no session waits for no disk, however often it connects.
            for _ in range(20):
                await house.client("passing")
            assert not answered.is_set()
            house.gate.open()


async def test_session_that_said_goodbye_for_good_is_gone_before_the_next_one_begins(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        reader = await house.reader("t", lasting=True)
        house.gate.shut()
        await reader.send(Disconnect(ReasonCode.NORMAL_DISCONNECTION, Properties(session_expiry_interval=0)))
        await reader.expect_end()
        async with trio.open_nursery() as nursery:
            answered = trio.Event()

            async def come_again() -> None:
                await house.client("reader", lasting=True)
                answered.set()

            nursery.start_soon(come_again)
            for _ in range(20):
                await house.client("passing")
            assert not answered.is_set()
            house.gate.open()


async def test_woken_session_is_sent_messages_when_it_is_kept_that_it_is_awake(tmp_path: Path) -> None:
    """After a crash they must be marked as repeated ones."""
    async with running(tmp_path) as house:
        reader, writer = await house.reader("t", lasting=True), await house.client()
        await reader.send(Disconnect())
        await reader.expect_end()
        await writer.send(Publish("t", b"x", QoS(1), packet_id=2))
        assert await writer.receive() == Puback(2)
        house.gate.shut()
        reader = await house.client("reader", lasting=True, resumes=True)
        assert await reader.seen() == []
        house.gate.open()
        assert isinstance(await reader.receive(), Publish)


async def test_pubrel_comes_when_it_is_kept_that_the_client_has_the_message(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        reader, writer = await house.reader("t", lasting=True), await house.client()
        await writer.send(Publish("t", b"x", QoS(2), packet_id=2))
        assert await writer.receive() == Pubrec(2)
        message = await reader.receive()
        assert isinstance(message, Publish)
        house.gate.shut()
        await reader.send(Pubrec(message.packet_id))
        assert await reader.seen() == []
        house.gate.open()
        assert await reader.receive() == Pubrel(message.packet_id)


async def test_lasting_session_gets_a_message_when_it_is_committed_and_another_at_once(tmp_path: Path) -> None:
    async with running(tmp_path) as house:
        lasting, writer = await house.reader("t", lasting=True), await house.client()
        passing = await house.client("passing")
        await passing.send(Subscribe(1, (Subscription("t", QoS(1)),)))
        assert isinstance(await passing.receive(), Suback)
        await writer.send(Publish("t", b"first", QoS(1), packet_id=9))
        assert await writer.receive() == Puback(9)
        for client in (lasting, passing):
            assert isinstance(await client.receive(), Publish)
        house.gate.shut()
        await writer.send(Publish("t", b"x", QoS(1), packet_id=1))
        found = await passing.receive()
        assert isinstance(found, Publish) and found.payload == b"x"
        assert await lasting.seen() == []
        house.gate.open()
        found = await lasting.receive()
        assert isinstance(found, Publish) and found.payload == b"x"


async def test_disk_that_is_full_ends_the_connection_and_the_next_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarm stops publishers before it comes to that; where it does not, nothing is acknowledged."""

    def full(*_values: object, **_named: object) -> None:
        raise DiskFull("no space left")

    async with running(tmp_path) as house:
        five, three = await house.client(), await house.client(version=Version.V3_1_1)
        with monkeypatch.context() as patched:
            patched.setattr(Broker, "publish", full)
            for client in (five, three):
                await client.send(Publish("t", b"x", QoS(1), packet_id=1))
            found = await five.receive()
            assert isinstance(found, Disconnect) and found.reason is ReasonCode.QUOTA_EXCEEDED
            for client in (five, three):
                await client.expect_end()
        again = await house.client()
        await again.send(Publish("t", b"x", QoS(1), packet_id=1))
        assert await again.receive() == Puback(1)
