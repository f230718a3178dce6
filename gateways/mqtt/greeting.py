"""What a client is answered to its CONNECT, and what holds for its connection from then on. Pure.

Neighbours: client.py asks and sends, front.py answers for clients of other nodes.
"""

from dataclasses import replace

from headrace.core_log.errors import DiskFull, HeadraceError
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.packets import Connack, Connect, Disconnect, Packet, Puback, Pubrec, Suback
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version, return_code


def keep_alive_of(connect: Connect, config: MqttConfig) -> tuple[int, int | None]:
    """What holds, and what the client must be told [MQTT-3.1.2-21]."""
    asked_s, limit = connect.keep_alive_s, config.keep_alive_s_max
    if limit and (not asked_s or asked_s > limit):
        # MQTT 3.1.1 has no way to tell; a client that asked for none is held to nothing there.
        return (limit, limit) if connect.version is Version.V5 else (asked_s, None)
    return asked_s, None


def expiry_of(connect: Connect, config: MqttConfig) -> tuple[int | None, int | None]:
    """How long the session outlives the connection (None: for ever), and what the client must be told."""
    limit = config.session_expiry_s_max
    if connect.version is Version.V3_1_1:
        return (0 if connect.clean_start else limit or None), None
    asked = connect.properties.session_expiry_interval or 0
    if limit and asked > limit:
        return limit, limit
    return (None if asked == 0xFFFF_FFFF else asked), None


def welcome(version: Version, config: MqttConfig, told: Properties, *, session_present: bool) -> Connack:
    """`told`: what concerns this client alone."""
    if version is not Version.V5:
        code = return_code(ReasonCode.SUCCESS)
        assert code is not None
        return Connack(code, session_present, NO_PROPERTIES)
    told = replace(
        told,
        receive_maximum=config.receive_max,
        maximum_packet_size=config.packet_bytes_max,
        topic_alias_maximum=config.topic_alias_max or None,
    )
    return Connack(ReasonCode.SUCCESS, session_present, told)


def refusal_of(error: MqttError, version: Version | None, *, explained: bool = True) -> Connack | None:
    """What a client is answered to its CONNECT; None: its version has no word for that, or is none of ours."""
    if version is Version.V5:
        return Connack(error.code, False, Properties(reason_string=error.text) if explained else NO_PROPERTIES)
    if version is Version.V3_1_1 or error.code is ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
        code = return_code(error.code)
        return None if code is None else Connack(code)
    return None


def as_mqtt(error: HeadraceError) -> MqttError:
    """What went wrong on our side, in the client's words."""
    if isinstance(error, MqttError):
        return error
    code = ReasonCode.QUOTA_EXCEEDED if isinstance(error, DiskFull) else ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    return MqttError(code, str(error))


def unexplained(packet: Packet) -> Packet:
    """Without reason string and user properties [MQTT-3.4.2-2, MQTT-3.4.2-3 and the like]."""
    match packet:
        case Connack() | Puback() | Pubrec() | Suback() | Disconnect():
            return replace(packet, properties=replace(packet.properties, reason_string=None, user_properties=()))
        case _:
            return packet
