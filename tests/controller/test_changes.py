"""The change feed keeps every change exactly."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.changes import CHANGES, Change, PutUser, decode_changes, encode_changes, replaces_secret
from headrace.controller.entities import User
from headrace.core_log.errors import UnknownFormat

from .strategies import changes


@settings(deadline=None)
@given(st.lists(changes, max_size=4))
def test_feed_gives_the_same_changes_back(batch: list[Change]) -> None:
    assert decode_changes(encode_changes(batch)) == tuple(batch)


def test_unknown_change_is_refused_loudly() -> None:
    with pytest.raises(UnknownFormat, match="PutMoon"):
        decode_changes('[["PutMoon",{}]]')


def test_every_change_has_its_own_name() -> None:
    assert len({kind.__name__ for kind in CHANGES}) == len(CHANGES) == 26


def test_password_hash_is_not_shown_by_repr() -> None:
    assert "canary" not in repr(PutUser(User("ann", "canary")))
    assert replaces_secret([PutUser(User("ann", "canary"))])
