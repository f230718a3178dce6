"""Method frames <-> pamqp's method objects. Format: pure functions, no I/O.

    method payload = u16 class, u16 method, then the arguments in order; neighbouring bits share an octet, lowest first

pamqp knows the methods: their ids, their arguments and the arguments' types; those definitions are read once, below.
The octets are read and written here, because pamqp's own marshalling is not fit for a server: it takes truncated
strings and trailing bytes for lawful, reads delivery tags as signed, refuses names that RabbitMQ takes (`ticket`,
`insist`, any `*` or umlaut in a queue's name) and tables without a bound. Use `make` instead of pamqp's constructors
for the same reason. The tests hold both equal, octet for octet, for every method that pamqp accepts.

Short strings must be UTF-8 (501 as in RabbitMQ), except in basic.publish, whose names keep their octets by
surrogateescape; so do long strings, which carry SASL's octets: `octets` gives them back.
basic.publish and basic.ack have their own path in frames.py; `decode_publish` reads what that path leaves unread.
Neighbours: fields.py for tables, frames.py above.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias, TypeVar

from pamqp import base, commands

from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.fields import FieldValue, decode_table, encode_table

Method: TypeAlias = base.Frame
M = TypeVar("M", bound=base.Frame)

_NUMBERS = {
    "octet": struct.Struct(">B"),
    "short": struct.Struct(">H"),
    "long": struct.Struct(">I"),
    "longlong": struct.Struct(">Q"),
}
_INDEX = struct.Struct(">I")
_LENGTH = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a method, or up to eight neighbouring bits."""

    type: str
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """The arguments of basic.publish."""

    exchange: str
    routing_key: str
    routing_key_bytes: bytes
    mandatory: bool
    immediate: bool


def _arguments(kind: type[Method]) -> Iterator[Argument]:
    for is_bit, names in groupby(kind.attributes(), lambda name: kind.amqp_type(name) == "bit"):
        listed = tuple(names)
        if is_bit:
            for first in range(0, len(listed), 8):
                yield Argument("bit", listed[first : first + 8])
        else:
            for name in listed:
                yield Argument(kind.amqp_type(name), (name,))


_KINDS: dict[int, type[Method]] = {
    index: kind for index, kind in commands.INDEX_MAPPING.items() if issubclass(kind, base.Frame)
}
_ARGUMENTS: dict[type[Method], tuple[Argument, ...]] = {kind: tuple(_arguments(kind)) for kind in _KINDS.values()}

# What a client may send; all else of the table above goes the other way only.
FROM_CLIENT: frozenset[int] = frozenset(
    kind.index
    for kind in (
        commands.Connection.StartOk,
        commands.Connection.SecureOk,
        commands.Connection.TuneOk,
        commands.Connection.Open,
        commands.Connection.Close,
        commands.Connection.CloseOk,
        commands.Connection.UpdateSecret,
        commands.Channel.Open,
        commands.Channel.Flow,
        commands.Channel.FlowOk,
        commands.Channel.Close,
        commands.Channel.CloseOk,
        commands.Exchange.Declare,
        commands.Exchange.Delete,
        commands.Exchange.Bind,
        commands.Exchange.Unbind,
        commands.Queue.Declare,
        commands.Queue.Bind,
        commands.Queue.Unbind,
        commands.Queue.Purge,
        commands.Queue.Delete,
        commands.Basic.Qos,
        commands.Basic.Consume,
        commands.Basic.Cancel,
        commands.Basic.CancelOk,
        commands.Basic.Publish,
        commands.Basic.Get,
        commands.Basic.Ack,
        commands.Basic.Reject,
        commands.Basic.Nack,
        commands.Basic.RecoverAsync,
        commands.Basic.Recover,
        commands.Tx.Select,
        commands.Tx.Commit,
        commands.Tx.Rollback,
        commands.Confirm.Select,
    )
)


def ids(method: Method | type[Method]) -> tuple[int, int]:
    """Class id and method id."""
    return method.index >> 16, method.index & 0xFFFF


def name_of(method: Method | type[Method]) -> str:
    """As RabbitMQ writes it: `queue.declare`, `basic.get-ok`."""
    family, _, verb = method.name.partition(".")
    return f"{family.lower()}.{''.join('-' + char.lower() if char.isupper() else char for char in verb).lstrip('-')}"


def make(kind: type[M], **values: object) -> M:
    """A method with these arguments; those not named are 0, False, empty. Nothing is checked until it is encoded."""
    method = kind.__new__(kind)
    for argument in _ARGUMENTS[kind]:
        for name in argument.names:
            setattr(method, name, values.pop(name) if name in values else _nothing(argument.type))
    if values:
        raise TypeError(f"{name_of(kind)} has no argument {', '.join(values)}")
    return method


def octets(text: str) -> bytes:
    """The octets that a long string of a method was read from."""
    return text.encode("utf-8", "surrogateescape")


def decode_method(payload: bytes) -> Method:
    """The method in the payload of a method frame; AmqpError (hard, laid to the method) if there is none."""
    if len(payload) < 4:
        raise amqp_error(ReplyCode.FRAME_ERROR, f"method frame of {len(payload)} octets")
    (index,) = _INDEX.unpack_from(payload)
    kind = _KINDS.get(index)
    if kind is None:
        class_id, method_id = index >> 16, index & 0xFFFF
        text = f"unknown method {method_id} of class {class_id}"
        raise amqp_error(ReplyCode.NOT_IMPLEMENTED, text, class_id, method_id)
    method = kind.__new__(kind)
    lax = kind is commands.Basic.Publish
    pos = 4
    try:
        for argument in _ARGUMENTS[kind]:
            pos = _read(method, argument, payload, pos, lax)
    except AmqpError as error:
        raise error.during(*ids(kind)) from None
    except (IndexError, struct.error):
        raise _cut_short(kind) from None
    if pos != len(payload):
        raise _cut_short(kind) if pos > len(payload) else _too_long(kind, len(payload) - pos)
    return method


def decode_publish(payload: bytes) -> Publish:
    """The arguments of basic.publish from the payload of its method frame: once per distinct payload, so straight."""
    try:
        # 0        2         4        6            7         ...
        # | class  | method  | ticket | length, exchange | length, routing key | bits |
        exchange_end = 7 + payload[6]
        key = exchange_end + 1
        key_end = key + payload[exchange_end]
        bits = payload[key_end]
    except IndexError:
        raise _cut_short(commands.Basic.Publish) from None
    if key_end + 1 != len(payload):
        raise _too_long(commands.Basic.Publish, len(payload) - key_end - 1)
    exchange = payload[7:exchange_end].decode("utf-8", "surrogateescape")
    routing_key = payload[key:key_end]
    return Publish(exchange, routing_key.decode("utf-8", "surrogateescape"), routing_key, bits & 1 == 1, bits & 2 == 2)


def encode_payload(method: Method) -> bytes:
    """The payload of the method's frame. An argument that does not fit its type is our mistake: ValueError."""
    parts = [_INDEX.pack(method.index)]
    for argument in _ARGUMENTS[type(method)]:
        try:
            parts.append(_written(method, argument))
        except (AttributeError, TypeError, ValueError, struct.error) as error:
            raise ValueError(f"{name_of(method)}, {' '.join(argument.names)}: {error}") from error
    return b"".join(parts)


def _nothing(kind: str) -> FieldValue:
    match kind:
        case "bit":
            return False
        case "shortstr" | "longstr":
            return ""
        case "table":
            return {}
        case _:
            return 0


def _read(method: Method, argument: Argument, payload: bytes, pos: int, lax: bool) -> int:
    """Set the argument from the octets at `pos`, return the position behind it."""
    if argument.type == "bit":
        bits = payload[pos]
        for place, name in enumerate(argument.names):
            setattr(method, name, bits >> place & 1 == 1)
        return pos + 1
    (name,) = argument.names
    value: FieldValue
    match argument.type:
        case "shortstr":
            end = pos + 1 + payload[pos]
            raw = payload[pos + 1 : end]
            try:
                value = raw.decode("utf-8", "surrogateescape" if lax else "strict")
            except UnicodeDecodeError:
                text = f"malformed UTF-8 in the short string '{name}' of {name_of(method)}"
                raise amqp_error(ReplyCode.FRAME_ERROR, text) from None
        case "longstr":
            end = pos + 4 + _LENGTH.unpack_from(payload, pos)[0]
            value = payload[pos + 4 : end].decode("utf-8", "surrogateescape")
        case "table":
            value, end = decode_table(payload, pos)
        case number:
            layout = _NUMBERS[number]
            end = pos + layout.size
            (value,) = layout.unpack_from(payload, pos)
    setattr(method, name, value)
    return end


def _written(method: Method, argument: Argument) -> bytes:
    if argument.type == "bit":
        return bytes((sum(bool(getattr(method, name)) << place for place, name in enumerate(argument.names)),))
    value = getattr(method, argument.names[0])
    match argument.type:
        case "shortstr":
            raw = octets(value)
            if len(raw) > 255:
                raise ValueError(f"a short string holds 255 octets, this one has {len(raw)}")
            return bytes((len(raw),)) + raw
        case "longstr":
            raw = octets(value)
            return _LENGTH.pack(len(raw)) + raw
        case "table":
            return encode_table(value)
        case number:
            return _NUMBERS[number].pack(value)


def _cut_short(kind: type[Method]) -> AmqpError:
    return amqp_error(ReplyCode.FRAME_ERROR, f"cannot decode {name_of(kind)}: its arguments are cut short", *ids(kind))


def _too_long(kind: type[Method], count: int) -> AmqpError:
    text = f"cannot decode {name_of(kind)}: {count} octets too many"
    return amqp_error(ReplyCode.FRAME_ERROR, text, *ids(kind))
