"""The HTTP door of a cluster's node: what a request names says which vhost it is about, and whoever leads that answers.
Driver: an ASGI application before those of the shards.

A request for a vhost that is led elsewhere is passed on: method, target, headers and body as they came, but for what
concerns one connection only; the answer comes back the same way, as it comes. So logins and rights are the leader's
affair, by what this node says of the client. What is about this node (health, metrics, the cluster) is answered here.
A request that names no vhost is about `/`.
Neighbours: app.py answers on the leader, connection.py speaks HTTP with the client.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import closing, suppress
from typing import Any
from urllib.parse import parse_qsl, unquote

import h11
import msgspec
import trio

from headrace.core_log.env import Env
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import Connection, DoorListener, Listener, TlsSide
from headrace.gateways.http.config import HEAD_BYTES_MAX, SMALL_BODY_BYTES_MAX, HttpConfig
from headrace.gateways.http.connection import CONNECTION, Application, Gone, HttpConnection, Message
from headrace.gateways.http.problems import MEDIA_TYPE, Code, Problem
from headrace.gateways.relay.dialing import client_of, connection_of, dial
from headrace.gateways.relay.end import End, EndLost
from headrace.gateways.relay.leaders import Leaders, NoLeader
from headrace.gateways.relay.opening import DoorName, HttpOpening

_log = logging.getLogger(__name__)

API = "/api/v1/"
DEFAULT_VHOST = "/"
# Of each node, whatever it leads.
HERE = ("/metrics", "/api/v1/health", "/api/v1/cluster", "/api/v1/openapi.json", "/api/v1/problems")
# Their names in paths may say `vhost|name`.
NAMED = frozenset(("topics", "queues", "consumer-groups", "schedules"))
# A POST here says in its body what it is about: the fields that may.
IN_BODY = {"topics": ("vhost",), "redrives": ("queue",)}
# RFC 9110, 7.6.1: of one connection only. Dates are given by whoever sends.
HOP_BY_HOP = frozenset(
    (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"date")
)
RETRY_AFTER_S = "1"

Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class _LeaderLost(Exception):
    """Before it had begun to answer."""


class HttpFront:
    def __init__(
        self,
        leaders: Leaders,
        env: Env,
        limits: Limits,
        alarms: Alarms,
        here: Application,
        *,
        config: HttpConfig | None = None,
    ) -> None:
        """`here` answers what is about this node."""
        self.limits = limits
        self.alarms = alarms
        self.config = config or HttpConfig()
        self.connections: set[HttpConnection] = set()
        self.passed_on_count = 0
        self._leaders = leaders
        self._env = env
        self._here = here

    async def serve(self, connection: Connection) -> None:
        """One connection, until it ends."""
        one = HttpConnection(self, connection, self.config, self._env.clock, self._env.worker)
        self.connections.add(one)
        try:
            await one.run()
        except Exception:
            # Our mistake: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})
        finally:
            self.connections.discard(one)

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        try:
            await self._answer(scope, receive, send)
        except Problem as problem:
            await _send_problem(problem, send)
        except NoLeader as error:
            await _send_problem(Problem(Code.NO_LEADER, str(error), headers={"retry-after": RETRY_AFTER_S}), send)

    async def _answer(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope["raw_path"].decode("ascii")
        if path.startswith(HERE) or not path.startswith(API):
            await self._here(scope, receive, send)
            return
        words = path[len(API) :].split("/")
        if scope["method"] == "POST" and len(words) == 1 and words[0] in IN_BODY:
            body = await _read(receive)
            receive = _again(body, receive)
            vhost = _vhost_in(body, IN_BODY[words[0]])
        else:
            vhost = vhost_of(words, scope["query_string"])
        doors = self._leaders.here(vhost)
        if doors is not None:
            await doors.http.app(scope, receive, send)
            return
        self.passed_on_count += 1
        may_repeat = scope["method"] in ("GET", "HEAD")
        while True:
            try:
                await self._pass_on(vhost, scope, receive, send)
                return
            except _LeaderLost:
                if not may_repeat:
                    text = "the node that leads this vhost was lost: whether the request was done is not known"
                    raise Problem(Code.NO_LEADER, text, headers={"retry-after": RETRY_AFTER_S}) from None

    # -- passing on -----------------------------------------------------------------------------------------------

    async def _pass_on(self, vhost: str, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        client = client_of(scope[CONNECTION])
        opening = msgspec.msgpack.encode(HttpOpening(client))
        sock, said = await dial(self._leaders, vhost, DoorName.HTTP, opening)
        with closing(sock):
            link = End(connection_of(client, sock), self._env.clock)
            http = h11.Connection(h11.CLIENT, max_incomplete_event_size=HEAD_BYTES_MAX)
            if said:
                http.receive_data(said)
            target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
            request = h11.Request(method=scope["method"], target=target, headers=_headers_for_one(scope["headers"]))
            # What ended it, if that was not the end of the answer: told outside of the nursery, which would wrap it.
            failure: Exception | None = None
            async with trio.open_nursery() as nursery:

                async def forth() -> None:
                    """The request; then watch out for the client's going."""
                    nonlocal failure
                    try:
                        with suppress(EndLost):
                            # One that answers before it has read all is not sent the rest.
                            await link.send(http.send(request) or b"")
                            await _send_body(http, link, receive)
                        while (await receive())["type"] != "http.disconnect":
                            pass
                        failure = Gone()
                    except (Problem, Gone) as error:
                        failure = error
                    nursery.cancel_scope.cancel()

                nursery.start_soon(forth)
                try:
                    await self._pass_back(http, link, send)
                except (_LeaderLost, Gone) as error:
                    failure = error
                nursery.cancel_scope.cancel()
            if failure is not None:
                raise failure

    async def _pass_back(self, http: h11.Connection, link: End, send: Send) -> None:
        """The answer. Raises _LeaderLost if there is none; Gone if there is half a one, or nobody to take it."""
        started = False
        while True:
            try:
                event = http.next_event()
                if event is h11.NEED_DATA:
                    http.receive_data(await link.read())
                    continue
            except (EndLost, h11.RemoteProtocolError):
                # Of half an answer, the end of the connection tells the client.
                raise (Gone if started else _LeaderLost) from None
            match event:
                case h11.Response():
                    started = True
                    headers = [(name, value) for name, value in event.headers if name not in HOP_BY_HOP]
                    await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
                case h11.Data():
                    await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
                case h11.EndOfMessage():
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
                    return
                case h11.InformationalResponse():
                    pass
                case _:
                    raise Gone if started else _LeaderLost


def vhost_of(words: Sequence[str], query: bytes) -> str:
    """The vhost that a request is about, by the words of its path behind the version, and its query."""
    if len(words) > 1 and words[0] in NAMED:
        vhost, mark, _name = unquote(words[1], errors="surrogateescape").partition("|")
        # `exchange:orders` is a name, and so is all of it without the mark.
        return vhost if mark else DEFAULT_VHOST
    with suppress(ValueError):
        for name, value in parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="surrogateescape"):
            if name == "vhost":
                return value
    return DEFAULT_VHOST


def _vhost_in(body: bytes, fields: Sequence[str]) -> str:
    """What cannot be read is the leader's to refuse."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        return DEFAULT_VHOST
    for name in fields:
        value = found.get(name) if isinstance(found, dict) else None
        if isinstance(value, str):
            vhost, mark, _name = value.partition("|")
            return value if name == "vhost" else vhost if mark else DEFAULT_VHOST
    return DEFAULT_VHOST


def _headers_for_one(headers: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Without what was about the client's connection, its framing of the body included."""
    named = {word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")}
    kept = [(name, value) for name, value in headers if name not in HOP_BY_HOP and name not in named]
    # We have told the client to go on by the time there is a body to send.
    kept = [(name, value) for name, value in kept if name != b"expect"]
    if any(name == b"transfer-encoding" for name, _value in headers):
        kept.append((b"transfer-encoding", b"chunked"))
    return [*kept, (b"connection", b"close")]


async def _send_body(http: h11.Connection, link: End, receive: Receive) -> None:
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        if message["body"]:
            await link.send(http.send(h11.Data(data=message["body"])) or b"")
        if not message.get("more_body"):
            await link.send(http.send(h11.EndOfMessage()) or b"")
            return


async def _read(receive: Receive) -> bytes:
    """A small body whole."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message["body"])
        size += len(message["body"])
        if size > SMALL_BODY_BYTES_MAX:
            raise Problem(Code.BODY_TOO_LARGE, f"the body is longer than {SMALL_BODY_BYTES_MAX} bytes")
        if not message.get("more_body"):
            return b"".join(parts)


def _again(body: bytes, receive: Receive) -> Receive:
    """A body that was read, for whoever answers."""
    told = False

    async def receive_again() -> Message:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _send_problem(problem: Problem, send: Send) -> None:
    body = msgspec.json.encode(problem.document())
    headers = {"content-type": MEDIA_TYPE, "content-length": str(len(body)), "cache-control": "no-store"}
    encoded = [(name.encode(), value.encode()) for name, value in (headers | problem.headers).items()]
    await send({"type": "http.response.start", "status": problem.code.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


class HttpFrontListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, front: HttpFront, tls: TlsSide | None = None) -> None:
        super().__init__(name, Listener(front.serve, front.limits, front.alarms, tls))
        self._front = front

    async def _dismiss(self) -> None:
        for one in list(self._front.connections):
            one.dismiss()
        await trio.lowlevel.checkpoint()
