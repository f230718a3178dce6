"""Field tables: lossless both ways, equal to pamqp where pamqp is right, and only AmqpError on anything else."""

import math
import struct
from collections.abc import Callable, Sequence
from decimal import Decimal

import pamqp.decode
import pamqp.encode
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateways.amqp.errors import AmqpError, ReplyCode
from headrace.gateways.amqp.fields import (
    TABLE_BYTES_MAX,
    TABLE_DEPTH_MAX,
    ByteArray,
    FieldTable,
    FieldValue,
    Float32,
    Int8,
    Int16,
    Int64,
    Int64L,
    Timestamp,
    TypedInt,
    UInt8,
    UInt16,
    UInt32,
    check_table,
    decode_table,
    encode_name,
    encode_table,
    encode_value,
    entries_of,
    parted,
    type_name,
)


def sized(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


def nested(levels: int) -> bytes:
    """A table of tables, `levels` of them in all."""
    table = sized(b"")
    for _ in range(levels - 1):
        table = sized(b"\x01a" + b"F" + table)
    return table


# Values as they stand on the wire, letter first, written independently of the encoder under test.
def integers(letter: bytes, layout: str, low: int, high: int) -> st.SearchStrategy[bytes]:
    return st.integers(low, high).map(lambda number: letter + struct.pack(layout, number))


SCALARS = st.one_of(
    st.just(b"V"),
    st.sampled_from([b"t\x00", b"t\x01"]),
    integers(b"b", ">b", -(2**7), 2**7 - 1),
    integers(b"B", ">B", 0, 2**8 - 1),
    integers(b"s", ">h", -(2**15), 2**15 - 1),
    integers(b"u", ">H", 0, 2**16 - 1),
    integers(b"I", ">i", -(2**31), 2**31 - 1),
    integers(b"i", ">I", 0, 2**32 - 1),
    integers(b"l", ">q", -(2**63), 2**63 - 1),
    integers(b"L", ">q", -(2**63), 2**63 - 1),
    integers(b"T", ">Q", 0, 2**64 - 1),
    st.floats(width=32, allow_nan=False).map(lambda number: b"f" + struct.pack(">f", number)),
    st.floats(allow_nan=False).map(lambda number: b"d" + struct.pack(">d", number)),
    st.tuples(st.integers(0, 255), st.integers(-(2**31), 2**31 - 1)).map(lambda pair: b"D" + struct.pack(">Bi", *pair)),
    st.text(max_size=20).map(lambda text: b"S" + sized(text.encode())),
    st.binary(max_size=20).map(lambda data: b"S" + sized(data)),
    st.binary(max_size=20).map(lambda data: b"x" + sized(data)),
)
NAMES = st.one_of(st.text(max_size=12).map(str.encode), st.binary(max_size=12))


def joined_entries(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    return b"".join(bytes((len(name),)) + name + value for name, value in entries)


def entries_with(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    pairs = st.lists(st.tuples(NAMES, values), max_size=4, unique_by=lambda pair: pair[0])
    return pairs.map(joined_entries)


WIRE_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4).map(lambda items: b"A" + sized(b"".join(items))),
        entries_with(inner).map(lambda entries: b"F" + sized(entries)),
    ),
    max_leaves=12,
)
WIRE_TABLES = entries_with(WIRE_VALUES).map(sized)


@given(WIRE_TABLES, st.binary(max_size=5), st.binary(max_size=5))
def test_a_table_is_written_back_letter_by_letter(table: bytes, before: bytes, behind: bytes) -> None:
    decoded, end = decode_table(before + table + behind, len(before))
    assert end == len(before) + len(table)
    assert encode_table(decoded) == table


@settings(max_examples=40)
@given(WIRE_TABLES)
def test_a_check_reaches_the_same_end_as_a_decode(table: bytes) -> None:
    assert check_table(table) == decode_table(table)[1] == len(table)


@settings(max_examples=40)
@given(WIRE_TABLES)
def test_raw_entries_cover_the_table_without_gaps(table: bytes) -> None:
    entries = entries_of(table, 4, len(table))
    assert b"".join(table[start:end] for _, start, end in entries) == table[4:]
    assert [name.decode("utf-8", "surrogateescape") for name, _, _ in entries] == list(decode_table(table)[0])


@settings(max_examples=40)
@given(WIRE_TABLES)
def test_a_table_is_parted_by_names(table: bytes) -> None:
    entries = entries_of(table, 4, len(table))
    names = {name for name, _, _ in entries[::2]}
    ours, others = parted(table, 4, len(table), names)
    assert ours == b"".join(table[start:end] for name, start, end in entries if name in names)
    assert others == b"".join(table[start:end] for name, start, end in entries if name not in names)


@given(st.binary(max_size=60))
def test_parts_of_garbage_are_refused_or_cover_it(data: bytes) -> None:
    try:
        ours, others = parted(data, 0, len(data), {b"a"})
    except AmqpError:
        return
    assert len(ours) + len(others) == len(data)


@given(st.binary(max_size=60))
def test_raw_entries_of_garbage_are_refused_or_cover_it(data: bytes) -> None:
    try:
        entries = entries_of(data, 0, len(data))
    except AmqpError:
        return
    assert b"".join(data[start:end] for _, start, end in entries) == data


@pytest.mark.parametrize("entries", [b"\x01", b"\x01aI\x00", b"\x01aS\x00\x00\x00\x09x", b"\x01aZ"])
def test_raw_entries_cut_short_are_refused_even_when_bytes_follow(entries: bytes) -> None:
    with pytest.raises(AmqpError):
        entries_of(entries, 0, len(entries))
    with pytest.raises(AmqpError):
        entries_of(entries + bytes(20), 0, len(entries))


@given(st.binary(max_size=200))
def test_garbage_raises_nothing_but_an_amqp_error(data: bytes) -> None:
    outcomes = []
    readers: list[Callable[[], int]] = [lambda: decode_table(data)[1], lambda: check_table(data)]
    for read in readers:
        try:
            outcomes.append(read())
        except AmqpError as error:
            assert error.code in (ReplyCode.FRAME_ERROR, ReplyCode.SYNTAX_ERROR)
            outcomes.append(int(error.code))
    assert outcomes[0] == outcomes[1]


@given(WIRE_TABLES, st.data())
def test_a_damaged_table_raises_nothing_but_an_amqp_error(table: bytes, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(table) - 1))
    damaged = bytearray(table)
    damaged[place] = data.draw(st.integers(0, 255))
    outcomes = []
    readers: list[Callable[[], int]] = [lambda: decode_table(bytes(damaged))[1], lambda: check_table(bytes(damaged))]
    for read in readers:
        try:
            outcomes.append(read())
        except AmqpError as error:
            outcomes.append(int(error.code))
    assert outcomes[0] == outcomes[1]


@settings(max_examples=40)
@given(WIRE_TABLES)
def test_a_table_cut_anywhere_is_a_frame_error(table: bytes) -> None:
    for cut in range(len(table)):
        with pytest.raises(AmqpError) as caught:
            decode_table(table[:cut])
        assert caught.value.code == ReplyCode.FRAME_ERROR


def test_an_unknown_type_letter_is_a_syntax_error() -> None:
    with pytest.raises(AmqpError, match="unknown type b'Z'") as caught:
        decode_table(sized(b"\x01aZ"))
    assert caught.value.code == ReplyCode.SYNTAX_ERROR


def test_a_value_that_runs_past_its_table_is_refused_even_when_bytes_follow() -> None:
    inner = b"\x01aI\x00\x00"
    with pytest.raises(AmqpError):
        decode_table(sized(inner) + b"\x00\x07")
    with pytest.raises(AmqpError):
        check_table(sized(inner) + b"\x00\x07")


@pytest.mark.parametrize("read", [decode_table, check_table])
def test_depth_is_refused_one_past_the_limit(read: object) -> None:
    assert callable(read)
    read(nested(TABLE_DEPTH_MAX))
    with pytest.raises(AmqpError, match="deeper than 16") as caught:
        read(nested(TABLE_DEPTH_MAX + 1))
    assert caught.value.code == ReplyCode.SYNTAX_ERROR


@pytest.mark.parametrize("read", [decode_table, check_table])
def test_ten_thousand_levels_end_in_an_amqp_error_and_not_in_a_stack_overflow(read: object) -> None:
    assert callable(read)
    with pytest.raises(AmqpError):
        read(nested(9_000))
    deep_arrays = b""
    for _ in range(9_000):
        deep_arrays = b"A" + sized(deep_arrays)
    with pytest.raises(AmqpError):
        read(sized(b"\x01a" + deep_arrays))


def test_size_is_refused_one_past_the_limit() -> None:
    def table(size: int) -> bytes:
        return sized(b"\x01aS" + sized(b"y" * (size - 7)))

    for read in (decode_table, check_table):
        assert callable(read)
        read(table(TABLE_BYTES_MAX))
        with pytest.raises(AmqpError, match="at most 65536") as caught:
            read(table(TABLE_BYTES_MAX + 1))
        assert caught.value.code == ReplyCode.SYNTAX_ERROR
    assert decode_table(table(TABLE_BYTES_MAX + 1), bytes_max=None)[1] == TABLE_BYTES_MAX + 5


def test_the_first_entry_of_a_name_counts() -> None:
    assert decode_table(sized(b"\x01at\x01" + b"\x01at\x00"))[0] == {"a": True}


def test_python_values_choose_their_letters() -> None:
    table: FieldTable = {
        "void": None,
        "yes": True,
        "int": 7,
        "long": 2**40,
        "double": 0.5,
        "text": "ö",
        "list": [1, {"deep": False}],
        "price": Decimal("12.50"),
        "raw": b"\xff\x00",
        "array of bytes": ByteArray(b"ab"),
        "when": Timestamp(2**40),
        "single": Float32(0.25),
        "table": {},
    }
    decoded, _ = decode_table(encode_table(table))
    assert decoded == table
    assert [type_name(value) for value in decoded.values()] == [
        "void",
        "bool",
        "signedint",
        "long",
        "double",
        "longstr",
        "array",
        "decimal",
        "longstr",
        "binary",
        "timestamp",
        "float",
        "table",
    ]


@pytest.mark.parametrize("kind", [Int8, UInt8, Int16, UInt16, UInt32, Int64, Int64L, Timestamp])
def test_a_typed_integer_keeps_its_letter_and_equals_the_plain_one(kind: type[TypedInt]) -> None:
    wire = encode_table({"n": kind(5)})
    assert wire[6:7] == kind.letter
    decoded = decode_table(wire)[0]["n"]
    assert type(decoded) is kind
    assert decoded == 5
    assert type_name(decoded) == kind.rabbit


def test_a_decimal_keeps_its_places() -> None:
    for text in ("0.00", "-1.10", "2147483647", "-2147483648", "0.0000001"):
        value = Decimal(text)
        decoded = decode_table(encode_table({"d": value}))[0]["d"]
        assert isinstance(decoded, Decimal)
        assert decoded.as_tuple() == value.as_tuple()


def test_a_nan_stays_a_nan() -> None:
    decoded, _ = decode_table(encode_table({"f": Float32("nan"), "d": math.nan}))
    assert all(isinstance(value, float) and math.isnan(value) for value in decoded.values())
    assert type(decoded["f"]) is Float32


@pytest.mark.parametrize(
    "value", [2**63, Int8(128), UInt8(-1), Timestamp(-1), Decimal("1e5"), Decimal("nan"), Decimal(2**31), "\ud800"]
)
def test_what_the_wire_cannot_hold_is_a_value_error(value: FieldValue) -> None:
    with pytest.raises(ValueError):
        encode_value(value)


def test_a_name_holds_255_bytes_and_not_one_more() -> None:
    assert decode_table(encode_table({"n" * 255: 1}))[0] == {"n" * 255: 1}
    with pytest.raises(ValueError, match="255"):
        encode_name("n" * 256)


# --- against pamqp, over the values that both can express ---

PAMQP_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=20).map(bytearray),
    st.decimals(-1000, 1000, allow_nan=False, places=2),
)
PAMQP_NAMES = st.text(max_size=10)
PAMQP_TABLES = st.dictionaries(
    PAMQP_NAMES,
    st.recursive(
        PAMQP_SCALARS,
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(PAMQP_NAMES, inner, max_size=3)),
        max_leaves=8,
    ),
    max_size=4,
)


@given(PAMQP_TABLES)
def test_what_pamqp_encodes_we_decode_to_the_same_values(table: dict[str, object]) -> None:
    wire = pamqp.encode.field_table(table)  # type: ignore[arg-type]
    decoded, end = decode_table(wire)
    assert end == len(wire)
    assert decoded == table
    assert encode_table(decoded) == wire


@settings(max_examples=40)
@given(WIRE_TABLES.filter(lambda table: b"T" not in table and b"x" not in table))
def test_what_we_encode_pamqp_decodes_to_the_same_values(table: bytes) -> None:
    decoded, _ = decode_table(table)
    try:
        expected = pamqp.decode.field_table(table)[1]
    except UnicodeDecodeError:  # a name that is not UTF-8: pamqp's gap
        return
    assert decoded == expected
