"""Every setting of a node, as one frozen value. Driver: reads the file once, and again when told to reload.

Each section below is a table of the TOML file; docs/configuration.md lists the same keys (a test holds the two
together). Nothing else in the house reads a file or a variable for its settings: the rooms are handed values.
Neighbours: settings.py has the order of precedence and the errors, kinds.py the ways to write a value.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.core_log.config import Compression, DirectoryConfig, Durability, LogConfig
from headrace.kinds import (
    DAY_MS,
    GIB,
    HOUR_MS,
    KIB,
    MIB,
    Address,
    Choice,
    Count,
    FilePath,
    Listen,
    Milliseconds,
    Seconds,
    Size,
)
from headrace.settings import load, section, setting


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
class Config:
    node: NodeConfig = section(NodeConfig)
    doors: DoorsConfig = section(DoorsConfig)
    log: LoggingConfig = section(LoggingConfig)
    storage: StorageConfig = section(StorageConfig)


def load_config(path: Path | None, environ: Mapping[str, str], overrides: Mapping[str, str]) -> Config:
    """Flags (`overrides`, by name: `doors.amqp`) over environment over file over defaults, or ConfigError."""
    return load(Config, path, environ, overrides)
