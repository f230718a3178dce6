"""A client with no manners: sends the frames it is told to, and shows every frame that comes. For tests.

pika and aio-pika hide class and method ids, send nothing unlawful and answer by themselves; this one does none of that.
"""

import socket
import struct
from types import TracebackType
from typing import Any, Self, TypeVar

from pamqp import base, body, commands, frame, header, heartbeat

F = TypeVar("F")
PATIENCE_S = 30.0
CAPABILITIES = {"consumer_cancel_notify": True, "basic.nack": True, "authentication_failure_close": True}


class Closed(Exception):
    """The broker closed the socket."""


class Wire:
    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self.socket = socket.create_connection((host, port), timeout=PATIENCE_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._held = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, channel: int, *frames: base.Frame | header.ContentHeader | body.ContentBody) -> None:
        """All in one write."""
        self.socket.sendall(b"".join(frame.marshal(one, channel) for one in frames))

    def send_octets(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> tuple[int, Any]:
        """The next frame that is no heartbeat: (channel, frame)."""
        while True:
            number, found = self.receive_any()
            if not isinstance(found, heartbeat.Heartbeat):
                return number, found

    def receive_any(self) -> tuple[int, Any]:
        while True:
            if len(self._held) >= 7:
                size = struct.unpack_from(">I", self._held, 3)[0] + 8
                if len(self._held) >= size:
                    _count, number, found = frame.unmarshal(self._held[:size])
                    self._held = self._held[size:]
                    return number, found
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                raise Closed from None
            if not data:
                raise Closed
            self._held += data

    def expect(self, kind: type[F], channel: int | None = None) -> F:
        """The next frame, which must be of this kind."""
        number, found = self.receive()
        assert isinstance(found, kind), f"expected {kind.__name__}, got {_shown(found)}"
        assert channel is None or number == channel
        return found

    def call(self, channel: int, method: base.Frame, answer: type[F]) -> F:
        self.send(channel, method)
        return self.expect(answer, channel)

    # -- the handshake --------------------------------------------------------------------------------------------

    def greet(self) -> commands.Connection.Start:
        self.send_octets(b"AMQP\0\0\x09\x01")
        return self.expect(commands.Connection.Start, 0)

    def authenticate(self, user: str = "guest", password: str = "guest", **properties: Any) -> commands.Connection.Tune:
        known = {"capabilities": CAPABILITIES} | properties
        self.send(0, commands.Connection.StartOk(known, "PLAIN", f"\0{user}\0{password}", "en_US"))
        return self.expect(commands.Connection.Tune, 0)

    def log_in(
        self, *, user: str = "guest", vhost: str = "/", frame_max: int = 131_072, channel_max: int = 0, beat: int = 0
    ) -> None:
        self.greet()
        tune = self.authenticate(user)
        self.send(0, commands.Connection.TuneOk(channel_max or tune.channel_max, frame_max, beat))
        self.call(0, commands.Connection.Open(vhost), commands.Connection.OpenOk)

    def open_channel(self, number: int) -> None:
        self.call(number, commands.Channel.Open(), commands.Channel.OpenOk)

    # -- what comes often -----------------------------------------------------------------------------------------

    def publish(self, channel: int, exchange: str, key: str, data: bytes = b"x", **flags: bool) -> None:
        properties = commands.Basic.Properties()
        self.send(
            channel,
            commands.Basic.Publish(exchange=exchange, routing_key=key, **flags),
            header.ContentHeader(body_size=len(data), properties=properties),
            *([body.ContentBody(data)] if data else []),
        )

    def expect_channel_close(self, channel: int, code: int, method: type[base.Frame] | None = None) -> str:
        """A soft error: this channel ends, laid to this method; the connection goes on. Returns the text."""
        found = self.expect(commands.Channel.Close, channel)
        assert (found.reply_code, _blamed(found)) == (code, _ids(method)), found.reply_text
        self.send(channel, commands.Channel.CloseOk())
        return str(found.reply_text)

    def expect_connection_close(self, code: int, method: type[base.Frame] | None = None) -> str:
        """A hard error: the connection ends, laid to this method. Returns the text."""
        while True:
            number, found = self.receive()
            if number == 0:
                break
        assert isinstance(found, commands.Connection.Close), _shown(found)
        assert (found.reply_code, _blamed(found)) == (code, _ids(method)), found.reply_text
        self.send(0, commands.Connection.CloseOk())
        return str(found.reply_text)

    def expect_end(self) -> None:
        """Nothing more, and the socket is closed."""
        try:
            number, found = self.receive()
        except Closed:
            return
        raise AssertionError(f"{_shown(found)} on channel {number} instead of the end")


def _ids(method: type[base.Frame] | None) -> tuple[int, int]:
    return (method.index >> 16, method.index & 0xFFFF) if method is not None else (0, 0)


def _blamed(close: commands.Channel.Close | commands.Connection.Close) -> tuple[int, int]:
    return int(close.class_id or 0), int(close.method_id or 0)


def _shown(found: Any) -> str:
    values = dict(found) if isinstance(found, base.Frame) else {}
    return f"{getattr(found, 'name', type(found).__name__)} {values}"
