"""Settings of one stream's logs, and of the directory that holds them all. Values, checked when made."""

from dataclasses import dataclass
from typing import Literal

KIB = 1024
MIB = 1024 * KIB

Durability = Literal["sync", "interval", "os"]
Compression = Literal["none", "lz4", "auto"]
Cleanup = Literal["delete", "compact"]


@dataclass(frozen=True, slots=True)
class LogConfig:
    """How the partitions of one stream are kept."""

    durability: Durability = "sync"
    compression: Compression = "auto"
    cleanup: Cleanup = "delete"
    retention_ms: int | None = 7 * 24 * 3600 * 1000
    retention_bytes: int | None = None
    segment_bytes_max: int = 64 * MIB
    # A quiet segment is sealed at this age, so that retention by age can take it.
    segment_ms_max: int = 24 * 3600 * 1000
    batch_bytes_max: int = 256 * KIB
    index_interval_bytes: int = 32 * KIB
    tombstone_ms: int = 24 * 3600 * 1000
    # Sealed segments get an index of their keys; logs in which nobody looks for one go without.
    key_index: bool = True
    # Offsets promised to the disk ahead of use; after an unclean start the log goes on above them (K3).
    offsets_reserved: int = 1_000_000
    producer_expiry_ms: int = 7 * 24 * 3600 * 1000
    producer_count_max: int = 100_000
    # With more than one, a record is committed when the replicas say so, and a crash promises no offsets ahead.
    replica_count: int = 1

    def __post_init__(self) -> None:
        if self.durability not in ("sync", "interval", "os"):
            raise ValueError(f"durability is sync, interval or os, not {self.durability!r}")
        if self.compression not in ("none", "lz4", "auto"):
            raise ValueError(f"compression is none, lz4 or auto, not {self.compression!r}")
        if self.cleanup not in ("delete", "compact"):
            raise ValueError(f"cleanup is delete or compact, not {self.cleanup!r}")
        for name in ("segment_bytes_max", "segment_ms_max", "batch_bytes_max", "index_interval_bytes", "replica_count"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("retention_ms", "retention_bytes"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must not be negative, not {value}")
        for name in ("offsets_reserved", "producer_count_max", "producer_expiry_ms", "tombstone_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @property
    def segment_bytes(self) -> int:
        """Where a segment rolls: with a small retention by bytes, at a quarter of that."""
        if self.retention_bytes is None:
            return self.segment_bytes_max
        return min(self.segment_bytes_max, max(self.retention_bytes // 4, 64 * KIB))

    @property
    def segment_ms(self) -> int:
        """The age at which one rolls: with a short retention by age, a quarter of that."""
        if self.retention_ms is None:
            return self.segment_ms_max
        return min(self.segment_ms_max, max(self.retention_ms // 4, 1000))


@dataclass(frozen=True, slots=True)
class DirectoryConfig:
    """What all partitions of a data directory share."""

    tail_cache_bytes_max: int = 64 * MIB
    index_cache_count_max: int = 256
    journal_bytes_max: int = 32 * MIB
    # Dirty files beyond which one journal is synced instead of each file (K4).
    journal_from_files: int = 3
    interval_ms: int = 100
    # Removed segments are kept so long under another name, for readers that are at work on them.
    removal_delay_ms: int = 60_000
    # Of them and of those ready to be used again, so many are kept at most: they are disk that holds nothing.
    recycled_count_max: int = 4
    trash_ms: int = 24 * 3600 * 1000
    # Of a shard's directory: each log of it is kept as one of several replicas, whatever its own settings say.
    replica_count: int = 1

    def __post_init__(self) -> None:
        if self.journal_from_files < 2:
            raise ValueError("journal_from_files must be at least 2: one dirty file is synced as it is")
        for name in ("tail_cache_bytes_max", "journal_bytes_max", "interval_ms", "index_cache_count_max"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
