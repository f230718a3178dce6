"""SCRAM-SHA-256: the exchange of RFC 7677, everything a client can say wrong, and an independent client's proof."""

from base64 import b64decode, b64encode
from contextlib import suppress
from hashlib import pbkdf2_hmac, sha256
from hmac import digest

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.verifiers import Verifier, derive
from headrace.gateways.mqtt.scram import MESSAGE_BYTES_MAX, Exchange, ScramError

from .scram_client import ScramClient

# RFC 7677, 3.
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
VERIFIER = derive("pencil", b64decode("W22ZaJ0SNY7soEsUEjb6gQ=="), 4096)


def begun(first: bytes = CLIENT_FIRST) -> Exchange:
    exchange = Exchange(NONCE)
    exchange.begin(first)
    exchange.challenge(VERIFIER)
    return exchange


def test_exchange_of_rfc_7677() -> None:
    exchange = Exchange(NONCE)
    assert exchange.begin(CLIENT_FIRST) == "user"
    assert exchange.challenge(VERIFIER) == SERVER_FIRST
    assert exchange.finish(CLIENT_FINAL) == SERVER_FINAL


def test_wrong_proof_gets_no_signature() -> None:
    proof = CLIENT_FINAL.rpartition(b"p=")[2]
    wrong = b64encode(bytes([b64decode(proof)[0] ^ 1]) + b64decode(proof)[1:])
    assert begun().finish(CLIENT_FINAL.replace(proof, wrong)) is None


def test_proof_of_one_exchange_is_none_in_another() -> None:
    replayed = Exchange("other")
    replayed.begin(CLIENT_FIRST)
    replayed.challenge(VERIFIER)
    with pytest.raises(ScramError):
        replayed.finish(CLIENT_FINAL)
    # Even if the client puts the new nonce into its old message.
    mended = CLIENT_FINAL.replace(NONCE.encode(), b"other")
    assert replayed.finish(mended) is None


@pytest.mark.parametrize(
    ("first", "name"),
    [
        (b"n,,n=a=2Cb=3Dc,r=x", "a,b=c"),
        (b"y,,n=user,r=x", "user"),
        (b"n,a=user,n=user,r=x", "user"),
        (b"n,,n=user,r=x,extension=1", "user"),
        ("n,,n=jürgen,r=x".encode(), "jürgen"),
    ],
)
def test_client_says_who_it_is(first: bytes, name: str) -> None:
    assert Exchange(NONCE).begin(first) == name


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n",
        b"n,",
        b"n,,",
        b"n,,n=user",
        b"n,,n=user,r=",
        b"n,,n=,r=x",
        b"n,,r=x,n=user",
        b"n,,m=must,n=user,r=x",
        b"n,,n=a=2cb,r=x",
        b"n,,n=a=,r=x",
        b"p=tls-unique,,n=user,r=x",
        b"x,,n=user,r=x",
        b"n,a=admin,n=user,r=x",
        b"n,admin,n=user,r=x",
        b"n,,n=\xff,r=x",
        b"n,,n=user,r=" + b"x" * MESSAGE_BYTES_MAX,
    ],
)
def test_first_message_that_is_none_is_refused(first: bytes) -> None:
    with pytest.raises(ScramError):
        Exchange(NONCE).begin(first)


@pytest.mark.parametrize(
    "final",
    [
        b"",
        CLIENT_FINAL.partition(b",p=")[0],
        CLIENT_FINAL.replace(b"biws", b"eSws"),
        CLIENT_FINAL.replace(b"biws", b"!!!!"),
        CLIENT_FINAL.replace(NONCE.encode(), b""),
        CLIENT_FINAL.replace(b"c=biws,", b""),
        CLIENT_FINAL[:-4],
        CLIENT_FINAL + b"!",
        b"\xff",
    ],
)
def test_last_message_that_is_none_is_refused(final: bytes) -> None:
    with pytest.raises(ScramError):
        begun().finish(final)


@given(st.binary(max_size=200))
def test_whatever_comes_is_judged_or_refused(octets: bytes) -> None:
    with suppress(ScramError):
        assert Exchange(NONCE).begin(octets)
    with suppress(ScramError):
        assert begun().finish(octets) is None


name = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), min_size=1, max_size=20)
password = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)


@given(name, password, st.binary(min_size=1, max_size=32))
def test_whoever_knows_the_password_and_nobody_else_gets_in(name: str, password: str, salt: bytes) -> None:
    verifier = derive(password, salt, 4096)
    for tried in (password, password + "x"):
        exchange, client = Exchange(NONCE), ScramClient(name, tried)
        assert exchange.begin(client.first()) == name
        answer = exchange.finish(client.final(exchange.challenge(verifier)))
        assert (answer is not None) == (tried == password)
        if answer is not None:
            assert client.knows_server(answer)


def test_stolen_verifier_is_no_password() -> None:
    """What is kept is the hash of what is proven."""
    salted = pbkdf2_hmac("sha256", b"pencil", VERIFIER.salt, 4096)
    assert sha256(digest(salted, b"Client Key", sha256)).digest() == VERIFIER.stored_key
    client = ScramClient("user", "?")
    exchange = Exchange(NONCE)
    exchange.begin(client.first())
    thief = client.final(exchange.challenge(VERIFIER), client_key=VERIFIER.stored_key)
    assert exchange.finish(thief) is None


def test_decoy_has_the_shape_of_a_verifier() -> None:
    decoy = Verifier(4096, bytes(16), bytes(32), bytes(32))
    exchange, client = Exchange(NONCE), ScramClient("nobody", "x")
    exchange.begin(client.first())
    assert len(exchange.challenge(decoy)) == len(SERVER_FIRST) - len("rOprNGfwEbeRWgbNEkqO") + len(client.nonce)
