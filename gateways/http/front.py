"""The HTTP door of a cluster's node: what a request names says which vhost it is about, and whoever leads that answers.
Driver: an ASGI application before those of the shards.

A request for a vhost that is led elsewhere is passed on: method, target, headers and body as they came, but for what
concerns one connection only; the answer comes back the same way, as it comes. So logins and rights are the leader's
affair, by what this node says of the client. What is about this node (health, metrics, the cluster) is answered here.
A list that names no vhost is asked of every leader, and what has an id of each until one knows it (gathering.py); any
other request that names no vhost is about `/`.
Neighbours: app.py answers on the leader, connection.py speaks HTTP with the client.
"""

import logging
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, cast
from urllib.parse import parse_qsl, quote, unquote, urlencode

import h11
import msgspec
import trio

from headrace.core_log.env import Env
from headrace.core_log.peer.errors import LinkError
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import Connection, DoorListener, Listener, TlsSide
from headrace.gateways.http.config import HEAD_BYTES_MAX, SMALL_BODY_BYTES_MAX, HttpConfig
from headrace.gateways.http.connection import CONNECTION, Application, Gone, HttpConnection, Message
from headrace.gateways.http.gathering import (
    Document,
    cursor_of,
    is_by_id,
    is_list_of_all,
    limit_of,
    merged,
    merged_events,
    split_cursor,
)
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


# How long a list of all waits for a leader; it is given without what that one has, and says so.
GATHER_SECONDS_MAX = 5.0


class _LeaderLost(Exception):
    """Before it had begun to answer."""


@dataclass(slots=True)
class _Answer:
    """One that is held back until it is known what to make of it."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""

    async def take(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.body += message.get("body", b"")

    @property
    def document(self) -> Document:
        return cast(Document, msgspec.json.decode(self.body))

    async def send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status, "headers": self.headers})
        await send({"type": "http.response.body", "body": self.body})


@dataclass(frozen=True, slots=True)
class _Question:
    """A request as it is asked of several leaders."""

    scope: MutableMapping[str, Any]
    body: bytes = b""

    def other(self, method: str, target: str, query: str = "") -> "_Question":
        """Somebody's request for something else."""
        path = target.encode("ascii")
        about_body = (b"content-length", b"content-type", b"transfer-encoding", b"expect")
        headers = [(name, value) for name, value in self.scope["headers"] if name not in about_body]
        changed = {"method": method, "raw_path": path, "path": target, "query_string": query.encode("ascii")}
        return _Question({**self.scope, **changed, "headers": headers})

    def behind(self, cursor: int) -> "_Question":
        """The same, of one leader's pages."""
        kept = [(name, value) for name, value in parse_qsl(self.scope["query_string"].decode()) if name != "after"]
        query = urlencode([*kept, ("after", str(cursor))]).encode()
        return _Question({**self.scope, "query_string": query})

    def receive(self) -> Receive:
        """The body, and nothing behind it: whoever asked is still there."""
        told = False

        async def receive() -> Message:
            nonlocal told
            if told:
                await trio.sleep_forever()
            told = True
            return {"type": "http.request", "body": self.body, "more_body": False}

        return receive


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
        if (parts := self._leaders.parts()) and len(parts) > 1:
            if is_list_of_all(scope["method"], words, scope["query_string"]):
                await self._gather(words[0], _Question(scope), parts, send)
                return
            if is_by_id(words, scope["query_string"]):
                question = _Question(scope, await _read(receive))
                await (await self._find(words, question, parts)).send(send)
                return
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

    # -- asking all -----------------------------------------------------------------------------------------------

    async def _ask(self, vhost: str, question: _Question) -> _Answer:
        """What its leader answers. Raises NoLeader, _LeaderLost, Problem."""
        answer = _Answer()
        scope = dict(question.scope)
        doors = self._leaders.here(vhost)
        if doors is not None:
            await doors.http.app(scope, question.receive(), answer.take)
        else:
            self.passed_on_count += 1
            await self._pass_on(vhost, scope, question.receive(), answer.take)
        return answer

    async def _ask_all(self, questions: Sequence[tuple[str, _Question] | None]) -> list[_Answer | None]:
        """All at once; None: it was not asked, or nobody led in time."""
        answers: list[_Answer | None] = [None] * len(questions)

        async def ask(place: int, vhost: str, question: _Question) -> None:
            with trio.move_on_after(GATHER_SECONDS_MAX), suppress(NoLeader, _LeaderLost, Problem, LinkError):
                answers[place] = await self._ask(vhost, question)

        async with trio.open_nursery() as nursery:
            for place, one in enumerate(questions):
                if one is not None:
                    nursery.start_soon(ask, place, *one)
        return answers

    async def _gather(self, word: str, question: _Question, parts: Sequence[Sequence[str]], send: Send) -> None:
        """A list of what all leaders have; without what nobody leads now, which it names."""
        query = question.scope["query_string"]
        limit = limit_of(word, query)
        is_head = question.scope["method"] == "HEAD"
        if is_head:
            question = _Question({**question.scope, "method": "GET"})
        cursors = split_cursor(cursor_of(query), len(parts)) if word == "audit" else [None] * len(parts)
        questions = [
            None if cursor == 0 else (names[0], question.behind(cursor) if cursor is not None else question)
            for names, cursor in zip(parts, cursors, strict=True)
        ]
        answers = await self._ask_all(questions)
        wrong = next((one for one in answers if one is not None and one.status != HTTPStatus.OK), None)
        if wrong is not None:
            await wrong.send(send)
            return
        missing = [names for names, asked, one in zip(parts, questions, answers, strict=True) if asked and one is None]
        pages = [None if one is None else one.document for one in answers]
        there = [one for one in pages if one is not None]
        if not there and missing:
            raise NoLeader("nobody leads any vhost")
        if word == "audit":
            found = merged_events(pages, cursors, limit or len(there))
        else:
            found = merged(word, there, limit)
        if missing:
            found["missing_vhosts"] = [name for names in missing for name in names]
        first = next(one for one in answers if one is not None)
        framing = (b"content-length", b"transfer-encoding")
        body = msgspec.json.encode(found)
        headers = [(name, value) for name, value in first.headers if name.lower() not in framing]
        headers.append((b"content-length", str(len(body)).encode()))
        await _Answer(200, headers, b"" if is_head else body).send(send)

    async def _find(self, words: Sequence[str], question: _Question, parts: Sequence[Sequence[str]]) -> _Answer:
        """What has an id is with the leader that knows it."""
        match words:
            case ["stages", "abort"]:
                return await self._abort_everywhere(question, parts)
            case ["stages", "commit"]:
                return await self._ask(await self._vhost_of_commit(question, parts), question)
            case ["cursors", name] if question.scope["method"] == "PUT":
                known = await self._knowing(question.other("GET", f"{API}cursors/{name}"), parts)
                return await self._ask(known[0] if known else _vhost_of_cursor(question.body), question)
        answer: _Answer | None = None
        lost: Exception | None = None
        for names in parts:
            try:
                answer = await self._ask(names[0], question)
            except (NoLeader, _LeaderLost, LinkError) as error:
                lost = error
                continue
            if answer.status != HTTPStatus.NOT_FOUND:
                return answer
        if lost is not None:
            text = "a part of the cluster has no leader now, and nobody else knows it: whether it was done is not known"
            raise Problem(Code.NO_LEADER, text, headers={"retry-after": RETRY_AFTER_S})
        assert answer is not None
        return answer

    async def _knowing(self, question: _Question, parts: Sequence[Sequence[str]]) -> list[str]:
        """One vhost of each leader that has it. NoLeader: one cannot be asked."""
        answers = await self._ask_all([(names[0], question) for names in parts])
        if None in answers:
            raise NoLeader("a part of the cluster has no leader now")
        return [
            names[0]
            for names, one in zip(parts, answers, strict=True)
            if one is not None and one.status != HTTPStatus.NOT_FOUND
        ]

    async def _vhost_of_commit(self, question: _Question, parts: Sequence[Sequence[str]]) -> str:
        """Where the stages of the batch are; if there are none, where the query is known."""
        wanted = _field_of(question.body, "query")
        if not isinstance(wanted, str) or not wanted:
            # The leader says what is wrong.
            return DEFAULT_VHOST
        name = quote(wanted, safe="")
        answers = await self._ask_all(
            [(names[0], question.other("GET", f"{API}stages", f"query={name}&limit=1")) for names in parts]
        )
        if None in answers:
            raise NoLeader("a part of the cluster has no leader now")
        having = [
            names[0]
            for names, one in zip(parts, answers, strict=True)
            if one is not None and one.status == HTTPStatus.OK and one.document["total"]
        ]
        having = having or await self._knowing(question.other("GET", f"{API}stages/queries/{name}"), parts)
        if len(having) > 1:
            text = f"the stages of query '{wanted}' lie in vhosts that have several leaders: a commit is with one"
            raise Problem(Code.REFUSED, text)
        return having[0] if having else DEFAULT_VHOST

    async def _abort_everywhere(self, question: _Question, parts: Sequence[Sequence[str]]) -> _Answer:
        answers = [await self._ask(names[0], question) for names in parts]
        wrong = next((one for one in answers if one.status != HTTPStatus.OK), None)
        if wrong is not None:
            return wrong
        body = msgspec.json.encode({"aborted": sum(one.document["aborted"] for one in answers)})
        headers = [(name, value) for name, value in answers[0].headers if name.lower() != b"content-length"]
        return _Answer(200, [*headers, (b"content-length", str(len(body)).encode())], body)

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


def _field_of(body: bytes, name: str) -> object:
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError):
        return None
    return found.get(name) if isinstance(found, dict) else None


def _vhost_of_cursor(body: bytes) -> str:
    """That of its first topic; of several, their leader must be one."""
    topics = _field_of(body, "topics")
    first = next(iter(topics), "") if isinstance(topics, dict) else ""
    vhost, mark, _name = first.partition("|")
    return vhost if mark else DEFAULT_VHOST


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
