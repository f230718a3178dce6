"""The MQTT door: its clients, the hubs of the vhosts they are in, keep alives; and its listeners. Driver.

There is one door for all ways that MQTT comes in: plain, with TLS, over WebSocket.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from headrace.controller.changes import (
    Change,
    DeletePermission,
    DeleteTopicPermission,
    DeleteUser,
    DeleteVhost,
    PutPermission,
    PutTopicPermission,
)
from headrace.controller.snapshot import Snapshot
from headrace.gateways.delivery.access import Access, Operation
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.inbox import STALL_S
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import ByteSocket, Connection, DoorListener, Listener, TlsSide
from headrace.gateways.delivery.meter import Watch
from headrace.gateways.delivery.poller import Poller, is_available
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.mqtt import state
from headrace.gateways.mqtt.catch_up import Translated
from headrace.gateways.mqtt.client import Client
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.hub import COMPACTED, Hub
from headrace.gateways.mqtt.properties import PublishScans
from headrace.gateways.mqtt.reasons import ReasonCode
from headrace.gateways.mqtt.retained_log import RetainedLog
from headrace.gateways.mqtt.retaining import Unattended
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.shared import EXCHANGE, Shared
from headrace.gateways.mqtt.shares import Shares
from headrace.gateways.mqtt.topics import TopicNames
from headrace.gateways.mqtt.websocket import open_websocket
from headrace.gateways.relay.dialing import connection_of
from headrace.gateways.relay.opening import MqttOpening

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """MQTT in one vhost."""

    hub: Hub
    shares: Shares


class MqttDoor:
    def __init__(
        self,
        broker: Broker,
        turn: Turn,
        access: Access,
        authentication: Authentication,
        limits: Limits,
        watch: Watch,
        *,
        keys: RoutingKeys,
        to_mqtt: Callable[[bytes], Translated],
        config: MqttConfig | None = None,
        version: str = "headrace",
    ) -> None:
        """Before the broker is loaded: the door has logs of its own."""
        self.broker = broker
        self.turn = turn
        self.access = access
        self.authentication = authentication
        self.limits = limits
        self.alarms = watch.alarms
        self.config = config or MqttConfig()
        self.topics = TopicNames()
        self.scans = PublishScans()
        self.keys = keys
        self.clients: set[Client] = set()
        self.poller = Poller(turn, broker.env.clock) if is_available() else None
        self._places: dict[str, Place] = {}
        self._nursery: trio.Nursery | None = None
        self._shared = Shared(
            broker,
            self.config,
            keys,
            self.scans,
            to_mqtt,
            broker.private_log(state.SESSIONS_NAME, COMPACTED),
            RetainedLog(broker.private_log(state.RETAINED_NAME, COMPACTED)),
            self._may_publish,
            turn.before_end,
            version,
        )
        broker.log_made = self._log_made
        broker.metadata.listen(self._metadata_changed)
        watch.listen(self._alarms_changed)

    def load(self) -> None:
        """Sessions and retained messages as the log has them. Once the broker is loaded."""
        for vhost, message in self._shared.retained.entries():
            if vhost in self.broker.vhosts:
                retained = self.place(vhost).hub.retained
                retained.put(message) if message.payload else retained.remove(message.topic)
        kept: dict[bytes, tuple[int, bytes]] = {}
        for offset, key, value in self._shared.sessions_log.entries():
            kept[key] = (offset, value)
        noted: dict[str, int] = {}
        for key, (offset, value) in kept.items():
            vhost, client_id = state.split_key(key)
            if not client_id:
                noted[vhost] = state.decode_noted(value, offset)
            elif value and vhost in self.broker.vhosts:
                place = self.place(vhost)
                place.shares.restore(place.hub.restore(client_id.decode(), state.decode_session(value, offset)))
        for vhost, place in self._places.items():
            place.hub.set_right(noted.get(vhost, 0))
        for vhost, host in self.broker.vhosts.items():
            stream = host.exchange_stream(EXCHANGE)
            if stream is not None and self.broker.maybe_log(stream) is not None:
                self._log_made(vhost, "exchange", EXCHANGE)

    def _log_made(self, vhost: str, kind: str, name: str) -> None:
        """Nobody speaks MQTT there yet, but AMQP clients may publish what is to be retained."""
        if (kind, name) == ("exchange", EXCHANGE) and vhost not in self._places:
            log = self.broker.vhosts[vhost].exchange_log(EXCHANGE)
            self.broker.taps[log] = Unattended(lambda: self.place(vhost).hub.fan_out)

    def _may_publish(self, user: str, vhost: str, topic: str, client_id: str) -> bool:
        key = self.keys.key_of(topic.encode()).decode("utf-8", "surrogateescape")
        return self.access.may(user, vhost, Operation.WRITE, EXCHANGE) and self.access.may_use_key(
            user, vhost, EXCHANGE, Operation.WRITE, key, client_id or None
        )

    # -- as its clients see it ------------------------------------------------------------------------------------

    def place(self, vhost: str) -> Place:
        place = self._places.get(vhost)
        if place is None:
            hub = Hub(self._shared, self.broker.vhosts[vhost])
            place = self._places[vhost] = Place(hub, Shares(hub, self.start_soon))
            if self._nursery is not None:
                self._nursery.start_soon(hub.run)
        return place

    def hubs(self) -> list[Hub]:
        """Of the vhosts in which there is MQTT."""
        return [place.hub for place in self._places.values()]

    def new_client_id(self) -> str:
        return f"headrace-{self.broker.env.ids.uuid()}"

    def start_soon(self, run: Callable[[], object]) -> None:
        if self._nursery is not None:
            self._nursery.start_soon(run)  # type: ignore[arg-type]

    async def serve(self, connection: Connection, leftover: bytes = b"") -> None:
        """One connection, until it ends. `leftover`: octets of the client's that were read already."""
        client = Client(self, connection, leftover)
        self.clients.add(client)
        try:
            await client.run()
        except Exception:
            # Our mistake, or a disk that fails and ends the node by another way: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})
        finally:
            self.clients.discard(client)

    async def take_relayed(self, sock: ByteSocket, opening: bytes, leftover: bytes) -> None:
        """A client of another node's, until it ends. Raises msgspec.DecodeError."""
        told = msgspec.msgpack.decode(opening, type=MqttOpening)
        await self.serve(connection_of(told.client, sock), leftover)

    async def step_down(self, reason: str) -> None:
        """Another node serves these vhosts from now on, or nobody: clients are told to come again."""
        for client in list(self.clients):
            client.dismiss(ReasonCode.SERVER_SHUTTING_DOWN, reason)
        while self.clients:
            # They have been told to end, and need no more than their turn for it.
            await trio.lowlevel.checkpoint()

    async def run(self) -> None:
        """Keep alives and the hubs, until cancelled."""
        clock = self.broker.env.clock
        async with trio.open_nursery() as self._nursery:
            if self.poller is not None:
                self._nursery.start_soon(self.poller.run)
            for place in self._places.values():
                self._nursery.start_soon(place.hub.run)
            if self.config.sys_period_s:
                self._nursery.start_soon(self._tell_sys)
            while True:
                before = clock.monotonic()
                await clock.sleep(1)
                now = clock.monotonic()
                for client in list(self.clients):
                    if now - before > STALL_S:
                        client.excuse()
                    client.check_alive(now)
                self.turn.end()

    async def _tell_sys(self) -> None:
        while True:
            await self.broker.env.clock.sleep(self.config.sys_period_s)
            for place in list(self._places.values()):
                place.hub.tell_sys()
            self.turn.end()

    async def close(self) -> None:
        """The clients have gone: what they left is written down."""
        for place in self._places.values():
            place.hub.close()
        await self.broker.directory.committer.flush()

    # -- told from outside ----------------------------------------------------------------------------------------

    def _alarms_changed(self) -> None:
        for client in list(self.clients):
            client.reconsider()

    def _metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        """Who lost a right, or all of them, notices without having to ask."""
        for change in changes:
            match change:
                case DeleteUser(name):
                    for client in [one for one in self.clients if one.user == name]:
                        client.dismiss(ReasonCode.NOT_AUTHORIZED)
                case DeleteVhost(name):
                    for client in [one for one in self.clients if one.vhost == name]:
                        client.dismiss(ReasonCode.ADMINISTRATIVE_ACTION)
                    self._places.pop(name, None)
                case DeletePermission(user, vhost):
                    for client in [one for one in self.clients if one.user == user and one.vhost == vhost]:
                        client.dismiss(ReasonCode.NOT_AUTHORIZED)
                case PutPermission(right) | PutTopicPermission(right):
                    self._rights_changed(right.user, right.vhost)
                case DeleteTopicPermission(user, vhost):
                    self._rights_changed(user, vhost)
                case _:
                    pass

    def _rights_changed(self, user: str, vhost: str) -> None:
        for client in [one for one in self.clients if one.user == user and one.vhost == vhost]:
            client.rights_changed()


class MqttListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, door: MqttDoor, tls: TlsSide | None = None, *, websocket: bool = False) -> None:
        serve = self._serve_websocket if websocket else door.serve
        super().__init__(name, Listener(serve, door.limits, door.alarms, tls))
        self._door = door
        # Of those who have not got their WebSocket yet.
        self._shaking: set[trio.CancelScope] = set()

    async def _serve_websocket(self, connection: Connection) -> None:
        config = self._door.config
        with trio.move_on_after(config.handshake_s) as patience:
            self._shaking.add(patience)
            try:
                carried = await open_websocket(connection, config.ws_origins)
            finally:
                self._shaking.discard(patience)
        if not patience.cancelled_caught and carried is not None:
            try:
                await self._door.serve(carried)
            finally:
                carried.socket.close()

    async def _dismiss(self) -> None:
        for scope in self._shaking:
            scope.cancel()
        await self._door.step_down("broker is shutting down")
