"""An AMQP client of this node whose vhost is led by another: its octets, both ways, and a new leader when one is lost.
Driver.

    client <-> this node (tracker, heartbeats) <-> leader (session)

The client's connection lasts as long as somebody leads its vhost, or is elected to within its patience. Heartbeats are
this node's affair on the client's side; on the link there are other ones, shorter, so that a silent leader is noticed.
Whoever does not read is not read for: what waits in between is one read and what tracking.py holds back.
Neighbours: tracking.py knows what to resume, front.py has the handshake, the leader's AmqpDoor.take_relayed is the
other side.
"""

import logging
import socket
from contextlib import closing, suppress
from enum import Enum

import msgspec
import trio
from pamqp import commands

from headrace.core_log.env import Clock
from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.frames import HEARTBEAT_FRAME, encode_method
from headrace.gateways.amqp.handshake import CLOSE_SECONDS_MAX, CLOSED_SECONDS_MAX
from headrace.gateways.amqp.methods import make
from headrace.gateways.amqp.tracking import Recovery, Tracker
from headrace.gateways.delivery.listener import ByteSocket, Connection
from headrace.gateways.relay.dialing import connection_of, dial
from headrace.gateways.relay.end import End, EndLost
from headrace.gateways.relay.leaders import Leaders, NoLeader
from headrace.gateways.relay.opening import AmqpOpening, DoorName, Opened

_log = logging.getLogger(__name__)

# Both sides of a link give the other one up when it was silent for twice as long.
LINK_HEARTBEAT_S = 4
# How long a leader that takes nothing is told that a client has gone.
GOODBYE_S = 1.0


class _Outcome(Enum):
    CLIENT_GONE = 1
    LEADER_LOST = 2


class AmqpRelay:
    def __init__(self, leaders: Leaders, connection: Connection, opened: Opened, clock: Clock, identity: bytes) -> None:
        """`identity`: of the client's connection, like no other one's."""
        self.opened = opened
        self.failover_count = 0
        self._leaders = leaders
        self._connection = connection
        self._clock = clock
        self._opening = AmqpOpening(identity, msgspec.structs.replace(opened, heartbeat_s=LINK_HEARTBEAT_S))
        self._tracker = Tracker(frame_max=opened.frame_max)
        self._client = End(connection, clock)
        self._link: End | None = None
        self._links: trio.CancelScope | None = None
        self._scope = trio.CancelScope()
        self._sent_to_client = 0
        self._quiet_s = 0
        self._quiet_link_s = 0
        self._sent_to_link = 0

    async def run(self, leftover: bytes) -> None:
        """Until the client goes. Raises NoLeader if there is none to begin with: the client was told nothing then."""
        sock, said = await dial(self._leaders, self.opened.vhost, DoorName.AMQP, msgspec.msgpack.encode(self._opening))
        recovery: Recovery | None = None
        with self._scope:
            while True:
                with closing(sock):
                    if await self._carry(sock, said, leftover, recovery) is _Outcome.CLIENT_GONE:
                        return
                leftover = b""
                if self._tracker.is_closing:
                    await self._end()
                    return
                recovery = self._tracker.recover()
                try:
                    await self._client.send(recovery.to_client)
                    sock, said = await self._redial(recovery)
                except EndLost:
                    return
                except NoLeader as error:
                    await self._refuse(amqp_error(ReplyCode.CONNECTION_FORCED, str(error)))
                    return

    async def _redial(self, recovery: Recovery) -> tuple[ByteSocket, bytes]:
        self.failover_count += 1
        vhost = self.opened.vhost
        _log.info("leader lost, looking for the next", extra={"peer": self._connection.host, "vhost": vhost})
        opening = msgspec.structs.replace(self._opening, resumed=recovery.resumed)
        found = await dial(self._leaders, vhost, DoorName.AMQP, msgspec.msgpack.encode(opening))
        # Nobody read what it sent meanwhile.
        self._client.excuse()
        return found

    async def _carry(self, sock: ByteSocket, said: bytes, leftover: bytes, recovery: Recovery | None) -> _Outcome:
        """Both ways, until one side ends."""
        link = End(connection_of(self.opened.client, sock), self._clock)
        outcome = _Outcome.LEADER_LOST
        async with trio.open_nursery() as nursery:
            self._link, self._links = link, nursery.cancel_scope

            async def upward() -> None:
                nonlocal outcome
                with suppress(EndLost):
                    if recovery is not None:
                        await link.send(recovery.to_leader)
                    data = leftover
                    while True:
                        if data and (passed := self._tracker.from_client(data)):
                            await link.send(passed)
                        try:
                            data = await self._client.read()
                        except EndLost:
                            outcome = _Outcome.CLIENT_GONE
                            break
                nursery.cancel_scope.cancel()

            async def downward() -> None:
                nonlocal outcome
                with suppress(EndLost):
                    data = said
                    while True:
                        if data and (passed := self._tracker.from_leader(data)):
                            try:
                                await self._client.send(passed)
                            except EndLost:
                                outcome = _Outcome.CLIENT_GONE
                                break
                        data = await link.read()
                nursery.cancel_scope.cancel()

            nursery.start_soon(upward)
            nursery.start_soon(downward)
        self._link = self._links = None
        if outcome is _Outcome.CLIENT_GONE:
            # Else the leader would wait for it to come back by another link.
            with trio.move_on_after(GOODBYE_S), suppress(EndLost):
                await link.send(encode_method(0, make(commands.Connection.CloseOk)))
        return outcome

    # -- the end --------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        """The link is gone, and so should be the client: it gets the answer it waits for, and a moment to hear it."""
        with suppress(EndLost):
            if not self._tracker.leader_closes:
                await self._client.send(encode_method(0, make(commands.Connection.CloseOk)))
            await self._linger(CLOSED_SECONDS_MAX)

    async def _refuse(self, error: AmqpError) -> None:
        extra = {"peer": self._connection.host, "user": self.opened.user, "code": int(error.code)}
        _log.warning("connection closed: %s", error.text, extra=extra)
        with suppress(EndLost):
            close = make(commands.Connection.Close, reply_code=int(error.code), reply_text=error.reply_text)
            await self._client.send(encode_method(0, close))
            await self._linger(CLOSE_SECONDS_MAX)

    async def _linger(self, seconds: float) -> None:
        """What it still sends is thrown away: closing a socket with unread octets would take back what we sent."""
        with suppress(OSError):
            self._connection.socket.shutdown(socket.SHUT_WR)
        with trio.move_on_after(seconds):
            while True:
                await self._client.read()

    # -- asked from outside ---------------------------------------------------------------------------------------

    async def shut(self, reason: str) -> None:
        """This node stops: the client is told, and its answer ends the session at its leader too."""
        error = amqp_error(ReplyCode.CONNECTION_FORCED, reason)
        close = make(commands.Connection.Close, reply_code=int(error.code), reply_text=error.reply_text)
        self._tracker.leader_closes = True
        if self._link is None:
            self._scope.cancel()
        self._scope.deadline = trio.current_time() + CLOSE_SECONDS_MAX
        with suppress(EndLost):
            await self._client.send(encode_method(0, close))

    def move(self) -> None:
        """Another node leads the vhost."""
        if self._links is not None:
            self._links.cancel()

    def beat(self, now: float, *, late: bool) -> None:
        """Once a second: heartbeats where nothing else was sent, and the end of those who are silent. `late`: we were
        held up, and what they sent has not been read."""
        link = self._link
        if late:
            self._client.excuse()
            if link is not None:
                link.excuse()
        self._beat_client(now, link)
        if link is None:
            return
        if now - link.last_received > 2 * LINK_HEARTBEAT_S and not self._client.is_sending:
            _log.warning("the leader is silent", extra={"peer": self._connection.host, "vhost": self.opened.vhost})
            self.move()
            return
        if link.sent_count != self._sent_to_link:
            self._sent_to_link, self._quiet_link_s = link.sent_count, 0
            return
        self._quiet_link_s += 1
        if self._quiet_link_s >= LINK_HEARTBEAT_S // 2:
            link.send_now(HEARTBEAT_FRAME)
            self._quiet_link_s = 0

    def _beat_client(self, now: float, link: End | None) -> None:
        heartbeat_s = self.opened.heartbeat_s
        if not heartbeat_s:
            return
        # Nobody reads from it while there is no leader, or one that takes nothing.
        is_heard = link is not None and not link.is_sending
        if is_heard and now - self._client.last_received > 2 * heartbeat_s:
            _log.warning("connection closed: no heartbeat", extra={"peer": self._connection.host})
            self._scope.cancel()
            return
        if self._client.sent_count != self._sent_to_client:
            self._sent_to_client, self._quiet_s = self._client.sent_count, 0
            return
        self._quiet_s += 1
        if self._quiet_s >= heartbeat_s // 2:
            self._client.send_now(HEARTBEAT_FRAME)
            self._quiet_s = 0
