"""How the log behind an exchange or a queue is kept: what its arguments and its policy ask for together. Value; pure.

Arguments have an `x-` before the names of the settings in a policy. Where both speak, the argument decides about
durability and compression, and of two retentions the shorter one counts, as with RabbitMQ's limits. What nobody asks
for is the node's default ([storage]). Neighbours: the doors checked the arguments, controller/policies.py the policy.
"""

from dataclasses import dataclass, replace
from typing import cast

from headrace.controller.table import EMPTY, Table
from headrace.core_log.config import Compression, Durability, LogConfig

# Segments are not made smaller than that, however small somebody asks for them, nor larger than this.
SEGMENT_BYTES_MIN = 64 * 1024
SEGMENT_BYTES_MAX = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class LogSettings:
    """None: not asked for."""

    durability: Durability | None = None
    compression: Compression | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None
    segment_bytes: int | None = None

    def over(self, default: LogConfig) -> LogConfig:
        """The default, but for what is asked for."""
        segment_bytes = default.segment_bytes_max
        if self.segment_bytes is not None:
            segment_bytes = min(max(self.segment_bytes, SEGMENT_BYTES_MIN), SEGMENT_BYTES_MAX)
        return replace(
            default,
            durability=self.durability or default.durability,
            compression=self.compression or default.compression,
            retention_ms=default.retention_ms if self.retention_ms is None else self.retention_ms,
            retention_bytes=default.retention_bytes if self.retention_bytes is None else self.retention_bytes,
            segment_bytes_max=segment_bytes,
        )


NOTHING_ASKED = LogSettings()


def log_settings(arguments: Table, policy: Table = EMPTY, *, is_stream: bool = False) -> LogSettings:
    """`is_stream`: the size of its segments may be asked for too, as in RabbitMQ."""
    durability = _first_text(arguments.get("x-durability"), policy.get("durability"))
    compression = _first_text(arguments.get("x-compression"), policy.get("compression"))
    return LogSettings(
        durability=cast(Durability | None, durability),
        compression=cast(Compression | None, compression),
        retention_ms=_lowest(arguments.get("x-retention-ms"), policy.get("retention-ms")),
        retention_bytes=_lowest(arguments.get("x-retention-bytes"), policy.get("retention-bytes")),
        segment_bytes=_lowest(
            arguments.get("x-stream-max-segment-size-bytes"), policy.get("stream-max-segment-size-bytes")
        )
        if is_stream
        else None,
    )


def _first_text(*found: object) -> str | None:
    return next((one for one in found if isinstance(one, str)), None)


def _lowest(*found: object) -> int | None:
    return min((one for one in found if isinstance(one, int)), default=None)
