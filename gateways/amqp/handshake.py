"""One AMQP connection before it is open: protocol header, login, tuning, the vhost it wants. Driver.

The same for whoever serves it afterwards: the node that accepted it, or the one that leads its vhost and gets it
relayed. connection.open-ok is theirs to send, and so are the limits of users and vhosts theirs to count: nobody is told
open by one who does not serve. Frames are taken one at a time, so that what came behind connection.open is handed on as
it came.
Neighbours: session.py serves what is opened here, front.py decides where.
"""

import logging
import socket
import struct
from contextlib import suppress
from typing import NoReturn, Protocol, cast

import trio
from pamqp import commands

from headrace import __version__
from headrace.core_log.env import Clock
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.fields import FieldTable, decode_table, encode_table
from headrace.gateways.amqp.frames import (
    PROTOCOL_HEADER,
    Event,
    FrameCutter,
    MethodFrame,
    Violation,
    encode_method,
    match_protocol_header,
)
from headrace.gateways.amqp.methods import Method, ids, make, octets
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.inbox import Inbox
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.delivery.login import Identity, Refusal
from headrace.gateways.relay.dialing import client_of
from headrace.gateways.relay.opening import Opened

_log = logging.getLogger(__name__)

READ_BYTES = 4096
# How long a peer has to answer connection.close, and to close its side of a connection that makes no sense any more.
CLOSE_SECONDS_MAX = 10
# How long one that was told closed may leave its socket open.
CLOSED_SECONDS_MAX = 1
# What a stranger may send before it has logged in: a hundred times what that takes.
HANDSHAKE_BYTES_MAX = 64 * 1024
CAPABILITIES: FieldTable = {
    "publisher_confirms": True,
    "exchange_exchange_bindings": True,
    "basic.nack": True,
    "consumer_cancel_notify": True,
    "connection.blocked": True,
    "consumer_priorities": True,
    "authentication_failure_close": True,
    "per_consumer_qos": True,
    "direct_reply_to": True,
}
_SIZE = struct.Struct(">I")
# Header and end octet around a payload; where in the header its size stands.
_FRAME_OVERHEAD, _SIZE_AT = 8, 3


class Gate(Protocol):
    """What a handshake asks of those it is made for."""

    access: Access
    authentication: Authentication
    config: AmqpConfig

    @property
    def clock(self) -> Clock: ...

    def has_vhost(self, name: str) -> bool: ...


class Ended(Exception):
    """The connection is over, in good order or not; the reason is logged by whoever raised it."""


class Handshake:
    def __init__(self, gate: Gate, connection: Connection) -> None:
        self.user = ""
        self._gate = gate
        self._config = gate.config
        self._connection = connection
        self._socket = connection.socket
        self._inbox = Inbox(connection, gate.clock, bytes_min=READ_BYTES, bytes_max=READ_BYTES)
        # No channel is open before the connection is: its frames are refused by the cutter.
        self._cutter = FrameCutter(body_bytes_max=0)
        self._properties: FieldTable = {}
        self._heartbeat_s = 0
        self._channel_max = 0
        self._expected: type[Method] = commands.Connection.StartOk
        self._opened: Opened | None = None
        self._scope = trio.CancelScope()

    def cancel(self) -> None:
        self._scope.cancel()

    async def run(self) -> tuple[Opened, bytes] | None:
        """What the client asked for, and the octets that came behind; None: it was refused, and the connection is
        over."""
        with self._scope, suppress(Ended):
            self._scope.deadline = trio.current_time() + self._config.handshake_s
            try:
                return await self._shake_hands()
            except AmqpError as error:
                await self.refuse(error)
        if self._scope.cancelled_caught and self._opened is None:
            _log.warning("handshake took too long", extra={"peer": self._connection.host})
        return None

    async def _shake_hands(self) -> tuple[Opened, bytes]:
        data = await self._greet()
        received = len(data)
        while True:
            while frame := self._first_frame(data):
                data = data[len(frame) :]
                for event in self._cutter.receive(frame):
                    await self._take(event)
                if self._opened is not None:
                    return self._opened, data
            more = await self._read()
            received += len(more)
            if received > HANDSHAKE_BYTES_MAX:
                _log.warning("too many octets before the login", extra={"peer": self._connection.host})
                raise Ended
            data += more

    def _first_frame(self, data: bytes) -> bytes:
        """Empty if it has not all come; what is too long for one is the cutter's to refuse."""
        if len(data) < _FRAME_OVERHEAD - 1:
            return b""
        size = _SIZE.unpack_from(data, _SIZE_AT)[0] + _FRAME_OVERHEAD
        if size > self._cutter.frame_max + _FRAME_OVERHEAD:
            return data
        return data[:size] if len(data) >= size else b""

    async def _greet(self) -> bytes:
        """The protocol header, then connection.start; returns what came behind the header."""
        data = b""
        while (matched := match_protocol_header(data)) is None:
            data += await self._read()
        if not matched:
            await self._write(PROTOCOL_HEADER)
            await self._say_goodbye()
        await self._send(
            make(
                commands.Connection.Start,
                version_major=0,
                version_minor=9,
                server_properties={
                    "product": "Headrace",
                    "version": __version__,
                    "platform": "Python",
                    "information": "Licensed under the Apache License 2.0",
                    "capabilities": CAPABILITIES,
                },
                mechanisms=" ".join(self._mechanisms()),
                locales="en_US",
            ),
        )
        return data[len(PROTOCOL_HEADER) :]

    def _mechanisms(self) -> list[str]:
        """The ways to log in over this connection; what is not offered is refused."""
        connection = self._connection
        offered = []
        if connection.is_loopback or connection.tls or self._config.allow_plaintext_auth:
            offered += ["PLAIN", "AMQPLAIN"]
        if connection.certified_name is not None:
            offered.append("EXTERNAL")
        if not offered:
            # Else it would send its password for everybody to read, only to be refused.
            text = "no way to log in: clear text from other machines needs TLS or amqp.allow_plaintext_auth"
            _log.warning(text, extra={"peer": connection.host})
        return offered

    # -- methods --------------------------------------------------------------------------------------------------

    async def _take(self, event: Event) -> None:
        match event:
            case Violation():
                raise event.error
            case MethodFrame(method=commands.Connection.Close()):
                await self._send(make(commands.Connection.CloseOk))
                await self._wait_for_end(CLOSED_SECONDS_MAX)
            case MethodFrame(method=commands.Connection.CloseOk()):
                raise Ended
            case MethodFrame():
                await self._take_method(event.method)
            case _:
                pass  # a heartbeat

    async def _take_method(self, method: Method) -> None:
        if not isinstance(method, self._expected):
            text = f"expected {self._expected.name}, got {method.name}"
            raise amqp_error(ReplyCode.COMMAND_INVALID, text, *ids(method))
        match method:
            case commands.Connection.StartOk():
                await self._log_in(method)
            case commands.Connection.TuneOk():
                self._tune(method)
            case commands.Connection.Open():
                self._open(method)

    async def _log_in(self, method: commands.Connection.StartOk) -> None:
        self._properties = cast(FieldTable, method.client_properties)
        if method.mechanism not in ("PLAIN", "AMQPLAIN", "EXTERNAL"):
            text = f"unknown authentication mechanism '{method.mechanism}'"
            raise amqp_error(ReplyCode.COMMAND_INVALID, text, *ids(method))
        if method.mechanism not in self._mechanisms():
            raise self._refusal(method.mechanism)
        outcome: Identity | Refusal
        connection, authentication = self._connection, self._gate.authentication
        address, is_loopback = connection.host, connection.is_loopback
        if method.mechanism == "EXTERNAL":
            name = connection.certified_name
            assert name is not None, "else it is not offered"
            outcome = await authentication.certified(name, address=address, peer_is_loopback=is_loopback)
        else:
            name, password = self._credentials(method)
            outcome = await authentication.login(name, password, address=address, peer_is_loopback=is_loopback)
        if not isinstance(outcome, Identity):
            raise self._refusal(method.mechanism)
        self.user = outcome.name
        self._expected = commands.Connection.TuneOk
        await self._send(
            make(
                commands.Connection.Tune,
                channel_max=self._config.channel_max,
                frame_max=self._config.frame_max,
                heartbeat=self._config.heartbeat_s,
            )
        )

    def _refusal(self, mechanism: str) -> Exception:
        """403 for a client that says it knows what that is here; others only see the end, as the standard has it."""
        if not understands(self._properties, "authentication_failure_close"):
            return Ended()
        text = f"Login was refused using authentication mechanism {mechanism}. For details see the broker logfile."
        error = amqp_error(ReplyCode.ACCESS_REFUSED, text)
        error.hard = True
        return error

    def _credentials(self, method: commands.Connection.StartOk) -> tuple[str, str]:
        response = octets(method.response)
        if method.mechanism == "PLAIN":
            parts = response.split(b"\0")
            if len(parts) == 3:
                return parts[1].decode("utf-8", "replace"), parts[2].decode("utf-8", "replace")
        else:
            table, _end = decode_table(len(response).to_bytes(4, "big") + response)
            name, password = table.get("LOGIN"), table.get("PASSWORD")
            if isinstance(name, str) and isinstance(password, str):
                return name, password
        raise self._refusal(method.mechanism)

    def _tune(self, method: commands.Connection.TuneOk) -> None:
        config = self._config
        frame_max = method.frame_max or config.frame_max
        if not 4096 <= frame_max <= config.frame_max:
            text = f"negotiated frame_max = {frame_max} is outside 4096..{config.frame_max}"
            raise amqp_error(ReplyCode.NOT_ALLOWED, text, *ids(method))
        channel_max = method.channel_max or config.channel_max
        if channel_max > config.channel_max:
            text = f"negotiated channel_max = {channel_max} is higher than the maximum allowed ({config.channel_max})"
            raise amqp_error(ReplyCode.NOT_ALLOWED, text, *ids(method))
        self._cutter.frame_max = frame_max
        self._channel_max = channel_max
        self._heartbeat_s = method.heartbeat
        self._expected = commands.Connection.Open

    def _open(self, method: commands.Connection.Open) -> None:
        name = method.virtual_host
        if not self._gate.has_vhost(name):
            raise amqp_error(ReplyCode.NOT_ALLOWED, f"vhost '{name}' not found", *ids(method))
        if not self._gate.access.may_enter(self.user, name):
            text = f"access to vhost '{name}' refused for user '{self.user}'"
            raise amqp_error(ReplyCode.NOT_ALLOWED, text, *ids(method))
        self._opened = Opened(
            client_of(self._connection),
            self.user,
            name,
            self._channel_max,
            self._cutter.frame_max,
            self._heartbeat_s,
            encode_table(self._properties),
        )

    # -- the end --------------------------------------------------------------------------------------------------

    async def refuse(self, error: AmqpError) -> None:
        """Tell the client, and give it a moment to answer. Also for whoever finds out after the handshake that nobody
        can serve what was opened."""
        extra = {"peer": self._connection.host, "user": self.user, "code": int(error.code)}
        _log.warning("connection closed: %s", error.text, extra=extra)
        with trio.move_on_after(CLOSE_SECONDS_MAX), suppress(Ended):
            await self._send(
                make(
                    commands.Connection.Close,
                    reply_code=int(error.code),
                    reply_text=error.reply_text,
                    class_id=error.class_id,
                    method_id=error.method_id,
                )
            )
            if self._cutter.lost_sync:
                await self._say_goodbye()
            self._cutter.close_connection()
            await self._wait_for_end(CLOSE_SECONDS_MAX)

    async def _wait_for_end(self, seconds: float) -> NoReturn:
        """Whatever else it sends is void, but for its own goodbye."""
        with trio.move_on_after(seconds):
            while True:
                for event in self._cutter.receive(await self._read()):
                    match event:
                        case MethodFrame(method=commands.Connection.Close()):
                            await self._send(make(commands.Connection.CloseOk))
                        case MethodFrame(method=commands.Connection.CloseOk()):
                            raise Ended
                        case _:
                            pass
        raise Ended

    async def _say_goodbye(self) -> NoReturn:
        """The last words to a peer whose octets mean nothing any more. What it still sends is read and thrown away:
        closing a socket with unread octets would take back what we sent."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        with trio.move_on_after(CLOSE_SECONDS_MAX):
            while True:
                await self._read()
        raise Ended

    # -- the socket -----------------------------------------------------------------------------------------------

    async def _read(self) -> bytes:
        data = await self._inbox.read()
        if not data:
            raise Ended
        return data

    async def _send(self, method: Method) -> None:
        await self._write(encode_method(0, method))

    async def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                await trio.lowlevel.wait_writable(self._socket)
            except OSError:
                raise Ended from None


def understands(properties: FieldTable, capability: str) -> bool:
    """Whether the client said so."""
    capabilities = properties.get("capabilities")
    return isinstance(capabilities, dict) and capabilities.get(capability) is True
