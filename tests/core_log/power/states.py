"""Small stories of the log core, cut short at every step, in every state that a loss of power may leave. Driver.

A story runs on a TracingStorage and marks what it has promised so far (a copy of its ledgers). For each prefix of the
trace and each allowed loss (storage/crash.py) the directory is opened by the real recovery, asked for everything
marked, appended to, closed and opened once more. Now and then the recovery itself is traced and cut short in turn.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import islice
from uuid import UUID

from headrace.core_log.compaction import compact
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Producer
from headrace.core_log.spec import StreamSpec
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.crash import CrashState, TracingStorage, crash_states
from headrace.core_log.storage.memory import MemoryStorage

from .inline import drive, env_on
from .ledger import Ledger, Row, Sequence

STREAM = UUID(int=1)
LOGS = LogConfig(segment_bytes_max=1024, offsets_reserved=5, index_interval_bytes=300, compression="none")
DIRECTORY = DirectoryConfig(journal_bytes_max=2000, removal_delay_ms=1)
CLEAN = "clean"
Ledgers = dict[int, Ledger]
# Of so many states one has its recovery cut short too.
RECOVERIES_EVERY = 97


class Story:
    """One process on a data directory, from start to wherever it is cut."""

    def __init__(self, storage: Storage, ledgers: Ledgers | None = None, seed: int = 0) -> None:
        self.storage = storage
        self.ledgers: Ledgers = {} if ledgers is None else ledgers
        self.env: Env = env_on(storage, seed)
        self.mark()
        self.directory = LogDirectory.open_now(self.env, DIRECTORY, clean=_take_clean_marker(storage))
        self.current: dict[int, dict[int, Row]] = {}
        for partition, log in enumerate(self.logs):
            # A stream that was being created may be there or not.
            ledger = self.ledgers.setdefault(partition, Ledger(f"partition {partition}"))
            self.current[partition] = ledger.check(log)
        for ledger in list(self.ledgers.values())[len(self.logs) :]:
            ledger.fail("the partition was created and is gone")
        self.mark()
        self._count = seed * 1000

    @property
    def logs(self) -> list[PartitionLog]:
        stream = self.directory.streams.get(STREAM)
        return [] if stream is None else stream.partitions

    def mark(self) -> None:
        if isinstance(self.storage, TracingStorage):
            self.storage.mark("ledgers", deepcopy(self.ledgers))

    def create(self, count: int, config: LogConfig = LOGS) -> None:
        self.directory.create_now(StreamSpec(id=STREAM, name="s", kind="topic", partition_count=count, config=config))
        for partition in range(count):
            ledger = self.ledgers[partition] = Ledger(f"partition {partition}")
            ledger.promise(config)
            self.current[partition] = {}
        self.mark()

    def append(self, partition: int, *sizes: int) -> None:
        log, ledger = self.logs[partition], self.ledgers[partition]
        rows = []
        for size in sizes:
            self._count += 1
            rows.append(Row(b"k%d" % (self._count % 3), b"", b"%d|" % self._count + b"x" * size))
        first = int(log.end)
        for offset, row in enumerate(rows, start=first):
            ledger.note_issued(offset, row)
            self.current[partition][offset] = row
        self.mark()
        keys, properties, values = zip(*((row.key, row.properties, row.value) for row in rows), strict=True)
        appended = log.append(keys, properties, values, timestamp_us=self._count)
        self._when_committed(partition, appended.next_offset, list(enumerate(rows, start=first)), [])

    def append_once(self, partition: int, first: int, count: int) -> None:
        log, ledger = self.logs[partition], self.ledgers[partition]
        sequences: list[Sequence] = [(1, 0, first + step) for step in range(count)]
        rows = [Row(b"k", b"", b"p%d|" % sequence[2] + b"y" * 200) for sequence in sequences]
        start = int(log.end)
        known = {row.value for row in self.current[partition].values()}
        fresh = [(sequence, row) for sequence, row in zip(sequences, rows, strict=True) if row.value not in known]
        placed = [(start + place, row) for place, (_sequence, row) in enumerate(fresh)]
        for (sequence, row), (offset, _row) in zip(fresh, placed, strict=True):
            ledger.note_issued(offset, row, sequence)
            self.current[partition][offset] = row
        self.mark()
        keys, properties, values = zip(*((row.key, row.properties, row.value) for row in rows), strict=True)
        written = log.append_once(Producer(b"p" * 16, 0, first), keys, properties, values, timestamp_us=self._count)
        assert sum(one.run.last - one.run.first for one in written if one.run is not None) == len(fresh)
        self._when_committed(partition, written[-1].next_offset, placed, sequences)

    def _when_committed(
        self, partition: int, next_offset: int, placed: list[tuple[int, Row]], sequences: list[Sequence]
    ) -> None:
        ledger = self.ledgers[partition]
        log = self.logs[partition]

        def done() -> None:
            where = {ledger.sequence_of.get(row.value): offset for offset, row in self.current[partition].items()}
            ledger.note_acked(placed)
            for sequence in sequences:
                ledger.note_acked_sequence(sequence, where.get(sequence), log.log_start)
            ledger.note_ends(log)
            self.mark()

        log.when_committed(next_offset, done)

    def commit(self, *partitions: int) -> None:
        chosen = partitions or tuple(self.ledgers)
        asked = {partition: int(self.logs[partition].log_start) for partition in chosen}
        drive(self.directory.committer.commit([self.logs[partition] for partition in chosen]))
        for partition in chosen:
            ledger, log = self.ledgers[partition], self.logs[partition]
            ledger.deleted_to = max(ledger.deleted_to, asked[partition])
            ledger.note_ends(log)
            ledger.note_epoch(log)
        self.mark()

    def delete_before(self, partition: int, offset: int) -> None:
        ledger = self.ledgers[partition]
        ledger.asked_to = max(ledger.asked_to, offset)
        self.mark()
        self.logs[partition].delete_before(offset)

    def compact(self, partition: int) -> None:
        drive(compact(self.env, self.logs[partition]))

    def close(self) -> None:
        self.directory.close_now()
        for partition, log in enumerate(self.logs):
            self.ledgers[partition].close(log, self.current[partition])
            self.ledgers[partition].note_ends(log)
        self.mark()
        self.storage.replace_file(CLEAN, b"")


def _take_clean_marker(storage: Storage) -> bool:
    """As the node does it: from here on, until the next clean stop, the directory counts as unclean."""
    if not storage.exists(CLEAN):
        return False
    storage.remove(CLEAN)
    storage.sync_dir("")
    return True


Workload = Callable[[TracingStorage], None]


def create_stream(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(2)


def append_and_commit(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(1)
    story.append(0, 10, 0, 300)
    story.commit()
    story.append(0, 10)
    story.append(0, 600)
    story.logs[0].seal()
    story.append(0, 5)
    story.commit()


def journalled_commit(storage: TracingStorage) -> None:
    """Commits of three files, so many that the journal starts over."""
    story = Story(storage)
    story.create(3)
    for _ in range(4):
        for partition in range(3):
            story.append(partition, 100)
        story.commit()


def roll(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(1)
    story.append(0, 700)
    story.commit()
    story.append(0, 700)
    story.logs[0].seal()
    story.append(0, 700)
    story.commit()


def idempotent_producer(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(1)
    story.append_once(0, 0, 2)
    story.commit()
    story.append_once(0, 1, 3)
    story.append(0, 600)
    story.commit()
    story.append_once(0, 0, 5)
    story.delete_before(0, 5)
    story.commit()
    story.append_once(0, 2, 3)
    story.commit()


def delete_records(storage: TracingStorage) -> None:
    """Some records and then all of them, so that whole segments go and come back recycled."""
    story = Story(storage)
    story.create(1)
    for _ in range(3):
        story.append(0, 600)
        story.commit()
    story.delete_before(0, 2)
    story.commit()
    story.logs[0].recycle(1 << 62)
    story.append(0, 600)
    story.commit()
    story.delete_before(0, int(story.logs[0].high_watermark))
    story.commit()
    story.append(0, 10)
    story.commit()


def compaction(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(1, LogConfig(segment_bytes_max=1024, offsets_reserved=5, compression="none", cleanup="compact"))
    for _ in range(4):
        story.append(0, 300, 300, 100)
        story.commit()
    story.compact(0)
    story.append(0, 700)
    story.commit()


def clean_close(storage: TracingStorage) -> None:
    story = Story(storage)
    story.create(2)
    story.append(0, 100)
    story.append_once(1, 0, 2)
    story.commit()
    story.append(0, 700)
    story.close()
    again = Story(storage, story.ledgers, seed=1)
    again.append(0, 700)
    again.append(1, 50)
    again.commit()


def recovery(storage: TracingStorage) -> None:
    """Start, by a crash that left a torn tail, a new segment and a journal behind, and once more."""
    story = Story(storage)
    story.create(3)
    for partition in range(3):
        story.append(partition, 200)
    story.commit()
    for partition in range(3):
        story.append(partition, 200, 100)
    story.commit()
    story.append(0, 700)
    story.logs[0].seal()
    story.append(1, 700)
    story.append_once(1, 0, 2)
    story.logs[1].seal()
    again = Story(storage, story.ledgers, seed=1)
    again.append(0, 300)
    again.commit()


WORKLOADS: tuple[Workload, ...] = (
    create_stream,
    append_and_commit,
    journalled_commit,
    roll,
    idempotent_producer,
    delete_records,
    compaction,
    clean_close,
    recovery,
)


def explore(workload: Workload, limit_per_prefix: int, *, every: int = 1) -> tuple[int, int, list[str]]:
    """(prefixes, states, what went wrong) of one workload; with `every`, only each so many-th state is looked at."""
    traced = TracingStorage(MemoryStorage())
    workload(traced)
    problems: list[str] = []
    count = 0
    for state, ledgers in islice(_states(traced, limit_per_prefix), 0, None, every):
        count += 1
        try:
            check(state.storage, ledgers)
        except Exception as error:
            lost = "; ".join(state.lost) or "nothing"
            problems.append(f"after {state.prefix} steps, {lost} lost: {type(error).__name__}: {error}")
    return len(traced.trace) + 1, count, problems


def _states(traced: TracingStorage, limit: int) -> Iterator[tuple[CrashState, Ledgers]]:
    """The states of a trace; now and then also those of the recovery that such a state calls for."""
    for number, state in enumerate(crash_states(traced, limit_per_prefix=limit)):
        ledgers = _promised(state, {})
        if number % RECOVERIES_EVERY == RECOVERIES_EVERY - 1:
            again = TracingStorage(state.storage.after_power_loss(lambda _: True))
            Story(again, deepcopy(ledgers), seed=7)
            for inner in crash_states(again, limit_per_prefix=max(4, limit // 8)):
                yield inner, _promised(inner, ledgers)
        yield state, ledgers


def _promised(state: CrashState, before: Ledgers) -> Ledgers:
    marks = state.marked("ledgers")
    found = marks[-1] if marks else before
    assert isinstance(found, dict)
    return found


def check(storage: Storage, promised: Ledgers) -> None:
    """Open what is left, ask for everything promised, go on, and ask again."""
    ledgers = deepcopy(promised)
    story = Story(storage, ledgers, seed=8)
    for partition in ledgers:
        story.append(partition, 30)
    story.commit()
    story.close()
    Story(storage, ledgers, seed=9)
