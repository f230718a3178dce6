"""Shares are as even as the wishes allow, and few slots move for it; checked against every possible sharing out."""

from collections import Counter
from itertools import product
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.consumer_groups_assignment import Slot, assign

A, B, C = (StreamId(UUID(int=number)) for number in (1, 2, 3))


def slots(stream: StreamId, count: int) -> list[Slot]:
    return [Slot(stream, number) for number in range(count)]


def loads(found: dict[Slot, str], *members: str) -> list[int]:
    counted = Counter(found.values())
    return [counted[member] for member in members]


def moved(before: dict[Slot, str], after: dict[Slot, str]) -> int:
    return sum(after[slot] != member for slot, member in before.items() if slot in after)


def test_one_member_gets_all_it_asks_for_and_nothing_else() -> None:
    found = assign([*slots(A, 3), *slots(B, 2)], {"x": frozenset([A])}, {})
    assert found == dict.fromkeys(slots(A, 3), "x")


def test_who_comes_takes_no_more_than_its_share() -> None:
    before = assign(slots(A, 7), {"x": frozenset([A])}, {})
    after = assign(slots(A, 7), {"x": frozenset([A]), "y": frozenset([A])}, before)
    assert loads(after, "x", "y") == [4, 3]
    assert moved(before, after) == 3


def test_what_one_leaves_is_shared_by_the_others_who_keep_theirs() -> None:
    everybody = {name: frozenset([A]) for name in "wxyz"}
    before = assign(slots(A, 10), everybody, {})
    left = {name: wish for name, wish in everybody.items() if name != "w"}
    after = assign(slots(A, 10), left, before)
    assert sorted(loads(after, "x", "y", "z")) == [3, 3, 4]
    assert all(after[slot] == member for slot, member in before.items() if member != "w")


def test_last_of_those_in_order_is_the_first_to_be_moved() -> None:
    in_order = slots(A, 4)[::-1]
    after = assign(in_order, {"x": frozenset([A]), "y": frozenset([A])}, dict.fromkeys(in_order, "x"))
    assert [slot for slot, member in after.items() if member == "y"] == [Slot(A, 0), Slot(A, 1)]


def test_evenness_is_found_by_way_of_a_third_member() -> None:
    # x can give only to y, and y only what z may have too.
    wishes = {"x": frozenset([A]), "y": frozenset([A, B]), "z": frozenset([B])}
    before = dict.fromkeys(slots(A, 4), "x") | dict.fromkeys(slots(B, 2), "y")
    after = assign([*slots(A, 4), *slots(B, 2)], wishes, before)
    assert loads(after, "x", "y", "z") == [2, 2, 2]


def test_member_whose_topic_nobody_else_wants_keeps_its_burden() -> None:
    wishes = {"x": frozenset([A]), "y": frozenset([B])}
    assert loads(assign([*slots(A, 9), *slots(B, 1)], wishes, {}), "x", "y") == [9, 1]


def test_many_members_and_partitions_are_even_within_one() -> None:
    wishes = {f"m{number}": frozenset([A, B]) for number in range(300)}
    found = assign([*slots(A, 2000), *slots(B, 1000)], wishes, {})
    counted = Counter(found.values())
    assert set(counted.values()) == {10}


members = st.dictionaries(
    st.sampled_from("wxyz"), st.frozensets(st.sampled_from([A, B, C]), min_size=1), min_size=1, max_size=3
)


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[Slot], dict[str, frozenset[StreamId]], dict[Slot, str]]:
    counts = {stream: draw(st.integers(0, 3)) for stream in (A, B, C)}
    all_slots = [slot for stream, count in counts.items() for slot in slots(stream, count)]
    before = {slot: draw(st.sampled_from("vwxyz")) for slot in all_slots if draw(st.booleans())}
    return all_slots, draw(members), before


def unevenness(found: dict[Slot, str]) -> int:
    return sum(count * count for count in Counter(found.values()).values())


@given(situations())
def test_no_other_sharing_out_is_more_even(
    situation: tuple[list[Slot], dict[str, frozenset[StreamId]], dict[Slot, str]],
) -> None:
    all_slots, wishes, before = situation
    found = assign(all_slots, wishes, before)
    takers = {slot: [name for name in wishes if slot.stream in wishes[name]] for slot in all_slots}
    wanted = [slot for slot in all_slots if takers[slot]]
    assert set(found) == set(wanted)
    assert all(found[slot] in takers[slot] for slot in wanted)
    every = product(*(takers[slot] for slot in wanted))
    assert unevenness(found) == min(unevenness(dict(zip(wanted, one, strict=True))) for one in every)


@given(st.integers(0, 8), st.lists(st.sampled_from("vwxyz"), min_size=8, max_size=8), st.sets(st.sampled_from("wxyz")))
def test_with_equal_wishes_no_even_sharing_out_moves_less(count: int, held: list[str], names: set[str]) -> None:
    wishes = {name: frozenset([A]) for name in names}
    before = dict(zip(slots(A, count), held, strict=False))
    after = assign(slots(A, count), wishes, before)
    if not names:
        assert after == {}
        return
    shares = Counter(dict.fromkeys(names, 0))
    shares.update(after.values())
    assert max(shares.values()) - min(shares.values()) <= 1
    # Each keeps what it has up to its share; the odd ones go to those who have the most.
    has = sorted((sum(member == name for member in before.values()) for name in names), reverse=True)
    even, odd = divmod(count, len(names))
    kept = sum(min(own, even + (place < odd)) for place, own in enumerate(has))
    assert sum(after[slot] == member for slot, member in before.items()) == kept
