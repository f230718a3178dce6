"""A damaged partition is made whole again: what is whole stays, what is lost is named, and the broker opens it."""

import json
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.config import LogConfig
from headrace.core_log.epochs import EpochHistory, EpochStart
from headrace.core_log.errors import CorruptLog, UnknownFormat
from headrace.core_log.format import HASHED_FROM, HEADER_SIZE, SEGMENT_HEAD_SIZE, BatchHeader
from headrace.core_log.inspection import Finding, Level, Partition, Tally, partition_of, read_journal, streams, verify
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Gap, Record, RecordBatch
from headrace.core_log.repair import GivenUp, Plan, carry_out, plan
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.crash import TracingStorage, crash_states
from headrace.core_log.storage.memory import MemoryStorage

from .directories import SMALL, add_stream, append, commit, env_on, fill, only_log, open_directory
from .test_format import forged


def look(storage: Storage) -> Partition:
    (found,) = streams(storage)
    assert found.spec is not None
    return partition_of(storage, found.spec, 0, read_journal(storage))


def problems(storage: Storage) -> list[Finding]:
    return [finding for finding in verify(look(storage), Tally()) if finding.level is Level.PROBLEM]


def repair(storage: Storage) -> Plan:
    made = plan(look(storage))
    carry_out(env_on(storage, seed=99), made)
    return made


def batches(log: PartitionLog) -> list[RecordBatch]:
    found: list[RecordBatch] = []
    offset = int(log.log_start)
    while offset < log.high_watermark:
        found += [run.batch for run in log.read(offset)]
        offset = int(found[-1].next_offset)
    return found


def records(log: PartitionLog) -> dict[int, Record]:
    found = [record for batch in batches(log) for record in batch.records()]
    return {int(record.offset): record for record in found if record.offset >= log.log_start}


def offsets(given_up: list[GivenUp]) -> set[int]:
    return {offset for one in given_up for offset in range(one.first_offset, one.next_offset)}


class Case:
    """A log of several segments, stopped in good order, and everything that is known of it before it is harmed."""

    def __init__(self, config: LogConfig = SMALL, rounds: int = 3, log_start: int = 0) -> None:
        self.storage = MemoryStorage()
        directory = open_directory(self.storage)
        (self.log,) = add_stream(directory, "one", config).partitions
        for _ in range(rounds):
            fill(self.log)
        if log_start:
            self.log.delete_before(log_start)
            commit(self.log)
        directory.close_now()
        self.folder = self.log.folder
        self.segments = self.log.segments
        self.paths = [one.path for one in self.segments]
        self.before = records(self.log)
        self.places: list[list[tuple[int, BatchHeader]]] = [list(one.headers()) for one in self.segments]
        self.contents = {path: self.storage.read_file(path) for path in self.paths}

    def batch(self, segment: int, batch: int) -> tuple[str, int, set[int]]:
        """Path, position and offsets of a batch."""
        position, header = self.places[segment][batch]
        return self.paths[segment], position, set(range(header.base_offset, header.next_offset))

    def harm(self, segment: int, batch: int, byte: int = HEADER_SIZE + 3) -> set[int]:
        """Flip a bit of a batch; returns its offsets."""
        path, position, lost = self.batch(segment, batch)
        self.storage.flip_bit(path, position + byte)
        return lost

    def range_of(self, segment: int) -> set[int]:
        return set(range(self.segments[segment].base_offset, self.segments[segment].end_offset))

    def intact(self) -> set[int]:
        """Offsets of batches whose bytes are where they were."""
        return {
            offset
            for path, places in zip(self.paths, self.places, strict=True)
            for position, header in places
            for offset in range(header.base_offset, header.next_offset)
            if self.storage.exists(path)
            and self.storage.read_file(path)[position : position + header.size]
            == self.contents[path][position : position + header.size]
        }


def assert_mended(case: Case, made: Plan, storage: MemoryStorage | None = None, *, clean: bool = True) -> PartitionLog:
    """What was not given up is there as it was, the rest is a typed gap, nothing is found wrong, and it can be used."""
    storage = case.storage if storage is None else storage
    assert problems(storage) == []
    log = only_log(open_directory(storage, clean=clean, seed=50))
    lost = offsets(made.given_up)
    rerouted = {offset for one in made.segments for pair in one.routes_lost for offset in range(*pair)}
    after = records(log)
    assert set(case.before) - lost == set(after) & set(case.before)
    for offset in after:
        old, new = case.before[offset], after[offset]
        assert new == old or (offset in rerouted and (new.key, new.value, new.tags) == (old.key, old.value, old.tags))
    gaps = [batch for batch in batches(log) if batch.gap is Gap.REPAIRED]
    empty = {offset for batch in gaps for offset in range(batch.base_offset, batch.next_offset)}
    assert empty & set(case.before) == lost & set(case.before)
    end = log.end
    assert end > max(case.before)
    append(log, 1)
    commit(log)
    assert records(log)[int(end)].value.startswith(b"value")
    assert problems(storage) == []
    return log


# -- one kind of damage after the other -------------------------------------------------------------------------


def test_whole_partition_needs_nothing_and_nothing_is_done() -> None:
    case = Case()
    names = case.storage.list(case.folder)
    assert repair(case.storage).is_empty
    assert case.storage.list(case.folder) == names


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_bad_batch_in_a_segment_becomes_a_gap_and_the_damaged_file_is_kept(segment: int) -> None:
    case = Case()
    lost = case.harm(segment, 1)
    damaged = case.storage.read_file(case.paths[segment])
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert case.storage.read_file(f"{case.paths[segment]}.damaged") == damaged
    assert_mended(case, made)


def test_first_and_last_batch_of_a_segment_become_gaps() -> None:
    case = Case()
    lost = case.harm(1, 0) | case.harm(1, -1)
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert_mended(case, made)


@pytest.mark.parametrize("segment", [0, -1])
def test_bad_head_costs_nothing_because_the_batches_tell_the_salt(segment: int) -> None:
    case = Case()
    case.storage.flip_bit(case.paths[segment], 9)
    made = repair(case.storage)
    assert made.given_up == []
    assert [one.base_offset for one in made.segments] == [case.segments[segment].base_offset]
    assert_mended(case, made)


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_bad_head_and_first_batch_cost_the_first_batch(segment: int) -> None:
    case = Case()
    path, position, lost = case.batch(segment, 0)
    case.storage.open(path).write(0, [bytes(position + 100)])
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert_mended(case, made)


def test_old_batches_in_a_recycled_file_with_a_bad_head_do_not_come_back() -> None:
    case = Case()
    # All of the segment's own batches are gone; what the file held before shines through.
    old = case.contents[case.paths[0]][SEGMENT_HEAD_SIZE:]
    case.storage.replace_file(case.paths[1], bytes(SEGMENT_HEAD_SIZE) + old)
    made = repair(case.storage)
    assert offsets(made.given_up) == case.range_of(1)
    assert_mended(case, made)


@pytest.mark.parametrize("segment", [0, 1, -1])
def test_missing_segment_becomes_a_gap(segment: int) -> None:
    case = Case()
    case.storage.remove(case.paths[segment])
    made = repair(case.storage)
    assert offsets(made.given_up) == case.range_of(segment)
    assert_mended(case, made)


def test_all_segments_missing_are_gaps() -> None:
    case = Case()
    for path in case.paths:
        case.storage.remove(path)
    made = repair(case.storage)
    assert offsets(made.given_up) == set(case.before)
    assert_mended(case, made)


@pytest.mark.parametrize("segment", [0, 1, -1])
@pytest.mark.parametrize("cut", [1, 130, 400, 100_000])
def test_segment_that_is_too_short_ends_with_a_gap(segment: int, cut: int) -> None:
    case = Case()
    position, header = case.places[segment][-1]
    case.storage.open(case.paths[segment]).truncate(max(position + header.size - cut, 0))
    made = repair(case.storage)
    assert max(offsets(made.given_up)) == case.segments[segment].end_offset - 1
    assert_mended(case, made)


@pytest.mark.parametrize("content", [None, b"", b"nonsense" * 128])
def test_missing_watermark_is_written_from_what_is_whole(content: bytes | None) -> None:
    case = Case()
    path = f"{case.folder}/watermark"
    if content is None:
        case.storage.remove(path)
    else:
        case.storage.replace_file(path, content)
    made = repair(case.storage)
    assert (made.segments, made.given_up) == ([], [])
    assert made.watermark is not None
    after = assert_mended(case, made)
    # Nobody knows how far offsets were shown, so the log goes on well above.
    assert min(set(records(after)) - set(case.before)) >= max(case.before) + SMALL.offsets_reserved


def test_missing_watermark_and_a_bad_batch_are_mended_together() -> None:
    case = Case()
    lost = case.harm(0, 1)
    case.storage.remove(f"{case.folder}/watermark")
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert_mended(case, made)


@pytest.mark.parametrize("compression", ["none", "lz4"])
def test_lost_definition_of_a_route_set_costs_the_others_their_route_and_not_their_records(compression: str) -> None:
    case = Case(LogConfig(compression=compression), rounds=1)
    assert case.harm(0, 2) == {7}
    made = repair(case.storage)
    assert offsets(made.given_up) == {7}
    assert [one.routes_lost for one in made.segments] == [[(8, 10)]]
    after = assert_mended(case, made)
    assert records(after)[8].route_set == ()


def test_damage_above_the_watermark_that_a_later_batch_knows_to_be_committed_becomes_a_gap() -> None:
    case = Case(LogConfig(), rounds=1)
    path = f"{case.folder}/watermark"
    old = case.storage.read_file(path)
    log = only_log(open_directory(case.storage, clean=True))
    for _ in range(3):
        append(log, 3)
        commit(log)
    case.before = records(log)
    case.places = [list(log.segments[0].headers())]
    # The newest watermarks never reached the disk.
    case.storage.replace_file(path, old)
    lost = case.harm(0, -3)
    with pytest.raises(CorruptLog):
        open_directory(case.storage.after_power_loss(lambda _: True))
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert_mended(case, made, clean=False)


def test_torn_tail_is_left_to_the_next_start() -> None:
    case = Case(LogConfig(), rounds=1)
    log = only_log(open_directory(case.storage, clean=True))
    append(log, 3)
    log.seal()
    case.storage.open(log.segments[0].path).truncate(log.segments[0].end_position - 1)
    assert plan(look(case.storage)).is_empty


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".keys"])
def test_derived_file_that_lies_is_removed_and_no_record_is_lost(suffix: str) -> None:
    case = Case()
    path = case.segments[0].stem + suffix
    case.storage.replace_file(path, b"lies")
    made = repair(case.storage)
    assert (path in made.removed, made.given_up, made.segments) == (True, [], [])
    assert not case.storage.exists(path)
    assert_mended(case, made)


@pytest.mark.parametrize(
    ("name", "content"),
    [("epochs", b"x"), ("epochs", EpochHistory([EpochStart(9, 9, 0)]).encode()), ("producers", b"bad")],
)
def test_epochs_and_producers_that_cannot_be_believed_are_set_aside(name: str, content: bytes) -> None:
    case = Case()
    case.storage.replace_file(f"{case.folder}/{name}", content)
    made = repair(case.storage)
    assert (made.given_up, made.segments) == ([], [])
    assert case.storage.read_file(f"{case.folder}/{name}.damaged") == content
    log = assert_mended(case, made)
    assert log.epochs.entries[0].epoch == 1


def forge(case: Case, place: int, value: int) -> set[int]:
    """Let the first batch lie in one byte, under a hash that fits."""
    path, position, touched = case.batch(0, 0)
    data = bytearray(case.contents[path][position : case.places[0][1][0]])
    data[HASHED_FROM + place] = value
    case.storage.open(path).write(position, [forged(data)])
    return touched


def test_batch_that_lies_under_a_right_hash_is_given_up() -> None:
    case = Case()
    lost = forge(case, 4, 2)
    made = repair(case.storage)
    assert offsets(made.given_up) == lost
    assert_mended(case, made)


def test_batch_of_a_later_release_is_not_touched() -> None:
    case = Case()
    forge(case, 0, 3)
    with pytest.raises(UnknownFormat):
        plan(look(case.storage))


def test_offsets_below_the_log_start_are_not_counted_as_given_up() -> None:
    case = Case(LogConfig(), rounds=1, log_start=4)
    case.harm(0, 0)
    case.harm(0, 1)
    made = repair(case.storage)
    assert offsets(made.given_up) == {4, 5, 6}
    assert_mended(case, made)


# -- what is written down ---------------------------------------------------------------------------------------


def contents(storage: Storage, folder: str) -> dict[str, bytes]:
    return {name: storage.read_file(f"{folder}/{name}") for name in storage.list(folder)}


def test_plan_changes_nothing() -> None:
    case = Case()
    lost = case.harm(1, 0)
    before = contents(case.storage, case.folder)
    assert offsets(plan(look(case.storage)).given_up) == lost
    assert contents(case.storage, case.folder) == before


def test_every_repair_is_a_line_of_the_repairs_file_and_every_copy_is_kept() -> None:
    case = Case()
    first = case.harm(0, 0)
    repair(case.storage)
    # The file was written anew, so the second batch lies somewhere else now.
    log = only_log(open_directory(case.storage, clean=True, seed=3))
    case.places[0] = list(log.segments[0].headers())
    second = case.harm(0, 1)
    repair(case.storage)
    lines = [json.loads(line) for line in case.storage.read_file(f"{case.folder}/repairs").splitlines()]
    name = case.paths[0].rpartition("/")[2]
    assert [line["copies"] for line in lines] == [[f"{name}.damaged"], [f"{name}.damaged.2"]]
    assert [line["written_anew"] for line in lines] == [[0], [0]]
    for line, lost in zip(lines, (first, second), strict=True):
        (given_up,) = line["given_up"]
        assert set(range(given_up["first_offset"], given_up["next_offset"])) == lost
        assert given_up["why"] == "a batch fails its hash"


# -- anything at all --------------------------------------------------------------------------------------------

Harm = Callable[[MemoryStorage, str, Random], None]


def flip_some_bits(storage: MemoryStorage, path: str, random: Random) -> None:
    size = storage.open(path).size()
    for _ in range(random.randrange(1, 6) if size else 0):
        storage.flip_bit(path, random.randrange(min(size, 2500)), random.randrange(8))


def zero_a_stretch(storage: MemoryStorage, path: str, random: Random) -> None:
    storage.open(path).write(random.randrange(2000), [bytes(random.randrange(1, 1500))])


def cut_short(storage: MemoryStorage, path: str, random: Random) -> None:
    storage.open(path).truncate(random.randrange(2000))


def take_away(storage: MemoryStorage, path: str, random: Random) -> None:
    storage.remove(path)


def move_bytes(storage: MemoryStorage, path: str, random: Random) -> None:
    data = storage.read_file(path)
    at = random.randrange(1500)
    storage.open(path).write(at, [data[at + random.randrange(1, 300) :][:900]])


HARMS: list[Harm] = [flip_some_bits, zero_a_stretch, cut_short, take_away, move_bytes]


@settings(max_examples=150)
@given(st.integers(0, 2**32), st.booleans())
def test_whatever_happens_to_segments_is_mended_and_only_what_is_damaged_is_lost(seed: int, clean: bool) -> None:
    random = Random(seed)
    case = Case(rounds=2)
    for _ in range(random.randrange(1, 4)):
        path = random.choice(case.paths)
        if case.storage.exists(path):
            random.choice(HARMS)(case.storage, path, random)
    intact = case.intact()
    made = repair(case.storage)
    # Where the head is gone and nothing proves whose batches these are, a segment is given up whole.
    unproven = [one for one in made.given_up if "nothing in the segment" in one.why]
    assert offsets(made.given_up) & intact <= offsets(unproven)
    assert_mended(case, made, clean=clean)


@pytest.mark.parametrize("watermark", [True, False])
def test_repair_can_lose_power_at_any_moment_and_be_done_again(watermark: bool) -> None:
    case = Case(rounds=2)
    lost = case.harm(0, 0) | case.harm(-1, 1)
    case.storage.remove(case.paths[1])
    lost |= case.range_of(1)
    if not watermark:
        case.storage.remove(f"{case.folder}/watermark")
    for folder in ("", "streams", case.folder.rpartition("/")[0], case.folder):
        case.storage.sync_dir(folder)
    traced = TracingStorage(case.storage)
    repair(traced)
    count = 0
    for state in crash_states(traced, limit_per_prefix=12):
        made = repair(state.storage)
        assert offsets(made.given_up) <= lost
        assert problems(state.storage) == []
        log = only_log(open_directory(state.storage, clean=True, seed=50))
        after = records(log)
        assert set(after) == set(case.before) - lost, (state.prefix, state.lost)
        copies = [name for name in state.storage.list(case.folder) if ".damaged" in name]
        assert copies
        count += 1
    assert count > 100
