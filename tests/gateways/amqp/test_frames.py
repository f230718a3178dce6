"""The frame cutter and the encoders: equal to pamqp and to a plain reader, however the octets are cut."""

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pamqp import base, body, commands, frame, header

from headrace.gateways.amqp.errors import ReplyCode
from headrace.gateways.amqp.frames import (
    BODY_BYTES_MAX,
    HEARTBEAT_FRAME,
    PROTOCOL_HEADER,
    Acks,
    FrameCutter,
    Heartbeat,
    MethodFrame,
    PublishRun,
    Violation,
    encode_ack,
    encode_deliver_run,
    encode_get_ok,
    encode_method,
    encode_nack,
    encode_return,
    match_protocol_header,
)
from headrace.gateways.amqp.methods import decode_publish, encode_payload, make
from headrace.gateways.amqp.properties import NO_PROPERTIES, Properties, encode

# The fuzz targets run as scripts, so they cannot live under a package of their own.
from ...fuzz.amqp_frames import check as check_frames  # noqa: TID252
from ...fuzz.amqp_frames import cut, flat  # noqa: TID252
from ...fuzz.amqp_properties import check as check_properties  # noqa: TID252

PERSISTENT = encode(Properties(delivery_mode=2))


def cutter(frame_max: int = 4096, channel_max: int = 100, body_bytes_max: int = 10_000) -> FrameCutter:
    return FrameCutter(frame_max=frame_max, channel_max=channel_max, body_bytes_max=body_bytes_max)


def framed(kind: int, channel: int, payload: bytes) -> bytes:
    return struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce"


def publish_payload(key: str = "key", exchange: str = "ex") -> bytes:
    return encode_payload(make(commands.Basic.Publish, exchange=exchange, routing_key=key))


def content_header(size: int, props: bytes = PERSISTENT, class_id: int = 60, weight: int = 0) -> bytes:
    return struct.pack(">HHQ", class_id, weight, size) + props


def message(channel: int, value: bytes, props: bytes = PERSISTENT, key: str = "key", parts: int = 1) -> list[bytes]:
    """The frames of one published message, its body in so many parts."""
    frames = [framed(1, channel, publish_payload(key)), framed(2, channel, content_header(len(value), props))]
    size = max(1, -(-len(value) // parts))
    return frames + [framed(3, channel, value[start : start + size]) for start in range(0, len(value), size)]


def method(channel: int, kind: type[base.Frame], **values: object) -> bytes:
    return encode_method(channel, make(kind, **values))


def violation(events: Sequence[object]) -> tuple[int, int, bool, int, int]:
    """Channel, code, hard, class and method of the violation that ends the list."""
    last = events[-1]
    assert isinstance(last, Violation)
    return last.channel, int(last.error.code), last.error.hard, last.error.class_id, last.error.method_id


# ---- what a plain reader with pamqp would say happened -------------------------------------------------------------


def read_plainly(octets: bytes) -> list[tuple[object, ...]]:
    """Lawful octets only: no errors, no limits, one frame after the other, contents put together per channel."""
    happened: list[tuple[object, ...]] = []
    open_contents: dict[int, tuple[bytes, bytes, int, bytes]] = {}
    while octets:
        used, channel, found = frame.unmarshal(octets)
        payload, octets = octets[7 : used - 1], octets[used:]
        if isinstance(found, commands.Basic.Publish):
            open_contents[channel] = (payload, b"", 0, b"")
        elif isinstance(found, commands.Basic.Ack):
            happened.append(("ack", channel, found.delivery_tag, found.multiple))
        elif isinstance(found, header.ContentHeader):
            open_contents[channel] = (open_contents[channel][0], payload[12:], found.body_size, b"")
        elif isinstance(found, body.ContentBody):
            start, props, size, parts = open_contents[channel]
            open_contents[channel] = (start, props, size, parts + found.value)
        elif isinstance(found, base.Frame):
            happened.append(("method", channel, found.name, payload))
        else:
            happened.append(("heartbeat",))
        content = open_contents.get(channel)
        if content and content[1] and content[2] == len(content[3]):
            happened.append(("publish", channel, content[0], content[1], content[3]))
            del open_contents[channel]
    return happened


PROPERTY_BYTES = st.sampled_from(
    [NO_PROPERTIES, PERSISTENT, encode(Properties(message_id="m")), encode(Properties(content_type="é", priority=3))]
)
BODIES = st.binary(max_size=40) | st.integers(0, 3).map(lambda size: b"z" * size)
MESSAGES = st.builds(
    message, st.integers(1, 3), BODIES, PROPERTY_BYTES, key=st.sampled_from(["a", "b"]), parts=st.integers(1, 3)
)
SINGLES = st.one_of(
    st.builds(encode_ack, st.integers(1, 3), st.integers(0, 2**63 - 1), st.booleans()),
    st.just(HEARTBEAT_FRAME),
    st.just(method(0, commands.Connection.TuneOk, channel_max=5)),
    st.builds(lambda channel: method(channel, commands.Queue.Declare, queue="q"), st.integers(1, 3)),
    st.builds(lambda channel: method(channel, commands.Tx.Select), st.integers(1, 3)),
).map(lambda octets: [octets])


@st.composite
def streams(draw: st.DrawFn) -> bytes:
    """Lawful frames: each channel in order, the channels interleaved frame by frame."""
    waiting: dict[int, list[bytes]] = {}
    for frames in draw(st.lists(MESSAGES | SINGLES, max_size=12)):
        waiting.setdefault(struct.unpack_from(">H", frames[0], 1)[0], []).extend(frames)
    out = []
    while waiting:
        channel = draw(st.sampled_from(sorted(waiting)))
        count = draw(st.integers(1, len(waiting[channel])))
        out += waiting[channel][:count]
        del waiting[channel][:count]
        if not waiting[channel]:
            del waiting[channel]
    return b"".join(out)


@given(streams())
def test_the_cutter_sees_what_a_plain_reader_sees(octets: bytes) -> None:
    assert flat(cutter().receive(octets)) == read_plainly(octets)


@settings(max_examples=30)
@given(streams())
def test_cutting_the_octets_at_any_place_changes_nothing(octets: bytes) -> None:
    expected = flat(cutter().receive(octets))
    for place in range(len(octets)):
        assert cut(cutter(), octets, place) == expected
    assert cut(cutter(), octets, *range(len(octets))) == expected


@settings(max_examples=60)
@given(streams(), st.data())
def test_damaged_octets_give_the_same_events_however_they_are_cut(octets: bytes, data: st.DataObject) -> None:
    damaged = bytearray(octets or b"\x00")
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    expected = cut(cutter(), bytes(damaged))
    for place in range(0, len(damaged), 7):
        assert cut(cutter(), bytes(damaged), place) == expected
    assert cut(cutter(), bytes(damaged), *range(len(damaged))) == expected


@given(st.binary(max_size=200))
def test_garbage_never_raises(data: bytes) -> None:
    check_frames(data)
    check_properties(data)


# ---- runs ----------------------------------------------------------------------------------------------------------


def test_publishes_of_one_method_payload_are_one_run() -> None:
    octets = b"".join([*message(1, b"one"), *message(1, b"two!"), *message(1, b"")])
    payload = publish_payload()
    assert cutter().receive(octets) == [PublishRun(1, payload, [PERSISTENT] * 3, [b"one", b"two!", b""])]


def test_another_key_another_channel_or_a_method_between_ends_a_run() -> None:
    octets = b"".join(
        [
            *message(1, b"1"),
            *message(1, b"2", key="other"),
            *message(1, b"3"),
            *message(2, b"4"),
            method(2, commands.Tx.Select),
            *message(2, b"5"),
        ]
    )
    runs = [event.bodies for event in cutter().receive(octets) if isinstance(event, PublishRun)]
    assert runs == [[b"1"], [b"2"], [b"3"], [b"4"], [b"5"]]


def test_acks_of_one_channel_are_one_event() -> None:
    octets = encode_ack(1, 1, False) + encode_ack(1, 2**64 - 1, True) + encode_ack(2, 3, False)
    assert cutter().receive(octets) == [Acks(1, [(1, False), (2**64 - 1, True)]), Acks(2, [(3, False)])]


def test_only_the_lowest_bit_of_an_ack_says_multiple() -> None:
    octets = encode_ack(1, 1, False)[:-2]
    events = cutter().receive(octets + b"\x02\xce" + octets + b"\x03\xce")
    assert events == [Acks(1, [(1, False), (1, True)])]


@pytest.mark.parametrize("count", [1, 2, 15, 16, 17, 18, 19, 40, 300])
@pytest.mark.parametrize("unique", [False, True])
def test_messages_of_equal_size_come_out_whole_and_in_order(count: int, unique: bool) -> None:
    bodies = [b"%08d" % place for place in range(count)]
    props = [encode(Properties(message_id=f"{place * unique:06}")) for place in range(count)]
    octets = b"".join(b"".join(message(1, value, prop)) for value, prop in zip(bodies, props, strict=True))
    assert cutter(frame_max=131_072).receive(octets) == [PublishRun(1, publish_payload(), props, bodies)]


@pytest.mark.parametrize("unique", [False, True])
@given(place=st.integers(0, 59), octet=st.integers(0, 10_000), value=st.integers(0, 255))
def test_one_odd_message_among_equal_ones_is_seen(unique: bool, place: int, octet: int, value: int) -> None:
    messages = [
        b"".join(message(1, b"%04d" % number, encode(Properties(message_id=f"{number * unique:03}"))))
        for number in range(60)
    ]
    odd = bytearray(messages[place])
    odd[octet % len(odd)] = value
    messages[place] = bytes(odd)
    octets = b"".join(messages)
    piecewise = cutter()
    expected = [happening for piece in octets for happening in flat(piecewise.receive(bytes((piece,))))]
    assert flat(cutter().receive(octets)) == expected


def test_sizes_that_change_after_a_lucky_guess_are_read_one_by_one() -> None:
    # Equal sizes at once and at the sixteenth place, other sizes of the same sum between.
    pattern = [10, 10, 10, 5, 15] * 12
    bodies = [bytes((65 + place % 26,)) * size for place, size in enumerate(pattern)]
    octets = b"".join(b"".join(message(1, value)) for value in bodies)
    (run,) = cutter().receive(octets)
    assert isinstance(run, PublishRun)
    assert run.bodies == bodies


# ---- contents ------------------------------------------------------------------------------------------------------


def test_a_body_comes_in_as_many_frames_as_it_likes_between_those_of_other_channels() -> None:
    first, second = message(1, b"a" * 1000, parts=10), message(2, b"b" * 999, parts=7)
    octets = b"".join(value for pair in zip(first, [*second, *[HEARTBEAT_FRAME] * 9], strict=False) for value in pair)
    runs = [event for event in cutter().receive(octets) if isinstance(event, PublishRun)]
    assert [(run.channel, run.bodies) for run in runs] == [(2, [b"b" * 999]), (1, [b"a" * 1000])]


def test_an_empty_body_frame_is_lawful_while_more_is_to_come() -> None:
    frames = message(1, b"body")
    events = cutter().receive(b"".join([*frames[:2], framed(3, 1, b""), *frames[2:]]))
    assert flat(events)[0][-1] == b"body"


def test_a_body_of_the_greatest_size_passes_and_one_octet_more_closes_its_channel() -> None:
    passed = cutter(body_bytes_max=100)
    assert len(flat(passed.receive(b"".join(message(1, b"x" * 100))))) == 1
    for parts in (1, 5):
        refusing = cutter(body_bytes_max=100)
        octets = b"".join([*message(1, b"ok"), *message(1, b"x" * 101, parts=parts), *message(2, b"other")])
        events = refusing.receive(octets)
        assert flat(events)[0][-1] == b"ok"
        assert violation(events[:2]) == (1, 406, False, 60, 40)
        assert "message size 101 is larger than configured max size 100" in str(events[1])
        assert flat(events[2:]) == [("publish", 2, publish_payload(), PERSISTENT, b"other")]
        # The channel is closing: whatever was under way is void, and close-ok frees the number.
        assert refusing.receive(b"".join(message(1, b"late")) + encode_ack(1, 1, False)) == []
        ok, opened = refusing.receive(method(1, commands.Channel.CloseOk) + method(1, commands.Channel.Open))
        assert isinstance(ok, MethodFrame)
        assert isinstance(ok.method, commands.Channel.CloseOk)
        assert isinstance(opened, MethodFrame)
        assert len(flat(refusing.receive(b"".join(message(1, b"again"))))) == 1


def test_an_announced_size_costs_nothing_until_the_octets_come() -> None:
    waiting = cutter(frame_max=131_072, body_bytes_max=BODY_BYTES_MAX)
    events = waiting.receive(framed(1, 1, publish_payload()) + framed(2, 1, content_header(BODY_BYTES_MAX)))
    assert events == []
    assert waiting.buffered_bytes == 0
    assert waiting.receive(framed(3, 1, b"x" * 1000) + struct.pack(">BHI", 3, 1, 131_072)) == []
    assert waiting.buffered_bytes == 1007


def test_a_large_body_in_many_reads_is_put_together() -> None:
    value = bytes(range(256)) * 4096 * 2
    reading = cutter(frame_max=131_072, body_bytes_max=len(value))
    octets = b"".join(message(1, value, parts=17))
    events = []
    for start in range(0, len(octets), 10_000):
        events += reading.receive(octets[start : start + 10_000])
    (run,) = events
    assert isinstance(run, PublishRun)
    assert run.bodies == [value]
    assert reading.buffered_bytes == 0


def test_many_tiny_reads_of_one_frame_are_held_as_one() -> None:
    reading = cutter()
    octets = b"".join(message(1, b"x" * 3000))
    for place in range(0, len(octets) - 1, 2):
        assert reading.receive(octets[place : place + 2]) == [] or place + 2 >= len(octets)
    assert reading.buffered_bytes <= len(octets)


# ---- violations ----------------------------------------------------------------------------------------------------

LAWFUL = b"".join(message(1, b"before"))
PUBLISH_FRAME = framed(1, 1, publish_payload())


@pytest.mark.parametrize(
    ("octets", "code", "laid_to"),
    [
        pytest.param(framed(2, 1, content_header(0)), 505, (0, 0), id="header without a method"),
        pytest.param(framed(3, 1, b"x"), 505, (0, 0), id="body without a method"),
        pytest.param(PUBLISH_FRAME + method(1, commands.Tx.Select), 505, (60, 40), id="method instead of a header"),
        pytest.param(PUBLISH_FRAME * 2, 505, (60, 40), id="publish instead of a header"),
        pytest.param(PUBLISH_FRAME + encode_ack(1, 1, False), 505, (60, 40), id="ack instead of a header"),
        pytest.param(PUBLISH_FRAME + framed(3, 1, b"x"), 505, (60, 40), id="body instead of a header"),
        pytest.param(PUBLISH_FRAME + framed(2, 1, content_header(1)) * 2, 505, (60, 40), id="header instead of a body"),
        pytest.param(
            PUBLISH_FRAME + framed(2, 1, content_header(1)) + encode_ack(1, 1, False),
            505,
            (60, 40),
            id="ack instead of a body",
        ),
        pytest.param(PUBLISH_FRAME + framed(2, 1, content_header(0, class_id=50)), 505, (60, 40), id="wrong class"),
        pytest.param(PUBLISH_FRAME + framed(2, 1, content_header(0, weight=1)), 505, (60, 40), id="weight"),
        pytest.param(PUBLISH_FRAME + framed(2, 1, b"\x00\x3c"), 501, (60, 40), id="header cut short"),
        pytest.param(
            PUBLISH_FRAME + framed(2, 1, content_header(3)) + framed(3, 1, b"four"), 501, (60, 40), id="body too long"
        ),
        pytest.param(framed(8, 1, b""), 505, (0, 0), id="heartbeat on a channel"),
        pytest.param(framed(8, 0, b"x"), 501, (0, 0), id="heartbeat with octets"),
        pytest.param(framed(2, 0, content_header(0)), 505, (0, 0), id="header on channel 0"),
        pytest.param(framed(3, 0, b"x"), 505, (0, 0), id="body on channel 0"),
        pytest.param(method(0, commands.Tx.Select), 504, (90, 10), id="tx.select on channel 0"),
        pytest.param(framed(1, 0, publish_payload()), 504, (60, 40), id="publish on channel 0"),
        pytest.param(encode_ack(0, 1, False), 504, (60, 80), id="ack on channel 0"),
        pytest.param(method(1, commands.Connection.Close), 503, (10, 50), id="connection.close on a channel"),
        pytest.param(method(1, commands.Basic.Deliver), 503, (60, 60), id="deliver from a client"),
        pytest.param(method(1, commands.Queue.DeclareOk), 503, (50, 11), id="declare-ok from a client"),
        pytest.param(framed(1, 1, b"\x00\x32\xff\xff"), 540, (50, 65535), id="unknown method"),
        pytest.param(framed(1, 1, b"\x00\x32"), 501, (0, 0), id="half a method id"),
        pytest.param(framed(1, 1, b""), 501, (0, 0), id="empty method frame"),
        pytest.param(framed(1, 1, b"\x00\x3c\x00\x50\x00"), 501, (60, 80), id="ack cut short"),
        pytest.param(method(101, commands.Channel.Open), 530, (0, 0), id="channel above channel_max"),
        pytest.param(framed(1, 101, publish_payload()), 530, (0, 0), id="publish above channel_max"),
        pytest.param(framed(4, 1, b""), 501, (0, 0), id="unknown frame type"),
        pytest.param(framed(1, 1, publish_payload())[:-1] + b"\xcd", 501, (0, 0), id="wrong frame end"),
        pytest.param(struct.pack(">BHI", 1, 1, 4097), 501, (0, 0), id="payload one octet above frame_max"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", 501, (0, 0), id="http"),
    ],
)
def test_a_violation_closes_the_connection_and_loses_nothing_before_it(
    octets: bytes, code: int, laid_to: tuple[int, int]
) -> None:
    reading = cutter()
    events = reading.receive(LAWFUL + HEARTBEAT_FRAME + octets + LAWFUL)
    assert flat(events)[:2] == [("publish", 1, publish_payload(), PERSISTENT, b"before"), ("heartbeat",)]
    assert len(events) == 3
    _, found, hard, *ids = violation(events)
    assert (found, hard, tuple(ids)) == (code, True, laid_to)
    assert reading.receive(LAWFUL) == []


def test_nothing_but_close_and_close_ok_comes_out_of_a_closing_connection() -> None:
    reading = cutter()
    octets = framed(3, 1, b"x") + LAWFUL + HEARTBEAT_FRAME + method(0, commands.Connection.CloseOk)
    broken, ok = reading.receive(octets)
    assert isinstance(broken, Violation)
    assert isinstance(ok, MethodFrame)
    assert isinstance(ok.method, commands.Connection.CloseOk)
    assert not reading.lost_sync

    ours = cutter()
    ours.receive(PUBLISH_FRAME)
    ours.close_connection()
    (theirs,) = ours.receive(encode_ack(1, 1, False) + method(0, commands.Connection.Close, reply_text="bye"))
    assert isinstance(theirs, MethodFrame)
    assert isinstance(theirs.method, commands.Connection.Close)


def test_a_second_violation_of_a_closing_connection_is_silent() -> None:
    reading = cutter()
    reading.close_connection()
    assert reading.receive(framed(3, 1, b"x") + framed(1, 0, b"\x00\x0a\x00\x32")) == []
    assert reading.receive(framed(9, 0, b"")) == []
    assert reading.lost_sync


def test_nothing_is_read_after_sync_was_lost() -> None:
    reading = cutter()
    reading.receive(LAWFUL[:-1] + b"\x00")
    assert reading.lost_sync
    assert reading.receive(method(0, commands.Connection.CloseOk)) == []
    assert reading.buffered_bytes == 0


def test_a_closing_channel_lets_close_and_close_ok_through_even_amid_a_content() -> None:
    reading = cutter()
    assert reading.receive(PUBLISH_FRAME + framed(2, 1, content_header(10)) + framed(3, 1, b"half")) == []
    reading.close_channel(1)
    assert reading.buffered_bytes == 0
    events = reading.receive(
        framed(3, 1, b"-done") + method(1, commands.Channel.Close) + LAWFUL + framed(9 - 1, 1, b"")
    )
    assert [type(event.method) for event in events if isinstance(event, MethodFrame)] == [commands.Channel.Close]
    assert len(events) == 1
    events = reading.receive(method(1, commands.Channel.CloseOk) + method(1, commands.Channel.Open) + LAWFUL)
    assert [name for name, *_ in flat(events)] == ["method", "method", "publish"]


def test_no_channel_may_be_used_before_the_connection_is_open() -> None:
    for octets in (method(1, commands.Channel.Open), LAWFUL, encode_ack(1, 1, False)):
        assert violation(FrameCutter().receive(octets)) == (1, 505, True, 0, 0)
    assert FrameCutter().receive(HEARTBEAT_FRAME) == [Heartbeat()]


def test_channel_max_is_the_last_lawful_channel() -> None:
    (event,) = cutter(channel_max=100).receive(method(100, commands.Channel.Open))
    assert isinstance(event, MethodFrame)
    assert event.channel == 100


def test_a_payload_as_large_as_frame_max_passes() -> None:
    # One octet more is refused in the table of violations above.
    (run,) = cutter(frame_max=4096).receive(b"".join(message(1, b"x" * 4096)))
    assert isinstance(run, PublishRun)
    assert run.bodies == [b"x" * 4096]


def test_a_body_in_one_frame_above_frame_max_is_refused_before_it_comes() -> None:
    reading = cutter(frame_max=4096)
    frames = message(1, b"x" * 4097)
    assert violation(reading.receive(b"".join(frames[:2]) + frames[2][:7]))[1] == 501


@pytest.mark.parametrize(
    ("data", "answer"),
    [
        (b"", None),
        (b"AMQP", None),
        (PROTOCOL_HEADER[:-1], None),
        (PROTOCOL_HEADER, True),
        (PROTOCOL_HEADER + b"more", True),
        (b"AMQP\x00\x01\x00\x00", False),
        (b"AMQP\x01\x01\x00\x09", False),
        (b"GET", False),
        (b"\x16\x03\x01", False),
    ],
)
def test_only_amqp_0_9_1_may_begin(data: bytes, answer: bool | None) -> None:
    assert match_protocol_header(data) is answer


# ---- outgoing ------------------------------------------------------------------------------------------------------


def contents(channel: int, properties: Properties, value: bytes, frame_max: int) -> bytes:
    """Header and body frames, by pamqp."""
    head = header.ContentHeader(body_size=len(value))
    head.properties = commands.Basic.Properties(
        content_type=properties.content_type, message_id=properties.message_id, delivery_mode=properties.delivery_mode
    )
    size = frame_max - 8
    parts = [value[start : start + size] for start in range(0, len(value), size)]
    return frame.marshal(head, channel) + b"".join(frame.marshal(body.ContentBody(part), channel) for part in parts)


PAMQP_NAMES = st.text(st.sampled_from("abz09-_.:@#,/+ "), max_size=20)
PAMQP_PROPERTIES = st.builds(
    Properties,
    content_type=st.none() | st.text(min_size=1, max_size=5),
    delivery_mode=st.sampled_from([None, 1, 2]),
    message_id=st.none() | st.text(min_size=1, max_size=5),
)
DELIVERIES = st.lists(
    st.tuples(st.booleans(), PAMQP_NAMES, PAMQP_NAMES, PAMQP_PROPERTIES, st.binary(max_size=50)), max_size=8
)


@given(
    channel=st.integers(1, 65535),
    tag=PAMQP_NAMES,
    first=st.integers(1, 2**62),
    deliveries=DELIVERIES | st.builds(lambda rows, times: rows * times, DELIVERIES, st.integers(4, 6)),
    frame_max=st.sampled_from([20, 50, 4096]),
)
def test_deliveries_are_what_pamqp_would_write(
    channel: int,
    tag: str,
    first: int,
    deliveries: list[tuple[bool, str, str, Properties, bytes]],
    frame_max: int,
) -> None:
    ours = encode_deliver_run(
        channel,
        tag.encode(),
        first,
        [row[0] for row in deliveries],
        [row[1].encode() for row in deliveries],
        [row[2].encode() for row in deliveries],
        [encode(row[3]) for row in deliveries],
        [row[4] for row in deliveries],
        frame_max,
    )
    theirs = b""
    for place, (redelivered, exchange, key, properties, value) in enumerate(deliveries):
        deliver = commands.Basic.Deliver(tag, first + place, redelivered, exchange, key)
        theirs += frame.marshal(deliver, channel) + contents(channel, properties, value, frame_max)
    assert ours == theirs


@given(
    first=st.integers(0, 2**64 - 200),
    redelivered=st.booleans(),
    bodies=st.integers(0, 30).flatmap(
        lambda size: st.lists(st.binary(min_size=size, max_size=size), min_size=1, max_size=9)
    ),
)
def test_alike_deliveries_equal_the_same_ones_sent_singly(first: int, redelivered: bool, bodies: list[bytes]) -> None:
    props = [encode(Properties(message_id=f"{place:04}")) for place in range(len(bodies))]

    def run(begin: int, end: int) -> bytes:
        count = end - begin
        return encode_deliver_run(
            7,
            b"tag",
            first + begin,
            [redelivered] * count,
            [b"ex"] * count,
            [b"key"] * count,
            props[begin:end],
            bodies[begin:end],
            30,
        )

    assert run(0, len(bodies)) == b"".join(run(place, place + 1) for place in range(len(bodies)))


@given(st.integers(1, 65535), st.integers(0, 2**63 - 1), st.booleans(), st.booleans())
def test_acks_and_nacks_are_what_pamqp_would_write(channel: int, tag: int, multiple: bool, requeue: bool) -> None:
    assert encode_ack(channel, tag, multiple) == frame.marshal(commands.Basic.Ack(tag, multiple), channel)
    nack = commands.Basic.Nack(tag, multiple, requeue)
    assert encode_nack(channel, tag, multiple, requeue) == frame.marshal(nack, channel)


@given(PAMQP_NAMES, PAMQP_NAMES, PAMQP_PROPERTIES, st.binary(max_size=60), st.booleans(), st.integers(0, 2**32 - 1))
def test_get_ok_and_return_are_what_pamqp_would_write(
    exchange: str, key: str, properties: Properties, value: bytes, redelivered: bool, count: int
) -> None:
    ours = encode_get_ok(3, 9, redelivered, exchange.encode(), key.encode(), count, encode(properties), value, 30)
    got = commands.Basic.GetOk(9, redelivered, exchange, key, count)
    assert ours == frame.marshal(got, 3) + contents(3, properties, value, 30)
    ours = encode_return(
        3, ReplyCode.NO_ROUTE, "NO_ROUTE", exchange.encode(), key.encode(), encode(properties), value, 30
    )
    returned = commands.Basic.Return(312, "NO_ROUTE", exchange, key)
    assert ours == frame.marshal(returned, 3) + contents(3, properties, value, 30)


def test_methods_and_heartbeats_are_framed_as_pamqp_does() -> None:
    close = commands.Connection.Close(200, "bye", 0, 0)
    assert encode_method(0, close) == frame.marshal(close, 0)
    assert HEARTBEAT_FRAME == b"\x08\x00\x00\x00\x00\x00\x00\xce"


@given(st.text(max_size=40), st.text(max_size=40), st.booleans())
def test_the_method_payload_of_a_run_is_that_of_the_publish(exchange: str, key: str, mandatory: bool) -> None:
    sent = make(commands.Basic.Publish, exchange=exchange, routing_key=key, mandatory=mandatory)
    octets = encode_method(5, sent) + framed(2, 5, content_header(0))
    (run,) = cutter().receive(octets)
    assert isinstance(run, PublishRun)
    publish = decode_publish(run.method_payload)
    assert (publish.exchange, publish.routing_key, publish.mandatory) == (exchange, key, mandatory)


def test_a_name_above_255_octets_cannot_be_delivered() -> None:
    with pytest.raises(ValueError):
        encode_deliver_run(1, b"t", 1, [False], [b"e" * 256], [b"k"], [NO_PROPERTIES], [b""], 4096)
