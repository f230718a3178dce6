"""Epoch histories: who wrote what, where two logs part, and what is believed of a file."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.epochs import EpochHistory, EpochStart

# A log as a list of (epoch, leader) by offset; two logs share a beginning and then go on by themselves, each stint with
# an identity of its own.
stints = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(0, 4)), max_size=5)
Stints = list[tuple[int, int, int]]


def grown(log: list[tuple[int, int]], more: Stints, side: int) -> list[tuple[int, int]]:
    log = list(log)
    for rise, leader, count in more:
        epoch = (log[-1][0] if log else 0) + rise
        log += [(epoch, 3 * leader + side)] * count
    return log


def history_of(log: list[tuple[int, int]]) -> EpochHistory:
    history = EpochHistory()
    for offset, (epoch, leader) in enumerate(log):
        history.note(epoch, leader, offset)
    return history


@given(stints, stints, stints, st.booleans())
def test_divergence_is_where_two_logs_stop_being_the_same(
    shared: Stints, ours: Stints, theirs: Stints, go_on: bool
) -> None:
    common = grown([], shared, 0)
    one, other = grown(common, ours, 1), grown(common, theirs, 2)
    if go_on and common:
        # Both may have written more in the last common stint, one of them further than the other.
        one = common + [common[-1]] * len(ours)
        other = common + [common[-1]] * len(theirs)
    same = next((place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    expected = min(len(one), len(other)) if same is None else same
    assert history_of(one).divergence(len(one), history_of(other), len(other)) == expected


@given(stints)
def test_every_offset_belongs_to_the_stint_that_wrote_it(more: Stints) -> None:
    log = grown([], more, 0)
    history = history_of(log)
    assert [history.epoch_at(offset)[:2] for offset in range(len(log))] == log
    for epoch, leader in set(log):
        end = len(log) - log[::-1].index((epoch, leader))
        assert history.end_of(epoch, leader, len(log)) == end


@given(stints, st.integers(0, 20))
def test_cut_history_is_that_of_the_shorter_log(more: Stints, cut: int) -> None:
    log = grown([], more, 0)
    history = history_of(log)
    history.cut_from(cut)
    assert history.entries == history_of(log[:cut]).entries


@given(stints)
def test_history_comes_back_from_its_bytes(more: Stints) -> None:
    history = history_of(grown([], more, 0))
    assert EpochHistory.decode(history.encode()).entries == history.entries


@given(st.data())
def test_no_flipped_bit_is_believed(data: st.DataObject) -> None:
    encoded = bytearray(EpochHistory([EpochStart(1, 0, 0), EpochStart(7, 2, 130)]).encode())
    encoded[data.draw(st.integers(0, len(encoded) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ValueError, match="hash"):
        EpochHistory.decode(bytes(encoded))


@pytest.mark.parametrize("content", [b"", b"1 0 0\n", b"\xff" * 40, b"hash 0\n"])
def test_bytes_that_are_no_history_are_a_value_error(content: bytes) -> None:
    with pytest.raises(ValueError):
        EpochHistory.decode(content)


def test_stint_that_wrote_nothing_leaves_no_entry() -> None:
    history = EpochHistory([EpochStart(1, 0, 0), EpochStart(2, 0, 5)])
    assert history.note(3, 1, 5)
    assert history.entries == (EpochStart(1, 0, 0), EpochStart(3, 1, 5))


@pytest.mark.parametrize("entry", [EpochStart(1, 0, 9), EpochStart(4, 0, 2)])
def test_falling_epoch_or_offset_is_our_mistake(entry: EpochStart) -> None:
    history = EpochHistory([EpochStart(1, 0, 0), EpochStart(2, 0, 5)])
    with pytest.raises(ValueError, match="after epoch 2 at 5"):
        history.note(*entry)
    assert len(history.entries) == 2


def test_same_number_of_another_leader_is_another_stint() -> None:
    history = EpochHistory([EpochStart(2, 0, 0)])
    assert history.note(2, 1, 4)
    other = EpochHistory([EpochStart(2, 2, 0)])
    assert history.divergence(8, other, 8) == 0
