"""The AMQP door: its sessions, heartbeats, patience with clients; and its listeners. Driver.

There is one door for all addresses that AMQP is spoken on, with TLS or without.
"""

import logging
from collections.abc import Sequence

import msgspec
import trio

from headrace.controller.changes import (
    Change,
    DeletePermission,
    DeleteUser,
    DeleteVhost,
    PutPermission,
)
from headrace.controller.snapshot import Snapshot
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.handshake import Handshake
from headrace.gateways.amqp.session import Session
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.inbox import STALL_S
from headrace.gateways.delivery.limits import Limits
from headrace.gateways.delivery.listener import ByteSocket, Connection, DoorListener, Listener, TlsSide
from headrace.gateways.delivery.meter import Watch
from headrace.gateways.delivery.poller import Poller, is_available
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.relay.dialing import connection_of
from headrace.gateways.relay.opening import AmqpOpening, Opened, Resumed

_log = logging.getLogger(__name__)

# How often deliveries that nobody settles are looked for, with timeouts of minutes; RabbitMQ does so once a minute.
DELIVERIES_PERIOD_S = 15.0


class AmqpDoor:
    def __init__(
        self,
        broker: Broker,
        turn: Turn,
        access: Access,
        authentication: Authentication,
        limits: Limits,
        watch: Watch,
        config: AmqpConfig | None = None,
    ) -> None:
        self.broker = broker
        self.access = access
        self.authentication = authentication
        self.limits = limits
        self.alarms = watch.alarms
        self.config = config or AmqpConfig()
        self.clock = broker.env.clock
        self.sessions: set[Session] = set()
        # Of those who are not there yet.
        self.shaking: set[Handshake] = set()
        self.turn = turn
        self.poller = Poller(turn, broker.env.clock) if is_available() else None
        # After the access rights and the broker itself have heard of a change.
        broker.metadata.listen(self._metadata_changed)
        watch.listen(self._alarms_changed)

    def has_vhost(self, name: str) -> bool:
        return name in self.broker.vhosts

    async def serve(self, connection: Connection) -> None:
        """One connection, until it ends."""
        handshake = Handshake(self, connection)
        self.shaking.add(handshake)
        try:
            outcome = await handshake.run()
        except Exception:
            _log.exception("a connection ended by an internal error", extra={"peer": connection.host})
            return
        finally:
            self.shaking.discard(handshake)
        if outcome is not None:
            await self.adopt(connection, *outcome)

    async def adopt(self, connection: Connection, opened: Opened, leftover: bytes = b"") -> None:
        """One connection that was opened by a handshake, until it ends. It is told open-ok here. `leftover`: octets of
        the client's that were read already, from the first one behind connection.open."""
        await self._run(Session(self, connection, opened), leftover, None)

    async def take_relayed(self, sock: ByteSocket, opening: bytes, leftover: bytes) -> None:
        """A client of another node's, until it ends or that node is lost. One that was served by an earlier leader, or
        here over a link that was lost, goes on where it was. Raises msgspec.DecodeError."""
        told = msgspec.msgpack.decode(opening, type=AmqpOpening)
        owner: object = None
        for earlier in [one for one in self.sessions if one.relayed == told.connection]:
            earlier.be_succeeded()
            await earlier.gone()
            owner = earlier.owner
        connection = connection_of(told.opened.client, sock)
        session = Session(self, connection, told.opened, relayed=told.connection, owner=owner)
        await self._run(session, leftover, told.resumed)

    async def _run(self, session: Session, leftover: bytes, resumed: Resumed | None) -> None:
        self.sessions.add(session)
        try:
            await session.run(leftover, resumed)
        except Exception:
            # Our mistake, or a disk that fails and ends the node by another way: the other connections live on.
            _log.exception("a connection ended by an internal error", extra={"peer": session.connection.host})
        finally:
            self.sessions.discard(session)

    async def step_down(self, reason: str) -> None:
        """Another node serves these vhosts from now on: clients of other nodes go on with it without noticing, those of
        this node are told to come again. What they declared stays; none of them touches anything when this returns."""
        ending = list(self.sessions)
        for session in ending:
            session.be_forsaken()
            if not session.relayed:
                await session.shut(reason)
        for session in ending:
            if session.relayed:
                await session.gone()

    def _alarms_changed(self) -> None:
        for session in list(self.sessions):
            session.reconsider()

    def _metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        """Who lost a right, or all of them, notices without having to ask."""
        for change in changes:
            match change:
                case DeleteUser(name):
                    for session in self._sessions_of(user=name):
                        session.expel(f"user '{name}' is deleted")
                case DeleteVhost(name):
                    for session in self._sessions_of(vhost=name):
                        session.expel(f"vhost '{name}' is deleted")
                case DeletePermission(user, vhost):
                    for session in self._sessions_of(user=user, vhost=vhost):
                        session.rights_changed()
                case PutPermission(right):
                    for session in self._sessions_of(user=right.user, vhost=right.vhost):
                        session.rights_changed()
                case _:
                    pass

    def _sessions_of(self, *, user: str | None = None, vhost: str | None = None) -> list[Session]:
        return [
            session
            for session in self.sessions
            if (user is None or session.user == user) and (vhost is None or session.vhost == vhost)
        ]

    async def run(self) -> None:
        """Heartbeats and patience with clients, until cancelled.

        By a sweep: for 5,000 sessions 1 ms a second, as much as timers of their own would take, which would besides
        wake the loop for each.
        """
        async with trio.open_nursery() as nursery:
            if self.poller is not None:
                nursery.start_soon(self.poller.run)
            await self._sweep()

    async def _sweep(self) -> None:
        clock = self.clock
        deliveries_due = 0.0
        while True:
            before = clock.monotonic()
            await clock.sleep(1)
            now = clock.monotonic()
            for session in list(self.sessions):
                if now - before > STALL_S:
                    session.excuse()
                session.beat(now)
            if now >= deliveries_due:
                deliveries_due = now + self._deliveries_period_s()
                for session in list(self.sessions):
                    session.check_deliveries(now)
            self.turn.end()

    def _deliveries_period_s(self) -> float:
        timeout_s = self.config.consumer_timeout_ms / 1000
        return min(timeout_s / 4, DELIVERIES_PERIOD_S) if timeout_s else DELIVERIES_PERIOD_S


class AmqpListener(DoorListener):
    """One address of the door."""

    def __init__(self, name: str, door: AmqpDoor, tls: TlsSide | None = None) -> None:
        super().__init__(name, Listener(door.serve, door.limits, door.alarms, tls))
        self._door = door

    async def _dismiss(self) -> None:
        for handshake in list(self._door.shaking):
            handshake.cancel()
        for session in list(self._door.sessions):
            await session.shut("broker is shutting down")
