"""Deletions are remembered until every replica has heard of them."""

from uuid import UUID

import pytest

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.replication.deletions import PATH, Deletions
from headrace.core_log.storage.memory import MemoryStorage

ONE, TWO, THREE = (UUID(int=number) for number in (1, 2, 3))


def test_a_deletion_is_found_after_a_restart_until_it_is_forgotten() -> None:
    storage = MemoryStorage()
    deletions = Deletions(storage, (), ())
    deletions.save()
    assert not storage.exists(PATH)
    deletions.note(ONE)
    deletions.note(TWO)
    deletions.save()
    assert Deletions(storage, (), ()).streams == {ONE, TWO}
    deletions.forget([ONE, THREE])
    deletions.save()
    assert Deletions(storage, (), ()).streams == {TWO}


def test_what_lies_in_the_trash_was_deleted_though_a_crash_kept_that_from_the_file() -> None:
    storage = MemoryStorage()
    deletions = Deletions(storage, [TWO], [ONE, TWO])
    assert deletions.streams == {ONE}, "one that is there again is not"
    assert not deletions.is_saved


def test_a_file_that_cannot_be_read_is_told() -> None:
    storage = MemoryStorage()
    storage.replace_file(PATH, b"[1]")
    with pytest.raises(UnknownFormat, match="deleted"):
        Deletions(storage, (), ())
