"""Stages over HTTP: messages that wait for a commit, and the commits that publish a batch whole and once. Driver.

    POST /api/v1/topics/{topic}/stages       what one task of a batch brings, as often as it likes
    POST /api/v1/stages/commit               publish these stages as batch n of a query; repeated, it does nothing
    POST /api/v1/stages/abort                these will not be committed

To stage needs what publishing needs: the right to write to the topic, and with a topic exchange the right to the keys;
the commit asks again. Stages and queries are their user's own. Neighbours: publishing.py checks messages,
gateways/delivery/staging.py keeps and carries out, spark/sink.py is the client it was made for.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Annotated
from uuid import UUID

import trio
from msgspec import Meta

from headrace.core_log.record import PERSISTENT, Protocol
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.staging_state import BY_KEY, Chunk, Stage
from headrace.gateways.delivery.topics import TopicKind, TopicName
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.publishing import BATCH_MAX, Batch, NewMessage, Ready, check_alarms, place_of
from headrace.gateways.http.records import time_text
from headrace.gateways.http.topics import PATH as TOPICS_PATH
from headrace.gateways.http.topics import TopicPath

PATH = "/api/v1/stages"
# A chunk is one record of the log: not one for each message, and not too much to be read at once.
CHUNK_COUNT = 500
CHUNK_BYTES = 256 * 1024
STAGES_MAX = 100_000
LIMIT_MAX = 1000
_NUMBER_MAX = 2**63 - 1

QueryName = Annotated[
    str, Meta(min_length=1, max_length=255, description="who commits batches, in order: a streaming query, or a job")
]
BatchNumber = Annotated[int, Meta(ge=0, le=_NUMBER_MAX, description="counts up from batch to batch of a query")]
StageIds = Annotated[list[UUID], Meta(max_length=STAGES_MAX)]


class NewStage(Body, frozen=True, kw_only=True):
    query: QueryName
    batch: BatchNumber
    partition: Annotated[int, Meta(ge=0, description="which task of the batch brings them, for people who look")] = 0
    attempt: Annotated[int, Meta(ge=0, description="and at which of its attempts")] = 0
    messages: Annotated[
        list[NewMessage], Meta(min_length=1, max_length=BATCH_MAX, description="without producer_id and sequence")
    ]


class StageOut(Answer, frozen=True, kw_only=True):
    id: UUID
    query: str
    batch: int
    partition: int
    attempt: int
    topic: str
    messages: int
    bytes: Annotated[int, Meta(description="that count towards staging.bytes_max")]
    created_at: str
    expires_at: str


class StageList(Answer, frozen=True, kw_only=True):
    stages: Annotated[list[StageOut], Meta(description="the oldest first")]
    total: int


class StagesQuery(Parameters, frozen=True, kw_only=True):
    query: Annotated[str | None, Meta(description="of this query only")] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX)] = 100


class NewCommit(Body, frozen=True, kw_only=True):
    query: QueryName
    batch: BatchNumber
    stages: Annotated[StageIds, Meta(description="in the order in which they are published; none: an empty batch")]


class CommitOut(Answer, frozen=True, kw_only=True):
    query: str
    batch: int
    messages: Annotated[int, Meta(description="how many this commit has published")]
    repeated: Annotated[bool, Meta(description="this batch or a later one was committed before: nothing was done")]


class NewAbort(Body, frozen=True, kw_only=True):
    stages: StageIds


class AbortOut(Answer, frozen=True, kw_only=True):
    aborted: Annotated[int, Meta(description="how many of them there were")]


class QueryPath(Parameters, frozen=True, kw_only=True):
    query: Annotated[str, Meta(min_length=1)]


class QueryOut(Answer, frozen=True, kw_only=True):
    query: str
    last_batch: Annotated[int | None, Meta(description="this batch and all before count as published")]
    pending_batch: Annotated[int | None, Meta(description="decided, and being carried out")]
    used_at: str


async def stage_messages(call: Call[TopicPath, Parameters, NewStage]) -> Reply:
    door, asked = call.door, call.body
    place = place_of(door, call.visitor, call.path.topic)
    check_alarms(door)
    for index, message in enumerate(asked.messages):
        if message.producer_id is not None or message.sequence is not None:
            raise Problem(Code.INVALID, "staged messages have numbers of their own, and no producer_id", index=index)
    ready = await Batch(door, call.visitor, place).checked(asked.messages)
    stage = await door.staging.stage(
        call.visitor.name,
        asked.query,
        asked.batch,
        place,
        [chunk async for chunk in _chunks(ready, asked.messages)],
        partition=asked.partition,
        attempt=asked.attempt,
    )
    return Reply(_shown(stage, door.staging.config.expiry_ms), status=201)


async def _chunks(ready: Sequence[Ready], messages: Sequence[NewMessage]) -> AsyncIterator[Chunk]:
    for together in _cut(ready):
        yield _chunk(together, messages)
        await trio.lowlevel.checkpoint()


def _cut(ready: Sequence[Ready]) -> Iterator[Sequence[Ready]]:
    low = size = 0
    for high, one in enumerate(ready):
        if high > low and (high - low == CHUNK_COUNT or size + len(one.value) > CHUNK_BYTES):
            yield ready[low:high]
            low, size = high, 0
        size += len(one.value) + len(one.properties)
    yield ready[low:]


def _chunk(ready: Sequence[Ready], messages: Sequence[NewMessage]) -> Chunk:
    given = [messages[one.index].partition for one in ready]
    return Chunk(
        keys=[one.key if one.target is None else one.target.key for one in ready],
        properties=[one.properties for one in ready],
        values=[one.value for one in ready],
        headers=[list(one.headers) for one in ready],
        tags=[list(one.tags) for one in ready],
        attributes=[
            int(Protocol.NEUTRAL if one.target is None else Protocol.AMQP) | (PERSISTENT if one.persistent else 0)
            for one in ready
        ],
        partitions=[BY_KEY if one is None else one for one in given],
        due_us=[one.due_us for one in ready],
        ids=[one.id for one in ready],
    )


def _shown(stage: Stage, expiry_ms: int) -> StageOut:
    return StageOut(
        id=stage.id,
        query=stage.query,
        batch=stage.batch,
        partition=stage.partition,
        attempt=stage.attempt,
        topic=TopicName(stage.vhost, TopicKind(stage.kind), stage.name).text,
        messages=stage.count,
        bytes=stage.byte_count,
        created_at=time_text(stage.made_us),
        expires_at=time_text(stage.made_us + expiry_ms * 1000),
    )


async def list_stages(call: Call[Parameters, StagesQuery, None]) -> Reply:
    staging = call.door.staging
    found = staging.stages(call.visitor.name, call.query.query)
    shown = [_shown(one, staging.config.expiry_ms) for one in found[: call.query.limit]]
    return Reply(StageList(stages=shown, total=len(found)))


async def commit_stages(call: Call[Parameters, Parameters, NewCommit]) -> Reply:
    door, visitor, asked = call.door, call.visitor, call.body
    check_alarms(door)

    def allowed(stage: Stage, key: bytes) -> None:
        exchange = DEFAULT_EXCHANGE if stage.kind == TopicKind.QUEUE else stage.name
        visitor.require(Right.WRITE, stage.vhost, exchange)
        found = door.broker.vhosts[stage.vhost].router.exchange(exchange)
        if stage.kind == TopicKind.EXCHANGE and found is not None and found.kind == "topic":
            text = key.decode("utf-8", "surrogateescape")
            if not visitor.access.may_use_key(visitor.name, stage.vhost, exchange, Right.WRITE, text):
                raise Problem(Code.FORBIDDEN, f"write access with key '{text}' refused for user '{visitor.name}'")

    done = await door.staging.commit(visitor.name, asked.query, asked.batch, asked.stages, allowed)
    return Reply(CommitOut(query=asked.query, batch=asked.batch, messages=done.count, repeated=done.repeated))


async def abort_stages(call: Call[Parameters, Parameters, NewAbort]) -> Reply:
    return Reply(AbortOut(aborted=call.door.staging.abort(call.visitor.name, call.body.stages)))


async def get_query(call: Call[QueryPath, Parameters, None]) -> Reply:
    found = call.door.staging.query(call.visitor.name, call.path.query)
    return Reply(
        QueryOut(
            query=found.name,
            last_batch=found.last_batch,
            pending_batch=None if found.pending is None else found.pending.batch,
            used_at=time_text(found.used_us),
        )
    )


async def forget_query(call: Call[QueryPath, Parameters, None]) -> Reply:
    door, user, query = call.door, call.visitor.name, call.path.query
    last = door.staging.query(user, query).last_batch
    await door.staging.forget(user, query)
    await door.broker.audit.noted("query-forgotten", user, {"query": query, "last_batch": last})
    return Reply(status=204)


def operations() -> list[Operation]:
    return [
        Operation(
            "POST",
            f"{TOPICS_PATH}/{{topic}}/stages",
            stage_messages,
            "Stage messages for a commit",
            "They are durable, and nobody sees them before their commit; without one they are gone after "
            "staging.expiry_ms. Authorised and checked as a publish; nothing is staged if one of them is not lawful.",
            parameters=TopicPath,
            body=NewStage,
            answers={201: StageOut},
            problems=(
                Code.NOT_FOUND,
                Code.LIMIT_REACHED,
                Code.ALARM,
                Code.STORAGE_FAILED,
                Code.DISK_FULL,
            ),
            large=True,
        ),
        Operation(
            "GET",
            PATH,
            list_stages,
            "List your stages",
            query=StagesQuery,
            answers={200: StageList},
        ),
        Operation(
            "POST",
            f"{PATH}/commit",
            commit_stages,
            "Publish stages as one batch of a query, once",
            "All of it or nothing, also over a crash. A batch at or below the query's last one is answered with "
            "`repeated` and not published again; its stages are dropped.",
            body=NewCommit,
            answers={200: CommitOut},
            problems=(
                Code.NOT_FOUND,
                Code.FORBIDDEN,
                Code.QUEUE_FULL,
                Code.LIMIT_REACHED,
                Code.ALARM,
                Code.STORAGE_FAILED,
                Code.DISK_FULL,
            ),
            large=True,
        ),
        Operation(
            "POST",
            f"{PATH}/abort",
            abort_stages,
            "Drop stages that will not be committed",
            body=NewAbort,
            answers={200: AbortOut},
            problems=(Code.DISK_FULL,),
            large=True,
        ),
        Operation(
            "GET",
            f"{PATH}/queries/{{query}}",
            get_query,
            "Which batch of a query was committed last",
            parameters=QueryPath,
            answers={200: QueryOut},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "DELETE",
            f"{PATH}/queries/{{query}}",
            forget_query,
            "Forget a query: its batches can be committed again",
            "For a job that is to run a second time under its name. Audited.",
            parameters=QueryPath,
            answers={204: None},
            problems=(Code.NOT_FOUND, Code.IN_USE, Code.DISK_FULL),
        ),
    ]
