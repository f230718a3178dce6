"""Where replicas go: even shares, few moves, no node on which too much depends."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.controller.placement import Placement


def is_even(counts: dict[int, int], tolerance: float = 0.05) -> bool:
    share = sum(counts.values()) / len(counts)
    return all(abs(count - share) <= max(tolerance * share, 1) for count in counts.values())


@given(st.integers(1, 12), st.integers(1, 4), st.integers(0, 200))
@settings(max_examples=50, deadline=None)
def test_replicas_are_on_different_nodes_and_shares_differ_by_one(nodes: int, factor: int, count: int) -> None:
    factor = min(factor, nodes)
    placement: Placement[int] = Placement(range(nodes))
    placement.place(range(count), factor)
    assert all(len(set(found)) == factor for found in placement.replicas.values())
    assert max(placement.held.values()) - min(placement.held.values()) <= 1
    assert max(placement.led.values()) - min(placement.led.values()) <= max(2, count // nodes // 10 + 2)


def test_more_replicas_than_nodes_are_refused() -> None:
    with pytest.raises(Invalid, match="3 replicas need 3 nodes"):
        Placement[int](range(2)).place([1], 3)


@given(st.integers(4, 12), st.integers(1, 300), st.data())
@settings(max_examples=50, deadline=None)
def test_only_what_a_lost_node_held_moves(nodes: int, count: int, data: st.DataObject) -> None:
    before: Placement[int] = Placement(range(nodes))
    before.place(range(count), 3)
    lost = data.draw(st.integers(0, nodes - 1))
    after = Placement((node for node in range(nodes) if node != lost), before.replicas)
    changed = after.repair()
    assert set(changed) == {one for one, found in before.replicas.items() if lost in found}
    for partition, found in after.replicas.items():
        kept = set(before.replicas[partition]) - {lost}
        assert kept <= set(found) and lost not in found and len(set(found)) == 3
    # Where few nodes are left to choose from, shares differ by a little more than one.
    assert max(after.held.values()) - min(after.held.values()) <= max(4, count // nodes)


def test_who_led_goes_on_leading_when_another_is_lost() -> None:
    placement: Placement[str] = Placement([1, 2, 4], {"p": (2, 3, 1)})
    placement.repair()
    assert placement.replicas["p"] == (2, 1, 4)


def test_a_partition_without_any_of_its_nodes_is_placed_anew() -> None:
    placement: Placement[str] = Placement([7, 8], {"p": (1, 2, 3)})
    placement.repair()
    assert sorted(placement.replicas["p"]) == [7, 8]


def test_a_new_node_gets_its_share_and_nothing_else_moves() -> None:
    before: Placement[int] = Placement(range(4))
    before.place(range(1000), 3)
    after = Placement(range(5), before.replicas)
    after.spread()
    assert is_even(after.held)
    moved = sum(len(set(after.replicas[one]) - set(before.replicas[one])) for one in before.replicas)
    assert moved == after.held[4], "every move is one to the new node"
    after.lead_evenly()
    assert is_even(after.led, 0.06)


def test_leadership_is_evened_out_without_moving_a_replica() -> None:
    replicas = {number: (0, 1 + number % 2, 2 - number % 2) for number in range(300)}
    placement = Placement(range(3), replicas)
    placement.lead_evenly()
    assert is_even(placement.led)
    assert all(set(placement.replicas[one]) == set(replicas[one]) for one in replicas)


def test_partitions_on_fifty_nodes_stay_even_through_the_loss_of_one() -> None:
    """bench/placement.py does it with a hundred thousand."""
    placement: Placement[int] = Placement(range(50))
    placement.place(range(10_000), 3)
    assert is_even(placement.held)
    assert is_even(placement.led)
    held_by_lost = placement.held[17]
    after = Placement((node for node in range(50) if node != 17), placement.replicas)
    before = dict(placement.replicas)
    assert len(after.repair()) == held_by_lost
    assert sum(len(set(after.replicas[one]) - set(before[one])) for one in before) == held_by_lost
    assert is_even(after.held)
    assert is_even(after.led)
    taken_over = Counter(after.replicas[one][0] for one in before if before[one][0] == 17)
    assert len(taken_over) == 49 and max(taken_over.values()) < 4 * sum(taken_over.values()) / 49, "all share the work"
