"""Messages published over HTTP: one or a batch, answered when they are committed. Driver.

To a created topic they are appended as they are, by key, with their headers beside them. To an exchange or a queue they
are published as an AMQP client would publish them: routed, limited, with basic properties, so that AMQP's and MQTT's
consumers get them like any other. A batch is checked as a whole before any of it is published.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from msgspec import Meta, Raw, field

from headrace.controller.errors import Invalid, NotFound
from headrace.core_log.errors import Refused, SequenceRefused
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, Headers, Producer, Protocol
from headrace.delay.parked import DelayRefused
from headrace.filtering.tags import Tags, collect
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.alarms import Alarm
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.delayed_when import DELAY, DELIVER_AT, due_us_of, schedule_id_of
from headrace.gateways.delivery.producers import producer
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.topics import Place, TopicKind, parse_name
from headrace.gateways.delivery.vhost import Target, VirtualHost
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem, problem_of
from headrace.gateways.http.records import CONTENT_TYPE, Encoding, header_octets, octets, time_text, value_octets
from headrace.gateways.http.topics import PATH, TopicPath
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

BATCH_MAX = 10_000
ROUTING_KEY_BYTES_MAX = 255
# So many messages are looked at, or published, before others on the loop get a turn: a few milliseconds.
_PER_TURN = 200
_SEQUENCE_MAX = 2**63 - 2
_DELAY_MS_MAX = 2**53


class NewMessage(Body, frozen=True, kw_only=True):
    """`value` is a string, or with encoding `json` (and whenever it is no string) any JSON, stored as its text."""

    key: Annotated[str, Meta(description="decides the partition; for exchanges the routing key")] = ""
    key_encoding: Encoding = "text"
    value: Annotated[Raw, Meta(description="nothing: an empty value")] = field(default_factory=lambda: Raw(b""))
    encoding: Annotated[
        Literal["text", "base64", "json"] | None, Meta(description="text for strings, json for all else, unless given")
    ] = None
    headers: Annotated[dict[str, Any], Meta(description='texts, or octets as {"base64": "..."}')] = field(
        default_factory=dict
    )
    content_type: Annotated[str, Meta(max_length=255)] | None = None
    tags: list[str] = field(default_factory=list)
    partition: Annotated[
        Annotated[int, Meta(ge=0)] | None, Meta(description="of a created topic, whatever the key says")
    ] = None
    persistent: Annotated[bool, Meta(description="false: may be lost in a crash, and is answered at once")] = True
    deliver_at: Annotated[
        str | int | None, Meta(description="not before then: ms since 1970, or RFC 3339 with its zone")
    ] = None
    delay_ms: Annotated[Annotated[int, Meta(ge=0, le=_DELAY_MS_MAX)] | None, Meta(description="not before so long")] = (
        None
    )
    schedule_id: Annotated[
        Annotated[str, Meta(min_length=1, max_length=255)] | None,
        Meta(description="of a delayed message, to cancel or reschedule it by; made by the broker when absent"),
    ] = None
    producer_id: Annotated[str | None, Meta(description="with `sequence`: sent again, it is not published again")] = (
        None
    )
    producer_epoch: Annotated[int, Meta(ge=0, le=2**32 - 1)] = 0
    sequence: Annotated[int, Meta(ge=0, le=_SEQUENCE_MAX)] | None = None


class Published(Answer, frozen=True, kw_only=True, omit_defaults=True):
    """Where a message is. Without an offset: it was published before, or lies in no log that can be read."""

    partition: int | None = None
    offset: int | None = None
    queues: Annotated[int | None, Meta(description="how many queues got it, of an exchange's or queue's")] = None
    duplicate: Annotated[bool, Meta(description="it was published before under this sequence number")] = False
    schedule_id: Annotated[str | None, Meta(description="of a message that is parked until it is due")] = None
    deliver_at: Annotated[str | None, Meta(description="when it is due")] = None


class PublishedAll(Answer, frozen=True, kw_only=True):
    results: Annotated[list[Published], Meta(description="one for each message, in their order")]


class PublishQuery(Parameters, frozen=True, kw_only=True):
    acks: Annotated[
        Literal["0", "1", "all"], Meta(description="0: answered before the commit; else when they are committed")
    ] = "all"


Messages = NewMessage | Annotated[list[NewMessage], Meta(min_length=1, max_length=BATCH_MAX)]


@dataclass(frozen=True, slots=True)
class Ready:
    """A message that was found lawful."""

    index: int
    key: bytes
    value: bytes
    tags: Tags
    persistent: bool
    producer: Producer | None
    # Of a topic's record.
    headers: Headers = ()
    partition: int = 0
    # Of an exchange's or queue's.
    properties: bytes = b""
    target: Target | None = None
    # Parked until then under this id; 0: published now.
    due_us: int = 0
    id: bytes = b""


async def publish_messages(call: Call[TopicPath, PublishQuery, NewMessage | list[NewMessage]]) -> Reply:
    door = call.door
    place = place_of(door, call.visitor, call.path.topic)
    check_alarms(door)
    messages = [call.body] if isinstance(call.body, NewMessage) else call.body
    batch = Batch(door, call.visitor, place)
    ready = await batch.checked(messages)
    refused = await batch.publish(ready)
    if call.query.acks != "0":
        await batch.committed()
    if refused is not None:
        raise refused
    return Reply(PublishedAll(results=batch.results))


def place_of(door: "HttpDoor", visitor: Visitor, name: str) -> Place:
    asked = parse_name(name)
    visitor.require_vhost(asked.vhost)
    try:
        place = door.topics.resolve(asked)
    except NotFound:
        visitor.require(Right.WRITE, asked.vhost, asked.name)
        raise
    # A queue is published to through the default exchange, as in AMQP.
    visitor.require(Right.WRITE, place.vhost, DEFAULT_EXCHANGE if place.kind is TopicKind.QUEUE else place.name)
    return place


def check_alarms(door: "HttpDoor") -> None:
    """Over AMQP and MQTT publishers are kept waiting; here they are told to come back. Nobody is kept waiting for
    replicas."""
    reason = door.broker.unwritable()
    if reason is not None:
        raise Problem(Code.TOO_FEW_REPLICAS, f"publish refused: {reason}", headers={"retry-after": "1"})
    active = door.alarms.active
    if active:
        code = Code.DISK_FULL if Alarm.DISK in active else Code.ALARM
        raise Problem(code, f"publishers have to wait: {door.alarms.reason}", headers={"retry-after": "5"})


class Batch:
    def __init__(self, door: "HttpDoor", visitor: Visitor, place: Place) -> None:
        self._door = door
        self._broker = door.broker
        self._visitor = visitor
        self._place = place
        self._host: VirtualHost = door.broker.vhosts[place.vhost]
        self._exchange = DEFAULT_EXCHANGE if place.kind is TopicKind.QUEUE else place.name
        self._targets: dict[tuple[bytes, Tags], Target] = {}
        self._known_tags: dict[tuple[str, ...], Tags] = {(): ()}
        # The partition of all records without a key: neighbours stay neighbours.
        self._keyless: int | None = None
        # Logs that must be committed.
        self._logs: set[PartitionLog] = set()
        # One for each message, by its index.
        self.results: list[Published] = []
        self._rights = self._user_version()

    # -- checking -------------------------------------------------------------------------------------------------

    async def checked(self, messages: Sequence[NewMessage]) -> list[Ready]:
        if self._place.kind is not TopicKind.TOPIC:
            found = self._host.router.exchange(self._exchange)
            if found is not None and found.internal:
                raise Problem(Code.FORBIDDEN, f"cannot publish to internal exchange '{self._exchange}'")
        ready = []
        for index, message in enumerate(messages):
            if index % _PER_TURN == _PER_TURN - 1:
                await trio.lowlevel.checkpoint()
            try:
                ready.append(self._checked(index, message))
            except Problem as problem:
                raise problem.at(index) from None
            except SequenceRefused as error:
                raise Problem(Code.INVALID, str(error), index=index) from None
            except Refused as error:
                code = Code.NOT_FOUND if isinstance(error, NotFound) else Code.INVALID
                raise Problem(code, str(error), index=index) from None
            except ValueError as error:
                raise Problem(Code.INVALID, str(error), index=index) from None
        return ready

    def _checked(self, index: int, message: NewMessage) -> Ready:
        key = octets(message.key, message.key_encoding)
        value = value_octets(message.value, message.encoding)
        tags = self._tags(message.tags)
        numbered = self._producer(message)
        due_us, schedule_id = self._due(message)
        if self._place.kind is TopicKind.TOPIC:
            return Ready(
                index,
                key,
                value,
                tags,
                message.persistent,
                numbered,
                headers=_neutral_headers(message),
                partition=0 if due_us else self._partition(message, key),
                due_us=due_us,
                id=schedule_id,
            )
        if message.partition is not None:
            raise Invalid("partition can be given for created topics only")
        content_type = message.content_type
        if content_type is None and (
            message.encoding == "json" or (message.encoding is None and not bytes(message.value).startswith(b'"'))
        ):
            content_type = "application/json" if bytes(message.value) else None
        properties = self._door.words.write(
            message.headers, content_type=content_type, tags=tags, persistent=message.persistent
        )
        target = self._target(key, properties, tags, message.headers.get("CC", ()))
        return Ready(
            index,
            key,
            value,
            tags,
            message.persistent,
            numbered,
            properties=properties,
            target=target,
            due_us=due_us,
            id=schedule_id,
        )

    def _due(self, message: NewMessage) -> tuple[int, bytes]:
        """When it is due, and its id; (0, b""): now."""
        if message.delay_ms is None and message.deliver_at is None:
            if message.schedule_id is not None:
                raise Invalid("schedule_id is for messages with delay_ms or deliver_at")
            return 0, b""
        now_us = self._broker.env.clock.wall_us()
        try:
            due_us = due_us_of(now_us, message.delay_ms, message.deliver_at)
            if due_us is None:
                return 0, b""
            self._broker.delayed.check(due_us, now_us)
            wanted = schedule_id_of(message.schedule_id)
        except DelayRefused as error:
            # In the words of the other doors' headers.
            told = str(error).replace(DELIVER_AT, "deliver_at").replace(DELAY, "delay_ms")
            raise Invalid(told) from None
        if message.partition is not None:
            raise Invalid("partition cannot be given for a delayed message: its key decides when it is due")
        return due_us, wanted or str(self._broker.env.ids.uuid()).encode()

    def _tags(self, listed: list[str]) -> Tags:
        """Most messages of a batch have the tags of others."""
        key = tuple(listed)
        tags = self._known_tags.get(key)
        if tags is None:
            tags = self._known_tags[key] = collect(key)
        return tags

    def _producer(self, message: NewMessage) -> Producer | None:
        if message.producer_id is None and message.sequence is None:
            return None
        if message.producer_id is None or message.sequence is None:
            raise Invalid("producer_id and sequence belong together")
        return producer(
            self._place.vhost, self._visitor.name, message.producer_id, message.producer_epoch, message.sequence
        )

    def _partition(self, message: NewMessage, key: bytes) -> int:
        topics, place = self._door.topics, self._place
        if message.partition is not None:
            topics.log_at(place, message.partition)
            return message.partition
        if key:
            return topics.partition_for(place, key)
        if self._keyless is None:
            self._keyless = topics.next_partition(place)
        return self._keyless

    def _target(self, key: bytes, properties: bytes, tags: Tags, copies: Sequence[str]) -> Target:
        if self._place.kind is TopicKind.QUEUE:
            # The queue that was named, whatever the key; its routing key is its name.
            key = self._place.name.encode("utf-8", "surrogateescape")
        if len(key) > ROUTING_KEY_BYTES_MAX:
            raise Invalid(f"a routing key of {len(key)} bytes is longer than {ROUTING_KEY_BYTES_MAX}")
        known = self._targets.get((key, tags))
        if known is not None and not known.route.reads_message and not copies and self._host.is_current(known):
            return known
        text = key.decode("utf-8", "surrogateescape")
        for one in (text, *copies):
            self._check_key(one)
        target = self._host.target(
            self._exchange, key, [text, *copies], lambda: self._broker.fields_of(properties)[0], None, tags
        )
        if not copies:
            self._targets[key, tags] = target
        return target

    def _check_key(self, key: str) -> None:
        visitor, place = self._visitor, self._place
        exchange = self._host.router.exchange(self._exchange)
        if exchange is not None and exchange.kind == "topic":
            allowed = visitor.access.may_use_key(visitor.name, place.vhost, self._exchange, Right.WRITE, key)
            if not allowed:
                raise Problem(Code.FORBIDDEN, f"write access with key '{key}' refused for user '{visitor.name}'")

    # -- publishing -----------------------------------------------------------------------------------------------

    async def publish(self, ready: Sequence[Ready]) -> Problem | None:
        """All of them, or up to the one that was refused; then the problem."""
        self.results = [Published()] * len(ready)
        if self._place.kind is TopicKind.TOPIC and not any(one.producer or one.due_us for one in ready):
            # Nobody can tell in which order partitions got theirs, and each gets them in few appends.
            ready = sorted(ready, key=attrgetter("partition"))
        try:
            for first in range(0, len(ready), _PER_TURN):
                if first:
                    self._door.turn.soon()
                    await trio.lowlevel.checkpoint()
                part = ready[first : first + _PER_TURN]
                refused = self._still_lawful(part) or self._publish(part)
                if refused is not None:
                    return refused
        finally:
            self._door.turn.soon()
        return None

    def _still_lawful(self, ready: Sequence[Ready]) -> Problem | None:
        """Others had their turn since it was looked at."""
        visitor, place, first = self._visitor, self._place, ready[0].index
        if not self._door.topics.is_there(place):
            return Problem(Code.NOT_FOUND, f"'{place.public_name}' was deleted meanwhile", index=first)
        version = self._user_version()
        if version != self._rights:
            self._rights = version
            try:
                visitor.require(Right.WRITE, place.vhost, self._exchange)
                for one in ready if place.kind is TopicKind.EXCHANGE else ():
                    first = one.index
                    self._check_key(one.key.decode("utf-8", "surrogateescape"))
            except Problem as problem:
                return problem.at(first)
        return None

    def _user_version(self) -> int | None:
        """Moves with every change of the user's rights."""
        user = self._broker.metadata.snapshot.users.get(self._visitor.name)
        return None if user is None else user.version

    def _publish(self, ready: Sequence[Ready]) -> Problem | None:
        first = 0
        while first < len(ready):
            last = first + 1
            while last < len(ready) and _alike(ready[first], ready[last]):
                last += 1
            run = ready[first:last]
            try:
                if run[0].due_us:
                    self._park(run)
                elif self._place.kind is TopicKind.TOPIC:
                    self._append(run)
                else:
                    self._route(run)
            except Problem as problem:
                return problem
            except SequenceRefused as error:
                return problem_of(error).at(run[0].index)
            first = last
        return None

    def _park(self, run: Sequence[Ready]) -> None:
        """Until they are due."""
        one, place = run[0], self._place
        if place.kind is TopicKind.TOPIC:
            duty = Duty(DutyKind.TOPIC, place.vhost, place.name)
            attributes, tags = int(Protocol.NEUTRAL), one.tags
        else:
            assert one.target is not None
            duty = Duty(DutyKind.PUBLISH, place.vhost, self._exchange)
            attributes, tags = int(Protocol.AMQP), one.target.tags
        delayed = self._broker.delayed
        intake = delayed.delays.intake
        before = intake.end
        delayed.park(
            duty,
            [item.key if item.target is None else item.target.key for item in run],
            [item.properties for item in run],
            [item.value for item in run],
            due_us=[item.due_us for item in run],
            ids=[item.id for item in run],
            attributes=attributes | (PERSISTENT if one.persistent else 0),
            tags=tags,
            headers=[item.headers for item in run] if any(item.headers for item in run) else None,
            producer=one.producer,
        )
        if one.persistent:
            self._logs.add(intake)
        if intake.end == before:
            self.results[one.index] = Published(duplicate=True)
            return
        for item in run:
            told = item.id.decode("utf-8", "replace")
            self.results[item.index] = Published(schedule_id=told, deliver_at=time_text(item.due_us))

    def _append(self, run: Sequence[Ready]) -> None:
        """To a created topic."""
        one = run[0]
        log = self._door.topics.log_at(self._place, one.partition)
        if log is None:
            raise Problem(Code.STORAGE_FAILED, f"topic '{self._place.name}' has no files", index=one.index)
        columns = [item.key for item in run], [b""] * len(run), [item.value for item in run]
        headers = [item.headers for item in run] if any(item.headers for item in run) else None
        attributes = int(Protocol.NEUTRAL) | (PERSISTENT if one.persistent else 0)
        now_us = self._broker.env.clock.wall_us()
        if one.producer is None:
            appended = log.append(*columns, timestamp_us=now_us, attributes=attributes, tags=one.tags, headers=headers)
            assert appended.run is not None
            first = appended.run.batch.offset_at(appended.run.first)
            for place, item in enumerate(run):
                self.results[item.index] = Published(partition=log.partition, offset=first + place)
        else:
            (written,) = log.append_once(
                one.producer, *columns, timestamp_us=now_us, attributes=attributes, tags=one.tags, headers=headers
            )
            self.results[one.index] = (
                Published(partition=log.partition, duplicate=True)
                if written.run is None
                else Published(partition=log.partition, offset=written.run.batch.offset_at(written.run.first))
            )
        committer = self._broker.directory.committer
        if one.persistent:
            committer.urgent(log)
            self._logs.add(log)
        else:
            committer.lazy(log)

    def _route(self, run: Sequence[Ready]) -> None:
        """To an exchange or queue, as an AMQP publish."""
        one = run[0]
        assert one.target is not None
        target = self._host.now(one.target)
        if target.byte_limits:
            full = [queue for queue in target.byte_limits if not queue.admits(1, len(one.value))]
            if full:
                left = tuple(queue for queue in target.queues if queue not in full)
                if left:
                    self._store(target.only(left), run)
                for queue in full:
                    self._broker.refuse(self._host, queue, target, one.properties, one.value)
                raise Problem(Code.QUEUE_FULL, f"queue '{full[0].name}' is full", index=one.index)
        reached = self._store(target, run)
        log, count = target.log, len(target.queues)
        for place, item in enumerate(run):
            if reached is None or log is None or log.stream_id != self._place.stream_id:
                told = Published(queues=count)
            elif reached < 0:
                told = Published(partition=log.partition, queues=count, duplicate=True)
            else:
                told = Published(partition=log.partition, offset=reached - len(run) + place, queues=count)
            self.results[item.index] = told

    def _store(self, target: Target, run: Sequence[Ready]) -> int | None:
        """The offset behind them; -1 for one that was published before; None for what is kept in no log."""
        self._broker.speaker = self._visitor.name
        try:
            return self._keep(target, run)
        finally:
            self._broker.speaker = ""

    def _keep(self, target: Target, run: Sequence[Ready]) -> int | None:
        one = run[0]
        properties, values = [item.properties for item in run], [item.value for item in run]
        attributes = int(Protocol.AMQP) | (PERSISTENT if one.persistent else 0)
        if one.producer is None:
            reached = self._broker.publish(target, properties, values, attributes=attributes)
            is_new = True
        else:
            before = 0 if target.log is None else target.log.end
            reached = self._broker.publish_once(target, one.producer, properties, values, attributes=attributes)
            is_new = target.log is None or target.log.end > before
        if reached is None or target.log is None:
            return None
        if one.persistent:
            self._logs.add(target.log)
        return reached if is_new else -1

    async def committed(self) -> None:
        """Wait until all of them are safe."""
        waiting: list[trio.Event] = []
        for log in self._logs:
            done = trio.Event()
            # Up to its end: who comes later to a log than its publishers' tickets may only ask for more.
            log.when_committed(log.end, done.set)
            if not done.is_set():
                self._broker.directory.committer.urgent(log)
                waiting.append(done)
        for done in waiting:
            await done.wait()


def _alike(one: Ready, other: Ready) -> bool:
    """Whether two neighbours can be one append."""
    if one.producer is not None or other.producer is not None or one.persistent is not other.persistent:
        return False
    if bool(one.due_us) != bool(other.due_us):
        return False
    if one.due_us:
        return one.tags == other.tags
    if one.target is not None:
        return other.target is one.target and not one.target.byte_limits
    return (one.partition, one.tags) == (other.partition, other.tags)


def _neutral_headers(message: NewMessage) -> Headers:
    found: list[tuple[bytes, bytes]] = []
    if message.content_type is not None:
        found.append((CONTENT_TYPE, message.content_type.encode()))
    for name, value in message.headers.items():
        data = value.encode() if isinstance(value, str) else header_octets(value)
        if data is None:
            raise Invalid(f"""the header '{name}' of a topic's record must be text, or octets: {{"base64": "..."}}""")
        if name.encode() == CONTENT_TYPE:
            raise Invalid("the header 'content-type' cannot be given here: use the field content_type")
        found.append((name.encode(), data))
    return tuple(found)


def operations() -> list[Operation]:
    return [
        Operation(
            "POST",
            f"{PATH}/{{topic}}/messages",
            publish_messages,
            "Publish one message, or an array of them",
            "Answered when they are committed. Nothing is published of an array in which one is not lawful. If one is "
            "refused later (`queue_full`, `sequence_refused`), those before `index` are published, and none behind it.",
            parameters=TopicPath,
            query=PublishQuery,
            body=Messages,
            answers={200: PublishedAll},
            problems=(
                Code.NOT_FOUND,
                Code.SEQUENCE_REFUSED,
                Code.QUEUE_FULL,
                Code.ALARM,
                Code.STORAGE_FAILED,
                Code.DISK_FULL,
            ),
            large=True,
        )
    ]
