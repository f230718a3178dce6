"""Hostile octets for the MQTT packet cutter: `python tests/fuzz/mqtt_packets.py -max_total_time=60` (needs atheris).

The oracle: nothing but events comes out, cutting the octets anywhere gives the same, whatever came out of a lawful
packet can be written again, and nothing is held beyond one unfinished packet.
"""

import sys
from contextlib import nullcontext

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["headrace"]) if __name__ == "__main__" else nullcontext():
    from headrace.gateways.mqtt.cutter import AckRun, PacketCutter, PublishRun, Violation
    from headrace.gateways.mqtt.encoder import encode_packet, encode_publish_run
    from headrace.gateways.mqtt.packets import Connect
    from headrace.gateways.mqtt.reasons import Version

PACKET_BYTES_MAX = 4096


def cut(version: Version, octets: bytes, *places: int) -> list[object]:
    """What happened when the octets come in pieces that end at these places, without where runs ended."""
    cutter = PacketCutter(packet_bytes_max=PACKET_BYTES_MAX, topic_alias_max=4)
    happened: list[object] = []
    start = 0
    connect = encode_packet(Connect("fuzz", version), version)
    for piece_end in [0, *sorted(places), len(octets)]:
        piece = connect if not happened and not piece_end else octets[start:piece_end]
        start = max(start, piece_end)
        for event in cutter.receive(piece):
            match event:
                case PublishRun():
                    columns = (event.topics, event.properties, event.payloads)
                    assert len({len(one) for one in columns}) == 1
                    ids = event.packet_ids or [0] * len(event.topics)
                    happened += [(event.first_byte, *row) for row in zip(*columns, ids, strict=True)]
                    encode_publish_run(event.first_byte, *columns, event.packet_ids, version)
                case AckRun(kind, packet_ids):
                    happened += [(kind, packet_id) for packet_id in packet_ids]
                case Violation(error):
                    happened.append(str(error))
                case packet:
                    encode_packet(packet, version)
                    happened.append(packet)
        assert cutter.buffered_bytes <= PACKET_BYTES_MAX
    return happened


def wrapped(data: bytes) -> bytes:
    """Packets around arbitrary bodies, so that a fuzzer need not find lengths by luck."""
    out = []
    while len(data) >= 2:
        size = data[1] % 128
        body = data[2 : 2 + size]
        out.append(bytes((data[0], len(body))) + body)
        data = data[2 + size :]
    return b"".join(out)


def check(data: bytes) -> None:
    if len(data) < 3:
        return
    version = Version.V5 if data[0] & 2 else Version.V3_1_1
    octets = data[3:] if data[0] & 1 else wrapped(data[3:])
    assert cut(version, octets, data[1], data[2]) == cut(version, octets)


if __name__ == "__main__":
    if atheris is None:
        sys.exit("atheris is not installed")
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
