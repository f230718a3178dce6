"""What a queue has not done with, over HTTP: ready and unacked, page by page. Driver.

In the order of the queue's own numbers; a page says where the next one begins, and what arrives or is settled between
two pages moves none of the others. For tables (spark/tables.py) and for whoever copies a queue: to look at its head,
peeking (queues.py) is enough.
"""

from typing import Annotated, Literal

import trio
from msgspec import Meta

from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.lane import Lane
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.queues import PATH, QueuePath, queue_named
from headrace.gateways.http.records import Message, shown

LIMIT_MAX = 1000
BYTES_MAX = 16 * 1024 * 1024


class UnsettledQuery(Parameters, frozen=True, kw_only=True):
    after: Annotated[str | None, Meta(description="the cursor of the page before")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8")] = "auto"


class Unsettled(Answer, frozen=True, kw_only=True):
    lane: Annotated[int, Meta(description="of a queue with priorities or partitions; else 0")]
    sequence: Annotated[int, Meta(description="its number in the lane")]
    state: Literal["ready", "unacked"]
    stream: Annotated[str, Meta(description="the stream in which it lies; with partition and offset of the message")]
    message: Message


class UnsettledPage(Answer, frozen=True, kw_only=True):
    messages: list[Unsettled]
    cursor: Annotated[str | None, Meta(description="for `after`; null: this was the last page")]


async def list_unsettled(call: Call[QueuePath, UnsettledQuery, None]) -> Reply:
    _host, queue = queue_named(call.door, call.visitor, call.path.queue, Right.READ)
    query, door = call.query, call.door
    lane_at, sequence = _place(query.after)
    await door.broker.committed()
    found: list[Unsettled] = []
    room = BYTES_MAX
    for at in range(lane_at, len(queue.lanes)):
        lane = queue.lanes[at]
        ready = _ready(lane)
        for stretch in lane.unsettled_stretches(sequence):
            batch = stretch.loaded()
            for place in range(stretch.count):
                index, number = stretch.index + place, stretch.seq + place
                room -= len(batch.values[index])
                if len(found) == query.limit or (found and room < 0):
                    return Reply(UnsettledPage(messages=found, cursor=f"{at}/{number}"))
                found.append(
                    Unsettled(
                        lane=at,
                        sequence=number,
                        state="ready" if any(low <= number < high for low, high in ready) else "unacked",
                        stream=str(stretch.source.stream_id),
                        message=shown(
                            door.words, stretch.source.partition, batch, index, base64=query.encoding == "base64"
                        ),
                    )
                )
            await trio.lowlevel.checkpoint()
        sequence = 0
    return Reply(UnsettledPage(messages=found, cursor=None))


def _ready(lane: Lane) -> list[tuple[int, int]]:
    """Sequences first..end-1 that nobody holds."""
    found: list[tuple[int, int]] = []
    for stretch in lane.ready_stretches():
        if found and found[-1][1] == stretch.seq:
            found[-1] = found[-1][0], stretch.seq + stretch.count
        else:
            found.append((stretch.seq, stretch.seq + stretch.count))
    return found


def _place(cursor: str | None) -> tuple[int, int]:
    if cursor is None:
        return 0, 0
    lane, _, sequence = cursor.partition("/")
    if not (lane.isascii() and lane.isdigit() and sequence.isascii() and sequence.isdigit()):
        raise Problem(Code.INVALID_PARAMETER, f"'{cursor}' is not a cursor of this list")
    return int(lane), int(sequence)


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            f"{PATH}/{{queue}}/unsettled",
            list_unsettled,
            "List what a queue has not done with",
            "Ready and unacked messages, in the order of the queue's own numbers, page by page.",
            parameters=QueuePath,
            query=UnsettledQuery,
            answers={200: UnsettledPage},
            problems=(Code.NOT_FOUND,),
        )
    ]
