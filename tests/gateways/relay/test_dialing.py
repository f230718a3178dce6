"""The way to a leader: asked again until there is one, or the client has waited long enough."""

import socket
from uuid import UUID

import msgspec
import pytest
import trio

from headrace.core_log.peer.errors import PeerGone, PeerUnreachable
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.peer.wire import SocketWire
from headrace.gateways.delivery.listener import ByteSocket
from headrace.gateways.relay.answering import RelayAnswers
from headrace.gateways.relay.dialing import client_of, connection_of, dial
from headrace.gateways.relay.leaders import NoLeader
from headrace.gateways.relay.opening import Client, DoorName


def hello(detail: bytes = b"") -> Hello:
    return Hello(UUID(int=1), 1, 1, UUID(int=1), Purpose.RELAY, detail)


def linked(detail: bytes) -> tuple[PeerLink, PeerLink]:
    near, far = socket.socketpair()
    for one in (near, far):
        one.setblocking(False)
    return PeerLink(SocketWire(near), hello()), PeerLink(SocketWire(far), hello(detail))


class Echo:
    """A door that says what it was told, and then whatever it hears."""

    async def take_relayed(self, sock: ByteSocket, opening: bytes, leftover: bytes) -> None:
        sock.send(opening + leftover)
        await trio.lowlevel.wait_readable(sock)
        sock.send(sock.recv(1000))

    async def adopt(self, *_arguments: object) -> None:
        raise AssertionError("nobody comes in here")

    serve = step_down = adopt
    app = adopt


class Doors:
    amqp = mqtt = http = Echo()


class Leaders:
    """Leads `/` from the moment it is told to; answers its own links."""

    def __init__(self, nursery: trio.Nursery, *, patience_s: float = 30.0) -> None:
        self.patience_s = patience_s
        self.leads = True
        self.unreachable_count = 0
        self.asked_count = 0
        self._nursery = nursery

    def parts(self) -> list[list[str]]:
        return [["/"]]

    def here(self, vhost: str) -> Doors | None:
        return Doors() if self.leads and vhost == "/" else None  # type: ignore[return-value]

    async def connect(self, vhost: str, detail: bytes) -> PeerLink:
        self.asked_count += 1
        if self.asked_count <= self.unreachable_count:
            raise PeerUnreachable("nobody answers")
        near, far = linked(detail)
        self._nursery.start_soon(self._answer, far)
        return near

    async def _answer(self, link: PeerLink) -> None:
        try:
            await RelayAnswers(self).handle(link)  # type: ignore[arg-type]
        except PeerGone:
            pass
        finally:
            link.close()


async def heard(sock: ByteSocket) -> bytes:
    await trio.lowlevel.wait_readable(sock)
    return sock.recv(1000)


@pytest.mark.parametrize("door", list(DoorName))
async def test_the_leader_serves_the_client_on_the_socket_that_comes_back(door: DoorName) -> None:
    async with trio.open_nursery() as nursery:
        sock, said = await dial(Leaders(nursery), "/", door, b"opening")  # type: ignore[arg-type]
        assert said + (b"" if said else await heard(sock)) == b"opening"
        sock.send(b"octets of the client")
        assert await heard(sock) == b"octets of the client"
        sock.close()


async def test_one_who_cannot_be_reached_or_does_not_lead_yet_is_asked_again(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        leaders = Leaders(nursery)
        leaders.unreachable_count = 3
        leaders.leads = False

        async def elect() -> None:
            await trio.sleep(5)
            leaders.leads = True

        nursery.start_soon(elect)
        sock, _said = await dial(leaders, "/", DoorName.AMQP, b"o")  # type: ignore[arg-type]
        assert trio.current_time() >= 5
        assert leaders.asked_count > 4
        sock.send(b"bye")
        while not (await heard(sock)).endswith(b"bye"):
            pass
        sock.close()


async def test_the_reason_of_the_last_refusal_is_told_when_patience_ends(autojump_clock: object) -> None:
    async with trio.open_nursery() as nursery:
        leaders = Leaders(nursery, patience_s=3)
        with pytest.raises(NoLeader, match="does not lead vhost 'other'"):
            await dial(leaders, "other", DoorName.AMQP, b"o")  # type: ignore[arg-type]


async def test_an_opening_that_cannot_be_read_is_refused() -> None:
    near, far = linked(b"\xc1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(RelayAnswers(Leaders(nursery)).handle, far)  # type: ignore[arg-type]
        kind, text = await near.receive()
        assert kind == 3
        assert b"cannot be read" in text
    near.close()
    far.close()


def test_a_client_is_the_same_on_both_nodes() -> None:
    client = Client("192.0.2.7", 4711, tls=True, certified_name="ann")
    near, far = socket.socketpair()
    with near, far:
        told = msgspec.msgpack.decode(msgspec.msgpack.encode(client), type=Client)
        assert client_of(connection_of(told, near)) == client
