"""Dead letters go back to where they died: one, some or all of a queue's, each exactly once. Driver.

A redrive goes through the queue that holds them as a filter does (scan.py), takes what is wanted and hands it to
transfers.py, which numbers, journals and sends it: so a record is in its dead-letter queue or back in its own, whatever
happens in between, and never in both. What is on its way when the broker stops is in the one or the other afterwards;
the same redrive asked again goes on with what is left. Only what is there when it begins is moved: what fails again and
comes back meanwhile stays for the next.

Back means: into the queue or consumer group it died in, and nobody else's, under the key it was published with, from
the first attempt on, with its time to live counted anew; to a group by way of the delay engine, as its retries come. A
record whose queue or group is gone, or that does not say where it died, stays; another queue may be named for all.
Every redrive is in the audit (audit.py), from its beginning to its end.
Neighbours: dead_letters.py reads and chooses, gateways/http/dead_letters.py asks.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import trio

from headrace.core_log.errors import HeadraceError, Refused
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, RELOCATED, Headers, RecordBatch
from headrace.gateways.delivery.audit import Audit
from headrace.gateways.delivery.dead_letters import DeadLetter, Selection, Wanted, read, revived
from headrace.gateways.delivery.delayed_duty import Duty
from headrace.gateways.delivery.lane import Lane, Stretch
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.scan import READ_BYTES, Patience, Scan
from headrace.gateways.delivery.transfers import Piece
from headrace.gateways.delivery.vhost import Target

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker
    from headrace.gateways.delivery.vhost import VirtualHost

K = TypeVar("K")
V = TypeVar("V")
_log = logging.getLogger(__name__)

# So many are taken at once, and so many may be on their way at a time.
TAKEN_AT_ONCE = 2048
UNDER_WAY_MAX = 16_384
# Redrives that have ended and are still told of.
ENDED_MAX = 100
# What is looked at of the audit at a start.
EVENTS_MAX = 1000
NOTE_PERIOD_S = 10.0
# Kinds of dead letters that are remembered.
KNOWN_MAX = 4096
KIND = "redrive"

# What of each of some properties tells of a death, and what is left without it.
Apart = Callable[[Sequence[bytes]], list[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True, eq=False)
class _Way:
    """What becomes of records that are alike."""

    is_wanted: bool
    # The queue it goes to, which is not there if there is no target.
    name: str = ""
    target: "Target | Duty | None" = None
    attributes: int = 0
    key: bytes = b""
    headers: Headers = ()

    def goes_with(self, other: "_Way") -> bool:
        same = self.target == other.target if isinstance(self.target, Duty) else self.target is other.target
        return same and self.attributes == other.attributes


_UNWANTED = _Way(False)


class State(StrEnum):
    RUNNING = "running"
    DONE = "done"
    CANCELLED = "cancelled"
    FAILED = "failed"
    # The broker stopped meanwhile. What was moved is moved.
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Request:
    vhost: str
    # The queue that holds them.
    queue: str
    wanted: Wanted = field(default_factory=Wanted)
    # Another queue than the one they died in.
    to: str | None = None
    # At most so many in a second, and so many in all.
    rate: float | None = None
    limit: int | None = None

    def told(self) -> dict[str, Any]:
        """For the audit."""
        wanted = self.wanted
        found: dict[str, Any] = {
            "vhost": self.vhost,
            "queue": self.queue,
            "to": self.to,
            "rate": self.rate,
            "limit": self.limit,
            "reason": wanted.reason,
            "died_before_us": wanted.died_before_us,
            "died_after_us": wanted.died_after_us,
            "key": wanted.key,
            "died_in": wanted.queue,
            "filter": None if wanted.tags is None else wanted.tags.canonical,
            "ids": sorted("/".join(map(str, place)) for place in wanted.places) or None,
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(slots=True)
class Progress:
    """How far a redrive is."""

    # Wanted and looked at.
    matched: int = 0
    moved: int = 0
    # Wanted, but they do not say where they died, or that queue is not there.
    without_way: int = 0
    # So many were in the queue when it began.
    total: int = 0
    by_queue: Counter[str] = field(default_factory=Counter)


class Redrive:
    """One run."""

    def __init__(self, redrives: "Redrives", id: UUID, request: Request, who: str, started_us: int) -> None:
        self.id = id
        self.request = request
        self.who = who
        self.started_us = started_us
        self.ended_us: int | None = None
        self.state = State.RUNNING
        self.failure = ""
        self.progress = Progress()
        self._redrives = redrives
        self._broker = redrives.broker
        self._stop = trio.CancelScope()
        self._under_way = 0
        self._fewer = trio.Event()
        self._noted_s = self._broker.env.clock.monotonic()
        self._targets: dict[str, Target] = {}
        # What becomes of records that tell this of their deaths, with these keys and attributes.
        self._known: dict[tuple[bytes, bytes, int], _Way] = {}
        # The batch that is looked at, and what is told of deaths there, and what else.
        self._batch: RecordBatch | None = None
        self._parts: list[tuple[bytes, bytes]] = []
        # Of what tells of deaths in a protocol's words, the headers that do.
        self._deaths: dict[tuple[int, bytes], Mapping[str, object]] = {}

    def cancel(self) -> None:
        """Take no more. What is on its way gets there."""
        if self.state is State.RUNNING:
            self._stop.cancel()

    # -- looking ------------------------------------------------------------------------------------------------

    def _judge(self, batch: RecordBatch, index: int) -> "tuple[_Way, bytes] | None":
        """What becomes of a record that is wanted and can go somewhere, and with which properties."""
        places = self.request.wanted.places
        if places and not any(offset == batch.offset_at(index) for _stream, _partition, offset in places):
            return None
        neutral = batch.headers[index] if batch.headers is not None else ()
        attributes = batch.attributes.at(index)
        if batch is not self._batch or index >= len(self._parts):
            # Another one, or one that has grown since.
            self._batch, self._parts = batch, self._redrives.apart(batch)
        told, left = self._parts[index]
        # Dead letters of one queue and one second tell the same, whatever else they say.
        known = (told, batch.keys[index], attributes)
        found = None if neutral else self._known.get(known)
        if found is None:
            found = self._look(batch, index, neutral, told)
            if not neutral:
                _remember(self._known, known, found)
        if not found.is_wanted:
            return None
        self.progress.matched += 1
        if found.target is None:
            self.progress.without_way += 1
            return None
        return found, left

    def _look(self, batch: RecordBatch, index: int, neutral: Headers, told: bytes) -> "_Way":
        request = self.request
        known = (batch.attributes.at(index) & PROTOCOL_MASK, told)
        deaths = self._deaths.get(known)
        if deaths is None:
            deaths = self._redrives.headers_of(batch, index)
            _remember(self._deaths, known, deaths)
        letter = read(batch, index, lambda _batch, _index: deaths)
        if letter is None:
            if request.to is None or not _asks_nothing(request.wanted):
                return _UNWANTED
            # An ordinary message that somebody sends elsewhere.
            letter = DeadLetter("", "", 0, 1, key=batch.keys[index].decode("utf-8", "surrogateescape"))
        if not request.wanted.matches(letter):
            return _UNWANTED
        name = request.to if request.to is not None else letter.queue
        target: Target | Duty | None
        if letter.is_of_group and request.to is None:
            origin = "" if letter.origin is None else letter.origin.stream
            target = self._redrives.group_way(request.vhost, name, origin)
        else:
            target = self._target(name)
        attributes = batch.attributes.at(index)
        return _Way(
            True,
            name,
            target,
            (attributes | PERSISTENT) & ~RELOCATED,
            letter.key.encode("utf-8", "surrogateescape"),
            revived(letter, neutral),
        )

    @property
    def _host(self) -> "VirtualHost":
        return self._broker.vhosts[self.request.vhost]

    def _target(self, name: str) -> "Target | None":
        queue = self._host.queues.get(name)
        if queue is None or name == self.request.queue:
            return None
        found = self._targets.get(name)
        if found is None:
            key = name.encode("utf-8", "surrogateescape")
            found = self._targets[name] = self._host.target(DEFAULT_EXCHANGE, key, [name]).only((queue,))
        return found

    def _forget_the_past(self) -> None:
        """Queues may have come and gone."""
        if not all(self._host.is_current(target) for target in self._targets.values()):
            self._targets, self._known = {}, {}

    async def count(self) -> None:
        """What it would do, and nothing more."""
        queue = self._redrives.source(self.request)
        self.progress.total = queue.ready_count
        selection = Selection(self.request.wanted, self._judge)
        for stretch in ready_in(queue):
            batch = stretch.loaded()
            for low, high in selection.spans(batch, stretch.index, stretch.index + stretch.count):
                for index in range(low, high):
                    found = selection.found(batch, index)
                    assert found is not None
                    if self._is_there(batch, index, stretch):
                        self.progress.by_queue[found[0].name] += 1
            await trio.lowlevel.checkpoint()
        self.state = State.DONE

    def _is_there(self, batch: RecordBatch, index: int, stretch: Stretch) -> bool:
        """It is the very record that was asked for, where somebody asked for that."""
        places = self.request.wanted.places
        source = stretch.source
        return not places or (str(source.stream_id), source.partition, int(batch.offset_at(index))) in places

    # -- moving -------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        clock = self._broker.env.clock
        try:
            queue = self._redrives.source(self.request)
            self.progress.total = queue.ready_count
            await self._broker.committed()
            with self._stop:
                for lane in reversed(queue.lanes):
                    await self._move_lane(queue, lane)
            while self._under_way:
                self._fewer = trio.Event()
                await self._fewer.wait()
            self.state = State.CANCELLED if self._stop.cancelled_caught else State.DONE
        except HeadraceError as error:
            self.state, self.failure = State.FAILED, str(error)
        finally:
            self.ended_us = clock.wall_us()

    async def _move_lane(self, queue: Queue, lane: Lane) -> None:
        end = lane.next_seq
        selection = Selection(self.request.wanted, self._judge)
        scan = Scan(lane, selection)
        started = self._broker.env.clock.monotonic()
        try:
            while (room := await self._room(started)) > 0:
                self._forget_the_past()
                if queue.deleted:
                    raise Refused(f"queue '{queue.name}' was deleted meanwhile")
                patience = Patience(READ_BYTES)
                stretch = scan.take(room, early=False, patience=patience)
                if stretch is not None:
                    self._send(queue, lane, scan, stretch, end, selection)
                elif patience.left > 0 or scan.seq >= end:
                    return
                if scan.seq >= end and not any(first < end for first, _last in scan.untested):
                    return
                await trio.lowlevel.checkpoint()
        finally:
            scan.close()

    def _send(
        self, queue: Queue, lane: Lane, scan: Scan, stretch: Stretch, end: int, selection: Selection[tuple[_Way, bytes]]
    ) -> None:
        batch = stretch.loaded()
        count = min(stretch.count, max(end - stretch.seq, 0))
        if self.request.wanted.places:
            count = min(count, 1) if self._is_there(batch, stretch.index, stretch) else 0
        if count < stretch.count:
            # Came after the beginning, or is another record at the same offset of another log.
            taken = stretch.split(count) if count else None
            rest = (stretch.seq, stretch.seq + stretch.count)
            lane.put_back(stretch)
            if taken is None:
                scan.untested.remove(*rest)
                return
            stretch = taken
        self._under_way += stretch.count
        pieces: list[Piece] = []
        now_us = self._broker.env.clock.wall_us()
        for _place, low, high in batch.tags.spans(stretch.index, stretch.index + stretch.count):
            found = [one for index in range(low, high) if (one := selection.found(batch, index)) is not None]
            ways = [way for way, _left in found]
            first = 0
            while first < len(ways):
                way, last = ways[first], first + 1
                while last < len(ways) and (ways[last] is way or ways[last].goes_with(way)):
                    last += 1
                pieces.append(_piece(found[first:last], batch, low + first, now_us))
                self.progress.by_queue[way.name] += last - first
                first = last
        self._broker.transfers.send_back(self._host, queue, stretch, pieces, self._told)

    async def _room(self, started: float) -> int:
        """How many may be taken now; waits until there are some. 0: it was as many as were asked for."""
        request, clock = self.request, self._broker.env.clock
        if clock.monotonic() - self._noted_s > NOTE_PERIOD_S:
            # Should the broker not live to see the end, the audit tells how far it came.
            self._noted_s = clock.monotonic()
            self._redrives.note(self)
        taken = self.progress.by_queue.total()
        if request.limit is not None and taken >= request.limit:
            return 0
        while self._under_way >= UNDER_WAY_MAX:
            self._fewer = trio.Event()
            await self._fewer.wait()
        room = TAKEN_AT_ONCE if request.limit is None else min(TAKEN_AT_ONCE, request.limit - taken)
        if request.rate is None:
            return room
        allowed = int((clock.monotonic() - started) * request.rate) + 1 - taken
        while allowed <= 0:
            await clock.sleep((1 - allowed) / request.rate)
            allowed = int((clock.monotonic() - started) * request.rate) + 1 - taken
        return min(room, allowed)

    def _told(self, count: int, is_moved: bool) -> None:
        self._under_way -= count
        if is_moved:
            self.progress.moved += count
        self._fewer.set()

    def told(self) -> dict[str, Any]:
        progress = self.progress
        return {
            "id": str(self.id),
            **self.request.told(),
            "state": str(self.state),
            "matched": progress.matched,
            "moved": progress.moved,
            "without_way": progress.without_way,
            **({"failure": self.failure} if self.failure else {}),
        }


class Redrives:
    """All redrives of a node. `run` must be running for one to begin."""

    def __init__(self, broker: "Broker", audit: Audit) -> None:
        self.broker = broker
        # By protocol. What has none tells of its deaths when it is tried anew.
        self.aparts: Mapping[int, Apart] = {}
        # What died in a consumer group: vhost, group and the stream it was in first -> how it comes back.
        self.group_way: Callable[[str, str, str], Duty | None] = lambda vhost, group, stream: None
        self._audit = audit
        # The newest last.
        self._all: dict[UUID, Redrive] = {}
        # What the audit tells of those of earlier lives, the newest first.
        self.earlier: Sequence[Mapping[str, Any]] = ()
        self._started, self._to_start = trio.open_memory_channel[Redrive](1024)

    async def load(self) -> None:
        """Find out what earlier lives did, and did not come to the end of."""
        last: dict[str, dict[str, Any]] = {}
        # The newest first, and of each redrive its last word; one that was under way is among the newest.
        for event in (await self._audit.page(KIND, limit=EVENTS_MAX)).events:
            last.setdefault(event.about["id"], {"time_us": event.time_us, "who": event.who, **event.about})
        for told in last.values():
            if told["state"] == State.RUNNING:
                told["state"] = str(State.INTERRUPTED)
                about = {name: value for name, value in told.items() if name not in ("time_us", "who")}
                self._audit.note(KIND, told["who"], about)
        self.earlier = list(last.values())[:ENDED_MAX]

    def apart(self, batch: RecordBatch) -> list[tuple[bytes, bytes]]:
        """Where nobody can tell them apart, all of the properties may tell of a death, and they stay as they are."""
        found: list[tuple[bytes, bytes]] = []
        for attributes, low, high in batch.attributes.spans(0, batch.count):
            apart, part = self.aparts.get(attributes & PROTOCOL_MASK), batch.properties[low:high]
            found += list(zip(part, part, strict=True)) if apart is None else apart(part)
        return found

    def headers_of(self, batch: RecordBatch, index: int) -> Mapping[str, object]:
        (properties,) = self.broker.properties_of(batch, index, index + 1)
        # Most that was never dead-lettered says so at once.
        return self.broker.fields_of(properties)[0] if b"x-death" in properties else {}

    def source(self, request: Request) -> Queue:
        """The queue that holds them. Raises NotFound, Refused."""
        host = self.broker.vhosts.get(request.vhost)
        if host is None:
            raise Refused(f"no vhost '{request.vhost}'")
        queue = host.queue(request.queue)
        if queue.settings.stream:
            raise Refused(
                f"queue '{queue.name}' is a stream: nothing can be taken out of it, so nothing goes back from it"
            )
        if request.to is not None:
            if request.to == request.queue:
                raise Refused(f"queue '{queue.name}' cannot be redriven to itself")
            host.queue(request.to)
        return queue

    def start(self, request: Request, who: str) -> Redrive:
        """Raises what `source` raises, and Refused when one of this queue is running."""
        self.source(request)
        for one in self._all.values():
            same = (one.request.vhost, one.request.queue) == (request.vhost, request.queue)
            if one.state is State.RUNNING and same:
                raise Refused(f"redrive {one.id} of queue '{request.queue}' is still running")
        found = Redrive(self, self.broker.env.ids.uuid(), request, who, self.broker.env.clock.wall_us())
        self._started.send_nowait(found)
        self._all[found.id] = found
        ended = [one for one in self._all.values() if one.state is not State.RUNNING]
        for one in ended[: max(len(ended) - ENDED_MAX, 0)]:
            del self._all[one.id]
        return found

    async def dry_run(self, request: Request, who: str) -> Redrive:
        found = Redrive(self, self.broker.env.ids.uuid(), request, who, self.broker.env.clock.wall_us())
        await self.broker.committed()
        await found.count()
        found.ended_us = self.broker.env.clock.wall_us()
        return found

    def get(self, id: UUID) -> Redrive | None:
        return self._all.get(id)

    def list(self) -> list[Redrive]:
        """The newest first."""
        return list(reversed(self._all.values()))

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            async for one in self._to_start:
                nursery.start_soon(self._run, one)

    async def _run(self, one: Redrive) -> None:
        await self._audit.noted(KIND, one.who, one.told())
        try:
            await one.run()
        except trio.Cancelled:
            one.state = State.INTERRUPTED
            raise
        finally:
            self.note(one)
            _log.info("a redrive has ended", extra=one.told())

    def note(self, one: Redrive) -> None:
        self._audit.note(KIND, one.who, one.told())


def _piece(found: Sequence[tuple[_Way, bytes]], batch: RecordBatch, first: int, now_us: int) -> Piece:
    """Neighbours that are appended together, from this index on."""
    way, count = found[0][0], len(found)
    target, tags = way.target, batch.tags_at(first)
    assert target is not None
    if tags and not isinstance(target, Duty):
        target = Target(target.exchange, target.key, target.route, target.log, target.queues, target.through, tags)
    return Piece(
        target,
        way.attributes,
        tags,
        [one.key for one, _left in found],
        [left for _one, left in found],
        batch.values[first : first + count],
        [one.headers for one, _left in found],
        # What is parked on its way is due at once.
        [now_us] * count,
    )


def _remember(known: dict[K, V], key: K, value: V) -> None:
    if len(known) >= KNOWN_MAX:
        known.clear()
    known[key] = value


def ready_in(queue: Queue) -> Iterator[Stretch]:
    """What is ready in a queue, in its order; not to be changed."""
    return (stretch for lane in reversed(queue.lanes) for stretch in lane.ready_stretches())


def _asks_nothing(wanted: Wanted) -> bool:
    """Of how a record died."""
    asked = (wanted.reason, wanted.died_before_us, wanted.died_after_us, wanted.queue)
    return all(one is None for one in asked)
