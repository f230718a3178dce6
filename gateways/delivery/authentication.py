"""Logins for all doors. Driver (trio): passwords are checked in at most two worker threads.

Neighbours: login.py decides, controller/passwords.py computes, the doors speak.
"""

import logging
from collections.abc import Callable
from dataclasses import replace

import trio

from headrace.controller.changes import PutUser
from headrace.controller.passwords import hash_password, needs_rehash, verify_password
from headrace.controller.service import HASHING_THREADS_MAX, MetadataService
from headrace.core_log.errors import DiskFull, Refused
from headrace.gateways.delivery.login import Check, Identity, Login, LoginConfig, Refusal

log = logging.getLogger(__name__)


class Authentication:
    def __init__(
        self,
        metadata: MetadataService,
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

    async def _check(self, check: Check, password: str) -> Identity | Refusal:
        verified = await trio.to_thread.run_sync(verify_password, check.stored, password, limiter=self._threads)
        outcome = self._login.finish(check, verified, self._monotonic())
        if isinstance(outcome, Identity) and needs_rehash(check.stored, self._config.hash_cost):
            await self._rehash(check, password)
        return outcome

    async def _rehash(self, check: Check, password: str) -> None:
        """The hash was made at another cost. Whatever keeps it from being renewed does not keep the user out."""
        renewed = await trio.to_thread.run_sync(hash_password, password, self._config.hash_cost, limiter=self._threads)
        user = self._metadata.snapshot.users.get(check.name)
        if user is None or user.password_hash != check.stored:
            return
        try:
            await self._metadata.commit(PutUser(replace(user, password_hash=renewed), if_version=user.version))
        except (Refused, DiskFull) as error:
            log.warning("the password hash of user %r was not renewed: %s", check.name, error)

    def _logged(self, outcome: Identity | Refusal, name: str, address: str) -> Identity | Refusal:
        if isinstance(outcome, Refusal):
            log.warning("login of user %r from %s refused: %s", name, address, outcome.reason.value)
        return outcome
