"""Who gets in, who does not, and how slow guessing becomes."""

from dataclasses import replace
from uuid import UUID

import pytest

from headrace.controller.changes import DeleteUser, PutPermission, PutUser, PutVhost
from headrace.controller.entities import Permission, User, Version, Vhost
from headrace.controller.passwords import HashCost, hash_password, needs_rehash, verify_password
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.controller.verifiers import derive, parse
from headrace.core_log.ids import ViewId
from headrace.gateways.delivery.login import Check, Identity, Login, LoginConfig, ProofCheck, Reason, Refusal

CHEAP = HashCost(memory_kib=8, passes=1)
CONFIG = LoginConfig(hash_cost=CHEAP)
KEY = b"k" * 32
ELSEWHERE = "192.0.2.7"
CANARY = "canary-91d2"
USERS = apply(
    load(UUID(int=0), Version(0), ViewId(1)),
    [
        PutVhost(Vhost("/")),
        PutUser(User("ann", hash_password("secret", CHEAP), ("monitoring",))),
        PutUser(User("guest", hash_password("guest", CHEAP))),
        PutUser(User("certified")),
    ],
)


class Peer:
    """Logs in as a driver would, and counts the passwords that were really checked."""

    def __init__(self, snapshot: Snapshot = USERS, config: LoginConfig = CONFIG) -> None:
        self.login = Login(snapshot, key=KEY, config=config)
        self.now = 1000.0
        self.checked = 0

    def attempt(
        self, name: str, password: str, address: str = ELSEWHERE, *, loopback: bool = False
    ) -> Identity | Refusal:
        outcome = self.login.begin(name, password, address, loopback, self.now)
        if isinstance(outcome, Check):
            self.checked += 1
            outcome = self.login.finish(outcome, verify_password(outcome.stored, password), self.now)
        return outcome


def refused(reason: Reason) -> Refusal:
    return Refusal(reason)


def test_right_password_gives_the_identity_with_its_tags() -> None:
    assert Peer().attempt("ann", "secret") == Identity("ann", ("monitoring",))


@pytest.mark.parametrize("name", ["ann", "nobody", "certified"])
def test_wrong_password_unknown_user_and_user_without_password_are_told_the_same(name: str) -> None:
    assert Peer().attempt(name, "wrong") == refused(Reason.CREDENTIALS)


@pytest.mark.parametrize("name", ["ann", "nobody", "certified"])
def test_all_of_them_take_the_same_work(name: str) -> None:
    check = Peer().login.begin(name, "wrong", ELSEWHERE, False, 0)
    assert isinstance(check, Check)
    assert not needs_rehash(check.stored, CHEAP)


@pytest.mark.parametrize("name", ["ann", "nobody", "certified"])
def test_blank_password_is_refused_unchecked(name: str) -> None:
    peer = Peer()
    assert peer.attempt(name, "") == refused(Reason.BLANK_PASSWORD)
    assert peer.checked == 0


def test_even_a_verified_decoy_lets_nobody_in() -> None:
    peer = Peer()
    for name in ("nobody", "certified"):
        check = peer.login.begin(name, "x", ELSEWHERE, False, 0)
        assert isinstance(check, Check)
        assert peer.login.finish(check, True, 0) == refused(Reason.CREDENTIALS)


def test_guest_comes_from_this_machine_only() -> None:
    peer = Peer()
    assert peer.attempt("guest", "guest", "127.0.0.1", loopback=True) == Identity("guest", ())
    assert peer.attempt("guest", "guest") == refused(Reason.LOOPBACK_ONLY)
    assert peer.attempt("guest", "wrong") == refused(Reason.CREDENTIALS)


def test_loopback_users_are_as_configured() -> None:
    peer = Peer(config=replace(CONFIG, loopback_users=frozenset({"ann"})))
    assert peer.attempt("guest", "guest") == Identity("guest", ())
    assert peer.attempt("ann", "secret") == refused(Reason.LOOPBACK_ONLY)


def test_certificate_needs_a_user_and_obeys_the_loopback_rule() -> None:
    login = Peer().login
    assert login.certified("certified", False) == Identity("certified", ())
    assert login.certified("nobody", False) == refused(Reason.UNKNOWN_CERTIFICATE)
    assert login.certified("guest", False) == refused(Reason.LOOPBACK_ONLY)
    assert login.certified("guest", True) == Identity("guest", ())


# Remembered passwords.


def test_verified_password_is_not_checked_again() -> None:
    peer = Peer()
    for _ in range(3):
        assert isinstance(peer.attempt("ann", "secret"), Identity)
    assert peer.checked == 1
    peer.attempt("ann", "wrong")
    assert peer.checked == 2


@pytest.mark.parametrize("change", [PutUser(User("ann", hash_password("changed", CHEAP))), DeleteUser("ann")], ids=repr)
def test_remembered_password_is_dropped_when_it_is_no_longer_the_password(change: PutUser | DeleteUser) -> None:
    peer = Peer()
    peer.attempt("ann", "secret")
    peer.login.update(apply(USERS, [change]))
    assert peer.attempt("ann", "secret") == refused(Reason.CREDENTIALS)
    assert peer.checked == 2


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (PutPermission(Permission("ann", "/", "", "", "")), Identity("ann", ("monitoring",))),
        (PutUser(replace(USERS.users["ann"], tags=("x",))), Identity("ann", ("x",))),
    ],
    ids=repr,
)
def test_other_changes_of_a_user_count_at_once_and_cost_no_check(
    change: PutUser | PutPermission, expected: Identity
) -> None:
    peer = Peer()
    peer.attempt("ann", "secret")
    peer.login.update(apply(USERS, [change]))
    assert peer.attempt("ann", "secret") == expected
    assert peer.checked == 1


# Proofs (SCRAM).

SCRAM = str(derive("secret", bytes(16), 4096))
PROVEN = apply(
    USERS, [PutUser(replace(USERS.users["ann"], scram=SCRAM)), PutUser(User("guest", scram=SCRAM))], Version(7)
)


class Prover:
    """Tries to prove a password; whether it does is up to the test."""

    def __init__(self, users: Snapshot = PROVEN) -> None:
        self.login = Login(users, key=KEY, config=CONFIG)
        self.now = 0.0

    def begin(self, name: str, *, address: str = ELSEWHERE, loopback: bool = False) -> ProofCheck:
        begun = self.login.begin_proof(name, address, loopback, self.now)
        assert isinstance(begun, ProofCheck)
        return begun

    def attempt(self, name: str, proven: bool, *, loopback: bool = False) -> Identity | Refusal:
        begun = self.login.begin_proof(name, ELSEWHERE, loopback, self.now)
        return begun if isinstance(begun, Refusal) else self.login.finish_proof(begun, proven, self.now)


def test_proof_is_held_against_the_verifier_of_the_user() -> None:
    peer = Prover()
    assert str(peer.begin("ann").verifier) == SCRAM
    assert peer.attempt("ann", True) == Identity("ann", ("monitoring",))
    assert peer.attempt("ann", False) == refused(Reason.PROOF)


@pytest.mark.parametrize("name", ["nobody", "certified"])
def test_user_without_a_verifier_gets_one_that_looks_real_and_never_fits(name: str) -> None:
    peer = Prover()
    decoy, real = peer.begin(name).verifier, parse(str(derive("x", peer.begin("ann").verifier.salt)))
    assert (decoy.iterations, len(decoy.salt)) == (real.iterations, len(real.salt))
    # The same each time and after a restart, as a real one is; another one for another name.
    assert Prover().begin(name).verifier == decoy
    assert peer.begin("x" + name).verifier.salt != decoy.salt
    # Even if somebody could prove it.
    assert isinstance(peer.attempt(name, True), Refusal)


def test_log_says_when_a_user_has_no_verifier_yet() -> None:
    assert Prover().attempt("certified", False) == refused(Reason.NO_VERIFIER)
    assert Prover().attempt("nobody", False) == refused(Reason.PROOF)


def test_guest_proves_its_password_from_this_machine_only() -> None:
    assert Prover().attempt("guest", True) == refused(Reason.LOOPBACK_ONLY)
    assert Prover().attempt("guest", True, loopback=True) == Identity("guest", ())


def test_proof_of_a_password_that_was_changed_meanwhile_no_longer_counts() -> None:
    peer = Prover()
    begun = peer.begin("ann")
    peer.login.update(apply(PROVEN, [PutUser(User("ann", scram=str(derive("new", bytes(16), 4096))))]))
    assert peer.login.finish_proof(begun, True, 0) == refused(Reason.PROOF)


@pytest.mark.parametrize("name", ["ann", "nobody"])
def test_wrong_proofs_and_wrong_passwords_are_slowed_together(name: str) -> None:
    peer = Prover()
    assert [peer.attempt(name, False) for _ in range(6)] == [refused(Reason.PROOF)] * 5 + [refused(Reason.THROTTLED)]
    assert peer.login.begin(name, "secret", ELSEWHERE, False, 0) == refused(Reason.THROTTLED)
    assert isinstance(peer.begin(name, address="192.0.2.8"), ProofCheck)


def test_many_proofs_that_began_at_once_are_cut_short() -> None:
    peer = Prover()
    begun = [peer.begin("ann") for _ in range(20)]
    outcomes = [peer.login.finish_proof(one, False, 0) for one in begun]
    assert outcomes == [refused(Reason.PROOF)] * 5 + [refused(Reason.THROTTLED)] * 15
    assert peer.login.finish_proof(begun[0], True, 0) == refused(Reason.THROTTLED)


def test_password_changed_while_it_was_being_checked_no_longer_lets_in() -> None:
    peer = Peer()
    check = peer.login.begin("ann", "secret", ELSEWHERE, False, 0)
    assert isinstance(check, Check)
    peer.login.update(apply(USERS, [PutUser(User("ann", hash_password("changed", CHEAP)))]))
    assert peer.login.finish(check, True, 0) == refused(Reason.CREDENTIALS)


def test_remembered_passwords_are_bounded() -> None:
    users = apply(USERS, [PutUser(User(f"u{number}", hash_password("p", CHEAP))) for number in range(5)])
    peer = Peer(users, replace(CONFIG, verified_max=3))
    for number in range(5):
        peer.attempt(f"u{number}", "p")
    assert len(peer.login._verified) == 3
    peer.attempt("u4", "p")
    assert peer.checked == 5
    peer.attempt("u0", "p")
    assert peer.checked == 6


def test_one_mans_password_does_not_serve_for_another() -> None:
    peer = Peer(apply(USERS, [PutUser(User("an", hash_password("other", CHEAP)))]))
    peer.attempt("ann", "secret")
    assert peer.attempt("an", "nsecret") == refused(Reason.CREDENTIALS)
    assert peer.attempt("an", "secret") == refused(Reason.CREDENTIALS)


# Guessing.


def test_from_the_fifth_failure_on_each_further_one_costs_twice_as_long() -> None:
    peer = Peer()
    for _ in range(5):
        assert peer.attempt("ann", "wrong") == refused(Reason.CREDENTIALS)
    for delay in (1, 2, 4, 8, 16, 32, 60, 60):
        peer.now += delay - 0.001
        assert peer.attempt("ann", "secret") == refused(Reason.THROTTLED)
        peer.now += 0.001
        assert peer.attempt("ann", "wrong") == refused(Reason.CREDENTIALS)
    assert peer.checked == 13


def test_four_failures_cost_nothing() -> None:
    peer = Peer()
    for _ in range(4):
        peer.attempt("ann", "wrong")
    assert isinstance(peer.attempt("ann", "secret"), Identity)


def test_success_clears_the_failures() -> None:
    peer = Peer()
    for _ in range(3):
        for _ in range(4):
            assert peer.attempt("ann", "wrong") == refused(Reason.CREDENTIALS)
        assert isinstance(peer.attempt("ann", "secret"), Identity)


def test_other_addresses_and_other_users_are_not_slowed() -> None:
    peer = Peer()
    for _ in range(6):
        peer.attempt("ann", "wrong")
    assert peer.attempt("ann", "secret") == refused(Reason.THROTTLED)
    assert isinstance(peer.attempt("ann", "secret", "192.0.2.8"), Identity)
    assert peer.attempt("nobody", "wrong") == refused(Reason.CREDENTIALS)


def test_unknown_user_is_slowed_alike_so_that_slowness_tells_nothing() -> None:
    peer = Peer()
    outcomes = [peer.attempt("nobody", "wrong").reason for _ in range(7)]  # type: ignore[union-attr]
    assert outcomes == [Reason.CREDENTIALS] * 5 + [Reason.THROTTLED] * 2


def test_remembered_password_cannot_be_guessed_at_without_delay() -> None:
    peer = Peer()
    assert isinstance(peer.attempt("ann", "secret"), Identity)
    for _ in range(5):
        peer.attempt("ann", "wrong")
    assert peer.attempt("ann", "secret") == refused(Reason.THROTTLED)


def test_loopback_is_never_slowed() -> None:
    peer = Peer()
    for _ in range(20):
        assert peer.attempt("ann", "wrong", "127.0.0.1", loopback=True) == refused(Reason.CREDENTIALS)
    assert isinstance(peer.attempt("ann", "secret", "127.0.0.1", loopback=True), Identity)


def test_failures_are_forgotten_after_a_quiet_time() -> None:
    peer = Peer()
    for _ in range(9):
        peer.attempt("ann", "wrong")
        peer.now += 100
    peer.now += CONFIG.forget_s
    for _ in range(5):
        assert peer.attempt("ann", "wrong") == refused(Reason.CREDENTIALS)
    assert peer.attempt("ann", "wrong") == refused(Reason.THROTTLED)


def test_memory_of_failures_is_bounded_whatever_names_come() -> None:
    peer = Peer(config=replace(CONFIG, failures_max=50))
    for number in range(200):
        peer.attempt("x" * 1000 + str(number), "wrong")
    assert len(peer.login._failures) == 50
    assert {len(key) for key in peer.login._failures} == {32}


def test_endless_failures_do_not_overflow() -> None:
    peer = Peer(config=replace(CONFIG, delay_s_max=1e9, forget_s=1e300))
    for _ in range(100):
        peer.attempt("ann", "wrong")
        peer.now += 2e9
    assert peer.checked == 100


@pytest.mark.parametrize(("name", "password"), [("\ud800", "x"), ("ann", "\udcff"), ("a" * 70_000, "x" * 70_000)])
def test_odd_bytes_and_sizes_are_only_wrong(name: str, password: str) -> None:
    assert Peer().attempt(name, password) == refused(Reason.CREDENTIALS)


def test_nothing_shows_a_password_or_a_hash() -> None:
    users = apply(USERS, [PutUser(User("eve", hash_password(CANARY, CHEAP)))])
    login = Login(users, key=KEY, config=CONFIG)
    check = login.begin("eve", CANARY, ELSEWHERE, False, 0)
    assert isinstance(check, Check)
    shown = repr(check) + repr(login.finish(check, True, 0)) + repr(login.__dict__) + repr(users)
    assert CANARY not in shown
    assert users.users["eve"].password_hash not in shown


@pytest.mark.parametrize(
    "wrong",
    [{"failures_max": 0}, {"verified_max": 0}, {"free_failure_count": -1}, {"delay_s": -1}, {"delay_s": 61}],
    ids=str,
)
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        LoginConfig(**wrong)  # type: ignore[arg-type]
