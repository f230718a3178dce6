"""The MQTT door of a cluster's node: a client's CONNECT says which vhost it wants, and whoever leads that serves it.
Driver.

Logins are the leader's affair: what is relayed are the client's octets from the first one on, with its address and the
name in its certificate. Sessions live with their vhost, so a client finds its own whatever node it comes to. When the
leader is lost the client is told to come again (MQTT 5; others just see the end), and finds it with the next one.
Neighbours: MqttDoor of the shard's service, here or elsewhere; websocket.py unwraps what comes over WebSocket.
"""

import logging
import socket
from collections.abc import Callable, Container
from contextlib import closing, suppress

import msgspec
import trio

from headrace.core_log.env import Clock
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import Connection, DoorListener, Listener, TlsSide
from headrace.gateways.mqtt.client import CONNECT_BYTES_MAX
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.cutter import PacketCutter, Violation
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.greeting import refusal_of
from headrace.gateways.mqtt.login import placed
from headrace.gateways.mqtt.packets import Connect, Disconnect
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version
from headrace.gateways.mqtt.scram import Exchange, ScramError
from headrace.gateways.mqtt.websocket import open_websocket
from headrace.gateways.relay.dialing import client_of, connection_of, dial
from headrace.gateways.relay.end import End, EndLost
from headrace.gateways.relay.leaders import Leaders, MqttInside, NoLeader
from headrace.gateways.relay.opening import DoorName, MqttOpening

_log = logging.getLogger(__name__)

GOODBYE_S = 1.0
LOST = "the node that leads this vhost was lost: connect again"
STOPPING = "this node is shutting down: connect to another one"


class MqttFront:
    def __init__(
        self,
        leaders: Leaders,
        clock: Clock,
        limits: Limits,
        alarms: Alarms,
        *,
        users: Callable[[], Container[str]],
        config: MqttConfig | None = None,
    ) -> None:
        """`users`: the names of all there are now; a colon may be part of one."""
        self.limits = limits
        self.alarms = alarms
        self.config = config or MqttConfig()
        self.relays: set[MqttRelay] = set()
        self._leaders = leaders
        self._clock = clock
        self._users = users
        self._greeting: set[trio.CancelScope] = set()
        # Doors of this node that serve connections which came in here.
        self._inside: list[MqttInside] = []

    async def serve(self, connection: Connection) -> None:
        """One connection, until it ends."""
        try:
            await self._serve(connection)
        except Exception:
            # Our mistake: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})

    async def serve_websocket(self, connection: Connection) -> None:
        with trio.move_on_after(self.config.handshake_s) as patience:
            self._greeting.add(patience)
            try:
                carried = await open_websocket(connection, self.config.ws_origins)
            finally:
                self._greeting.discard(patience)
        if not patience.cancelled_caught and carried is not None:
            with closing(carried.socket):
                await self.serve(carried)

    async def _serve(self, connection: Connection) -> None:
        end = End(connection, self._clock)
        cutter = PacketCutter(
            packet_bytes_max=self.config.packet_bytes_max,
            connect_bytes_max=min(CONNECT_BYTES_MAX, self.config.packet_bytes_max),
        )
        data = b""
        first: object = None
        with trio.move_on_after(self.config.handshake_s) as patience, suppress(EndLost):
            self._greeting.add(patience)
            try:
                while first is None:
                    more = await end.read()
                    data += more
                    first = next(iter(cutter.receive(more)), None)
            finally:
                self._greeting.discard(patience)
        if patience.cancelled_caught:
            _log.warning("no CONNECT in time", extra={"peer": connection.host})
        if isinstance(first, Violation):
            await self._refuse(connection, end, first.error, cutter.version)
        if not isinstance(first, Connect):
            return
        vhost = self._vhost_of(first)
        doors = self._leaders.here(vhost)
        if doors is not None:
            self._inside.append(doors.mqtt)
            try:
                await doors.mqtt.serve(connection, data)
            finally:
                self._inside.remove(doors.mqtt)
            return
        relay = MqttRelay(self._leaders, connection, end, vhost, first.version, self._clock)
        self.relays.add(relay)
        try:
            await relay.run(data)
        except NoLeader as error:
            await self._refuse(connection, end, MqttError(ReasonCode.SERVER_UNAVAILABLE, str(error)), cutter.version)
        finally:
            self.relays.discard(relay)

    def _vhost_of(self, connect: Connect) -> str:
        """As the door that serves it will find; it checks whether the client may enter."""
        name = connect.user_name or ""
        data = connect.properties.authentication_data
        if connect.properties.authentication_method is not None:
            # One who lets us begin has not said who it is: it is taken to be at home in the usual vhost.
            with suppress(ScramError):
                name = Exchange("").begin(data) if data else ""
        return placed(name, self._users(), self.config.vhost)[0]

    async def _refuse(self, connection: Connection, end: End, error: MqttError, version: Version | None) -> None:
        _log.info("connection refused: %s", error, extra={"peer": connection.host})
        packet = refusal_of(error, version)
        with suppress(EndLost), trio.move_on_after(GOODBYE_S):
            if packet is not None:
                await end.send(encode_packet(packet, version or Version.V3_1_1))
            await _linger(connection, end)

    def moved(self, vhost: str) -> None:
        """The vhost has another leader now: its clients are told to come again."""
        for relay in list(self.relays):
            if relay.vhost == vhost:
                relay.cancel(LOST)

    async def dismiss(self) -> None:
        """This node stops: tell everybody who came in here."""
        for scope in self._greeting:
            scope.cancel()
        for relay in list(self.relays):
            relay.cancel(STOPPING)
        for door in list(self._inside):
            await door.step_down(STOPPING)


class MqttRelay:
    """One client whose vhost is led by another node."""

    def __init__(
        self, leaders: Leaders, connection: Connection, end: End, vhost: str, version: Version, clock: Clock
    ) -> None:
        self.vhost = vhost
        self._leaders = leaders
        self._connection = connection
        self._client = end
        self._version = version
        self._clock = clock
        self._reason = LOST
        self._borders = PacketBorders()
        self._scope = trio.CancelScope()

    def cancel(self, reason: str) -> None:
        self._reason = reason
        self._scope.cancel()

    async def run(self, first: bytes) -> None:
        """Until either side ends. Raises NoLeader if there is none: the client was told nothing then."""
        opening = msgspec.msgpack.encode(MqttOpening(client_of(self._connection)))
        sock, said = await dial(self._leaders, self.vhost, DoorName.MQTT, opening)
        with closing(sock):
            link = End(connection_of(client_of(self._connection), sock), self._clock)
            is_client_gone = await self._carry(link, first, said)
        if not is_client_gone:
            await self._say_goodbye()

    async def _carry(self, link: End, first: bytes, said: bytes) -> bool:
        """Both ways, until one side ends. True: the client's."""
        is_client_gone = False
        with self._scope:
            async with trio.open_nursery() as nursery:

                async def upward() -> None:
                    nonlocal is_client_gone
                    with suppress(EndLost):
                        data = first
                        while True:
                            await link.send(data)
                            try:
                                data = await self._client.read()
                            except EndLost:
                                is_client_gone = True
                                break
                    nursery.cancel_scope.cancel()

                async def downward() -> None:
                    nonlocal is_client_gone
                    with suppress(EndLost):
                        data = said
                        while True:
                            if data:
                                if self._version is Version.V5:
                                    self._borders.pass_on(data)
                                try:
                                    await self._client.send(data)
                                except EndLost:
                                    is_client_gone = True
                                    break
                            data = await link.read()
                    nursery.cancel_scope.cancel()

                nursery.start_soon(upward)
                nursery.start_soon(downward)
        return is_client_gone

    async def _say_goodbye(self) -> None:
        """[MQTT-3.14] DISCONNECT with the reason, where that can be said: behind CONNACK, and between two packets."""
        with trio.move_on_after(GOODBYE_S), suppress(EndLost):
            # What is left of the last read goes first.
            if self._version is Version.V5 and self._borders.may_end:
                told = Disconnect(ReasonCode.SERVER_SHUTTING_DOWN, Properties(reason_string=self._reason))
                await self._client.send(encode_packet(told, Version.V5))
            else:
                await self._client.send(b"")
            await _linger(self._connection, self._client)


class PacketBorders:
    """Where the packets in a stream of octets end; no more is looked at than their sizes."""

    def __init__(self) -> None:
        # Octets of the packet under way that are still to come, once its size is known.
        self._missing = 0
        self._head = b""
        self._count = 0
        self._has_ended = False

    @property
    def may_end(self) -> bool:
        """Whether a DISCONNECT may follow: between two packets, not before the first and not behind another one."""
        return not self._missing and not self._head and self._count > 0 and not self._has_ended

    def pass_on(self, data: bytes) -> None:
        pos, end = self._missing, len(data)
        if pos > end:
            self._missing -= end
            return
        self._missing = 0
        while pos < end:
            # A packet's first byte, and up to four with its size; the last of them is below 128.
            start = pos
            pos += 0 if self._head else 1
            while pos < end and data[pos] >= 128:
                pos += 1
            if pos >= end:
                self._head += data[start:end]
                return
            head, self._head = self._head + data[start : pos + 1], b""
            size = sum((byte & 127) << 7 * place for place, byte in enumerate(head[1:]))
            self._count += 1
            self._has_ended |= head[0] == 0xE0
            pos += 1 + size
        self._missing = pos - end


async def _linger(connection: Connection, end: End) -> None:
    """What the peer still sends is thrown away: closing a socket with unread octets would take back what we sent."""
    with suppress(OSError):
        connection.socket.shutdown(socket.SHUT_WR)
    while True:
        await end.read()


class MqttFrontListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, front: MqttFront, tls: TlsSide | None = None, *, websocket: bool = False) -> None:
        serve = front.serve_websocket if websocket else front.serve
        super().__init__(name, Listener(serve, front.limits, front.alarms, tls))
        self._front = front

    async def _dismiss(self) -> None:
        await self._front.dismiss()
