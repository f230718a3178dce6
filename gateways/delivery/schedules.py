"""Messages that come round: each run of a schedule is a parcel on the delay wheel. Driver.

    put -> state in __schedules -> the next run is parked -> due: publish -> state with the one after -> park -> ...

A run is published with the schedule's own numbers (run k is number k of the producer that the schedule is), so it may
be tried any number of times and is there once: after a crash the engine fires the run again, or the next one is parked
again at the start, and neither does harm. The order is: publish, wait for its commit, write the state that names the
next run, park that. What is parked for a schedule that was changed, paused or deleted since is passed over when due.
Runs that were missed while the broker was down go by the schedule's policy (delay/cron.py); those of a paused schedule
are not made up for. Neighbours: schedules_state.py is what is written; delayed.py calls; the HTTP door asks.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import trio

from headrace.controller.changes import Change, DeleteVhost
from headrace.controller.errors import Invalid, NotFound
from headrace.controller.snapshot import Snapshot
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull, UnknownFormat
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import PERSISTENT, Producer
from headrace.delay.cron import CronRefused, Missed
from headrace.delay.fire import DueRun
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty
from headrace.gateways.delivery.delayed_publish import DelayedPublishes
from headrace.gateways.delivery.schedules_state import (
    NAME_BYTES_MAX,
    STREAM_NAME,
    Definition,
    Schedule,
    decode_schedule,
    encode_schedule,
    schedule_key,
)

_log = logging.getLogger(__name__)

CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)
RETRY_S = 1.0
# A run further away than this is looked at again before: what is parked has a limit, a schedule has none.
PARKED_US_MAX = 366 * 86_400 * 1_000_000
_REVISION, _NUMBER = b"revision", b"number"


class Schedules:
    """The carrier of runs."""

    def __init__(self, broker: Broker, publishes: DelayedPublishes) -> None:
        """Before the broker is loaded: there is a log of its own."""
        self._broker = broker
        self._publishes = publishes
        self._log = broker.private_log(STREAM_NAME, CONFIG)
        self._schedules: dict[tuple[str, str], Schedule] = {}
        # What is to be written of runs that are done.
        self._finished: deque[Callable[[], None]] = deque()
        self._wake = trio.Event()
        # One change of schedules at a time.
        self._changing = trio.Lock()
        broker.delayed.carry(DutyKind.SCHEDULE, self)

    def load(self) -> None:
        """As the log has them. Once the broker is loaded."""
        kept: dict[bytes, bytes] = {}
        for _offset, key, value in self._log.entries():
            kept[key] = value
        for key, value in kept.items():
            if value:
                try:
                    schedule = decode_schedule(key, value)
                except UnknownFormat as error:
                    _log.error("a schedule was passed over: %s", error)
                    continue
                if schedule.vhost in self._broker.vhosts:
                    self._schedules[schedule.vhost, schedule.name] = schedule

    # -- asked from outside -------------------------------------------------------------------------------------

    def list(self, vhost: str | None = None) -> list[Schedule]:
        """By name."""
        found = [one for one in self._schedules.values() if vhost is None or one.vhost == vhost]
        return sorted(found, key=lambda one: (one.vhost, one.name))

    def get(self, vhost: str, name: str) -> Schedule:
        found = self._schedules.get((vhost, name))
        if found is None:
            raise NotFound(f"no schedule '{name}' in vhost '{vhost}'")
        return found

    async def put(self, vhost: str, name: str, definition: Definition) -> Schedule:
        """Make a schedule, or change the one of this name; it runs from now on. Durable when this returns."""
        if not name or len(name.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
            raise Invalid(f"the name of a schedule has 1 to {NAME_BYTES_MAX} bytes")
        host = self._broker.vhosts.get(vhost)
        if host is None:
            raise NotFound(f"no vhost '{vhost}'")
        exchange = definition.message.exchange
        if host.router.exchange(exchange) is None:
            raise NotFound(f"no exchange '{exchange}' in vhost '{vhost}'")
        now_us = self._broker.env.clock.wall_us()
        try:
            first_us = definition.cron.check(now_us)
        except CronRefused as error:
            raise Invalid(str(error)) from error
        async with self._changing:
            before = self._schedules.get((vhost, name))
            if before is None:
                made = Schedule(vhost, name, self._broker.env.ids.uuid(), definition, now_us)
            else:
                made = _changed(before, definition)
            return await self._change(before, replace(made, next_us=None if definition.paused else first_us))

    async def delete(self, vhost: str, name: str) -> None:
        async with self._changing:
            before = self.get(vhost, name)
            with trio.CancelScope(shield=True):
                del self._schedules[vhost, name]
                await self._write(schedule_key(vhost, name), b"")
                await self._cancel(before)

    async def pause(self, vhost: str, name: str) -> Schedule:
        async with self._changing:
            before = self.get(vhost, name)
            if before.definition.paused:
                return before
            paused = replace(before.definition, paused=True)
            return await self._change(before, replace(_changed(before, paused), next_us=None))

    async def resume(self, vhost: str, name: str) -> Schedule:
        async with self._changing:
            before = self.get(vhost, name)
            if not before.definition.paused:
                return before
            resumed = replace(before.definition, paused=False)
            next_us = resumed.cron.next_us(self._broker.env.clock.wall_us())
            return await self._change(before, replace(_changed(before, resumed), next_us=next_us))

    async def run_now(self, vhost: str, name: str) -> None:
        """Publish once, beside the schedule: durable and counted when this returns. NotFound: its exchange is gone."""
        schedule = self.get(vhost, name)
        message = schedule.definition.message
        host = self._broker.vhosts[vhost]
        if host.router.exchange(message.exchange) is None:
            raise NotFound(f"no exchange '{message.exchange}' in vhost '{vhost}'")
        done = trio.Event()
        now_us = self._broker.env.clock.wall_us()
        self._publish(schedule, now_us, None, lambda: self._later(partial(self._count, schedule, now_us, done.set)))
        await done.wait()

    async def _change(self, before: Schedule | None, schedule: Schedule) -> Schedule:
        """Not to be given up half way: what is written must be here too."""
        with trio.CancelScope(shield=True):
            key = schedule.vhost, schedule.name
            self._schedules[key] = schedule
            await self._write(schedule_key(*key), encode_schedule(schedule))
            if before is not None:
                await self._cancel(before)
            if _same_run(self._schedules.get(key), schedule):
                reached = self._park(schedule)
                if reached is not None:
                    intake = self._broker.delayed.delays.intake
                    await self._broker.wait_committed(intake, reached)
        return schedule

    async def _write(self, key: bytes, value: bytes) -> None:
        await self._broker.wait_committed(self._log, self._append(key, value))

    def _append(self, key: bytes, value: bytes) -> int:
        now_us = self._broker.env.clock.wall_us()
        appended = self._log.append([key], [b""], [value], timestamp_us=now_us, attributes=PERSISTENT)
        self._broker.directory.committer.urgent(self._log)
        return int(appended.next_offset)

    async def _cancel(self, schedule: Schedule) -> None:
        if schedule.next_us is not None:
            await self._broker.delayed.delays.cancel(_run_id(schedule))

    def metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        """A vhost that goes takes its schedules along."""
        for change in changes:
            if isinstance(change, DeleteVhost):
                for key in [key for key in self._schedules if key[0] == change.name]:
                    del self._schedules[key]
                    self._append(schedule_key(*key), b"")

    # -- runs ---------------------------------------------------------------------------------------------------

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        """A run brings its own numbers."""
        return None

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        waiting = _All(len(run), done)
        for index in range(len(run)):
            headers = dict(run.headers[index]) if run.headers is not None else {}
            revision, number = int.from_bytes(headers[_REVISION], "big"), int.from_bytes(headers[_NUMBER], "big")
            schedule = self._schedules.get((duty.vhost, duty.name))
            if schedule is None or (schedule.revision, schedule.number) != (revision, number):
                waiting()
            else:
                self._come_up(schedule, waiting)

    def _come_up(self, schedule: Schedule, done: Callable[[], None]) -> None:
        now_us = self._broker.env.clock.wall_us()
        due_us = schedule.next_us
        if due_us is None:
            done()
            return
        if now_us < due_us:
            # It was parked for a look on the way.
            self._finish(schedule, schedule, done)
            return
        step = schedule.definition.cron.step(due_us, now_us, Missed(schedule.definition.missed))
        after = replace(schedule, number=schedule.number + 1, next_us=step.next_us, last_us=now_us)
        if not step.runs:
            _log.warning(
                "a run was missed", extra={"vhost": schedule.vhost, "schedule": schedule.name, "due_us": due_us}
            )
            self._finish(schedule, replace(after, missed_count=schedule.missed_count + 1), done)
            return
        message = schedule.definition.message
        if self._publishes.place(Duty(DutyKind.PUBLISH, schedule.vhost, message.exchange), message.key) is None:
            _log.warning(
                "a run found nothing to publish to", extra={"vhost": schedule.vhost, "schedule": schedule.name}
            )
            self._finish(schedule, replace(after, failed_count=schedule.failed_count + 1), done)
            return
        counted = replace(after, run_count=schedule.run_count + 1)
        self._publish(schedule, due_us, schedule.number, lambda: self._finish(schedule, counted, done))

    def _publish(self, schedule: Schedule, due_us: int, number: int | None, done: Callable[[], None]) -> None:
        message = schedule.definition.message
        duty = Duty(DutyKind.PUBLISH, schedule.vhost, message.exchange)
        where = self._publishes.place(duty, message.key)
        producer = None
        if where is not None and number is not None:
            producer = Producer(schedule.id.bytes, 0, number, dense=True)
        run = DueRun(
            target=encode_duty(duty),
            where=where if producer is not None else None,
            producer=producer,
            # Every run before is done with, wherever it went.
            settled=number or 0,
            ids=[_run_id(schedule)],
            due_us=[due_us],
            keys=[message.key],
            properties=[message.properties],
            values=[message.value],
            attributes=message.attributes,
            tags=message.tags,
            headers=None,
        )
        self._publishes.fire(duty, run, done)

    def _finish(self, before: Schedule, after: Schedule, done: Callable[[], None]) -> None:
        self._later(partial(self._advance, before, after, done))

    def _later(self, write: Callable[[], None]) -> None:
        """By `run`: this may be called out of a commit, where nobody can wait for a disk that is full."""
        self._finished.append(write)
        self._wake.set()

    def _park(self, schedule: Schedule) -> int | None:
        if schedule.next_us is None:
            return None
        now_us = self._broker.env.clock.wall_us()
        return self._broker.delayed.park(
            Duty(DutyKind.SCHEDULE, schedule.vhost, schedule.name),
            [schedule.definition.message.key],
            [b""],
            [b""],
            due_us=[min(schedule.next_us, now_us + PARKED_US_MAX)],
            ids=[_run_id(schedule)],
            attributes=PERSISTENT,
            headers=[
                (
                    (_REVISION, schedule.revision.to_bytes(8, "big")),
                    (_NUMBER, schedule.number.to_bytes(8, "big")),
                )
            ],
        )

    async def run(self) -> None:
        """Park what is not parked, then follow the runs, until cancelled."""
        for schedule in list(self._schedules.values()):
            await self._rearm(schedule)
        while True:
            while self._finished:
                try:
                    self._finished[0]()
                except DiskFull:
                    await self._broker.env.clock.sleep(RETRY_S)
                else:
                    self._finished.popleft()
            await self._wake.wait()
            self._wake = trio.Event()

    async def _rearm(self, schedule: Schedule) -> None:
        """At a start: the run may be parked, or under way, or neither. Once too often does no harm."""
        if schedule.next_us is None:
            return
        while await self._broker.delayed.delays.inspect(_run_id(schedule)) is None:
            try:
                self._park(schedule)
                return
            except DiskFull:
                await self._broker.env.clock.sleep(RETRY_S)

    def _count(self, ran: Schedule, time_us: int, done: Callable[[], None]) -> None:
        """A run beside the schedule's own."""
        key = ran.vhost, ran.name
        known = self._schedules.get(key)
        if known is None or known.id != ran.id:
            done()
            return
        counted = replace(known, run_count=known.run_count + 1, last_us=time_us)
        written = self._append(schedule_key(*key), encode_schedule(counted))
        self._schedules[key] = counted
        self._log.when_committed(written, done)

    def _advance(self, before: Schedule, after: Schedule, done: Callable[[], None]) -> None:
        key = before.vhost, before.name
        known = self._schedules.get(key)
        if known is None or not _same_run(known, before):
            # It was changed or deleted while it ran.
            done()
            return
        if known is not before:
            # Somebody had it run beside its times meanwhile.
            after = replace(after, run_count=after.run_count + known.run_count - before.run_count)
        waiting = _All(2, done)
        reached = self._park(after)
        written = self._append(schedule_key(*key), encode_schedule(after))
        self._schedules[key] = after
        self._log.when_committed(written, waiting)
        if reached is None:
            waiting()
        else:
            self._broker.delayed.when_parked(reached, waiting)


def _changed(schedule: Schedule, definition: Definition) -> Schedule:
    """A run of before may be under way, and has its number."""
    return replace(schedule, definition=definition, revision=schedule.revision + 1, number=schedule.number + 1)


def _same_run(known: Schedule | None, schedule: Schedule) -> bool:
    """It was neither changed nor deleted, nor has it run; but it may have been run beside its times."""
    return known is not None and _run_id(known) == _run_id(schedule)


def _run_id(schedule: Schedule) -> bytes:
    """Also how people cancel or move the next run."""
    return f"schedule-{schedule.id}-{schedule.revision}-{schedule.number}".encode()


class _All:
    """Calls `done` with the last of so many calls."""

    __slots__ = ("_count", "_done")

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._count = count
        self._done = done

    def __call__(self) -> None:
        self._count -= 1
        if not self._count:
            self._done()
