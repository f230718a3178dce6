"""Cursors over HTTP: pinned once, then the same for ever. Driver; delivery/cursors.py keeps them.

    PUT /api/v1/cursors/{cursor}     create; 200 and the one that is there, if one is

Who may read all topics of a cursor may see and delete it. Neighbours: spark/stream_broker.py is a client.
"""

from collections.abc import Iterable
from typing import Annotated
from uuid import UUID

from msgspec import Meta

from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.cursors import Cursor, CursorTopic
from headrace.gateways.delivery.topics import parse_name
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code
from headrace.gateways.http.records import time_text
from headrace.gateways.http.topics import found
from headrace.gateways.http.visitor import Visitor

PATH = "/api/v1/cursors"
TOPICS_MAX = 10_000
_OFFSET_MAX = 2**62

Offsets = Annotated[
    dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,8})$")], Annotated[int, Meta(ge=0, le=_OFFSET_MAX)]],
    Meta(description="by partition, the next offset to read"),
]


class CursorPath(Parameters, frozen=True, kw_only=True):
    cursor: Annotated[str, Meta(min_length=1, max_length=255)]


class TopicStart(Body, frozen=True, kw_only=True):
    id: Annotated[UUID | None, Meta(description="the stream; not given: the one that the name leads to now")] = None
    offsets: Offsets


class NewCursor(Body, frozen=True, kw_only=True):
    topics: Annotated[dict[str, TopicStart], Meta(min_length=1, max_length=TOPICS_MAX)]


class TopicStarted(Answer, frozen=True, kw_only=True):
    id: UUID
    offsets: dict[str, int]


class CursorOut(Answer, frozen=True, kw_only=True):
    cursor: str
    user: Annotated[str, Meta(description="who created it")]
    created_at: str
    topics: dict[str, TopicStarted]


class CursorList(Answer, frozen=True, kw_only=True):
    cursors: list[CursorOut]


async def put_cursor(call: Call[CursorPath, Parameters, NewCursor]) -> Reply:
    door, visitor = call.door, call.visitor
    topics = {}
    for name, start in call.body.topics.items():
        place = found(door, visitor, Right.READ, name)
        offsets = {int(partition): offset for partition, offset in start.offsets.items()}
        topics[name] = CursorTopic(id=start.id or place.stream_id, offsets=offsets)
    cursor, is_new = await door.cursors.create(call.path.cursor, visitor.name, topics)
    _require(visitor, cursor.topics)
    return Reply(_shown(cursor), status=201 if is_new else 200)


async def get_cursor(call: Call[CursorPath, Parameters, None]) -> Reply:
    cursor = call.door.cursors.get(call.path.cursor)
    _require(call.visitor, cursor.topics)
    return Reply(_shown(cursor))


async def list_cursors(call: Call[Parameters, Parameters, None]) -> Reply:
    seen = [one for one in call.door.cursors.list() if all(_may(call.visitor, name) for name in one.topics)]
    return Reply(CursorList(cursors=[_shown(one) for one in seen]))


async def delete_cursor(call: Call[CursorPath, Parameters, None]) -> Reply:
    _require(call.visitor, call.door.cursors.get(call.path.cursor).topics)
    await call.door.cursors.delete(call.path.cursor)
    return Reply(status=204)


def _require(visitor: Visitor, topics: Iterable[str]) -> None:
    for topic in topics:
        asked = parse_name(topic)
        visitor.require_vhost(asked.vhost)
        visitor.require(Right.READ, asked.vhost, asked.name)


def _may(visitor: Visitor, topic: str) -> bool:
    asked = parse_name(topic)
    return visitor.may(Right.READ, asked.vhost, asked.name)


def _shown(cursor: Cursor) -> CursorOut:
    return CursorOut(
        cursor=cursor.name,
        user=cursor.user,
        created_at=time_text(cursor.created_us),
        topics={
            name: TopicStarted(id=one.id, offsets={str(number): offset for number, offset in one.offsets.items()})
            for name, one in cursor.topics.items()
        },
    )


def operations() -> list[Operation]:
    path = f"{PATH}/{{cursor}}"
    return [
        Operation("GET", PATH, list_cursors, "List cursors", answers={200: CursorList}),
        Operation(
            "PUT",
            path,
            put_cursor,
            "Create a cursor, or get the one that is there",
            "Where a reader begins is decided once: 201 and what was sent, or 200 and what was sent the first time.",
            parameters=CursorPath,
            body=NewCursor,
            answers={200: CursorOut, 201: CursorOut},
            problems=(Code.NOT_FOUND, Code.LIMIT_REACHED),
        ),
        Operation(
            "GET",
            path,
            get_cursor,
            "Look at a cursor",
            parameters=CursorPath,
            answers={200: CursorOut},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "DELETE",
            path,
            delete_cursor,
            "Delete a cursor",
            parameters=CursorPath,
            answers={204: None},
            problems=(Code.NOT_FOUND,),
        ),
    ]
