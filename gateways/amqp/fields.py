"""Field tables, in RabbitMQ's type letters. Format: pure functions, no I/O.

    table = u32 length, then entries:  u8 length, name, letter, value
    array = u32 length, then items:    letter, value

    letter  value                     in Python           letter  value                     in Python
    t       u8, 0 is false            bool                f       float32                   Float32
    b       i8                        Int8                d       float64                   float
    B       u8                        UInt8               D       u8 scale, i32 unscaled    decimal.Decimal
    s       i16                       Int16               S       u32 length, bytes         str; bytes if not UTF-8
    u       u16                       UInt16              x       u32 length, bytes         ByteArray
    I       i32                       int                 T       u64 seconds               Timestamp
    i       u32                       UInt32              A       array                     list
    l       i64                       int or Int64        F       table                     dict
    L       i64 (RabbitMQ: signed)    Int64L              V       nothing                   None

Nothing changes its type on the way through: `encode_table(decode_table(t))` is `t` again, letter by letter, but
for a boolean byte above 1, a second entry of one name (the first counts, as in RabbitMQ) and a signalling NaN.
Names that are not UTF-8 keep their bytes by surrogateescape. Depth is bounded, so recursion here is safe.
pamqp's decoder is not used: it lets values run past their table, loses types (f, d, T above 2106, integers), slices
quadratically and recurses without a bound. The tests hold the two equal where pamqp is right.
Neighbours: properties.py and methods.py above; errors.py below.
"""

import struct
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import ClassVar, TypeAlias

from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error

TABLE_DEPTH_MAX = 16  # a table is depth 1, a table or array inside it depth 2
TABLE_BYTES_MAX = 65_536  # entries of one table from a client; 32,768 of the smallest entries

FieldValue: TypeAlias = (
    "bool | int | float | Decimal | str | bytes | Sequence[FieldValue] | Mapping[str, FieldValue] | None"
)
FieldTable: TypeAlias = dict[str, FieldValue]

U32 = struct.Struct(">I")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_F64 = struct.Struct(">d")
_DECIMAL = struct.Struct(">Bi")


class TypedInt(int):
    """An integer that remembers its letter. Equal to the plain integer."""

    __slots__ = ()
    letter: ClassVar[bytes]
    layout: ClassVar[struct.Struct]
    rabbit: ClassVar[str]


class Int8(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"b", struct.Struct(">b"), "byte"


class UInt8(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"B", struct.Struct(">B"), "unsignedbyte"


class Int16(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"s", struct.Struct(">h"), "short"


class UInt16(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"u", struct.Struct(">H"), "unsignedshort"


class UInt32(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"i", U32, "unsignedint"


class Int64(TypedInt):
    """Only where a plain int would be written shorter: a value of 32 bits in a field of 64."""

    __slots__ = ()
    letter, layout, rabbit = b"l", _I64, "long"


class Int64L(TypedInt):
    __slots__ = ()
    letter, layout, rabbit = b"L", _I64, "long"


class Timestamp(TypedInt):
    """Seconds since 1970 UTC, unsigned."""

    __slots__ = ()
    letter, layout, rabbit = b"T", struct.Struct(">Q"), "timestamp"


class Float32(float):
    """A float that came in, and goes out, in 32 bits."""

    __slots__ = ()
    layout: ClassVar[struct.Struct] = struct.Struct(">f")


class ByteArray(bytes):
    """Bytes under the letter x; plain bytes are a long string that is not UTF-8."""

    __slots__ = ()


_TYPED: dict[int, type[TypedInt]] = {
    kind.letter[0]: kind for kind in (Int8, UInt8, Int16, UInt16, UInt32, Int64L, Timestamp)
}
# Bytes of a value whose size its letter fixes.
_FIXED: dict[int, int] = {
    ord(letter): size
    for letters, size in (("V", 0), ("tbB", 1), ("su", 2), ("Iif", 4), ("D", 5), ("lLdT", 8))
    for letter in letters
}
_STRING, _ARRAY, _TABLE = b"SAF"


def check_table(data: bytes, start: int = 0, *, bytes_max: int = TABLE_BYTES_MAX) -> int:
    """Walk the table at `start` without building anything; return its end, or raise as `decode_table` would."""
    try:
        entries, end = _span(data, start, bytes_max)
        _check(data, entries, end, True, TABLE_DEPTH_MAX)
    except (IndexError, struct.error):
        raise _truncated() from None
    return end


def decode_table(data: bytes, start: int = 0, *, bytes_max: int | None = TABLE_BYTES_MAX) -> tuple[FieldTable, int]:
    """The table at `start` and the position behind it."""
    try:
        entries, end = _span(data, start, bytes_max)
        return _decode_table(data, entries, end, TABLE_DEPTH_MAX), end
    except (IndexError, struct.error):
        raise _truncated() from None


def encode_table(table: Mapping[str, FieldValue]) -> bytes:
    """The table with its length. A value or name that the wire cannot hold is our mistake: ValueError, TypeError."""
    entries = b"".join([encode_name(name) + encode_value(value) for name, value in table.items()])
    return U32.pack(len(entries)) + entries


def encode_name(name: str) -> bytes:
    encoded = name.encode("utf-8", "surrogateescape")
    if len(encoded) > 255:
        raise ValueError(f"a field name holds 255 bytes, this one has {len(encoded)}")
    return bytes((len(encoded),)) + encoded


def encode_value(value: FieldValue) -> bytes:
    """Letter and value."""
    match value:
        case None:
            return b"V"
        case bool():
            return b"t\x01" if value else b"t\x00"
        case str():
            return _sized(b"S", value.encode("utf-8"))
        case TypedInt():
            return value.letter + _packed(value.layout, value)
        case int():
            return b"I" + _I32.pack(value) if -0x8000_0000 <= value <= 0x7FFF_FFFF else b"l" + _packed(_I64, value)
        case Float32():
            return b"f" + Float32.layout.pack(value)
        case float():
            return b"d" + _F64.pack(value)
        case ByteArray():
            return _sized(b"x", value)
        case bytes():
            return _sized(b"S", value)
        case Decimal():
            return b"D" + _encode_decimal(value)
        case Mapping():
            return b"F" + encode_table(value)
        case Sequence():
            items = b"".join(map(encode_value, value))
            return _sized(b"A", items)


def entries_of(data: bytes, start: int, end: int) -> list[tuple[bytes, int, int]]:
    """Name, start and end of each raw entry of a table whose entries fill data[start:end]; for edits in place."""
    found = []
    try:
        while start < end:
            value = start + 1 + data[start]
            behind = _skip(data, value, end, TABLE_DEPTH_MAX)
            found.append((data[start + 1 : value], start, behind))
            start = behind
    except (IndexError, struct.error):
        raise _truncated() from None
    if start != end:
        raise _truncated()
    return found


def parted(data: bytes, start: int, end: int, names: Collection[bytes]) -> tuple[bytes, bytes]:
    """The entries of a table that fill data[start:end], in two: those of these names, and the others, in their order.

    For many, which were looked through when they came: what stands inside nested tables is not looked at.
    """
    ours: list[bytes] = []
    others: list[bytes] = []
    fixed, size_of = _FIXED, U32.unpack_from
    try:
        while start < end:
            value = start + 1 + data[start]
            letter = data[value]
            size = fixed.get(letter)
            if size is not None:
                behind = value + 1 + size
            elif letter in b"SxAF":
                behind = value + 5 + size_of(data, value + 1)[0]
            else:
                raise _unknown(letter)
            (ours if data[start + 1 : value] in names else others).append(data[start:behind])
            start = behind
    except (IndexError, struct.error):
        raise _truncated() from None
    if start != end:
        raise _truncated()
    return b"".join(ours), b"".join(others)


def type_name(value: FieldValue) -> str:
    """What RabbitMQ calls the type, for error texts."""
    match value:
        case None:
            return "void"
        case bool():
            return "bool"
        case TypedInt():
            return value.rabbit
        case int():
            return "signedint" if -0x8000_0000 <= value <= 0x7FFF_FFFF else "long"
        case Float32():
            return "float"
        case float():
            return "double"
        case ByteArray():
            return "binary"
        case str() | bytes():
            return "longstr"
        case Decimal():
            return "decimal"
        case Mapping():
            return "table"
        case Sequence():
            return "array"


def _span(data: bytes, start: int, bytes_max: int | None) -> tuple[int, int]:
    (length,) = U32.unpack_from(data, start)
    entries = start + 4
    if entries + length > len(data):
        raise _truncated()
    if bytes_max is not None and length > bytes_max:
        raise amqp_error(ReplyCode.SYNTAX_ERROR, f"field table of {length} bytes, at most {bytes_max} are allowed")
    return entries, entries + length


def _check(data: bytes, pos: int, end: int, named: bool, depth: int) -> None:
    """The entries (named) or items that must fill data[pos:end] exactly."""
    if not depth:
        raise amqp_error(ReplyCode.SYNTAX_ERROR, f"field table nested deeper than {TABLE_DEPTH_MAX}")
    fixed = _FIXED
    while pos < end:
        if named:
            pos += 1 + data[pos]
        letter = data[pos]
        if letter == _STRING:
            pos += 5 + U32.unpack_from(data, pos + 1)[0]
        elif letter in fixed:
            pos += 1 + fixed[letter]
        else:
            pos = _skip(data, pos, end, depth)
    # Whatever read past the end moved past it too, so this one comparison finds it.
    if pos != end:
        raise _truncated()


def _skip(data: bytes, pos: int, end: int, depth: int) -> int:
    """The position behind the value whose letter is at `pos`, everything inside it checked."""
    letter = data[pos]
    size = _FIXED.get(letter)
    if size is not None:
        return pos + 1 + size
    if letter not in b"SxAF":
        raise _unknown(letter)
    behind: int = pos + 5 + U32.unpack_from(data, pos + 1)[0]
    if letter in (_TABLE, _ARRAY):
        if behind > end:
            raise _truncated()
        _check(data, pos + 5, behind, letter == _TABLE, depth - 1)
    return behind


def _decode_table(data: bytes, pos: int, end: int, depth: int) -> FieldTable:
    if not depth:
        raise amqp_error(ReplyCode.SYNTAX_ERROR, f"field table nested deeper than {TABLE_DEPTH_MAX}")
    table: FieldTable = {}
    while pos < end:
        letter = pos + 1 + data[pos]
        name = data[pos + 1 : letter].decode("utf-8", "surrogateescape")
        value, pos = _decode_value(data, letter, end, depth)
        table.setdefault(name, value)
    return table


def _decode_array(data: bytes, pos: int, end: int, depth: int) -> list[FieldValue]:
    if not depth:
        raise amqp_error(ReplyCode.SYNTAX_ERROR, f"field table nested deeper than {TABLE_DEPTH_MAX}")
    items: list[FieldValue] = []
    while pos < end:
        value, pos = _decode_value(data, pos, end, depth)
        items.append(value)
    return items


def _decode_value(data: bytes, pos: int, end: int, depth: int) -> tuple[FieldValue, int]:
    """The value whose letter is at `pos`, and the position behind it, which is never past `end`."""
    letter = data[pos]
    pos += 1
    size = _FIXED.get(letter)
    if size is None:
        if letter not in b"SxAF":
            raise _unknown(letter)
        (size,) = U32.unpack_from(data, pos)
        pos += 4
    behind = pos + size
    if behind > end:
        raise _truncated()
    match letter:
        case 0x53:  # S
            raw = data[pos:behind]
            try:
                return raw.decode("utf-8"), behind
            except UnicodeDecodeError:
                return raw, behind
        case 0x49:  # I
            return _I32.unpack_from(data, pos)[0], behind
        case 0x6C:  # l
            (number,) = _I64.unpack_from(data, pos)
            return (Int64(number) if -0x8000_0000 <= number <= 0x7FFF_FFFF else number), behind
        case 0x74:  # t
            return data[pos] != 0, behind
        case 0x64:  # d
            return _F64.unpack_from(data, pos)[0], behind
        case 0x66:  # f
            return Float32(Float32.layout.unpack_from(data, pos)[0]), behind
        case 0x56:  # V
            return None, behind
        case 0x44:  # D
            scale, unscaled = _DECIMAL.unpack_from(data, pos)
            return _decimal(scale, unscaled), behind
        case 0x78:  # x
            return ByteArray(data[pos:behind]), behind
        case 0x46:  # F
            return _decode_table(data, pos, behind, depth - 1), behind
        case 0x41:  # A
            return _decode_array(data, pos, behind, depth - 1), behind
    kind = _TYPED[letter]
    return kind(kind.layout.unpack_from(data, pos)[0]), behind


def _decimal(scale: int, unscaled: int) -> Decimal:
    # Built from digits: arithmetic would round to the context's precision and lose the scale.
    return Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))


def _encode_decimal(value: Decimal) -> bytes:
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int) or not -255 <= exponent <= 0:
        raise ValueError(f"the wire holds decimals of 0 to 255 places, not {value}")
    unscaled = int("".join(map(str, digits)))
    return _packed(_DECIMAL, -exponent, -unscaled if sign else unscaled)


def _sized(letter: bytes, value: bytes) -> bytes:
    return letter + U32.pack(len(value)) + value


def _packed(layout: struct.Struct, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error as error:
        raise ValueError(f"{values[-1]} does not fit its field: {error}") from None


def _truncated() -> AmqpError:
    return amqp_error(ReplyCode.FRAME_ERROR, "field table is cut short or longer than its length says")


def _unknown(letter: int) -> AmqpError:
    return amqp_error(ReplyCode.SYNTAX_ERROR, f"field table has a value of unknown type {bytes((letter,))!r}")
