"""Hostile octets for the AMQP frame cutter: `python tests/fuzz/amqp_frames.py -max_total_time=60` (needs atheris).

The oracle: nothing but events comes out, cutting the octets anywhere gives the same, and everything that came out
can be read, refused or written again. The normal tests draw a small sample through `check`.
"""

import struct
import sys
from contextlib import nullcontext

from pamqp import commands

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["headrace"]) if __name__ == "__main__" else nullcontext():
    from headrace.gateways.amqp import frames, methods, properties
    from headrace.gateways.amqp.errors import AmqpError

INDEXES = sorted(commands.INDEX_MAPPING)


def flat(events: list[frames.Event]) -> list[tuple[object, ...]]:
    """What happened, without where runs ended."""
    happened: list[tuple[object, ...]] = []
    for event in events:
        match event:
            case frames.PublishRun(channel, payload, props, bodies):
                assert len(props) == len(bodies) > 0
                happened += [("publish", channel, payload, *pair) for pair in zip(props, bodies, strict=True)]
            case frames.Acks(channel, acks):
                assert acks
                happened += [("ack", channel, tag, multiple) for tag, multiple in acks]
            case frames.MethodFrame(channel, method):
                happened.append(("method", channel, method.name, methods.encode_payload(method)))
            case frames.Violation(channel, error):
                happened.append(("violation", channel, str(error)))
            case frames.Heartbeat():
                happened.append(("heartbeat",))
    return happened


def cut(cutter: frames.FrameCutter, octets: bytes, *places: int) -> list[tuple[object, ...]]:
    """The octets given in pieces that end at these places."""
    happened = []
    start = 0
    for place in [*sorted(places), len(octets)]:
        happened += flat(cutter.receive(octets[start:place]))
        start = max(start, place)
    return happened


def wrapped(data: bytes) -> bytes:
    """Frames around arbitrary payloads, so that a fuzzer need not find sizes and ends by luck."""
    out = []
    while len(data) >= 4:
        kind, channel, size = (1, 2, 3, 8)[data[0] % 4], data[1] % 4, data[2]
        payload = data[4 : 4 + size]
        if kind == 1:
            payload = struct.pack(">I", INDEXES[data[3] % len(INDEXES)]) + payload
        elif kind == 2:
            payload = struct.pack(">HHQ", 60, 0, data[3] % 8) + payload
        out.append(struct.pack(">BHI", kind, channel, len(payload)) + payload + b"\xce")
        data = data[4 + size :]
    return b"".join(out)


def check(data: bytes) -> None:
    if len(data) < 3:
        return
    octets = data[3:] if data[0] & 1 else wrapped(data[3:])

    def cutter() -> frames.FrameCutter:
        return frames.FrameCutter(frame_max=4096, channel_max=2, body_bytes_max=300)

    whole = cutter()
    happened = cut(whole, octets)
    assert cut(cutter(), octets, data[1], data[2]) == happened
    assert whole.buffered_bytes <= len(octets)
    for name, *details in happened:
        if name == "publish":
            _, payload, props, body = details
            assert isinstance(payload, bytes)
            assert isinstance(props, bytes)
            assert isinstance(body, bytes)
            assert len(body) <= 300
            try:
                methods.decode_publish(payload)
                properties.scan(props)
            except AmqpError:
                continue
            read = properties.decode(props)
            assert read.headers is None or len(read.headers) <= len(props)
            assert properties.encode(read) == props


if __name__ == "__main__":
    if atheris is None:
        sys.exit("atheris is not installed")
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
