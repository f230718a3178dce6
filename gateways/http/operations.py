"""What the HTTP door can be asked for. Values: one Operation for each method of each path.

An operation names the types of its path, query and body; the same types check a request before its handler sees it
(app.py) and stand in the OpenAPI document (openapi.py), so the two cannot differ. A file of the door that serves a
resource has a function `operations()` that returns its list; app.py puts the lists together.

    class Query(Parameters):
        limit: Annotated[int, Meta(ge=1, le=1000, description="how many at most")] = 100

    async def list_things(call: Call[Parameters, Query, None]) -> Reply: ...

    def operations() -> list[Operation]:
        return [Operation("GET", "/api/v1/things", list_things, "List things", query=Query, answers={200: Things})]
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a path or a query: their names, their types, their limits. This one has none."""


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request brings. A field that nobody knows is an error, so that a misspelt one is not passed over."""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a request is answered with."""


P = TypeVar("P", bound=Parameters)
Q = TypeVar("Q", bound=Parameters)
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class Call(Generic[P, Q, B]):
    """One request that was found lawful."""

    door: "HttpDoor"
    visitor: Visitor
    path: P
    query: Q
    body: B
    # Returns when nobody waits for the answer any more, or nobody should: for long polls.
    abandoned: Callable[[], Awaitable[None]]
    # Of the request, by their names in small letters.
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reply:
    """`value` is written as JSON; bytes and a Download are sent as they are, under their own media type."""

    value: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    media_type: str = "application/json"


Handler = Callable[[Call[Any, Any, Any]], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Operation:
    method: str
    # `{name}` is one segment of the path, percent-encoded by the caller: it may hold an encoded slash.
    path: str
    handler: Handler
    summary: str
    # Longer, for the document.
    description: str = ""
    parameters: type[Parameters] = Parameters
    query: type[Parameters] = Parameters
    # None: the request has no body.
    body: Any = None
    answers: Mapping[int, Any] = field(default_factory=lambda: {200: None})
    # What an answer that is no JSON is.
    media_type: str = "application/json"
    # Codes that its callers should expect besides those that any request may meet.
    problems: tuple[Code, ...] = ()
    # It brings messages, and may be as large as they are.
    large: bool = False
    # False: it is done all the time, as a group's commits are, and says nothing to those who look for what was changed.
    is_logged: bool = True
    # False: anybody may ask, and `Call.visitor` is nobody.
    login: bool = True

    @property
    def tag(self) -> str:
        """The resource it belongs to: the first word of its path behind the version."""
        words = self.path.strip("/").split("/")
        return words[2] if len(words) > 2 else words[-1]

    @property
    def id(self) -> str:
        """Its name in generated clients."""
        return self.handler.__name__


def parameters_from(kind: type[P], values: Mapping[str, str]) -> P:
    """Texts of a path or a query as their types. Raises Problem."""
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Problem(Code.INVALID_PARAMETER, _told(error, values)) from None


def body_from(kind: Any, data: bytes) -> Any:
    """JSON as its type. Raises Problem."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise Problem(Code.INVALID, str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Problem(Code.MALFORMED, f"the body is not JSON: {error}") from None


def _told(error: msgspec.ValidationError, values: Mapping[str, str]) -> str:
    text = str(error)
    # `Expected `int` - at `$.limit`` -> which one, and what came.
    _what, _, place = text.rpartition("`$.")
    name = place.rstrip("`")
    return f"{text}, not '{values[name]}'" if place and name in values else text
