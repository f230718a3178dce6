"""What is parked until it is due, over HTTP: counts, pages by due time, one by its id; cancel and reschedule. Driver.

An id is the one its publisher gave (`x-schedule-id`, `schedule_id`), or the broker's. To look at messages needs the
right to read the exchange they are for (or the queue they return to), to cancel or reschedule them the right to write
to it. Runs of schedules are counted here, and seen and changed through their schedules.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, field

from headrace.controller.errors import NotFound
from headrace.delay.parked import DelayRefused, Outcome, Pending
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, decode_duty, encode_duty
from headrace.gateways.delivery.delayed_when import DELAY, DELIVER_AT, due_us_of
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Encoding, octets, plain, time_text, written
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/delayed"
MESSAGES = f"{PATH}/messages"
LIMIT_MAX = 1000
# Pages of the engine that are looked through for one of ours, where few of the messages are for this user.
PAGES_MAX = 20
_MS_MAX = 2**53

Kind = Literal["publish", "retry", "schedule", "topic", "group"]


class MessagePath(Parameters, frozen=True, kw_only=True):
    id: Annotated[str, Meta(min_length=1, description="`x-schedule-id`, or the one that the broker made")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    vhost: Annotated[str, Meta(description="with `name`: the vhost it is in")] = "/"
    name: Annotated[
        str | None, Meta(description="the exchange they are for (`amq.default` for the default exchange)")
    ] = None
    kind: Annotated[Kind, Meta(description="with `name`: publish for an exchange, retry for a queue, or group")] = (
        "publish"
    )
    key: Annotated[str | None, Meta(description="with this routing key, or MQTT's topic as a key")] = None
    key_encoding: Encoding = "text"
    tag: str | None = None
    from_: Annotated[str | None, Meta(description="due from then on: ms since 1970, or RFC 3339")] = field(
        default=None, name="from"
    )
    until: Annotated[str | None, Meta(description="due before then")] = None
    after: Annotated[str | None, Meta(description="the cursor of the page before")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8")] = "auto"


class DelayedMessage(Answer, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    id_encoding: Encoding = "text"
    deliver_at: Annotated[str, Meta(description="when it is due")]
    parked_at: str
    kind: Kind
    vhost: str
    name: Annotated[str, Meta(description="the exchange it is for, or the queue it returns to")]
    key: str
    key_encoding: Encoding = "text"
    value: str
    encoding: Encoding = "text"
    headers: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


class DelayedPage(Answer, frozen=True, kw_only=True):
    messages: Annotated[list[DelayedMessage], Meta(description="by due time; may be few, or none, and not the last")]
    cursor: Annotated[str | None, Meta(description="for `after`; null: this was the last page")]


class TargetCount(Answer, frozen=True, kw_only=True):
    kind: Kind
    vhost: str
    name: str
    pending: int


class Bucket(Answer, frozen=True, kw_only=True):
    name: str
    start: Annotated[str | None, Meta(description="null: whatever is due soon, or came just now")]
    end: str | None
    pending: int
    bytes: int


class DelayedCounts(Answer, frozen=True, kw_only=True):
    pending: Annotated[int, Meta(description="all of them, whoever may see them")]
    targets: list[TargetCount]
    buckets: list[Bucket]


class When(Body, frozen=True, kw_only=True):
    """One of the two."""

    deliver_at: Annotated[str | int | None, Meta(description="ms since 1970, or RFC 3339 with its zone")] = None
    delay_ms: Annotated[Annotated[int, Meta(ge=0, le=_MS_MAX)] | None, Meta(description="from now")] = None


class Changed(Answer, frozen=True, kw_only=True):
    id: str
    outcome: Literal["cancelled", "rescheduled"]
    deliver_at: str | None = None


# -- showing ----------------------------------------------------------------------------------------------------------


def _kind(duty: Duty) -> Any:
    return duty.kind.name.lower()


def _resource(door: "HttpDoor", duty: Duty) -> str | None:
    """Whose rights are asked for: of what returns to a consumer group, those of the topic it failed in."""
    if duty.kind is not DutyKind.GROUP:
        return duty.name
    stream = door.groups.retries.stream_for(duty)
    place = None if stream is None else door.group_topics.maybe_place(door.groups.retries.origin_of(stream))
    return None if place is None else place.name


def _may(door: "HttpDoor", visitor: Visitor, right: Right, duty: Duty) -> bool:
    # Runs of schedules are seen elsewhere.
    if duty.kind is DutyKind.SCHEDULE or (name := _resource(door, duty)) is None:
        return False
    return visitor.may(right, duty.vhost, name)


def _may_count(door: "HttpDoor", visitor: Visitor, duty: Duty) -> bool:
    if duty.kind is not DutyKind.SCHEDULE:
        return _may(door, visitor, Right.READ, duty)
    try:
        schedule = door.schedules.get(duty.vhost, duty.name)
    except NotFound:
        return False
    return visitor.may(Right.READ, duty.vhost, schedule.definition.message.exchange)


def _shown(door: "HttpDoor", one: Pending, *, base64: bool) -> DelayedMessage:
    duty = decode_duty(one.target)
    properties, headers = plain(door.words, one.key, one.properties, one.attributes, one.headers)
    shown_id, id_encoding = written(one.id)
    key, key_encoding = written(one.key, base64=base64)
    value, encoding = written(one.value, base64=base64)
    return DelayedMessage(
        id=shown_id,
        id_encoding=id_encoding,
        deliver_at=time_text(one.due_us),
        parked_at=time_text(one.parked_us),
        kind=_kind(duty),
        vhost=duty.vhost,
        name=duty.name,
        key=key,
        key_encoding=key_encoding,
        value=value,
        encoding=encoding,
        headers=headers,
        properties=properties,
        tags=list(one.tags),
    )


def _time_us(name: str, text: str | None) -> int | None:
    if text is None:
        return None
    try:
        found = due_us_of(-(2**62), None, text)
    except DelayRefused as error:
        raise Problem(Code.INVALID_PARAMETER, str(error).replace(DELIVER_AT, name)) from None
    return found


# -- handlers ---------------------------------------------------------------------------------------------------------


async def count_delayed(call: Call[Parameters, Parameters, None]) -> Reply:
    delays = call.door.broker.delayed.delays
    targets = []
    for target, pending in delays.counts().items():
        duty = decode_duty(target)
        if pending and _may_count(call.door, call.visitor, duty):
            targets.append(TargetCount(kind=_kind(duty), vhost=duty.vhost, name=duty.name, pending=pending))
    buckets = [
        Bucket(
            name=one.name,
            start=time_text(one.start_us) if one.start_us else None,
            end=time_text(one.end_us) if one.start_us else None,
            pending=one.pending,
            bytes=one.byte_count,
        )
        for one in delays.buckets()
    ]
    targets.sort(key=lambda one: (one.vhost, one.kind, one.name))
    return Reply(DelayedCounts(pending=delays.count(), targets=targets, buckets=buckets))


async def list_delayed(call: Call[Parameters, ListQuery, None]) -> Reply:
    query, visitor = call.query, call.visitor
    wanted: list[bytes] = []
    if query.name is not None:
        visitor.require_vhost(query.vhost)
        name = "" if query.name == "amq.default" else query.name
        wanted = _targets(call.door, query.kind, query.vhost, name)
        if query.kind != "group":
            visitor.require(Right.READ, query.vhost, name)
        elif not wanted:
            # Nothing of the group ever failed.
            return Reply(DelayedPage(messages=[], cursor=None))
    try:
        key = None if query.key is None else octets(query.key, query.key_encoding)
    except ValueError as error:
        raise Problem(Code.INVALID_PARAMETER, f"key: {error}") from None
    found: list[DelayedMessage] = []
    cursor = query.after
    for _ in range(PAGES_MAX):
        page = await call.door.broker.delayed.delays.list(
            after=cursor,
            limit=query.limit - len(found),
            target=wanted[0] if len(wanted) == 1 else None,
            key=key,
            tag=query.tag,
            due_from_us=_time_us("from", query.from_),
            due_until_us=_time_us("until", query.until),
        )
        cursor = page.cursor
        found += [
            _shown(call.door, one, base64=query.encoding == "base64")
            for one in page.records
            if (not wanted or one.target in wanted) and _may(call.door, visitor, Right.READ, decode_duty(one.target))
        ]
        if cursor is None or len(found) >= query.limit:
            break
    return Reply(DelayedPage(messages=found, cursor=cursor))


def _targets(door: "HttpDoor", kind: Kind, vhost: str, name: str) -> list[bytes]:
    """What is parked for something is parked as one of these. Raises NotFound."""
    match kind:
        case "retry":
            return [encode_duty(Duty(DutyKind.RETRY, vhost, name, door.broker.vhosts[vhost].queue(name).view_id))]
        case "group":
            group = GroupName(vhost, name)
            if group not in door.groups.groups:
                raise NotFound(f"no consumer group '{name}' in vhost '{vhost}'")
            return [encode_duty(duty) for duty in door.groups.retries.duties(group).values()]
    return [encode_duty(Duty(DutyKind[kind.upper()], vhost, name))]


async def _check_may_change(call: Call[MessagePath, Any, Any]) -> None:
    """All that is pending under the id. What this user may not see is not there."""
    for target in await call.door.broker.delayed.delays.targets(_id(call.path.id)):
        duty = decode_duty(target)
        if not _may(call.door, call.visitor, Right.READ, duty):
            raise _unknown(call.path.id)
        call.visitor.require(Right.WRITE, duty.vhost, _resource(call.door, duty) or "")


def _id(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _unknown(text: str) -> Problem:
    return Problem(Code.NOT_FOUND, f"nothing is pending under the id '{text}'")


async def inspect_delayed(call: Call[MessagePath, Parameters, None]) -> Reply:
    one = await call.door.broker.delayed.delays.inspect(_id(call.path.id))
    if one is None or not _may(call.door, call.visitor, Right.READ, decode_duty(one.target)):
        raise _unknown(call.path.id)
    return Reply(_shown(call.door, one, base64=False))


async def cancel_delayed(call: Call[MessagePath, Parameters, None]) -> Reply:
    await _check_may_change(call)
    _answer(call.path.id, await call.door.broker.delayed.delays.cancel(_id(call.path.id)))
    return Reply(Changed(id=call.path.id, outcome="cancelled"))


async def reschedule_delayed(call: Call[MessagePath, Parameters, When]) -> Reply:
    now_us = call.door.broker.env.clock.wall_us()
    if (call.body.deliver_at is None) == (call.body.delay_ms is None):
        raise Problem(Code.INVALID, "give deliver_at or delay_ms")
    try:
        due_us = due_us_of(now_us, call.body.delay_ms, call.body.deliver_at) or now_us
        call.door.broker.delayed.check(due_us, now_us)
    except DelayRefused as error:
        told = str(error).replace(DELIVER_AT, "deliver_at").replace(DELAY, "delay_ms")
        raise Problem(Code.INVALID, told) from None
    await _check_may_change(call)
    _answer(call.path.id, await call.door.broker.delayed.delays.reschedule(_id(call.path.id), due_us))
    return Reply(Changed(id=call.path.id, outcome="rescheduled", deliver_at=time_text(due_us)))


def _answer(id: str, outcome: Outcome) -> None:
    match outcome:
        case Outcome.ALREADY_FIRED:
            raise Problem(Code.ALREADY_FIRED, f"what was parked under the id '{id}' has been delivered")
        case Outcome.ALREADY_CANCELLED:
            raise Problem(Code.ALREADY_CANCELLED, f"what was parked under the id '{id}' has been cancelled")
        case Outcome.UNKNOWN:
            raise _unknown(id)
        case Outcome.DONE:
            pass


def operations() -> list[Operation]:
    return [
        Operation("GET", PATH, count_delayed, "Count what is parked until it is due", answers={200: DelayedCounts}),
        Operation(
            "GET",
            MESSAGES,
            list_delayed,
            "List parked messages by due time",
            query=ListQuery,
            answers={200: DelayedPage},
            problems=(Code.INVALID_PARAMETER, Code.NOT_FOUND, Code.REFUSED),
        ),
        Operation(
            "GET",
            f"{MESSAGES}/{{id}}",
            inspect_delayed,
            "Look at a parked message",
            parameters=MessagePath,
            answers={200: DelayedMessage},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "DELETE",
            f"{MESSAGES}/{{id}}",
            cancel_delayed,
            "Cancel a parked message",
            description="The answer is definite: never delivered, delivered before, cancelled before, or not known.",
            parameters=MessagePath,
            answers={200: Changed},
            problems=(Code.NOT_FOUND, Code.ALREADY_FIRED, Code.ALREADY_CANCELLED, Code.REFUSED),
        ),
        Operation(
            "PUT",
            f"{MESSAGES}/{{id}}",
            reschedule_delayed,
            "Give a parked message another due time",
            parameters=MessagePath,
            body=When,
            answers={200: Changed},
            problems=(Code.NOT_FOUND, Code.ALREADY_FIRED, Code.ALREADY_CANCELLED, Code.REFUSED, Code.INVALID),
        ),
    ]
