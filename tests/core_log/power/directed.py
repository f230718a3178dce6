"""Stories that chance tells too rarely: each sets up its moment by hand and says what must hold. Driver.

They run in the suite as they are, and under the mutants that they are for.
"""

from uuid import UUID

import pytest

from headrace.core_log.checkpoint import Checkpoint, CheckpointFile, read_checkpoint
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.errors import Poisoned
from headrace.core_log.storage.memory import MemoryStorage
from headrace.core_log.storage.tree import Change, ContentChange, Fate

from .inline import append, commit, create_logs, open_directory, values_of


def batch_in_recycled_file_is_not_taken_over() -> None:
    """A file that held offset 1 of one partition becomes another's segment for offset 1, whose first batch is lost."""
    storage = MemoryStorage()
    config = DirectoryConfig(removal_delay_ms=1)
    directory = open_directory(storage, config=config)
    giver, taker, other = create_logs(
        directory, 3, LogConfig(segment_bytes_max=1024, compression="none", offsets_reserved=1)
    )
    for count in range(4):
        append(giver, b"giver %d" % count + bytes(700))
        commit(directory, giver)
    giver.delete_before(3)
    commit(directory, giver)
    assert giver.recycle(1 << 62) == 3
    for log in (other, taker):
        append(log, b"first" + bytes(700))
        commit(directory, log)
    # This one takes the file of the giver's offset 0, so that the next file is the right one.
    append(other, b"second" + bytes(700))
    other.seal()
    append(taker, b"second" + bytes(700))
    taker.seal()
    path = taker.segments[-1].path

    def fate(change: Change) -> bool:
        return not (isinstance(change, ContentChange) and change.path == path and change.position > 0)

    left = open_directory(storage.after_power_loss(fate), config=config)
    found = left.streams[UUID(int=1)].partitions[1]
    assert values_of(found) == {0: b"first" + bytes(700)}, "a record of another partition has come in"


def checkpoint_of_a_failed_sync_is_not_built_upon() -> None:
    """A process dies of the sync of its third checkpoint; the next one reads it, and loses power over the fourth."""
    states = [Checkpoint(0, 0, number, 64, number, 1, 0) for number in range(5)]
    storage = MemoryStorage()
    file = CheckpointFile(storage, "watermark")
    file.create(states[1])
    storage.sync_dir("")
    file.write(states[2], sync=True)
    storage.fail("sync")
    with pytest.raises(Poisoned):
        file.write(states[3], sync=True)
    storage = storage.process_crash()
    file = CheckpointFile(storage, "watermark")
    assert file.value == states[3]
    file.write(states[4], sync=False)
    newest = storage.unsynced()[-1]

    def fate(change: Change) -> Fate:
        return ((0, 10),) if change is newest else False

    left = read_checkpoint(storage.after_power_loss(fate), "watermark")
    assert left in states[2:], "a checkpoint that was synced is lost"
