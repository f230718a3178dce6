"""Data directories for tests of readers: real files, written by the log itself, without a broker."""

from pathlib import Path
from typing import Any
from uuid import UUID

from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.log import PartitionLog
from headrace.core_log.real import real_env
from headrace.core_log.spec import StreamSpec


class Written:
    """A directory with a broker's log in it, and how to write to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = LogDirectory.open_now(
            real_env(folder, handles_max=64), DirectoryConfig(removal_delay_ms=0, recycled_count_max=4), clean=False
        )

    @property
    def path(self) -> str:
        return str(self.folder)

    def topic(self, name: str = "t", *, partitions: int = 1, kind: str = "topic", **config: Any) -> list[PartitionLog]:
        settings = {"segment_bytes_max": 64 * 1024, "retention_ms": None, "compression": "none"} | config
        spec = StreamSpec(
            id=self.directory.env.ids.uuid(),
            name=name,
            kind=kind,
            partition_count=partitions,
            created_us=self.directory.env.clock.wall_us(),
            config=LogConfig(**settings),
        )
        return self.directory.create_now(spec).partitions

    def add(self, log: PartitionLog, *values: bytes, timestamp_us: int = 1, **fields: Any) -> None:
        """One batch, committed; where readers see it, `note` says."""
        keys = fields.pop("keys", [b"k"] * len(values))
        properties = fields.pop("properties", [b""] * len(values))
        log.append(keys, properties, values, timestamp_us=timestamp_us, **fields)
        commit(log)

    def fill(self, log: PartitionLog, batches: int, each: int = 10, size: int = 500, **fields: Any) -> None:
        """Batches whose values say their offsets; then the watermark follows."""
        for _ in range(batches):
            first = int(log.end)
            values = [b"%d." % offset + b"x" * size for offset in range(first, first + each)]
            self.add(log, *values, timestamp_us=1_000_000 + first, **fields)
        log.note_watermark()

    def segment_paths(self, log: PartitionLog) -> list[Path]:
        return [self.folder / segment.path for segment in log.segments]

    def id_of(self, log: PartitionLog) -> UUID:
        return UUID(bytes=log.stream_id.bytes)


def commit(log: PartitionLog) -> None:
    log.seal()
    job = log.begin_sync()
    if job is not None:
        log.run_sync(job)
        log.finish_sync(job)
