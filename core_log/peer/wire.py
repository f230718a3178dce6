"""Octets to and from a peer, over TCP or TLS. Driver: socket, ssl, trio.

The socket does not block and is ours alone, so that it can be given away whole (`PeerLink.detach`): a relay hands it to
the door that serves the client behind it. A TLS socket is an `ssl.SSLSocket`, with no layer of ours around it.
"""

import socket
import ssl
from typing import Protocol

import trio

from headrace.core_log.env import Worker
from headrace.core_log.log import RawSlice
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.raw import COPY_BYTES, send_raw

READ_BYTES = 256 * 1024
# Parts are joined up to this size: one call for all of them is cheaper than the copy.
JOIN_BYTES = 64 * 1024


class Wire(Protocol):
    """What a link needs. Whoever is cancelled in `send` has sent any part of it. All raise PeerGone."""

    async def send(self, parts: list[bytes | memoryview]) -> None: ...

    async def send_slice(self, worker: Worker, piece: RawSlice) -> None:
        """Stored batches as they are, by sendfile where that is possible."""

    async def receive_some(self) -> bytes:
        """At least one octet; b"" at the end."""

    def close(self) -> None: ...


class SocketWire:
    def __init__(self, sock: socket.socket) -> None:
        """The socket must not block."""
        self.socket = sock
        # The last read took all that there was: it is waited for more before it is asked for.
        self._is_drained = False

    async def send(self, parts: list[bytes | memoryview]) -> None:
        if sum(map(len, parts)) <= JOIN_BYTES:
            parts = [b"".join(parts)]
        for part in parts:
            await self._send_all(part)

    async def _send_all(self, data: bytes | memoryview) -> None:
        sock = self.socket
        left = memoryview(data)
        while left:
            try:
                left = left[sock.send(left) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                await _wait(trio.lowlevel.wait_writable, sock)
            except ssl.SSLWantReadError:
                await _wait(trio.lowlevel.wait_readable, sock)
            except OSError as error:
                raise _gone(error) from error

    async def send_slice(self, worker: Worker, piece: RawSlice) -> None:
        if isinstance(self.socket, ssl.SSLSocket):
            at, end = piece.position, piece.position + piece.length
            while at < end:
                size = min(COPY_BYTES, end - at)
                data = await worker.run(lambda at=at, size=size: piece.segment.file.read(at, size))  # type: ignore[misc]
                if not data:
                    raise PeerGone(f"{piece.segment.path} ends before byte {end}")
                await self._send_all(data)
                at += len(data)
            return
        try:
            await send_raw(worker, trio.SocketStream(trio.socket.from_stdlib_socket(self.socket)), piece)
        except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
            raise PeerGone("the link ended while records were sent") from error

    async def receive_some(self) -> bytes:
        sock = self.socket
        if self._is_drained:
            await _wait(trio.lowlevel.wait_readable, sock)
        while True:
            try:
                data = sock.recv(READ_BYTES)
                # What a TLS socket has unpacked already makes no descriptor readable.
                self._is_drained = len(data) < READ_BYTES and not isinstance(sock, ssl.SSLSocket)
                return data
            except (BlockingIOError, ssl.SSLWantReadError):
                await _wait(trio.lowlevel.wait_readable, sock)
            except ssl.SSLWantWriteError:
                await _wait(trio.lowlevel.wait_writable, sock)
            except ssl.SSLEOFError:
                return b""
            except OSError as error:
                raise _gone(error) from error

    def close(self) -> None:
        if self.socket.fileno() >= 0:
            trio.lowlevel.notify_closing(self.socket)
            self.socket.close()


async def _wait(wait: object, sock: socket.socket) -> None:
    """For the descriptor; somebody may close it meanwhile."""
    if sock.fileno() < 0:
        raise PeerGone("this link was closed")
    try:
        await wait(sock)  # type: ignore[operator]
    except trio.ClosedResourceError as error:
        raise PeerGone("this link was closed") from error


def _gone(error: OSError) -> PeerGone:
    return PeerGone(f"the link ended: {error.strerror or error}")


async def secured(
    sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, host: str | None
) -> ssl.SSLSocket:
    """A TLS connection of a plain one, whose socket is used up by it. OSError (ssl.SSLError is one) otherwise."""
    wrapped = context.wrap_socket(
        sock, server_side=server_side, do_handshake_on_connect=False, server_hostname=None if server_side else host
    )
    try:
        while True:
            try:
                wrapped.do_handshake()
                return wrapped
            except ssl.SSLWantReadError:
                await trio.lowlevel.wait_readable(wrapped)
            except ssl.SSLWantWriteError:
                await trio.lowlevel.wait_writable(wrapped)
    except BaseException:
        wrapped.close()
        raise
