"""A frozen map behaves as a dict that is copied at each change, without the copying."""

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.frozenmap import FrozenMap

keys = st.integers(0, 60)
steps = st.lists(st.tuples(st.dictionaries(keys, st.integers(), max_size=20), st.lists(keys, max_size=20)))


@settings(deadline=None)
@given(st.dictionaries(keys, st.integers()), steps)
def test_changed_copies_equal_changed_dicts_and_old_ones_stay(
    start: dict[int, int], changes: list[tuple[dict[int, int], list[int]]]
) -> None:
    history: list[tuple[FrozenMap[int, int], dict[int, int]]] = [(FrozenMap(start), dict(start))]
    for put, drop in changes:
        frozen, plain = history[-1]
        after = {key: value for key, value in plain.items() if key not in drop} | put
        history.append((frozen.changed(put, drop), after))
    for frozen, plain in history:
        assert dict(frozen) == plain
        assert len(frozen) == len(plain)
        assert frozen == FrozenMap(plain)
        assert list(frozen) == sorted(plain)
        assert all(frozen.get(key) == plain.get(key) for key in range(61))


def test_one_change_shares_nearly_everything_with_the_old_map() -> None:
    before: FrozenMap[int, int] = FrozenMap({number: number for number in range(100_000)})
    after = before.put(5, -5)
    old = {id(shard) for shard in before._shards}
    copied = [shard for shard in after._shards if id(shard) not in old]
    assert len(copied) == 1
    assert len(copied[0]) + len(after._shards) < 2_000
    assert (before[5], after[5]) == (5, -5)


def test_a_map_grown_one_by_one_has_small_parts() -> None:
    grown: FrozenMap[int, None] = FrozenMap()
    for number in range(5_000):
        grown = grown.put(number, None)
    assert max(map(len, grown._shards)) + len(grown._shards) < 500


def test_unequal_maps_are_unequal() -> None:
    assert FrozenMap({1: 1}) != FrozenMap({1: 2})
    assert FrozenMap({1: 1}) != FrozenMap({2: 1})
    assert FrozenMap({1: 1}) != FrozenMap({1: 1, 2: 2})
    assert FrozenMap({1: 1}) != {1: 1}
