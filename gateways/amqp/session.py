"""One AMQP connection, from the moment it is open to the closed socket. Driver.

Each turn: one read, all its frames, then what they caused (appends, deliveries, answers) and one flush of every
connection that has something to send. Nothing awaits per message; only methods that meet the metadata store do.
"""

import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn, Protocol

import trio
from pamqp import commands

from headrace.core_log.errors import HeadraceError
from headrace.gateways.amqp.channel import Channel
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error, reply_to
from headrace.gateways.amqp.fields import decode_table
from headrace.gateways.amqp.frames import (
    HEARTBEAT_FRAME,
    Acks,
    Event,
    FrameCutter,
    Heartbeat,
    MethodFrame,
    PublishRun,
    Violation,
    encode_method,
)
from headrace.gateways.amqp.handshake import CLOSE_SECONDS_MAX, CLOSED_SECONDS_MAX, Ended, understands
from headrace.gateways.amqp.methods import Method, ids, make, octets
from headrace.gateways.amqp.operations import Operations
from headrace.gateways.amqp.publishing import Publisher, send_confirms
from headrace.gateways.amqp.resuming import channel_as, resume
from headrace.gateways.delivery.access import Access
from headrace.gateways.delivery.alarms import Alarms
from headrace.gateways.delivery.authentication import Authentication
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.inbox import Inbox
from headrace.gateways.delivery.limits import Limits, Member
from headrace.gateways.delivery.listener import Connection
from headrace.gateways.delivery.login import Identity
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.poller import Poller
from headrace.gateways.delivery.turn import Turn
from headrace.gateways.relay.opening import Opened, Resumed

_log = logging.getLogger(__name__)

READ_BYTES_MIN = 4096
# Whose user or vhost was deleted is gone within five seconds, whatever it answers.
EXPEL_SECONDS_MAX = 4
# How long the queues of a relayed connection whose link was lost wait for it to come back by another one.
RETURN_SECONDS = 2
CLEANING_SECONDS_MAX = 5


class Door(Protocol):
    """What a session asks of its door."""

    broker: Broker
    access: Access
    authentication: Authentication
    limits: Limits
    alarms: Alarms
    config: AmqpConfig
    turn: Turn
    # Reads plain connections without a task switch; None: there is none here.
    poller: Poller | None


class Session:
    def __init__(
        self,
        door: Door,
        connection: Connection,
        opened: Opened,
        *,
        relayed: bytes = b"",
        owner: object = None,
    ) -> None:
        """`relayed`: which connection of another node's this is, if it is one; `owner`: to whom exclusive queues belong
        that it finds here, if that is not the session itself."""
        self.door = door
        self.connection = connection
        self.peer = (connection.host, connection.port)
        self.outbox = Outbox(connection.socket, door.config.write_buffer_bytes, door.turn.note)
        self._inbox = Inbox(
            connection,
            door.broker.env.clock,
            bytes_min=READ_BYTES_MIN,
            bytes_max=door.config.read_bytes_max,
        )
        self.last_sent_count = 0
        self.heartbeat_s = opened.heartbeat_s
        self._silent_s = 0
        self.user = opened.user
        self.vhost = opened.vhost
        self.properties = decode_table(opened.properties, bytes_max=None)[0]
        self.channels: dict[int, Channel] = {}
        self.relayed = relayed
        self.owner: object = owner or self
        # The client goes on with another session: its queues outlive this one.
        self._succeeded = trio.Event()
        # This node no longer leads the vhost: nothing of it is touched any more.
        self._is_forsaken = False
        self._cleaned = trio.Event()
        # Whom the limits count this connection for, once it is open.
        self._member: Member | None = None
        self._socket = connection.socket
        self._config = door.config
        self._broker = door.broker
        self._cutter = FrameCutter(
            frame_max=opened.frame_max, channel_max=opened.channel_max, body_bytes_max=door.config.body_bytes_max
        )
        self._operations: Operations | None = None
        self._publisher: Publisher | None = None
        self._closing = False
        self._closed_in_turn: set[int] = set()
        # True while the frames of a read are being worked through, also while one of them waits.
        self._turning = False
        self._published = False
        # What it waits for while an alarm keeps it from being read.
        self._blocked: trio.Event | None = None
        self._nursery: trio.Nursery | None = None
        self._scope = trio.CancelScope()
        # What became of a read that its task must go on with: events that may have to wait, or what went wrong with
        # the first of them.
        self._left: Sequence[Event] = ()
        self._failure: Exception | None = None
        self._is_over = False
        self._poller = door.poller if connection.is_plain else None
        self._descriptor = -1

    @property
    def is_loopback(self) -> bool:
        return self.connection.is_loopback

    @property
    def is_blocked(self) -> bool:
        return self._blocked is not None

    # -- running ----------------------------------------------------------------------------------------------------

    async def run(self, leftover: bytes = b"", resumed: Resumed | None = None) -> None:
        """Serve until the client goes, breaks the protocol, or the door drains. `leftover`: what came behind
        connection.open and was read already. `resumed`: the client is open already, with an earlier leader."""
        with self._scope:
            try:
                async with trio.open_nursery() as nursery:
                    self._nursery = nursery
                    nursery.start_soon(self.outbox.run)
                    try:
                        await self._begin(leftover, resumed)
                        while True:
                            await self._turn(await self._next_events())
                            if self._published and self.door.alarms.active:
                                await self._wait_for_alarms()
                    finally:
                        nursery.cancel_scope.cancel()
            except* Ended:
                pass
        with trio.CancelScope(shield=True), trio.move_on_after(CLEANING_SECONDS_MAX + RETURN_SECONDS):
            await self._clean_up()

    async def _begin(self, leftover: bytes, resumed: Resumed | None) -> None:
        """The connection is open, or was refused."""
        try:
            self._open()
            if resumed is None:
                self._send(0, make(commands.Connection.OpenOk))
            else:
                await self._resume(resumed)
        except AmqpError as error:
            await self._fail(0, error.during(*ids(commands.Connection.Open)))
        self.door.turn.end()
        if leftover:
            await self._turn(self._cutter.receive(leftover))

    async def _read(self) -> bytes:
        data = await self._inbox.read()
        if not data:
            raise Ended
        return data

    async def _next_events(self) -> Sequence[Event]:
        """What has come and is still to be done."""
        self._published = False
        if self._poller is None:
            return self._cutter.receive(await self._read())
        self._descriptor = self._socket.fileno()
        await self._poller.watch(self._descriptor, self._ready)
        left, self._left = self._left, ()
        if not left and self._is_over:
            raise Ended
        return left

    def _ready(self) -> None:
        """Something has come: read once, and do what needs no await. In a turn of the poller's."""
        poller = self._poller
        assert poller is not None
        data = self._inbox.read_now(poller.now)
        if data is None:
            return
        self._published = False
        done = 0
        events = self._cutter.receive(data)
        try:
            for event in events:
                if not self._take_at_once(event):
                    break
                done += 1
        except Exception as error:
            self._failure = error
        self._is_over = not data
        if done < len(events) or not data or (self._published and self.door.alarms.active):
            self._left = events[done:]
            self._turning = bool(self._left)
            poller.hand_over(self._descriptor)

    async def _turn(self, events: Sequence[Event]) -> None:
        self._turning = True
        self._closed_in_turn.clear()
        for event in events:
            if self._closed_in_turn and self._is_void(event):
                continue
            try:
                if self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                await self._take(event)
                self.door.turn.running = False
            except HeadraceError as error:
                self.door.turn.running = False
                await self._fail(*_blamed(event, error))
            except Ended:
                raise
            except Exception:
                # Our mistake, whatever the client sent: it costs this connection, not the broker and not the others.
                self.door.turn.running = False
                _log.exception("connection closed: internal error", extra={"peer": self.peer[0], "user": self.user})
                await self._fail(0, amqp_error(ReplyCode.INTERNAL_ERROR, "internal error, see the broker's log"))
        self.door.turn.end()
        self._turning = False
        if self._cutter.lost_sync:
            await self._say_goodbye()

    async def _say_goodbye(self) -> NoReturn:
        """The last words to a peer whose octets mean nothing any more. What it still sends is read and thrown away:
        closing a socket with unread octets would take back what we sent."""
        self._scope.deadline = trio.current_time() + CLOSE_SECONDS_MAX
        await self.outbox.drained()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while True:
            await self._read()

    def _is_void(self, event: Event) -> bool:
        """It came with the same read, behind what made us close its channel or (0) the connection."""
        if isinstance(event, Heartbeat) or not self._closed_in_turn & {0, event.channel}:
            return False
        return not (
            isinstance(event, MethodFrame)
            and isinstance(
                event.method, commands.Connection.Close | commands.Connection.CloseOk | commands.Channel.Close
            )
        )

    def _take_at_once(self, event: Event) -> bool:
        """What never has to wait for anything: publishes and acknowledgements. False: it may be something else."""
        if self._operations is None:
            return False
        if isinstance(event, PublishRun):
            channel = self._channel(event.channel)
            assert self._publisher is not None
            self.door.turn.running = True
            self._published = True
            self._publisher.publish(channel, event)
            if channel.confirming:
                send_confirms(channel, self.outbox)
            return True
        if isinstance(event, Acks):
            self.door.turn.running = True
            self._operations.acks(self._channel(event.channel), event)
            return True
        return isinstance(event, Heartbeat)

    async def _take(self, event: Event) -> None:
        if self._take_at_once(event):
            return
        match event:
            case MethodFrame(channel=0):
                await self._take_connection(event.method)
            case MethodFrame():
                await self._take_channel(event.channel, event.method)
            case Violation():
                await self._fail(event.channel, event.error, told=True)
            case _:
                pass

    def _send(self, channel: int, method: Method) -> None:
        self.outbox.put(encode_method(channel, method))

    # -- errors -----------------------------------------------------------------------------------------------------

    async def _fail(self, number: int, error: AmqpError, *, told: bool = False) -> None:
        """Close the channel (soft) or the connection (hard) for an error of the client's."""
        extra = {"peer": self.peer[0], "user": self.user, "channel": number, "code": int(error.code)}
        self._closed_in_turn.add(0 if error.hard else number)
        if error.hard or number == 0:
            _log.warning("connection closed: %s", error.text, extra=extra)
            if not told:
                self._cutter.close_connection()
            self._closing = True
            self._scope.deadline = trio.current_time() + CLOSE_SECONDS_MAX
            await self._let_go()
            close = make(
                commands.Connection.Close,
                reply_code=int(error.code),
                reply_text=error.reply_text,
                class_id=error.class_id,
                method_id=error.method_id,
            )
            self._send(0, close)
            return
        _log.info("channel closed: %s", error.text, extra=extra)
        if not told:
            self._cutter.close_channel(number)
        await self._close_channel(number)
        self._send(
            number,
            make(
                commands.Channel.Close,
                reply_code=int(error.code),
                reply_text=error.reply_text,
                class_id=error.class_id,
                method_id=error.method_id,
            ),
        )

    # -- the connection class -----------------------------------------------------------------------------------------

    async def _take_connection(self, method: Method) -> None:
        if isinstance(method, commands.Connection.Close):
            await self._let_go()
            await self._settled()
            self._free_place()
            self._send(0, make(commands.Connection.CloseOk))
            self._stay_for_its_end()
            return
        if isinstance(method, commands.Connection.CloseOk):
            # Also from a relay whose client has gone: it will not come back.
            self._closing = True
            raise Ended
        if self._closing:
            return
        match method:
            case commands.Connection.UpdateSecret():
                await self._update_secret(method)
            case _:
                raise amqp_error(ReplyCode.COMMAND_INVALID, f"unexpected {method.name}", *ids(method))

    def _open(self) -> None:
        name = self.vhost
        host = self._broker.vhosts.get(name)
        if host is None:
            raise amqp_error(ReplyCode.NOT_ALLOWED, f"vhost '{name}' not found")
        member = Member(self.user, name, self.peer[0], loopback=self.is_loopback)
        refusal = self.door.limits.enter(member)
        if refusal is not None:
            raise amqp_error(ReplyCode.NOT_ALLOWED, refusal)
        self._member = member
        self._operations = Operations(
            self._broker,
            host,
            self.door.access,
            self.user,
            self.outbox,
            self._config,
            connection=self.owner,
            notify_cancel=understands(self.properties, "consumer_cancel_notify"),
            frame_max=self._cutter.frame_max,
        )
        self._publisher = Publisher(self._broker, host, self.door.access, self.user, self.outbox)
        self._publisher.frame_max = self._cutter.frame_max
        self.outbox.on_room = self._wake_consumers
        _log.info("connection opened", extra={"peer": self.peer[0], "user": self.user, "vhost": name, "door": "amqp"})

    async def _resume(self, resumed: Resumed) -> None:
        assert self._operations is not None and self._member is not None
        for number in resumed.closing:
            self._cutter.close_channel(number)
        for one in resumed.channels:
            refusal = self.door.limits.open_channel(self._member)
            if refusal is not None:
                raise amqp_error(ReplyCode.NOT_ALLOWED, refusal)
            self.channels[one.number] = channel_as(one)
        await resume(resumed, self._operations, self.channels, self._cancelled)

    def _cancelled(self, channel: Channel, tag: str) -> None:
        if understands(self.properties, "consumer_cancel_notify"):
            self._send(channel.number, make(commands.Basic.Cancel, consumer_tag=tag, nowait=True))

    async def _update_secret(self, method: commands.Connection.UpdateSecret) -> None:
        outcome = await self.door.authentication.login(
            self.user,
            octets(str(method.new_secret)).decode("utf-8", "replace"),
            address=self.peer[0],
            peer_is_loopback=self.is_loopback,
        )
        if not isinstance(outcome, Identity):
            raise amqp_error(ReplyCode.NOT_ALLOWED, "new secret was refused", *ids(method))
        self._send(0, make(commands.Connection.UpdateSecretOk))

    def _wake_consumers(self) -> None:
        assert self._operations is not None
        for channel in self.channels.values():
            self._operations.wake(channel)
        self.door.turn.soon()

    # -- channels ---------------------------------------------------------------------------------------------------

    def _channel(self, number: int) -> Channel:
        channel = self.channels.get(number)
        if channel is None:
            raise amqp_error(ReplyCode.CHANNEL_ERROR, f"expected 'channel.open' on channel {number}")
        return channel

    async def _take_channel(self, number: int, method: Method) -> None:
        assert self._operations is not None
        if isinstance(method, commands.Channel.Open):
            if number in self.channels:
                raise amqp_error(ReplyCode.CHANNEL_ERROR, f"second 'channel.open' on channel {number}", *ids(method))
            assert self._member is not None
            refusal = self.door.limits.open_channel(self._member)
            if refusal is not None:
                raise amqp_error(ReplyCode.NOT_ALLOWED, refusal, *ids(method))
            self.channels[number] = Channel(number)
            self._send(number, make(commands.Channel.OpenOk))
            return
        if isinstance(method, commands.Channel.CloseOk | commands.Channel.FlowOk):
            return
        if isinstance(method, commands.Channel.Close):
            if await self._close_channel(number):
                await self._settled()
            self._send(number, make(commands.Channel.CloseOk))
            return
        # Synchronous methods see the connection's own past (K9): its publishes are with their queues already.
        self._broker.dispatch()
        await self._operations.handle(self._channel(number), method)

    async def _close_channel(self, number: int) -> bool:
        """Whether there was one."""
        channel = self.channels.pop(number, None)
        if channel is None:
            return False
        assert self._operations is not None and self._member is not None
        self.door.limits.close_channel(self._member)
        await self._operations.close_channel(channel, keep_queues=self._succeeded.is_set())
        return True

    async def _settled(self) -> None:
        """Acks are safe before the channel's or connection's close is answered (Q3)."""
        if self._is_forsaken:
            return
        self.door.turn.end()
        await self._broker.write_journal()

    async def _let_go(self) -> None:
        """What the connection held goes back, its exclusive queues go. Nobody finds them once it is told closed."""
        if self._operations is None:
            return
        if self._is_forsaken:
            for channel in self.channels.values():
                channel.open = False
                assert self._member is not None
                self.door.limits.close_channel(self._member)
            self.channels.clear()
            return
        for number in list(self.channels):
            await self._close_channel(number)
        host = self._broker.vhosts.get(self.vhost)
        if host is not None and not self._succeeded.is_set():
            await host.delete_owned(self.owner)

    async def _clean_up(self) -> None:
        """Whatever ended the connection."""
        self.outbox.close()
        self._socket.close()
        try:
            if self.relayed and not self._closing and not self._is_forsaken:
                await self._wait_for_successor()
            await self._let_go()
        finally:
            self._free_place()
            self._cleaned.set()
        self.door.turn.end()

    async def _wait_for_successor(self) -> None:
        """Its link was lost, and perhaps nothing else: what it held goes to others, what it declared stays a moment."""
        if self._operations is None:
            return
        for number, channel in list(self.channels.items()):
            del self.channels[number]
            assert self._member is not None
            self.door.limits.close_channel(self._member)
            await self._operations.close_channel(channel, keep_queues=True)
        self._free_place()
        self.door.turn.end()
        with trio.move_on_after(RETURN_SECONDS):
            await self._succeeded.wait()
        if not self._succeeded.is_set():
            await self._operations.let_go_left()

    def _stay_for_its_end(self) -> None:
        """The client was told closed. It closes the socket, as with RabbitMQ: each of its threads may send a close and
        gets an answer. Ended by us at once, it would see a reset because of what it still sends."""
        self._closing = True
        self._closed_in_turn.add(0)
        self._cutter.close_connection()
        self._scope.deadline = trio.current_time() + CLOSED_SECONDS_MAX

    def _free_place(self) -> None:
        """Whoever is told closed may come again at once, also where there may be only one."""
        if self._member is not None:
            self.door.limits.leave(self._member)
            self._member = None

    # -- alarms -------------------------------------------------------------------------------------------------------

    async def _wait_for_alarms(self) -> None:
        """It publishes while the node is short of memory or disk: nothing more is read from it until that is over. What
        it consumes is sent on."""
        told = understands(self.properties, "connection.blocked")
        reason = self.door.alarms.reason
        _log.info("connection blocked: %s", reason, extra={"peer": self.peer[0], "user": self.user})
        if told:
            self._send(0, make(commands.Connection.Blocked, reason=reason))
            self.door.turn.end()
        while self.door.alarms.active and not self._closing:
            self._blocked = trio.Event()
            await self._blocked.wait()
        self._blocked = None
        # It was not listened to: it cannot be blamed for its silence.
        self._inbox.note()
        _log.info("connection unblocked", extra={"peer": self.peer[0], "user": self.user})
        if told and not self._closing:
            self._send(0, make(commands.Connection.Unblocked))
            self.door.turn.end()

    def reconsider(self) -> None:
        """An alarm was raised or cleared, or the connection is to end."""
        if self._blocked is not None:
            self._blocked.set()

    # -- asked from outside -------------------------------------------------------------------------------------------

    def excuse(self) -> None:
        """The broker was held up: the client may have sent what nobody has read yet."""
        self._inbox.note()

    def beat(self, now: float) -> None:
        """Once a second: send a heartbeat when nothing else was sent, give up a peer that is silent for too long."""
        if self.outbox.closed:
            # The peer is gone, and perhaps nobody reads to notice.
            self._scope.cancel()
            return
        if not self.heartbeat_s or self._operations is None:
            return
        if self._blocked is None and now - self._inbox.last_received > 2 * self.heartbeat_s:
            _log.warning("connection closed: no heartbeat", extra={"peer": self.peer[0], "user": self.user})
            self._scope.cancel()
            return
        if self.outbox.sent_count != self.last_sent_count:
            self.last_sent_count = self.outbox.sent_count
            self._silent_s = 0
        else:
            self._silent_s += 1
        if self._silent_s >= self.heartbeat_s // 2:
            self.outbox.put(HEARTBEAT_FRAME)
            self._silent_s = 0

    def check_deliveries(self, now: float) -> None:
        """Now and then: close channels whose client has sat on a delivery for too long."""
        if self._operations is None or self._closing or self._turning:
            return
        timeout_ms = self._config.consumer_timeout_ms
        for channel in self.channels.values():
            held = channel.overdue(now, timeout_ms / 1000)
            if held is not None:
                assert self._nursery is not None
                own_ms = held.queue.settings.consumer_timeout_ms
                self._nursery.start_soon(self._time_out, channel, timeout_ms if own_ms is None else own_ms)

    async def _time_out(self, channel: Channel, timeout_ms: int) -> None:
        if self._turning or self.channels.get(channel.number) is not channel:
            # It is looked at again.
            return
        text = (
            f"delivery acknowledgement on channel {channel.number} timed out. Timeout value used: {timeout_ms} ms. "
            "This timeout value can be configured, see docs/configuration.md"
        )
        await self._fail(channel.number, amqp_error(ReplyCode.PRECONDITION_FAILED, text))
        self.door.turn.end()

    async def shut(self, reason: str) -> None:
        """The broker stops: tell the client and give it a moment to answer."""
        if self._operations is not None and not self._closing:
            self._closing = True
            self._cutter.close_connection()
            self._send_forced_close(reason)
        else:
            self._scope.cancel()

    def be_forsaken(self) -> None:
        """This node no longer leads the vhost. As `be_succeeded`, and what the client held is the next leader's too."""
        self._is_forsaken = True
        for channel in self.channels.values():
            # No consumer of theirs has room from now on.
            channel.open = False
        self.be_succeeded()

    def be_succeeded(self) -> None:
        """Another leader, or another session here, goes on with the client: nothing is deleted because this one ends.
        If it is relayed, it ends at once and without a word."""
        self._succeeded.set()
        if self.relayed:
            self._scope.cancel()

    async def gone(self) -> None:
        """Wait until nothing is held by it any more."""
        await self._cleaned.wait()

    def _send_forced_close(self, reason: str) -> None:
        text = f"CONNECTION_FORCED - {reason}"
        self._send(0, make(commands.Connection.Close, reply_code=int(ReplyCode.CONNECTION_FORCED), reply_text=text))
        self.door.turn.end()
        self.reconsider()

    def expel(self, reason: str) -> None:
        """Its user or vhost is no more: it gets nothing from now on, and has a moment to hear why."""
        if self._operations is None or self._closing or self._nursery is None:
            self._scope.cancel()
            return
        _log.warning("connection closed: %s", reason, extra={"peer": self.peer[0], "user": self.user})
        self._closing = True
        self._cutter.close_connection()
        self._scope.deadline = trio.current_time() + EXPEL_SECONDS_MAX
        for channel in self.channels.values():
            # No consumer of theirs has room from now on.
            channel.open = False
        self._nursery.start_soon(self._leave, reason)

    async def _leave(self, reason: str) -> None:
        await self._let_go()
        self._send_forced_close(reason)

    def rights_changed(self) -> None:
        """Consumers of queues that the user may no longer read are cancelled; all else is asked for at each method."""
        if self._operations is not None and not self._closing and self._nursery is not None:
            self._nursery.start_soon(self._check_consumers)

    async def _check_consumers(self) -> None:
        assert self._operations is not None
        for channel in list(self.channels.values()):
            await self._operations.drop_forbidden(channel)
        self.door.turn.end()

    def abort(self) -> None:
        self._scope.cancel()


def _blamed(event: Event, error: HeadraceError) -> tuple[int, AmqpError]:
    """The channel on which an error happened, and the error laid to the method that met it."""
    match event:
        case PublishRun():
            return event.channel, reply_to(error, *ids(commands.Basic.Publish))
        case Acks():
            return event.channel, reply_to(error, *ids(commands.Basic.Ack))
        case MethodFrame(channel=0) if isinstance(error, AmqpError):
            return 0, error
        case MethodFrame():
            return event.channel, reply_to(error, *ids(event.method))
        case Heartbeat() | Violation():
            return 0, reply_to(error, 0, 0)
