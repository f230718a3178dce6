"""The data types of MQTT. Format: pure functions, no I/O.

    variable byte integer   1 to 4 bytes, 7 bits each, lowest first; the high bit says that another byte follows
    UTF-8 encoded string    u16 length, then UTF-8 without surrogates and without U+0000
    binary data             u16 length, then bytes
    string pair             two strings

A Reader walks the body of one packet and never past it: whatever is cut short is malformed. Writing something that the
wire cannot hold is our own mistake: ValueError. Neighbours: properties.py, decoder.py, encoder.py above.
"""

import struct

from headrace.gateways.mqtt.reasons import MqttError, Version, malformed, protocol_error

U16 = struct.Struct(">H")
U32 = struct.Struct(">I")
VARINT_MAX = 268_435_455

# (ill-formed UTF-8, U+0000) in each standard.
_TEXT_STATEMENTS = {
    Version.V5: ("MQTT-1.5.4-1", "MQTT-1.5.4-2"),
    Version.V3_1_1: ("MQTT-1.5.3-1", "MQTT-1.5.3-2"),
}


class Reader:
    """Takes fields off the front of data[start:end]."""

    __slots__ = ("data", "end", "pos", "version")

    def __init__(self, data: bytes, version: Version, start: int = 0, end: int | None = None) -> None:
        self.data = data
        self.version = version
        self.pos = start
        self.end = len(data) if end is None else end

    @property
    def remaining(self) -> int:
        return self.end - self.pos

    def take(self, size: int) -> bytes:
        start = self.pos
        if start + size > self.end:
            raise malformed(f"cut short: {size} bytes announced, {self.end - start} left")
        self.pos = start + size
        return self.data[start : start + size]

    def u8(self) -> int:
        return self.take(1)[0]

    def u16(self) -> int:
        number: int = U16.unpack(self.take(2))[0]
        return number

    def u32(self) -> int:
        number: int = U32.unpack(self.take(4))[0]
        return number

    def varint(self) -> int:
        value = 0
        for shift in (0, 7, 14, 21):
            byte = self.u8()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if shift and not byte:
                    raise malformed(f"{value} is written in more bytes than it needs", "MQTT-1.5.5-1")
                return value
        raise malformed("a variable byte integer has more than four bytes")

    def binary(self) -> bytes:
        return self.take(self.u16())

    def text(self) -> str:
        return decode_text(self.binary(), self.version)

    def finish(self) -> None:
        if self.pos != self.end:
            raise malformed(f"{self.end - self.pos} bytes too many at the end of the packet")


def decode_text(raw: bytes, version: Version) -> str:
    """Strict: Python's UTF-8 refuses surrogates and overlong forms too, and keeps U+FEFF."""
    ill_formed, null = _TEXT_STATEMENTS[version]
    if b"\0" in raw:
        raise malformed("a string holds the null character", null)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(f"a string is not UTF-8: {error.reason} at byte {error.start}", ill_formed) from None


def encode_varint(value: int) -> bytes:
    if 0 <= value < 0x80:
        return value.to_bytes(1, "big")
    if not 0 <= value <= VARINT_MAX:
        raise ValueError(f"a variable byte integer holds 0 to {VARINT_MAX}, not {value}")
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_binary(value: bytes) -> bytes:
    if len(value) > 0xFFFF:
        raise ValueError(f"a field holds 65,535 bytes, this one has {len(value)}")
    return U16.pack(len(value)) + value


def encode_text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    if b"\0" in encoded:
        raise ValueError("an MQTT string holds no null character")
    return encode_binary(encoded)


def encode_u16(value: int) -> bytes:
    if not 0 <= value <= 0xFFFF:
        raise ValueError(f"a two byte integer holds 0 to 65,535, not {value}")
    return U16.pack(value)


def packet_id(reader: Reader) -> int:
    """[MQTT-2.2.1-3], 3.1.1 [MQTT-2.3.1-1]: never zero."""
    found = reader.u16()
    if not found:
        raise zero_packet_id(reader.version)
    return found


def zero_packet_id(version: Version) -> MqttError:
    statement = "MQTT-2.2.1-3" if version is Version.V5 else "MQTT-2.3.1-1"
    return protocol_error("a packet identifier is 0", statement)
