"""A schedule, and how it stands in the log `__schedules`. Format and values; pure.

The log keeps the last state of each schedule under its vhost and name (compacted); an empty value means it is gone.
Neighbours: schedules.py lives by it, delay/cron.py says when it runs.
"""

from dataclasses import dataclass
from uuid import UUID

import msgspec

from headrace.core_log.errors import UnknownFormat
from headrace.delay.cron import Cron, Missed

STREAM_NAME = "__schedules"
FORMAT = 1
NAME_BYTES_MAX = 255


@dataclass(frozen=True, slots=True)
class Message:
    """What each run publishes, in the words of one protocol (`attributes`)."""

    exchange: str
    key: bytes
    properties: bytes
    value: bytes
    attributes: int
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Definition:
    """What somebody asked for."""

    cron: Cron
    message: Message
    missed: Missed = Missed.SKIP
    paused: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    vhost: str
    name: str
    # Whose the numbers of its runs are in the logs it publishes to.
    id: UUID
    definition: Definition
    created_us: int
    # Counts up with each change: what was parked for an earlier one no longer counts.
    revision: int = 0
    # The number of the next run, and when it is; None: never, or it is paused.
    number: int = 0
    next_us: int | None = None
    last_us: int | None = None
    run_count: int = 0
    missed_count: int = 0
    # Runs that found no exchange to publish to.
    failed_count: int = 0


class _Stored(msgspec.Struct, array_like=True):
    format: int
    id: bytes
    cron: str
    zone: str
    missed: str
    paused: bool
    exchange: bytes
    key: bytes
    properties: bytes
    value: bytes
    attributes: int
    tags: list[str]
    created_us: int
    revision: int
    number: int
    next_us: int | None
    last_us: int | None
    run_count: int
    missed_count: int
    failed_count: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Stored)


def schedule_key(vhost: str, name: str) -> bytes:
    host = vhost.encode("utf-8", "surrogateescape")
    return len(host).to_bytes(2, "big") + host + name.encode("utf-8", "surrogateescape")


def split_key(key: bytes) -> tuple[str, str]:
    end = 2 + int.from_bytes(key[:2], "big")
    return key[2:end].decode("utf-8", "surrogateescape"), key[end:].decode("utf-8", "surrogateescape")


def encode_schedule(schedule: Schedule) -> bytes:
    definition = schedule.definition
    message = definition.message
    return _encoder.encode(
        _Stored(
            FORMAT,
            schedule.id.bytes,
            definition.cron.expression,
            definition.cron.zone,
            definition.missed.value,
            definition.paused,
            message.exchange.encode("utf-8", "surrogateescape"),
            message.key,
            message.properties,
            message.value,
            message.attributes,
            list(message.tags),
            schedule.created_us,
            schedule.revision,
            schedule.number,
            schedule.next_us,
            schedule.last_us,
            schedule.run_count,
            schedule.missed_count,
            schedule.failed_count,
        )
    )


def decode_schedule(key: bytes, value: bytes) -> Schedule:
    vhost, name = split_key(key)
    try:
        stored = _decoder.decode(value)
        id, missed = UUID(bytes=stored.id), Missed(stored.missed)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnknownFormat(f"{STREAM_NAME}: schedule '{name}' cannot be read: {error}") from error
    if stored.format != FORMAT:
        raise UnknownFormat(f"{STREAM_NAME}: this release reads format {FORMAT}, schedule '{name}' has {stored.format}")
    message = Message(
        stored.exchange.decode("utf-8", "surrogateescape"),
        stored.key,
        stored.properties,
        stored.value,
        stored.attributes,
        tuple(stored.tags),
    )
    return Schedule(
        vhost,
        name,
        id,
        Definition(Cron(stored.cron, stored.zone), message, missed, stored.paused),
        stored.created_us,
        stored.revision,
        stored.number,
        stored.next_us,
        stored.last_us,
        stored.run_count,
        stored.missed_count,
        stored.failed_count,
    )
