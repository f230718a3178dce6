"""Settings of the MQTT door. Values."""

from dataclasses import dataclass

from headrace.gateways.mqtt.quota import Overflow


@dataclass(frozen=True, slots=True)
class MqttConfig:
    # Whoever sends no user name is this user, from this machine only where the user is guest; empty: nobody may.
    anonymous_user: str = "guest"
    # Where a user name does not say `vhost:user`.
    vhost: str = "/"
    handshake_s: float = 10.0
    # Longer ones, and none at all, are answered with this one (MQTT 5) or held to it; 0: whatever the client asks.
    keep_alive_s_max: int = 0
    packet_bytes_max: int = 134_217_728
    # Publishes with QoS 1 and 2 that a client may have unanswered; MQTT 5 clients are told.
    receive_max: int = 1_000
    # Unacknowledged deliveries of a session, however many more its client would take.
    inflight_max: int = 1_000
    topic_alias_max: int = 64
    # 0: a session may sleep for ever. MQTT 5 clients are told, those of 3.1.1 are held to it.
    session_expiry_s_max: int = 0
    # Messages with QoS 1 and 2 that may wait for a session besides those in flight; 0: all that retention keeps.
    session_messages_max: int = 0
    session_overflow: Overflow = Overflow.DROP_OLDEST
    # Payloads of retained messages that are kept in memory, per vhost; the others are read when they are sent.
    retained_bytes_max: int = 64 * 1024 * 1024
    # Lanes into which a shared subscription deals its topics, each for one member at a time; 0: members take turns.
    shared_lanes: int = 0
    # Bytes a connection may have waiting to be sent before more is left in the log.
    write_buffer_bytes: int = 1024 * 1024
    read_bytes_max: int = 256 * 1024
    subscriptions_max: int = 10_000
    # Retained messages of a vhost; a topic beyond them is refused.
    retained_count_max: int = 100_000
    # Levels of a topic or filter: each costs what a whole short one does.
    topic_levels_max: int = 128
    client_id_bytes_max: int = 1_024
    # Whether one user's client may end the session of another's by using its identifier.
    take_over_between_users: bool = False
    # RabbitMQ's mapping of topics, which does not come back from `a.b/c` (docs/mapping.md).
    lossy_topics: bool = False
    # Whose web pages may connect over WebSocket besides those of this very host; `any` for all.
    ws_origins: tuple[str, ...] = ()
    # How often $SYS topics are published; 0: never.
    sys_period_s: int = 10
    # Off on loopback: a clear-text password to anybody else must be asked for.
    allow_plaintext_auth: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.receive_max <= 65_535:
            raise ValueError(f"receive_max must be 1 to 65535, not {self.receive_max}")
        if not 1 <= self.inflight_max <= 16_384:
            raise ValueError(f"inflight_max must be 1 to 16384, not {self.inflight_max}")
        if not 0 <= self.topic_alias_max <= 65_535:
            raise ValueError(f"topic_alias_max must be 0 to 65535, not {self.topic_alias_max}")
        if not 0 <= self.keep_alive_s_max <= 65_535:
            raise ValueError(f"keep_alive_s_max must be 0 to 65535, not {self.keep_alive_s_max}")
        if not 1024 <= self.packet_bytes_max <= 268_435_460:
            raise ValueError(f"packet_bytes_max must be 1024 to 268435460, not {self.packet_bytes_max}")
        if not 0 <= self.shared_lanes <= 1024:
            raise ValueError(f"shared_lanes must be 0 to 1024, not {self.shared_lanes}")
        if min(self.session_expiry_s_max, self.sys_period_s) < 0:
            raise ValueError("session_expiry_s_max and sys_period_s must be 0 or more")
