"""What people did to the broker's messages and when: the stream `__audit`. Driver.

One record for each event, as JSON: its kind, when, who, and what it was about. It is written as any record is, and kept
a year. Neighbours: redrive.py and consumer_groups_coordinator.py note, gateways/http/audit.py reads.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import trio

from headrace.core_log.config import LogConfig
from headrace.core_log.record import PERSISTENT

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker

STREAM_NAME = "__audit"
CONFIG = LogConfig(retention_ms=365 * 24 * 3600 * 1000, segment_bytes_max=16 * 1024 * 1024)
# Of one page: records that are read together, and how many bytes are looked through for those that are wanted.
WINDOW_COUNT = 64
LOOK_BYTES_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Event:
    offset: int
    kind: str
    time_us: int
    who: str
    about: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    # The newest first.
    events: Sequence[Event]
    # Older ones lie before this offset; None: there are none.
    before: int | None


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

    async def page(self, kind: str | None = None, *, before: int | None = None, limit: int = 100) -> Page:
        """What is committed, from the newest back: a window at a time, between which others on the loop get a turn."""
        log = self.log
        end = int(log.high_watermark)
        end = end if before is None else min(before, end)
        found: list[Event] = []
        room = LOOK_BYTES_MAX
        while end > log.log_start and room > 0:
            start = max(int(log.log_start), end - WINDOW_COUNT)
            window = await self._window(start, end)
            for offset, key, value in reversed(window):
                if kind is None or key == kind.encode():
                    if len(found) == limit:
                        return Page(found, found[-1].offset)
                    found.append(_event(offset, value))
                room -= len(value)
            end = start
        return Page(found, end if end > log.log_start else None)

    async def _window(self, offset: int, end: int) -> list[tuple[int, bytes, bytes]]:
        """(offset, key, value), the oldest first."""
        found: list[tuple[int, bytes, bytes]] = []
        while (offset := max(offset, int(self.log.log_start))) < end:
            runs = self.log.read(offset, end=end)
            for batch, first, last in runs:
                found += [(batch.offset_at(at), batch.keys[at], batch.values[at]) for at in range(first, last)]
            offset = int(runs[-1].batch.next_offset)
            await trio.lowlevel.checkpoint()
        return found


def _event(offset: int, value: bytes) -> Event:
    about = msgspec.json.decode(value)
    return Event(offset, about.pop("kind"), about.pop("time_us"), about.pop("who"), about)
