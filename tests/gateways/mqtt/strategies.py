"""Lawful packets of either side in either version, for the property tests."""

from collections.abc import Iterable
from dataclasses import replace

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from headrace.gateways.mqtt import packets as mq
from headrace.gateways.mqtt.properties import NO_PROPERTIES, WILL_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import (
    CLIENT_REASONS,
    LAWFUL_REASONS,
    SERVER_REASONS,
    PacketType,
    ReasonCode,
    ReturnCode,
    Version,
)

# A busy machine is not a mistake of ours.
settings.register_profile("codec", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("codec")

TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=6)
BINARY = st.binary(max_size=6)
LEVEL = st.sampled_from(["", "a", "b", "$x", "é", "v1.0", "50%", "*", "temperature"])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map("/".join).filter(bool)


@st.composite
def plain_filters(draw: st.DrawFn) -> str:
    levels = draw(st.lists(LEVEL | st.just("+"), min_size=1, max_size=4))
    if draw(st.booleans()):
        levels[-1] = "#"
    return "/".join(levels) or "+"


FILTER = plain_filters()
SHARED = st.tuples(st.sampled_from(["g", "group 1", "$"]), FILTER).map(lambda pair: f"$share/{pair[0]}/{pair[1]}")
QOS = st.sampled_from(mq.QoS)
PACKET_ID = st.integers(1, 0xFFFF)
U32 = st.integers(0, 0xFFFF_FFFF)
BLOBS = {
    "payload_format_indicator": st.integers(0, 1),
    "message_expiry_interval": U32,
    "content_type": TEXT,
    "response_topic": TOPIC,
    "correlation_data": BINARY,
    "user_properties": st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3).map(tuple),
}
ENDING = {"reason_string": TEXT, "user_properties": BLOBS["user_properties"]}
SIZES = {
    "session_expiry_interval": U32,
    "receive_maximum": PACKET_ID,
    "maximum_packet_size": st.integers(1, 268_435_455),
    "topic_alias_maximum": st.integers(0, 0xFFFF),
    "authentication_method": TEXT,
    "authentication_data": BINARY,
    "user_properties": BLOBS["user_properties"],
}
IDENTIFIER = st.integers(1, 268_435_455)
# Written down here once more, from table 2-4 of the standard.
ALLOWED: dict[int, dict[str, st.SearchStrategy[object]]] = {
    WILL_PROPERTIES: {**BLOBS, "will_delay_interval": U32},
    PacketType.CONNECT: {
        **SIZES,
        "request_problem_information": st.booleans(),
        "request_response_information": st.booleans(),
    },
    PacketType.CONNACK: {
        **SIZES,
        **ENDING,
        "assigned_client_identifier": TEXT,
        "server_keep_alive": st.integers(0, 0xFFFF),
        "response_information": TEXT,
        "server_reference": TEXT,
        "maximum_qos": st.integers(0, 1),
        "retain_available": st.booleans(),
        "wildcard_subscription_available": st.booleans(),
        "subscription_identifier_available": st.booleans(),
        "shared_subscription_available": st.booleans(),
    },
    PacketType.PUBLISH: {
        **BLOBS,
        "topic_alias": PACKET_ID,
        "subscription_identifiers": st.lists(IDENTIFIER, min_size=1, max_size=3).map(tuple),
    },
    PacketType.PUBACK: ENDING,
    PacketType.PUBREC: ENDING,
    PacketType.PUBREL: ENDING,
    PacketType.PUBCOMP: ENDING,
    PacketType.SUBSCRIBE: {
        "subscription_identifiers": IDENTIFIER.map(lambda number: (number,)),
        "user_properties": BLOBS["user_properties"],
    },
    PacketType.SUBACK: ENDING,
    PacketType.UNSUBSCRIBE: {"user_properties": BLOBS["user_properties"]},
    PacketType.UNSUBACK: ENDING,
    PacketType.DISCONNECT: {**ENDING, "session_expiry_interval": U32, "server_reference": TEXT},
    PacketType.AUTH: {**ENDING, "authentication_method": TEXT, "authentication_data": BINARY},
}


@st.composite
def properties(draw: st.DrawFn, place: int, version: Version = Version.V5, without: Iterable[str] = ()) -> Properties:
    if version is Version.V3_1_1:
        return NO_PROPERTIES
    allowed = {name: values for name, values in ALLOWED[place].items() if name not in without}
    chosen = draw(st.sets(st.sampled_from(sorted(allowed)), max_size=4)) if allowed else set()
    found = Properties(**{name: draw(allowed[name]) for name in sorted(chosen)})  # type: ignore[arg-type]
    if place == PacketType.AUTH or found.authentication_data is not None:
        found = replace(found, authentication_method=draw(TEXT))
    return found


@st.composite
def wills(draw: st.DrawFn, version: Version) -> mq.Will:
    return mq.Will(draw(TOPIC), draw(BINARY), draw(QOS), draw(st.booleans()), draw(properties(0, version)))


@st.composite
def connects(draw: st.DrawFn, version: Version) -> mq.Connect:
    user_name = draw(st.none() | TEXT)
    clean_start = draw(st.booleans())
    return mq.Connect(
        draw(TEXT if clean_start or version is Version.V5 else TEXT.filter(bool)),
        version,
        clean_start,
        draw(st.integers(0, 0xFFFF)),
        user_name,
        draw(st.none() | BINARY) if user_name is not None or version is Version.V5 else None,
        draw(st.none() | wills(version)),
        draw(properties(PacketType.CONNECT, version)),
    )


@st.composite
def publishes(draw: st.DrawFn, version: Version, without: Iterable[str] = ()) -> mq.Publish:
    qos = draw(QOS)
    found = draw(properties(PacketType.PUBLISH, version, without))
    return mq.Publish(
        draw(TOPIC if found.topic_alias is None else TOPIC | st.just("")),
        draw(BINARY | st.integers(0, 400).map(lambda size: b"z" * size)),
        qos,
        draw(st.booleans()),
        bool(qos) and draw(st.booleans()),
        draw(PACKET_ID) if qos else 0,
        found,
    )


def _reasons(kind: PacketType, version: Version) -> st.SearchStrategy[ReasonCode]:
    return st.sampled_from(sorted(LAWFUL_REASONS[kind])) if version is Version.V5 else st.just(ReasonCode.SUCCESS)


def acknowledgements(version: Version) -> st.SearchStrategy[mq.Packet]:
    kinds = (mq.Puback, mq.Pubrec, mq.Pubrel, mq.Pubcomp)
    return st.one_of(
        [
            st.builds(kind, PACKET_ID, _reasons(PacketType(place), version), properties(place, version))
            for place, kind in enumerate(kinds, start=PacketType.PUBACK)
        ]
    )


@st.composite
def subscriptions(draw: st.DrawFn, version: Version) -> mq.Subscription:
    text = draw(FILTER | SHARED)
    if version is Version.V3_1_1:
        return mq.Subscription(text, draw(QOS))
    no_local = draw(st.booleans()) and not text.startswith("$share/")
    return mq.Subscription(text, draw(QOS), no_local, draw(st.booleans()), draw(st.sampled_from(mq.RetainHandling)))


def client_packets(version: Version) -> st.SearchStrategy[mq.Packet]:
    """Everything that a client may send behind its CONNECT; no topic alias, which needs a history."""
    some_filters = st.lists(FILTER | SHARED, min_size=1, max_size=3).map(tuple)
    some_subscriptions = st.lists(subscriptions(version), min_size=1, max_size=3).map(tuple)
    found: list[st.SearchStrategy[mq.Packet]] = [
        publishes(version, ("topic_alias", "subscription_identifiers")),
        acknowledgements(version),
        st.builds(mq.Subscribe, PACKET_ID, some_subscriptions, properties(PacketType.SUBSCRIBE, version)),
        st.builds(mq.Unsubscribe, PACKET_ID, some_filters, properties(PacketType.UNSUBSCRIBE, version)),
        st.just(mq.Pingreq()),
    ]
    if version is Version.V5:
        reasons = st.sampled_from(sorted(CLIENT_REASONS[PacketType.AUTH]))
        found.append(st.builds(mq.Auth, reasons, properties(PacketType.AUTH)))
    return st.one_of(found)


def last_packets(version: Version) -> st.SearchStrategy[mq.Disconnect]:
    """A client's DISCONNECT."""
    if version is Version.V3_1_1:
        return st.just(mq.Disconnect())
    reasons = st.sampled_from(sorted(CLIENT_REASONS[PacketType.DISCONNECT]))
    return st.builds(mq.Disconnect, reasons, properties(PacketType.DISCONNECT))


def server_packets(version: Version) -> st.SearchStrategy[mq.Packet]:
    v5 = version is Version.V5
    granted = sorted(LAWFUL_REASONS[PacketType.SUBACK]) if v5 else [ReasonCode(code) for code in (0, 1, 2, 0x80)]
    connected = sorted(LAWFUL_REASONS[PacketType.CONNACK]) if v5 else list(ReturnCode)
    reasons = st.lists(st.sampled_from(granted), min_size=1, max_size=3).map(tuple)
    gone = st.lists(_reasons(PacketType.UNSUBACK, version), max_size=3 if v5 else 0).map(tuple)
    found: list[st.SearchStrategy[mq.Packet]] = [
        st.builds(mq.Connack, st.sampled_from(connected), st.booleans(), properties(PacketType.CONNACK, version)),
        publishes(version),
        acknowledgements(version),
        st.builds(mq.Suback, PACKET_ID, reasons, properties(PacketType.SUBACK, version)),
        st.builds(mq.Unsuback, PACKET_ID, gone, properties(PacketType.UNSUBACK, version)),
        st.just(mq.Pingresp()),
    ]
    if v5:
        ends = st.sampled_from(sorted(SERVER_REASONS[PacketType.DISCONNECT]))
        ending = properties(PacketType.DISCONNECT, without=["session_expiry_interval"])
        auths = st.sampled_from(sorted(SERVER_REASONS[PacketType.AUTH]))
        found.append(st.builds(mq.Disconnect, ends, ending))
        found.append(st.builds(mq.Auth, auths, properties(PacketType.AUTH)) | st.just(mq.Auth()))
    return st.one_of(found)
