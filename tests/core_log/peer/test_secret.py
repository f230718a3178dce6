"""A proof is about one secret, one role, two nonces and one hello."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headrace.core_log.peer.secret import Role, check_secret, is_proof, prove

inputs = st.tuples(
    st.binary(min_size=16, max_size=40),
    st.sampled_from(Role),
    st.binary(min_size=32, max_size=32),
    st.binary(min_size=32, max_size=32),
    st.binary(max_size=40),
)


@given(inputs, inputs)
def test_two_proofs_are_alike_only_for_the_same_words(one: tuple, other: tuple) -> None:
    assert is_proof(prove(*one), prove(*one))
    assume(one != other)
    # HMAC fills short keys up with zeros.
    assume(one[0].rstrip(b"\0") != other[0].rstrip(b"\0") or one[1:] != other[1:])
    assert not is_proof(prove(*one), prove(*other))


def test_a_proof_cannot_be_sent_back_to_its_maker() -> None:
    words = (bytes(32), bytes(32), b"hello")
    assert prove(b"s" * 16, Role.CALLER, *words) != prove(b"s" * 16, Role.DOOR, *words)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 16"):
        check_secret(b"hunter2\n")
    assert check_secret(b"0123456789abcdef\n") == b"0123456789abcdef"
