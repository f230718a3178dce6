"""What waits for another attempt, read as the topic `<queue>.retry` or `<group>.retry`. Driver.

It is no log but a look into the delay engine: messages by when they come back, numbered 0, 1, 2... as they stand now;
`first_offset` is 0 and `end_offset` how many wait; a message that comes back moves those behind it. A queue's has one
partition, a consumer group's one for each topic that something failed in. Who may read the queue, or that topic, may
read it. A topic, exchange or queue that is really called so comes first.
Neighbours: reading.py and topics.py ask here first; delayed.py cancels and moves what is listed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.controller.errors import NotFound
from headrace.core_log.log import PartitionLog
from headrace.delay.parked import Pending
from headrace.filtering.expression import Expression
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.consumer_groups_retries import RETRY_END
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty
from headrace.gateways.delivery.retry import times_in
from headrace.gateways.delivery.topics import TopicKind, parse_name
from headrace.gateways.http.records import Message, plain, protocol_of, time_text, written
from headrace.gateways.http.visitor import Visitor

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

PAGE = 500


@dataclass(frozen=True, slots=True)
class Waiting:
    """What one queue or group has waiting, by partition."""

    vhost: str
    name: str
    public_name: str
    duties: Mapping[int, Duty]


def maybe_waiting(door: "HttpDoor", visitor: Visitor, text: str) -> Waiting | None:
    """What a name leads to; None: it is no such topic. Raises Problem for who may not read it."""
    asked = parse_name(text)
    host = door.broker.vhosts.get(asked.vhost)
    base = asked.name.removesuffix(RETRY_END)
    if host is None or base == asked.name or asked.kind is TopicKind.EXCHANGE or door.topics.exists(asked):
        return None
    queue = host.queues.get(base)
    if queue is not None and not queue.settings.stream:
        visitor.require_vhost(asked.vhost)
        visitor.require(Right.READ, asked.vhost, base)
        return Waiting(asked.vhost, asked.name, text, {0: Duty(DutyKind.RETRY, host.name, base, queue.view_id)})
    group = GroupName(asked.vhost, base)
    if asked.kind is not None or group not in door.groups.groups:
        return None
    visitor.require_vhost(asked.vhost)
    for origin in door.groups.groups[group].returns:
        place = door.group_topics.maybe_place(origin)
        if place is not None:
            visitor.require(Right.READ, place.vhost, place.name)
    return Waiting(asked.vhost, asked.name, text, door.groups.retries.duties(group))


def intake_of(door: "HttpDoor") -> PartitionLog:
    """The log in which all of it was parked."""
    return door.broker.delayed.delays.intake


def count_of(door: "HttpDoor", waiting: Waiting, partition: int) -> int:
    """Raises NotFound for a partition that is not there."""
    return door.broker.delayed.delays.count(_target(waiting, partition))


def _target(waiting: Waiting, partition: int) -> bytes:
    duty = waiting.duties.get(partition)
    if duty is None:
        raise NotFound(f"'{waiting.public_name}' has no partition {partition}")
    return encode_duty(duty)


async def messages_of(
    door: "HttpDoor",
    waiting: Waiting,
    partition: int,
    start: int,
    limit: int,
    *,
    due_us: int | None,
    wanted: Expression | None,
    base64: bool,
) -> list[Message]:
    """Those from a number on, or the first that is due then, whose tags are wanted."""
    found: list[Message] = []
    cursor: str | None = None
    seen = 0
    while len(found) < limit:
        page = await door.broker.delayed.delays.list(after=cursor, limit=PAGE, target=_target(waiting, partition))
        for one in page.records:
            is_asked_for = seen >= start and (due_us is None or one.due_us >= due_us)
            if is_asked_for and len(found) < limit and (wanted is None or wanted.matches(one.tags)):
                found.append(_shown(door, partition, seen, one, base64=base64))
            seen += 1
        cursor = page.cursor
        if cursor is None:
            break
    return found


def _shown(door: "HttpDoor", partition: int, number: int, one: Pending, *, base64: bool) -> Message:
    properties, headers = plain(door.words, one.key, one.properties, one.attributes, one.headers)
    key, key_encoding = written(one.key, base64=base64)
    value, encoding = written(one.value, base64=base64)
    timestamp_us, expiry_us = times_in(one.headers)
    return Message(
        partition=partition,
        offset=number,
        timestamp=time_text(timestamp_us or one.parked_us),
        key=key,
        key_encoding=key_encoding,
        value=value,
        encoding=encoding,
        headers=headers,
        tags=list(one.tags),
        protocol=protocol_of(one.attributes),
        properties=properties,
        expires_at=time_text(expiry_us) if expiry_us else None,
        relocated=True,
        deliver_at=time_text(one.due_us),
        schedule_id=written(one.id)[0],
    )
