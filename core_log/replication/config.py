"""How the replicas of a shard keep pace with each other. Values, checked when made."""

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class ReplicationConfig:
    # A follower that has not caught up for so long leaves the in-sync set.
    lag_s: float = 10.0
    # One without a link leaves it after so long, if records wait for it.
    gone_s: float = 2.0
    # A leader answers after so long though it has nothing to tell; a follower that hears nothing for longer, connects
    # anew.
    wait_s: float = 0.5
    silence_s: float = 5.0
    # A watermark that moved is told with the next records, or after so long.
    watermark_s: float = 0.02
    # Between two attempts to reach a leader.
    retry_s: float = 0.1
    # How often the in-sync set is looked at, and a request for another one is repeated.
    tick_s: float = 0.2
    alter_s: float = 1.0
    # How long a follower holds back dispatch to consumers that must be alone, from the last answer of its leader on.
    promise_s: float = 6.0
    fetch_bytes_max: int = 4 * MIB
    # To each follower that is not in sync; None: as fast as it goes.
    throttle_bytes_s: int | None = None

    def __post_init__(self) -> None:
        seconds = ("lag_s", "gone_s", "wait_s", "silence_s", "watermark_s", "retry_s", "tick_s", "alter_s", "promise_s")
        for name in seconds:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
        if self.silence_s <= self.wait_s:
            raise ValueError("silence_s must be longer than wait_s: a leader with nothing to tell is no dead one")
        if self.fetch_bytes_max < 1:
            raise ValueError(f"fetch_bytes_max must be at least 1, not {self.fetch_bytes_max}")
        if self.throttle_bytes_s is not None and self.throttle_bytes_s < 1:
            raise ValueError(f"throttle_bytes_s must be at least 1, not {self.throttle_bytes_s}")
