"""Methods: every one of them both ways, octet for octet as pamqp writes it, and strict where pamqp is not."""

import struct

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pamqp import base, commands, frame

from headrace.gateways.amqp.errors import AmqpError, ReplyCode
from headrace.gateways.amqp.fields import FieldTable, Int16, decode_table
from headrace.gateways.amqp.methods import (
    FROM_CLIENT,
    Publish,
    decode_method,
    decode_publish,
    encode_payload,
    ids,
    make,
    name_of,
    octets,
)

KINDS: list[type[base.Frame]] = list(commands.INDEX_MAPPING.values())
every_method = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)

TABLES: st.SearchStrategy[FieldTable] = st.dictionaries(
    st.text(max_size=8), st.booleans() | st.text(max_size=8) | st.integers(0, 100).map(Int16), max_size=3
)
VALUES: dict[str, st.SearchStrategy[object]] = {
    "bit": st.booleans(),
    "octet": st.integers(0, 2**8 - 1),
    "short": st.integers(0, 2**16 - 1),
    "long": st.integers(0, 2**32 - 1),
    "longlong": st.integers(0, 2**64 - 1),
    "shortstr": st.text(max_size=60),
    "longstr": st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape")),
    "table": TABLES,
}
# What pamqp's own checks let pass, by type and, where they look at the argument, by name.
PAMQP_VALUES: dict[str, st.SearchStrategy[object]] = {
    **VALUES,
    "longlong": st.integers(0, 2**63 - 1),
    "shortstr": st.text(st.sampled_from("abz09-_.:@#,/+ "), max_size=100),
    "longstr": st.text(max_size=60),
    "table": st.dictionaries(st.text(max_size=8), st.booleans() | st.text(max_size=8), max_size=3).map(
        lambda table: dict(sorted(table.items()))
    ),
    "ticket": st.just(0),
    "capabilities": st.just(""),
    "insist": st.just(False),
    "known_hosts": st.just(""),
    "out_of_band": st.just("0"),
    "channel_id": st.just("0"),
    "cluster_id": st.just(""),
    "no_local": st.booleans(),
    "immediate": st.just(False),
    "internal": st.booleans(),
}


def drawn(data: st.DataObject, kind: type[base.Frame], values: dict[str, st.SearchStrategy[object]]) -> base.Frame:
    return make(kind, **{name: data.draw(values.get(name, values[kind.amqp_type(name)])) for name in kind.attributes()})


@every_method
@settings(max_examples=20)  # of each of 64 methods
@given(data=st.data())
def test_a_method_comes_back_as_it_went(kind: type[base.Frame], data: st.DataObject) -> None:
    method = drawn(data, kind, VALUES)
    again = decode_method(encode_payload(method))
    assert type(again) is kind
    assert dict(again) == dict(method)


@every_method
@settings(max_examples=20)  # of each of 64 methods
@given(data=st.data())
def test_pamqp_writes_and_reads_the_same_octets(kind: type[base.Frame], data: st.DataObject) -> None:
    method = drawn(data, kind, PAMQP_VALUES)
    payload = encode_payload(method)
    theirs = frame.marshal(method, 7)
    assert theirs == struct.pack(">BHI", 1, 7, len(payload)) + payload + b"\xce"
    if kind is not commands.Basic.RecoverAsync:  # pamqp's constructor warns, and warnings are errors here
        read_by_them = frame.unmarshal(theirs)[2]
        assert isinstance(read_by_them, base.Frame)
        assert dict(read_by_them) == dict(decode_method(payload))


@every_method
@settings(max_examples=20)  # of each of 64 methods
@given(data=st.data())
def test_arguments_cut_anywhere_or_continued_are_a_frame_error(kind: type[base.Frame], data: st.DataObject) -> None:
    payload = encode_payload(drawn(data, kind, VALUES))
    for damaged in [*(payload[:cut] for cut in range(len(payload))), payload + b"\x00"]:
        with pytest.raises(AmqpError) as caught:
            decode_method(damaged)
        assert caught.value.code == ReplyCode.FRAME_ERROR
        if len(damaged) >= 4:
            assert (caught.value.class_id, caught.value.method_id) == ids(kind)


@given(st.sampled_from(KINDS), st.binary(max_size=80))
def test_garbage_raises_nothing_but_an_amqp_error(kind: type[base.Frame], data: bytes) -> None:
    payload = struct.pack(">I", kind.index) + data
    for garbage in (payload, data):
        try:
            method = decode_method(garbage)
        except AmqpError as error:
            assert error.hard
        else:
            assert decode_method(encode_payload(method)) is not None


@pytest.mark.parametrize("index", [0x0032FFFF, 0x00000000, 0xFFFF0001, 0x001E000A])
def test_an_unknown_method_is_not_implemented(index: int) -> None:
    with pytest.raises(AmqpError, match="unknown method") as caught:
        decode_method(struct.pack(">I", index))
    assert (caught.value.code, caught.value.hard) == (540, True)
    assert (caught.value.class_id, caught.value.method_id) == (index >> 16, index & 0xFFFF)


def test_a_name_that_is_not_utf8_is_a_frame_error() -> None:
    payload = bytearray(encode_payload(make(commands.Queue.Declare, queue="q")))
    payload[payload.index(b"q")] = 0xFF
    with pytest.raises(AmqpError, match=r"malformed UTF-8 in the short string 'queue' of queue.declare") as caught:
        decode_method(bytes(payload))
    assert (caught.value.code, caught.value.class_id, caught.value.method_id) == (501, 50, 10)


def test_a_malformed_table_is_laid_to_its_method() -> None:
    payload = encode_payload(make(commands.Queue.Declare, queue="q", arguments={"a": True}))
    with pytest.raises(AmqpError, match="unknown type") as caught:
        decode_method(payload.replace(b"\x01at", b"\x01aZ"))
    assert (caught.value.code, caught.value.class_id, caught.value.method_id) == (502, 50, 10)


def test_sasl_octets_pass_through_a_long_string() -> None:
    payload = encode_payload(make(commands.Connection.SecureOk, response="\x00guest\x00guest"))
    sent = payload[:8] + b"\x00gu\xff\xfet" + payload[14:]
    method = decode_method(sent)
    assert isinstance(method, commands.Connection.SecureOk)
    assert method.response is not None
    assert octets(method.response) == b"\x00gu\xff\xfet\x00guest"
    assert encode_payload(method) == sent


def test_a_delivery_tag_is_unsigned() -> None:
    method = decode_method(struct.pack(">HHQB", 60, 80, 2**64 - 1, 1))
    assert isinstance(method, commands.Basic.Ack)
    assert (method.delivery_tag, method.multiple) == (2**64 - 1, True)


def test_names_that_pamqp_refuses_are_taken_both_ways() -> None:
    ok = make(commands.Queue.DeclareOk, queue="заказы*%", message_count=1)
    assert dict(decode_method(encode_payload(ok))) == {
        "queue": "заказы*%",
        "message_count": 1,
        "consumer_count": 0,
    }
    assert encode_payload(make(commands.Channel.OpenOk)) == struct.pack(">HHI", 20, 11, 0)
    opened = decode_method(struct.pack(">HHB", 20, 10, 0))
    assert isinstance(opened, commands.Channel.Open)


@given(st.binary(max_size=255), st.binary(max_size=255), st.booleans(), st.booleans(), st.integers(0, 2**16 - 1))
def test_publish_keeps_the_octets_of_its_names(
    exchange: bytes, key: bytes, mandatory: bool, immediate: bool, ticket: int
) -> None:
    method = make(
        commands.Basic.Publish,
        ticket=ticket,
        exchange=exchange.decode("utf-8", "surrogateescape"),
        routing_key=key.decode("utf-8", "surrogateescape"),
        mandatory=mandatory,
        immediate=immediate,
    )
    payload = encode_payload(method)
    publish = decode_publish(payload)
    assert publish == Publish(method.exchange, method.routing_key, key, mandatory, immediate)
    assert octets(publish.exchange) == exchange
    assert dict(decode_method(payload)) == dict(method)


@example(b"\x00\x00\x01e\x01k\x00")
@example(b"\x00\x00\x01e\x01k\x00\x00")
@example(b"\x00\x00\x01e\x01k")
@given(st.binary(max_size=40))
def test_publish_and_the_general_path_refuse_the_same(data: bytes) -> None:
    payload = struct.pack(">HH", 60, 40) + data
    outcomes = []
    for read in (decode_method, decode_publish):
        try:
            read(payload)
        except AmqpError as error:
            outcomes.append(str(error))
        else:
            outcomes.append("read")
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize(
    "method",
    [
        make(commands.Basic.ConsumeOk, consumer_tag="c" * 256),
        make(commands.Basic.Ack, delivery_tag=-1),
        make(commands.Basic.Ack, delivery_tag=None),
        make(commands.Connection.Tune, channel_max=2**16),
        make(commands.Connection.Start, server_properties={"n": 2**64}),
        make(commands.Connection.Close, reply_text=None),
    ],
    ids=lambda method: str(method.name),
)
def test_an_argument_that_does_not_fit_is_our_value_error(method: base.Frame) -> None:
    with pytest.raises(ValueError, match=name_of(method)):
        encode_payload(method)


def test_255_octets_fit_a_short_string() -> None:
    method = decode_method(encode_payload(make(commands.Basic.ConsumeOk, consumer_tag="c" * 255)))
    assert dict(method) == {"consumer_tag": "c" * 255}


def test_make_knows_the_arguments() -> None:
    with pytest.raises(TypeError, match=r"queue.purge has no argument exchange"):
        make(commands.Queue.Purge, exchange="x")


def test_only_client_methods_come_from_a_client() -> None:
    assert commands.Basic.Publish.index in FROM_CLIENT
    for kind in (commands.Basic.Deliver, commands.Basic.Return, commands.Connection.Start, commands.Queue.DeclareOk):
        assert kind.index not in FROM_CLIENT


def test_arguments_of_a_method_are_bounded_like_every_table() -> None:
    wide = make(commands.Queue.Declare, arguments={"a": "y" * 65_536})
    with pytest.raises(AmqpError, match="at most 65536"):
        decode_method(encode_payload(wide))
    assert decode_table(encode_payload(wide), 8, bytes_max=None)[0] == {"a": "y" * 65_536}
