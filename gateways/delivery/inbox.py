"""Bytes that come in on one connection. Driver of a socket's receiving side; outbox.py is the other.

Reads grow while they come back full and shrink when for a while none did, so that an idle connection costs little and
a busy one is cut in large pieces: what a publisher sends behind a window of acknowledgements is one read, again and
again, though something smaller comes between.
"""

import trio

from headrace.core_log.env import Clock
from headrace.gateways.delivery.listener import Connection

# A sweep over the connections that comes so much too late was held up, or the machine slept: what clients sent
# meanwhile has not been read yet, so their silence tells nothing.
STALL_S = 5.0
# So many reads in a row that would have fit into a quarter of the buffer halve it.
SMALL_READS = 16


class Inbox:
    __slots__ = (
        "_bytes",
        "_bytes_max",
        "_bytes_min",
        "_clock",
        "_connection",
        "_more",
        "_recv",
        "_small_count",
        "last_received",
        "received_count",
    )

    def __init__(self, connection: Connection, clock: Clock, *, bytes_min: int, bytes_max: int) -> None:
        self._connection = connection
        self._clock = clock
        self._recv = connection.socket.recv
        self._bytes_min = self._bytes = bytes_min
        self._bytes_max = bytes_max
        self._small_count = 0
        # There is something to be had without waiting for the descriptor.
        self._more = connection.has_more()
        self.last_received = clock.monotonic()
        self.received_count = 0

    async def read(self) -> bytes:
        """What has come, at least one byte; empty when the connection is over."""
        connection = self._connection
        while True:
            if not self._more:
                await trio.lowlevel.wait_readable(connection.socket)
            try:
                data = connection.socket.recv(self._bytes)
            except BlockingIOError:
                self._more = connection.has_more()
                if self._more:
                    await trio.lowlevel.checkpoint()
                continue
            except OSError:
                return b""
            if not data:
                return b""
            self.note()
            self.received_count += len(data)
            # A read that filled its buffer left more behind: it is asked for again without waiting.
            is_full = len(data) == self._bytes
            was_more, self._more = self._more, is_full or connection.has_more()
            self._resize(len(data))
            if was_more:
                # Others must have their turn even if this socket never runs dry.
                await trio.lowlevel.checkpoint()
            return data

    def read_now(self, now: float) -> bytes | None:
        """The same of a plain socket that was found to be readable: one read; None: there was nothing after all."""
        try:
            data = self._recv(self._bytes)
        except BlockingIOError:
            return None
        except OSError:
            return b""
        size = len(data)
        if size:
            self.last_received = now
            self.received_count += size
            if size == self._bytes or self._bytes > self._bytes_min:
                self._resize(size)
        return data

    def _resize(self, size: int) -> None:
        """A read brought so much."""
        if size >= self._bytes // 4:
            self._small_count = 0
            if size == self._bytes:
                self._bytes = min(size * 2, self._bytes_max)
        elif self._bytes > self._bytes_min:
            self._small_count += 1
            if self._small_count == SMALL_READS:
                self._small_count = 0
                self._bytes //= 2

    def note(self) -> None:
        """It was heard of just now, or could not be."""
        self.last_received = self._clock.monotonic()
