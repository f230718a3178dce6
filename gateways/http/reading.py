"""Messages of a partition read over HTTP, from any place in it. Driver.

Readers keep their own places and take nothing away. They see what is committed and nothing else (K3). An offset that is
not there (any more) is no error: the answer begins with what there is, and says where that was. A filter that matches
little may go through much: a request looks at so many bytes and answers how far it came.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Literal

import trio
from msgspec import Meta

from headrace.controller.errors import NotFound
from headrace.core_log.log import PartitionLog
from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.topics import Place, TopicKind
from headrace.gateways.http.operations import Answer, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem
from headrace.gateways.http.records import Message, filter_of, shown, time_us_of
from headrace.gateways.http.topics import PATH, PartitionPath, found
from headrace.gateways.http.visitor import Visitor
from headrace.gateways.http.waiting import Waiting, count_of, maybe_waiting, messages_of

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

LIMIT_MAX = 10_000
MIB = 1024 * 1024
# What one request goes through at most before it answers with what it has.
SCAN_BYTES_MAX = 32 * MIB
# So many messages are written down before others on the loop get a turn.
_PER_TURN = 250
_OFFSET_MAX = 2**62


class ReadQuery(Parameters, frozen=True, kw_only=True):
    offset: Annotated[
        Annotated[int, Meta(ge=-_OFFSET_MAX, le=_OFFSET_MAX)] | None,
        Meta(description="where to begin; negative: so many before the end. Not given: with the oldest there is"),
    ] = None
    timestamp: Annotated[
        str | None, Meta(description="begin with the first record of this time: ms since 1970, or RFC 3339")
    ] = None
    limit: Annotated[int, Meta(ge=1, le=LIMIT_MAX, description="messages at most")] = 100
    bytes_max: Annotated[int, Meta(ge=1, le=16 * MIB, description="of keys and values; one message always fits")] = MIB
    filter: Annotated[str | None, Meta(description="a tag expression: `eu || (vip && !test)`")] = None
    wait_ms: Annotated[
        int, Meta(ge=0, le=3_600_000, description="if there is nothing, wait so long for something (http.poll_s_max)")
    ] = 0
    encoding: Annotated[Literal["auto", "base64"], Meta(description="auto: text where it is UTF-8; base64: always")] = (
        "auto"
    )


class Absence(Answer, frozen=True, kw_only=True):
    """Offsets of the page that hold no record, for another reason than that a filter left them out."""

    offset: int
    next_offset: int
    reason: Annotated[
        str,
        Meta(
            description="unclean_start: the log was not closed, and nothing was there; unclean_election: a node was "
            "made leader by force, and what was there is lost; repaired: it could not be read back; compacted: later "
            "records of the same keys took their place"
        ),
    ]


class MessagePage(Answer, frozen=True, kw_only=True):
    topic: str
    partition: int
    offset: Annotated[int, Meta(description="where reading began: not where asked, if nothing is there (any more)")]
    next_offset: Annotated[int, Meta(description="where to go on")]
    first_offset: Annotated[int, Meta(description="the oldest record there is")]
    end_offset: Annotated[int, Meta(description="where readers stop")]
    messages: list[Message]
    gaps: list[Absence]


@dataclass(slots=True)
class _Page:
    offset: int
    next_offset: int
    messages: list[Message]
    gaps: list[Absence] = field(default_factory=list)


class Reader:
    """One request's way through a partition."""

    def __init__(self, door: "HttpDoor", visitor: Visitor, place: Place, query: ReadQuery) -> None:
        self._door = door
        self._visitor = visitor
        self._place = place
        self._query = query
        self._filter = filter_of(query.filter)
        self._time_us: int | None = None
        if query.timestamp is not None:
            self._time_us = time_us_of(query.timestamp, code=Code.INVALID_PARAMETER)
        exchange = None
        if place.kind is TopicKind.EXCHANGE:
            exchange = door.broker.vhosts[place.vhost].router.exchange(place.name)
        # On a topic exchange a topic permission narrows the keys that somebody may read.
        self._checks_keys = exchange is not None and exchange.kind == "topic"

    def start_in(self, log: PartitionLog) -> int:
        """The offset to begin at, within what there is."""
        query = self._query
        if self._time_us is not None:
            offset = int(log.offset_at_time(self._time_us))
        elif query.offset is None:
            offset = int(log.log_start)
        else:
            offset = query.offset if query.offset >= 0 else log.high_watermark + query.offset
        return max(int(log.log_start), min(offset, int(log.high_watermark)))

    async def page(self, log: PartitionLog, offset: int) -> _Page:
        """What there is from here on."""
        page = _Page(offset, offset, [])
        room = self._query.bytes_max
        scanned = 0
        while scanned < SCAN_BYTES_MAX:
            # Retention may have gone on while others had their turn.
            page.next_offset = max(page.next_offset, int(log.log_start))
            end = int(log.high_watermark)
            for batch, first, last in log.read(page.next_offset, end=end):
                scanned += batch.byte_count
                if batch.gap is not None:
                    upto = min(int(batch.next_offset), end)
                    page.gaps.append(Absence(offset=page.next_offset, next_offset=upto, reason=batch.gap.name.lower()))
                wanted = range(first, last) if self._filter is None else self._filter.select(batch, first, last)
                for index in wanted:
                    key = batch.keys[index]
                    if self._checks_keys and not self._may_read(key):
                        continue
                    size = len(key) + len(batch.values[index])
                    if len(page.messages) == self._query.limit or (page.messages and size > room):
                        page.next_offset = int(batch.offset_at(index))
                        return page
                    room -= size
                    base64 = self._query.encoding == "base64"
                    page.messages.append(shown(self._door.words, log.partition, batch, index, base64=base64))
                    if len(page.messages) % _PER_TURN == 0:
                        await trio.lowlevel.checkpoint()
                page.next_offset = min(int(batch.next_offset), end)
            if page.next_offset >= log.high_watermark or len(page.messages) == self._query.limit:
                return page
            await trio.lowlevel.checkpoint()
            self.check()
        return page

    def _may_read(self, key: bytes) -> bool:
        text = key.decode("utf-8", "surrogateescape")
        place, visitor = self._place, self._visitor
        return visitor.access.may_use_key(visitor.name, place.vhost, place.name, Right.READ, text)

    def check(self) -> None:
        """After others had their turn: is it still there, and may it still be read?"""
        if not self._door.topics.is_there(self._place):
            raise NotFound(f"'{self._place.public_name}' was deleted meanwhile")
        self._visitor.require(Right.READ, self._place.vhost, self._place.name)


async def read_messages(call: Call[PartitionPath, ReadQuery, None]) -> Reply:
    door, query, number = call.door, call.query, call.path.partition
    if query.offset is not None and query.timestamp is not None:
        raise Problem(Code.INVALID_PARAMETER, "offset and timestamp cannot both be given")
    waiting = maybe_waiting(door, call.visitor, call.path.topic)
    if waiting is not None:
        return Reply(await _waiting_page(call, waiting))
    place = found(door, call.visitor, Right.READ, call.path.topic)
    reader = Reader(door, call.visitor, place, query)
    log = door.topics.log_at(place, number)
    if log is None and query.wait_ms:
        log = _first_log(door, place)
    if log is None:
        page, first, end = _Page(0, 0, []), 0, 0
    else:
        wait_s = min(query.wait_ms / 1000, door.config.poll_s_max)
        page = await _read(reader, log, wait_s, call.abandoned)
        first, end = int(log.log_start), int(log.high_watermark)
    return Reply(
        MessagePage(
            topic=place.public_name,
            partition=number,
            offset=page.offset,
            next_offset=page.next_offset,
            first_offset=first,
            end_offset=end,
            messages=page.messages,
            gaps=page.gaps,
        )
    )


async def _waiting_page(call: Call[PartitionPath, ReadQuery, None], waiting: Waiting) -> MessagePage:
    """What waits for another attempt, as it stands now. A filter looks at each: there are no summaries to go by."""
    door, query, number = call.door, call.query, call.path.partition
    wanted = filter_of(query.filter)
    due_us = None if query.timestamp is None else time_us_of(query.timestamp, code=Code.INVALID_PARAMETER)
    count = count_of(door, waiting, number)
    offset = query.offset or 0
    start = max(0, count + offset) if offset < 0 else min(offset, count)
    base64 = query.encoding == "base64"
    messages = await messages_of(door, waiting, number, start, query.limit, due_us=due_us, wanted=wanted, base64=base64)
    following = messages[-1].offset + 1 if messages else start
    if wanted is not None and len(messages) < query.limit:
        # All the others were looked at.
        following = max(following, count)
    if not messages and query.wait_ms:
        with trio.move_on_after(min(query.wait_ms / 1000, door.config.poll_s_max)):
            await call.abandoned()
    return MessagePage(
        topic=waiting.public_name,
        partition=number,
        offset=messages[0].offset if messages else start,
        next_offset=following,
        first_offset=0,
        end_offset=count_of(door, waiting, number),
        messages=messages,
        gaps=[],
    )


async def _read(reader: Reader, log: PartitionLog, wait_s: float, abandoned: Callable[[], Awaitable[None]]) -> _Page:
    start = reader.start_in(log)
    page = await reader.page(log, start)
    deadline = trio.current_time() + wait_s
    while not page.messages and trio.current_time() < deadline:
        if page.next_offset >= log.high_watermark and not await _more(log, page.next_offset, deadline, abandoned):
            break
        reader.check()
        gaps = page.gaps
        page = await reader.page(log, page.next_offset)
        page.gaps[:0] = gaps
    page.offset = start
    return page


def _first_log(door: "HttpDoor", place: Place) -> PartitionLog | None:
    """The log of an exchange or queue to which nothing was ever written, so that it can be waited for."""
    host = door.broker.vhosts[place.vhost]
    if place.kind is TopicKind.EXCHANGE:
        return host.exchange_log(place.name)
    queue = host.queues.get(place.name)
    return door.broker.own_log(queue, place.vhost) if queue is not None and queue.durable else None


async def _more(log: PartitionLog, offset: int, deadline: float, abandoned: Callable[[], Awaitable[None]]) -> bool:
    """Wait until something behind the offset is committed, or the log is gone; False: there is no time for it."""
    came = trio.Event()

    def tell(_log: PartitionLog) -> None:
        came.set()

    log.advanced.append(tell)
    try:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = deadline

            async def give_up() -> None:
                await abandoned()
                nursery.cancel_scope.cancel()

            nursery.start_soon(give_up)
            await came.wait()
            nursery.cancel_scope.cancel()
    finally:
        log.advanced.remove(tell)
    return came.is_set()


def operations() -> list[Operation]:
    return [
        Operation(
            "GET",
            f"{PATH}/{{topic}}/partitions/{{partition}}/messages",
            read_messages,
            "Read messages of a partition",
            "From any place in it, without taking anything away; only what is committed. Go on with `next_offset`.",
            parameters=PartitionPath,
            query=ReadQuery,
            answers={200: MessagePage},
            problems=(Code.NOT_FOUND, Code.INVALID),
        )
    ]
