"""The bytes between nodes: the opening of a link, its hello, and the frames after it. Format; pure.

    opening   | magic "HRpeer" | version u16 | nonce 32 B |                                        40 bytes, both ways
    proof     | HMAC-SHA256 over who speaks, both nonces and the hello (secret.py) | size u32 | hello |
    frame     | size u32 | kind u8 | payload |                    size counts kind and payload; little-endian throughout

A hello is msgpack. What kinds of frames there are and what their payloads mean is the affair of whoever uses the link:
controller, replication, relay. Sizes are bounded before anything is allocated: by HELLO_BYTES_MAX before the proof was
checked, by FRAME_BYTES_MAX afterwards.
"""

import struct
from collections.abc import Sequence
from enum import IntEnum
from uuid import UUID

import msgspec

from headrace.core_log.peer.errors import PeerGone, PeerRefused

MAGIC = b"HRpeer"
VERSION = 1
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES_MAX = 64 * 1024
FRAME_BYTES_MAX = 64 * 1024 * 1024

_OPENING = struct.Struct(f"<6sH{NONCE_BYTES}s")
_SIZE = struct.Struct("<I")
_FRAME = struct.Struct("<IB")
OPENING_BYTES = _OPENING.size
FRAME_HEAD_BYTES = _FRAME.size
PROVEN_HEAD_BYTES = PROOF_BYTES + _SIZE.size


class Purpose(IntEnum):
    """What a link is for; the side that was connected to hands it to its handler by this."""

    CONTROL = 1
    FETCH = 2
    RELAY = 3


class Hello(msgspec.Struct, frozen=True, array_like=True):
    """Who speaks, and what for."""

    cluster: UUID
    node: int
    incarnation: int
    disk: UUID
    purpose: Purpose
    # FETCH: the shard, as text. RELAY: the relay's own opening message.
    detail: bytes = b""
    # Why there will be no link; the answer of one who is asked and does not want it.
    refusal: str = ""


def encode_opening(nonce: bytes, version: int = VERSION) -> bytes:
    return _OPENING.pack(MAGIC, version, nonce)


def decode_opening(data: bytes) -> bytes:
    """The other side's nonce. Raises PeerRefused for one that speaks something else."""
    magic, version, nonce = _OPENING.unpack(data)
    if magic != MAGIC:
        raise PeerRefused("the other side is no peer: it speaks another protocol")
    if version != VERSION:
        raise PeerRefused(f"the other side speaks version {version} of the peer protocol, this node version {VERSION}")
    found: bytes = nonce
    return found


def encode_proven(proof: bytes, hello: bytes) -> bytes:
    return proof + _SIZE.pack(len(hello)) + hello


def decode_proven_head(data: bytes) -> tuple[bytes, int]:
    """(proof, bytes of the hello that follow). Raises PeerRefused for more than a hello ever has."""
    (size,) = _SIZE.unpack_from(data, PROOF_BYTES)
    if size > HELLO_BYTES_MAX:
        raise PeerRefused(f"a hello of {size} bytes is longer than {HELLO_BYTES_MAX}")
    return data[:PROOF_BYTES], size


def encode_hello(hello: Hello) -> bytes:
    return msgspec.msgpack.encode(hello)


def decode_hello(data: bytes) -> Hello:
    """Only for what was proven. Raises PeerRefused."""
    try:
        return msgspec.msgpack.decode(data, type=Hello)
    except (msgspec.DecodeError, ValueError) as error:
        raise PeerRefused(f"the other side's hello cannot be read: {error}") from error


def frame_head(kind: int, parts: Sequence[bytes | memoryview]) -> bytes:
    """What goes before the parts of a payload."""
    size = sum(map(len, parts)) + 1
    if size > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {size} bytes is longer than {FRAME_BYTES_MAX}")
    return _FRAME.pack(size, kind)


def decode_frame_head(data: bytes | bytearray) -> tuple[int, int]:
    """(kind, bytes of payload that follow). Raises PeerGone for a size that no frame has."""
    size, kind = _FRAME.unpack_from(data)
    if not 1 <= size <= FRAME_BYTES_MAX:
        raise PeerGone(f"a frame of {size} bytes is none: the other side broke the protocol")
    return kind, size - 1
