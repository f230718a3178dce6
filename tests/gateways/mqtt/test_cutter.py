"""The packet cutter: equal to the decoder of single packets, however the octets are cut, and fast by runs."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateways.mqtt.cutter import AckRun, Event, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.decoder import check_publish_flags, decode_connect, decode_packet, packet_type
from headrace.gateways.mqtt.encoder import encode_ack_run, encode_packet, encode_publish_run
from headrace.gateways.mqtt.packets import (
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Subscribe,
    Subscription,
)
from headrace.gateways.mqtt.properties import Properties, PublishScans, decode_blob
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version, malformed, protocol_error
from headrace.gateways.mqtt.topics import TopicNames

from .strategies import client_packets, connects, last_packets, publishes, server_packets

V3, V5 = Version.V3_1_1, Version.V5
VERSIONS = list(Version)
ACKS = [PacketType.PUBACK, PacketType.PUBREC, PacketType.PUBREL, PacketType.PUBCOMP]


def connected(version: Version = V5, **limits: int) -> PacketCutter:
    cutter = PacketCutter(**limits)  # type: ignore[arg-type]
    assert cutter.receive(encode_packet(Connect("c", version), version)) == [Connect("c", version)]
    return cutter


def refusal(error: MqttError) -> tuple[str, ReasonCode, str]:
    return "refused", error.code, error.statement


def flat(events: list[Event]) -> list[object]:
    """What happened, packet by packet: without where runs ended."""
    happened: list[object] = []
    for event in events:
        match event:
            case PublishRun():
                count = len(event.payloads)
                assert count == len(event.topics) == len(event.properties) > 0
                assert len(event.packet_ids) == (count if event.qos else 0)
                for index in range(count):
                    packet_id = event.packet_ids[index] if event.qos else 0
                    blob = event.properties[index]
                    row = (event.topics[index], event.payloads[index], blob, packet_id, event.first_byte)
                    happened.append(row)
            case AckRun(kind, packet_ids):
                assert packet_ids
                happened += [(kind, packet_id) for packet_id in packet_ids]
            case Violation(error):
                happened.append(refusal(error))
            case packet:
                happened.append(packet)
    return happened


def cut(cutter: PacketCutter, octets: bytes, *places: int) -> list[object]:
    """The octets given in pieces that end at these places."""
    happened: list[object] = []
    start = 0
    for place in [*sorted(places), len(octets)]:
        happened += flat(cutter.receive(octets[start:place]))
        start = max(start, place)
    return happened


def read_plainly(octets: bytes, alias_max: int = 0) -> list[object]:
    """One packet after the other by `decode_packet`, in the shape of `flat`: what the cutter must say."""
    happened: list[object] = []
    version: Version | None = None
    aliases: dict[int, bytes] = {}
    pos = 0
    try:
        while pos < len(octets):
            first_byte = octets[pos]
            _check_first_byte(first_byte, version)
            body_at, size = _length(octets, pos, version)
            body = octets[body_at : body_at + size]
            if len(body) < size:
                break
            pos = body_at + size
            if version is None:
                connect = decode_connect(body)
                version = connect.version
                happened.append(connect)
                continue
            packet = decode_packet(first_byte, body, version)
            if isinstance(packet, Publish):
                happened.append(_row(packet, first_byte, body, version, aliases, alias_max))
            elif isinstance(packet, Puback | Pubrec | Pubrel | Pubcomp) and packet == type(packet)(packet.packet_id):
                happened.append((PacketType(first_byte >> 4), packet.packet_id))
            else:
                happened.append(packet)
            if isinstance(packet, Disconnect):
                break
    except IndexError:
        pass  # the last packet is not all there
    except MqttError as error:
        happened.append(refusal(error))
    return happened


def _check_first_byte(first_byte: int, version: Version | None) -> None:
    if version is None:
        if first_byte != 0x10:
            raise protocol_error("no CONNECT", "MQTT-3.1.0-1")
        return
    kind = packet_type(first_byte, version)
    if kind is PacketType.CONNECT:
        raise protocol_error("a second CONNECT", "MQTT-3.1.0-2")
    if kind is PacketType.PUBLISH:
        check_publish_flags(first_byte)


def _length(octets: bytes, pos: int, version: Version | None) -> tuple[int, int]:
    size = 0
    for count in range(1, 5):
        byte = octets[pos + count]
        size += (byte & 0x7F) * 128 ** (count - 1)
        if byte < 0x80:
            if version is V5 and count > 1 and size < 128 ** (count - 1):
                raise malformed("not the shortest form", "MQTT-1.5.5-1")
            return pos + count + 1, size
    raise malformed("more than four bytes")


def _row(
    packet: Publish, first_byte: int, body: bytes, version: Version, aliases: dict[int, bytes], alias_max: int
) -> tuple[object, ...]:
    blob = b""
    topic = packet.topic.encode()
    if version is V5:
        start = 2 + len(topic) + (2 if packet.qos else 0)
        blob = body[start : len(body) - len(packet.payload)]
        while blob[0] > 0x7F:
            blob = blob[1:]
        blob = blob[1:]
    alias = packet.properties.topic_alias
    if alias is not None:
        if alias > alias_max:
            text = f"the topic alias {alias} is above {alias_max}"
            raise MqttError(ReasonCode.TOPIC_ALIAS_INVALID, text, "MQTT-3.3.2-9")
        if topic:
            aliases[alias] = topic
        elif alias in aliases:
            topic = aliases[alias]
        else:
            raise MqttError(ReasonCode.PROTOCOL_ERROR, f"the topic alias {alias} stands for no topic yet")
        place = _alias_place(blob)
        blob = blob[:place] + blob[place + 3 :]
    assert decode_blob(blob) == replace(packet.properties, topic_alias=None)
    return topic, packet.payload, blob, packet.packet_id, first_byte


def _alias_place(blob: bytes) -> int:
    """Where the alias stands, found without the code under test: the only place whose removal leaves the rest whole."""
    wanted = replace(decode_blob(blob), topic_alias=None)
    for place in range(len(blob) - 2):
        if blob[place] == 0x23:
            try:
                if decode_blob(blob[:place] + blob[place + 3 :]) == wanted:
                    return place
            except MqttError:
                continue
    raise AssertionError(f"no alias in {blob!r}")


@st.composite
def alike(draw: st.DrawFn, version: Version) -> bytes:
    """A run as real clients send it: the same topic and properties again and again, sizes mostly equal."""
    model = draw(publishes(version, ("topic_alias", "subscription_identifiers")))
    count = draw(st.integers(1, 40))
    octets = []
    for index in range(count):
        packet_id = (model.packet_id + index) % 65_535 + 1 if model.qos else 0
        payload = struct.pack(">I", index) if index % 30 else model.payload
        octets.append(encode_packet(replace(model, packet_id=packet_id, payload=payload), version))
    return b"".join(octets)


@st.composite
def streams(draw: st.DrawFn, version: Version) -> bytes:
    """A lawful conversation of one client, with or without its end."""
    packets = client_packets(version).map(lambda packet: encode_packet(packet, version))
    ids = st.lists(st.integers(1, 0xFFFF), min_size=1, max_size=20)
    acks = st.builds(encode_ack_run, st.sampled_from(ACKS), ids)
    behind = draw(st.lists(packets | alike(version) | acks, max_size=6))
    ending = draw(st.just(b"") | last_packets(version).map(lambda packet: encode_packet(packet, version)))
    return encode_packet(draw(connects(version)), version) + b"".join(behind) + ending


STREAMS = streams(V3) | streams(V5)


@given(STREAMS)
def test_the_cutter_says_what_the_decoder_of_single_packets_says(octets: bytes) -> None:
    assert cut(PacketCutter(), octets) == read_plainly(octets)


@settings(max_examples=25)
@given(STREAMS)
def test_cutting_the_octets_at_any_place_changes_nothing(octets: bytes) -> None:
    expected = cut(PacketCutter(), octets)
    for place in range(0, len(octets), 1 if len(octets) < 300 else 7):
        assert cut(PacketCutter(), octets, place) == expected
    assert cut(PacketCutter(), octets, *range(len(octets))) == expected


@settings(max_examples=60)
@given(STREAMS, st.data())
def test_damaged_octets_give_the_same_events_however_they_are_cut(octets: bytes, data: st.DataObject) -> None:
    damaged = bytearray(octets)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    expected = cut(PacketCutter(), bytes(damaged))
    assert expected == read_plainly(bytes(damaged))
    for place in range(0, len(damaged), 7):
        assert cut(PacketCutter(), bytes(damaged), place) == expected
    assert cut(PacketCutter(), bytes(damaged), *range(len(damaged))) == expected


@settings(max_examples=200)
@given(st.sampled_from(VERSIONS), st.data())
def test_a_bad_packet_amid_a_run_comes_behind_all_that_stood_before_it(version: Version, data: st.DataObject) -> None:
    before, behind = data.draw(alike(version)), data.draw(alike(version))
    model = bytearray(before[: data.draw(st.integers(2, min(len(before), 60)))])
    model[data.draw(st.integers(0, len(model) - 1))] ^= data.draw(st.integers(1, 255))
    head = encode_packet(Connect("c", version), version)
    octets = head + before + bytes(model) + behind
    happened = cut(PacketCutter(), octets)
    assert happened == read_plainly(octets)
    assert happened[: len(read_plainly(head + before))] == read_plainly(head + before)


@given(st.binary(max_size=200), st.sampled_from(VERSIONS))
def test_garbage_never_raises(data: bytes, version: Version) -> None:
    PacketCutter().receive(data)
    happened = cut(connected(version), data)
    assert cut(connected(version), data, *range(len(data))) == happened
    assert happened == read_plainly(encode_packet(Connect("c", version), version) + data)[1:]


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["", "a", "a/b"])), max_size=30))
def test_aliases_are_resolved_and_do_not_come_out(uses: list[tuple[int, str]]) -> None:
    octets = encode_packet(Connect("c"), V5)
    for alias, topic in uses:
        properties = Properties(topic_alias=alias, content_type="t", user_properties=(("a", "b"),))
        octets += encode_packet(Publish(topic, b"x", properties=properties), V5)
    happened = cut(PacketCutter(topic_alias_max=3), octets)
    assert happened == read_plainly(octets, alias_max=3)


@pytest.mark.parametrize("version", VERSIONS)
@given(data=st.data())
def test_the_reading_side_of_a_client_gets_every_packet_as_its_value(version: Version, data: st.DataObject) -> None:
    packets = data.draw(st.lists(server_packets(version), max_size=5))
    octets = b"".join(encode_packet(packet, version) for packet in packets)
    last = next((index for index, one in enumerate(packets, start=1) if isinstance(one, Disconnect)), len(packets))
    cutter = PacketCutter(from_client=False, version=version)
    assert cut(cutter, octets, *range(len(octets))) == packets[:last]


# ---- runs ----------------------------------------------------------------------------------------------------------


def publish(topic: str = "a/b", payload: bytes = b"x", version: Version = V5, **values: object) -> bytes:
    return encode_packet(Publish(topic, payload, **values), version)  # type: ignore[arg-type]


def test_publishes_with_one_first_byte_are_one_run() -> None:
    octets = publish(payload=b"1") + publish("c", b"22") + publish(payload=b"")
    assert connected().receive(octets) == [
        PublishRun(0x30, [b"a/b", b"c", b"a/b"], [b"", b"", b""], [b"1", b"22", b""], [])
    ]


def test_another_first_byte_or_another_packet_ends_a_run() -> None:
    octets = publish() + publish(retain=True) + encode_packet(Pingreq(), V5) + publish(retain=True)
    kinds = [type(event) for event in connected().receive(octets)]
    assert kinds == [PublishRun, PublishRun, Pingreq, PublishRun]


def test_run_tells_qos_retain_and_dup() -> None:
    (run,) = connected().receive(publish(qos=QoS.EXACTLY_ONCE, retain=True, dup=True, packet_id=9))
    assert isinstance(run, PublishRun)
    assert (run.qos, run.retain, run.dup, run.packet_ids) == (2, True, True, [9])


def test_equal_topics_of_a_run_are_one_object() -> None:
    (run,) = connected().receive(publish(payload=b"1") + publish(payload=b"22"))
    assert isinstance(run, PublishRun) and run.topics[0] is run.topics[1]


@pytest.mark.parametrize("kind", ACKS)
def test_acknowledgements_that_went_well_are_one_run(kind: PacketType) -> None:
    assert connected().receive(encode_ack_run(kind, [3, 1, 2])) == [AckRun(kind, [3, 1, 2])]


def test_a_long_form_that_says_success_continues_the_run() -> None:
    octets = encode_ack_run(PacketType.PUBACK, [1]) + b"\x40\x03\0\2\0" + b"\x40\x04\0\3\0\0"
    assert connected().receive(octets) == [AckRun(PacketType.PUBACK, [1, 2, 3])]


def test_acknowledgement_with_another_reason_is_a_packet() -> None:
    packet = Puback(2, ReasonCode.NO_MATCHING_SUBSCRIBERS)
    octets = encode_ack_run(PacketType.PUBACK, [1]) + encode_packet(packet, V5)
    assert connected().receive(octets) == [AckRun(PacketType.PUBACK, [1]), packet]


def test_a_run_of_equal_sizes_ends_where_one_differs() -> None:
    octets = [publish(payload=struct.pack(">I", number), qos=QoS(1), packet_id=number) for number in range(1, 201)]
    octets[150] = publish("b/a", b"1234", qos=QoS(1), packet_id=7)
    octets[170] = octets[170][:7] + b"\0\0" + octets[170][9:]
    *_, violation = events = connected().receive(b"".join(octets))
    (run,) = [event for event in events if isinstance(event, PublishRun)]
    assert run.packet_ids == [*range(1, 151), 7, *range(152, 171)]
    assert run.topics.count(b"b/a") == 1 and len(run.payloads) == 170
    assert isinstance(violation, Violation) and violation.error.statement == "MQTT-2.2.1-3"


# Each says more than it holds, and what follows could be taken for the rest of it.
REACHING = [
    pytest.param(b"\x30\x03\0\x09a", id="topic"),
    pytest.param(b"\x30\x04\0\x02ab", id="no property length"),
    pytest.param(b"\x32\x03\0\1a", id="no packet identifier"),
    pytest.param(b"\x32\x04\0\1a\x07", id="half a packet identifier"),
    pytest.param(b"\x30\x04\0\1a\x07", id="properties"),
    pytest.param(b"\x30\x06\0\1a\x04\x26\0", id="half a property"),
    pytest.param(b"\x30\x04\0\1a\x80", id="half a property length"),
    pytest.param(b"\x30\x01\0", id="half a topic length"),
    pytest.param(b"\x30\0", id="nothing"),
    pytest.param(b"\x30\x06\0\0\3\x23\0\1", id="alias without a topic"),
    pytest.param(b"\x30\x84\0\0\1a\0", id="length too long"),
    pytest.param(b"\x40\x02\0\0", id="acknowledgement of 0"),
    pytest.param(b"\x62\x02\0\0", id="release of 0"),
    pytest.param(b"\x40\x01\0", id="half an acknowledgement"),
]


@pytest.mark.parametrize("behind", [b"", b"aaaaaaaaaaaaaaaa", b"\1" * 40, publish() * 3])
@pytest.mark.parametrize("bad", REACHING)
@pytest.mark.parametrize("before", [b"", publish() * 20, encode_ack_run(PacketType.PUBACK, [1, 2])])
def test_packet_that_reaches_into_the_next_one_is_refused(before: bytes, bad: bytes, behind: bytes) -> None:
    for version in Version:
        head = encode_packet(Connect("c", version), version)
        assert cut(PacketCutter(), head + before + bad + behind) == read_plainly(head + before + bad + behind)


@pytest.mark.parametrize("size", [127, 128, 129, 16_383, 16_384, 16_385, 2_097_151, 2_097_152])
@pytest.mark.parametrize("version", VERSIONS)
def test_length_of_any_width_is_read(version: Version, size: int) -> None:
    payload = bytes(size - 3)
    octets = publish("a", payload, version) * 2
    happened = cut(connected(version), octets, 1, 2, 3, 4, 5, size)
    assert [(row[0], row[1]) for row in happened] == [(b"a", payload)] * 2  # type: ignore[index]


# ---- limits and the order of things --------------------------------------------------------------------------------


def last_error(events: list[Event]) -> MqttError:
    violation = events[-1]
    assert isinstance(violation, Violation)
    return violation.error


def test_packet_too_large_is_refused_by_its_head() -> None:
    cutter = connected(packet_bytes_max=100)
    assert last_error(cutter.receive(b"\x30\xff\xff\xff\x7f")).code is ReasonCode.PACKET_TOO_LARGE
    assert cutter.buffered_bytes == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_packet_of_the_largest_size_passes_and_one_more_byte_does_not(version: Version) -> None:
    octets = publish(payload=bytes(60), version=version)
    assert isinstance(connected(version, packet_bytes_max=len(octets)).receive(octets)[0], PublishRun)
    events = connected(version, packet_bytes_max=len(octets)).receive(
        octets + publish(payload=bytes(61), version=version)
    )
    assert isinstance(events[0], PublishRun)
    assert last_error(events).code is ReasonCode.PACKET_TOO_LARGE


def test_connect_has_a_limit_of_its_own() -> None:
    cutter = PacketCutter(connect_bytes_max=64)
    octets = encode_packet(Connect("c" * 64), V5)
    assert last_error(cutter.receive(octets)).code is ReasonCode.PACKET_TOO_LARGE
    assert isinstance(PacketCutter(connect_bytes_max=len(octets)).receive(octets)[0], Connect)


def test_only_an_unfinished_packet_is_held() -> None:
    cutter = connected()
    octets = publish(payload=bytes(1000))
    for byte in octets[:-1]:
        assert cutter.receive(bytes((byte,))) == []
    assert cutter.buffered_bytes == len(octets) - 1
    (run,) = cutter.receive(octets[-1:] + b"\x30")
    assert isinstance(run, PublishRun) and run.payloads == [bytes(1000)]
    assert cutter.buffered_bytes == 1


def test_remaining_length_of_five_bytes_is_malformed() -> None:
    error = last_error(connected().receive(b"\x30\x80\x80\x80\x80\x01"))
    assert error.code is ReasonCode.MALFORMED_PACKET


def test_remaining_length_has_the_shortest_form_in_mqtt_5_only() -> None:
    assert last_error(connected(V5).receive(b"\xc0\x80\0")).statement == "MQTT-1.5.5-1"
    assert connected(V3).receive(b"\xc0\x80\0") == [Pingreq()]
    assert isinstance(connected(V3).receive(b"\x30\x84\0\0\1ab")[0], PublishRun)
    long_connect = encode_packet(Connect("c"), V5)
    long_connect = bytes((0x10, long_connect[1] | 0x80, 0)) + long_connect[2:]
    assert last_error(PacketCutter().receive(long_connect)).statement == "MQTT-1.5.5-1"


@pytest.mark.parametrize("first_byte", [0x36, 0x38, 0x00, 0x20, 0x41, 0x10])
def test_first_byte_that_cannot_be_is_refused_before_anything_is_held(first_byte: int) -> None:
    cutter = connected()
    assert isinstance(cutter.receive(bytes((first_byte,)))[-1], Violation)
    assert cutter.buffered_bytes == 0


def test_first_packet_is_a_connect() -> None:
    cutter = PacketCutter()
    assert last_error(cutter.receive(b"\xc0\0")).statement == "MQTT-3.1.0-1"
    assert cutter.version is None


def test_second_connect_is_a_protocol_error() -> None:
    error = last_error(connected().receive(publish() + encode_packet(Connect("c"), V5)))
    assert (error.code, error.statement) == (ReasonCode.PROTOCOL_ERROR, "MQTT-3.1.0-2")


@pytest.mark.parametrize(("level", "name", "version"), [(3, b"MQIsdp", V3), (6, b"MQTT", V5), (5, b"HTTP", None)])
def test_refused_connect_still_tells_how_to_answer(level: int, name: bytes, version: Version | None) -> None:
    body = struct.pack(">H", len(name)) + name + bytes((level, 2)) + b"\0\0\0\0\1c"
    cutter = PacketCutter()
    error = last_error(cutter.receive(bytes((0x10, len(body))) + body))
    assert error.code is ReasonCode.UNSUPPORTED_PROTOCOL_VERSION
    assert cutter.version is version


def test_nothing_comes_out_behind_a_violation() -> None:
    cutter = connected()
    assert len(cutter.receive(b"\xc1\0" + publish())) == 1
    assert cutter.finished
    assert cutter.receive(publish()) == []


def test_nothing_comes_out_behind_a_disconnect() -> None:
    cutter = connected()
    assert cutter.receive(encode_packet(Disconnect(), V5) + publish()) == [Disconnect()]
    assert cutter.receive(publish()) == []


def test_packets_behind_a_connect_in_one_read_are_cut_in_its_version() -> None:
    subscribe: Packet = Subscribe(1, (Subscription("a"),))
    for version in Version:
        octets = encode_packet(Connect("c", version), version) + encode_packet(subscribe, version)
        assert PacketCutter().receive(octets) == [Connect("c", version), subscribe]


def test_alias_above_the_maximum_or_without_a_topic_is_refused() -> None:
    octets = publish(properties=Properties(topic_alias=2))
    error = last_error(connected(topic_alias_max=1).receive(octets))
    assert (error.code, error.statement) == (ReasonCode.TOPIC_ALIAS_INVALID, "MQTT-3.3.2-9")
    octets = publish("", properties=Properties(topic_alias=1))
    assert last_error(connected(topic_alias_max=1).receive(octets)).code is ReasonCode.PROTOCOL_ERROR


def test_what_was_checked_is_shared_and_bounded() -> None:
    topics, scans = TopicNames(count_max=4, bytes_max=8), PublishScans(count_max=4, bytes_max=20)
    for client in range(3):
        cutter = PacketCutter(topics=topics, scans=scans)
        cutter.receive(encode_packet(Connect("c"), V5))
        for number in range(20):
            properties = Properties(content_type=f"{client}/{number}" * (number % 3 * 4 + 1))
            assert len(cutter.receive(publish(f"t{number}" * (number % 4 + 1), properties=properties))) == 1
    assert len(topics.known) <= 4 and all(len(name) <= 8 for name in topics.known)
    assert len(scans.known) <= 4 and all(len(blob) <= 20 for blob in scans.known)


def test_a_run_of_many_shapes_is_read_back_as_it_was_encoded() -> None:
    topics = [b"a", b"b/c", b"a"] * 30
    blobs = [b"", b"\x01\x01", b"\x09\0\1x"] * 30
    payloads = [bytes(size) for size in range(90)]
    octets = encode_publish_run(0x32, topics, blobs, payloads, range(1, 91), V5)
    assert connected().receive(octets) == [PublishRun(0x32, topics, blobs, payloads, [*range(1, 91)])]
