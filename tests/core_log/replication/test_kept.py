"""What a replica promised is found again after anything."""

from uuid import UUID

import pytest

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.replication.assignment import Ballot, Copy, RowVersion, Stint
from headrace.core_log.replication.kept import PATH, read_kept, write_kept
from headrace.core_log.replication.replica import Kept
from headrace.core_log.storage.memory import MemoryStorage

KEPT = Kept(Ballot(3, 1), Stint(7, 2), RowVersion(9, Ballot(3, 1)), (Copy(2, UUID(int=5)),), (Copy(1, UUID(int=6)),))


def test_it_is_on_the_disk_when_it_is_written() -> None:
    storage = MemoryStorage()
    assert read_kept(storage) is None
    write_kept(storage, KEPT)
    assert read_kept(storage.after_power_loss(lambda _: False)) == KEPT


def test_what_cannot_be_read_is_never_taken_for_nothing() -> None:
    storage = MemoryStorage()
    storage.replace_file(PATH, b"{}")
    with pytest.raises(UnknownFormat, match="kept"):
        read_kept(storage)
    write_kept(storage, KEPT)
    storage.replace_file(PATH, storage.read_file(PATH).replace(b'"format": 1', b'"format": 2'))
    with pytest.raises(UnknownFormat, match="format 2"):
        read_kept(storage)
