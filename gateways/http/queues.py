"""Queues over HTTP: list, describe, peek, rewind, purge, delete; exchanges and bindings. Driver.

A queue's name in a path is that of vhost `/`, or `vhost|name`. Offsets of a queue are its own numbers 0, 1, 2... of
what it has received, the same that AMQP's readers know as `x-stream-offset`.
"""

from base64 import b64encode
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from msgspec import Meta

from headrace.controller.table import Table
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import RecordBatch
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.lane import spans_of
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.reading import sequence_at
from headrace.gateways.delivery.rewind import Rewind
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.topics import DEFAULT_VHOST, TopicKind, TopicName, parse_name
from headrace.gateways.delivery.vhost import VirtualHost
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Message, shown, time_us_of
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/queues"
LIMIT_MAX = 10_000
PEEK_MAX = 1000
PEEK_BYTES_MAX = 16 * 1024 * 1024
_PER_TURN = 200
_NUMBER_MAX = 2**62

Number = Annotated[int, Meta(ge=-_NUMBER_MAX, le=_NUMBER_MAX)]


class QueuePath(Parameters, frozen=True, kw_only=True):
    queue: Annotated[str, Meta(min_length=1, description="`orders` of vhost `/`, or `vhost|orders`")]


class QueueSummary(Answer, frozen=True, kw_only=True):
    name: str
    vhost: str
    type: Literal["classic", "quorum", "stream"]
    state: Annotated[Literal["running", "idle"], Meta(description="idle: nobody consumes from it")]
    ready: Annotated[int, Meta(description="messages that wait for consumers")]
    unacked: Annotated[int, Meta(description="messages that consumers hold")]
    consumers: int
    durable: bool
    exclusive: bool
    auto_delete: bool
    policy: Annotated[str | None, Meta(description="the policy that applies to it")]


class QueueDescription(QueueSummary, frozen=True, kw_only=True):
    arguments: dict[str, Any]
    policy_definition: dict[str, Any]
    first_offset: Annotated[int, Meta(description="the first of its numbers that can be read or rewound to")]
    next_offset: Annotated[int, Meta(description="the number that the next message gets")]
    delivered: Annotated[int, Meta(description="since the broker started, as all that follow")]
    acked: int
    returned: int
    expired: int
    dropped: int
    bindings: "list[BindingOut]"


class BindingOut(Answer, frozen=True, kw_only=True):
    source: str
    destination: str
    destination_kind: Literal["queue", "exchange"]
    routing_key: str
    arguments: dict[str, Any]


class QueueList(Answer, frozen=True, kw_only=True):
    queues: list[QueueSummary]
    more: Annotated[bool, Meta(description="there are more than the limit")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    vhost: Annotated[str | None, Meta(description="in this vhost only")] = None
    after: Annotated[str, Meta(description="those that come behind this one (`name`, or `vhost|name`)")] = ""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 1000


class PeekQuery(Parameters, frozen=True, kw_only=True):
    offset: Annotated[
        Number | None,
        Meta(
            description="a number of the queue's: what it received from there on, done with or not; negative: so many "
            "before the end. Not given: what is ready, in the order in which consumers will get it"
        ),
    ] = None
    limit: Annotated[int, Meta(ge=1, le=PEEK_MAX)] = 10
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8")] = "auto"


class Peeked(Answer, frozen=True, kw_only=True):
    messages: Annotated[
        list[Message], Meta(description="`partition` and `offset` are those of the stream in which a message lies")
    ]
    offset: Annotated[int | None, Meta(description="the queue's number of the first; null without an offset")]
    next_offset: int | None


class RewindTo(Body, frozen=True, kw_only=True):
    """One of the two."""

    offset: Annotated[Number | None, Meta(description="a number of the queue's; negative: so many before its end")] = (
        None
    )
    timestamp: Annotated[str | None, Meta(description="ms since 1970, or RFC 3339")] = None


class Rewound(Answer, frozen=True, kw_only=True):
    offset: Annotated[int, Meta(description="where it was rewound to")]
    ready: Annotated[int, Meta(description="messages that are ready now")]


class Purged(Answer, frozen=True, kw_only=True):
    purged: int


class DeleteQuery(Parameters, frozen=True, kw_only=True):
    if_unused: Annotated[bool, Meta(description="not while it has consumers")] = False
    if_empty: Annotated[bool, Meta(description="not while messages are ready")] = False


class ExchangeOut(Answer, frozen=True, kw_only=True):
    name: str
    vhost: str
    type: str
    durable: bool
    auto_delete: bool
    internal: bool
    arguments: dict[str, Any]


class ExchangeList(Answer, frozen=True, kw_only=True):
    exchanges: list[ExchangeOut]


class BindingList(Answer, frozen=True, kw_only=True):
    bindings: list[BindingOut]


class VhostQuery(Parameters, frozen=True, kw_only=True):
    vhost: str = DEFAULT_VHOST


class BindingQuery(VhostQuery, frozen=True, kw_only=True):
    source: Annotated[str | None, Meta(description="from this exchange only")] = None


# -- finding ----------------------------------------------------------------------------------------------------------


def _found(call: Call[QueuePath, Any, Any], *rights: Right) -> tuple[VirtualHost, Queue]:
    return queue_named(call.door, call.visitor, call.path.queue, *rights)


def queue_named(door: "HttpDoor", visitor: Visitor, text: str, *rights: Right) -> tuple[VirtualHost, Queue]:
    """The queue that a path or a body names, for somebody who has these rights to it."""
    asked = _name(text)
    visitor.require_vhost(asked.vhost)
    for right in rights:
        visitor.require(right, asked.vhost, asked.name)
    host = door.broker.vhosts[asked.vhost]
    return host, host.queue(asked.name)


def _name(text: str) -> TopicName:
    name = parse_name(text)
    if name.kind is TopicKind.EXCHANGE:
        raise Problem(Code.INVALID_PARAMETER, f"'{text}' is no queue")
    return name


def _check_free(queue: Queue) -> None:
    if queue.owner is not None:
        raise Problem(Code.IN_USE, f"queue '{queue.name}' is exclusive to another connection")


def plain_text(text: str) -> str:
    """Octets that are no UTF-8 are written out."""
    return text.encode("utf-8", "backslashreplace").decode()


def _plain(table: Table) -> dict[str, Any]:
    return {plain_text(name): _plain_value(value) for name, value in table.items()}


def _plain_value(value: object) -> Any:
    match value:
        case Table():
            return _plain(value)
        case str():
            return plain_text(value)
        case bytes():
            return {"base64": b64encode(value).decode()}
        case bool() | int() | float() | None:
            return value
        case tuple() | list():
            return [_plain_value(one) for one in value]
        case _:
            return str(value)


def _summary(door: "HttpDoor", host: VirtualHost, queue: Queue) -> dict[str, Any]:
    kind = queue.arguments.get("x-queue-type")
    policy = door.broker.effective_policy(host.name, queue.name, queue.arguments)
    return {
        "name": plain_text(queue.name),
        "vhost": plain_text(host.name),
        "type": kind if kind in ("quorum", "stream") else "classic",
        "state": "idle" if queue.is_unused else "running",
        "ready": queue.ready_count,
        "unacked": queue.unacked_count,
        "consumers": queue.consumer_count,
        "durable": queue.declared_durable,
        "exclusive": queue.owner is not None,
        "auto_delete": queue.auto_delete,
        "policy": None if policy is None else policy.name,
    }


# -- handlers ---------------------------------------------------------------------------------------------------------


async def list_queues(call: Call[Parameters, ListQuery, None]) -> Reply:
    """Those that the caller may read or configure."""
    query, door = call.query, call.door
    if query.vhost is not None:
        call.visitor.require_vhost(query.vhost)
    listed = door.topics.names((TopicKind.QUEUE,), None if query.vhost is None else [query.vhost])
    names = [TopicName(one.vhost, None, one.name) for one in listed]
    found: list[QueueSummary] = []
    for place, name in enumerate(sorted((one for one in names if one.text > query.after), key=lambda one: one.text)):
        if place % _PER_TURN == 0:
            await trio.lowlevel.checkpoint()
        host = door.broker.vhosts.get(name.vhost)
        queue = None if host is None else host.queues.get(name.name)
        if host is None or queue is None or not _may_see(call.visitor, name.vhost, name.name):
            continue
        if len(found) == query.limit:
            return Reply(QueueList(queues=found, more=True))
        found.append(QueueSummary(**_summary(door, host, queue)))
    return Reply(QueueList(queues=found, more=False))


def _may_see(visitor: Visitor, vhost: str, name: str) -> bool:
    return any(visitor.may(right, vhost, name) for right in (Right.READ, Right.CONFIGURE))


async def get_queue(call: Call[QueuePath, Parameters, None]) -> Reply:
    host, queue = _found(call, Right.READ)
    policy = call.door.broker.effective_policy(host.name, queue.name, queue.arguments)
    bindings = [
        _binding(one.source, queue.name, "queue", one.key, one.arguments)
        for one in host.router.bindings_to_queue(queue)
    ]
    return Reply(
        QueueDescription(
            **_summary(call.door, host, queue),
            arguments=_plain(queue.arguments),
            policy_definition={} if policy is None else _plain(policy.definition),
            first_offset=queue.history.first_seq,
            next_offset=queue.history.next_seq,
            delivered=queue.delivered_count,
            acked=queue.acked_count,
            returned=queue.returned_count,
            expired=queue.expired_count,
            dropped=queue.dropped_count,
            bindings=bindings,
        )
    )


def _binding(
    source: str, destination: str, kind: Literal["queue", "exchange"], key: str, arguments: Table
) -> BindingOut:
    return BindingOut(
        source=plain_text(source),
        destination=plain_text(destination),
        destination_kind=kind,
        routing_key=plain_text(key),
        arguments=_plain(arguments),
    )


async def peek_messages(call: Call[QueuePath, PeekQuery, None]) -> Reply:
    _host, queue = _found(call, Right.READ)
    _check_free(queue)
    query = call.query
    start = None
    if query.offset is None and not queue.settings.stream:
        # Whoever sees offsets sees committed records only (K3).
        for source in {source for lane in queue.lanes for source in lane.applied}:
            assert isinstance(source, PartitionLog)
            await call.door.broker.wait_committed(source, source.end)
        runs = (run for lane in reversed(queue.lanes) for run in lane.ready_runs())
        records: Iterator[tuple[int | None, int, RecordBatch, int]] = (
            (None, 0, batch, index) for batch, first, last in runs for index in range(first, last)
        )
    else:
        # What has arrived gets its numbers for good with the journal (history.py).
        await call.door.broker.write_journal()
        start = _number(queue, query.offset if query.offset is not None else 0)
        records = _received(queue, start)
    messages: list[Message] = []
    following, room = start, PEEK_BYTES_MAX
    for number, partition, batch, index in records:
        room -= len(batch.values[index])
        if len(messages) == query.limit or (messages and room < 0):
            break
        if not messages and number is not None:
            start = number
        following = None if number is None else number + 1
        messages.append(shown(call.door.words, partition, batch, index, base64=query.encoding == "base64"))
    return Reply(Peeked(messages=messages, offset=start, next_offset=following))


def _number(queue: Queue, asked: int) -> int:
    history = queue.history
    number = asked if asked >= 0 else history.next_seq + asked
    return max(history.first_seq, min(number, history.next_seq))


def _received(queue: Queue, number: int) -> Iterator[tuple[int | None, int, RecordBatch, int]]:
    """(number, partition, batch, index) of what the queue has received and readers may see."""
    history = queue.history
    while (piece := history.piece(number, None)) is not None:
        source = piece.source
        end = piece.seq + piece.count
        if source is not None and source.log_start < piece.end:
            # Numbers are certain from the end of a piece: what retention took was at its beginning.
            found: list[tuple[RecordBatch, int]] = []
            offset = max(piece.first, int(source.log_start))
            upto = min(piece.end, int(source.high_watermark))
            while offset < upto:
                for run in source.read(offset, end=upto):
                    spans = [(run.first, run.last)]
                    if not piece.exact:
                        spans = list(spans_of(run.batch, run.first, run.last, queue.view_id))
                    found += ((run.batch, index) for low, high in spans for index in range(low, high))
                    offset = int(run.batch.next_offset)
            if upto < piece.end:
                # The rest is not committed yet.
                for place, (batch, index) in enumerate(found, start=piece.seq):
                    if place >= number:
                        yield place, source.partition, batch, index
                return
            for place, (batch, index) in enumerate(found, start=end - len(found)):
                if place >= number:
                    yield place, source.partition, batch, index
        number = end


async def rewind_queue(call: Call[QueuePath, Parameters, RewindTo]) -> Reply:
    _host, queue = _found(call, Right.READ, Right.CONFIGURE)
    _check_free(queue)
    body = call.body
    if (body.offset is None) == (body.timestamp is None):
        raise Problem(Code.INVALID, "give offset or timestamp, one of the two")
    if body.timestamp is not None:
        number = sequence_at(queue.history, queue.view_id, time_us_of(body.timestamp))
    else:
        assert body.offset is not None
        number = body.offset
    number = _number(queue, number)
    ready = await Rewind(call.door.broker, queue, number).run()
    return Reply(Rewound(offset=number, ready=ready))


async def purge_queue(call: Call[QueuePath, Parameters, None]) -> Reply:
    _host, queue = _found(call, Right.READ)
    _check_free(queue)
    if queue.settings.stream:
        raise Problem(Code.REFUSED, f"queue '{queue.name}' is a stream: nothing can be taken out of it")
    count = queue.purge()
    await call.door.broker.write_journal()
    return Reply(Purged(purged=count))


async def delete_queue(call: Call[QueuePath, DeleteQuery, None]) -> Reply:
    host, queue = _found(call, Right.CONFIGURE)
    _check_free(queue)
    query = call.query

    def holds() -> bool:
        return not (query.if_unused and not queue.is_unused) and not (query.if_empty and queue.ready_count)

    await host.delete_queue(queue, holds)
    if not queue.deleted:
        told = f"queue '{queue.name}' has {queue.consumer_count} consumers and {queue.ready_count} messages"
        raise Problem(Code.IN_USE, told)
    return Reply(status=204)


async def list_exchanges(call: Call[Parameters, VhostQuery, None]) -> Reply:
    call.visitor.require_vhost(call.query.vhost)
    host = call.door.broker.vhosts[call.query.vhost]
    found = [
        ExchangeOut(
            name=plain_text(one.name),
            vhost=plain_text(host.name),
            type=one.type,
            durable=one.durable,
            auto_delete=one.auto_delete,
            internal=one.internal,
            arguments=_plain(one.arguments),
        )
        for one in host.router.exchanges()
        if one.name != DEFAULT_EXCHANGE and _may_see(call.visitor, host.name, one.name)
    ]
    return Reply(ExchangeList(exchanges=sorted(found, key=lambda one: one.name)))


async def list_bindings(call: Call[Parameters, BindingQuery, None]) -> Reply:
    call.visitor.require_vhost(call.query.vhost)
    host = call.door.broker.vhosts[call.query.vhost]
    sources = [one.name for one in host.router.exchanges() if one.name != DEFAULT_EXCHANGE]
    if call.query.source is not None:
        call.visitor.require(Right.READ, host.name, call.query.source)
        sources = [one for one in sources if one == call.query.source]
    found: list[BindingOut] = []
    for source in sorted(sources):
        if not _may_see(call.visitor, host.name, source):
            continue
        for one in host.router.bindings_from(source):
            to_queue = isinstance(one.destination, Queue)
            name = one.destination.name if isinstance(one.destination, Queue) else one.destination
            found.append(_binding(source, name, "queue" if to_queue else "exchange", one.key, one.arguments))
        await trio.lowlevel.checkpoint()
    return Reply(BindingList(bindings=found))


def operations() -> list[Operation]:
    one = f"{PATH}/{{queue}}"
    return [
        Operation("GET", PATH, list_queues, "List queues", query=ListQuery, answers={200: QueueList}),
        Operation(
            "GET",
            one,
            get_queue,
            "Describe a queue",
            parameters=QueuePath,
            answers={200: QueueDescription},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "DELETE",
            one,
            delete_queue,
            "Delete a queue with its messages",
            parameters=QueuePath,
            query=DeleteQuery,
            answers={204: None},
            problems=(Code.NOT_FOUND, Code.IN_USE),
        ),
        Operation(
            "GET",
            f"{one}/messages",
            peek_messages,
            "Look at messages of a queue without taking them",
            parameters=QueuePath,
            query=PeekQuery,
            answers={200: Peeked},
            problems=(Code.NOT_FOUND, Code.IN_USE),
        ),
        Operation(
            "DELETE",
            f"{one}/messages",
            purge_queue,
            "Purge a queue",
            "Settles everything that is ready; what consumers hold stays with them.",
            parameters=QueuePath,
            answers={200: Purged},
            problems=(Code.NOT_FOUND, Code.IN_USE, Code.REFUSED),
        ),
        Operation(
            "POST",
            f"{one}/rewind",
            rewind_queue,
            "Rewind a queue",
            "What it received from there on is ready once more, in its old order: what was acknowledged, dead-lettered "
            "or dropped too. What consumers hold at that moment comes again.",
            parameters=QueuePath,
            body=RewindTo,
            answers={200: Rewound},
            problems=(Code.NOT_FOUND, Code.IN_USE, Code.REFUSED),
        ),
        Operation(
            "GET",
            "/api/v1/exchanges",
            list_exchanges,
            "List the exchanges of a vhost",
            query=VhostQuery,
            answers={200: ExchangeList},
        ),
        Operation(
            "GET",
            "/api/v1/bindings",
            list_bindings,
            "List the bindings of a vhost",
            query=BindingQuery,
            answers={200: BindingList},
        ),
    ]
