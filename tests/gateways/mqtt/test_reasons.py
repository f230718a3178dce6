"""Reason codes: the standard's table, as paho has it too."""

import pytest
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.reasoncodes import ReasonCode as PahoReasonCode

from headrace.gateways.mqtt.reasons import (
    CLIENT_REASONS,
    LAWFUL_REASONS,
    SERVER_REASONS,
    MqttError,
    PacketType,
    ReasonCode,
    ReturnCode,
    malformed,
    return_code,
)

# Table 3-1 of the standard has it (the will's payload is not what its format says); paho has not.
NOT_IN_PAHO = {PacketType.CONNACK: {0x99}}


@pytest.mark.parametrize("kind", sorted(LAWFUL_REASONS))
def test_a_packet_may_carry_the_codes_that_paho_knows_for_it(kind: PacketType) -> None:
    known = {
        code
        for code, names in PahoReasonCode(PacketTypes.PUBACK).names.items()
        if any(int(kind) in packets for packets in names.values())
    }
    assert set(map(int, LAWFUL_REASONS[kind])) == known | NOT_IN_PAHO.get(kind, set())


@pytest.mark.parametrize("kind", [PacketType.DISCONNECT, PacketType.AUTH])
def test_each_code_comes_from_one_side_at_least(kind: PacketType) -> None:
    assert CLIENT_REASONS[kind] | SERVER_REASONS[kind] == LAWFUL_REASONS[kind]
    assert ReasonCode.SERVER_SHUTTING_DOWN not in CLIENT_REASONS[kind]
    assert ReasonCode.DISCONNECT_WITH_WILL not in SERVER_REASONS[kind]


def test_failure_begins_at_0x80() -> None:
    assert [code for code in ReasonCode if code.failed] == [code for code in ReasonCode if code >= 0x80]


def test_every_return_code_of_3_1_1_is_reached() -> None:
    assert {return_code(code) for code in ReasonCode} == {*ReturnCode, None}


def test_an_error_says_code_text_and_statement() -> None:
    error = malformed("the reserved flag of CONNECT is set", "MQTT-3.1.2-3")
    assert isinstance(error, MqttError) and error.code is ReasonCode.MALFORMED_PACKET
    assert str(error) == "0x81 MALFORMED_PACKET: the reserved flag of CONNECT is set [MQTT-3.1.2-3]"
