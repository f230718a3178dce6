"""What of a relayed AMQP connection lives only with the leader that serves it: kept here, to resume it on another.
Machine: no I/O.

Known of each channel: its mode, its prefetch, its consumers, its next delivery tag, how many publishes there were and
how many were answered, the methods that wait for an answer; and of the connection: what was declared and bound through
it that no other node knows of. Both directions are followed as they pass (passing.py).

After the loss of a leader:
- What was delivered and not acknowledged comes again; acks of it are void (the new leader knows from where tags count).
- Publishes that were not confirmed may have happened or not. Their channel is closed and says so: a nack would lie.
  So is a channel with a transaction under way, with half a large message, or a purge, deletion or commit in flight.
- Methods in flight that may be done twice are sent again; all that the client notices is time.

Neighbours: relay.py carries the octets, resuming.py is how the new leader takes what `resume` says.
"""

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from pamqp import commands

from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error
from headrace.gateways.amqp.fields import FieldTable, encode_table
from headrace.gateways.amqp.frames import encode_method
from headrace.gateways.amqp.methods import Method, decode_method, encode_payload, make
from headrace.gateways.amqp.passing import Passing
from headrace.gateways.amqp.properties import number_in
from headrace.gateways.relay.opening import Resumed, ResumedChannel, ResumedConsumer

_Bind: TypeAlias = commands.Queue.Bind | commands.Exchange.Bind
_Key: TypeAlias = tuple[str, str, str, str, bytes]
# Answered by a method of their own, unless they say nowait.
_ASKING = (
    commands.Connection.UpdateSecret,
    commands.Channel.Open,
    commands.Channel.Flow,
    commands.Channel.Close,
    commands.Exchange.Declare,
    commands.Exchange.Delete,
    commands.Exchange.Bind,
    commands.Exchange.Unbind,
    commands.Queue.Declare,
    commands.Queue.Bind,
    commands.Queue.Unbind,
    commands.Queue.Purge,
    commands.Queue.Delete,
    commands.Basic.Qos,
    commands.Basic.Consume,
    commands.Basic.Cancel,
    commands.Basic.Get,
    commands.Basic.Recover,
    commands.Confirm.Select,
    commands.Tx.Select,
    commands.Tx.Commit,
    commands.Tx.Rollback,
)
# Done twice, they may do harm: somebody else may have declared or published in between.
_ONCE = (commands.Queue.Purge, commands.Queue.Delete, commands.Exchange.Delete, commands.Tx.Commit)
_ANSWERS = (
    commands.Connection.UpdateSecretOk,
    commands.Channel.OpenOk,
    commands.Channel.FlowOk,
    commands.Channel.CloseOk,
    commands.Exchange.DeclareOk,
    commands.Exchange.DeleteOk,
    commands.Exchange.BindOk,
    commands.Exchange.UnbindOk,
    commands.Queue.DeclareOk,
    commands.Queue.BindOk,
    commands.Queue.UnbindOk,
    commands.Queue.PurgeOk,
    commands.Queue.DeleteOk,
    commands.Basic.QosOk,
    commands.Basic.ConsumeOk,
    commands.Basic.CancelOk,
    commands.Basic.GetEmpty,
    commands.Basic.RecoverOk,
    commands.Confirm.SelectOk,
    commands.Tx.SelectOk,
    commands.Tx.CommitOk,
    commands.Tx.RollbackOk,
)
_DELIVER = commands.Basic.Deliver.index.to_bytes(4, "big")
_GET_OK = commands.Basic.GetOk.index.to_bytes(4, "big")
# Where a reader of a stream begins, and of each delivery to it which number it has.
OFFSET = "x-stream-offset"


@dataclass(slots=True)
class _Consumer:
    consume: commands.Basic.Consume
    prefetch: int
    # Of a reader of a stream: where it goes on.
    next_offset: int | None = None

    @property
    def again(self) -> commands.Basic.Consume:
        """How to consume as before."""
        if self.next_offset is None:
            return self.consume
        arguments = {**cast(FieldTable, self.consume.arguments or {}), OFFSET: self.next_offset}
        found: commands.Basic.Consume = copy(self.consume)
        found.arguments = cast(Any, arguments)
        return found


@dataclass(slots=True)
class _Channel:
    number: int
    confirming: bool = False
    transactional: bool = False
    # Something was published or settled since the last commit that was answered; since the last that was asked for.
    in_transaction: bool = False
    after_commit: bool = False
    published: int = 0
    answered: int = 0
    next_tag: int = 1
    consumer_prefetch: int = 0
    channel_prefetch: int = 0
    flowing: bool = True
    last_queue: str = ""
    consumers: dict[str, _Consumer] = field(default_factory=dict)
    asked: deque[Method] = field(default_factory=deque)

    def asks(self, *kinds: type[Method]) -> bool:
        return any(isinstance(method, kinds) for method in self.asked)


@dataclass(frozen=True, slots=True)
class Recovery:
    """How to go on with another leader."""

    resumed: Resumed
    # At once, and whatever comes of it.
    to_client: bytes
    # Before anything else that the client sends.
    to_leader: bytes


class Tracker:
    def __init__(self, *, frame_max: int) -> None:
        # The client asked for the end, or was told of it: there is nothing to resume.
        self.client_closes = False
        self.leader_closes = False
        self._frame_max = frame_max
        self._channels: dict[int, _Channel] = {}
        # On channel 0.
        self._asked: deque[Method] = deque()
        # Told closed, and have not answered.
        self._closing: set[int] = set()
        self._blocked = False
        self._exchanges: dict[str, commands.Exchange.Declare] = {}
        self._queues: dict[str, commands.Queue.Declare] = {}
        self._bindings: dict[_Key, _Bind] = {}
        self._up = Passing(_Up(self), frame_max=frame_max)
        self._down = Passing(_Down(self), frame_max=frame_max)
        # What readers of streams were given: channel, consumer, offset; and may not have been handed on.
        self._given: list[tuple[int, str, int]] = []

    @property
    def is_closing(self) -> bool:
        return self.client_closes or self.leader_closes

    def from_client(self, data: bytes) -> bytes:
        """What of it can go to the leader."""
        return self._up.receive(data)

    def from_leader(self, data: bytes) -> bytes:
        """What of it can go to the client."""
        found = self._down.receive(data)
        if self._given and not self._down.holds_what_was_found:
            self._note_given()
        return found

    def _note_given(self) -> None:
        given, self._given = self._given, []
        for number, tag, offset in given:
            channel = self._channels.get(number)
            consumer = None if channel is None else channel.consumers.get(tag)
            if consumer is not None:
                consumer.next_offset = offset + 1

    # -- after a loss ---------------------------------------------------------------------------------------------

    def recover(self) -> Recovery:
        """The leader is lost. May be asked for again, if the next one is lost too."""
        told: list[bytes] = []
        for channel in list(self._channels.values()):
            reason = self._why_not(channel)
            if reason is not None:
                told.append(self._close(channel.number, reason))
        for number in sorted(self._up.begun | self._down.begun):
            if number not in self._closing:
                told.append(self._close(number, "a large message was on its way"))
        if self._blocked:
            # The next one says so itself.
            told.append(encode_method(0, make(commands.Connection.Unblocked)))
            self._blocked = False
        # What the lost one had begun to say is void.
        watched = self._down.watched
        self._down = Passing(_Down(self), frame_max=self._frame_max)
        self._down.watched = watched
        self._given = []
        again = [encode_method(0, method) for method in self._asked]
        for channel in self._channels.values():
            ends = channel.asks(commands.Channel.Close) and not channel.asks(commands.Channel.Open)
            # It is not opened again to be closed.
            asked = [method for method in channel.asked if not ends or isinstance(method, commands.Channel.Close)]
            again += [encode_method(channel.number, method) for method in asked]
        return Recovery(self._resumed(), b"".join(told), b"".join(again))

    def _why_not(self, channel: _Channel) -> str | None:
        """Why the channel cannot go on; None if it can."""
        if channel.asks(commands.Channel.Close):
            return None
        unanswered = channel.published - channel.answered
        if unanswered:
            return f"the outcome of {unanswered} publishes is unknown"
        for method in channel.asked:
            if isinstance(method, commands.Tx.Commit):
                return "the outcome of tx.commit is unknown"
            if isinstance(method, _ONCE):
                return f"the outcome of {method.name.lower()} is unknown"
        if channel.in_transaction and (channel.after_commit or not channel.asks(commands.Tx.Rollback)):
            return "its transaction was not committed, and is rolled back"
        if channel.number in self._up.begun or channel.number in self._down.begun:
            return "a large message was on its way"
        return None

    def _close(self, number: int, reason: str) -> bytes:
        """Soft, and of a kind that clients take for worth another try: RESOURCE_ERROR."""
        self._drop(number)
        self._closing.add(number)
        error = amqp_error(ReplyCode.RESOURCE_ERROR, f"the leader of this vhost was lost: {reason}")
        close = make(commands.Channel.Close, reply_code=int(error.code), reply_text=error.reply_text)
        return encode_method(number, close)

    def _resumed(self) -> Resumed:
        channels = [
            ResumedChannel(
                one.number,
                one.next_tag,
                one.confirming,
                one.published,
                one.transactional,
                one.consumer_prefetch,
                one.channel_prefetch,
                one.flowing,
                one.last_queue,
                [ResumedConsumer(encode_payload(held.again), held.prefetch) for held in one.consumers.values()],
            )
            for one in self._channels.values()
            if not one.asks(commands.Channel.Open, commands.Channel.Close)
        ]
        declared: list[Method] = [*self._exchanges.values(), *self._queues.values(), *self._bindings.values()]
        return Resumed(channels, sorted(self._closing), [encode_payload(method) for method in declared])

    # -- from the client ------------------------------------------------------------------------------------------

    def asked(self, number: int, method: Method) -> None:
        match method:
            case commands.Connection.Close():
                self.client_closes = True
            case commands.Connection.CloseOk():
                self.leader_closes = True
            case commands.Channel.CloseOk():
                self._closing.discard(number)
            case commands.Channel.Open() if number not in self._channels:
                self._channels[number] = _Channel(number, asked=deque([method]))
            case commands.Basic.RecoverAsync() | commands.Channel.FlowOk() | commands.Basic.CancelOk():
                pass
            case _ if number == 0:
                if isinstance(method, _ASKING):
                    self._asked.append(method)
            case _:
                channel = self._channels.get(number)
                if channel is None or number in self._closing:
                    return  # void, or the leader minds
                if not isinstance(method, _ASKING):
                    return
                self._fill_in(channel, method)
                if isinstance(method, commands.Tx.Commit | commands.Tx.Rollback):
                    channel.after_commit = False
                # queue.unbind has no nowait.
                if getattr(method, "nowait", False):
                    self._done(channel, method, None)
                else:
                    channel.asked.append(method)

    def _fill_in(self, channel: _Channel, method: Method) -> None:
        """No name stands for the queue that was declared last; by the time of a resume that may be another one."""
        match method:
            case (
                commands.Queue.Bind() | commands.Queue.Unbind() | commands.Basic.Consume() | commands.Queue.Delete()
            ) if not method.queue:
                method.queue = channel.last_queue

    def published(self, number: int, count: int) -> None:
        channel = self._channels.get(number)
        if channel is None:
            return
        if channel.transactional or channel.asks(commands.Tx.Select):
            channel.in_transaction = channel.after_commit = True
        elif channel.confirming or channel.asks(commands.Confirm.Select):
            channel.published += count

    def settled(self, number: int) -> None:
        channel = self._channels.get(number)
        if channel is not None and (channel.transactional or channel.asks(commands.Tx.Select)):
            channel.in_transaction = channel.after_commit = True

    # -- from the leader ------------------------------------------------------------------------------------------

    def answered(self, number: int, method: Method) -> None:
        match method:
            case commands.Connection.Close() | commands.Connection.CloseOk():
                self.leader_closes = True
            case commands.Connection.Blocked():
                self._blocked = True
            case commands.Connection.Unblocked():
                self._blocked = False
            case commands.Channel.Close():
                self._drop(number)
                self._closing.add(number)
            case commands.Channel.CloseOk():
                self._drop(number)
            case commands.Basic.Cancel():
                channel = self._channels.get(number)
                if channel is not None:
                    channel.consumers.pop(str(method.consumer_tag), None)
            case _ if isinstance(method, _ANSWERS):
                self._answer(number, method)
            case _:
                pass

    def _answer(self, number: int, answer: Method) -> None:
        if number == 0:
            if self._asked:
                self._asked.popleft()
            return
        channel = self._channels.get(number)
        if channel is not None and channel.asked:
            self._done(channel, channel.asked.popleft(), answer)

    def delivered(self, number: int, tag: int) -> None:
        channel = self._channels.get(number)
        if channel is not None:
            channel.next_tag = tag + 1

    def given(self, number: int, tag: str, offset: int) -> None:
        """To a reader of a stream."""
        self._given.append((number, tag, offset))

    def got(self, number: int) -> None:
        """basic.get-ok: the answer that is a content."""
        channel = self._channels.get(number)
        if channel is not None and channel.asked:
            channel.asked.popleft()

    def confirmed(self, number: int, tag: int) -> None:
        channel = self._channels.get(number)
        if channel is not None:
            channel.answered = tag

    # -- what was asked and done ----------------------------------------------------------------------------------

    def _done(self, channel: _Channel, method: Method, answer: Method | None) -> None:
        match method:
            case commands.Confirm.Select():
                channel.confirming = True
            case commands.Tx.Select():
                channel.transactional = True
            case commands.Tx.Commit() | commands.Tx.Rollback():
                channel.in_transaction = channel.after_commit or channel.asks(commands.Tx.Commit)
            case commands.Channel.Flow():
                channel.flowing = bool(method.active)
            case commands.Basic.Qos():
                if method.global_:
                    channel.channel_prefetch = method.prefetch_count
                else:
                    channel.consumer_prefetch = method.prefetch_count
            case commands.Basic.Consume():
                tag = str(getattr(answer, "consumer_tag", method.consumer_tag))
                method.consumer_tag, method.nowait = tag, True
                channel.consumers[tag] = _Consumer(method, channel.consumer_prefetch)
                self._given = [one for one in self._given if one[:2] != (channel.number, tag)]
                if OFFSET in (method.arguments or {}):
                    self._down.watched.add(channel.number)
            case commands.Basic.Cancel():
                consumer = channel.consumers.pop(str(method.consumer_tag), None)
                if consumer is not None:
                    self._unconsumed(consumer.consume.queue)
            case commands.Queue.Declare():
                name = str(getattr(answer, "queue", method.queue))
                channel.last_queue = name
                if not method.passive and (method.exclusive or not method.durable) and name:
                    method.queue, method.nowait = name, True
                    self._queues[name] = method
            case commands.Queue.Delete():
                self._forget_queue(method.queue)
            case commands.Exchange.Declare():
                if not method.passive and not method.durable:
                    method.nowait = True
                    self._exchanges[method.exchange] = method
            case commands.Exchange.Delete():
                self._forget_exchange(method.exchange)
            case commands.Queue.Bind() | commands.Exchange.Bind():
                self._bound(method)
            case commands.Queue.Unbind() | commands.Exchange.Unbind():
                self._bindings.pop(_key(method), None)
            case _:
                pass

    def _bound(self, method: _Bind) -> None:
        """Only what no other node knows of: what is durable at both ends is theirs too, and others may unbind it."""
        if isinstance(method, commands.Queue.Bind):
            ephemeral = method.queue in self._queues or method.exchange in self._exchanges
        else:
            ephemeral = method.destination in self._exchanges or method.source in self._exchanges
        if ephemeral:
            method.nowait = True
            self._bindings[_key(method)] = method

    def _unconsumed(self, queue: str) -> None:
        declared = self._queues.get(queue)
        if declared is not None and declared.auto_delete:
            held = (one for channel in self._channels.values() for one in channel.consumers.values())
            if not any(one.consume.queue == queue for one in held):
                self._forget_queue(queue)

    def _forget_queue(self, name: str) -> None:
        self._queues.pop(name, None)
        for key, bind in list(self._bindings.items()):
            if isinstance(bind, commands.Queue.Bind) and bind.queue == name:
                del self._bindings[key]

    def _forget_exchange(self, name: str) -> None:
        self._exchanges.pop(name, None)
        for key, bind in list(self._bindings.items()):
            ends = (bind.exchange,) if isinstance(bind, commands.Queue.Bind) else (bind.source, bind.destination)
            if name in ends:
                del self._bindings[key]

    def _drop(self, number: int) -> None:
        """The channel is no more; its exclusive queues are the connection's."""
        channel = self._channels.pop(number, None)
        self._up.forget(number)
        self._down.watched.discard(number)
        if channel is not None:
            for consumer in channel.consumers.values():
                self._unconsumed(consumer.consume.queue)


def _key(bound: _Bind | commands.Queue.Unbind | commands.Exchange.Unbind) -> _Key:
    """Which binding it is about."""
    arguments = encode_table(cast(FieldTable, bound.arguments or {}))
    if isinstance(bound, commands.Queue.Bind | commands.Queue.Unbind):
        return "queue", bound.queue, bound.exchange, bound.routing_key, arguments
    return "exchange", bound.destination, bound.source, bound.routing_key, arguments


class _Up:
    """What the client sends."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def found_method(self, channel: int, payload: bytes) -> None:
        method = _decoded(payload)
        if method is not None:
            self._tracker.asked(channel, method)

    def found_settling(self, channel: int, payload: bytes) -> None:
        self._tracker.settled(channel)

    def found_contents(self, channel: int, payload: bytes, count: int) -> None:
        self._tracker.published(channel, count)

    def found_content(self, channel: int, payload: bytes, header: bytes) -> None:
        self._tracker.published(channel, 1)


class _Down:
    """What the leader sends."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker

    def found_method(self, channel: int, payload: bytes) -> None:
        method = _decoded(payload)
        if method is not None:
            self._tracker.answered(channel, method)

    def found_settling(self, channel: int, payload: bytes) -> None:
        # Confirms are told in the order of the publishes, each for all before it (publishing.py).
        self._tracker.confirmed(channel, int.from_bytes(payload[4:12], "big"))

    def found_contents(self, channel: int, payload: bytes, count: int) -> None:
        if payload.startswith(_DELIVER):
            at = 5 + payload[4]
        elif payload.startswith(_GET_OK):
            at = 4
            self._tracker.got(channel)
        else:
            return
        self._tracker.delivered(channel, int.from_bytes(payload[at : at + 8], "big"))

    def found_content(self, channel: int, payload: bytes, header: bytes) -> None:
        self.found_contents(channel, payload, 1)
        if payload.startswith(_DELIVER):
            offset = number_in(header[12:], OFFSET)
            if offset is not None:
                tag = payload[5 : 5 + payload[4]].decode("utf-8", "surrogateescape")
                self._tracker.given(channel, tag, offset)


def _decoded(payload: bytes) -> Method | None:
    """None: it is malformed, and the leader says so."""
    try:
        return decode_method(payload)
    except AmqpError:
        return None
