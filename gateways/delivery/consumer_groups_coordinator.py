"""Consumer groups at work: sessions, polls, and what has to be on the disk before somebody is told. Driver.

Every change of a group is appended to `__offsets` in the turn in which it is made, and no answer goes out before that
is committed: a generation, a tenure or an offset that somebody has heard of survives a crash.

A poll begins at what is committed, unless the member says which answer it has received last: then behind that one.
An answer that got lost is so given again, and nothing is passed over (G2): at least once. These places are in memory
only; who polls after a restart begins at what is committed.

What members fail with is written down with the commit that passes it (consumer_groups_retries.py has the rest).

A group pins nothing: what retention took before it was read is told as a gap, and counted. Neighbours:
consumer_groups.py decides, consumer_groups_journal.py has the bytes, gateways/http/groups.py the wire.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import trio

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import Refused
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, TOMBSTONE, Gap, RecordBatch
from headrace.delay.wheel import Timer
from headrace.gateways.delivery import consumer_groups_journal as journal
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.consumer_groups import (
    ConsumerGroup,
    GroupInUse,
    GroupSettings,
    Member,
    Standing,
    Start,
    UnknownMember,
)
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_config import GroupsConfig
from headrace.gateways.delivery.consumer_groups_journal import GroupName
from headrace.gateways.delivery.consumer_groups_lag import Gaps
from headrace.gateways.delivery.consumer_groups_retries import GroupRetries, check_grave

_log = logging.getLogger(__name__)

OFFSETS_CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)
SWEEP_PERIOD_S = 60.0
# The kinds of a reset and of a deletion in the audit.
RESET = "group-reset"
DELETE = "group-delete"
# A stream that nothing was ever written to has no log yet that could tell of its first record.
UNBORN_LOOK_S = 0.2
READ_BYTES = 256 * 1024
# Numbers that JSON's readers can hold exactly.
NUMBER_MAX = 2**52


# The partitions of a stream; None: nothing was ever written to it. Nothing at all: there is no such stream (any more).
LogsOf = Callable[[StreamId], Sequence[PartitionLog | None]]
# Of the records first..last-1 of a batch of a slot those that somebody wants, and may have.
Select = Callable[[Slot, RecordBatch, int, int], Iterable[int]]


class Delivered(NamedTuple):
    """One record of a poll."""

    slot: Slot
    batch: RecordBatch
    at: int


class Missing(NamedTuple):
    """Offsets that hold nothing. `reason` None: retention took them before the group came by."""

    slot: Slot
    offset: int
    next_offset: int
    reason: Gap | None


class Place(NamedTuple):
    """Where reading goes on. It belongs to a tenure, and ends with it."""

    since: int
    offset: int


@dataclass(slots=True)
class Polled:
    standing: Standing
    # Sent with the next poll, it says that this answer was received.
    number: int
    records: list[Delivered] = field(default_factory=list)
    missing: list[Missing] = field(default_factory=list)
    # Behind this answer: what may be committed once it was worked on.
    places: dict[Slot, Place] = field(default_factory=dict)
    byte_count: int = 0

    def is_full(self, bytes_max: int, count_max: int) -> bool:
        return self.byte_count >= bytes_max or len(self.records) >= count_max

    def add(self, one: Delivered) -> None:
        self.records.append(one)
        batch, index = one.batch, one.at
        self.byte_count += len(batch.values[index]) + len(batch.keys[index]) + len(batch.properties[index])


class Progress(NamedTuple):
    """How far a group is with one partition."""

    slot: Slot
    committed: int | None
    log_start: int
    end: int
    # Records to come.
    lag: int
    # Offsets that retention took before they were committed.
    lost: int
    member: str | None


@dataclass(slots=True, eq=False)
class _Cursor:
    """Where a member is: before its last answer, and behind it."""

    number: int
    before: Mapping[Slot, Place] = field(default_factory=dict)
    behind: Mapping[Slot, Place] = field(default_factory=dict)
    # Which of its polls waits; a later one takes over from an earlier one.
    turn: int = 0
    # Which slot is read first: each in its turn, so that none starves.
    first: int = 0
    woken: trio.Event = field(default_factory=trio.Event)


class GroupCoordinator:
    def __init__(self, broker: Broker, logs_of: LogsOf, config: GroupsConfig | None = None) -> None:
        """Before the broker is loaded: the groups have a log of their own."""
        self.groups: dict[GroupName, ConsumerGroup] = {}
        self.config = config or GroupsConfig()
        # Offsets that were gone before a group read them.
        self.lost_count = 0
        self._broker = broker
        self._clock = broker.env.clock
        self._topic_logs = logs_of
        self.journal = broker.private_log(journal.STREAM_NAME, OFFSETS_CONFIG)
        self._gaps = Gaps()
        # By group, up to where of each slot what was gone is counted.
        self._lost: dict[GroupName, dict[Slot, int]] = {}
        self._cursors: dict[str, _Cursor] = {}
        self._timers: dict[GroupName, tuple[float, Timer[Callable[[], None]]]] = {}
        self._waiting: dict[PartitionLog, set[_Cursor]] = {}
        self.retries = GroupRetries(self, broker)
        self._running = trio.CancelScope()
        self._ended: trio.Event | None = None

    # -- life ---------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Behind the broker's."""
        now_ms = self._now_ms()
        self.groups = await self._broker.env.worker.run(lambda: journal.restored(self.journal.entries(), now_ms))
        self.retries.load()
        for name in self.groups:
            self._arm(name)

    async def run(self) -> None:
        """Move what has failed, forget what nobody asks for any more, until cancelled or closed."""
        self._ended = trio.Event()
        try:
            with self._running:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.retries.run)
                    while True:
                        await self._clock.sleep(SWEEP_PERIOD_S)
                        self.sweep()
        finally:
            self._ended.set()

    async def close(self) -> None:
        """Before the broker's: from here on nothing is moved by itself."""
        self._running.cancel()
        if self._ended is not None:
            await self._ended.wait()

    def sweep(self) -> None:
        """Offsets of streams that are gone, and groups that had neither members nor commits for too long."""
        before_us = self._clock.wall_us() - self.config.offsets_retention_ms * 1000
        for name, group in list(self.groups.items()):
            over = group.is_over(before_us)
            lost = [origin for origin in group.returns if not self.logs_of(origin)]
            if over:
                self.retries.forget_group(group)
            elif lost:
                self.retries.forget(group, lost)
            gone = [slot for slot in group.committed if over or not self._exists(slot)]
            group.forget(gone)
            self._write(name, group)
            if over:
                self._drop(name)
                _log.info("offsets of a group without members have expired", extra={"group": name.name})
        if self.journal.needs_sync:
            self._broker.directory.committer.lazy(self.journal)

    def _drop(self, name: GroupName) -> None:
        if self.groups.pop(name).failures is not None:
            self._append(journal.failures_key(name), b"")
        self._append(journal.group_key(name), b"")
        self._lost.pop(name, None)

    def logs_of(self, stream: StreamId) -> Sequence[PartitionLog | None]:
        """Of a topic, or of what comes back to a group."""
        return self.retries.logs_of(stream) if self.retries.is_own(stream) else self._topic_logs(stream)

    def _exists(self, slot: Slot) -> bool:
        return slot.partition < len(self.logs_of(slot.stream))

    def _now_ms(self) -> float:
        return self._clock.monotonic() * 1000

    # -- members ------------------------------------------------------------------------------------------------

    async def join(
        self,
        name: GroupName,
        user: str,
        topics: frozenset[StreamId],
        *,
        session_ms: int,
        rebalance_ms: int,
        start: Start = Start.FIRST,
        label: str = "",
    ) -> tuple[str, Standing]:
        """A new member; its id is known to it alone, and says so in every later request."""
        low, high = self.config.session_ms_min, self.config.session_ms_max
        if not low <= session_ms <= high:
            raise Refused(f"a session timeout of {session_ms} ms is outside {low}..{high} ms")
        group = self.groups.setdefault(name, ConsumerGroup())
        member = Member(str(self._broker.env.ids.uuid()), user, topics, session_ms, rebalance_ms, start, label)
        group.join(member, self._counts(group.streams() | group.with_returns(topics)), self._now_ms())
        return member.id, await self._told(name, group, member.id)

    async def heartbeat(
        self,
        name: GroupName,
        member_id: str,
        user: str,
        generation: int,
        topics: frozenset[StreamId] | None = None,
    ) -> Standing:
        group = self._group_of(name, member_id, user)
        now_ms = self._now_ms()
        group.heartbeat(member_id, generation, now_ms)
        if topics is not None:
            group.ask_for(member_id, topics, self._counts(group.streams() | group.with_returns(topics)), now_ms)
        group.lay_out(self._counts(group.streams()), now_ms)
        return await self._told(name, group, member_id)

    async def leave(self, name: GroupName, member_id: str, user: str) -> None:
        group = self._group_of(name, member_id, user)
        group.leave(member_id, self._now_ms(), self._clock.wall_us())
        self._cursors.pop(member_id, None)
        await self._settled(name, group)

    def _group_of(self, name: GroupName, member_id: str, user: str) -> ConsumerGroup:
        """Another user's member is as unknown as nobody's."""
        group = self.groups.get(name) or ConsumerGroup()
        if group.member(member_id).user != user:
            raise UnknownMember(f"no member {member_id!r}: it has left, was not heard of in time, or never joined")
        return group

    async def _told(self, name: GroupName, group: ConsumerGroup, member_id: str) -> Standing:
        """What the member is answered: as it is now, once that is on the disk. What others change meanwhile comes
        with the next answer."""
        standing = group.standing(member_id)
        await self._settled(name, group)
        # It may have been put out while the disk was waited for.
        group.member(member_id)
        return standing

    def _counts(self, streams: Iterable[StreamId]) -> dict[StreamId, int]:
        return {stream: len(self.logs_of(stream)) for stream in streams}

    def laid_out(self, name: GroupName, group: ConsumerGroup) -> None:
        """The group has another stream to read: its members are told with their next answers."""
        group.lay_out(self._counts(group.streams()), self._now_ms())
        self._changed(name, group)

    # -- settings -----------------------------------------------------------------------------------------------

    async def configure(self, name: GroupName, settings: GroupSettings) -> bool:
        """A group is set up; True if it was made for that. It stays until it is deleted."""
        if settings.retry is not None and settings.dead_letter_exchange is None:
            check_grave(name)
        is_new = name not in self.groups
        group = self.groups.setdefault(name, ConsumerGroup(empty_since_us=self._clock.wall_us()))
        group.configure(settings)
        await self._settled(name, group)
        return is_new

    async def delete(self, name: GroupName, *, by: str) -> None:
        """Its offsets, what waits to come back to it and what did, but not its dead letters. Raises GroupInUse."""
        group = self.groups[name]
        if group.members:
            raise GroupInUse(f"the group has {len(group.members)} members")
        audit = self._broker.audit
        waiting = self.retries.waiting_count(name)
        audit.note(DELETE, by, {"vhost": name.vhost, "group": name.name, "waiting": waiting})
        self.retries.forget_group(group)
        group.forget(list(group.committed))
        self._write(name, group)
        self._drop(name)
        self._arm(name)
        await self._broker.wait_committed(self.journal, self.journal.end)
        await self._broker.wait_committed(audit.log, audit.log.end)

    # -- what is written down -----------------------------------------------------------------------------------

    async def _settled(self, name: GroupName, group: ConsumerGroup) -> None:
        """Everything that has happened to the group is on the disk when this returns, and its members are woken."""
        self._changed(name, group)
        await self._broker.wait_committed(self.journal, self.journal.end)

    async def written(self, name: GroupName, group: ConsumerGroup) -> None:
        """What is known of its failures is on the disk when this returns."""
        if self.groups.get(name) is group:
            self._write(name, group)
        await self._broker.wait_committed(self.journal, self.journal.end)

    def _changed(self, name: GroupName, group: ConsumerGroup) -> None:
        if group.changed:
            for member_id in group.members:
                if member_id in self._cursors:
                    self._cursors[member_id].woken.set()
            now_us = self._clock.wall_us()
            for slot, start in group.unplaced():
                group.place(slot, self._beginning(slot, start), now_us)
        self._write(name, group)
        self._arm(name)

    def _beginning(self, slot: Slot, start: Start) -> int:
        log = self.log_at(slot)
        if log is None:
            return 0
        return int(log.log_start if start is Start.FIRST else log.high_watermark)

    def log_at(self, slot: Slot) -> PartitionLog | None:
        logs = self.logs_of(slot.stream)
        return logs[slot.partition] if slot.partition < len(logs) else None

    def _write(self, name: GroupName, group: ConsumerGroup) -> None:
        entries: dict[bytes, bytes] = {}
        if group.changed:
            entries[journal.group_key(name)] = journal.encode_group(group)
        if group.changed_failures and group.failures is not None:
            entries[journal.failures_key(name)] = journal.encode_failures(group.failures)
        for slot in sorted(group.changed_offsets & group.committed.keys()):
            entries[journal.offset_key(name, slot)] = journal.encode_offset(group.committed[slot])
        if entries:
            # In one batch: a crash takes all of it or nothing.
            self.journal.append(
                list(entries),
                [b""] * len(entries),
                list(entries.values()),
                timestamp_us=self._clock.wall_us(),
                attributes=PERSISTENT,
            )
        for slot in sorted(group.changed_offsets - group.committed.keys()):
            self._append(journal.offset_key(name, slot), b"")
        group.changed = group.changed_failures = False
        group.changed_offsets.clear()

    def _append(self, key: bytes, value: bytes) -> None:
        attributes = PERSISTENT if value else PERSISTENT | TOMBSTONE
        self.journal.append([key], [b""], [value], timestamp_us=self._clock.wall_us(), attributes=attributes)

    # -- sessions -----------------------------------------------------------------------------------------------

    def _arm(self, name: GroupName) -> None:
        """One timer for a group, for whoever is the first to be missed."""
        group = self.groups.get(name)
        due_ms = None if group is None else group.next_deadline_ms()
        armed = self._timers.get(name)
        if armed is not None and (due_ms is None or due_ms < armed[0]):
            self._broker.timers.cancel(armed[1])
            del self._timers[name]
            armed = None
        if due_ms is not None and armed is None:
            # A millisecond late, so that no rounding makes it look too soon, again and again.
            seconds = (max(due_ms - self._now_ms(), 0) + 1) / 1000
            self._timers[name] = (due_ms, self._broker.timers.after(seconds, lambda: self._look(name)))

    def _look(self, name: GroupName) -> None:
        del self._timers[name]
        group = self.groups.get(name)
        if group is None:
            return
        for member_id, why in group.expire(self._now_ms(), self._clock.wall_us()).items():
            cursor = self._cursors.pop(member_id, None)
            if cursor is not None:
                cursor.woken.set()
            _log.warning("a member was put out of its group", extra={"group": name.name, "why": why})
        self._changed(name, group)
        if self.journal.needs_sync:
            self._broker.directory.committer.lazy(self.journal)

    # -- offsets ------------------------------------------------------------------------------------------------

    async def commit(
        self,
        name: GroupName,
        offsets: Mapping[Slot, int],
        *,
        member_id: str,
        user: str,
        generation: int,
        failed: Mapping[Slot, Mapping[int, str]] | None = None,
    ) -> None:
        """All of them or none. `failed`: of what the commit passes, the offsets of records that failed, and why."""
        group = self._group_of(name, member_id, user)
        self._check_reached(offsets)
        group.check_commit(member_id, generation, offsets)
        if failed:
            self.retries.check(group, offsets, failed)
        group.touch(group.member(member_id), self._now_ms())
        group.commit(offsets, self._clock.wall_us())
        if failed:
            self.retries.take(group, failed)
        await self._settled(name, group)

    async def commit_from_outside(self, name: GroupName, offsets: Mapping[Slot, int]) -> None:
        """For readers that share out the partitions by themselves."""
        group = self.groups.get(name) or ConsumerGroup()
        self._check_reached(offsets)
        group.check_commit_from_outside(offsets)
        self.groups.setdefault(name, group).commit(offsets, self._clock.wall_us())
        await self._settled(name, group)

    async def reset(self, name: GroupName, offsets: Mapping[Slot, int], *, by: str, force: bool = False) -> None:
        """`by`: whose doing it is, for the audit."""
        self.check_reset(name, offsets, force=force)
        group = self.groups.get(name) or ConsumerGroup()
        moved = [
            {
                "stream": str(slot.stream),
                "partition": slot.partition,
                "was": group.committed[slot].offset if slot in group.committed else None,
                "now": offset,
            }
            for slot, offset in offsets.items()
        ]
        group.reset(offsets, self._clock.wall_us(), force=force)
        self.groups.setdefault(name, group)
        about = {"vhost": name.vhost, "group": name.name, "generation": group.generation, "offsets": moved}
        audit = self._broker.audit
        audit.note(RESET, by, about)
        await self._settled(name, group)
        await self._broker.wait_committed(audit.log, audit.log.end)
        _log.warning("offsets of a group were reset", extra={"user": by, **about})

    def check_reset(self, name: GroupName, offsets: Mapping[Slot, int], *, force: bool = False) -> None:
        """Raises if it would be refused."""
        self._check_reached(offsets)
        if not force:
            (self.groups.get(name) or ConsumerGroup()).check_reset(offsets)

    def _check_reached(self, offsets: Mapping[Slot, int]) -> None:
        for slot, offset in offsets.items():
            if not self._exists(slot):
                raise Refused(f"there is no partition {slot.partition}")
            log = self.log_at(slot)
            end = 0 if log is None else int(log.high_watermark)
            if not 0 <= offset <= end:
                raise Refused(f"offset {offset} of partition {slot.partition} is outside 0..{end}")

    def progress(self, name: GroupName) -> list[Progress]:
        """Of every partition that the group holds or has an offset of."""
        group = self.groups[name]
        return [
            self._progress(group, slot) for slot in sorted({*group.tenures, *group.committed}) if self._exists(slot)
        ]

    def _progress(self, group: ConsumerGroup, slot: Slot) -> Progress:
        log = self.log_at(slot)
        tenure = group.tenures.get(slot)
        found = group.committed.get(slot)
        committed = None if found is None else found.offset
        member = None if tenure is None else tenure.member
        if log is None:
            return Progress(slot, committed, 0, 0, 0, 0, member)
        start, end = int(log.log_start), int(log.high_watermark)
        begins = start if committed is None else committed
        lost = max(start - begins, 0)
        return Progress(slot, committed, start, end, self._gaps.records_between(log, begins, end), lost, member)

    # -- polling ------------------------------------------------------------------------------------------------

    async def poll(
        self,
        name: GroupName,
        member_id: str,
        user: str,
        generation: int,
        *,
        after: int | None = None,
        wait_s: float = 0,
        bytes_max: int = READ_BYTES,
        count_max: int = 500,
        select: Select = lambda slot, batch, first, last: range(first, last),
    ) -> Polled:
        """The next records of what the member holds; waits for some, or until it is told something new.

        `after`: the number of the last answer that was received; reading goes on behind it. Without it, or if it is
        not known (any more), at what is committed.
        """
        standing = await self.heartbeat(name, member_id, user, generation)
        group = self.groups[name]
        cursor = self._cursor(member_id)
        cursor.turn += 1
        turn = cursor.turn
        cursor.woken.set()
        number = cursor.number + 1
        before: Mapping[Slot, Place] = {}
        if after == cursor.number:
            before = cursor.behind
        elif after == cursor.number - 1:
            number, before = cursor.number, cursor.before
        # A member that waits is alive, and is heard of again before it would count as gone.
        until = self._clock.monotonic() + min(wait_s, group.member(member_id).session_ms / 2000)
        while True:
            polled = Polled(standing, number)
            at_end = self._read(group, cursor, polled, before, bytes_max, count_max, select)
            left = until - self._clock.monotonic()
            if polled.records or polled.missing or standing.generation > generation or (at_end and left <= 0):
                break
            # What was looked at and not wanted is not looked at again.
            before = polled.places
            if at_end:
                # No less than a millisecond: rounding must not make it wait for nothing, again and again.
                await self._wait(polled.standing, cursor, max(left, 0.001))
            else:
                await trio.lowlevel.checkpoint()
            if cursor.turn != turn:
                # A later poll of the same member has taken over.
                break
            standing = await self._heard_again(name, group, member_id)
        if cursor.turn == turn:
            cursor.number, cursor.before, cursor.behind = number, before, polled.places
        self._count_lost(name, polled)
        return polled

    def _count_lost(self, name: GroupName, polled: Polled) -> None:
        """Once, however often the same offsets are asked for in vain."""
        counted = self._lost.setdefault(name, {})
        for slot, offset, next_offset, reason in polled.missing:
            if reason is None:
                self.lost_count += max(next_offset - max(offset, counted.get(slot, 0)), 0)
                counted[slot] = max(next_offset, counted.get(slot, 0))

    def _cursor(self, member_id: str) -> _Cursor:
        cursor = self._cursors.get(member_id)
        if cursor is None:
            # Numbers of an answer before a restart must not be taken for one behind it.
            cursor = self._cursors[member_id] = _Cursor(self._broker.env.ids.salt() % NUMBER_MAX)
        return cursor

    async def _heard_again(self, name: GroupName, group: ConsumerGroup, member_id: str) -> Standing:
        group.touch(group.member(member_id), self._now_ms())
        return await self._told(name, group, member_id)

    def _read(
        self,
        group: ConsumerGroup,
        cursor: _Cursor,
        polled: Polled,
        before: Mapping[Slot, Place],
        bytes_max: int,
        count_max: int,
        select: Select,
    ) -> bool:
        """Fill an answer; False if there is more to be looked at."""
        holds = polled.standing.holds
        at_end = True
        cursor.first += 1
        for step in range(len(holds)):
            slot, since = holds[(cursor.first + step) % len(holds)]
            place = before.get(slot)
            offset = place.offset if place is not None and place.since == since else group.committed[slot].offset
            log = self.log_at(slot)
            if log is not None:
                offset = _take(log, slot, offset, polled, bytes_max, count_max, select)
                at_end = at_end and offset >= log.high_watermark
            polled.places[slot] = Place(since, offset)
        return at_end

    async def _wait(self, standing: Standing, cursor: _Cursor, seconds: float) -> None:
        """Until something was committed to one of the member's logs, or it has to be told something."""
        logs = [self.log_at(held.slot) for held in standing.holds]
        cursor.woken = trio.Event()
        timer = self._broker.timers.after(min(seconds, UNBORN_LOOK_S) if None in logs else seconds, cursor.woken.set)
        born = [log for log in logs if log is not None]
        for log in born:
            if self._advanced not in log.advanced:
                log.advanced.append(self._advanced)
            self._waiting.setdefault(log, set()).add(cursor)
        try:
            await cursor.woken.wait()
        finally:
            self._broker.timers.cancel(timer)
            for log in born:
                self._waiting[log].discard(cursor)

    def _advanced(self, log: PartitionLog) -> None:
        for cursor in self._waiting.get(log, ()):
            cursor.woken.set()


def _take(
    log: PartitionLog, slot: Slot, offset: int, polled: Polled, bytes_max: int, count_max: int, select: Select
) -> int:
    """Records from an offset on, as many as there is room for and about one read's worth; returns what comes next."""
    start, end = int(log.log_start), int(log.high_watermark)
    if offset < start:
        polled.missing.append(Missing(slot, offset, start, None))
        offset = start
    if offset >= end or polled.is_full(bytes_max, count_max):
        return offset
    for batch, first, last in log.read(offset, bytes_max=min(bytes_max, READ_BYTES)):
        if batch.gap is not None:
            polled.missing.append(Missing(slot, offset, min(int(batch.next_offset), end), batch.gap))
        for index in select(slot, batch, first, last):
            if polled.is_full(bytes_max, count_max):
                return int(batch.offset_at(index))
            polled.add(Delivered(slot, batch, index))
        offset = min(int(batch.next_offset), end)
    return offset
