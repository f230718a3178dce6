"""Password hashes: what verifies, what does not, and what never shows."""

from base64 import b64encode
from hashlib import sha256, sha512

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.controller.passwords import (
    DEFAULT_COST,
    HashCost,
    decoy,
    hash_password,
    is_password_hash,
    matches_rabbitmq_hash,
    needs_rehash,
    verify_password,
    wrap_rabbitmq_hash,
)

CHEAP = HashCost(memory_kib=8, passes=1)
SHA256, SHA512 = "rabbit_password_hashing_sha256", "rabbit_password_hashing_sha512"
# The worked example of RabbitMQ's documentation: salt 908DC60A, password test12.
EXPORTED = "kI3GCqW5JLMJa4iX1lo7X4D6XbYqlLgxIs30+P6tENUV2POR"


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(), min_size=1, max_size=40), st.text(st.characters(), max_size=40))
def test_password_verifies_and_another_does_not(password: str, other: str) -> None:
    stored = hash_password(password, CHEAP)
    assert verify_password(stored, password)
    assert verify_password(stored, other) == (other == password)


def test_password_that_is_no_text_is_its_bytes() -> None:
    stored = hash_password(b"\xff\xfe".decode("utf-8", "surrogateescape"), CHEAP)
    assert verify_password(stored, b"\xff\xfe".decode("utf-8", "surrogateescape"))
    assert not verify_password(stored, "\ud800")


def test_known_answer_of_argon2id() -> None:
    # argon2 reference implementation: `echo -n password | argon2 somesalt -id -t 2 -m 16 -p 1`.
    stored = "$argon2id$v=19$m=65536,t=2,p=1$c29tZXNhbHQ$CTFhFdXPJO1aFaMaO6Mm5c8y7cJHAph8ArZWb2GRPPc"
    assert verify_password(stored, "password")
    assert not verify_password(stored, "Password")


def test_hash_carries_its_parameters_and_a_salt_of_its_own() -> None:
    one, two = hash_password("secret", CHEAP), hash_password("secret", CHEAP)
    assert one.startswith("$argon2id$v=19$m=8,t=1,p=1$")
    assert one != two


def test_default_cost_is_argon2id_with_19_mib() -> None:
    stored = hash_password("secret")
    assert stored.startswith("$argon2id$v=19$m=19456,t=2,p=1$")
    assert not needs_rehash(stored)
    assert needs_rehash(hash_password("secret", CHEAP))


def test_rabbitmq_hash_verifies_and_is_not_stored_as_it_came() -> None:
    stored = wrap_rabbitmq_hash(EXPORTED, SHA256, CHEAP)
    assert verify_password(stored, "test12")
    assert not verify_password(stored, "test13")
    assert EXPORTED[8:] not in stored
    assert "$argon2id$" in stored


def test_rabbitmq_sha512_hash_verifies() -> None:
    exported = b64encode(b"salt" + sha512(b"saltpw").digest()).decode()
    assert verify_password(wrap_rabbitmq_hash(exported, SHA512, CHEAP), "pw")


def test_wrapped_hash_is_recognised_as_its_export_only() -> None:
    stored = wrap_rabbitmq_hash(EXPORTED, SHA256, CHEAP)
    assert matches_rabbitmq_hash(stored, EXPORTED, SHA256)
    assert not matches_rabbitmq_hash(stored, b64encode(b"salt" + sha256(b"saltpw").digest()).decode(), SHA256)
    other_same_salt = b64encode(bytes.fromhex("908dc60a") + bytes(32)).decode()
    assert not matches_rabbitmq_hash(stored, other_same_salt, SHA256)
    assert not matches_rabbitmq_hash(hash_password("test12", CHEAP), EXPORTED, SHA256)


def test_wrapped_hash_is_rehashed_when_the_cost_changes() -> None:
    stored = wrap_rabbitmq_hash(EXPORTED, SHA256, CHEAP)
    assert not needs_rehash(stored, CHEAP)
    assert needs_rehash(stored, HashCost(memory_kib=16, passes=1))


@pytest.mark.parametrize(
    ("exported", "algorithm"),
    [("!", SHA256), ("AAAA", SHA256), (EXPORTED, SHA512), (EXPORTED, "rabbit_password_hashing_md5"), ("é", SHA256)],
)
def test_malformed_export_is_refused_without_showing_it(exported: str, algorithm: str) -> None:
    with pytest.raises(Invalid) as refused:
        wrap_rabbitmq_hash(exported, algorithm, CHEAP)
    assert exported == "!" or exported not in str(refused.value)
    assert refused.value.__cause__ is None


def test_blank_password_is_never_hashed() -> None:
    with pytest.raises(Invalid, match="blank"):
        hash_password("", CHEAP)


@pytest.mark.parametrize("stored", ["", "nonsense", "$argon2id$", "$rabbit-sha256$", "$rabbit-sha256$AAAA$nonsense"])
def test_stored_nonsense_verifies_nothing(stored: str) -> None:
    assert not verify_password(stored, "")
    assert not verify_password(stored, "nonsense")
    assert needs_rehash(stored, CHEAP)
    assert not is_password_hash(stored)


def test_stored_forms_are_recognised() -> None:
    assert is_password_hash(hash_password("x", CHEAP))
    assert is_password_hash(wrap_rabbitmq_hash(EXPORTED, SHA256, CHEAP))
    assert not is_password_hash("$other" + hash_password("x", CHEAP))
    assert not is_password_hash(EXPORTED)


def test_decoy_is_as_dear_as_a_real_hash_and_matches_nothing() -> None:
    for cost in (CHEAP, DEFAULT_COST):
        assert not needs_rehash(decoy(cost), cost)
        assert not verify_password(decoy(cost), "")
        assert not verify_password(decoy(cost), "guest")


@pytest.mark.parametrize("cost", [(7, 1, 1), (8, 0, 1), (8, 1, 0), (15, 1, 2)])
def test_impossible_cost_is_refused(cost: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="argon2"):
        HashCost(*cost)
