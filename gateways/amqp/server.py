"""The AMQP door: a listener, its sessions, one flush at the end of each turn, heartbeats. Driver."""

import logging
import socket

import trio

from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.outbox import Outbox
from headrace.gateways.amqp.session import Session
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker

_log = logging.getLogger(__name__)

# How often deliveries that nobody settles are looked for, with timeouts of minutes; RabbitMQ does so once a minute.
DELIVERIES_PERIOD_S = 15.0


class AmqpDoor:
    name = "amqp"

    def __init__(
        self, broker: Broker, access: Access, authentication: Authentication, config: AmqpConfig | None = None
    ) -> None:
        self.broker = broker
        self.access = access
        self.authentication = authentication
        self.config = config or AmqpConfig()
        self.sessions: set[Session] = set()
        self.accepted_count = 0
        self._listener: trio.socket.SocketType | None = None
        self._to_flush: list[Outbox] = []
        self._flush_soon = False
        # True while a session works through a read without awaiting.
        self.in_turn = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._draining = trio.Event()
        self._empty = trio.Event()
        self._empty.set()

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Bind and listen; returns where."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = trio.socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            await listener.bind((host, port))
            listener.listen(1024)
        except OSError:
            listener.close()
            raise
        self._listener = listener
        self._token = trio.lowlevel.current_trio_token()
        self.broker.on_ready = self.turn_soon
        self.broker.directory.committer.on_commit = self.end_turn
        bound = listener.getsockname()
        return bound[0], bound[1]

    async def serve(self) -> None:
        """Accept and serve; returns once drained."""
        assert self._listener is not None, "listen comes first"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._accept, nursery)
            nursery.start_soon(self._beat)
            await self._draining.wait()
            await self._empty.wait()
            nursery.cancel_scope.cancel()

    async def _accept(self, nursery: trio.Nursery) -> None:
        assert self._listener is not None
        with self._listener:
            while True:
                try:
                    accepted, peer = await self._listener.accept()
                except trio.ClosedResourceError:
                    return
                except OSError as error:
                    _log.warning("accept failed: %s", error)
                    await trio.sleep(0.1)
                    continue
                # The session reads and writes the plain socket itself, so that it can send without awaiting.
                plain = socket.socket(fileno=accepted.detach())
                plain.setblocking(False)
                plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.accepted_count += 1
                nursery.start_soon(self._run, Session(self, plain, (peer[0], peer[1])))

    async def _run(self, session: Session) -> None:
        self.sessions.add(session)
        self._empty = trio.Event() if self._empty.is_set() else self._empty
        try:
            await session.run()
        finally:
            self.sessions.discard(session)
            if not self.sessions:
                self._empty.set()

    async def _beat(self) -> None:
        """Heartbeats by a sweep: for 5,000 sessions 1 ms a second, as much as timers of their own would take, which
        would besides wake the loop for each."""
        clock = self.broker.env.clock
        deliveries_due = 0.0
        while True:
            await clock.sleep(1)
            now = clock.monotonic()
            for session in list(self.sessions):
                session.beat(now)
            if now >= deliveries_due:
                deliveries_due = now + self._deliveries_period_s()
                for session in list(self.sessions):
                    session.check_deliveries(now)
            self.end_turn()

    def _deliveries_period_s(self) -> float:
        timeout_s = self.config.consumer_timeout_ms / 1000
        return min(timeout_s / 4, DELIVERIES_PERIOD_S) if timeout_s else DELIVERIES_PERIOD_S

    # -- flushing -----------------------------------------------------------------------------------------------------

    def note(self, outbox: Outbox) -> None:
        """An outbox has something to send: with the end of this turn, or soon when nobody is in a turn."""
        self._to_flush.append(outbox)
        # Whoever is in a turn, or tells of a commit, ends it with a flush.
        if not self.in_turn and not self.broker.directory.committer.telling:
            self.turn_soon()

    def turn_soon(self) -> None:
        """Something became ready while nobody is in a turn."""
        if not self._flush_soon and self._token is not None:
            self._flush_soon = True
            self._token.run_sync_soon(self._flush_noted, idempotent=True)

    def _flush_noted(self) -> None:
        self._flush_soon = False
        self.end_turn()

    def end_turn(self) -> None:
        """Deliver what arrived and send what is to be sent."""
        self.broker.dispatch()
        while self._to_flush:
            outboxes, self._to_flush = self._to_flush, []
            for outbox in outboxes:
                outbox.flush()

    async def drain(self) -> None:
        """Accept nothing more, close every connection in good order."""
        if self._listener is not None:
            self._listener.close()
        for session in list(self.sessions):
            await session.shut("broker is shutting down")
        self._draining.set()
        await self._empty.wait()
