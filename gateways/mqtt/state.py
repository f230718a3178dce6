"""What outlives a connection and a crash: sessions in `__sessions`, retained messages in `__retained`. Format; pure.

The key of a session is vhost, NUL, client id, and its value the whole state, so the last record of a key is the truth;
an empty value ends it. The key without a client id has an offset, see `noted_key`. The key of a retained message is
vhost, NUL, topic; the record is the message, and one without a payload takes it away.
A state speaks of the log only up to `position`: what was delivered since is found again by reading on from there, and
gets the same packet identifiers (session.py).
"""

from collections.abc import Iterable

import msgspec

from headrace.core_log.errors import CorruptLog
from headrace.gateways.mqtt.flights import Flight
from headrace.gateways.mqtt.packets import QoS, RetainHandling, Will
from headrace.gateways.mqtt.properties import WILL_PROPERTIES, decode_blob, encode_blob
from headrace.gateways.mqtt.quota import Hole
from headrace.gateways.mqtt.session import Interest, Session

SESSIONS_NAME = "__sessions"
RETAINED_NAME = "__retained"
FORMAT = 1


class FlightState(msgspec.Struct, frozen=True, array_like=True):
    packet_id: int
    # -1: the message itself stands here; else it stands in the log.
    offset: int
    qos: int
    released: bool
    retain: bool = False
    topic: bytes = b""
    blob: bytes = b""
    payload: bytes = b""
    # The shared subscription it comes from, and its number and lane there.
    share: str = ""
    seq: int = -1
    lane: int = 0


class WillState(msgspec.Struct, frozen=True, array_like=True):
    topic: str
    payload: bytes
    qos: int
    retain: bool
    blob: bytes


class SessionState(msgspec.Struct, frozen=True, array_like=True):
    format: int
    user: str
    # None: for ever.
    expiry_s: int | None
    # 0: it was connected.
    asleep_since_us: int
    position: int
    next_seq: int
    # (filter, qos, no local, retain as published, retain handling, identifier, since)
    interests: list[tuple[str, int, bool, bool, int, int, int]]
    flights: list[FlightState]
    incoming: list[int]
    will: WillState | None = None
    # Of each of `incoming`, the offset of its message. None were written by the first builds: those identifiers count.
    incoming_offsets: list[int] = []
    # (first, end, count) of what it did not take, from `position` on (quota.py).
    refused: list[tuple[int, int, int]] = []
    # Records from `position` on and below this may have been sent already, besides those that were since this was
    # written, if it was connected.
    sent_below: int = 0
    # `incoming` has what was received before this offset of the log; -1: the first builds did not say.
    noted_to: int = -1
    # (share, lane, number) of messages that no group may give to anybody any more.
    handed: list[tuple[str, int, int]] = []
    # Of those interests that have one, by filter: the tag expression.
    wants: dict[str, str] = {}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SessionState)


def session_key(vhost: str, client_id: str) -> bytes:
    return f"{vhost}\0{client_id}".encode()


def noted_key(vhost: str) -> bytes:
    """No session has an empty client id: under this key stands an offset of the log of messages. What was received
    before that is in the states of the vhost's sessions that are written before it."""
    return session_key(vhost, "")


def encode_noted(offset: int) -> bytes:
    return msgspec.msgpack.encode(offset)


def decode_noted(value: bytes, offset: int) -> int:
    """Raises CorruptLog for what cannot be read."""
    try:
        return msgspec.msgpack.decode(value, type=int)
    except msgspec.DecodeError as error:
        raise CorruptLog(SESSIONS_NAME, 0, offset, f"an offset cannot be read ({error})") from error


def retained_key(vhost: str, topic: bytes) -> bytes:
    return vhost.encode() + b"\0" + topic


def split_key(key: bytes) -> tuple[str, bytes]:
    """The vhost and what is behind it."""
    vhost, _, rest = key.partition(b"\0")
    return vhost.decode(), rest


def encode_session(session: Session, log_end: int, noted_to: int) -> bytes:
    will = session.will
    position = session.unread_from(log_end)
    holes = () if session.quota is None else session.quota.holes
    return _encoder.encode(
        SessionState(
            FORMAT,
            session.user,
            session.expiry_s,
            session.asleep_since_us,
            position,
            session.number_at(position),
            [_interest_state(one) for one in session.interests.values()],
            [_flight_state(packet_id, flight) for packet_id, flight in session.flights.items()],
            [*session.incoming],
            None
            if will is None
            else WillState(
                will.topic, will.payload, int(will.qos), will.retain, encode_blob(will.properties, WILL_PROPERTIES)
            ),
            [*session.incoming.values()],
            [(one.first, one.end, one.count) for one in holes if one.end > position],
            session.sent_below if session.sent_below > position else 0,
            noted_to,
            [*session.handed],
            {one.filter: one.wants for one in session.interests.values() if one.wants},
        )
    )


def _interest_state(one: Interest) -> tuple[str, int, bool, bool, int, int, int]:
    handling = int(one.retain_handling)
    return one.filter, one.qos, one.no_local, one.retain_as_published, handling, one.identifier, one.since


def _flight_state(packet_id: int, flight: Flight) -> FlightState:
    if flight.offset >= 0:
        return FlightState(packet_id, flight.offset, flight.qos, flight.released, flight.retain)
    return FlightState(
        packet_id,
        -1,
        flight.qos,
        flight.released,
        flight.retain,
        flight.topic,
        flight.blob,
        flight.payload,
        flight.share,
        flight.seq,
        flight.lane,
    )


def decode_session(value: bytes, offset: int) -> SessionState:
    """Raises CorruptLog for what cannot be read."""
    try:
        state = _decoder.decode(value)
    except msgspec.DecodeError as error:
        raise CorruptLog(SESSIONS_NAME, 0, offset, f"a session's state cannot be read ({error})") from error
    if state.format != FORMAT:
        raise CorruptLog(SESSIONS_NAME, 0, offset, f"a session's state has the unknown format {state.format}")
    return state


def restore_session(session: Session, state: SessionState) -> Iterable[FlightState]:
    """Returns the flights whose messages must be read from the log; `Session.flights` has the others."""
    session.user = state.user
    session.expiry_s = state.expiry_s
    session.asleep_since_us = state.asleep_since_us
    session.position = state.position
    session.next_seq = state.next_seq
    session.sent_below = state.sent_below
    session.noted_to = state.noted_to
    session.handed = dict.fromkeys(state.handed)
    if session.quota is not None:
        session.quota.holes.extend(Hole(*one) for one in state.refused)
    for text, qos, no_local, as_published, handling, identifier, since in state.interests:
        session.interests[text] = Interest(
            text,
            qos,
            no_local,
            as_published,
            RetainHandling(handling),
            identifier,
            since,
            state.wants.get(text, ""),
        )
    offsets = state.incoming_offsets or [-1] * len(state.incoming)
    session.incoming = dict(zip(state.incoming, offsets, strict=True))
    if state.will is not None:
        will = state.will
        properties = decode_blob(will.blob, WILL_PROPERTIES)
        session.will = Will(will.topic, will.payload, QoS(will.qos), will.retain, properties)
    in_log = []
    for one in state.flights:
        if one.share and one.qos == 1:
            # Its group still has it, and deals it out again.
            continue
        session.flights[one.packet_id] = Flight(
            one.offset,
            one.qos,
            one.retain,
            one.topic,
            one.blob,
            one.payload,
            one.released,
            share=one.share,
            seq=one.seq,
            lane=one.lane,
        )
        if one.offset >= 0 and not one.released:
            in_log.append(one)
    return in_log
