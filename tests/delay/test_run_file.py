"""Rows on the disk: by due time for the wheel, by id for people; what is damaged is noticed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay import run_file
from headrace.delay.engine import by_source
from headrace.delay.marks import OFFSET_BITS
from headrace.delay.rows import ROW, Rows
from headrace.delay.run_file import RunFile

entries = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 3), st.integers(0, 2**64 - 1)), min_size=1, max_size=300
)


def rows_of(parts: list[tuple[int, int, int]]) -> Rows:
    rows = np.zeros(len(parts), dtype=ROW)
    for number, (due, source, id) in enumerate(parts):
        rows[number] = (due, source << OFFSET_BITS | number, number, id, 7)
    return by_source(rows)


def written(rows: Rows) -> tuple[MemoryStorage, RunFile]:
    storage = MemoryStorage()
    storage.make_dir(run_file.FOLDER)
    storage.replace_file(run_file.path_of(1), run_file.encode(rows))
    return storage, RunFile(storage, 1)


@given(entries)
def test_rows_come_back_by_source_due_time_and_number(parts: list[tuple[int, int, int]]) -> None:
    rows = rows_of(parts)
    _storage, run = written(rows)
    assert run.count == len(parts)
    assert run.all_rows(sorted(run.slices)).tolist() == rows.tolist()


@given(entries, st.integers(0, 51), st.integers(0, 300))
def test_first_row_from_a_due_time_on_is_found(parts: list[tuple[int, int, int]], due: int, number: int) -> None:
    _storage, run = written(rows_of(parts))
    for source, (first, end, _hash) in run.slices.items():
        found = run.first_from(source, due, number)
        before = run.rows(first, found - first)[["due", "number"]].tolist()
        after = run.rows(found, end - found)[["due", "number"]].tolist()
        assert all(tuple(one) < (due, number) for one in before)
        assert all(tuple(one) >= (due, number) for one in after)


@given(entries)
def test_every_id_is_found_and_no_other(parts: list[tuple[int, int, int]]) -> None:
    rows = rows_of(parts)
    _storage, run = written(rows)
    for one in rows:
        assert int(one["place"]) in run.find([int(one["id"])])
    known = {id for _due, _source, id in parts}
    assert run.find([next(one for one in range(2**63, 2**64) if one not in known)]) == []


def test_ids_are_found_though_their_hashes_are_not_spread_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_file, "_GUESS_ROWS", 4)
    rows = rows_of([(1, 1, 1000 + number // 3) for number in range(90)])
    _storage, run = written(rows)
    for id in range(1000, 1030):
        assert len(run.find([id])) == 3


def test_damage_is_noticed() -> None:
    storage, _run = written(rows_of([(5, 1, 9), (6, 2, 8)]))
    size = storage.open(run_file.path_of(1)).size()
    storage.flip_bit(run_file.path_of(1), 3)
    with pytest.raises(CorruptLog, match="not a run file"):
        RunFile(storage, 1)
    storage.flip_bit(run_file.path_of(1), 3)
    storage.flip_bit(run_file.path_of(1), size - 2 * 12 - 40)
    again = RunFile(storage, 1)
    with pytest.raises(CorruptLog, match="hash"):
        again.check(1)
    again.check(2)
    with pytest.raises(CorruptLog, match="gone"):
        RunFile(storage, 2)
    storage.open(run_file.path_of(1)).truncate(size - 1)
    with pytest.raises(CorruptLog, match="size"):
        RunFile(storage, 1)
    assert run_file.number_of("0000000001.run") == 1 and run_file.number_of("x.tmp") is None
