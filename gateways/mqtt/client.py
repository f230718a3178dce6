"""One MQTT connection, from CONNECT to the closed socket. Driver.

Each turn: one read, all its packets, then what they caused and one flush of every connection that has something to
send. Nothing awaits per message; logins and shared subscriptions do. One task, and a second one only while the socket
takes no more: most devices are idle most of the time.
"""

import logging
import socket
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

import trio

from headrace.core_log.errors import DiskFull, HeadraceError
from headrace.gateways.delivery.access import Access, Operation
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_when import HINT
from headrace.gateways.delivery.filters import TooManyFilters
from headrace.gateways.delivery.inbox import Inbox
from headrace.gateways.delivery.limits import Limits, Member
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.delivery.login import Identity, Refusal
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.poller import SILENT_S, Poller
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.mqtt import delaying
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.cutter import AckRun, Event, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.delaying import Countdown
from headrace.gateways.mqtt.encoder import encode_ack_run, encode_packet
from headrace.gateways.mqtt.hub import EXCHANGE, Hub
from headrace.gateways.mqtt.intake import Intake
from headrace.gateways.mqtt.interest import KNOWN_TOPIC_BYTES_MAX
from headrace.gateways.mqtt.packets import (
    Auth,
    Connack,
    Connect,
    Disconnect,
    Packet,
    Pingreq,
    Pingresp,
    Puback,
    Pubcomp,
    Pubrec,
    Pubrel,
    Suback,
    Subscribe,
    Subscription,
    Unsuback,
    Unsubscribe,
    Will,
)
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties, PublishScans, encode_blob
from headrace.gateways.mqtt.proving import MECHANISM, Proven, Proving
from headrace.gateways.mqtt.reasons import (
    MqttError,
    PacketType,
    ReasonCode,
    Version,
    protocol_error,
    return_code,
)
from headrace.gateways.mqtt.received import parked_at
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.session import Interest, Outcome, Session
from headrace.gateways.mqtt.shares import Shares
from headrace.gateways.mqtt.sys_topics import PREFIX as SYS
from headrace.gateways.mqtt.topics import TopicNames, is_shared, parse_filter
from headrace.gateways.mqtt.wanted import wanted_by

_log = logging.getLogger(__name__)

READ_BYTES_MIN = 2048
CONNECT_BYTES_MAX = 256 * 1024
# Retained and shared messages that may wait for a client before it may make another subscription.
EXTRAS_MAX = 20_000
# How long a peer that was told goodbye may still send before its socket is closed.
GOODBYE_S = 1.0
# [MQTT-3.1.2-24] A client is gone when nothing was heard of it for this many of its keep alives.
PATIENCE = 1.5


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


class Ended(Exception):
    """The connection is over; whoever raised it has said why."""


class Client:
    __slots__ = (
        "_alarms",
        "_allowed",
        "_blocked",
        "_cutter",
        "_descriptor",
        "_early",
        "_ended",
        "_failure",
        "_inbox",
        "_intake",
        "_last_word",
        "_left",
        "_leftover",
        "_member",
        "_method",
        "_place",
        "_poller",
        "_problem_information",
        "_proving",
        "_published",
        "_room",
        "_scope",
        "_sent_count",
        "_socket",
        "_swamped_bytes",
        "_tallied_in",
        "_tallied_out",
        "_unanswered",
        "_will",
        "_writer",
        "alias_max",
        "client_id",
        "connection",
        "door",
        "gathering",
        "keep_alive_s",
        "origin",
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
        # How the client proves who it is, if not by sending a password; what is said to it last; a proof under way.
        self._method: str | None = None
        self._last_word: bytes | None = None
        self._proving: Proving | None = None
        # Topics this user may publish to, as asked before.
        self._allowed: set[bytes] = set()
        # Publishes with QoS 1 and 2 that are not answered yet.
        self._unanswered = 0
        self._problem_information = True
        self._published = False
        self._blocked: trio.Event | None = None
        # Set while nothing is read because the client does not read either.
        self._room: trio.Event | None = None
        self._sent_count = 0
        self._ended = False
        # As the intake sees it.
        self.origin = 0
        self.gathering = -1
        # What became of a read that its task must go on with: events that may have to wait, or what went wrong.
        self._left: Sequence[Event] = ()
        self._failure: Exception | None = None
        self._intake: Intake | None = None
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

    def _put(self, packet: Packet) -> None:
        """[MQTT-3.1.2-24] Nothing larger than the client takes: what only explains is left out first."""
        data = encode_packet(packet, self.version)
        limit = self.packet_bytes_max
        if limit and len(data) > limit:
            data = encode_packet(_unexplained(packet), self.version)
            if len(data) > limit:
                kind = type(packet).__name__.upper()
                _log.warning("connection closed: %s does not fit into its maximum packet size", kind, extra=self._who())
                self._scope.cancel()
                return
        self.outbox.put(data)

    def _has_room(self) -> None:
        """The socket takes more: in the next turn, since this one may be in the middle of a send."""
        if self._room is not None:
            self._room.set()
        session = self.session
        if session is not None and not self._ended:
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
        if self._writer is None and not self._ended:
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
        poller, session = self._poller, self.session
        assert poller is not None
        if session is None:
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
                    self._publish(session, event)
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
            if self._ended:
                raise Ended
            if self._failure is not None:
                break
            try:
                self.door.turn.running = True
                if isinstance(event, Subscribe | Unsubscribe):
                    # What was published before comes before it in the log.
                    self.door.turn.end()
                    await (self._subscribe(event) if isinstance(event, Subscribe) else self._unsubscribe(event))
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
                return _as_mqtt(failure)
            case _:
                # Our mistake, whatever the client sent: it costs this connection, not the broker and not the others.
                _log.error("connection closed: internal error", exc_info=failure, extra=self._who())
                return MqttError(ReasonCode.UNSPECIFIED_ERROR, "internal error, see the broker's log")

    def _take(self, event: Event) -> None:
        session = self.session
        assert session is not None
        match event:
            case PublishRun():
                self._publish(session, event)
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
                    self._flush_intake()
                self._put(Pingresp())
            case Disconnect():
                self._disconnected(event)
            case Auth():
                self._prove_again(event)
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
        try:
            place = await self._log_in(first)
            await self._open(first, place)
        except MqttError as error:
            await self._refuse(error)
        except HeadraceError as error:
            await self._refuse(_as_mqtt(error))
        self.door.turn.end()
        early, self._early = self._early, []
        if early:
            await self._turn(early)

    async def _refuse(self, error: MqttError) -> None:
        """[MQTT-3.2.2-7] CONNACK with the reason, where the client's version has one for it, and the end."""
        _log.info("connection refused: %s", error, extra={"peer": self.connection.host})
        version = self._cutter.version
        self.version = version or Version.V3_1_1
        packet = refusal_of(error, version, explained=self._problem_information)
        if packet is not None:
            self._put(packet)
        await self._say_goodbye()

    async def _log_in(self, connect: Connect) -> Place:
        config, connection = self.door.config, self.connection
        self._problem_information = connect.properties.request_problem_information is not False
        name, vhost = connect.user_name, config.vhost
        address, loopback = connection.host, connection.is_loopback
        authentication = self.door.authentication
        if connect.properties.authentication_method is not None:
            outcome, vhost = await self._prove(connect.properties)
        elif name is None:
            name = connection.certified_name or config.anonymous_user
            if not name:
                raise MqttError(ReasonCode.BAD_USER_NAME_OR_PASSWORD, "a user name is needed")
            outcome = await authentication.certified(name, address=address, peer_is_loopback=loopback)
        else:
            if not (loopback or connection.tls or config.allow_plaintext_auth):
                text = "a password in clear text from another machine: use TLS, or set mqtt.allow_plaintext_auth"
                raise MqttError(ReasonCode.NOT_AUTHORIZED, text)
            vhost, name = self._placed(name)
            password = (connect.password or b"").decode("utf-8", "replace")
            outcome = await authentication.login(name, password, address=address, peer_is_loopback=loopback)
        if not isinstance(outcome, Identity):
            raise MqttError(ReasonCode.BAD_USER_NAME_OR_PASSWORD, "login refused; the broker's log says why")
        self.user = outcome.name
        if vhost not in self.door.broker.vhosts or not self.door.access.may_enter(self.user, vhost):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, f"access to vhost '{vhost}' refused for user '{self.user}'")
        self.vhost = vhost
        return self.door.place(vhost)

    def _placed(self, name: str) -> tuple[str, str]:
        """Vhost and user that a name means, as RabbitMQ has it."""
        return placed(name, self.door.broker.metadata.snapshot.users, self.door.config.vhost)

    # -- AUTH -----------------------------------------------------------------------------------------------------

    async def _prove(self, asked: Properties) -> tuple[Identity | Refusal, str]:
        """[MQTT-4.12] The client proves who it is in AUTH packets before it gets its CONNACK."""
        if asked.authentication_method != MECHANISM:
            text = f"unknown authentication method '{asked.authentication_method}'; there is {MECHANISM}"
            raise MqttError(ReasonCode.BAD_AUTHENTICATION_METHOD, text, "MQTT-4.12.0-1")
        self._method = MECHANISM
        proving, data = self._new_proof(), asked.authentication_data
        while not isinstance(step := proving.take(data), Proven | Refusal):
            self._put(Auth(ReasonCode.CONTINUE_AUTHENTICATION, self._auth_properties(step)))
            self.door.turn.end()
            data = await self._next_proof()
        if isinstance(step, Refusal):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, "login refused; the broker's log says why", "MQTT-4.12.0-4")
        self._last_word = step.answer
        return step.identity, proving.vhost

    async def _next_proof(self) -> bytes | None:
        while not self._early:
            self._early.extend(self._cutter.receive(await self._read()))
        match self._early.pop(0):
            case Auth(ReasonCode.CONTINUE_AUTHENTICATION, properties) if properties.authentication_method == MECHANISM:
                return properties.authentication_data
            case Auth():
                raise protocol_error("AUTH does not go on with what CONNECT began", "MQTT-4.12.0-5")
            case Violation(error):
                raise error
            case Disconnect():
                raise Ended
            case other:
                text = f"{type(other).__name__.upper()} before the login is complete"
                raise protocol_error(text, "MQTT-3.1.2-30")

    def _prove_again(self, packet: Auth) -> None:
        """[MQTT-4.12.1] The client proves once more who it is; everything else goes on meanwhile."""
        if self._method is None:
            raise protocol_error("AUTH without an authentication method", "MQTT-4.12.0-7")
        if packet.properties.authentication_method != self._method:
            raise protocol_error("another authentication method than in CONNECT", "MQTT-4.12.1-1")
        begins = packet.reason is ReasonCode.REAUTHENTICATE
        if begins == (self._proving is not None):
            raise protocol_error("AUTH does not go on with what was begun")
        proving = self._proving = self._new_proof() if self._proving is None else self._proving
        step = proving.take(packet.properties.authentication_data)
        if isinstance(step, bytes):
            self._put(Auth(ReasonCode.CONTINUE_AUTHENTICATION, self._auth_properties(step)))
            return
        self._proving = None
        if isinstance(step, Refusal) or (step.identity.name, proving.vhost) != (self.user, self.vhost):
            # [MQTT-4.12.1-2]
            raise MqttError(ReasonCode.NOT_AUTHORIZED, "login refused; the broker's log says why", "MQTT-4.12.1-2")
        self._put(Auth(ReasonCode.SUCCESS, self._auth_properties(step.answer)))

    def _new_proof(self) -> Proving:
        connection = self.connection
        return Proving(
            self.door.authentication,
            self.door.broker.env.ids.nonce(),
            self._placed,
            address=connection.host,
            peer_is_loopback=connection.is_loopback,
        )

    def _auth_properties(self, data: bytes | None) -> Properties:
        return Properties(authentication_method=self._method, authentication_data=data or None)

    async def _open(self, connect: Connect, place: Place) -> None:
        config, asked = self.door.config, connect.properties
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
        if connect.will is not None:
            self._check_publish(connect.will.topic.encode())
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
        self.keep_alive_s, told_keep_alive_s = self._keep_alive(connect.keep_alive_s)
        expiry_s, told_expiry_s = self._expiry(connect)
        await place.hub.make_way(client_id, self.user, clean_start=connect.clean_start)
        session, present = place.hub.connect(
            client_id, self, self, user=self.user, clean_start=connect.clean_start, expiry_s=expiry_s
        )
        self.session, self._place, self._will = session, place, connect.will
        self.origin = session.origin
        self._intake = place.hub.intake
        session.will = connect.will
        properties = NO_PROPERTIES
        if self.version is Version.V5:
            properties = Properties(
                session_expiry_interval=told_expiry_s,
                receive_maximum=config.receive_max,
                maximum_packet_size=config.packet_bytes_max,
                topic_alias_maximum=config.topic_alias_max or None,
                assigned_client_identifier=assigned,
                server_keep_alive=told_keep_alive_s,
                response_information=f"response/{client_id}/" if asked.request_response_information else None,
                # [MQTT-4.12.0-5]
                authentication_method=self._method,
                authentication_data=self._last_word,
            )
        code = ReasonCode.SUCCESS if self.version is Version.V5 else return_code(ReasonCode.SUCCESS)
        assert code is not None
        # [MQTT-3.2.0-1] Before anything that the session has for it.
        self._put(Connack(code, present, properties))
        if present:
            place.shares.resume(session)
        session.pump()
        _log.info("connection opened", extra={**self._who(), "version": self.version.name, "session": present})

    def _keep_alive(self, asked_s: int) -> tuple[int, int | None]:
        """What holds, and what the client must be told [MQTT-3.1.2-21]."""
        limit = self.door.config.keep_alive_s_max
        if limit and (not asked_s or asked_s > limit):
            # MQTT 3.1.1 has no way to tell; a client that asked for none is held to nothing there.
            return (limit, limit) if self.version is Version.V5 else (asked_s, None)
        return asked_s, None

    def _expiry(self, connect: Connect) -> tuple[int | None, int | None]:
        """How long the session outlives the connection (None: for ever), and what the client must be told."""
        limit = self.door.config.session_expiry_s_max
        if self.version is Version.V3_1_1:
            return (0 if connect.clean_start else limit or None), None
        asked = connect.properties.session_expiry_interval or 0
        if limit and asked > limit:
            return limit, limit
        return (None if asked == 0xFFFF_FFFF else asked), None

    # -- publishing -----------------------------------------------------------------------------------------------

    def _may_publish(self, topic: bytes) -> bool:
        if topic in self._allowed:
            return True
        access, key = self.door.access, self.door.keys.key_of(topic).decode("utf-8", "surrogateescape")
        allowed = access.may(self.user, self.vhost, Operation.WRITE, EXCHANGE) and access.may_use_key(
            self.user, self.vhost, EXCHANGE, Operation.WRITE, key, self.client_id
        )
        if allowed and len(topic) <= KNOWN_TOPIC_BYTES_MAX:
            if len(self._allowed) >= 1024:
                self._allowed.clear()
            self._allowed.add(topic)
        return allowed

    def _check_publish(self, topic: bytes) -> None:
        if topic.startswith(SYS.encode()):
            raise MqttError(ReasonCode.NOT_AUTHORIZED, "topics below $SYS are the broker's own")
        if not self._may_publish(topic):
            text = f"publishing to '{topic.decode()}' refused for user '{self.user}'"
            raise MqttError(ReasonCode.NOT_AUTHORIZED, text)

    def rights_changed(self) -> None:
        self._allowed.clear()

    def _publish(self, session: Session, run: PublishRun) -> None:
        self._published = True
        reason = self.door.broker.unwritable()
        # What has been taken with QoS 2 is not refused when it comes again.
        if reason is not None and (run.qos < 2 or session.incoming.keys().isdisjoint(run.packet_ids)):
            self._refuse_some(session, run, MqttError(ReasonCode.QUOTA_EXCEEDED, f"publish refused: {reason}"))
            return
        if not self._allowed.issuperset(run.topics):
            unknown = {*run.topics} - self._allowed
            if any(topic.startswith(delaying.TOPIC) for topic in unknown):
                self._publish_late(session, run)
                return
            try:
                for topic in unknown:
                    self._check_publish(topic)
            except MqttError as error:
                self._refuse_some(session, run, error)
                return
        if self.version is Version.V5:
            for blob in filter(None, set(run.properties)):
                if HINT in blob:
                    self._publish_late(session, run)
                    return
                refusal = self.door.scans.of(blob).refusal
                if refusal:
                    self._refuse_some(session, run, MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, refusal))
                    return
        self._publish_now(session, run)

    def _publish_now(self, session: Session, run: PublishRun) -> None:
        if run.qos == 2:
            self._publish_once(session, run)
            return
        if run.packet_ids:
            self._count_unanswered(len(run.packet_ids))
        assert self._intake is not None
        self._intake.put(self, run)

    def _publish_late(self, session: Session, run: PublishRun) -> None:
        """A run in which something may be delivered later."""
        if len(run.topics) > 1:
            self._publish_each(session, run)
            return
        assert self._place is not None
        hub = self._place.hub
        try:
            topic, late = hub.parking.read(run.topics[0], run.properties[0])
            self._check_publish(topic)
            scan = self.door.scans.of(run.properties[0])
            if scan.refusal:
                raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, scan.refusal)
        except MqttError as error:
            self._refuse_some(session, run, error)
            return
        if late is None:
            self._publish_now(session, replace(run, topics=[topic]))
            return
        packet_id = run.packet_ids[0] if run.qos else 0
        kind = PacketType.PUBACK if run.qos == 1 else PacketType.PUBREC
        safe = Countdown(1, lambda: self._tell(kind, run.packet_ids) if run.qos else None)
        if run.qos < 2 or packet_id not in session.incoming:
            if run.qos:
                self._count_unanswered(1)
            if run.qos == 2:
                # It is written before the message, and counts only with it (received.py).
                session.incoming[packet_id] = parked_at(int(self.door.broker.delayed.delays.intake.end))
                if session.outlives:
                    safe.more()
                    hub.keep(session, safe, first=True)
            try:
                hub.parking.park(
                    late,
                    run.properties[0],
                    run.payloads[0],
                    qos=run.qos,
                    retain=run.retain,
                    version=self.version,
                    origin=session.origin,
                    tags=scan.tags,
                )
            except HeadraceError:
                session.incoming.pop(packet_id, None)
                raise
        # One that came before may still be on its way to the disk.
        hub.parking.when_parked(safe)

    def _publish_each(self, session: Session, run: PublishRun) -> None:
        for place in range(len(run.topics)):
            ids = run.packet_ids[place : place + 1]
            part = slice(place, place + 1)
            self._publish(
                session, PublishRun(run.first_byte, run.topics[part], run.properties[part], run.payloads[part], ids)
            )

    def _flush_intake(self) -> None:
        if self._intake is not None:
            self._intake.flush()

    def appended(self, run: PublishRun) -> None:
        """Messages with QoS 1 are committed."""
        if not self._ended and run.packet_ids:
            self._unanswered -= len(run.packet_ids)
            self.outbox.put(encode_ack_run(PacketType.PUBACK, run.packet_ids))

    def turned_away(self, run: PublishRun, refused: Sequence[int]) -> PublishRun:
        """Some messages of a run with QoS 1 were refused by a full queue; returns what is left to be acknowledged."""
        try:
            full = set() if self._ended else self._refuse_full(run, refused)
        except MqttError as error:
            self.append_failed(error)
            return PublishRun(run.first_byte)
        self._unanswered -= len(full)
        left = [packet_id for packet_id in run.packet_ids if packet_id not in full]
        return PublishRun(run.first_byte, packet_ids=left)

    def append_failed(self, error: HeadraceError) -> None:
        """Something that this client sent was not taken, and its version has no other way to say so."""
        self._failure = error
        if self._poller is not None and self._descriptor >= 0:
            self._poller.hand_over(self._descriptor)

    def _refuse_full(self, run: PublishRun, refused: Sequence[int]) -> set[int]:
        """A queue with reject-publish is full; returns the identifiers of what it did not take."""
        error = MqttError(ReasonCode.QUOTA_EXCEEDED, "a queue is full and refused the message")
        if self.version is not Version.V5:
            raise error
        full = {run.packet_ids[place] for place in refused}
        kind = Puback if run.qos == 1 else Pubrec
        properties = Properties(reason_string=error.text) if self._problem_information else NO_PROPERTIES
        for packet_id in full:
            self._put(kind(packet_id, error.code, properties))
        return full

    def _refuse_some(self, session: Session, run: PublishRun, error: MqttError) -> None:
        """Not all of a run may be published: each for itself then."""
        if len(run.topics) > 1:
            self._publish_each(session, run)
            return
        if self.version is not Version.V5 or not run.qos:
            # [MQTT-3.3.5-2] There is no way to say no but to end the connection.
            if run.qos or self.version is not Version.V5:
                raise error
            _log.warning("a message was refused: %s", error, extra=self._who())
            return
        kind = Puback if run.qos == 1 else Pubrec
        properties = Properties(reason_string=error.text) if self._problem_information else NO_PROPERTIES
        self._put(kind(run.packet_ids[0], error.code, properties))

    def _count_unanswered(self, count: int) -> None:
        self._unanswered += count
        if self.version is Version.V5 and self._unanswered > self.door.config.receive_max:
            text = f"more than {self.door.config.receive_max} publishes without an answer"
            raise MqttError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, text, "MQTT-3.3.4-7")

    def _publish_once(self, session: Session, run: PublishRun) -> None:
        """[MQTT-4.3.3] A second PUBLISH with an identifier that was not released is the same message."""
        incoming = session.incoming
        packet_ids: Sequence[int] = run.packet_ids
        fresh = run
        if not incoming.keys().isdisjoint(packet_ids) or len(set(packet_ids)) < len(packet_ids):
            fresh = _only(run, incoming)
        if fresh.packet_ids:
            self._count_unanswered(len(fresh.packet_ids))
            refused: list[int] = []
            assert self._place is not None
            self._place.hub.publish_once(
                session,
                fresh.packet_ids,
                fresh.topics,
                fresh.properties,
                fresh.payloads,
                retain=fresh.retain,
                version=self.version,
                refused=refused,
            )
            if refused:
                full = self._refuse_full(fresh, refused)
                packet_ids = [packet_id for packet_id in packet_ids if packet_id not in full]
                self._unanswered -= len(full)
        assert self._place is not None
        hub = self._place.hub

        def answer() -> None:
            # What came before may still be on its way to the disk: whoever asks again is answered when it is there.
            self._answer(packet_ids, PacketType.PUBREC, int(hub.log.end))

        if session.outlives and not session.is_kept:
            # The log has the identifiers, but nobody would know whose.
            hub.keep(session, answer)
        else:
            answer()

    def _answer(self, packet_ids: Sequence[int], kind: PacketType, reached: int | None) -> None:
        """Once the log is committed up to there, and not before."""
        if not packet_ids:
            return
        if reached is None or self._place is None:
            self._tell(kind, packet_ids)
        else:
            self._place.hub.log.when_committed(reached, lambda: self._tell(kind, packet_ids))

    def _tell(self, kind: PacketType, packet_ids: Sequence[int]) -> None:
        if self._ended:
            return
        if kind is PacketType.PUBACK:
            self._unanswered -= len(packet_ids)
        self.outbox.put(encode_ack_run(kind, packet_ids))

    def _acknowledged(self, session: Session, kind: PacketType, packet_ids: Sequence[int]) -> None:
        match kind:
            case PacketType.PUBACK:
                session.acknowledge(packet_ids)
                self._wake_shares()
            case PacketType.PUBREC:
                for unknown in session.receive(packet_ids):
                    self._put(Pubrel(unknown, ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))
            case PacketType.PUBREL:
                self._released(session, packet_ids)
            case _:
                session.complete(packet_ids)
                self._wake_shares()

    def _released(self, session: Session, packet_ids: Sequence[int]) -> None:
        known = [packet_id for packet_id in packet_ids if packet_id in session.incoming]
        for packet_id in known:
            session.incoming.pop(packet_id, None)
        self._unanswered = max(0, self._unanswered - len(known))
        if known and session.outlives:
            assert self._place is not None
            # With PUBCOMP the identifier is free: were it still taken after a crash, the client's next message with it
            # would be answered as this one, and be lost.
            self._place.hub.keep(session, lambda: self._tell_released(packet_ids, known))
        else:
            self._tell_released(packet_ids, known)

    def _tell_released(self, packet_ids: Sequence[int], known: Sequence[int]) -> None:
        if len(known) == len(packet_ids):
            self._tell(PacketType.PUBCOMP, packet_ids)
        elif not self._ended:
            for packet_id in packet_ids:
                found = packet_id in known
                self._put(Pubcomp(packet_id, ReasonCode.SUCCESS if found else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND))

    # -- subscriptions --------------------------------------------------------------------------------------------

    async def _subscribe(self, packet: Subscribe) -> None:
        session, place = self.session, self._place
        assert session is not None and place is not None
        hub = place.hub
        identifier = packet.properties.subscription_identifiers[:1]
        reasons: list[ReasonCode] = []
        granted: list[tuple[Interest, bool, int]] = []
        wants, unreadable = wanted_by(packet.properties)
        refusal = unreadable
        for one in packet.subscriptions:
            reason = self._subscribable(session, one) if not unreadable else ReasonCode.TOPIC_FILTER_INVALID
            reasons.append(reason)
            if reason.failed:
                continue
            interest = Interest(
                one.filter,
                int(one.qos),
                one.no_local,
                one.retain_as_published,
                one.retain_handling,
                identifier[0] if identifier else 0,
                wants=wants,
            )
            if is_shared(one.filter):
                try:
                    await place.shares.join(session, interest)
                except TooManyFilters as error:
                    reasons[-1], refusal = ReasonCode.QUOTA_EXCEEDED, str(error)
                    hub.unsubscribe(session, one.filter)
                    continue
                if session.link is not self:
                    raise Ended
                hub.subscribe(session, interest, self.version)
                continue
            granted.append((interest, hub.subscribe(session, interest, self.version), int(hub.log.end)))
        told = refusal and self._problem_information
        suback = Suback(packet.packet_id, tuple(reasons), Properties(reason_string=refusal) if told else NO_PROPERTIES)

        def done() -> None:
            if session.link is not self:
                return
            self._put(suback)
            for interest, is_new, below in granted:
                hub.send_retained(session, interest, is_new=is_new, below=below)

        hub.keep(session, done)

    def _subscribable(self, session: Session, one: Subscription) -> ReasonCode:
        """The QoS granted, or why not."""
        group, plain = parse_filter(one.filter)
        if group is not None and plain.startswith(SYS):
            # Nothing of it is in the log, which is what a group shares.
            return ReasonCode.TOPIC_FILTER_INVALID
        access = self.door.access
        key = self.door.keys.binding_key(plain)
        if not (
            access.may(self.user, self.vhost, Operation.READ, EXCHANGE)
            and access.may_use_key(self.user, self.vhost, EXCHANGE, Operation.READ, key, self.client_id)
        ):
            return ReasonCode.NOT_AUTHORIZED
        if one.filter not in session.interests and len(session.interests) >= self.door.config.subscriptions_max:
            return ReasonCode.QUOTA_EXCEEDED
        if len(session.extras) >= EXTRAS_MAX:
            # Each would add all retained messages that match to those that the client has not taken yet.
            return ReasonCode.QUOTA_EXCEEDED
        return ReasonCode(int(one.qos))

    async def _unsubscribe(self, packet: Unsubscribe) -> None:
        session, place = self.session, self._place
        assert session is not None and place is not None
        reasons = []
        for topic_filter in packet.filters:
            found = place.hub.unsubscribe(session, topic_filter)
            reasons.append(ReasonCode.SUCCESS if found else ReasonCode.NO_SUBSCRIPTION_EXISTED)
            if found and is_shared(topic_filter):
                await place.shares.leave(session, topic_filter)
        unsuback = Unsuback(packet.packet_id, tuple(reasons))
        place.hub.keep(session, lambda: self._put(unsuback))

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
        self._ended = True
        if session is not None and place is not None and session.link is self:
            place.shares.pause(session)
            place.hub.disconnect(session, will=will)
        self.session = None

    async def _fail(self, error: MqttError) -> None:
        _log.warning("connection closed: %s", error, extra=self._who())
        if self.version is Version.V5:
            properties = Properties(reason_string=error.text) if self._problem_information else NO_PROPERTIES
            self._put(Disconnect(error.code, properties))
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
        _log.info("connection closed: its session was taken over", extra=self._who())
        self.dismiss(ReasonCode.SESSION_TAKEN_OVER)

    def dismiss(self, reason: ReasonCode, text: str | None = None) -> None:
        """The connection ends from our side, at once."""
        if self._ended:
            return
        if self.version is Version.V5 and self.session is not None:
            self._put(Disconnect(reason, Properties(reason_string=text)))
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
            _log.info("connection closed: keep alive ran out", extra=self._who())
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
        _log.info("connection blocked: %s", self.door.alarms.reason, extra=self._who())
        while self.door.alarms.active:
            self._blocked = trio.Event()
            await self._blocked.wait()
        self._blocked = None
        self._inbox.note()

    def reconsider(self) -> None:
        """An alarm was raised or cleared."""
        if self._blocked is not None:
            self._blocked.set()

    def _who(self) -> dict[str, str]:
        return {
            "peer": self.connection.host,
            "user": self.user,
            "vhost": self.vhost,
            "client": self.client_id,
            "door": "mqtt",
        }


# What never has to wait for anything.
_AT_ONCE = frozenset((AckRun, Puback, Pubrec, Pubrel, Pubcomp, Pingreq))


def _unexplained(packet: Packet) -> Packet:
    """Without reason string and user properties [MQTT-3.4.2-2, MQTT-3.4.2-3 and the like]."""
    match packet:
        case Connack() | Puback() | Pubrec() | Disconnect():
            return replace(packet, properties=replace(packet.properties, reason_string=None, user_properties=()))
        case _:
            return packet


def _only(run: PublishRun, known: Iterable[int]) -> PublishRun:
    """What of a run is new: the first with each identifier that is not known."""
    seen, places = set(known), []
    for place, packet_id in enumerate(run.packet_ids):
        if packet_id not in seen:
            seen.add(packet_id)
            places.append(place)
    return PublishRun(
        run.first_byte,
        [run.topics[place] for place in places],
        [run.properties[place] for place in places],
        [run.payloads[place] for place in places],
        [run.packet_ids[place] for place in places],
    )


def _as_mqtt(error: HeadraceError) -> MqttError:
    """What went wrong on our side, in the client's words."""
    if isinstance(error, MqttError):
        return error
    code = ReasonCode.QUOTA_EXCEEDED if isinstance(error, DiskFull) else ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    return MqttError(code, str(error))


def placed(name: str, users: Container[str], vhost: str) -> tuple[str, str]:
    """Vhost and user that a name means, as RabbitMQ has it; `vhost`: where it does not say."""
    if ":" in name and name not in users:
        vhost, _, name = name.partition(":")
    return vhost, name


def refusal_of(error: MqttError, version: Version | None, *, explained: bool = True) -> Connack | None:
    """What a client is answered to its CONNECT; None: its version has no word for that, or is none of ours."""
    if version is Version.V5:
        return Connack(error.code, False, Properties(reason_string=error.text) if explained else NO_PROPERTIES)
    if version is Version.V3_1_1 or error.code is ReasonCode.UNSUPPORTED_PROTOCOL_VERSION:
        code = return_code(error.code)
        return None if code is None else Connack(code)
    return None
