"""Stages and the queries they are of, and how they stand in `__stages` and `__staged`. Format and values; pure.

`__stages` keeps the last state of each stage (key `s` + id) and of each query (key `q` + user + name); an empty value
means it is gone. `__staged` has the messages of stages, in chunks: one record is the columns of some messages, and a
stage is the records first..end-1. Neighbours: staging.py lives by it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from uuid import UUID

import msgspec

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.outbox import TargetPartition

STATE_NAME = "__stages"
DATA_NAME = "__staged"
FORMAT = 1
NAME_BYTES_MAX = 255
# The partition of a message whose key decides.
BY_KEY = -1


@dataclass(frozen=True, slots=True)
class Stage:
    """Messages for one topic that wait for a commit."""

    id: UUID
    user: str
    query: str
    batch: int
    # Which task of the batch brought them, and at which attempt: for people who look.
    partition: int
    attempt: int
    vhost: str
    # What the topic's name led to when they came (topics.py).
    kind: str
    name: str
    stream: UUID
    # Offsets in `__staged`.
    first: int
    end: int
    count: int
    byte_count: int
    made_us: int


@dataclass(frozen=True, slots=True)
class Chosen:
    """A stage of a commit, and what decides the partitions of its messages: the same again after a crash."""

    stage: UUID
    partition_count: int
    # For messages without a key.
    keyless: int


@dataclass(frozen=True, slots=True)
class Pending:
    """A commit that was decided: it will be carried out, whatever happens."""

    batch: int
    stages: Sequence[Chosen]


@dataclass(frozen=True, slots=True)
class Query:
    """Whoever commits batches: a streaming query, or a job."""

    user: str
    name: str
    # Whose the numbers of its messages are in the logs that they go to.
    owner: UUID
    used_us: int
    # Everything up to this batch is published.
    last_batch: int | None = None
    # The next number in each log; those of a pending commit begin here.
    numbers: Mapping[TargetPartition, int] = field(default_factory=dict)
    pending: Pending | None = None


class Chunk(msgspec.Struct, array_like=True):
    """Messages as columns. `headers` are neutral, `properties` of the protocol that `attributes` name."""

    keys: list[bytes] = []
    properties: list[bytes] = []
    values: list[bytes] = []
    headers: list[list[tuple[bytes, bytes]]] = []
    tags: list[list[str]] = []
    attributes: list[int] = []
    # BY_KEY, or what the publisher said.
    partitions: list[int] = []
    # 0: at once.
    due_us: list[int] = []
    # Of those that are due later.
    ids: list[bytes] = []
    format: int = FORMAT

    def __len__(self) -> int:
        return len(self.values)


class _StoredStage(msgspec.Struct, array_like=True):
    format: int
    user: bytes
    query: bytes
    batch: int
    partition: int
    attempt: int
    vhost: bytes
    kind: str
    name: bytes
    stream: bytes
    first: int
    end: int
    count: int
    byte_count: int
    made_us: int


class _StoredQuery(msgspec.Struct, array_like=True):
    format: int
    owner: bytes
    used_us: int
    last_batch: int | None
    numbers: list[tuple[bytes, int, int]]
    # (batch, (stage, partitions, keyless) of each stage)
    pending: tuple[int, list[tuple[bytes, int, int]]] | None


_encoder = msgspec.msgpack.Encoder()
_stages = msgspec.msgpack.Decoder(_StoredStage)
_queries = msgspec.msgpack.Decoder(_StoredQuery)
_chunks = msgspec.msgpack.Decoder(Chunk)


def stage_key(stage: UUID) -> bytes:
    return b"s" + stage.bytes


def query_key(user: str, name: str) -> bytes:
    who = _octets(user)
    return b"q" + len(who).to_bytes(2, "big") + who + _octets(name)


def encode_stage(stage: Stage) -> bytes:
    return _encoder.encode(
        _StoredStage(
            FORMAT,
            _octets(stage.user),
            _octets(stage.query),
            stage.batch,
            stage.partition,
            stage.attempt,
            _octets(stage.vhost),
            stage.kind,
            _octets(stage.name),
            stage.stream.bytes,
            stage.first,
            stage.end,
            stage.count,
            stage.byte_count,
            stage.made_us,
        )
    )


def encode_query(query: Query) -> bytes:
    pending = query.pending
    return _encoder.encode(
        _StoredQuery(
            FORMAT,
            query.owner.bytes,
            query.used_us,
            query.last_batch,
            [(target.stream.bytes, target.partition, number) for target, number in query.numbers.items()],
            None
            if pending is None
            else (pending.batch, [(one.stage.bytes, one.partition_count, one.keyless) for one in pending.stages]),
        )
    )


def encode_chunk(chunk: Chunk) -> bytes:
    return _encoder.encode(chunk)


def decode_entry(key: bytes, value: bytes) -> Stage | Query:
    """Raises UnknownFormat for what this release did not write."""
    try:
        return _stage(key, _stages.decode(value)) if key[:1] == b"s" else _query(key, _queries.decode(value))
    except (msgspec.DecodeError, ValueError) as error:
        raise UnknownFormat(f"{STATE_NAME}: the entry {key!r} cannot be read: {error}") from error


def decode_chunk(value: bytes) -> Chunk:
    try:
        chunk = _chunks.decode(value)
    except msgspec.DecodeError as error:
        raise UnknownFormat(f"{DATA_NAME}: a chunk cannot be read: {error}") from error
    _check_format(chunk.format)
    return chunk


def _stage(key: bytes, stored: _StoredStage) -> Stage:
    _check_format(stored.format)
    return Stage(
        UUID(bytes=key[1:]),
        _text(stored.user),
        _text(stored.query),
        stored.batch,
        stored.partition,
        stored.attempt,
        _text(stored.vhost),
        stored.kind,
        _text(stored.name),
        UUID(bytes=stored.stream),
        stored.first,
        stored.end,
        stored.count,
        stored.byte_count,
        stored.made_us,
    )


def _query(key: bytes, stored: _StoredQuery) -> Query:
    _check_format(stored.format)
    end = 3 + int.from_bytes(key[1:3], "big")
    pending = None
    if stored.pending is not None:
        batch, stages = stored.pending
        pending = Pending(batch, tuple(Chosen(UUID(bytes=one), count, keyless) for one, count, keyless in stages))
    return Query(
        _text(key[3:end]),
        _text(key[end:]),
        UUID(bytes=stored.owner),
        stored.used_us,
        stored.last_batch,
        {TargetPartition(UUID(bytes=stream), at): number for stream, at, number in stored.numbers},
        pending,
    )


def _check_format(found: int) -> None:
    if found != FORMAT:
        raise UnknownFormat(f"{STATE_NAME}: this release reads format {FORMAT}, not {found}")


def _octets(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")
