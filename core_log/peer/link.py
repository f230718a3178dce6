"""One link to another node, and how it comes about. Driver: trio.

    caller                        door
    opening: version, nonce  ->
                             <-   opening: version, nonce
    proof of all that, hello ->
                             <-   proof, hello: or a hello that says why not
    frames                  <->   frames

A reset or a refused connection is told at once; silence is noticed by the heartbeats of whoever uses the link.
Neighbours: frames.py has the bytes, secret.py the proofs, wire.py the socket, door.py the side that is connected to.
"""

import socket
import ssl
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

import msgspec
import trio

from headrace.core_log.env import Worker
from headrace.core_log.log import RawSlice
from headrace.core_log.peer.errors import LinkError, PeerGone, PeerRefused, PeerUnreachable
from headrace.core_log.peer.frames import (
    FRAME_HEAD_BYTES,
    OPENING_BYTES,
    PROVEN_HEAD_BYTES,
    Hello,
    Purpose,
    decode_frame_head,
    decode_hello,
    decode_opening,
    decode_proven_head,
    encode_hello,
    encode_opening,
    encode_proven,
    frame_head,
)
from headrace.core_log.peer.secret import Role, is_proof, prove
from headrace.core_log.peer.wire import SocketWire, Wire, secured

CONNECT_S = 5.0
HANDSHAKE_S = 5.0


class Address(Protocol):
    """Where a peer listens."""

    @property
    def host(self) -> str: ...
    @property
    def port(self) -> int: ...


class PeerLink:
    """Whole frames both ways. Any number of tasks may send, one at a time receives; a send that is cancelled, or fails,
    ends the link."""

    def __init__(self, wire: Wire, hello: Hello, buffered: bytes = b"") -> None:
        """For `Peers.connect`, `PeerDoor` and tests."""
        # The other side's.
        self.hello = hello
        self.is_closed = False
        self._wire = wire
        self._buffer = buffered
        # So much of it was taken already.
        self._at = 0
        self._parts: list[bytes] = []
        # Of a frame whose payload is still to come: kind and size.
        self._head: tuple[int, int] | None = None
        self._sending = trio.Lock()

    async def send(self, kind: int, *parts: bytes | memoryview) -> None:
        """One frame. Raises PeerGone."""
        head = frame_head(kind, parts)
        async with self._sending:
            self._refuse_closed()
            with _Breaking(self):
                await self._wire.send([head, *parts])

    async def send_followed_by(
        self, kind: int, payload: bytes, octets: Sequence[bytes | RawSlice], worker: Worker
    ) -> None:
        """One frame, and behind it these octets and slices of segments, unframed: the payload must say how many."""
        parts: list[bytes | memoryview] = [frame_head(kind, (payload,)), payload]
        try:
            # Who waits for an answer paces it: there is no need for a turn of the loop before each.
            self._sending.acquire_nowait()
        except trio.WouldBlock:
            await self._sending.acquire()
        try:
            self._refuse_closed()
            with _Breaking(self):
                for one in octets:
                    if isinstance(one, RawSlice):
                        await self._wire.send(parts)
                        await self._wire.send_slice(worker, one)
                        parts = []
                    else:
                        parts.append(one)
                if parts:
                    await self._wire.send(parts)
        finally:
            self._sending.release()

    async def receive(self) -> tuple[int, bytes]:
        """The next frame: its kind and payload. Raises PeerGone when there will be none."""
        if self._head is None:
            self._head = decode_frame_head(await self.receive_exactly(FRAME_HEAD_BYTES))
        kind, size = self._head
        payload = await self.receive_exactly(size)
        self._head = None
        return kind, payload

    async def receive_exactly(self, size: int) -> bytes:
        """Octets that follow a frame, if its sender says so."""
        self._refuse_closed()
        have = len(self._buffer) - self._at
        if have < size:
            # Gathered apart, and kept: whoever is cancelled here loses nothing of it.
            self._parts = self._parts or [self._buffer[self._at :]]
            self._buffer, self._at = b"", 0
            have = sum(map(len, self._parts))
            while have < size:
                data = await self._wire.receive_some()
                if not data:
                    self.close()
                    raise PeerGone("the other side closed the link")
                self._parts.append(data)
                have += len(data)
            self._buffer, self._parts = b"".join(self._parts), []
        start = self._at
        self._at += size
        return self._buffer[start : self._at]

    def _refuse_closed(self) -> None:
        if self.is_closed:
            raise PeerGone("this link is closed")

    def detach(self) -> tuple[socket.socket, bytes]:
        """The socket (an `ssl.SSLSocket` under TLS), which is the caller's from now on, and octets read already."""
        wire = self._wire
        assert isinstance(wire, SocketWire), "only a link over a socket has one to give away"
        self._refuse_closed()
        self.is_closed = True
        return wire.socket, b"".join((self._buffer[self._at :], *self._parts))

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._wire.close()

    async def aclose(self) -> None:
        self.close()
        await trio.lowlevel.checkpoint()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Breaking:
    """Half a frame makes nonsense of all that would follow."""

    def __init__(self, link: PeerLink) -> None:
        self._link = link

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._link.close()


async def shake_hands(
    wire: Wire, secret: bytes, role: Role, nonce: bytes, hello: Callable[[Hello | None], Hello]
) -> PeerLink:
    """Prove ourselves to each other. `hello` says ours; a door's may depend on the caller's. Raises LinkError, and then
    the wire is of no use any more."""
    link = PeerLink(wire, _NO_HELLO)
    await wire.send([encode_opening(nonce)])
    other_nonce = decode_opening(await link.receive_exactly(OPENING_BYTES))
    if other_nonce == nonce:
        raise PeerRefused("the other side repeats what it hears")
    nonces = (nonce, other_nonce) if role is Role.CALLER else (other_nonce, nonce)

    async def speak(ours: Hello) -> None:
        data = encode_hello(ours)
        await wire.send([encode_proven(prove(secret, role, *nonces, data), data)])

    async def hear() -> Hello:
        proof, size = decode_proven_head(await link.receive_exactly(PROVEN_HEAD_BYTES))
        data = await link.receive_exactly(size)
        other = Role.DOOR if role is Role.CALLER else Role.CALLER
        if not is_proof(proof, prove(secret, other, *nonces, data)):
            raise PeerRefused("the other side does not know the secret of this cluster")
        return decode_hello(data)

    if role is Role.CALLER:
        await speak(hello(None))
        link.hello = await hear()
        if link.hello.refusal:
            raise PeerRefused(f"node {link.hello.node} refuses: {link.hello.refusal}")
    else:
        link.hello = await hear()
        ours = hello(link.hello)
        await speak(ours)
        if ours.refusal:
            raise PeerRefused(f"node {link.hello.node} was refused: {ours.refusal}")
    return link


class Peers:
    """Connects to other nodes, as this one."""

    def __init__(
        self,
        me: Callable[[], Hello],
        secret: bytes,
        nonce: Callable[[], bytes],
        *,
        tls: ssl.SSLContext | None = None,
        connect_s: float = CONNECT_S,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        """`me`: who this node is now (purpose and detail are filled in); `nonce`: 32 unguessable bytes; `tls`: the
        context of the caller's side, with our certificate and their CA."""
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self._tls = tls
        self._connect_s = connect_s
        self._handshake_s = handshake_s

    async def connect(self, address: Address, purpose: Purpose, detail: bytes = b"") -> PeerLink:
        """A link to the node at this address. Raises PeerUnreachable, PeerRefused."""
        where = f"{address.host}:{address.port}"
        sock = await self._connect(address, where)
        hello = msgspec.structs.replace(self._me(), purpose=purpose, detail=detail)
        wire: SocketWire | None = None
        try:
            with trio.fail_after(self._handshake_s):
                if self._tls is not None:
                    sock = await secured(sock, self._tls, server_side=False, host=address.host)
                wire = SocketWire(sock)
                link = await shake_hands(wire, self._secret, Role.CALLER, self._nonce(), lambda _other: hello)
            if link.hello.cluster != hello.cluster:
                raise PeerRefused(f"{where} belongs to another cluster")
            return link
        except BaseException as error:
            if wire is None:
                sock.close()
            else:
                wire.close()
            match error:
                case trio.TooSlowError():
                    raise PeerUnreachable(f"{where} did not finish the handshake in {self._handshake_s:g} s") from None
                case PeerGone():
                    # A door that does not take our proof says nothing, and closes.
                    raise PeerRefused(f"{where} ended the handshake: is it a peer, with the same secret?") from error
                case ssl.SSLError():
                    raise PeerRefused(f"{where}: no TLS: {error.reason or error}") from error
                case OSError():
                    raise PeerUnreachable(f"{where}: {error.strerror or error}") from error
                case LinkError():
                    raise type(error)(f"{where}: {error}") from error
            raise

    async def _connect(self, address: Address, where: str) -> socket.socket:
        try:
            with trio.fail_after(self._connect_s):
                stream = await trio.open_tcp_stream(address.host, address.port)
        except trio.TooSlowError:
            raise PeerUnreachable(f"{where} did not answer in {self._connect_s:g} s") from None
        except OSError as error:
            raise PeerUnreachable(f"{where}: {_reason(error)}") from error
        sock = socket.socket(fileno=stream.socket.detach())
        sock.setblocking(False)
        prepare(sock)
        return sock


def prepare(sock: socket.socket) -> None:
    """Frames go out at once, and a peer whose machine is gone is noticed some day by the system too."""
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _reason(error: OSError) -> str:
    """What the first address that was tried said: trio tells only that all have failed."""
    cause = error.__cause__
    if isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, OSError):
        error = cause
    return error.strerror or str(error)


_NO_HELLO = Hello(msgspec.UNSET, -1, 0, msgspec.UNSET, Purpose.CONTROL)  # type: ignore[arg-type]
