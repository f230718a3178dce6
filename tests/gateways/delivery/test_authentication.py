"""Logins driven for real: threads, storms, renewed hashes."""

import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import uuid4

import pytest
import trio

from headrace.controller.changes import PutUser
from headrace.controller.entities import User
from headrace.controller.passwords import HashCost, hash_password, needs_rehash, verify_password
from headrace.controller.service import MetadataService
from headrace.controller.store import Fault, MemoryStore
from headrace.controller.verifiers import derive, parse
from headrace.gateways.delivery import authentication
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.login import Identity, LoginConfig, ProofCheck, Reason, Refusal

CHEAP = HashCost(memory_kib=8, passes=1)
DEARER = HashCost(memory_kib=16, passes=1)
ELSEWHERE = "192.0.2.7"
CANARY = "canary-b7c0"


class House:
    def __init__(self, metadata: MetadataService, store: MemoryStore, doors: Authentication) -> None:
        self.metadata = metadata
        self.store = store
        self.doors = doors

    async def login(self, name: str, password: str, address: str = ELSEWHERE) -> Identity | Refusal:
        return await self.doors.login(name, password, address=address, peer_is_loopback=False)


@asynccontextmanager
async def house(cost: HashCost = CHEAP) -> AsyncIterator[House]:
    store = MemoryStore(uuid4())
    metadata = MetadataService(lambda: store, new_uuid=uuid4, hash_cost=CHEAP)
    async with trio.open_nursery() as nursery:
        await nursery.start(metadata.run)
        await metadata.commit(PutUser(User("ann", hash_password(CANARY, CHEAP))))
        config = LoginConfig(hash_cost=cost)
        yield House(
            metadata, store, Authentication(metadata, key=b"k" * 32, monotonic=trio.current_time, config=config)
        )
        nursery.cancel_scope.cancel()


class CountedChecks:
    """verify_password, with how often and how many at a time."""

    def __init__(self) -> None:
        self.count = 0
        self.at_once_max = 0
        self._inside = 0
        self._lock = threading.Lock()

    def __call__(self, stored: str, password: str) -> bool:
        with self._lock:
            self.count += 1
            self._inside += 1
            self.at_once_max = max(self.at_once_max, self._inside)
        try:
            return verify_password(stored, password)
        finally:
            with self._lock:
                self._inside -= 1


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> CountedChecks:
    checks = CountedChecks()
    monkeypatch.setattr(authentication, "verify_password", checks)
    return checks


async def test_login_by_password_and_by_certificate() -> None:
    async with house() as home:
        assert await home.login("ann", CANARY) == Identity("ann", ())
        assert await home.login("ann", "wrong") == Refusal(Reason.CREDENTIALS)
        assert await home.doors.certified("ann", address=ELSEWHERE, peer_is_loopback=False) == Identity("ann", ())


async def test_changed_password_is_effective_at_once() -> None:
    async with house() as home:
        assert await home.login("ann", CANARY) == Identity("ann", ())
        await home.metadata.commit(PutUser(User("ann", hash_password("new", CHEAP))))
        assert await home.login("ann", CANARY) == Refusal(Reason.CREDENTIALS)
        assert await home.login("ann", "new") == Identity("ann", ())


async def test_storm_of_one_user_costs_few_checks_in_at_most_two_threads(checks: CountedChecks) -> None:
    async with house() as home:
        outcomes: list[Identity | Refusal] = []

        async def attempt() -> None:
            outcomes.append(await home.login("ann", CANARY))

        async with trio.open_nursery() as nursery:
            for _ in range(200):
                nursery.start_soon(attempt)
        assert outcomes == [Identity("ann", ())] * 200
        assert checks.count <= 2
        assert checks.at_once_max <= 2


async def test_burst_of_guesses_is_cut_short_though_all_come_at_once(checks: CountedChecks) -> None:
    async with house() as home:
        reasons: list[Reason] = []

        async def guess(number: int) -> None:
            outcome = await home.login("ann", f"guess {number}")
            assert isinstance(outcome, Refusal)
            reasons.append(outcome.reason)

        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(guess, number)
        assert len(reasons) == 200
        # Five fail, and one more may have been in the other thread when the fifth did.
        assert checks.count <= 6
        assert reasons.count(Reason.THROTTLED) >= 194


async def test_hash_of_another_cost_is_renewed_at_login() -> None:
    async with house(DEARER) as home:
        old = home.metadata.snapshot.users["ann"].password_hash
        assert await home.login("ann", CANARY) == Identity("ann", ())
        new = home.metadata.snapshot.users["ann"].password_hash
        assert new != old and not needs_rehash(new, DEARER)
        version = home.metadata.snapshot.version
        assert await home.login("ann", CANARY) == Identity("ann", ())
        assert home.metadata.snapshot.version == version


async def test_login_by_password_makes_the_verifier_that_is_missing() -> None:
    async with house() as home:
        assert home.metadata.snapshot.users["ann"].scram == ""
        assert await home.login("ann", "wrong") == Refusal(Reason.CREDENTIALS)
        assert home.metadata.snapshot.users["ann"].scram == ""
        assert await home.login("ann", CANARY) == Identity("ann", ())
        after = home.metadata.snapshot.users["ann"]
        verifier = parse(after.scram)
        assert verifier == derive(CANARY, verifier.salt)
        assert verify_password(after.password_hash, CANARY)
        version = home.metadata.snapshot.version
        assert await home.login("ann", CANARY) == Identity("ann", ())
        assert home.metadata.snapshot.version == version


async def test_hash_of_another_cost_is_renewed_and_the_verifier_stays() -> None:
    async with house(DEARER) as home:
        scram = str(derive(CANARY, b"salt", 4096))
        await home.metadata.commit(PutUser(User("ann", hash_password(CANARY, CHEAP), scram=scram)))
        await home.login("ann", CANARY)
        after = home.metadata.snapshot.users["ann"]
        assert after.scram == scram and not needs_rehash(after.password_hash, DEARER)


async def test_proof_is_a_login_in_two_halves(caplog: pytest.LogCaptureFixture) -> None:
    async with house() as home:
        await home.login("ann", CANARY)
        for proven, expected in ((True, Identity("ann", ())), (False, Refusal(Reason.PROOF))):
            begun = home.doors.begin_proof("ann", address=ELSEWHERE, peer_is_loopback=False)
            assert isinstance(begun, ProofCheck)
            assert home.doors.finish_proof(begun, proven, address=ELSEWHERE) == expected
        assert Reason.PROOF.value in caplog.text


async def test_full_disk_does_not_keep_a_user_out(caplog: pytest.LogCaptureFixture) -> None:
    async with house(DEARER) as home:
        home.store.next_fault = Fault.FULL
        assert await home.login("ann", CANARY) == Identity("ann", ())
        assert "not renewed" in caplog.text


async def test_refusal_is_logged_with_its_reason_and_without_the_password(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with house(DEARER) as home:
        await home.login("ann", "wrong " + CANARY)
        await home.login("ann\nforged line", CANARY)
        await home.login("ann", CANARY)
        stored = home.metadata.snapshot.users["ann"].password_hash
    assert Reason.CREDENTIALS.value in caplog.text
    assert CANARY not in caplog.text
    assert stored not in caplog.text
    assert "\nforged" not in caplog.text
