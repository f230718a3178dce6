"""Retained messages of MQTT over HTTP: by topic filter, page by page. Driver; the MQTT door keeps them.

To see one needs the right to read `amq.topic`, and its topic where the user's keys are narrowed, as for a subscription.
Neighbours: gateways/connected.py hands over what the MQTT door has.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import trio
from msgspec import Meta, field

from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.topics import DEFAULT_VHOST
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Encoding, time_text, written

PATH = "/api/v1/retained"
EXCHANGE = "amq.topic"
LIMIT_MAX = 1000
BYTES_MAX = 16 * 1024 * 1024
_PER_TURN = 200


@dataclass(frozen=True, slots=True)
class RetainedOne:
    """A retained message as the MQTT door tells of it."""

    topic: str
    # Its topic as a routing key of amq.topic.
    key: str
    qos: int
    timestamp_us: int
    expiry_us: int
    tags: tuple[str, ...]
    user: str
    client_id: str
    # None: another has just taken its place.
    payload: Callable[[], bytes | None]


# (vhost, topic filter) -> what matches, by topic. ValueError for a filter that is none.
FindRetained: TypeAlias = Callable[[str, str], Iterator[RetainedOne]]


class RetainedQuery(Parameters, frozen=True, kw_only=True):
    vhost: str = DEFAULT_VHOST
    filter: Annotated[str, Meta(description="a topic filter of MQTT")] = "#"
    after: Annotated[str | None, Meta(description="topics behind this one")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8")] = "auto"


class RetainedOut(Answer, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    value: str
    encoding: Encoding = "text"
    qos: int
    timestamp: str
    expires_at: str | None = None
    tags: list[str] = field(default_factory=list)
    user: str = ""
    client_id: str = ""


class RetainedPage(Answer, frozen=True, kw_only=True):
    messages: Annotated[list[RetainedOut], Meta(description="by topic")]
    more: Annotated[bool, Meta(description="there are more: ask for those behind the last topic")]


async def list_retained(call: Call[Parameters, RetainedQuery, None]) -> Reply:
    query, visitor = call.query, call.visitor
    visitor.require_vhost(query.vhost)
    visitor.require(Right.READ, query.vhost, EXCHANGE)
    try:
        matching = call.door.retained(query.vhost, query.filter)
    except ValueError as error:
        raise Problem(Code.INVALID_PARAMETER, f"filter: {error}") from None
    found: list[RetainedOut] = []
    room = BYTES_MAX
    for place, one in enumerate(matching):
        if place % _PER_TURN == _PER_TURN - 1:
            await trio.lowlevel.checkpoint()
        if query.after is not None and one.topic <= query.after:
            continue
        if not visitor.access.may_use_key(visitor.name, query.vhost, EXCHANGE, Right.READ, one.key):
            continue
        payload = one.payload()
        if payload is None:
            continue
        room -= len(payload)
        if len(found) == query.limit or (found and room < 0):
            return Reply(RetainedPage(messages=found, more=True))
        value, encoding = written(payload, base64=query.encoding == "base64")
        found.append(
            RetainedOut(
                topic=one.topic,
                value=value,
                encoding=encoding,
                qos=one.qos,
                timestamp=time_text(one.timestamp_us),
                expires_at=time_text(one.expiry_us) if one.expiry_us else None,
                tags=list(one.tags),
                user=one.user,
                client_id=one.client_id,
            )
        )
    return Reply(RetainedPage(messages=found, more=False))


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            list_retained,
            "List retained messages of MQTT",
            query=RetainedQuery,
            answers={200: RetainedPage},
            problems=(Code.FORBIDDEN,),
        )
    ]
