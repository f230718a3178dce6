"""Records that members of a consumer group failed with: they wait and come back to the group, or they are dead. Driver.

A commit says which of the records that it passes have failed. They are written to `__offsets` in one batch with the
offsets, so from then on each is either committed and failed, or neither. Then, one round after the other (K7):

    decided    by the group's policy and the attempts so far: parked (delayed.py), or dead
    numbered   with the next numbers of the group's outbox, which are written to `__offsets`
    sent       appended with their numbers to the intake of the delay engine, or to the log of the dead-letter queue
    settled    when that is committed

A crash finds them with numbers or without; the target says which of the numbers it has, and the rest is decided anew.

What comes back stands in a stream of the group's own, one for each topic that something failed in, which is shared out,
read and committed like a partition of that topic: so it is fenced as commits are, reaches this group only, and can fail
again. The dead go to the group's dead-letter exchange, or to the queue `<group>.dlq`, whence redrive.py sends them
back by the same streams. Retention takes nothing that has failed and is not sent yet.
Neighbours: consumer_groups.py decides about commits, consumer_groups_coordinator.py writes, retry.py has the policy.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

import trio

from headrace.controller.entities import NAME_BYTES_MAX
from headrace.controller.table import EMPTY
from headrace.core_log.errors import DiskFull, Refused
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import Outbox, TargetPartition, Transfer
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, RELOCATED, Headers, Protocol, RecordBatch
from headrace.core_log.spec import StreamSpec
from headrace.delay.fire import DueRun
from headrace.delay.parked import Page
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.consumer_groups import ConsumerGroup, Failure, Failures
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.dead_letters import DIED_IN_GROUP
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty
from headrace.gateways.delivery.logsettings import NOTHING_ASKED
from headrace.gateways.delivery.ports import Source
from headrace.gateways.delivery.queue import Queue, Reason
from headrace.gateways.delivery.relocation import origin_headers
from headrace.gateways.delivery.retry import after_failure, alike_in_time, attempt_of, with_times
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE, Fields
from headrace.gateways.delivery.transfers import DEAD_LETTER_END, Death, Letter, Piece, dead_attributes
from headrace.gateways.delivery.vhost import Target, VirtualHost

if TYPE_CHECKING:
    from headrace.gateways.delivery.consumer_groups_coordinator import GroupCoordinator

_log = logging.getLogger(__name__)

KIND = "retry"
# What the streams of a group are called, behind its name.
RETRY_END = ".retry"
# What found no room, or no queue yet, is tried again after so long.
AGAIN_S = 1.0
# Of one group, so many may be on their way; more are refused until there are fewer.
FAILURES_MAX = 10_000
# In one round of a group.
ROUND_MAX = 1000

# The headers of a topic's record -> the properties that AMQP's readers get.
RestateNeutral = Callable[[Headers], bytes]


class _Sending(NamedTuple):
    """Records with their numbers, and what is appended under them."""

    transfer: Transfer[list[Failure]]
    piece: Piece
    host: VirtualHost


class GroupRetries:
    """`run` must be running for anything to move."""

    def __init__(self, groups: "GroupCoordinator", broker: Broker) -> None:
        """Before the broker is loaded: no view reads the streams of groups."""
        # Failures that are followed by another attempt, those that were the last, what came back, what was in vain:
        # its group or its topic was gone, or retention had taken it.
        self.retried_count = self.dead_count = self.returned_count = self.dropped_count = 0
        # The composition root knows the words.
        self.restate: RestateNeutral = lambda headers: b"\0\0"
        self._groups = groups
        self._broker = broker
        self._clock = broker.env.clock
        # The group and the topic's stream that each of our streams is for.
        self._owners: dict[StreamId, tuple[GroupName, StreamId]] = {}
        self._orphans: list[StreamId] = []
        self._wake = trio.Event()
        broker.delayed.carry(DutyKind.GROUP, self)
        broker.redrives.group_way = self.way_back
        for stream in broker.directory.streams.values():
            if stream.spec.kind == KIND:
                broker.leave_alone(stream.partitions)

    # -- life ---------------------------------------------------------------------------------------------------

    def load(self) -> None:
        """The groups are there, and everything they may have sent to."""
        directory = self._broker.directory
        for name, group in self._groups.groups.items():
            for origin, one in list(group.returns.items()):
                if one.stream in directory.streams:
                    self._owners[one.stream] = (name, origin)
                else:
                    _log.error("a retry stream of a group is gone", extra={"group": name.name, "vhost": name.vhost})
                    group.drop_return(origin)
            if group.failures is not None:
                self._take_up(group.failures)
        self._orphans = [
            StreamId(one.spec.id)
            for one in directory.streams.values()
            if one.spec.kind == KIND and one.spec.id not in self._owners
        ]
        self._wake.set()

    def _take_up(self, failures: Failures) -> None:
        """What the targets have is settled; where the rest goes is decided anew."""
        before, failures.outbox = failures.outbox, Outbox(failures.owner)
        again: list[Failure] = []
        for target in before.targets:
            stream = self._broker.directory.streams.get(target.stream)
            reached = 0 if stream is None else stream.partitions[target.partition].next_sequence(failures.owner, 0)
            pending = list(before.pending(target))
            for one in pending:
                again += one.what[max(reached - one.first, 0) :]
            if stream is not None:
                known = pending[0].first if pending else before.next_number(target)
                failures.outbox.restore(target, max(reached, known), ())
        failures.waiting[:0] = again

    async def run(self) -> None:
        """Move what has failed, until cancelled."""
        with self._broker.holding(self):
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                try:
                    is_done = await self._round()
                except (DiskFull, Refused) as error:
                    # A vhost may have as many queues as it may have, say.
                    _log.warning("failed records of consumer groups have to wait", extra={"why": str(error)})
                    is_done = False
                if not is_done:
                    await self._clock.sleep(AGAIN_S)
                    self._wake.set()

    async def _round(self) -> bool:
        """One round of every group; False if something has to be tried again."""
        is_done = True
        for name, group in list(self._groups.groups.items()):
            if group.failures is not None and group.failures.waiting:
                is_done = await self._move(name, group, group.failures) and is_done
        while self._orphans:
            stream = self._broker.directory.streams.get(self._orphans.pop())
            if stream is not None:
                self._broker.take_back(stream.partitions)
                await self._broker.directory.delete_stream(stream)
        return is_done

    @property
    def pins(self) -> Mapping[Source, int]:
        """For retention: what is not sent yet is needed."""
        found: dict[Source, int] = {}
        for group in self._groups.groups.values():
            for one in group.failures or ():
                log = self._groups.log_at(one.slot)
                if log is not None:
                    found[log] = min(one.offset, found.get(log, one.offset))
        return found

    # -- streams of groups --------------------------------------------------------------------------------------

    def is_own(self, stream: StreamId) -> bool:
        return stream in self._owners

    def logs_of(self, stream: StreamId) -> Sequence[PartitionLog | None]:
        """Of one of our own: as long as the topic is there."""
        _name, origin = self._owners[stream]
        found = self._broker.directory.streams.get(stream)
        return () if found is None or not self._groups.logs_of(origin) else found.partitions

    def origin_of(self, stream: StreamId) -> StreamId:
        """The topic that it is for; a topic's stream is its own."""
        owner = self._owners.get(stream)
        return stream if owner is None else owner[1]

    async def _make_stream(self, name: GroupName, group: ConsumerGroup, origin: StreamId) -> None:
        broker = self._broker
        spec = StreamSpec(
            id=broker.env.ids.uuid(),
            name=name.name + RETRY_END,
            kind=KIND,
            vhost=name.vhost,
            created_us=self._clock.wall_us(),
            config=broker.log_config(NOTHING_ASKED),
        )
        stream = await broker.env.worker.run(lambda: broker.directory.create_now(spec))
        broker.leave_alone(stream.partitions)
        stream_id = StreamId(spec.id)
        if self._groups.groups.get(name) is not group:
            # The group was deleted meanwhile.
            self._orphans.append(stream_id)
            return
        self._owners[stream_id] = (name, origin)
        group.add_return(origin, stream_id, self._clock.wall_us())
        self._groups.laid_out(name, group)

    def forget(self, group: ConsumerGroup, origins: Iterable[StreamId]) -> None:
        """Nobody reads these streams any more, or the topics they are for are gone."""
        for origin in origins:
            stream = group.returns[origin].stream
            group.drop_return(origin)
            self._owners.pop(stream, None)
            self._orphans.append(stream)
        self._wake.set()

    def forget_group(self, group: ConsumerGroup) -> None:
        self.forget(group, list(group.returns))
        if group.failures is not None:
            for target in group.failures.outbox.targets:
                stream = self._broker.directory.streams.get(target.stream)
                if stream is not None:
                    stream.partitions[target.partition].forget_producer(group.failures.owner)

    # -- failing ------------------------------------------------------------------------------------------------

    def check(
        self, group: ConsumerGroup, offsets: Mapping[Slot, int], failed: Mapping[Slot, Mapping[int, str]]
    ) -> None:
        """Raises Refused if one of them cannot fail."""
        group.check_failures(offsets, failed)
        if len(group.failures or ()) + sum(map(len, failed.values())) > FAILURES_MAX:
            raise Refused(f"more than {FAILURES_MAX} failed records of this group would be on their way: wait for some")
        for slot, reasons in failed.items():
            found = {offset for offset, _batch, _index in _records(self._groups.log_at(slot), sorted(reasons))}
            missing = sorted(reasons.keys() - found)
            if missing:
                raise Refused(f"offset {missing[0]} of partition {slot.partition} holds no message (any more)")

    def take(self, group: ConsumerGroup, failed: Mapping[Slot, Mapping[int, str]]) -> None:
        """What was checked in this same turn."""
        now_us = self._clock.wall_us()
        group.fail(
            [
                Failure(slot, offset, reason, now_us)
                for slot, reasons in failed.items()
                for offset, reason in sorted(reasons.items())
            ],
            self._broker.env.ids.uuid().bytes,
        )
        self._wake.set()

    # -- moving -------------------------------------------------------------------------------------------------

    async def _move(self, name: GroupName, group: ConsumerGroup, failures: Failures) -> bool:
        host = self._broker.vhosts.get(name.vhost)
        if host is None:
            # The vhost is gone, and with it all that was in it.
            self.dropped_count += len(failures.waiting)
            failures.waiting.clear()
            return True
        for origin in {self.origin_of(one.slot.stream) for one in failures.waiting[:ROUND_MAX]} - group.returns.keys():
            if self._groups.logs_of(origin):
                await self._make_stream(name, group, origin)
        sending = self._numbered(name, host, group, failures)
        if sending is None:
            await self._make_grave(host, name.name + DEAD_LETTER_END)
            sending = self._numbered(name, host, group, failures)
        await self._groups.written(name, group)
        if not sending:
            return not failures.waiting
        await self._send(failures, sending)
        group.changed_failures = True
        await self._groups.written(name, group)
        if failures.waiting:
            self._wake.set()
        return True

    async def _make_grave(self, host: VirtualHost, name: str) -> None:
        await host.declare_queue(name, self._broker.settings_of(host.name, name, EMPTY), durable=True)

    def _numbered(
        self, name: GroupName, host: VirtualHost, group: ConsumerGroup, failures: Failures
    ) -> list[_Sending] | None:
        """Decide about what waits, and give it numbers; None: the dead-letter queue has to be made first."""
        if self._groups.groups.get(name) is not group:
            return []
        those, rest = failures.waiting[:ROUND_MAX], failures.waiting[ROUND_MAX:]
        stuck: list[Failure] = []
        letters: list[tuple[Failure, Letter]] = []
        taken: dict[Queue, int] = {}
        for failure, batch, index in self._found(those):
            if self.origin_of(failure.slot.stream) not in group.returns:
                # It came while the streams of others were made.
                stuck.append(failure)
                continue
            letter = self._letter(name, host, group, failure, batch, index)
            if letter is None:
                return None
            if isinstance(letter.way, Target) and not _has_room(letter.way, len(letter.value), taken):
                stuck.append(failure)
            else:
                letters.append((failure, letter))
        lost = len(those) - len(letters) - len(stuck)
        if lost:
            self.dropped_count += lost
            _log.warning(
                "failed records are gone before they could be moved", extra={"group": name.name, "count": lost}
            )
        # What is stuck does not hold up the others.
        failures.waiting = rest + stuck
        group.changed_failures = True
        pieces: list[tuple[TargetPartition, Piece, list[Failure]]] = []
        for failure, letter in letters:
            target = self._target_of(letter)
            if not pieces or pieces[-1][0] != target or not pieces[-1][1].shares(letter):
                pieces.append((target, Piece(letter.way, letter.attributes, letter.tags), []))
            pieces[-1][1].add(letter)
            pieces[-1][2].append(failure)
        return [
            _Sending(failures.outbox.assign(target, len(what), what), piece, host) for target, piece, what in pieces
        ]

    def _found(self, failures: Iterable[Failure]) -> Iterator[tuple[Failure, RecordBatch, int]]:
        """Those whose records are there."""
        for slot, those in groupby(failures, key=lambda one: one.slot):
            by_offset = {one.offset: one for one in those}
            for offset, batch, index in _records(self._groups.log_at(slot), sorted(by_offset)):
                yield by_offset[offset], batch, index

    def _target_of(self, letter: Letter) -> TargetPartition:
        log = self._broker.delayed.delays.intake if isinstance(letter.way, Duty) else letter.way.log
        assert log is not None
        return TargetPartition(log.stream_id, log.partition)

    def _letter(
        self,
        name: GroupName,
        host: VirtualHost,
        group: ConsumerGroup,
        failure: Failure,
        batch: RecordBatch,
        index: int,
    ) -> Letter | None:
        """What becomes of a record; None: its dead-letter queue has to be made first."""
        broker, slot = self._broker, failure.slot
        origin = self.origin_of(slot.stream)
        log = self._groups.log_at(slot)
        assert log is not None
        attributes, properties = batch.attributes.at(index), batch.properties[index]
        neutral = batch.headers[index] if batch.headers is not None else ()
        if attributes & PROTOCOL_MASK == Protocol.NEUTRAL:
            # Its headers are its publisher's; from here on they stand where those of the other doors stand.
            properties, attributes = self.restate(neutral), int(Protocol.AMQP) | attributes & PERSISTENT
        exchange = broker.exchange_names.get(origin, b"")
        # What other views note of their attempts is no affair of this group's.
        headers = neutral if slot.stream in self._owners else origin_headers(log, failure.offset, exchange)
        attempt, retry = attempt_of(headers), group.settings.retry
        times = batch.timestamps.at(index), batch.expiries.at(index)
        if retry is not None and retry.retries(attempt):
            headers = with_times(after_failure(headers, attempt + 1, failure.reason, failure.time_us), *times)
            return Letter(
                _duty(name, group.returns[origin].stream),
                attributes | RELOCATED | PERSISTENT,
                batch.tags_at(index),
                batch.keys[index],
                broker.transfers.marked(properties, attributes, headers),
                batch.values[index],
                headers,
                failure.time_us + 1000 * retry.wait_ms(attempt, broker.env.random.random()),
            )
        headers = with_times(after_failure(headers, attempt, failure.reason, failure.time_us), *times)
        headers = (*headers, (DIED_IN_GROUP, name.name.encode()))
        key, tags = batch.keys[index], batch.tags_at(index)
        if attributes & PROTOCOL_MASK != Protocol.AMQP:
            properties = broker.restated(key, properties, attributes)
        attributes = dead_attributes(attributes) | PERSISTENT
        death = Death(name.name, Reason.REJECTED, exchange, key, failure.time_us, rerouted=False)
        stamped = broker.transfers.stamp(broker.transfers.marked(properties, attributes, headers), death)
        target = None
        if group.settings.dead_letter_exchange is not None:
            keys = [key.decode("utf-8", "surrogateescape"), *stamped.copies]
            target = _routed(host, group.settings.dead_letter_exchange, key, keys, stamped.headers, tags)
        if target is None:
            grave = name.name + DEAD_LETTER_END
            if grave not in host.queues:
                return None
            target = host.target(DEFAULT_EXCHANGE, grave.encode(), [grave], tags=tags)
        return Letter(target, attributes, target.tags, key, stamped.properties, batch.values[index], headers)

    async def _send(self, failures: Failures, sending: Sequence[_Sending]) -> None:
        """Their numbers are on the disk. Behind one that finds no room the others wait, too: numbers have an order."""
        left = deque(sending)
        sent: list[_Sending] = []
        while left:
            one = left[0]
            if one.transfer.taken_back:
                left.popleft()
                continue
            if not self._goes_there(one):
                for taken in failures.outbox.take_back(one.transfer.target, one.transfer.first):
                    failures.waiting += taken.what
                continue
            try:
                self._append(failures, one)
            except DiskFull:
                await self._clock.sleep(AGAIN_S)
                continue
            sent.append(left.popleft())
        for one in sent:
            stream = self._broker.directory.streams.get(one.transfer.target.stream)
            if stream is not None:
                log = stream.partitions[one.transfer.target.partition]
                await self._broker.wait_committed(log, log.end)
            failures.outbox.settle(one.transfer)

    def _goes_there(self, one: _Sending) -> bool:
        """Its way still leads into the same log."""
        way, target = one.piece.way, one.transfer.target
        if isinstance(way, Target):
            if not one.host.is_current(way):
                one.piece.way = way = one.host.now(way)
            if not way.queues or way.log is None or way.log.stream_id != target.stream:
                return False
        return target.stream in self._broker.directory.streams

    def _append(self, failures: Failures, one: _Sending) -> None:
        broker, piece = self._broker, one.piece
        producer = failures.outbox.producer(one.transfer)
        if isinstance(piece.way, Duty):
            latest_us = broker.delayed.latest_us(self._clock.wall_us())
            broker.delayed.park(
                piece.way,
                piece.keys,
                piece.properties,
                piece.values,
                due_us=[min(due_us, latest_us) for due_us in piece.dues_us],
                attributes=piece.attributes,
                tags=piece.tags,
                headers=piece.all_headers,
                producer=producer,
            )
            self.retried_count += len(piece.values)
            return
        broker.publish_dense(
            piece.way,
            producer,
            piece.keys,
            piece.properties,
            piece.values,
            settled=failures.outbox.settled_below(one.transfer.target),
            attributes=piece.attributes,
            headers=piece.all_headers,
        )
        self.dead_count += len(piece.values)
        broker.on_ready()

    # -- coming back --------------------------------------------------------------------------------------------

    def waiting_count(self, name: GroupName) -> int:
        """How many records of a group wait for another attempt."""
        delays = self._broker.delayed.delays
        return sum(delays.count(encode_duty(duty)) for duty in self.duties(name).values())

    def duties(self, name: GroupName) -> dict[int, Duty]:
        """What records that wait for a group are parked as, by the number of the stream they come back in."""
        returns = self._groups.groups[name].returns.values()
        return {one.number: _duty(name, one.stream) for one in sorted(returns)}

    async def waiting(self, duty: Duty, *, after: str | None = None, limit: int = 100) -> Page:
        """Those of one stream, by when they are due; `after` is the cursor of the page before."""
        return await self._broker.delayed.delays.list(target=encode_duty(duty), after=after, limit=limit)

    def way_back(self, vhost: str, group: str, origin: str) -> Duty | None:
        """For a redrive: how a dead letter of a group comes back to it; None: the group or the topic is gone."""
        name = GroupName(vhost, group)
        found = self._groups.groups.get(name)
        try:
            stream = None if found is None else found.returns.get(StreamId(UUID(origin)))
        except ValueError:
            return None
        if stream is None or not self.logs_of(stream.stream):
            return None
        return _duty(name, stream.stream)

    def stream_for(self, duty: Duty) -> StreamId | None:
        """The stream that a parked record of ours comes back in; None: its group is gone, or its topic."""
        group = self._groups.groups.get(GroupName(duty.vhost, duty.name))
        for one in () if group is None else group.returns.values():
            if _view(one.stream) == duty.view:
                return one.stream if self.logs_of(one.stream) else None
        return None

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        stream = self.stream_for(duty)
        return None if stream is None else TargetPartition(stream)

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        found = None if run.where is None else self._broker.directory.streams.get(run.where.stream)
        if found is None or run.producer is None:
            self.dropped_count += len(run)
            _log.warning(
                "failed records were dropped: their group or topic is gone",
                extra={"vhost": duty.vhost, "group": duty.name, "count": len(run)},
            )
            done()
            return
        log = found.partitions[0]
        before, reached = log.end, 0
        for first, last, timestamp_us, expiry_us in alike_in_time(run.headers, len(run)):
            producer = run.producer._replace(first_sequence=run.producer.first_sequence + first)
            appended = log.append_dense(
                producer,
                run.keys[first:last],
                run.properties[first:last],
                run.values[first:last],
                settled=max(run.settled, producer.first_sequence),
                timestamp_us=self._clock.wall_us() if timestamp_us is None else timestamp_us,
                attributes=run.attributes,
                expiry_us=expiry_us,
                tags=run.tags,
                headers=None if run.headers is None else run.headers[first:last],
            )
            reached = int(appended.next_offset)
        self.returned_count += int(log.end) - int(before)
        self._broker.directory.committer.urgent(log)
        log.when_committed(reached, done)


def check_grave(name: GroupName) -> None:
    """Raises Refused for a group whose dead-letter queue could never be made."""
    if len(name.name.encode()) + len(DEAD_LETTER_END) > NAME_BYTES_MAX:
        raise Refused(
            f"the name of the group's dead-letter queue would be longer than {NAME_BYTES_MAX} bytes: give it a "
            "dead-letter exchange"
        )


def _view(stream: StreamId) -> int:
    return stream.int & 0xFFFF_FFFF_FFFF_FFFF


def _duty(name: GroupName, stream: StreamId) -> Duty:
    return Duty(DutyKind.GROUP, name.vhost, name.name, _view(stream))


def _records(log: PartitionLog | None, offsets: Sequence[int]) -> Iterator[tuple[int, RecordBatch, int]]:
    """Those of these offsets, in their order, that hold a committed record."""
    batch: RecordBatch | None = None
    for offset in offsets:
        if log is None or not log.log_start <= offset < log.high_watermark:
            continue
        if batch is None or offset >= batch.next_offset:
            batch = log.read(offset, end=offset + 1)[0].batch
        index = batch.index_of(offset)
        if batch.gap is None and batch.offset_at(index) == offset:
            yield offset, batch, index


def _has_room(target: Target, byte_count: int, taken: dict[Queue, int]) -> bool:
    """Queues that refuse publishes when they are full are asked first."""
    for queue in target.byte_limits:
        if not queue.admits(taken.get(queue, 0) + 1, byte_count):
            return False
    for queue in target.byte_limits:
        taken[queue] = taken.get(queue, 0) + 1
    return True


def _routed(
    host: VirtualHost,
    exchange: str,
    key: bytes,
    keys: Sequence[str],
    headers: Fields,
    tags: tuple[str, ...],
) -> Target | None:
    """Where a dead-letter exchange leads; None: to nobody, or it is gone."""
    if host.router.exchange(exchange) is None:
        return None
    target = host.target(exchange, key, keys, headers, tags=tags)
    return target if target.queues and target.log is not None else None
