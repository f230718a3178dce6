"""The sparse index leads to the right batch by offset and by time, and is not believed when it does not fit."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.index import NEVER, SparseIndex
from headrace.core_log.storage.memory import MemoryStorage

START = 64
# (offsets covered, bytes, newest timestamp or None for a gap)
batches = st.lists(
    st.tuples(st.integers(1, 9), st.integers(128, 900), st.none() | st.integers(-50, 50)), min_size=1, max_size=40
)
intervals = st.sampled_from([1, 500, 2000])
Batch = tuple[int, int, int | None]
SALT = 77


def built(parts: list[Batch], interval: int, base: int = 10) -> tuple[SparseIndex, list[tuple[int, int, int | None]]]:
    """The index, and (offset, position, newest) of every batch."""
    index = SparseIndex(base, START, interval)
    all_of_them = []
    for span, size, newest in parts:
        all_of_them.append((index.end_offset, index.end_position, newest))
        index.add(index.end_offset + span, size, newest)
    return index, all_of_them


@given(batches, intervals)
def test_every_offset_is_found_at_or_behind_a_batch_near_by(parts: list[Batch], interval: int) -> None:
    index, known = built(parts, interval)
    starts = {(offset, position) for offset, position, _ in known}
    for offset in range(10, index.end_offset):
        entry = index.position_before(offset)
        assert entry in starts
        assert entry is not None and entry[0] <= offset
        holder = max(position for start, position, _ in known if start <= offset)
        assert holder - entry[1] <= interval + 900
    assert index.position_before(9) is None


@given(batches, intervals, st.integers(-60, 60))
def test_search_by_time_never_begins_behind_the_first_record_that_is_new_enough(
    parts: list[Batch], interval: int, wanted: int
) -> None:
    index, known = built(parts, interval)
    first = next((offset for offset, _, newest in known if newest is not None and newest >= wanted), None)
    begin = index.offset_before_time(wanted)
    if first is not None:
        assert begin is None or begin <= first
    assert index.max_timestamp == max((newest for _, _, newest in known if newest is not None), default=NEVER)


@given(batches, intervals)
def test_saved_index_is_loaded_as_it_was(parts: list[Batch], interval: int) -> None:
    storage = MemoryStorage()
    index, _ = built(parts, interval)
    index.save(storage, "00", SALT)
    loaded = SparseIndex.maybe_load(storage, "00", SALT, interval, index.end_offset, START)
    assert loaded is not None
    for name in ("offsets", "positions", "times", "end_position", "max_timestamp"):
        assert getattr(loaded, name) == getattr(index, name), name
    # A shorter one saved over it leaves nothing of the longer.
    shorter, _ = built(parts[:1], interval)
    shorter.save(storage, "00", SALT)
    assert SparseIndex.maybe_load(storage, "00", SALT, interval, shorter.end_offset, START) is not None


@given(batches, intervals, st.data())
def test_after_a_cut_nothing_points_behind_it(parts: list[Batch], interval: int, draw: st.DataObject) -> None:
    index, known = built(parts, interval)
    offset, position, _ = draw.draw(st.sampled_from(known))
    index.cut_from(offset, position)
    assert (index.end_offset, index.end_position) == (offset, position)
    assert all(entry < offset for entry in index.offsets)
    assert all(entry < position for entry in index.positions)
    index.add(offset + 1, 200, 99)
    entry = index.position_before(offset)
    assert entry is not None and entry[0] <= offset and entry[1] <= position


def saved() -> tuple[MemoryStorage, SparseIndex]:
    storage = MemoryStorage()
    index, _ = built([(3, 600, 5), (2, 600, 9), (4, 600, 7)], 500)
    index.save(storage, "00", SALT)
    return storage, index


def test_index_of_another_segment_or_of_another_end_is_not_believed() -> None:
    storage, index = saved()
    assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is not None
    assert SparseIndex.maybe_load(storage, "00", SALT + 1, 500, index.end_offset, START) is None
    assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset - 1, START) is None
    assert SparseIndex.maybe_load(storage, "01", SALT, 500, index.end_offset, START) is None


def test_files_of_two_different_moments_are_not_believed() -> None:
    storage, index = saved()
    old = storage.read_file("00.timeindex")
    index.add(index.end_offset, 100, 1000)
    index.save(storage, "00", SALT)
    storage.replace_file("00.timeindex", old)
    assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is None


def test_any_flipped_bit_truncation_or_missing_half_is_noticed() -> None:
    storage, index = saved()
    for name in ("00.index", "00.timeindex"):
        data = storage.read_file(name)
        for position in range(len(data)):
            storage.flip_bit(name, position, position % 8)
            assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is None, position
            storage.flip_bit(name, position, position % 8)
        for length in range(len(data)):
            storage.replace_file(name, data[:length])
            assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is None, length
        storage.remove(name)
        assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is None
        storage.replace_file(name, data)
    assert SparseIndex.maybe_load(storage, "00", SALT, 500, index.end_offset, START) is not None
