"""Who leads a shard, who is in sync, and on whose word. Values; shared by replicas and the controller.

After a regression of the metadata store the same number may be given out twice, so nothing is compared by a number
alone (C7): an epoch goes with its leader (`Stint`), a controller's epoch with its incarnation (`Ballot`), a version of
a shard's row with the ballot that wrote it (`RowVersion`).
"""

from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

# The leader of a stint that nobody leads: a replica was fenced, or has heard of no leader yet.
NOBODY = -1


class Ballot(NamedTuple):
    """Which controller speaks. Later controllers have higher ballots."""

    epoch: int
    incarnation: int


class RowVersion(NamedTuple):
    """Which version of a shard's row, and who committed it."""

    number: int
    ballot: Ballot

    @property
    def age(self) -> tuple[Ballot, int]:
        """By this, the latest of several versions is found: a controller writes rows only after a sweep, so whatever it
        wrote knows of all that was acknowledged under those before it, and a store that went back in time may have
        given a higher number to a row that nobody acted on."""
        return self.ballot, self.number


class Stint(NamedTuple):
    """One leader's time at the head of a shard; the identity of the records written in it."""

    epoch: int
    leader: int


class Copy(NamedTuple):
    """The records of a shard that one disk of one node holds."""

    node: int
    disk: UUID


class Member(NamedTuple):
    """One life of a node on one disk: a node that restarts is another member, and so is one that lost its disk."""

    node: int
    incarnation: int
    disk: UUID

    @property
    def copy(self) -> Copy:
        return Copy(self.node, self.disk)


NO_BALLOT = Ballot(0, 0)
NO_VERSION = RowVersion(0, NO_BALLOT)
NO_STINT = Stint(0, NOBODY)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A shard's row, as the controller committed it and orders it."""

    replicas: tuple[int, ...]
    # NOBODY: there is none, and the shard is offline until one is elected.
    leader: int
    leader_incarnation: int
    epoch: int
    # In sync, sorted by node: each holds every record below the high watermark, synced.
    isr: tuple[Copy, ...]
    version: RowVersion
    min_isr: int
    # Left the in-sync set when it was too small for the high watermark to move: they still hold all below it (KIP-966).
    eligible: tuple[Copy, ...] = ()
    # The last epoch that was begun by force, by a replica that may lack what was confirmed (E7); 0: none ever.
    forced_epoch: int = 0

    @property
    def stint(self) -> Stint:
        return Stint(self.epoch, self.leader)

    @property
    def in_sync_nodes(self) -> frozenset[int]:
        return frozenset(copy.node for copy in self.isr)
