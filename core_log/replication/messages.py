"""What replicas of a shard and the controller say to each other. Values; frames.py gives them their bytes.

Each carries the stint or the ballot it was said in, by which whoever is behind, or ahead, is told from who is right. A
shard has many logs under one stint and one row; positions, histories and cuts are each log's own.
"""

from typing import NamedTuple
from uuid import UUID

from headrace.core_log.epochs import EpochStart
from headrace.core_log.replication.assignment import Copy, Member, RowVersion, Stint


class LogId(NamedTuple):
    """One log of a shard: a partition of a stream."""

    stream: UUID
    partition: int


class Position(NamedTuple):
    """How much of a log a follower has."""

    log: LogId
    # Where its records begin; where they end.
    start: int
    end: int
    synced_end: int
    # Whose records it holds; sent when the leader cannot know.
    history: tuple[EpochStart, ...] | None


class Fetch(NamedTuple):
    """A follower asks its leader for what comes next, and tells what it has: of some logs, or of all."""

    member: Member
    stint: Stint
    # Kept by the follower.
    version: RowVersion
    positions: tuple[Position, ...]


class Go(NamedTuple):
    """The follower's records are the leader's: more of them follow from its end on."""

    log: LogId
    high_watermark: int


class Cut(NamedTuple):
    """The follower's log is another from here on: it is cut, and asked for anew."""

    log: LogId
    offset: int


class Begin(NamedTuple):
    """The leader has let go of what the follower would need next: the follower lets go of its log, and begins here."""

    log: LogId
    offset: int


class Explain(NamedTuple):
    """Not known yet whether these are the same records: send the history."""

    log: LogId


class Suspect(NamedTuple):
    """A follower could not take the batch that covers this offset: is it what the leader once wrote?"""

    log: LogId
    offset: int


class Answer(NamedTuple):
    """Whose word it is, the row that this one leads by, and what is to be done with each log that was told of."""

    stint: Stint
    version: RowVersion
    isr: tuple[Copy, ...]
    eligible: tuple[Copy, ...]
    logs: tuple[Go | Cut | Begin | Explain, ...]


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


class OwnCopy(NamedTuple):
    """What a node has of a shard, where that is not simply what its disk held."""

    shard: int
    # The shard's own; the node's is another.
    disk: UUID
    is_damaged: bool


class CatchUp(NamedTuple):
    """A replica on its way to have everything."""

    shard: int
    node: int
    records: int
    size: int
    # By the pace so far; None: it is not connected, or has not begun.
    seconds: float | None


class Report(NamedTuple):
    """What a replica answers to a new controller. It has promised not to obey an older one (C3)."""

    member: Member
    stint: Stint
    version: RowVersion
    # The latest stint in which something was written here, and how much lies here in all logs together.
    last: Stint
    end: int
    is_blank: bool
    is_corrupt: bool
    # Of the row of that version: who holds all that was acknowledged under it.
    isr: tuple[Copy, ...] = ()
    eligible: tuple[Copy, ...] = ()
