"""One address that a door listens on: accepting, limits, TLS. Driver.

Whoever comes is counted, and turned away unheard beyond the hard limits or when memory is nearly used up. What a door
gets is a connection: a socket that does not block (with TLS, one that looks like it), who it is from, and the name in
the certificate if it showed one. An accept that fails (no descriptors left) is tried again; the others live on.
Neighbours: limits.py counts, tls.py shakes hands, each door serves its connections in its own way.
"""

import ipaddress
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.tls import NameFrom, TlsSocket, name_in, shake_hands

_log = logging.getLogger(__name__)

BACKLOG = 1024
TLS_SECONDS_MAX = 5.0
RETRY_S = 0.1


class ByteSocket(Protocol):
    """A socket that does not block, or what looks like it."""

    def recv(self, bufsize: int, /) -> bytes: ...
    def send(self, data: bytes | memoryview, /) -> int: ...
    def shutdown(self, how: int, /) -> None: ...
    def fileno(self) -> int: ...
    def close(self) -> None: ...


def _nothing_more() -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Connection:
    socket: ByteSocket
    host: str
    port: int
    tls: bool = False
    # From a certificate that was checked; None if there is none, or none that can be used.
    certified_name: str | None = None
    # Whether `socket.recv` may have something though the descriptor is not readable: a layer in between holds it.
    has_more: Callable[[], bool] = _nothing_more

    @property
    def is_plain(self) -> bool:
        """The descriptor tells of everything that can be read: no layer in between holds any of it."""
        return isinstance(self.socket, socket.socket)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


@dataclass(slots=True)
class TlsSide:
    """What a TLS listener shakes hands with; a reload puts another context in for those who come later."""

    context: ssl.SSLContext
    name_from: NameFrom = NameFrom.SAN_OR_CN


Serve = Callable[[Connection], Awaitable[None]]


class Listener:
    def __init__(self, serve: Serve, limits: Limits, alarms: Alarms, tls: TlsSide | None = None) -> None:
        self._serve = serve
        self._limits = limits
        self._alarms = alarms
        self._tls = tls
        self._sockets: list[trio.socket.SocketType] = []
        self._turning_away = False
        self.accepted_count = 0

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Bind and listen; returns where. OSError if that fails."""
        family, _, _, _, where = (await resolve(host, port))[0]
        listener = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await listener.bind(where)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._sockets.append(listener)
        bound = listener.getsockname()
        return bound[0], bound[1]

    async def run(self) -> None:
        """Accept and serve; returns when it is closed and the last connection has ended."""
        async with trio.open_nursery() as nursery:
            for listener in self._sockets:
                nursery.start_soon(self._accept, listener, nursery)

    def close(self) -> None:
        """Accept nothing more; who is connected stays."""
        for listener in self._sockets:
            listener.close()

    async def _accept(self, listener: trio.socket.SocketType, nursery: trio.Nursery) -> None:
        with listener:
            while True:
                try:
                    accepted, peer = await listener.accept()
                except trio.ClosedResourceError:
                    return
                except OSError as error:
                    if listener.fileno() < 0:
                        return  # closed before it began to accept
                    _log.warning("accept failed: %s", error)
                    await trio.sleep(RETRY_S)
                    continue
                # The doors read and write the plain socket themselves, so that they can send without awaiting.
                plain = socket.socket(fileno=accepted.detach())
                plain.setblocking(False)
                if self._is_heard(peer[0]):
                    self.accepted_count += 1
                    nursery.start_soon(self._run, plain, peer[0], peer[1])
                else:
                    plain.close()

    def _is_heard(self, host: str) -> bool:
        heard = not self._alarms.refusing and self._limits.accept(host, loopback=is_loopback(host))
        if not heard and not self._turning_away:
            why = "too little memory" if self._alarms.refusing else "too many connections"
            _log.warning("connections are turned away: %s", why, extra={"peer": host})
        self._turning_away = not heard
        return heard

    async def _run(self, plain: socket.socket, host: str, port: int) -> None:
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # For peers that vanish while nobody expects to hear from them.
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            connection = await self._connection(plain, host, port)
            if connection is not None:
                try:
                    await self._serve(connection)
                finally:
                    connection.socket.close()
        finally:
            plain.close()
            self._limits.close(host)

    async def _connection(self, plain: socket.socket, host: str, port: int) -> Connection | None:
        side = self._tls
        if side is None:
            return Connection(plain, host, port)
        try:
            with trio.fail_after(TLS_SECONDS_MAX):
                secured = await shake_hands(plain, side.context)
        except (OSError, trio.TooSlowError) as error:
            why = "it took too long" if isinstance(error, trio.TooSlowError) else error
            _log.info("no TLS: %s", why, extra={"peer": host})
            return None
        return Connection(secured, host, port, tls=True, certified_name=_name_of(secured, side.name_from))


def _name_of(secured: TlsSocket, name_from: NameFrom) -> str | None:
    try:
        certificate = secured.certificate()
    except ValueError:
        return None
    return None if certificate is None else name_in(certificate, name_from)


class DoorListener:
    """One address of a door: what is the same for all of them."""

    def __init__(self, name: str, listener: Listener) -> None:
        self.name = name
        self._listener = listener
        self._ended = trio.Event()

    @property
    def accepted_count(self) -> int:
        """Connections that were heard."""
        return self._listener.accepted_count

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Bind and listen; returns where."""
        return await self._listener.open(host, port)

    async def serve(self) -> None:
        """Accept and serve; returns once drained."""
        await self._listener.run()
        self._ended.set()

    async def drain(self) -> None:
        """Accept nothing more; returns when the last connection has ended."""
        self._listener.close()
        await self._dismiss()
        await self._ended.wait()

    async def _dismiss(self) -> None:
        """Tell everybody that the broker stops."""
        raise NotImplementedError


async def resolve(
    host: str, port: int
) -> list[tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int]]]:
    """Every address that a host name means. OSError (socket.gaierror is one) if it means none."""
    found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return [(family, kind, protocol, name, where) for family, kind, protocol, name, where in found]  # type: ignore[misc]


def is_loopback(host: str) -> bool:
    """Of this machine only. `host` is an address, not a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return address.is_loopback
