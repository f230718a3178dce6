"""One random run: a data directory lives, dies and is opened again, and after each start the ledgers are asked. Driver.

Everything follows from the seed: sizes and settings (small, so that rolls, evictions and journal turns happen all the
time), which faults may come (swarm: a subset for each run), the operations, and the moment of each crash, counted in
changes to the storage, so that it also falls between two steps of a commit or of a recovery. No threads and no trio:
what the loop does while the worker is busy is done between two changes of the storage.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, TypeVar
from unittest.mock import patch
from uuid import UUID

from headrace.core_log import segment as segment_module
from headrace.core_log.checkpoint import read_checkpoint
from headrace.core_log.compaction import compact
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory, Stream
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, DiskFull, Poisoned, SequenceRefused, StorageError
from headrace.core_log.format import SEGMENT_HEAD_SIZE, BatchHeader, is_whole, maybe_header, maybe_segment_head
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Producer
from headrace.core_log.spec import CHECKPOINT, StreamSpec
from headrace.core_log.storage.memory import MemoryStorage, Planted

from .fuse import Crash, FusedStorage
from .inline import Clock, InlineWorker, SeededIds, drive
from .ledger import Broken, Ledger, Row, Sequence

T = TypeVar("T")
FAULTS = ("process", "power", "recovery", "sync", "write", "full", "rot", "meanwhile", "streams")


@dataclass(slots=True)
class Outcome:
    """What a run came to. Vacuous: no loss of power took unsynced changes, or nothing was acknowledged."""

    seed: int
    starts: int = 0
    process_crashes: int = 0
    power_losses: int = 0
    losses_with_unsynced: int = 0
    crashes_in_recovery: int = 0
    sync_failures: int = 0
    refused: int = 0
    acked_count: int = 0
    journalled_count: int = 0
    compacted_count: int = 0

    @property
    def vacuous(self) -> bool:
        return not self.losses_with_unsynced or not self.acked_count


@dataclass(slots=True)
class Place:
    """One partition of the run, over all its lives."""

    stream: UUID
    partition: int
    ledger: Ledger
    log: PartitionLog
    # What this life has put at each offset, or found there.
    current: dict[int, Row] = field(default_factory=dict)
    next_sequence: dict[tuple[int, int], int] = field(default_factory=dict)
    epoch_of: dict[int, int] = field(default_factory=dict)
    # Publishers who have not heard yet.
    waiting: int = 0


class World:
    def __init__(self, seed: int, *, planted: Planted | None = None) -> None:
        self.random = Random(seed)
        self.outcome = Outcome(seed)
        self.clock = Clock()
        self.ids = SeededIds(self.random)
        self.memory = MemoryStorage(planted=planted)
        self.faults = {fault for fault in FAULTS if self.random.random() < 0.6}
        self.faults.add(self.random.choice(("power",) * 5 + ("process",)))
        self.directory_config = self._draw_directory_config()
        self.places: list[Place] = []
        self.storage = FusedStorage(self.memory, self.random)
        self.worker = InlineWorker()
        self.worker.around = self._around
        self.directory: LogDirectory | None = None
        self._value = 0
        self._mood: dict[str, float] = {}
        self._clean = False
        self._meanwhile_left = 0
        self.done: list[str] = []
        # Streams whose deletion was acknowledged, or was under way when the process died.
        self._gone: set[UUID] = set()
        self._going: set[UUID] = set()
        self.clock.on_sleep = self._free_disk

    # -- drawing -------------------------------------------------------------------------------------------------

    def _draw_directory_config(self) -> DirectoryConfig:
        choice = self.random.choice
        return DirectoryConfig(
            tail_cache_bytes_max=choice((1, 3000, 1 << 20)),
            index_cache_count_max=choice((1, 2, 256)),
            journal_bytes_max=choice((1000, 4000, 40_000)),
            journal_from_files=choice((2, 3, 3)),
            removal_delay_ms=choice((0, 0, 60_000)),
            recycled_count_max=choice((0, 2, 8)),
            trash_ms=choice((1000, 24 * 3600 * 1000)),
        )

    def _draw_log_config(self) -> LogConfig:
        choice = self.random.choice
        return LogConfig(
            durability=choice(("sync", "sync", "sync", "interval", "os")),
            compression=choice(("none", "auto", "lz4")),
            cleanup=choice(("delete", "delete", "compact")),
            retention_ms=choice((None, 5_000, 60_000)),
            segment_bytes_max=choice((1024, 2048, 8192)),
            segment_ms_max=choice((2_000, 24 * 3600 * 1000)),
            batch_bytes_max=choice((100, 1000, 4000)),
            index_interval_bytes=choice((1, 300, 32768)),
            offsets_reserved=choice((1, 2, 7, 100, 1000)),
        )

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        try:
            for _ in range(self.random.randint(2, 5)):
                self._start()
                if self._live():
                    return self.outcome
            self._start()
        except BaseException as error:
            error.add_note(
                f"seed {self.outcome.seed}, faults {sorted(self.faults)}, last: {' | '.join(self.done[-12:])}"
            )
            raise
        return self.outcome

    def _env(self) -> Env:
        return Env(clock=self.clock, storage=self.storage, worker=self.worker, ids=self.ids, random=self.random)

    def _start(self) -> None:
        """Open the directory, however often that is interrupted, and look at everything in it."""
        while True:
            self.storage = FusedStorage(self.memory, self.random)
            if "recovery" in self.faults and self.random.random() < 0.3:
                self.storage.left = self.random.randrange(60)
            if "sync" in self.faults and self.random.random() < 0.05:
                self.memory.fail("sync", nth=self.random.randint(1, 8))
            clean, self._clean = self._clean, False
            try:
                self.directory = LogDirectory.open_now(self._env(), self.directory_config, clean=clean)
                break
            except Crash:
                self.done.append("crash in recovery")
                self.outcome.crashes_in_recovery += 1
            except DiskFull:
                self.done.append("full in recovery")
                self.memory.capacity_bytes = None
            except Poisoned:
                self.done.append("sync failure in recovery")
                self.outcome.sync_failures += 1
            self._die(self.random.choice(("process", "power")) if "power" in self.faults else "process")
        self.storage.left = None
        self.done.append(f"start{' clean' if clean else ''}")
        self.outcome.starts += 1
        self._find_streams(self.directory)
        for place in self.places:
            place.current = place.ledger.check(place.log)
            place.ledger.asked_to = int(place.log.log_start)
            place.waiting = 0

    def _find_streams(self, directory: LogDirectory) -> None:
        """What was acknowledged is there or gone as it was said; of what was under way both will do."""
        known = {place.stream for place in self.places}
        if back := self._gone & directory.streams.keys():
            raise Broken(f"streams {back} were deleted and are back")
        self._gone |= self._going - directory.streams.keys()
        self.places = [place for place in self.places if place.stream not in self._gone]
        for stream in directory.streams.values():
            if stream.spec.id not in known:
                self._add_places(stream, 0)
        self._going.clear()
        for place in self.places:
            found = directory.streams.get(place.stream)
            if found is None or place.partition >= len(found.partitions):
                place.ledger.fail("the partition was created and is gone")
            place.log = found.partitions[place.partition]
            place.ledger.promise(found.spec.config)
        for stream in directory.streams.values():
            self._add_places(stream, sum(place.stream == stream.spec.id for place in self.places))

    def _live(self) -> bool:
        """A life, up to a crash or a clean stop; True when the run is over with it."""
        operations = self.random.randint(3, 40)
        how = "power" if "power" in self.faults and self.random.random() < 0.7 else "process"
        try:
            for count in range(operations):
                if count == operations - 1 and self.random.random() < 0.7:
                    self.storage.left = self.random.randrange(25)
                self._operate()
            if self.storage.left is None and self.random.random() < 0.3:
                self._close()
                return False
        except Crash:
            self.done.append("crash")
        except Poisoned:
            self.done.append("poisoned")
            self.outcome.sync_failures += 1
            # As a rule the process stops, and another one finds what the kernel holds.
            how = self.random.choice((how, "process"))
        except DiskFull:
            self.done.append("stopped by a full disk")
            self.memory.capacity_bytes = None
        except StorageError as error:
            if "Input/output" not in str(error):
                raise
            self.done.append("write error")
        self._note_ends()
        self._die(how)
        if "rot" in self.faults and self.random.random() < 0.3:
            self._rot()
            return True
        return False

    def _note_ends(self) -> None:
        for place in self.places:
            place.ledger.note_ends(place.log)

    def _die(self, how: str) -> None:
        if how == "power":
            self.outcome.power_losses += 1
            self.outcome.losses_with_unsynced += bool(self.memory.unsynced())
            self.memory = self.memory.power_loss(self.random)
            for place in self.places:
                place.ledger.lose_power()
        else:
            self.outcome.process_crashes += 1
            self.memory = self.memory.process_crash()
        self.done.append(how)

    def _close(self) -> None:
        assert self.directory is not None
        self._commit(self.places)
        self.directory.close_now()
        self._clean = True
        self.done.append("close")
        for place in self.places:
            if place.waiting:
                place.ledger.fail(f"{place.waiting} publishers never heard of their records")
            place.ledger.asked_to = place.ledger.deleted_to = int(place.log.log_start)
            place.ledger.close(place.log, place.current)
            place.ledger.note_ends(place.log)
        self._die("power" if "power" in self.faults else "process")

    def _free_disk(self) -> None:
        if self.random.random() < 0.5:
            self.memory.capacity_bytes = None
        elif self.random.random() < 0.1:
            raise Crash

    # -- operations ----------------------------------------------------------------------------------------------

    def _operate(self) -> None:
        operations: list[tuple[float, Callable[[], None]]] = [
            (6, self._append),
            (4, self._append_once),
            (2, self._seal),
            (6, self._commit_some),
            (2, self._read),
            (1, self._delete),
            (1, self._maintain),
            (1, self._compact),
            (0.3, self._note_watermark),
            (0.3, self._begin_epoch),
            (1, self._pass_time),
        ]
        if "streams" in self.faults:
            operations += [(0.3, self._create), (0.3, self._grow), (0.1, self._delete_stream), (0.2, self._configure)]
        if "full" in self.faults:
            operations.append((0.4, self._fill_disk))
        if "sync" in self.faults:
            operations.append((0.3, self._order_sync_failure))
        if "write" in self.faults:
            operations.append((0.1, self._order_write_failure))
        if not self.places:
            return self._create()
        weights = [weight * self._mood.setdefault(one.__name__, self._draw_mood()) for weight, one in operations]
        (operation,) = self.random.choices([one for _, one in operations], weights)
        operation()

    def _draw_mood(self) -> float:
        """Each run likes some operations better than others."""
        return self.random.choice((0.3, 1, 1, 3))

    def _pick(self) -> tuple[Place, PartitionLog]:
        place = self.random.choice(self.places)
        return place, place.log

    def _create(self) -> None:
        assert self.directory is not None
        if len(self.places) >= 6:
            return
        config = self._draw_log_config()
        count = self.random.choice((1, 2, 3, 4))
        spec = StreamSpec(id=self.ids.uuid(), name="s", kind="topic", partition_count=count, config=config)
        self.done.append("create")
        with suppress(DiskFull):
            stream = self.directory.streams[spec.id] = self.directory.create_now(spec)
            self._add_places(stream, 0)

    def _add_places(self, stream: Stream, first: int) -> None:
        for partition, log in enumerate(stream.partitions[first:], start=first):
            ledger = Ledger(f"{str(stream.spec.id)[:8]}/{partition}")
            ledger.promise(stream.spec.config)
            self.places.append(Place(stream.spec.id, partition, ledger, log))

    def _pick_stream(self) -> Stream:
        assert self.directory is not None
        return self.directory.streams[self.random.choice(self.places).stream]

    def _grow(self) -> None:
        assert self.directory is not None
        stream = self._pick_stream()
        count = len(stream.partitions)
        self.done.append("grow")
        with suppress(DiskFull):
            drive(self.directory.grow_stream(stream, count + 1))
        self._add_places(stream, count)

    def _delete_stream(self) -> None:
        assert self.directory is not None
        stream = self._pick_stream()
        self.done.append("delete a stream")
        self._going.add(stream.spec.id)
        # Nobody publishes to it any more, and who still waits is told nothing.
        places, self.places = self.places, [place for place in self.places if place.stream != stream.spec.id]
        try:
            drive(self.directory.delete_stream(stream))
        except (Crash, StorageError):
            self.places = places
            raise
        self._going.clear()
        self._gone.add(stream.spec.id)

    def _configure(self) -> None:
        assert self.directory is not None
        stream = self._pick_stream()
        config = replace(stream.spec.config, durability=self.random.choice(("sync", "interval", "os")))
        self.done.append(f"configure {config.durability}")
        # Until the next start the lesser of the two promises counts: readers may be ahead of the last sync.
        for place in self.places:
            place.ledger.syncs &= place.stream != stream.spec.id or config.durability == "sync"
        with suppress(DiskFull):
            drive(self.directory.configure_stream(stream, config))

    def _size(self) -> int:
        return self.random.choice((0, 5, 40, 200, self.random.randrange(600), self.random.randrange(3000)))

    def _row(self, name: bytes) -> Row:
        key = b"k%d" % self.random.randrange(6)
        filler = self.random.choice((b"x", b"ab")) * self._size()
        return Row(key, self.random.choice((b"", b"p", b"q" * 30)), name + filler)

    def _append(self) -> None:
        place, log = self._pick()
        rows = []
        for _ in range(self.random.choice((1, 1, 2, 5))):
            self._value += 1
            rows.append(self._row(b"v%d|" % self._value))
        self.done.append(f"append {len(rows)}")
        try:
            written = log.append(
                [row.key for row in rows],
                [row.properties for row in rows],
                [row.value for row in rows],
                timestamp_us=self.clock.now_us,
                route_set=self.random.choice(((), (1, 2), tuple(range(100)))),
                tags=self.random.choice(((), ("a",))),
            )
        except DiskFull:
            return
        assert written.run is not None
        first = written.run.batch.base_offset + written.run.first
        placed = list(enumerate(rows, start=first))
        assert written.next_offset == first + len(rows)
        for offset, row in placed:
            place.ledger.note_issued(offset, row)
            place.current[offset] = row
        self._wait(place, log, written.next_offset, placed)

    def _wait(self, place: Place, log: PartitionLog, next_offset: int, placed: list[tuple[int, Row]]) -> None:
        def done() -> None:
            place.ledger.note_acked(placed)
            self.outcome.acked_count += len(placed)

        self._ticket(place, log, next_offset, done)

    def _ticket(self, place: Place, log: PartitionLog, next_offset: int, done: Callable[[], None]) -> None:
        def called() -> None:
            place.waiting -= 1
            if log.high_watermark < next_offset:
                place.ledger.fail(f"acknowledged at {next_offset} with the high watermark at {log.high_watermark}")
            done()

        place.waiting += 1
        log.when_committed(next_offset, called)

    def _append_once(self) -> None:
        """A producer sends something new, or sends again what it sent before, or comes back with a higher epoch."""
        place, log = self._pick()
        number = self.random.randrange(3)
        if self.random.random() < 0.05:
            place.epoch_of[number] = place.epoch_of.get(number, 0) + 1
        epoch = place.epoch_of.get(number, 0)
        following = place.next_sequence.get((number, epoch), 0)
        dense = number == 0
        count = self.random.randint(1, 4)
        if self.random.random() < 0.5 and following:
            first = self.random.randrange(max(0, following - 6), following)
        else:
            first = following if dense else following + self.random.choice((0, 0, 2))
        sequences: list[Sequence] = [(number, epoch, first + step) for step in range(count)]
        rows = [self._sequence_row(place, one) for one in sequences]
        self.done.append(f"append once {sequences[0]}+{count}")
        try:
            producer = Producer(bytes([number + 1]) * 16, epoch, first)
            columns = [row.key for row in rows], [row.properties for row in rows], [row.value for row in rows]
            if dense:
                written = [log.append_dense(producer, *columns, timestamp_us=self.clock.now_us)]
            else:
                written = log.append_once(producer, *columns, timestamp_us=self.clock.now_us)
        except DiskFull:
            place.ledger.perhaps.update(row.value for row in rows)
            return
        except SequenceRefused:
            # The numbers before were lost with a crash: the producer has to go back to where the log stands.
            place.next_sequence[number, epoch] = 0
            acked = [one for one in sequences if one in place.ledger.acked]
            if acked:
                place.ledger.fail(f"sequence {acked[0]} was acknowledged and is refused")
            return
        place.next_sequence[number, epoch] = max(following, first + count)
        placed: list[tuple[int, Row]] = []
        by_value = {row.value: (row, one) for row, one in zip(rows, sequences, strict=True)}
        for appended in written:
            if appended.run is not None:
                batch = appended.run.batch
                for index in range(appended.run.first, appended.run.last):
                    row, sequence = by_value[batch.values[index]]
                    offset = batch.base_offset + index
                    place.ledger.note_issued(offset, row, sequence)
                    place.current[offset] = row
                    placed.append((offset, row))
        where = {row.value: offset for offset, row in place.current.items() if row.value in by_value}
        self._wait_once(place, log, written[-1].next_offset, placed, sequences, rows, where)

    def _sequence_row(self, place: Place, sequence: Sequence) -> Row:
        # The same bytes each time it is sent.
        random = Random(f"{place.stream}/{place.partition}/{sequence}")
        return Row(b"k%d" % random.randrange(6), b"", b"p%d.%d.%d|" % sequence + b"y" * random.choice((0, 10, 300)))

    def _wait_once(
        self,
        place: Place,
        log: PartitionLog,
        next_offset: int,
        placed: list[tuple[int, Row]],
        sequences: list[Sequence],
        rows: list[Row],
        where: dict[bytes, int],
    ) -> None:
        def done() -> None:
            place.ledger.note_acked(placed)
            self.outcome.acked_count += len(placed)
            for sequence, row in zip(sequences, rows, strict=True):
                place.ledger.note_acked_sequence(sequence, where.get(row.value), log.log_start)

        self._ticket(place, log, next_offset, done)

    def _seal(self) -> None:
        _place, log = self._pick()
        self.done.append("seal")
        with suppress(DiskFull):
            log.seal()

    def _commit_some(self) -> None:
        few = self.random.choice((1, 2, len(self.places), len(self.places)))
        self._commit(self.random.sample(self.places, min(few, len(self.places))))

    def _commit(self, places: list[Place]) -> None:
        """A group, as Committer.run and its lazy side would form it."""
        assert self.directory is not None
        committer = self.directory.committer
        group: list[PartitionLog] = []
        asked = {id(place): int(place.log.log_start) for place in places}
        for place in places:
            if place.log.config.durability != "sync":
                with suppress(DiskFull):
                    place.log.seal()
                place.log.advance()
                if place.log.config.durability == "os" and not place.log.needs_checkpoint:
                    continue
            group.append(place.log)
        self.done.append(f"commit {len(group)}")
        drive(committer.commit(group))
        committer._urgent.clear()
        for place in places:
            if place.log in group:
                place.ledger.deleted_to = max(place.ledger.deleted_to, asked[id(place)])
                place.ledger.note_ends(place.log)
                place.ledger.note_epoch(place.log)
        self.outcome.journalled_count += committer.journalled_count
        committer.journalled_count = 0

    def _read(self) -> None:
        place, log = self._pick()
        early = self.random.random() < 0.5
        end = log.early_end if early else log.high_watermark
        place.ledger.note_ends(log)
        if end <= log.log_start:
            return
        start = self.random.randrange(log.log_start, end)
        self.done.append(f"read {start}..{end}")
        runs = log.read(start, bytes_max=self.random.choice((1, 1000, 100_000)), end=end)
        if not runs:
            place.ledger.fail(f"nothing to read at {start} below {end}")
        place.ledger.note_read(log, start, runs, committed=not early)

    def _delete(self) -> None:
        place, log = self._pick()
        limit = int(log.high_watermark)
        offset = self.random.choice((limit, self.random.randrange(log.log_start, limit + 1)))
        self.done.append(f"delete before {offset}")
        with suppress(DiskFull):
            log.delete_before(offset)
        place.ledger.asked_to = max(place.ledger.asked_to, int(log.log_start))

    def _maintain(self) -> None:
        assert self.directory is not None
        self.done.append("maintain")
        # Retention asks for deletes by itself, and maintenance may be cut short: anything it may take counts as asked.
        for place in self.places:
            place.ledger.asked_to = max(place.ledger.asked_to, int(place.log.expired(self.clock.now_us)))
        drive(self.directory.maintain())
        self.directory.committer._urgent.clear()
        self.directory.committer._lazy.clear()

    def _compact(self) -> None:
        _place, log = self._pick()
        if log.config.cleanup == "compact":
            self.done.append("compact")
            self.outcome.compacted_count += drive(compact(self._env(), log))

    def _note_watermark(self) -> None:
        _place, log = self._pick()
        self.done.append("note watermark")
        log.note_watermark()

    def _begin_epoch(self) -> None:
        _place, log = self._pick()
        self.done.append("new epoch")
        with suppress(DiskFull):
            log.begin_epoch(log.epoch + self.random.randint(1, 2), self.random.randrange(3))

    def _pass_time(self) -> None:
        self.clock.now_us += self.random.choice((1000, 3_000_000, 100_000_000, -2_000_000))

    def _fill_disk(self) -> None:
        self.done.append("fill disk")
        plenty = 1 << 40
        self.memory.capacity_bytes = plenty
        used = plenty - self.memory.free_bytes()
        self.memory.capacity_bytes = used + self.random.choice((0, 100, 2000))

    def _order_sync_failure(self) -> None:
        self.done.append("order a failing sync")
        place = self.random.choice(self.places)
        path = self.random.choice((None, f"streams/{place.stream}/{place.partition}/{CHECKPOINT}", "journal"))
        if path is None:
            self.memory.fail(self.random.choice(("sync", "sync", "sync_dir")), nth=self.random.randint(1, 6))
        else:
            self.memory.fail("sync", path=path, nth=self.random.randint(1, 2))

    def _order_write_failure(self) -> None:
        self.done.append("order a failing write")
        self.memory.fail("write", nth=self.random.randint(1, 6))

    # -- meanwhile -----------------------------------------------------------------------------------------------

    def _around(self, call: Callable[[], Any]) -> Any:
        """What the loop does while the worker is at work: append, seal, delete, look."""
        if "meanwhile" not in self.faults or self._meanwhile_left:
            return call()
        self._meanwhile_left = self.random.choice((0, 0, 1, 2, 4))
        try:
            self._interfere()
            self.storage.between = self._interfere
            result = call()
            self.storage.between = None
            self._interfere()
            return result
        finally:
            self.storage.between = None
            self._meanwhile_left = 0

    def _interfere(self) -> None:
        if self._meanwhile_left and self.places and self.random.random() < 0.4:
            self._meanwhile_left -= 1
            between, self.storage.between = self.storage.between, None
            self.done.append("(meanwhile)")
            self.random.choice((self._append, self._append, self._append_once, self._seal, self._read, self._delete))()
            self.storage.between = between

    # -- rot -----------------------------------------------------------------------------------------------------

    def _rot(self) -> None:
        """Damage what is on the medium. It may be refused, at the start or when it is read; it is never passed over."""
        choices = [
            (place, folder, name)
            for place in self.places
            for folder in [f"streams/{place.stream}/{place.partition}"]
            if self.memory.exists(folder)
            for name in self.memory.list(folder)
            if name.endswith(".log")
        ]
        if not choices:
            return
        place, folder, name = self.random.choice(choices)
        path = f"{folder}/{name}"
        batches = list(_whole_batches(self.memory, path))
        checkpoint = read_checkpoint(self.memory, f"{folder}/{CHECKPOINT}")
        if checkpoint is None:
            place.ledger.fail("no checkpoint is left")
        hurt = int(name[:-4])
        if self.random.random() < 0.2 or not batches:
            self.done.append(f"lose {path}")
            self.memory.remove(path)
        else:
            at, header = self.random.choice(batches)
            position = self.random.choice(
                (self.random.randrange(SEGMENT_HEAD_SIZE), at + self.random.randrange(header.size))
            )
            self.done.append(f"flip in {path} at {position}")
            self.memory.flip_bit(path, position, self.random.randrange(8))
            hurt = header.base_offset if position >= SEGMENT_HEAD_SIZE else int(name[:-4])
        # Of what no checkpoint and no later batch says that it was safe, damage cannot be told from a torn tail (D7).
        claims = [
            header.durable_offset
            for one in self.memory.list(folder)
            if one.endswith(".log") and one >= name
            for _at, header in _whole_batches(self.memory, f"{folder}/{one}")
            if header.base_offset > hurt
        ]
        if max(claims, default=0) <= hurt and checkpoint.offset <= hurt:
            place.ledger.excused_from = hurt
        self.faults = set()
        try:
            self._start()
        except CorruptLog:
            self.outcome.refused += 1
            self.done.append("refused")


def _whole_batches(storage: MemoryStorage, path: str) -> Iterator[tuple[int, BatchHeader]]:
    """The batches of a segment file one behind the other, as long as they are whole."""
    data = storage.read_file(path)
    head = maybe_segment_head(data)
    at = SEGMENT_HEAD_SIZE
    while head is not None:
        header = maybe_header(data, at, head.salt)
        if header is None or not is_whole(data, at, header):
            return
        yield at, header
        at += header.size


@contextmanager
def small_segments() -> Any:
    """Files grow in small steps, so that a state of the disk is small and quickly made."""
    with patch.object(segment_module, "GROWTH_BYTES_MIN", 1024):
        yield
