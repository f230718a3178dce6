"""The checkpoint file: whatever is lost, the newest state that was synced, or a newer one, is read back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.checkpoint import FILE_BYTES, Checkpoint, CheckpointFile, read_checkpoint
from headrace.core_log.storage.crash import TracingStorage, crash_states
from headrace.core_log.storage.memory import MemoryStorage

PATH = "watermark"


def state(number: int) -> Checkpoint:
    return Checkpoint(0, 0, number, 64 + number, number + 10, 1, 0)


def created() -> tuple[MemoryStorage, CheckpointFile]:
    storage = MemoryStorage()
    file = CheckpointFile(storage, PATH)
    file.create(state(0))
    storage.sync_dir("")
    return storage, file


@given(st.lists(st.sampled_from(("sync", "write", "reopen")), max_size=6))
def test_no_crash_state_shows_less_than_what_was_synced(steps: list[str]) -> None:
    storage = TracingStorage(MemoryStorage())
    file = CheckpointFile(storage, PATH)
    file.create(state(0))
    storage.sync_dir("")
    storage.mark("synced", 0)
    for number, step in enumerate(steps, start=1):
        if step == "reopen":
            file = CheckpointFile(storage, PATH)
        else:
            file.write(state(number), sync=step == "sync")
        if file.synced is not None:
            storage.mark("synced", file.synced.offset)
    for left in crash_states(storage, limit_per_prefix=32):
        synced = left.marked("synced")
        if synced:
            found = read_checkpoint(left.storage, PATH)
            assert found is not None
            assert found.offset >= max(int(str(one)) for one in synced)
            assert found == state(found.offset)


def test_unsynced_states_go_to_one_slot_again_and_again() -> None:
    storage, file = created()
    file.write(state(1), sync=True)
    before = storage.read_file(PATH)
    for number in range(2, 6):
        file.write(state(number), sync=False)
    after = storage.read_file(PATH)
    assert (before[:512] == after[:512]) != (before[512:] == after[512:])
    assert read_checkpoint(storage, PATH) == state(5)
    assert (file.value, file.synced) == (state(5), state(1))


def test_file_is_as_long_as_it_will_ever_be() -> None:
    storage, file = created()
    file.write(state(1), sync=True)
    file.write(state(2), sync=True)
    assert len(storage.read_file(PATH)) == FILE_BYTES


@pytest.mark.parametrize("slot", [0, 1])
def test_damaged_slot_gives_way_to_the_other(slot: int) -> None:
    storage, file = created()
    file.write(state(1), sync=True)
    storage.flip_bit(PATH, slot * 512 + 30)
    # The first state went to slot 0, the second to slot 1.
    assert read_checkpoint(storage, PATH) == state(1 - slot)


def test_nothing_valid_is_no_checkpoint() -> None:
    storage, _file = created()
    storage.flip_bit(PATH, 30)
    assert read_checkpoint(storage, PATH) is None
    assert CheckpointFile(storage, PATH).value is None
    assert read_checkpoint(storage, "elsewhere") is None


def test_what_a_process_left_in_the_page_cache_is_made_safe_before_it_is_built_upon() -> None:
    storage, file = created()
    file.write(state(1), sync=False)
    storage = storage.process_crash()
    file = CheckpointFile(storage, PATH)
    assert (file.value, file.synced) == (state(1), None)
    file.anchor()
    assert file.synced == state(1)
    assert read_checkpoint(storage.after_power_loss(lambda _: False), PATH) == state(1)
