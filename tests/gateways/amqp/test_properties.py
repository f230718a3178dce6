"""Basic properties: scanned cheaply, decoded and encoded without loss, edited without touching the rest."""

import datetime
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pamqp import commands, header

from headrace.gateways.amqp.errors import AmqpError, ReplyCode
from headrace.gateways.amqp.fields import TABLE_DEPTH_MAX, FieldTable, Timestamp, UInt16, decode_table, encode_table
from headrace.gateways.amqp.properties import (
    EXPIRATION_MS_MAX,
    NO_PROPERTIES,
    Properties,
    PropertyScan,
    decode,
    encode,
    headers_place,
    scan,
    with_expiration,
    with_headers,
    without_header,
)

TABLES: st.SearchStrategy[FieldTable] = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.text(max_size=8),
        st.integers(0, 2**64 - 1).map(Timestamp),
        st.integers(0, 2**16 - 1).map(UInt16),
        st.lists(st.integers(0, 5), max_size=3),
        st.dictionaries(st.text(max_size=4), st.none(), max_size=2),
    ),
    max_size=4,
)
STRINGS = st.one_of(
    st.text(max_size=20), st.binary(max_size=20).map(lambda data: data.decode("utf-8", "surrogateescape"))
)
PROPERTIES = st.builds(
    Properties,
    content_type=st.none() | STRINGS,
    content_encoding=st.none() | STRINGS,
    headers_bytes=st.none() | TABLES.map(encode_table),
    delivery_mode=st.none() | st.integers(0, 255),
    priority=st.none() | st.integers(0, 255),
    correlation_id=st.none() | STRINGS,
    reply_to=st.none() | STRINGS,
    expiration=st.none() | st.integers(0, EXPIRATION_MS_MAX).map(str),
    message_id=st.none() | STRINGS,
    timestamp=st.none() | st.integers(0, 2**64 - 1),
    message_type=st.none() | STRINGS,
    user_id=st.none() | STRINGS,
    app_id=st.none() | STRINGS,
    cluster_id=st.none() | STRINGS,
)


@given(PROPERTIES)
def test_properties_come_back_as_they_went(properties: Properties) -> None:
    assert decode(encode(properties)) == properties


@given(PROPERTIES)
def test_a_scan_finds_what_a_decode_finds(properties: Properties) -> None:
    found = scan(encode(properties))
    assert found.delivery_mode == properties.delivery_mode
    assert found.persistent == (properties.delivery_mode == 2)
    assert found.priority == properties.priority
    assert found.expiration_ms == (None if properties.expiration is None else int(properties.expiration))
    assert found.has_headers == (properties.headers_bytes is not None)


@given(
    st.builds(
        commands.Basic.Properties,
        content_type=st.text(min_size=1, max_size=8) | st.none(),
        content_encoding=st.text(min_size=1, max_size=8) | st.none(),
        headers=st.dictionaries(st.text(max_size=5), st.text(max_size=5) | st.booleans(), min_size=1, max_size=3)
        | st.none(),
        delivery_mode=st.sampled_from([1, 2, None]),
        priority=st.integers(0, 255) | st.none(),
        correlation_id=st.text(min_size=1, max_size=8) | st.none(),
        reply_to=st.text(min_size=1, max_size=8) | st.none(),
        expiration=st.integers(0, 10**9).map(str) | st.none(),
        message_id=st.text(min_size=1, max_size=8) | st.none(),
        timestamp=st.datetimes(
            datetime.datetime(1970, 1, 1), datetime.datetime(2100, 1, 1), timezones=st.just(datetime.UTC)
        ).map(lambda moment: moment.replace(microsecond=0))
        | st.none(),
        message_type=st.text(min_size=1, max_size=8) | st.none(),
        user_id=st.text(min_size=1, max_size=8) | st.none(),
        app_id=st.text(min_size=1, max_size=8) | st.none(),
    )
)
def test_pamqp_and_we_read_and_write_the_same_bytes(theirs: commands.Basic.Properties) -> None:
    wire = theirs.marshal()
    ours = decode(wire)
    assert encode(ours) == wire
    for name, value in theirs:
        if name == "headers":
            assert ours.headers == value
        elif name == "timestamp":
            assert value is None or isinstance(value, datetime.datetime)
            assert ours.timestamp == (None if value is None else int(value.timestamp()))
        elif name != "cluster_id":
            assert getattr(ours, name) == value
    again = header.ContentHeader()
    again.unmarshal(struct.pack(">HHQ", 60, 0, 0) + encode(ours))
    assert again.properties == theirs


def test_the_usual_message_shares_one_scan() -> None:
    props = encode(Properties(delivery_mode=2, message_id="a"))
    assert scan(props) is scan(encode(Properties(delivery_mode=2, message_id="b")))
    assert scan(NO_PROPERTIES) == PropertyScan(None, None, None, has_headers=False, interesting=False)


@pytest.mark.parametrize(
    ("properties", "interesting"),
    [
        (Properties(headers_bytes=encode_table({"x-tags": "a"})), True),
        (Properties(headers_bytes=encode_table({"CC": ["a"]})), True),
        (Properties(headers_bytes=encode_table({"BCC": ["a"]})), True),
        (Properties(headers_bytes=encode_table({"deep": {"x-tags": "a"}})), True),
        (Properties(headers_bytes=encode_table({"tenant": "acme"})), False),
        (Properties(content_type="x-text", message_id="CC", message_type="x-"), False),
        (Properties(user_id="guest"), True),
        (Properties(reply_to="amq.rabbitmq.reply-to"), True),
        (Properties(reply_to="amq.rabbitmq.reply-to.token"), True),
        (Properties(reply_to="my-queue"), False),
    ],
)
def test_a_scan_tells_what_may_concern_the_broker(properties: Properties, interesting: bool) -> None:
    assert scan(encode(properties)).interesting is interesting


@pytest.mark.parametrize("text", ["0", "60000", "+5", "-0", str(EXPIRATION_MS_MAX)])
def test_a_lawful_expiration_is_read(text: str) -> None:
    assert scan(encode(Properties(expiration=text))).expiration_ms == int(text)


TOO_LONG = str(EXPIRATION_MS_MAX + 1)


@pytest.mark.parametrize("text", ["", "abc", "-1", "1.5", " 5", "1_000", "5 ", "٣", TOO_LONG, "9" * 255])
def test_an_unlawful_expiration_closes_the_channel_only(text: str) -> None:
    with pytest.raises(AmqpError, match="invalid expiration") as caught:
        scan(encode(Properties(expiration=text)))
    error = caught.value
    assert (error.code, error.hard, error.class_id, error.method_id) == (406, False, 60, 40)


@given(PROPERTIES.filter(lambda properties: properties != Properties()))
def test_properties_cut_or_continued_anywhere_are_refused(properties: Properties) -> None:
    props = encode(properties)
    for damaged in [*(props[:cut] for cut in range(len(props))), props + b"\x00"]:
        for read in (scan, decode):
            with pytest.raises(AmqpError) as caught:
                read(damaged)
            if caught.value.code != ReplyCode.PRECONDITION_FAILED:  # a cut expiration may be none
                assert caught.value.hard


@given(st.binary(max_size=100))
def test_garbage_raises_nothing_but_an_amqp_error(data: bytes) -> None:
    try:
        scan(data)
    except AmqpError as error:
        assert (error.class_id, error.method_id) == (60, 40)
    else:
        properties = decode(data)
        assert properties.headers is None or isinstance(properties.headers, dict)
        assert encode(properties) == data


@pytest.mark.parametrize("flags", [0x0001, 0x0002, 0x1001])
def test_a_flag_of_no_property_is_refused(flags: int) -> None:
    props = struct.pack(">H", flags) + (b"\x02" if flags & 0x1000 else b"")
    for read in (scan, decode):
        with pytest.raises(AmqpError, match="flags") as caught:
            read(props)
        assert caught.value.code == ReplyCode.SYNTAX_ERROR


def test_headers_too_deep_are_refused_at_ingress() -> None:
    deep: FieldTable = {}
    for _ in range(TABLE_DEPTH_MAX - 1):
        deep = {"a": deep}
    assert scan(encode(Properties(headers_bytes=encode_table(deep)))).has_headers
    with pytest.raises(AmqpError, match="deeper"):
        scan(encode(Properties(headers_bytes=encode_table({"a": deep}))))


@given(PROPERTIES, TABLES.filter(bool))
def test_setting_headers_touches_nothing_else(properties: Properties, changes: FieldTable) -> None:
    edited = decode(with_headers(encode(properties), changes))
    before = properties.headers or {}
    assert edited.headers == {**before, **changes}
    assert as_dict(edited) == {**as_dict(properties), "headers_bytes": edited.headers_bytes}
    assert edited.headers_bytes is not None
    for name, value in before.items():
        assert name in changes or encode_table({name: value})[4:] in edited.headers_bytes


def as_dict(properties: Properties) -> dict[str, object]:
    return {name: getattr(properties, name) for name in Properties.__slots__}


def test_a_header_of_an_odd_type_keeps_its_bytes_when_another_is_set() -> None:
    odd = b"\x01bt\x07" + b"\x01fF\x00\x00\x00\x00" + b"\x01nf\x7f\x80\x00\x01" + b"\x01ds\x00\x01" + b"\x01ds\x00\x02"
    props = b"\x20\x00" + struct.pack(">I", len(odd)) + odd
    edited = with_headers(props, {"x-death": [1]})
    assert edited[6 : 6 + len(odd)] == odd
    assert decode_table(edited, 2)[0]["x-death"] == [1]


def test_a_header_is_replaced_at_its_place_and_its_second_entry_goes() -> None:
    table = b"\x01at\x01" + b"\x01bt\x01" + b"\x01bt\x00" + b"\x01ct\x01"
    props = b"\x20\x00" + struct.pack(">I", len(table)) + table
    assert list((decode(with_headers(props, {"b": 9})).headers or {}).items()) == [("a", True), ("b", 9), ("c", True)]


def test_no_change_gives_the_same_object() -> None:
    props = encode(Properties(headers_bytes=encode_table({"a": 1})))
    assert with_headers(props, {}) is props
    assert without_header(props, "BCC") is props
    assert without_header(NO_PROPERTIES, "BCC") is NO_PROPERTIES
    assert with_expiration(props, None) is props


@given(PROPERTIES, st.sampled_from(["BCC", "", "a"]))
def test_removing_a_header_touches_nothing_else(properties: Properties, name: str) -> None:
    props = encode(properties)
    assert without_header(with_headers(without_header(props, name), {name: [1]}), name) in (
        without_header(props, name),
        with_empty_headers(without_header(props, name)),
    )


def with_empty_headers(props: bytes) -> bytes:
    return without_header(with_headers(props, {"only": 1}), "only")


@given(PROPERTIES, st.integers(0, 10**6).map(str))
def test_expiration_can_be_set_and_taken_away(properties: Properties, expiration: str) -> None:
    props = encode(properties)
    assert decode(with_expiration(props, expiration)).expiration == expiration
    removed = decode(with_expiration(props, None))
    assert removed.expiration is None
    assert as_dict(removed) == {**as_dict(properties), "expiration": None}


@pytest.mark.parametrize(
    "properties",
    [
        Properties(content_type="x" * 256),
        Properties(priority=256),
        Properties(delivery_mode=-1),
        Properties(timestamp=2**64),
    ],
)
def test_what_the_wire_cannot_hold_is_a_value_error(properties: Properties) -> None:
    with pytest.raises(ValueError):
        encode(properties)


@given(PROPERTIES)
def test_place_of_the_headers_is_where_their_bytes_are(properties: Properties) -> None:
    props = encode(properties)
    start, end = headers_place(props)
    assert props[start:end] == (properties.headers_bytes or b"")
