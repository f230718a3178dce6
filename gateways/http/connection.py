"""One HTTP/1.1 connection: h11 reads and writes it, an ASGI application answers. Driver.

What a client may take its time with is bounded: the headers of a request, its body, the time between two requests, and
how long it takes nothing of an answer. Requests that came while one is being answered wait in the socket, but for one
read of them. A connection whose request was not read to its end is closed behind the answer, after a moment in which
what still comes is thrown away: else the client would hear of a reset instead of the answer.

ASGI servers for trio exist; why none of them is used: docs/decisions/0016-http-on-h11.md. Neighbours: app.py is the
application, delivery/listener.py accepted the connection and shook hands where there is TLS.
"""

import logging
import os
import socket
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from email.utils import formatdate
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import h11
import msgspec
import trio

from headrace.core_log.env import Clock, Worker
from headrace.core_log.errors import StorageError
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.http.config import HEAD_BYTES_MAX, HttpConfig
from headrace.gateways.http.download import ZERO_COPY
from headrace.gateways.http.problems import MEDIA_TYPE, Code, Problem

_log = logging.getLogger(__name__)

READ_BYTES = 64 * 1024
SENDFILE_BYTES = 1024 * 1024
LINGER_S = 1.0
LINGER_BYTES_MAX = 4 * 1024 * 1024
# In an ASGI scope: the listener's Connection, which knows of TLS and certificates.
CONNECTION = "headrace.connection"

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]


class Gone(Exception):
    """The client is no longer there, or takes nothing."""


class HttpConnection:
    def __init__(
        self,
        application: Application,
        connection: Connection,
        config: HttpConfig,
        clock: Clock,
        worker: Worker | None = None,
    ) -> None:
        """Without a worker every byte of an answer comes from the application."""
        self._worker = worker
        self._application = application
        self._connection = connection
        self._socket = connection.socket
        self._config = config
        self._clock = clock
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=HEAD_BYTES_MAX)
        # The last read filled its buffer, so that more may be had without waiting.
        self._has_more = False
        self._stopping = False
        # Around the wait for a request of which nothing has come.
        self._idle: trio.CancelScope | None = None

    # -- from outside ---------------------------------------------------------------------------------------------

    def dismiss(self) -> None:
        """The broker stops: what is being answered is answered, and nothing after it."""
        self._stopping = True
        if self._idle is not None:
            self._idle.cancel()

    async def run(self) -> None:
        """Answer requests until either side has had enough."""
        wait_s = self._config.head_s
        with suppress(Gone):
            while not self._stopping:
                request = await self._next_request(wait_s)
                if request is None or not await self._answer(request):
                    break
                wait_s = self._config.idle_s
            await self._linger()

    # -- requests -------------------------------------------------------------------------------------------------

    async def _next_request(self, wait_s: float) -> h11.Request | None:
        """None: there will be none."""
        deadline = trio.current_time() + wait_s
        begun = bool(self._http.trailing_data[0])
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                await self._refuse(error)
                return None
            if isinstance(event, h11.Request):
                return event
            if event is not h11.NEED_DATA:
                return None
            with trio.CancelScope(deadline=deadline) as scope:
                self._idle = None if begun else scope
                try:
                    data = await self._read()
                finally:
                    self._idle = None
            if scope.cancelled_caught:
                if begun:
                    await self._send_problem(Problem(Code.REQUEST_TIMEOUT, "the headers took too long"))
                return None
            self._http.receive_data(data)
            if not begun and data:
                begun = True
                deadline = trio.current_time() + self._config.head_s

    async def _refuse(self, error: h11.RemoteProtocolError) -> None:
        code = Code.HEADERS_TOO_LARGE if error.error_status_hint == 431 else Code.MALFORMED
        await self._send_problem(Problem(code, str(error)))

    async def _answer(self, request: h11.Request) -> bool:
        """True if there may be another request behind this one."""
        exchange = _Exchange(self, request, self._config)
        scope = self._scope(request)
        if scope is None:
            await self._send_problem(Problem(Code.MALFORMED, "the target must be a path"))
            return False
        try:
            await self._application(scope, exchange.receive, exchange.send)
        except Gone:
            raise
        except Exception:
            # Our mistake; the application answers for those it sees coming.
            _log.exception("a request ended by an internal error", extra={"peer": self._connection.host})
            if not exchange.started:
                await self._send_problem(Problem(Code.INTERNAL_ERROR))
            return False
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    def _scope(self, request: h11.Request) -> MutableMapping[str, Any] | None:
        target = request.target
        if not target.startswith(b"/"):
            # RFC 9112, 3.2.2: a server takes the absolute form too.
            scheme, found, rest = target.partition(b"://")
            if not found or scheme.lower() not in (b"http", b"https"):
                return None
            target = b"/" + rest.partition(b"/")[2]
        path, _, query = target.partition(b"?")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": request.http_version.decode(),
            "method": request.method.decode("ascii"),
            "scheme": "https" if self._connection.tls else "http",
            "path": unquote(path.decode("ascii"), errors="surrogateescape"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(name, value) for name, value in request.headers],
            "client": (self._connection.host, self._connection.port),
            "server": None,
            "extensions": {} if self._worker is None or self._connection.tls else {ZERO_COPY: {}},
            CONNECTION: self._connection,
        }

    async def next_data(self, deadline: float) -> bytes | None:
        """The next piece of a request's body; None at its end. Raises Problem when it is late or not HTTP, Gone when
        the client is."""
        while True:
            if self._http.they_are_waiting_for_100_continue:
                await self._write(self._http.send(h11.InformationalResponse(status_code=100, headers=[])))
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as error:
                raise Problem(Code.MALFORMED, str(error)) from None
            if isinstance(event, h11.Data):
                return bytes(event.data)
            if event is not h11.NEED_DATA:
                return None
            with trio.CancelScope(deadline=deadline) as scope:
                data = await self._read()
            if scope.cancelled_caught:
                raise Problem(Code.REQUEST_TIMEOUT, "the body took too long")
            if not data:
                raise Gone
            self._http.receive_data(data)

    async def wait_gone(self) -> None:
        """Return when the client has hung up. One read of what it may send meanwhile is kept for later."""
        data = await self._read()
        if data:
            self._http.receive_data(data)
            await trio.sleep_forever()

    # -- answers --------------------------------------------------------------------------------------------------

    async def send_event(self, *events: h11.Event) -> None:
        await self._write(b"".join(self._http.send(event) or b"" for event in events))

    async def send_file(self, descriptor: int, position: int, count: int) -> None:
        """So many bytes of a file as the rest of an answer, without a copy of ours."""
        assert self._worker is not None, "nobody was told that this can be done"
        assert self._http.send_with_data_passthrough(h11.Data(data=_Elsewhere(count))) is not None  # type: ignore[arg-type]
        # Closed while the worker is at it, our number could be somebody else's connection by then.
        out = os.dup(self._socket.fileno())
        try:
            end = position + count
            while position < end:
                at, size = position, min(end - position, SENDFILE_BYTES)
                try:
                    sent = await self._worker.run(lambda at=at, size=size: os.sendfile(out, descriptor, at, size))  # type: ignore[misc]
                except BlockingIOError:
                    await self._wait_writable()
                    continue
                except OSError:
                    raise Gone from None
                if not sent:
                    raise StorageError(f"a file ends before byte {end}")
                position += sent
        finally:
            os.close(out)

    def closes(self) -> bool:
        """Whether the answer that is about to be sent is the last one: the request was not read to its end, and what
        has come of it is not its end either."""
        with suppress(h11.RemoteProtocolError):
            while self._http.their_state is h11.SEND_BODY and self._http.next_event() is not h11.NEED_DATA:
                pass
        return self._stopping or self._http.their_state not in (h11.DONE, h11.MUST_CLOSE)

    async def _send_problem(self, problem: Problem) -> None:
        """An answer without an application, and the last one."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return
        body = msgspec.json.encode(problem.document())
        headers = [
            ("content-type", MEDIA_TYPE),
            ("content-length", str(len(body))),
            ("date", self.date()),
            ("connection", "close"),
        ]
        answer = _response(problem.code.status, headers)
        with suppress(h11.LocalProtocolError):
            await self.send_event(answer, h11.Data(data=body), h11.EndOfMessage())

    def date(self) -> str:
        return formatdate(self._clock.wall_us() / 1e6, usegmt=True)

    # -- the socket -----------------------------------------------------------------------------------------------

    async def _read(self) -> bytes:
        """What has come; empty at the end. Nothing is lost when this is cancelled."""
        await trio.lowlevel.checkpoint()
        while True:
            if not self._has_more and not self._connection.has_more():
                await trio.lowlevel.wait_readable(self._socket)
            try:
                data = self._socket.recv(READ_BYTES)
            except BlockingIOError:
                self._has_more = False
                continue
            except OSError:
                return b""
            self._has_more = len(data) == READ_BYTES
            return data

    async def _write(self, data: bytes) -> None:
        """All of it is with the kernel when this returns. Raises Gone when the client takes nothing for too long."""
        left = memoryview(data)
        while left:
            try:
                left = left[self._socket.send(left) :]
            except BlockingIOError:
                await self._wait_writable()
            except OSError:
                raise Gone from None

    async def _wait_writable(self) -> None:
        with trio.move_on_after(self._config.write_s) as scope:
            await trio.lowlevel.wait_writable(self._socket)
        if scope.cancelled_caught:
            _log.info("a client takes nothing of its answer", extra={"peer": self._connection.host})
            raise Gone

    async def _linger(self) -> None:
        """Let the client read its answer before what it still sends meets a closed socket."""
        if self._http.their_state not in (h11.SEND_BODY, h11.ERROR) and not self._http.trailing_data[0]:
            return
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        left = LINGER_BYTES_MAX
        with trio.move_on_after(LINGER_S):
            while left > 0 and (data := await self._read()):
                left -= len(data)


def _response(status: int, headers: list[tuple[str, str]] | list[tuple[bytes, bytes]]) -> h11.Response:
    return h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())


class _Elsewhere:
    """Stands for bytes that do not pass through here; h11 wants to know how many they are."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count


class _Exchange:
    """One request and its answer, as ASGI sees them."""

    def __init__(self, connection: HttpConnection, request: h11.Request, config: HttpConfig) -> None:
        self._connection = connection
        self._is_head = request.method == b"HEAD"
        self._deadline = trio.current_time() + config.body_s
        self._is_read = False
        self._response: h11.Response | None = None
        self.started = False

    async def receive(self) -> Message:
        if self._is_read:
            await self._connection.wait_gone()
            return {"type": "http.disconnect"}
        data = await self._connection.next_data(self._deadline)
        self._is_read = data is None
        return {"type": "http.request", "body": data or b"", "more_body": data is not None}

    async def send(self, message: Message) -> None:
        match message["type"]:
            case "http.response.start":
                headers = [*message.get("headers", ()), (b"date", self._connection.date().encode())]
                if self._connection.closes():
                    headers.append((b"connection", b"close"))
                self._response = _response(message["status"], headers)
            case "http.response.body":
                events: list[h11.Event] = []
                if not self.started:
                    assert self._response is not None, "an answer begins with its status"
                    self.started = True
                    events.append(self._response)
                body = message.get("body", b"")
                if body and not self._is_head:
                    events.append(h11.Data(data=body))
                if not message.get("more_body", False):
                    events.append(h11.EndOfMessage())
                await self._connection.send_event(*events)
            case message_type if message_type == ZERO_COPY:
                assert self._response is not None, "an answer begins with its status"
                self.started = True
                await self._connection.send_event(self._response)
                await self._connection.send_file(message["file"], message["offset"], message["count"])
                await self._connection.send_event(h11.EndOfMessage())
            case other:
                raise AssertionError(f"no answer begins with {other}")
