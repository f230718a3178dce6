"""Settings of the AMQP door. Values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AmqpConfig:
    frame_max: int = 131_072
    channel_max: int = 2047
    heartbeat_s: int = 60
    body_bytes_max: int = 134_217_728
    handshake_s: float = 10.0
    # Bytes a connection may have waiting to be sent before its consumers are left alone.
    write_buffer_bytes: int = 1024 * 1024
    read_bytes_max: int = 256 * 1024
    consumers_per_channel_max: int = 1000
    # How long a client may hold a delivery without settling it, where the queue does not say; 0: as long as it likes.
    consumer_timeout_ms: int = 1_800_000
    # Off on loopback: a clear-text password to anybody else must be asked for.
    allow_plaintext_auth: bool = False

    def __post_init__(self) -> None:
        if not 4096 <= self.frame_max <= 1 << 24:
            raise ValueError(f"frame_max must be 4096 to 16777216, not {self.frame_max}")
        if not 1 <= self.channel_max <= 65535:
            raise ValueError(f"channel_max must be 1 to 65535, not {self.channel_max}")
        if not 0 <= self.heartbeat_s <= 65535:
            raise ValueError(f"heartbeat_s must be 0 to 65535, not {self.heartbeat_s}")
        if self.consumer_timeout_ms < 0:
            raise ValueError(f"consumer_timeout_ms must be 0 (off) or more, not {self.consumer_timeout_ms}")
