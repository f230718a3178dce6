"""A snapshot as bytes, and what leads from one to another."""

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.changes import Change, PutExchange, PutShard, PutUser
from headrace.controller.entities import Exchange, Shard, User, Version
from headrace.controller.frozenmap import FrozenMap
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.controller.snapshot_form import decode_snapshot, difference, encode_snapshot
from headrace.core_log.errors import Refused, UnknownFormat
from headrace.core_log.ids import StreamId, ViewId

from .strategies import RICH
from .strategies import changes as any_change

EMPTY = load(UUID(int=1), Version(0), ViewId(1))


def reached(transactions: list[list[Change]]) -> Snapshot:
    snapshot = apply(EMPTY, RICH)
    for transaction in transactions:
        try:
            snapshot = apply(snapshot, transaction)
        except Refused:
            continue
    return snapshot


walks = st.lists(st.lists(any_change, min_size=1, max_size=5), max_size=6).map(reached)


@settings(deadline=None, max_examples=40)
@given(walks)
def test_what_is_decoded_is_what_was_encoded(snapshot: Snapshot) -> None:
    assert decode_snapshot(encode_snapshot(snapshot)) == snapshot


@pytest.mark.parametrize("spoiled", [b"", b"headrace metadata 2 x\n{}", encode_snapshot(EMPTY)[:-1]])
def test_anything_else_is_refused(spoiled: bytes) -> None:
    with pytest.raises(UnknownFormat):
        decode_snapshot(spoiled)


def without_versions(snapshot: Snapshot) -> Snapshot:
    """Users are stamped anew when changes are applied; ids that were given out stay so; shards are never deleted."""
    users = FrozenMap((name, replace(user, version=Version(0))) for name, user in snapshot.users.items())
    return replace(snapshot, version=Version(0), next_view=ViewId(1), users=users, shards=FrozenMap[int, Shard]())


@settings(deadline=None, max_examples=40)
@given(walks, walks)
def test_the_difference_leads_from_one_to_the_other(before: Snapshot, after: Snapshot) -> None:
    made = apply(replace(before, shards=FrozenMap[int, Shard]()), difference(before, after))
    assert without_versions(made) == without_versions(after)


def test_what_is_the_same_is_not_among_the_differences() -> None:
    before = reached([])
    assert difference(before, before) == []
    after = apply(before, [PutUser(User("new")), PutExchange(Exchange("/", "n", "topic", StreamId(UUID(int=5))))])
    assert {type(change) for change in difference(before, after)} == {PutUser, PutExchange}
    assert not any(isinstance(change, PutShard) for change in difference(before, after))
