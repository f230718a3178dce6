"""The packets as values: one class for each type of packet, and none that can change."""

from dataclasses import FrozenInstanceError, is_dataclass
from typing import get_args

import pytest

from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import Packet, Pingreq, Publish
from headrace.gateways.mqtt.properties import NO_PROPERTIES
from headrace.gateways.mqtt.reasons import PacketType, Version

KINDS = get_args(Packet)


def test_each_type_of_packet_has_a_class_of_its_name() -> None:
    assert [kind.__name__.upper() for kind in KINDS] == [kind.name for kind in PacketType]


@pytest.mark.parametrize("kind", KINDS)
def test_a_packet_is_a_value(kind: type) -> None:
    assert is_dataclass(kind)
    assert getattr(kind, "__slots__", None) is not None


def test_a_packet_does_not_change() -> None:
    packet = Publish("a")
    with pytest.raises(FrozenInstanceError):
        packet.topic = "b"  # type: ignore[misc]
    assert packet == Publish("a", properties=NO_PROPERTIES) and hash(packet) == hash(Publish("a"))


def test_type_stands_in_the_high_bits_of_the_first_byte() -> None:
    assert encode_packet(Pingreq(), Version.V5)[0] >> 4 == PacketType.PINGREQ
