"""Settings of staging. Values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StagingConfig:
    # Of all stages together, as they lie on the disk.
    bytes_max: int = 1024 * 1024 * 1024
    # A stage that nobody commits is gone after this.
    expiry_ms: int = 24 * 3600 * 1000
    # So long after its last commit a query is remembered.
    queries_retention_ms: int = 90 * 24 * 3600 * 1000
    # What is remembered of each is small, and in memory.
    stage_count_max: int = 100_000
    query_count_max: int = 100_000
