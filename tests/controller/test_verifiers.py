"""A verifier is what RFC 7677 says of its password, reads back as it was written, and nothing else passes for one."""

from base64 import b64decode
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.controller.verifiers import ITERATIONS, ITERATIONS_MIN, Verifier, derive, parse, prepare, scram_of

SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
# Of the example in RFC 7677, 3: the password is pencil. As PostgreSQL 15 has it for that salt.
RFC_7677 = (
    "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ=="
    "$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
)


def test_verifier_of_the_rfc() -> None:
    assert str(derive("pencil", SALT, 4096)) == RFC_7677
    assert parse(RFC_7677) == derive("pencil", SALT, 4096)


@given(st.integers(ITERATIONS_MIN, 10_000_000), st.binary(min_size=1, max_size=40), st.binary(min_size=32, max_size=32))
def test_verifier_comes_back(iterations: int, salt: bytes, key: bytes) -> None:
    verifier = Verifier(iterations, salt, key, sha256(key).digest())
    assert parse(str(verifier)) == verifier


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pencil",
        RFC_7677.replace("256", "1"),
        RFC_7677.replace("4096", "4095"),
        RFC_7677.replace("4096", "-1"),
        RFC_7677.replace("4096", "99999999999"),
        RFC_7677.replace("W22ZaJ0SNY7soEsUEjb6gQ==", ""),
        RFC_7677.replace("W22Z", "W2!Z"),
        RFC_7677[:-4],
        RFC_7677 + "$",
        RFC_7677 + ":AAAA",
    ],
)
def test_what_is_no_verifier_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse(text)


@given(st.text())
def test_any_text_is_a_verifier_or_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse(text)


def test_keys_are_not_shown_by_repr() -> None:
    assert derive("pencil", SALT, 4096).stored_key.hex()[:8] not in repr(derive("pencil", SALT, 4096))
    assert "stored_key" not in repr(derive("pencil", SALT, 4096))


@pytest.mark.parametrize(
    ("text", "prepared"),
    [
        # The examples of RFC 4013, 3.
        ("I\u00adX", "IX"),
        ("user", "user"),
        ("USER", "USER"),
        ("\u00aa", "a"),
        ("\u2168", "IX"),
        # Forbidden there, so taken as they are.
        ("\u0007é", "\u0007é"),
        ("\u06271", "\u06271"),
        ("\u00ad", "\u00ad"),
        # A space is a space.
        ("a\u00a0b", "a b"),
    ],
)
def test_password_is_prepared_as_rfc_4013_says(text: str, prepared: str) -> None:
    assert prepare(text) == prepared


def test_same_password_typed_otherwise_has_the_same_verifier() -> None:
    assert derive("café", SALT, 4096) == derive("cafe\u0301", SALT, 4096)


def test_password_that_is_no_text_has_none() -> None:
    assert scram_of("\udcff", SALT) == ""
    assert parse(scram_of("pencil", SALT)).iterations == ITERATIONS
