"""What a client asks of its door and of the vhost it is in, and what the parts of a client ask of each other. Contract.

A client is a connection (client.py) that says who it is (login.py), publishes (publisher.py) and subscribes
(subscriber.py); server.py is the door.
"""

from collections.abc import Callable
from typing import Protocol

from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.poller import Poller
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.cutter import Event
from headrace.gateways.mqtt.hub import Hub
from headrace.gateways.mqtt.packets import Packet
from headrace.gateways.mqtt.properties import PublishScans
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.shares import Shares
from headrace.gateways.mqtt.topics import TopicNames


class Place(Protocol):
    """A vhost, as a client sees it."""

    @property
    def hub(self) -> Hub: ...
    @property
    def shares(self) -> Shares: ...


class Door(Protocol):
    """What a client asks of its door."""

    broker: Broker
    turn: Turn
    access: Access
    authentication: Authentication
    limits: Limits
    alarms: Alarms
    config: MqttConfig
    topics: TopicNames
    scans: PublishScans
    keys: RoutingKeys
    # Reads plain connections without a task switch; None: there is none here.
    poller: Poller | None

    def place(self, vhost: str) -> Place: ...

    def new_client_id(self) -> str: ...

    def start_soon(self, run: Callable[[], object]) -> None: ...


class Line(Protocol):
    """A connection, as its parts see it."""

    door: Door
    connection: Connection
    outbox: Outbox
    version: Version
    user: str
    vhost: str
    client_id: str
    # Whether the client wants to read why something went wrong.
    is_told_why: bool
    # Its session is not its own any more.
    has_ended: bool

    def put(self, packet: Packet) -> None:
        """Send it with the end of the turn."""

    async def next_event(self) -> Event:
        """What the client sends next, while its CONNECT is not answered."""

    def fail_soon(self, error: Exception) -> None:
        """The connection ends with this, from its own task."""

    def who(self) -> dict[str, str]:
        """For the log."""


class Ended(Exception):
    """The connection is over; whoever raised it has said why."""
