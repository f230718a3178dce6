"""What operators are told of a shard's replica on one node. Values."""

from dataclasses import dataclass
from enum import Enum

from headrace.core_log.replication.assignment import Copy, RowVersion, Stint


class Role(Enum):
    LEADER = "leader"
    FOLLOWER = "follower"
    # No leader is known, or this node is the one of an earlier life.
    WAITING = "waiting"
    # What was written here does not read back (damaged.py).
    DAMAGED = "damaged"


@dataclass(frozen=True, slots=True)
class FollowerStatus:
    node: int
    is_in_sync: bool
    is_connected: bool
    # Records that it has not synced yet, in all logs, and about so many bytes.
    record_lag: int
    byte_lag: int
    # How long ago it had all that there was.
    behind_s: float
    sent_bytes: int
    # Of this link.
    connected_s: float


@dataclass(frozen=True, slots=True)
class ShardStatus:
    shard: int
    role: Role
    stint: Stint
    version: RowVersion
    isr: tuple[Copy, ...]
    # Records that are written here and not known to be committed, in all logs.
    watermark_lag: int
    log_count: int
    followers: tuple[FollowerStatus, ...]
    received_bytes: int
    # How often damaged files were set aside, and still lie there.
    aside_count: int = 0
