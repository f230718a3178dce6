"""Crash states: every prefix of a trace, every allowed loss, and a checker that finds planted mistakes by them."""

from collections import Counter
from pathlib import Path

import pytest

from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.crash import CrashState, TracingStorage, crash_states
from headrace.core_log.storage.disk import DiskStorage
from headrace.core_log.storage.memory import MemoryStorage, Planted


def contents(storage: Storage) -> dict[str, bytes]:
    return {name: storage.read_file(name) for name in storage.list("")}


def test_empty_trace_has_the_one_state_it_began_with() -> None:
    start = MemoryStorage()
    start.replace_file("a", b"before")
    (state,) = crash_states(TracingStorage(start))
    assert state.prefix == 0
    assert state.lost == ()
    assert contents(state.storage) == {"a": b"before"}


def test_every_prefix_yields_its_allowed_states() -> None:
    traced = TracingStorage(MemoryStorage())
    file = traced.open("a", create=True)
    file.write(0, [b"x", b"y"])
    file.sync()
    traced.sync_dir("")
    found: dict[int, list[dict[str, bytes]]] = {}
    for state in crash_states(traced):
        found.setdefault(state.prefix, []).append(contents(state.storage))
    assert found[0] == [{}]
    assert found[1] == [{"a": b""}, {}]
    assert {frozenset(files.items()) for files in found[2]} == {
        frozenset(),
        frozenset({("a", b"")}),
        frozenset({("a", b"x")}),
        frozenset({("a", b"\0y")}),
        frozenset({("a", b"\0\0")}),
        frozenset({("a", b"xy")}),
    }
    assert found[3] == [{"a": b"xy"}, {}]
    assert found[4] == [{"a": b"xy"}]


def test_trace_of_real_files_gives_the_same_states_as_one_of_memory(tmp_path: Path) -> None:
    def run(inner: Storage) -> list[tuple[int, tuple[str, ...], dict[str, bytes]]]:
        traced = TracingStorage(inner)
        journal(traced, ack_before_sync=False)
        return [(state.prefix, state.lost, contents(state.storage)) for state in crash_states(traced)]

    assert run(DiskStorage(tmp_path)) == run(MemoryStorage())


def test_states_are_capped_per_prefix_and_the_same_every_time() -> None:
    traced = TracingStorage(MemoryStorage())
    file = traced.open("a", create=True)
    for number in range(30):
        file.write(number * 600, [b"x" * 600])
    counted = Counter(state.prefix for state in crash_states(traced, limit_per_prefix=20))
    assert len(counted) == 32
    assert max(counted.values()) == counted[31] == 20
    one, other = ([(state.prefix, state.lost) for state in crash_states(traced, limit_per_prefix=20)] for _ in range(2))
    assert one == other
    assert len(set(one)) == len(one)


def test_no_family_of_losses_starves_under_the_cap() -> None:
    traced = TracingStorage(MemoryStorage())
    files = [traced.open(name, create=True) for name in "abcdefgh"]
    traced.sync_dir("")
    for file in files:
        file.write(0, [b"x" * 2000])
    last = [state.lost for state in crash_states(traced) if state.prefix == len(traced.trace)]
    assert len(last) == 64
    whole = {"".join(line[6] for line in lost) for lost in last if not any("torn" in line for line in lost)}
    assert {"", "abcdefgh"} <= whole
    assert set("abcdefgh") <= whole  # one lost
    assert {"abcdefg", "abcdefh", "bcdefgh"} <= whole  # one kept
    assert {"gh", "fgh", "cdefgh"} <= whole  # the newest lost
    assert {"fh", "abcdef"} <= whole  # two lost, two kept
    torn = {line for lost in last for line in lost if "torn" in line}
    assert len({line[6] for line in torn}) > 1
    assert {line for line in torn if line.startswith("write h")} == {
        f"write h 0+2000 torn to {ranges}"
        for ranges in (
            ((0, 1),),
            ((0, 512),),
            ((0, 1000),),
            ((0, 1536),),
            ((0, 1999),),
            ((512, 2000),),
            ((2000, 2000),),
        )
    }


def test_names_kept_over_lost_contents_are_among_the_first_states() -> None:
    traced = TracingStorage(MemoryStorage())
    for name in "abcdefgh":
        traced.open(name, create=True).write(0, [b"x" * 2000])
    states = [state for state in crash_states(traced, limit_per_prefix=4) if state.prefix == len(traced.trace)]
    assert dict.fromkeys("abcdefgh", b"") in [contents(state.storage) for state in states]


def test_mark_is_known_from_its_place_in_the_trace_on() -> None:
    traced = TracingStorage(MemoryStorage())
    traced.make_dir("folder")
    traced.mark("acked", 1)
    traced.mark("seen", "other")
    traced.mark("acked", 2)
    known = {state.prefix: state.marked("acked") for state in crash_states(traced)}
    assert known == {0: [], 1: [], 2: [1], 3: [1], 4: [1, 2]}


def test_states_leave_the_traced_storage_alone() -> None:
    inner = MemoryStorage()
    traced = TracingStorage(inner)
    file = traced.open("a", create=True)
    file.write(0, [b"x"])
    for state in crash_states(traced):
        state.storage.replace_file("b", b"")
    assert contents(inner) == {"a": b"x"}
    assert file.read(0, 1) == b"x"


def test_trace_follows_every_change_of_names_and_files() -> None:
    traced = TracingStorage(MemoryStorage())
    traced.lock()
    traced.make_dir("folder")
    traced.remove_dir("folder")
    file = traced.open("a", create=True)
    traced.rename("a", "b")
    assert file.path == "b"
    file.write(0, [b"b"])
    other = traced.open("a", create=True)
    traced.remove("a")
    other.write(0, [b"nameless"])
    file.truncate(3)
    file.sync()
    traced.sync_dir("")
    assert contents(list(crash_states(traced))[-1].storage) == {"b": b"b\0\0", "lock": b""}


# A tiny store whose only promise is: a line that was acked is read back after a loss of power.


def journal(storage: Storage, *, ack_before_sync: bool) -> None:
    mark = storage.mark if isinstance(storage, TracingStorage) else lambda _name, _value: None
    for generation in range(2):
        file = storage.open(f"{generation}", create=True)
        storage.sync_dir("")
        for line in range(3):
            file.write(line * 2, [b"%d\n" % line])
            if ack_before_sync:
                mark("acked", (generation, line))
            file.sync()
            if not ack_before_sync:
                mark("acked", (generation, line))


def missing(state: CrashState) -> list[object]:
    files = contents(state.storage)
    lines = [(generation, line) for generation in range(2) for line in range(3)]
    kept = [(generation, line) for generation, line in lines if b"%d\n" % line in files.get(f"{generation}", b"")]
    return [line for line in state.marked("acked") if line not in kept]


def test_store_that_syncs_before_its_acks_loses_none_in_any_state() -> None:
    traced = TracingStorage(MemoryStorage())
    journal(traced, ack_before_sync=False)
    states = list(crash_states(traced))
    assert [state for state in states if missing(state)] == []
    assert any(state.marked("acked") and state.lost for state in states)


@pytest.mark.parametrize(("planted", "ack_before_sync"), [("no-sync", False), ("no-dir-sync", False), (None, True)])
def test_planted_mistake_shows_in_some_state(planted: Planted | None, ack_before_sync: bool) -> None:
    traced = TracingStorage(MemoryStorage(planted=planted))
    journal(traced, ack_before_sync=ack_before_sync)
    assert [state.prefix for state in crash_states(traced) if missing(state)] != []
