"""The columns of a record and their types, for the decoder and for those who only plan. Format; of pyarrow's types.

decode.py says what each holds, and makes them.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

KAFKA_COLUMNS = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")

_TIME = pa.timestamp("us", tz="UTC")
_PAIR_OF_TEXTS = pa.struct([("key", pa.string()), ("value", pa.string())])

FIELDS: dict[str, Any] = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "offset": pa.int64(),
    "timestamp": _TIME,
    "timestampType": pa.int32(),
    "headers": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
    "tags": pa.list_(pa.string()),
    "tag": pa.string(),
    "protocol": pa.string(),
    "routing_key": pa.string(),
    "amqp": pa.struct(
        [
            ("content_type", pa.string()),
            ("content_encoding", pa.string()),
            ("delivery_mode", pa.int32()),
            ("priority", pa.int32()),
            ("correlation_id", pa.string()),
            ("reply_to", pa.string()),
            ("expiration", pa.string()),
            ("message_id", pa.string()),
            ("timestamp", _TIME),
            ("type", pa.string()),
            ("user_id", pa.string()),
            ("app_id", pa.string()),
        ]
    ),
    "mqtt": pa.struct(
        [
            ("topic", pa.string()),
            ("qos", pa.int32()),
            ("retain", pa.bool_()),
            ("payload_format_indicator", pa.int32()),
            ("message_expiry_interval", pa.int64()),
            ("content_type", pa.string()),
            ("response_topic", pa.string()),
            ("correlation_data", pa.binary()),
            ("user_properties", pa.list_(_PAIR_OF_TEXTS)),
        ]
    ),
    "properties": pa.binary(),
    "priority": pa.int16(),
    "qos": pa.int8(),
    "persistent": pa.bool_(),
    "retain": pa.bool_(),
    "expiry": _TIME,
}


def schema(columns: Sequence[str]) -> pa.Schema:
    """These columns, in this order; all may be null. Raises ValueError for one that there is not, or twice."""
    unknown = [name for name in columns if name not in FIELDS]
    if unknown:
        raise ValueError(f"no column {', '.join(unknown)}; there are {', '.join(FIELDS)}")
    if len(set(columns)) != len(columns):
        raise ValueError(f"a column twice: {', '.join(columns)}")
    return pa.schema([pa.field(name, FIELDS[name]) for name in columns])
