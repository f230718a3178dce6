"""Octets <-> frames. Machine: no I/O, no clock.

     0      1         3      7                7 + size
     | type | channel | size | payload ...    | 0xCE

    type 1 method   u16 class, u16 method, arguments           (methods.py)
    type 2 header   u16 class, u16 weight 0, u64 body size, properties (properties.py)
    type 3 body     a part of the content
    type 8 heartbeat, empty, on channel 0

`FrameCutter` is the server's reading side: it takes what the socket gave and returns what happened, in order, with no
object per message: publishes that follow each other on one channel with the same method payload (exchange, routing
key, flags) are one PublishRun, acknowledgements one Acks. Properties and bodies are slices of the read. The
arguments of a publish and the properties stay unread here: `decode_publish`, once per distinct payload, and `scan`
refuse what is malformed in them.

A wrong peer never raises: a Violation stands in the list behind everything that came before it. A soft one closes its
channel: until channel.close-ok nothing of that channel comes out, as after `close_channel`. A hard one closes the
connection: nothing comes out but connection.close and close-ok, as after `close_connection`. After a frame whose end is
not where its size says (`lost_sync`) nothing can be read any more.

Invariants: nothing is allocated for a size that a peer only announced; a channel holds one unfinished content at most;
cutting the octets anywhere gives the same events as all at once, but for where runs end.
Neighbours: methods.py, properties.py, errors.py below; connection.py and channel.py above.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import TypeAlias

import numpy as np
from pamqp import commands

from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.methods import FROM_CLIENT, Method, decode_method, encode_payload, ids, name_of

PROTOCOL_HEADER = b"AMQP\x00\x00\x09\x01"

METHOD, HEADER, BODY, HEARTBEAT = 1, 2, 3, 8
FRAME_END = 0xCE
FRAME_OVERHEAD = 8  # header and end octet around a payload

FRAME_MIN = 4096  # the least frame-max that may be negotiated
INITIAL_FRAME_MAX = 8192  # until tune-ok; RabbitMQ's, wide enough for a token in start-ok
FRAME_MAX = 131_072
BODY_BYTES_MAX = 134_217_728

_END = b"\xce"
_FRAME = struct.Struct(">BHI")
_SIZE = struct.Struct(">I")
_CONTENT = struct.Struct(">HHQ")
# A header frame as one look: type and channel, size, class and weight, body size.
_HEADER_FRAME = struct.Struct(">3sIIQ")
_BASIC_WEIGHT_0 = 60 << 16
# The end of a header frame and the start of the body frame behind it, as one number: end, type, channel, size.
_JOINT = struct.Struct(">Q")
# basic.ack and basic.nack as whole frames: type, channel, size, class, method, delivery tag, bits, end.
_ACK_FRAME = struct.Struct(">BHIHHQBB")
_ACK_PARTS = struct.Struct(">11sQBB")
assert _ACK_FRAME.size == _ACK_PARTS.size == 21

_PUBLISH_ID = struct.pack(">I", commands.Basic.Publish.index)
_ACK_ID = struct.pack(">I", commands.Basic.Ack.index)
_CONNECTION_CLASS = commands.Connection.frame_id
_CONNECTION_CLOSE = (commands.Connection.Close.index, commands.Connection.CloseOk.index)
_CHANNEL_CLOSE = (commands.Channel.Close.index, commands.Channel.CloseOk.index)
_PUBLISH = ids(commands.Basic.Publish)

# Fewer messages of one size than this are not worth the calls into numpy.
_STRIDE_MIN = 16
# Small reads held for one unfinished frame are joined at this many, so that their objects do not outweigh them.
_HELD_MAX = 64


@dataclass(slots=True)
class PublishRun:
    """Messages published one after the other on one channel with the same method payload. Complete once handed over."""

    channel: int
    method_payload: bytes
    properties: list[bytes]
    bodies: list[bytes]


@dataclass(slots=True)
class Acks:
    """basic.ack one after the other on one channel: (delivery tag, multiple). Complete once handed over."""

    channel: int
    acks: list[tuple[int, bool]]


@dataclass(frozen=True, slots=True)
class MethodFrame:
    """Any other method."""

    channel: int
    method: Method


@dataclass(frozen=True, slots=True)
class Heartbeat:
    pass


@dataclass(frozen=True, slots=True)
class Violation:
    """The peer broke the protocol; the answer is channel.close or connection.close, as `error.hard` says."""

    channel: int
    error: AmqpError


Event: TypeAlias = PublishRun | Acks | MethodFrame | Heartbeat | Violation

_HEARTBEAT_EVENT = Heartbeat()


@dataclass(slots=True)
class _Content:
    """A publish whose content has not all come. `missing` is -1 until the content header tells the size."""

    method_payload: bytes
    properties: bytes
    missing: int
    body: bytearray


def match_protocol_header(data: bytes) -> bool | None:
    """Whether a connection opens with `AMQP 0 0 9 1`; None while the octets so far leave it open.

    Anything else is answered with PROTOCOL_HEADER, and the socket closed.
    """
    if len(data) >= len(PROTOCOL_HEADER):
        return data.startswith(PROTOCOL_HEADER)
    return None if PROTOCOL_HEADER.startswith(data) else False


class FrameCutter:
    """The octets behind the protocol header of one connection, cut into events."""

    def __init__(
        self, *, frame_max: int = INITIAL_FRAME_MAX, channel_max: int = 0, body_bytes_max: int = BODY_BYTES_MAX
    ) -> None:
        # Octets of a whole frame; set to what tune-ok agreed on, never 0. As RabbitMQ, a payload of this size is let
        # through too: quite a few clients forget the eight octets around it.
        self.frame_max = frame_max
        # The highest channel; 0 until connection.open, when no channel may be used.
        self.channel_max = channel_max
        self.body_bytes_max = body_bytes_max
        self.lost_sync = False
        self._closing = False
        self._closing_channels: set[int] = set()
        self._contents: dict[int, _Content] = {}
        # Octets of an unfinished frame, and how many it takes to go on.
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = 0
        # False for the rest of a read in which a guess at equal sizes failed, so that nobody can make us guess wrong
        # again and again.
        self._guess_strides = True

    @property
    def buffered_bytes(self) -> int:
        """What is held of unfinished frames and contents."""
        return self._held_bytes + sum(len(content.body) for content in self._contents.values())

    def close_channel(self, channel: int) -> None:
        """We sent channel.close: until close-ok only it and channel.close come out of this channel."""
        self._contents.pop(channel, None)
        self._closing_channels.add(channel)

    def close_connection(self) -> None:
        """We sent connection.close: from now on only it and its answer come out."""
        self._closing = True
        self._contents.clear()
        self._closing_channels.clear()

    def receive(self, data: bytes) -> list[Event]:
        """Cut everything that is complete; never raises for what a peer sent."""
        events: list[Event] = []
        if self.lost_sync:
            return events
        if self._held:
            self._held.append(data)
            self._held_bytes += len(data)
            if self._held_bytes < self._wanted_bytes:
                if len(self._held) == _HELD_MAX:
                    self._held = [b"".join(self._held)]
                return events
            data = b"".join(self._held)
        self._guess_strides = True
        unpack = _FRAME.unpack_from
        pos = 0
        end = len(data)
        wanted = _FRAME.size
        while end - pos >= 7:
            kind, channel, size = unpack(data, pos)
            stop = pos + 7 + size
            complete = stop < end
            if size > self.frame_max or kind not in (1, 2, 3, 8) or (complete and data[stop] != FRAME_END):
                self._lose_sync(events, kind, channel, size, data[stop] if complete else FRAME_END)
                return events
            if not complete:
                wanted = stop + 1 - pos
                break
            if kind == METHOD:
                behind = 0
                method = data[pos + 7 : pos + 11]
                if method == _PUBLISH_ID:
                    behind = self._cut_publishes(events, data, pos, stop + 1, channel)
                elif method == _ACK_ID and size == 13:
                    behind = self._cut_acks(events, data, pos, channel)
                if behind:
                    pos = behind
                    continue
            self._take(events, kind, channel, data[pos + 7 : stop])
            pos = stop + 1
        self._held = [data[pos:]] if pos < end else []
        self._held_bytes = end - pos
        self._wanted_bytes = wanted
        return events

    # ---- the fast path: whole messages, whole acknowledgements -------------------------------------------------

    def _open(self, channel: int) -> bool:
        """Whether the channel stands between two methods, with nothing in the way of a new one."""
        return (
            0 < channel <= self.channel_max
            and channel not in self._contents
            and channel not in self._closing_channels
            and not self._closing
        )

    def _cut_publishes(self, events: list[Event], data: bytes, pos: int, behind: int, channel: int) -> int:
        """Cut the message whose method frame is data[pos:behind], and all publishes that follow on the channel.

        Returns the position behind them; 0 if not even the first is whole, lawful and in three frames (two when it
        has no body): then the slow path looks at it frame by frame, and knows what is wrong.
        """
        if not self._open(channel):
            return 0
        number = data[pos + 1 : pos + 3]
        method_start = b"\x01" + number
        header_start = b"\x02" + number
        joint = _JOINT.unpack(b"\xce\x03" + number + b"\x00\x00\x00\x00")[0]
        frame_max = self.frame_max
        body_max = min(self.body_bytes_max, frame_max)
        end = len(data)
        method_frame = data[pos:behind]
        run = self._run(events, channel, method_frame[7:-1])
        done = last_stride = 0
        while True:
            header = pos + len(method_frame)
            if header + 19 > end:
                break
            start, size, class_weight, body_size = _HEADER_FRAME.unpack_from(data, header)
            header_end = header + 7 + size
            body = header_end + 8 if body_size else header_end
            last = body + body_size
            if start != header_start or class_weight != _BASIC_WEIGHT_0 or not 12 <= size <= frame_max or last >= end:
                break
            if body_size and (body_size > body_max or _JOINT.unpack_from(data, header_end)[0] != joint + body_size):
                break
            if data[last] != FRAME_END:
                break
            run.properties.append(data[header + 19 : header_end])
            run.bodies.append(data[body:last])
            stride = last + 1 - pos
            done = pos = last + 1
            if stride == last_stride and self._guess_strides and body_size:
                done = pos = pos + stride * self._cut_strides(run, data, pos, stride, header_end - header - 19)
            last_stride = stride
            if data.startswith(method_frame, pos):
                continue
            if not data.startswith(method_start, pos) or not data.startswith(_PUBLISH_ID, pos + 7):
                break
            behind = pos + 8 + _SIZE.unpack_from(data, pos + 3)[0]
            if behind > end or behind - pos > frame_max or data[behind - 1] != FRAME_END:
                break
            if not events or events[-1] is not run:
                events.append(run)
            method_frame = data[pos:behind]
            run = PublishRun(channel, method_frame[7:-1], [], [])
            last_stride = 0
        if run.bodies and (not events or events[-1] is not run):
            events.append(run)
        return done

    def _cut_strides(self, run: PublishRun, data: bytes, pos: int, stride: int, properties_size: int) -> int:
        """Cut the messages from `pos` on that have the very sizes of the one before `pos`; return how many.

        Equal sizes make a matrix, one row per message, in which all octets but properties and body must equal those
        of the message before. Measured: 0.08 us per message with equal properties, 0.25 with unique ones, against 0.7
        one by one.
        """
        count = (len(data) - pos) // stride
        sizes_length = 7 + len(run.method_payload) + 1 + 19
        sizes = data[pos - stride : pos - stride + sizes_length]
        if count < _STRIDE_MIN or not data.startswith(sizes, pos + (_STRIDE_MIN - 1) * stride):
            return 0
        properties_end = sizes_length + properties_size
        body = properties_end + 8
        body_size = stride - body - 1
        rows = np.frombuffer(data, np.uint8, count * stride, pos).reshape(count, stride)
        same = rows[:, :body] == np.frombuffer(data, np.uint8, body, pos - stride)
        lawful = rows[:, -1] == FRAME_END
        equal_properties = bool(same.all())
        if not equal_properties:
            lawful &= same[:, :sizes_length].all(axis=1) & same[:, properties_end:].all(axis=1)
        if not lawful.all():
            count = int(lawful.argmin())
        self._guess_strides = count >= _STRIDE_MIN
        view = memoryview(data)[pos : pos + count * stride]
        if equal_properties:
            run.properties += repeat(run.properties[-1], count)
            run.bodies += [part for (part,) in struct.iter_unpack(f"{body}x{body_size}sx", view)]
        elif count:
            layout = f"{sizes_length}x{properties_size}s8x{body_size}sx"
            properties, bodies = zip(*struct.iter_unpack(layout, view), strict=True)
            run.properties += properties
            run.bodies += bodies
        return count

    def _run(self, events: list[Event], channel: int, method_payload: bytes) -> PublishRun:
        """The run at the end of the list if a publish with this payload continues it, else a new one, not yet in it."""
        if events:
            last = events[-1]
            if type(last) is PublishRun and last.channel == channel and last.method_payload == method_payload:
                return last
        return PublishRun(channel, method_payload, [], [])

    def _cut_acks(self, events: list[Event], data: bytes, pos: int, channel: int) -> int:
        """Cut the basic.ack at `pos` and all that follow on the channel; return the position behind them, 0 if none."""
        if not self._open(channel):
            return 0
        acks = self._acks(events, channel)
        append = acks.acks.append
        start = data[pos : pos + 11]
        count = (len(data) - pos) // 21
        first = pos
        for front, tag, bits, last in _ACK_PARTS.iter_unpack(memoryview(data)[pos : pos + 21 * count]):
            if front != start or last != FRAME_END:
                break
            append((tag, bits & 1 == 1))
            pos += 21
        assert pos > first, "receive() has seen the first frame whole"
        if not events or events[-1] is not acks:
            events.append(acks)
        return pos

    def _acks(self, events: list[Event], channel: int) -> Acks:
        if events:
            last = events[-1]
            if type(last) is Acks and last.channel == channel:
                return last
        return Acks(channel, [])

    # ---- the slow path: one frame at a time --------------------------------------------------------------------

    def _take(self, events: list[Event], kind: int, channel: int, payload: bytes) -> None:
        try:
            if self._closing:
                self._take_while_closing(events, kind, channel, payload)
            elif channel == 0:
                self._take_on_channel_0(events, kind, payload)
            elif channel > self.channel_max:
                raise self._no_such_channel(channel)
            elif channel in self._closing_channels:
                self._take_on_closing_channel(events, kind, channel, payload)
            else:
                self._take_on_channel(events, kind, channel, payload)
        except AmqpError as error:
            events.append(Violation(channel, error))
            if error.hard:
                self.close_connection()
            else:
                self.close_channel(channel)

    def _take_while_closing(self, events: list[Event], kind: int, channel: int, payload: bytes) -> None:
        # Everything else was sent before the peer knew, and is void.
        if kind == METHOD and channel == 0 and _index(payload) in _CONNECTION_CLOSE:
            try:
                events.append(MethodFrame(0, decode_method(payload)))
            except AmqpError:
                return  # one violation has been told; a second close would not be read

    def _take_on_channel_0(self, events: list[Event], kind: int, payload: bytes) -> None:
        if kind == HEARTBEAT:
            if payload:
                raise amqp_error(ReplyCode.FRAME_ERROR, f"heartbeat with {len(payload)} octets")
            events.append(_HEARTBEAT_EVENT)
            return
        if kind != METHOD:
            raise amqp_error(ReplyCode.UNEXPECTED_FRAME, f"frame of type {kind} on channel 0")
        method = self._method(payload)
        if ids(method)[0] != _CONNECTION_CLASS:
            raise amqp_error(ReplyCode.CHANNEL_ERROR, f"{name_of(method)} on channel 0", *ids(method))
        events.append(MethodFrame(0, method))

    def _take_on_closing_channel(self, events: list[Event], kind: int, channel: int, payload: bytes) -> None:
        if kind == METHOD and _index(payload) in _CHANNEL_CLOSE:
            method = decode_method(payload)
            if isinstance(method, commands.Channel.CloseOk):
                self._closing_channels.discard(channel)
            events.append(MethodFrame(channel, method))

    def _take_on_channel(self, events: list[Event], kind: int, channel: int, payload: bytes) -> None:
        content = self._contents.get(channel)
        if kind == HEARTBEAT:
            raise amqp_error(ReplyCode.UNEXPECTED_FRAME, f"heartbeat on channel {channel}")
        if content is None:
            if kind != METHOD:
                raise amqp_error(ReplyCode.UNEXPECTED_FRAME, "expected method frame, got non method frame instead")
            self._take_method(events, channel, payload)
        elif content.missing < 0:
            if kind != HEADER:
                text = "expected content header for class 60, got non content header frame instead"
                raise amqp_error(ReplyCode.UNEXPECTED_FRAME, text, *_PUBLISH)
            self._take_header(events, channel, content, payload)
        elif kind != BODY:
            text = "expected content body, got non content body frame instead"
            raise amqp_error(ReplyCode.UNEXPECTED_FRAME, text, *_PUBLISH)
        else:
            self._take_body(events, channel, content, payload)

    def _take_method(self, events: list[Event], channel: int, payload: bytes) -> None:
        if payload.startswith(_PUBLISH_ID):
            self._contents[channel] = _Content(payload, b"", -1, bytearray())
            return
        method = self._method(payload)
        if ids(method)[0] == _CONNECTION_CLASS:
            text = f"{name_of(method)} on channel {channel}"
            raise amqp_error(ReplyCode.COMMAND_INVALID, text, *ids(method))
        events.append(MethodFrame(channel, method))

    def _take_header(self, events: list[Event], channel: int, content: _Content, payload: bytes) -> None:
        if len(payload) < _CONTENT.size:
            raise amqp_error(ReplyCode.FRAME_ERROR, f"content header of {len(payload)} octets", *_PUBLISH)
        class_id, weight, body_size = _CONTENT.unpack_from(payload)
        if class_id != 60 or weight:
            text = f"expected content header for class 60, got one for class {class_id}, weight {weight}"
            raise amqp_error(ReplyCode.UNEXPECTED_FRAME, text, *_PUBLISH)
        if body_size > self.body_bytes_max:
            text = f"message size {body_size} is larger than configured max size {self.body_bytes_max}"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH)
        content.properties = payload[12:]
        content.missing = body_size
        if not body_size:
            self._finish(events, channel, content, b"")

    def _take_body(self, events: list[Event], channel: int, content: _Content, payload: bytes) -> None:
        missing = content.missing - len(payload)
        if missing < 0:
            raise amqp_error(ReplyCode.FRAME_ERROR, "content body frame exceeds remaining content size", *_PUBLISH)
        if missing:
            content.missing = missing
            content.body += payload
        elif content.body:
            content.body += payload
            self._finish(events, channel, content, bytes(content.body))
        else:
            self._finish(events, channel, content, payload)

    def _finish(self, events: list[Event], channel: int, content: _Content, body: bytes) -> None:
        del self._contents[channel]
        run = self._run(events, channel, content.method_payload)
        run.properties.append(content.properties)
        run.bodies.append(body)
        if not events or events[-1] is not run:
            events.append(run)

    def _method(self, payload: bytes) -> Method:
        method = decode_method(payload)
        if method.index not in FROM_CLIENT:
            raise amqp_error(ReplyCode.COMMAND_INVALID, f"{name_of(method)} from a client", *ids(method))
        return method

    def _no_such_channel(self, channel: int) -> AmqpError:
        if not self.channel_max:
            return amqp_error(ReplyCode.UNEXPECTED_FRAME, f"frame on channel {channel} before connection.open")
        text = f"channel {channel} is above the negotiated channel_max ({self.channel_max})"
        return amqp_error(ReplyCode.NOT_ALLOWED, text)

    def _lose_sync(self, events: list[Event], kind: int, channel: int, size: int, end_octet: int) -> None:
        if kind not in (METHOD, HEADER, BODY, HEARTBEAT):
            text = f"frame of unknown type {kind}"
        elif size > self.frame_max:
            text = f"frame of type {kind} with {size} octets, frame_max is {self.frame_max}"
        else:
            text = f"frame of type {kind} with {size} octets ends with {end_octet:#04x} instead of 0xce"
        if not self._closing:
            events.append(Violation(channel, amqp_error(ReplyCode.FRAME_ERROR, text)))
        self.close_connection()
        self.lost_sync = True
        self._held = []
        self._held_bytes = 0


def _index(payload: bytes) -> int:
    return int.from_bytes(payload[:4], "big") if len(payload) >= 4 else -1


# ---- outgoing --------------------------------------------------------------------------------------------------

HEARTBEAT_FRAME = _FRAME.pack(HEARTBEAT, 0, 0) + _END

_DELIVER_INDEX = commands.Basic.Deliver.index
_GET_OK = struct.Struct(">IQ?")
_RETURN = struct.Struct(">IH")
# The end of a method frame and the header frame behind it up to its properties.
_HEADER_SIZES = struct.Struct(">BBHIIQ")
_JOINT_PARTS = struct.Struct(">BBHI")


@lru_cache(maxsize=64)
def _deliver_layout(start_length: int) -> struct.Struct:
    """A deliver frame up to its route: type, channel, size, method and consumer tag, delivery tag, redelivered."""
    return struct.Struct(f">BHI{start_length}sQ?")


def encode_method(channel: int, method: Method) -> bytes:
    payload = encode_payload(method)
    return _FRAME.pack(METHOD, channel, len(payload)) + payload + _END


def encode_ack(channel: int, delivery_tag: int, multiple: bool) -> bytes:
    return _ACK_FRAME.pack(METHOD, channel, 13, 60, 80, delivery_tag, multiple, FRAME_END)


def encode_nack(channel: int, delivery_tag: int, multiple: bool, requeue: bool = False) -> bytes:
    return _ACK_FRAME.pack(METHOD, channel, 13, 60, 120, delivery_tag, multiple | requeue << 1, FRAME_END)


def encode_get_ok(
    channel: int,
    delivery_tag: int,
    redelivered: bool,
    exchange: bytes,
    routing_key: bytes,
    message_count: int,
    properties: bytes,
    body: bytes,
    frame_max: int,
) -> bytes:
    head = _GET_OK.pack(commands.Basic.GetOk.index, delivery_tag, redelivered)
    payload = head + _short(exchange) + _short(routing_key) + _SIZE.pack(message_count)
    return _with_content(channel, payload, properties, body, frame_max)


def encode_return(
    channel: int,
    reply_code: ReplyCode,
    reply_text: str,
    exchange: bytes,
    routing_key: bytes,
    properties: bytes,
    body: bytes,
    frame_max: int,
) -> bytes:
    head = _RETURN.pack(commands.Basic.Return.index, reply_code)
    payload = head + _short(reply_text.encode()) + _short(exchange) + _short(routing_key)
    return _with_content(channel, payload, properties, body, frame_max)


def encode_deliver_run(
    channel: int,
    consumer_tag: bytes,
    first_delivery_tag: int,
    redelivered: Sequence[bool],
    exchanges: Sequence[bytes],
    routing_keys: Sequence[bytes],
    properties: Sequence[bytes],
    bodies: Sequence[bytes],
    frame_max: int,
) -> bytes:
    """basic.deliver with its content, once for each body, delivery tags counting up from the first.

    A body beyond what a frame holds is split; one call should carry no more than the write buffer may.
    """
    count = len(bodies)
    # One pack per message when all have one shape: 0.2 us against 0.5 (100 octets, measured).
    if (
        count >= 4
        and 0 < len(bodies[0]) <= frame_max - FRAME_OVERHEAD
        and routing_keys.count(routing_keys[0]) == count
        and exchanges.count(exchanges[0]) == count
        and redelivered.count(redelivered[0]) == count
        and len(set(map(len, bodies))) == 1
        and len(set(map(len, properties))) == 1
    ):
        return _deliver_alike(
            channel,
            consumer_tag,
            first_delivery_tag,
            redelivered[0],
            _short(exchanges[0]) + _short(routing_keys[0]),
            properties,
            bodies,
        )
    start = _SIZE.pack(_DELIVER_INDEX) + _short(consumer_tag)
    fixed = len(start) + 9
    pack_method = _deliver_layout(len(start)).pack
    pack_sizes = _HEADER_SIZES.pack
    pack_joint = _JOINT_PARTS.pack
    routes: dict[tuple[bytes, bytes], bytes] = {}
    body_max = frame_max - FRAME_OVERHEAD
    parts: list[bytes | memoryview] = []
    tag = first_delivery_tag
    for again, exchange, key, props, body in zip(redelivered, exchanges, routing_keys, properties, bodies, strict=True):
        route = routes.get((exchange, key))
        if route is None:
            route = routes[exchange, key] = _short(exchange) + _short(key)
        size = len(body)
        method = pack_method(METHOD, channel, fixed + len(route), start, tag, again)
        header = pack_sizes(FRAME_END, HEADER, channel, len(props) + 12, _BASIC_WEIGHT_0, size)
        if 0 < size <= body_max:
            parts += (method, route, header, props, pack_joint(FRAME_END, BODY, channel, size), body, _END)
        else:
            parts += (method, route, header, props, _END)
            _append_body(parts, channel, body, body_max)
        tag += 1
    return b"".join(parts)


def _deliver_alike(
    channel: int,
    consumer_tag: bytes,
    first_delivery_tag: int,
    redelivered: bool,
    route: bytes,
    properties: Sequence[bytes],
    bodies: Sequence[bytes],
) -> bytes:
    tag = _short(consumer_tag)
    properties_size, body_size = len(properties[0]), len(bodies[0])
    start = _FRAME.pack(METHOD, channel, 13 + len(tag) + len(route)) + _SIZE.pack(_DELIVER_INDEX) + tag
    middle = (
        bytes((redelivered,))
        + route
        + _END
        + _FRAME.pack(HEADER, channel, properties_size + 12)
        + _CONTENT.pack(60, 0, body_size)
    )
    joint = _END + _FRAME.pack(BODY, channel, body_size)
    pack = struct.Struct(f">{len(start)}sQ{len(middle)}s{properties_size}s8s{body_size}sB").pack
    tags = range(first_delivery_tag, first_delivery_tag + len(bodies))
    return b"".join(
        map(pack, repeat(start), tags, repeat(middle), properties, repeat(joint), bodies, repeat(FRAME_END))
    )


def _with_content(channel: int, payload: bytes, properties: bytes, body: bytes, frame_max: int) -> bytes:
    parts: list[bytes | memoryview] = [
        _FRAME.pack(METHOD, channel, len(payload)),
        payload,
        _END,
        _FRAME.pack(HEADER, channel, len(properties) + 12),
        _CONTENT.pack(60, 0, len(body)),
        properties,
        _END,
    ]
    _append_body(parts, channel, body, frame_max - FRAME_OVERHEAD)
    return b"".join(parts)


def _append_body(parts: list[bytes | memoryview], channel: int, body: bytes, body_max: int) -> None:
    view = memoryview(body)
    for start in range(0, len(body), body_max):
        piece = view[start : start + body_max]
        parts += (_FRAME.pack(BODY, channel, len(piece)), piece, _END)


def _short(text: bytes) -> bytes:
    """A short string; ValueError above 255 octets."""
    return bytes((len(text),)) + text
