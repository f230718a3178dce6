"""The data types: whole, shortest, and never past the end of the packet."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paho.mqtt.properties import VariableByteIntegers

from headrace.gateways.mqtt.fields import (
    VARINT_MAX,
    Reader,
    encode_binary,
    encode_text,
    encode_u16,
    encode_varint,
    packet_id,
)
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version

V5 = Version.V5


@given(st.integers(0, VARINT_MAX) | st.sampled_from([0, 127, 128, 16_383, 16_384, 2_097_151, 2_097_152, VARINT_MAX]))
def test_a_varint_is_written_as_paho_writes_it_and_comes_back(value: int) -> None:
    encoded = encode_varint(value)
    assert encoded == VariableByteIntegers.encode(value)
    reader = Reader(encoded, V5)
    assert (reader.varint(), reader.remaining) == (value, 0)


@pytest.mark.parametrize("value", [-1, VARINT_MAX + 1])
def test_a_varint_has_a_largest_value(value: int) -> None:
    with pytest.raises(ValueError):
        encode_varint(value)


@pytest.mark.parametrize(
    ("octets", "statement"),
    [
        (b"", ""),
        (b"\x80", ""),
        (b"\x80\x80\x80\x80\x01", ""),
        (b"\x80\x00", "MQTT-1.5.5-1"),
        (b"\xff\x80\x00", "MQTT-1.5.5-1"),
    ],
)
def test_a_bad_varint_is_malformed(octets: bytes, statement: str) -> None:
    with pytest.raises(MqttError) as caught:
        Reader(octets, V5).varint()
    assert (caught.value.code, caught.value.statement) == (ReasonCode.MALFORMED_PACKET, statement)


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20), st.binary(max_size=20))
def test_text_and_bytes_come_back(text: str, data: bytes) -> None:
    reader = Reader(encode_text(text) + encode_binary(data), V5)
    assert (reader.text(), reader.binary()) == (text, data)
    reader.finish()


@given(st.binary(max_size=6), st.sampled_from(["u8", "u16", "u32", "varint", "binary", "text"]))
def test_a_reader_stays_inside_its_part(data: bytes, field: str) -> None:
    reader = Reader(b"\1" + data + b"\1\1\1\1", V5, 1, 1 + len(data))
    try:
        getattr(reader, field)()
    except MqttError as error:
        assert error.code is ReasonCode.MALFORMED_PACKET
    assert reader.pos <= reader.end


def test_what_is_left_over_is_malformed() -> None:
    with pytest.raises(MqttError, match="2 bytes too many"):
        Reader(b"ab", V5).finish()


@pytest.mark.parametrize("value", [-1, 65_536])
def test_a_two_byte_integer_has_a_largest_value(value: int) -> None:
    with pytest.raises(ValueError):
        encode_u16(value)


def test_a_packet_identifier_is_not_zero() -> None:
    assert packet_id(Reader(b"\0\1", V5)) == 1
    with pytest.raises(MqttError) as caught:
        packet_id(Reader(b"\0\0", V5))
    assert caught.value.code is ReasonCode.PROTOCOL_ERROR
