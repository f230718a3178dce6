"""What replicas of a partition and the controller say to each other. Values; frames.py gives them their bytes.

Each carries the stint or the ballot it was said in, by which whoever is behind, or ahead, is told from who is right.
"""

from typing import NamedTuple

from headrace.core_log.epochs import EpochStart
from headrace.core_log.replication.assignment import Copy, Member, RowVersion, Stint


class Fetch(NamedTuple):
    """A follower asks its leader for what comes next, and tells what it has."""

    member: Member
    stint: Stint
    # Kept by the follower.
    version: RowVersion
    end: int
    synced_end: int
    # Whose records it holds; sent when the leader cannot know.
    history: tuple[EpochStart, ...] | None


class Answer(NamedTuple):
    """Records follow from `Fetch.end` on, as the driver finds them."""

    stint: Stint
    version: RowVersion
    high_watermark: int


class Cut(NamedTuple):
    """The follower's log is another from here on: it is cut, and asked for anew."""

    stint: Stint
    offset: int


class Explain(NamedTuple):
    """Not known yet whether these are the same records: send the history."""

    stint: Stint


class Fenced(NamedTuple):
    """The one who asks is behind; nothing was changed (E2)."""

    stint: Stint


class Stale(NamedTuple):
    """The one who was asked is behind, and should hear from the controller; nothing was changed (E2)."""

    stint: Stint


class AlterIsr(NamedTuple):
    """A leader asks the controller for another in-sync set. Sent again, the same, until an order settles it (E4)."""

    stint: Stint
    leader_incarnation: int
    version: RowVersion
    isr: tuple[Copy, ...]
    # Which life of the one that joins has caught up (E5).
    joining: Member | None


class Report(NamedTuple):
    """What a replica answers to a new controller. It has promised not to obey an older one (C3)."""

    member: Member
    stint: Stint
    version: RowVersion
    last: Stint
    end: int
    is_blank: bool
    is_corrupt: bool
