"""Read leases: somebody outside is at work on a topic from an offset on, and retention waits for them. Driver.

A lease is a name, the lowest offset that its holder still needs of each partition, and how long that counts unless it
is renewed. It survives a restart. A holder that comes no further does not keep the disk for ever: a lowest offset that
has not moved for `hold_s_max` counts no more, however often it is renewed (R2, R4). Names belong to the user who took
them, and to a stream: a topic that was deleted and created again has no leases.
Neighbours: broker.py asks for `pins` before anything is removed, gateways/http/leases.py is the way in.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from uuid import UUID

import msgspec

from headrace.controller.errors import LimitReached, NotFound
from headrace.core_log.config import LogConfig
from headrace.core_log.errors import OffsetOutOfRange
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.ports import Source

NAME = "__leases"
CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=4 * 1024 * 1024)
LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class LeaseConfig:
    # A lowest offset that does not move counts for so long.
    hold_s_max: float = 24 * 3600.0
    ttl_s_max: float = 3600.0
    count_max: int = 10_000

    def __post_init__(self) -> None:
        for name in ("hold_s_max", "ttl_s_max", "count_max"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be more than 0, not {getattr(self, name)}")


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The lowest offset of a partition that is needed, and since when it has been that one."""

    offset: int
    since_us: int


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    stream: UUID
    user: str
    name: str
    expires_us: int
    held: dict[int, Held]

    @property
    def key(self) -> tuple[UUID, str, str]:
        return self.stream, self.user, self.name


class ReadLeases:
    def __init__(self, broker: Broker, config: LeaseConfig | None = None) -> None:
        """Before the broker is loaded: there is a log of its own."""
        self.config = config or LeaseConfig()
        # What became of leases.
        self.counts: Counter[str] = Counter(dict.fromkeys(("granted", "renewed", "released", "expired"), 0))
        # Partitions for which retention waits no more, though a lease says so.
        self.overdue_count = 0
        self._broker = broker
        self._log = broker.private_log(NAME, CONFIG)
        self._leases: dict[tuple[UUID, str, str], Lease] = {}

    async def load(self) -> None:
        for _offset, key, value in await self._broker.env.worker.run(lambda: list(self._log.entries())):
            if value:
                lease = msgspec.json.decode(value, type=Lease)
                self._leases[lease.key] = lease
            else:
                self._leases.pop(_parts(key), None)

    async def run(self) -> None:
        """Retention asks us, and leases end, until cancelled."""
        with self._broker.holding(self):
            while True:
                self._end_old()
                await self._broker.env.clock.sleep(LOOK_S)

    # -- asked from outside ---------------------------------------------------------------------------------------

    @property
    def pins(self) -> Mapping[Source, int]:
        found: dict[Source, int] = {}
        now_us = self._now_us()
        for lease in self._leases.values():
            if lease.expires_us <= now_us:
                continue
            for log, held in self._logs(lease):
                if not self._is_overdue(held, now_us):
                    found[log] = min(held.offset, found.get(log, held.offset))
        return found

    def list(self, stream: UUID) -> Sequence[Lease]:
        now_us = self._now_us()
        found = [one for one in self._leases.values() if one.stream == stream and one.expires_us > now_us]
        return sorted(found, key=lambda one: (one.user, one.name))

    def get(self, stream: UUID, user: str, name: str) -> Lease:
        found = self._leases.get((stream, user, name))
        if found is None or found.expires_us <= self._now_us():
            raise NotFound(f"user '{user}' has no lease '{name}' here (any more)")
        return found

    @property
    def count(self) -> int:
        return len(self._leases)

    async def put(
        self, logs: Sequence[PartitionLog], stream: UUID, user: str, name: str, offsets: Mapping[int, int], ttl_s: float
    ) -> tuple[Lease, bool]:
        """Take or renew; True: it is new. What a renewal does not name is needed no more.

        Raises OffsetOutOfRange for an offset that is not there (any more): the lease cannot keep it, and is left as it
        was. Returns when the lease survives a crash.
        """
        now_us = self._now_us()
        for partition, offset in offsets.items():
            if not 0 <= partition < len(logs):
                raise NotFound(f"there are {len(logs)} partitions, and no partition {partition}")
            log = logs[partition]
            if not log.log_start <= offset <= log.high_watermark:
                raise OffsetOutOfRange(offset, log.log_start, log.high_watermark)
        known = self._leases.get((stream, user, name))
        if known is None and len(self._leases) >= self.config.count_max:
            raise LimitReached(f"there are {len(self._leases)} leases, at most {self.config.count_max} are kept")
        held = {}
        for partition, offset in offsets.items():
            before = None if known is None else known.held.get(partition)
            since_us = before.since_us if before is not None and before.offset == offset else now_us
            held[partition] = Held(offset=offset, since_us=since_us)
        expires_us = now_us + int(min(ttl_s, self.config.ttl_s_max) * 1e6)
        lease = Lease(stream=stream, user=user, name=name, expires_us=expires_us, held=held)
        self._leases[lease.key] = lease
        self.counts["granted" if known is None else "renewed"] += 1
        await self._broker.wait_committed(self._log, self._write([(lease.key, msgspec.json.encode(lease))]))
        return lease, known is None

    async def release(self, stream: UUID, user: str, name: str) -> None:
        """Nothing is needed any more. Raises NotFound."""
        lease = self.get(stream, user, name)
        del self._leases[lease.key]
        self.counts["released"] += 1
        await self._broker.wait_committed(self._log, self._write([(lease.key, b"")]))

    def is_overdue(self, held: Held) -> bool:
        """It has not moved for so long that retention waits no more."""
        return self._is_overdue(held, self._now_us())

    # -- inside ---------------------------------------------------------------------------------------------------

    def _is_overdue(self, held: Held, now_us: int) -> bool:
        return now_us - held.since_us >= self.config.hold_s_max * 1e6

    def _logs(self, lease: Lease) -> Iterator[tuple[PartitionLog, Held]]:
        stream = self._broker.directory.streams.get(lease.stream)
        for partition, held in lease.held.items():
            if stream is not None and partition < len(stream.partitions):
                yield stream.partitions[partition], held

    def _end_old(self) -> None:
        now_us = self._now_us()
        streams = self._broker.directory.streams
        over = [one for one in self._leases.values() if one.expires_us <= now_us or one.stream not in streams]
        for lease in over:
            del self._leases[lease.key]
            self.counts["expired"] += 1
        if over:
            self._write([(one.key, b"") for one in over])
        overdue = sum(self._is_overdue(held, now_us) for one in self._leases.values() for held in one.held.values())
        self.overdue_count = overdue

    def _write(self, entries: Sequence[tuple[tuple[UUID, str, str], bytes]]) -> int:
        keys, values = [_key(key) for key, _ in entries], [value for _, value in entries]
        appended = self._log.append(keys, [b""] * len(keys), values, timestamp_us=self._now_us(), attributes=PERSISTENT)
        self._broker.directory.committer.urgent(self._log)
        return int(appended.next_offset)

    def _now_us(self) -> int:
        return self._broker.env.clock.wall_us()


def _key(key: tuple[UUID, str, str]) -> bytes:
    stream, user, name = key
    return msgspec.json.encode([str(stream), user, name])


def _parts(key: bytes) -> tuple[UUID, str, str]:
    stream, user, name = msgspec.json.decode(key, type=tuple[UUID, str, str])
    return stream, user, name
