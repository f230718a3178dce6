"""From the intake into buckets, a block at a time; and what becomes of buckets that are empty. Driver.

One pass: the rows of a block that are due from the edge of ring 0 on; their bodies, read once; by bucket and due time;
appended to the buckets; their rows to a run file; and when all that is durable, one decision by which they stand there
and no longer in the intake. A pass that came to nothing leaves records in buckets that no decision names: nobody sees
them. Work is cut into steps of a few milliseconds. A body is written twice in all: intake and bucket.
Neighbours: engine.py has what is shared, buckets.py the rings, run_file.py the rows on the disk.
"""

from dataclasses import dataclass, field
from functools import partial
from operator import attrgetter
from uuid import UUID

import numpy as np
import numpy.typing as npt
import trio

from headrace.core_log import allocator
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.delay.bodies import Integers
from headrace.delay.buckets import coarser, name_of, spans_of, starts_of
from headrace.delay.decisions import Dropped, Merged, Moved, Opened, Sorted, Trimmed, pack
from headrace.delay.engine import BUCKET_CONFIG, BUCKET_NAME, Engine, by_source
from headrace.delay.freight import Freight, load
from headrace.delay.ledger import Source
from headrace.delay.marks import INTAKE, OFFSET_BITS, OFFSET_MASK, Places, State
from headrace.delay.rows import Rows, firing_order, in_order, joined, no_rows, target_of
from headrace.delay.run_file import RunFile
from headrace.delay.waiting import BLOCK_COUNT_MAX, Block, between

LOOK_S = 0.2
FULL_DISK_PAUSE_S = 1.0
# While records are parked, passes begin when so many times as much waits as is sorted when it is quiet: of a burst what
# is sorted meanwhile takes half of the disk and of the processor from accepting the rest (bench/delay.py).
BUSY = 128
# With so many times as much waiting, the sorter is behind: it then works so long before others get a turn,
# and they wait for it, as publishers wait for a slow disk.
BEHIND = 192
# The same of small records, by the memory that they take while they wait: ten million and twelve at 8 bytes each. A
# start reads them: ten million in two seconds.
BUSY_MEMORY = 80_000_000
BEHIND_MEMORY = 96_000_000
TURN_S = 0.003
# So many passes are written while an earlier one waits for the disk.
UNDER_WAY_MAX = 2
# Memory is given back after so many passes, or when no other is under way: the next takes it again, page by page.
TRIM_PASSES = 2
# So many records, of about so many bytes, are written as one batch: to fire one record a whole batch is read.
BATCH_COUNT_MAX = 1024
BATCH_BYTES = 128 * 1024
# Fewer of one hour in one pass go to the bucket of their day.
HOUR_COUNT_MIN = 256
# Run files are merged when there are so many of about one size, up to so many rows.
MERGE_FILES = 8
MERGE_ROWS_MAX = 8 * BLOCK_COUNT_MAX
# Rows read at a time for the ring, and put into it in one step.
_WINDOW_ROWS = 4096
_NEAR_ROWS = 32_768


@dataclass(slots=True, eq=False)
class _Pass:
    block: Block
    edge_us: int
    # What is due too soon to move.
    near: Rows
    # What moves: rows as they stand in the intake, and, once they are written, in the buckets; which of the targets
    # each has.
    old: Rows
    new: Rows
    targets: Integers
    names: list[bytes]
    # Source, first offset and count of what was appended.
    moved: list[tuple[int, int, int]]
    # What must be durable before it is decided.
    logs: list[PartitionLog]
    # Buckets that it writes to.
    sources: set[int] = field(default_factory=set)
    # Everything is in the files; and on the disk.
    is_written: bool = False
    is_safe: bool = False


class Sorter:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._passes: list[_Pass] = []
        self._under_way = trio.Semaphore(UNDER_WAY_MAX)
        # A log has one sync at a time.
        self._syncing = trio.Lock()
        # A bucket's stream is there and its sources are not yet.
        self._creating = False
        self._behind = False
        # How far the intake was known when the sorter last looked.
        self._absorbed = 0
        self._turn_began = 0.0
        self._untrimmed = 0

    async def run(self) -> None:
        """Sort whenever there is enough, until cancelled. While one pass is committed the next is written."""
        async with trio.open_nursery() as nursery:
            while True:
                block = self._due_block()
                if block is None:
                    await self._engine.env.clock.sleep(LOOK_S)
                    continue
                try:
                    one = await self._begin(block)
                    await self._under_way.acquire()
                    nursery.start_soon(self._complete_in_turn, one)
                    await self._merge()
                except DiskFull:
                    await self._engine.env.clock.sleep(FULL_DISK_PAUSE_S)

    async def _complete_in_turn(self, one: _Pass | None) -> None:
        try:
            if one is not None:
                await self._complete(one)
        except DiskFull:
            await self._engine.env.clock.sleep(FULL_DISK_PAUSE_S)
        finally:
            self._under_way.release()

    def _due_block(self) -> Block | None:
        """The oldest block that is not sorted, if enough waits or it has waited long enough."""
        engine, config = self._engine, self._engine.config
        is_busy = engine.absorbed != self._absorbed
        self._absorbed = engine.absorbed
        block = engine.waiting.first_unsorted()
        if block is None:
            return None
        is_old = engine.env.clock.monotonic() - block.since >= config.sort_interval_s
        enough = config.sort_bytes * BUSY if is_busy else config.sort_bytes
        is_much = engine.waiting.unsorted_bytes >= enough or engine.waiting.unsorted_memory >= BUSY_MEMORY
        return block if is_old or is_much else None

    async def _turn(self) -> None:
        clock = self._engine.env.clock
        if not self._behind or clock.monotonic() - self._turn_began >= TURN_S:
            await trio.lowlevel.checkpoint()
            self._turn_began = clock.monotonic()

    # -- one pass -----------------------------------------------------------------------------------------------

    async def sort(self, block: Block) -> None:
        """Move what a block holds and is not due soon. DiskFull: nothing has moved."""
        one = await self._begin(block)
        if one is not None:
            await self._complete(one)

    async def _begin(self, block: Block) -> _Pass | None:
        """Write what is to move to the buckets; None when there is nothing."""
        engine = self._engine
        waiting = engine.waiting
        self._behind = (
            waiting.unsorted_bytes >= BEHIND * engine.config.sort_bytes or waiting.unsorted_memory >= BEHIND_MEMORY
        )
        # Nobody else lets go of its rows from now on.
        block.is_sorted = block.is_moving = True
        edge_us = engine.edge_us
        rows = await engine.env.worker.run(lambda: block.rows)
        pending = engine.ledger.states(rows["place"]) == State.PENDING

        def part() -> tuple[Rows, Rows]:
            """What is due too soon to move; what moves."""
            later = rows["due"] >= edge_us
            return rows.compress(pending & ~later), rows.compress(pending & later)

        near, old = await engine.env.worker.run(part)
        if not len(old):
            block.is_moving = False
            block.keep(near)
            return None
        one = _Pass(block, edge_us, near, old, no_rows(), np.zeros(0, dtype=np.int64), [], [], [])
        self._passes.append(one)
        try:
            await self._write(one)
            one.is_written = True
        except DiskFull:
            self._give_up(one)
            raise
        return one

    async def _complete(self, one: _Pass) -> None:
        """Wait until the buckets are durable; then it is decided."""
        engine = self._engine
        try:
            async with self._syncing:
                if not one.is_safe:
                    await self._sync([other for other in self._passes if other.is_written and not other.is_safe])
            async with engine.layout:
                await self._finish(one)
        except DiskFull:
            self._give_up(one)
            raise
        one.block.is_moving = False
        self._passes.remove(one)
        self._untrimmed += 1
        if self._untrimmed >= TRIM_PASSES or not self._passes:
            self._untrimmed = 0
            await engine.env.worker.run(allocator.trim)

    async def _sync(self, passes: list[_Pass]) -> None:
        """Make what these wrote safe: one sync for all passes that wait for it, as in a group commit."""
        logs = list(dict.fromkeys(log for one in passes for log in one.logs))
        await self._engine.committer.commit_apart(logs)
        for one in passes:
            one.is_safe = True

    def _give_up(self, one: _Pass) -> None:
        """The same block is sorted again later."""
        one.block.is_sorted = one.block.is_moving = False
        self._passes.remove(one)

    def _in_use(self) -> set[int]:
        """Buckets that a pass writes to, and nobody may drop."""
        return {source for one in self._passes for source in one.sources}

    async def _write(self, one: _Pass) -> None:
        """Append everything to its bucket, by due time."""
        engine, worker = self._engine, self._engine.env.worker
        chosen = await self._choose(one)
        shelves = engine.shelves(one.old["place"])

        def fetch() -> tuple[Freight, Integers]:
            """By source, due time and number."""
            order = firing_order(one.old["due"], one.old["number"], chosen)
            freight = load(shelves, one.old["place"], order)
            one.old = in_order(one.old, order)
            one.new = one.old.copy()
            return freight, chosen[order]

        engine.readers += 1
        try:
            freight, sources = await worker.run(fetch)
        finally:
            engine.readers -= 1
        known: dict[bytes, int] = {}
        of_sets = np.array([known.setdefault(target_of(tags), len(known)) for tags in freight.tag_sets])
        one.names, one.targets = list(known), of_sets[freight.tags]
        # How many records make a batch, and where each source begins.
        step = min(max(BATCH_BYTES // (freight.byte_count // len(freight) + 1), 1), BATCH_COUNT_MAX)
        firsts = np.concatenate(([0], np.flatnonzero(sources[1:] != sources[:-1]) + 1))
        numbers = sources[firsts]
        ends = [*firsts[1:].tolist(), len(freight)]
        for number, first, end in zip(numbers.tolist(), firsts.tolist(), ends, strict=True):
            log = engine.logs[number]
            start = int(log.end)
            for low in range(first, end, step):
                high = min(low + step, end)
                for batch in freight.batches(one.old[low:high], low, high):
                    log.append_bulk(batch)
                    await self._turn()
            one.new["place"][first:end] = np.arange(start, start + end - first) | (number << OFFSET_BITS)
            one.moved.append((number, start, end - first))
            one.logs.append(log)

    async def _choose(self, one: _Pass) -> Integers:
        """The source that each row goes to; buckets are made where there is none."""
        engine, rows = self._engine, one.old
        now_us, config = engine.env.clock.wall_us(), engine.config

        def find() -> tuple[list[tuple[int, int]], Integers]:
            spans = coarser(rows["due"], spans_of(rows["due"], now_us, config), HOUR_COUNT_MIN)
            kinds: list[tuple[int, int]] = []
            which = np.empty(len(rows), dtype=np.int64)
            for span_us in np.unique(spans).tolist():
                of_span = spans == span_us
                starts, places = np.unique(starts_of(rows["due"][of_span], span_us), return_inverse=True)
                which[of_span] = places.reshape(-1) + len(kinds)
                kinds += [(start_us, span_us) for start_us in starts.tolist()]
            return kinds, which

        kinds, which = await engine.env.worker.run(find)
        sources = [await self._bucket(one, start_us, span_us) for start_us, span_us in kinds]
        chosen: Integers = np.array(sources, dtype=np.int64)[which, rows["target"] % config.shard_count]
        return chosen

    async def _bucket(self, one: _Pass, start_us: int, span_us: int) -> list[int]:
        """The sources of a bucket, one for each shard."""
        engine = self._engine
        shards = engine.config.shard_count
        streams: dict[UUID, list[Source]] = {}
        for source in engine.ledger.sources.values():
            if source.start_us == start_us and source.span_us == span_us and source.number != INTAKE:
                streams.setdefault(source.stream, []).append(source)
        # With another number of shards than now it takes no more.
        fitting = next((found for found in streams.values() if len(found) == shards), None)
        if fitting is not None:
            sources = [source.number for source in sorted(fitting, key=attrgetter("partition"))]
            one.sources.update(sources)
            return sources
        name = f"{BUCKET_NAME}.{name_of(span_us)}.{start_us // 1_000_000}"
        self._creating = True
        try:
            stream = await engine.directory.create_stream(
                name, kind="internal", partition_count=shards, config=BUCKET_CONFIG
            )
        finally:
            self._creating = False
        first = engine.ledger.next_source
        sources = list(range(first, first + shards))
        one.sources.update(sources)
        engine.logs.update(zip(sources, stream.partitions, strict=True))
        stream_id = stream.spec.id.bytes
        engine.decide(*(Opened(source, stream_id, shard, start_us, span_us) for shard, source in enumerate(sources)))
        return sources

    async def _finish(self, one: _Pass) -> None:
        """Everything is durable in the buckets: from one decision on it stands there, and not in the intake."""
        engine, ledger = self._engine, self._engine.ledger
        number = ledger.next_run

        def write() -> tuple[RunFile, Places, Places]:
            # The columns by themselves: what follows is one step, and looks at them several times.
            return engine.write_run(number, one.new), one.old["place"].copy(), one.new["place"].copy()

        run, old, new = await engine.env.worker.run(write)
        states = ledger.states(old)
        moves = states == State.PENDING
        decided = pack(new[~moves])
        engine.decide(
            Sorted(
                one.block.first,
                one.block.end,
                one.edge_us,
                number,
                _moved(one, moves),
                decided,
                states[~moves].tobytes(),
            )
        )
        ledger.intake.marks.set(old[moves] & OFFSET_MASK, int(State.MOVED))
        one.block.keep(one.near[ledger.states(one.near["place"]) == State.PENDING])
        engine.runs[number] = run
        # The edge may have moved since the pass began.
        soon = one.new.compress(one.new["due"] < engine.edge_us)
        if len(soon):
            engine.bring_near(soon["due"].copy(), soon["place"].copy())
        await engine.decided()

    # -- the window that is in memory ---------------------------------------------------------------------------

    async def advance(self) -> None:
        """Move the edge of the ring to the horizon, when it has come near."""
        engine = self._engine
        now_us, horizon_us = engine.env.clock.wall_us(), engine.config.horizon_s * 1_000_000
        if engine.edge_us - now_us >= horizon_us * 3 // 4:
            return
        async with engine.layout:
            edge_us = now_us + horizon_us
            found = [
                await engine.env.worker.run(partial(self._window, run, edge_us)) for run in list(engine.runs.values())
            ]
            before, engine.edge_us = engine.edge_us, edge_us
            # From here on what is absorbed finds its way by itself.
            parts = engine.waiting.snapshot()
            near = await engine.env.worker.run(lambda: between(parts, before, edge_us))
            for rows in (*found, *near):
                for low in range(0, len(rows), _NEAR_ROWS):
                    part = rows[low : low + _NEAR_ROWS]
                    engine.bring_near(part["due"].copy(), part["place"].copy())
                    await trio.lowlevel.checkpoint()

    def _window(self, run: RunFile, edge_us: int) -> Rows:
        """Rows of a run file between the edge as it is and as it will be. Blocks."""
        engine = self._engine
        parts: list[Rows] = []
        for number, (_first, end, _hash) in run.slices.items():
            source = engine.ledger.sources.get(number)
            if source is None or source.start_us >= edge_us or source.end_us <= engine.edge_us:
                continue
            engine.check_run(run, number)
            at = run.first_from(number, engine.edge_us)
            while at < end:
                rows = run.rows(at, min(_WINDOW_ROWS, end - at))
                within = rows[rows["due"] < edge_us]
                parts.append(within)
                at += len(rows)
                if len(within) < len(rows):
                    break
        return joined(parts)

    # -- letting go ---------------------------------------------------------------------------------------------

    async def tidy(self) -> None:
        """Let go of what nobody needs: rows, intake, buckets, run files."""
        engine = self._engine
        for block in list(engine.waiting):
            if block.is_sorted and block.count and not block.is_moving:
                pending = engine.ledger.states(block.rows["place"]) == State.PENDING
                if not pending.all():
                    block.keep(block.rows[pending])
                # To look at all that was decided of a block takes a millisecond.
                await trio.lowlevel.checkpoint()
        engine.waiting.forget_empty()
        if engine.readers == 0 and not engine.layout.locked():
            async with engine.layout:
                await self._trim()
                await self._drop()

    async def _trim(self) -> None:
        engine = self._engine
        floor = engine.waiting.floor(engine.absorbed)
        for move in engine.ledger.moves.values():
            mine = move.places[move.places >> OFFSET_BITS == INTAKE]
            if len(mine):
                floor = min(floor, int(mine.min()) & OFFSET_MASK)
        if floor <= engine.ledger.floor:
            return
        engine.decide(Trimmed(floor))
        await engine.decided()
        if engine.readers == 0:
            engine.intake.delete_before(floor)
            engine.committer.urgent(engine.intake)

    async def _drop(self) -> None:
        """Buckets in which nothing is left, and run files that speak of no others."""
        engine, ledger = self._engine, self._engine.ledger
        in_use = self._in_use()
        idle = [one for one in ledger.idle_sources() if one.number not in in_use]
        whole = [one for one in idle if self._is_idle(one, idle)]
        if not whole:
            return
        gone = {one.number for one in whole}
        runs = [run for run in engine.runs.values() if not run.slices.keys() & (ledger.sources.keys() - gone)]
        engine.decide(Dropped(sorted(gone)), Merged([run.number for run in runs], 0))
        await engine.decided()
        for run in runs:
            del engine.runs[run.number]
            await engine.env.worker.run(partial(engine.drop_run, run.number))
        for number in gone:
            del engine.logs[number]

    def _is_idle(self, source: Source, idle: list[Source]) -> bool:
        """All shards of its bucket are."""
        shards = [one for one in self._engine.ledger.sources.values() if one.stream == source.stream]
        return all(one in idle for one in shards)

    async def delete_unused(self) -> None:
        """Streams of buckets that no source stands for: dropped, or left by a pass that came to nothing."""
        engine, clock = self._engine, self._engine.env.clock
        if self._creating or engine.readers:
            return
        used = engine.used_streams()
        for stream in engine.bucket_streams():
            if stream.spec.id in used:
                continue
            for log in stream.partitions:
                # Its files are of use elsewhere, or go at once: in the trash they would stay for a day.
                log.delete_before(int(log.high_watermark))
                engine.committer.urgent(log)
            await clock.sleep(LOOK_S)
            for log in stream.partitions:
                await engine.env.worker.run(partial(log.recycle, clock.wall_us() // 1000))
            await engine.directory.delete_stream(stream)

    async def _merge(self) -> None:
        """Make one run file of several small ones, so that to look for an id takes few reads."""
        engine, ledger = self._engine, self._engine.ledger
        async with engine.layout:
            few = self._mergeable()
            if not few:
                return
            number = ledger.next_run
            kept = set(ledger.sources)

            def merge() -> RunFile | None:
                for run in few:
                    for source in run.slices.keys() & kept:
                        engine.check_run(run, source)
                numbers = sorted({source for run in few for source in run.slices} & kept)
                rows = by_source(joined([run.all_rows([one for one in numbers if one in run.slices]) for run in few]))
                return engine.write_run(number, rows) if len(rows) else None

            merged = await engine.env.worker.run(merge)
            engine.decide(Merged([run.number for run in few], 0 if merged is None else number))
            for run in few:
                del engine.runs[run.number]
            if merged is not None:
                engine.runs[number] = merged
            await engine.decided()
            for run in few:
                await engine.env.worker.run(partial(engine.drop_run, run.number))
        # Half a million rows were in memory several times, each time in another place.
        await engine.env.worker.run(allocator.trim)

    def _mergeable(self) -> list[RunFile]:
        """Enough run files of about one size, the smallest first."""
        sizes: dict[int, list[RunFile]] = {}
        for run in self._engine.runs.values():
            sizes.setdefault(run.count.bit_length() // 3, []).append(run)
        few = min((runs for runs in sizes.values() if len(runs) >= MERGE_FILES), key=_rows_in, default=[])
        return few if _rows_in(few) <= MERGE_ROWS_MAX else []


def _rows_in(runs: list[RunFile]) -> int:
    return sum(run.count for run in runs)


def _moved(one: _Pass, moves: npt.NDArray[np.bool_]) -> list[Moved]:
    """What each source got, and how many of each target count there."""
    moved = []
    at = 0
    for source, first, count in one.moved:
        targets = one.targets[at : at + count][moves[at : at + count]]
        counts = {one.names[place]: number for place, number in enumerate(np.bincount(targets).tolist()) if number}
        moved.append(Moved(source, first, count, counts))
        at += count
    return moved
