"""Views of the broker as tables: queues, dead letters, delays, schedules, retained messages, lag. Driver: HTTP.

Page by page from the broker's HTTP door; no pyspark.

    queue:orders                ready and unacked messages, in the queue's order
    dead-letters:orders.dlq     where, when and why each died, and how often it was tried
    delayed, delayed:orders     what is parked until it is due, of all or for one exchange (`vhost|name`)
    schedules                   what comes round
    retained, retained:a/#      retained messages of MQTT, of vhost `/` (`retained:vhost|a/#` of another)
    lag, lag:workers            how far consumer groups have come in each partition

A table is what the broker says while it is read: pages are asked for one after the other, and messages may come and go
between them. Times are UTC, keys and values the octets they are; headers and properties that are no text are JSON.
Neighbours: table_reader.py hands it to Spark, gateways/http/ answers.
"""

import json
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlencode

import pyarrow as pa

from headrace.spark.access_http import Door

PAGE = 1000

_TIME = pa.timestamp("us", tz="UTC")
_TEXTS = pa.map_(pa.string(), pa.string())
_MESSAGE = {
    "key": pa.binary(),
    "value": pa.binary(),
    "headers": _TEXTS,
    "tags": pa.list_(pa.string()),
}
_RECORD = {
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    **_MESSAGE,
    "protocol": pa.string(),
    "properties": _TEXTS,
}

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class View:
    """`kind` is one of KINDS; `name` is empty where none was given."""

    kind: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class _Kind:
    columns: dict[str, pa.DataType]
    rows: Callable[[Door, str], Iterator[Row]]
    needs_name: bool = False
    takes_name: bool = True


def parse_view(text: str) -> View:
    """Raises ValueError."""
    kind, _, name = text.strip().partition(":")
    found = KINDS.get(kind)
    if found is None:
        raise ValueError(f"there is no view {kind!r}; there are {', '.join(KINDS)}")
    if found.needs_name and not name:
        raise ValueError(f"say which: {kind}:name")
    if name and not found.takes_name:
        raise ValueError(f"{kind!r} takes no name")
    return View(kind, name)


def arrow_schema(view: View) -> pa.Schema:
    return pa.schema([pa.field(name, kind) for name, kind in KINDS[view.kind].columns.items()])


def read_view(door: Door, view: View) -> Iterator[pa.RecordBatch]:
    """Everything, in record batches of a page each."""
    schema = arrow_schema(view)
    rows: list[Row] = []
    for row in KINDS[view.kind].rows(door, view.name):
        rows.append(row)
        if len(rows) == PAGE:
            yield pa.RecordBatch.from_pylist(rows, schema=schema)
            rows = []
    if rows:
        yield pa.RecordBatch.from_pylist(rows, schema=schema)


# -- the kinds ------------------------------------------------------------------------------------------------------


def _queue(door: Door, name: str) -> Iterator[Row]:
    path = f"/api/v1/queues/{quote(name, safe='')}/unsettled"
    for page in _pages(door, path, lambda page: page["cursor"]):
        for one in page["messages"]:
            yield {
                "lane": one["lane"],
                "sequence": one["sequence"],
                "state": one["state"],
                "stream": one["stream"],
                **_record(one["message"]),
            }


def _dead_letters(door: Door, name: str) -> Iterator[Row]:
    path = f"/api/v1/queues/{quote(name, safe='')}/dead-letters"
    for page in _pages(door, path, lambda page: page["dead_letters"][-1]["id"] if page["more"] else None):
        for one in page["dead_letters"]:
            history = [{"failed_at": _time(it["failed_at"]), "reason": it["reason"]} for it in one["history"]]
            yield {
                "id": one["id"],
                "died_in": one["died_in"],
                "reason": one["reason"],
                "died_at": _time(one["died_at"]),
                "attempts": one["attempts"],
                "history": history,
                "origin": one["origin"],
                **_record(one["message"]),
            }


def _delayed(door: Door, name: str) -> Iterator[Row]:
    vhost, mark, rest = name.partition("|")
    asked = {} if not name else {"vhost": vhost, "name": rest} if mark else {"name": name}
    for page in _pages(door, "/api/v1/delayed/messages", lambda page: page["cursor"], **asked):
        for one in page["messages"]:
            yield {
                "id": one["id"],
                "deliver_at": _time(one["deliver_at"]),
                "parked_at": _time(one["parked_at"]),
                "kind": one["kind"],
                "vhost": one["vhost"],
                "name": one["name"],
                **_message(one),
            }


def _schedules(door: Door, name: str) -> Iterator[Row]:
    for one in door.json("GET", "/api/v1/schedules")["schedules"]:
        message = one.pop("message")
        times = {at: _time(one.pop(at)) for at in ("next_run", "last_run", "created_at")}
        yield {**one, **times, "exchange": message["exchange"], **_message(message)}


def _retained(door: Door, name: str) -> Iterator[Row]:
    vhost, mark, rest = name.partition("|")
    asked = {"vhost": vhost, "filter": rest or "#"} if mark else {"filter": name or "#"}
    last = _behind("messages", "topic")
    for page in _pages(door, "/api/v1/retained", last, **asked):
        for one in page["messages"]:
            yield {
                "topic": one["topic"],
                "value": _octets(one["value"], one.get("encoding")),
                "qos": one["qos"],
                "timestamp": _time(one["timestamp"]),
                "expires_at": _time(one.get("expires_at")),
                "tags": one.get("tags", []),
                "user": one.get("user", ""),
                "client_id": one.get("client_id", ""),
            }


def _lag(door: Door, name: str) -> Iterator[Row]:
    path = "/api/v1/consumer-groups"
    if name:
        names = [name]
    else:
        found = door.json("GET", path)["groups"]
        names = [one["group"] if one["vhost"] == "/" else f"{one['vhost']}|{one['group']}" for one in found]
    for group in names:
        told = door.json("GET", f"{path}/{quote(group, safe='')}")
        for one in told["partitions"]:
            yield {"group": told["group"], "vhost": told["vhost"], "state": told["state"], **one}


KINDS = {
    "queue": _Kind(
        {"lane": pa.int32(), "sequence": pa.int64(), "state": pa.string(), "stream": pa.string(), **_RECORD},
        _queue,
        needs_name=True,
    ),
    "dead-letters": _Kind(
        {
            "id": pa.string(),
            "died_in": pa.string(),
            "reason": pa.string(),
            "died_at": _TIME,
            "attempts": pa.int32(),
            "history": pa.list_(pa.struct([("failed_at", _TIME), ("reason", pa.string())])),
            "origin": pa.struct(
                [
                    ("stream", pa.string()),
                    ("partition", pa.int32()),
                    ("offset", pa.int64()),
                    ("exchange", pa.string()),
                ]
            ),
            **_RECORD,
        },
        _dead_letters,
        needs_name=True,
    ),
    "delayed": _Kind(
        {
            "id": pa.string(),
            "deliver_at": _TIME,
            "parked_at": _TIME,
            "kind": pa.string(),
            "vhost": pa.string(),
            "name": pa.string(),
            **_MESSAGE,
        },
        _delayed,
    ),
    "schedules": _Kind(
        {
            "name": pa.string(),
            "vhost": pa.string(),
            "cron": pa.string(),
            "zone": pa.string(),
            "missed": pa.string(),
            "paused": pa.bool_(),
            "next_run": _TIME,
            "last_run": _TIME,
            "runs": pa.int64(),
            "missed_runs": pa.int64(),
            "failed_runs": pa.int64(),
            "created_at": _TIME,
            "exchange": pa.string(),
            **_MESSAGE,
        },
        _schedules,
        takes_name=False,
    ),
    "retained": _Kind(
        {
            "topic": pa.string(),
            "value": pa.binary(),
            "qos": pa.int32(),
            "timestamp": _TIME,
            "expires_at": _TIME,
            "tags": pa.list_(pa.string()),
            "user": pa.string(),
            "client_id": pa.string(),
        },
        _retained,
    ),
    "lag": _Kind(
        {
            "group": pa.string(),
            "vhost": pa.string(),
            "state": pa.string(),
            "topic": pa.string(),
            "partition": pa.int32(),
            "committed": pa.int64(),
            "first_offset": pa.int64(),
            "end_offset": pa.int64(),
            "lag": pa.int64(),
            "lost": pa.int64(),
            "member_id": pa.string(),
        },
        _lag,
    ),
}


# -- pages and values -----------------------------------------------------------------------------------------------


def _pages(door: Door, path: str, after_of: Callable[[Any], str | None], **asked: str) -> Iterator[Any]:
    after: str | None = None
    while True:
        query = {"limit": str(PAGE), "encoding": "base64", **asked, **({} if after is None else {"after": after})}
        page = door.json("GET", f"{path}?{urlencode(query)}")
        yield page
        after = after_of(page)
        if after is None:
            return


def _behind(rows: str, key: str) -> Callable[[Any], str | None]:
    return lambda page: page[rows][-1][key] if page["more"] else None


def _record(message: Row) -> Row:
    return {
        "partition": message["partition"],
        "offset": message["offset"],
        "timestamp": _time(message["timestamp"]),
        **_message(message),
        "protocol": message.get("protocol", "http"),
        "properties": _texts(message.get("properties", {})),
    }


def _message(message: Row) -> Row:
    return {
        "key": _octets(message["key"], message.get("key_encoding")),
        "value": _octets(message["value"], message.get("encoding")),
        "headers": _texts(message.get("headers", {})),
        "tags": message.get("tags", []),
    }


def _octets(text: str, encoding: str | None) -> bytes:
    return b64decode(text) if encoding == "base64" else text.encode()


def _texts(values: Row) -> list[tuple[str, str]]:
    return [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in values.items()]


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)
