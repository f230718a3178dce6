"""What the controller and its nodes say to each other, as bytes."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.entities import Endpoint
from headrace.controller.messages import (
    FRAME_KIND,
    Alter,
    Announce,
    Ask,
    Beat,
    Commit,
    Delta,
    Fence,
    Message,
    Obeyed,
    Operate,
    Order,
    Outcome,
    Outvoted,
    Register,
    Reported,
    UnknownMessage,
    Unwanted,
    Welcome,
    Whole,
    decode,
    encode,
)
from headrace.core_log.replication.assignment import Member, RowVersion, Stint
from headrace.core_log.replication.messages import AlterIsr, Report

from .strategies import assignments, ballots, copies, disks, node_ids, shards

numbers = st.integers(0, 2**53)
members = st.builds(Member, node_ids, numbers, disks)
stints = st.builds(Stint, numbers, node_ids)
versions = st.builds(RowVersion, numbers, ballots)
reports = st.builds(
    Report, members, stints, versions, stints, numbers, st.booleans(), st.booleans(), isr=copies, eligible=copies
)
requests = st.builds(AlterIsr, stints, numbers, versions, copies, st.none() | members)
endpoints = st.lists(st.tuples(st.text(), st.builds(Endpoint, st.text(), st.integers(0, 65535))), max_size=2).map(tuple)
arguments = st.dictionaries(st.text(), numbers | st.text() | st.booleans() | st.lists(node_ids, max_size=2), max_size=2)
messages: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        Register, members, endpoints, st.booleans(), numbers, ballots, numbers, st.lists(shards, max_size=2).map(tuple)
    ),
    st.builds(Welcome, ballots, node_ids, numbers, st.text(), numbers),
    st.builds(Unwanted, st.text(), node_ids),
    st.builds(Announce, node_ids, ballots),
    st.builds(
        Beat,
        numbers,
        st.lists(node_ids, max_size=2).map(tuple),
        st.lists(st.tuples(numbers, st.text()), max_size=2).map(tuple),
    ),
    st.builds(Whole, st.binary(), st.booleans()),
    st.builds(Delta, numbers, st.text()),
    st.builds(Ask, ballots, numbers, numbers),
    st.builds(Fence, ballots, numbers, numbers, numbers),
    st.builds(Order, ballots, numbers, numbers, assignments),
    st.builds(Reported, numbers, numbers, reports),
    st.builds(Obeyed, numbers, numbers),
    st.builds(Outvoted, ballots),
    st.builds(Alter, numbers, requests),
    st.builds(Commit, numbers, st.text()),
    st.builds(Operate, numbers, st.text(), arguments),
    st.builds(Outcome, numbers, st.none() | numbers, st.text(), st.text()),
)


@given(messages)
def test_what_is_decoded_is_what_was_encoded(message: Message) -> None:
    found = decode(FRAME_KIND, encode(message))
    assert found == message and type(found) is type(message)


@given(messages, st.data())
def test_a_part_of_a_message_is_refused(message: Message, data: st.DataObject) -> None:
    whole = encode(message)
    with pytest.raises(UnknownMessage):
        decode(FRAME_KIND, whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=200))
def test_anything_else_is_refused_and_nothing_worse(data: bytes) -> None:
    try:
        found = decode(FRAME_KIND, data)
    except UnknownMessage:
        return
    assert decode(FRAME_KIND, encode(found)) == found


def test_a_kind_of_message_that_this_release_does_not_know_is_refused() -> None:
    with pytest.raises(UnknownMessage, match="as this release knows them"):
        decode(FRAME_KIND, msgspec.msgpack.encode(["Abdicate", 3]))
    with pytest.raises(UnknownMessage, match="kind 9"):
        decode(9, encode(Beat(1)))
