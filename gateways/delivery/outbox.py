"""Bytes on their way out of one connection. Driver of a socket's sending side.

What is put here during a turn goes out in one send at the end of it, straight from whoever caused it; only when the
socket is full does a writer task wait. `is_full` tells consumers to wait, so a reader that sleeps costs one buffer.
"""

from collections import deque
from collections.abc import Callable

import trio

from headrace.gateways.delivery.listener import ByteSocket

# Small parts are joined up to about this much for one send; what is larger goes out as it is, without another copy.
SEND_BYTES = 256 * 1024


class Outbox:
    __slots__ = (
        "_bytes_max",
        "_emptied",
        "_full",
        "_is_blocked",
        "_note",
        "_noted",
        "_parts",
        "_socket",
        "byte_count",
        "closed",
        "on_blocked",
        "on_room",
        "sent_count",
    )

    def __init__(self, sock: ByteSocket, bytes_max: int, note: Callable[["Outbox"], None]) -> None:
        self._socket = sock
        self._bytes_max = bytes_max
        self._note = note
        self._parts: deque[bytes | memoryview] = deque()
        self._noted = False
        # The socket takes no more, and the writer waits for it.
        self._is_blocked = False
        # Who waits for that, and for the end of it: most outboxes never know either.
        self._full: trio.Event | None = None
        self._emptied: trio.Event | None = None
        self.byte_count = 0
        self.sent_count = 0
        self.closed = False
        # Called when there is room again after it was full. It must put nothing in by itself: that is for a later turn.
        self.on_room: Callable[[], None] = lambda: None
        # Called when the socket takes no more: `run` must run from now on.
        self.on_blocked: Callable[[], None] = lambda: None

    @property
    def is_full(self) -> bool:
        return self.byte_count >= self._bytes_max

    def put(self, data: bytes) -> None:
        if self.closed:
            return
        self._parts.append(data)
        self.byte_count += len(data)
        if not self._noted:
            self._noted = True
            self._note(self)

    def flush(self) -> None:
        """Send what the socket takes now; the rest is the writer's."""
        self._noted = False
        if self._is_blocked or self.closed:
            return
        was_full = self.byte_count >= self._bytes_max
        if not self._send():
            self._is_blocked = True
            if self._full is not None:
                self._full.set()
            self.on_blocked()
        elif was_full:
            self.on_room()

    def _send(self) -> bool:
        """True when everything went out."""
        parts = self._parts
        while parts:
            data = parts.popleft() if len(parts) == 1 else self._joined()
            try:
                count = self._socket.send(data)
            except BlockingIOError:
                count = 0
            except OSError:
                self.close()
                return True
            self.byte_count -= count
            self.sent_count += count
            if count < len(data):
                # A view of the rest: a large message is sent in many pieces, and copied for none of them.
                parts.appendleft(memoryview(data)[count:])
                return False
        return True

    def _joined(self) -> bytes | memoryview:
        """The first parts as one, up to about SEND_BYTES; at least one of them."""
        parts = self._parts
        if self.byte_count <= SEND_BYTES:
            data = b"".join(parts)
            parts.clear()
            return data
        taken = [parts.popleft()]
        size = len(taken[0])
        while parts and size + len(parts[0]) <= SEND_BYTES:
            taken.append(parts.popleft())
            size += len(taken[-1])
        return taken[0] if len(taken) == 1 else b"".join(taken)

    async def run(self) -> None:
        """Wait for a full socket to take more, until cancelled."""
        while not self.closed:
            if not self._is_blocked:
                self._full = trio.Event()
                await self._full.wait()
                self._full = None
            while not self.closed:
                await trio.lowlevel.wait_writable(self._socket)
                was_full = self.is_full
                done = self._send()
                if was_full and not self.is_full:
                    self.on_room()
                if done:
                    break
            self._is_blocked = False
            self._tell_emptied()
            self.on_room()

    async def drained(self) -> None:
        """Wait until everything put so far is with the kernel. `run` must be running: one task waits for a socket."""
        self.flush()
        while self._parts and not self.closed:
            if self._emptied is None:
                self._emptied = trio.Event()
            await self._emptied.wait()

    def _tell_emptied(self) -> None:
        if self._emptied is not None:
            self._emptied.set()
            self._emptied = None

    def close(self) -> None:
        self.closed = True
        self._parts.clear()
        self.byte_count = 0
        self._tell_emptied()
