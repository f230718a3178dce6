"""Properties read from the log's bytes: the same that the doors read."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.amqp import properties as amqp_door
from headrace.gateways.amqp.fields import encode_table
from headrace.gateways.mqtt import properties as mqtt_door
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.spark.properties import Amqp, Mqtt, amqp, mqtt, mqtt_topic

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
SHORT = st.none() | TEXT
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.builds(
        amqp_door.Properties,
        content_type=SHORT,
        content_encoding=SHORT,
        headers_bytes=st.none() | st.dictionaries(TEXT, VALUES, max_size=4).map(encode_table),
        delivery_mode=st.none() | st.sampled_from([1, 2]),
        priority=st.none() | st.integers(0, 255),
        correlation_id=SHORT,
        reply_to=SHORT,
        expiration=st.none() | st.just("1000"),
        message_id=SHORT,
        timestamp=st.none() | st.integers(0, 2**40),
        message_type=SHORT,
        user_id=SHORT,
        app_id=SHORT,
        cluster_id=SHORT,
    )
)
def test_amqp_properties_are_read_as_the_door_reads_them(sent: amqp_door.Properties) -> None:
    data = amqp_door.encode(sent)
    door, found = amqp_door.decode(data), amqp(data)
    assert found is not None
    for name in Amqp._fields:
        if name not in ("type", "timestamp", "headers"):
            assert getattr(found, name) == getattr(door, name)
    assert found.type == door.message_type
    assert found.timestamp == (None if door.timestamp is None else door.timestamp * 1_000_000)
    headers = door.headers or {}
    assert [name for name, _ in found.headers] == list(headers)
    for (_, written), value in zip(found.headers, headers.values(), strict=True):
        if isinstance(value, str):
            assert written == value.encode()
        elif isinstance(value, int) and not isinstance(value, bool):
            assert int(written) == value


@given(
    st.builds(
        mqtt_door.Properties,
        payload_format_indicator=st.none() | st.sampled_from([0, 1]),
        message_expiry_interval=st.none() | st.integers(0, 2**32 - 1),
        content_type=SHORT,
        response_topic=st.none() | st.just("a/b"),
        correlation_data=st.none() | st.binary(max_size=20),
        user_properties=st.lists(st.tuples(TEXT, TEXT), max_size=3).map(tuple),
    )
)
def test_mqtt_properties_are_read_as_the_door_reads_them(sent: mqtt_door.Properties) -> None:
    data = mqtt_door.encode_blob(sent)
    door, found = mqtt_door.decode_blob(data), mqtt(data)
    assert found is not None
    for name in Mqtt._fields[:-1]:
        assert getattr(found, name) == getattr(door, name)
    assert [(name, value.decode()) for name, value in found.user_properties] == list(door.user_properties)


@given(st.binary(max_size=30) | TEXT.map(str.encode))
def test_topics_of_keys_are_the_brokers(key: bytes) -> None:
    assert mqtt_topic(key).encode() == RoutingKeys().topic_of(key)


@given(st.binary(max_size=60))
def test_bytes_that_are_no_properties_are_none_and_never_an_error(data: bytes) -> None:
    amqp(data)
    mqtt(data)
