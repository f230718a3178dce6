"""Password hashes: argon2id, with its parameters in the hash. Format; plain functions that take tens of milliseconds.

A driver calls `hash_password` and `verify_password` in a worker thread, at most two at a time. They draw salt from the
operating system; nothing else here has effects.

    $argon2id$v=19$m=19456,t=2,p=1$<salt>$<hash>
    $rabbit-sha256$<salt>$argon2id$v=19$...         argon2id over RabbitMQ's salted SHA-256 (or -sha512)

A hash exported from RabbitMQ is one round of SHA-256; it is wrapped in argon2id the moment it comes in, so no fast hash
is ever stored, and checking takes the same time for every user. It becomes a plain one when its cost is raised.
"""

from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from dataclasses import dataclass
from hashlib import new as new_digest

from argon2 import PasswordHasher
from argon2.exceptions import InvalidHashError, VerificationError

from headrace.controller.errors import Invalid

# RabbitMQ's name of the algorithm, as in its exported definitions -> (our tag, hashlib's name, size in bytes).
RABBITMQ_ALGORITHMS = {
    "rabbit_password_hashing_sha256": ("rabbit-sha256", "sha256", 32),
    "rabbit_password_hashing_sha512": ("rabbit-sha512", "sha512", 64),
}
_DIGESTS = {tag: digest for tag, digest, _ in RABBITMQ_ALGORITHMS.values()}
_RABBITMQ_SALT_BYTES = 4


@dataclass(frozen=True, slots=True)
class HashCost:
    """What one guess costs an attacker, and one login the broker. The default is OWASP's: 19 MiB, two passes, one
    lane (some 20 ms), because a fleet of devices logs in at once after every network cut."""

    memory_kib: int = 19_456
    passes: int = 2
    lanes: int = 1

    def __post_init__(self) -> None:
        if self.lanes < 1 or self.passes < 1 or self.memory_kib < 8 * self.lanes:
            raise ValueError("argon2 needs at least one lane, one pass, and 8 KiB of memory per lane")


DEFAULT_COST = HashCost()


def hash_password(password: str, cost: HashCost = DEFAULT_COST) -> str:
    if not password:
        raise Invalid("a password must not be blank")
    return _hasher(cost).hash(_bytes(password))


def wrap_rabbitmq_hash(exported: str, algorithm: str, cost: HashCost = DEFAULT_COST) -> str:
    """The stored form of a `password_hash` (and `hashing_algorithm`) exported from RabbitMQ."""
    tag, salt, digest = _parse_rabbitmq(exported, algorithm)
    return f"${tag}${b64encode(salt).decode()}{_hasher(cost).hash(digest)}"


def check_rabbitmq_hash(exported: str, algorithm: str) -> None:
    """Invalid unless it is such an export. Fast."""
    _parse_rabbitmq(exported, algorithm)


def matches_rabbitmq_hash(stored: str, exported: str, algorithm: str) -> bool:
    """Whether `stored` came from this very export. As slow as a verification."""
    tag, salt, digest = _parse_rabbitmq(exported, algorithm)
    prefix = f"${tag}${b64encode(salt).decode()}$"
    return stored.startswith(prefix) and _verify(stored[len(prefix) - 1 :], digest)


def verify_password(stored: str, password: str) -> bool:
    """Whether it is the password. An unknown user is checked against `decoy`, so that it takes as long."""
    tag, _, rest = stored.removeprefix("$").partition("$")
    digest_name = _DIGESTS.get(tag)
    if digest_name is None:
        return _verify(stored, _bytes(password))
    salt, _, argon2 = rest.partition("$")
    return _verify(f"${argon2}", new_digest(digest_name, b64decode(salt) + _bytes(password)).digest())


def needs_rehash(stored: str, cost: HashCost = DEFAULT_COST) -> bool:
    """Whether the hash was made at another cost than is asked for now. Fast."""
    argon2 = stored[stored.index("$argon2") :] if "$argon2" in stored else stored
    try:
        return _hasher(cost).check_needs_rehash(argon2)
    except InvalidHashError:
        return True


def decoy(cost: HashCost = DEFAULT_COST) -> str:
    """A hash that no password has, as slow to check as a real one: for users that do not exist."""
    nothing = b64encode(bytes(32)).decode().rstrip("=")
    salt = b64encode(bytes(16)).decode().rstrip("=")
    return f"$argon2id$v=19$m={cost.memory_kib},t={cost.passes},p={cost.lanes}${salt}${nothing}"


def is_password_hash(text: str) -> bool:
    """Whether it is a hash in the form that is stored here."""
    argon2 = text[text.index("$argon2") :] if "$argon2" in text else text
    try:
        DEFAULT_HASHER.check_needs_rehash(argon2)
    except InvalidHashError:
        return False
    tag = text.removeprefix("$").partition("$")[0]
    return argon2 == text or tag in _DIGESTS


def _parse_rabbitmq(exported: str, algorithm: str) -> tuple[str, bytes, bytes]:
    if algorithm not in RABBITMQ_ALGORITHMS:
        raise Invalid(f"'{algorithm}' is not a password hashing algorithm; known: {', '.join(RABBITMQ_ALGORITHMS)}")
    tag, _, size = RABBITMQ_ALGORITHMS[algorithm]
    try:
        raw = b64decode(exported, validate=True)
    except (NotBase64, ValueError):
        raise Invalid("a password hash from RabbitMQ must be base64 text") from None
    if len(raw) != _RABBITMQ_SALT_BYTES + size:
        raise Invalid(f"a password hash of {algorithm} has {_RABBITMQ_SALT_BYTES + size} bytes, not {len(raw)}")
    return tag, raw[:_RABBITMQ_SALT_BYTES], raw[_RABBITMQ_SALT_BYTES:]


def _hasher(cost: HashCost) -> PasswordHasher:
    return PasswordHasher(time_cost=cost.passes, memory_cost=cost.memory_kib, parallelism=cost.lanes)


def _verify(argon2: str, secret: bytes) -> bool:
    try:
        return DEFAULT_HASHER.verify(argon2, secret)
    except (VerificationError, InvalidHashError):
        return False


def _bytes(password: str) -> bytes:
    try:
        # A password that came as bytes which are not UTF-8 is carried as surrogates, and is those bytes.
        return password.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return password.encode("utf-8", "surrogatepass")


DEFAULT_HASHER = _hasher(DEFAULT_COST)
