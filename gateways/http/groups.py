"""Consumer groups over HTTP: settings, join, heartbeat, leave, poll, commit, reset, lag. Driver.

A member says with each request which generation it has acted upon; what it is told to give up it stops reading,
commits, and gives up by naming the generation that told it so. The loop of a simple client is: poll, work, commit
`positions`, poll again with the generation of the answer. `{group}` is a group of vhost `/`, or `vhost|group`; it reads
topics of its own vhost, and everything here asks for the right to read them. What failed and has come back is shown as
the topic `<group>.retry`, with a partition for each topic that something failed in, and may be read by who may read it.
To set a group up, or to delete it, asks for the right to configure its name. Neighbours:
gateways/delivery/consumer_groups_coordinator.py does the work.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from msgspec import Meta, field
from msgspec.structs import asdict

from headrace.controller.entities import PARTITIONS_MAX
from headrace.controller.errors import NotFound
from headrace.core_log.errors import HeadraceError
from headrace.core_log.ids import StreamId
from headrace.core_log.record import Gap, RecordBatch
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.consumer_groups import ConsumerGroup, GroupSettings, Member, Standing, Start
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_coordinator import Polled, Progress
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.consumer_groups_retries import RETRY_END
from headrace.gateways.delivery.relocation import ORIGIN_OFFSET, ORIGIN_PARTITION
from headrace.gateways.delivery.retry import DELAY_MAX_MS, DELAY_MS, Backoff, RetryPolicy, attempt_of, attempts_in
from headrace.gateways.delivery.topics import DEFAULT_VHOST, Place, TopicKind, TopicName, parse_name
from headrace.gateways.delivery.transfers import DEAD_LETTER_END
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Message, filter_of, shown, time_text, time_us_of
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/consumer-groups"
NAME_BYTES_MAX = 255

INTEGER_MAX = 2**53
# It stands between others in a header, and in the bindings of exchanges that sort by it.
REASON_PATTERN = "^[A-Za-z0-9_.:-]{1,64}$"

Milliseconds = Annotated[int, Meta(ge=1, le=86_400_000)]
Generation = Annotated[int, Meta(ge=0, le=INTEGER_MAX, description="the last one that the member has acted upon")]
Number = Annotated[int, Meta(ge=0, le=PARTITIONS_MAX)]
Offset = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
TopicNames = Annotated[list[str], Meta(min_length=1)]


class GroupPath(Parameters, frozen=True, kw_only=True):
    group: Annotated[str, Meta(min_length=1, description="the group's name, or `vhost|name`")]


class MemberPath(GroupPath, frozen=True, kw_only=True):
    member: Annotated[str, Meta(min_length=1, description="the id that the join was answered with")]


class GroupPartition(Answer, frozen=True, kw_only=True):
    topic: str
    partition: int


class Position(Body, frozen=True, kw_only=True):
    topic: str
    partition: Number
    offset: Offset


class FailedMessage(Position, frozen=True, kw_only=True):
    reason: Annotated[
        str,
        Meta(
            pattern=REASON_PATTERN, description="a word that says why: `x-reason` of the next attempt, or of the dead"
        ),
    ] = "rejected"


class Assigned(Answer, frozen=True, kw_only=True):
    topic: str
    partition: int
    generation: Annotated[
        int, Meta(description="since when it is held: when this moves, what was read of it comes again")
    ]
    offset: Annotated[int, Meta(description="committed: the next message that the group has not done with")]


class Assignment(Answer, frozen=True, kw_only=True):
    member_id: str
    generation: int
    assignment: list[Assigned]
    give_up: Annotated[
        list[GroupPartition],
        Meta(description="no longer to be read; given up by naming this generation in the next request"),
    ]


class Join(Body, frozen=True, kw_only=True):
    topics: TopicNames
    session_timeout_ms: Annotated[Milliseconds, Meta(description="not heard of for so long, a member is gone")] = 45_000
    rebalance_timeout_ms: Annotated[Milliseconds, Meta(description="time to give up what it is asked for")] = 60_000
    start: Annotated[
        Literal["first", "next"], Meta(description="where the group begins in a topic that it has never read")
    ] = "first"
    name: Annotated[str, Meta(max_length=NAME_BYTES_MAX, description="what the member calls itself")] = ""


class Heartbeat(Body, frozen=True, kw_only=True):
    generation: Generation
    topics: Annotated[TopicNames | None, Meta(description="other topics than before, from now on")] = None


class PollQuery(Parameters, frozen=True, kw_only=True):
    generation: Generation
    after: Annotated[
        Offset | None,
        Meta(description="`poll` of the last answer that was received; without it reading begins at what is committed"),
    ] = None
    wait_ms: Annotated[int, Meta(ge=0, le=3_600_000, description="how long to wait for a first message")] = 0
    limit: Annotated[int, Meta(ge=1, le=10_000, description="so many messages at most")] = 500
    bytes_max: Annotated[
        int, Meta(ge=1, le=16 * 1024 * 1024, description="about so many bytes at most, but always one message")
    ] = 1024 * 1024
    filter: Annotated[str | None, Meta(description="a tag expression: `eu || (vip && !test)`")] = None


class FailedAttempt(Answer, frozen=True, kw_only=True):
    failed_at: str
    reason: str


class Retried(Answer, frozen=True, kw_only=True):
    """Of a message that has failed before: which attempt this is, and where it was first."""

    attempt: int
    topic: str
    partition: int
    offset: int
    history: Annotated[list[FailedAttempt], Meta(description="the attempts that failed, the first first")]


class PolledMessage(Message, frozen=True, kw_only=True, omit_defaults=True):
    topic: str
    retried: Retried | None = None


class Hole(Answer, frozen=True, kw_only=True):
    """Offsets that hold nothing: what retention took before it was read, or what a crash left out."""

    topic: str
    partition: int
    offset: int
    next_offset: int
    reason: str


class Poll(Assignment, frozen=True, kw_only=True):
    poll: Annotated[int, Meta(description="for `after` of the next poll")]
    messages: list[PolledMessage]
    gaps: list[Hole]
    positions: Annotated[
        list[Position], Meta(description="behind these messages: to be committed when they are done with")
    ]


class Commit(Body, frozen=True, kw_only=True):
    offsets: Annotated[list[Position], Meta(min_length=1)]
    member_id: Annotated[
        str | None, Meta(description="without it: of somebody who is no member, where no member reads")
    ] = None
    generation: Generation | None = None
    failed: Annotated[
        list[FailedMessage],
        Meta(description="messages that this commit passes and that failed: they are tried again, or dead"),
    ] = field(default_factory=list)


class Committed(Answer, frozen=True, kw_only=True):
    generation: int
    offsets: list[Position]


class Reset(Body, frozen=True, kw_only=True):
    """Where to go on: one of `to`, `offset` and `timestamp`."""

    topic: str
    partition: Annotated[Number | None, Meta(description="without it: all of the topic")] = None
    to: Annotated[
        Literal["first", "last", "next"] | None,
        Meta(description="`last`: the newest message once more; `next`: only what comes from now on"),
    ] = None
    offset: Offset | None = None
    timestamp: Annotated[str | None, Meta(description="the first message of this time: ms since 1970, or RFC 3339")] = (
        None
    )
    force: Annotated[
        bool, Meta(description="also while members hold it; what they have read is refused then, and comes again")
    ] = False
    dry_run: Annotated[bool, Meta(description="only say what would be done")] = False


class Moved(Answer, frozen=True, kw_only=True):
    topic: str
    partition: int
    was: int | None
    offset: int


class ResetDone(Answer, frozen=True, kw_only=True):
    generation: int
    dry_run: bool
    offsets: list[Moved]


class Settings(Body, frozen=True, kw_only=True):
    """A retry policy, as of a queue: x-retry-max and the others. Without `retry_max` there is none."""

    retry_max: Annotated[
        Annotated[int, Meta(ge=0, le=2**31)] | None, Meta(description="attempts after the first; 0: dead at once")
    ] = None
    retry_backoff: Literal["fixed", "exponential", "levels"] = "exponential"
    retry_delay_ms: Annotated[
        Annotated[int, Meta(ge=0, le=INTEGER_MAX)] | None, Meta(description="1 s unless given; not with levels")
    ] = None
    retry_delay_max_ms: Annotated[
        Annotated[int, Meta(ge=0, le=INTEGER_MAX)] | None, Meta(description="of exponential, 1 h unless given")
    ] = None
    retry_jitter: bool = False
    dead_letter_exchange: Annotated[
        str | None, Meta(description="for what failed its last attempt; else, or if it leads nowhere, `<group>.dlq`")
    ] = None


class SettingsOut(Answer, frozen=True, kw_only=True):
    retry_max: int | None
    retry_backoff: str
    retry_delay_ms: int
    retry_delay_max_ms: int
    retry_jitter: bool
    dead_letter_exchange: str | None


class GroupSummary(Answer, frozen=True, kw_only=True):
    group: str
    vhost: str
    generation: int
    state: Annotated[str, Meta(description="stable, rebalancing (something is to be given up) or empty (no members)")]
    member_count: int
    topics: list[str]
    lag: Annotated[int, Meta(description="messages to come, of all partitions")]


class GroupList(Answer, frozen=True, kw_only=True):
    groups: list[GroupSummary]


class GroupMember(Answer, frozen=True, kw_only=True):
    member_id: str
    name: str
    user: str
    topics: list[str]
    session_timeout_ms: int
    partitions: list[GroupPartition]


class GroupProgress(Answer, frozen=True, kw_only=True):
    topic: str
    partition: int
    committed: int | None
    first_offset: int
    end_offset: int
    lag: int
    lost: Annotated[int, Meta(description="offsets that retention took before the group had read them")]
    member_id: str | None


class GroupDescription(GroupSummary, frozen=True, kw_only=True):
    settings: SettingsOut
    waiting: Annotated[int, Meta(description="messages that failed and wait for another attempt")]
    members: list[GroupMember]
    partitions: list[GroupProgress]


# -- names ------------------------------------------------------------------------------------------------------


def group_name(text: str) -> GroupName:
    vhost, mark, name = text.partition("|")
    found = GroupName(vhost, name) if mark else GroupName(DEFAULT_VHOST, text)
    try:
        size = len(found.name.encode())
    except UnicodeEncodeError:
        raise Problem(Code.INVALID_PARAMETER, "a group's name must be UTF-8") from None
    if not 1 <= size <= NAME_BYTES_MAX:
        raise Problem(Code.INVALID_PARAMETER, f"a group's name must have 1 to {NAME_BYTES_MAX} bytes")
    return found


def _public(name: GroupName) -> str:
    return name.name if name.vhost == DEFAULT_VHOST and "|" not in name.name else f"{name.vhost}|{name.name}"


class _Asked:
    """One request about one group: its topics by name and by stream, as far as the visitor may read them."""

    def __init__(self, door: "HttpDoor", visitor: Visitor, name: GroupName) -> None:
        self.door = door
        self.name = name
        self.groups = door.groups
        self.user = visitor.name
        self._visitor = visitor
        visitor.require_vhost(name.vhost)

    def place(self, topic: str) -> Place:
        """Raises Problem for what may not be read, NotFound for what is not there."""
        asked = self._parsed(topic)
        self._visitor.require(Right.READ, asked.vhost, asked.name)
        place = self.door.topics.resolve(asked)
        self.door.group_topics.note(place)
        return place

    def _parsed(self, topic: str) -> TopicName:
        asked = parse_name(topic)
        if asked.vhost != self.name.vhost:
            raise Problem(Code.INVALID, f"'{topic}' is in vhost '{asked.vhost}', and the group in '{self.name.vhost}'")
        return asked

    def slot(self, topic: str, partition: int) -> Slot:
        """Raises as `place` does. The group's own topic is what came back to it."""
        if self._parsed(topic).name == self.name.name + RETRY_END:
            for origin, one in self.group().returns.items():
                if one.number == partition:
                    place = self.door.group_topics.maybe_place(origin)
                    if place is not None:
                        self._visitor.require(Right.READ, place.vhost, place.name)
                        return Slot(one.stream, 0)
        return Slot(self.place(topic).stream_id, partition)

    def is_own(self, topic: str) -> bool:
        """It is what comes back to this group."""
        return self._parsed(topic).name == self.name.name + RETRY_END and bool(
            self.groups.groups.get(self.name, ConsumerGroup()).returns
        )

    def shown(self, slot: Slot) -> tuple[str, int]:
        """Topic and partition, as members know them."""
        topic = self.maybe_topic(slot.stream) or str(slot.stream)
        origin = self.groups.retries.origin_of(slot.stream)
        if origin == slot.stream:
            return topic, slot.partition
        found = self.group().returns.get(origin)
        return topic, slot.partition if found is None else found.number

    def streams(self, topics: Iterable[str]) -> frozenset[StreamId]:
        return frozenset(self.place(topic).stream_id for topic in topics)

    def slots(self, positions: Iterable[Position]) -> dict[Slot, int]:
        found: dict[Slot, int] = {}
        for one in positions:
            slot = self.slot(one.topic, one.partition)
            if slot in found:
                raise Problem(Code.INVALID, f"partition {one.partition} of '{one.topic}' is named twice")
            found[slot] = one.offset
        return found

    def failures(self, messages: Iterable[FailedMessage]) -> dict[Slot, dict[int, str]]:
        found: dict[Slot, dict[int, str]] = {}
        for one in messages:
            reasons = found.setdefault(self.slot(one.topic, one.partition), {})
            if one.offset in reasons:
                raise Problem(Code.INVALID, f"offset {one.offset} of '{one.topic}' is named twice")
            reasons[one.offset] = one.reason
        return found

    def maybe_topic(self, stream: StreamId) -> str | None:
        """Its name, if it is there and the visitor may read it: of what came back, the topic it failed in."""
        origin = self.groups.retries.origin_of(stream)
        place = self.door.group_topics.maybe_place(origin)
        if place is None or not self._visitor.may(Right.READ, place.vhost, place.name):
            return None
        return (
            place.public_name if origin == stream else _public(GroupName(self.name.vhost, self.name.name + RETRY_END))
        )

    def require_rights(self, member_id: str) -> None:
        """What a member asked for once it must still be allowed to read."""
        group = self.groups.groups.get(self.name)
        member = None if group is None else group.members.get(member_id)
        for stream in () if member is None else member.topics:
            place = self.door.group_topics.maybe_place(stream)
            if place is not None:
                self._visitor.require(Right.READ, place.vhost, place.name)

    def require_configure(self) -> None:
        self._visitor.require(Right.CONFIGURE, self.name.vhost, self.name.name)

    def reader_of_keys(self, stream: StreamId) -> Callable[[bytes], bool] | None:
        """On a topic exchange a topic permission narrows the keys that somebody may read; None: it is none."""
        place = self.door.group_topics.maybe_place(self.groups.retries.origin_of(stream))
        if place is None or place.kind is not TopicKind.EXCHANGE:
            return None
        exchange = self.door.broker.vhosts[place.vhost].router.exchange(place.name)
        if exchange is None or exchange.kind != "topic":
            return None
        may_use, vhost, name = self._visitor.access.may_use_key, place.vhost, place.name
        return lambda key: may_use(self.user, vhost, name, Right.READ, key.decode("utf-8", "surrogateescape"))

    def group(self) -> ConsumerGroup:
        found = self.groups.groups.get(self.name)
        if found is None:
            raise NotFound(f"no consumer group '{self.name.name}' in vhost '{self.name.vhost}'")
        return found


def _asked(call: Call[Any, Any, Any]) -> _Asked:
    return _Asked(call.door, call.visitor, group_name(call.path.group))


# -- members ----------------------------------------------------------------------------------------------------


async def join_group(call: Call[GroupPath, Parameters, Join]) -> Reply:
    asked = _asked(call)
    body = call.body
    member_id, standing = await asked.groups.join(
        asked.name,
        asked.user,
        asked.streams(body.topics),
        session_ms=body.session_timeout_ms,
        rebalance_ms=body.rebalance_timeout_ms,
        start=Start(body.start),
        label=body.name,
    )
    return Reply(Assignment(**_told(asked, member_id, standing)), status=201)


async def heartbeat_member(call: Call[MemberPath, Parameters, Heartbeat]) -> Reply:
    asked = _asked(call)
    topics = None if call.body.topics is None else asked.streams(call.body.topics)
    member_id = call.path.member
    standing = await asked.groups.heartbeat(asked.name, member_id, asked.user, call.body.generation, topics)
    return Reply(Assignment(**_told(asked, member_id, standing)))


async def leave_group(call: Call[MemberPath, Parameters, None]) -> Reply:
    asked = _asked(call)
    await asked.groups.leave(asked.name, call.path.member, asked.user)
    return Reply(status=204)


def _told(asked: _Asked, member_id: str, standing: Standing) -> dict[str, Any]:
    committed = asked.group().committed
    return {
        "member_id": member_id,
        "generation": standing.generation,
        "assignment": [
            Assigned(topic=topic, partition=partition, generation=since, offset=committed[slot].offset)
            for slot, since in standing.holds
            for topic, partition in [asked.shown(slot)]
        ],
        "give_up": [_partition(asked, slot) for slot in standing.give_up],
    }


def _partition(asked: _Asked, slot: Slot) -> GroupPartition:
    topic, partition = asked.shown(slot)
    return GroupPartition(topic=topic, partition=partition)


# -- polling ----------------------------------------------------------------------------------------------------


async def poll_messages(call: Call[MemberPath, PollQuery, None]) -> Reply:
    asked = _asked(call)
    query = call.query
    select = _Select(asked, query.filter)
    asked.require_rights(call.path.member)
    polled: Polled | None = None
    refused: HeadraceError | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_end_with, call.abandoned, nursery.cancel_scope)
        try:
            polled = await asked.groups.poll(
                asked.name,
                call.path.member,
                asked.user,
                query.generation,
                after=query.after,
                wait_s=min(query.wait_ms / 1000, call.door.config.poll_s_max),
                bytes_max=query.bytes_max,
                count_max=query.limit,
                select=select,
            )
        except HeadraceError as error:
            refused = error
        nursery.cancel_scope.cancel()
    if refused is not None:
        raise refused
    if polled is None:
        # Nobody waits for it, or the broker stops.
        raise Problem(Code.STOPPING)
    # They may have been taken away while it was waited for.
    asked.require_rights(call.path.member)
    return Reply(_polled(asked, call.path.member, polled))


async def _end_with(abandoned: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
    await abandoned()
    scope.cancel()


class _Select:
    """Which messages a poll is answered with: what the filter lets through and the member may read."""

    def __init__(self, asked: _Asked, text: str | None) -> None:
        self._asked = asked
        self._filter = filter_of(text)

    def __call__(self, slot: Slot, batch: RecordBatch, first: int, last: int) -> Iterable[int]:
        wanted = range(first, last) if self._filter is None else self._filter.select(batch, first, last)
        may_read = self._asked.reader_of_keys(slot.stream)
        return wanted if may_read is None else (index for index in wanted if may_read(batch.keys[index]))


def _polled(asked: _Asked, member_id: str, polled: Polled) -> Poll:
    return Poll(
        **_told(asked, member_id, polled.standing),
        poll=polled.number,
        messages=[_message(asked, *one) for one in polled.records],
        gaps=[
            Hole(topic=topic, partition=partition, offset=offset, next_offset=next_offset, reason=_reason(reason))
            for slot, offset, next_offset, reason in polled.missing
            for topic, partition in [asked.shown(slot)]
        ],
        positions=[
            Position(topic=topic, partition=partition, offset=place.offset)
            for slot, place in sorted(polled.places.items())
            for topic, partition in [asked.shown(slot)]
        ],
    )


def _message(asked: _Asked, slot: Slot, batch: RecordBatch, index: int) -> PolledMessage:
    topic, partition = asked.shown(slot)
    retried = None
    if batch.headers is not None and asked.groups.retries.is_own(slot.stream):
        notes = dict(batch.headers[index])
        origin = Slot(asked.groups.retries.origin_of(slot.stream), int(notes[ORIGIN_PARTITION]))
        retried = Retried(
            attempt=attempt_of(batch.headers[index]),
            topic=asked.shown(origin)[0],
            partition=origin.partition,
            offset=int(notes[ORIGIN_OFFSET]),
            history=[FailedAttempt(failed_at=time_text(when), reason=why) for when, why in attempts_in(notes)],
        )
    return PolledMessage(topic=topic, retried=retried, **asdict(shown(asked.door.words, partition, batch, index)))


def _reason(reason: Gap | None) -> str:
    return "retention" if reason is None else reason.name.lower()


# -- offsets ----------------------------------------------------------------------------------------------------


async def commit_offsets(call: Call[GroupPath, Parameters, Commit]) -> Reply:
    asked = _asked(call)
    body = call.body
    offsets = asked.slots(body.offsets)
    if body.member_id is None:
        if body.generation is not None:
            raise Problem(Code.INVALID, "a generation belongs to a member: name its id too")
        if body.failed:
            raise Problem(Code.INVALID, "only a member can say that messages have failed: name its id too")
        await asked.groups.commit_from_outside(asked.name, offsets)
    else:
        if body.generation is None:
            raise Problem(Code.INVALID, "a member commits with the generation that it has acted upon")
        await asked.groups.commit(
            asked.name,
            offsets,
            member_id=body.member_id,
            user=asked.user,
            generation=body.generation,
            failed=asked.failures(body.failed),
        )
    return Reply(Committed(generation=asked.group().generation, offsets=body.offsets))


async def reset_offsets(call: Call[GroupPath, Parameters, Reset]) -> Reply:
    asked = _asked(call)
    body = call.body
    if sum(one is not None for one in (body.to, body.offset, body.timestamp)) != 1:
        raise Problem(Code.INVALID, "one of `to`, `offset` and `timestamp` says where to go on")
    if asked.is_own(body.topic):
        raise Problem(Code.REFUSED, "what came back to the group is not reset: dead letters are redriven")
    place = asked.place(body.topic)
    count = call.door.topics.partition_count(place)
    numbers = range(count) if body.partition is None else [body.partition]
    offsets = {Slot(place.stream_id, number): _wanted(call, place, number) for number in numbers}
    group = asked.groups.groups.get(asked.name) or ConsumerGroup()
    was = {slot: found.offset for slot, found in group.committed.items() if slot in offsets}
    if body.dry_run:
        # Whoever holds it does not mind being looked at.
        asked.groups.check_reset(asked.name, offsets, force=True)
    else:
        await asked.groups.reset(asked.name, offsets, by=asked.user, force=body.force)
        group = asked.group()
    moved = [
        Moved(topic=place.public_name, partition=slot.partition, was=was.get(slot), offset=offset)
        for slot, offset in offsets.items()
    ]
    return Reply(ResetDone(generation=group.generation, dry_run=body.dry_run, offsets=moved))


def _wanted(call: Call[GroupPath, Parameters, Reset], place: Place, number: int) -> int:
    body = call.body
    log = call.door.topics.log_at(place, number)
    if body.offset is not None:
        return body.offset
    if log is None:
        return 0
    if body.timestamp is not None:
        return int(log.offset_at_time(time_us_of(body.timestamp)))
    start, end = int(log.log_start), int(log.high_watermark)
    match body.to:
        case "first":
            return start
        case "last":
            return max(end - 1, start)
        case _:
            return end


# -- settings ---------------------------------------------------------------------------------------------------


async def configure_group(call: Call[GroupPath, Parameters, Settings]) -> Reply:
    """The whole of it: what is left out is as if it was never given."""
    asked, body = _asked(call), call.body
    asked.require_configure()
    if body.dead_letter_exchange is not None:
        call.visitor.require(Right.WRITE, asked.name.vhost, body.dead_letter_exchange)
        if call.door.broker.vhosts[asked.name.vhost].router.exchange(body.dead_letter_exchange) is None:
            raise NotFound(f"no exchange '{body.dead_letter_exchange}' in vhost '{asked.name.vhost}'")
    elif body.retry_max is not None:
        # The broker makes it when it is first needed.
        call.visitor.require(Right.CONFIGURE, asked.name.vhost, asked.name.name + DEAD_LETTER_END)
    settings = GroupSettings(
        _policy(body, call.door.broker.delayed.config.delay_s_max * 1000), body.dead_letter_exchange
    )
    is_new = await asked.groups.configure(asked.name, settings)
    return Reply(_settings(settings), status=201 if is_new else 200)


def _policy(body: Settings, delay_max_ms: int) -> RetryPolicy | None:
    given = (body.retry_delay_ms, body.retry_delay_max_ms)
    if body.retry_max is None:
        if any(one is not None for one in given) or body.retry_jitter or body.dead_letter_exchange is not None:
            raise Problem(Code.INVALID, "without retry_max there is no policy that the rest could belong to")
        return None
    if body.retry_backoff == "levels" and any(one is not None for one in given):
        raise Problem(Code.INVALID, "levels have delays of their own, retry_delay_* sets others")
    delay_ms = DELAY_MS if body.retry_delay_ms is None else body.retry_delay_ms
    longest_ms = max(DELAY_MAX_MS, delay_ms) if body.retry_delay_max_ms is None else body.retry_delay_max_ms
    if longest_ms < delay_ms:
        raise Problem(Code.INVALID, f"retry_delay_max_ms: {longest_ms} is less than the delay of {delay_ms}")
    if max(delay_ms, longest_ms) > delay_max_ms:
        raise Problem(
            Code.INVALID, f"a delay of {max(delay_ms, longest_ms)} ms is more than the {delay_max_ms} that can be kept"
        )
    return RetryPolicy(body.retry_max, Backoff(body.retry_backoff), delay_ms, longest_ms, body.retry_jitter)


def _settings(settings: GroupSettings) -> SettingsOut:
    retry = settings.retry or RetryPolicy(0)
    return SettingsOut(
        retry_max=None if settings.retry is None else retry.retries_max,
        retry_backoff=retry.backoff.value,
        retry_delay_ms=retry.delay_ms,
        retry_delay_max_ms=retry.delay_max_ms,
        retry_jitter=retry.jitter,
        dead_letter_exchange=settings.dead_letter_exchange,
    )


async def delete_group(call: Call[GroupPath, Parameters, None]) -> Reply:
    asked = _asked(call)
    asked.require_configure()
    asked.group()
    await asked.groups.delete(asked.name, by=asked.user)
    return Reply(status=204)


# -- looking ----------------------------------------------------------------------------------------------------


async def list_groups(call: Call[Parameters, Parameters, None]) -> Reply:
    """Groups of every vhost that the visitor may enter, but for those whose topics it may not read."""
    found = []
    for name, group in sorted(call.door.groups.groups.items()):
        if call.visitor.may_enter(name.vhost):
            asked = _Asked(call.door, call.visitor, name)
            progress = _progress(asked)
            if progress or not (group.committed or group.tenures):
                found.append(GroupSummary(**_summary(asked, group, progress)))
    return Reply(GroupList(groups=found))


async def get_group(call: Call[GroupPath, Parameters, None]) -> Reply:
    asked = _asked(call)
    group = asked.group()
    progress = _progress(asked)
    if not progress and (group.committed or group.tenures):
        raise Problem(Code.FORBIDDEN, f"none of the group's topics may be read by user '{asked.user}'")
    return Reply(
        GroupDescription(
            **_summary(asked, group, progress),
            settings=_settings(group.settings),
            waiting=asked.groups.retries.waiting_count(asked.name),
            members=[_member(asked, group, one) for one in group.members.values()],
            partitions=[
                GroupProgress(
                    topic=topic,
                    partition=asked.shown(one.slot)[1],
                    committed=one.committed,
                    first_offset=one.log_start,
                    end_offset=one.end,
                    lag=one.lag,
                    lost=one.lost,
                    member_id=one.member,
                )
                for topic, one in progress
            ],
        )
    )


def _progress(asked: _Asked) -> list[tuple[str, Progress]]:
    """Of the topics that the visitor may read, by name."""
    named = ((asked.maybe_topic(one.slot.stream), one) for one in asked.groups.progress(asked.name))
    return sorted(((topic, one) for topic, one in named if topic is not None), key=lambda pair: (pair[0], pair[1].slot))


def _summary(asked: _Asked, group: ConsumerGroup, progress: list[tuple[str, Progress]]) -> dict[str, Any]:
    state = "stable"
    if not group.members:
        state = "empty"
    elif any(tenure.revoked is not None for tenure in group.tenures.values()):
        state = "rebalancing"
    return {
        "group": _public(asked.name),
        "vhost": asked.name.vhost,
        "generation": group.generation,
        "state": state,
        "member_count": len(group.members),
        "topics": sorted({topic for topic, _one in progress}),
        "lag": sum(one.lag for _topic, one in progress),
    }


def _member(asked: _Asked, group: ConsumerGroup, member: Member) -> GroupMember:
    topics = (asked.maybe_topic(stream) for stream in member.topics)
    return GroupMember(
        member_id=member.id,
        name=member.name,
        user=member.user,
        topics=sorted(topic for topic in topics if topic is not None),
        session_timeout_ms=member.session_ms,
        partitions=[
            _partition(asked, slot)
            for slot, tenure in sorted(group.tenures.items(), key=lambda pair: pair[0])
            if tenure.member == member.id and asked.maybe_topic(slot.stream) is not None
        ],
    )


def operations() -> list[Operation]:
    of_member = (Code.UNKNOWN_MEMBER, Code.REFUSED)
    return [
        Operation("GET", PATH, list_groups, "List consumer groups", answers={200: GroupList}),
        Operation(
            "GET",
            f"{PATH}/{{group}}",
            get_group,
            "Members, assignment and lag of a group",
            parameters=GroupPath,
            answers={200: GroupDescription},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "PUT",
            f"{PATH}/{{group}}",
            configure_group,
            "Set a group up",
            "A retry policy for what its members fail with. The group is made if it is not there, and stays until "
            "somebody deletes it.",
            parameters=GroupPath,
            body=Settings,
            answers={200: SettingsOut, 201: SettingsOut},
            problems=(Code.NOT_FOUND, Code.INVALID, Code.REFUSED),
        ),
        Operation(
            "DELETE",
            f"{PATH}/{{group}}",
            delete_group,
            "Delete a group without members",
            "With its offsets and whatever waits to come back to it; not with its dead letters.",
            parameters=GroupPath,
            answers={204: None},
            problems=(Code.NOT_FOUND, Code.IN_USE),
        ),
        Operation(
            "POST",
            f"{PATH}/{{group}}/members",
            join_group,
            "Join a group",
            "The group is made by its first member. What the answer assigns may be polled at once.",
            parameters=GroupPath,
            body=Join,
            answers={201: Assignment},
            problems=(Code.NOT_FOUND, Code.REFUSED),
            is_logged=False,
        ),
        Operation(
            "PUT",
            f"{PATH}/{{group}}/members/{{member}}",
            heartbeat_member,
            "Say that a member lives, and what it has acted upon",
            "Within each session timeout; a poll or a commit says so too.",
            parameters=MemberPath,
            body=Heartbeat,
            answers={200: Assignment},
            problems=of_member,
            is_logged=False,
        ),
        Operation(
            "DELETE",
            f"{PATH}/{{group}}/members/{{member}}",
            leave_group,
            "Leave a group",
            parameters=MemberPath,
            answers={204: None},
            problems=of_member,
            is_logged=False,
        ),
        Operation(
            "GET",
            f"{PATH}/{{group}}/members/{{member}}/messages",
            poll_messages,
            "Poll for messages",
            "Answers as soon as there is a message or a new assignment, and empty after `wait_ms` (or half of the "
            "session timeout, if that is less). A later poll of the same member ends one that waits.",
            parameters=MemberPath,
            query=PollQuery,
            answers={200: Poll},
            problems=(*of_member, Code.STOPPING),
        ),
        Operation(
            "POST",
            f"{PATH}/{{group}}/offsets",
            commit_offsets,
            "Commit offsets",
            "The offset of the next message that the group has not done with, and what failed of those before it. "
            "All of them or none.",
            parameters=GroupPath,
            body=Commit,
            answers={200: Committed},
            problems=(*of_member, Code.NOT_HELD, Code.FENCED, Code.OFFSET_BEHIND, Code.IN_USE, Code.NOT_FOUND),
            is_logged=False,
        ),
        Operation(
            "PUT",
            f"{PATH}/{{group}}/offsets",
            reset_offsets,
            "Reset offsets",
            "Go on elsewhere in a topic. Refused while members hold it, unless forced; a dry run never is for that.",
            parameters=GroupPath,
            body=Reset,
            answers={200: ResetDone},
            problems=(Code.IN_USE, Code.REFUSED, Code.NOT_FOUND),
        ),
    ]
