"""An AMQP field table that cannot change: arguments of exchanges, queues and bindings, policy definitions. Format.

Two tables are equal when names, types and values are: `1`, `1.0` and `true` are three different arguments. The
text form is canonical JSON (sorted names), with what JSON cannot say wrapped under AMQP's own type letter:

    {"x-max-length": 10}                 str, int, finite float, bool, None and arrays stand for themselves
    {"S": "<base64>"}                    a long string that is not UTF-8 (bytes)
    {"x": "<base64>"}                    a byte array (bytearray)
    {"D": "1.50"}  {"T": 1700000000000000}  {"d": "nan"}  {"F": {...}}    decimal, time in us, odd float, table

Neighbours: entities.py holds tables, models.py stores their text, the AMQP door converts from and to the wire.
"""

from base64 import b64decode, b64encode
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from hashlib import sha256
from math import isfinite
from typing import TypeAlias

import msgspec

from headrace.controller.errors import Invalid

# Deeper nesting is refused before Python's own stack is at risk; the wire allows 16.
DEPTH_MAX = 64
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class ByteArray(bytes):
    """AMQP's type `x`, told apart from a long string that happens not to be UTF-8."""

    __slots__ = ()


# What a caller may put in, and what comes out: arrays as tuples, tables as Table, byte arrays as ByteArray.
Scalar: TypeAlias = bool | int | float | str | bytes | Decimal | datetime
FieldIn: TypeAlias = "Scalar | bytearray | Sequence[FieldIn] | Mapping[str, FieldIn] | None"
Field: TypeAlias = "Scalar | tuple[Field, ...] | Table | None"


class Table(Mapping[str, Field]):
    """Immutable, hashable, compared by exact type."""

    __slots__ = ("_fields", "text")

    _fields: dict[str, Field]
    text: str

    def __init__(self, fields: Mapping[str, FieldIn] | None = None) -> None:
        frozen = _freeze_table(fields, 0)._fields if fields else {}
        self._take(frozen)

    def _take(self, frozen: dict[str, Field]) -> None:
        self._fields = frozen
        self.text = _encode({name: _wrap(value) for name, value in frozen.items()}) if frozen else "{}"

    @classmethod
    def parse(cls, text: str) -> "Table":
        """The table of a text that `text` once gave."""
        return cls.from_json(msgspec.json.decode(text)) if text != "{}" else EMPTY

    @classmethod
    def from_json(cls, decoded: object) -> "Table":
        """The table of a text already decoded as plain JSON, as inside a larger document."""
        return cls(_unwrap_table(decoded))

    def __getitem__(self, name: str) -> Field:
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return self.text == other.text
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return f"Table({self._fields!r})"

    @property
    def digest(self) -> str:
        """A fixed-size stand-in for the whole table in a database key."""
        return sha256(self.text.encode()).hexdigest()

    def thaw(self) -> dict[str, FieldIn]:
        """Plain dicts, lists and bytearrays, as an encoder wants them."""
        return {name: _thaw(value) for name, value in self._fields.items()}


def _freeze_table(fields: Mapping[str, FieldIn], depth: int) -> Table:
    if isinstance(fields, Table):
        return fields
    if depth > DEPTH_MAX:
        raise Invalid(f"arguments are nested deeper than {DEPTH_MAX} levels")
    frozen: dict[str, Field] = {}
    for name in sorted(fields):
        if not isinstance(name, str):
            raise Invalid(f"an argument's name must be text, not {type(name).__name__}")
        _check_text(name)
        frozen[name] = _freeze(fields[name], depth + 1)
    table = Table()
    table._take(frozen)
    return table


def _freeze(value: FieldIn, depth: int) -> Field:
    match value:
        case None | bool() | float():
            return value
        case int():
            if not -(2**63) <= value < 2**63:
                raise Invalid(f"{value} does not fit an AMQP integer")
            return value
        case str():
            _check_text(value)
            return value
        case bytearray() | ByteArray():
            return ByteArray(value)
        case bytes() | Decimal():
            return value
        case datetime():
            return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
        case Mapping():
            return _freeze_table(value, depth)
        case list() | tuple():
            if depth > DEPTH_MAX:
                raise Invalid(f"arguments are nested deeper than {DEPTH_MAX} levels")
            return tuple(_freeze(item, depth + 1) for item in value)
        case _:
            raise Invalid(f"{type(value).__name__} is not an AMQP field type")


def _check_text(value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"{value!r} is not valid Unicode text") from error


def _encode(plain: object) -> str:
    return msgspec.json.encode(plain, order="deterministic").decode()


def _wrap(value: Field) -> object:
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if isfinite(value) else {"d": repr(value)}
        case ByteArray():
            return {"x": b64encode(value).decode()}
        case bytes():
            return {"S": b64encode(value).decode()}
        case Decimal():
            return {"D": str(value)}
        case datetime():
            return {"T": (value - _EPOCH) // _MICROSECOND}
        case tuple():
            return [_wrap(item) for item in value]
        case Table():
            return {"F": {name: _wrap(item) for name, item in value.items()}}


def _unwrap_table(plain: object) -> dict[str, FieldIn]:
    if not isinstance(plain, dict):
        raise Invalid("a stored field table is not an object")
    return {str(name): _unwrap(value) for name, value in plain.items()}


def _unwrap(plain: object) -> FieldIn:
    match plain:
        case None | bool() | int() | float() | str():
            return plain
        case list():
            return [_unwrap(item) for item in plain]
        case {"S": str(text)}:
            return b64decode(text)
        case {"x": str(text)}:
            return ByteArray(b64decode(text))
        case {"D": str(text)}:
            return Decimal(text)
        case {"d": str(text)}:
            return float(text)
        case {"T": int(microseconds)}:
            return _EPOCH + microseconds * _MICROSECOND
        case {"F": dict(table)}:
            return _unwrap_table(table)
        case _:
            raise Invalid("a stored field table holds a value of no known type")


def _thaw(value: Field) -> FieldIn:
    match value:
        case ByteArray():
            return bytearray(value)
        case tuple():
            return [_thaw(item) for item in value]
        case Table():
            return value.thaw()
        case _:
            return value


EMPTY = Table()
