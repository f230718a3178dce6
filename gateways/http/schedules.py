"""Schedules over HTTP: create and change, list, pause and resume, run now, delete. Driver.

A schedule publishes one message to an exchange, again and again, as its cron expression says in its time zone. Its name
in a path is that of vhost `/`, or `vhost|name`. To make, change or run one needs the right to write to its exchange; to
see one, the right to read from it.
"""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Raw, field

from headrace.controller.errors import NotFound
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, Protocol
from headrace.delay.cron import Cron, Missed
from headrace.filtering.tags import collect
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.delayed_when import DELAY, DELAY_LEVEL, DELIVER_AT, SCHEDULE_ID
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.schedules_state import Definition, Schedule
from headrace.gateways.delivery.schedules_state import Message as Scheduled
from headrace.gateways.delivery.topics import DEFAULT_VHOST
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Encoding, octets, time_text, value_octets, written

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/schedules"
# Headers that the broker acts upon when somebody publishes.
_AT_ITS_TIME = "a schedule's message is published at its time, and cannot wait after it"
_NUMBERED = "the runs of a schedule have numbers of their own"
_OF_A_PUBLISH = {
    **dict.fromkeys((DELAY, DELIVER_AT, DELAY_LEVEL, SCHEDULE_ID), _AT_ITS_TIME),
    **dict.fromkeys(("x-producer-id", "x-producer-epoch", "x-sequence"), _NUMBERED),
}


class SchedulePath(Parameters, frozen=True, kw_only=True):
    schedule: Annotated[str, Meta(min_length=1, description="`nightly` of vhost `/`, or `vhost|nightly`")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    vhost: Annotated[str | None, Meta(description="in this vhost only")] = None


class ScheduledMessage(Body, frozen=True, kw_only=True):
    """With `exchange` or `queue`."""

    exchange: Annotated[str | None, Meta(description="empty: the default exchange, with a queue's name as the key")] = (
        None
    )
    queue: Annotated[str | None, Meta(description="instead: the queue it goes to")] = None
    key: Annotated[str, Meta(description="the routing key, with `exchange`")] = ""
    value: Annotated[Raw, Meta(description="nothing: an empty value")] = field(default_factory=lambda: Raw(b""))
    encoding: Annotated[
        Literal["text", "base64", "json"] | None, Meta(description="text for strings, json for all else, unless given")
    ] = None
    headers: dict[str, Any] = field(default_factory=dict)
    content_type: Annotated[str, Meta(max_length=255)] | None = None
    tags: list[str] = field(default_factory=list)
    persistent: bool = True


class NewSchedule(Body, frozen=True, kw_only=True):
    cron: Annotated[str, Meta(max_length=256, description="five fields, six with seconds, or @daily and the like")]
    zone: Annotated[str, Meta(description="a time zone of the IANA database")] = "UTC"
    missed: Annotated[
        Literal["skip", "once", "all"],
        Meta(description="runs that passed while the broker was down: none is made up for, one for all, or each"),
    ] = "skip"
    paused: bool = False
    message: ScheduledMessage


class ScheduleMessageOut(Answer, frozen=True, kw_only=True, omit_defaults=True):
    exchange: str
    key: str
    key_encoding: Encoding = "text"
    value: str
    encoding: Encoding = "text"
    headers: dict[str, Any] = field(default_factory=dict)
    properties: dict[str, Any] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)


class ScheduleOut(Answer, frozen=True, kw_only=True):
    name: str
    vhost: str
    cron: str
    zone: str
    missed: Literal["skip", "once", "all"]
    paused: bool
    next_run: Annotated[str | None, Meta(description="null: it is paused, or never comes again")]
    last_run: str | None
    runs: int
    missed_runs: int
    failed_runs: Annotated[int, Meta(description="that found no exchange or queue to publish to")]
    created_at: str
    message: ScheduleMessageOut


class ScheduleList(Answer, frozen=True, kw_only=True):
    schedules: list[ScheduleOut]


def _split(text: str) -> tuple[str, str]:
    vhost, bar, name = text.partition("|")
    return (vhost, name) if bar else (DEFAULT_VHOST, text)


def _found(call: Call[SchedulePath, Any, Any], right: Right) -> Schedule:
    vhost, name = _split(call.path.schedule)
    call.visitor.require_vhost(vhost)
    found = call.door.schedules.get(vhost, name)
    call.visitor.require(right, vhost, found.definition.message.exchange)
    return found


def _shown(door: "HttpDoor", schedule: Schedule) -> ScheduleOut:
    definition = schedule.definition
    message = definition.message
    properties: dict[str, Any] = {}
    headers: dict[str, Any] = {}
    if message.attributes & PROTOCOL_MASK != Protocol.NEUTRAL:
        plain = door.words.read(message.key, message.properties, message.attributes)
        properties, headers = dict(plain.properties), dict(plain.headers)
    key, key_encoding = written(message.key)
    value, encoding = written(message.value)
    return ScheduleOut(
        name=schedule.name,
        vhost=schedule.vhost,
        cron=definition.cron.expression,
        zone=definition.cron.zone,
        missed=definition.missed.value,
        paused=definition.paused,
        next_run=_time(schedule.next_us),
        last_run=_time(schedule.last_us),
        runs=schedule.run_count,
        missed_runs=schedule.missed_count,
        failed_runs=schedule.failed_count,
        created_at=time_text(schedule.created_us),
        message=ScheduleMessageOut(
            exchange=message.exchange,
            key=key,
            key_encoding=key_encoding,
            value=value,
            encoding=encoding,
            headers=headers,
            properties=properties,
            tags=list(message.tags),
        ),
    )


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else time_text(time_us)


async def list_schedules(call: Call[Parameters, ListQuery, None]) -> Reply:
    if call.query.vhost is not None:
        call.visitor.require_vhost(call.query.vhost)
    found = [
        _shown(call.door, one)
        for one in call.door.schedules.list(call.query.vhost)
        if call.visitor.may(Right.READ, one.vhost, one.definition.message.exchange)
    ]
    return Reply(ScheduleList(schedules=found))


async def get_schedule(call: Call[SchedulePath, Parameters, None]) -> Reply:
    return Reply(_shown(call.door, _found(call, Right.READ)))


def _where(message: ScheduledMessage) -> tuple[str, str]:
    """(exchange, routing key)."""
    if (message.exchange is None) == (message.queue is None) or message.queue == "":
        raise Problem(Code.INVALID, "say where the message goes: exchange or queue")
    if message.queue is not None:
        if message.key:
            raise Problem(Code.INVALID, "key belongs to exchange: a queue gets the message by its name")
        return DEFAULT_EXCHANGE, message.queue
    return message.exchange or DEFAULT_EXCHANGE, message.key


def _check_headers(message: ScheduledMessage) -> None:
    for name in message.headers:
        if name in _OF_A_PUBLISH:
            raise Problem(Code.INVALID, f"the header '{name}' cannot be given here: {_OF_A_PUBLISH[name]}")


async def put_schedule(call: Call[SchedulePath, Parameters, NewSchedule]) -> Reply:
    door, asked, message = call.door, call.body, call.body.message
    vhost, name = _split(call.path.schedule)
    call.visitor.require_vhost(vhost)
    exchange_name, routing_key = _where(message)
    call.visitor.require(Right.WRITE, vhost, exchange_name)
    try:
        is_new = False
        before = door.schedules.get(vhost, name)
        call.visitor.require(Right.WRITE, vhost, before.definition.message.exchange)
    except NotFound:
        is_new = True
    exchange = door.broker.vhosts[vhost].router.exchange(exchange_name)
    if exchange is not None and exchange.internal:
        raise Problem(Code.FORBIDDEN, f"cannot publish to internal exchange '{exchange_name}'")
    if exchange is not None and exchange.kind == "topic":
        access = call.visitor.access
        if not access.may_use_key(call.visitor.name, vhost, exchange_name, Right.WRITE, routing_key):
            text = f"write access with key '{routing_key}' refused for user '{call.visitor.name}'"
            raise Problem(Code.FORBIDDEN, text)
    key = octets(routing_key, "text")
    if len(key) > 255:
        raise Problem(Code.INVALID, f"a routing key of {len(key)} bytes is longer than 255")
    try:
        value = value_octets(message.value, message.encoding)
        tags = collect(message.tags)
    except ValueError as error:
        raise Problem(Code.INVALID, str(error)) from None
    _check_headers(message)
    content_type = message.content_type
    is_json = message.encoding == "json" or (
        message.encoding is None and not bytes(message.value).startswith(b'"') and bytes(message.value)
    )
    if content_type is None and is_json:
        content_type = "application/json"
    properties = door.words.write(message.headers, content_type=content_type, tags=tags, persistent=message.persistent)
    definition = Definition(
        Cron(asked.cron, asked.zone),
        Scheduled(
            exchange_name,
            key,
            properties,
            value,
            int(Protocol.AMQP) | (PERSISTENT if message.persistent else 0),
            tags,
        ),
        Missed(asked.missed),
        asked.paused,
    )
    made = await door.schedules.put(vhost, name, definition)
    return Reply(_shown(door, made), status=201 if is_new else 200)


async def delete_schedule(call: Call[SchedulePath, Parameters, None]) -> Reply:
    found = _found(call, Right.WRITE)
    await call.door.schedules.delete(found.vhost, found.name)
    return Reply(status=204)


async def pause_schedule(call: Call[SchedulePath, Parameters, None]) -> Reply:
    found = _found(call, Right.WRITE)
    return Reply(_shown(call.door, await call.door.schedules.pause(found.vhost, found.name)))


async def resume_schedule(call: Call[SchedulePath, Parameters, None]) -> Reply:
    found = _found(call, Right.WRITE)
    return Reply(_shown(call.door, await call.door.schedules.resume(found.vhost, found.name)))


async def run_schedule(call: Call[SchedulePath, Parameters, None]) -> Reply:
    found = _found(call, Right.WRITE)
    await call.door.schedules.run_now(found.vhost, found.name)
    return Reply(_shown(call.door, call.door.schedules.get(found.vhost, found.name)))


def operations() -> list[Operation]:
    one = f"{PATH}/{{schedule}}"

    def action(verb: str, handler: Any, summary: str) -> Operation:
        return Operation(
            "POST",
            f"{one}/{verb}",
            handler,
            summary,
            parameters=SchedulePath,
            answers={200: ScheduleOut},
            problems=(Code.NOT_FOUND,),
        )

    return [
        Operation("GET", PATH, list_schedules, "List schedules", query=ListQuery, answers={200: ScheduleList}),
        Operation(
            "GET",
            one,
            get_schedule,
            "Describe a schedule",
            parameters=SchedulePath,
            answers={200: ScheduleOut},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "PUT",
            one,
            put_schedule,
            "Create or change a schedule",
            description="It runs as it says from now on; runs of before are not made up for.",
            parameters=SchedulePath,
            body=NewSchedule,
            answers={200: ScheduleOut, 201: ScheduleOut},
            problems=(Code.NOT_FOUND, Code.INVALID),
            large=True,
        ),
        Operation(
            "DELETE",
            one,
            delete_schedule,
            "Delete a schedule",
            parameters=SchedulePath,
            answers={204: None},
            problems=(Code.NOT_FOUND,),
        ),
        action("pause", pause_schedule, "Pause a schedule"),
        action("resume", resume_schedule, "Let a paused schedule run again"),
        action("run", run_schedule, "Publish its message once, now"),
    ]
