"""Settings of the HTTP door. Values."""

from dataclasses import dataclass

# Of a request line with its headers; h11 holds no more of one that is not complete.
HEAD_BYTES_MAX = 16 * 1024
# Of every request but those that bring messages.
SMALL_BODY_BYTES_MAX = 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpConfig:
    # Of a request that brings messages.
    body_bytes_max: int = 16 * 1024 * 1024
    # Time for a request's headers, from its first octet on (of a connection's first request: from accept on).
    head_s: float = 10.0
    # Time for its body.
    body_s: float = 30.0
    # How long a connection may stay without a request.
    idle_s: float = 60.0
    # How long a client may take nothing of an answer.
    write_s: float = 30.0
    # The longest wait of a long poll.
    poll_s_max: float = 60.0
    # Off on loopback: a clear-text password to anybody else must be asked for.
    allow_plaintext_auth: bool = False

    def __post_init__(self) -> None:
        for name in ("body_bytes_max", "head_s", "body_s", "idle_s", "write_s", "poll_s_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")
