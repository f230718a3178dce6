"""Batches that are published whole and once, however often they are tried: stages and their commits. Driver.

    stage -> chunks in __staged, its entry in __stages        durable, and visible to nobody
    commit -> decided: the query's state names the stages      from here on it will be carried out, also after a crash
           -> published with the query's own numbers (K7)      what is there already is not published again
           -> done: the state names the batch as the last one  the stages are gone

A query is whoever commits batches, in the order of their numbers: a streaming query, or a job that has one batch. A
batch at or below the last one is answered and not published again, so a driver that does not know how its commit ended
brings the batch again, perhaps with its messages in other stages, and commits that. Messages in stages that nobody
commits are gone after a while, as are queries that commit nothing more.

A commit is refused, with nothing published, when one of its stages or topics is not there (any more), the user may not
write there (any more), or a queue that refuses publishes has no room for all of it. Once decided it is not given up: a
disk that is full is tried again, a topic that is deleted in between loses what was meant for it, and that is counted.

Queries belong to the user who commits them: nobody can spend another's batch numbers.
Neighbours: staging_state.py is what is written, the HTTP door asks (gateways/http/staging.py), spark/sink.py uses it.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

import trio

from headrace.controller.errors import InUse, Invalid, LimitReached, NotFound
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull, Refused, UnknownFormat
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import PERSISTENT, Headers, Producer
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.staging_config import StagingConfig
from headrace.gateways.delivery.staging_state import (
    BY_KEY,
    DATA_NAME,
    NAME_BYTES_MAX,
    STATE_NAME,
    Chosen,
    Chunk,
    Pending,
    Query,
    Stage,
    decode_chunk,
    decode_entry,
    encode_chunk,
    encode_query,
    encode_stage,
    query_key,
    stage_key,
)
from headrace.gateways.delivery.topics import Place, TopicKind, Topics, partition_of
from headrace.gateways.delivery.vhost import Target, VirtualHost

_log = logging.getLogger(__name__)

STATE_CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)
DATA_CONFIG = LogConfig(retention_ms=None, segment_bytes_max=64 * 1024 * 1024)
RETRY_S = 1.0
LOOK_S = 60.0
# Data of stages that are gone is let go of when there is so much of it, and at each look.
TRIM_BYTES = 64 * 1024 * 1024


class QueueFull(Refused):
    """A queue that refuses publishes has no room for a batch."""


@dataclass(frozen=True, slots=True)
class Committed:
    # How many messages were published by this commit.
    count: int
    # It was published before: nothing was done.
    repeated: bool


# Raises when the user may not publish to a stage's topic with this key.
Allowed = Callable[[Stage, bytes], None]


class _Known:
    """A query, and the commit that it is at."""

    __slots__ = ("done", "lock", "query")

    def __init__(self, query: Query) -> None:
        self.query = query
        # One commit of a query at a time.
        self.lock = trio.Lock()
        # Of the commit that was decided and is not done; set when it is.
        self.done: trio.Event | None = None


@dataclass(frozen=True, slots=True)
class _Run:
    """Messages of a chunk that are appended together."""

    indexes: Sequence[int]
    tags: tuple[str, ...]
    attributes: int
    # Of a created topic.
    partition: int = 0
    # Of an exchange's or queue's.
    target: Target | None = None
    is_delayed: bool = False


class Staging:
    def __init__(self, broker: Broker, topics: Topics, config: StagingConfig | None = None) -> None:
        """Before the broker is loaded: there are logs of its own."""
        self.config = config or StagingConfig()
        # What came of stages and commits.
        self.counts: Counter[str] = Counter(
            dict.fromkeys(("staged", "committed", "repeated", "published", "aborted", "expired", "dropped"), 0)
        )
        self.byte_count = 0
        self._broker = broker
        self._topics = topics
        self._state_log = broker.private_log(STATE_NAME, STATE_CONFIG)
        self._data_log = broker.private_log(DATA_NAME, DATA_CONFIG)
        self._stages: dict[UUID, Stage] = {}
        self._queries: dict[tuple[str, str], _Known] = {}
        # Stages that a commit looks at or carries out: they neither expire nor are aborted.
        self._held: Counter[UUID] = Counter()
        self._dead_bytes = 0
        # Stages whose chunks are written and whose entry is not: their chunks stay.
        self._arriving: dict[UUID, int] = {}
        self._decided: deque[_Known] = deque()
        self._wake = trio.Event()

    async def load(self) -> None:
        """As the logs have them. Once the broker is loaded."""
        kept: dict[bytes, bytes] = {}
        for _offset, key, value in await self._broker.env.worker.run(lambda: list(self._state_log.entries())):
            kept[key] = value
        for key, value in kept.items():
            if not value:
                continue
            try:
                entry = decode_entry(key, value)
            except UnknownFormat as error:
                _log.error("an entry was passed over: %s", error)
                continue
            if isinstance(entry, Stage):
                self._stages[entry.id] = entry
                self.byte_count += entry.byte_count
            else:
                known = self._queries[entry.user, entry.name] = _Known(entry)
                if entry.pending is not None:
                    self._held.update(one.stage for one in entry.pending.stages)
                    known.done = trio.Event()
                    self._decided.append(known)

    # -- asked from outside -------------------------------------------------------------------------------------

    @property
    def stage_count(self) -> int:
        return len(self._stages)

    @property
    def query_count(self) -> int:
        return len(self._queries)

    def stages(self, user: str | None = None, query: str | None = None) -> list[Stage]:
        """The oldest first."""
        return [
            one
            for one in sorted(self._stages.values(), key=lambda one: (one.made_us, one.id))
            if user in (None, one.user) and query in (None, one.query)
        ]

    def query(self, user: str, name: str) -> Query:
        known = self._queries.get((user, name))
        if known is None:
            raise NotFound(f"no query '{name}' of user '{user}' has committed anything that is remembered")
        return known.query

    async def stage(
        self, user: str, query: str, batch: int, place: Place, chunks: Sequence[Chunk], *, partition: int, attempt: int
    ) -> Stage:
        """Take messages for a topic; durable when this returns. LimitReached: there is no room for them."""
        if not query or len(query.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
            raise Invalid(f"the name of a query has 1 to {NAME_BYTES_MAX} bytes")
        values = [encode_chunk(one) for one in chunks]
        byte_count = sum(map(len, values))
        self._check_room(byte_count)
        made = self._broker.env.ids.uuid()
        now_us = self._broker.env.clock.wall_us()
        first = int(self._data_log.end)
        # The place in the log is taken before the append is waited for: two that come together have their own each.
        self._arriving[made] = first
        self.byte_count += byte_count
        try:
            appended = self._data_log.append(
                [stage_key(made)] * len(values),
                [b""] * len(values),
                values,
                timestamp_us=now_us,
                attributes=PERSISTENT,
            )
            end = int(appended.next_offset)
            await self._committed(self._data_log, end)
            stage = Stage(
                made,
                user,
                query,
                batch,
                partition,
                attempt,
                place.vhost,
                place.kind.value,
                place.name,
                place.stream_id,
                end - len(values),
                end,
                sum(map(len, chunks)),
                byte_count,
                now_us,
            )
            reached = self._write([stage_key(made)], [encode_stage(stage)])
            self._stages[made] = stage
        except BaseException:
            self._dead_bytes += byte_count
            self.byte_count -= byte_count
            raise
        finally:
            del self._arriving[made]
        self.counts["staged"] += stage.count
        await self._committed(self._state_log, reached)
        return stage

    def _check_room(self, byte_count: int) -> None:
        config = self.config
        if self.byte_count + byte_count > config.bytes_max:
            raise LimitReached(
                f"{self.byte_count} bytes wait in stages, and {byte_count} more would pass staging.bytes_max = "
                f"{config.bytes_max}: commit or abort some first"
            )
        if len(self._stages) >= config.stage_count_max:
            raise LimitReached(f"{len(self._stages)} stages wait, as many as there may be: commit or abort some first")

    async def commit(
        self, user: str, query: str, batch: int, stages: Sequence[UUID], allowed: Allowed = lambda stage, key: None
    ) -> Committed:
        """Publish what these stages hold, as this batch of the query: once, and all of it.

        Safe when this returns. Refused, nothing is published; who gives up waiting finds it done when asking again.
        """
        if len(set(stages)) < len(stages):
            raise Invalid("a stage is named twice")
        known = self._known(user, query)
        async with known.lock:
            while known.done is not None:
                await known.done.wait()
            last = known.query.last_batch
            if last is not None and batch <= last:
                self.counts["repeated"] += 1
                self._drop([one for one in stages if self._is_of(one, user, query)])
                return Committed(0, repeated=True)
            self._held.update(stages)
            try:
                found = [self._found(one, user, query, batch) for one in stages]
                await self._check(found, allowed)
                chosen = tuple(map(self._chosen, found))
                decided = replace(known.query, pending=Pending(batch, chosen), used_us=self._now_us())
                self._write([query_key(user, query)], [encode_query(decided)])
            except BaseException:
                self._release(stages)
                self._unknow(known)
                raise
            known.query = decided
            done = known.done = trio.Event()
            self._decided.append(known)
            self._wake.set()
            await done.wait()
            return Committed(sum(one.count for one in found), repeated=False)

    def abort(self, user: str, stages: Sequence[UUID]) -> int:
        """These will not be committed; returns how many there were. Those of a commit under way are left alone."""
        gone = [one for one in stages if one in self._stages and self._stages[one].user == user and not self._held[one]]
        self._drop(gone)
        self.counts["aborted"] += len(gone)
        return len(gone)

    async def forget(self, user: str, query: str) -> None:
        """Its batches count as never published: they can be committed again. InUse: it is at a commit."""
        self.query(user, query)
        known = self._queries[user, query]
        if known.done is not None or known.lock.locked():
            raise InUse(f"the query '{query}' is at a commit")
        await self._committed(self._state_log, self._forget([known]))

    # -- deciding -----------------------------------------------------------------------------------------------

    def _known(self, user: str, query: str) -> _Known:
        known = self._queries.get((user, query))
        if known is None:
            if len(self._queries) >= self.config.query_count_max:
                raise LimitReached(f"{len(self._queries)} queries are remembered, as many as there may be")
            made = Query(user, query, self._broker.env.ids.uuid(), self._now_us())
            known = self._queries[user, query] = _Known(made)
        return known

    def _unknow(self, known: _Known) -> None:
        """A query whose first commit was refused has nothing to be remembered by."""
        query = known.query
        if query.last_batch is None and not known.lock.statistics().tasks_waiting:
            del self._queries[query.user, query.name]

    def _is_of(self, stage: UUID, user: str, query: str) -> bool:
        found = self._stages.get(stage)
        return found is not None and (found.user, found.query) == (user, query)

    def _found(self, stage: UUID, user: str, query: str, batch: int) -> Stage:
        if not self._is_of(stage, user, query):
            raise NotFound(f"no stage '{stage}' of query '{query}': it was never made, was aborted or has expired")
        found = self._stages[stage]
        if found.batch != batch:
            raise Invalid(f"the stage '{stage}' is of batch {found.batch}, not {batch}")
        return found

    def _chosen(self, stage: Stage) -> Chosen:
        place = _place(stage)
        count = self._topics.partition_count(place)
        return Chosen(stage.id, count, self._topics.next_partition(place) if stage.kind == TopicKind.TOPIC else 0)

    async def _check(self, stages: Sequence[Stage], allowed: Allowed) -> None:
        """Raises what a commit is refused with."""
        room: dict[Queue, tuple[int, int]] = {}
        for stage in stages:
            if not self._topics.is_there(_place(stage)):
                raise NotFound(f"'{_place(stage).public_name}' was deleted since messages for it were staged")
            if stage.kind == TopicKind.TOPIC:
                allowed(stage, b"")
                continue
            host = self._broker.vhosts[stage.vhost]
            asked: set[bytes] = set()
            for chunk in self._chunks(stage):
                for key in {*chunk.keys} - asked:
                    allowed(stage, key)
                    asked.add(key)
                for run in self._runs(host, stage, _NO_CHOICE, chunk):
                    if run.target is not None and not run.is_delayed:
                        for queue in run.target.byte_limits:
                            count, byte_count = room.get(queue, (0, 0))
                            more = sum(len(chunk.values[index]) for index in run.indexes)
                            room[queue] = count + len(run.indexes), byte_count + more
                await trio.lowlevel.checkpoint()
        for queue, (count, byte_count) in room.items():
            if not queue.admits(count, byte_count):
                raise QueueFull(f"queue '{queue.name}' has no room for {count} messages of {byte_count} bytes")

    # -- carrying out -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out what is decided, and let go of what is old, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            while True:
                while self._decided:
                    nursery.start_soon(self._carry_out, self._decided.popleft())
                await self._wake.wait()
                self._wake = trio.Event()

    async def _carry_out(self, known: _Known) -> None:
        """Again and again, until it is done."""
        query, pending = known.query, known.query.pending
        assert pending is not None and known.done is not None
        await self._committed(self._state_log, int(self._state_log.end))
        while True:
            try:
                numbers = await self._publish(query, pending)
                done = replace(query, last_batch=pending.batch, numbers=numbers, pending=None, used_us=self._now_us())
                ids = [one.stage for one in pending.stages if one.stage in self._stages]
                keys = [query_key(query.user, query.name), *map(stage_key, ids)]
                reached = self._write(keys, [encode_query(done), *[b""] * len(ids)])
                break
            except DiskFull:
                _log.warning("a commit waits for room on the disk", extra={"query": query.name, "batch": pending.batch})
                await self._broker.env.clock.sleep(RETRY_S)
        self._let_go(ids)
        await self._committed(self._state_log, reached)
        self._release([one.stage for one in pending.stages])
        self.counts["committed"] += 1
        known.query = done
        known.done.set()
        known.done = None

    async def _publish(self, query: Query, pending: Pending) -> dict[TargetPartition, int]:
        """Everything of a commit that is not there yet; returns the numbers behind it. Safe when this returns."""
        numbers = dict(query.numbers)
        logs: set[PartitionLog] = set()
        for chosen in pending.stages:
            stage = self._stages.get(chosen.stage)
            if stage is None:
                _log.error("a stage of a commit is not there", extra={"query": query.name, "stage": str(chosen.stage)})
                continue
            for chunk in self._chunks(stage):
                self._carry(query, stage, chosen, chunk, numbers, logs)
                self._broker.on_ready()
                await trio.lowlevel.checkpoint()
        for log in logs:
            await self._committed(log, int(log.end))
        return numbers

    def _carry(
        self,
        query: Query,
        stage: Stage,
        chosen: Chosen,
        chunk: Chunk,
        numbers: dict[TargetPartition, int],
        logs: set[PartitionLog],
    ) -> None:
        host = self._broker.vhosts.get(stage.vhost)
        if host is None or not self._topics.is_there(_place(stage)):
            self._lose(stage, len(chunk))
            return
        for run in self._runs(host, stage, chosen, chunk):
            log = self._log_of(stage, run)
            if log is None:
                self._lose(stage, len(run.indexes))
                continue
            where = TargetPartition(log.stream_id, log.partition)
            number = numbers.get(where, 0)
            producer = Producer(query.owner.bytes, 0, number, dense=True)
            before = int(log.end)
            self._append(stage, run, chunk, log, producer, settled=query.numbers.get(where, 0))
            self.counts["published"] += int(log.end) - before
            numbers[where] = number + len(run.indexes)
            logs.add(log)

    def _append(
        self, stage: Stage, run: _Run, chunk: Chunk, log: PartitionLog, producer: Producer, *, settled: int
    ) -> None:
        broker = self._broker
        keys, properties, values = (
            [column[index] for index in run.indexes] for column in (chunk.keys, chunk.properties, chunk.values)
        )
        found: list[Headers] = [tuple((name, value) for name, value in chunk.headers[index]) for index in run.indexes]
        headers = found if any(found) else None
        if run.is_delayed:
            broker.delayed.park(
                _duty(stage),
                keys,
                properties,
                values,
                due_us=[chunk.due_us[index] for index in run.indexes],
                ids=[chunk.ids[index] for index in run.indexes],
                attributes=run.attributes,
                tags=run.tags,
                headers=headers,
                producer=producer,
            )
        elif run.target is not None:
            broker.publish_dense(
                run.target, producer, keys, properties, values, settled=settled, attributes=run.attributes
            )
        else:
            log.append_dense(
                producer,
                keys,
                properties,
                values,
                settled=settled,
                timestamp_us=self._now_us(),
                attributes=run.attributes,
                tags=run.tags,
                headers=headers,
            )
            broker.directory.committer.urgent(log)

    def _log_of(self, stage: Stage, run: _Run) -> PartitionLog | None:
        """Where it goes; None: there is nothing there any more."""
        if run.is_delayed:
            return self._broker.delayed.delays.intake
        if run.target is not None:
            return run.target.log
        logs = self._topics.logs_of(StreamId(stage.stream))
        return logs[run.partition] if run.partition < len(logs) else None

    def _lose(self, stage: Stage, count: int) -> None:
        self.counts["dropped"] += count
        _log.warning(
            "messages of a commit were dropped: their topic is gone",
            extra={"query": stage.query, "topic": _place(stage).public_name, "count": count},
        )

    def _runs(self, host: VirtualHost, stage: Stage, chosen: Chosen, chunk: Chunk) -> Iterator[_Run]:
        """A chunk by where its messages go; in their order, wherever that can be told."""
        delayed = [index for index, due_us in enumerate(chunk.due_us) if due_us]
        at_once = [index for index, due_us in enumerate(chunk.due_us) if not due_us]
        yield from _alike(chunk, delayed, lambda index: _DELAYED)
        if stage.kind == TopicKind.TOPIC:
            partitions = [_partition(chosen, chunk, index) for index in range(len(chunk))]
            at_once.sort(key=partitions.__getitem__)
            yield from _alike(chunk, at_once, partitions.__getitem__)
        else:
            targets = dict(zip(at_once, self._targets(host, stage, chunk, at_once), strict=True))
            yield from _alike(chunk, at_once, targets.__getitem__)

    def _targets(self, host: VirtualHost, stage: Stage, chunk: Chunk, indexes: Sequence[int]) -> Iterator[Target]:
        exchange = DEFAULT_EXCHANGE if stage.kind == TopicKind.QUEUE else stage.name
        known: dict[tuple[bytes, tuple[str, ...]], Target] = {}
        for index in indexes:
            key, tags = chunk.keys[index], tuple(chunk.tags[index])
            target = known.get((key, tags))
            if target is None:
                headers, copies = self._broker.fields_of(chunk.properties[index])
                text = key.decode("utf-8", "surrogateescape")
                target = host.target(exchange, key, [text, *copies], headers, None, tags)
                if not (target.route.reads_message or copies):
                    known[key, tags] = target
            yield target

    def _chunks(self, stage: Stage) -> Iterator[Chunk]:
        offset = stage.first
        while offset < stage.end:
            for batch, first, last in self._data_log.read(offset, end=stage.end):
                for index in range(first, last):
                    yield decode_chunk(batch.values[index])
                offset = batch.offset_at(last - 1) + 1

    # -- letting go ---------------------------------------------------------------------------------------------

    async def _look(self) -> None:
        """Stages and queries that are too old."""
        while True:
            now_us = self._now_us()
            before_us = now_us - self.config.expiry_ms * 1000
            old = [one.id for one in self._stages.values() if one.made_us < before_us and not self._held[one.id]]
            forgotten_us = now_us - self.config.queries_retention_ms * 1000
            idle = [
                one
                for one in self._queries.values()
                if one.query.used_us < forgotten_us and one.done is None and not one.lock.locked()
            ]
            try:
                self._drop(old)
                self.counts["expired"] += len(old)
                self._forget(idle)
                self._trim()
            except DiskFull:
                pass  # it is tried again with the next look
            await self._broker.env.clock.sleep(LOOK_S)

    def _drop(self, stages: Sequence[UUID]) -> None:
        """These are gone, and whoever asks for them is told so."""
        if stages:
            self._write([stage_key(one) for one in stages], [b""] * len(stages))
            self._let_go(stages)

    def _let_go(self, stages: Sequence[UUID]) -> None:
        for one in stages:
            gone = self._stages.pop(one)
            self.byte_count -= gone.byte_count
            self._dead_bytes += gone.byte_count
        if self._dead_bytes >= TRIM_BYTES:
            self._trim()

    def _trim(self) -> None:
        """The log of their messages begins with the first that somebody may still want."""
        if not self._dead_bytes:
            return
        wanted = [*(one.first for one in self._stages.values()), *self._arriving.values()]
        before = self._data_log.log_start
        if self._data_log.delete_before(min(wanted, default=int(self._data_log.end))) > before:
            self._broker.directory.committer.urgent(self._data_log)
        self._dead_bytes = 0

    def _forget(self, queries: Sequence[_Known]) -> int:
        if queries:
            self._write([query_key(one.query.user, one.query.name) for one in queries], [b""] * len(queries))
        for one in queries:
            query = one.query
            del self._queries[query.user, query.name]
            for where in query.numbers:
                stream = self._broker.directory.streams.get(where.stream)
                if stream is not None and where.partition < len(stream.partitions):
                    stream.partitions[where.partition].forget_producer(query.owner.bytes)
        return int(self._state_log.end)

    def _release(self, stages: Sequence[UUID]) -> None:
        self._held.subtract(stages)
        for one in stages:
            if self._held[one] <= 0:
                del self._held[one]

    def _write(self, keys: Sequence[bytes], values: Sequence[bytes]) -> int:
        appended = self._state_log.append(
            keys, [b""] * len(keys), values, timestamp_us=self._now_us(), attributes=PERSISTENT
        )
        self._broker.directory.committer.urgent(self._state_log)
        return int(appended.next_offset)

    async def _committed(self, log: PartitionLog, end: int) -> None:
        await self._broker.wait_committed(log, end)

    def _now_us(self) -> int:
        return self._broker.env.clock.wall_us()


# For a look at messages that are not for a created topic.
_NO_CHOICE = Chosen(UUID(int=0), 1, 0)
_DELAYED = object()


def _place(stage: Stage) -> Place:
    return Place(stage.vhost, TopicKind(stage.kind), stage.name, StreamId(stage.stream))


def _duty(stage: Stage) -> Duty:
    match TopicKind(stage.kind):
        case TopicKind.TOPIC:
            return Duty(DutyKind.TOPIC, stage.vhost, stage.name)
        case TopicKind.EXCHANGE:
            return Duty(DutyKind.PUBLISH, stage.vhost, stage.name)
        case TopicKind.QUEUE:
            return Duty(DutyKind.PUBLISH, stage.vhost, DEFAULT_EXCHANGE)


def _partition(chosen: Chosen, chunk: Chunk, index: int) -> int:
    if chunk.partitions[index] != BY_KEY:
        return chunk.partitions[index]
    key = chunk.keys[index]
    return partition_of(key, chosen.partition_count) if key else chosen.keyless


def _alike(chunk: Chunk, indexes: Sequence[int], way_of: Callable[[int], object]) -> Iterator[_Run]:
    """Neighbours that share their way, tags and attributes."""
    low = 0
    while low < len(indexes):
        first = indexes[low]
        way, tags, attributes = way_of(first), chunk.tags[first], chunk.attributes[first]
        high = low + 1
        while high < len(indexes):
            index = indexes[high]
            if way_of(index) is not way and way_of(index) != way:
                break
            if chunk.tags[index] != tags or chunk.attributes[index] != attributes:
                break
            high += 1
        yield _Run(
            indexes[low:high],
            tuple(tags),
            attributes,
            partition=way if isinstance(way, int) else 0,
            target=way if isinstance(way, Target) else None,
            is_delayed=way is _DELAYED,
        )
        low = high
