"""A small cluster in one process for tests: nodes that lead, one after the other, on the same disk and metadata, and a
node that leads nothing and relays. Links between them are real sockets; who leads is the test's affair."""

import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import pika
import trio
from pika.credentials import ExternalCredentials
from tests.gateways.delivery.certificates import Authority
from tests.gateways.delivery.house import House

from headrace.config import load_config
from headrace.controller.config import Definitions
from headrace.controller.passwords import HashCost
from headrace.controller.service import MetadataService
from headrace.core_log.config import DirectoryConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.peer.door import PeerDoor
from headrace.core_log.peer.errors import PeerUnreachable
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink, Peers
from headrace.gateways.amqp.front import AmqpFront, AmqpFrontListener
from headrace.gateways.delivery.listener import DoorListener, TlsSide
from headrace.gateways.delivery.tls import TlsConfig, load_context
from headrace.gateways.http.front import HttpFront, HttpFrontListener
from headrace.gateways.mqtt.front import MqttFront, MqttFrontListener
from headrace.gateways.relay.answering import RelayAnswers
from headrace.gateways.relay.leaders import NoLeader
from headrace.service import Commons, Service, open_service

T = TypeVar("T")
CLUSTER, SECRET = UUID(int=5), b"a secret of the town's"
PATIENCE_S = 60
_nonces = count(1)


class Where(NamedTuple):
    host: str
    port: int


def _nonce() -> bytes:
    return next(_nonces).to_bytes(32, "little")


def _hello(node: int) -> Hello:
    return Hello(CLUSTER, node, 1, UUID(int=node), Purpose.RELAY)


async def _about_here(_scope: object, _receive: object, send: Callable[..., Awaitable[None]]) -> None:
    """Answers what is about the node that leads nothing."""
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
    await send({"type": "http.response.body", "body": b"here"})


@dataclass
class Leading:
    """A node that leads."""

    service: Service
    scope: trio.CancelScope
    where: Where
    ended: trio.Event
    links: list[PeerLink] = field(default_factory=list)

    async def kill(self) -> None:
        """As a crash leaves it: nobody is told, nothing is closed but sockets."""
        self.scope.cancel()
        await self.ended.wait()


class Leaders:
    """As a node sees them."""

    def __init__(self, town: "Town", node: int) -> None:
        self.patience_s = 20.0
        self._town = town
        self._node = node
        self._peers = Peers(lambda: _hello(node), SECRET, _nonce, tls=town.secured and town.secured.caller)

    def parts(self) -> list[list[str]]:
        return [["/"]]

    def here(self, vhost: str) -> Service | None:
        leading = self._town.leading
        return leading.service if leading is not None and self._node == self._town.leader else None

    async def connect(self, vhost: str, detail: bytes) -> PeerLink:
        while self._town.leading is None:
            if self._town.is_hopeless:
                raise NoLeader("nobody leads it")
            await trio.sleep(0.01)
        if self._town.is_cut:
            raise PeerUnreachable("the network is cut")
        where = Where("localhost", self._town.leading.where.port) if self._town.secured else self._town.leading.where
        return await self._peers.connect(where, Purpose.RELAY, detail)


class Secured:
    """Certificates of a town in which everything goes through TLS: links, and clients too."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        certificate, key = authority.server()
        self.side = TlsSide(load_context(TlsConfig(certificate, key, authority.file)))
        self.door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.file)
        self.door.load_cert_chain(certificate, key)
        self.door.verify_mode = ssl.CERT_REQUIRED
        self.caller = authority.client_context((certificate, key))


class Town:
    def __init__(self, nursery: trio.Nursery, secured: Secured | None = None) -> None:
        self.secured = secured
        self.house = House()
        self.leading: Leading | None = None
        # Which node that is; the one that clients of these tests come to is 1.
        self.leader = 2
        self.is_hopeless = False
        self.is_cut = False
        self.leaders = Leaders(self, 1)
        self.config = load_config(None, {}, {})
        self.ports: dict[str, int] = {}
        self.front: AmqpFront | None = None
        self._nursery = nursery

    async def lead(self) -> Leading:
        """A node opens what the last one left, and leads."""
        self.leading = await self._nursery.start(self._lead)
        return self.leading

    async def _lead(self, task_status: trio.TaskStatus[Leading]) -> None:
        ended = trio.Event()
        try:
            async with trio.open_nursery() as nursery:
                commons = await self._commons(nursery, self.house)
                directory = await LogDirectory.open(self.house.env, DirectoryConfig(), clean=False)
                nursery.start_soon(directory.run)
                service = await open_service(commons, directory, nursery, clean=False)
                handlers = {Purpose.RELAY: RelayAnswers(Leaders(self, self.leader)).handle}
                tls = self.secured and self.secured.door
                door = PeerDoor(lambda: _hello(2), SECRET, _nonce, handlers, tls=tls)
                where = Where(*await door.open("127.0.0.1", 0))
                nursery.start_soon(door.serve)
                task_status.started(Leading(service, nursery.cancel_scope, where, ended))
        finally:
            self.leading = None
            ended.set()

    async def _commons(self, nursery: trio.Nursery, house: House) -> Commons:
        metadata = MetadataService(
            lambda: house.store, new_uuid=house.env.ids.uuid, hash_cost=HashCost(memory_kib=8, passes=1)
        )
        await nursery.start(metadata.run)
        await metadata.seed(Definitions())
        return Commons(self.config, house.env, metadata, trio.CapacityLimiter(2))

    async def open_front(self) -> None:
        """The node that clients come to."""
        tls = self.secured and self.secured.side
        # Users of its own: nobody here hands metadata around.
        commons = await self._commons(self._nursery, House(seed=2))
        self.front = AmqpFront(
            self.leaders,
            commons.env,
            commons.access,
            commons.authentication,
            commons.limits,
            commons.watch.alarms,
            has_vhost=lambda name: name in commons.metadata.snapshot.vhosts,
            config=self.config.amqp.door(),
        )
        self.listener = AmqpFrontListener("amqp", self.front, tls)
        self.mqtt = MqttFront(
            self.leaders,
            commons.env.clock,
            commons.limits,
            commons.watch.alarms,
            users=lambda: commons.metadata.snapshot.users,
            config=self.config.mqtt.door(),
        )
        mqtt = MqttFrontListener("mqtt", self.mqtt, tls)
        ws = MqttFrontListener("ws", self.mqtt, tls, websocket=True)
        self.http = HttpFront(
            self.leaders,
            commons.env,
            commons.limits,
            commons.watch.alarms,
            _about_here,
            config=self.config.http.door(),
        )
        http = HttpFrontListener("http", self.http, tls)
        listeners: tuple[DoorListener, ...] = (self.listener, mqtt, ws, http)
        for one in listeners:
            self.ports[one.name] = (await one.open("127.0.0.1", 0))[1]
            self._nursery.start_soon(one.serve)
        self._nursery.start_soon(self.front.run)

    def connect(self, **settings: Any) -> pika.BlockingConnection:
        settings = {"heartbeat": 0, "socket_timeout": PATIENCE_S, "blocked_connection_timeout": PATIENCE_S} | settings
        host = "127.0.0.1"
        if self.secured is not None:
            host = "localhost"
            certificate = self.secured.authority.issue("client", common_names=["guest"])
            context = self.secured.authority.client_context(certificate)
            settings |= {"ssl_options": pika.SSLOptions(context, host), "credentials": ExternalCredentials()}
        return pika.BlockingConnection(pika.ConnectionParameters(host, self.ports["amqp"], **settings))

    async def until(self, holds: Callable[[], object]) -> None:
        with trio.fail_after(PATIENCE_S):
            while not holds():
                await trio.sleep(0.005)


@asynccontextmanager
async def town(secured: Secured | None = None) -> AsyncIterator[Town]:
    """With a leader, and a node that leads nothing."""
    with contextlib.suppress(trio.Cancelled):
        async with trio.open_nursery() as nursery:
            built = Town(nursery, secured)
            await built.lead()
            await built.open_front()
            yield built
            nursery.cancel_scope.cancel()


async def in_thread(call: Callable[[], T]) -> T:
    with trio.fail_after(2 * PATIENCE_S):
        return await trio.to_thread.run_sync(call, abandon_on_cancel=True)
