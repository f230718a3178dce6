"""What goes over a FETCH link is read as it was written, and nothing else is taken for it."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.epochs import EpochStart
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.replication.assignment import Ballot, Copy, Member, RowVersion, Stint
from headrace.core_log.replication.frames import (
    AnswerFrame,
    FetchFrame,
    Granted,
    RefusalFrame,
    decode_answer,
    decode_fetch,
    decode_refusal,
    encode,
)
from headrace.core_log.replication.messages import Begin, Cut, Explain, Fetch, Go, LogId, Position
from headrace.core_log.spec import StreamSpec

numbers = st.integers(0, 2**63 - 1)
logs = st.builds(LogId, st.uuids(), st.integers(0, 1000))
stints = st.builds(Stint, numbers, st.integers(-1, 1000))
versions = st.builds(RowVersion, numbers, st.builds(Ballot, numbers, numbers))
copies = st.lists(st.builds(Copy, st.integers(0, 9), st.uuids()), max_size=3).map(tuple)
histories = st.none() | st.lists(st.builds(EpochStart, numbers, numbers, numbers), max_size=3).map(tuple)
positions = st.builds(Position, logs, numbers, numbers, numbers, histories)
fetches = st.builds(
    Fetch, st.builds(Member, st.integers(0, 9), numbers, st.uuids()), stints, versions, st.lists(positions).map(tuple)
)


@given(st.builds(FetchFrame, fetches, st.booleans(), numbers, st.none() | st.lists(st.uuids()).map(tuple)))
def test_a_fetch_is_read_as_it_was_written(frame: FetchFrame) -> None:
    assert decode_fetch(encode(frame)) == frame


@given(
    st.builds(
        AnswerFrame,
        stints,
        versions,
        copies,
        copies,
        st.lists(st.builds(Granted, logs, numbers, numbers, numbers), max_size=3).map(tuple),
        st.lists(st.builds(Cut, logs, numbers), max_size=3).map(tuple),
        st.lists(st.builds(Begin, logs, numbers), max_size=3).map(tuple),
        st.lists(st.builds(Explain, logs), max_size=3).map(tuple),
        numbers,
        st.lists(st.builds(StreamSpec, id=st.uuids(), name=st.text(), kind=st.text()), max_size=2).map(tuple),
        st.lists(st.uuids(), max_size=3).map(tuple),
    )
)
def test_an_answer_is_read_as_it_was_written(frame: AnswerFrame) -> None:
    found = decode_answer(encode(frame))
    assert found == frame
    assert found.answer.stint == frame.stint


def test_an_answer_tells_the_machine_what_to_do_with_each_log() -> None:
    one, other = LogId(UUID(int=1), 0), LogId(UUID(int=2), 3)
    version = RowVersion(3, Ballot(1, 0))
    frame = AnswerFrame(Stint(1, 0), version, (), (), (Granted(one, 5, 0, 0),), (Cut(other, 2),))
    assert decode_answer(encode(frame)).answer.logs == (Go(one, 5), Cut(other, 2))


@given(st.builds(RefusalFrame, stints, st.booleans()))
def test_a_refusal_is_read_as_it_was_written(frame: RefusalFrame) -> None:
    assert decode_refusal(encode(frame)) == frame


@given(st.binary(max_size=200))
def test_octets_that_say_nothing_end_the_link(data: bytes) -> None:
    for decode in (decode_fetch, decode_answer, decode_refusal):
        with pytest.raises(PeerGone, match="cannot be read"):
            decode(data)
