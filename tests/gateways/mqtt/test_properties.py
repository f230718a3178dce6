"""The properties of MQTT 5: which packet may have which, read and written as paho does, scanned as they are decoded."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from headrace.gateways.mqtt.fields import Reader
from headrace.gateways.mqtt.properties import (
    NO_PROPERTIES,
    NOTHING_SCANNED,
    WILL_PROPERTIES,
    Properties,
    PublishScans,
    check_from_client,
    decode_blob,
    decode_properties,
    encode_blob,
    encode_properties,
    encode_subscription_identifiers,
    encode_topic_alias,
    entries_of,
    scan,
    with_message_expiry,
)
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version

from .paho_properties import FIELDS, as_paho, from_paho, paho_name
from .strategies import ALLOWED, properties

PLACES = [WILL_PROPERTIES, *sorted(set(ALLOWED) - {WILL_PROPERTIES})]
PAHO_PLACES = {WILL_PROPERTIES: PacketTypes.WILLMESSAGE, **{place: int(place) for place in PacketType}}
SAMPLES = {"user_properties": (("a", "b"),), "subscription_identifiers": (7,), "authentication_data": b"d"}
ANY_PLACE = st.one_of([st.tuples(st.just(place), properties(place)) for place in PLACES])
PUBLISHED = properties(PacketType.PUBLISH, without=["subscription_identifiers"])


def sample(field: str) -> Properties:
    """Properties with a lawful value of one field, and of what that field asks for."""
    annotation = str(Properties.__dataclass_fields__[field].type)
    value: object = (
        "text" if "str" in annotation else b"data" if "bytes" in annotation else True if "bool" in annotation else 1
    )
    found = replace(NO_PROPERTIES, **{field: SAMPLES.get(field, value)})
    return replace(found, authentication_method="m") if field == "authentication_data" else found


@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_packet_has_the_properties_that_paho_gives_it(place: int, field: str) -> None:
    paho = PahoProperties(PAHO_PLACES[place])
    identifier = next(number for number, name in _paho_numbers(paho).items() if name == paho_name(field))
    allowed = PAHO_PLACES[place] in paho.properties[identifier][1]
    assert allowed is (field in ALLOWED[place])
    if allowed:
        octets = encode_properties(sample(field), place)
        assert octets[1] == identifier or field == "authentication_data"
        assert decode_properties(Reader(octets, Version.V5), place) == sample(field)
    else:
        with pytest.raises(ValueError):
            encode_properties(sample(field), place)


def _paho_numbers(paho: PahoProperties) -> dict[int, str]:
    return {number: name.replace(" ", "") for name, number in paho.names.items()}


@given(ANY_PLACE)
def test_properties_come_back_as_they_went(case: tuple[int, Properties]) -> None:
    place, found = case
    octets = encode_properties(found, place)
    reader = Reader(octets + b"more", Version.V5)
    assert decode_properties(reader, place) == found
    assert reader.remaining == 4
    assert decode_blob(encode_blob(found, place), place) == found


@given(ANY_PLACE)
def test_paho_reads_what_we_write(case: tuple[int, Properties]) -> None:
    place, found = case
    octets = encode_properties(found, place)
    paho = PahoProperties(PAHO_PLACES[place])
    paho.unpack(octets)
    assert from_paho(paho) == found


@given(ANY_PLACE)
def test_we_read_what_paho_writes(case: tuple[int, Properties]) -> None:
    place, found = case
    octets = bytes(as_paho(found, PAHO_PLACES[place]).pack())
    assert decode_properties(Reader(octets, Version.V5), place) == found


def test_largest_numbers_are_lawful() -> None:
    found = Properties(maximum_packet_size=0xFFFF_FFFF, session_expiry_interval=0xFFFF_FFFF, receive_maximum=0xFFFF)
    assert decode_blob(encode_blob(found, PacketType.CONNECT), PacketType.CONNECT) == found


@pytest.mark.parametrize(
    "found",
    [
        Properties(topic_alias=0),
        Properties(topic_alias=65_536),
        Properties(payload_format_indicator=2),
        Properties(message_expiry_interval=-1),
        Properties(content_type="a\0"),
        Properties(correlation_data=bytes(65_536)),
        Properties(subscription_identifiers=(0,)),
        Properties(will_delay_interval=1),
    ],
    ids=repr,
)
def test_what_a_publish_cannot_have_is_our_mistake(found: Properties) -> None:
    with pytest.raises(ValueError):
        encode_blob(found)


def test_a_subscribe_has_one_identifier() -> None:
    with pytest.raises(ValueError):
        encode_blob(Properties(subscription_identifiers=(1, 2)), PacketType.SUBSCRIBE)


# ---- the scan of a PUBLISH -----------------------------------------------------------------------------------------


@given(PUBLISHED)
def test_a_scan_finds_what_a_decode_finds(found: Properties) -> None:
    scanned = scan(encode_blob(found))
    assert scanned.message_expiry_interval == found.message_expiry_interval
    assert scanned.topic_alias == (found.topic_alias or 0)
    assert scanned.payload_is_text == (found.payload_format_indicator == 1)
    assert scanned.interesting == any(name.startswith(("x-", "tag")) for name, _ in found.user_properties)
    assert decode_blob(scanned.stored) == replace(found, topic_alias=None)


def decoded(blob: bytes) -> tuple[ReasonCode, str] | Properties:
    try:
        found = decode_blob(blob)
        check_from_client(found)
    except MqttError as error:
        return error.code, error.statement
    return found


ODD_BLOBS = [
    b"\x26\0\2a\0\0\0",
    b"\x26\0\0\0\1\0",
    b"\x26\0\1a\0\1\xff",
    b"\x26\0\1\xff\0\0",
    b"\x26\0\1a\0\5b",
    b"\x26\0\1a",
    b"\x26\0\x09a\0\0",
    b"\x01\2",
    b"\x01",
    b"\x01\1\x01\1",
    b"\x02\0\0\0",
    b"\x03\0\5ab",
    b"\x03\0\1\0",
    b"\x03\0\1\xff",
    b"\x08\0\0",
    b"\x08\0\1#",
    b"\x08\0\1\0",
    b"\x09\0\5ab",
    b"\x09\0\2\0\xff",
    b"\x0b\1",
    b"\x23\0\0",
    b"\x23\0",
    b"\x23\0\1\x23\0\1",
    b"\x80\0",
    b"\x24\1",
    b"\x7f",
]


@settings(max_examples=300)
@given(
    st.lists(
        st.one_of(
            PUBLISHED.map(encode_blob),
            st.binary(max_size=8),
            st.sampled_from(ODD_BLOBS),
        ),
        max_size=3,
    ).map(b"".join)
)
def test_a_scan_refuses_exactly_what_a_decode_refuses(blob: bytes) -> None:
    compare_scan(blob)


@pytest.mark.parametrize("before", [b"", b"\x26\0\1a\0\1b"])
@pytest.mark.parametrize("odd", ODD_BLOBS)
def test_a_scan_and_a_decode_agree_on_what_is_odd(before: bytes, odd: bytes) -> None:
    compare_scan(before + odd)
    compare_scan(odd + before)


def compare_scan(blob: bytes) -> None:
    expected = decoded(blob)
    try:
        scanned = scan(blob)
    except MqttError as error:
        assert (error.code, error.statement) == expected
    else:
        assert isinstance(expected, Properties)
        assert decode_blob(scanned.stored) == replace(expected, topic_alias=None)


@pytest.mark.parametrize("name", ["x-delay", "x-", "tag", "tags"])
def test_properties_that_may_concern_the_broker_are_seen(name: str) -> None:
    assert scan(encode_blob(Properties(user_properties=(("a", "b"), (name, "v"), ("c", "d"))))).interesting
    assert not scan(encode_blob(Properties(user_properties=(("a", name),)))).interesting


def test_scans_are_kept_by_blob() -> None:
    scans = PublishScans()
    blob = encode_blob(Properties(content_type="t"))
    assert scans.of(blob) is scans.of(bytes(bytearray(blob)))
    assert scans.of(b"") is NOTHING_SCANNED
    with pytest.raises(MqttError):
        scans.of(b"\xff")


# ---- edits on the way out ------------------------------------------------------------------------------------------


@given(PUBLISHED, st.integers(0, 0xFFFF_FFFF))
def test_expiry_is_set_without_touching_the_rest(found: Properties, seconds: int) -> None:
    blob = encode_blob(found)
    changed = with_message_expiry(blob, seconds)
    assert decode_blob(changed) == replace(found, message_expiry_interval=seconds)
    if found.message_expiry_interval is not None:
        assert len(changed) == len(blob)


@given(PUBLISHED, st.lists(st.integers(1, 268_435_455), max_size=3).map(tuple), st.integers(1, 0xFFFF))
def test_identifiers_and_alias_go_behind_the_blob(found: Properties, identifiers: tuple[int, ...], alias: int) -> None:
    found = replace(found, topic_alias=None)
    blob = encode_blob(found) + encode_subscription_identifiers(identifiers) + encode_topic_alias(alias)
    assert decode_blob(blob) == replace(found, subscription_identifiers=identifiers, topic_alias=alias)


@given(properties(PacketType.PUBLISH))
def test_entries_cover_the_blob_in_order(found: Properties) -> None:
    blob = encode_blob(found)
    entries = entries_of(blob)
    assert b"".join(blob[start:end] for _, start, end in entries) == blob
    assert all(blob[start] == identifier for identifier, start, _ in entries)


def test_only_what_is_set_is_shown() -> None:
    assert repr(Properties(topic_alias=3, user_properties=(("a", "b"),))) == (
        "Properties(topic_alias=3, user_properties=(('a', 'b'),))"
    )
