"""MQTT over WebSocket: the opening handshake, and a socket whose octets travel in binary messages. Driver.

h11 reads the request, `judge` says who may come in, wsproto does the rest of RFC 6455. A `WebSocket` looks like a
socket that does not block, so a client's connection does not know what carries it. Packets and messages have nothing
to do with each other's borders [MQTT-6.0.0-2]: what has come of a message is handed on, whole or not, so nothing is
gathered here. No extension is agreed to: compression of strangers' octets is memory for strangers to spend.

Invariants: octets that are not handed out yet come from one read of the socket below; a frame that was begun is sent to
its end before another begins. Neighbours: server.py listens, delivery/tls.py may lie below, client.py reads and writes.
"""

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import h11
import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection as Frames
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import RemoteProtocolError

from headrace.gateways.delivery.listener import ByteSocket, Connection, is_loopback

_log = logging.getLogger(__name__)

PATH = "/mqtt"
SUBPROTOCOL = "mqtt"
ANY_ORIGIN = "any"
# Of a request, headers and all.
REQUEST_BYTES_MAX = 16 * 1024
READ_BYTES = 64 * 1024
# Some clients refuse messages of more than 1 MiB, whatever is in them.
MESSAGE_BYTES = 256 * 1024
# A frame takes some 8 us however little is in it: a flood of small ones is read in parts, and others have their turn.
FRAMES_PER_READ = 512
GOODBYE_S = 1.0


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why somebody does not get a WebSocket, as HTTP says it."""

    status: int
    text: str
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer that makes a WebSocket of the connection."""

    answer: bytes


def judge(request: h11.Request, origins: Sequence[str], *, peer_is_loopback: bool) -> Refusal | Grant:
    """Whether this is a request for a WebSocket that may be granted."""
    if request.method != b"GET":
        return Refusal(405, "only GET leads to a WebSocket", (("Allow", "GET"),))
    if request.target.partition(b"?")[0] != PATH.encode():
        return Refusal(404, f"MQTT is at {PATH}")
    if request.http_version < b"1.1":
        return Refusal(400, "a WebSocket needs HTTP/1.1")
    if any(name in (b"content-length", b"transfer-encoding") for name, _value in request.headers):
        return Refusal(400, "a request for a WebSocket has no body")
    asking = WSConnection(ConnectionType.SERVER)
    try:
        asking.initiate_upgrade_connection(list(request.headers), request.target)
        (wanted,) = asking.events()
    except RemoteProtocolError as error:
        hint = error.event_hint
        assert isinstance(hint, RejectConnection)
        return Refusal(hint.status_code, str(error), tuple((a.decode(), b.decode()) for a, b in hint.headers))
    except UnicodeError:
        return Refusal(400, "a header is not ASCII text")
    assert isinstance(wanted, Request)
    origin = next((value.decode("latin-1") for name, value in request.headers if name == b"origin"), None)
    if origin is not None and not may_come_from(origin, wanted.host, origins, peer_is_loopback=peer_is_loopback):
        return Refusal(403, f"pages of {origin} may not connect here: see mqtt.ws_origins")
    if SUBPROTOCOL not in wanted.subprotocols:
        # [MQTT-6.0.0-3]
        return Refusal(400, f"the subprotocol '{SUBPROTOCOL}' must be among those offered")
    # [MQTT-6.0.0-4]
    return Grant(asking.send(AcceptConnection(subprotocol=SUBPROTOCOL)))


def may_come_from(origin: str, host: str, allowed: Sequence[str], *, peer_is_loopback: bool) -> bool:
    """Whether a web page of this origin may connect. Whoever sends no origin is no browser, and is not asked.

    Any page a person looks at can have their browser connect, also to the broker on their own machine, where guest
    needs no certificate. So from this machine only pages of this machine may, whatever name they were reached by (a
    name can be made to lead here); from elsewhere those of the host that they connect to.
    """
    if origin in allowed or ANY_ORIGIN in allowed:
        return True
    try:
        parts = urlsplit(origin)
        name = parts.hostname or ""
    except ValueError:
        return False
    if peer_is_loopback:
        return name == "localhost" or is_loopback(name)
    return bool(parts.netloc) and parts.netloc.lower() == host.lower()


async def open_websocket(connection: Connection, origins: Sequence[str]) -> Connection | None:
    """The same peer behind a WebSocket; None: it was told why not, or has gone."""
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
    try:
        request = await _request(http, connection.socket)
        if request is None:
            return None
        verdict = judge(request, origins, peer_is_loopback=connection.is_loopback)
    except h11.RemoteProtocolError as error:
        verdict = Refusal(error.error_status_hint, "this is not HTTP/1.1")
    except OSError:
        return None
    with suppress(OSError):
        if isinstance(verdict, Grant):
            await _send(connection.socket, verdict.answer)
            # A client that does not wait for the answer has sent its first frames already.
            carried = WebSocket(connection.socket, http.trailing_data[0])
            return replace(connection, socket=carried, has_more=carried.has_more)
        _log.info("no WebSocket: %d, %s", verdict.status, verdict.text, extra={"peer": connection.host})
        await _refuse(http, connection.socket, verdict)
    return None


async def _request(http: h11.Connection, sock: ByteSocket) -> h11.Request | None:
    """With everything that h11 knows of it; None: the peer has gone."""
    request = None
    while True:
        event = http.next_event()
        if isinstance(event, h11.Request):
            request = event
        elif event is not h11.NEED_DATA or request is not None:
            # The end of the request, a pause because of the upgrade, or a body that nobody reads.
            return request
        else:
            try:
                # h11 holds unfinished requests against their limit after each read.
                data = sock.recv(REQUEST_BYTES_MAX // 4)
            except BlockingIOError:
                # Not before: TLS may hold what came with the last read.
                await trio.lowlevel.wait_readable(sock)
                continue
            if not data:
                return None
            http.receive_data(data)


async def _send(sock: ByteSocket, data: bytes) -> None:
    while data:
        try:
            data = data[sock.send(data) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(sock)


async def _refuse(http: h11.Connection, sock: ByteSocket, refusal: Refusal) -> None:
    """Answer, and read what the peer still sends: closing a socket with unread octets would take the answer back."""
    body = refusal.text.encode() + b"\n"
    headers = [
        *refusal.headers,
        ("Content-Type", "text/plain; charset=utf-8"),
        ("Content-Length", str(len(body))),
        ("Connection", "close"),
    ]
    answer = [
        http.send(h11.Response(status_code=refusal.status, headers=headers)),
        http.send(h11.Data(data=body)),
        http.send(h11.EndOfMessage()),
    ]
    with trio.move_on_after(GOODBYE_S):
        await _send(sock, b"".join(part for part in answer if part))
        sock.shutdown(socket.SHUT_WR)
        while True:
            await trio.lowlevel.wait_readable(sock)
            with suppress(BlockingIOError):
                if not sock.recv(READ_BYTES):
                    return


class WebSocket:
    """Reads and writes like a non-blocking socket: BlockingIOError when it would wait.

    Whoever calls `send` after a BlockingIOError, or after less than all was taken, begins with the octets that were
    not; as outboxes do, and as TLS below wants it too.
    """

    def __init__(self, sock: ByteSocket, early: bytes = b"") -> None:
        """`early`: what came behind the request."""
        self._socket = sock
        self._frames = Frames(ConnectionType.SERVER, trailing_data=early)
        # Received and not handed out.
        self._came = bytearray()
        # Frames may wait inside `_frames`, or octets in the TLS below: after the request too.
        self._undecoded = bool(early)
        self._unread = True
        self._ended = False
        # A frame that was begun, and how many of our caller's octets are in it.
        self._unsent = memoryview(b"")
        self._unsent_octets = 0
        # [RFC 6455, 5.5.3] Of many pings only the last must be answered.
        self._pong = b""

    def has_more(self) -> bool:
        """Whether `recv` may have something though the socket below is not readable."""
        return bool(self._came) or self._undecoded or self._unread or self._ended

    # -- reading --------------------------------------------------------------------------------------------------

    def recv(self, bytes_max: int) -> bytes:
        came = self._came
        while len(came) < bytes_max and not self._ended:
            if self._undecoded:
                self._decode(bytes_max)
                if self._undecoded:
                    # The others have their turn first.
                    break
            elif not self._read():
                break
        self._send_pong()
        if came:
            data = bytes(came[:bytes_max])
            del came[:bytes_max]
            return data
        if self._ended:
            return b""
        raise BlockingIOError

    def _read(self) -> bool:
        """Whether there are new octets to decode."""
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            self._unread = False
            return False
        except OSError:
            if not self._came:
                raise
            # What came before it counts; it will be met again.
            self._unread = False
            return False
        if not data:
            self._ended = True
            return False
        self._unread = len(data) == READ_BYTES
        self._frames.receive_data(data)
        self._undecoded = True
        return True

    def _decode(self, bytes_max: int) -> None:
        frames_left = FRAMES_PER_READ
        for event in self._frames.events():
            self._take(event)
            frames_left -= 1
            if self._ended or not frames_left or len(self._came) >= bytes_max:
                return
        self._undecoded = False

    def _take(self, event: Event) -> None:
        match event:
            case BytesMessage():
                self._came += event.data
            case TextMessage():
                # [MQTT-6.0.0-1]
                self._close(CloseReason.UNSUPPORTED_DATA, "MQTT is binary")
            case Ping() if self._frames.state is ConnectionState.OPEN:
                self._pong = self._frames.send(event.response())
            case CloseConnection() if self._frames.state is ConnectionState.REMOTE_CLOSING:
                self._put(self._frames.send(event.response()))
                self._end()
            case CloseConnection():
                # It answers ours; or wsproto says what is wrong with the frames, in the words to be sent.
                self._close(event.code, event.reason or "")
            case _:
                pass  # a pong that nobody asked for is lawful [RFC 6455, 5.5.3]

    # -- writing --------------------------------------------------------------------------------------------------

    def send(self, data: bytes | memoryview) -> int:
        view = memoryview(data)
        taken = 0
        while self._flush():
            taken += self._unsent_octets
            self._unsent_octets = 0
            if taken == len(view):
                return taken
            if self._frames.state is not ConnectionState.OPEN:
                raise BrokenPipeError("the WebSocket is closed")
            part = view[taken : taken + MESSAGE_BYTES]
            self._unsent = memoryview(self._frames.send(BytesMessage(data=bytes(part))))
            self._unsent_octets = len(part)
        if not taken:
            raise BlockingIOError
        return taken

    def _flush(self) -> bool:
        """Whether another frame may begin."""
        while True:
            while self._unsent:
                try:
                    self._unsent = self._unsent[self._socket.send(self._unsent) :]
                except BlockingIOError:
                    return False
            if not self._pong or self._unsent_octets:
                return True
            self._unsent, self._pong = memoryview(self._pong), b""

    def _send_pong(self) -> None:
        """At once if the socket takes it, else with what is sent next."""
        if self._pong:
            with suppress(OSError):
                self._flush()

    def _put(self, frame: bytes) -> None:
        """The last frame of all. If the socket does not take it, the peer hears nothing more."""
        with suppress(OSError):
            if self._flush() and not self._unsent_octets:
                self._unsent = memoryview(frame)
                self._flush()

    # -- the end --------------------------------------------------------------------------------------------------

    def _close(self, code: int, reason: str) -> None:
        if self._frames.state is ConnectionState.OPEN:
            self._put(self._frames.send(CloseConnection(code, reason)))
        self._end()

    def _end(self) -> None:
        self._ended = True
        self._undecoded = self._unread = False

    def shutdown(self, how: int) -> None:
        """Nothing more will be sent; what the peer still sends can be read."""
        if self._frames.state is ConnectionState.OPEN:
            self._put(self._frames.send(CloseConnection(CloseReason.NORMAL_CLOSURE)))
        self._socket.shutdown(how)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        if self._frames.state is ConnectionState.OPEN:
            self._put(self._frames.send(CloseConnection(CloseReason.GOING_AWAY)))
        self._socket.close()
