"""Topics over HTTP: create, configure, grow, delete, list, describe. Driver; delivery/topics.py does the work.

A topic's name in a path is percent-encoded; it may say more than a name (`exchange:orders`, `vhost|orders`).
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from msgspec import UNSET, Meta, UnsetType

from headrace.controller.entities import PARTITIONS_MAX, Topic
from headrace.controller.table import Table
from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.topics import DEFAULT_VHOST, Place, TopicKind, TopicName, parse_name
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code
from headrace.gateways.http.visitor import Visitor
from headrace.gateways.http.waiting import Waiting, count_of, intake_of, maybe_waiting

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/topics"
LIMIT_MAX = 10_000
# So many are looked at before others on the loop get a turn.
_PER_TURN = 200
_INTEGER_MAX = 2**53

PartitionCount = Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)]
Retention = Annotated[int, Meta(ge=1, le=_INTEGER_MAX)]


class TopicPath(Parameters, frozen=True, kw_only=True):
    topic: Annotated[str, Meta(min_length=1, description="`orders`, `exchange:orders`, `queue:orders`, `vhost|orders`")]


class PartitionPath(TopicPath, frozen=True, kw_only=True):
    partition: Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)]


class Settings(Body, frozen=True, kw_only=True):
    """How a topic's log is kept. What is left out stays as it is; null gives back the node's default."""

    durability: Annotated[
        Literal["sync", "interval", "os"] | UnsetType | None,
        Meta(description="when a record counts as committed"),
    ] = UNSET
    compression: Literal["none", "lz4", "auto"] | UnsetType | None = UNSET
    retention_ms: Annotated[Retention | UnsetType | None, Meta(description="age at which records may go")] = UNSET
    retention_bytes: Annotated[
        Retention | UnsetType | None, Meta(description="size of a partition above which its oldest records may go")
    ] = UNSET


class NewTopic(Settings, frozen=True, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=255)]
    vhost: str = DEFAULT_VHOST
    partitions: PartitionCount = 1


class TopicChange(Settings, frozen=True, kw_only=True):
    partitions: Annotated[PartitionCount | UnsetType, Meta(description="not fewer than there are")] = UNSET


class Partition(Answer, frozen=True, kw_only=True):
    partition: int
    first_offset: Annotated[int, Meta(description="the oldest record there is")]
    end_offset: Annotated[int, Meta(description="where readers stop: the next record that is committed")]
    byte_count: Annotated[int, Meta(description="as stored")]


class TopicSummary(Answer, frozen=True, kw_only=True):
    name: str
    topic: Annotated[str, Meta(description="a name that leads here whatever else there is")]
    vhost: str
    kind: Annotated[
        Literal["topic", "exchange", "queue", "retry"],
        Meta(description="retry: what of a queue or consumer group waits for another attempt"),
    ]
    stream: Annotated[str, Meta(description="the same name later may be another stream")]
    partitions: int


class TopicSettings(Answer, frozen=True, kw_only=True):
    durability: str
    compression: str
    retention_ms: int | None
    retention_bytes: int | None


class TopicDescription(TopicSummary, frozen=True, kw_only=True):
    settings: Annotated[TopicSettings, Meta(description="as they count now, defaults included")]
    compacted: Annotated[bool, Meta(description="only the last record of each key is kept: not every offset has one")]
    partition_list: list[Partition]


class TopicList(Answer, frozen=True, kw_only=True):
    topics: list[TopicSummary]
    more: Annotated[bool, Meta(description="there are more than the limit")]


class ListQuery(Parameters, frozen=True, kw_only=True):
    vhost: Annotated[str | None, Meta(description="in this vhost only")] = None
    kind: Annotated[Literal["topic", "exchange", "queue"] | None, Meta(description="of this kind only")] = None
    after: Annotated[str, Meta(description="those whose `topic` comes behind this one")] = ""
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 1000


# -- finding ----------------------------------------------------------------------------------------------------------


def found(door: "HttpDoor", visitor: Visitor, right: Right, name: str) -> Place:
    """The place that a name leads to, for somebody who may do that there. Raises Problem and NotFound."""
    asked = parse_name(name)
    visitor.require_vhost(asked.vhost)
    # Asked before it is looked for: who may not see it does not hear whether it is there.
    visitor.require(right, asked.vhost, asked.name)
    return door.topics.resolve(asked)


def _summary(door: "HttpDoor", place: Place) -> dict[str, Any]:
    return {
        "name": place.name,
        "topic": place.public_name,
        "vhost": place.vhost,
        "kind": place.kind.value,
        "stream": str(place.stream_id),
        "partitions": door.topics.partition_count(place),
    }


def _description(door: "HttpDoor", place: Place) -> TopicDescription:
    logs = door.topics.logs_of(place.stream_id)
    config = logs[0].config if logs else door.topics.config_of(place)
    return TopicDescription(
        **_summary(door, place),
        settings=_settings(config),
        compacted=config.cleanup == "compact",
        partition_list=[_partition(log) for log in logs] if logs else [_nothing()],
    )


def _settings(config: LogConfig) -> TopicSettings:
    return TopicSettings(
        durability=config.durability,
        compression=config.compression,
        retention_ms=config.retention_ms,
        retention_bytes=config.retention_bytes,
    )


def _partition(log: PartitionLog) -> Partition:
    return Partition(
        partition=log.partition,
        first_offset=log.log_start,
        end_offset=log.high_watermark,
        byte_count=log.byte_count,
    )


def _nothing() -> Partition:
    """Of an exchange or queue to which nothing was ever written."""
    return Partition(partition=0, first_offset=0, end_offset=0, byte_count=0)


# -- handlers ---------------------------------------------------------------------------------------------------------


async def list_topics(call: Call[Parameters, ListQuery, None]) -> Reply:
    """Those that the caller may read or configure."""
    query, door = call.query, call.door
    if query.vhost is not None:
        call.visitor.require_vhost(query.vhost)
    shown: list[TopicSummary] = []
    for place, name in enumerate(_names(door, query)):
        if place % _PER_TURN == 0:
            await trio.lowlevel.checkpoint()
        may_see = any(call.visitor.may(right, name.vhost, name.name) for right in (Right.READ, Right.CONFIGURE))
        if not may_see or not door.topics.exists(name):
            continue
        if len(shown) == query.limit:
            return Reply(TopicList(topics=shown, more=True))
        shown.append(TopicSummary(**_summary(door, door.topics.resolve(name))))
    return Reply(TopicList(topics=shown, more=False))


def _names(door: "HttpDoor", query: ListQuery) -> list[TopicName]:
    kinds = TopicKind if query.kind is None else (TopicKind(query.kind),)
    names = door.topics.names(kinds, None if query.vhost is None else [query.vhost])
    return sorted((one for one in names if one.text > query.after), key=lambda one: one.text)


async def create_topic(call: Call[Parameters, Parameters, NewTopic]) -> Reply:
    body = call.body
    call.visitor.require_vhost(body.vhost)
    call.visitor.require(Right.CONFIGURE, body.vhost, body.name)
    settings = _changed(Table(), body)
    topic = await call.door.topics.create(body.vhost, body.name, body.partitions, settings)
    return Reply(_described(call.door, topic), status=201)


async def get_topic(call: Call[TopicPath, Parameters, None]) -> Reply:
    waiting = maybe_waiting(call.door, call.visitor, call.path.topic)
    if waiting is not None:
        return Reply(_described_waiting(call.door, waiting))
    return Reply(_description(call.door, found(call.door, call.visitor, Right.READ, call.path.topic)))


def _described_waiting(door: "HttpDoor", waiting: Waiting) -> TopicDescription:
    log = intake_of(door)
    return TopicDescription(
        name=waiting.name,
        topic=waiting.public_name,
        vhost=waiting.vhost,
        kind="retry",
        stream=str(log.stream_id),
        partitions=len(waiting.duties),
        settings=_settings(log.config),
        compacted=False,
        partition_list=[
            Partition(partition=number, first_offset=0, end_offset=count_of(door, waiting, number), byte_count=0)
            for number in waiting.duties
        ],
    )


async def change_topic(call: Call[TopicPath, Parameters, TopicChange]) -> Reply:
    place = found(call.door, call.visitor, Right.CONFIGURE, call.path.topic)
    body = call.body

    def changed(topic: Topic) -> Topic:
        count = topic.partition_count if body.partitions is UNSET else body.partitions
        return replace(topic, partition_count=count, settings=_changed(topic.settings, body))

    call.door.topics.topic(place)
    return Reply(_described(call.door, await call.door.topics.change(place.vhost, place.name, changed)))


async def delete_topic(call: Call[TopicPath, Parameters, None]) -> Reply:
    place = found(call.door, call.visitor, Right.CONFIGURE, call.path.topic)
    call.door.topics.topic(place)
    await call.door.topics.delete(place.vhost, place.name)
    return Reply(status=204)


def _described(door: "HttpDoor", topic: Topic) -> TopicDescription:
    return _description(door, Place(topic.vhost, TopicKind.TOPIC, topic.name, topic.stream))


def _changed(settings: Table, body: Settings) -> Table:
    """Settings in the words of an exchange's arguments."""
    values = dict(settings)
    for name in ("durability", "compression", "retention_ms", "retention_bytes"):
        value = getattr(body, name)
        argument = f"x-{name.replace('_', '-')}"
        if value is None:
            values.pop(argument, None)
        elif value is not UNSET:
            values[argument] = value
    return Table(values)


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            PATH,
            list_topics,
            "List topics",
            "Created topics, exchanges and queues that the caller may read or configure, in the order of `topic`.",
            query=ListQuery,
            answers={200: TopicList},
        ),
        Operation(
            "POST",
            PATH,
            create_topic,
            "Create a topic",
            body=NewTopic,
            answers={201: TopicDescription},
            problems=(Code.ALREADY_EXISTS, Code.DISK_FULL, Code.NOT_FOUND),
        ),
        Operation(
            "GET",
            f"{PATH}/{{topic}}",
            get_topic,
            "Describe a topic",
            parameters=TopicPath,
            answers={200: TopicDescription},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "PATCH",
            f"{PATH}/{{topic}}",
            change_topic,
            "Configure or grow a created topic",
            "Records stay in the partitions they were written to. When a topic grows, keys are dealt out anew over all "
            "partitions: records of one key from before and after may lie in different ones.",
            parameters=TopicPath,
            body=TopicChange,
            answers={200: TopicDescription},
            problems=(Code.NOT_FOUND, Code.DISK_FULL),
        ),
        Operation(
            "DELETE",
            f"{PATH}/{{topic}}",
            delete_topic,
            "Delete a created topic with its records",
            parameters=TopicPath,
            answers={204: None},
            problems=(Code.NOT_FOUND,),
        ),
    ]
