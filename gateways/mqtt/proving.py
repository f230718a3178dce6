"""One login by SCRAM-SHA-256, step by step: what a client said last -> what it is told next. Machine.

    step = proving.take(data)       bytes: say this and wait; Proven or Refusal: it is over

An empty first message asks us to begin, which in SCRAM is the client's part: it is answered with nothing, once. A user
that does not exist, a wrong proof and a message that is none are all refused alike.
Neighbours: scram.py knows the messages, delivery/login.py the users, login.py carries both in AUTH packets.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace.controller.verifiers import MECHANISM
from headrace.gateways.delivery.login import Identity, ProofCheck, Reason, Refusal
from headrace.gateways.mqtt.scram import Exchange, ScramError

__all__ = ["MECHANISM", "Proven", "Proving"]


@dataclass(frozen=True, slots=True)
class Proven:
    identity: Identity
    # Our own proof.
    answer: bytes


class Authentication(Protocol):
    """What is asked of delivery/authentication.py."""

    def begin_proof(self, name: str, *, address: str, peer_is_loopback: bool) -> ProofCheck | Refusal: ...
    def finish_proof(self, check: ProofCheck, proven: bool, *, address: str) -> Identity | Refusal: ...


class Proving:
    def __init__(
        self,
        authentication: Authentication,
        nonce: str,
        placed: Callable[[str], tuple[str, str]],
        *,
        address: str,
        peer_is_loopback: bool,
    ) -> None:
        """`placed`: vhost and user that a name means."""
        self.vhost = ""
        self._authentication = authentication
        self._exchange = Exchange(nonce)
        self._placed = placed
        self._address = address
        self._peer_is_loopback = peer_is_loopback
        self._asked_to_begin = False
        self._check: ProofCheck | None = None

    def take(self, data: bytes | None) -> bytes | Proven | Refusal:
        try:
            if self._check is not None:
                return self._finish(self._check, data or b"")
            if not data and not self._asked_to_begin:
                self._asked_to_begin = True
                return b""
            return self._begin(data or b"")
        except ScramError:
            if self._check is not None:
                return self._refused(self._check)
            return Refusal(Reason.PROOF)

    def _begin(self, data: bytes) -> bytes | Refusal:
        self.vhost, name = self._placed(self._exchange.begin(data))
        begun = self._authentication.begin_proof(name, address=self._address, peer_is_loopback=self._peer_is_loopback)
        if isinstance(begun, Refusal):
            return begun
        self._check = begun
        return self._exchange.challenge(begun.verifier)

    def _finish(self, check: ProofCheck, data: bytes) -> Proven | Refusal:
        answer = self._exchange.finish(data)
        if answer is None:
            return self._refused(check)
        outcome = self._authentication.finish_proof(check, True, address=self._address)
        return outcome if isinstance(outcome, Refusal) else Proven(outcome, answer)

    def _refused(self, check: ProofCheck) -> Refusal:
        outcome = self._authentication.finish_proof(check, False, address=self._address)
        assert isinstance(outcome, Refusal)
        return outcome
