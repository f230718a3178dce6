"""The proof that a peer knows the cluster's secret. Format; pure but for the hash.

Each side has sent a nonce of its own; the proof covers both, the role of who speaks (so that it cannot be reflected),
the version and the hello that comes with it. Nothing of the other side is parsed as a request before its proof holds.
Whoever listens in learns what is said; where the network is not trusted, links run in mutual TLS beneath this.
"""

import hmac
from enum import Enum

from headrace.core_log.peer.frames import VERSION

# A proof that was overheard can be tried against guesses, at leisure: so the secret must be more than a word.
SECRET_BYTES_MIN = 16


class Role(Enum):
    """Who speaks: the one that connected, or the one that was connected to."""

    CALLER = b"caller"
    DOOR = b"door"


def check_secret(secret: bytes) -> bytes:
    """The secret, without the newline that editors add. Raises ValueError for one that can be guessed."""
    found = secret.strip()
    if len(found) < SECRET_BYTES_MIN:
        raise ValueError(f"the cluster's secret has {len(found)} bytes; it needs at least {SECRET_BYTES_MIN}")
    return found


def prove(secret: bytes, role: Role, caller_nonce: bytes, door_nonce: bytes, hello: bytes) -> bytes:
    # Everything but the hello has a fixed size, and the role ends in a zero: no two inputs run together.
    about = b"".join(
        (b"headrace peer ", role.value, b"\0", VERSION.to_bytes(2, "little"), caller_nonce, door_nonce, hello)
    )
    return hmac.digest(secret, about, "sha256")


def is_proof(found: bytes, expected: bytes) -> bool:
    return hmac.compare_digest(found, expected)
