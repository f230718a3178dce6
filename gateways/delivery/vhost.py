"""One virtual host: its exchanges, queues and bindings, and the way of a publish into the log. Driver of topology.

Durable things are committed to the metadata store first and routed with afterwards, so a bind-ok means that the next
publish is routed with it. Ephemeral ones (non-durable, exclusive) live here only and never meet the store (K6).
Publishing itself is synchronous: route, append, tell the views, in one step (K1).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol
from uuid import UUID

import trio

from headrace.controller.changes import (
    Change,
    DeleteBinding,
    DeleteExchange,
    DeleteQueue,
    PutBinding,
    PutExchange,
    PutQueue,
)
from headrace.controller.entities import Binding as BindingEntity
from headrace.controller.entities import DestinationKind
from headrace.controller.entities import Exchange as ExchangeEntity
from headrace.controller.entities import Queue as QueueEntity
from headrace.controller.errors import InUse, Invalid, LimitReached, NotFound
from headrace.controller.snapshot import Snapshot
from headrace.controller.table import EMPTY, Table
from headrace.core_log.config import LogConfig
from headrace.core_log.ids import StreamId, ViewId
from headrace.core_log.log import PartitionLog
from headrace.filtering.rules import TagRules
from headrace.filtering.tags import NO_TAGS, Tags
from headrace.gateways.delivery.attachment import Attachment
from headrace.gateways.delivery.logsettings import log_settings
from headrace.gateways.delivery.past import Past, StartOf
from headrace.gateways.delivery.queue import Queue, QueueSettings
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE, Fields, Route, Router, kind_of
from headrace.gateways.delivery.tagging import rules_of

if TYPE_CHECKING:
    from headrace.gateways.delivery.broker import Broker

# View ids from here on are ephemeral: they mean something only while this process lives.
EPHEMERAL_VIEWS = 1 << 31


class ReplyReceiver(Protocol):
    """Somebody who waits for direct answers under a name of its own."""

    def receive(self, properties: bytes, body: bytes) -> None: ...


class Target:
    """Where publishes with one exchange and key go: kept by publishers until the router says otherwise."""

    __slots__ = ("byte_limits", "exchange", "key", "log", "queues", "route", "route_set", "tags", "through")

    def __init__(
        self,
        exchange: str,
        key: bytes,
        route: Route[Queue],
        log: PartitionLog | None,
        queues: tuple[Queue, ...],
        through: tuple[StreamId, ...] = (),
        tags: Tags = NO_TAGS,
    ) -> None:
        self.exchange = exchange
        self.key = key
        self.route = route
        self.log = log
        self.queues = queues
        # Streams of the other exchanges that the route passes.
        self.through = through
        # What its records are tagged with: the publisher's tags, and those that rules give to the key.
        self.tags = tags
        self.route_set = tuple(sorted(queue.view_id for queue in queues))
        # Only queues with reject-publish have to be asked before an append.
        self.byte_limits = [queue for queue in queues if queue.settings.overflow != "drop-head"]

    def only(self, queues: tuple[Queue, ...]) -> "Target":
        """The same for some of its queues."""
        return Target(self.exchange, self.key, self.route, self.log, queues, self.through, self.tags)


class VirtualHost:
    def __init__(self, broker: "Broker", name: str) -> None:
        self.name = name
        self.queues: dict[str, Queue] = {}
        self.router: Router[Queue] = Router(self.queues.get, name_of=lambda queue: queue.name)
        # Direct reply-to: who may be answered, by name. In memory only, as the answers are.
        self.replies: dict[str, ReplyReceiver] = {}
        self._broker = broker
        self._streams: dict[str, StreamId] = {}
        # What exchanges tag by the keys of their records, where a policy says so.
        self._rules: dict[str, TagRules] = {}
        # Exclusive queues by the connection that owns them.
        self._owned: dict[object, dict[Queue, None]] = {}
        self._topology = trio.Lock()
        # One binding to the past at a time.
        self._attaching = trio.Lock()
        self._closed = False

    # -- loading ------------------------------------------------------------------------------------------------

    def load(self, snapshot: Snapshot) -> None:
        """Everything durable, as the store has it."""
        for (vhost, name), exchange in snapshot.exchanges.items():
            if vhost == self.name and name != DEFAULT_EXCHANGE:
                self._put_exchange(exchange, durable=True)
        for (vhost, _name), found in snapshot.queues.items():
            if vhost == self.name:
                self._put_queue(
                    self._broker.new_queue(
                        self,
                        found.name,
                        int(found.view),
                        found.stream,
                        self._broker.settings_of(self.name, found.name, found.arguments),
                        durable=True,
                        arguments=found.arguments,
                        auto_delete=found.auto_delete,
                    )
                )
        for (vhost, _source), bindings in snapshot.bindings_from.items():
            if vhost == self.name:
                for binding in bindings.values():
                    self._bind(binding)

    def _put_exchange(self, exchange: ExchangeEntity, *, durable: bool) -> None:
        self._streams[exchange.name] = exchange.stream
        self._broker.exchange_names[exchange.stream] = exchange.name.encode()
        self.router.put_exchange(
            exchange.name,
            kind_of(exchange.kind, exchange.arguments),
            durable=durable,
            auto_delete=exchange.auto_delete,
            internal=exchange.internal,
            alternate=self._alternate(exchange.name, exchange.arguments),
            arguments=exchange.arguments,
            declared_type=exchange.kind,
        )
        self._apply_rules(exchange.name)

    def _apply_rules(self, exchange: str) -> None:
        before = self._rules.pop(exchange, None)
        rules = rules_of(self._broker.exchange_policy(self.name, exchange))
        if rules is not None:
            self._rules[exchange] = rules
        if rules is not before:
            self.router.exchange_changed(exchange)

    def _alternate(self, exchange: str, arguments: Table) -> str | None:
        """Its argument says, else its policy."""
        for table in (arguments, self._broker.exchange_policy(self.name, exchange)):
            alternate = table.get("alternate-exchange")
            if isinstance(alternate, str):
                return alternate
        return None

    def apply_policies(self) -> None:
        """The policies have changed: so may what every queue and exchange does."""
        for queue in list(self.queues.values()):
            settings = self._broker.settings_of(self.name, queue.name, queue.arguments)
            if settings != queue.settings:
                self._broker.apply(self, queue, settings)
                self.router.queue_changed(queue)
        for found in self.router.exchanges():
            if found.name == DEFAULT_EXCHANGE:
                continue
            self._apply_rules(found.name)
            alternate = self._alternate(found.name, found.arguments)
            if alternate != found.alternate:
                self.router.put_exchange(
                    found.name,
                    found.kind,
                    durable=found.durable,
                    auto_delete=found.auto_delete,
                    internal=found.internal,
                    alternate=alternate,
                    arguments=found.arguments,
                    declared_type=found.declared_type,
                )
        self.configure_logs()

    def configure_logs(self) -> None:
        """The logs of exchanges are kept as their arguments and policies say now; those of queues likewise."""
        for found in self.router.exchanges():
            if found.name != DEFAULT_EXCHANGE:
                self._broker.configure(self._streams[found.name], partial(self.exchange_config, found.name))
        for queue in self.queues.values():
            self._broker.configure(queue.stream_id, partial(self._broker.own_config, queue))

    def exchange_config(self, exchange: str) -> LogConfig:
        """How the log of an exchange is kept."""
        found = self.router.exchange(exchange)
        arguments = EMPTY if found is None else found.arguments
        return self._broker.log_config(log_settings(arguments, self._broker.exchange_policy(self.name, exchange)))

    def close(self) -> None:
        """The vhost was deleted: what is in it is let go of. Its connections are closed by their doors."""
        self._closed = True
        for queue in list(self.queues.values()):
            self._forget_queue(queue)
        for stream in self._streams.values():
            self._broker.retire(stream)
        self._streams.clear()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise NotFound(f"no vhost '{self.name}'")

    def _put_queue(self, queue: Queue) -> None:
        self.queues[queue.name] = queue
        if queue.owner is not None:
            self._owned.setdefault(queue.owner, {})[queue] = None
        self.router.put_queue(queue)

    def _bind(self, binding: BindingEntity) -> None:
        if binding.destination_kind is DestinationKind.QUEUE:
            queue = self.queues[binding.destination]
            self.router.bind_queue(binding.source, queue, binding.routing_key, binding.arguments)
        else:
            self.router.bind_exchange(binding.source, binding.destination, binding.routing_key, binding.arguments)

    async def _commit(self, change: Change) -> None:
        """Not to be cancelled: what is in the store must be here too, whoever has left meanwhile."""
        with trio.CancelScope(shield=True):
            await self._broker.metadata.commit(change)

    # -- exchanges ----------------------------------------------------------------------------------------------

    async def declare_exchange(
        self, name: str, kind: str, *, durable: bool, auto_delete: bool, internal: bool, arguments: Table = EMPTY
    ) -> None:
        """A new exchange. The caller has compared with one that may exist."""
        try:
            kind_of(kind, arguments)
        except ValueError:
            raise Invalid(f"unknown exchange type '{kind}'") from None
        async with self._topology:
            self._check_open()
            if self.router.exchange(name) is not None:
                return
            entity = ExchangeEntity(
                vhost=self.name,
                name=name,
                kind=kind,
                stream=self._broker.metadata.new_stream(),
                auto_delete=auto_delete,
                internal=internal,
                arguments=arguments,
            )
            if durable:
                await self._commit(PutExchange(entity))
            self._put_exchange(entity, durable=durable)

    async def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        async with self._topology:
            found = self.router.exchange(name)
            if found is None:
                return
            if if_unused and not self.router.is_unused(name):
                raise InUse(f"exchange '{name}' in vhost '{self.name}' in use")
            await self._remove_exchange(name, durable=found.durable)

    async def _remove_exchange(self, name: str, *, durable: bool) -> None:
        stream = self._streams.pop(name)
        self._rules.pop(name, None)
        if durable:
            await self._commit(DeleteExchange(self.name, name, stream))
        left_over = self.router.remove_exchange(name)
        self._broker.retire(stream)
        for other in left_over:
            await self._auto_delete_exchange(other)

    async def _auto_delete_exchange(self, name: str) -> None:
        found = self.router.exchange(name)
        if found is not None and found.auto_delete and self.router.is_unused(name):
            await self._remove_exchange(name, durable=found.durable)

    # -- queues -------------------------------------------------------------------------------------------------

    def queue(self, name: str) -> Queue:
        found = self.queues.get(name)
        if found is None:
            raise NotFound(f"no queue '{name}' in vhost '{self.name}'")
        return found

    async def declare_queue(
        self,
        name: str,
        settings: QueueSettings,
        *,
        durable: bool,
        auto_delete: bool = False,
        owner: object = None,
        user: str = "",
        arguments: Table = EMPTY,
    ) -> Queue:
        """A new queue, or the one that somebody declared meanwhile."""
        async with self._topology:
            self._check_open()
            found = self.queues.get(name)
            if found is not None:
                return found
            limit = self._broker.queues_max(self.name)
            if limit is not None and len(self.queues) >= limit:
                raise LimitReached(
                    f"cannot declare queue '{name}': queue limit in vhost '{self.name}' ({limit}) is reached"
                )
            metadata = self._broker.metadata
            stream = metadata.new_stream()
            kept = durable and owner is None
            if kept:
                view = metadata.new_view()
                await self._commit(
                    PutQueue(
                        QueueEntity(
                            vhost=self.name,
                            name=name,
                            view=view,
                            stream=stream,
                            owner=user,
                            auto_delete=auto_delete,
                            arguments=arguments,
                        )
                    )
                )
            queue = self._broker.new_queue(
                self,
                name,
                int(view) if kept else self._broker.next_ephemeral_view(),
                stream,
                settings,
                durable=kept,
                declared_durable=durable,
                arguments=arguments,
                auto_delete=auto_delete,
                owner=owner,
            )
            self._put_queue(queue)
            return queue

    async def delete_queue(self, queue: Queue, only_if: Callable[[], bool] = lambda: True) -> int:
        """Gone, with its bindings and its own log; returns how many records were ready."""
        async with self._topology:
            if queue.deleted or not only_if():
                return 0
            if queue.durable:
                try:
                    await self._commit(DeleteQueue(self.name, queue.name, ViewId(queue.view_id)))
                except NotFound:
                    # The vhost went first, and took it along.
                    if not queue.deleted:
                        raise
            # The vhost may have gone meanwhile.
            return 0 if queue.deleted else await self._drop_queue(queue)

    async def delete_owned(self, owner: object) -> None:
        """A connection ends: so do its exclusive queues."""
        for queue in list(self._owned.get(owner, ())):
            await self.delete_queue(queue)

    async def _drop_queue(self, queue: Queue) -> int:
        count = queue.ready_count
        for exchange in self._forget_queue(queue):
            await self._auto_delete_exchange(exchange)
        return count

    def _forget_queue(self, queue: Queue) -> Sequence[str]:
        """Returns the auto-delete exchanges that are left without bindings."""
        queue.deleted = True
        del self.queues[queue.name]
        if queue.owner is not None:
            owned = self._owned[queue.owner]
            del owned[queue]
            if not owned:
                del self._owned[queue.owner]
        left_over = self.router.remove_queue(queue)
        for consumer in [*queue.consumers, *queue.readers]:
            consumer.cancel()
        queue.consumers.clear()
        queue.readers.clear()
        self._broker.forget(queue)
        return left_over

    # -- bindings -----------------------------------------------------------------------------------------------

    async def bind(self, binding: BindingEntity) -> None:
        """Raises NotFound for ends that are not there. Routed with when this returns."""
        async with self._topology:
            durable = self._check_ends(binding)
            self.router.check_filter(binding.source, binding.arguments)
            if durable:
                await self._commit(PutBinding(binding))
            self._bind(binding)

    async def bind_from(self, binding: BindingEntity, start_of: StartOf) -> None:
        """The same for a queue, with what was published before; Invalid for exchanges whose past cannot be given."""
        async with self._attaching:
            self._check_ends(binding)
            exchange, queue = self.router.exchange(binding.source), self.queues[binding.destination]
            stream_id = self._streams[binding.source]
            source = self._broker.maybe_log(stream_id)
            if source is None or exchange is None:
                await self.bind(binding)
                return
            known = next((one for one in queue.attached if _is_of(one, stream_id, binding)), None)
            attachment = known or Attachment(stream_id, binding.routing_key, binding.arguments)
            past = Past(
                queue,
                exchange,
                source,
                self._broker.own_log(queue, self.name) if queue.durable else self._broker.transient_log,
                attachment,
                start_of(source),
                fields_of=self._broker.fields_of,
                now_us=self._broker.env.clock.wall_us(),
            )
            with self._broker.holding(past):
                await past.copy_most(self._broker.appended)
                async with self._topology:
                    durable = self._check_ends(binding)
                    if queue.deleted or self._streams[binding.source] != stream_id:
                        raise NotFound(f"queue or exchange went while '{queue.name}' was bound to '{binding.source}'")
                    past.finish()
                    if known is None:
                        queue.attached.append(attachment)
                    is_new = self.router.bind_queue(binding.source, queue, binding.routing_key, binding.arguments)
                    self._broker.appended(past.target)
                    self._broker.note_change(queue)
                    self._broker.wake(queue)
                    try:
                        # What was attached is safe before the binding is: after a crash in between the next bind
                        # goes on from there.
                        await self._broker.write_journal()
                        if durable:
                            await self._commit(PutBinding(binding))
                    except BaseException:
                        if is_new and not queue.deleted:
                            self.router.unbind_queue(binding.source, queue, binding.routing_key, binding.arguments)
                        raise

    async def unbind(self, binding: BindingEntity) -> None:
        async with self._topology:
            if self.router.exchange(binding.source) is None:
                return
            durable = self._check_ends(binding)
            known = self._broker.metadata.snapshot.bindings_of(self.name, binding.source)
            if durable and binding.key in known:
                await self._commit(DeleteBinding(binding))
            source, key, arguments = binding.source, binding.routing_key, binding.arguments
            if binding.destination_kind is DestinationKind.QUEUE:
                queue = self.queues[binding.destination]
                was_there = self.router.unbind_queue(source, queue, key, arguments)
                queue.attached = [one for one in queue.attached if not _is_of(one, self._streams[source], binding)]
                self._broker.note_change(queue)
            else:
                was_there = self.router.unbind_exchange(source, binding.destination, key, arguments)
            if was_there:
                await self._auto_delete_exchange(source)

    def _check_ends(self, binding: BindingEntity) -> bool:
        """True if both ends are durable, and so is the binding."""
        source = self.router.exchange(binding.source)
        if source is None:
            raise NotFound(f"no exchange '{binding.source}' in vhost '{self.name}'")
        if binding.destination_kind is DestinationKind.QUEUE:
            return source.durable and self.queue(binding.destination).durable
        destination = self.router.exchange(binding.destination)
        if destination is None:
            raise NotFound(f"no exchange '{binding.destination}' in vhost '{self.name}'")
        return source.durable and destination.durable

    # -- publishing ---------------------------------------------------------------------------------------------

    def target(
        self,
        exchange: str,
        key: bytes,
        keys: Sequence[str],
        headers: Fields = None,
        properties: Fields = None,
        tags: Tags = NO_TAGS,
    ) -> Target:
        """Where a publish goes, and with which tags: those of the publisher (checked, as filtering/tags.py collects
        them) and those that rules give. Raises NotFound for an exchange that is not there."""
        rules = self._rules.get(exchange)
        if rules is not None:
            given = rules.tags_of(keys[0])
            tags = tuple(sorted({*given, *tags})) if tags else given
        route = self.router.route(exchange, keys, headers, properties, tags)
        through = tuple(self._streams[name] for name in route.through if name in self._streams)
        return Target(exchange, key, route, self._log_for(exchange, route.queues), route.queues, through, tags)

    def now(self, target: Target) -> Target:
        """For a publish that waited for its commit: the queues it was routed to, without those that are gone since."""
        if self.is_current(target):
            return target
        queues = tuple(queue for queue in target.queues if not queue.deleted)
        exchange = target.exchange if target.exchange in self._streams else DEFAULT_EXCHANGE
        log = self._log_for(exchange, queues)
        return Target(target.exchange, target.key, target.route, log, queues, target.through, target.tags)

    def _log_for(self, exchange: str, queues: Sequence[Queue]) -> PartitionLog | None:
        """The log that holds a publish: the exchange's, or for the default exchange a queue's own."""
        if exchange != DEFAULT_EXCHANGE:
            return self.exchange_log(exchange)
        for queue in queues:
            if queue.durable:
                return self._broker.own_log(queue, self.name)
        return self._broker.transient_log if queues else None

    def exchange_stream(self, name: str) -> StreamId | None:
        """The stream of an exchange; None if there is no such exchange."""
        return self._streams.get(name)

    def exchange_log(self, name: str) -> PartitionLog:
        """The log of an exchange, made if nothing was ever published to it."""
        config_of = partial(self.exchange_config, name)
        return self._broker.log_of(self._streams[name], name, "exchange", self.name, config_of)

    def is_current(self, target: Target) -> bool:
        return self.router.is_current(target.route)

    def bindings(self) -> Mapping[str, int]:
        """How many bindings each exchange has, for those who look."""
        return {one.name: len(self.router.bindings_from(one.name)) for one in self.router.exchanges()}


def _is_of(attachment: Attachment, stream_id: UUID, binding: BindingEntity) -> bool:
    return (attachment.stream, attachment.key, attachment.arguments) == (
        stream_id,
        binding.routing_key,
        binding.arguments,
    )
