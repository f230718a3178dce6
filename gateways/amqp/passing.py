"""Frames of a relayed connection, one direction: found in passing, not taken apart. Machine: no I/O.

What is handed on ends behind a whole method or a whole content, so that another leader can go on from there: a content
that is not complete is held back, up to HOLD_BYTES; a larger one is passed frame by frame, and its channel is `begun`.
Messages of one shape that follow each other (an application's usually do) are found as one matrix, a row for each: what
is read of them is the delivery tag of the last, or how many they are.
Octets that are no frames are passed on as they are, and nothing more is found (`lost`): the leader says what is wrong
with them.

Invariants: cutting the octets anywhere finds the same, and hands on the same octets; what is held is less than
HOLD_BYTES and a frame.
Neighbours: frames.py has the layout, tracking.py keeps what is found here.
"""

import struct
from typing import Protocol

import numpy as np
from pamqp import commands

from headrace.gateways.amqp.frames import BODY, FRAME_END, FRAME_OVERHEAD, HEADER, HEARTBEAT, METHOD

HOLD_BYTES = 256 * 1024
# Fewer messages of one shape than this are compared one by one.
ROWS_MIN = 16

_FRAME = struct.Struct(">BHI")
_BODY_SIZE = struct.Struct(">Q")
# Type, channel, size and method of a frame, and the octet behind: the length of a deliver's consumer tag.
_METHOD_HEAD = 12
# The end of a method frame, and a header frame up to the body's size.
_JOINT = 20
# Class and method of contents and of what settles them; payloads begin with it.
_CONTENTS = frozenset(
    struct.pack(">I", kind.index)
    for kind in (commands.Basic.Publish, commands.Basic.Deliver, commands.Basic.GetOk, commands.Basic.Return)
)
_SETTLING = frozenset(
    struct.pack(">I", kind.index) for kind in (commands.Basic.Ack, commands.Basic.Nack, commands.Basic.Reject)
)


class Finder(Protocol):
    """Who is told what was found, in the order of the octets."""

    def found_method(self, channel: int, payload: bytes) -> None:
        """A method without content that settles nothing."""

    def found_settling(self, channel: int, payload: bytes) -> None:
        """basic.ack, nack or reject: the last of some on this channel that followed each other."""

    def found_contents(self, channel: int, payload: bytes, count: int) -> None:
        """So many whole contents of one method; the payload is the last one's."""

    def found_content(self, channel: int, payload: bytes, header: bytes) -> None:
        """One whole content of a channel that is watched, with the payload of its header frame."""


class _Part:
    """A content that has not all come; `missing` is -1 until its size is known."""

    __slots__ = ("header", "missing", "payload")

    def __init__(self, payload: bytes) -> None:
        self.payload = payload
        self.header = b""
        self.missing = -1


class Passing:
    def __init__(self, finder: Finder, *, frame_max: int) -> None:
        self.lost = False
        # Channels with a content of which a part was handed on.
        self.begun: set[int] = set()
        # Channels whose contents are told of one by one, with their headers.
        self.watched: set[int] = set()
        self._finder = finder
        self._frame_max = frame_max
        self._parts: dict[int, _Part] = {}
        self._held = b""
        # How much of what is held was looked at.
        self._seen = 0

    @property
    def held_bytes(self) -> int:
        return len(self._held)

    @property
    def holds_what_was_found(self) -> bool:
        return self._seen > 0

    def forget(self, channel: int) -> None:
        """The channel is no more: what comes of its content is void, and waited for by nobody."""
        self._parts.pop(channel, None)
        self.begun.discard(channel)

    def receive(self, data: bytes) -> bytes:
        """What can be handed on now."""
        if self.lost:
            return data
        if self._held:
            data = self._held + data
        pos, end = self._seen, len(data)
        whole = 0
        while end - pos >= _FRAME.size:
            kind, channel, size = _FRAME.unpack_from(data, pos)
            stop = pos + _FRAME.size + size
            if size > self._frame_max or kind not in (METHOD, HEADER, BODY, HEARTBEAT):
                return self._lose(data)
            if stop >= end:
                break
            if data[stop] != FRAME_END:
                return self._lose(data)
            if kind == METHOD:
                pos = self._method(data, pos, stop + 1, channel)
            else:
                if kind != HEARTBEAT:
                    self._content(channel, kind, data[pos + _FRAME.size : stop] if kind == HEADER else b"", size)
                pos = stop + 1
            if not self._parts:
                whole = pos
        if pos - whole > HOLD_BYTES:
            self.begun.update(self._parts)
            whole = pos
        self._held = data[whole:]
        self._seen = pos - whole
        return data[:whole]

    def _lose(self, data: bytes) -> bytes:
        self.lost = True
        self._held = b""
        return data

    def _method(self, data: bytes, pos: int, behind: int, channel: int) -> int:
        """Look at the method frame data[pos:behind], and at what is like it behind; returns where to go on."""
        method = data[pos + 7 : pos + 11]
        # [0-9-1, 4.2.6] A method ends a content that has not all come; the leader minds.
        self.forget(channel)
        if method in _CONTENTS:
            return self._contents(data, pos, behind, channel)
        payload = data[pos + 7 : behind - 1]
        if method not in _SETTLING or len(payload) < 13:
            self._finder.found_method(channel, payload)
            return behind
        size = behind - pos
        head = data[pos : pos + 11]
        while data.startswith(head, behind) and behind + size <= len(data) and data[behind + size - 1] == FRAME_END:
            behind += size
        self._finder.found_settling(channel, data[behind - size + 7 : behind - 1])
        return behind

    def _contents(self, data: bytes, pos: int, behind: int, channel: int) -> int:
        """A content's method frame is data[pos:behind]: all whole contents from here on that have the same shape; or
        just the method, if not even the first is there in three frames (two if it has no body)."""
        stride = self._stride(data, pos, behind)
        if not stride:
            self._parts[channel] = _Part(data[pos + 7 : behind - 1])
            return behind
        if channel in self.watched:
            size = int.from_bytes(data[behind + 3 : behind + 7], "big")
            self._finder.found_content(channel, data[pos + 7 : behind - 1], data[behind + 7 : behind + 7 + size])
            return pos + stride
        count = 1 + self._count_alike(data, pos, behind - pos, stride)
        last = pos + (count - 1) * stride
        self._finder.found_contents(channel, data[last + 7 : last + behind - pos - 1], count)
        return pos + count * stride

    def _stride(self, data: bytes, pos: int, header: int) -> int:
        """Octets of the content whose method frame is data[pos:header]; 0: it is not all there, or in more frames."""
        end = len(data)
        if header + 19 > end or not data.startswith(b"\x02" + data[pos + 1 : pos + 3], header):
            return 0
        header_end = header + 7 + int.from_bytes(data[header + 3 : header + 7], "big")
        body_size = int.from_bytes(data[header + 11 : header + 19], "big")
        if header_end < header + 19 or header_end >= end or data[header_end] != FRAME_END:
            return 0
        if not body_size:
            return header_end + 1 - pos
        body = header_end + 1
        last = body + 7 + body_size
        if last >= end or data[last] != FRAME_END or body_size > self._frame_max:
            return 0
        if data[body : body + 7] != _FRAME.pack(BODY, int.from_bytes(data[pos + 1 : pos + 3], "big"), body_size):
            return 0
        return last + 1 - pos

    def _count_alike(self, data: bytes, pos: int, method_bytes: int, stride: int) -> int:
        """How many contents of the same sizes follow the one at `pos`, without a gap."""
        room = (len(data) - pos) // stride - 1
        if room <= 0 or not data.startswith(data[pos : pos + _METHOD_HEAD], pos + stride):
            return 0
        joint = method_bytes - 1
        header_bytes = int.from_bytes(data[pos + method_bytes + 3 : pos + method_bytes + 7], "big") + FRAME_OVERHEAD
        # The end of the header frame, and the head of the body's if there is one.
        tail = method_bytes + header_bytes - 1
        tail_bytes = min(8, stride - tail)
        if room < ROWS_MIN:
            count = 0
            for row in range(pos + stride, pos + (room + 1) * stride, stride):
                if not (
                    data.startswith(data[pos : pos + _METHOD_HEAD], row)
                    and data.startswith(data[pos + joint : pos + joint + _JOINT], row + joint)
                    and data.startswith(data[pos + tail : pos + tail + tail_bytes], row + tail)
                    and data[row + stride - 1] == FRAME_END
                ):
                    break
                count += 1
            return count
        rows = np.frombuffer(data, np.uint8, (room + 1) * stride, pos).reshape(room + 1, stride)
        alike = rows[:, -1] == FRAME_END
        for first, size in ((0, _METHOD_HEAD), (joint, _JOINT), (tail, tail_bytes)):
            alike &= (rows[:, first : first + size] == rows[0, first : first + size]).all(axis=1)
        return room if alike.all() else int(alike.argmin()) - 1

    def _content(self, channel: int, kind: int, header: bytes, size: int) -> None:
        part = self._parts.get(channel)
        if part is None:
            return
        if kind == HEADER:
            part.missing = int.from_bytes(header[4:12], "big") if part.missing < 0 else 0
            part.header = header
        else:
            part.missing -= size
        if part.missing <= 0:
            self.forget(channel)
            if part.missing == 0 and channel in self.watched:
                self._finder.found_content(channel, part.payload, part.header)
            elif part.missing == 0:
                self._finder.found_contents(channel, part.payload, 1)
