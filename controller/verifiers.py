"""SCRAM-SHA-256 verifiers: what is kept so that a password can be proven without being sent. Format, pure.

    SCRAM-SHA-256$<iterations>:<salt>$<StoredKey>:<ServerKey>        base64, as PostgreSQL writes it

RFC 5802 has the names, RFC 7677 the hash. It cannot be made from an argon2 hash, so it is made when the password is at
hand and kept beside it. Whoever steals it can guess passwords at the price of its iterations, and can play the server
to that user; not log in.
"""

import stringprep
import unicodedata
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass, field
from hashlib import pbkdf2_hmac, sha256
from hmac import digest

from headrace.controller.errors import Invalid

MECHANISM = "SCRAM-SHA-256"
# RFC 7677 asks for so many at least; a client computes them at each login, be it ever so small a device.
ITERATIONS_MIN = 4_096
ITERATIONS = 15_000
_ITERATIONS_MAX = 10_000_000
SALT_BYTES = 16
_KEY_BYTES = 32


@dataclass(frozen=True, slots=True)
class Verifier:
    iterations: int
    salt: bytes
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)

    def __str__(self) -> str:
        salt, stored, server = (b64encode(part).decode() for part in (self.salt, self.stored_key, self.server_key))
        return f"{MECHANISM}${self.iterations}:{salt}${stored}:{server}"


def derive(password: str, salt: bytes, iterations: int = ITERATIONS) -> Verifier:
    """Takes some milliseconds. Invalid for a password that is not text: such a one cannot be proven this way."""
    try:
        secret = prepare(password).encode()
    except UnicodeEncodeError:
        raise Invalid("the password is not text") from None
    salted = pbkdf2_hmac("sha256", secret, salt, iterations)
    client_key = digest(salted, b"Client Key", sha256)
    return Verifier(iterations, salt, sha256(client_key).digest(), digest(salted, b"Server Key", sha256))


def scram_of(password: str, salt: bytes) -> str:
    """What is kept of a password; nothing of one that is not text."""
    try:
        return str(derive(password, salt))
    except Invalid:
        return ""


def parse(text: str) -> Verifier:
    """The verifier that was written so, or Invalid."""
    try:
        mechanism, cost, keys = text.split("$")
        iterations, salt = cost.split(":")
        stored, server = (b64decode(part, validate=True) for part in keys.split(":"))
        found = Verifier(int(iterations), b64decode(salt, validate=True), stored, server)
    except (ValueError, NotBase64):
        raise Invalid("not a SCRAM verifier: <mechanism>$<iterations>:<salt>$<StoredKey>:<ServerKey>") from None
    if mechanism != MECHANISM or not len(found.stored_key) == len(found.server_key) == _KEY_BYTES or not found.salt:
        raise Invalid(f"not a verifier of {MECHANISM}")
    if not ITERATIONS_MIN <= found.iterations <= _ITERATIONS_MAX:
        raise Invalid(f"a SCRAM verifier has {ITERATIONS_MIN} to {_ITERATIONS_MAX} iterations, not {found.iterations}")
    return found


def prepare(text: str) -> str:
    """SASLprep (RFC 4013), so that the same password typed on two keyboards is the same. What it forbids is taken as it
    is, as PostgreSQL does: a password may hold anything."""
    if text.isascii():
        return text
    mapped = "".join(" " if stringprep.in_table_c12(one) else one for one in text if not stringprep.in_table_b1(one))
    prepared = unicodedata.normalize("NFKC", mapped)
    if not prepared or any(_is_forbidden(one) for one in prepared):
        return text
    if any(map(stringprep.in_table_d1, prepared)):
        both_ends = stringprep.in_table_d1(prepared[0]) and stringprep.in_table_d1(prepared[-1])
        if not both_ends or any(map(stringprep.in_table_d2, prepared)):
            return text
    return prepared


def _is_forbidden(one: str) -> bool:
    return (
        stringprep.in_table_a1(one)
        or stringprep.in_table_c12(one)
        or stringprep.in_table_c21_c22(one)
        or stringprep.in_table_c3(one)
        or stringprep.in_table_c4(one)
        or stringprep.in_table_c5(one)
        or stringprep.in_table_c6(one)
        or stringprep.in_table_c7(one)
        or stringprep.in_table_c8(one)
        or stringprep.in_table_c9(one)
    )
