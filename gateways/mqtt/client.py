"""One MQTT connection, from CONNECT to the closed socket. Driver.

Each turn: one read, all its packets, then what they caused and one flush of every connection that has something to
send. Nothing awaits per message; logins and shared subscriptions do. One task, and a second one only while the socket
takes no more: most devices are idle most of the time.
Neighbours: login.py knows who it is, publisher.py and subscriber.py answer what it publishes and subscribes to,
session.py holds what outlives it; door.py has what they ask of each other.
"""

import logging
import math
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import trio

from headrace.core_log.errors import HeadraceError
from headrace.gateways.delivery.inbox import Inbox
from headrace.gateways.delivery.limits import Member
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.poller import SILENT_S, Poller
from headrace.gateways.mqtt.cutter import AckRun, Event, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.door import Door, Ended, Place
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.flights import Outcome
from headrace.gateways.mqtt.greeting import as_mqtt, expiry_of, keep_alive_of, refusal_of, unexplained, welcome
from headrace.gateways.mqtt.login import Login
from headrace.gateways.mqtt.packets import (
    Auth,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Pubrec,
    Pubrel,
    Subscribe,
    Unsubscribe,
    Will,
)
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties, encode_blob
from headrace.gateways.mqtt.publisher import Publisher
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version, protocol_error
from headrace.gateways.mqtt.session import Session
from headrace.gateways.mqtt.subscriber import Subscriber, drop_unreadable, may_subscribe

_log = logging.getLogger(__name__)

READ_BYTES_MIN = 2048
CONNECT_BYTES_MAX = 256 * 1024
# How long a peer that was told goodbye may still send before its socket is closed.
GOODBYE_S = 1.0
# [MQTT-3.1.2-24] A client is gone when nothing was heard of it for this many of its keep alives.
PATIENCE = 1.5


class Client:
    __slots__ = (
        "_alarms",
        "_blocked",
        "_cutter",
        "_descriptor",
        "_early",
        "_failure",
        "_inbox",
        "_left",
        "_leftover",
        "_login",
        "_member",
        "_place",
        "_poller",
        "_published",
        "_publisher",
        "_room",
        "_scope",
        "_sent_count",
        "_socket",
        "_swamped_bytes",
        "_tallied_in",
        "_tallied_out",
        "_will",
        "_writer",
        "alias_max",
        "client_id",
        "connection",
        "door",
        "has_ended",
        "is_told_why",
        "keep_alive_s",
        "outbox",
        "packet_bytes_max",
        "session",
        "user",
        "version",
        "vhost",
        "window",
    )

    def __init__(self, door: Door, connection: Connection, leftover: bytes = b"") -> None:
        """`leftover`: octets of the client's that were read already."""
        self._leftover = leftover
        self.door = door
        self.connection = connection
        config = door.config
        self.user = ""
        self.vhost = ""
        self.client_id = ""
        self.version = Version.V3_1_1
        self.keep_alive_s = 0
        self.packet_bytes_max = 0
        self.alias_max = 0
        self.window = config.inflight_max
        self._inbox = Inbox(
            connection, door.broker.env.clock, bytes_min=READ_BYTES_MIN, bytes_max=config.read_bytes_max
        )
        self.session: Session | None = None
        self._place: Place | None = None
        self._member: Member | None = None
        self._will: Will | None = None
        self._socket = connection.socket
        self.outbox = Outbox(connection.socket, config.write_buffer_bytes, door.turn.note)
        self.outbox.on_room = self._has_room
        self.outbox.on_blocked = self._start_writer
        self._writer: trio.CancelScope | None = None
        self._cutter = PacketCutter(
            packet_bytes_max=config.packet_bytes_max,
            connect_bytes_max=min(CONNECT_BYTES_MAX, config.packet_bytes_max),
            topic_alias_max=config.topic_alias_max,
            topics=door.topics,
            scans=door.scans,
        )
        # What the vhost's tally has of the bytes that came and went.
        self._tallied_in = self._tallied_out = 0
        self._scope = trio.CancelScope()
        # What came behind CONNECT before it was answered.
        self._early: list[Event] = []
        # None: it has not said who it is, or cannot be asked again.
        self._login: Login | None = None
        self._publisher: Publisher | None = None
        self.is_told_why = True
        self._published = False
        self._blocked: trio.Event | None = None
        # Set while nothing is read because the client does not read either.
        self._room: trio.Event | None = None
        self._sent_count = 0
        self.has_ended = False
        # What became of a read that its task must go on with: events that may have to wait, or what went wrong.
        self._left: Sequence[Event] = ()
        self._failure: Exception | None = None
        self._alarms = door.alarms
        self._swamped_bytes = 2 * config.write_buffer_bytes
        self._poller = door.poller if connection.is_plain else None
        self._descriptor = -1

    # -- as its session sees it -----------------------------------------------------------------------------------

    @property
    def is_full(self) -> bool:
        return self.outbox.is_full

    def send(self, data: bytes) -> None:
        self.outbox.put(data)

    def put(self, packet: Packet) -> None:
        """[MQTT-3.1.2-24] Nothing larger than the client takes: what only explains is left out first."""
        data = encode_packet(packet, self.version)
        limit = self.packet_bytes_max
        if limit and len(data) > limit:
            data = encode_packet(unexplained(packet), self.version)
            if len(data) > limit:
                kind = type(packet).__name__.upper()
                _log.warning("connection closed: %s does not fit into its maximum packet size", kind, extra=self.who())
                self._scope.cancel()
                return
        self.outbox.put(data)

    def _has_room(self) -> None:
        """The socket takes more: in the next turn, since this one may be in the middle of a send."""
        if self._room is not None:
            self._room.set()
        session = self.session
        if session is not None and not self.has_ended:
            self.door.broker.on_ready()
            self.door.start_soon(self._pump)

    async def _pump(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.session is not None and self.session.link is self:
            self.session.pump()
            self._wake_shares()
        self.door.turn.end()

    def _wake_shares(self) -> None:
        if self.session is not None and self._place is not None:
            self._place.shares.wake(self.session)

    def _start_writer(self) -> None:
        if self._writer is None and not self.has_ended:
            self._writer = trio.CancelScope()
            self.door.start_soon(self._write)

    async def _write(self) -> None:
        assert self._writer is not None
        with self._writer, suppress(OSError, trio.ClosedResourceError):
            await self.outbox.run()

    # -- running --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the client goes, breaks the protocol, or is told to go."""
        try:
            with self._scope, suppress(Ended):
                with trio.move_on_after(self.door.config.handshake_s) as patience:
                    rest = await self._first()
                    if not _waits_for_proof(rest):
                        # From here on it waits for us.
                        patience.deadline = math.inf
                    await self._connect(rest)
                if patience.cancelled_caught:
                    _log.warning("no CONNECT in time", extra={"peer": self.connection.host})
                    raise Ended
                while True:
                    if self._poller is None:
                        events: Sequence[Event] = self._cutter.receive(await self._read())
                        self._published = False
                    else:
                        events = await self._be_watched(self._poller)
                    await self._turn(events)
                    if self._published and self._alarms.active:
                        await self._wait_for_alarms()
                    if self.outbox.byte_count > self._swamped_bytes:
                        await self._wait_for_reader()
        finally:
            self._let_go(self._will)
            if self._writer is not None:
                self._writer.cancel()
            self.outbox.close()
            self._count_bytes()
            if self._member is not None:
                self.door.limits.leave(self._member)
            self.door.turn.end()

    async def _wait_for_reader(self) -> None:
        """Deliveries stop when its buffer is full, so these are answers that it does not read: it gets no more of them
        until it does."""
        while self.outbox.is_full and not self.outbox.closed:
            self._room = trio.Event()
            await self._room.wait()
        self._room = None

    def _must_wait(self) -> bool:
        """Whether nothing more may be read now: it published and there is an alarm, or it does not read itself."""
        return (self._published and bool(self._alarms.active)) or self.outbox.byte_count > self._swamped_bytes

    async def _be_watched(self, poller: Poller) -> Sequence[Event]:
        """Until there is something that cannot be done in one go; returns what is left to do."""
        self._descriptor = self._socket.fileno()
        await poller.watch(self._descriptor, self._ready)
        self._descriptor = -1
        left, self._left = self._left, ()
        return left

    def _ready(self) -> None:
        """Something has come: read once, and do what needs no await. In a turn of the poller's."""
        poller, session, publisher = self._poller, self.session, self._publisher
        assert poller is not None
        if session is None or publisher is None:
            return
        inbox, now = self._inbox, poller.now
        if now - inbox.last_received > SILENT_S:
            poller.silent_count += 1
        data = inbox.read_now(now)
        if data is None:
            return
        self._published = False
        done = 0
        events: list[Event] = []
        try:
            if not data:
                raise Ended
            events = self._cutter.receive(data)
            for event in events:
                if type(event) is PublishRun:
                    done += 1
                    self._published = True
                    publisher.publish(session, event)
                elif type(event) in _AT_ONCE:
                    done += 1
                    self._take(event)
                else:
                    break
            if done == len(events) and not self._must_wait():
                return
        except Exception as error:
            self._failure = error
        self._left = events[done:]
        poller.hand_over(self._descriptor)

    async def _read(self) -> bytes:
        data = await self._inbox.read()
        if not data:
            raise Ended
        return data

    async def _first(self) -> list[Event]:
        """CONNECT, and what came with it."""
        data, self._leftover = self._leftover, b""
        while True:
            events = self._cutter.receive(data or await self._read())
            if events:
                return events
            data = b""

    async def _turn(self, events: Sequence[Event]) -> None:
        for event in events:
            if self.has_ended:
                raise Ended
            if self._failure is not None:
                break
            try:
                self.door.turn.running = True
                if isinstance(event, Subscribe | Unsubscribe):
                    # What was published before comes before it in the log.
                    self.door.turn.end()
                    one = self._subscriber()
                    await (one.subscribe(event) if isinstance(event, Subscribe) else one.unsubscribe(event))
                else:
                    self._take(event)
            except Exception as error:
                self._failure = error
            finally:
                self.door.turn.running = False
        self.door.turn.end()
        if self._failure is not None:
            await self._fail(self._blame(self._failure))

    def _blame(self, failure: Exception) -> MqttError:
        """What the client is told. Ended: it knows."""
        match failure:
            case Ended():
                raise failure
            case HeadraceError():
                return as_mqtt(failure)
            case _:
                # Our mistake, whatever the client sent: it costs this connection, not the broker and not the others.
                _log.error("connection closed: internal error", exc_info=failure, extra=self.who())
                return MqttError(ReasonCode.UNSPECIFIED_ERROR, "internal error, see the broker's log")

    def _take(self, event: Event) -> None:
        session, publisher = self.session, self._publisher
        assert session is not None and publisher is not None
        match event:
            case PublishRun():
                self._published = True
                publisher.publish(session, event)
            case AckRun(kind, packet_ids):
                self._acknowledged(session, kind, packet_ids)
            case Puback(packet_id, reason):
                session.acknowledge((packet_id,), Outcome.REFUSED if reason.failed else Outcome.ACCEPTED)
                self._wake_shares()
            case Pubrec(packet_id, reason):
                if reason.failed:
                    session.refuse(packet_id)
                else:
                    self._acknowledged(session, PacketType.PUBREC, (packet_id,))
                self._wake_shares()
            case Pubrel(packet_id):
                self._acknowledged(session, PacketType.PUBREL, (packet_id,))
            case Pubcomp(packet_id):
                self._acknowledged(session, PacketType.PUBCOMP, (packet_id,))
            case Pingreq():
                if self._published:
                    # What it published before and gets itself comes before the answer.
                    publisher.flush()
                self.put(Pingresp())
            case Disconnect():
                self._disconnected(event)
            case Auth():
                if self._login is None:
                    raise protocol_error("AUTH without an authentication method", "MQTT-4.12.0-7")
                self._login.prove_again(event)
            case Violation(error):
                raise error
            case _:
                raise protocol_error(f"a client does not send {type(event).__name__.upper()}")

    # -- CONNECT --------------------------------------------------------------------------------------------------

    async def _connect(self, events: Sequence[Event]) -> None:
        first = events[0]
        self._early.extend(events[1:])
        if isinstance(first, Violation):
            await self._refuse(first.error)
        assert isinstance(first, Connect), "the cutter lets nothing else pass"
        self.version = first.version
        self.packet_bytes_max = first.properties.maximum_packet_size or 0
        self.is_told_why = first.properties.request_problem_information is not False
        try:
            login = Login(self)
            self.user, self.vhost = await login.log_in(first)
            await self._open(first, login)
        except MqttError as error:
            await self._refuse(error)
        except HeadraceError as error:
            await self._refuse(as_mqtt(error))
        self.door.turn.end()
        early, self._early = self._early, []
        if early:
            await self._turn(early)

    async def _refuse(self, error: MqttError) -> None:
        """[MQTT-3.2.2-7] CONNACK with the reason, where the client's version has one for it, and the end."""
        _log.info("connection refused: %s", error, extra={"peer": self.connection.host})
        version = self._cutter.version
        self.version = version or Version.V3_1_1
        packet = refusal_of(error, version, explained=self.is_told_why)
        if packet is not None:
            self.put(packet)
        await self._say_goodbye()

    def _check_owner(self, place: Place) -> None:
        if not self.door.config.take_over_between_users and place.hub.is_of_another(self.client_id, self.user):
            text = "this client identifier belongs to a session of another user"
            raise MqttError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text)

    async def next_event(self) -> Event:
        """While CONNECT is not answered."""
        while not self._early:
            self._early.extend(self._cutter.receive(await self._read()))
        return self._early.pop(0)

    async def _open(self, connect: Connect, login: Login) -> None:
        config, asked = self.door.config, connect.properties
        place = self.door.place(self.vhost)
        publisher = Publisher(self, place.hub)
        client_id, assigned = connect.client_id, None
        if not client_id:
            if self.version is Version.V3_1_1 and not connect.clean_start:
                text = "a client without an identifier has no session to keep"
                raise MqttError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text, "MQTT-3.1.3-8")
            client_id = assigned = self.door.new_client_id()
        if len(client_id.encode()) > config.client_id_bytes_max:
            text = f"a client identifier has at most {config.client_id_bytes_max} bytes here"
            raise MqttError(ReasonCode.CLIENT_IDENTIFIER_NOT_VALID, text)
        self.client_id = client_id
        self._check_owner(place)
        if connect.will is not None:
            publisher.check(connect.will.topic.encode())
            blob = encode_blob(replace(connect.will.properties, will_delay_interval=None))
            if unkept := self.door.scans.of(blob).refusal:
                raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, unkept)
        member = Member(self.user, self.vhost, self.connection.host, loopback=self.connection.is_loopback)
        refusal = self.door.limits.enter(member)
        if refusal is not None:
            raise MqttError(ReasonCode.QUOTA_EXCEEDED, refusal)
        self._member = member
        self.alias_max = asked.topic_alias_maximum or 0
        self.window = min(asked.receive_maximum or 65_535, config.inflight_max)
        self.keep_alive_s, told_keep_alive_s = keep_alive_of(connect, config)
        expiry_s, told_expiry_s = expiry_of(connect, config)
        await place.hub.make_way(client_id, self.user, clean_start=connect.clean_start)
        self._check_owner(place)
        known = place.hub.sessions.get(client_id)
        if known is not None and known.user == self.user:
            await drop_unreadable(self, known, place)
            # Somebody else may have come meanwhile.
            self._check_owner(place)
        session, present = place.hub.connect(
            client_id, self, self, user=self.user, clean_start=connect.clean_start, expiry_s=expiry_s
        )
        self.session, self._place, self._will = session, place, connect.will
        self._publisher, publisher.origin = publisher, session.origin
        self._login = login if login.method is not None else None
        session.will = connect.will
        properties = Properties(
            session_expiry_interval=told_expiry_s,
            assigned_client_identifier=assigned,
            server_keep_alive=told_keep_alive_s,
            response_information=f"response/{client_id}/" if asked.request_response_information else None,
            # [MQTT-4.12.0-5]
            authentication_method=login.method,
            authentication_data=login.last_word,
        )
        # [MQTT-3.2.0-1] Before anything that the session has for it.
        self.put(welcome(self.version, config, properties, session_present=present))
        if present:
            place.shares.resume(session)
        session.pump()
        _log.info("connection opened", extra={**self.who(), "version": self.version.name, "session": present})

    # -- what its parts ask ---------------------------------------------------------------------------------------

    def _subscriber(self) -> Subscriber:
        assert self.session is not None and self._place is not None
        return Subscriber(self, self.session, self._place)

    def fail_soon(self, error: Exception) -> None:
        self._failure = error
        if self._poller is not None and self._descriptor >= 0:
            self._poller.hand_over(self._descriptor)

    def rights_changed(self) -> None:
        """Publishes are checked anew. Who may no longer read what it subscribed to is sent no more of that: the
        connection ends, and its session goes on without the subscription."""
        if self._publisher is not None:
            self._publisher.rights_changed()
        if self.session is not None and not all(may_subscribe(self, one) for one in self.session.interests):
            _log.warning("connection closed: it may no longer read what it subscribed to", extra=self.who())
            self.dismiss(ReasonCode.NOT_AUTHORIZED, "a subscription is no longer allowed")

    def _acknowledged(self, session: Session, kind: PacketType, packet_ids: Sequence[int]) -> None:
        match kind:
            case PacketType.PUBACK:
                session.acknowledge(packet_ids)
                self._wake_shares()
            case PacketType.PUBREC:
                for unknown in session.receive(packet_ids):
                    self.put(Pubrel(unknown, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
            case PacketType.PUBREL:
                assert self._publisher is not None
                self._publisher.release(session, packet_ids)
            case _:
                session.complete(packet_ids)
                self._wake_shares()

    # -- the end --------------------------------------------------------------------------------------------------

    def _disconnected(self, packet: Disconnect) -> None:
        """[MQTT-3.14.4-3] A client that says goodbye takes its will along, unless it says otherwise."""
        session = self.session
        assert session is not None
        expiry = packet.properties.session_expiry_interval
        if expiry is not None:
            if not session.outlives and expiry:
                raise protocol_error("a session that was to end with its connection cannot be kept", "MQTT-3.14.2-2")
            limit = self.door.config.session_expiry_s_max
            session.expiry_s = None if expiry == 0xFFFF_FFFF and not limit else min(expiry, limit or expiry)
        if packet.reason is not ReasonCode.DISCONNECT_WITH_WILL:
            self._will = None
        raise Ended

    def _let_go(self, will: Will | None) -> None:
        """The session is no longer this connection's."""
        session, place = self.session, self._place
        self.has_ended = True
        if session is not None and place is not None and session.link is self:
            place.shares.pause(session)
            place.hub.disconnect(session, will=will)
        self.session = None

    async def _fail(self, error: MqttError) -> None:
        _log.warning("connection closed: %s", error, extra=self.who())
        if self.version is Version.V5:
            properties = Properties(reason_string=error.text) if self.is_told_why else NO_PROPERTIES
            self.put(Disconnect(error.code, properties))
        await self._say_goodbye()

    async def _say_goodbye(self) -> None:
        """Send what there is, and read what the peer still sends: closing a socket with unread octets would take back
        what we sent."""
        self._let_go(self._will)
        self.door.turn.end()
        with trio.move_on_after(GOODBYE_S), suppress(OSError):
            self.outbox.flush()
            while self.outbox.byte_count and not self.outbox.closed:
                await trio.lowlevel.checkpoint()
                await trio.lowlevel.wait_writable(self._socket) if self._writer is None else await trio.sleep(0.01)
                self.outbox.flush()
            self._socket.shutdown(socket.SHUT_WR)
            while True:
                await trio.lowlevel.wait_readable(self._socket)
                if not self._socket.recv(65_536):
                    break
        raise Ended

    def take_over(self) -> None:
        """[MQTT-3.1.4-3] Somebody else has connected with the same client id."""
        _log.info("connection closed: its session was taken over", extra=self.who())
        self.dismiss(ReasonCode.SESSION_TAKEN_OVER)

    def dismiss(self, reason: ReasonCode, text: str | None = None) -> None:
        """The connection ends from our side, at once."""
        if self.has_ended:
            return
        if self.version is Version.V5 and self.session is not None:
            self.put(Disconnect(reason, Properties(reason_string=text)))
        self._let_go(self._will)
        self.outbox.flush()
        self._scope.cancel()

    def excuse(self) -> None:
        """The broker was held up: the client may have sent what nobody has read yet."""
        self._inbox.note()

    def check_alive(self, now: float) -> None:
        """Once a second."""
        self._count_bytes()
        if self._room is not None and self.outbox.sent_count != self._sent_count:
            # What it sends waits until it has read: as long as it reads, it is there.
            self._sent_count = self.outbox.sent_count
            self._inbox.note()
        if self.outbox.closed:
            # The peer is gone, and perhaps nobody reads to notice.
            self._scope.cancel()
        elif (
            self.keep_alive_s
            and self._blocked is None
            and now - self._inbox.last_received > PATIENCE * self.keep_alive_s
        ):
            _log.info("connection closed: keep alive ran out", extra=self.who())
            self.dismiss(ReasonCode.KEEP_ALIVE_TIMEOUT)

    def _count_bytes(self) -> None:
        if self._place is not None:
            tally, received, sent = self._place.hub.tally, self._inbox.received_count, self.outbox.sent_count
            tally.bytes_received += received - self._tallied_in
            tally.bytes_sent += sent - self._tallied_out
            self._tallied_in, self._tallied_out = received, sent

    # -- alarms ---------------------------------------------------------------------------------------------------

    async def _wait_for_alarms(self) -> None:
        """It publishes while the node is short of memory or disk: nothing more is read from it until that is over."""
        _log.info("connection blocked: %s", self.door.alarms.reason, extra=self.who())
        while self.door.alarms.active:
            self._blocked = trio.Event()
            await self._blocked.wait()
        self._blocked = None
        self._inbox.note()

    def reconsider(self) -> None:
        """An alarm was raised or cleared."""
        if self._blocked is not None:
            self._blocked.set()

    def who(self) -> dict[str, str]:
        return {
            "peer": self.connection.host,
            "user": self.user,
            "vhost": self.vhost,
            "client": self.client_id,
            "door": "mqtt",
        }


def _waits_for_proof(events: Sequence[Event]) -> bool:
    """Whether a login needs more of the client than its CONNECT."""
    first = events[0]
    return isinstance(first, Connect) and first.properties.authentication_method is not None


# What never has to wait for anything.
_AT_ONCE = frozenset((AckRun, Puback, Pubrec, Pubrel, Pubcomp, Pingreq))
