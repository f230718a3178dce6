"""Too little memory or disk: publishers wait, everybody else goes on (X4, X5). Machine: what was measured is handed in.

An alarm is raised when the node has more memory than its share of the machine's, or the disk less free space than its
floor, and cleared when it is clearly over: a little hysteresis keeps publishers from being stopped and let go at every
measurement. While any alarm is up, the doors no longer read from connections that publish. At a higher share of memory
they take no new connections either.
Neighbours: meter.py measures and drives this, the doors look at `active` when a client publishes.
"""

from dataclasses import dataclass
from enum import StrEnum

GIB = 1 << 30
# An alarm is over when it would not be raised with so much less of what is scarce.
HYSTERESIS = 0.05


class Alarm(StrEnum):
    """What a node can be low on, as clients are told."""

    MEMORY = "memory"
    DISK = "disk"


@dataclass(frozen=True, slots=True)
class AlarmsConfig:
    # Of the memory that the machine or the container has; 0: never.
    memory_share: float = 0.6
    refuse_share: float = 0.8
    # Free space on the disk of the data: the greater of both.
    disk_free_share: float = 0.05
    disk_free_bytes: int = 2 * GIB


@dataclass(frozen=True, slots=True)
class Measured:
    memory_bytes: int
    memory_bytes_max: int
    disk_free_bytes: int
    disk_bytes: int


@dataclass(frozen=True, slots=True)
class Turned:
    """An alarm was raised or cleared; `measured` bytes against the `limit` bytes that decide."""

    alarm: Alarm
    raised: bool
    measured: int
    limit: int


class Alarms:
    def __init__(self, config: AlarmsConfig | None = None) -> None:
        self.config = config or AlarmsConfig()
        self.active: frozenset[Alarm] = frozenset()
        # No new connections either.
        self.refusing = False
        # The last measurement, for those who look.
        self.measured: Measured | None = None

    @property
    def reason(self) -> str:
        """What clients are told, in RabbitMQ's words."""
        return f"low on {' & '.join(sorted(self.active, reverse=True))}"

    def measure(self, now: Measured) -> list[Turned]:
        """Take a measurement; returns what has changed by it."""
        self.measured = now
        turned: list[Turned] = []
        config = self.config
        limit = int(now.memory_bytes_max * config.memory_share)
        up = Alarm.MEMORY in self.active
        held = limit * (1 - HYSTERESIS) if up else limit
        if (limit > 0 and now.memory_bytes >= held) != up:
            turned.append(Turned(Alarm.MEMORY, not up, now.memory_bytes, limit))
        refuse = now.memory_bytes_max * config.refuse_share
        if self.refusing:
            refuse *= 1 - HYSTERESIS
        self.refusing = 0 < refuse <= now.memory_bytes
        floor = max(int(now.disk_bytes * config.disk_free_share), config.disk_free_bytes)
        up = Alarm.DISK in self.active
        needed = floor * (1 + HYSTERESIS) if up else floor
        if (now.disk_free_bytes < needed) != up:
            turned.append(Turned(Alarm.DISK, not up, now.disk_free_bytes, floor))
        for one in turned:
            self.active = self.active | {one.alarm} if one.raised else self.active - {one.alarm}
        return turned
