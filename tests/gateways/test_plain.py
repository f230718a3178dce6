"""AMQP's and MQTT's properties in plain words, and HTTP's in AMQP's."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.core_log.record import QOS_SHIFT, RETAIN, Protocol
from headrace.gateways.amqp import properties as amqp
from headrace.gateways.amqp.fields import Timestamp, encode_table
from headrace.gateways.mqtt import properties as mqtt
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.plain import PlainWords

WORDS = PlainWords(RoutingKeys())
AMQP = int(Protocol.AMQP)
RESERVED = {"CC", "BCC", "x-tags", "x-delay", "x-deliver-at", "x-delay-level", "x-schedule-id"}
RESERVED |= {"x-producer-id", "x-producer-epoch", "x-sequence"}

plain_text = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20)
headers = st.dictionaries(
    st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name not in RESERVED),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | plain_text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(plain_text, inner, max_size=3),
        max_leaves=6,
    ).filter(lambda value: json.dumps(value).find("Infinity") < 0),
    max_size=4,
)


@given(headers, st.booleans())
def test_headers_that_are_written_are_read_back(given_headers: dict[str, object], persistent: bool) -> None:
    written = WORDS.write(given_headers, content_type="text/plain", tags=("a", "b,c"), persistent=persistent)
    amqp.scan(written)
    plain = WORDS.read(b"k", written, AMQP)
    assert plain.headers == {**given_headers, "x-tags": 'a,"b,c"'}
    assert plain.properties == {"content_type": "text/plain", "delivery_mode": 2 if persistent else 1}


@given(st.binary(max_size=40), st.sampled_from([int(one) for one in Protocol]))
def test_any_octets_give_something_that_json_can_say(properties: bytes, protocol: int) -> None:
    plain = WORDS.read(b"a.b", properties, protocol)
    json.dumps([plain.properties, plain.headers])


def test_amqp_properties_have_their_names() -> None:
    properties = amqp.encode(
        amqp.Properties(
            headers_bytes=encode_table({"when": Timestamp(5), "raw": b"\xff", "odd": float("inf")}),
            message_type="t",
            user_id="guest",
            timestamp=7,
        )
    )
    plain = WORDS.read(b"", properties, AMQP)
    assert plain.properties == {"type": "t", "user_id": "guest", "timestamp": 7}
    assert plain.headers == {"when": {"timestamp": 5}, "raw": {"base64": "/w=="}, "odd": "inf"}


def test_mqtt_properties_have_their_names_and_user_properties_are_headers() -> None:
    blob = mqtt.encode_blob(
        mqtt.Properties(
            content_type="c",
            correlation_data=b"\xff",
            user_properties=(("a", "1"), ("b", "2"), ("a", "3"), ("a", "4")),
        )
    )
    plain = WORDS.read(b"a.b%2Ec", blob, int(Protocol.MQTT_5) | 1 << QOS_SHIFT | RETAIN)
    assert plain.properties == {
        "topic": "a/b.c",
        "qos": 1,
        "retain": True,
        "content_type": "c",
        "correlation_data": {"base64": "/w=="},
    }
    assert plain.headers == {"a": ["1", "3", "4"], "b": "2"}


@pytest.mark.parametrize("name", sorted(RESERVED - {"CC"}))
def test_header_that_the_broker_would_act_upon_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match=name):
        WORDS.write({name: "1"}, content_type=None, tags=(), persistent=True)


@pytest.mark.parametrize(
    "bad",
    [
        {"x" * 256: 1},
        {"a": {"x" * 256: 1}},
        {"a": 2**63},
        {"a": [[[[[[[[[[[[[[[[[[1]]]]]]]]]]]]]]]]]]},
        {"CC": "one"},
        {"CC": [1]},
    ],
)
def test_header_that_amqp_cannot_hold_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(Invalid):
        WORDS.write(bad, content_type=None, tags=(), persistent=True)


def test_content_type_that_is_too_long_is_refused() -> None:
    with pytest.raises(Invalid):
        WORDS.write({}, content_type="ü" * 200, tags=(), persistent=True)
