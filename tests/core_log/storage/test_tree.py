"""What a loss of power may leave of files and names: exactly these states, no more and no fewer."""

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import Poisoned, StorageError
from headrace.core_log.storage.contract import Storage
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.storage.tree import Change, ContentChange, Fate

State = dict[str, bytes | None]


def seen(storage: Storage, folder: str = "") -> State:
    """Every path with its content, None for a folder."""
    found: State = {}
    for name in storage.list(folder):
        path = f"{folder}/{name}" if folder else name
        try:
            found[path] = storage.read_file(path)
        except StorageError:
            found[path] = None
            found |= seen(storage, path)
    return found


def states(storage: MemoryStorage) -> list[State]:
    """Every state in which each unsynced change is either kept or lost."""
    changes = storage.unsynced()
    found: list[State] = []
    for fates in product((False, True), repeat=len(changes)):
        fate_of: dict[Change, Fate] = dict(zip(changes, fates, strict=True))
        state = seen(storage.after_power_loss(fate_of.__getitem__))
        if state not in found:
            found.append(state)
    return found


def same(one: list[State], other: list[State]) -> bool:
    return len(one) == len(other) and all(state in other for state in one)


def with_durable(files: dict[str, bytes]) -> MemoryStorage:
    storage = MemoryStorage()
    for path, content in files.items():
        folder = path.rpartition("/")[0]
        storage.make_dir(folder)
        file = storage.open(path, create=True)
        file.write(0, [content])
        file.sync()
        storage.sync_dir(folder)
    storage.sync_dir("")
    assert storage.unsynced() == []
    return storage


# -- names


def test_new_file_may_lose_its_name_its_bytes_or_both() -> None:
    storage = MemoryStorage()
    storage.open("a", create=True).write(0, [b"x"])
    assert same(states(storage), [{}, {"a": b""}, {"a": b"x"}])


def test_synced_file_without_sync_dir_may_be_gone_altogether() -> None:
    storage = MemoryStorage()
    file = storage.open("a", create=True)
    file.write(0, [b"x"])
    file.sync()
    assert same(states(storage), [{}, {"a": b"x"}])


def test_synced_name_over_unsynced_bytes_may_be_empty() -> None:
    storage = MemoryStorage()
    storage.open("a", create=True).write(0, [b"x"])
    storage.sync_dir("")
    assert same(states(storage), [{"a": b""}, {"a": b"x"}])


def test_nothing_is_lost_of_a_synced_file_with_a_synced_name() -> None:
    storage = with_durable({"a": b"x", "folder/b": b"y"})
    assert states(storage) == [{"a": b"x", "folder": None, "folder/b": b"y"}]


def test_names_are_lost_each_for_itself() -> None:
    storage = MemoryStorage()
    storage.open("a", create=True)
    storage.open("b", create=True)
    assert same(states(storage), [{}, {"a": b""}, {"b": b""}, {"a": b"", "b": b""}])


def test_rename_leaves_the_old_name_or_the_new_but_never_both_or_none() -> None:
    storage = with_durable({"a": b"x"})
    storage.rename("a", "b")
    assert same(states(storage), [{"a": b"x"}, {"b": b"x"}])
    storage.sync_dir("")
    assert states(storage) == [{"b": b"x"}]


def test_rename_over_a_file_leaves_the_old_content_or_the_new() -> None:
    storage = with_durable({"a": b"new", "b": b"old"})
    storage.rename("a", "b")
    assert same(states(storage), [{"a": b"new", "b": b"old"}, {"b": b"new"}])


def test_rename_of_an_unsynced_file_over_another_may_leave_it_empty() -> None:
    storage = with_durable({"b": b"old"})
    storage.open("a", create=True).write(0, [b"new"])
    storage.rename("a", "b")
    storage.sync_dir("")
    assert same(states(storage), [{"b": b""}, {"b": b"new"}])


def test_chain_of_renames_leaves_the_file_under_exactly_one_of_its_names() -> None:
    storage = with_durable({"a": b"x"})
    storage.rename("a", "b")
    storage.rename("b", "c")
    assert same(states(storage), [{"a": b"x"}, {"b": b"x"}, {"c": b"x"}])


def test_removed_file_may_come_back_with_its_old_bytes_until_sync_dir() -> None:
    storage = with_durable({"a": b"old"})
    storage.open("a").write(0, [b"new"])
    storage.remove("a")
    assert same(states(storage), [{}, {"a": b"old"}, {"a": b"new"}])
    storage.sync_dir("")
    assert states(storage) == [{}]


def test_name_used_again_is_the_old_file_nothing_or_the_new_file() -> None:
    storage = with_durable({"a": b"old"})
    storage.remove("a")
    file = storage.open("a", create=True)
    file.write(0, [b"new"])
    file.sync()
    assert same(states(storage), [{"a": b"old"}, {}, {"a": b"new"}])


def test_rename_between_folders_is_durable_with_the_new_folder() -> None:
    storage = with_durable({"one/a": b"x", "two/b": b"y"})
    old: State = {"one": None, "one/a": b"x", "two": None, "two/b": b"y"}
    new: State = {"one": None, "two": None, "two/a": b"x", "two/b": b"y"}
    storage.rename("one/a", "two/a")
    assert same(states(storage), [old, new])
    storage.sync_dir("one")
    assert same(states(storage), [old, new])
    storage.sync_dir("two")
    assert states(storage) == [new]


def test_sync_dir_of_one_folder_leaves_the_names_of_another_open() -> None:
    storage = with_durable({"one/a": b"", "two/a": b""})
    storage.open("one/b", create=True)
    storage.open("two/b", create=True)
    storage.sync_dir("one")
    assert [str(change) for change in storage.unsynced()] == ["create two/b"]


def test_folder_is_durable_only_when_every_parent_is_synced() -> None:
    storage = MemoryStorage()
    storage.make_dir("one/two")
    file = storage.open("one/two/a", create=True)
    file.write(0, [b"x"])
    file.sync()
    storage.sync_dir("one/two")
    assert same(states(storage), [{}, {"one": None}, {"one": None, "one/two": None, "one/two/a": b"x"}])
    storage.sync_dir("one")
    storage.sync_dir("")
    assert states(storage) == [{"one": None, "one/two": None, "one/two/a": b"x"}]


def test_renamed_folder_keeps_its_files_under_one_name_or_the_other() -> None:
    storage = with_durable({"old/a": b"x"})
    storage.rename("old", "new")
    assert same(states(storage), [{"old": None, "old/a": b"x"}, {"new": None, "new/a": b"x"}])


def test_replaced_file_is_old_or_new_in_every_state_of_every_moment() -> None:
    storage = with_durable({"a": b"old"})
    storage.replace_file("a", b"new")
    assert states(storage) == [{"a": b"new"}]


# -- bytes


def test_unsynced_writes_are_lost_in_any_combination() -> None:
    storage = with_durable({"a": b"...."})
    file = storage.open("a")
    file.write(0, [b"1"])
    file.write(2, [b"2"])
    assert same(states(storage), [{"a": b"...."}, {"a": b"1..."}, {"a": b"..2."}, {"a": b"1.2."}])


def test_lost_overwrite_shows_the_bytes_below_it() -> None:
    storage = with_durable({"a": b"000000"})
    file = storage.open("a")
    file.write(0, [b"1111"])
    file.write(2, [b"2222"])
    assert same(states(storage), [{"a": b"000000"}, {"a": b"111100"}, {"a": b"002222"}, {"a": b"112222"}])


def test_lost_append_before_a_kept_one_is_a_hole_of_zeros() -> None:
    storage = with_durable({"a": b""})
    file = storage.open("a")
    file.write(0, [b"11"])
    file.write(2, [b"22"])
    assert same(states(storage), [{"a": b""}, {"a": b"11"}, {"a": b"\0\x0022"}, {"a": b"1122"}])


def test_cut_is_kept_or_lost_like_a_write() -> None:
    storage = with_durable({"a": b"0123"})
    file = storage.open("a")
    file.truncate(1)
    file.write(1, [b"x"])
    assert same(states(storage), [{"a": b"0123"}, {"a": b"0"}, {"a": b"0x23"}, {"a": b"0x"}])
    file.sync()
    assert states(storage) == [{"a": b"0x"}]


def test_torn_write_keeps_only_its_ranges() -> None:
    storage = with_durable({"a": b"......"})
    storage.open("a").write(1, [b"1234567"])
    assert storage.after_power_loss(lambda _: ((0, 1), (3, 4))).read_file("a") == b".1..4."
    assert storage.after_power_loss(lambda _: ((6, 7),)).read_file("a") == b"......\x007"
    assert storage.after_power_loss(lambda _: ((7, 7),)).read_file("a") == b"......\0\0"
    assert storage.after_power_loss(lambda _: ()).read_file("a") == b"......"


def test_bytes_of_a_failed_sync_stay_lossy_whatever_is_synced_later() -> None:
    storage = MemoryStorage(planted="no-poison")
    file = storage.open("a", create=True)
    storage.sync_dir("")
    file.write(0, [b"11"])
    storage.fail("sync")
    with pytest.raises(Poisoned):
        file.sync()
    file.write(1, [b"22"])
    file.sync()
    file.sync()
    assert file.read(0, 9) == b"122"
    assert same(states(storage), [{"a": b"\x0022"}, {"a": b"122"}])


def test_what_a_failed_sync_left_is_made_good_by_writing_it_again() -> None:
    storage = MemoryStorage()
    file = storage.open("a", create=True)
    storage.sync_dir("")
    file.write(0, [b"11"])
    storage.fail("sync")
    with pytest.raises(Poisoned):
        file.sync()
    after = storage.process_crash()
    file = after.open("a")
    assert file.read(0, 9) == b"11"
    file.sync()
    assert same(states(after), [{"a": b""}, {"a": b"11"}])
    file.write(0, [b"11"])
    file.sync()
    assert states(after) == [{"a": b"11"}]


# -- any run of calls

writes = st.tuples(st.just("write"), st.integers(0, 40), st.binary(min_size=1, max_size=20))
cuts = st.tuples(st.just("truncate"), st.integers(0, 50), st.none())
syncs = st.tuples(st.just("sync"), st.none(), st.none())


@given(st.lists(st.one_of(writes, cuts, syncs), max_size=12), st.data())
def test_every_surviving_byte_is_durable_or_was_written_there(
    calls: list[tuple[str, int | None, bytes | None]], data: st.DataObject
) -> None:
    storage = MemoryStorage()
    file = storage.open("a", create=True)
    storage.sync_dir("")
    durable = b""
    written: list[tuple[int, bytes]] = []
    smallest = 0
    for _, position, content in calls:
        if position is None:
            file.sync()
            durable, written, smallest = file.read(0, 1000), [], file.size()
        elif content is None:
            file.truncate(position)
            smallest = min(smallest, position)
        else:
            file.write(position, [content])
            written.append((position, content))

    def fate(change: Change) -> Fate:
        if isinstance(change, ContentChange) and change.data is not None and data.draw(st.booleans()):
            borders = sorted(data.draw(st.sets(st.integers(0, len(change.data)), min_size=2, max_size=4)))
            return tuple(pairwise(borders))[::2]
        return data.draw(st.booleans())

    survived = storage.after_power_loss(fate).read_file("a")
    assert len(survived) >= smallest
    for place, byte in enumerate(survived):
        allowed = {content[place - at] for at, content in written if at <= place < at + len(content)}
        # Zero where the file was shorter at some moment, else the byte the last sync made sure of.
        allowed.add(durable[place] if place < len(durable) else 0)
        if place >= smallest:
            allowed.add(0)
        assert byte in allowed
    assert storage.after_power_loss(lambda _: True).read_file("a") == file.read(0, 1000)
    assert storage.after_power_loss(lambda _: False).read_file("a") == durable
    file.sync()
    assert storage.after_power_loss(lambda _: False).read_file("a") == file.read(0, 1000)


names = st.sampled_from(["a", "b", "one/a", "one/x", "two/a", "two/y", "z"])
name_calls = st.one_of(
    st.tuples(st.just("create"), names, names),
    st.tuples(st.just("rename"), names, names),
    st.tuples(st.just("remove"), names, names),
    st.tuples(st.just("sync_dir"), st.sampled_from(["", "one", "two"]), names),
)


@given(st.lists(name_calls, max_size=10), st.data())
def test_files_survive_under_one_name_at_most_and_durable_ones_under_one_at_least(
    calls: list[tuple[str, str, str]], data: st.DataObject
) -> None:
    storage = with_durable({"one/x": b"x", "two/y": b"y", "z": b"z"})
    untouched: set[bytes | None] = {b"x", b"y", b"z"}
    made = 0
    for method, first, second in calls:
        before = seen(storage)
        if method == "create" and first not in before:
            made += 1
            file = storage.open(first, create=True)
            file.write(0, [b"%d" % made])
            file.sync()
        elif method == "rename" and first in before:
            storage.rename(first, second)
        elif method == "remove" and first in before:
            storage.remove(first)
        elif method == "sync_dir":
            storage.sync_dir(first)
        untouched &= set(seen(storage).values())
    everything = seen(storage)
    state = seen(storage.after_power_loss(lambda _: data.draw(st.booleans())))
    files = [content for content in state.values() if content is not None]
    assert len(files) == len(set(files))
    assert untouched <= set(files)
    assert seen(storage.after_power_loss(lambda _: True)) == everything
    for folder in ("one", "two", ""):
        storage.sync_dir(folder)
    assert storage.unsynced() == []
    assert seen(storage.after_power_loss(lambda _: False)) == everything
