"""The application behind the HTTP door: routes, login, checks, answers. Driver: ASGI, by Starlette.

A request goes: path -> operation -> where it comes from -> who it is -> parameters and body by the operation's types ->
its handler. Whatever is wrong on the way is answered with a problem document; what a handler did not see coming is
logged and answered with 500. Resources stand in files of their own, each with a function `operations()`.
"""

import binascii
import logging
from base64 import b64decode
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec
import trio
from starlette.convertors import CONVERTOR_TYPES, Convertor, register_url_convertor
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import Receive, Scope, Send

from headrace.core_log.errors import HeadraceError
from headrace.gateways.delivery.listener import Connection, is_loopback
from headrace.gateways.delivery.login import Reason, Refusal
from headrace.gateways.http import (
    audit,
    connections,
    cursors,
    dead_letters,
    delayed,
    groups,
    health,
    leases,
    metrics,
    openapi,
    publishing,
    queues,
    reading,
    retained,
    schedules,
    segments,
    staging,
    topics,
    unsettled,
)
from headrace.gateways.http.config import SMALL_BODY_BYTES_MAX
from headrace.gateways.http.connection import CONNECTION, Gone
from headrace.gateways.http.download import Download, DownloadResponse
from headrace.gateways.http.operations import (
    Answer,
    Call,
    Operation,
    Parameters,
    Reply,
    body_from,
    parameters_from,
)
from headrace.gateways.http.problems import MEDIA_TYPE, PATH, Code, Problem, problem_of, unauthorized
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

_log = logging.getLogger(__name__)

# What a browser must not do with an answer of ours.
_SAFE_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
# In a scope: who makes the request, once that is known.
USER = "headrace.user"
_CHANGING = frozenset(("POST", "PUT", "PATCH", "DELETE"))


class _Segment(Convertor[str]):
    """One segment of a path that is still percent-encoded, so that an encoded slash does not end it."""

    regex = "[^/]+"

    def convert(self, value: str) -> str:
        return unquote(value, errors="surrogateescape")

    def to_string(self, value: str) -> str:
        raise NotImplementedError("paths are not made from names here")


if "segment" not in CONVERTOR_TYPES:
    register_url_convertor("segment", _Segment())


def all_operations() -> list[Operation]:
    """Everything that the door can be asked for."""
    return [
        *health.operations(),
        *metrics.operations(),
        *topics.operations(),
        *publishing.operations(),
        *reading.operations(),
        *queues.operations(),
        *unsettled.operations(),
        *retained.operations(),
        *connections.operations(),
        *dead_letters.operations(),
        *audit.operations(),
        *groups.operations(),
        *delayed.operations(),
        *schedules.operations(),
        *staging.operations(),
        *segments.operations(),
        *cursors.operations(),
        *leases.operations(),
        *about_itself(),
    ]


class App:
    def __init__(
        self,
        door: "HttpDoor",
        operations: Sequence[Operation] | None = None,
        documented: Sequence[Operation] | None = None,
    ) -> None:
        """`operations`: what is answered here, all there is unless said otherwise; `documented`: also by others."""
        self.door = door
        self.operations = list(all_operations() if operations is None else operations)
        self._documented = documented or self.operations
        self._headers = _SAFE_HEADERS | {"server": f"headrace/{door.version}"}
        by_path: dict[str, dict[str, Operation]] = {}
        for one in self.operations:
            by_path.setdefault(one.path, {})[one.method] = one
        self._router = Router(
            [Route(_route(path), _Resource(self, known)) for path, known in by_path.items()],
            redirect_slashes=False,
            default=_Resource(self, {}),
        )

    @cached_property
    def document(self) -> bytes:
        """Made for the first who asks: a shard's new leader, which has a door of its own, has no time for it."""
        return msgspec.json.encode(openapi.document(self._documented, version=self.door.version))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Routes are found in the path as it came; see _Segment.
        scope["path"] = scope["raw_path"].decode("ascii")
        await self._router(scope, receive, send)

    async def respond(self, known: Mapping[str, Operation], request: Request) -> Response:
        """The answer to a request for a path that knows these methods."""
        operation = known.get("GET" if request.method == "HEAD" else request.method)
        try:
            if not known:
                raise Problem(Code.NOT_FOUND, f"there is nothing at {request.scope['path']}")
            if operation is None:
                raise Problem(Code.METHOD_NOT_ALLOWED, headers={"allow": ", ".join(_methods(known))})
            return self._logged(operation, request, self._response(await self._answered(operation, request)))
        except Problem as problem:
            return self._problem(problem)
        except HeadraceError as error:
            return self._problem(problem_of(error))
        except Gone:
            raise
        except Exception:
            _log.exception("a request ended by an internal error", extra={"path": request.scope["path"]})
            return self._problem(Problem(Code.INTERNAL_ERROR))

    async def _answered(self, operation: Operation, request: Request) -> Reply:
        connection: Connection = request.scope[CONNECTION]
        _check_origin(request, connection)
        visitor = await self._visitor(operation, request, connection)
        request.scope[USER] = visitor.name
        path = parameters_from(operation.parameters, request.path_params)
        query = parameters_from(operation.query, _query(request))
        body = None
        if operation.body is not None:
            limit = self.door.config.body_bytes_max if operation.large else SMALL_BODY_BYTES_MAX
            body = body_from(operation.body, await _body(request, limit))
        else:
            await _body(request, 0)

        async def abandoned() -> None:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_gone, request, nursery.cancel_scope)
                await self.door.stopping.wait()
                nursery.cancel_scope.cancel()

        return await operation.handler(Call(self.door, visitor, path, query, body, abandoned, request.headers))

    def _logged(self, operation: Operation, request: Request, response: Response) -> Response:
        """Who changed what, from where; messages are no such changes."""
        if operation.method in _CHANGING and not operation.large and operation.is_logged:
            connection: Connection = request.scope[CONNECTION]
            _log.info(
                "changed over HTTP",
                extra={
                    "operation": operation.id,
                    "path": request.scope["path"],
                    "user": request.scope[USER],
                    "peer": connection.host,
                    "metadata_version": self.door.metadata_version,
                },
            )
        return response

    # -- who it is ------------------------------------------------------------------------------------------------

    async def _visitor(self, operation: Operation, request: Request, connection: Connection) -> Visitor:
        given = request.headers.get("authorization")
        access, local = self.door.access, _is_local(request, connection)
        if given is None and connection.certified_name is not None:
            outcome = await self.door.authentication.certified(
                connection.certified_name, address=connection.host, peer_is_loopback=local
            )
            if not isinstance(outcome, Refusal):
                return Visitor(outcome.name, access, local)
        if given is None:
            if not operation.login:
                return Visitor("", access, local)
            raise unauthorized()
        if not (connection.tls or connection.is_loopback or self.door.config.allow_plaintext_auth):
            raise Problem(
                Code.PLAINTEXT_REFUSED, "use the https door, or allow it with http.allow_plaintext_auth = true"
            )
        name, password = _credentials(given)
        outcome = await self.door.authentication.login(name, password, address=connection.host, peer_is_loopback=local)
        if isinstance(outcome, Refusal):
            if outcome.reason is Reason.THROTTLED:
                raise Problem(Code.TOO_MANY_FAILURES, headers={"retry-after": "60"})
            raise unauthorized()
        return Visitor(outcome.name, access, local)

    # -- answers --------------------------------------------------------------------------------------------------

    def _response(self, reply: Reply) -> Response:
        if isinstance(reply.value, Download):
            headers = {**self._headers, **reply.headers, "content-type": reply.media_type}
            return DownloadResponse(self.door.broker.env.worker, reply.value, reply.status, headers)
        if reply.value is None:
            content = b""
        elif isinstance(reply.value, bytes):
            content = reply.value
        else:
            content = msgspec.json.encode(reply.value)
        response = Response(content, reply.status, {**self._headers, **reply.headers})
        if reply.value is not None:
            response.headers["content-type"] = reply.media_type
        return response

    def _problem(self, problem: Problem) -> Response:
        content = msgspec.json.encode(problem.document())
        headers = self._headers | problem.headers | {"content-type": MEDIA_TYPE}
        return Response(content, problem.code.status, headers)


class _Resource:
    """What is at a path, as ASGI sees it: Starlette then leaves it to us which methods there are."""

    def __init__(self, app: App, known: Mapping[str, Operation]) -> None:
        self._app = app
        self._known = known

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._app.respond(self._known, Request(scope, receive, send))
        self._app.door.answers[f"{response.status_code // 100}xx"] += 1
        await response(scope, receive, send)


def _methods(known: Mapping[str, Operation]) -> list[str]:
    return sorted({*known, *(("HEAD",) if "GET" in known else ())})


def _route(path: str) -> str:
    return path.replace("}", ":segment}")


def _query(request: Request) -> dict[str, str]:
    try:
        pairs = parse_qsl(
            request.scope["query_string"].decode("ascii"), keep_blank_values=True, errors="surrogateescape"
        )
    except ValueError as error:
        raise Problem(Code.INVALID_PARAMETER, f"the query cannot be read: {error}") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Problem(Code.INVALID_PARAMETER, "a parameter of the query is given twice")
    return found


async def _body(request: Request, bytes_max: int) -> bytes:
    """The whole body. Its length is looked at before it is read, and again while it is."""
    too_large = Problem(Code.BODY_TOO_LARGE, f"the body is longer than {bytes_max} bytes")
    if not bytes_max:
        too_large = Problem(Code.MALFORMED, "this request has no body")
    if int(request.headers.get("content-length", "0")) > bytes_max:
        raise too_large
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > bytes_max:
            raise too_large
        parts.append(part)
    # Forms and plain text are what a browser sends for any page without asking first.
    if size and kind != "application/json" and not kind.endswith("+json"):
        raise Problem(Code.UNSUPPORTED_MEDIA_TYPE, f"say content-type: application/json, not {kind}")
    return b"".join(parts)


async def _gone(request: Request, scope: trio.CancelScope) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    scope.cancel()


def _credentials(given: str) -> tuple[str, str]:
    scheme, _, encoded = given.partition(" ")
    refused = unauthorized("only Basic is known")
    if scheme.lower() != "basic":
        raise refused
    try:
        name, colon, password = b64decode(encoded.strip(), validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        raise refused from None
    if not colon:
        raise refused
    return name, password


def _is_local(request: Request, connection: Connection) -> bool:
    """Whether the request was made on this machine. One that a proxy of this machine passes on was not, and neither
    was one for a name that is not this machine's: any name can be made to lead here (DNS rebinding)."""
    if not connection.is_loopback or "x-forwarded-for" in request.headers or "forwarded" in request.headers:
        return False
    return _is_local_name(request.headers.get("host", ""))


def _is_local_name(netloc: str) -> bool:
    try:
        name = urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return False
    return name == "localhost" or is_loopback(name)


def _check_origin(request: Request, connection: Connection) -> None:
    """A browser says whose page makes it send a request; only our own may make it change something."""
    origin = request.headers.get("origin")
    if origin is None or request.method not in _CHANGING:
        return
    try:
        netloc = urlsplit(origin).netloc
    except ValueError:
        netloc = ""
    if not netloc or netloc.lower() != request.headers.get("host", "").lower():
        raise Problem(Code.CROSS_ORIGIN, f"the request comes from {origin}")


# -- what the door says about itself -----------------------------------------------------------------------------


class KnownProblem(Answer, frozen=True, kw_only=True):
    code: str
    status: int
    title: str


class KnownProblems(Answer, frozen=True, kw_only=True):
    problems: list[KnownProblem]


async def get_openapi(call: Call[Parameters, Parameters, None]) -> Reply:
    return Reply(call.door.app.document)


async def list_problems(call: Call[Parameters, Parameters, None]) -> Reply:
    return Reply(KnownProblems(problems=[KnownProblem(code=a.code, status=a.status, title=a.title) for a in Code]))


def about_itself() -> Sequence[Operation]:
    return [
        Operation("GET", openapi.PATH, get_openapi, "This document", answers={200: dict[str, Any]}, login=False),
        Operation(
            "GET",
            PATH,
            list_problems,
            "Every code that a problem document may have",
            answers={200: KnownProblems},
            login=False,
        ),
    ]
