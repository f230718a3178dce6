"""Settings of consumer groups. Values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupsConfig:
    # How long the offsets of a group without members are kept.
    offsets_retention_ms: int = 7 * 24 * 3600 * 1000
    session_ms_min: int = 1_000
    session_ms_max: int = 1_800_000
