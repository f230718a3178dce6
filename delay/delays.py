"""The delay engine: records parked until they are due, then fired exactly once into their target. Driver.

    park -> __delay.in -> sorter -> hour, day, month buckets (streams) -> ring 0 in memory -> __delay.log -> Fire

A hierarchical time wheel whose outer rings are logs. The intake takes a run in one append; what is due soon is in
memory from its commit on, as a due time and a place; the rest is sorted into buckets in bulk, and comes back as rows,
never as bodies, when its time is near. So memory depends on what is due soon, not on what is pending. Firing and
cancelling are one decision in one log, and whichever stands first holds (T4).
Neighbours: firing.py, sorter.py, rescheduling.py, search.py do the work on engine.py; fire.py is the other side.
"""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import trio

from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Headers, Numbers, Producer
from headrace.delay.buckets import name_of
from headrace.delay.config import DelayConfig
from headrace.delay.decisions import Cancelled, Rescheduled
from headrace.delay.engine import DelayCounters, Engine
from headrace.delay.fire import Fire
from headrace.delay.firing import Firing
from headrace.delay.marks import INTAKE, State
from headrace.delay.parked import BucketCount, DelayRefused, Outcome, Page, Pending
from headrace.delay.rescheduling import Rescheduling
from headrace.delay.rows import ID_HEADER, id_hashes, target_tag
from headrace.delay.search import Match, Search, Wanted
from headrace.delay.sorter import Sorter

__all__ = ["BucketCount", "DelayRefused", "Delays", "Outcome", "Page", "Pending"]

KEEP_S = 0.2
FULL_DISK_PAUSE_S = 1.0


class Delays:
    """One for a node. `park` is synchronous; everything that may read the disk is not."""

    def __init__(self, env: Env, directory: LogDirectory, config: DelayConfig, fire: Fire) -> None:
        """Makes its logs if they are not there."""
        self._engine = Engine(env, directory, config)
        self._firing = Firing(self._engine, fire)
        self._sorter = Sorter(self._engine)
        self._search = Search(self._engine)
        self._clock = env.clock
        self._config = config
        self._rescheduling = Rescheduling(self._engine)

    @property
    def intake(self) -> PartitionLog:
        """The log whose commit means that a park is safe: intake.when_committed(next_offset, confirm)."""
        return self._engine.intake

    @property
    def counters(self) -> DelayCounters:
        return self._engine.counters

    @property
    def byte_count(self) -> int:
        """Bytes of all its logs."""
        return self._engine.byte_count

    # -- life ---------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Find out what is parked, and what was being fired when the last life ended. Before `run` and `park`."""
        engine = self._engine

        def load() -> tuple[bool, bool]:
            found = engine.replay()
            engine.load_sources()
            engine.load_intake()
            return found, engine.load_runs()

        found, whole = await engine.env.worker.run(load)
        if not found:
            engine.snapshot()
        if not whole:
            await engine.rebuild_runs()
        await engine.env.worker.run(engine.remove_strangers)
        engine.intake.advanced.append(lambda _log: engine.follow())

    async def run(self) -> None:
        """Sort and fire until cancelled. The directory's committer must be running."""
        await self._rescheduling.resume()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._engine.absorb_forever)
            nursery.start_soon(self._firing.run)
            nursery.start_soon(self._sorter.run)
            nursery.start_soon(self._rescheduling.run)
            nursery.start_soon(self._keep_forever)
            nursery.start_soon(self._delete_forever)

    async def _keep_forever(self) -> None:
        while True:
            try:
                await self._sorter.advance()
                self._engine.settle()
                await self._sorter.tidy()
                if self._engine.wants_snapshot:
                    await self._engine.prepare_snapshot()
                    self._engine.snapshot()
                self._engine.trim_journal()
            except DiskFull:
                await self._clock.sleep(FULL_DISK_PAUSE_S)
            await self._clock.sleep(KEEP_S)

    async def _delete_forever(self) -> None:
        while True:
            await self._sorter.delete_unused()
            await self._clock.sleep(1.0)

    async def close(self) -> None:
        """Write down where we are: the next load is short. After `run` has ended, before the directory closes."""
        await trio.lowlevel.checkpoint()
        self._engine.settle()
        self._engine.snapshot()

    # -- parking ------------------------------------------------------------------------------------------------

    def park(
        self,
        target: bytes,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        due_us: Numbers,
        ids: Sequence[bytes | None] | None = None,
        attributes: int = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
        producer: Producer | None = None,
    ) -> int:
        """Take a run of records in one append; returns the next offset of the intake and asks for its commit.

        Records without an id (None) get one: `made_id(offset)`; the first of the run has offset `returned - count`,
        unless there is a producer: then what was parked under its numbers before is not parked again.
        Due times in the past are lawful: they fire at once. Raises DelayRefused (nothing is taken) when one is
        due too far in the future, DiskFull as any append, SequenceRefused as any idempotent one.
        """
        count = len(values)
        if count == 0:
            return int(self._engine.intake.end)
        now_us = self._clock.wall_us()
        try:
            dues = np.maximum(np.asarray(due_us, dtype=np.int64), 0)
        except OverflowError:
            # Too large for any column, and so too far away; or as far in the past, and so due.
            self._refuse_too_far(max(due_us), now_us)
            dues = np.array([max(one, 0) for one in due_us], dtype=np.int64)
        self._refuse_too_far(int(dues.max()), now_us)
        if ids is not None and any(one is not None for one in ids):
            given = headers if headers is not None else [()] * count
            headers = [more if one is None else ((ID_HEADER, one), *more) for one, more in zip(ids, given, strict=True)]
        log = self._engine.intake
        if producer is not None:
            end = self._park_once(
                producer, target, keys, properties, values, dues.tolist(), attributes, tags, headers, now_us
            )
            self._engine.committer.urgent(log)
            return end
        appended = log.append(
            keys,
            properties,
            values,
            timestamp_us=now_us,
            expiry_us=dues,
            attributes=attributes,
            tags=(target_tag(target), *tags),
            headers=headers,
        )
        self._engine.committer.urgent(log)
        return int(appended.next_offset)

    def _park_once(
        self,
        producer: Producer,
        target: bytes,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        due_us: Sequence[int],
        attributes: int,
        tags: tuple[str, ...],
        headers: Sequence[Headers] | None,
        now_us: int,
    ) -> int:
        """One idempotent append for each span of records that are due together."""
        log = self._engine.intake
        append = log.append_dense if producer.dense else log.append_once
        low = 0
        while low < len(values):
            high = low + 1
            while high < len(values) and due_us[high] == due_us[low]:
                high += 1
            append(
                producer._replace(first_sequence=producer.first_sequence + low),
                keys[low:high],
                properties[low:high],
                values[low:high],
                timestamp_us=now_us,
                attributes=attributes,
                expiry_us=due_us[low],
                tags=(target_tag(target), *tags),
                headers=None if headers is None else headers[low:high],
            )
            low = high
        return int(log.end)

    def _refuse_too_far(self, due_us: int, now_us: int) -> None:
        limit_s = self._config.delay_s_max
        if due_us - now_us > limit_s * 1_000_000:
            raise DelayRefused(
                f"due in {(due_us - now_us) // 1_000_000} s, which is later than the limit of {limit_s} s from now"
            )

    # -- counting -----------------------------------------------------------------------------------------------

    def count(self, target: bytes | None = None) -> int:
        """How many are pending, of one target or of all. O(1)."""
        self._engine.absorb()
        ledger = self._engine.ledger
        return ledger.total if target is None else ledger.targets[target]

    def counts(self) -> Mapping[bytes, int]:
        """Pending records of each target that has any."""
        self._engine.absorb()
        return dict(self._engine.ledger.targets)

    def buckets(self) -> Sequence[BucketCount]:
        """Pending records of each bucket, by time; the intake, `near`, comes first."""
        engine = self._engine
        engine.absorb()
        sources = sorted(engine.ledger.sources.values(), key=lambda one: (one.start_us, one.number))
        return [
            BucketCount(
                "near" if one.number == INTAKE else name_of(one.span_us),
                one.start_us,
                one.end_us,
                one.pending,
                engine.logs[one.number].byte_count,
            )
            for one in sources
        ]

    # -- looking ------------------------------------------------------------------------------------------------

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        target: bytes | None = None,
        key: bytes | None = None,
        tag: str | None = None,
        due_from_us: int | None = None,
        due_until_us: int | None = None,
    ) -> Page:
        """Pending records by due time. Refused for a cursor that is none."""
        self._engine.absorb()
        return await self._search.page(after, limit, Wanted(target, key, tag, due_from_us or 0, due_until_us))

    async def inspect(self, id: bytes) -> Pending | None:
        """The pending record of this id (the first due, where several share it)."""
        pending, _decided = await self._under(id)
        return pending[0].record if pending else None

    async def targets(self, id: bytes) -> frozenset[bytes]:
        """Whose it is that is pending under this id: several publishers may have chosen the same."""
        pending, _decided = await self._under(id)
        return frozenset(one.record.target for one in pending)

    async def _under(self, id: bytes) -> tuple[Sequence[Match], Outcome]:
        """What is pending under this id, and what became of the others; true until the caller waits for something."""
        ledger = self._engine.ledger
        while True:
            await self._rescheduling.arrival(id)
            # What was confirmed a moment ago is known, however much came with it.
            self._engine.absorb()
            relocations = ledger.relocation_count
            found = await self._search.by_id(id)
            states = [ledger.state(one.place) for one in found]
            moved = any(
                one.state == State.PENDING and now == State.MOVED for one, now in zip(found, states, strict=True)
            )
            # It may have got another place before its state was looked at, and its new one was not.
            missed = State.PENDING not in states and ledger.relocation_count != relocations
            if not moved and not missed and not self._rescheduling.is_on_the_way(id):
                break
        pending = [one for one, now in zip(found, states, strict=True) if now == State.PENDING]
        return pending, _outcome({*states, self._engine.remembered.get(id_hashes(id)[-1])})

    # -- deciding -----------------------------------------------------------------------------------------------

    async def cancel(self, id: bytes) -> Outcome:
        """Cancel whatever is pending under this id; the answer is durable."""
        engine = self._engine
        pending, decided = await self._under(id)
        if pending:
            engine.decide(*(Cancelled(one.record.target, one.place.to_bytes(8, "little")) for one in pending))
            engine.counters.cancelled += len(pending)
            engine.remember(id_hashes(id)[-1:], State.CANCELLED)
        # Also "unknown" may rest upon a decision that is not durable yet.
        await engine.decided()
        return Outcome.DONE if pending else decided

    async def reschedule(self, id: bytes, due_us: int) -> Outcome:
        """Give whatever is pending under this id another due time; the answer is durable. May raise DelayRefused."""
        self._refuse_too_far(due_us, self._clock.wall_us())
        engine, ledger = self._engine, self._engine.ledger
        pending, decided = await self._under(id)
        for one in pending:
            number, first = ledger.next_number, ledger.outbox.next_number(ledger.intake_partition)
            engine.decide(Rescheduled(number, one.record.target, one.place, max(due_us, 0), first))
            self._rescheduling.send(ledger.moves[number], id)
        engine.counters.rescheduled += len(pending)
        if pending:
            await self._rescheduling.arrival(id)
        else:
            await engine.decided()
        return Outcome.DONE if pending else decided


def _outcome(states: Collection[State | None]) -> Outcome:
    """Of what is no longer pending."""
    if State.FIRED in states:
        return Outcome.ALREADY_FIRED
    return Outcome.ALREADY_CANCELLED if State.CANCELLED in states else Outcome.UNKNOWN
