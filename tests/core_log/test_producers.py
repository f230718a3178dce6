"""What is written, acknowledged or refused of a producer's sequences, against a table that remembers everything."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import SequenceRefused, UnknownFormat
from headrace.core_log.producers import WINDOW, ProducerTable
from headrace.core_log.record import Producer

ONE, OTHER = b"1" * 16, b"2" * 16
DAY_US = 24 * 3600 * 1_000_000


def table(*, expiry_us: int = 7 * DAY_US, count_max: int = 100) -> ProducerTable:
    return ProducerTable(expiry_us=expiry_us, count_max=count_max)


class Naive:
    """Every sequence ever written, by producer and epoch."""

    def __init__(self) -> None:
        self.written: dict[tuple[bytes, int], set[int]] = {}

    def unseen(self, producer: Producer, count: int) -> list[int] | None:
        """What is to be written, or None: refused."""
        newest = max((epoch for one, epoch in self.written if one == producer.id), default=None)
        if newest is not None and producer.epoch < newest:
            return None
        written = self.written.get((producer.id, producer.epoch), set())
        following = max(written, default=-1) + 1
        if producer.first_sequence < following - WINDOW:
            return None
        sequences = range(producer.first_sequence, producer.first_sequence + count)
        return [sequence for sequence in sequences if sequence not in written]

    def note(self, producer: Producer, sequences: list[int]) -> None:
        self.written.setdefault((producer.id, producer.epoch), set()).update(sequences)


sends = st.lists(
    st.tuples(
        st.sampled_from((ONE, OTHER)),
        st.integers(0, 2),
        st.one_of(st.integers(0, 20), st.integers(0, 3 * WINDOW)),
        st.integers(1, 6),
    ),
    max_size=30,
)


@given(sends, st.booleans())
def test_each_sequence_is_written_once_and_refused_only_when_nobody_can_know(
    batches: list[tuple[bytes, int, int, int]], through_snapshots: bool
) -> None:
    known, naive = table(), Naive()
    for one, epoch, first, count in batches:
        producer = Producer(one, epoch, first)
        expected = naive.unseen(producer, count)
        if expected is None:
            with pytest.raises(SequenceRefused):
                known.unseen(producer, count, now_us=0)
            continue
        ranges = known.unseen(producer, count, now_us=0)
        assert [sequence for low, high in ranges for sequence in range(low, high)] == expected
        for low, high in ranges:
            known.note(producer._replace(first_sequence=low), high - low, 0)
        naive.note(producer, expected)
        if through_snapshots:
            snapshot = known.encode(0)
            known = table()
            known.restore(snapshot)


def test_asking_changes_nothing() -> None:
    known = table()
    known.unseen(Producer(ONE, 0, 0), 3, now_us=0)
    assert known.unseen(Producer(ONE, 0, 0), 3, now_us=0) == [(0, 3)]
    assert len(known) == 0


def test_window_holds_its_sequences_and_not_one_more() -> None:
    known = table()
    known.note(Producer(ONE, 0, 0), 2 * WINDOW, 0)
    assert known.unseen(Producer(ONE, 0, WINDOW), 1, now_us=0) == []
    with pytest.raises(SequenceRefused, match="below the window"):
        known.unseen(Producer(ONE, 0, WINDOW - 1), 1, now_us=0)


def test_gap_of_a_client_is_accepted() -> None:
    known = table()
    known.note(Producer(ONE, 0, 0), 2, 0)
    assert known.unseen(Producer(ONE, 0, 5), 1, now_us=0) == [(5, 6)]


def test_o5_lower_epoch_is_fenced_and_a_higher_one_starts_afresh() -> None:
    known = table()
    known.note(Producer(ONE, 3, 0), 10, 0)
    with pytest.raises(SequenceRefused, match="fenced by epoch 3"):
        known.unseen(Producer(ONE, 2, 10), 1, now_us=0)
    assert known.unseen(Producer(ONE, 4, 0), 2, now_us=0) == [(0, 2)]
    with pytest.raises(SequenceRefused, match="fenced by epoch 3"):
        known.next_sequence(ONE, 2)
    assert known.next_sequence(ONE, 4) == 0


def test_expired_producers_make_room_and_living_ones_do_not() -> None:
    known = table(expiry_us=10, count_max=2)
    known.note(Producer(ONE, 0, 0), 1, 0)
    known.note(Producer(OTHER, 0, 0), 1, 95)
    with pytest.raises(SequenceRefused, match="2 producers are known"):
        known.unseen(Producer(b"3" * 16, 0, 0), 1, now_us=5)
    assert known.unseen(Producer(b"3" * 16, 0, 0), 1, now_us=100) == [(0, 1)]
    assert known.unseen(Producer(OTHER, 0, 0), 1, now_us=100) == []


def test_outbox_does_not_grow_old_and_takes_no_clients_room() -> None:
    known = table(expiry_us=10, count_max=2)
    known.note(Producer(ONE, 0, 0, dense=True), 3, 0)
    known.note(Producer(OTHER, 0, 0), 1, 0)
    known.unseen(Producer(b"3" * 16, 0, 0), 1, now_us=5)
    back = table(expiry_us=10)
    back.restore(known.encode(10**18))
    assert back.next_sequence(ONE, 0) == 3
    back.forget(ONE, 10**18)
    once_more = table(expiry_us=10)
    once_more.restore(back.encode(10**18 + 11))
    assert len(once_more) == 0


def test_snapshot_keeps_the_living_and_its_place_in_the_log() -> None:
    known = table(expiry_us=10)
    known.note(Producer(ONE, 0, 0), 1, 0)
    known.note(Producer(OTHER, 2, 7), 3, 95)
    known.next_offset = 1234
    back = table(expiry_us=10)
    back.restore(known.encode(100))
    assert (len(back), back.next_offset) == (1, 1234)
    assert back.unseen(Producer(OTHER, 2, 6), 5, now_us=100) == [(6, 7), (10, 11)]


@given(st.data())
def test_no_flipped_bit_of_a_snapshot_is_believed(data: st.DataObject) -> None:
    known = table()
    known.note(Producer(ONE, 1, 5), 3, 0)
    snapshot = bytearray(known.encode(0))
    snapshot[data.draw(st.integers(0, len(snapshot) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    back = table()
    back.note(Producer(OTHER, 0, 0), 1, 0)
    with pytest.raises(UnknownFormat):
        back.restore(bytes(snapshot))
    assert len(back) == 1
