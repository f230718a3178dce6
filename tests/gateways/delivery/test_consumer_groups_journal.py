"""A group comes back from its journal as it was."""

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.consumer_groups import Committed, ConsumerGroup, Member, Start, Tenure
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_journal import (
    GroupName,
    encode_group,
    encode_offset,
    group_key,
    offset_key,
    restored,
)

NAME = GroupName("/", "billing")
numbers = st.integers(0, 2**53)
names = st.text(max_size=12)
streams = st.uuids().map(StreamId)
slots = st.builds(Slot, streams, st.integers(0, 2**32 - 1))
members = st.builds(
    Member,
    id=names,
    user=names,
    topics=st.frozensets(streams, max_size=3),
    session_ms=st.integers(1, 10**6),
    rebalance_ms=st.integers(1, 10**6),
    start=st.sampled_from(Start),
    name=names,
)


@st.composite
def groups(draw: st.DrawFn) -> ConsumerGroup:
    group = ConsumerGroup(generation=draw(numbers), empty_since_us=draw(numbers))
    group.members = {one.id: one for one in draw(st.lists(members, max_size=3))}
    for one in group.members.values():
        one.told = group.generation
        one.deadline_ms = 100 + one.session_ms
    heirs = st.none() | st.sampled_from([name for name in group.members if name] or [None])
    for slot in draw(st.sets(slots, max_size=4)) if group.members else ():
        holder = draw(st.sampled_from(sorted(group.members)))
        revoked = draw(st.none() | numbers)
        group.tenures[slot] = Tenure(holder, draw(numbers), revoked, None if revoked is None else draw(heirs))
        if revoked is not None:
            group.members[holder].give_up_by_ms = 100 + group.members[holder].rebalance_ms
    group.committed = draw(st.dictionaries(slots, st.builds(Committed, numbers, numbers, numbers), max_size=4))
    return group


@given(groups(), st.builds(GroupName, names, names))
def test_group_is_the_same_when_it_is_read_back(group: ConsumerGroup, name: GroupName) -> None:
    entries = [(0, group_key(name), encode_group(group))]
    entries += [(1, offset_key(name, slot), encode_offset(one)) for slot, one in group.committed.items()]
    assert restored(entries, 100) == {name: group}
    assert restored(reversed(entries), 100) == {name: group}


@given(st.lists(st.builds(GroupName, names, names), unique=True, max_size=6), slots)
def test_keys_of_different_groups_differ(found: list[GroupName], slot: Slot) -> None:
    keys = {group_key(name) for name in found} | {offset_key(name, slot) for name in found}
    assert len(keys) == 2 * len(found)


def test_last_value_of_a_key_counts_and_an_empty_one_ends_it() -> None:
    one, two = (Slot(StreamId(UUID(int=1)), number) for number in (0, 1))
    values = [(one, 5), (two, 6), (one, 7)]
    entries = [
        (at, offset_key(NAME, slot), encode_offset(Committed(offset, 1, 2))) for at, (slot, offset) in enumerate(values)
    ]
    entries.append((3, offset_key(NAME, two), b""))
    assert restored(entries, 0)[NAME].committed == {one: Committed(7, 1, 2)}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (group_key(NAME), b"\xc1"),
        (group_key(NAME), msgspec.msgpack.encode([9, 0, [], [], 0])),
        (offset_key(NAME, Slot(StreamId(UUID(int=1)), 0)), msgspec.msgpack.encode([9, 0, 0, 0])),
        (b"offset:\x00\x05ab", b"\x90"),
        (b"gruop:", b"\x90"),
    ],
)
def test_what_cannot_be_read_is_corrupt_and_says_where(key: bytes, value: bytes) -> None:
    with pytest.raises(CorruptLog, match=r"a group's state cannot be read.*offset 41"):
        restored([(41, key, value)], 0)
