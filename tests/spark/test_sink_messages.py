"""Rows as messages: what is known and what is refused, without Spark and without a broker."""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pytest

from headrace.spark.options import InvalidOption
from headrace.spark.sink_messages import ROWS_MAX, SinkOptions, check_columns, messages, parcels, sink_options

URL = {"url": "http://127.0.0.1:15672"}


@pytest.mark.parametrize(
    ("options", "streaming", "told"),
    [
        ({}, False, "give its HTTP door as 'url'"),
        ({**URL, "acks": "1"}, False, "it is 'x-acks'"),
        ({**URL, "x-acks": "2"}, False, "one of all, 1, 0"),
        ({**URL, "idempotnt": "true"}, False, "did you mean 'idempotent'"),
        ({**URL, "idempotent": "yes"}, False, "true or false"),
        ({**URL, "idempotent": "true"}, False, "needs 'jobId'"),
        ({**URL, "jobId": "j"}, False, "batch writes with 'idempotent'"),
        ({**URL, "idempotent": "true", "jobId": "j"}, True, "a stream has the id of its query"),
        ({**URL, "idempotent": "true", "x-acks": "0"}, True, "does not go with"),
        ({**URL, "topic": " "}, False, "'topic' is empty"),
        ({**URL, "password": "secret"}, False, "tokenName"),
        ({"url": "http://u:p@host"}, False, "user or password"),
    ],
)
def test_option_that_cannot_be_is_refused(options: Mapping[str, str], streaming: bool, told: str) -> None:
    with pytest.raises(InvalidOption, match=told):
        sink_options(options, streaming=streaming)


def test_options_are_read() -> None:
    found = sink_options({**URL, "topic": "t", "idempotent": "true", "jobId": "j", "tokenName": "n"}, streaming=False)
    assert found == SinkOptions(URL["url"], "n", "t", "all", True, "j")


@pytest.mark.parametrize(
    ("types", "told"),
    [
        ({"key": "binary"}, "value is missing"),
        ({"value": "binary", "vlaue": "binary"}, "no column vlaue"),
        ({"value": "bigint"}, "value is binary or string; not bigint"),
        ({"value": "string", "deliver_at": "string"}, "deliver_at is timestamp"),
        ({"value": "string"}, "say where to"),
    ],
)
def test_column_that_cannot_be_written_is_refused(types: Mapping[str, str], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        check_columns(types, SinkOptions(URL["url"]))


def one(row: dict[str, Any], topic: str | None = "t") -> tuple[str, dict[str, Any]]:
    ((where, message, _size),) = messages(pa.RecordBatch.from_pylist([row]), topic)
    return where, message


def test_row_becomes_a_message_with_all_that_it_says() -> None:
    row = {
        "value": b"\xff",
        "key": "k",
        "headers": [{"key": "a", "value": b"1"}, {"key": "b", "value": b"\xff\x00"}],
        "tags": ["eu", "vip"],
        "partition": 2,
        "topic": "orders",
    }
    assert one(row, None) == (
        "orders",
        {
            "value": "/w==",
            "encoding": "base64",
            "key": "k",
            "key_encoding": "text",
            "headers": {"a": "1", "b": {"base64": "/wA="}},
            "tags": ["eu", "vip"],
            "partition": 2,
        },
    )
    assert one(row, "other")[0] == "other"


def test_text_that_looks_like_json_stays_text_and_null_is_empty() -> None:
    assert one({"value": b'{"a": 1}'})[1] == {"value": '{"a": 1}', "encoding": "text"}
    assert one({"value": None})[1] == {"value": "", "encoding": "text"}


def test_due_times_are_never_early() -> None:
    times = pa.array([1_700_000_000_000_001, None], pa.timestamp("us", tz="UTC"))
    batch = pa.RecordBatch.from_arrays([pa.array([b"a", b"b"]), times], ["value", "deliver_at"])
    found = [message.get("deliver_at") for _, message, _ in messages(batch, "t")]
    assert found == [1_700_000_000_001, None]


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ({"value": b"", "topic": None}, "no topic"),
        ({"value": b"", "topic": "t", "headers": [{"key": "a", "value": b""}] * 2}, "twice"),
    ],
)
def test_row_that_cannot_be_a_message_is_refused(row: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        one(row, None)


def test_rows_of_a_topic_keep_their_order_and_parcels_are_bounded() -> None:
    rows = [{"value": f"{n}", "topic": f"t{n % 2}"} for n in range(3 * ROWS_MAX)]
    made = list(parcels(iter([pa.RecordBatch.from_pylist(rows)]), None))
    assert max(len(parcel.messages) for parcel in made) == ROWS_MAX
    for topic in ("t0", "t1"):
        values = [message["value"] for parcel in made if parcel.topic == topic for message in parcel.messages]
        assert values == [row["value"] for row in rows if row["topic"] == topic]
    large = [{"value": bytes(1024 * 1024)} for _ in range(20)]
    assert len(list(parcels(iter([pa.RecordBatch.from_pylist(large)]), "t"))) >= 4
