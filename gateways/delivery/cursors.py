"""Cursors: where readers outside began, kept for them under a name. Driver.

A cursor is written once. Who creates one that is there already gets the one that is there: a stream that asks again
after a crash begins where it began the first time, whatever "latest" has become since. The broker does not move it and
keeps nothing for it (that is what read leases are for).
Neighbours: gateways/http/cursors.py is the way in, spark/stream.py the reader it was made for.
"""

from uuid import UUID

import msgspec
import trio

from headrace.controller.errors import LimitReached, NotFound
from headrace.core_log.config import LogConfig
from headrace.core_log.record import PERSISTENT
from headrace.gateways.delivery.broker import Broker

NAME = "__cursors"
CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=4 * 1024 * 1024)
COUNT_MAX = 100_000


class CursorTopic(msgspec.Struct, frozen=True, kw_only=True):
    """The next offset to read of each partition of a topic, which was this stream at the time."""

    id: UUID
    offsets: dict[int, int]


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    user: str
    created_us: int
    # By public name.
    topics: dict[str, CursorTopic]


class Cursors:
    def __init__(self, broker: Broker) -> None:
        """Before the broker is loaded: there is a log of its own."""
        self._broker = broker
        self._log = broker.private_log(NAME, CONFIG)
        self._cursors: dict[str, Cursor] = {}
        # One change at a time: nobody is told of a cursor that a crash could take back.
        self._changing = trio.Lock()

    async def load(self) -> None:
        for _offset, key, value in await self._broker.env.worker.run(lambda: list(self._log.entries())):
            if value:
                self._cursors[key.decode()] = msgspec.json.decode(value, type=Cursor)
            else:
                self._cursors.pop(key.decode(), None)

    def list(self) -> list[Cursor]:
        return [self._cursors[name] for name in sorted(self._cursors)]

    def get(self, name: str) -> Cursor:
        found = self._cursors.get(name)
        if found is None:
            raise NotFound(f"no cursor '{name}'")
        return found

    async def create(self, name: str, user: str, topics: dict[str, CursorTopic]) -> tuple[Cursor, bool]:
        """The cursor of this name, and whether it is new. It survives a crash when this returns."""
        async with self._changing:
            known = self._cursors.get(name)
            if known is not None:
                return known, False
            if len(self._cursors) >= COUNT_MAX:
                raise LimitReached(f"there are {len(self._cursors)} cursors, at most {COUNT_MAX} are kept")
            now_us = self._broker.env.clock.wall_us()
            cursor = Cursor(name=name, user=user, created_us=now_us, topics=topics)
            await self._write(name, msgspec.json.encode(cursor))
            self._cursors[name] = cursor
            return cursor, True

    async def delete(self, name: str) -> None:
        async with self._changing:
            self.get(name)
            await self._write(name, b"")
            del self._cursors[name]

    async def _write(self, name: str, value: bytes) -> None:
        # Who gives up waiting must not leave it undecided whether it is there.
        with trio.CancelScope(shield=True):
            now_us = self._broker.env.clock.wall_us()
            appended = self._log.append([name.encode()], [b""], [value], timestamp_us=now_us, attributes=PERSISTENT)
            self._broker.directory.committer.urgent(self._log)
            await self._broker.wait_committed(self._log, int(appended.next_offset))
