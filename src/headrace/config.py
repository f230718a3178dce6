"""Every setting of a node, as one frozen value. Driver: reads the file once, and again when told to reload.

Each section below is a table of the TOML file; docs/configuration.md lists the same keys (a test holds the two
together). Nothing else in the house reads a file or a variable for its settings: the rooms are handed values.
Neighbours: settings.py has the order of precedence and the errors, kinds.py the ways to write a value.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from headrace.controller.config import SECTIONS, Definitions, parse_definitions
from headrace.core_log.config import Compression, DirectoryConfig, Durability, LogConfig
from headrace.delay.config import DelayConfig
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.delivery.alarms import AlarmsConfig
from headrace.gateways.delivery.consumer_groups_config import GroupsConfig
from headrace.gateways.delivery.limits import LimitsConfig
from headrace.gateways.delivery.read_leases import LeaseConfig
from headrace.gateways.delivery.staging_config import StagingConfig
from headrace.gateways.delivery.tls import NameFrom, TlsConfig
from headrace.gateways.http.config import HttpConfig
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.quota import Overflow
from headrace.kinds import (
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    MINUTE_MS,
    Address,
    Choice,
    Count,
    FilePath,
    Flag,
    Listen,
    Milliseconds,
    Origins,
    Seconds,
    Share,
    Size,
    Text,
)
from headrace.settings import ConfigError, load, parsed, section, setting


def _door(name: str, port: int, what: str, *, open: bool = True) -> Address | None:
    default = Address("127.0.0.1", port) if open else None
    door: Address | None = setting(Listen(), what, default, flag=f"--{name}")
    return door


@dataclass(frozen=True, slots=True)
class NodeConfig:
    data: Path = setting(
        FilePath(), "folder of the log and of everything else kept", Path("headrace-data"), flag="--data"
    )
    drain_seconds: int = setting(
        Seconds(0, 3600), "how long a stop waits for clients to finish before it closes their connections", 10
    )


@dataclass(frozen=True, slots=True)
class DoorsConfig:
    amqp: Address | None = _door("amqp", 5672, "AMQP 0-9-1")
    amqps: Address | None = _door("amqps", 5671, "AMQP 0-9-1 over TLS; usual port 5671", open=False)
    mqtt: Address | None = _door("mqtt", 1883, "MQTT 3.1.1 and 5")
    mqtts: Address | None = _door("mqtts", 8883, "MQTT over TLS; usual port 8883", open=False)
    ws: Address | None = _door("ws", 8083, "MQTT over WebSocket, path /mqtt")
    wss: Address | None = _door("wss", 8084, "MQTT over WebSocket and TLS; usual port 8084", open=False)
    http: Address | None = _door("http", 15672, "HTTP API, console and metrics")
    https: Address | None = _door("https", 15671, "HTTP API over TLS; usual port 15671", open=False)
    peer: Address | None = _door("peer", 25672, "other nodes of the cluster; usual port 25672", open=False)


@dataclass(frozen=True, slots=True)
class LoggingConfig:
    level: str = setting(
        Choice(("debug", "info", "warning", "error")),
        "least severity that is logged",
        "info",
        flag="--log-level",
        live=True,
    )
    format: str = setting(
        Choice(("human", "json")),
        "lines for people, or one JSON object a line",
        "human",
        flag="--log-format",
        live=True,
    )


@dataclass(frozen=True, slots=True)
class StorageConfig:
    segment_bytes: int = setting(Size(MIB, 2 * GIB), "size at which a partition begins a new segment file", 64 * MIB)
    handles_max: int = setting(Count(16, 1_000_000), "segment files held open at a time", 512)
    durability: Durability = setting(
        Choice(("sync", "interval", "os")), "when an append counts as committed, for streams that do not say", "sync"
    )
    interval_ms: int = setting(Milliseconds(1, HOUR_MS), "time between syncs of streams with durability interval", 100)
    compression: Compression = setting(
        Choice(("none", "lz4", "auto")), "how batches are compressed, for streams that do not say", "auto"
    )
    retention_ms: int | None = setting(
        Milliseconds(1, unlimited=True), "age at which settled records may go, for streams that do not say", 7 * DAY_MS
    )
    retention_bytes: int | None = setting(
        Size(KIB, unlimited=True), "size of a stream above which its oldest settled records may go", None
    )
    release_bytes: int = setting(
        Size(MIB),
        "what a queue that needs little of it may hold of a stream before it gets copies instead",
        GIB,
    )
    tail_cache_bytes: int = setting(
        Size(MIB), "memory for the newest batches of all partitions, for readers near the end", 64 * MIB
    )
    journal_bytes: int = setting(
        Size(MIB, GIB), "size of the commit journal; what lies in it is replayed after a crash", 32 * MIB
    )

    def directory(self) -> DirectoryConfig:
        """What all partitions of the data directory share."""
        return DirectoryConfig(
            tail_cache_bytes_max=self.tail_cache_bytes,
            journal_bytes_max=self.journal_bytes,
            interval_ms=self.interval_ms,
        )

    def stream_defaults(self) -> LogConfig:
        """How a stream is kept that was declared without saying so."""
        return LogConfig(
            durability=self.durability,
            compression=self.compression,
            retention_ms=self.retention_ms,
            retention_bytes=self.retention_bytes,
            segment_bytes_max=self.segment_bytes,
        )


@dataclass(frozen=True, slots=True)
class AmqpSection:
    allow_plaintext_auth: bool = setting(
        Flag(), "let clients of other machines send passwords without TLS; over loopback they always may", False
    )
    heartbeat_s: int = setting(
        Seconds(0, 65_535), "heartbeat proposed to clients; a peer silent for two of them is gone; 0 for none", 60
    )
    frame_max: int = setting(Size(4 * KIB, 16 * MIB), "largest frame, of either side", 128 * KIB)
    channel_max: int = setting(Count(1, 65_535), "channels of one connection", 2047)
    body_bytes_max: int = setting(Size(1, 512 * MIB), "largest message; a larger one is refused", 128 * MIB)
    consumers_per_channel_max: int = setting(Count(1, 1_000_000), "consumers of one channel", 1000)
    consumer_timeout_ms: int = setting(
        Milliseconds(0),
        "how long a client may hold a delivery without settling it; 0 for as long as it likes",
        HOUR_MS // 2,
    )
    handshake_s: int = setting(Seconds(1, 600), "time to log in, from the first octet on", 10)
    write_buffer_bytes: int = setting(
        Size(16 * KIB, GIB), "unsent octets of a connection above which its consumers wait", MIB
    )

    def door(self) -> AmqpConfig:
        return AmqpConfig(
            frame_max=self.frame_max,
            channel_max=self.channel_max,
            heartbeat_s=self.heartbeat_s,
            body_bytes_max=self.body_bytes_max,
            handshake_s=self.handshake_s,
            write_buffer_bytes=self.write_buffer_bytes,
            consumers_per_channel_max=self.consumers_per_channel_max,
            consumer_timeout_ms=self.consumer_timeout_ms,
            allow_plaintext_auth=self.allow_plaintext_auth,
        )


@dataclass(frozen=True, slots=True)
class MqttSection:
    allow_plaintext_auth: bool = setting(
        Flag(), "let clients of other machines send passwords without TLS; over loopback they always may", False
    )
    anonymous_user: str = setting(
        Text(blank=True),
        "who a client without user name is; guest may come from this machine only; empty: all need a name",
        "guest",
    )
    vhost: str = setting(Text(), "vhost of clients whose user name does not say `vhost:user`", "/")
    keep_alive_s_max: int = setting(
        Seconds(0, 65_535), "longest keep alive; clients that ask for more, or for none, get it; 0 for any", 0
    )
    packet_bytes_max: int = setting(Size(KIB, 256 * MIB), "largest packet; a larger one ends the connection", 128 * MIB)
    receive_max: int = setting(Count(1, 65_535), "publishes with QoS 1 and 2 a client may have unanswered", 1_000)
    inflight_max: int = setting(Count(1, 16_384), "unacknowledged deliveries of a session", 1_000)
    topic_alias_max: int = setting(Count(0, 65_535), "topics a client may replace by numbers", 64)
    session_expiry_s_max: int = setting(
        Seconds(0, 0xFFFF_FFFE), "how long a session may outlive its connection; 0 for as long as the client asks", 0
    )
    session_messages_max: int = setting(
        Count(0, 1_000_000_000), "messages that may wait for a session besides those in flight; 0 for all of them", 0
    )
    session_overflow: Overflow = setting(
        Choice(tuple(Overflow)), "what is let go of when more would wait", Overflow.DROP_OLDEST
    )
    retained_bytes_max: int = setting(
        Size(0, 64 * GIB),
        "payloads of retained messages kept in memory, in each vhost; others are read when sent",
        64 * MIB,
    )
    shared_lanes: int = setting(
        Count(0, 1024), "lanes of a shared subscription, so that a topic sticks to one member; 0: members take turns", 0
    )
    subscriptions_max: int = setting(Count(1, 10_000_000), "subscriptions of one session", 10_000)
    retained_count_max: int = setting(
        Count(0, 100_000_000), "retained messages in each vhost; one of a further topic is refused", 100_000
    )
    topic_levels_max: int = setting(Count(1, 65_536), "levels of a topic or topic filter", 128)
    client_id_bytes_max: int = setting(Count(23, 65_535), "longest client identifier", KIB)
    take_over_between_users: bool = setting(
        Flag(), "let a client end the session of another user's client that has the same identifier", False
    )
    lossy_topics: bool = setting(
        Flag(), "map topics to routing keys as RabbitMQ does, though `a.b/c` does not come back from it", False
    )
    handshake_s: int = setting(Seconds(1, 600), "time to send CONNECT and log in", 10)
    sys_period_s: int = setting(
        Seconds(0, 86_400),
        "how often subscribers of $SYS topics are told what changed; 0: there are no such topics",
        10,
    )
    ws_origins: tuple[str, ...] = setting(
        Origins(), "whose web pages may connect over WebSocket besides the broker's own host's", ()
    )
    write_buffer_bytes: int = setting(
        Size(16 * KIB, GIB), "unsent octets of a connection above which the rest is left in the log", MIB
    )

    def door(self) -> MqttConfig:
        return MqttConfig(
            anonymous_user=self.anonymous_user,
            vhost=self.vhost,
            handshake_s=self.handshake_s,
            keep_alive_s_max=self.keep_alive_s_max,
            packet_bytes_max=self.packet_bytes_max,
            receive_max=self.receive_max,
            inflight_max=self.inflight_max,
            topic_alias_max=self.topic_alias_max,
            session_expiry_s_max=self.session_expiry_s_max,
            session_messages_max=self.session_messages_max,
            session_overflow=Overflow(self.session_overflow),
            retained_bytes_max=self.retained_bytes_max,
            shared_lanes=self.shared_lanes,
            write_buffer_bytes=self.write_buffer_bytes,
            subscriptions_max=self.subscriptions_max,
            client_id_bytes_max=self.client_id_bytes_max,
            retained_count_max=self.retained_count_max,
            topic_levels_max=self.topic_levels_max,
            take_over_between_users=self.take_over_between_users,
            lossy_topics=self.lossy_topics,
            sys_period_s=self.sys_period_s,
            ws_origins=self.ws_origins,
            allow_plaintext_auth=self.allow_plaintext_auth,
        )


@dataclass(frozen=True, slots=True)
class HttpSection:
    allow_plaintext_auth: bool = setting(
        Flag(), "let clients of other machines send passwords without TLS; over loopback they always may", False
    )
    body_bytes_max: int = setting(
        Size(KIB, GIB), "largest request that brings messages; others may have 1 MiB", 16 * MIB
    )
    head_s: int = setting(Seconds(1, 600), "time to send the headers of a request", 10)
    body_s: int = setting(Seconds(1, 3600), "time to send its body", 30)
    idle_s: int = setting(Seconds(1, 3600), "how long a connection may stay open without a request", 60)
    write_s: int = setting(Seconds(1, 3600), "how long a client may take nothing of an answer", 30)
    poll_s_max: int = setting(Seconds(1, 3600), "longest wait of a long poll", 60)

    def door(self) -> HttpConfig:
        return HttpConfig(
            allow_plaintext_auth=self.allow_plaintext_auth,
            body_bytes_max=self.body_bytes_max,
            head_s=self.head_s,
            body_s=self.body_s,
            idle_s=self.idle_s,
            write_s=self.write_s,
            poll_s_max=self.poll_s_max,
        )


@dataclass(frozen=True, slots=True)
class GroupsSection:
    offsets_retention_ms: int = setting(
        Milliseconds(MINUTE_MS), "how long the offsets of a consumer group without members are kept", 7 * DAY_MS
    )

    def values(self) -> GroupsConfig:
        return GroupsConfig(offsets_retention_ms=self.offsets_retention_ms)


@dataclass(frozen=True, slots=True)
class StagingSection:
    bytes_max: int = setting(Size(MIB), "how much may wait in stages, of all queries together", 1024 * MIB)
    expiry_ms: int = setting(Milliseconds(MINUTE_MS), "how long a stage waits for its commit", DAY_MS)
    queries_retention_ms: int = setting(
        Milliseconds(MINUTE_MS), "how long after its last commit a query is remembered", 90 * DAY_MS
    )

    def values(self) -> StagingConfig:
        return StagingConfig(
            bytes_max=self.bytes_max,
            expiry_ms=self.expiry_ms,
            queries_retention_ms=self.queries_retention_ms,
        )


@dataclass(frozen=True, slots=True)
class LeasesSection:
    hold_s_max: int = setting(
        Seconds(1, 366 * 86_400), "how long retention waits for a reader whose lowest offset does not move", 86_400
    )
    ttl_s_max: int = setting(Seconds(1, 7 * 86_400), "how long a lease counts at most without being renewed", 3600)
    count_max: int = setting(Count(1, 1_000_000), "how many leases there may be", 10_000)

    def values(self) -> LeaseConfig:
        return LeaseConfig(hold_s_max=self.hold_s_max, ttl_s_max=self.ttl_s_max, count_max=self.count_max)


@dataclass(frozen=True, slots=True)
class DelaySection:
    tick_ms: int = setting(Milliseconds(1, MINUTE_MS), "due times are rounded up to whole ticks", 1)
    horizon_s: int = setting(Seconds(1, 3600), "what is due within this waits in memory, with 16 bytes for each", 120)
    hour_buckets: int = setting(Count(1, 10_000), "how many hours ahead a bucket holds an hour", 24)
    day_buckets: int = setting(Count(1, 3660), "how many days ahead a bucket holds a day; later ones hold a month", 31)
    shards: int = setting(Count(1, 1024), "partitions of a bucket, by the target of what is parked", 1)
    sort_bytes: int = setting(Size(KIB), "how much of the intake may wait to be sorted into buckets", 16 * MIB)
    sort_interval_s: int = setting(Seconds(1, 86_400), "how long a little of it may wait", 300)
    prefetch_bytes: int = setting(Size(KIB), "memory for messages that are about to be due", 16 * MIB)
    remembered: int = setting(
        Count(0, 100_000_000), "fired messages of which cancelling still says that they have fired", 100_000
    )

    def values(self) -> DelayConfig:
        return DelayConfig(
            tick_ms=self.tick_ms,
            horizon_s=self.horizon_s,
            hour_bucket_count=self.hour_buckets,
            day_bucket_count=self.day_buckets,
            shard_count=self.shards,
            sort_bytes=self.sort_bytes,
            sort_interval_s=self.sort_interval_s,
            prefetch_bytes=self.prefetch_bytes,
            remembered_count=self.remembered,
        )


@dataclass(frozen=True, slots=True)
class TlsSection:
    certificate: Path | None = setting(
        FilePath(maybe=True), "PEM file of the server's certificate and those between it and its CA", None, live=True
    )
    key: Path | None = setting(
        FilePath(maybe=True), "PEM file of the key, without passphrase and for its owner only", None, live=True
    )
    client_ca: Path | None = setting(
        FilePath(maybe=True), "PEM file of the CAs whose certificates clients may log in with", None, live=True
    )
    client_certificate_required: bool = setting(Flag(), "turn away clients that show no certificate", False, live=True)
    name_from: NameFrom = setting(
        Choice(tuple(NameFrom)),
        "field of a client's certificate that has the user's name",
        NameFrom.SAN_OR_CN,
        live=True,
    )

    def doors(self) -> TlsConfig | None:
        """None: nothing that TLS needs is configured. ConfigError for half of it."""
        if self.certificate is None and self.key is None:
            if self.client_ca is not None or self.client_certificate_required:
                raise ConfigError(["tls: client certificates need certificate and key of the server"])
            return None
        if self.certificate is None or self.key is None:
            missing = "certificate" if self.certificate is None else "key"
            raise ConfigError([f"tls.{missing}: missing; certificate and key belong together"])
        try:
            return TlsConfig(
                self.certificate, self.key, self.client_ca, self.client_certificate_required, NameFrom(self.name_from)
            )
        except ValueError as error:
            raise ConfigError([f"tls.client_certificate_required: {error}"]) from None


@dataclass(frozen=True, slots=True)
class LimitsSection:
    connections_max: int | None = setting(
        Count(1, 10_000_000, unlimited=True), "connections of this node", 10_000, live=True
    )
    connections_per_user_max: int | None = setting(
        Count(1, 10_000_000, unlimited=True), "connections of one user, loopback spared", 1000, live=True
    )
    connections_per_address_max: int | None = setting(
        Count(1, 10_000_000, unlimited=True), "connections from one address, loopback spared", 100, live=True
    )
    channels_per_user_max: int | None = setting(
        Count(1, 10_000_000, unlimited=True), "channels of one user, loopback spared", None, live=True
    )
    queues_per_vhost_max: int | None = setting(
        Count(1, 10_000_000, unlimited=True), "queues of one vhost, exclusive ones too", 50_000, live=True
    )

    def values(self) -> LimitsConfig:
        return LimitsConfig(
            connections_max=self.connections_max,
            connections_per_user_max=self.connections_per_user_max,
            connections_per_address_max=self.connections_per_address_max,
            channels_per_user_max=self.channels_per_user_max,
            queues_per_vhost_max=self.queues_per_vhost_max,
        )


@dataclass(frozen=True, slots=True)
class AlarmsSection:
    memory_share: float = setting(
        Share(0, 1), "of the machine's or container's memory: above it, publishers wait; 0 for never", 0.6, live=True
    )
    refuse_share: float = setting(
        Share(0, 1), "of the memory: above it, nobody new may connect; 0 for never", 0.8, live=True
    )
    disk_free_share: float = setting(
        Share(0, 1), "of the data directory's disk: with less free, publishers wait", 0.05, live=True
    )
    disk_free_bytes: int = setting(Size(0), "the same in bytes; the greater of both counts", 2 * GIB, live=True)

    def values(self) -> AlarmsConfig:
        return AlarmsConfig(
            memory_share=self.memory_share,
            refuse_share=self.refuse_share,
            disk_free_share=self.disk_free_share,
            disk_free_bytes=self.disk_free_bytes,
        )


@dataclass(frozen=True, slots=True)
class ClusterSection:
    store: str = setting(
        Text(blank=True),
        "PostgreSQL that has the metadata of all nodes, as postgresql://user@host/database; none: one node alone",
        "",
        flag="--cluster",
    )
    node_id: int = setting(
        Count(0, 65_535), "number of this node, from 1 on, for ever; with `store` only", 0, flag="--node-id"
    )
    secret_file: Path | None = setting(
        FilePath(maybe=True),
        "file with the secret that nodes prove to each other, 16 bytes or more, for its owner only",
        None,
        flag="--secret-file",
    )
    peer_tls: bool = setting(
        Flag(), "nodes show each other tls.certificate, and take those of the CAs in tls.client_ca", False
    )
    advertise: str = setting(
        Text(blank=True),
        "where other nodes reach this one, as host or host:port; none: where the peer door listens",
        "",
    )
    shards: int = setting(
        Count(1, 1024), "parts into which vhosts are divided, each with a leader of its own; of a new cluster", 3
    )
    replicas: int = setting(Count(1, 15), "nodes that keep each shard", 3)
    min_in_sync: int = setting(Count(1, 15), "nodes that must have a record before it is confirmed", 2)
    lag_seconds: int = setting(Seconds(1, 3600), "how long a node may lag behind before it no longer counts", 10)
    catch_up_bytes: int | None = setting(
        Size(KIB, unlimited=True), "bytes a second that a node which lags behind may take from a leader", None
    )
    patience_seconds: int = setting(
        Seconds(0, 3600), "how long clients are kept waiting for a leader before they are sent away", 30
    )

    @property
    def is_wanted(self) -> bool:
        return bool(self.store)

    def problems(self) -> list[str]:
        """What does not go together."""
        found = []
        if not self.store:
            if self.node_id or self.secret_file is not None:
                found.append("cluster.store: missing; node_id and secret_file are of use in a cluster only")
            return found
        if not self.node_id:
            found.append("cluster.node_id: missing; each node of a cluster has a number of its own, from 1 on")
        if self.secret_file is None:
            found.append("cluster.secret_file: missing; nodes prove to each other that they know the same secret")
        if not re.fullmatch(r"([^:]+(:[0-9]{1,5})?)?", self.advertise):
            found.append("cluster.advertise: a host, or host:port")
        if self.min_in_sync > self.replicas:
            found.append(f"cluster.min_in_sync: {self.min_in_sync} nodes cannot have what is kept on {self.replicas}")
        return found


@dataclass(frozen=True, slots=True)
class Config:
    node: NodeConfig = section(NodeConfig)
    doors: DoorsConfig = section(DoorsConfig)
    log: LoggingConfig = section(LoggingConfig)
    storage: StorageConfig = section(StorageConfig)
    amqp: AmqpSection = section(AmqpSection)
    mqtt: MqttSection = section(MqttSection)
    http: HttpSection = section(HttpSection)
    groups: GroupsSection = section(GroupsSection)
    staging: StagingSection = section(StagingSection)
    leases: LeasesSection = section(LeasesSection)
    delay: DelaySection = section(DelaySection)
    tls: TlsSection = section(TlsSection)
    limits: LimitsSection = section(LimitsSection)
    alarms: AlarmsSection = section(AlarmsSection)
    cluster: ClusterSection = section(ClusterSection)
    # Vhosts, users, rights, policies, and the limits of single users and vhosts.
    definitions: Definitions = parsed(SECTIONS, parse_definitions)  # noqa: RUF009 (it makes a field)
    # Where they stand, for those who find something wrong with them.
    file: Path | None = None


def load_config(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> Config:
    """Flags (`overrides`, by name: `doors.amqp`) over environment over file over defaults, or ConfigError."""
    config = load(Config, path, environ, overrides)
    # Half a configuration of TLS is found here, not when a door opens.
    config.tls.doors()
    if wrong := config.cluster.problems():
        raise ConfigError(wrong)
    return replace(config, file=path)
