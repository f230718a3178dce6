"""Rows on their way into the broker: which columns and options there are, and a row as a message. Format; no pyspark.

Names are those of Spark's Kafka sink (key, value, headers, topic, partition) and our own (tags, deliver_at). What is
not known is refused: a column that is left out in silence is data that is lost in silence.
Neighbours: sink.py sends what is made here.
"""

from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from headrace.spark.options import InvalidOption, check_names, where

OPTIONS = ("url", "tokenName", "topic", "x-acks", "idempotent", "jobId", "checkpointLocation")
ACKS = ("all", "1", "0")
_INSTEAD = {
    "acks": "it is 'x-acks'",
    "kafka.acks": "it is 'x-acks'",
    "path": "rows are written through a broker: give its HTTP door as 'url'",
    "kafka.bootstrap.servers": "give the broker's HTTP door as 'url'",
}
# So many rows, or about so many bytes of them, are sent in one request; the broker takes 10,000 and 16 MiB.
ROWS_MAX = 5_000
BYTES_MAX = 4 * 1024 * 1024
JOB_BYTES_MAX = 200


@dataclass(frozen=True, slots=True)
class SinkOptions:
    url: str
    token_name: str | None = None
    # Takes the place of the column.
    topic: str | None = None
    acks: str = "all"
    idempotent: bool = False
    job_id: str | None = None


def sink_options(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Raises InvalidOption."""
    for name in options:
        if hint := _INSTEAD.get(name.lower()):
            raise InvalidOption(f"unknown option {name!r}: {hint}")
    check_names(options, OPTIONS)
    if "url" not in options:
        raise InvalidOption("rows are written through a broker: give its HTTP door as 'url'")
    found = where(options)
    assert found.url is not None
    acks = options.get("x-acks", "all").strip().lower()
    if acks not in ACKS:
        raise InvalidOption(f"'x-acks' is one of {', '.join(ACKS)}; not {acks!r}")
    idempotent = options.get("idempotent", "false").strip().lower()
    if idempotent not in ("true", "false"):
        raise InvalidOption(f"'idempotent' is true or false; not {idempotent!r}")
    made = SinkOptions(
        found.url, found.token_name, _given(options, "topic"), acks, idempotent == "true", _given(options, "jobId")
    )
    if made.idempotent and "x-acks" in options:
        raise InvalidOption("'x-acks' does not go with 'idempotent': a commit is always durable")
    if made.job_id is not None and (streaming or not made.idempotent):
        raise InvalidOption("'jobId' is for batch writes with 'idempotent'; a stream has the id of its query")
    if made.idempotent and not streaming and made.job_id is None:
        raise InvalidOption("a batch write with 'idempotent' needs 'jobId': the name under which it counts as done")
    if made.job_id is not None and len(made.job_id.encode()) > JOB_BYTES_MAX:
        raise InvalidOption(f"'jobId' is longer than {JOB_BYTES_MAX} bytes")
    return made


def _given(options: Mapping[str, str], name: str) -> str | None:
    text = options.get(name)
    if text is not None and not text.strip():
        raise InvalidOption(f"{name!r} is empty")
    return text


# -- columns --------------------------------------------------------------------------------------------------------

_PLAIN = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "partition": ("int",),
    "tags": ("array<string>",),
    "deliver_at": ("timestamp",),
    "headers": ("array<struct<key:string,value:binary>>", "array<struct<key:string,value:string>>"),
}
COLUMNS = tuple(_PLAIN)


def check_columns(types: Mapping[str, str], options: SinkOptions) -> None:
    """`types` are Spark's simple strings by column. Raises ValueError for what cannot be written."""
    unknown = [name for name in types if name not in _PLAIN]
    if unknown:
        raise ValueError(f"there is no column {', '.join(unknown)} to write; there are {', '.join(COLUMNS)}")
    for name, found in types.items():
        if found not in _PLAIN[name]:
            raise ValueError(f"the column {name} is {' or '.join(_PLAIN[name])}; not {found}")
    if "value" not in types:
        raise ValueError("the column value is missing")
    if "topic" not in types and options.topic is None:
        raise ValueError("say where to: a column topic, or the option 'topic'")


# -- rows -----------------------------------------------------------------------------------------------------------

Message = dict[str, Any]


@dataclass(slots=True)
class Parcel:
    """Messages for one topic that are sent together."""

    topic: str
    messages: list[Message]
    byte_count: int = 0

    @property
    def is_full(self) -> bool:
        return len(self.messages) >= ROWS_MAX or self.byte_count >= BYTES_MAX


def parcels(batches: Iterator[pa.RecordBatch], topic: str | None) -> Iterator[Parcel]:
    """Rows by where they go, those of a topic in their order."""
    open_parcels: dict[str, Parcel] = {}
    for batch in batches:
        for where_to, message, size in messages(batch, topic):
            parcel = open_parcels.get(where_to)
            if parcel is None:
                parcel = open_parcels[where_to] = Parcel(where_to, [])
            parcel.messages.append(message)
            parcel.byte_count += size
            if parcel.is_full:
                del open_parcels[where_to]
                yield parcel
    yield from open_parcels.values()


def messages(batch: pa.RecordBatch, topic: str | None) -> Iterator[tuple[str, Message, int]]:
    """(topic, message, about how many bytes) of each row. ValueError for one that cannot be a message."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    if "deliver_at" in columns:
        # Milliseconds, rounded up: never early.
        columns["deliver_at"] = columns["deliver_at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
    lists = {name: column.to_pylist() for name, column in columns.items()}
    for row in range(batch.num_rows):
        where_to = topic if topic is not None else lists["topic"][row]
        if not where_to:
            raise ValueError("a row has no topic: its column is null or empty, and there is no option 'topic'")
        value = lists["value"][row]
        message, size = _value("value", "encoding", value)
        if "key" in lists and lists["key"][row] is not None:
            key, more = _value("key", "key_encoding", lists["key"][row])
            message |= key
            size += more
        if "headers" in lists and lists["headers"][row]:
            message["headers"] = _headers(lists["headers"][row])
        if "tags" in lists and lists["tags"][row]:
            message["tags"] = lists["tags"][row]
        if "partition" in lists and lists["partition"][row] is not None:
            message["partition"] = lists["partition"][row]
        if "deliver_at" in lists and lists["deliver_at"][row] is not None:
            message["deliver_at"] = -(-lists["deliver_at"][row] // 1000)
        yield where_to, message, size + 32


def _value(name: str, encoding: str, value: bytes | str | None) -> tuple[Message, int]:
    if value is None:
        return {name: "", encoding: "text"}, 0
    if isinstance(value, str):
        return {name: value, encoding: "text"}, len(value)
    try:
        return {name: value.decode(), encoding: "text"}, len(value)
    except UnicodeDecodeError:
        return {name: b64encode(value).decode(), encoding: "base64"}, len(value) * 4 // 3


def _headers(listed: list[dict[str, Any]]) -> dict[str, str | dict[str, str]]:
    found: dict[str, str | dict[str, str]] = {}
    for one in listed:
        name, value = one["key"], one["value"]
        if name in found:
            raise ValueError(f"the header {name!r} comes twice in one row")
        try:
            found[name] = value if isinstance(value, str) else (value or b"").decode()
        except UnicodeDecodeError:
            found[name] = {"base64": b64encode(value).decode()}
    return found
