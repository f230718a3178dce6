"""What the tasks of the delay engine share: its logs, what was decided, what is due soon. Driver.

Whatever is decided goes through `decide`: appended to the decision log and made to hold in one step, so the order of
that log is the order of events; `durable` waits for its commit. The intake is followed at each commit: what is not
committed is not there yet (V1).
Neighbours: firing.py, sorter.py and search.py are the tasks, delays.py puts them together, ledger.py keeps the rules.
"""

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from uuid import UUID

import numpy as np
import numpy.typing as npt
import trio

from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory, Stream
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, DiskFull
from headrace.core_log.format import FLAG_GAP, decode
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import RecordBatch
from headrace.core_log.spec import StreamSpec
from headrace.delay import decisions, marks, run_file
from headrace.delay.bodies import Bodies, Opening, Shelf, fetch, segment_of
from headrace.delay.config import MIB, DelayConfig
from headrace.delay.decisions import Decision, Merged, Settled, Snapshot
from headrace.delay.ledger import Ledger
from headrace.delay.marks import INTAKE, OFFSET_BITS, OFFSET_MASK, Places, State
from headrace.delay.near import NearRing
from headrace.delay.rows import (
    Rows,
    count_targets,
    firing_order,
    in_order,
    joined,
    rows_of,
    target_hash,
    target_of_all,
)
from headrace.delay.run_file import RunFile
from headrace.delay.waiting import BLOCK_COUNT_MAX, Waiting

INTAKE_NAME = "__delay.in"
JOURNAL_NAME = "__delay.log"
BUCKET_NAME = "__delay.bucket"
_PRIVATE = LogConfig(retention_ms=None, segment_bytes_max=16 * MIB, key_index=False)
# Small batches: to fire one record a whole one is read.
BUCKET_CONFIG = LogConfig(retention_ms=None, batch_bytes_max=64 * 1024, key_index=False)
# So many records are asked for in one go: their batches are in memory twice until they are opened.
READ_COUNT_MAX = 4096
# So many records of the intake are taken note of in one step.
ABSORB_COUNT = 4096
# Rows of about so many records are made again in one go.
REBUILD_COUNT_MAX = 4096
# The decision log is begun anew with a snapshot behind so many bytes of decisions.
SNAPSHOT_BYTES = 8 * MIB
# So many blocks of marks are packed in one step.
MARKS_IN_ONE_STEP = 64
Turn = Callable[[], Awaitable[None]]
# Upper bounds of the lateness histogram, in seconds.
LATENESS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 60.0)


@dataclass(slots=True)
class DelayCounters:
    """Since the start of the node, for metrics."""

    parked: int = 0
    fired: int = 0
    cancelled: int = 0
    rescheduled: int = 0
    # Firings by lateness: at most LATENESS_S[i] late; the last entry is for the rest.
    lateness: list[int] = field(default_factory=lambda: [0] * (len(LATENESS_S) + 1))
    lateness_us: int = 0

    def note_fired(self, dues: Places, now_us: int) -> None:
        late = np.maximum(now_us - dues, 0)
        self.fired += len(late)
        self.lateness_us += int(late.sum())
        places = np.searchsorted(np.array(LATENESS_S) * 1e6, late)
        for place, count in enumerate(np.bincount(places, minlength=len(self.lateness)).tolist()):
            self.lateness[place] += count


class Engine:
    def __init__(self, env: Env, directory: LogDirectory, config: DelayConfig) -> None:
        self.env = env
        self.directory = directory
        self.config = config
        self.committer = directory.committer
        self.counters = DelayCounters()
        self.intake = self._private(INTAKE_NAME).partitions[0]
        self.journal = self._private(JOURNAL_NAME).partitions[0]
        self.ledger = Ledger(env.ids.uuid().bytes, TargetPartition(self.intake.stream_id))
        self.ring = NearRing()
        self.waiting = Waiting()
        self.runs: dict[int, RunFile] = {}
        self.logs: dict[int, PartitionLog] = {INTAKE: self.intake}
        # The ring holds whatever is due before this, but for what was taken out to be fired.
        self.edge_us = 0
        # The intake is known up to here.
        self.absorbed = 0
        # Held while rows change their places between run files, ring and intake.
        self.layout = trio.Lock()
        # How many read records right now: nothing is let go of meanwhile.
        self.readers = 0
        # Set when something may be due sooner than those who sleep believe.
        self.sooner = trio.Event()
        # Outcomes of late, by the hash of the id, oldest first.
        self.remembered: dict[int, State] = {}
        # Numbers of moves that are done, and not written down as such.
        self.settled: list[int] = []
        self._snapshot_offset = 0
        self._journal_bytes = 0
        self._much_is_new = trio.Event()

    def _private(self, name: str) -> Stream:
        for stream in self.directory.streams.values():
            if stream.spec.kind == "internal" and stream.spec.name == name:
                return stream
        spec = StreamSpec(id=self.env.ids.uuid(), name=name, kind="internal", config=_PRIVATE)
        return self.directory.create_now(spec)

    # -- deciding -----------------------------------------------------------------------------------------------

    def decide(self, *made: Decision, urgent: bool = True) -> int:
        """Make decisions hold; returns the offset that the decision log's commit must pass for them."""
        values = [decisions.encode(one) for one in made]
        end = self._append(values, urgent=urgent)
        for one in made:
            self.ledger.apply(one)
        return end

    def _append(self, values: list[bytes], *, urgent: bool) -> int:
        """Raises DiskFull, and nothing was decided."""
        keys = [b""] * len(values)
        end = self.journal.append(keys, keys, values, timestamp_us=self.env.clock.wall_us()).next_offset
        self._journal_bytes += sum(map(len, values))
        if urgent:
            self.committer.urgent(self.journal)
        else:
            self.committer.lazy(self.journal)
        return int(end)

    async def durable(self, *ends: tuple[PartitionLog, int]) -> None:
        """Wait until these logs are committed up to these offsets, which are their ends."""
        done = trio.Event()
        left = len(ends)

        def tell() -> None:
            nonlocal left
            left -= 1
            if not left:
                done.set()

        for log, end in ends:
            self.committer.urgent(log)
            log.when_committed(end, tell)
        if ends:
            await done.wait()
        await trio.lowlevel.checkpoint()

    async def decided(self) -> None:
        """Wait until everything that was decided so far is durable."""
        await self.durable((self.journal, int(self.journal.end)))

    def settle(self) -> None:
        """Write down which moves are committed where they went. Nobody waits for it; a full disk may wait for room."""
        if self.settled:
            with suppress(DiskFull):
                self.decide(Settled(self.settled), urgent=False)
                self.settled = []

    def remember(self, ids: Iterable[int], state: State) -> None:
        """So that cancelling what has just fired is answered as such."""
        remembered = self.remembered
        remembered.update(dict.fromkeys(ids, state))
        for old in list(islice(remembered, max(len(remembered) - self.config.remembered_count, 0))):
            del remembered[old]

    # -- the decision log ---------------------------------------------------------------------------------------

    def replay(self) -> bool:
        """Take up what was decided in earlier lives; False if there was none. Blocks."""
        found = False
        for batch, first, last in self.journal.runs():
            for index in range(first, last):
                offset = int(batch.offset_at(index))
                decision = decisions.decode(batch.values[index], offset)
                if isinstance(decision, Snapshot):
                    self.ledger = Ledger.restored(decision)
                    self._snapshot_offset = offset
                    self._journal_bytes = 0
                    found = True
                elif not found:
                    raise CorruptLog(JOURNAL_NAME, 0, offset, "the decision log does not begin with a snapshot")
                else:
                    self.ledger.apply(decision)
                    self._journal_bytes += len(batch.values[index])
        self.ledger.begin(self.journal.epoch if self.journal.is_replicated else 0)
        return found

    @property
    def wants_snapshot(self) -> bool:
        return self._journal_bytes >= SNAPSHOT_BYTES

    async def prepare_snapshot(self) -> None:
        """Most of the work of a snapshot, in steps: ten million records of which many were decided are 10 ms in all."""
        for source in list(self.ledger.sources.values()):
            for count, _ in enumerate(source.marks.packing()):
                if count % MARKS_IN_ONE_STEP == 0:
                    await trio.lowlevel.checkpoint()

    def snapshot(self) -> int:
        """Write down everything at once; what stands before it may go once that is durable."""
        for target in self.ledger.outbox.targets:
            gone = target.stream not in self.directory.streams
            if gone and next(self.ledger.outbox.pending(target), None) is None:
                self.ledger.outbox.forget(target)
        self._snapshot_offset = int(self.journal.end)
        end = self._append([decisions.encode(self.ledger.snapshot())], urgent=True)
        self._journal_bytes = 0
        return end

    def trim_journal(self) -> None:
        if self.journal.high_watermark > self._snapshot_offset > self.journal.log_start:
            self.journal.delete_before(self._snapshot_offset)
            self.committer.urgent(self.journal)

    # -- the intake ---------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Something was committed in the intake. What is much is taken note of by and by, see `absorb_forever`."""
        self.absorb(ABSORB_COUNT)
        if self.absorbed < self.intake.high_watermark:
            self._much_is_new.set()

    def absorb(self, count: int | None = None) -> None:
        """Take note of what was committed in the intake since, of about so many records: all of it is pending."""
        while self.absorbed < self.intake.high_watermark and (count is None or count > 0):
            for batch, first, last in self.intake.read(self.absorbed):
                if first < last:
                    self._absorb(batch, first, last)
                self.absorbed = int(batch.next_offset)
                if count is not None:
                    count -= last - first
                    if count <= 0:
                        break

    def _absorb(self, batch: RecordBatch, first: int, last: int) -> None:
        target = target_of_all(batch)
        if target is None:
            rows = rows_of(batch, first, last)
            return self._take(batch, first, rows, np.ones(len(rows), dtype=bool))
        # The usual case: a number for each record, and no row. Parking takes an eighth less of the loop's time.
        count = last - first
        self.ledger.count_intake(Counter({target: count}))
        self.counters.parked += count
        dues = batch.expiries.expand()[first:last]
        place = int(batch.offset_at(first)) | (INTAKE << OFFSET_BITS)
        size, hash = batch.byte_count // batch.count, target_hash(target)
        for low in range(0, count, BLOCK_COUNT_MAX):
            part = dues[low : low + BLOCK_COUNT_MAX]
            self.waiting.add_alike(part, place + low, hash, size * len(part), self.env.clock.monotonic())
        if int(dues.min()) < self.edge_us:
            soon = np.flatnonzero(dues < self.edge_us)
            self.bring_near(dues[soon], soon + place)

    async def absorb_forever(self) -> None:
        """What one commit brought in great numbers, some at a time: others on the loop get their turns."""
        while True:
            await self._much_is_new.wait()
            self._much_is_new = trio.Event()
            while self.absorbed < self.intake.high_watermark:
                self.absorb(ABSORB_COUNT)
                await trio.lowlevel.checkpoint()

    def load_intake(self) -> None:
        """What the intake holds from earlier lives, and counts. Blocks; nobody else is at work yet."""
        self.absorbed = max(int(self.intake.log_start), self.ledger.floor)
        while self.absorbed < self.intake.high_watermark:
            for batch, first, last in self.intake.read(self.absorbed):
                if first < last:
                    rows = rows_of(batch, first, last)
                    self._take(batch, first, rows, self._counting(rows))
                self.absorbed = int(batch.next_offset)
        self.counters = DelayCounters()

    def _counting(self, rows: Rows) -> npt.NDArray[np.bool_]:
        """Which were not decided and not sorted away."""
        counts: npt.NDArray[np.bool_] = self.ledger.states(rows["place"]) == State.PENDING
        offsets = rows["place"] & OFFSET_MASK
        for first, end, edge_us in self.ledger.passes:
            if first <= offsets[-1] and end > offsets[0]:
                counts &= (offsets < first) | (offsets >= end) | (rows["due"] < edge_us)
        return counts

    def _take(self, batch: RecordBatch, first: int, rows: Rows, which: npt.NDArray[np.bool_]) -> None:
        self.ledger.count_intake(count_targets(batch, first, which))
        rows = rows if which.all() else rows.compress(which)
        self.counters.parked += len(rows)
        size = batch.byte_count // max(batch.count, 1)
        for low in range(0, len(rows), BLOCK_COUNT_MAX):
            part = rows[low : low + BLOCK_COUNT_MAX]
            self.waiting.add(part, size * len(part), self.env.clock.monotonic())
        soon = rows[rows["due"] < self.edge_us]
        if len(soon):
            self.bring_near(soon["due"].copy(), soon["place"].copy())

    def bring_near(self, dues: Places, places: Places) -> None:
        """Into the ring, which keeps both; there must be some."""
        before = self.ring.next_due_us()
        first = int(dues.min())
        self.ring.add(dues, places)
        if before is None or first < before:
            self.sooner.set()

    # -- buckets and run files ----------------------------------------------------------------------------------

    def load_sources(self) -> None:
        """Find the log of each source. Raises CorruptLog when one is gone."""
        for source in self.ledger.sources.values():
            stream = self.directory.streams.get(source.stream)
            if stream is None or source.partition >= len(stream.partitions):
                raise CorruptLog(f"streams/{source.stream}", 0, 0, "a bucket of parked records is gone")
            self.logs[source.number] = stream.partitions[source.partition]

    def load_runs(self) -> bool:
        """Open every run file; False where one is missing or damaged, or what is pending stands in none. Blocks."""
        storage = self.env.storage
        storage.make_dir(run_file.FOLDER)
        storage.sync_dir("")
        try:
            for number in sorted(self.ledger.runs):
                self.runs[number] = RunFile(storage, number)
        except CorruptLog:
            return False
        found = {source for run in self.runs.values() for source in run.slices}
        return all(one.number in found for one in self.ledger.sources.values() if one.pending and one.number != INTAKE)

    def remove_strangers(self) -> None:
        """Run files that no decision names: of a pass or a merge that came to nothing, or replaced."""
        storage = self.env.storage
        for name in storage.list(run_file.FOLDER):
            if run_file.number_of(name) not in self.runs:
                storage.remove(f"{run_file.FOLDER}/{name}")

    async def rebuild_runs(self) -> None:
        """Run files are derived: the same rows stand in the buckets, within the extents that passes wrote down. One
        decision takes the new ones for the old: a life that ends in between leaves the old to be made again."""
        self.runs.clear()
        rows: list[Rows] = []
        for source in self.ledger.sources.values():
            for first, end in source.extents if source.number != INTAKE else ():
                while first < end:
                    found, first = await self.env.worker.run(partial(self._rows_from, source.number, first, end))
                    rows += found
                    if sum(map(len, rows)) >= BLOCK_COUNT_MAX:
                        await self._add_rebuilt(rows)
                        rows = []
        if rows:
            await self._add_rebuilt(rows)
        self.decide(*(Merged([], number) for number in self.runs), Merged(sorted(self.ledger.runs), 0))

    def _rows_from(self, source: int, first: int, end: int) -> tuple[list[Rows], int]:
        """Rows of some batches of a bucket from an offset on, and the next offset. Blocks."""
        log, found = self.logs[source], []
        segment = segment_of(log.segments, first)
        for at, header in segment.headers(segment.locate(first, log.config.index_interval_bytes)):
            if header.flags & FLAG_GAP == 0:
                batch = decode(segment.read_whole(at, header)[1], 0, header)
                base = header.base_offset
                found.append(rows_of(batch, max(first - base, 0), min(end - base, batch.count), source))
            first = header.next_offset
            if first >= end or sum(map(len, found)) >= REBUILD_COUNT_MAX:
                break
        return found, first

    async def _add_rebuilt(self, rows: list[Rows]) -> None:
        number = self.ledger.next_run + len(self.runs)
        self.runs[number] = await self.env.worker.run(lambda: self.write_run(number, by_source(joined(rows))))

    def write_run(self, number: int, rows: Rows) -> RunFile:
        """Blocks. It counts when a decision names it."""
        self.env.storage.replace_file(run_file.path_of(number), run_file.encode(rows))
        return RunFile(self.env.storage, number)

    def check_run(self, run: RunFile, source: int) -> None:
        """Look at the hash of a source's rows before they are relied on, once. Blocks; raises CorruptLog."""
        if source not in run.checked:
            try:
                run.check(source)
            except CorruptLog:
                # The next start does not find it, and makes it again from the buckets.
                self.drop_run(run.number)
                raise
            run.checked.add(source)

    def drop_run(self, number: int) -> None:
        """A decision no longer names it, and is durable. Blocks."""
        self.env.storage.remove(run_file.path_of(number))

    # -- targets ------------------------------------------------------------------------------------------------

    async def learn_numbers(self, where: TargetPartition) -> None:
        """A target's log knows what it has of our numbers when this returns, read a piece at a time: after a crash the
        first append with numbers would read up to a segment in one step."""
        stream = self.directory.streams.get(where.stream)
        if stream is not None and where.partition < len(stream.partitions):
            for _ in stream.partitions[where.partition].loading_producers():
                await trio.lowlevel.checkpoint()

    # -- reading records ----------------------------------------------------------------------------------------

    def shelves(self, places: Places) -> dict[int, Shelf]:
        return {
            number: Shelf(self.logs[number].segments, self.logs[number].config.index_interval_bytes)
            for number, _which in marks.by_source(places)
        }

    async def bodies(self, places: Places, turn: Turn = trio.lowlevel.checkpoint) -> Bodies:
        """The records at these places, in this order, of sources that are still there. `turn` lets others work."""
        opening = Opening(len(places))
        for low in range(0, len(places), READ_COUNT_MAX):
            part = places[low : low + READ_COUNT_MAX]
            shelves = self.shelves(part)
            self.readers += 1
            try:
                fetched = await self.env.worker.run(partial(fetch, shelves, part))
            finally:
                self.readers -= 1
            fetched.reverse()
            while fetched:
                opening.open(fetched.pop(), low)
                await turn()
        return opening.finish()

    @property
    def byte_count(self) -> int:
        return sum(log.byte_count for log in self.logs.values()) + int(self.journal.byte_count)

    def bucket_streams(self) -> list[Stream]:
        """Streams of buckets, also those that nobody needs any more."""
        return [
            stream
            for stream in self.directory.streams.values()
            if stream.spec.kind == "internal" and stream.spec.name.startswith(BUCKET_NAME)
        ]

    def used_streams(self) -> set[UUID]:
        return {source.stream for source in self.ledger.sources.values()}


def by_source(rows: Rows) -> Rows:
    """By (source, due, number), as a run file wants them."""
    return in_order(rows, firing_order(rows["due"], rows["number"], rows["place"] >> OFFSET_BITS))
