"""What views write to their journal comes back as it was; the last word counts; what cannot be read is said aloud."""

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import CorruptLog
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery import journal
from headrace.gateways.delivery.journal import FORMAT, HistoryState, LaneState, Restored, ViewState

NUMBERS = st.integers(0, 2**62)
STREAMS = st.uuids().map(lambda one: one.bytes)
PLACES = st.lists(st.tuples(STREAMS, st.integers(0, 2**31), NUMBERS), max_size=3)
LANES = st.builds(
    LaneState,
    next_seq=NUMBERS,
    floor=NUMBERS,
    settled=st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4),
    arrivals=st.lists(st.tuples(NUMBERS, NUMBERS, STREAMS, st.integers(0, 2**31), NUMBERS, NUMBERS), max_size=4),
    applied=PLACES,
    delivered_below=NUMBERS,
)
HISTORIES = st.builds(
    HistoryState, first_seq=NUMBERS, next_seq=NUMBERS, newest_us=NUMBERS, byte_count=NUMBERS, applied=PLACES
)
VIEWS = st.builds(
    ViewState,
    format=st.just(FORMAT),
    lanes=st.lists(LANES, max_size=3),
    timed=st.booleans(),
    history=st.none() | HISTORIES,
)
EMPTY = ViewState(FORMAT, [])


@given(st.dictionaries(st.integers(1, 2**63), VIEWS, max_size=5))
def test_states_come_back_as_they_were(views: dict[int, ViewState]) -> None:
    entries = [
        (offset, journal.view_key(view_id), journal.encode_view(state))
        for offset, (view_id, state) in enumerate(views.items())
    ]
    assert Restored(entries).views == views


@given(st.lists(st.tuples(st.uuids(), st.integers(0, 2**32 - 1), st.integers(0, 2**63)), max_size=5))
def test_reach_of_a_log_comes_back(told: list[tuple[UUID, int, int]]) -> None:
    entries = [
        (offset, journal.log_key(StreamId(stream), partition), journal.encode_applied(end))
        for offset, (stream, partition, end) in enumerate(told)
    ]
    restored = Restored(entries)
    for stream, partition, end in {
        (stream, partition): (stream, partition, end) for stream, partition, end in told
    }.values():
        assert restored.applied_to(stream, partition, -1) == end
    assert restored.applied_to(UUID(int=0), 0, 17) == 17


@given(st.lists(st.tuples(st.integers(1, 3), VIEWS), max_size=8))
def test_last_state_of_a_view_wins(written: list[tuple[int, ViewState]]) -> None:
    entries = [
        (offset, journal.view_key(view_id), journal.encode_view(state))
        for offset, (view_id, state) in enumerate(written)
    ]
    assert Restored(entries).views == dict(written)


def test_view_that_was_forgotten_is_gone_and_may_be_written_again() -> None:
    key = journal.view_key(7)
    state = journal.encode_view(EMPTY)
    assert Restored([(0, key, state), (1, key, b"")]).views == {}
    assert Restored([(0, key, state), (1, key, b""), (2, key, state)]).views == {7: EMPTY}


def test_keys_of_views_logs_and_blocks_never_meet() -> None:
    """A view's key is a number: the letters of the others would be a number that no view ever has."""
    logs = journal.log_key(StreamId(UUID(int=0)), 0)
    blocks = journal.block_key(0, 0)
    assert len({logs[:4], blocks[:4], journal.view_key(2**32 - 1)[:4]}) == 3
    assert min(int.from_bytes(prefix, "big") for prefix in (logs[:8], blocks[:8])) > 2**60


def test_state_of_an_unknown_format_is_refused_with_its_place() -> None:
    later = journal.encode_view(msgspec.structs.replace(EMPTY, format=FORMAT + 1))
    with pytest.raises(CorruptLog, match=f"unknown format {FORMAT + 1}") as refused:
        Restored([(41, journal.view_key(7), later)])
    assert "__views" in str(refused.value) and "41" in str(refused.value)


@pytest.mark.parametrize("value", [b"\xc1", b"\x93", b"not a state", journal.encode_view(EMPTY)[:-1]])
def test_state_that_cannot_be_read_is_refused_with_its_place(value: bytes) -> None:
    with pytest.raises(CorruptLog, match="cannot be read") as refused:
        Restored([(0, journal.view_key(6), journal.encode_view(EMPTY)), (41, journal.view_key(7), value)])
    assert "41" in str(refused.value)


@given(st.binary(min_size=1, max_size=40))
def test_garbage_is_a_state_or_refused(value: bytes) -> None:
    try:
        restored = Restored([(3, journal.view_key(7), value)])
    except CorruptLog:
        return
    assert restored.views[7].format == FORMAT


def test_older_state_that_was_damaged_does_not_matter() -> None:
    key = journal.view_key(7)
    assert Restored([(0, key, b"damaged"), (1, key, journal.encode_view(EMPTY))]).views == {7: EMPTY}


def test_blocks_of_a_history_come_back_with_their_view() -> None:
    entries = [(number, journal.block_key(7, number), journal._encoder.encode(_block(number))) for number in range(3)]
    restored = Restored([*entries, (3, journal.block_key(7, 0), b"")])
    assert [block.ordinal for block in restored.blocks[7]] == [1, 2]


def _block(number: int) -> journal.BlockState:
    return journal.BlockState(number, [(number, UUID(int=1).bytes, 0, 5, 9, 11, 13, False)])
