"""QoS 2 is exactly once through a loss of power at any moment: a node on a disk in memory, over the wire.

While clients go through their exchanges, the state that a loss of power would leave is taken before every sync, four
times: with nothing of what was not synced, with all of it, and with that of either of two logs alone. The clients then
go on with each of those disks, as the standard asks of them.
"""

import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Generic, TypeVar

import pytest
import trio
from tests.gateways.mqtt.test_door_commit import House

from headrace.config import load_config
from headrace.core_log.real import real_env
from headrace.core_log.storage.memory import MemoryFile, MemoryStorage
from headrace.core_log.storage.tree import Change, ContentChange
from headrace.gateways.delivery import broker
from headrace.gateways.mqtt import keeping
from headrace.gateways.mqtt.packets import (
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Suback,
    Subscribe,
    Subscription,
)
from headrace.node import run_node

T = TypeVar("T")


class Inline:
    """A worker without threads: what is taken from the disk is taken between two calls."""

    async def run(self, call: Callable[[], T]) -> T:
        await trio.lowlevel.checkpoint()
        return call()


@asynccontextmanager
async def running(folder: Path, storage: MemoryStorage) -> AsyncIterator[House]:
    """`folder` has the metadata; the logs are in memory."""
    folder.mkdir(exist_ok=True)
    off = {f"doors.{name}": "off" for name in ("amqp", "ws", "http")}
    config = load_config(None, {}, off | {"doors.mqtt": "127.0.0.1:0", "node.data": str(folder)})
    env = replace(real_env(folder), storage=storage, worker=Inline())
    stop = trio.Event()
    async with trio.open_nursery() as nursery:
        doors = await nursery.start(partial(run_node, config, env, stop=stop))
        house = House(None, doors["mqtt"].port)  # type: ignore[arg-type]
        yield house
        await house.close()
        stop.set()


@dataclass
class Publisher:
    """What a client knows of its exchanges, and has to bring to an end."""

    sent: list[bytes] = field(default_factory=list)
    unanswered: dict[int, bytes] = field(default_factory=dict)
    unreleased: set[int] = field(default_factory=set)

    def publish(self) -> Publish:
        """With the lowest identifier that is free."""
        packet_id = next(number for number in count(1) if number not in self.unanswered.keys() | self.unreleased)
        payload = b"%d" % len(self.sent)
        self.sent.append(payload)
        self.unanswered[packet_id] = payload
        return Publish("t", payload, QoS(2), packet_id=packet_id)

    def take(self, packet: Packet) -> list[Packet]:
        match packet:
            case Pubrec(packet_id):
                self.unanswered.pop(packet_id, None)
                self.unreleased.add(packet_id)
                return [Pubrel(packet_id)]
            case Pubcomp(packet_id):
                self.unreleased.discard(packet_id)
                return []
            case _:
                raise AssertionError(packet)

    def again(self) -> list[Packet]:
        """[MQTT-4.4.0-1] What is sent on the next connection."""
        unanswered: list[Packet] = [
            Publish("t", payload, QoS(2), dup=True, packet_id=packet_id)
            for packet_id, payload in self.unanswered.items()
        ]
        return unanswered + [Pubrel(packet_id) for packet_id in sorted(self.unreleased)]

    @property
    def is_done(self) -> bool:
        return not self.unanswered and not self.unreleased


@dataclass
class Member:
    """What a client knows of the messages that it is sent."""

    sent: list[bytes] = field(default_factory=list)
    got: list[bytes] = field(default_factory=list)
    # Received and not released: what comes under these identifiers is the same message.
    received: set[int] = field(default_factory=set)

    def take(self, packet: Packet) -> Packet:
        match packet:
            case Publish(payload=payload, packet_id=packet_id):
                if packet_id not in self.received:
                    self.got.append(payload)
                    self.received.add(packet_id)
                return Pubrec(packet_id)
            case Pubrel(packet_id):
                self.received.discard(packet_id)
                return Pubcomp(packet_id)
            case _:
                raise AssertionError(packet)


K = TypeVar("K", Publisher, Member)


class Cuts(Generic[K]):
    """The states that losses of power would have left, each with what the client knew then."""

    def __init__(self, storage: MemoryStorage, known: K, *names: str) -> None:
        """`names`: of the logs of which one may have been written without the other."""
        self._storage = storage
        self._known = known
        self._names = names
        self.found: list[tuple[str, MemoryStorage, K]] = []

    @contextmanager
    def before_each_sync(self, patch: pytest.MonkeyPatch) -> Iterator[None]:
        sync = MemoryFile.sync

        def watched(file: MemoryFile) -> None:
            self._take()
            sync(file)

        with patch.context() as patched:
            patched.setattr(MemoryFile, "sync", watched)
            yield
        self._take()

    def _take(self) -> None:
        folders = self._folders()
        for kept in ("nothing", "all", *self._names):

            def fates(change: Change, kept: str = kept) -> bool:
                if kept in ("nothing", "all") or not isinstance(change, ContentChange):
                    return kept != "nothing"
                return change.path.startswith(folders[kept])

            moment = f"{len(self.found)}, {kept}"
            self.found.append((moment, self._storage.after_power_loss(fates), deepcopy(self._known)))

    def _folders(self) -> dict[str, str]:
        found = {}
        for name in self._storage.list("streams"):
            spec = json.loads(self._storage.read_file(f"streams/{name}/stream.json"))
            found[spec["name"]] = f"streams/{name}/"
        return found


async def test_message_comes_once_whenever_the_power_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    publisher = Publisher()
    cuts = Cuts(storage, publisher, "amq.topic", "__sessions")
    async with running(tmp_path / "before", storage) as house:
        for name in ("reader", "writer"):
            client = await house.client(name, lasting=True)
            topic = "t" if name == "reader" else "other"
            await client.send(Subscribe(1, (Subscription(topic, QoS(2)),)))
            assert isinstance(await client.receive(), Suback)
            if name == "reader":
                await client.close()
        # The files of the log are made by the first message.
        await client.send(Publish("first", b"", QoS(1), packet_id=9))
        assert await client.receive() == Puback(9)

        with cuts.before_each_sync(monkeypatch):
            await client.send(publisher.publish(), publisher.publish())
            while not publisher.is_done:
                answers = publisher.take(await client.receive())
                # The next one goes with what ends another, whose state is written then.
                more = [publisher.publish()] if answers and len(publisher.sent) < 6 else []
                await client.send(*more, *answers)
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    # How many syncs there are depends on how busy the machine is: what comes together is synced together.
    assert len(cuts.found) >= 12, "too few moments to show anything"
    for moment, left, known in cuts.found:
        async with running(tmp_path / "after", left) as house:
            client = await house.client("writer", lasting=True, resumes=True)
            await client.send(*known.again())
            while not known.is_done:
                await client.send(*known.take(await client.receive()))
            reader = await house.client("reader", lasting=True, resumes=True)
            came = []
            while len(came) < len(known.sent):
                message = await reader.receive()
                assert isinstance(message, Publish), moment
                came.append(message.payload)
            assert came == known.sent, moment
            assert await reader.seen() == [], moment


async def test_message_of_a_group_comes_to_one_member_once_whenever_the_power_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that both logs are written many times while the messages are on their way.
    monkeypatch.setattr(keeping, "STATE_PERIOD_S", 0.02)
    monkeypatch.setattr(broker, "JOURNAL_PERIOD_S", 0.03)
    storage = MemoryStorage()
    known = Member()
    cuts = Cuts(storage, known, "__views", "__sessions")
    async with running(tmp_path / "before", storage) as house:
        member, writer = await house.client("member", lasting=True), await house.client()
        await member.send(Subscribe(1, (Subscription("$share/g/t", QoS(2)),)))
        assert isinstance(await member.receive(), Suback)
        await writer.send(Publish("first", b"", QoS(1), packet_id=9))
        assert await writer.receive() == Puback(9)
        with cuts.before_each_sync(monkeypatch):
            for number in range(4):
                payload = b"%d" % number
                await writer.send(Publish("t", payload, QoS(2), packet_id=number + 1))
                assert await writer.receive() == Pubrec(number + 1)
                known.sent.append(payload)
                while len(known.got) < len(known.sent) or known.received:
                    await member.send(known.take(await member.receive()))
        shutil.copytree(tmp_path / "before", tmp_path / "after")
    for moment, left, story in cuts.found:
        async with running(tmp_path / "after", left) as house:
            member = await house.client("member", lasting=True, resumes=True)
            writer = await house.client()
            # Whatever the group still has comes before this one.
            await writer.send(Publish("t", b"last", QoS(2), packet_id=1))
            assert await writer.receive() == Pubrec(1)
            while b"last" not in story.got or story.received:
                await member.send(story.take(await member.receive()))
            assert len(story.got) == len(set(story.got)), moment
            # One that was published and not acknowledged may be among them.
            assert set(story.sent) <= set(story.got), moment
