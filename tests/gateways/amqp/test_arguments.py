"""Arguments: what is read, what is refused and with which words, and when two declarations are the same."""

from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.controller.table import Table
from headrace.filtering.expression import parse
from headrace.gateways.amqp.arguments import (
    PARTITION_COUNT_MAX,
    Backoff,
    BindingArguments,
    Compression,
    ConsumerArguments,
    DeadLetterStrategy,
    Dispatch,
    Durability,
    ExchangeArguments,
    HashProperty,
    HeadersMatch,
    QueueArguments,
    QueueType,
    RetryArguments,
    Start,
    StreamOffset,
    StreamSettings,
    check_same_exchange,
    check_same_queue,
    from_table,
    parse_binding_arguments,
    parse_consumer_arguments,
    parse_exchange_arguments,
    parse_queue_arguments,
    to_table,
)
from headrace.gateways.amqp.errors import AmqpError
from headrace.gateways.amqp.fields import (
    ByteArray,
    FieldTable,
    Float32,
    Int8,
    Int64,
    Timestamp,
    UInt16,
    decode_table,
    encode_table,
)
from headrace.gateways.amqp.properties import EXPIRATION_MS_MAX
from headrace.gateways.delivery.filters import Unmatched
from headrace.gateways.delivery.queue import Overflow
from headrace.gateways.delivery.routing import ExchangeKind


def queue(arguments: FieldTable, durable: bool = True, exclusive: bool = False, auto_delete: bool = False) -> Any:
    return parse_queue_arguments(arguments, "q", "/", durable=durable, exclusive=exclusive, auto_delete=auto_delete)


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    """The text of the 406 that the call ends in."""
    with pytest.raises(AmqpError) as caught:
        call(*arguments, **options)
    assert (caught.value.code, caught.value.hard) == (406, False)
    return caught.value.text


# ---- queues --------------------------------------------------------------------------------


def test_no_arguments_ask_for_nothing() -> None:
    assert queue({}) == QueueArguments(table=Table())


def test_every_queue_argument_is_read() -> None:
    arguments: FieldTable = {
        "x-queue-type": "quorum",
        "x-message-ttl": 60_000,
        "x-expires": Int64(1),
        "x-max-length": 10,
        "x-max-length-bytes": 2**40,
        "x-overflow": "reject-publish-dlx",
        "x-max-priority": Int8(10),
        "x-dead-letter-exchange": "dlx",
        "x-dead-letter-routing-key": "dead",
        "x-dead-letter-strategy": "at-least-once",
        "x-single-active-consumer": True,
        "x-delivery-limit": 20,
        "x-dispatch": "committed",
        "x-filter-unmatched": "dead-letter",
        "x-partitions": 8,
        "x-durability": "interval",
        "x-compression": "lz4",
        "x-retention-ms": 0,
        "x-retention-bytes": 2**40,
        "x-retry-max": 3,
        "x-retry-backoff": "exponential",
        "x-retry-delay-ms": 100,
        "x-retry-delay-max-ms": 10_000,
        "x-retry-jitter": True,
        "x-queue-mode": "lazy",
        "x-queue-version": 2,
        "x-queue-leader-locator": "balanced",
        "x-quorum-initial-group-size": 3,
        "x-my-own": {"any": "thing"},
    }
    assert queue(arguments) == QueueArguments(
        table=to_table(arguments),
        queue_type=QueueType.QUORUM,
        message_ttl_ms=60_000,
        expires_ms=1,
        max_length=10,
        max_length_bytes=2**40,
        overflow=Overflow.REJECT_PUBLISH_DLX,
        max_priority=10,
        dead_letter_exchange="dlx",
        dead_letter_routing_key="dead",
        dead_letter_strategy=DeadLetterStrategy.AT_LEAST_ONCE,
        single_active_consumer=True,
        delivery_limit=20,
        dispatch=Dispatch.COMMITTED,
        filter_unmatched=Unmatched.DEAD_LETTER,
        stream=StreamSettings(8, Durability.INTERVAL, Compression.LZ4, 0, 2**40),
        retry=RetryArguments(3, Backoff.EXPONENTIAL, 100, 10_000, True),
    )


def test_every_stream_argument_is_read() -> None:
    arguments: FieldTable = {
        "x-queue-type": "stream",
        "x-max-age": "7D",
        "x-max-length-bytes": 10**9,
        "x-stream-max-segment-size-bytes": 10**6,
        "x-stream-filter-size-bytes": 32,
        "x-initial-cluster-size": 3,
    }
    read = queue(arguments)
    assert (read.queue_type, read.max_age_ms) == (QueueType.STREAM, 7 * 86_400_000)
    assert (read.max_length_bytes, read.max_segment_bytes, read.filter_size_bytes) == (10**9, 10**6, 32)


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("1s", 1000),
        ("2m", 120_000),
        ("3h", 10_800_000),
        ("1D", 86_400_000),
        ("1M", 30 * 86_400_000),
        ("1Y", 365 * 86_400_000),
    ],
)
def test_an_age_has_a_unit(text: str, milliseconds: int) -> None:
    assert queue({"x-queue-type": "stream", "x-max-age": text}).max_age_ms == milliseconds


def test_unknown_arguments_are_kept_whatever_they_hold() -> None:
    arguments: FieldTable = {"x-vendor": [1, None], "note": b"\xff"}
    assert from_table(queue(arguments).table) == arguments


def test_a_refusal_names_argument_queue_and_vhost() -> None:
    text = refusal(queue, {"x-message-ttl": -1})
    assert text == "invalid arg 'x-message-ttl' for queue 'q' in vhost '/': value negative: -1"
    text = refusal(queue, {"x-message-ttl": "1000"})
    assert text == "invalid arg 'x-message-ttl' for queue 'q' in vhost '/': expected integer, got longstr"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-message-ttl", True),
        ("x-message-ttl", 1.0),
        ("x-message-ttl", Timestamp(1)),
        ("x-message-ttl", EXPIRATION_MS_MAX + 1),
        ("x-expires", 0),
        ("x-expires", EXPIRATION_MS_MAX + 1),
        ("x-max-length", -1),
        ("x-max-length-bytes", None),
        ("x-max-priority", 256),
        ("x-max-priority", -1),
        ("x-overflow", "drop-tail"),
        ("x-overflow", 1),
        ("x-dead-letter-exchange", 5),
        ("x-dead-letter-exchange", b"\xff"),
        ("x-dead-letter-exchange", ByteArray(b"dlx")),
        ("x-dead-letter-exchange", "x" * 256),
        ("x-dead-letter-strategy", "sometimes"),
        ("x-single-active-consumer", 1),
        ("x-single-active-consumer", "true"),
        ("x-delivery-limit", -2),
        ("x-queue-type", "mirrored"),
        ("x-queue-type", None),
        ("x-queue-mode", "eager"),
        ("x-queue-version", 3),
        ("x-queue-leader-locator", "nowhere"),
        ("x-quorum-initial-group-size", 0),
        ("x-partitions", 0),
        ("x-partitions", PARTITION_COUNT_MAX + 1),
        ("x-durability", "maybe"),
        ("x-compression", "zip"),
        ("x-retention-ms", -1),
        ("x-retention-bytes", "1GB"),
        ("x-dispatch", "late"),
        ("x-filter-unmatched", "keep"),
        ("x-retry-max", -1),
        ("x-retry-backoff", "random"),
        ("x-retry-delay-ms", -1),
        ("x-retry-delay-max-ms", 1.5),
        ("x-retry-jitter", 0),
    ],
)
def test_a_wrong_type_or_range_is_refused(name: str, value: Any) -> None:
    assert refusal(queue, {name: value}).startswith(f"invalid arg '{name}' for queue 'q' in vhost '/': ")


@pytest.mark.parametrize("text", ["", "7", "D", "0D", "7d", "7DD", "-1D", "1.5h", " 1h", "1234567890Y"])
def test_an_age_without_number_or_unit_is_refused(text: str) -> None:
    assert "x-max-age" in refusal(queue, {"x-queue-type": "stream", "x-max-age": text})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-message-ttl", 0),
        ("x-message-ttl", EXPIRATION_MS_MAX),
        ("x-expires", EXPIRATION_MS_MAX),
        ("x-max-length", 0),
        ("x-max-priority", 255),
        ("x-max-priority", UInt16(0)),
        ("x-delivery-limit", -1),
        ("x-partitions", PARTITION_COUNT_MAX),
        ("x-dead-letter-exchange", ""),
        ("x-dead-letter-exchange", "x" * 255),
    ],
)
def test_the_limits_themselves_are_lawful(name: str, value: Any) -> None:
    queue({name: value})


def test_a_dead_letter_key_needs_a_dead_letter_exchange() -> None:
    assert "no dead-letter exchange" in refusal(queue, {"x-dead-letter-routing-key": "k"})


def test_a_stream_takes_no_argument_about_emptying_a_queue_and_a_queue_none_of_a_stream() -> None:
    text = refusal(queue, {"x-queue-type": "stream", "x-message-ttl": 5})
    assert text == "invalid arg 'x-message-ttl' for queue 'q' in vhost '/' of queue type stream"
    text = refusal(queue, {"x-max-age": "1h"})
    assert text == "invalid arg 'x-max-age' for queue 'q' in vhost '/' of queue type classic"


@pytest.mark.parametrize("kind", ["quorum", "stream"])
def test_a_replicated_queue_is_durable_shared_and_stays(kind: str) -> None:
    arguments: FieldTable = {"x-queue-type": kind}
    assert refusal(queue, arguments, durable=False) == "invalid property 'non-durable' for queue 'q' in vhost '/'"
    assert refusal(queue, arguments, exclusive=True) == "invalid property 'exclusive-owner' for queue 'q' in vhost '/'"
    assert refusal(queue, arguments, auto_delete=True) == "invalid property 'auto-delete' for queue 'q' in vhost '/'"
    queue({"x-queue-type": "classic"}, durable=False, exclusive=True, auto_delete=True)


# ---- exchanges, bindings, consumers --------------------------------------------------------------------------------


def exchange(arguments: FieldTable, kind: str = "topic") -> ExchangeArguments:
    return parse_exchange_arguments(arguments, "e", "/", kind)


def test_exchange_arguments_are_read() -> None:
    read = exchange({"alternate-exchange": "ae", "x-partitions": 4, "x-durability": "os", "other": 1})
    assert (read.alternate_exchange, read.stream) == ("ae", StreamSettings(4, Durability.OS))
    assert exchange({"x-delayed-type": "topic"}, "x-delayed-message").delayed_type is ExchangeKind.TOPIC
    assert exchange({"hash-header": "h"}, "x-consistent-hash").hash_header == "h"
    hashed = exchange({"hash-property": "message_id"}, "x-consistent-hash")
    assert hashed.hash_property is HashProperty.MESSAGE_ID
    assert exchange({"hash-header": 5, "x-delayed-type": "?"}).hash_header is None


def test_an_alternate_exchange_is_a_name() -> None:
    text = refusal(exchange, {"alternate-exchange": 5})
    assert text == "invalid arg 'alternate-exchange' for exchange 'e' in vhost '/': expected string, got signedint"


@pytest.mark.parametrize("arguments", [{}, {"x-delayed-type": "x-delayed-message"}, {"x-delayed-type": 5}])
def test_a_delayed_exchange_needs_the_type_it_delays(arguments: FieldTable) -> None:
    assert "'x-delayed-type' must be an existing exchange type" in refusal(exchange, arguments, "x-delayed-message")


def test_a_hash_takes_a_header_or_a_property_but_not_both() -> None:
    both: FieldTable = {"hash-header": "h", "hash-property": "message_id"}
    assert "mutually exclusive" in refusal(exchange, both, "x-consistent-hash")
    assert "mutually exclusive" in refusal(
        exchange, {**both, "x-delayed-type": "x-consistent-hash"}, "x-delayed-message"
    )
    assert "hash-property" in refusal(exchange, {"hash-property": "app_id"}, "x-consistent-hash")


def binding(arguments: FieldTable, kind: str = "topic") -> BindingArguments:
    return parse_binding_arguments(arguments, "e", "/", kind)


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ("first", StreamOffset(Start.FIRST)),
        (0, StreamOffset(Start.OFFSET, 0)),
        (Int64(7), StreamOffset(Start.OFFSET, 7)),
        (Timestamp(1_700_000_000), StreamOffset(Start.TIME_MS, 1_700_000_000_000)),
    ],
)
def test_a_binding_may_begin_in_the_past(value: Any, start: StreamOffset) -> None:
    assert binding({"x-from": value, "x-filter": "eu"}).start == start
    assert parse_consumer_arguments({"x-stream-offset": value}, "q", "/").stream_offset == start


@pytest.mark.parametrize("value", ["last", "next", "1h", -1, 1.5, None, True])
def test_a_binding_begins_nowhere_else(value: Any) -> None:
    text = refusal(binding, {"x-from": value})
    assert text.startswith("invalid arg 'x-from' for binding of exchange 'e' in vhost '/': expected first")


def test_x_match_counts_for_headers_exchanges_only() -> None:
    assert binding({"a": 1}, "headers").match is HeadersMatch.ALL
    assert binding({"x-match": "any-with-x"}, "headers").match is HeadersMatch.ANY_WITH_X
    assert binding({"x-match": "none"}).match is HeadersMatch.ALL
    text = refusal(binding, {"x-match": "none"}, "headers")
    assert text == "Invalid x-match field value 'none'; expected all, any, all-with-x, or any-with-x"
    text = refusal(binding, {"x-match": Int8(1)}, "headers")
    assert text == "Invalid x-match field type byte (value 1); expected longstr"


def test_consumer_arguments_are_read() -> None:
    arguments: FieldTable = {
        "x-priority": -5,
        "x-stream-offset": "1h",
        "x-filter": "eu",
        "x-stream-filter": ["a", "b"],
        "x-stream-match-unfiltered": True,
        "x-cancel-on-ha-failover": True,
        "client": "mine",
    }
    assert parse_consumer_arguments(arguments, "q", "/") == ConsumerArguments(
        table=to_table(arguments),
        priority=-5,
        stream_offset=StreamOffset(Start.AGO_MS, 3_600_000),
        filter=parse("eu"),
        stream_filter=("a", "b"),
        match_unfiltered=True,
        cancel_on_failover=True,
    )
    assert parse_consumer_arguments({"x-stream-filter": "a"}, "q", "/").stream_filter == ("a",)
    for word, start in (("last", Start.LAST), ("next", Start.NEXT)):
        assert parse_consumer_arguments({"x-stream-offset": word}, "q", "/").stream_offset == StreamOffset(start)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-priority", "high"),
        ("x-priority", 2**31),
        ("x-stream-offset", "yesterday"),
        ("x-stream-offset", -1),
        ("x-stream-offset", 1.0),
        ("x-stream-offset", None),
        ("x-filter", ["eu"]),
        ("x-filter", "eu &&"),
        ("x-stream-filter", 5),
        ("x-stream-filter", [5]),
        ("x-stream-match-unfiltered", "yes"),
        ("x-cancel-on-ha-failover", 1),
    ],
)
def test_a_wrong_consumer_argument_is_refused(name: str, value: Any) -> None:
    text = refusal(parse_consumer_arguments, {name: value}, "q", "/")
    assert text.startswith(f"invalid arg '{name}' for queue 'q' in vhost '/': ")


# ---- declaring again --------------------------------------------------------------------------------


def same_queue(
    current: FieldTable,
    received: FieldTable,
    durable: tuple[bool, bool] = (True, True),
    auto_delete: tuple[bool, bool] = (False, False),
) -> None:
    check_same_queue(to_table(current), received, "q", "/", durable=durable, auto_delete=auto_delete)


def test_the_same_queue_may_be_declared_again() -> None:
    same_queue({}, {})
    same_queue({"x-max-length": 5, "x-overflow": "drop-head"}, {"x-overflow": "drop-head", "x-max-length": Int8(5)})
    same_queue({}, {"x-queue-type": "classic"})
    same_queue({"x-queue-type": "classic"}, {})
    same_queue({"mine": 1}, {"yours": 2})


def test_another_argument_is_inequivalent_in_rabbitmqs_words() -> None:
    where = "for queue 'q' in vhost '/': received"
    ttl = "inequivalent arg 'x-message-ttl'"
    assert refusal(same_queue, {"x-message-ttl": 5}, {"x-message-ttl": 6}) == f"{ttl} {where} '6' but current is '5'"
    assert (
        refusal(same_queue, {}, {"x-message-ttl": Int64(6)})
        == f"{ttl} {where} the value '6' of type 'long' but current is none"
    )
    assert (
        refusal(same_queue, {"x-message-ttl": 6}, {})
        == f"{ttl} {where} none but current is the value '6' of type 'signedint'"
    )
    assert (
        refusal(same_queue, {}, {"x-queue-type": "quorum"})
        == f"inequivalent arg 'x-queue-type' {where} the value 'quorum' of type 'longstr' but current is none"
    )
    assert (
        refusal(same_queue, {}, {}, durable=(True, False))
        == f"inequivalent arg 'durable' {where} 'false' but current is 'true'"
    )
    assert refusal(same_queue, {}, {}, auto_delete=(False, True)).startswith("inequivalent arg 'auto_delete'")


def test_a_number_is_no_boolean_when_declared_again() -> None:
    with pytest.raises(AmqpError, match="x-single-active-consumer"):
        same_queue({"x-single-active-consumer": True}, {"x-single-active-consumer": 1})


def same_exchange(current: FieldTable, received: FieldTable, **pairs: tuple[Any, Any]) -> None:
    flags: dict[str, Any] = {
        "exchange_type": ("topic", "topic"),
        "durable": (True, True),
        "auto_delete": (False, False),
        "internal": (False, False),
        **pairs,
    }
    check_same_exchange(to_table(current), received, "e", "/", **flags)


def test_the_same_exchange_may_be_declared_again_and_no_other() -> None:
    same_exchange({"alternate-exchange": "a", "mine": 1}, {"alternate-exchange": "a"})
    text = refusal(same_exchange, {}, {}, exchange_type=("topic", "direct"))
    assert text == "inequivalent arg 'type' for exchange 'e' in vhost '/': received 'direct' but current is 'topic'"
    for flag in ("durable", "auto_delete", "internal"):
        assert f"inequivalent arg '{flag}'" in refusal(same_exchange, {}, {}, **{flag: (True, False)})
    assert "inequivalent arg 'alternate-exchange'" in refusal(same_exchange, {}, {"alternate-exchange": "a"})
    assert "inequivalent arg 'x-delayed-type'" in refusal(
        same_exchange, {"x-delayed-type": "topic"}, {"x-delayed-type": "direct"}
    )


# ---- tables --------------------------------------------------------------------------------

TABLES: st.SearchStrategy[FieldTable] = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6),
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
        | st.binary(max_size=6).map(ByteArray)
        | st.integers(0, 253_402_300_799).map(Timestamp)
        | st.decimals(-1000, 1000, allow_nan=False, places=2),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.just("in"), inner, max_size=1),
        max_leaves=6,
    ),
    max_size=4,
)


@given(TABLES)
def test_arguments_survive_the_metadata_store(arguments: FieldTable) -> None:
    wire = decode_table(encode_table(arguments))[0]
    stored = Table.parse(to_table(wire).text)
    assert from_table(stored) == wire
    assert {
        name: type(value) for name, value in from_table(stored).items() if isinstance(value, Timestamp | ByteArray)
    } == {name: type(value) for name, value in wire.items() if isinstance(value, Timestamp | ByteArray)}


def test_arguments_from_the_store_are_read_like_those_from_the_wire() -> None:
    declared: FieldTable = {"x-message-ttl": Int64(5), "x-overflow": "drop-head", "x-vendor": Float32(0.5)}
    first = queue(declared)
    again = parse_queue_arguments(
        Table.parse(first.table.text), "q", "/", durable=True, exclusive=False, auto_delete=False
    )
    assert again == first
    moment = parse_binding_arguments(Table({"x-from": datetime(2026, 1, 1, tzinfo=UTC)}), "e", "/", "topic")
    assert moment.start == StreamOffset(Start.TIME_MS, 1_767_225_600_000)


def test_what_the_store_cannot_keep_is_refused_as_the_peers_mistake() -> None:
    for arguments in ({"\udcff": 1}, {"in": {"\udcff": 1}}, {"t": Timestamp(2**63)}):
        with pytest.raises(AmqpError) as caught:
            to_table(arguments)
        assert caught.value.code == 502
    assert from_table(to_table({"d": Decimal("1.50")})) == {"d": Decimal("1.50")}
