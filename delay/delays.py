"""The delay engine: records parked until they are due, then fired exactly once into their target. Driver.

    park -> intake log -> (sorter) -> hour, day, month buckets -> ring 0 in memory -> decision log -> Fire

Neighbours: fire.py is what it asks of the gateways.
"""

from collections.abc import Mapping, Sequence

from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import Headers
from headrace.delay.config import DelayConfig
from headrace.delay.fire import Fire
from headrace.delay.parked import BucketCount, DelayRefused, Outcome, Page, Pending

__all__ = ["BucketCount", "DelayRefused", "Delays", "Outcome", "Page", "Pending"]


class Delays:
    """One for a node. `park` is synchronous; everything that may read the disk is not."""

    def __init__(self, env: Env, directory: LogDirectory, config: DelayConfig, fire: Fire) -> None:
        raise NotImplementedError

    # The log whose commit means that a park is safe: intake.when_committed(next_offset, confirm).
    intake: PartitionLog

    async def load(self) -> None:
        """Find out what is parked, and what was being fired when the last life ended. Before `run` and `park`."""
        raise NotImplementedError

    async def run(self) -> None:
        """Sort and fire until cancelled. The directory's committer must be running."""
        raise NotImplementedError

    async def close(self) -> None:
        """Write down where we are: the next load is short. After `run` has ended, before the directory closes."""
        raise NotImplementedError

    def park(
        self,
        target: bytes,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        due_us: Sequence[int],
        ids: Sequence[bytes | None] | None = None,
        attributes: int = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
    ) -> int:
        """Take a run of records in one append; returns the next offset of the intake and asks for its commit.

        Records without an id (None) get one: `made_id(offset)`; the first of the run has offset `returned - count`.
        Due times in the past are lawful: they fire at once. Raises DelayRefused (nothing is taken) when one is
        due too far in the future, DiskFull as any append.
        """
        raise NotImplementedError

    def count(self, target: bytes | None = None) -> int:
        """How many are pending, of one target or of all. O(1)."""
        raise NotImplementedError

    def counts(self) -> Mapping[bytes, int]:
        """Pending records of each target that has any."""
        raise NotImplementedError

    def buckets(self) -> Sequence[BucketCount]:
        """Pending records of each bucket, by time."""
        raise NotImplementedError

    async def list(
        self,
        *,
        after: str | None = None,
        limit: int = 100,
        target: bytes | None = None,
        key: bytes | None = None,
        tag: str | None = None,
        due_from_us: int | None = None,
        due_until_us: int | None = None,
    ) -> Page:
        """Pending records by due time. Refused for a cursor that is none."""
        raise NotImplementedError

    async def inspect(self, id: bytes) -> Pending | None:
        """The pending record of this id (the first due, where several share it)."""
        raise NotImplementedError

    async def cancel(self, id: bytes) -> Outcome:
        """Cancel whatever is pending under this id; the answer is durable."""
        raise NotImplementedError

    async def reschedule(self, id: bytes, due_us: int) -> Outcome:
        """Give whatever is pending under this id another due time; the answer is durable. May raise DelayRefused."""
        raise NotImplementedError
