"""Logins for all doors. Driver (trio): passwords are checked in at most two worker threads.

Neighbours: login.py decides, controller/passwords.py computes, the doors speak.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import trio

from headrace.controller.changes import PutUser
from headrace.controller.metadata import HASHING_THREADS_MAX, Metadata
from headrace.controller.passwords import hash_password, needs_rehash, verify_password
from headrace.controller.verifiers import scram_of
from headrace.core_log.errors import DiskFull, Refused
from headrace.gateways.delivery.login import Check, Identity, Login, LoginConfig, ProofCheck, Refusal

log = logging.getLogger(__name__)


class Authentication:
    def __init__(
        self,
        metadata: Metadata,
        *,
        key: bytes,
        monotonic: Callable[[], float],
        hashing: trio.CapacityLimiter | None = None,
        config: LoginConfig | None = None,
    ) -> None:
        """`key`: 32 random bytes of this process. `hashing`: shared with whoever else hashes passwords."""
        self._metadata = metadata
        self._config = config or LoginConfig()
        self._login = Login(metadata.snapshot, key=key, config=self._config)
        self._monotonic = monotonic
        self._hashing = hashing or trio.CapacityLimiter(HASHING_THREADS_MAX)
        # The place is taken before the thread is, so the threads need no limit of their own.
        self._threads = trio.CapacityLimiter(HASHING_THREADS_MAX)
        metadata.listen(lambda snapshot, changes: self._login.update(snapshot))

    async def login(self, name: str, password: str, *, address: str, peer_is_loopback: bool) -> Identity | Refusal:
        outcome = self._login.begin(name, password, address, peer_is_loopback, self._monotonic())
        if isinstance(outcome, Check):
            async with self._hashing:
                # Once more: while this one waited, others may have proven the same password, or failed too often.
                outcome = self._login.begin(name, password, address, peer_is_loopback, self._monotonic())
                if isinstance(outcome, Check):
                    outcome = await self._check(outcome, password)
        return self._logged(outcome, name, address)

    async def certified(self, name: str, *, address: str, peer_is_loopback: bool) -> Identity | Refusal:
        """For a verified certificate that bears this name."""
        await trio.lowlevel.checkpoint()
        return self._logged(self._login.certified(name, peer_is_loopback), name, address)

    def begin_proof(self, name: str, *, address: str, peer_is_loopback: bool) -> ProofCheck | Refusal:
        """The first half of a login by SCRAM: what the client must prove to know."""
        outcome = self._login.begin_proof(name, address, peer_is_loopback, self._monotonic())
        if isinstance(outcome, Refusal):
            self._logged(outcome, name, address)
        return outcome

    def finish_proof(self, check: ProofCheck, proven: bool, *, address: str) -> Identity | Refusal:
        return self._logged(self._login.finish_proof(check, proven, self._monotonic()), check.name, address)

    async def _check(self, check: Check, password: str) -> Identity | Refusal:
        verified = await trio.to_thread.run_sync(verify_password, check.stored, password, limiter=self._threads)
        outcome = self._login.finish(check, verified, self._monotonic())
        if isinstance(outcome, Identity):
            await self._renew(check, password)
        return outcome

    async def _renew(self, check: Check, password: str) -> None:
        """A hash that was made at another cost is made anew, and a SCRAM verifier that is missing is made: now there
        is a password to make them from. Whatever keeps them from being written does not keep the user out."""
        user = self._metadata.snapshot.users.get(check.name)
        if user is None or user.password_hash != check.stored:
            return
        had, cost, salt = user.scram, self._config.hash_cost, self._metadata.new_salt()

        def made() -> tuple[str, str]:
            password_hash = hash_password(password, cost) if needs_rehash(check.stored, cost) else check.stored
            return password_hash, had or scram_of(password, salt)

        if had and not needs_rehash(check.stored, cost):
            return
        password_hash, scram = await trio.to_thread.run_sync(made, limiter=self._threads)
        user = self._metadata.snapshot.users.get(check.name)
        if user is None or user.password_hash != check.stored or (password_hash, scram) == (check.stored, user.scram):
            return
        renewed = replace(user, password_hash=password_hash, scram=scram)
        try:
            await self._metadata.commit(PutUser(renewed, if_version=user.version))
        except (Refused, DiskFull) as error:
            log.warning("the password hash of user %r was not renewed: %s", check.name, error)

    def _logged(self, outcome: Identity | Refusal, name: str, address: str) -> Identity | Refusal:
        if isinstance(outcome, Refusal):
            log.warning("login of user %r from %s refused: %s", name, address, outcome.reason.value)
        return outcome
