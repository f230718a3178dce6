"""One end of a relayed connection: the client's socket or the link to its leader. Driver.

Whatever is sent is sent whole, even if whoever sends is cancelled meanwhile: what is left goes first the next time.
So both sides only ever see whole pieces, in order. Nobody reads from one end while the other takes nothing, which is
all the back-pressure there is.
"""

import trio

from headrace.core_log.env import Clock
from headrace.gateways.delivery.inbox import Inbox
from headrace.gateways.delivery.listener import Connection

READ_BYTES_MIN = 4096
READ_BYTES_MAX = 256 * 1024


class EndLost(Exception):
    """The other side of the socket is gone."""


class End:
    def __init__(self, connection: Connection, clock: Clock) -> None:
        self.sent_count = 0
        self._socket = connection.socket
        self._inbox = Inbox(connection, clock, bytes_min=READ_BYTES_MIN, bytes_max=READ_BYTES_MAX)
        self._rest = memoryview(b"")
        self._sending = False
        self._lock = trio.Lock()

    @property
    def last_received(self) -> float:
        return self._inbox.last_received

    @property
    def is_sending(self) -> bool:
        """Its other side takes nothing at the moment."""
        return self._sending

    def excuse(self) -> None:
        """It could not be heard."""
        self._inbox.note()

    async def read(self) -> bytes:
        """What has come. Raises EndLost when there will be no more."""
        data = await self._inbox.read()
        if not data:
            raise EndLost
        return data

    async def send(self, data: bytes) -> None:
        """With the kernel when this returns. Raises EndLost."""
        async with self._lock:
            # Twice at most: what was left by somebody who was cancelled, then this.
            for piece in (self._rest, memoryview(data)):
                self._rest = piece
                await self._send_rest()

    async def _send_rest(self) -> None:
        while self._rest:
            try:
                count = self._socket.send(self._rest)
            except BlockingIOError:
                self._sending = True
                try:
                    await trio.lowlevel.wait_writable(self._socket)
                finally:
                    self._sending = False
                continue
            except OSError:
                raise EndLost from None
            self.sent_count += count
            self._rest = self._rest[count:]

    def send_now(self, data: bytes) -> None:
        """If nothing is being sent; else it is not needed."""
        if self._lock.locked() or self._rest:
            return
        try:
            count = self._socket.send(data)
        except OSError:
            return  # no room, or whoever reads notices
        self.sent_count += count
        self._rest = memoryview(data)[count:]
