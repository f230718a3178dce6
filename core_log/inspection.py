"""A data directory, read and checked without a broker. Machine over the storage contract; imports no trio.

Works beside a running broker: it takes no lock, writes nothing and believes nothing above the watermark. What is
below it must be there, byte for byte: `verify` walks every batch of every segment, checks each hash, and goes on
behind what is damaged, so that one bad place does not hide another. Bytes that only the commit journal holds (the
power went before the segment was synced) count as there, because the next start puts them back.
Neighbours: storage/readonly.py for real files, repair.py mends what is found here, commands/log.py shows it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple
from uuid import UUID

from headrace.core_log.checkpoint import FILE_BYTES, Checkpoint, read_checkpoint
from headrace.core_log.epochs import EpochHistory
from headrace.core_log.errors import CorruptLog, StorageError, UnknownFormat
from headrace.core_log.format import (
    BATCH_MAGIC,
    FLAG_COMPACTED,
    FLAG_GAP,
    HEADER_SIZE,
    ROUTE_IDS_INLINE_MAX,
    SEGMENT_HEAD_SIZE,
    BatchHeader,
    decode,
    decode_columns,
    is_whole,
    maybe_header,
    maybe_segment_head,
)
from headrace.core_log.index import NEVER, SparseIndex
from headrace.core_log.journal import Entry, entries
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.producers import ProducerTable
from headrace.core_log.record import RecordBatch, RouteReference
from headrace.core_log.segment import Segment, stem_of
from headrace.core_log.spec import CHECKPOINT, EPOCHS, PRODUCERS, SPEC, STREAMS, StreamSpec, folder_of, read_spec
from headrace.core_log.storage.contract import Buffer, File, Storage

WINDOW = 1024 * 1024
_SEARCH_BYTES = 4 * 1024 * 1024
_NOWHERE = 1 << 63
DERIVED = (".index", ".timeindex", ".keys")

Progress = Callable[[int], None]


class Level(Enum):
    """A problem is something that was promised and is not there; a note is worth knowing and lawful."""

    PROBLEM = "problem"
    NOTE = "note"


class Finding(NamedTuple):
    level: Level
    path: str
    position: int | None
    offset: int | None
    what: str


class Whole(NamedTuple):
    """A batch that is all there: its bytes are data[at : at + header.size]."""

    position: int
    header: BatchHeader
    data: bytes
    at: int


class Damage(NamedTuple):
    """Bytes position..end_position of a segment are not the batches that offsets offset..next_offset-1 need."""

    path: str
    position: int
    end_position: int
    offset: int
    next_offset: int
    what: str


@dataclass(slots=True)
class Tally:
    """How much was checked."""

    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0


# -- what there is ----------------------------------------------------------------------------------------------


class SegmentFile(NamedTuple):
    """A segment as its name and size tell; `end_offset` is the next one's base, or None for the last."""

    base_offset: int
    end_offset: int | None
    size: int


@dataclass(frozen=True, slots=True)
class Partition:
    """One partition at one moment. The checkpoint was read before the names, the log start after them."""

    storage: Storage
    spec: StreamSpec
    number: int
    checkpoint: Checkpoint | None
    log_start: int
    bases: tuple[int, ...]
    journal: Sequence[Entry] = field(repr=False)

    @property
    def folder(self) -> str:
        return folder_of(self.spec.id, self.number)

    def path(self, base_offset: int) -> str:
        return stem_of(self.folder, base_offset) + ".log"

    def next_base(self, base_offset: int) -> int | None:
        return next((base for base in self.bases if base > base_offset), None)

    @property
    def sizes(self) -> list[SegmentFile]:
        """Segments that a broker may remove meanwhile are left out."""
        found = []
        for base in self.bases:
            try:
                size = self.storage.open(self.path(base)).size()
            except FileNotFoundError:
                continue
            found.append(SegmentFile(base, self.next_base(base), size))
        return found

    def open(self, base_offset: int) -> tuple[File, bool]:
        """A segment's file as the next start will find it, and whether the commit journal had to help."""
        file = self.storage.open(self.path(base_offset))
        head = maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE))
        patches = [
            entry
            for entry in self.journal
            if entry.segment_base == base_offset
            and head is not None
            and entry.segment_salt == head.salt
            and file.read(entry.position, len(entry.data)) != entry.data
        ]
        return (_Patched(file, patches), True) if patches else (file, False)


class StreamFound(NamedTuple):
    """A folder of streams/: what its stream.json says, or why that cannot be read."""

    id: str
    spec: StreamSpec | None
    problem: Finding | None


def streams(storage: Storage) -> list[StreamFound]:
    """Every stream of a data directory. StorageError when this is none."""
    if not storage.exists(STREAMS):
        raise StorageError(f"no folder {STREAMS!r} in it: not a data directory, or one that no broker has used yet")
    found = []
    for name in storage.list(STREAMS):
        # A folder without its stream.json was never finished (or is being deleted): it does not count.
        if not storage.exists(f"{STREAMS}/{name}/{SPEC}"):
            continue
        try:
            found.append(StreamFound(name, read_spec(storage, name), None))
        except FileNotFoundError:
            continue
        except UnknownFormat as error:
            path = f"{STREAMS}/{name}/{SPEC}"
            text = str(error).removeprefix(f"{path}: ")
            found.append(StreamFound(name, None, Finding(Level.PROBLEM, path, None, None, text)))
    return found


def is_named(spec: StreamSpec | None, text: str) -> bool:
    """By uuid, by name, or by name with kind or virtual host: `orders`, `queue:orders`, `vhost|orders`."""
    return spec is not None and text in (
        str(spec.id),
        spec.name,
        f"{spec.kind}:{spec.name}",
        f"{spec.vhost}|{spec.name}",
    )


def partition_of(storage: Storage, spec: StreamSpec, number: int, journal: Sequence[Entry] = ()) -> Partition:
    """A partition as it is now. FileNotFoundError when its folder is not there."""
    folder = folder_of(spec.id, number)
    checkpoint = read_checkpoint(storage, f"{folder}/{CHECKPOINT}")
    names = storage.list(folder)
    # A segment leaves only after a log start above it is in the file, so the start is read after the names.
    again = read_checkpoint(storage, f"{folder}/{CHECKPOINT}")
    bases = tuple(sorted(int(name[:-4]) for name in names if name.endswith(".log")))
    log_start = again.log_start if again is not None else bases[0] if bases else 0
    mine = [entry for entry in journal if entry.stream_id == spec.id and entry.partition == number]
    return Partition(storage, spec, number, checkpoint, log_start, bases, mine)


def read_journal(storage: Storage) -> list[Entry]:
    return list(entries(storage))


class _Patched:
    """A segment with the journal's bytes in their places."""

    __slots__ = ("_file", "_patches", "path")

    def __init__(self, file: File, patches: Sequence[Entry]) -> None:
        self.path = file.path
        self._file = file
        self._patches = patches

    def size(self) -> int:
        return max(self._file.size(), *(entry.position + len(entry.data) for entry in self._patches))

    def read(self, position: int, length: int) -> bytes:
        length = max(0, min(length, self.size() - position))
        data = bytearray(self._file.read(position, length).ljust(length, b"\0"))
        for entry in self._patches:
            low, high = max(position, entry.position), min(position + length, entry.position + len(entry.data))
            if low < high:
                data[low - position : high - position] = entry.data[low - entry.position : high - entry.position]
        return bytes(data)

    def fileno(self) -> int:
        return -1

    def write(self, position: int, buffers: Sequence[Buffer]) -> int:
        raise StorageError(f"{self.path}: is being read only")

    def sync(self) -> None:
        raise StorageError(f"{self.path}: is being read only")

    def truncate(self, size: int) -> None:
        raise StorageError(f"{self.path}: is being read only")


# -- walking a segment ------------------------------------------------------------------------------------------


class Walk:
    """A place in a segment: the next batch must begin at `position` with `offset`, in no lower epoch."""

    __slots__ = ("_data", "_file", "_salt", "_start", "epoch", "offset", "position")

    def __init__(self, file: File, salt: int, position: int, offset: int, epoch: int = 0) -> None:
        self._file = file
        self._salt = salt
        self.position = position
        self.offset = offset
        self.epoch = epoch
        self._data = b""
        self._start = position

    def step(self, stop_position: int, stop_offset: int) -> Whole | str:
        """The batch at this place, passing it; or why there is none, staying."""
        position = self.position
        header = maybe_header(self._data, position - self._start, self._salt)
        if header is None or position - self._start + header.size > len(self._data):
            self._start = position
            self._data = self._file.read(position, max(0, min(WINDOW, stop_position - position)))
            header = maybe_header(self._data, 0, self._salt)
        if header is None:
            return "no batch where one must be"
        if header.size > stop_position - position:
            return "a batch reaches beyond the end"
        at = position - self._start
        if at + header.size > len(self._data):
            self._data += self._file.read(self._start + len(self._data), at + header.size - len(self._data))
        if not is_whole(self._data, at, header):
            return "a batch fails its hash"
        if header.base_offset != self.offset:
            return f"a batch begins at offset {header.base_offset}"
        if header.span == 0 or header.record_count > header.span or header.next_offset > stop_offset:
            return f"a batch covers offsets up to {header.next_offset}, beyond {stop_offset}"
        if header.leader_epoch < self.epoch:
            return f"a batch of epoch {header.leader_epoch} after one of epoch {self.epoch}"
        self.position += header.size
        self.offset = header.next_offset
        self.epoch = header.leader_epoch
        return Whole(position, header, self._data, at)

    def skip(self, stop_position: int, stop_offset: int) -> None:
        """Move to the next whole batch of this segment that may follow here, or to the stop."""
        for at, header in self.batches_beyond(stop_position):
            fits = self.offset <= header.base_offset < header.next_offset <= stop_offset
            if fits or header.base_offset == stop_offset:
                self.position, self.offset = at, header.base_offset
                return
        self.position, self.offset = stop_position, stop_offset

    def batches_beyond(self, stop_position: int) -> Iterator[tuple[int, BatchHeader]]:
        """Whole batches with this segment's salt anywhere behind this place."""
        needle = self._salt.to_bytes(8, "little")
        position = self.position + 1
        while position + HEADER_SIZE <= stop_position:
            chunk = self._file.read(position, min(_SEARCH_BYTES, stop_position - position))
            found = chunk.find(needle, 8)
            passed = 0
            while found >= 0:
                at = position + found - 8
                header = maybe_header(self._file.read(at, HEADER_SIZE), 0, self._salt)
                if header is not None and _is_whole_at(self._file, at, header, stop_position):
                    yield at, header
                    # Nothing inside a whole batch is another one, whatever its records hold.
                    passed = at + header.size - position
                found = chunk.find(needle, max(found + 1, passed + 8))
            if position + len(chunk) >= stop_position:
                return
            position += max(len(chunk) - 15, passed, 1)


def _is_whole_at(file: File, position: int, header: BatchHeader, stop_position: int) -> bool:
    return header.size <= stop_position - position and is_whole(file.read(position, header.size), 0, header)


def walk(
    file: File, salt: int, *, position: int, offset: int, stop_position: int, stop_offset: int, epoch: int = 0
) -> Iterator[Whole | Damage]:
    """Every batch from a place to a stop, and what is damaged between; together they cover all offsets to the stop."""
    place = Walk(file, salt, position, offset, epoch)
    while place.position < stop_position and place.offset < stop_offset:
        found = place.step(stop_position, stop_offset)
        if isinstance(found, Whole):
            yield found
        else:
            start, first = place.position, place.offset
            place.skip(stop_position, stop_offset)
            yield Damage(file.path, start, place.position, first, place.offset, found)
    if place.offset < stop_offset:
        what = f"the segment ends below offset {stop_offset}"
        yield Damage(file.path, place.position, place.position, place.offset, stop_offset, what)


def find_salt(partition: Partition, base_offset: int, file: File) -> int | None:
    """The salt of a segment: from its head, or, where that is damaged, the one that its batches have.

    A recycled file holds an older segment's batches too, perhaps of another stream: those must not come back. So a
    salt counts only if something proves it: the head's own bytes, a batch right behind the head with the segment's
    offset, a batch that ends exactly where the segment must end, or an index file. If two are proven (no hash covers
    a batch's salt), the one that more bytes have is right.
    """
    start = file.read(0, SEGMENT_HEAD_SIZE)
    head = maybe_segment_head(start)
    if head is not None:
        ours = (head.base_offset, head.stream_id, head.partition)
        return head.salt if ours == (base_offset, partition.spec.id.bytes, partition.number) else None
    checkpoint = partition.checkpoint
    end_offset, end_position = partition.next_base(base_offset), None
    if checkpoint is not None and checkpoint.segment_base == base_offset:
        end_offset, end_position = checkpoint.offset, checkpoint.position
    stem = stem_of(partition.folder, base_offset)

    def is_proven(salt: int, found: list[tuple[int, BatchHeader]]) -> bool:
        if salt == int.from_bytes(start[8:16], "little"):
            return True
        if (found[0][0], found[0][1].base_offset) == (SEGMENT_HEAD_SIZE, base_offset):
            return True
        if end_offset is None:
            return False
        for position, header in found:
            if header.next_offset == end_offset and end_position in (None, position + header.size):
                return True
        return SparseIndex.maybe_load(partition.storage, stem, salt, 1, end_offset, SEGMENT_HEAD_SIZE) is not None

    proven = {
        salt: sum(header.size for _, header in found)
        for salt, found in _batches_by_salt(file).items()
        if is_proven(salt, found)
    }
    return max(proven, key=proven.__getitem__, default=None)


def _batches_by_salt(file: File) -> dict[int, list[tuple[int, BatchHeader]]]:
    """Every whole batch in a file, whosesoever it is."""
    found: dict[int, list[tuple[int, BatchHeader]]] = {}
    size = file.size()
    position = SEGMENT_HEAD_SIZE
    while position + HEADER_SIZE <= size:
        chunk = file.read(position, _SEARCH_BYTES)
        at = chunk.find(BATCH_MAGIC)
        passed = 0
        while at >= 0:
            start = file.read(position + at, HEADER_SIZE)
            header = maybe_header(start, 0, int.from_bytes(start[8:16], "little"))
            if header is not None and _is_whole_at(file, position + at, header, size):
                found.setdefault(header.salt, []).append((position + at, header))
                passed = at + header.size
            at = chunk.find(BATCH_MAGIC, max(at + 1, passed))
        position += max(len(chunk) - 3, passed, 1)
    return found


# -- reading ----------------------------------------------------------------------------------------------------


def batches(partition: Partition, start: int = 0, end: int | None = None) -> Iterator[tuple[Segment, Whole | Damage]]:
    """(segment, batch) for every batch with offsets in start..end-1, up to the watermark and not beyond.

    Damage is told and passed. Without a readable watermark everything whole is taken to be committed.
    """
    checkpoint = partition.checkpoint
    start = max(start, partition.log_start)
    committed = _NOWHERE if checkpoint is None else checkpoint.offset
    end = committed if end is None else min(end, committed)
    for base in partition.bases:
        following = partition.next_base(base)
        if base >= end or (following is not None and following <= start):
            continue
        file, _ = partition.open(base)
        salt = find_salt(partition, base, file)
        limit = min(committed, _NOWHERE if following is None else following)
        size = file.size()
        if checkpoint is not None and checkpoint.segment_base == base:
            size = min(size, checkpoint.position)
        segment = Segment(partition.storage, partition.folder, base, limit)
        if salt is None:
            yield segment, Damage(file.path, 0, size, base, limit, "the segment's head is not readable")
            continue
        position, offset = _start_in(partition, base, salt, start, limit)
        if checkpoint is None and following is None:
            place = Walk(file, salt, position, offset)
            while isinstance(found := place.step(size, _NOWHERE), Whole):
                segment.end_offset = found.header.next_offset
                if found.header.next_offset > start and found.header.base_offset < end:
                    yield segment, found
            continue
        for item in walk(file, salt, position=position, offset=offset, stop_position=size, stop_offset=limit):
            first = item.header.base_offset if isinstance(item, Whole) else item.offset
            last = item.header.next_offset if isinstance(item, Whole) else item.next_offset
            if first >= end:
                break
            if last > start:
                yield segment, item


def _start_in(partition: Partition, base: int, salt: int, start: int, end_offset: int) -> tuple[int, int]:
    """(position, offset) of a batch at or before the wanted offset, by the index where there is one."""
    stem = stem_of(partition.folder, base)
    index = SparseIndex.maybe_load(partition.storage, stem, salt, 1, end_offset, SEGMENT_HEAD_SIZE)
    entry = None if index is None else index.position_before(start)
    return (SEGMENT_HEAD_SIZE, base) if entry is None else (entry[1], entry[0])


def decode_whole(partition: Partition, segment: Segment, whole: Whole) -> RecordBatch:
    """The batch's records, with large route sets in their places. CorruptLog where a route set is not to be found."""
    batch = decode(whole.data, whole.at, whole.header)
    for place, one in enumerate(batch.route_sets):
        if isinstance(one, RouteReference):
            batch.route_sets[place] = segment.route_set(one, partition.spec.config.index_interval_bytes)
    return batch


# -- verifying --------------------------------------------------------------------------------------------------


def verify(partition: Partition, tally: Tally, progress: Progress = lambda size: None) -> Iterator[Finding]:
    """Everything that is wrong with one partition, and what is worth a note."""
    tally.partitions += 1
    yield from _verify_watermark(partition)
    yield from _verify_chain(partition)
    history, findings = _stored_epochs(partition)
    yield from findings
    yield from _verify_producers(partition)
    epoch = 0
    for base in partition.bases:
        stop = _promised_end(partition, base)
        if stop is None:
            break
        try:
            check = _SegmentCheck(partition, base, *stop, epoch, history, tally, progress)
            yield from check.run()
        except FileNotFoundError:
            yield from _explain_absence(partition, base)
            continue
        epoch = check.epoch
    yield from _verify_beyond(partition, epoch)


def _promised_end(partition: Partition, base: int) -> tuple[int, int | None] | None:
    """(offset, position if known) that a segment must reach; None above the watermark, where nothing is promised."""
    checkpoint = partition.checkpoint
    following = partition.next_base(base)
    if checkpoint is None:
        return None if following is None else (following, None)
    if base > checkpoint.segment_base:
        return None
    if base == checkpoint.segment_base:
        return checkpoint.offset, checkpoint.position
    # Where the segment that the checkpoint names was never durable, the one before is complete up to there.
    return (checkpoint.segment_base if following is None else min(following, checkpoint.segment_base)), None


def _verify_watermark(partition: Partition) -> Iterator[Finding]:
    path = f"{partition.folder}/{CHECKPOINT}"
    if partition.checkpoint is None:
        yield Finding(Level.PROBLEM, path, None, None, "no watermark can be read, so nothing tells how far it is safe")
        return
    try:
        size = len(partition.storage.read_file(path))
    except FileNotFoundError:
        return
    if size != FILE_BYTES:
        yield Finding(Level.NOTE, path, size, None, f"is {size} bytes long, not {FILE_BYTES}")


def _verify_chain(partition: Partition) -> Iterator[Finding]:
    """Segments begin at or below the log start and go on to the one that the checkpoint names."""
    checkpoint = partition.checkpoint
    if checkpoint is None or checkpoint.offset <= partition.log_start:
        return
    first = partition.bases[0] if partition.bases else checkpoint.offset
    if first > partition.log_start:
        what = f"offsets {partition.log_start} to {first - 1} have no segment"
        yield Finding(Level.PROBLEM, partition.folder, None, partition.log_start, what)
    if checkpoint.segment_base not in partition.bases and checkpoint.offset > checkpoint.segment_base >= first:
        what = "the segment that the watermark names is gone"
        yield Finding(Level.PROBLEM, partition.path(checkpoint.segment_base), None, checkpoint.segment_base, what)


def _stored_epochs(partition: Partition) -> tuple[EpochHistory | None, list[Finding]]:
    path = f"{partition.folder}/{EPOCHS}"
    try:
        return EpochHistory.decode(partition.storage.read_file(path)), []
    except FileNotFoundError:
        return None, []
    except (ValueError, TypeError) as error:
        return None, [Finding(Level.PROBLEM, path, None, None, f"is no epoch history: {error}; rebuilt from the log")]


def _verify_producers(partition: Partition) -> Iterator[Finding]:
    path = f"{partition.folder}/{PRODUCERS}"
    try:
        ProducerTable(expiry_us=1, count_max=1).restore(partition.storage.read_file(path))
    except FileNotFoundError:
        return
    except UnknownFormat as error:
        what = f"{error}; producers whose records retention took would be forgotten"
        yield Finding(Level.PROBLEM, path, None, None, what)


def _explain_absence(partition: Partition, base: int) -> Iterator[Finding]:
    """A file went while we were at work: retention may do that, whatever else does is a problem."""
    try:
        now = partition_of(partition.storage, partition.spec, partition.number)
    except FileNotFoundError:
        return
    following = partition.next_base(base)
    if following is None or following > now.log_start:
        yield Finding(Level.PROBLEM, partition.path(base), None, base, "the segment is gone")


class _SegmentCheck:
    """One segment, up to where it must reach. `epoch` is the last batch's, for the next segment."""

    def __init__(
        self,
        partition: Partition,
        base: int,
        stop_offset: int,
        stop_position: int | None,
        epoch: int,
        history: EpochHistory | None,
        tally: Tally,
        progress: Progress,
    ) -> None:
        self.epoch = epoch
        self._partition = partition
        self._base = base
        self._path = partition.path(base)
        self._stop_offset = stop_offset
        self._stop_position = stop_position
        self._history = history
        self._tally = tally
        self._progress = progress
        self._problems = 0
        # Where batches begin, and the newest timestamp before each: what an index must agree with.
        self._starts: dict[int, tuple[int, int]] = {}
        self._newest = NEVER
        self._holding: list[tuple[int, int]] = []
        # Large route sets spelled out so far, by the offset of their batch.
        self._sets: dict[int, set[int]] = {}

    def run(self) -> Iterator[Finding]:
        file, helped = self._partition.open(self._base)
        self._tally.segments += 1
        if helped:
            what = "bytes that only the commit journal holds; the next start puts them back"
            yield Finding(Level.NOTE, self._path, None, self._base, what)
        head = maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE))
        if head is None:
            yield self._problem(0, self._base, "the segment's head is damaged")
        elif head.base_offset != self._base:
            yield self._problem(8, self._base, f"the head names another base offset, {head.base_offset}")
        elif (head.stream_id, head.partition) != (self._partition.spec.id.bytes, self._partition.number):
            what = f"belongs to partition {head.partition} of stream {UUID(bytes=head.stream_id)}"
            yield self._problem(24, self._base, what)
        salt = find_salt(self._partition, self._base, file)
        if salt is None:
            what = f"nothing in this segment can be read: offsets {self._base} to {self._stop_offset - 1}"
            yield self._problem(SEGMENT_HEAD_SIZE, self._base, what)
            return
        position = SEGMENT_HEAD_SIZE
        size = file.size() if self._stop_position is None else self._stop_position
        for item in walk(
            file,
            salt,
            position=position,
            offset=self._base,
            stop_position=size,
            stop_offset=self._stop_offset,
            epoch=self.epoch,
        ):
            if isinstance(item, Damage):
                what = f"{item.what}; offsets {item.offset} to {item.next_offset - 1} cannot be read"
                yield self._problem(item.position, item.offset, what)
                position = item.end_position
            else:
                yield from self._check_batch(item)
                position = item.position + item.header.size
                self._progress(item.header.size)
        if self._stop_position is not None and position != self._stop_position:
            what = f"the watermark says that offset {self._stop_offset} is at byte {self._stop_position}"
            yield self._problem(position, self._stop_offset, what)
        if self._partition.next_base(self._base) == self._stop_offset and not self._problems:
            yield from self._check_derived(salt, position)

    def _problem(self, position: int, offset: int, what: str) -> Finding:
        self._problems += 1
        return Finding(Level.PROBLEM, self._path, position, offset, what)

    def _check_batch(self, item: Whole) -> Iterator[Finding]:
        header = item.header
        tally = self._tally
        tally.batches += 1
        tally.records += header.record_count
        tally.bytes += header.size
        self.epoch = header.leader_epoch
        self._starts[header.base_offset] = (item.position, self._newest)
        try:
            if header.flags & FLAG_GAP:
                decode(item.data, item.at, header)
                return
            columns = decode_columns(item.data, item.at, header)
        except (CorruptLog, UnknownFormat) as error:
            yield self._problem(item.position, header.base_offset, str(error))
            return
        self._newest = max(self._newest, header.max_timestamp)
        self._holding.append((item.position, header.base_offset))
        large = set()
        for place, one in enumerate(columns.route_sets):
            if isinstance(one, RouteReference):
                if one.place not in self._sets.get(one.base_offset, ()):
                    what = f"refers to a route set of the batch at offset {one.base_offset} that is not there"
                    yield self._problem(item.position, header.base_offset, what)
            elif len(one) > ROUTE_IDS_INLINE_MAX:
                large.add(place)
        if large:
            self._sets[header.base_offset] = large
        # A compacted batch may begin where a stint ended whose records are all gone.
        if self._history is not None and not header.flags & FLAG_COMPACTED:
            noted = self._history.epoch_at(header.base_offset)
            if (noted.epoch, noted.leader_id) != (header.leader_epoch, header.leader_id):
                what = (
                    f"says epoch {noted.epoch} of leader {noted.leader_id}, the batch in {self._path} at byte "
                    f"{item.position} says epoch {header.leader_epoch} of leader {header.leader_id}"
                )
                path = f"{self._partition.folder}/{EPOCHS}"
                yield Finding(Level.PROBLEM, path, None, header.base_offset, what)
                # Once is enough to know that it is wrong.
                self._history = None

    def _check_derived(self, salt: int, end_position: int) -> Iterator[Finding]:
        """Files beside a sealed segment may be missing; one that is there must say what the segment says."""
        storage = self._partition.storage
        stem = stem_of(self._partition.folder, self._base)
        end_offset = self._stop_offset
        if storage.exists(stem + ".index") and storage.exists(stem + ".timeindex"):
            index = SparseIndex.maybe_load(storage, stem, salt, 1, end_offset, SEGMENT_HEAD_SIZE)
            if index is None:
                yield from self._unfit(salt, (".index", ".timeindex"), "fails its hash, or is of another segment")
            elif index.end_position != end_position or index.max_timestamp < self._newest:
                yield from self._unfit(salt, (".index",), f"says the segment ends at byte {index.end_position}")
            else:
                for offset, position, newest in zip(index.offsets, index.positions, index.times, strict=True):
                    place, actual = self._starts.get(offset, (-1, NEVER))
                    # After a cut the index may know of a newer time than is left; it stays an upper bound.
                    if place != position or newest < actual:
                        what = f"says that offset {offset} is at byte {position}, after time {newest}"
                        yield from self._unfit(salt, (".index",), what)
                        break
        if storage.exists(stem + ".keys"):
            segment = Segment(storage, self._partition.folder, self._base, end_offset)
            keys = KeyIndex.maybe_load(storage, segment)
            if keys is None:
                yield from self._unfit(salt, (".keys",), "fails its hash, or is of another segment")
            elif list(zip(keys.positions, keys.base_offsets, strict=True)) != self._holding:
                yield from self._unfit(salt, (".keys",), "names other batches than the segment holds")

    def _unfit(self, salt: int, suffixes: Sequence[str], what: str) -> Iterator[Finding]:
        stem = stem_of(self._partition.folder, self._base)
        # A running broker may have rewritten the segment meanwhile (compaction), and its files with it.
        head = maybe_segment_head(self._partition.storage.open(self._path).read(0, SEGMENT_HEAD_SIZE))
        if head is not None and head.salt == salt:
            for suffix in suffixes:
                # An empty file is one that is being written, or was when the power went.
                level = Level.PROBLEM if self._partition.storage.read_file(stem + suffix) else Level.NOTE
                yield Finding(level, stem + suffix, None, self._base, f"{what}; the log is whole without it")


def _verify_beyond(partition: Partition, epoch: int) -> Iterator[Finding]:
    """What lies above the watermark: whole batches, then perhaps a torn tail; never something that was committed."""
    checkpoint = partition.checkpoint
    if checkpoint is not None:
        position, offset, first = checkpoint.position, checkpoint.offset, checkpoint.segment_base
    elif partition.bases:
        position, offset, first = SEGMENT_HEAD_SIZE, partition.bases[-1], partition.bases[-1]
    else:
        return
    for base in partition.bases:
        if base < first:
            continue
        try:
            file, _ = partition.open(base)
            salt = find_salt(partition, base, file)
        except FileNotFoundError:
            continue
        size = file.size()
        if base == first and salt is None and checkpoint is not None:
            continue
        if base > first:
            position = SEGMENT_HEAD_SIZE
        if base > offset or maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE)) is None or salt is None:
            stray = Walk(file, salt or 0, SEGMENT_HEAD_SIZE - 1, base)
            claimed = max((header.durable_offset for _, header in stray.batches_beyond(size)), default=0)
            what = f"cannot follow offset {offset}, where the log ends"
            if claimed > offset:
                what = f"{what}, and says that everything below offset {claimed} was committed"
                yield Finding(Level.PROBLEM, file.path, 0, base, what)
            else:
                yield Finding(Level.NOTE, file.path, 0, base, f"{what}; the next start drops it")
            continue
        place = Walk(file, salt, position, offset, epoch)
        while isinstance(place.step(size, _NOWHERE), Whole):
            continue
        if place.offset == partition.next_base(base):
            offset = place.offset
            continue
        claimed = max((header.durable_offset for _, header in place.batches_beyond(size)), default=0)
        # A running broker may have finished the batch since it was looked at.
        if claimed > place.offset and isinstance(why := place.step(size, _NOWHERE), str):
            what = f"{why}, though a later batch says that everything below offset {claimed} was committed"
            yield Finding(Level.PROBLEM, file.path, place.position, place.offset, what)
        elif salt.to_bytes(8, "little") in file.read(place.position, _SEARCH_BYTES):
            what = "a torn tail above the watermark; the next start cuts it"
            yield Finding(Level.NOTE, file.path, place.position, place.offset, what)
        offset = place.offset
