"""Consumer groups over HTTP: join, heartbeat, leave, poll, commit, reset, lag. Driver.

A member says with each request which generation it has acted upon; what it is told to give up it stops reading,
commits, and gives up by naming the generation that told it so. The loop of a simple client is: poll, work, commit
`positions`, poll again with the generation of the answer. `{group}` is a group of vhost `/`, or `vhost|group`; it reads
topics of its own vhost, and everything here asks for the right to read them. Neighbours:
gateways/delivery/consumer_groups_coordinator.py does the work.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Annotated, Any, Literal

import trio
from msgspec import Meta
from msgspec.structs import asdict

from headrace.controller.entities import PARTITIONS_MAX
from headrace.controller.errors import NotFound
from headrace.core_log.errors import HeadraceError
from headrace.core_log.ids import StreamId
from headrace.core_log.record import Gap, RecordBatch
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.consumer_groups import ConsumerGroup, Member, Standing, Start
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_coordinator import Polled, Progress
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.topics import DEFAULT_VHOST, Place, TopicKind, parse_name
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Message, filter_of, shown, time_us_of
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PATH = "/api/v1/consumer-groups"
NAME_BYTES_MAX = 255

INTEGER_MAX = 2**53

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


class PolledMessage(Message, frozen=True, kw_only=True, omit_defaults=True):
    topic: str


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
        asked = parse_name(topic)
        if asked.vhost != self.name.vhost:
            raise Problem(Code.INVALID, f"'{topic}' is in vhost '{asked.vhost}', and the group in '{self.name.vhost}'")
        self._visitor.require(Right.READ, asked.vhost, asked.name)
        place = self.door.topics.resolve(asked)
        self.door.group_topics.note(place)
        return place

    def streams(self, topics: Iterable[str]) -> frozenset[StreamId]:
        return frozenset(self.place(topic).stream_id for topic in topics)

    def slots(self, positions: Iterable[Position]) -> dict[Slot, int]:
        found: dict[Slot, int] = {}
        for one in positions:
            slot = Slot(self.place(one.topic).stream_id, one.partition)
            if slot in found:
                raise Problem(Code.INVALID, f"partition {one.partition} of '{one.topic}' is named twice")
            found[slot] = one.offset
        return found

    def maybe_topic(self, stream: StreamId) -> str | None:
        """Its name, if it is there and the visitor may read it."""
        place = self.door.group_topics.maybe_place(stream)
        if place is None or not self._visitor.may(Right.READ, place.vhost, place.name):
            return None
        return place.public_name

    def topic(self, stream: StreamId) -> str:
        """Of what a member holds; the right to it may have been taken away since."""
        return self.maybe_topic(stream) or str(stream)

    def require_rights(self, member_id: str) -> None:
        """What a member asked for once it must still be allowed to read."""
        group = self.groups.groups.get(self.name)
        member = None if group is None else group.members.get(member_id)
        for stream in () if member is None else member.topics:
            place = self.door.group_topics.maybe_place(stream)
            if place is not None:
                self._visitor.require(Right.READ, place.vhost, place.name)

    def reader_of_keys(self, stream: StreamId) -> Callable[[bytes], bool] | None:
        """On a topic exchange a topic permission narrows the keys that somebody may read; None: it is none."""
        place = self.door.group_topics.maybe_place(stream)
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
            Assigned(
                topic=asked.topic(slot.stream),
                partition=slot.partition,
                generation=since,
                offset=committed[slot].offset,
            )
            for slot, since in standing.holds
        ],
        "give_up": [_partition(asked, slot) for slot in standing.give_up],
    }


def _partition(asked: _Asked, slot: Slot) -> GroupPartition:
    return GroupPartition(topic=asked.topic(slot.stream), partition=slot.partition)


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
        messages=[
            PolledMessage(
                topic=asked.topic(slot.stream), **asdict(shown(asked.door.words, slot.partition, batch, index))
            )
            for slot, batch, index in polled.records
        ],
        gaps=[
            Hole(
                topic=asked.topic(slot.stream),
                partition=slot.partition,
                offset=offset,
                next_offset=next_offset,
                reason=_reason(reason),
            )
            for slot, offset, next_offset, reason in polled.missing
        ],
        positions=[
            Position(topic=asked.topic(slot.stream), partition=slot.partition, offset=place.offset)
            for slot, place in sorted(polled.places.items())
        ],
    )


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
        await asked.groups.commit_from_outside(asked.name, offsets)
    else:
        if body.generation is None:
            raise Problem(Code.INVALID, "a member commits with the generation that it has acted upon")
        await asked.groups.commit(
            asked.name, offsets, member_id=body.member_id, user=asked.user, generation=body.generation
        )
    return Reply(Committed(generation=asked.group().generation, offsets=body.offsets))


async def reset_offsets(call: Call[GroupPath, Parameters, Reset]) -> Reply:
    asked = _asked(call)
    body = call.body
    if sum(one is not None for one in (body.to, body.offset, body.timestamp)) != 1:
        raise Problem(Code.INVALID, "one of `to`, `offset` and `timestamp` says where to go on")
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
            members=[_member(asked, group, one) for one in group.members.values()],
            partitions=[
                GroupProgress(
                    topic=topic,
                    partition=one.slot.partition,
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
            "The offset of the next message that the group has not done with. All of them or none.",
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
