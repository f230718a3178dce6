"""Who somebody is: names and passwords, certificates, and guessing made slow. Machine: `now` is handed in.

A password takes a worker thread tens of milliseconds to check, so a login has two halves:

    match login.begin(name, password, address, peer_is_loopback, now):
        case Identity() | Refusal() as outcome: ...             # known from before, or not worth the work
        case Check() as check:                                  # in a worker thread:
            verified = verify_password(check.stored, password)
            outcome = login.finish(check, verified, now)

A password that is proven by SCRAM needs no thread, and has two halves since the client speaks in between: `begin_proof`
says what it must prove, to a user that does not exist too, and `finish_proof` takes the outcome.

Whoever drives it takes a place among the few hashing threads before `begin`, so that a burst of guesses cannot all
begin before the first has failed (authentication.py does). An unknown user, a wrong password, a user without password
and a user who may only come from this machine all take the same work and get the same words; the log has the reason.

From the fifth failure for a user from an address on, further attempts from there are refused unchecked for a time
that doubles. Other addresses are not touched. Loopback is not slowed: all local programs share that address.
A verified password is remembered as an HMAC under a key of this process, while the user's hash stays what it was.
"""

from dataclasses import dataclass, field
from enum import Enum
from hashlib import sha256
from hmac import compare_digest, digest

from headrace.controller.entities import User, Version
from headrace.controller.passwords import DEFAULT_COST, HashCost, decoy
from headrace.controller.snapshot import Snapshot
from headrace.controller.verifiers import ITERATIONS, SALT_BYTES, Verifier, parse


@dataclass(frozen=True, slots=True)
class LoginConfig:
    # These log in only from this machine itself.
    loopback_users: frozenset[str] = frozenset({"guest"})
    # Failures that cost nothing; the next one costs `delay_s`, and each after that twice as much, up to the maximum.
    free_failure_count: int = 4
    delay_s: float = 1.0
    delay_s_max: float = 60.0
    # A failure is forgotten after this long without another.
    forget_s: float = 900.0
    # How many (user, address) pairs with failures, and how many users with a verified password, are remembered; the
    # oldest go first.
    failures_max: int = 10_000
    verified_max: int = 100_000
    hash_cost: HashCost = DEFAULT_COST

    def __post_init__(self) -> None:
        if min(self.failures_max, self.verified_max) < 1:
            raise ValueError("failures_max and verified_max must be 1 or more")
        if self.free_failure_count < 0 or not 0 <= self.delay_s <= self.delay_s_max:
            raise ValueError("free_failure_count must not be negative, and 0 <= delay_s <= delay_s_max")


@dataclass(frozen=True, slots=True)
class Identity:
    name: str
    tags: tuple[str, ...]


class Reason(Enum):
    """For the log; the peer is told none of them."""

    BLANK_PASSWORD = "blank password"
    CREDENTIALS = "unknown user or wrong password"
    LOOPBACK_ONLY = "this user can only connect from the broker's own machine"
    NO_VERIFIER = "this user's password was set before SCRAM verifiers were kept, or as a hash"
    PROOF = "unknown user or wrong proof"
    THROTTLED = "too many failures from this address"
    UNKNOWN_CERTIFICATE = "no user has the certificate's name"


@dataclass(frozen=True, slots=True)
class Refusal:
    reason: Reason


@dataclass(frozen=True, slots=True)
class Check:
    """A password to be verified against `stored`, then handed to `finish`."""

    name: str
    stored: str = field(repr=False)
    # The user as it was asked about; None if there is no such user or it has no password.
    version: Version | None
    peer_is_loopback: bool
    _source: bytes = field(repr=False)
    _proof: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProofCheck:
    """A proof to be held against `verifier`, then handed to `finish_proof`."""

    name: str
    verifier: Verifier
    peer_is_loopback: bool
    # What the user's verifier was; empty if there is no such user or it has none.
    _stored: str = field(repr=False)
    _source: bytes = field(repr=False)


@dataclass(slots=True)
class _Failures:
    count: int
    last_s: float
    not_before_s: float


class Login:
    def __init__(self, snapshot: Snapshot, *, key: bytes, config: LoginConfig | None = None) -> None:
        """`key`: 32 random bytes, another one in each process."""
        self._snapshot = snapshot
        self._key = key
        self._config = config or LoginConfig()
        self._decoy = decoy(self._config.hash_cost)
        # Oldest first. Keys are digests: names and addresses of strangers take no more room than that.
        self._failures: dict[bytes, _Failures] = {}
        # By user: a seal over the hash against which, and the proof with which, the password was verified.
        self._verified: dict[str, bytes] = {}

    def update(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def begin(
        self, name: str, password: str, address: str, peer_is_loopback: bool, now: float
    ) -> Identity | Refusal | Check:
        """`now` in seconds that never go back."""
        if not password:
            return Refusal(Reason.BLANK_PASSWORD)
        source = self._digest(b"source", name, address)
        # First of all: else the remembered proof could be guessed at without delay.
        if self._is_throttled(source, now):
            return Refusal(Reason.THROTTLED)
        proof = self._digest(b"proof", name, password)
        user = self._snapshot.users.get(name)
        if user is not None and self._remembers(user, proof):
            self._failures.pop(source, None)
            return self._admit(user, peer_is_loopback)
        if user is None or not user.password_hash:
            return Check(name, self._decoy, None, peer_is_loopback, source, proof)
        return Check(name, user.password_hash, user.version, peer_is_loopback, source, proof)

    def finish(self, check: Check, verified: bool, now: float) -> Identity | Refusal:
        user = self._snapshot.users.get(check.name)
        # A password that was changed or taken away while it was being checked is no longer one.
        if not verified or check.version is None or user is None or user.password_hash != check.stored:
            if not check.peer_is_loopback:
                self._count_failure(check._source, now)
            return Refusal(Reason.CREDENTIALS)
        self._failures.pop(check._source, None)
        self._remember(user, check._proof)
        return self._admit(user, check.peer_is_loopback)

    def begin_proof(self, name: str, address: str, peer_is_loopback: bool, now: float) -> ProofCheck | Refusal:
        source = self._digest(b"source", name, address)
        if self._is_throttled(source, now):
            return Refusal(Reason.THROTTLED)
        user = self._snapshot.users.get(name)
        stored = user.scram if user is not None else ""
        return ProofCheck(
            name, parse(stored) if stored else self._decoy_verifier(name), peer_is_loopback, stored, source
        )

    def finish_proof(self, check: ProofCheck, proven: bool, now: float) -> Identity | Refusal:
        # Once more: many may have begun before the first of them failed.
        if self._is_throttled(check._source, now):
            return Refusal(Reason.THROTTLED)
        user = self._snapshot.users.get(check.name)
        if not proven or user is None or not user.scram or user.scram != check._stored:
            if not check.peer_is_loopback:
                self._count_failure(check._source, now)
            return Refusal(Reason.NO_VERIFIER if user is not None and not user.scram else Reason.PROOF)
        self._failures.pop(check._source, None)
        return self._admit(user, check.peer_is_loopback)

    def _decoy_verifier(self, name: str) -> Verifier:
        """What nobody can prove, looking like a real one: the same salt for the same name, after a restart too."""
        key = self._snapshot.cluster.bytes
        salt, stored, server = (
            digest(key, what + name.encode("utf-8", "surrogatepass"), sha256) for what in (b"salt ", b"key ", b"own ")
        )
        return Verifier(ITERATIONS, salt[:SALT_BYTES], stored, server)

    def certified(self, name: str, peer_is_loopback: bool) -> Identity | Refusal:
        """For a peer whose certificate, already verified, bears this name (EXTERNAL)."""
        user = self._snapshot.users.get(name)
        if user is None:
            return Refusal(Reason.UNKNOWN_CERTIFICATE)
        return self._admit(user, peer_is_loopback)

    def _admit(self, user: User, peer_is_loopback: bool) -> Identity | Refusal:
        if user.name in self._config.loopback_users and not peer_is_loopback:
            return Refusal(Reason.LOOPBACK_ONLY)
        return Identity(user.name, user.tags)

    def _remembers(self, user: User, proof: bytes) -> bool:
        return compare_digest(self._verified.get(user.name, b""), self._seal(user, proof))

    def _remember(self, user: User, proof: bytes) -> None:
        self._verified.pop(user.name, None)
        self._verified[user.name] = self._seal(user, proof)
        if len(self._verified) > self._config.verified_max:
            del self._verified[next(iter(self._verified))]

    def _seal(self, user: User, proof: bytes) -> bytes:
        return digest(self._key, b"seal " + proof + user.password_hash.encode("utf-8", "surrogatepass"), sha256)

    def _is_throttled(self, source: bytes, now: float) -> bool:
        failures = self._failures.get(source)
        return failures is not None and now < failures.not_before_s

    def _count_failure(self, source: bytes, now: float) -> None:
        config = self._config
        failures = self._failures.pop(source, None)
        if failures is None or now - failures.last_s >= config.forget_s:
            failures = _Failures(0, now, now)
        failures.count += 1
        failures.last_s = now
        beyond = failures.count - config.free_failure_count
        if beyond > 0:
            # The exponent is bounded so that no count overflows a float.
            failures.not_before_s = now + min(config.delay_s_max, config.delay_s * 2.0 ** min(beyond - 1, 64))
        self._failures[source] = failures
        if len(self._failures) > config.failures_max:
            del self._failures[next(iter(self._failures))]

    def _digest(self, purpose: bytes, one: str, two: str) -> bytes:
        first, second = (text.encode("utf-8", "surrogatepass") for text in (one, two))
        # The length in front keeps ("ab", "c") apart from ("a", "bc").
        return digest(self._key, b"%s %d " % (purpose, len(first)) + first + second, sha256)
