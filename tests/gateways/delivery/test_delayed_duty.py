"""What a parked record is for comes back from its bytes as it went in, and no other bytes pass for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, decode_duty, encode_duty

names = st.text(max_size=40) | st.binary(max_size=40).map(lambda octets: octets.decode("utf-8", "surrogateescape"))
names = names.filter(lambda name: name == name.encode("utf-8", "surrogateescape").decode("utf-8", "surrogateescape"))
duties = st.builds(
    Duty,
    st.sampled_from(DutyKind),
    names,
    names,
    st.integers(min_value=0, max_value=2**64 - 1),
)


@given(duties)
def test_a_duty_comes_back_as_it_was(duty: Duty) -> None:
    assert decode_duty(encode_duty(duty)) == duty


@given(duties, duties)
def test_different_duties_have_different_bytes(one: Duty, other: Duty) -> None:
    assert (encode_duty(one) == encode_duty(other)) == (one == other)


@given(st.binary(max_size=40))
def test_other_bytes_are_a_duty_or_are_refused(octets: bytes) -> None:
    try:
        duty = decode_duty(octets)
    except ValueError:
        return
    assert encode_duty(duty) == octets


@pytest.mark.parametrize("octets", [b"", b"\x01" * 10, b"\x63" + bytes(10), b"\x01" + bytes(8) + b"\x00\x05four"])
def test_what_is_cut_short_or_of_no_kind_is_refused(octets: bytes) -> None:
    with pytest.raises(ValueError, match="not a duty"):
        decode_duty(octets)
