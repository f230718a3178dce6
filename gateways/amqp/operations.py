"""What each method of a channel does: exchange, queue, basic, confirm, tx. Driver of the broker for one channel.

Every method checks its rights first, then its arguments, then acts and answers. A refusal is raised as AmqpError; the
session closes the channel or the connection for it and nothing else is touched.
"""

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from pamqp import commands

from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.errors import InUse, NotFound
from headrace.controller.table import Table
from headrace.core_log.errors import Refused
from headrace.core_log.log import PartitionLog
from headrace.filtering.expression import Expression, ExpressionError, both
from headrace.filtering.tags import InvalidTags
from headrace.gateways.amqp.arguments import (
    ConsumerArguments,
    QueueArguments,
    QueueType,
    Start,
    StreamOffset,
    StreamSettings,
    check_declared,
    check_same_exchange,
    check_same_queue,
    parse_binding_arguments,
    parse_consumer_arguments,
    parse_exchange_arguments,
    parse_queue_arguments,
)
from headrace.gateways.amqp.channel import Channel
from headrace.gateways.amqp.config import AmqpConfig
from headrace.gateways.amqp.consumer import AmqpConsumer, ReadingConsumer, properties_of, short_keys
from headrace.gateways.amqp.errors import AmqpError, ReplyCode, amqp_error, reply_to, resource
from headrace.gateways.amqp.frames import Acks, encode_get_ok, encode_method
from headrace.gateways.amqp.methods import Method, ids, make
from headrace.gateways.amqp.replyto import PREFIX, REPLY_TO, ReplyConsumer
from headrace.gateways.amqp.settings import combine
from headrace.gateways.amqp.tags import stream_filter
from headrace.gateways.delivery.access import Access, Operation
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.filters import TooManyFilters
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.queue import Queue, View
from headrace.gateways.delivery.reading import sequence_at
from headrace.gateways.delivery.routing import DELAYED_EXCHANGE, ExchangeKind
from headrace.gateways.delivery.transfers import DEAD_LETTER_END
from headrace.gateways.delivery.vhost import VirtualHost

Handler = Callable[[Channel, Any], Awaitable[None]]


class Operations:
    """The methods of all channels of one connection."""

    def __init__(
        self,
        broker: Broker,
        host: VirtualHost,
        access: Access,
        user: str,
        outbox: Outbox,
        config: AmqpConfig,
        *,
        connection: object,
        notify_cancel: bool,
        frame_max: int,
    ) -> None:
        self._broker = broker
        self._host = host
        self._access = access
        self._user = user
        self._outbox = outbox
        self._config = config
        self._connection = connection
        self._notify_cancel = notify_cancel
        self._frame_max = frame_max
        # While a connection of an earlier leader's is made again: what it declared may have a name of the broker's.
        self.resuming = False
        # That consumers left who may come back, and that are deleted for the lack of consumers if they do not.
        self._left: set[Queue] = set()
        self._touched: dict[View, None] = {}
        self._handlers: dict[type[Method], Handler] = {
            commands.Exchange.Declare: self._exchange_declare,
            commands.Exchange.Delete: self._exchange_delete,
            commands.Exchange.Bind: self._exchange_bind,
            commands.Exchange.Unbind: self._exchange_unbind,
            commands.Queue.Declare: self._queue_declare,
            commands.Queue.Bind: self._queue_bind,
            commands.Queue.Unbind: self._queue_unbind,
            commands.Queue.Purge: self._queue_purge,
            commands.Queue.Delete: self._queue_delete,
            commands.Basic.Qos: self._basic_qos,
            commands.Basic.Consume: self._basic_consume,
            commands.Basic.Cancel: self._basic_cancel,
            commands.Basic.Get: self._basic_get,
            commands.Basic.Ack: self._basic_ack,
            commands.Basic.Nack: self._basic_nack,
            commands.Basic.Reject: self._basic_reject,
            commands.Basic.Recover: self._basic_recover,
            commands.Basic.RecoverAsync: self._basic_recover,
            commands.Confirm.Select: self._confirm_select,
            commands.Tx.Select: self._tx_select,
            commands.Tx.Commit: self._tx_commit,
            commands.Tx.Rollback: self._tx_rollback,
            commands.Channel.Flow: self._channel_flow,
        }

    async def handle(self, channel: Channel, method: Method) -> None:
        handler = self._handlers.get(type(method))
        if handler is None:
            raise amqp_error(ReplyCode.COMMAND_INVALID, f"unexpected {method.name} on channel", *ids(method))
        try:
            await handler(channel, method)
        except AmqpError as error:
            raise reply_to(error, *ids(method)) from None
        except NotFound as error:
            raise amqp_error(ReplyCode.NOT_FOUND, str(error), *ids(method)) from error
        except InUse as error:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *ids(method)) from error
        except Refused as error:
            raise reply_to(error, *ids(method)) from error

    def _answer(self, channel: Channel, kind: type[Method], **values: object) -> None:
        self._outbox.put(encode_method(channel.number, make(kind, **values)))

    # -- rights ---------------------------------------------------------------------------------------------------

    def _demand(self, operation: Operation, kind: str, name: str) -> None:
        if not self._access.may(self._user, self._host.name, operation, name):
            shown = name or "amq.default"
            where = f"{kind} '{shown}' in vhost '{self._host.name}'"
            text = f"{operation} access to {where} refused for user '{self._user}'"
            raise amqp_error(ReplyCode.ACCESS_REFUSED, text)

    def _demand_named(self, exchange: str) -> None:
        if not exchange:
            raise amqp_error(ReplyCode.ACCESS_REFUSED, "operation not permitted on the default exchange")

    def _queue(self, channel: Channel, name: str, operation: Operation | None = None) -> Queue:
        """The queue of this name (the channel's last one for none), if user and connection may use it so."""
        name = self._queue_name(channel, name)
        if operation is not None:
            self._demand(operation, "queue", name)
        queue = self._host.queue(name)
        if queue.owner is not None and queue.owner is not self._connection:
            raise self._locked(name)
        return queue

    def _queue_name(self, channel: Channel, name: str) -> str:
        name = name or channel.last_queue
        if not name:
            raise amqp_error(ReplyCode.NOT_FOUND, "no previously declared queue")
        return name

    def _locked(self, queue: str) -> AmqpError:
        text = (
            f"cannot obtain exclusive access to locked {resource('queue', queue, self._host.name)}. It could be "
            "originally declared on another connection or the exclusive property value does not match that of the "
            "original declaration."
        )
        return amqp_error(ReplyCode.RESOURCE_LOCKED, text)

    # -- exchanges ------------------------------------------------------------------------------------------------

    async def _exchange_declare(self, channel: Channel, method: commands.Exchange.Declare) -> None:
        name, kind = method.exchange, method.exchange_type
        where = resource("exchange", name, self._host.name)
        found = self._host.router.exchange(name)
        if method.passive:
            if found is None:
                raise amqp_error(ReplyCode.NOT_FOUND, f"no {where}")
        else:
            self._demand(Operation.CONFIGURE, "exchange", name)
            self._demand_named(name)
            if kind not in {*ExchangeKind, DELAYED_EXCHANGE}:
                raise amqp_error(ReplyCode.COMMAND_INVALID, f"unknown exchange type '{kind}'")
            arguments = parse_exchange_arguments(method.arguments, name, self._host.name, kind)
            if arguments.stream.partitions is not None and arguments.stream.partitions > 1:
                raise _not_yet("x-partitions on an exchange")
            if arguments.alternate_exchange is not None:
                self._demand(Operation.READ, "exchange", name)
                self._demand(Operation.WRITE, "exchange", arguments.alternate_exchange)
            if found is None:
                if name.startswith("amq."):
                    text = f"exchange name '{name}' contains reserved prefix 'amq.*'"
                    raise amqp_error(ReplyCode.ACCESS_REFUSED, text)
                await self._host.declare_exchange(
                    name,
                    kind,
                    durable=method.durable,
                    auto_delete=method.auto_delete,
                    internal=method.internal,
                    arguments=arguments.table,
                )
                found = self._host.router.exchange(name)
                assert found is not None
            check_same_exchange(
                found.arguments,
                arguments.table,
                name,
                self._host.name,
                exchange_type=(found.type, kind),
                durable=(found.durable, method.durable),
                auto_delete=(found.auto_delete, method.auto_delete),
                internal=(found.internal, method.internal),
            )
        if not method.nowait:
            self._answer(channel, commands.Exchange.DeclareOk)

    async def _exchange_delete(self, channel: Channel, method: commands.Exchange.Delete) -> None:
        self._demand(Operation.CONFIGURE, "exchange", method.exchange)
        self._demand_named(method.exchange)
        if method.exchange.startswith("amq."):
            text = f"operation not permitted on exchange '{method.exchange}': its name has the reserved prefix 'amq.*'"
            raise amqp_error(ReplyCode.ACCESS_REFUSED, text)
        await self._host.delete_exchange(method.exchange, if_unused=method.if_unused)
        if not method.nowait:
            self._answer(channel, commands.Exchange.DeleteOk)

    async def _exchange_bind(self, channel: Channel, method: commands.Exchange.Bind) -> None:
        binding, _start = self._binding(method.source, DestinationKind.EXCHANGE, method.destination, method)
        await self._host.bind(binding)
        if not method.nowait:
            self._answer(channel, commands.Exchange.BindOk)

    async def _exchange_unbind(self, channel: Channel, method: commands.Exchange.Unbind) -> None:
        exchange = self._host.router.exchange
        if self._may_unbind(method.source, "exchange", method.destination, exchange(method.destination) is not None):
            binding, _start = self._binding(method.source, DestinationKind.EXCHANGE, method.destination, method)
            await self._host.unbind(binding)
        if not method.nowait:
            self._answer(channel, commands.Exchange.UnbindOk)

    def _may_unbind(self, source: str, kind: str, destination: str, is_there: bool) -> bool:
        """Whether there is anything to unbind: what is gone took its bindings along, and RabbitMQ says ok to that."""
        self._demand_named(source)
        self._demand(Operation.WRITE, kind, destination)
        self._demand(Operation.READ, "exchange", source)
        return is_there and self._host.router.exchange(source) is not None

    def _binding(
        self, source: str, kind: DestinationKind, destination: str, method: Any
    ) -> tuple[Binding, StreamOffset | None]:
        """A binding, and from where on it is to be given the past."""
        self._demand(Operation.WRITE, str(kind), destination)
        self._demand(Operation.READ, "exchange", source)
        self._demand_named(source)
        self._demand_named(destination)
        found = self._host.router.exchange(source)
        if found is None:
            raise amqp_error(ReplyCode.NOT_FOUND, f"no {resource('exchange', source, self._host.name)}")
        if found.kind is ExchangeKind.TOPIC and not self._access.may_use_key(
            self._user, self._host.name, source, Operation.READ, method.routing_key, None
        ):
            text = f"read access to topic '{method.routing_key}' in exchange '{source}' refused for user '{self._user}'"
            raise amqp_error(ReplyCode.ACCESS_REFUSED, text)
        arguments = parse_binding_arguments(method.arguments, source, self._host.name, str(found.kind))
        if arguments.start is not None and kind is DestinationKind.EXCHANGE:
            raise _not_yet("x-from on a binding to an exchange")
        binding = Binding(
            vhost=self._host.name,
            source=source,
            destination_kind=kind,
            destination=destination,
            routing_key=method.routing_key,
            # Where to begin is a request, and no part of what the binding is.
            arguments=Table({name: value for name, value in arguments.table.thaw().items() if name != "x-from"}),
        )
        return binding, arguments.start

    # -- queues ---------------------------------------------------------------------------------------------------

    async def _queue_declare(self, channel: Channel, method: commands.Queue.Declare) -> None:
        name = method.queue
        host = self._host
        if name == REPLY_TO or name.startswith(PREFIX):
            self._declare_reply_queue(channel, method)
            return
        if method.passive:
            queue = self._queue(channel, name)
            name = queue.name
        else:
            if not name:
                name = f"amq.gen-{self._broker.env.ids.uuid().hex}"
            elif name.startswith("amq.") and name not in host.queues and not self.resuming:
                text = f"queue name '{name}' contains reserved prefix 'amq.*'"
                raise amqp_error(ReplyCode.ACCESS_REFUSED, text)
            self._demand(Operation.CONFIGURE, "queue", name)
            if name in host.queues:
                self._queue(channel, name)
            arguments = parse_queue_arguments(
                method.arguments,
                name,
                host.name,
                durable=method.durable,
                exclusive=method.exclusive,
                auto_delete=method.auto_delete,
            )
            if arguments.dead_letter_exchange is not None:
                self._demand(Operation.READ, "queue", name)
                self._demand(Operation.WRITE, "exchange", arguments.dead_letter_exchange)
            elif arguments.may_need_grave:
                # What fails its last attempt, or no filter wants, makes it.
                self._demand(Operation.CONFIGURE, "queue", name + DEAD_LETTER_END)
            settings = combine(arguments, self._broker.queue_policy(host.name, name, arguments.table))
            grave = name + DEAD_LETTER_END if settings.dead_letter_exchange is None else ""
            check_declared(arguments, grave, name, host.name)
            if not method.durable or method.exclusive:
                _refuse_log_settings(arguments.stream, resource("queue", name, host.name))
            if arguments.stream.partitions is not None:
                _check_partitions(arguments, resource("queue", name, host.name))
            queue = await host.declare_queue(
                name,
                settings,
                durable=method.durable,
                auto_delete=method.auto_delete,
                owner=self._connection if method.exclusive else None,
                user=self._user,
                arguments=arguments.table,
            )
            self._queue(channel, name)
            if (queue.owner is not None) != method.exclusive:
                raise self._locked(name)
            check_same_queue(
                queue.arguments,
                arguments.table,
                name,
                host.name,
                durable=(queue.declared_durable, method.durable),
                auto_delete=(queue.auto_delete, method.auto_delete),
            )
        channel.last_queue = name
        self._broker.touch(queue)
        if not method.nowait:
            self._answer(
                channel,
                commands.Queue.DeclareOk,
                queue=name,
                message_count=queue.ready_count,
                consumer_count=queue.consumer_count,
            )

    def _declare_reply_queue(self, channel: Channel, method: commands.Queue.Declare) -> None:
        """Nothing is made: whoever answers may ask in this way whether the one who asked is still there."""
        if method.queue != REPLY_TO and method.queue not in self._host.replies:
            raise amqp_error(ReplyCode.NOT_FOUND, f"no {resource('queue', method.queue, self._host.name)}")
        if not method.nowait:
            self._answer(channel, commands.Queue.DeclareOk, queue=method.queue, message_count=0, consumer_count=1)

    async def _queue_bind(self, channel: Channel, method: commands.Queue.Bind) -> None:
        self._demand_named(method.exchange)
        queue = self._queue(channel, method.queue, Operation.WRITE)
        binding, start = self._binding(method.exchange, DestinationKind.QUEUE, queue.name, method)
        if start is None:
            await self._host.bind(binding)
        else:
            await self._host.bind_from(binding, partial(_offset_in, start))
        if not method.nowait:
            self._answer(channel, commands.Queue.BindOk)

    async def _queue_unbind(self, channel: Channel, method: commands.Queue.Unbind) -> None:
        name = self._queue_name(channel, method.queue)
        if self._may_unbind(method.exchange, "queue", name, name in self._host.queues):
            queue = self._queue(channel, name, Operation.WRITE)
            binding, _start = self._binding(method.exchange, DestinationKind.QUEUE, queue.name, method)
            await self._host.unbind(binding)
        self._answer(channel, commands.Queue.UnbindOk)

    async def _queue_purge(self, channel: Channel, method: commands.Queue.Purge) -> None:
        queue = self._queue(channel, method.queue, Operation.READ)
        if queue.settings.stream:
            where = resource("queue", queue.name, self._host.name)
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, f"queue.purge not supported by stream queues {where}")
        count = queue.purge()
        if not method.nowait:
            self._answer(channel, commands.Queue.PurgeOk, message_count=count)

    async def _queue_delete(self, channel: Channel, method: commands.Queue.Delete) -> None:
        name = self._queue_name(channel, method.queue)
        if name not in self._host.queues:
            # Deleting what is not there succeeds, as in RabbitMQ.
            self._demand(Operation.CONFIGURE, "queue", name)
            if not method.nowait:
                self._answer(channel, commands.Queue.DeleteOk)
            return
        queue = self._queue(channel, name, Operation.CONFIGURE)
        where = resource("queue", queue.name, self._host.name)
        if method.if_unused and not queue.is_unused:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"{where} in use")
        if method.if_empty and queue.ready_count:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"{where} not empty")
        count = await self._host.delete_queue(queue)
        if not method.nowait:
            self._answer(channel, commands.Queue.DeleteOk, message_count=count)

    # -- consuming ------------------------------------------------------------------------------------------------

    async def _basic_qos(self, channel: Channel, method: commands.Basic.Qos) -> None:
        if method.prefetch_size:
            text = f"prefetch_size!=0 ({method.prefetch_size})"
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, text)
        if method.global_:
            channel.channel_prefetch = method.prefetch_count
            for consumer in channel.consumers.values():
                self._touched[consumer.queue] = None
        else:
            channel.consumer_prefetch = method.prefetch_count
        self._answer(channel, commands.Basic.QosOk)
        self.dispatch_touched()

    async def _basic_consume(self, channel: Channel, method: commands.Basic.Consume) -> None:
        if method.queue == REPLY_TO:
            self._consume_replies(channel, method)
            return
        queue = self._queue(channel, method.queue, Operation.READ)
        where = resource("queue", queue.name, self._host.name)
        arguments = parse_consumer_arguments(method.arguments, queue.name, self._host.name)
        wants = _wanted(arguments, where)
        reads = queue.settings.stream or arguments.stream_offset is not None
        if reads:
            if self.resuming and (arguments.stream_offset is None or not arguments.stream_offset.is_exact):
                raise amqp_error(
                    ReplyCode.PRECONDITION_FAILED, f"the place of a reader of {where} is not known any more"
                )
            self._check_reader(channel, method, where)
        tag = self._consumer_tag(channel, method.consumer_tag)
        if any(consumer.exclusive for consumer in queue.consumers) or (method.exclusive and queue.consumers):
            raise amqp_error(ReplyCode.ACCESS_REFUSED, f"{where} in exclusive use")
        consumer = (ReadingConsumer if reads else AmqpConsumer)(
            self._broker,
            channel,
            self._outbox,
            queue,
            tag,
            no_ack=method.no_ack,
            exclusive=method.exclusive,
            priority=arguments.priority,
            prefetch=channel.consumer_prefetch,
            frame_max=self._frame_max,
            notify_cancel=self._notify_cancel,
        )
        if reads:
            start = self._start_of(queue, arguments.stream_offset or StreamOffset(Start.NEXT))
            queue.add_reader(consumer, start, wants)
        else:
            try:
                queue.add_consumer(consumer, wants)
            except TooManyFilters as error:
                raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"no further x-filter for {where}: {error}") from error
        channel.consumers[tag] = consumer
        self._broker.touch(queue)
        if not method.nowait:
            self._answer(channel, commands.Basic.ConsumeOk, consumer_tag=tag)
        self._broker.wake(queue)

    def _check_reader(self, channel: Channel, method: commands.Basic.Consume, where: str) -> None:
        """RabbitMQ's rules for streams; they hold for whoever reads beside an ordinary queue as well."""
        if not channel.consumer_prefetch and not channel.channel_prefetch:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"consumer prefetch count is not set for '{where}'")
        if method.no_ack:
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, f"automatic acknowledgement not supported by {where}")
        if method.exclusive:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"a reader of {where} cannot be exclusive")

    def _start_of(self, queue: Queue, asked: StreamOffset) -> int:
        """The number of the record to begin with."""
        history = queue.history
        match asked.start:
            case Start.FIRST:
                return history.first_seq
            case Start.LAST:
                return history.next_seq - 1
            case Start.NEXT:
                return history.next_seq
            case Start.OFFSET:
                return asked.number
            case Start.TIME_MS:
                return sequence_at(history, queue.view_id, asked.number * 1000)
            case Start.AGO_MS:
                now_us = self._broker.env.clock.wall_us()
                return sequence_at(history, queue.view_id, now_us - asked.number * 1000)

    def _consumer_tag(self, channel: Channel, asked: str) -> str:
        tag = asked or f"amq.ctag-{self._broker.env.ids.uuid().hex}"
        reply_consumer = channel.reply_consumer
        if tag in channel.consumers or (reply_consumer is not None and tag == reply_consumer.tag):
            raise amqp_error(ReplyCode.NOT_ALLOWED, f"attempt to reuse consumer tag '{tag}'")
        if len(channel.consumers) >= self._config.consumers_per_channel_max:
            raise amqp_error(
                ReplyCode.NOT_ALLOWED, f"reached maximum ({len(channel.consumers)}) of consumers per channel"
            )
        return tag

    def _consume_replies(self, channel: Channel, method: commands.Basic.Consume) -> None:
        tag = self._consumer_tag(channel, method.consumer_tag)
        if not method.no_ack:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, "reply consumer cannot acknowledge")
        if channel.reply_consumer is not None:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, "reply consumer already set")
        name = f"{PREFIX}{self._broker.env.ids.uuid().hex}"
        channel.reply_consumer = ReplyConsumer(name, tag, channel, self._outbox, self._frame_max)
        self._host.replies[name] = channel.reply_consumer
        if not method.nowait:
            self._answer(channel, commands.Basic.ConsumeOk, consumer_tag=tag)

    def _drop_reply_consumer(self, channel: Channel) -> None:
        if channel.reply_consumer is not None:
            del self._host.replies[channel.reply_consumer.name]
            channel.reply_consumer = None

    async def _basic_cancel(self, channel: Channel, method: commands.Basic.Cancel) -> None:
        tag = str(method.consumer_tag)
        if channel.reply_consumer is not None and tag == channel.reply_consumer.tag:
            self._drop_reply_consumer(channel)
        consumer = channel.consumers.pop(tag, None)
        if consumer is not None:
            await self._drop_consumer(consumer)
        if not method.nowait:
            self._answer(channel, commands.Basic.CancelOk, consumer_tag=tag)

    async def _drop_consumer(self, consumer: AmqpConsumer) -> None:
        queue = consumer.queue
        if queue.serves(consumer):
            queue.remove_consumer(consumer)
            self._broker.touch(queue)
            self._broker.wake(queue)
        if queue.auto_delete and queue.had_consumers and queue.is_unused and not queue.deleted:
            await self._host.delete_queue(queue)

    async def drop_forbidden(self, channel: Channel) -> None:
        """The user's rights have changed: whoever consumes what it may no longer read is cancelled."""
        for consumer in list(channel.consumers.values()):
            if not self._access.may(self._user, self._host.name, Operation.READ, consumer.queue.name):
                consumer.cancel()
                await self._drop_consumer(consumer)

    async def _basic_get(self, channel: Channel, method: commands.Basic.Get) -> None:
        queue = self._queue(channel, method.queue, Operation.READ)
        if queue.settings.stream:
            where = resource("queue", queue.name, self._host.name)
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, f"basic.get not supported by stream queues {where}")
        self._broker.touch(queue)
        stretch = queue.get()
        if stretch is None and queue.ready_count:
            await self._broker.visible(queue)
            if not channel.open:
                return
            stretch = queue.get()
        if stretch is None:
            self._answer(channel, commands.Basic.GetEmpty)
            return
        batch = stretch.loaded()
        index = stretch.index
        again = stretch.deliveries > 0 or stretch.seq < stretch.lane.delivered_below
        if method.no_ack:
            tag = channel.skip(1)
            queue.settle(stretch)
        else:
            tag = channel.hold(queue, stretch, None)
        self._outbox.put(
            encode_get_ok(
                channel.number,
                tag,
                again,
                self._broker.exchanges_of(stretch)[0],
                short_keys(batch, index, index + 1)[0],
                queue.ready_count,
                properties_of(self._broker, queue, stretch)[0],
                batch.values[index],
                self._frame_max,
            )
        )
        stretch.batch = None

    # -- settling -------------------------------------------------------------------------------------------------

    def acks(self, channel: Channel, event: Acks) -> None:
        """The hot path of basic.ack: all acks of one read."""
        if channel.transactional:
            for tag, multiple in event.acks:
                channel.set_aside(tag, multiple, _settle)
            return
        touched = self._touched
        for tag, multiple in event.acks:
            for queue, stretch in channel.release(tag, multiple):
                queue.settle(stretch)
                touched[queue] = None
        self.dispatch_touched()

    def dispatch_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for queue in touched:
            self._broker.wake(queue)

    async def _basic_ack(self, channel: Channel, method: commands.Basic.Ack) -> None:
        self.acks(channel, Acks(channel.number, [(method.delivery_tag, method.multiple)]))

    async def _basic_nack(self, channel: Channel, method: commands.Basic.Nack) -> None:
        # As in RabbitMQ 4.3: a nack says that nobody tried, a reject that somebody failed.
        self._reject(channel, method.delivery_tag, method.multiple, _return if method.requeue else _reject)

    async def _basic_reject(self, channel: Channel, method: commands.Basic.Reject) -> None:
        self._reject(channel, int(method.delivery_tag or 0), False, _give_back if method.requeue else _reject)

    def _reject(self, channel: Channel, tag: int, multiple: bool, settle: Callable[[View, Stretch], None]) -> None:
        if channel.transactional:
            channel.set_aside(tag, multiple, settle)
            return
        for queue, stretch in channel.release(tag, multiple):
            settle(queue, stretch)
            self._touched[queue] = None
        self.dispatch_touched()

    async def _basic_recover(self, channel: Channel, method: commands.Basic.Recover) -> None:
        if not method.requeue:
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, "requeue=false")
        for queue, stretch in channel.release_all():
            queue.give_back([stretch], failed=False)
            self._touched[queue] = None
        if isinstance(method, commands.Basic.Recover):
            self._answer(channel, commands.Basic.RecoverOk)
        self.dispatch_touched()

    # -- confirms, transactions, flow -----------------------------------------------------------------------------

    async def _confirm_select(self, channel: Channel, method: commands.Confirm.Select) -> None:
        if channel.transactional:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, "cannot switch from tx to confirm mode")
        channel.confirming = True
        if not method.nowait:
            self._answer(channel, commands.Confirm.SelectOk)

    async def _tx_select(self, channel: Channel, method: commands.Tx.Select) -> None:
        if channel.confirming:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, "cannot switch from confirm to tx mode")
        channel.transactional = True
        self._answer(channel, commands.Tx.SelectOk)

    async def _tx_commit(self, channel: Channel, method: commands.Tx.Commit) -> None:
        self._demand_transaction(channel)
        publishes, channel.pending = channel.pending, []
        for publish in publishes:
            publish()
        for settle, held in channel.take_pending():
            settle(held.queue, held.stretch)
            self._touched[held.queue] = None
        self._broker.dispatch()
        self.dispatch_touched()
        await self._broker.committed()
        await self._broker.write_journal()
        self._answer(channel, commands.Tx.CommitOk)

    async def _tx_rollback(self, channel: Channel, method: commands.Tx.Rollback) -> None:
        self._demand_transaction(channel)
        channel.put_back()
        self._answer(channel, commands.Tx.RollbackOk)

    def _demand_transaction(self, channel: Channel) -> None:
        if not channel.transactional:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, "channel is not transactional")

    async def _channel_flow(self, channel: Channel, method: commands.Channel.Flow) -> None:
        channel.flowing = bool(method.active)
        self._answer(channel, commands.Channel.FlowOk, active=method.active)
        if method.active:
            self.wake(channel)

    def wake(self, channel: Channel) -> None:
        """The channel may take deliveries again."""
        for consumer in list(channel.consumers.values()):
            self._broker.wake(consumer.queue)

    async def close_channel(self, channel: Channel, *, keep_queues: bool = False) -> None:
        """Consumers go, what they held goes back. `keep_queues`: the consumers come back here or elsewhere."""
        channel.open = False
        self._drop_reply_consumer(channel)
        consumers = list(channel.consumers.values())
        channel.consumers.clear()
        queues = {consumer.queue for consumer in consumers}
        for consumer in consumers:
            if consumer.queue.serves(consumer):
                consumer.queue.remove_consumer(consumer)
                self._broker.touch(consumer.queue)
        channel.put_back()
        for view, stretch in channel.release_all():
            if not view.deleted:
                view.give_back([stretch])
                if isinstance(view, Queue):
                    queues.add(view)
        for queue in sorted(queues, key=lambda one: one.name):
            if keep_queues:
                self._left.add(queue)
                self._broker.wake(queue)
            else:
                await self._let_go(queue)

    async def let_go_left(self) -> None:
        """Nobody came back."""
        for queue in sorted(self._left, key=lambda one: one.name):
            await self._let_go(queue)

    async def _let_go(self, queue: Queue) -> None:
        if queue.auto_delete and queue.had_consumers and queue.is_unused and not queue.deleted:
            await self._host.delete_queue(queue)
        else:
            self._broker.wake(queue)


def _refuse_log_settings(asked: StreamSettings, where: str) -> None:
    """A queue that lives in memory has no log of its own that could be kept so."""
    for name, value in (
        ("x-durability", asked.durability),
        ("x-compression", asked.compression),
        ("x-retention-ms", asked.retention_ms),
        ("x-retention-bytes", asked.retention_bytes),
    ):
        if value is not None:
            text = f"invalid arg '{name}' for {where}: only a durable queue that is not exclusive has a log of its own"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text)


def _check_partitions(arguments: QueueArguments, where: str) -> None:
    for unlawful, word in (
        (arguments.max_priority is not None, "x-max-priority"),
        (arguments.single_active_consumer, "x-single-active-consumer"),
        (arguments.queue_type is QueueType.STREAM, "x-queue-type stream"),
    ):
        if unlawful:
            text = f"invalid arg 'x-partitions' for {where}: it cannot be combined with {word}"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text)


def _wanted(arguments: ConsumerArguments, where: str) -> Expression | None:
    """What a consumer's filters let through together; None: everything."""
    wants = arguments.filter
    if not arguments.stream_filter:
        return wants
    try:
        by_value = stream_filter(arguments.stream_filter, match_unfiltered=arguments.match_unfiltered)
    except (InvalidTags, ExpressionError) as error:
        text = f"invalid arg 'x-stream-filter' for {where}: {error}"
        raise amqp_error(ReplyCode.PRECONDITION_FAILED, text) from error
    return by_value if wants is None else both(wants, by_value)


def _offset_in(start: StreamOffset, log: PartitionLog) -> int:
    """Where in an exchange's log a binding to the past begins."""
    if start.start is Start.TIME_MS:
        return int(log.offset_at_time(start.number * 1000))
    return max(int(log.log_start), start.number)


def _not_yet(what: str) -> AmqpError:
    """A feature that this release does not have: refused, never passed over."""
    return amqp_error(ReplyCode.PRECONDITION_FAILED, f"{what} is not supported by this release")


def _settle(view: View, stretch: Stretch) -> None:
    view.settle(stretch)


def _reject(view: View, stretch: Stretch) -> None:
    view.reject(stretch)


def _give_back(view: View, stretch: Stretch) -> None:
    view.give_back([stretch])


def _return(view: View, stretch: Stretch) -> None:
    view.give_back([stretch], failed=False)
