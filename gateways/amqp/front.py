"""The AMQP door of a cluster's node: every client shakes hands here, then is served here or by the leader of its vhost.
Driver.

Neighbours: handshake.py, then AmqpDoor.adopt of the shard's service, or relay.py.
"""

import logging
from collections import Counter
from collections.abc import Callable

from headrace.core_log.env import Env
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.errors import ReplyCode, amqp_error
from headrace.gateways.amqp.handshake import Handshake
from headrace.gateways.amqp.relay import AmqpRelay
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.inbox import STALL_S
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import Connection, DoorListener, Listener, TlsSide
from headrace.gateways.relay.leaders import AmqpInside, Leaders, NoLeader
from headrace.gateways.relay.opening import Opened

_log = logging.getLogger(__name__)


class AmqpFront:
    def __init__(
        self,
        leaders: Leaders,
        env: Env,
        access: Access,
        authentication: Authentication,
        limits: Limits,
        alarms: Alarms,
        *,
        has_vhost: Callable[[str], bool],
        config: AmqpConfig | None = None,
    ) -> None:
        """`has_vhost`: whether the cluster has it, wherever it is led."""
        self.access = access
        self.authentication = authentication
        self.limits = limits
        self.alarms = alarms
        self.config = config or AmqpConfig()
        self.clock = env.clock
        self.has_vhost = has_vhost
        self.relays: set[AmqpRelay] = set()
        self._leaders = leaders
        self._ids = env.ids
        self._shaking: set[Handshake] = set()
        # Doors of this node that serve connections which came in here.
        self._inside: Counter[AmqpInside] = Counter()

    async def serve(self, connection: Connection) -> None:
        """One connection, until it ends."""
        handshake = Handshake(self, connection)
        self._shaking.add(handshake)
        try:
            outcome = await handshake.run()
            self._shaking.discard(handshake)
            if outcome is None:
                return
            opened, leftover = outcome
            doors = self._leaders.here(opened.vhost)
            if doors is not None:
                await self._adopt(doors.amqp, connection, opened, leftover)
                return
            relay = AmqpRelay(self._leaders, connection, opened, self.clock, self._ids.uuid().bytes)
            self.relays.add(relay)
            try:
                await relay.run(leftover)
            except NoLeader as error:
                await handshake.refuse(amqp_error(ReplyCode.CONNECTION_FORCED, str(error)))
            finally:
                self.relays.discard(relay)
        except Exception:
            # Our mistake: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})
        finally:
            self._shaking.discard(handshake)

    async def _adopt(self, door: AmqpInside, connection: Connection, opened: Opened, leftover: bytes) -> None:
        self._inside[door] += 1
        try:
            await door.adopt(connection, opened, leftover)
        finally:
            self._inside[door] -= 1
            if not self._inside[door]:
                del self._inside[door]

    async def run(self) -> None:
        """Heartbeats of relayed connections, until cancelled."""
        while True:
            before = self.clock.monotonic()
            await self.clock.sleep(1)
            now = self.clock.monotonic()
            for relay in list(self.relays):
                relay.beat(now, late=now - before > STALL_S)

    def moved(self, vhost: str) -> None:
        """The vhost has another leader now: nobody waits for the old one to fall silent."""
        for relay in list(self.relays):
            if relay.opened.vhost == vhost:
                relay.move()

    async def dismiss(self, reason: str) -> None:
        """This node stops: tell everybody who came in here."""
        for handshake in list(self._shaking):
            handshake.cancel()
        for relay in list(self.relays):
            await relay.shut(reason)
        for door in list(self._inside):
            await door.step_down(reason)


class AmqpFrontListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, front: AmqpFront, tls: TlsSide | None = None) -> None:
        super().__init__(name, Listener(front.serve, front.limits, front.alarms, tls))
        self._front = front

    async def _dismiss(self) -> None:
        await self._front.dismiss("broker is shutting down")
