"""Where other nodes connect to. Driver: trio, socket.

Whoever connects has `handshake_s` to prove that it knows the secret and to say that it is of this cluster; nothing that
it sends before is taken for a request, and there are only `unproven_max` such connections at once. The link then goes
to the handler of its purpose, and ends with it unless that one took the socket.
Neighbours: link.py shakes hands, headrace/node.py lists it among the doors.
"""

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping

import msgspec
import trio

from headrace.core_log.peer.errors import LinkError
from headrace.core_log.peer.frames import Hello, Purpose
from headrace.core_log.peer.link import HANDSHAKE_S, PeerLink, prepare, shake_hands
from headrace.core_log.peer.secret import Role
from headrace.core_log.peer.wire import SocketWire, secured

_log = logging.getLogger(__name__)

BACKLOG = 256
RETRY_S = 0.1
UNPROVEN_MAX = 256

Handler = Callable[[PeerLink], Awaitable[None]]


class PeerDoor:
    name = "peer"

    def __init__(
        self,
        me: Callable[[], Hello],
        secret: bytes,
        nonce: Callable[[], bytes],
        handlers: Mapping[Purpose, Handler],
        *,
        tls: ssl.SSLContext | None = None,
        handshake_s: float = HANDSHAKE_S,
        unproven_max: int = UNPROVEN_MAX,
    ) -> None:
        """`handlers` is looked at for each link, so that it may be filled later; a purpose without one is refused.
        `tls`: the context of the door's side, which asks for a certificate and has the CA to check it by."""
        self._me = me
        self._secret = secret
        self._nonce = nonce
        self.handlers = handlers
        self._tls = tls
        self._handshake_s = handshake_s
        self._unproven_max = unproven_max
        self._unproven_count = 0
        self._listener: trio.socket.SocketType | None = None
        self._ended = trio.Event()
        self._serving: trio.CancelScope | None = None
        self._relayed_count = 0
        self._no_relayed = trio.Event()

    async def open(self, host: str, port: int) -> tuple[str, int]:
        """Bind and listen; returns where. OSError if that fails."""
        found = await trio.socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, where = found[0]
        listener = trio.socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            await listener.bind(where)
            listener.listen(BACKLOG)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        bound = listener.getsockname()
        return bound[0], bound[1]

    async def serve(self) -> None:
        """Accept and serve; returns once drained."""
        assert self._listener is not None, "opened before it serves"
        try:
            async with trio.open_nursery() as nursery:
                self._serving = nursery.cancel_scope
                await self._accept(self._listener, nursery)
        finally:
            self._ended.set()

    async def drain(self) -> None:
        """Accept nothing more; clients of a relay are waited for, then every link ends."""
        if self._listener is not None:
            self._listener.close()
        while self._relayed_count:
            self._no_relayed = trio.Event()
            await self._no_relayed.wait()
        if self._serving is not None:
            self._serving.cancel()
            await self._ended.wait()

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
                plain = socket.socket(fileno=accepted.detach())
                plain.setblocking(False)
                if self._unproven_count < self._unproven_max:
                    self._unproven_count += 1
                    nursery.start_soon(self._run, plain, peer[0])
                else:
                    plain.close()

    async def _run(self, plain: socket.socket, host: str) -> None:
        try:
            link = await self._welcome(plain, host)
        finally:
            self._unproven_count -= 1
        if link is None:
            return
        purpose = link.hello.purpose
        is_relay = purpose is Purpose.RELAY
        self._relayed_count += is_relay
        try:
            await self.handlers[purpose](link)
        except* LinkError as group:
            # Also from the tasks of a handler.
            _log.debug("the link of node %d ended: %s", link.hello.node, group.exceptions)
        finally:
            link.close()
            self._relayed_count -= is_relay
            if not self._relayed_count:
                self._no_relayed.set()

    async def _welcome(self, plain: socket.socket, host: str) -> PeerLink | None:
        sock = plain
        try:
            prepare(plain)
            with trio.fail_after(self._handshake_s):
                if self._tls is not None:
                    sock = await secured(plain, self._tls, server_side=True, host=None)
                return await shake_hands(SocketWire(sock), self._secret, Role.DOOR, self._nonce(), self._answer)
        except (OSError, LinkError, trio.TooSlowError) as error:
            why = "it took too long" if isinstance(error, trio.TooSlowError) else error
            _log.warning("a connection to the peer door came to nothing: %s", why, extra={"peer": host})
        except BaseException:
            sock.close()
            raise
        sock.close()
        return None

    def _answer(self, other: Hello | None) -> Hello:
        """Ours, to one that has proven to know the secret."""
        assert other is not None
        me = msgspec.structs.replace(self._me(), purpose=other.purpose, detail=b"")
        if other.cluster != me.cluster:
            return msgspec.structs.replace(me, refusal=f"this is cluster {me.cluster}")
        if other.purpose not in self.handlers:
            return msgspec.structs.replace(me, refusal=f"it does not serve {other.purpose.name.lower()} links")
        return me
