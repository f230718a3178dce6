"""Everything from outside comes in through here: clock, disk, randomness, ids, threads. Values and protocols.

No module reads the time, draws a number or touches a file by itself; so a test can run the same code on a
virtual clock, a faulty disk and a seed. `real.py` builds the real one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Protocol, TypeVar
from uuid import UUID

from headrace.core_log.storage.contract import Storage

T = TypeVar("T")


class Clock(Protocol):
    # The wall clock may be set while somebody waits for a time of it: nobody waits for longer than this at once.
    wall_look_s: float

    def monotonic(self) -> float:
        """Seconds; never goes back."""

    def wall_us(self) -> int:
        """Microseconds since 1970 UTC; may step both ways."""

    async def sleep(self, seconds: float) -> None:
        """A pause. Whoever waits for a certain time looks at the clock again behind it."""

    async def sleep_until(self, monotonic_s: float) -> None:
        """Something is due when `monotonic` shows this; a virtual clock stops there on its way."""


class Ids(Protocol):
    def uuid(self) -> UUID: ...

    def nonce(self) -> str:
        """Printable ASCII without comma, of 128 unguessable bits or more: what a peer's proof is about."""

    def salt(self) -> int:
        """64 unguessable bits, never 0: tells a segment's batches from what a recycled file held before."""


class Worker(Protocol):
    """Where blocking calls go, so that the loop never waits for a disk."""

    async def run(self, call: Callable[[], T]) -> T: ...


@dataclass(frozen=True, slots=True)
class Env:
    clock: Clock
    storage: Storage
    worker: Worker
    ids: Ids
    random: Random
