"""The way to the leader of a vhost, for one client. Driver.

A leader that does not know yet that it is one, does not know yet that it is none, or is gone, is asked again until the
client's patience ends: an election takes a moment, and each node hears of it at another time.
Neighbours: answering.py is the other side; leaders.py knows who leads.
"""

import ssl

import msgspec
import trio

from headrace.core_log.peer.errors import LinkError
from headrace.core_log.peer.link import PeerLink
from headrace.gateways.delivery.listener import ByteSocket, Connection
from headrace.gateways.delivery.tls import TlsSocket
from headrace.gateways.relay.leaders import Leaders, NoLeader
from headrace.gateways.relay.opening import Client, Destination, DoorName, Kind

RETRY_S = 0.05


async def dial(leaders: Leaders, vhost: str, door: DoorName, opening: bytes) -> tuple[ByteSocket, bytes]:
    """A socket on which the leader serves the client, and what it has said already. Raises NoLeader."""
    detail = msgspec.msgpack.encode(Destination(vhost, door))
    last = "none was elected"
    with trio.move_on_after(leaders.patience_s):
        while True:
            try:
                return await _ask(await leaders.connect(vhost, detail), opening)
            except LinkError as error:
                last = str(error)
                await trio.sleep(RETRY_S)
    raise NoLeader(f"no leader for vhost '{vhost}' within {leaders.patience_s:g} s: {last}")


async def _ask(link: PeerLink, opening: bytes) -> tuple[ByteSocket, bytes]:
    try:
        await link.send(Kind.OPENING, opening)
        kind, payload = await link.receive()
        if kind != Kind.READY:
            raise LinkError(payload.decode("utf-8", "replace"))
        return detached(link)
    finally:
        link.close()  # does nothing to a socket that was taken


def detached(link: PeerLink) -> tuple[ByteSocket, bytes]:
    """The link's socket, as doors read and write theirs, and what was read of it already."""
    sock, leftover = link.detach()
    return (TlsSocket(sock) if isinstance(sock, ssl.SSLSocket) else sock), leftover


def client_of(connection: Connection) -> Client:
    return Client(connection.host, connection.port, connection.tls, connection.certified_name)


def connection_of(client: Client, sock: ByteSocket) -> Connection:
    """The client's connection as the leader sees it: what it says of itself, over the relay's socket."""
    return Connection(sock, client.host, client.port, client.tls, client.certified_name)
