"""The bytes between nodes: what is written is read back, and nothing else is taken for it."""

from uuid import UUID

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.peer.errors import LinkError, PeerGone, PeerRefused
from headrace.core_log.peer.frames import (
    FRAME_BYTES_MAX,
    FRAME_HEAD_BYTES,
    HELLO_BYTES_MAX,
    NONCE_BYTES,
    OPENING_BYTES,
    PROOF_BYTES,
    PROVEN_HEAD_BYTES,
    VERSION,
    Hello,
    Purpose,
    decode_frame_head,
    decode_hello,
    decode_opening,
    decode_proven_head,
    encode_hello,
    encode_opening,
    encode_proven,
    frame_head,
)

hellos = st.builds(
    Hello,
    st.uuids(),
    st.integers(0, 2**31),
    st.integers(0, 2**62),
    st.uuids(),
    st.sampled_from(Purpose),
    st.binary(max_size=200),
    st.text(max_size=50),
)


@given(hellos)
def test_a_hello_is_read_as_it_was_written(hello: Hello) -> None:
    assert decode_hello(encode_hello(hello)) == hello


@given(st.binary(max_size=200))
def test_what_is_no_hello_is_refused(data: bytes) -> None:
    try:
        found = decode_hello(data)
    except PeerRefused:
        return
    assert isinstance(found.cluster, UUID)


def test_a_hello_for_a_purpose_that_is_none_is_refused() -> None:
    words = msgspec.msgpack.encode([str(UUID(int=1)), 1, 1, str(UUID(int=2)), 9, b""])
    with pytest.raises(PeerRefused, match="9"):
        decode_hello(words)


@given(st.binary(min_size=NONCE_BYTES, max_size=NONCE_BYTES))
def test_an_opening_brings_its_nonce(nonce: bytes) -> None:
    data = encode_opening(nonce)
    assert len(data) == OPENING_BYTES
    assert decode_opening(data) == nonce


@given(st.binary(min_size=OPENING_BYTES, max_size=OPENING_BYTES))
def test_another_protocol_is_no_opening(data: bytes) -> None:
    with pytest.raises(PeerRefused, match="another protocol"):
        decode_opening(data)


def test_another_version_is_told_by_its_number() -> None:
    with pytest.raises(PeerRefused, match=f"version {VERSION + 1} .* this node version {VERSION}"):
        decode_opening(encode_opening(bytes(NONCE_BYTES), VERSION + 1))


@given(st.binary(max_size=100))
def test_a_proof_says_how_much_follows(hello: bytes) -> None:
    data = encode_proven(b"p" * PROOF_BYTES, hello)
    assert decode_proven_head(data[:PROVEN_HEAD_BYTES]) == (b"p" * PROOF_BYTES, len(hello))


def test_nobody_unproven_makes_us_read_much() -> None:
    with pytest.raises(PeerRefused, match="longer than"):
        decode_proven_head(bytes(PROOF_BYTES) + (HELLO_BYTES_MAX + 1).to_bytes(4, "little"))


@given(st.integers(0, 255), st.lists(st.binary(max_size=50), max_size=4))
def test_a_frame_counts_its_parts(kind: int, parts: list[bytes]) -> None:
    head = frame_head(kind, parts)
    assert len(head) == FRAME_HEAD_BYTES
    assert decode_frame_head(head) == (kind, sum(map(len, parts)))


@given(st.binary(min_size=FRAME_HEAD_BYTES, max_size=FRAME_HEAD_BYTES))
def test_a_frame_is_never_longer_than_allowed(data: bytes) -> None:
    try:
        _kind, size = decode_frame_head(data)
    except LinkError:
        return
    assert 0 <= size < FRAME_BYTES_MAX


def test_a_frame_that_is_too_long_is_refused_on_both_sides() -> None:
    with pytest.raises(PeerGone, match="broke the protocol"):
        decode_frame_head((FRAME_BYTES_MAX + 1).to_bytes(4, "little") + b"\1")
    with pytest.raises(ValueError, match="longer than"):
        frame_head(1, [memoryview(bytes(FRAME_BYTES_MAX))])
