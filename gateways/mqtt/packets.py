"""The fifteen control packets as values. Values: frozen; nothing here reads or writes bytes.

One class serves both versions: what MQTT 3.1.1 does not have (properties, reason codes, subscription options) stays at
its default there, and encoding it for 3.1.1 leaves it out. Text is str, what the standards call binary is bytes.
PUBLISH and PUBACK stand here for tests, wills and single sends; in bulk they travel as the columns of cutter.py.
Neighbours: decoder.py and encoder.py turn them from and into bytes; properties.py, reasons.py below.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import ReasonCode, ReturnCode, Version


class QoS(IntEnum):
    AT_MOST_ONCE = 0
    AT_LEAST_ONCE = 1
    EXACTLY_ONCE = 2


class RetainHandling(IntEnum):
    """When a SUBSCRIBE is answered with retained messages. MQTT 3.1.1 always sends."""

    SEND = 0
    SEND_IF_NEW = 1
    DO_NOT_SEND = 2


@dataclass(frozen=True, slots=True)
class Will:
    topic: str
    payload: bytes
    qos: QoS = QoS.AT_MOST_ONCE
    retain: bool = False
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Connect:
    client_id: str
    version: Version = Version.V5
    clean_start: bool = True  # MQTT 3.1.1 calls it clean session, and means the end of the session too
    keep_alive_s: int = 0
    user_name: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Connack:
    """`reason` is a ReasonCode in MQTT 5 and a ReturnCode in 3.1.1."""

    reason: ReasonCode | ReturnCode = ReasonCode.SUCCESS
    session_present: bool = False
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Publish:
    """`packet_id` is 0 exactly when the QoS is."""

    topic: str
    payload: bytes = b""
    qos: QoS = QoS.AT_MOST_ONCE
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Puback:
    packet_id: int
    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubrec:
    packet_id: int
    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubrel:
    packet_id: int
    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pubcomp:
    packet_id: int
    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Subscription:
    """One topic filter of a SUBSCRIBE, well formed (a shared one too)."""

    filter: str
    qos: QoS = QoS.AT_MOST_ONCE
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: RetainHandling = RetainHandling.SEND


@dataclass(frozen=True, slots=True)
class Subscribe:
    packet_id: int
    subscriptions: tuple[Subscription, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Suback:
    """One code for each filter, in order. In MQTT 3.1.1 any failure is sent as 0x80."""

    packet_id: int
    reasons: tuple[ReasonCode, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    packet_id: int
    filters: tuple[str, ...]
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Unsuback:
    """One code for each filter, in order; MQTT 3.1.1 sends none of them."""

    packet_id: int
    reasons: tuple[ReasonCode, ...] = ()
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Pingreq:
    pass


@dataclass(frozen=True, slots=True)
class Pingresp:
    pass


@dataclass(frozen=True, slots=True)
class Disconnect:
    reason: ReasonCode = ReasonCode.NORMAL_DISCONNECTION
    properties: Properties = NO_PROPERTIES


@dataclass(frozen=True, slots=True)
class Auth:
    """MQTT 5 only."""

    reason: ReasonCode = ReasonCode.SUCCESS
    properties: Properties = NO_PROPERTIES


Packet: TypeAlias = (
    Connect
    | Connack
    | Publish
    | Puback
    | Pubrec
    | Pubrel
    | Pubcomp
    | Subscribe
    | Suback
    | Unsubscribe
    | Unsuback
    | Pingreq
    | Pingresp
    | Disconnect
    | Auth
)
