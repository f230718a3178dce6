"""Dead letters over HTTP: list them where they lie, send them back, watch it, stop it. Driver.

Dead letters are messages of an ordinary queue: `<queue>.dlq`, or whichever a dead-letter exchange leads to. To list
them needs the right to read that queue; to send them back also the right to write to the default exchange, by which
anybody else would publish to a queue.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal
from uuid import UUID

import trio
from msgspec import Meta, field

from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.dead_letters import DeadLetter, Wanted, read
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.redrive import Redrive, Request, ready_in
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.queues import QueuePath, plain_text, queue_named
from headrace.gateways.http.records import Message, filter_of, shown, time_text, time_us_of
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/redrives"
LIMIT_MAX = 1000
BYTES_MAX = 16 * 1024 * 1024
IDS_MAX = 1000

Reason = Annotated[str, Meta(description="rejected, expired, maxlen, delivery_limit, unmatched")]
Died = Annotated[str, Meta(description="ms since 1970, or RFC 3339 with its zone")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    reason: Reason | None = None
    died_in: Annotated[str | None, Meta(description="the queue they died in")] = None
    key: Annotated[str | None, Meta(description="the routing key they were published with")] = None
    filter: Annotated[str | None, Meta(description="a tag expression")] = None
    died_before: Died | None = None
    died_after: Died | None = None
    after: Annotated[str | None, Meta(description="those behind the one with this id")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8")] = "auto"


class Attempt(Answer, frozen=True, kw_only=True):
    failed_at: str
    reason: str


class OriginOut(Answer, frozen=True, kw_only=True):
    """Where it was first."""

    stream: str
    partition: int
    offset: int
    exchange: str


class DeadLetterOut(Answer, frozen=True, kw_only=True):
    id: Annotated[str, Meta(description="stream/partition/offset of where it lies; names it to a redrive")]
    died_in: Annotated[str, Meta(description="the queue or consumer group it died in last")]
    kind: Annotated[Literal["queue", "group"], Meta(description="which of the two")]
    reason: str
    died_at: str
    attempts: int
    history: Annotated[list[Attempt], Meta(description="the attempts that are known, the first first")]
    origin: OriginOut | None
    message: Message


class DeadLetterList(Answer, frozen=True, kw_only=True):
    dead_letters: list[DeadLetterOut]
    more: Annotated[bool, Meta(description="there are more than the limit")]


class RedriveBody(Body, frozen=True, kw_only=True):
    queue: Annotated[str, Meta(min_length=1, description="the queue that holds them, or `vhost|queue`")]
    ids: Annotated[list[str], Meta(max_length=IDS_MAX, description="these only, as they are listed")] = field(
        default_factory=list
    )
    reason: Reason | None = None
    died_in: Annotated[str | None, Meta(description="the queue they died in")] = None
    key: str | None = None
    filter: Annotated[str | None, Meta(description="a tag expression")] = None
    died_before: Died | int | None = None
    died_after: Died | int | None = None
    to: Annotated[str | None, Meta(description="another queue than the one each died in")] = None
    rate: Annotated[float, Meta(gt=0, le=1e9, description="at most so many a second")] | None = None
    limit: Annotated[int, Meta(ge=1, le=2**53, description="at most so many in all")] | None = None
    dry_run: Annotated[bool, Meta(description="only count what would be moved")] = False


class RedriveOut(Answer, frozen=True, kw_only=True):
    id: str
    queue: str
    vhost: str
    state: Literal["running", "done", "cancelled", "failed", "interrupted"]
    user: str
    started_at: str
    ended_at: str | None
    total: Annotated[int, Meta(description="messages in the queue when it began")]
    matched: Annotated[int, Meta(description="dead letters that were asked for, so far")]
    moved: int
    without_way: Annotated[int, Meta(description="asked for, but the queue they died in is not there: they stay")]
    targets: Annotated[dict[str, int], Meta(description="how many for which queue")]
    dry_run: bool
    failure: str


class EarlierOut(Answer, frozen=True, kw_only=True):
    """One of before the broker was started, as the audit tells."""

    id: str
    queue: str
    vhost: str
    state: str
    user: str
    noted_at: str
    matched: int
    moved: int
    without_way: int


class RedriveList(Answer, frozen=True, kw_only=True):
    redrives: Annotated[list[RedriveOut], Meta(description="the newest first")]
    earlier: list[EarlierOut]


class RedrivePath(Parameters, frozen=True, kw_only=True):
    id: UUID


# -- asking -----------------------------------------------------------------------------------------------------------


def _time_us(text: str | int | None, name: str) -> int | None:
    return None if text is None else time_us_of(text, name=name)


def _place(id: str) -> tuple[str, int, int]:
    stream, _, rest = id.partition("/")
    partition, _, offset = rest.partition("/")
    try:
        return str(UUID(stream)), int(partition), int(offset)
    except ValueError:
        raise Problem(Code.INVALID, f"'{id}' is not the id of a dead letter") from None


def _wanted(asked: ListQuery | RedriveBody) -> Wanted:
    return Wanted(
        reason=asked.reason,
        died_before_us=_time_us(asked.died_before, "died_before"),
        died_after_us=_time_us(asked.died_after, "died_after"),
        key=asked.key,
        queue=asked.died_in,
        tags=filter_of(asked.filter),
        places=frozenset(_place(one) for one in asked.ids) if isinstance(asked, RedriveBody) else frozenset(),
    )


# -- listing ----------------------------------------------------------------------------------------------------------


async def list_dead_letters(call: Call[QueuePath, ListQuery, None]) -> Reply:
    _host, queue = queue_named(call.door, call.visitor, call.path.queue, Right.READ)
    query, door = call.query, call.door
    wanted = _wanted(query)
    after = None if query.after is None else _place(query.after)
    await door.broker.committed()
    found: list[DeadLetterOut] = []
    room = BYTES_MAX
    for stretch in ready_in(queue):
        batch = stretch.loaded()
        for index in range(stretch.index, stretch.index + stretch.count):
            place = (str(stretch.source.stream_id), stretch.source.partition, int(batch.offset_at(index)))
            if after is not None:
                after = None if place == after else after
                continue
            if wanted.tags is not None and not wanted.tags.matches(batch.tags_at(index)):
                continue
            letter = read(batch, index, door.broker.redrives.headers_of)
            if letter is None or not wanted.matches(letter):
                continue
            room -= len(batch.values[index])
            if len(found) == query.limit or (found and room < 0):
                return Reply(DeadLetterList(dead_letters=found, more=True))
            found.append(_out(door, stretch, index, letter, place, base64=query.encoding == "base64"))
        await trio.lowlevel.checkpoint()
    return Reply(DeadLetterList(dead_letters=found, more=False))


def _out(
    door: "HttpDoor", stretch: Stretch, index: int, letter: DeadLetter, place: tuple[str, int, int], *, base64: bool
) -> DeadLetterOut:
    origin = letter.origin
    return DeadLetterOut(
        id="/".join(map(str, place)),
        died_in=plain_text(letter.queue),
        kind="group" if letter.is_of_group else "queue",
        reason=plain_text(letter.reason),
        died_at=time_text(letter.died_us),
        attempts=letter.attempts,
        history=[Attempt(failed_at=time_text(when), reason=why) for when, why in letter.history],
        origin=None
        if origin is None
        else OriginOut(
            stream=origin.stream, partition=origin.partition, offset=origin.offset, exchange=plain_text(origin.exchange)
        ),
        message=shown(door.words, stretch.source.partition, stretch.loaded(), index, base64=base64),
    )


# -- redrives ---------------------------------------------------------------------------------------------------------


async def start_redrive(call: Call[Parameters, Parameters, RedriveBody]) -> Reply:
    body, door = call.body, call.door
    host, queue = queue_named(door, call.visitor, body.queue, Right.READ)
    call.visitor.require(Right.WRITE, host.name, DEFAULT_EXCHANGE)
    request = Request(host.name, queue.name, _wanted(body), body.to, body.rate, body.limit)
    redrives = door.broker.redrives
    redrives.source(request)
    if body.dry_run:
        return Reply(_redrive(await redrives.dry_run(request, call.visitor.name), dry_run=True))
    started = redrives.start(request, call.visitor.name)
    return Reply(_redrive(started), status=202, headers={"location": f"{PATH}/{started.id}"})


def _redrive(one: Redrive, *, dry_run: bool = False) -> RedriveOut:
    progress = one.progress
    return RedriveOut(
        id=str(one.id),
        queue=plain_text(one.request.queue),
        vhost=plain_text(one.request.vhost),
        state=one.state.value,
        user=one.who,
        started_at=time_text(one.started_us),
        ended_at=None if one.ended_us is None else time_text(one.ended_us),
        total=progress.total,
        matched=progress.matched,
        moved=progress.moved,
        without_way=progress.without_way,
        targets={plain_text(name): count for name, count in progress.by_queue.items()},
        dry_run=dry_run,
        failure=one.failure,
    )


def _may_see(visitor: Visitor, vhost: str, queue: str) -> bool:
    return visitor.may(Right.READ, vhost, queue)


async def list_redrives(call: Call[Parameters, Parameters, None]) -> Reply:
    await trio.lowlevel.checkpoint()
    redrives = call.door.broker.redrives
    return Reply(
        RedriveList(
            redrives=[
                _redrive(one) for one in redrives.list() if _may_see(call.visitor, one.request.vhost, one.request.queue)
            ],
            earlier=[
                _earlier(event) for event in redrives.earlier if _may_see(call.visitor, event["vhost"], event["queue"])
            ],
        )
    )


def _earlier(event: Any) -> EarlierOut:
    return EarlierOut(
        id=event["id"],
        queue=event["queue"],
        vhost=event["vhost"],
        state=event["state"],
        user=event["who"],
        noted_at=time_text(event["time_us"]),
        matched=event["matched"],
        moved=event["moved"],
        without_way=event["without_way"],
    )


def _found(call: Call[RedrivePath, Any, Any], right: Right) -> Redrive:
    one = call.door.broker.redrives.get(call.path.id)
    if one is None or not call.visitor.may(right, one.request.vhost, one.request.queue):
        raise Problem(Code.NOT_FOUND, f"there is no redrive {call.path.id}")
    return one


async def get_redrive(call: Call[RedrivePath, Parameters, None]) -> Reply:
    await trio.lowlevel.checkpoint()
    return Reply(_redrive(_found(call, Right.READ)))


async def cancel_redrive(call: Call[RedrivePath, Parameters, None]) -> Reply:
    one = _found(call, Right.READ)
    call.visitor.require(Right.WRITE, one.request.vhost, DEFAULT_EXCHANGE)
    one.cancel()
    await trio.lowlevel.checkpoint()
    return Reply(_redrive(one), status=202)


def operations() -> list[Operation]:
    one = f"{PATH}/{{id}}"
    return [
        Operation(
            "GET",
            "/api/v1/queues/{queue}/dead-letters",
            list_dead_letters,
            "List the dead letters in a queue",
            "With where, when and why each died. Messages that never died are left out.",
            parameters=QueuePath,
            query=ListQuery,
            answers={200: DeadLetterList},
            problems=(Code.NOT_FOUND, Code.INVALID_PARAMETER, Code.INVALID),
        ),
        Operation(
            "POST",
            PATH,
            start_redrive,
            "Send dead letters back",
            "To the queue each died in, and to no other, or to the one that is named; exactly once. Asked for while "
            "one of the same queue runs, it is refused.",
            body=RedriveBody,
            answers={200: RedriveOut, 202: RedriveOut},
            problems=(Code.NOT_FOUND, Code.INVALID_PARAMETER, Code.INVALID, Code.REFUSED),
        ),
        Operation("GET", PATH, list_redrives, "List redrives", answers={200: RedriveList}),
        Operation(
            "GET",
            one,
            get_redrive,
            "How far a redrive is",
            parameters=RedrivePath,
            answers={200: RedriveOut},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "DELETE",
            one,
            cancel_redrive,
            "Stop a redrive",
            "What is on its way gets there; nothing more is taken.",
            parameters=RedrivePath,
            answers={202: RedriveOut},
            problems=(Code.NOT_FOUND,),
        ),
    ]
