"""Makes a damaged partition whole again, and says what that costs. Driver over the storage contract.

Every whole batch is kept, byte for byte; the offsets of what cannot be read become a typed gap (Gap.REPAIRED), so
that readers are told and no offset is issued twice. A damaged segment is written anew beside the old one; the old
one stays as `<base>.log.damaged`, and a line in the file `repairs` says what was given up, before anything takes
its place. Renaming is the one step that counts: a gap is padded so that the watermark's offset stays at its byte.
`plan` only looks; `carry_out` needs the directory's lock and a replayed commit journal.
Neighbours: inspection.py finds the damage, commands/log.py asks before it lets go.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from headrace.core_log.checkpoint import Checkpoint, CheckpointFile
from headrace.core_log.env import Env
from headrace.core_log.epochs import EpochHistory
from headrace.core_log.errors import CorruptLog
from headrace.core_log.format import (
    FLAG_GAP,
    HEADER_SIZE,
    SEGMENT_HEAD_SIZE,
    Body,
    SegmentHead,
    decode,
    encode,
    encode_segment_head,
    maybe_segment_head,
    restamp,
    stamp,
)
from headrace.core_log.inspection import DERIVED, Damage, Level, Partition, Tally, Walk, Whole, find_salt, verify, walk
from headrace.core_log.record import Gap, RouteReference, gap_batch
from headrace.core_log.segment import stem_of
from headrace.core_log.spec import CHECKPOINT, EPOCHS, PRODUCERS
from headrace.core_log.storage.contract import File, Storage

REPAIRS = "repairs"
DAMAGED = ".damaged"
# What PartitionLog.open removes when it finds it.
_TEMPORARY = ".temp"
_NOWHERE = 1 << 63
_SPAN_MAX = 0xFFFF_FFFF
_COPY_BYTES = 4 * 1024 * 1024


class GivenUp(NamedTuple):
    """Offsets first..next-1 hold no record any more."""

    first_offset: int
    next_offset: int
    why: str


@dataclass(slots=True)
class SegmentPlan:
    """One segment that is to be written anew, or written for the first time where its file is gone."""

    base_offset: int
    # What it must reach: everything below was committed.
    end_offset: int
    exists: bool
    epoch_before: tuple[int, int]
    given_up: list[GivenUp] = field(default_factory=list)
    # Batches whose records are kept, but whose large route set was spelled out in a batch that is lost.
    routes_lost: list[tuple[int, int]] = field(default_factory=list)
    head_lost: bool = False


@dataclass(slots=True)
class Plan:
    """What a repair of one partition comes to. Nothing to do: `is_empty`."""

    partition: Partition
    segments: list[SegmentPlan] = field(default_factory=list)
    # Why a new watermark must be written, or None.
    watermark: str | None = None
    # Files that are rebuilt from the log when they are not there.
    removed: list[str] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.segments and self.watermark is None and not self.removed

    @property
    def given_up(self) -> list[GivenUp]:
        """What is lost to readers: offsets below the log start were deleted before."""
        start = self.partition.log_start
        return [
            one._replace(first_offset=max(one.first_offset, start))
            for segment in self.segments
            for one in segment.given_up
            if one.next_offset > start
        ]


# -- looking ----------------------------------------------------------------------------------------------------


def plan(partition: Partition) -> Plan:
    """What must be done so that a broker opens this partition and `verify` finds no problem."""
    made = Plan(partition)
    problems = [finding for finding in verify(partition, Tally()) if finding.level is Level.PROBLEM]
    if not problems:
        return made
    files = {f"{partition.folder}/{EPOCHS}", f"{partition.folder}/{PRODUCERS}"}
    made.removed = sorted({one.path for one in problems if one.path in files or one.path.endswith(DERIVED)})
    committed = committed_end(partition)
    identity = (0, 0)
    for base, end, exists in _needed(partition, committed):
        one = SegmentPlan(base, end, exists, identity)
        if not exists:
            one.given_up.append(GivenUp(base, end, "there is no segment"))
            made.segments.append(one)
            continue
        identity = _look(partition, one)
        if one.given_up or one.routes_lost or one.head_lost:
            made.segments.append(one)
    made.watermark = _watermark_problem(partition, made)
    return made


def committed_end(partition: Partition) -> int:
    """How far the log must be covered: by its watermark, or by what a whole batch says that was written later."""
    checkpoint = partition.checkpoint
    # Without a watermark: a segment is sealed before the next one is begun, so it was complete.
    end = max(partition.bases, default=0) if checkpoint is None else checkpoint.offset
    for base in partition.bases:
        if checkpoint is not None and base < checkpoint.segment_base:
            continue
        file, _ = partition.open(base)
        salt = find_salt(partition, base, file)
        if salt is not None:
            place = Walk(file, salt, SEGMENT_HEAD_SIZE - 1, base)
            end = max(end, *(header.durable_offset for _, header in place.batches_beyond(file.size())), 0)
    return end


def _needed(partition: Partition, committed: int) -> Iterator[tuple[int, int, bool]]:
    """(base, end, exists) of the segments that must cover everything from the log start to the committed end."""
    checkpoint = partition.checkpoint
    bases = dict.fromkeys(partition.bases, True)
    if checkpoint is not None:
        if checkpoint.offset > checkpoint.segment_base:
            bases.setdefault(checkpoint.segment_base, False)
        if committed > partition.log_start and min(bases, default=committed) > partition.log_start:
            bases[partition.log_start] = False
    ordered = sorted(bases)
    for place, base in enumerate(ordered):
        following = ordered[place + 1] if place + 1 < len(ordered) else _NOWHERE
        named = checkpoint is not None and base == checkpoint.segment_base
        if base < committed or named:
            yield base, max(base, min(following, committed)), bases[base]


def _look(partition: Partition, one: SegmentPlan) -> tuple[int, int]:
    """Note what is wrong with a segment; returns the epoch and leader of its last batch."""
    file, _ = partition.open(one.base_offset)
    head = maybe_segment_head(file.read(0, SEGMENT_HEAD_SIZE))
    one.head_lost = head is None
    identity = one.epoch_before
    for item, body in _rewritten(partition, one):
        if isinstance(item, Damage):
            one.given_up.append(GivenUp(item.offset, item.next_offset, item.what))
            continue
        identity = (item.header.leader_epoch, item.header.leader_id)
        if body is not None:
            one.routes_lost.append((item.header.base_offset, item.header.next_offset))
    return identity


def _contents(partition: Partition, one: SegmentPlan, file: File) -> Iterator[Whole | Damage]:
    """What is left of a segment and what is not, up to its committed end, then the whole batches behind that."""
    salt = find_salt(partition, one.base_offset, file)
    if salt is None:
        if one.end_offset > one.base_offset:
            what = "nothing in the segment can be read"
            yield Damage(file.path, 0, file.size(), one.base_offset, one.end_offset, what)
        return
    position, offset, epoch = SEGMENT_HEAD_SIZE, one.base_offset, one.epoch_before[0]
    checkpoint = partition.checkpoint
    stops = [(file.size(), one.end_offset)]
    if checkpoint is not None and checkpoint.segment_base == one.base_offset:
        # The watermark's place stays the border of a batch, whatever is lost around it.
        stops.insert(0, (checkpoint.position, min(checkpoint.offset, one.end_offset)))
    for stop_position, stop_offset in stops:
        for item in walk(
            file,
            salt,
            position=position,
            offset=offset,
            stop_position=stop_position,
            stop_offset=stop_offset,
            epoch=epoch,
        ):
            if isinstance(item, Whole):
                position, offset, epoch = (
                    item.position + item.header.size,
                    item.header.next_offset,
                    item.header.leader_epoch,
                )
            else:
                position, offset = item.end_position, item.next_offset
            yield _if_it_adds_up(item, file.path)
    place = Walk(file, salt, position, offset, epoch)
    while isinstance(found := place.step(file.size(), _NOWHERE), Whole):
        yield _if_it_adds_up(found, file.path)


def _if_it_adds_up(item: Whole | Damage, path: str) -> Whole | Damage:
    """A batch that passes its hash and lies all the same cannot be kept. What a later release wrote is not touched."""
    if isinstance(item, Whole):
        try:
            decode(item.data, item.at, item.header)
        except CorruptLog as error:
            end = item.position + item.header.size
            return Damage(path, item.position, end, item.header.base_offset, item.header.next_offset, error.what)
    return item


def _lost_routes(item: Whole, known: set[RouteReference]) -> list[int]:
    """Entries of a batch's dictionary that lead nowhere; sets that it spells out itself are added to the known."""
    if item.header.flags & FLAG_GAP:
        return []
    sets = decode(item.data, item.at, item.header).route_sets
    lost = [place for place, one in enumerate(sets) if isinstance(one, RouteReference) and one not in known]
    known.update(
        RouteReference(item.header.base_offset, place)
        for place, one in enumerate(sets)
        if not isinstance(one, RouteReference)
    )
    return lost


def _watermark_problem(partition: Partition, made: Plan) -> str | None:
    checkpoint = partition.checkpoint
    if checkpoint is None:
        return "there is none that can be read"
    if checkpoint.segment_base in [one.base_offset for one in made.segments]:
        # What is written anew is made to fit.
        return None
    if not _watermark_fits(partition):
        return f"offset {checkpoint.offset} is not at byte {checkpoint.position}"
    return None


def _watermark_fits(partition: Partition) -> bool:
    checkpoint = partition.checkpoint
    if checkpoint is None:
        return False
    if not partition.storage.exists(partition.path(checkpoint.segment_base)):
        return checkpoint.offset == checkpoint.segment_base
    place = _place_of(partition, checkpoint.segment_base, checkpoint.offset)
    return place == (checkpoint.offset, checkpoint.position)


def _place_of(partition: Partition, base: int, offset: int) -> tuple[int, int]:
    """(offset, position) of the first border of batches at or above an offset, or of the segment's end."""
    file, _ = partition.open(base)
    salt = find_salt(partition, base, file)
    place = Walk(file, salt or 0, SEGMENT_HEAD_SIZE, base)
    while place.offset < offset and isinstance(place.step(file.size(), _NOWHERE), Whole):
        continue
    return place.offset, place.position


# -- doing ------------------------------------------------------------------------------------------------------


def carry_out(env: Env, made: Plan) -> None:
    """Do what the plan says. A crash on the way leaves a directory that can be repaired again."""
    if made.is_empty:
        return
    storage, partition = env.storage, made.partition
    history = _history(partition, made)
    for one in made.segments:
        _write_anew(env, partition, one, history)
    copies = [_keep_copy(storage, partition.path(one.base_offset)) for one in made.segments if one.exists]
    copies += [_keep_copy(storage, path) for path in made.removed if not path.endswith(DERIVED)]
    storage.sync_dir(partition.folder)
    _write_down(env, made, copies)
    for one in made.segments:
        stem = stem_of(partition.folder, one.base_offset)
        storage.rename(stem + _TEMPORARY, stem + ".log")
        _remove_all(storage, [stem + suffix for suffix in DERIVED])
    _remove_all(storage, made.removed)
    storage.sync_dir(partition.folder)
    if not _watermark_fits(partition):
        _write_watermark(partition)


def _history(partition: Partition, made: Plan) -> EpochHistory:
    path = f"{partition.folder}/{EPOCHS}"
    if path in made.removed or not partition.storage.exists(path):
        return EpochHistory()
    return EpochHistory.decode(partition.storage.read_file(path))


def _write_anew(env: Env, partition: Partition, one: SegmentPlan, history: EpochHistory) -> None:
    """The segment as it will be, synced, under a name that does not count yet."""
    path = stem_of(partition.folder, one.base_offset) + _TEMPORARY
    if env.storage.exists(path):
        env.storage.remove(path)
    padding = _padding(partition, one)
    file = env.storage.open(path, create=True)
    writer = _Writer(file, SegmentHead(env.ids.salt(), one.base_offset, partition.spec.id.bytes, partition.number))
    identity = one.epoch_before
    for item, body in _rewritten(partition, one):
        if isinstance(item, Damage):
            writer.gap(item.offset, item.next_offset, _stint(identity, history, item.offset), padding)
            padding = 0
            continue
        identity = (item.header.leader_epoch, item.header.leader_id)
        if body is None:
            writer.copy(item)
        else:
            writer.write(body, item.header.base_offset, identity, item.header.durable_offset)
    file.sync()


def _rewritten(partition: Partition, one: SegmentPlan) -> Iterator[tuple[Whole | Damage, Body | None]]:
    """The segment's batches; with a body where a batch cannot stay as it is."""
    if not one.exists:
        path = partition.path(one.base_offset)
        yield Damage(path, SEGMENT_HEAD_SIZE, SEGMENT_HEAD_SIZE, one.base_offset, one.end_offset, ""), None
        return
    known: set[RouteReference] = set()
    for item in _contents(partition, one, partition.open(one.base_offset)[0]):
        lost = [] if isinstance(item, Damage) else _lost_routes(item, known)
        if isinstance(item, Damage) or not lost:
            yield item, None
            continue
        batch = decode(item.data, item.at, item.header)
        for place in lost:
            batch.route_sets[place] = ()
        # Without its summary it is never larger than it was.
        yield item, encode(batch, compress="lz4" if item.header.codec else "none")._replace(summary=b"")


def _padding(partition: Partition, one: SegmentPlan) -> int:
    """By how much the batches below the watermark shrink: one gap takes it up, and the watermark's byte stays."""
    checkpoint = partition.checkpoint
    if checkpoint is None or checkpoint.segment_base != one.base_offset:
        return 0
    position = SEGMENT_HEAD_SIZE
    for item, body in _rewritten(partition, one):
        following = item.next_offset if isinstance(item, Damage) else item.header.next_offset
        if following > checkpoint.offset:
            break
        if isinstance(item, Damage):
            position += HEADER_SIZE * -(-(item.next_offset - item.offset) // _SPAN_MAX)
        else:
            position += item.header.size if body is None else body.size
    return max(0, checkpoint.position - position)


def _stint(identity: tuple[int, int], history: EpochHistory, offset: int) -> tuple[int, int]:
    """Whose offsets these were: the batch's before, or what the history says where there is none before."""
    if identity[0]:
        return identity
    noted = history.epoch_at(offset)
    return (noted.epoch, noted.leader_id) if noted.epoch else (1, 0)


class _Writer:
    """Puts batches one behind the other into a new segment file."""

    def __init__(self, file: File, head: SegmentHead) -> None:
        self._file = file
        self._salt = head.salt
        self._position = file.write(0, [encode_segment_head(head)])

    def copy(self, item: Whole) -> None:
        data = item.data[item.at : item.at + item.header.size]
        self._position += self._file.write(self._position, [restamp(data, self._salt)])

    def gap(self, first_offset: int, next_offset: int, stint: tuple[int, int], padding: int) -> None:
        while first_offset < next_offset:
            upto = min(next_offset, first_offset + _SPAN_MAX)
            body = encode(gap_batch(first_offset, upto, stint[0], Gap.REPAIRED))
            body = body._replace(blob_size=padding, blobs=[bytes(padding)])
            self.write(body, first_offset, stint, first_offset)
            first_offset, padding = upto, 0

    def write(self, body: Body, base_offset: int, stint: tuple[int, int], durable_offset: int) -> None:
        buffers = stamp(
            body,
            salt=self._salt,
            base_offset=base_offset,
            leader_epoch=stint[0],
            leader_id=stint[1],
            durable_offset=durable_offset,
            first_of_segment=self._position == SEGMENT_HEAD_SIZE,
        )
        self._position += self._file.write(self._position, buffers)


def _keep_copy(storage: Storage, path: str) -> str:
    """A synced copy under a name that nothing else uses; the original stays until it is replaced."""
    copy, number = path + DAMAGED, 1
    while storage.exists(copy):
        number += 1
        copy = f"{path}{DAMAGED}.{number}"
    source = storage.open(path)
    target = storage.open(copy, create=True)
    position = 0
    while data := source.read(position, _COPY_BYTES):
        position += target.write(position, [data])
    target.sync()
    return copy


def _write_down(env: Env, made: Plan, copies: list[str]) -> None:
    """One more line in the file `repairs`: what is being given up, and where the damaged bytes are."""
    path = f"{made.partition.folder}/{REPAIRS}"
    earlier = env.storage.read_file(path) if env.storage.exists(path) else b""
    line = {
        "time_us": env.clock.wall_us(),
        "given_up": [one._asdict() for one in made.given_up],
        "routes_lost": [pair for segment in made.segments for pair in segment.routes_lost],
        "written_anew": [segment.base_offset for segment in made.segments],
        "watermark": made.watermark,
        "removed": [name.rpartition("/")[2] for name in made.removed],
        "copies": [name.rpartition("/")[2] for name in copies],
    }
    env.storage.replace_file(path, earlier + msgspec.json.encode(line) + b"\n")


def _write_watermark(partition: Partition) -> None:
    storage = partition.storage
    path = f"{partition.folder}/{CHECKPOINT}"
    if partition.checkpoint is None:
        # Whatever is there is no checkpoint.
        storage.replace_file(path, b"")
    CheckpointFile(storage, path).write(_new_checkpoint(partition), sync=True)
    storage.sync_dir(partition.folder)


def _new_checkpoint(partition: Partition) -> Checkpoint:
    """The old one at its right place; or, where there was none, the end of what is whole."""
    old = partition.checkpoint
    if old is not None:
        offset, position = _place_of(partition, old.segment_base, old.offset)
        return old._replace(offset=offset, position=position, ceiling=max(old.ceiling, offset))
    bases = sorted(int(name[:-4]) for name in partition.storage.list(partition.folder) if name.endswith(".log"))
    if not bases:
        return Checkpoint(0, 0, 0, SEGMENT_HEAD_SIZE, 0, 1, 0)
    offset, position = _place_of(partition, bases[-1], _NOWHERE)
    epoch, leader = _last_identity(partition, bases)
    ceiling = offset + partition.spec.config.offsets_reserved
    return Checkpoint(bases[0], bases[-1], offset, position, ceiling, epoch, leader)


def _last_identity(partition: Partition, bases: list[int]) -> tuple[int, int]:
    for base in reversed(bases):
        file, _ = partition.open(base)
        place = Walk(file, find_salt(partition, base, file) or 0, SEGMENT_HEAD_SIZE, base)
        identity = None
        while isinstance(found := place.step(file.size(), _NOWHERE), Whole):
            identity = (found.header.leader_epoch, found.header.leader_id)
        if identity is not None:
            return identity
    return 1, 0


def _remove_all(storage: Storage, paths: list[str]) -> None:
    for path in paths:
        if storage.exists(path):
            storage.remove(path)
