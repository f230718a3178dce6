"""AMQP and MQTT properties, both ways: docs/mapping.md names a test of this file in each of its rows."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.record import QOS_SHIFT, RETAIN, Protocol
from headrace.gateways.amqp import properties as amqp
from headrace.gateways.amqp.fields import ByteArray, FieldTable, Float32, Timestamp, UInt16, encode_table
from headrace.gateways.mapping import PropertyMapping
from headrace.gateways.mqtt import properties as mqtt
from headrace.gateways.mqtt.packets import QoS
from headrace.gateways.mqtt.reasons import PacketType
from headrace.gateways.mqtt.routingkeys import RoutingKeys

from .mqtt.strategies import properties as mqtt_properties

PAGE = Path(__file__).parents[2] / "docs" / "mapping.md"


def mapping(lossy: bool = False) -> PropertyMapping:
    return PropertyMapping(RoutingKeys(lossy=lossy))


def to_amqp(qos: int = 0, retain: bool = False, key: bytes = b"a.b", **values: object) -> amqp.Properties:
    """The basic properties that an AMQP consumer sees of a message published over MQTT with these properties."""
    attributes = Protocol.MQTT_5 | qos << QOS_SHIFT | (RETAIN if retain else 0)
    blob = mqtt.encode_blob(mqtt.Properties(**values))  # type: ignore[arg-type]
    octets = mapping().to_amqp(key, blob, attributes)
    amqp.scan(octets)
    return amqp.decode(octets)


def to_mqtt(headers: FieldTable | None = None, **values: object) -> mqtt.Properties:
    """The properties that an MQTT subscriber sees of a message published over AMQP with these basic properties."""
    headers_bytes = None if headers is None else encode_table(headers)
    octets = amqp.encode(amqp.Properties(headers_bytes=headers_bytes, **values))  # type: ignore[arg-type]
    return mqtt.decode_blob(mapping().to_mqtt(octets).blob)


# ---- from MQTT to AMQP ---------------------------------------------------------------------------------------------


def test_message_without_properties_is_transient_and_has_nothing_else() -> None:
    assert to_amqp() == amqp.Properties(delivery_mode=1)


@pytest.mark.parametrize(("qos", "delivery_mode"), [(QoS(0), 1), (QoS(1), 2), (QoS(2), 2)])
def test_qos_becomes_delivery_mode(qos: QoS, delivery_mode: int) -> None:
    assert to_amqp(qos=qos).delivery_mode == delivery_mode


def test_content_type_becomes_content_type() -> None:
    assert to_amqp(content_type="application/json; é").content_type == "application/json; é"


def test_content_type_that_a_short_string_does_not_hold_is_dropped() -> None:
    assert to_amqp(content_type="t" * 255).content_type == "t" * 255
    assert to_amqp(content_type="t" * 256).content_type is None


def test_text_payload_becomes_content_encoding_utf_8() -> None:
    assert to_amqp(payload_format_indicator=1).content_encoding == "utf-8"
    assert to_amqp(payload_format_indicator=0).content_encoding is None


def test_correlation_data_becomes_correlation_id() -> None:
    found = to_amqp(correlation_data="né 1".encode())
    assert (found.correlation_id, found.headers) == ("né 1", None)


@pytest.mark.parametrize("data", [b"\xff\x00", b"c" * 256], ids=["not UTF-8", "too long"])
def test_other_correlation_data_becomes_a_header(data: bytes) -> None:
    found = to_amqp(correlation_data=data)
    value = (found.headers or {})["x-correlation-id"]
    assert found.correlation_id is None
    assert (value.encode() if isinstance(value, str) else value) == data


def test_response_topic_becomes_header_and_reply_to() -> None:
    found = to_amqp(response_topic="answers/v1.0")
    assert found.headers == {"x-reply-to-topic": "answers.v1%2E0"}
    assert found.reply_to == "answers.v1%2E0"


def test_long_response_topic_becomes_the_header_alone() -> None:
    found = to_amqp(response_topic="r" * 256)
    assert (found.headers, found.reply_to) == ({"x-reply-to-topic": "r" * 256}, None)


def test_user_properties_become_headers_in_order() -> None:
    found = to_amqp(user_properties=(("z", "1"), ("a", "é")))
    assert list((found.headers or {}).items()) == [("z", "1"), ("a", "é")]


def test_repeated_user_property_becomes_an_array() -> None:
    found = to_amqp(user_properties=(("tag", "a"), ("k", "v"), ("tag", "b")))
    assert found.headers == {"tag": ["a", "b"], "k": "v"}


def test_user_property_with_a_long_name_is_dropped() -> None:
    assert to_amqp(user_properties=(("n" * 256, "v"), ("n" * 255, "v"))).headers == {"n" * 255: "v"}


def test_response_topic_counts_more_than_a_user_property_of_its_name() -> None:
    found = to_amqp(response_topic="a/b", user_properties=(("x-reply-to-topic", "mine"),))
    assert found.headers == {"x-reply-to-topic": "a.b"}


def test_message_expiry_becomes_expiration() -> None:
    assert to_amqp(message_expiry_interval=90).expiration == "90000"
    assert to_amqp(message_expiry_interval=0xFFFF_FFFF).expiration == "4294967295000"


def test_retain_becomes_a_header() -> None:
    assert to_amqp(retain=True).headers == {"x-mqtt-retain": True}


def test_topic_longer_than_a_routing_key_becomes_a_header() -> None:
    topic = "v1.0/" + "l" * 300
    key = RoutingKeys().key_of(topic.encode())
    assert to_amqp(key=key).headers == {"x-mqtt-topic": topic}
    assert to_amqp(key=key[:255]).headers is None


@given(mqtt_properties(PacketType.PUBLISH, without=["subscription_identifiers", "topic_alias"]), st.booleans())
def test_whatever_mqtt_says_amqp_can_read(found: mqtt.Properties, retain: bool) -> None:
    octets = mapping().to_amqp(b"k", mqtt.encode_blob(found), Protocol.MQTT_5 | (RETAIN if retain else 0))
    amqp.scan(octets)
    assert amqp.encode(amqp.decode(octets)) == octets


# ---- from AMQP to MQTT ---------------------------------------------------------------------------------------------


def test_message_without_basic_properties_has_none_in_mqtt() -> None:
    assert mapping().to_mqtt(amqp.NO_PROPERTIES) == (b"", 0, False)


@pytest.mark.parametrize(("delivery_mode", "qos"), [(None, 0), (1, 0), (2, 1), (3, 0)])
def test_delivery_mode_becomes_qos(delivery_mode: int | None, qos: int) -> None:
    octets = amqp.encode(amqp.Properties(delivery_mode=delivery_mode))
    assert mapping().to_mqtt(octets).qos == qos


def test_content_type_comes_from_content_type() -> None:
    assert to_mqtt(content_type="text/plain") == mqtt.Properties(content_type="text/plain")


@pytest.mark.parametrize("text", ["a\0b", b"\xff".decode("utf-8", "surrogateescape")], ids=["null", "not UTF-8"])
def test_text_that_mqtt_cannot_say_is_dropped(text: str) -> None:
    assert to_mqtt(content_type=text, message_id=text, headers={"h": "1", "n" + text: "2"}) == mqtt.Properties(
        user_properties=(("h", "1"),)
    )


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8"])
def test_content_encoding_utf_8_says_that_the_payload_is_text(encoding: str) -> None:
    assert to_mqtt(content_encoding=encoding) == mqtt.Properties(payload_format_indicator=1)


def test_other_content_encoding_becomes_a_user_property() -> None:
    assert to_mqtt(content_encoding="gzip") == mqtt.Properties(user_properties=(("content-encoding", "gzip"),))


def test_correlation_id_becomes_correlation_data() -> None:
    assert to_mqtt(correlation_id="né").correlation_data == "né".encode()
    assert to_mqtt(correlation_id=b"\xff".decode("utf-8", "surrogateescape")).correlation_data == b"\xff"


def test_correlation_data_comes_back_from_its_header() -> None:
    assert to_mqtt({"x-correlation-id": b"\xff"}) == mqtt.Properties(correlation_data=b"\xff")


def test_reply_to_topic_header_becomes_response_topic() -> None:
    assert to_mqtt({"x-reply-to-topic": "a.v1%2E0"}, reply_to="q") == mqtt.Properties(response_topic="a/v1.0")


def test_reply_to_is_taken_as_a_key_of_the_topic_exchange() -> None:
    assert to_mqtt(reply_to="answers.me") == mqtt.Properties(response_topic="answers/me")


def test_direct_reply_to_has_no_topic() -> None:
    assert to_mqtt(reply_to="amq.rabbitmq.reply-to.g1h2") == mqtt.NO_PROPERTIES


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("é", "é"),
        (True, "true"),
        (False, "false"),
        (7, "7"),
        (UInt16(8), "8"),
        (Timestamp(9), "9"),
        (1.5, "1.5"),
        (Float32(0.5), "0.5"),
        (None, ""),
        ({"a": 1, "b": [True, None, "é"]}, '{"a":1,"b":[true,null,"é"]}'),
    ],
)
def test_header_becomes_a_user_property_by_its_text(value: object, text: str) -> None:
    assert to_mqtt({"h": value}).user_properties == (("h", text),)  # type: ignore[dict-item]


def test_array_becomes_a_user_property_for_each_item() -> None:
    assert to_mqtt({"tag": ["a", 2, {"k": []}]}).user_properties == (("tag", "a"), ("tag", "2"), ("tag", '{"k":[]}'))


@pytest.mark.parametrize("value", [b"\xff", ByteArray(b"a"), {"k": b"\xff"}, "l" * 65_536], ids=repr)
def test_header_without_a_text_is_dropped(value: object) -> None:
    assert to_mqtt({"h": value, "other": "1"}).user_properties == (("other", "1"),)  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("expiration", "seconds"), [("0", 0), ("1", 1), ("1000", 1), ("1001", 2), ("4294967295000", 0xFFFF_FFFF)]
)
def test_expiration_becomes_message_expiry_in_seconds_rounded_up(expiration: str, seconds: int) -> None:
    assert to_mqtt(expiration=expiration).message_expiry_interval == seconds


def test_expiration_beyond_what_mqtt_can_say_is_none() -> None:
    assert to_mqtt(expiration="4294967295001").message_expiry_interval is None


def test_what_mqtt_has_no_name_for_becomes_user_properties() -> None:
    found = to_mqtt(
        priority=3, message_id="m", timestamp=12, message_type="t", user_id="u", app_id="a", cluster_id="dropped"
    )
    assert found.user_properties == (
        ("priority", "3"),
        ("message-id", "m"),
        ("timestamp", "12"),
        ("type", "t"),
        ("user-id", "u"),
        ("app-id", "a"),
    )


@pytest.mark.parametrize(("value", "retain"), [(True, True), (False, False), ("true", False)])
def test_retain_header_asks_for_retaining(value: object, retain: bool) -> None:
    octets = amqp.encode(amqp.Properties(headers_bytes=encode_table({"x-retain": value})))  # type: ignore[dict-item]
    found = mapping().to_mqtt(octets)
    assert found.retain is retain
    assert (found.blob == b"") is retain


@given(
    st.builds(
        amqp.Properties,
        content_type=st.none() | st.binary(max_size=9).map(lambda data: data.decode("utf-8", "surrogateescape")),
        headers_bytes=st.none()
        | st.dictionaries(
            st.text(max_size=4), st.integers(-(2**63), 2**63 - 1) | st.text(max_size=4) | st.binary(max_size=4)
        ).map(encode_table),
        correlation_id=st.none() | st.binary(max_size=9).map(lambda data: data.decode("utf-8", "surrogateescape")),
        reply_to=st.none() | st.binary(max_size=9).map(lambda data: data.decode("utf-8", "surrogateescape")),
        expiration=st.none() | st.integers(0, 2**53).map(str),
        timestamp=st.none() | st.integers(0, 2**64 - 1),
    ).map(amqp.encode)
)
def test_whatever_amqp_says_mqtt_can_read(octets: bytes) -> None:
    found = mapping().to_mqtt(octets)
    mqtt.scan(found.blob)


# ---- there and back ------------------------------------------------------------------------------------------------


@given(
    mqtt_properties(PacketType.PUBLISH, without=["subscription_identifiers", "topic_alias", "user_properties"]),
    st.dictionaries(
        st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=4), st.text("ab", max_size=4)
    ),
)
def test_what_both_sides_can_say_comes_back(found: mqtt.Properties, texts: dict[str, str]) -> None:
    blob = mqtt.encode_blob(found) + mqtt.encode_blob(mqtt.Properties(user_properties=tuple(texts.items())))
    one = mapping()
    again = mqtt.decode_blob(one.to_mqtt(one.to_amqp(b"k", blob, Protocol.MQTT_5 | 1 << QOS_SHIFT)).blob)
    expected = mqtt.decode_blob(blob)
    if expected.payload_format_indicator == 0:
        assert again.payload_format_indicator is None
        again = mqtt.decode_blob(b"\x01\x00" + mqtt.encode_blob(again))
    assert again == expected


@pytest.mark.parametrize("size", [10, 2000])
def test_a_translation_that_is_kept_equals_one_that_is_not(size: int) -> None:
    blob = mqtt.encode_blob(mqtt.Properties(user_properties=(("n", "v" * size),)))
    one = mapping()
    assert one.to_amqp(b"k", blob, Protocol.MQTT_5) == one.to_amqp(b"k", blob, Protocol.MQTT_5)
    octets = one.to_amqp(b"k", blob, Protocol.MQTT_5)
    assert one.to_mqtt(octets) == one.to_mqtt(octets)


def test_response_topic_follows_the_lossy_mapping() -> None:
    blob = mqtt.encode_blob(mqtt.Properties(response_topic="a.b/c"))
    found = amqp.decode(mapping(lossy=True).to_amqp(b"k", blob, Protocol.MQTT_5))
    assert found.reply_to == "a.b.c"


def test_every_test_that_the_page_names_is_there() -> None:
    names = set(re.findall(r"`(test_\w+)`", PAGE.read_text()))
    files = [*PAGE.parents[1].joinpath("tests/gateways").glob("test_mapping.py")]
    files += PAGE.parents[1].joinpath("tests/gateways/mqtt").glob("test_*.py")
    defined = {name for file in files for name in re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE)}
    assert names and names <= defined
