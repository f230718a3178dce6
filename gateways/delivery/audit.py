"""What people did to the broker's messages and when: the stream `__audit`. Driver.

One record for each event, as JSON: its kind, when, who, and what it was about. It is written as any record is, and kept
a year; whoever may read the data directory reads it with `headrace log dump`.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.core_log.config import LogConfig
from headrace.core_log.record import PERSISTENT

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker

STREAM_NAME = "__audit"
CONFIG = LogConfig(retention_ms=365 * 24 * 3600 * 1000, segment_bytes_max=16 * 1024 * 1024)


class Audit:
    def __init__(self, broker: "Broker") -> None:
        """Before the broker loads."""
        self._broker = broker
        self.log = broker.private_log(STREAM_NAME, CONFIG)

    def note(self, kind: str, who: str, about: Mapping[str, Any]) -> int:
        """Returns the offset that a commit must pass for it to be safe."""
        now_us = self._broker.env.clock.wall_us()
        value = msgspec.json.encode({"kind": kind, "time_us": now_us, "who": who, **about})
        appended = self.log.append([kind.encode()], [b""], [value], timestamp_us=now_us, attributes=PERSISTENT)
        self._broker.directory.committer.urgent(self.log)
        return int(appended.next_offset)

    async def noted(self, kind: str, who: str, about: Mapping[str, Any]) -> None:
        """It is safe when this returns."""
        await self._broker.wait_committed(self.log, self.note(kind, who, about))

    def events(self, kind: str | None = None) -> Iterator[dict[str, Any]]:
        """What was noted, the oldest first. Reads the disk."""
        for _offset, key, value in self.log.entries():
            if kind is None or key == kind.encode():
                yield msgspec.json.decode(value)
