"""How the delay engine keeps what is parked. Values, checked when made.

Neighbours: buckets.py has the rings, delays.py everything else; src/headrace/config.py fills it in.
"""

from dataclasses import dataclass

MIB = 1024 * 1024
YEAR_S = 365 * 24 * 3600


@dataclass(frozen=True, slots=True)
class DelayConfig:
    # Due times are rounded up to whole ticks; what is due within one tick is decided together.
    tick_ms: int = 1
    # What is due sooner than this waits in memory, as a due time and a place of 8 bytes each.
    horizon_s: int = 120
    # How far ahead of now hour and day buckets reach; what is due later lies in a month bucket.
    hour_bucket_count: int = 24
    day_bucket_count: int = 31
    # Each bucket is split into so many partitions by the hash of the target.
    shard_count: int = 1
    # The intake is sorted into buckets when so much of it waits (128 times as much, or ten million records, while
    # more is parked), or the oldest has waited so long.
    sort_bytes: int = 16 * MIB
    sort_interval_s: int = 300
    # Bodies that are read ahead of their due time.
    prefetch_bytes: int = 16 * MIB
    # How many decisions are remembered, so that cancelling what has fired is answered as such.
    remembered_count: int = 100_000
    # Due later than this from now: refused.
    delay_s_max: int = 10 * YEAR_S

    def __post_init__(self) -> None:
        for name in (
            "tick_ms",
            "horizon_s",
            "hour_bucket_count",
            "day_bucket_count",
            "shard_count",
            "sort_bytes",
            "sort_interval_s",
            "prefetch_bytes",
            "delay_s_max",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.remembered_count < 0:
            raise ValueError(f"remembered_count must not be negative, not {self.remembered_count}")
