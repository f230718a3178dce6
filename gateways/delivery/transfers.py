"""Records that leave a queue for another log, each exactly once (K7): dead letters, retries. Driver over outbox.py.

Where they go (`_letter`): what failed under a retry policy is parked (delayed.py) and comes back (returns.py) while the
policy has attempts left; otherwise to the dead-letter exchange, as in RabbitMQ; without one, what failed its last
attempt or its delivery limit, or what no filter wants, goes to the queue `<queue>.dlq`, which is made when it is first
needed and outlives the queue; the rest is dropped. A queue that is full and refuses publishes gets no dead letters: one
for a `.dlq`, or of at-least-once, stays where it is until there is room. The way of each, if its queue is durable:

    planned    taken out of its lane (unacked), routed and stamped; nothing is written
    numbered   when the queue's state is drafted for the journal: the next numbers of its outbox for the target's log
    journalled the state with these numbers is committed in `__views`; then they are
    sent       appended to the target with their numbers, whose queues hear of them, and once that is committed
    settled    in their lane; the next state in the journal no longer speaks of them

A crash finds them in the journal or not. Not: they are back in their queue. Otherwise the target says which numbers it
has: those are settled, the others are planned anew, since nothing of them was ever appended. What is planned within one
turn goes in runs: one state in the journal, one batch in the target. A queue that is not kept over a restart has no
journal: its dead letters are published at once and settled when they are committed.

`Death` and `Stamped` are how a door writes a death into its properties (gateways/amqp/deaths.py).
Neighbours: queue.py lets records go, broker.py has the journal, lane.py the places.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING
from uuid import UUID

import trio

from headrace.controller.entities import NAME_BYTES_MAX
from headrace.controller.table import EMPTY
from headrace.core_log.errors import DiskFull, Refused
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import Outbox, TargetPartition, Transfer
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, RELOCATED, Headers, Producer, Protocol, RecordBatch
from headrace.filtering.tags import Tags
from headrace.gateways.delivery import journal
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Overflow, Queue, Reason
from headrace.gateways.delivery.relocation import with_origin
from headrace.gateways.delivery.retry import after_failure, attempt_of, told, with_times
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE, Fields

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker
    from headrace.gateways.delivery.vhost import Target, VirtualHost

_log = logging.getLogger(__name__)

# What a queue's own dead-letter queue is called, behind the queue's name.
DEAD_LETTER_END = ".dlq"
# What found no room, or at-least-once found no way for, is tried again after so long.
RETRY_S = 1.0
# The same for a dead-letter queue that cannot be made.
GRAVE_RETRY_S = 10.0
# The journal of transfers is written as soon as there are any, but the larger the states the less often.
JOURNAL_BYTES_PER_S = 32 * 1024 * 1024
JOURNAL_PAUSE_MIN_S = 0.001
_RESTATED = frozenset((int(Protocol.MQTT_3), int(Protocol.MQTT_5)))


@dataclass(frozen=True, slots=True)
class Death:
    """One record leaves a queue for a dead-letter exchange."""

    queue: str
    reason: Reason
    exchange: bytes
    routing_key: bytes
    time_us: int
    # The queue has a dead-letter routing key, which takes the place of all that the record came with.
    rerouted: bool


@dataclass(frozen=True, slots=True)
class Stamped:
    """What a protocol makes of a record that died."""

    properties: bytes
    # Keys to route with besides the routing key.
    copies: Sequence[str]
    headers: Fields
    # Names of queues that would close a cycle, and so do not get it.
    cycling: frozenset[str]


# How a protocol writes a death into its properties.
Stamp = Callable[[bytes, Death], Stamped]


# Writes these headers into the properties of a record, in the words of its protocol.
Mark = Callable[[bytes, Mapping[str, str | int]], bytes]

# What is a failure of whoever consumed it, and so has another attempt.
FAILURES = frozenset((Reason.REJECTED, Reason.DELIVERY_LIMIT))
# What goes to the queue's own dead-letter queue without a retry policy, too.
_NEVER_NOWHERE = frozenset((Reason.DELIVERY_LIMIT, Reason.UNMATCHED))


# How many of those that were to be sent back have been (True), or stay (False).
Told = Callable[[int, bool], None]


class Way(Enum):
    """Why a record goes nowhere now."""

    # Nobody would get it.
    NONE = auto()
    # Its queue has to be made first.
    NOT_YET = auto()
    # Its queue takes none now: it stays, and is tried again.
    STUCK = auto()
    # It is of no use to anybody.
    GONE = auto()


@dataclass(frozen=True, slots=True)
class Letter:
    """One record with where it goes: to the queues of a target, or to wait until it is due."""

    way: "Target | Duty"
    attributes: int
    tags: Tags
    key: bytes
    properties: bytes
    value: bytes
    headers: Headers = ()
    due_us: int = 0


@dataclass(slots=True, eq=False)
class Piece:
    """Letters that are appended together: they share the way, attributes and tags."""

    way: "Target | Duty"
    attributes: int
    tags: Tags
    keys: list[bytes] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    dues_us: list[int] = field(default_factory=list)

    def shares(self, other: "Letter | Piece") -> bool:
        if self.attributes != other.attributes or self.tags != other.tags:
            return False
        mine, its = self.way, other.way
        if mine is its:
            return True
        if isinstance(mine, Duty) or isinstance(its, Duty):
            return mine == its
        return mine.route is its.route and mine.queues == its.queues

    def add(self, letter: Letter) -> None:
        self.keys.append(letter.key)
        self.properties.append(letter.properties)
        self.values.append(letter.value)
        self.headers.append(letter.headers)
        self.dues_us.append(letter.due_us)

    def extend(self, other: "Piece") -> None:
        self.keys += other.keys
        self.properties += other.properties
        self.values += other.values
        self.headers += other.headers
        self.dues_us += other.dues_us

    @property
    def all_headers(self) -> list[Headers] | None:
        return self.headers if any(self.headers) else None


@dataclass(slots=True, eq=False)
class Move:
    """Neighbours of one lane on their way into one log."""

    host: "VirtualHost"
    stretch: Stretch
    reason: Reason
    log: PartitionLog
    pieces: list[Piece]
    # They are in the target's log, and will be settled when that is committed.
    is_sent: bool = False
    # Who wants to hear how many were moved, or (False) stay where they are.
    told: Told | None = None

    @property
    def target(self) -> TargetPartition:
        return TargetPartition(self.log.stream_id, self.log.partition)

    def maybe_join(self, other: "Move") -> bool:
        """Take in what follows this, if it lies behind it in the same batch and goes the same way."""
        mine, its = self.stretch, other.stretch
        if mine.lane is not its.lane or mine.batch is not its.batch or mine.seq + mine.count != its.seq:
            return False
        if mine.index + mine.count != its.index or self.log is not other.log or self.reason is not other.reason:
            return False
        if self.told != other.told:
            return False
        mine.count += its.count
        for piece in other.pieces:
            if self.pieces[-1].shares(piece):
                self.pieces[-1].extend(piece)
            else:
                self.pieces.append(piece)
        return True


@dataclass(slots=True, eq=False)
class Waiting:
    """Nobody takes these now, and at-least-once or a dead-letter queue promised not to drop them."""

    host: "VirtualHost"
    stretch: Stretch
    reason: Reason


class Room:
    """What letters that are looked at together take of the room in queues that refuse publishes when they are full."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: dict[Queue, tuple[int, int]] = {}

    def take(self, queues: Iterable[Queue], count: int, byte_count: int) -> None:
        for queue in queues:
            if queue.settings.overflow is not Overflow.DROP_HEAD:
                counted, bytes_counted = self._taken.get(queue, (0, 0))
                self._taken[queue] = counted + count, bytes_counted + byte_count

    def full(self, queues: Iterable[Queue], byte_count: int) -> list[Queue]:
        """Those without room for one more."""
        found = []
        for queue in queues:
            counted, bytes_counted = self._taken.get(queue, (0, 0))
            if not queue.admits(counted + 1, bytes_counted + byte_count):
                found.append(queue)
        return found

    @property
    def is_there(self) -> bool:
        """There is as much as was taken."""
        return all(queue.admits(*taken) for queue, taken in self._taken.items())


class Transfers:
    def __init__(self, broker: "Broker", stamp: Stamp) -> None:
        # Records that were moved, by why; those that only went in a circle.
        self.dead_letters: Counter[Reason] = Counter()
        # Attempts that failed and are followed by another, and those that were the last.
        self.retries: Counter[Reason] = Counter()
        self.exhausted: Counter[Reason] = Counter()
        # Copies that a full queue did not get, and that are gone.
        self.refused: Counter[Reason] = Counter()
        self.dropped_count = self.redriven_count = 0
        # By protocol. What has none tells its readers nothing.
        self.marks: dict[int, Mark] = {}
        self._broker = broker
        self.stamp = stamp
        self._outboxes: dict[Queue, Outbox[Move]] = {}
        self._planned: dict[Queue, list[Move]] = {}
        self._waiting: dict[Queue, list[Waiting]] = {}
        # Journalled, in the order of their numbers; without a transfer: not numbered.
        self._to_send: deque[tuple[Queue, Move, Transfer[Move] | None]] = deque()
        # Dead-letter queues to be made, and those that could not be and are tried again later.
        self._graves: dict[tuple[VirtualHost, str], None] = {}
        self._unmade: set[tuple[VirtualHost, str]] = set()
        # Of which it was said that their letters have to wait.
        self._warned: set[tuple[VirtualHost, str]] = set()
        self._dig = trio.Event()
        self._sending = False
        self._wake = trio.Event()
        self._stuck = trio.Event()

    @property
    def dead_letter_count(self) -> int:
        return self.dead_letters.total()

    # -- planning -----------------------------------------------------------------------------------------------

    def send_back(
        self, host: "VirtualHost", queue: Queue, stretch: Stretch, pieces: Sequence[Piece], told: Told
    ) -> None:
        """Records leave a queue for where somebody sends them (redrive.py). Those that cannot get there stay."""
        for log, together in groupby(pieces, key=lambda piece: self._log_of(piece.way)):
            those = list(together)
            part = stretch.split(sum(len(piece.values) for piece in those))
            self._plan(queue, Move(host, part, Reason.REDRIVEN, log, those, told=told))

    def let_go(self, host: "VirtualHost", queue: Queue, stretch: Stretch, reason: Reason) -> None:
        """Records leave a queue: for another log, or for good."""
        if reason is Reason.REDRIVEN:
            # It was on its way back, and did not get there: whoever sends it knows where to.
            stretch.lane.put_back(stretch)
            self._broker.note_change(queue)
            self._broker.wake(queue)
            return
        settings = queue.settings
        goes = settings.retry or settings.dead_letter_exchange is not None or reason in _NEVER_NOWHERE
        if not goes or host.is_closed:
            self._drop(queue, stretch)
            return
        for move in self._moves(host, queue, stretch, reason):
            self._plan(queue, move)

    def _plan(self, queue: Queue, move: Move) -> None:
        if not queue.durable or queue.deleted:
            self._to_send.append((queue, move, None))
            self._send()
            return
        planned = self._planned.setdefault(queue, [])
        if not planned or not planned[-1].maybe_join(move):
            planned.append(move)
        self._broker.note_change(queue)
        self._wake.set()

    def _drop(self, queue: Queue, stretch: Stretch) -> None:
        stretch.lane.settle(stretch.seq, stretch.count)
        self._broker.note_change(queue)

    def _without_way(self, host: "VirtualHost", queue: Queue, stretch: Stretch, reason: Reason) -> None:
        """Nobody would get these now: they are gone, unless the queue has more to ask (RabbitMQ's at-least-once)."""
        if queue.settings.at_least_once and queue.durable and not queue.deleted:
            self._wait(host, queue, stretch, reason)
            self._stuck.set()
        else:
            self._drop(queue, stretch)

    def _wait(self, host: "VirtualHost", queue: Queue, stretch: Stretch, reason: Reason) -> None:
        self._waiting.setdefault(queue, []).append(Waiting(host, stretch, reason))
        self._broker.note_change(queue)

    def _moves(self, host: "VirtualHost", queue: Queue, stretch: Stretch, reason: Reason) -> Iterator[Move]:
        """What a stretch becomes, by where it goes. The stretch gets shorter by what is handed on."""
        broker = self._broker
        batch, first = stretch.loaded(), stretch.index
        names = broker.exchanges_of(stretch)
        pieces: list[Piece] = []
        log: PartitionLog | None = None
        room = Room()
        for index, name in enumerate(names, start=first):
            letter = self._letter(host, queue, stretch, batch, index, name, reason, room)
            its_log = None if isinstance(letter, Way) else self._log_of(letter.way)
            if pieces and its_log is not log:
                assert log is not None
                yield Move(host, stretch.split(sum(len(one.values) for one in pieces)), reason, log, pieces)
                pieces = []
            log = its_log
            if isinstance(letter, Way):
                match letter:
                    case Way.NONE:
                        self._without_way(host, queue, stretch.split(1), reason)
                    case Way.NOT_YET:
                        self._wait(host, queue, stretch.split(1), reason)
                    case Way.STUCK:
                        self._wait(host, queue, stretch.split(1), reason)
                        self._stuck.set()
                    case Way.GONE:
                        self._drop(queue, stretch.split(1))
                continue
            if not pieces or not pieces[-1].shares(letter):
                pieces.append(Piece(letter.way, letter.attributes, letter.tags))
            pieces[-1].add(letter)
        if pieces:
            assert log is not None
            yield Move(host, stretch.split(sum(len(one.values) for one in pieces)), reason, log, pieces)

    def _log_of(self, way: "Target | Duty") -> PartitionLog:
        if isinstance(way, Duty):
            return self._broker.delayed.delays.intake
        assert way.log is not None
        return way.log

    def _letter(
        self,
        host: "VirtualHost",
        queue: Queue,
        stretch: Stretch,
        batch: RecordBatch,
        index: int,
        name: bytes,
        reason: Reason,
        room: Room,
    ) -> "Letter | Way":
        """Where one record goes, and how it is changed for that. `name`: the exchange it was published to."""
        retry = queue.settings.retry
        if retry is None or reason not in FAILURES:
            return self._dead_letter(host, queue, stretch, batch, index, name, reason, room)
        now_us = self._broker.env.clock.wall_us()
        headers = with_origin(stretch.source, batch, index, name)
        attempt = attempt_of(headers)
        if not retry.retries(attempt):
            headers = after_failure(headers, attempt, reason, now_us)
            return self._dead_letter(host, queue, stretch, batch, index, name, reason, room, headers)
        headers = after_failure(headers, attempt + 1, reason, now_us)
        headers = with_times(headers, batch.timestamps.at(index), batch.expiries.at(index))
        attributes = batch.attributes.at(index)
        return Letter(
            Duty(DutyKind.RETRY, host.name, queue.name, queue.view_id),
            attributes | RELOCATED,
            batch.tags_at(index),
            batch.keys[index],
            self.marked(batch.properties[index], attributes, headers),
            batch.values[index],
            headers,
            now_us + 1000 * retry.wait_ms(attempt, self._broker.env.random.random()),
        )

    def marked(self, properties: bytes, attributes: int, headers: Headers) -> bytes:
        """What the headers tell, for those who read the properties of this protocol."""
        mark = self.marks.get(attributes & PROTOCOL_MASK)
        return properties if mark is None else mark(properties, told(headers))

    def _dead_letter(
        self,
        host: "VirtualHost",
        queue: Queue,
        stretch: Stretch,
        batch: RecordBatch,
        index: int,
        name: bytes,
        reason: Reason,
        room: Room,
        headers: Headers = (),
    ) -> "Letter | Way":
        """The way of one that has no attempt left, or none to begin with."""
        broker, settings = self._broker, queue.settings
        key, tags, now_us = batch.keys[index], batch.tags_at(index), broker.env.clock.wall_us()
        (properties,) = broker.properties_of(batch, index, index + 1)
        attributes = dead_attributes(batch.attributes.at(index))
        death = Death(queue.name, reason, name, key, now_us, settings.dead_letter_routing_key is not None)
        if settings.dead_letter_exchange is not None:
            if host.router.exchange(settings.dead_letter_exchange) is None:
                return Way.NONE
            if headers:
                properties = self.marked(properties, attributes, headers)
            target, stamped = self._dead_target(host, queue, settings.dead_letter_exchange, death, properties, tags)
            if target is None or target.log is None or (not target.queues and settings.at_least_once):
                return Way.NONE
            full = room.full(target.queues, len(batch.values[index]))
            if full and settings.at_least_once:
                return Way.NONE
            left = self._without(target, full, reason) if full else target
            if left is None:
                return Way.GONE
            room.take(left.queues, 1, len(batch.values[index]))
            return Letter(left, attributes, left.tags, left.key, stamped, batch.values[index], headers)
        failed = reason in FAILURES and (settings.retry is not None or queue.durable)
        if not failed and reason is not Reason.UNMATCHED:
            return Way.GONE
        grave = self._grave(host, queue, tags, room, len(batch.values[index]))
        if isinstance(grave, Way):
            return grave
        if not headers:
            headers = with_origin(stretch.source, batch, index, name)
            headers = after_failure(headers, attempt_of(headers), reason, now_us)
        headers = with_times(headers, batch.timestamps.at(index), batch.expiries.at(index))
        stamped = self.stamp(self.marked(properties, attributes, headers), death).properties
        return Letter(grave, attributes, tags, key, stamped, batch.values[index], headers)

    def _without(self, target: "Target", full: Sequence[Queue], reason: Reason) -> "Target | None":
        """The way of one that these queues have no room for; None: it leads nowhere. So does RabbitMQ."""
        self.refused[reason] += len(full)
        left = target.only(tuple(queue for queue in target.queues if queue not in full))
        # An exchange has a log of its own, and perhaps somebody who listens.
        return None if target.exchange == DEFAULT_EXCHANGE and not left.queues else left

    def _grave(self, host: "VirtualHost", queue: Queue, tags: Tags, room: Room, byte_count: int) -> "Target | Way":
        """The queue's own dead-letter queue, with room for one more."""
        name = queue.name + DEAD_LETTER_END
        key = name.encode("utf-8", "surrogateescape")
        found = host.queues.get(name)
        if found is None:
            if len(key) > NAME_BYTES_MAX:
                self._warn(
                    host, name, "the name of a dead-letter queue is too long: its dead letters stay where they are"
                )
                return Way.STUCK
            if (host, name) not in self._unmade:
                self._graves[host, name] = None
                self._dig.set()
            return Way.NOT_YET
        # Of a queue that is gone nothing can stay.
        if not queue.deleted and room.full((found,), byte_count):
            self._warn(host, name, "a dead-letter queue is full and refuses more: its dead letters stay where they are")
            return Way.STUCK
        room.take((found,), 1, byte_count)
        return host.target(DEFAULT_EXCHANGE, key, [name], tags=tags)

    def _warn(self, host: "VirtualHost", grave: str, text: str) -> None:
        """Once, until none of its letters waits any more."""
        if (host, grave) not in self._warned:
            self._warned.add((host, grave))
            _log.warning(text, extra={"vhost": host.name, "queue": grave})

    def _dead_target(
        self, host: "VirtualHost", queue: Queue, exchange: str, death: Death, properties: bytes, tags: Tags
    ) -> tuple["Target | None", bytes]:
        """Where a dead record goes, and with what properties. No target: it would only go round in a cycle."""
        key, other_key = death.routing_key, queue.settings.dead_letter_routing_key
        stamped = self.stamp(properties, death)
        if other_key is not None:
            key = other_key.encode("utf-8", "surrogateescape")
        keys = [key.decode("utf-8", "surrogateescape"), *stamped.copies]
        target = host.target(exchange, key, keys, stamped.headers, tags=tags)
        left = tuple(other for other in target.queues if other.name not in stamped.cycling)
        if len(left) < len(target.queues):
            if not left:
                self.dropped_count += 1
                return None, b""
            target = target.only(left)
        return target, stamped.properties

    def refuse(self, host: "VirtualHost", queue: Queue, target: "Target", properties: bytes, body: bytes) -> None:
        """A full queue refuses a publish; with reject-publish-dlx the message is dead-lettered, else it is gone.

        It was never in a log, so no number is needed to know it again.
        """
        exchange = queue.settings.dead_letter_exchange
        if queue.settings.overflow != Overflow.REJECT_PUBLISH_DLX or exchange is None:
            return
        if host.router.exchange(exchange) is None:
            return
        name = target.exchange.encode("utf-8", "surrogateescape")
        rerouted = queue.settings.dead_letter_routing_key is not None
        death = Death(queue.name, Reason.MAXLEN, name, target.key, self._broker.env.clock.wall_us(), rerouted)
        moved, stamped = self._dead_target(host, queue, exchange, death, properties, target.tags)
        if moved is not None and (full := Room().full(moved.queues, len(body))):
            moved = self._without(moved, full, Reason.MAXLEN)
        if moved is not None:
            self._broker.publish(moved, [stamped], [body], attributes=int(Protocol.AMQP) | PERSISTENT)
            self.dead_letters[Reason.MAXLEN] += 1

    # -- the journal --------------------------------------------------------------------------------------------

    @property
    def planned(self) -> Iterable[Queue]:
        """Queues whose states have to be written before anything is sent."""
        return self._planned

    def number(self, queue: Queue) -> list[Transfer[Move]]:
        """The queue's state is about to be drafted: what is planned gets its numbers. Give them to `journalled`."""
        planned = self._planned.pop(queue, None)
        if planned is None:
            return []
        outbox = self._outbox(queue)
        return [outbox.assign(move.target, move.stretch.count, move) for move in planned]

    def _outbox(self, queue: Queue) -> Outbox[Move]:
        found = self._outboxes.get(queue)
        if found is None:
            found = self._outboxes[queue] = Outbox(queue.stream_id.bytes)
        return found

    def state(self, queue: Queue) -> tuple[list[journal.OutboxState], list[journal.MovingState]]:
        """What the journal has to know: the numbers for each target, and what has no way."""
        outbox = self._outboxes.get(queue)
        waiting = [_moving_state(-1, one.stretch, one.reason) for one in self._waiting.get(queue, ())]
        if outbox is None:
            return [], waiting
        return [
            journal.OutboxState(
                target.stream.bytes,
                target.partition,
                outbox.next_number(target),
                [_moving_state(one.first, one.what.stretch, one.what.reason) for one in outbox.pending(target)],
            )
            for target in outbox.targets
        ], waiting

    def journalled(self, transfers: Iterable[tuple[Queue, Transfer[Move]]]) -> None:
        """The numbers of these are safe."""
        self._to_send.extend((queue, transfer.what, transfer) for queue, transfer in transfers)
        if self._to_send:
            self._send()
            self._broker.on_ready()

    # -- sending ------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Append what is numbered. Behind one that finds no room its neighbours wait, too: numbers have an order."""
        if self._sending:
            # What came meanwhile is at the end of the line.
            return
        self._sending = True
        full: set[tuple[Queue, TargetPartition]] = set()
        left: deque[tuple[Queue, Move, Transfer[Move] | None]] = deque()
        while self._to_send:
            queue, move, transfer = self._to_send.popleft()
            if transfer is not None and (transfer.taken_back or queue.deleted):
                continue
            if (queue, move.target) in full:
                left.append((queue, move, transfer))
                continue
            if not self._goes_there(move) or not self._has_room(queue, move):
                self._plan_again(queue, move, transfer)
                continue
            try:
                self._append(queue, move, transfer)
            except DiskFull:
                full.add((queue, move.target))
                left.append((queue, move, transfer))
        self._to_send = left
        self._sending = False
        if left:
            self._stuck.set()

    def _goes_there(self, move: Move) -> bool:
        """Its way is still what it was when it was planned, or another way into the same log."""
        host, log = move.host, move.log
        for piece in move.pieces:
            if not isinstance(piece.way, Duty) and not host.is_current(piece.way):
                piece.way = host.now(piece.way)
                if piece.way.log is not log:
                    return False
        return log.stream_id in self._broker.directory.streams

    def _has_room(self, queue: Queue, move: Move) -> bool:
        """The queues it goes to did not fill up meanwhile. What is sent back, or left by a queue that is gone, goes all
        the same: it could not be planned otherwise."""
        if move.reason is Reason.REDRIVEN or queue.deleted:
            return True
        room = Room()
        for piece in move.pieces:
            if not isinstance(piece.way, Duty):
                room.take(piece.way.queues, len(piece.values), sum(map(len, piece.values)))
        return room.is_there

    def _plan_again(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        """Its way is not what it was when it was planned. Numbers behind it were not used either."""
        again = [move]
        if transfer is not None:
            taken = self._outbox(queue).take_back(transfer.target, transfer.first)
            again = [one.what for one in taken]
        for one in again:
            if one.told is not None:
                one.told(one.stretch.count, False)
            self.let_go(one.host, queue, one.stretch, one.reason)

    def _append(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        reached: int | None = None
        if transfer is None:
            while move.pieces:
                reached = self._append_piece(move.pieces[0], None, 0)
                # Should the next one find no room, this is not sent again.
                self._count(queue, move.reason, move.pieces.pop(0))
        else:
            outbox = self._outbox(queue)
            producer, settled = outbox.producer(transfer), outbox.settled_below(transfer.target)
            for piece in move.pieces:
                reached = self._append_piece(piece, producer, settled)
                producer = producer._replace(first_sequence=producer.first_sequence + len(piece.values))
            for piece in move.pieces:
                self._count(queue, move.reason, piece)
        move.is_sent = True
        if reached is None:
            self._settle(queue, move, transfer)
        else:
            move.log.when_committed(reached, _Settle(self, queue, move, transfer))

    def _append_piece(self, piece: Piece, producer: Producer | None, settled: int) -> int | None:
        broker, way = self._broker, piece.way
        if isinstance(way, Duty):
            # Rather sooner than never: the policy, or the clock when it was planned, may say more than can be kept.
            latest_us = broker.delayed.latest_us(broker.env.clock.wall_us())
            return broker.delayed.park(
                way,
                piece.keys,
                piece.properties,
                piece.values,
                due_us=[min(due_us, latest_us) for due_us in piece.dues_us],
                attributes=piece.attributes,
                tags=piece.tags,
                headers=piece.all_headers,
                producer=producer,
            )
        if producer is None:
            return broker.publish(
                way,
                piece.properties,
                piece.values,
                keys=piece.keys,
                attributes=piece.attributes,
                headers=piece.all_headers,
            )
        return broker.publish_dense(
            way,
            producer,
            piece.keys,
            piece.properties,
            piece.values,
            settled=settled,
            attributes=piece.attributes,
            headers=piece.all_headers,
        )

    def _count(self, queue: Queue, reason: Reason, piece: Piece) -> None:
        count = len(piece.values)
        if reason is Reason.REDRIVEN:
            self.redriven_count += count
            return
        if isinstance(piece.way, Duty):
            self.retries[reason] += count
            return
        self.dead_letters[reason] += count
        if queue.settings.retry is not None and reason in FAILURES:
            self.exhausted[reason] += count

    def _settle(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        stretch = move.stretch
        stretch.lane.settle(stretch.seq, stretch.count)
        if transfer is not None:
            outbox = self._outboxes.get(queue)
            if outbox is not None:
                outbox.settle(transfer)
        self._broker.note_change(queue)
        if move.told is not None:
            move.told(stretch.count, True)

    # -- coming and going ---------------------------------------------------------------------------------------

    def restore(
        self,
        queue: Queue,
        state: journal.ViewState,
        log_of: Callable[[bytes, int], PartitionLog | None],
    ) -> list[tuple[Queue, Stretch, Reason]]:
        """Settle what the targets have, and take the rest out of the lanes; returns it, for `resume`.

        `log_of` finds the logs that queues take from."""
        again: list[tuple[Queue, Stretch, Reason]] = []
        for box in state.outbox:
            target = TargetPartition(UUID(bytes=box.stream), box.partition)
            stream = self._broker.directory.streams.get(target.stream)
            reached = 0
            if stream is not None:
                reached = stream.partitions[target.partition].next_sequence(queue.stream_id.bytes, 0)
            for moving in box.moving:
                again += _taken_up(queue, moving, reached - moving.first, log_of)
            if stream is not None:
                # What was not appended gets other numbers: where it goes is decided anew.
                known = box.moving[0].first if box.moving else box.next_number
                self._outbox(queue).restore(target, max(reached, known), ())
        for moving in state.waiting:
            again += _taken_up(queue, moving, 0, log_of)
        return again

    def resume(self, leaving: Iterable[tuple[Queue, Stretch, Reason]]) -> None:
        """Everything is loaded: what was leaving its queue when the last life ended goes on."""
        hosts = {queue: host for host in self._broker.vhosts.values() for queue in host.queues.values()}
        for queue, stretch, reason in leaving:
            lost = min(stretch.source.log_start - stretch.offset, stretch.count)
            if lost > 0:
                self._drop(queue, stretch.split(lost))
            while stretch.count:
                batch = stretch.loaded()
                part = stretch.split(min(stretch.count, int(batch.next_offset) - stretch.offset))
                stretch.batch = None
                if batch.gap is not None:
                    # A repair gave them up.
                    self._drop(queue, part)
                else:
                    self.let_go(hosts[queue], queue, part, reason)

    def forget(self, queue: Queue) -> None:
        """A queue is gone: what was leaving it goes now, since nobody will know of its numbers any more."""
        outbox = self._outboxes.pop(queue, None)
        numbered = [] if outbox is None else [one.what for one in outbox.pending() if not one.what.is_sent]
        for move in (*numbered, *self._planned.pop(queue, ())):
            self._to_send.append((queue, move, None))
        if queue.settings.at_least_once and queue.settings.dead_letter_exchange is not None:
            self._waiting.pop(queue, None)
        self._send()
        for target in () if outbox is None else outbox.targets:
            stream = self._broker.directory.streams.get(target.stream)
            if stream is not None:
                stream.partitions[target.partition].forget_producer(queue.stream_id.bytes)

    def forget_stream(self, stream_id: UUID) -> None:
        """A stream is gone, and with it the numbers it knew. What was on its way to it is planned anew."""
        for outbox in self._outboxes.values():
            for target in outbox.targets:
                if target.stream == stream_id and not any(outbox.pending(target)):
                    outbox.forget(target)

    async def run(self) -> None:
        """Write the journal as soon as something is planned, and try again what could not be sent, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_journal)
            nursery.start_soon(self._keep_trying)
            nursery.start_soon(self._keep_graves)

    async def _keep_journal(self) -> None:
        broker = self._broker
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            byte_count = await broker.write_journal(list(self._planned))
            pause_s = byte_count / JOURNAL_BYTES_PER_S
            if pause_s >= JOURNAL_PAUSE_MIN_S:
                await broker.env.clock.sleep(pause_s)

    async def _keep_trying(self) -> None:
        while True:
            await self._stuck.wait()
            await self._broker.env.clock.sleep(RETRY_S)
            self._stuck = trio.Event()
            self.try_again()

    async def _keep_graves(self) -> None:
        while True:
            await self._dig.wait()
            self._dig = trio.Event()
            await self.make_graves()

    async def make_graves(self) -> None:
        """Make the dead-letter queues that are missing, and send what waits for them."""
        graves, self._graves = self._graves, {}
        for host, name in graves:
            if host.is_closed:
                continue
            # An ordinary queue: nothing in it is let go of before somebody has dealt with it (redrive.py), its count is
            # what is left to be dealt with, and what it once held can still be read by offset.
            settings = self._broker.settings_of(host.name, name, EMPTY)
            try:
                await host.declare_queue(name, settings, durable=True)
            except (Refused, DiskFull) as error:
                _log.warning(
                    "a dead-letter queue cannot be made yet", extra={"vhost": host.name, "queue": name, "why": error}
                )
                self._unmade.add((host, name))
                self._broker.timers.after(GRAVE_RETRY_S, partial(self._dig_again, host, name))
        self.try_again()

    def _dig_again(self, host: "VirtualHost", name: str) -> None:
        self._unmade.discard((host, name))
        self._graves[host, name] = None
        self._dig.set()

    def try_again(self) -> None:
        """Send what found no room, and look for a way for what had none."""
        waiting, self._waiting = self._waiting, {}
        for queue, those in waiting.items():
            for place, one in enumerate(those):
                if queue in self._waiting and queue.settings.dead_letter_exchange is None:
                    # All of them wait for one queue, which does not take the first.
                    self._waiting[queue] += those[place:]
                    break
                for part in one.stretch.lane.in_batches(one.stretch):
                    self.let_go(one.host, queue, part, one.reason)
            if queue not in self._waiting:
                self._warned.discard((those[0].host, queue.name + DEAD_LETTER_END))
        self.journalled(())


class _Settle:
    """Settles records once their copies are safe. A plain callback for the log."""

    __slots__ = ("_move", "_queue", "_transfer", "_transfers")

    def __init__(self, transfers: Transfers, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        self._transfers = transfers
        self._queue = queue
        self._move = move
        self._transfer = transfer

    def __call__(self) -> None:
        self._transfers._settle(self._queue, self._move, self._transfer)


def dead_attributes(found: int) -> int:
    """Of a dead letter: it is no copy of a view's own, and speaks AMQP."""
    found &= ~RELOCATED
    if found & PROTOCOL_MASK in _RESTATED:
        return int(Protocol.AMQP) | found & PERSISTENT
    return found


def _moving_state(first: int, stretch: Stretch, reason: Reason) -> journal.MovingState:
    places = [
        (part.source.stream_id.bytes, part.source.partition, part.offset, part.count)
        for part in stretch.lane.where(stretch)
    ]
    return journal.MovingState(first, stretch.lane.place, stretch.seq, str(reason), places)


def _taken_up(
    queue: Queue, moving: journal.MovingState, held: int, log_of: Callable[[bytes, int], PartitionLog | None]
) -> Iterator[tuple[Queue, Stretch, Reason]]:
    """What is left of journalled neighbours of which the target has the first `held`."""
    lane = queue.lanes[moving.lane]
    seq = moving.seq
    for stream, partition, offset, count in moving.places:
        lane.withdraw(seq, count)
        there = min(max(held, 0), count)
        if there:
            lane.settle(seq, there)
        log = log_of(stream, partition)
        if there < count:
            assert log is not None, "what a queue has not settled is kept"
            left = Stretch(lane, seq + there, count - there, log, offset + there, None, 0)
            yield queue, left, Reason(moving.reason)
        seq += count
        held -= count
