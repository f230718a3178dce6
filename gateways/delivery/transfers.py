"""Records that leave a queue for another log: dead letters, each exactly once (K7). Driver over core_log/outbox.py.

The way of a dead letter of a durable queue:

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

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from uuid import UUID

import trio

from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import Outbox, TargetPartition, Transfer
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, RELOCATED, Protocol
from headrace.filtering.tags import Tags
from headrace.gateways.delivery import journal
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Overflow, Queue, Reason
from headrace.gateways.delivery.routing import Fields

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker
    from headrace.gateways.delivery.vhost import Target, VirtualHost

# What found no room, or at-least-once found no way for, is tried again after so long.
RETRY_S = 1.0
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


@dataclass(slots=True, eq=False)
class Piece:
    """Records that are appended together: they share target and attributes."""

    target: "Target"
    attributes: int
    keys: list[bytes] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    values: list[bytes] = field(default_factory=list)

    def shares(self, target: "Target", attributes: int) -> bool:
        mine = self.target
        if mine is not target and (mine.route is not target.route or mine.queues != target.queues):
            return False
        return self.attributes == attributes and mine.tags == target.tags


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
        mine.count += its.count
        for piece in other.pieces:
            last = self.pieces[-1]
            if last.shares(piece.target, piece.attributes):
                last.keys += piece.keys
                last.properties += piece.properties
                last.values += piece.values
            else:
                self.pieces.append(piece)
        return True


@dataclass(slots=True, eq=False)
class Waiting:
    """Nobody takes these now, and at-least-once promised not to drop them."""

    host: "VirtualHost"
    stretch: Stretch
    reason: Reason


class Transfers:
    def __init__(self, broker: "Broker", stamp: Stamp) -> None:
        # Records that were moved, by why; those that only went in a circle.
        self.dead_letters: Counter[Reason] = Counter()
        self.dropped_count = 0
        self._broker = broker
        self._stamp = stamp
        self._outboxes: dict[Queue, Outbox[Move]] = {}
        self._planned: dict[Queue, list[Move]] = {}
        self._waiting: dict[Queue, list[Waiting]] = {}
        # Journalled, in the order of their numbers; without a transfer: not numbered.
        self._to_send: deque[tuple[Queue, Move, Transfer[Move] | None]] = deque()
        self._sending = False
        self._wake = trio.Event()
        self._stuck = trio.Event()

    @property
    def dead_letter_count(self) -> int:
        return self.dead_letters.total()

    # -- planning -----------------------------------------------------------------------------------------------

    def let_go(self, host: "VirtualHost", queue: Queue, stretch: Stretch, reason: Reason) -> None:
        """Records leave a queue: for its dead-letter exchange, or for good."""
        exchange = queue.settings.dead_letter_exchange
        if exchange is None or host.is_closed:
            self._drop(queue, stretch)
        elif host.router.exchange(exchange) is None:
            self._without_way(host, queue, stretch, reason)
        else:
            for move in self._moves(host, queue, stretch, exchange, reason):
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
        """Nobody would get these: they are gone, unless the queue asks for more (RabbitMQ's at-least-once)."""
        if queue.settings.at_least_once and queue.durable and not queue.deleted:
            self._waiting.setdefault(queue, []).append(Waiting(host, stretch, reason))
            self._broker.note_change(queue)
            self._stuck.set()
        else:
            self._drop(queue, stretch)

    def _moves(
        self, host: "VirtualHost", queue: Queue, stretch: Stretch, exchange: str, reason: Reason
    ) -> Iterator[Move]:
        """What a stretch becomes, by where it goes. The stretch gets shorter by what is handed on."""
        broker = self._broker
        now_us, rerouted = broker.env.clock.wall_us(), queue.settings.dead_letter_routing_key is not None
        batch, index = stretch.loaded(), stretch.index
        names = broker.exchanges_of(stretch)
        properties = broker.properties_of(batch, index, index + stretch.count)
        pieces: list[Piece] = []
        for place, name in enumerate(names):
            death = Death(queue.name, reason, name, batch.keys[index + place], now_us, rerouted)
            target, stamped = self._dead_target(
                host, queue, exchange, death, properties[place], batch.tags_at(index + place)
            )
            log = None if target is None else target.log
            if pieces and log is not pieces[0].target.log:
                yield _move(host, stretch, reason, pieces)
                pieces = []
            if target is None or log is None or (not target.queues and queue.settings.at_least_once):
                self._without_way(host, queue, stretch.split(1), reason)
                continue
            attributes = _attributes(batch.attributes.at(index + place))
            if not pieces or not pieces[-1].shares(target, attributes):
                pieces.append(Piece(target, attributes))
            pieces[-1].keys.append(target.key)
            pieces[-1].properties.append(stamped)
            pieces[-1].values.append(batch.values[index + place])
        if pieces:
            yield _move(host, stretch, reason, pieces)

    def _dead_target(
        self, host: "VirtualHost", queue: Queue, exchange: str, death: Death, properties: bytes, tags: Tags
    ) -> tuple["Target | None", bytes]:
        """Where a dead record goes, and with what properties. No target: it would only go round in a cycle."""
        key, other_key = death.routing_key, queue.settings.dead_letter_routing_key
        stamped = self._stamp(properties, death)
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
            if not self._goes_there(move):
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
            if not host.is_current(piece.target):
                piece.target = host.now(piece.target)
                if piece.target.log is not log:
                    return False
        return log.stream_id in self._broker.directory.streams

    def _plan_again(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        """The log it was to go to is not the one any more. Numbers behind it were not used either."""
        again = [move]
        if transfer is not None:
            taken = self._outbox(queue).take_back(transfer.target, transfer.first)
            again = [one.what for one in taken]
        for one in again:
            self.let_go(one.host, queue, one.stretch, one.reason)

    def _append(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        broker, log = self._broker, move.log
        reached: int | None = None
        if transfer is None:
            while move.pieces:
                piece = move.pieces[0]
                reached = broker.publish(
                    piece.target, piece.properties, piece.values, keys=piece.keys, attributes=piece.attributes
                )
                # Should the next one find no room, this is not sent again.
                del move.pieces[0]
                self.dead_letters[move.reason] += len(piece.values)
        else:
            outbox = self._outbox(queue)
            producer, settled = outbox.producer(transfer), outbox.settled_below(transfer.target)
            for piece in move.pieces:
                reached = broker.publish_dense(
                    piece.target,
                    producer,
                    piece.keys,
                    piece.properties,
                    piece.values,
                    settled=settled,
                    attributes=piece.attributes,
                )
                producer = producer._replace(first_sequence=producer.first_sequence + len(piece.values))
            self.dead_letters[move.reason] += move.stretch.count
        move.is_sent = True
        if reached is None:
            self._settle(queue, move, transfer)
        else:
            log.when_committed(reached, _Settle(self, queue, move, transfer))

    def _settle(self, queue: Queue, move: Move, transfer: Transfer[Move] | None) -> None:
        stretch = move.stretch
        stretch.lane.settle(stretch.seq, stretch.count)
        if transfer is not None:
            outbox = self._outboxes.get(queue)
            if outbox is not None:
                outbox.settle(transfer)
        self._broker.note_change(queue)

    # -- coming and going ---------------------------------------------------------------------------------------

    def restore(
        self,
        queue: Queue,
        state: journal.ViewState,
        log_of: Callable[[bytes, int], PartitionLog | None],
    ) -> list[tuple[Queue, Stretch, Reason]]:
        """Settle what the targets have, and take the rest out of the lanes; returns it, for `resume`."""
        again: list[tuple[Queue, Stretch, Reason]] = []
        for box in state.outbox:
            log = log_of(box.stream, box.partition)
            reached = 0 if log is None else log.next_sequence(queue.stream_id.bytes, 0)
            for moving in box.moving:
                again += _taken_up(queue, moving, reached - moving.first, log_of)
            if log is not None:
                # What was not appended gets other numbers: where it goes is decided anew.
                known = box.moving[0].first if box.moving else box.next_number
                target = TargetPartition(UUID(bytes=box.stream), box.partition)
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

    def try_again(self) -> None:
        """Send what found no room, and look for a way for what had none."""
        waiting, self._waiting = self._waiting, {}
        for queue, those in waiting.items():
            for one in those:
                for part in one.stretch.lane.in_batches(one.stretch):
                    self.let_go(one.host, queue, part, one.reason)
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


def _move(host: "VirtualHost", stretch: Stretch, reason: Reason, pieces: list[Piece]) -> Move:
    log = pieces[0].target.log
    assert log is not None
    return Move(host, stretch.split(sum(len(piece.values) for piece in pieces)), reason, log, pieces)


def _attributes(found: int) -> int:
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
