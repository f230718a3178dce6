"""Who leads a vhost, as the doors ask for it. Values: what the composition of a cluster's node hands to them."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from headrace.core_log.errors import HeadraceError
from headrace.core_log.peer.link import PeerLink
from headrace.gateways.delivery.listener import ByteSocket, Connection
from headrace.gateways.relay.opening import Opened


class NoLeader(HeadraceError):
    """Nobody leads the vhost, and nobody was elected in the time that a client waits."""


class Relayed(Protocol):
    """A door that clients of other nodes are handed to."""

    async def take_relayed(self, sock: ByteSocket, opening: bytes, leftover: bytes) -> None:
        """One client, until it ends. `opening`: as its door on the other node encoded it; `leftover`: octets of the
        client's that were read already. The socket is the caller's to close."""


class AmqpInside(Relayed, Protocol):
    async def adopt(self, connection: Connection, opened: Opened, leftover: bytes = b"") -> None: ...

    async def step_down(self, reason: str) -> None: ...


class MqttInside(Relayed, Protocol):
    async def serve(self, connection: Connection, leftover: bytes = b"") -> None: ...

    async def step_down(self, reason: str) -> None: ...


class HttpInside(Relayed, Protocol):
    @property
    def app(self) -> Callable[..., Awaitable[None]]:
        """Answers a request, as ASGI has it."""


class ShardDoors(Protocol):
    """What serves the vhosts of one shard on the node that leads it."""

    @property
    def amqp(self) -> AmqpInside: ...
    @property
    def mqtt(self) -> MqttInside: ...
    @property
    def http(self) -> HttpInside: ...


class Leaders(Protocol):
    # How long a client waits for a leader to be elected.
    patience_s: float

    def parts(self) -> Sequence[Sequence[str]]:
        """The vhosts, those that have one leader together; what is not about a vhost is that of the first's."""

    def here(self, vhost: str) -> ShardDoors | None:
        """What serves the vhost, if this node leads it."""

    async def connect(self, vhost: str, detail: bytes) -> PeerLink:
        """A link (Purpose.RELAY, with this detail) to whoever leads the vhost. Raises LinkError when that one cannot be
        reached, NoLeader when there is none within `patience_s`."""
