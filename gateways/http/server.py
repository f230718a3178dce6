"""The HTTP door: what its handlers work with, its connections, its listeners. Driver."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import trio

from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.consumer_groups_coordinator import GroupCoordinator
from headrace.gateways.delivery.consumer_groups_topics import GroupTopics
from headrace.gateways.delivery.cursors import Cursors
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import ByteSocket, Connection, DoorListener, Listener, TlsSide
from headrace.gateways.delivery.meter import Watch
from headrace.gateways.delivery.read_leases import ReadLeases
from headrace.gateways.delivery.schedules import Schedules
from headrace.gateways.delivery.staging import Staging
from headrace.gateways.delivery.topics import Topics
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.http.app import App
from headrace.gateways.http.config import HttpConfig
from headrace.gateways.http.connection import HttpConnection
from headrace.gateways.http.connections import Connections
from headrace.gateways.http.metrics import MqttCounts
from headrace.gateways.http.retained import FindRetained
from headrace.gateways.http.words import Words
from headrace.gateways.relay.dialing import connection_of
from headrace.gateways.relay.opening import HttpOpening

_log = logging.getLogger(__name__)


class HttpDoor:
    def __init__(
        self,
        broker: Broker,
        turn: Turn,
        access: Access,
        authentication: Authentication,
        limits: Limits,
        watch: Watch,
        *,
        topics: Topics,
        groups: GroupCoordinator,
        group_topics: GroupTopics,
        schedules: Schedules,
        staging: Staging,
        cursors: Cursors,
        read_leases: ReadLeases,
        words: Words,
        open_connections: Connections,
        config: HttpConfig | None = None,
        version: str = "",
    ) -> None:
        self.broker = broker
        self.turn = turn
        self.access = access
        self.authentication = authentication
        self.limits = limits
        self.watch = watch
        self.alarms = watch.alarms
        self.topics = topics
        self.groups = groups
        self.group_topics = group_topics
        self.schedules = schedules
        self.staging = staging
        self.cursors = cursors
        self.read_leases = read_leases
        self.words = words
        # Of the other doors.
        self.open_connections = open_connections
        self.mqtt_counts: Callable[[], Sequence[MqttCounts]] = lambda: ()
        self.retained: FindRetained = lambda vhost, topic_filter: iter(())
        self.config = config or HttpConfig()
        self.version = version
        # Of every door, for those who count.
        self.listeners: Sequence[DoorListener] = ()
        # Set when the broker stops: long polls end with what they have.
        self.stopping = trio.Event()
        self.connections: set[HttpConnection] = set()
        # Requests that were answered, by the class of the status.
        self.answers: Counter[str] = Counter()
        self.app = App(self)

    @property
    def metadata_version(self) -> int:
        return self.broker.metadata.snapshot.version

    async def serve(self, connection: Connection) -> None:
        """One connection, until it ends."""
        one = HttpConnection(self.app, connection, self.config, self.broker.env.clock, self.broker.env.worker)
        self.connections.add(one)
        try:
            await one.run()
        except Exception:
            # Our mistake: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})
        finally:
            self.connections.discard(one)

    async def take_relayed(self, sock: ByteSocket, opening: bytes, leftover: bytes) -> None:
        """A request that another node passes on, of a client there. Raises msgspec.DecodeError."""
        told = msgspec.msgpack.decode(opening, type=HttpOpening)
        assert not leftover, "whoever passes on waits until it is listened to"
        await self.serve(connection_of(told.client, sock))

    async def step_down(self) -> None:
        """Another node answers from now on, or nobody: long polls end with what they have."""
        self.stopping.set()
        for one in list(self.connections):
            one.dismiss()
        await trio.lowlevel.checkpoint()


class HttpListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, door: HttpDoor, tls: TlsSide | None = None) -> None:
        super().__init__(name, Listener(door.serve, door.limits, door.alarms, tls))
        self._door = door

    async def _dismiss(self) -> None:
        await self._door.step_down()
