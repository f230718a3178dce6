"""The arguments of queues, exchanges, bindings and consumers: read, checked, compared. Format: pure, no I/O.

Names are RabbitMQ's, and those of ours that docs/reference lists. A known one of the wrong type or range is refused
(406, soft, in RabbitMQ's words); an unknown one is kept and means nothing, since clients put their own there. Each
value here holds what was read and, in `table`, all that was declared, to be stored, shown and compared.

Declaring again with other arguments is refused (406) argument by argument: integers of any width are one type, and
no `x-queue-type` is `classic`. Arguments come from the wire (fields.py) or from the metadata store (Table): a time is
a Timestamp there and a datetime here.
Neighbours: fields.py and errors.py below; controller/table.py keeps the tables; channel.py above.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum, StrEnum
from typing import Any, TypeAlias, TypeVar

from headrace.controller.policies import RETRY_DELAY_MS_MAX
from headrace.controller.table import ByteArray as StoredByteArray
from headrace.controller.table import FieldIn, Table
from headrace.filtering.expression import Expression, ExpressionError, parse
from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error, resource
from headrace.gateways.amqp.fields import ByteArray, FieldTable, FieldValue, Timestamp, type_name
from headrace.gateways.amqp.properties import EXPIRATION_MS_MAX
from headrace.gateways.delivery.filters import Unmatched
from headrace.gateways.delivery.queue import Overflow
from headrace.gateways.delivery.retry import DELAY_MS, Backoff
from headrace.gateways.delivery.routing import DELAYED_EXCHANGE, DELAYED_TYPE, ExchangeKind

Arguments: TypeAlias = Mapping[str, Any]

PRIORITY_MAX = 255
PARTITION_COUNT_MAX = 1024
NAME_BYTES_MAX = 255  # of what later travels as a short string

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND_MAX = 253_402_300_799  # the last second of the year 9999: the last that a datetime can hold


class QueueType(StrEnum):
    CLASSIC = "classic"
    QUORUM = "quorum"
    STREAM = "stream"


class DeadLetterStrategy(StrEnum):
    AT_MOST_ONCE = "at-most-once"
    AT_LEAST_ONCE = "at-least-once"


class QueueMode(StrEnum):
    DEFAULT = "default"
    LAZY = "lazy"


class LeaderLocator(StrEnum):
    CLIENT_LOCAL = "client-local"
    BALANCED = "balanced"
    RANDOM = "random"
    LEAST_LEADERS = "least-leaders"
    MIN_MASTERS = "min-masters"


class Durability(StrEnum):
    SYNC = "sync"
    INTERVAL = "interval"
    OS = "os"


class Compression(StrEnum):
    NONE = "none"
    LZ4 = "lz4"
    AUTO = "auto"


class Dispatch(StrEnum):
    EARLY = "early"
    COMMITTED = "committed"


class HashProperty(StrEnum):
    CORRELATION_ID = "correlation_id"
    MESSAGE_ID = "message_id"
    TIMESTAMP = "timestamp"


class HeadersMatch(StrEnum):
    ALL = "all"
    ANY = "any"
    ALL_WITH_X = "all-with-x"
    ANY_WITH_X = "any-with-x"


class Start(Enum):
    """Where in a stream to begin; the last three come with a number."""

    FIRST = "first"
    LAST = "last"
    NEXT = "next"
    OFFSET = "offset"
    TIME_MS = "time"
    AGO_MS = "interval"


@dataclass(frozen=True, slots=True)
class StreamOffset:
    start: Start
    number: int = 0

    @property
    def is_exact(self) -> bool:
        """It is the same place whenever it is asked for."""
        return self.start in (Start.FIRST, Start.OFFSET, Start.TIME_MS)


@dataclass(frozen=True, slots=True)
class StreamSettings:
    """What an exchange and a queue may both ask of the stream they own. None: not asked."""

    partitions: int | None = None
    durability: Durability | None = None
    compression: Compression | None = None
    retention_ms: int | None = None
    retention_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RetryArguments:
    """None: not asked."""

    max: int | None = None
    backoff: Backoff | None = None
    delay_ms: int | None = None
    delay_max_ms: int | None = None
    jitter: bool | None = None


@dataclass(frozen=True, slots=True)
class QueueArguments:
    """None: not asked, so a policy or the default decides."""

    table: Table
    queue_type: QueueType = QueueType.CLASSIC
    message_ttl_ms: int | None = None
    expires_ms: int | None = None
    max_length: int | None = None
    max_length_bytes: int | None = None
    overflow: Overflow | None = None
    max_priority: int | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    dead_letter_strategy: DeadLetterStrategy | None = None
    single_active_consumer: bool = False
    delivery_limit: int | None = None  # -1: expressly without limit
    consumer_timeout_ms: int | None = None
    max_age_ms: int | None = None
    max_segment_bytes: int | None = None
    filter_size_bytes: int | None = None
    dispatch: Dispatch | None = None
    filter_unmatched: Unmatched | None = None
    stream: StreamSettings = StreamSettings()
    retry: RetryArguments = RetryArguments()

    @property
    def may_need_grave(self) -> bool:
        """Where there is no dead-letter exchange it has a dead-letter queue of its own."""
        return self.retry.max is not None or self.filter_unmatched is Unmatched.DEAD_LETTER


@dataclass(frozen=True, slots=True)
class ExchangeArguments:
    table: Table
    alternate_exchange: str | None = None
    delayed_type: ExchangeKind | None = None
    hash_header: str | None = None
    hash_property: HashProperty | None = None
    stream: StreamSettings = StreamSettings()


@dataclass(frozen=True, slots=True)
class BindingArguments:
    table: Table
    filter: Expression | None = None
    start: StreamOffset | None = None
    match: HeadersMatch = HeadersMatch.ALL


@dataclass(frozen=True, slots=True)
class ConsumerArguments:
    table: Table
    priority: int = 0
    stream_offset: StreamOffset | None = None
    filter: Expression | None = None
    stream_filter: tuple[str, ...] = ()
    match_unfiltered: bool = False
    cancel_on_failover: bool = False


# ---- tables ---------------------------------------------------------------------------------------------------------


def to_table(arguments: Mapping[str, FieldValue]) -> Table:
    """Arguments from the wire as the metadata store keeps them: without the width of numbers."""
    return Table(_stored_table(arguments))


def from_table(table: Arguments) -> FieldTable:
    """Arguments from the metadata store as they go to the wire."""
    return {name: _on_wire(value) for name, value in table.items()}


def _stored_table(table: Mapping[str, FieldValue]) -> dict[str, FieldIn]:
    for name in table:
        if not _is_text(name):
            raise amqp_error(ReplyCode.SYNTAX_ERROR, "an argument has a name that is not UTF-8")
    return {name: _stored(value) for name, value in table.items()}


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _stored(value: FieldValue) -> FieldIn:
    match value:
        case Timestamp():
            if value > _SECOND_MAX:
                raise amqp_error(ReplyCode.SYNTAX_ERROR, f"an argument holds a time after the year 9999: {value:d}")
            return _EPOCH + timedelta(seconds=value)
        case ByteArray():
            return StoredByteArray(value)
        case bool() | str() | bytes() | Decimal() | None:
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case Mapping():
            return _stored_table(value)
        case _:
            return [_stored(inner) for inner in value]


def _on_wire(value: Any) -> FieldValue:
    match value:
        case datetime():
            return Timestamp((value - _EPOCH) // timedelta(seconds=1))
        case StoredByteArray():
            return ByteArray(value)
        case Mapping():
            return from_table(value)
        case tuple() | list():
            return [_on_wire(inner) for inner in value]
        case _:
            plain: FieldValue = value
            return plain


# ---- checks of one value --------------------------------------------------------------------------------------------


class _Invalid(Exception):
    """Why a value is refused; always caught in this file."""


Check: TypeAlias = Callable[[Any], Any]
E = TypeVar("E", bound=StrEnum)


def _name_of_type(value: Any) -> str:
    return type_name(_on_wire(value))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool | Timestamp)


def _integer(value: Any) -> int:
    if not _is_integer(value):
        raise _Invalid(f"expected integer, got {_name_of_type(value)}")
    return int(value)


def _at_least(low: int, high: int | None = None) -> Check:
    def check(value: Any) -> int:
        number = _integer(value)
        if number < low:
            raise _Invalid(f"value {'negative' if low == 0 else 'too small'}: {number}")
        if high is not None and number > high:
            raise _Invalid(f"value too big: {number}, at most {high}")
        return number

    return check


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Invalid(f"expected boolean, got {_name_of_type(value)}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        # Bytes here are a long string that is not UTF-8.
        found = "longstr that is not UTF-8" if type(value) is bytes else _name_of_type(value)
        raise _Invalid(f"expected string, got {found}")
    return value


def _name(value: Any) -> str:
    text = _text(value)
    if len(text.encode()) > NAME_BYTES_MAX:
        raise _Invalid(f"longer than {NAME_BYTES_MAX} bytes")
    return text


def _one_of(words: type[E]) -> Check:
    def check(value: Any) -> E:
        text = _text(value)
        try:
            return words(text)
        except ValueError:
            raise _Invalid(f"unsupported value '{text}', expected one of {', '.join(words)}") from None

    return check


def _queue_version(value: Any) -> int:
    number = _integer(value)
    if number not in (1, 2):
        raise _Invalid(f"unsupported queue version '{number}'")
    return number


_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "D": 86_400_000, "M": 30 * 86_400_000, "Y": 365 * 86_400_000}
_AGE = re.compile(r"([0-9]{1,9})([YMDhms])")


def age_ms(value: Any) -> int:
    """`7D`, `12h`: RabbitMQ's x-max-age."""
    text = _text(value)
    found = _AGE.fullmatch(text)
    if found is None or int(found[1]) == 0:
        raise _Invalid(f"'{text}' is not a number above 0 with one of the units Y, M, D, h, m, s")
    return int(found[1]) * _UNIT_MS[found[2]]


def _point_in_past(value: Any) -> StreamOffset:
    """x-from: first, an offset or a time."""
    if _is_integer(value) and value >= 0:
        return StreamOffset(Start.OFFSET, int(value))
    moment = _on_wire(value)
    if isinstance(moment, Timestamp):
        return StreamOffset(Start.TIME_MS, 1000 * moment)
    if value == "first":
        return StreamOffset(Start.FIRST)
    raise _Invalid("expected first, an offset or a timestamp")


def _stream_offset(value: Any) -> StreamOffset:
    match value:
        case "last":
            return StreamOffset(Start.LAST)
        case "next":
            return StreamOffset(Start.NEXT)
        case str() if value != "first":
            return StreamOffset(Start.AGO_MS, age_ms(value))
    try:
        return _point_in_past(value)
    except _Invalid:
        raise _Invalid("expected first, last, next, an offset, a timestamp or an interval such as 1h") from None


def _texts(value: Any) -> tuple[str, ...]:
    return (_text(value),) if isinstance(value, str) else tuple(map(_text, _array(value)))


def _expression(value: Any) -> Expression:
    try:
        return parse(_text(value))
    except ExpressionError as error:
        raise _Invalid(str(error)) from None


def _array(value: Any) -> Iterable[Any]:
    if not isinstance(value, list | tuple):
        raise _Invalid(f"expected string or array, got {_name_of_type(value)}")
    return value


# ---- the known arguments --------------------------------------------------------------------------------------------

_milliseconds = _at_least(0, EXPIRATION_MS_MAX)
_STREAM_SETTINGS: dict[str, tuple[str, Check]] = {
    "x-partitions": ("partitions", _at_least(1, PARTITION_COUNT_MAX)),
    "x-durability": ("durability", _one_of(Durability)),
    "x-compression": ("compression", _one_of(Compression)),
    "x-retention-ms": ("retention_ms", _at_least(0)),
    "x-retention-bytes": ("retention_bytes", _at_least(0)),
}
_RETRY: dict[str, tuple[str, Check]] = {
    "x-retry-max": ("max", _at_least(0)),
    "x-retry-backoff": ("backoff", _one_of(Backoff)),
    "x-retry-delay-ms": ("delay_ms", _milliseconds),
    "x-retry-delay-max-ms": ("delay_max_ms", _milliseconds),
    "x-retry-jitter": ("jitter", _boolean),
}
_QUEUE: dict[str, tuple[str, Check]] = {
    "x-queue-type": ("queue_type", _one_of(QueueType)),
    "x-message-ttl": ("message_ttl_ms", _milliseconds),
    "x-expires": ("expires_ms", _at_least(1, EXPIRATION_MS_MAX)),
    "x-max-length": ("max_length", _at_least(0)),
    "x-max-length-bytes": ("max_length_bytes", _at_least(0)),
    "x-overflow": ("overflow", _one_of(Overflow)),
    "x-max-priority": ("max_priority", _at_least(0, PRIORITY_MAX)),
    "x-dead-letter-exchange": ("dead_letter_exchange", _name),
    "x-dead-letter-routing-key": ("dead_letter_routing_key", _name),
    "x-dead-letter-strategy": ("dead_letter_strategy", _one_of(DeadLetterStrategy)),
    "x-single-active-consumer": ("single_active_consumer", _boolean),
    "x-delivery-limit": ("delivery_limit", _at_least(-1)),
    "x-consumer-timeout": ("consumer_timeout_ms", _at_least(1)),
    "x-max-age": ("max_age_ms", age_ms),
    "x-stream-max-segment-size-bytes": ("max_segment_bytes", _at_least(0)),
    "x-stream-filter-size-bytes": ("filter_size_bytes", _at_least(16, 255)),
    "x-dispatch": ("dispatch", _one_of(Dispatch)),
    "x-filter-unmatched": ("filter_unmatched", _one_of(Unmatched)),
}
# How RabbitMQ places and stores a queue: checked, compared, and of no effect on an engine that has one way for all.
_QUEUE_PLACEMENT: dict[str, Check] = {
    "x-queue-mode": _one_of(QueueMode),
    "x-queue-version": _queue_version,
    "x-queue-leader-locator": _one_of(LeaderLocator),
    "x-queue-master-locator": _text,
    "x-quorum-initial-group-size": _at_least(1),
    "x-quorum-target-group-size": _at_least(1),
    "x-initial-cluster-size": _at_least(1),
    "x-max-in-memory-length": _at_least(0),
    "x-max-in-memory-bytes": _at_least(0),
}
_EXCHANGE: dict[str, tuple[str, Check]] = {
    "alternate-exchange": ("alternate_exchange", _name),
}
# Only an x-consistent-hash exchange reads these.
_HASH: dict[str, tuple[str, Check]] = {
    "hash-header": ("hash_header", _text),
    "hash-property": ("hash_property", _one_of(HashProperty)),
}
_BINDING: dict[str, tuple[str, Check]] = {
    "x-filter": ("filter", _expression),
    "x-from": ("start", _point_in_past),
}
_CONSUMER: dict[str, tuple[str, Check]] = {
    "x-priority": ("priority", _at_least(-(2**31), 2**31 - 1)),
    "x-stream-offset": ("stream_offset", _stream_offset),
    "x-filter": ("filter", _expression),
    "x-stream-filter": ("stream_filter", _texts),
    "x-stream-match-unfiltered": ("match_unfiltered", _boolean),
    "x-cancel-on-ha-failover": ("cancel_on_failover", _boolean),
}

_QUEUE_NAMES = (*_QUEUE, *_QUEUE_PLACEMENT, *_STREAM_SETTINGS, *_RETRY)
_STREAM_ONLY = frozenset(
    {"x-max-age", "x-stream-max-segment-size-bytes", "x-stream-filter-size-bytes", "x-initial-cluster-size"}
)
# A stream is read and never emptied: what is about taking out, running out and bringing back has no meaning there.
_NOT_FOR_STREAM = frozenset(
    {
        "x-message-ttl",
        "x-expires",
        "x-max-length",
        "x-overflow",
        "x-max-priority",
        "x-dead-letter-exchange",
        "x-dead-letter-routing-key",
        "x-dead-letter-strategy",
        "x-single-active-consumer",
        "x-delivery-limit",
        "x-consumer-timeout",
        "x-dispatch",
        "x-filter-unmatched",
        "x-queue-mode",
        "x-queue-version",
        "x-quorum-initial-group-size",
        "x-quorum-target-group-size",
        "x-max-in-memory-length",
        "x-max-in-memory-bytes",
        *_RETRY,
    }
)


# ---- reading --------------------------------------------------------------------------------------------------------


def parse_queue_arguments(
    arguments: Arguments, queue: str, vhost: str, *, durable: bool, exclusive: bool, auto_delete: bool
) -> QueueArguments:
    where = resource("queue", queue, vhost)
    known = _read(arguments, _QUEUE, where)
    for name, check in _QUEUE_PLACEMENT.items():
        if name in arguments:
            _checked(name, check, arguments[name], where)
    stream = StreamSettings(**_read(arguments, _STREAM_SETTINGS, where))
    retry = RetryArguments(**_read(arguments, _RETRY, where))
    parsed = QueueArguments(table=_kept(arguments), stream=stream, retry=retry, **known)
    _check_retry(retry, where)
    if parsed.dead_letter_routing_key is not None and parsed.dead_letter_exchange is None:
        raise _refused("x-dead-letter-routing-key", where, "routing key but no dead-letter exchange defined")
    kind = parsed.queue_type
    for name in _NOT_FOR_STREAM if kind is QueueType.STREAM else _STREAM_ONLY:
        if name in arguments:
            raise _precondition_failed(f"invalid arg '{name}' for {where} of queue type {kind}")
    if kind is not QueueType.CLASSIC:
        for unlawful, word in (
            (not durable, "non-durable"),
            (exclusive, "exclusive-owner"),
            (auto_delete, "auto-delete"),
        ):
            if unlawful:
                raise _precondition_failed(f"invalid property '{word}' for {where}")
    return parsed


def _check_retry(retry: RetryArguments, where: str) -> None:
    if retry.backoff is Backoff.LEVELS and (retry.delay_ms is not None or retry.delay_max_ms is not None):
        raise _refused("x-retry-backoff", where, "levels have delays of their own, x-retry-delay-* sets others")
    delay_ms = DELAY_MS if retry.delay_ms is None else retry.delay_ms
    if retry.delay_max_ms is not None and retry.delay_max_ms < delay_ms:
        raise _refused("x-retry-delay-max-ms", where, f"{retry.delay_max_ms} is less than the delay of {delay_ms}")


def check_declared(asked: QueueArguments, grave: str, queue: str, vhost: str) -> None:
    """Refuse what a queue may not be declared with from now on; those that were declared with it still load.

    `grave`: what its own dead-letter queue would be called; empty: it has a dead-letter exchange.
    """
    where = resource("queue", queue, vhost)
    for name, delay_ms in (
        ("x-retry-delay-ms", asked.retry.delay_ms),
        ("x-retry-delay-max-ms", asked.retry.delay_max_ms),
    ):
        if delay_ms is not None and delay_ms > RETRY_DELAY_MS_MAX:
            raise _refused(name, where, f"{delay_ms} is more than ten years ({RETRY_DELAY_MS_MAX})")
    if asked.may_need_grave and len(grave.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
        name = "x-retry-max" if asked.retry.max is not None else "x-filter-unmatched"
        # A reply has no room for names as long as these.
        reason = f"the name of its dead-letter queue, <queue>.dlq, would be longer than {NAME_BYTES_MAX} bytes"
        raise _precondition_failed(f"invalid arg '{name}': {reason}")


def parse_exchange_arguments(arguments: Arguments, exchange: str, vhost: str, exchange_type: str) -> ExchangeArguments:
    where = resource("exchange", exchange, vhost)
    known = _read(arguments, _EXCHANGE, where)
    if exchange_type == DELAYED_EXCHANGE:
        if arguments.get(DELAYED_TYPE) not in tuple(ExchangeKind):
            raise _precondition_failed("Invalid argument, 'x-delayed-type' must be an existing exchange type")
        known["delayed_type"] = ExchangeKind(arguments[DELAYED_TYPE])
    effective_type = known.get("delayed_type", exchange_type)
    if effective_type == ExchangeKind.CONSISTENT_HASH:
        known |= _read(arguments, _HASH, where)
        if "hash_header" in known and "hash_property" in known:
            raise _precondition_failed("hash-header and hash-property are mutually exclusive")
    stream = StreamSettings(**_read(arguments, _STREAM_SETTINGS, where))
    return ExchangeArguments(table=_kept(arguments), stream=stream, **known)


def parse_binding_arguments(arguments: Arguments, exchange: str, vhost: str, exchange_type: str) -> BindingArguments:
    """Arguments of a binding whose source is this exchange; for a delayed one the type is the one it delays."""
    where = f"binding of {resource('exchange', exchange, vhost)}"
    known = _read(arguments, _BINDING, where)
    if exchange_type == ExchangeKind.CONSISTENT_HASH and "filter" in known:
        raise _refused("x-filter", where, "the bindings of an x-consistent-hash exchange divide all that is published")
    if exchange_type == ExchangeKind.HEADERS and "x-match" in arguments:
        match = arguments["x-match"]
        if not isinstance(match, str):
            text = f"Invalid x-match field type {_name_of_type(match)} (value {_shown(match)}); expected longstr"
            raise _precondition_failed(text)
        try:
            known["match"] = HeadersMatch(match)
        except ValueError:
            text = f"Invalid x-match field value '{match}'; expected all, any, all-with-x, or any-with-x"
            raise _precondition_failed(text) from None
    return BindingArguments(table=_kept(arguments), **known)


def parse_consumer_arguments(arguments: Arguments, queue: str, vhost: str) -> ConsumerArguments:
    known = _read(arguments, _CONSUMER, resource("queue", queue, vhost))
    return ConsumerArguments(table=_kept(arguments), **known)


def _read(arguments: Arguments, known: Mapping[str, tuple[str, Check]], where: str) -> dict[str, Any]:
    return {
        field: _checked(name, check, arguments[name], where)
        for name, (field, check) in known.items()
        if name in arguments
    }


def _checked(name: str, check: Check, value: Any, where: str) -> Any:
    try:
        return check(value)
    except _Invalid as reason:
        raise _refused(name, where, str(reason)) from None


def _kept(arguments: Arguments) -> Table:
    return arguments if isinstance(arguments, Table) else to_table(arguments)


# ---- comparing ------------------------------------------------------------------------------------------------------


def check_same_queue(
    current: Arguments,
    received: Arguments,
    queue: str,
    vhost: str,
    *,
    durable: tuple[bool, bool],
    auto_delete: tuple[bool, bool],
) -> None:
    """Refuse to declare an existing queue otherwise than it is; the pairs are (current, received)."""
    where = resource("queue", queue, vhost)
    check_same("durable", *durable, where)
    check_same("auto_delete", *auto_delete, where)
    _check_same_arguments(current, received, _QUEUE_NAMES, where)


def check_same_exchange(
    current: Arguments,
    received: Arguments,
    exchange: str,
    vhost: str,
    *,
    exchange_type: tuple[str, str],
    durable: tuple[bool, bool],
    auto_delete: tuple[bool, bool],
    internal: tuple[bool, bool],
) -> None:
    """Refuse to declare an existing exchange otherwise than it is; the pairs are (current, received)."""
    where = resource("exchange", exchange, vhost)
    check_same("type", *exchange_type, where)
    check_same("durable", *durable, where)
    check_same("auto_delete", *auto_delete, where)
    check_same("internal", *internal, where)
    names = (*_EXCHANGE, DELAYED_TYPE, *_HASH, *_STREAM_SETTINGS)
    _check_same_arguments(current, received, names, where)


def check_same(name: str, current: bool | str, received: bool | str, where: str) -> None:
    if current != received:
        raise _inequivalent(name, where, f"'{_shown(received)}'", f"'{_shown(current)}'")


def _check_same_arguments(current: Arguments, received: Arguments, names: Iterable[str], where: str) -> None:
    for name in names:
        default = {"x-queue-type": QueueType.CLASSIC.value}.get(name)
        old, new = current.get(name, default), received.get(name, default)
        if _class_of_type(old) == _class_of_type(new) and old == new:
            continue
        if name in current and name in received:
            raise _inequivalent(name, where, f"'{_shown(new)}'", f"'{_shown(old)}'")
        raise _inequivalent(name, where, _typed(name, received), _typed(name, current))


def _class_of_type(value: Any) -> str:
    if _is_integer(value):
        return "int"
    return "float" if isinstance(value, float) else _name_of_type(value)


def _typed(name: str, arguments: Arguments) -> str:
    if name not in arguments:
        return "none"
    value = arguments[name]
    return f"the value '{_shown(value)}' of type '{_name_of_type(value)}'"


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _inequivalent(name: str, where: str, received: str, current: str) -> AmqpError:
    return _precondition_failed(f"inequivalent arg '{name}' for {where}: received {received} but current is {current}")


def _refused(name: str, where: str, reason: str) -> AmqpError:
    return _precondition_failed(f"invalid arg '{name}' for {where}: {reason}")


def _precondition_failed(text: str) -> AmqpError:
    return amqp_error(ReplyCode.PRECONDITION_FAILED, text)
