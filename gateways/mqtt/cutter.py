"""Octets -> packets, incrementally. Machine: no I/O, no clock.

`PacketCutter` is the reading side of a connection: it takes what the socket gave and returns what happened, in order,
with no object per message: PUBLISH packets that follow each other with the same first byte (QoS, retain, dup) are one
PublishRun, acknowledgements of one kind that went well one AckRun. Any other packet comes as its value. Topics and
properties are checked once per distinct bytes. Topic aliases are resolved here and do not come out.

A wrong peer never raises: a Violation stands behind everything that came before it, and nothing comes after it, nor
after a DISCONNECT. The first packet is a CONNECT and no other is; it decides the version.

Invariants: nothing is held for a packet whose first byte or size is refused, and never more than one unfinished packet;
cutting the octets anywhere gives the same events as all at once, but for where runs end; what comes out is what
`decode_packet` says, packet by packet. Neighbours: decoder.py, properties.py, topics.py below, the session above.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

from headrace.gateways.mqtt.decoder import (
    check_publish_flags,
    decode_connect,
    decode_packet,
    packet_type,
    version_of_connect,
)
from headrace.gateways.mqtt.packets import Connect, Disconnect, Packet, Puback, Pubcomp, Publish, Pubrec, Pubrel
from headrace.gateways.mqtt.properties import NO_PROPERTIES, PublishScans
from headrace.gateways.mqtt.reasons import (
    MqttError,
    PacketType,
    ReasonCode,
    Version,
    malformed,
    protocol_error,
)
from headrace.gateways.mqtt.topics import TopicNames

PACKET_BYTES_MAX = 268_435_460  # what the standards allow: five bytes in front of the largest remaining length

_CONNECT = 0x10
# First bytes of a lawful PUBLISH: QoS 0 without dup; QoS 1 and 2 with and without.
_PUBLISHES = frozenset((0x30, 0x31, 0x32, 0x33, 0x34, 0x35, 0x3A, 0x3B, 0x3C, 0x3D))
_PUBLISH_HEADS = frozenset(bytes((first,)) for first in _PUBLISHES)
# The first two bytes of an acknowledgement in its shortest form, which says that it went well.
_SHORT_ACKS = {0x40: 0x4002, 0x50: 0x5002, 0x62: 0x6202, 0x70: 0x7002}

# Fewer messages of one size than this are not worth a guess at more of them.
_STRIDE_MIN = 16


@dataclass(slots=True)
class PublishRun:
    """PUBLISH packets one after the other with the same first byte. Complete once handed over.

    The columns are equally long, `packet_ids` excepted, which is empty at QoS 0. Topics are topic names, well formed,
    and never empty; equal ones are mostly one object. Properties are blobs as the log keeps them: checked, and without
    the topic alias; MQTT 3.1.1 has empty ones.
    """

    first_byte: int
    topics: list[bytes] = field(default_factory=list)
    properties: list[bytes] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    packet_ids: list[int] = field(default_factory=list)

    @property
    def qos(self) -> int:
        return self.first_byte >> 1 & 3

    @property
    def retain(self) -> bool:
        return self.first_byte & 1 == 1

    @property
    def dup(self) -> bool:
        return self.first_byte & 8 == 8


@dataclass(slots=True)
class AckRun:
    """PUBACK, PUBREC, PUBREL or PUBCOMP one after the other, success and no properties each. Any other is a packet."""

    kind: PacketType
    packet_ids: list[int]


@dataclass(frozen=True, slots=True)
class Violation:
    """The peer broke the protocol; the connection ends."""

    error: MqttError


Event: TypeAlias = PublishRun | AckRun | Packet | Violation


class PacketCutter:
    """The octets of one connection, cut into events."""

    __slots__ = (
        "_aliases",
        "_connected",
        "_from_client",
        "_guess_strides",
        "_held",
        "_scans",
        "_topics",
        "_wanted_bytes",
        "connect_bytes_max",
        "finished",
        "packet_bytes_max",
        "topic_alias_max",
        "version",
    )

    def __init__(
        self,
        *,
        packet_bytes_max: int = PACKET_BYTES_MAX,
        connect_bytes_max: int | None = None,
        topic_alias_max: int = 0,
        topics: TopicNames | None = None,
        scans: PublishScans | None = None,
        from_client: bool = True,
        version: Version | None = None,
    ) -> None:
        """`topics` and `scans` are meant to be shared by all connections.

        The reading side of a client says `from_client=False` and its version; it gets every packet as its value.
        """
        # Octets of a whole packet; one that announces more is answered with 0x95 before anything of it is held.
        self.packet_bytes_max = packet_bytes_max
        # The same for CONNECT, which comes from somebody we do not know yet.
        self.connect_bytes_max = packet_bytes_max if connect_bytes_max is None else connect_bytes_max
        # What our CONNACK says; MQTT 5 only.
        self.topic_alias_max = topic_alias_max
        # Set by CONNECT, also by one that is refused: how to answer. None: no answer would be understood.
        self.version: Version | None = version
        # Nothing comes out any more: a Violation or a DISCONNECT has.
        self.finished = False
        self._connected = version is not None
        self._from_client = from_client
        self._topics = TopicNames() if topics is None else topics
        self._scans = PublishScans() if scans is None else scans
        self._aliases: dict[int, bytes] = {}
        # Octets of an unfinished packet, and how many it takes to go on.
        self._held = bytearray()
        self._wanted_bytes = 0
        # False for the rest of a read in which a guess at equal sizes failed, so that nobody can make us guess wrong
        # again and again.
        self._guess_strides = True

    @property
    def buffered_bytes(self) -> int:
        """What is held of an unfinished packet."""
        return len(self._held)

    def receive(self, data: bytes) -> list[Event]:
        """Cut everything that is complete; never raises for what a peer sent."""
        events: list[Event] = []
        if self.finished:
            return events
        held = self._held
        if held:
            held += data
            if len(held) < self._wanted_bytes:
                return events
            data = bytes(held)
            held.clear()
        self._guess_strides = True
        pos = 0
        if self._connected and self._from_client and data[:1] in _PUBLISH_HEADS:
            # Most reads hold these and nothing else.
            pos = self._cut_publishes(events, data, 0)
            if pos == len(data):
                return events
        try:
            pos, self._wanted_bytes = self._cut(events, data, pos)
        except MqttError as error:
            events.append(Violation(error))
            self.finished = True
        if not self.finished and pos < len(data):
            held += memoryview(data)[pos:]
        return events

    def _cut(self, events: list[Event], data: bytes, pos: int) -> tuple[int, int]:
        """The position behind the last whole packet, and how many octets from there on are worth another look."""
        end = len(data)
        while pos < end:
            first_byte = data[pos]
            behind = pos
            if self._connected and self._from_client:
                if first_byte in _PUBLISHES:
                    behind = self._cut_publishes(events, data, pos)
                elif first_byte in _SHORT_ACKS:
                    behind = self._cut_acks(events, data, pos)
            if behind > pos:
                pos = behind
                continue
            kind = self._type(first_byte)
            body, size = _remaining_length(data, pos, self.version)
            if not body:
                return pos, size
            stop = body + size
            limit = self.packet_bytes_max if self._connected else self.connect_bytes_max
            if stop - pos > limit:
                text = f"{kind.name} of {stop - pos} bytes, at most {limit} are allowed"
                raise MqttError(ReasonCode.PACKET_TOO_LARGE, text)
            if stop > end:
                return pos, stop - pos
            self._take(events, first_byte, data[body:stop], body - pos)
            if self.finished:
                break
            pos = stop
        return pos, 2

    # ---- one packet at a time --------------------------------------------------------------------------------------

    def _type(self, first_byte: int) -> PacketType:
        """Refuses what the first byte alone condemns, before anything is held for it."""
        if not self._connected:
            if first_byte != _CONNECT:
                raise protocol_error(f"the first packet begins with {first_byte:#04x}: no CONNECT", "MQTT-3.1.0-1")
            return PacketType.CONNECT
        assert self.version is not None
        kind = packet_type(first_byte, self.version, from_client=self._from_client)
        if kind is PacketType.CONNECT:
            raise protocol_error("a second CONNECT", "MQTT-3.1.0-2")
        if kind is PacketType.PUBLISH:
            check_publish_flags(first_byte)
        return kind

    def _take(self, events: list[Event], first_byte: int, body: bytes, head_bytes: int) -> None:
        if not self._connected:
            events.append(self._connect(body, head_bytes))
            return
        assert self.version is not None
        packet = decode_packet(first_byte, body, self.version, from_client=self._from_client)
        if self._from_client:
            if isinstance(packet, Publish):
                # All others go the fast way.
                raise self._alias_error(packet)
            if isinstance(packet, Puback | Pubrec | Pubrel | Pubcomp) and _went_well(packet):
                run = _acks(events, PacketType(first_byte >> 4))
                run.packet_ids.append(packet.packet_id)
                _put(events, run)
                return
        events.append(packet)
        self.finished = isinstance(packet, Disconnect)

    def _connect(self, body: bytes, head_bytes: int) -> Connect:
        self.version = version_of_connect(body)
        connect = decode_connect(body)
        # The version, and with it this rule, is known only now.
        if connect.version is Version.V5 and head_bytes > 2 and len(body) < 1 << 7 * (head_bytes - 2):
            raise _needlessly_long(len(body))
        self._connected = True
        return connect

    def _resolve(self, alias: int, topic: bytes | None) -> bytes | None:
        """The topic that an alias stands for or, given with one, stands for from now on; None: it is unlawful."""
        if alias > self.topic_alias_max:
            return None
        if topic is None:
            return self._aliases.get(alias)
        self._aliases[alias] = topic
        return topic

    def _alias_error(self, packet: Publish) -> MqttError:
        alias = packet.properties.topic_alias
        assert alias is not None, "decoded and yet not cut in a run"
        if alias > self.topic_alias_max:
            text = f"the topic alias {alias} is above {self.topic_alias_max}"
            return MqttError(ReasonCode.TOPIC_ALIAS_INVALID, text, "MQTT-3.3.2-9")
        return protocol_error(f"the topic alias {alias} stands for no topic yet")

    # ---- the fast path: whole runs ---------------------------------------------------------------------------------

    def _cut_publishes(self, events: list[Event], data: bytes, pos: int) -> int:
        """Cut the PUBLISH at `pos` and all that follow with its first byte; return the position behind them.

        Stops at whatever is not whole and lawful, which the slow path then looks at, and knows what is wrong.
        """
        first_byte = data[pos]
        run = _run(events, first_byte)
        topics, blobs, payloads, packet_ids = run.topics, run.properties, run.payloads, run.packet_ids
        version = self.version
        assert version is not None
        v5 = version is Version.V5
        qos = first_byte & 6
        limit = self.packet_bytes_max
        known_topic = self._topics.known.get
        known_scan = self._scans.known.get
        end = len(data)
        packet_id = id_at = last_stride = 0
        last_topic = last_blob = None
        try:
            while data[pos] == first_byte:
                size = data[pos + 1]
                body = pos + 2
                if size > 127:
                    size = size & 127 | data[body] << 7
                    body += 1
                    # Two bytes, and not one too many, or the slower way. The call costs 0.4 us.
                    if not 128 <= size < 16_384:
                        body, size = _remaining_length(data, pos, version)
                        if not body:
                            break
                stop = body + size
                if stop > end or stop - pos > limit:
                    break
                at = body + 2 + (data[body] << 8 | data[body + 1])
                raw = data[body + 2 : at]
                topic = known_topic(raw)
                if topic is None and raw:
                    topic = self._topics.check(raw, version)
                if qos:
                    packet_id = data[at] << 8 | data[at + 1]
                    if not packet_id:
                        break
                    id_at = at - pos
                    at += 2
                blob = b""
                if v5:
                    blob_size = data[at]
                    at += 1
                    if blob_size:
                        if blob_size > 127:
                            at, blob_size = _remaining_length(data, at - 2, version)
                            if not at:
                                break
                        blob = data[at : at + blob_size]
                        at += blob_size
                        scan = known_scan(blob) or self._scans.of(blob)
                        blob = scan.stored
                        if scan.topic_alias:
                            topic = self._resolve(scan.topic_alias, topic)
                # Whatever read past the packet moved past it too.
                if at > stop or topic is None:
                    break
                topics.append(topic)
                blobs.append(blob)
                payloads.append(data[at:stop])
                if qos:
                    packet_ids.append(packet_id)
                stride = stop - pos
                pos = stop
                if stride == last_stride and topic is last_topic and blob is last_blob and self._guess_strides:
                    pos += stride * self._cut_strides(run, data, pos, stride, at - stop + stride, id_at)
                if pos == end:
                    # Not by an IndexError: a read often holds one message only.
                    break
                last_stride = stride
                last_topic = topic
                last_blob = blob
        except (IndexError, MqttError):
            # The end of the read, or something wrong with this packet.
            pass
        if topics:
            _put(events, run)
        return pos

    def _cut_strides(self, run: PublishRun, data: bytes, pos: int, stride: int, head: int, id_at: int) -> int:
        """Cut the packets from `pos` on that are as long as the one before and begin as it does; return how many.

        `head` octets stand before its payload, its packet identifier (if `id_at` is not 0) among them. Equal sizes make
        a matrix, one row per packet, in which all octets before the payload but the identifier must equal those of the
        packet before. Rows are looked at in growing numbers, so that a guess costs no more than what it finds.
        """
        available = (len(data) - pos) // stride
        model = data[pos - stride : pos - stride + head]
        same = id_at or head
        if available < _STRIDE_MIN or not data.startswith(model[:same], pos + (_STRIDE_MIN - 1) * stride):
            return 0
        done = 0
        rows = 256
        while done < available:
            count = min(rows, available - done)
            found = _cut_rows(run, data, pos + done * stride, stride, count, model, id_at)
            done += found
            if found < count:
                break
            rows *= 4
        self._guess_strides = done >= _STRIDE_MIN
        run.topics += repeat(run.topics[-1], done)
        run.properties += repeat(run.properties[-1], done)
        return done

    def _cut_acks(self, events: list[Event], data: bytes, pos: int) -> int:
        """Cut the acknowledgement at `pos` and all of its kind that follow, as long as they have the shortest form."""
        start = _SHORT_ACKS[data[pos]]
        run = _acks(events, PacketType(data[pos] >> 4))
        first = pos
        rows = 16
        while count := min(rows, (len(data) - pos) // 4):
            # Looked at in growing numbers: much else may follow in the read.
            numbers = struct.unpack_from(f">{2 * count}H", data, pos)
            heads, ids = numbers[0::2], numbers[1::2]
            found = count
            if heads.count(start) != count or 0 in ids:
                found = next(place for place in range(count) if heads[place] != start or not ids[place])
            run.packet_ids += ids[:found]
            pos += 4 * found
            if found < count:
                break
            rows *= 4
        if pos > first:
            _put(events, run)
        return pos


def _cut_rows(run: PublishRun, data: bytes, pos: int, stride: int, count: int, model: bytes, id_at: int) -> int:
    view = memoryview(data)[pos : pos + count * stride]
    head = len(model)
    if not id_at:
        fronts, payloads = zip(*struct.iter_unpack(f"{head}s{stride - head}s", view), strict=True)
        found = _alike(fronts, model)
    else:
        behind = id_at + 2
        layout = f">{id_at}sH{head - behind}s{stride - head}s"
        fronts, packet_ids, tails, payloads = zip(*struct.iter_unpack(layout, view), strict=True)
        found = min(_alike(fronts, model[:id_at]), _alike(tails, model[behind:]))
        if 0 in packet_ids:
            found = min(found, packet_ids.index(0))
        run.packet_ids += packet_ids[:found]
    run.payloads += payloads[:found]
    return found


def _alike(parts: Sequence[bytes], model: bytes) -> int:
    """How many from the first on are like the model."""
    count = len(parts)
    if parts.count(model) == count:
        return count
    return next(place for place, part in enumerate(parts) if part != model)


def _remaining_length(data: bytes, pos: int, version: Version | None) -> tuple[int, int]:
    """The length behind the octet at `pos`: the position behind it, and its value.

    While it is not all there: 0, and how many octets from `pos` on are worth another look.
    """
    value = 0
    at = pos + 1
    for shift in (0, 7, 14, 21):
        if at >= len(data):
            return 0, at + 1 - pos
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # MQTT 3.1.1 does not ask for the shortest form.
            if shift and not byte and version is Version.V5:
                raise _needlessly_long(value)
            return at, value
    raise malformed("a length of more than four bytes")


def _needlessly_long(value: int) -> MqttError:
    return malformed(f"{value} is written in more bytes than it needs", "MQTT-1.5.5-1")


def _went_well(packet: Puback | Pubrec | Pubrel | Pubcomp) -> bool:
    """The longer forms can say the same as the shortest."""
    return packet.reason is ReasonCode.SUCCESS and packet.properties == NO_PROPERTIES


def _run(events: list[Event], first_byte: int) -> PublishRun:
    """The run at the end of the list if a PUBLISH with this first byte continues it, else a new one, not yet in it."""
    last = events[-1] if events else None
    if type(last) is PublishRun and last.first_byte == first_byte:
        return last
    return PublishRun(first_byte, [], [], [], [])


def _acks(events: list[Event], kind: PacketType) -> AckRun:
    last = events[-1] if events else None
    return last if type(last) is AckRun and last.kind is kind else AckRun(kind, [])


def _put(events: list[Event], run: PublishRun | AckRun) -> None:
    if not events or events[-1] is not run:
        events.append(run)
