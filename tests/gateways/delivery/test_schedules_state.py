"""A schedule comes back from the log as it was written, and what is no schedule is told from one."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import UnknownFormat
from headrace.delay.cron import Cron, Missed
from headrace.gateways.delivery.schedules_state import (
    Definition,
    Message,
    Schedule,
    decode_schedule,
    encode_schedule,
    schedule_key,
    split_key,
)

names = st.text(st.characters(codec="utf-8"), max_size=30)
counts = st.integers(0, 2**53)
times = st.none() | counts
schedules = st.builds(
    Schedule,
    names,
    names,
    st.uuids(),
    st.builds(
        Definition,
        st.builds(Cron, names, names),
        st.builds(
            Message,
            names,
            st.binary(max_size=20),
            st.binary(max_size=20),
            st.binary(max_size=20),
            st.integers(0, 2**31),
            st.lists(names, max_size=3).map(tuple),
        ),
        st.sampled_from(Missed),
        st.booleans(),
    ),
    counts,
    counts,
    counts,
    times,
    times,
    counts,
    counts,
    counts,
)


@given(schedules)
def test_a_schedule_comes_back_as_it_was(schedule: Schedule) -> None:
    key = schedule_key(schedule.vhost, schedule.name)
    assert split_key(key) == (schedule.vhost, schedule.name)
    assert decode_schedule(key, encode_schedule(schedule)) == schedule


@given(st.binary(max_size=60))
def test_other_bytes_are_refused_or_a_schedule(octets: bytes) -> None:
    key = schedule_key("/", "nightly")
    try:
        found = decode_schedule(key, octets)
    except UnknownFormat:
        return
    assert found.name == "nightly"


def test_a_later_format_is_refused_by_its_number() -> None:
    schedule = Schedule("/", "nightly", UUID(int=1), Definition(Cron("@daily"), Message("", b"", b"", b"", 0)), 0)
    later = bytearray(encode_schedule(schedule))
    assert later[3] == 1
    later[3] = 2
    with pytest.raises(UnknownFormat, match="reads format 1"):
        decode_schedule(schedule_key("/", "nightly"), bytes(later))
