"""The delay engine against a naive oracle, through crashes and clocks that are set. Driver for tests.

One seed is one data directory in memory and several lives. In each life a few clients park, cancel and reschedule at
random, the wall clock steps back and forth, the sorter runs whenever it likes, and the fuse of the storage blows
somewhere: the process is gone, or the power with all that was not synced. After each start the oracle asks for
everything: what was acknowledged is pending or has arrived, once; what was cancelled is neither; counts and lists are
exact; nothing has arrived before it was due. In the end time passes, and all of it has to be there.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as with_
from random import Random
from unittest.mock import patch

import trio
import trio.testing
from tests.core_log.power.fuse import Crash, FusedStorage
from tests.delay.house import DAY_US, SECOND_US, START_US, Clock, Target, env_on

from headrace.core_log import segment as segment_module
from headrace.core_log.config import DirectoryConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay import engine as engine_module
from headrace.delay import marks as marks_module
from headrace.delay import search as search_module
from headrace.delay import sorter as sorter_module
from headrace.delay import waiting as waiting_module
from headrace.delay.config import DelayConfig
from headrace.delay.delays import Delays, Outcome
from headrace.delay.fire import DueRun
from headrace.delay.parked import Pending

LIVES = 6
OPERATIONS_PER_LIFE = 160
CLIENTS = 4
TARGETS = (b"orders", b"mail", b"t\xff\x00")
FAR_US = 11 * 365 * DAY_US


@dataclass(slots=True)
class Entry:
    """What the oracle knows of one record. Its value is its name."""

    value: bytes
    target: bytes
    # Lawful due times: more than one while a reschedule has no answer.
    dues: set[int]
    id: bytes = b""
    acknowledged: bool = False
    cancelled: bool = False
    # So many cancellations were asked for and not answered.
    cancelling: int = 0
    lost: bool = False
    # An answer said that nothing is pending under its id.
    gone: bool = False
    # Of the due times, those it had or was given by an answer, and those of reschedules without an answer.
    moved: set[int] = field(default_factory=set)
    moving: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moved |= self.dues


@dataclass(slots=True)
class Tally:
    operations: int = 0
    parked: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    power_losses: int = 0
    steps: int = 0
    passes: int = 0
    arrived: int = 0

    def add(self, other: "Tally") -> None:
        for name in ("operations", "parked", "crashes", "power_losses", "steps", "passes", "arrived"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.outcomes += other.outcomes


@contextmanager
def small_sizes() -> Iterator[None]:
    """Segments, blocks, pages and snapshots so small that each life has many."""
    private = with_(engine_module._PRIVATE, segment_bytes_max=2048, batch_bytes_max=512, offsets_reserved=64)
    bucket = with_(engine_module.BUCKET_CONFIG, segment_bytes_max=2048, batch_bytes_max=256, offsets_reserved=64)
    with ExitStack() as stack:
        for module, name, value in (
            (engine_module, "_PRIVATE", private),
            (sorter_module, "BUCKET_CONFIG", bucket),
            (engine_module, "BLOCK_COUNT_MAX", 8),
            (waiting_module, "BLOCK_COUNT_MAX", 8),
            (engine_module, "SNAPSHOT_BYTES", 2000),
            (marks_module, "_BLOCK_BITS", 2),
            (marks_module, "_BLOCK_SIZE", 4),
            (sorter_module, "MERGE_FILES", 3),
            (sorter_module, "HOUR_COUNT_MIN", 2),
            (sorter_module, "_WINDOW_ROWS", 3),
            (search_module, "_ROWS_AT_ONCE", 4),
            (segment_module, "GROWTH_BYTES_MIN", 256),
            (segment_module, "GROWTH_BYTES_MAX", 1024),
        ):
            stack.enter_context(patch.object(module, name, value))
        yield


class Checked(Target):
    """Says at once when something is fired that the oracle holds back. A slow one takes its time to append."""

    def __init__(self, directory: LogDirectory, clock: Clock, world: "World") -> None:
        super().__init__(directory, clock)
        self._world = world
        self._later: deque[tuple[DueRun, Callable[[], None]]] = deque()

    def fire(self, run: DueRun, done: Callable[[], None]) -> None:
        for value in run.values:
            self._world.note_firing(value, run.target)
        if self._world.is_slow:
            self._later.append((run, done))
        else:
            super().fire(run, done)

    async def catch_up(self) -> None:
        while True:
            await trio.sleep(self._world.random.choice((0.01, 0.3, 0.7)))
            while self._later:
                super().fire(*self._later.popleft())


class World:
    def __init__(self, seed: int, *, lives: int = LIVES) -> None:
        self.random = Random(seed)
        self.seed = seed
        self.lives = lives
        self.inner = MemoryStorage()
        self.entries: dict[bytes, Entry] = {}
        self.tally = Tally()
        self.done: list[str] = []
        self.now_us = START_US
        self.clock = Clock()
        # When the clock was set, and what it said before; what a life decided may be done in the next one.
        self.before_steps: list[tuple[float, int]] = []
        self.is_slow = self.random.random() < 0.3
        self.config = DelayConfig(
            horizon_s=self.random.choice((1, 30, 600)),
            sort_interval_s=self.random.choice((1, 20, 300)),
            sort_bytes=self.random.choice((1, 500, 1 << 30)),
            shard_count=self.random.choice((1, 1, 3)),
            tick_ms=self.random.choice((1, 1, 100)),
            prefetch_bytes=self.random.choice((10, 1 << 20)),
            remembered_count=self.random.choice((0, 5, 1000)),
        )

    def run(self) -> Tally:
        with small_sizes():
            for number in range(self.lives + 1):
                self._run_life(last=number == self.lives)
        return self.tally

    def note_firing(self, value: bytes, target: bytes) -> None:
        entry = self.entries[value]
        assert not entry.cancelled, f"{value!r} is fired although its cancellation was answered"
        assert entry.target == target
        assert min(entry.dues) <= self._latest_us(), f"{value!r} is fired early"

    def _latest_us(self) -> int:
        """The wall clock, or what it would be had it not been set back a moment ago, when the firing was decided."""
        now = trio.current_time()
        before = (wall_us + round((now - at) * 1e6) for at, wall_us in self.before_steps if at > now - 2)
        return max([self.clock.wall_us(), *before])

    # -- one life -----------------------------------------------------------------------------------------------

    def _run_life(self, *, last: bool) -> None:
        storage = FusedStorage(self.inner, self.random)
        storage.left = None if last else self.random.choice((100, 600, 2000, 4000))
        try:
            _deterministic_run(self.random, lambda: self._live(storage, last))
            assert last or not storage.blown
            self.inner = self.inner.process_crash()
        except BaseException as error:
            if not storage.blown or _others(error):
                raise
            self.tally.crashes += 1
            if self.random.random() < 0.6:
                self.tally.power_losses += 1
                self.inner = self.inner.power_loss(self.random)
            else:
                self.inner = self.inner.process_crash()

    async def _live(self, storage: FusedStorage, last: bool) -> None:
        self.clock.shift_us = self.now_us - round(trio.current_time() * 1e6)
        try:
            await self._serve(storage, last)
        finally:
            # What was decided by the clock of this life may be done in the first moments of the next one.
            self.before_steps = [(0.0, self._latest_us())]
            self.now_us = self.clock.wall_us()

    async def _serve(self, storage: FusedStorage, last: bool) -> None:
        env = env_on(storage, self.clock, self.random.getrandbits(32))
        directory = LogDirectory.open_now(env, DirectoryConfig(journal_bytes_max=1 << 16), clean=False)
        target = Checked(directory, self.clock, self)
        delays = Delays(env, directory, self.config, target)
        await delays.load()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(directory.run)
            nursery.start_soon(delays.run)
            nursery.start_soon(target.catch_up)
            await self._reconcile(delays, target)
            if last:
                self.clock.step(FAR_US)
                await trio.sleep(5)
                await self._reconcile(delays, target)
                assert delays.count() == 0, f"{delays.count()} never fire"
            else:
                async with trio.open_nursery() as clients:
                    for _ in range(CLIENTS):
                        clients.start_soon(self._act, delays)
                await self._reconcile(delays, target)
            nursery.cancel_scope.cancel()

    async def _act(self, delays: Delays) -> None:
        random = self.random
        for _ in range(OPERATIONS_PER_LIFE // CLIENTS):
            self.tally.operations += 1
            match random.random():
                case chance if chance < 0.4:
                    await self._park(delays)
                case chance if chance < 0.6:
                    await self._cancel(delays)
                case chance if chance < 0.75:
                    await self._reschedule(delays)
                case chance if chance < 0.85:
                    self._step()
                case chance if chance < 0.9:
                    await self._sort(delays)
                case _:
                    await trio.sleep(random.choice((0.001, 0.1, 1, 30)))

    def _due_us(self) -> int:
        random = self.random
        ahead = random.choice((-5, 0, 0.02, 0.3, 5, 90, 1800, 5 * 3600, 3 * 86400, 50 * 86400, 3000 * 86400))
        # Often the very same microsecond as others.
        return max(self.clock.wall_us() + round(ahead * random.choice((1, 1, random.random())) * SECOND_US), 0)

    async def _park(self, delays: Delays) -> None:
        random = self.random
        target = random.choice(TARGETS)
        entries = []
        ids: list[bytes | None] = []
        dues = []
        same = self._due_us()
        for _ in range(random.choice((1, 1, 3, 12))):
            value = b"%d" % len(self.entries)
            dues.append(same if random.random() < 0.5 else self._due_us())
            entry = self.entries[value] = Entry(value, target, {dues[-1]})
            ids.append(b"id-" + value if random.random() < 0.5 else None)
            entries.append(entry)
        values = [entry.value for entry in entries]
        end = delays.park(target, values, [b""] * len(values), values, due_us=dues, ids=ids)
        for offset, (entry, id) in enumerate(zip(entries, ids, strict=True), start=end - len(values)):
            entry.id = id if id is not None else b"hd-%016x" % offset
        self.done.append(f"park {values} {dues}")
        done = trio.Event()
        delays.intake.when_committed(end, done.set)
        await done.wait()
        for entry in entries:
            entry.acknowledged = True
        self.tally.parked += len(values)

    def _some(self) -> Entry | None:
        known = [one for one in self.entries.values() if one.id]
        return self.random.choice(known[-30:]) if known else None

    async def _cancel(self, delays: Delays) -> None:
        entry = self._some()
        if entry is None:
            return
        acknowledged = entry.acknowledged
        entry.cancelling += 1
        outcome = await delays.cancel(entry.id)
        self._check_outcome("cancel", entry, outcome, acknowledged)
        if outcome == Outcome.DONE:
            entry.cancelled = True
        entry.cancelling -= 1

    async def _reschedule(self, delays: Delays) -> None:
        entry = self._some()
        if entry is None:
            return
        due_us = self._due_us()
        acknowledged = entry.acknowledged
        entry.moving.append(due_us)
        entry.dues.add(due_us)
        outcome = await delays.reschedule(entry.id, due_us)
        self._check_outcome("reschedule", entry, outcome, acknowledged)
        entry.moving.remove(due_us)
        if outcome == Outcome.DONE:
            entry.moved.add(due_us)
        elif due_us not in entry.moving and due_us not in entry.moved:
            # Nobody else moves, or has moved it to the very same time.
            entry.dues.discard(due_us)

    def _check_outcome(self, what: str, entry: Entry, outcome: Outcome, acknowledged: bool) -> None:
        self.done.append(f"{what} {entry.value!r} {outcome.name}")
        self.tally.outcomes[f"{what}: {outcome.value}"] += 1
        match outcome:
            case Outcome.DONE:
                assert not entry.cancelled, f"{entry.value!r} was cancelled before"
            case Outcome.ALREADY_FIRED:
                assert not entry.cancelled, f"{entry.value!r} was cancelled, and is said to have fired"
                assert min(entry.dues) <= self.clock.wall_us() + 10 * DAY_US
            case Outcome.ALREADY_CANCELLED:
                others = entry.cancelling - (what == "cancel")
                assert entry.cancelled or others, f"nobody cancelled {entry.value!r}"
                entry.gone = entry.gone or acknowledged
            case Outcome.UNKNOWN:
                # Cancelled, or fired and forgotten, or never parked: in any case not pending, now or later.
                if acknowledged:
                    entry.gone = True

    def _step(self) -> None:
        self.tally.steps += 1
        by_s = self.random.choice((-3600, -30, -1, 1, 30, 3600, 86400, 40 * 86400))
        self.done.append(f"step {by_s}")
        self.before_steps.append((trio.current_time(), self.clock.wall_us()))
        self.clock.step(by_s * SECOND_US)

    async def _sort(self, delays: Delays) -> None:
        """The sorter's own task has its own mind; this only makes it do so sooner."""
        for block in delays._engine.waiting:
            if not block.is_sorted:
                block.since = -1e9
        self.tally.passes += 1
        await trio.sleep(0.3)

    # -- asking for everything ----------------------------------------------------------------------------------

    async def _reconcile(self, delays: Delays, target: Target) -> None:
        await trio.sleep(3)
        with trio.fail_after(3600):
            while not self._is_quiet(delays):
                await trio.sleep(0.5)
        pending: dict[bytes, Pending] = {}
        cursor: str | None = None
        last = (-1, -1)
        while True:
            page = await delays.list(after=cursor, limit=self.random.choice((1, 7, 1000)))
            for record in page.records:
                assert record.value not in pending, f"{record.value!r} is listed twice"
                assert record.due_us >= last[0], "the list is not by due time"
                last = (record.due_us, 0)
                pending[record.value] = record
            if page.cursor is None:
                break
            cursor = page.cursor
        arrived = Counter(target.values())
        self.tally.arrived = len(arrived)
        twice = [value for value, count in arrived.items() if count > 1]
        assert not twice, f"{twice} arrived more than once"
        for entry in self.entries.values():
            self._settle(entry, pending.get(entry.value), entry.value in arrived)
        # What became due while the list was read has left it since.
        late = [one for one in pending.values() if one.due_us <= self.clock.wall_us()]
        if not late:
            assert delays.count() == len(pending), f"{delays.count()} are counted, {len(pending)} are there"
            by_target = Counter(one.target for one in pending.values())
            assert delays.counts() == by_target
            assert sum(one.pending for one in delays.buckets()) == len(pending)

    def _is_quiet(self, delays: Delays) -> bool:
        """Nothing is due or on its way."""
        engine, staged = delays._engine, delays._firing._staged
        dues = [one.next_due_us for one in staged]
        if (due_us := engine.ring.next_due_us()) is not None:
            dues.append(due_us)
        return not engine.ledger.moves and min(dues, default=1 << 62) > self.clock.wall_us()

    def _settle(self, entry: Entry, pending: Pending | None, arrived: bool) -> None:
        value = entry.value
        assert not (pending and arrived and pending.due_us > self.clock.wall_us()), f"{value!r} arrived and is pending"
        if entry.cancelled:
            assert not pending and not arrived, f"{value!r} was cancelled"
        elif pending is not None:
            assert not entry.gone, f"{value!r} is pending although it was said to be unknown"
            assert pending.due_us in entry.dues, f"{value!r} is due {pending.due_us}, not {entry.dues}"
            assert not entry.id or pending.id == entry.id
            entry.dues, entry.moved, entry.moving = {pending.due_us}, {pending.due_us}, []
            entry.acknowledged, entry.cancelling, entry.id = True, 0, pending.id
        elif not arrived:
            assert not entry.acknowledged or entry.cancelling or entry.lost, f"{value!r} is lost"
            # An id that nobody was told of may be another record's now.
            entry.lost, entry.id = True, b""
        if arrived:
            assert not entry.lost, f"{value!r} came back"
            entry.acknowledged, entry.cancelling = True, 0


def _others(error: BaseException) -> BaseException | None:
    """What went wrong beside the crash itself."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(Crash)[1]
    return None if isinstance(error, Crash) else error


def _deterministic_run(random: Random, work: Callable[[], object]) -> None:
    clock = trio.testing.MockClock(autojump_threshold=0)
    with (
        patch.object(trio._core._run, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        patch.object(trio._core._run, "_r", Random(random.getrandbits(32))),
    ):
        trio.run(work, clock=clock)  # type: ignore[arg-type]
