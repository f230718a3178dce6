"""The whole of delivery on one node: virtual hosts, views and their journal, publishing. Driver.

The way of a publish: door -> VirtualHost.target (route) -> Broker.publish (append, tell the views) -> dispatch at the
end of the door's turn -> committer -> confirm. The way of a settlement: door -> Queue.settle -> `__views`, written in
groups a few times a second and never before the log has passed the records it speaks of (K3).
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nlargest
from uuid import UUID

import trio

from headrace.controller.changes import Change, DeletePolicy, DeleteVhost, PutPolicy, PutVhost
from headrace.controller.entities import Policy
from headrace.controller.errors import NotFound
from headrace.controller.metadata import Metadata
from headrace.controller.policies import Resource
from headrace.controller.snapshot import Snapshot
from headrace.controller.table import EMPTY, Table
from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory, Stream
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog, Run
from headrace.core_log.outbox import Transfer
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, Headers, Producer, Protocol, RecordBatch
from headrace.core_log.spec import StreamSpec
from headrace.delay.config import DelayConfig
from headrace.gateways.delivery import journal
from headrace.gateways.delivery.alone import Alone
from headrace.gateways.delivery.audit import Audit
from headrace.gateways.delivery.delayed import Delayed
from headrace.gateways.delivery.delayed_duty import DutyKind
from headrace.gateways.delivery.expiry import Expiry
from headrace.gateways.delivery.lane import Extent, Lane, Stretch, spans_of
from headrace.gateways.delivery.logsettings import SEGMENT_BYTES_MIN, LogSettings
from headrace.gateways.delivery.past import FieldsOf
from headrace.gateways.delivery.ports import LogHolder, Source, Tap
from headrace.gateways.delivery.queue import Queue, QueueSettings, View
from headrace.gateways.delivery.reading import ReadingView
from headrace.gateways.delivery.redrive import Redrives
from headrace.gateways.delivery.release import Releases
from headrace.gateways.delivery.relocation import exchanges_of
from headrace.gateways.delivery.returns import Returns
from headrace.gateways.delivery.scanning import Scanning
from headrace.gateways.delivery.timers import Timers
from headrace.gateways.delivery.transfers import Move, Stamp, Transfers
from headrace.gateways.delivery.vhost import EPHEMERAL_VIEWS, Target, VirtualHost

_log = logging.getLogger(__name__)

JOURNAL_PERIOD_S = 0.2
STREAM_PERIOD_S = 1.0
CONFIGURE_RETRY_S = 5.0
ORPHANED_S = 24 * 3600.0
ORPHANS_PERIOD_S = 60.0
RELEASE_BYTES_MIN = 1 << 30
TRANSIENT_NAME = "__transient"
# What the delay engine parks and decides is nobody else's.
DELAY_PREFIX = "__delay."
TRANSIENT_CONFIG = LogConfig(
    durability="os", retention_ms=60_000, segment_ms_max=60_000, segment_bytes_max=16 * 1024 * 1024
)
VIEWS_CONFIG = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)

_RESOURCES = {"quorum": Resource.QUORUM_QUEUE, "stream": Resource.STREAM}

# Arguments and the effective policy of a queue -> its settings; the AMQP door knows the names.
SettingsOf = Callable[[Table, Table], QueueSettings]


# The properties of a record that was published over MQTT (key, properties, attributes), in the words that `Stamp` and
# `FieldsOf` read and AMQP's readers get.
Restate = Callable[[bytes, bytes, int], bytes]
_RESTATED = frozenset((int(Protocol.MQTT_3), int(Protocol.MQTT_5)))


def is_all_amqp(batch: RecordBatch) -> bool:
    """As nearly all batches are that AMQP's readers see. False: it must be looked at more closely."""
    values = batch.attributes.values
    return len(values) == 1 and values[0] & PROTOCOL_MASK == Protocol.AMQP


class Broker:
    def __init__(
        self,
        env: Env,
        directory: LogDirectory,
        metadata: Metadata,
        *,
        settings_of: SettingsOf,
        stamp: Stamp,
        clean: bool,
        log_config: LogConfig | None = None,
        release_bytes_min: int = RELEASE_BYTES_MIN,
        delay: DelayConfig | None = None,
        fields_of: FieldsOf = lambda properties: ({}, ()),
        restate: Restate = lambda key, properties, attributes: properties,
    ) -> None:
        self.env = env
        self.directory = directory
        self.metadata = metadata
        self.vhosts: dict[str, VirtualHost] = {}
        self.exchange_names: dict[UUID, bytes] = {}
        self.unroutable_count = 0
        self._settings_of = settings_of
        self.fields_of = fields_of
        self.restated = restate
        self._clean = clean
        self._loaded = False
        # The version of the metadata that was loaded.
        self._loaded_version = 0
        self._log_config = directory.replicated(log_config or LogConfig())
        self._views: dict[int, Queue] = {}
        self._dirty: dict[Queue, None] = {}
        self._dirty_logs: dict[PartitionLog, None] = {}
        # For each log, how far the journal knows who got what of it; retention takes nothing behind that.
        self._journalled_ends: dict[PartitionLog, int] = {}
        self._to_dispatch: dict[Queue, None] = {}
        self._next_ephemeral = EPHEMERAL_VIEWS
        self._retired: set[UUID] = set()
        # Streams that nobody names, and since when this leader knows of them.
        self._orphans: dict[UUID, float] = {}
        self._holders: set[LogHolder] = set()
        # For each durable queue, the lowest offset of each log that its last state in the journal speaks of: a crash
        # brings that state back, so its records must be there.
        self._kept: dict[Queue, dict[Source, int]] = {}
        # What is being written to the journal; somebody who gave up waiting leaves it to the next.
        self._draft: _Draft | None = None
        # Queues whose head is not visible yet, by the log that must be committed first.
        self._hidden: dict[PartitionLog, dict[Queue, None]] = {}
        # Called when something became ready outside of a door's turn.
        self.on_ready: Callable[[], None] = lambda: None
        self.releases = Releases(self, release_bytes_min)
        self._scanning = Scanning(self.wake, lambda: self.on_ready())
        # What leaves queues for other logs.
        self.transfers = Transfers(self, stamp)
        self.returns = Returns(self)
        # Who hears of every append to a log, besides its views.
        self.taps: dict[PartitionLog, Tap] = {}
        # Who publishes, while a door does so that marks no records with it; whoever listens may want to know.
        self.speaker = ""
        # Called for each log of an exchange or queue that is made: with its vhost, its kind and the name.
        self.log_made: Callable[[str, str, str], None] = lambda vhost, kind, name: None
        self.timers = Timers(env.clock)
        self._expiry = Expiry(self.timers, env.clock, self._expired)
        self.delayed = Delayed()
        self.delayed.open(env, directory, delay or DelayConfig())
        self.delayed.carry(DutyKind.RETRY, self.returns)
        self._running = trio.CancelScope()
        # Of `run`; None before it has begun.
        self._ended: trio.Event | None = None
        self._closed = False
        self._journal_lock = trio.Lock()
        self._wake = trio.Event()
        self._stream_came = trio.Event()
        # Streams whose settings have changed, and are not in their files yet.
        self._to_configure: dict[UUID, LogConfig] = {}
        self._configure_wake = trio.Event()
        self.transient_log = self._internal(TRANSIENT_NAME, TRANSIENT_CONFIG)
        # Logs that no view reads.
        self._private: set[PartitionLog] = set()
        self._views_log = self.private_log(journal.STREAM_NAME, VIEWS_CONFIG)
        self.audit = Audit(self)
        self.redrives = Redrives(self, self.audit)
        self.transient_log.advanced.append(self._advanced)
        self.exchange_names[self.transient_log.stream_id] = b""
        directory.pinned_from = self._pinned_from
        # How many queues a vhost may have; None: as many as it likes.
        self.queues_max: Callable[[str], int | None] = lambda vhost: None
        # Why nothing can be committed now, if nothing can: doors say so to publishers, and append nothing.
        self.unwritable: Callable[[], str | None] = lambda: None
        self.alone = Alone(self.wake, lambda: self.on_ready(), env.clock)

    # -- starting -----------------------------------------------------------------------------------------------

    def _internal(self, name: str, config: LogConfig) -> PartitionLog:
        for stream in self.directory.streams.values():
            if stream.spec.kind == "internal" and stream.spec.name == name:
                return stream.partitions[0]
        spec = StreamSpec(id=self.env.ids.uuid(), name=name, kind="internal", config=config)
        return self.directory.create_now(spec).partitions[0]

    def private_log(self, name: str, config: LogConfig) -> PartitionLog:
        """A log of the broker's own that holds no messages; made if it is not there. Before `load`."""
        log = self._internal(name, config)
        self._private.add(log)
        return log

    def leave_alone(self, logs: Iterable[PartitionLog]) -> None:
        """No view reads these: they are a topic's."""
        self._private.update(logs)

    def take_back(self, logs: Iterable[PartitionLog]) -> None:
        """These are gone."""
        self._private.difference_update(logs)

    async def load(self) -> None:
        """Bring every durable queue back with exactly its unsettled records, in order."""
        snapshot = self.metadata.snapshot
        self._loaded_version = snapshot.version
        for name in snapshot.vhosts:
            host = self.vhosts[name] = VirtualHost(self, name)
            host.load(snapshot)
        restored = await self.env.worker.run(lambda: journal.Restored(self._views_log.entries()))
        logs = {
            (stream.spec.id, log.partition): log
            for stream in self.directory.streams.values()
            for log in stream.partitions
            if log not in self._private and not stream.spec.name.startswith(DELAY_PREFIX)
        }
        leaving = []
        for view_id, state in restored.views.items():
            queue = self._views.get(view_id)
            if queue is not None:
                _restore(queue, state, restored.blocks.get(view_id, ()), logs)
                leaving += self.transfers.restore(queue, state, lambda stream, at: logs.get((UUID(bytes=stream), at)))
                self._kept[queue] = _lowest_offsets(queue)
        for queue in await self.env.worker.run(lambda: self._find_arrivals(restored, logs.values())):
            self.note_change(queue)
        for log in logs.values():
            self._journalled_ends[log] = restored.applied_to(log.stream_id, log.partition, 0)
            if self._journalled_ends[log] < log.end:
                self._dirty_logs[log] = None
                self._wake.set()
            if self._advanced not in log.advanced:
                log.advanced.append(self._advanced)
        if not self._clean:
            for queue in self._views.values():
                for lane in queue.lanes:
                    lane.delivered_below = lane.next_seq
        await self.env.worker.run(self._count_bytes)
        await self._drop_unneeded()
        for host in self.vhosts.values():
            host.configure_logs()
        await self.delayed.delays.load()
        self._loaded = True
        self.transfers.resume(leaving)
        await self.redrives.load()
        for queue in self._views.values():
            if queue.ready_count and (queue.timed or queue.settings.message_ttl_ms is not None):
                self._expiry.look_soon(queue)

    def _count_bytes(self) -> None:
        for queue in self._views.values():
            queue.count_bytes()

    def _find_arrivals(self, restored: journal.Restored, logs: Iterable[PartitionLog]) -> set[Queue]:
        """Records behind the journal's last word find their views again by the routes in their batches."""
        found: set[Queue] = set()
        # Readers rely on this order (history.py).
        first_logs = {queue: queue.history.last_source for queue in self._views.values()}
        for is_first in (True, False):
            for log in logs:
                offset = max(restored.applied_to(log.stream_id, log.partition, 0), log.log_start)
                for run in log.runs(offset):
                    for queue in self._views_in(run.batch):
                        if (first_logs[queue] is log) is is_first:
                            self._apply(log, run.batch, queue)
                            found.add(queue)
        return found

    def _views_in(self, batch: RecordBatch) -> Iterator[Queue]:
        for view_id in {one for route_set in batch.route_sets for one in route_set}:
            queue = self._views.get(view_id)
            if queue is not None and view_id < EPHEMERAL_VIEWS:
                yield queue

    def _apply(self, log: PartitionLog, batch: RecordBatch, queue: Queue) -> None:
        first = batch.index_of(queue.history.applied.get(log, 0))
        for low, high in spans_of(batch, first, batch.count, queue.view_id):
            queue.history.arrive(log, batch, low, high)
        for lane in queue.lanes:
            first = batch.index_of(lane.applied.get(log, 0))
            for low, high in lane.spans(batch, first, batch.count):
                lane.extend(log, high - low, batch.base_offset + low, batch.base_offset + high)
                queue.timed = queue.timed or any(batch.expiries.values)

    async def _drop_unneeded(self) -> None:
        """Streams of exchanges that were not durable are deleted, unless a queue still wants something of them. In a
        cluster nothing is deleted because nobody mentions it (E8): its metadata may have been set back, and what they
        forgot is put back a moment later. Such streams are orphans for a day first."""
        known = self._known_streams()
        needed = self._needed_streams()
        for stream in list(self.directory.streams.values()):
            if stream.spec.kind in ("exchange", "queue") and stream.spec.id not in known:
                if self.directory.config.replica_count > 1:
                    self._orphans[stream.spec.id] = self.env.clock.monotonic()
                elif stream.spec.id in needed:
                    self._retired.add(stream.spec.id)
                else:
                    await self._delete_stream(stream)
            if stream.spec.kind == "exchange":
                self.exchange_names.setdefault(stream.spec.id, stream.spec.name.encode())

    def _known_streams(self) -> set[UUID]:
        """Those that an exchange or a queue of the metadata has."""
        snapshot = self.metadata.snapshot
        known = {exchange.stream for exchange in snapshot.exchanges.values()}
        return known | {queue.stream for queue in snapshot.queues.values()}

    def _needed_streams(self) -> set[UUID]:
        """Streams that hold something which a queue has not settled, a stream keeps or a reader is at."""
        sources: set[Source] = set()
        for queue in self._views.values():
            sources.update(_lowest_offsets(queue), self._kept.get(queue, ()))
            for reader in queue.readers.values():
                sources.update(reader.lane.lowest_offsets())
            if queue.settings.stream:
                sources |= queue.history.sources
        for holder in self._holders:
            sources.update(holder.pins)
        return {source.stream_id for source in sources}

    def views_of(self, log: PartitionLog) -> list[tuple[str, Queue]]:
        """Queues that have taken records of a log, each with the name of its vhost."""
        return [
            (host.name, queue)
            for host in self.vhosts.values()
            for queue in host.queues.values()
            if any(log in lane.applied for lane in queue.lanes)
        ]

    def pinned_bytes(self, queue: Queue) -> int:
        """What the logs hold because of a queue: from the first record on that it needs."""
        lowest = _lowest_offsets(queue)
        if queue.settings.stream:
            found = ((source, queue.history.lowest_offset(source)) for source in queue.history.sources)
            lowest = {source: offset for source, offset in found if offset is not None}
        return sum(log.bytes_from(offset) for log, offset in lowest.items() if isinstance(log, PartitionLog))

    def largest_holders(self, count: int) -> list[tuple[int, str, str]]:
        """(bytes, vhost, queue) of those that pin most, the largest first."""
        found = [
            (self.pinned_bytes(queue), host.name, queue.name)
            for host in self.vhosts.values()
            for queue in host.queues.values()
        ]
        return nlargest(count, (one for one in found if one[0]))

    def has_view(self, view_id: int) -> bool:
        return view_id in self._views

    @contextmanager
    def holding(self, holder: LogHolder) -> Iterator[None]:
        """Retention leaves alone what somebody is at work on."""
        self._holders.add(holder)
        try:
            yield
        finally:
            self._holders.remove(holder)

    async def _delete_stream(self, stream: Stream) -> None:
        for log in stream.partitions:
            self._dirty_logs.pop(log, None)
            self._journalled_ends.pop(log, None)
            for queue in self._views.values():
                for lane in queue.lanes:
                    lane.applied.pop(log, None)
                queue.attached = [one for one in queue.attached if one.stream != log.stream_id]
                if log in queue.history.applied:
                    queue.history.forget_source(log)
                    self.note_change(queue)
        self.exchange_names.pop(stream.spec.id, None)
        self.transfers.forget_stream(stream.spec.id)
        await self.directory.delete_stream(stream)

    # -- queues -------------------------------------------------------------------------------------------------

    def settings_of(self, vhost: str, name: str, arguments: Table) -> QueueSettings:
        return self._settings_of(arguments, self.queue_policy(vhost, name, arguments))

    def queue_policy(self, vhost: str, name: str, arguments: Table) -> Table:
        """What the effective policy says; nothing if there is none."""
        policy = self.effective_policy(vhost, name, arguments)
        return EMPTY if policy is None else policy.definition

    def effective_policy(self, vhost: str, name: str, arguments: Table) -> Policy | None:
        """The one policy that applies to a queue with these arguments."""
        kind = arguments.get("x-queue-type")
        resource = _RESOURCES.get(kind, Resource.CLASSIC_QUEUE) if isinstance(kind, str) else Resource.CLASSIC_QUEUE
        return self.metadata.snapshot.effective_policy(vhost, name, resource)

    def exchange_policy(self, vhost: str, name: str) -> Table:
        policy = self.metadata.snapshot.effective_policy(vhost, name, Resource.EXCHANGE)
        return EMPTY if policy is None else policy.definition

    def follow_metadata(self) -> None:
        """Hear of changes from now on, and take up those that came while this was loading: in a cluster others make
        them too."""
        snapshot = self.metadata.snapshot
        for name in snapshot.vhosts:
            if name not in self.vhosts:
                self.vhosts[name] = VirtualHost(self, name)
                self.vhosts[name].load(snapshot)
        for name in [name for name in self.vhosts if name not in snapshot.vhosts]:
            self.vhosts.pop(name).close()
        if snapshot.version != self._loaded_version:
            for host in self.vhosts.values():
                host.apply_policies()
        self.metadata.listen(self.metadata_changed)

    def metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        """Vhosts come and go, and policies change what exists. Exchanges, queues and bindings are changed by the vhosts
        themselves, which know of it when they are told that it is durable."""
        with_new_policies: dict[str, None] = {}
        for change in changes:
            match change:
                case PutVhost(vhost) if vhost.name not in self.vhosts and vhost.name in snapshot.vhosts:
                    self.vhosts[vhost.name] = VirtualHost(self, vhost.name)
                    self.vhosts[vhost.name].load(snapshot)
                case DeleteVhost(name) if name in self.vhosts:
                    self.vhosts.pop(name).close()
                case PutPolicy(policy):
                    with_new_policies[policy.vhost] = None
                case DeletePolicy(name, _policy):
                    with_new_policies[name] = None
                case _:
                    pass
        for name in with_new_policies:
            if name in self.vhosts:
                self.vhosts[name].apply_policies()
                self.on_ready()

    def apply(self, host: VirtualHost, queue: Queue, settings: QueueSettings) -> None:
        """A queue gets other settings: its limits and times count from now on."""
        before = queue.settings
        queue.apply(settings)
        if settings.expires_ms != before.expires_ms:
            self._expiry.lease(queue, host.delete_queue)
        self._to_dispatch[queue] = None

    def new_queue(
        self,
        host: VirtualHost,
        name: str,
        view_id: int,
        stream_id: StreamId,
        settings: QueueSettings,
        *,
        durable: bool,
        arguments: Table = EMPTY,
        auto_delete: bool = False,
        owner: object = None,
        declared_durable: bool | None = None,
    ) -> Queue:
        queue = Queue(
            name,
            view_id,
            settings,
            durable=durable,
            transfer=lambda one, stretch, reason: self.transfers.let_go(host, one, stretch, reason),
            changed=self.note_change,
            now_us=self.env.clock.wall_us,
            stream_id=stream_id,
            arguments=arguments,
            auto_delete=auto_delete,
            owner=owner,
            key_at=self._key_at,
        )
        queue.declared_durable = durable if declared_durable is None else declared_durable
        self._views[view_id] = queue
        if settings.stream:
            self._stream_came.set()
        self._expiry.lease(queue, host.delete_queue)
        return queue

    def _key_at(self, batch: RecordBatch, index: int) -> bytes:
        """The header `x-key` of a record, else its routing key."""
        properties = batch.properties[index]
        # Nearly all have none, and are not decoded.
        if b"x-key" in properties:
            (restated,) = self.properties_of(batch, index, index + 1)
            found = self.fields_of(restated)[0].get("x-key")
            if found is not None:
                return found if isinstance(found, bytes) else str(found).encode("utf-8", "surrogateescape")
        return batch.keys[index]

    def properties_of(self, batch: RecordBatch, first: int, last: int) -> list[bytes]:
        """The properties of records as AMQP has them, whichever door they came through."""
        found = batch.properties[first:last]
        if is_all_amqp(batch):
            return found
        for value, low, high in batch.attributes.spans(first, last):
            if value & PROTOCOL_MASK in _RESTATED:
                keys = batch.keys
                for index in range(low, high):
                    found[index - first] = self.restated(keys[index], batch.properties[index], value)
        return found

    def next_ephemeral_view(self) -> int:
        self._next_ephemeral += 1
        return self._next_ephemeral

    def forget(self, queue: Queue) -> None:
        """A queue is gone: its own log is dropped, and the journal no longer speaks of it."""
        self._views.pop(queue.view_id, None)
        self._kept.pop(queue, None)
        self._dirty.pop(queue, None)
        self._to_dispatch.pop(queue, None)
        self._expiry.forget(queue)
        self.transfers.forget(queue)
        if queue.durable:
            for number in queue.history.blocks:
                self._append_entry(journal.block_key(queue.view_id, number), b"")
            self._append_view(queue.view_id, b"")
            self.directory.committer.lazy(self._views_log)
            self.retire(queue.stream_id)

    def retire(self, stream_id: UUID) -> None:
        """Nothing is appended to this stream any more; it goes when no view needs it."""
        if stream_id in self.directory.streams:
            self._retired.add(stream_id)
            self._wake.set()
        else:
            self.exchange_names.pop(stream_id, None)

    def note_change(self, queue: Queue) -> None:
        if queue.durable:
            if not self._dirty:
                self._wake.set()
            self._dirty[queue] = None

    # -- publishing ---------------------------------------------------------------------------------------------

    def own_log(self, queue: Queue, vhost: str) -> PartitionLog:
        """The log of a queue, for what is published to it by the default exchange."""
        return self.log_of(queue.stream_id, queue.name, "queue", vhost, partial(self.own_config, queue))

    def own_config(self, queue: Queue) -> LogConfig:
        """How a queue's own log is kept."""
        config = self.log_config(queue.settings.log)
        if not queue.settings.stream:
            return config
        # What a stream keeps is decided by its history, which this log follows (_keep_streams).
        bytes_max = queue.settings.length_bytes_max
        segment = config.segment_bytes_max if bytes_max is None else max(bytes_max // 4, SEGMENT_BYTES_MIN)
        return replace(
            config, retention_ms=None, retention_bytes=None, segment_bytes_max=min(config.segment_bytes_max, segment)
        )

    def log_config(self, asked: LogSettings) -> LogConfig:
        return asked.over(self._log_config)

    def configure(self, stream_id: UUID, config_of: Callable[[], LogConfig]) -> None:
        """A stream is kept so from now on, if there is one. Its file follows; at a start the metadata decide."""
        stream = self.directory.streams.get(stream_id)
        if stream is None or (config := config_of()) == stream.partitions[0].config:
            return
        for log in stream.partitions:
            log.config = config
        self._to_configure[stream_id] = config
        self._configure_wake.set()
        _log.info(
            "a stream is kept otherwise",
            extra={
                "stream": stream.spec.name,
                "kind": stream.spec.kind,
                "vhost": stream.spec.vhost,
                "durability": config.durability,
                "compression": config.compression,
                "retention_ms": config.retention_ms,
                "retention_bytes": config.retention_bytes,
            },
        )

    async def _keep_configs(self) -> None:
        """Write down how streams are kept, for those who look at them without the broker."""
        while True:
            await self._configure_wake.wait()
            self._configure_wake = trio.Event()
            try:
                await self._write_configs()
            except DiskFull:
                await self.env.clock.sleep(CONFIGURE_RETRY_S)
                self._configure_wake.set()

    async def _write_configs(self) -> None:
        while self._to_configure:
            stream_id, config = next(iter(self._to_configure.items()))
            stream = self.directory.streams.get(stream_id)
            if stream is not None:
                await self.directory.configure_stream(stream, config)
                for log in stream.partitions:
                    # It may have changed again meanwhile.
                    log.config = self._to_configure[stream_id]
            if self._to_configure[stream_id] == config:
                del self._to_configure[stream_id]

    def maybe_log(self, stream_id: UUID) -> PartitionLog | None:
        """The log of a stream, if anything was ever written to it."""
        stream = self.directory.streams.get(stream_id)
        return None if stream is None else stream.partitions[0]

    def log_of(
        self, stream_id: StreamId, name: str, kind: str, vhost: str, config_of: Callable[[], LogConfig]
    ) -> PartitionLog:
        """The log of an exchange or queue, made when it is first written to."""
        stream = self.directory.streams.get(stream_id)
        if stream is None:
            spec = StreamSpec(
                id=stream_id,
                name=name,
                kind=kind,
                vhost=vhost,
                created_us=self.env.clock.wall_us(),
                config=config_of(),
            )
            stream = self.directory.create_now(spec)
            self.log_made(vhost, kind, name)
            self._journalled_ends[stream.partitions[0]] = 0
        log = stream.partitions[0]
        if self._advanced not in log.advanced:
            log.advanced.append(self._advanced)
        return log

    def publish(
        self,
        target: Target,
        properties: Sequence[bytes],
        bodies: Sequence[bytes],
        *,
        attributes: int,
        expiry_us: int = 0,
        keys: Sequence[bytes] | None = None,
        origin: int | Sequence[int] = 0,
        headers: Sequence[Headers] | None = None,
    ) -> int | None:
        """Append records that share target, attributes and expiry; the views hear of them at once.

        Returns the offset that a commit must pass before they may be confirmed, or None: there was nothing to keep.
        Consumers get theirs with `dispatch`.
        """
        log = target.log
        count = len(bodies)
        if not target.queues:
            self.unroutable_count += count
            if log is None:
                return None
        assert log is not None
        appended = log.append(
            [target.key] * count if keys is None else keys,
            properties,
            bodies,
            timestamp_us=self.env.clock.wall_us(),
            attributes=attributes,
            expiry_us=expiry_us,
            route_set=target.route_set,
            origin=origin,
            tags=target.tags,
            headers=headers,
        )
        assert appended.run is not None
        self._arrived(target, log, appended.run, expiry_us)
        self._to_commit(log, attributes)
        return int(appended.next_offset)

    def publish_once(
        self,
        target: Target,
        producer: Producer,
        properties: Sequence[bytes],
        bodies: Sequence[bytes],
        *,
        attributes: int,
        expiry_us: int = 0,
    ) -> int | None:
        """The same for an idempotent producer's next numbers: what was published before is not published again.

        Raises SequenceRefused, with nothing published, when one of them may not be confirmed.
        """
        log = target.log
        if not target.queues:
            self.unroutable_count += len(bodies)
        if log is None:
            return None
        before = log.end
        try:
            appended = log.append_once(
                producer,
                [target.key] * len(bodies),
                properties,
                bodies,
                timestamp_us=self.env.clock.wall_us(),
                attributes=attributes,
                expiry_us=expiry_us,
                route_set=target.route_set,
                tags=target.tags,
            )
        except DiskFull:
            # Some may have been taken, and will count as published when they are sent again.
            while before < log.end:
                for run in log.read(before, end=log.end):
                    self._arrived(target, log, run, expiry_us)
                    before = run.batch.next_offset
            raise
        for one in appended:
            if one.run is not None:
                self._arrived(target, log, one.run, expiry_us)
        self._to_commit(log, attributes)
        return int(appended[-1].next_offset)

    def publish_dense(
        self,
        target: Target,
        producer: Producer,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        bodies: Sequence[bytes],
        *,
        settled: int,
        attributes: int,
        expiry_us: int = 0,
        origin: int = 0,
        headers: Sequence[Headers] | None = None,
        timestamp_us: int | None = None,
    ) -> int:
        """The same for the next numbers of an outbox, whose target has a log (core_log/outbox.py)."""
        log = target.log
        assert log is not None
        appended = log.append_dense(
            producer,
            keys,
            properties,
            bodies,
            settled=settled,
            timestamp_us=self.env.clock.wall_us() if timestamp_us is None else timestamp_us,
            attributes=attributes,
            expiry_us=expiry_us,
            route_set=target.route_set,
            origin=origin,
            tags=target.tags,
            headers=headers,
        )
        if appended.run is not None:
            if not target.queues:
                self.unroutable_count += appended.run.last - appended.run.first
            self._arrived(target, log, appended.run, expiry_us)
        self._to_commit(log, attributes)
        return int(appended.next_offset)

    def _arrived(self, target: Target, log: PartitionLog, run: Run, expiry_us: int) -> None:
        to_dispatch = self._to_dispatch
        for queue in target.queues:
            queue.arrive(log, run.batch, run.first, run.last)
            if expiry_us:
                queue.timed = True
            to_dispatch[queue] = None
        self._note_written(log)
        tap = self.taps.get(log)
        if tap is not None:
            tap.take(run.batch, run.first, run.last)
        if target.through:
            self._relay(target, run)

    def _note_written(self, log: PartitionLog) -> None:
        """The journal will say that everybody has got theirs of it: retention waits for that."""
        if log not in self._dirty_logs:
            self._dirty_logs[log] = None
            self._wake.set()

    def _relay(self, target: Target, run: Run) -> None:
        """Who listens to an exchange's log gets also what reaches it by way of another exchange: as a copy in that
        log, where those who come later look for it."""
        batch, first, last = run
        # Whose right it was to publish to another exchange says nothing of this one.
        self.speaker = ""
        for stream_id in target.through:
            log = self.maybe_log(stream_id)
            tap = None if log is None else self.taps.get(log)
            if log is None or tap is None or not tap.wants_copies:
                continue
            attributes = batch.attributes.at(first)
            copied = log.append(
                batch.keys[first:last],
                batch.properties[first:last],
                batch.values[first:last],
                timestamp_us=batch.timestamps.at(first),
                attributes=attributes,
                expiry_us=batch.expiries.at(first),
                origin=batch.origins.at(first),
                tags=batch.tags_at(first),
            )
            assert copied.run is not None
            self._note_written(log)
            tap.take(*copied.run)
            self._to_commit(log, attributes)

    def is_heard(self, target: Target) -> bool:
        """Whether anybody gets what is published to this target now: a queue, or somebody who listens."""
        if target.queues:
            return True
        logs = [target.log, *(self.maybe_log(stream_id) for stream_id in target.through)]
        taps = [self.taps[log] for log in logs if log is not None and log in self.taps]
        return any(tap.wants(target.key, target.tags) for tap in taps)

    def _to_commit(self, log: PartitionLog, attributes: int) -> None:
        if attributes & PERSISTENT:
            self.directory.committer.urgent(log)
        else:
            self.directory.committer.lazy(log)

    def appended(self, log: PartitionLog) -> None:
        """Somebody appended to a log other than by a publish, and will wait for it."""
        self._note_written(log)
        self.directory.committer.urgent(log)

    def exchanges_of(self, stretch: Stretch) -> Sequence[bytes]:
        """The exchange that each record of a stretch was published to."""
        otherwise = self.exchange_names.get(stretch.source.stream_id, b"")
        return exchanges_of(stretch.loaded(), stretch.index, stretch.index + stretch.count, otherwise)

    def wake(self, view: View) -> None:
        """Its consumers have room again, or changed: dispatch it with the next turn."""
        self._to_dispatch[view.queue if isinstance(view, ReadingView) else view] = None

    def touch(self, queue: Queue) -> None:
        """A queue is in use: its expiry starts anew, and its head may be another after this turn."""
        self._expiry.touch(queue)
        if queue.timed:
            self._to_dispatch[queue] = None

    async def committed(self) -> None:
        """Everything published or parked so far is safe when this returns."""
        intake = self.delayed.delays.intake
        await self.wait_committed(intake, intake.end)
        for log in list(self._dirty_logs):
            await self.wait_committed(log, log.end)

    def dispatch(self) -> None:
        """Hand out what arrived since the last call, then keep the length limits."""
        while self._to_dispatch and not self._closed:
            queues, self._to_dispatch = self._to_dispatch, {}
            for queue in queues:
                if queue.consumers and not self.alone.holds(queue):
                    queue.dispatch()
                    self._note_hidden(queue)
                    if queue.is_unfinished:
                        self._scanning.add(queue)
                if queue.readers:
                    for reader in list(queue.readers.values()):
                        reader.dispatch()
                        if reader.is_unfinished:
                            self._scanning.add(queue)
                    self._note_hidden(queue)
                queue.keep_limits()
                if queue.timed or queue.settings.message_ttl_ms is not None:
                    self._watch_head(queue)

    def _watch_head(self, queue: Queue) -> None:
        self._expiry.watch_head(queue)
        if queue.ready_count:
            self._note_hidden(queue)
        elif not queue.unacked_count:
            queue.timed = False

    def _expired(self, queue: Queue) -> None:
        self._to_dispatch[queue] = None
        self.on_ready()

    def _note_hidden(self, queue: Queue) -> None:
        """A head that nobody may see yet is dispatched when its log is committed."""
        for lane in (*queue.lanes, *(reader.lane for reader in queue.readers.values())):
            source, lane.hidden_in = lane.hidden_in, None
            if source is not None:
                assert isinstance(source, PartitionLog)
                self._hidden.setdefault(source, {})[queue] = None
                self.directory.committer.urgent(source)

    def _advanced(self, log: PartitionLog) -> None:
        for queue in self._hidden.pop(log, ()):
            if not queue.deleted:
                self._to_dispatch[queue] = None
                self.on_ready()

    async def visible(self, queue: Queue) -> None:
        """Wait until what this queue holds may be seen: basic.get sees the connection's own publishes (K9)."""
        for lane in queue.lanes:
            source, lane.hidden_in = lane.hidden_in, None
            if source is not None:
                assert isinstance(source, PartitionLog)
                await self.wait_committed(source, source.end)

    def refuse(self, host: VirtualHost, queue: Queue, target: Target, properties: bytes, body: bytes) -> None:
        """A full queue refuses a publish; with reject-publish-dlx the message is dead-lettered, else it is gone."""
        self.transfers.refuse(host, queue, target, properties, body)

    @property
    def dead_letter_count(self) -> int:
        return self.transfers.dead_letter_count

    @property
    def dropped_death_count(self) -> int:
        return self.transfers.dropped_count

    # -- the journal --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Write the views' journal and see to timers until cancelled."""
        self._ended = trio.Event()
        try:
            with self._running:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self.timers.run)
                    nursery.start_soon(self._expiry.run)
                    nursery.start_soon(self.delayed.delays.run)
                    nursery.start_soon(self._keep_journal)
                    nursery.start_soon(self._keep_orphans)
                    nursery.start_soon(self._keep_streams)
                    nursery.start_soon(self.releases.run)
                    nursery.start_soon(self._scanning.run)
                    nursery.start_soon(self.alone.run)
                    nursery.start_soon(self.transfers.run)
                    nursery.start_soon(self.redrives.run)
                    nursery.start_soon(self._keep_configs)
        finally:
            self._ended.set()

    async def close(self) -> None:
        """Stop what runs by itself, then make everything settled safe. Nothing is handed out, expires or is moved any
        more, so that the log can be closed behind this."""
        self._closed = True
        self._running.cancel()
        if self._ended is not None:
            await self._ended.wait()
        # What leaves queues may be parked with it.
        await self.write_journal()
        # Its log and the metadata know, should there be no room.
        with suppress(DiskFull):
            await self.delayed.delays.close()
            await self._write_configs()

    async def _keep_journal(self) -> None:
        while True:
            await self._wake.wait()
            await self.env.clock.sleep(JOURNAL_PERIOD_S)
            self._wake = trio.Event()
            await self.write_journal()
            await self._drop_retired()

    async def _keep_orphans(self) -> None:
        """Until each is somebody's again, or was nobody's for so long."""
        while self._orphans:
            await self.env.clock.sleep(ORPHANS_PERIOD_S)
            known, now_s = self._known_streams(), self.env.clock.monotonic()
            for stream_id, since_s in list(self._orphans.items()):
                if stream_id in known or now_s - since_s >= ORPHANED_S:
                    del self._orphans[stream_id]
                    if stream_id not in known:
                        self.retire(stream_id)

    async def _keep_streams(self) -> None:
        """Streams let go of what their retention gave up."""
        while True:
            await self._stream_came.wait()
            await self.env.clock.sleep(STREAM_PERIOD_S)
            now_us = self.env.clock.wall_us()
            streams = [queue for queue in self._views.values() if queue.settings.stream]
            for queue in streams:
                self._expire_stream(queue, now_us)
            if not streams:
                self._stream_came = trio.Event()

    def _expire_stream(self, queue: Queue, now_us: int) -> None:
        settings, history = queue.settings, queue.history
        before_us = None if settings.max_age_ms is None else now_us - settings.max_age_ms * 1000
        if history.expire(before_us=before_us, bytes_max=settings.length_bytes_max):
            self.note_change(queue)
        stream = self.directory.streams.get(queue.stream_id)
        if stream is None or len(stream.partitions[0].segments) < 2:
            return
        log = stream.partitions[0]
        lowest = history.lowest_offset(log)
        if log.segments[0].end_offset <= (log.high_watermark if lowest is None else lowest):
            log.delete_before(log.high_watermark if lowest is None else lowest)
            self.directory.committer.urgent(log)

    async def write_journal(self, only: Collection[Queue] | None = None) -> int:
        """Everything settled so far (by these queues) is on the disk when this returns; the answer is how many bytes
        that took. Then what leaves them for other logs is on its way."""
        async with self._journal_lock:
            draft = self._drafted(only)
            if draft is None:
                return 0
            await self._all_committed(draft.logs)
            byte_count = await self._append_entries(draft.entries)
            await self._all_committed([self._views_log])
            self._draft = None
            for log, end in draft.ends.items():
                if log in self._journalled_ends:
                    self._journalled_ends[log] = end
            for queue, mark, lowest in draft.queues:
                queue.history.note_kept(mark)
                if not queue.deleted:
                    self._kept[queue] = lowest
                if queue.readers:
                    self._to_dispatch[queue] = None
                    self.on_ready()
            self.transfers.journalled(draft.transfers)
            return byte_count

    async def _append_entries(self, entries: list[tuple[bytes, bytes]]) -> int:
        """In their order; what finds no room waits, and is still among the entries if somebody gives up."""
        byte_count = 0
        while entries:
            key, value = entries[0]
            try:
                self._append_entry(key, value)
            except DiskFull:
                await self.env.clock.sleep(CONFIGURE_RETRY_S)
                continue
            del entries[0]
            byte_count += len(value)
        return byte_count

    def _drafted(self, only: Collection[Queue] | None) -> "_Draft | None":
        """What changed, behind what somebody left half way."""
        asked = self._dirty if only is None else [queue for queue in only if queue in self._dirty]
        queues = [queue for queue in asked if not queue.deleted]
        logs: list[PartitionLog] = []
        if only is None:
            self._dirty = {}
            logs, self._dirty_logs = list(self._dirty_logs), {}
        else:
            for queue in queues:
                del self._dirty[queue]
        if not queues and not logs:
            return self._draft
        draft = self._draft = self._draft or _Draft()
        for queue in queues:
            draft.transfers += [(queue, one) for one in self.transfers.number(queue)]
            # The blocks come first: they may be newer than the state, never older.
            for number, block in queue.history.changed_blocks():
                value = b"" if block is None else journal.encode_block(block)
                draft.entries.append((journal.block_key(queue.view_id, number), value))
            draft.entries.append((journal.view_key(queue.view_id), journal.encode_view(self._state(queue))))
            draft.queues.append((queue, queue.history.mark, _lowest_offsets(queue)))
            for source in {*queue.history.applied, *(source for lane in queue.lanes for source in lane.applied)}:
                assert isinstance(source, PartitionLog)
                draft.logs.add(source)
        for log in logs:
            draft.entries.append((journal.log_key(log.stream_id, log.partition), journal.encode_applied(log.end)))
            draft.logs.add(log)
            draft.ends[log] = log.end
        return draft

    def _state(self, queue: Queue) -> journal.ViewState:
        outbox, waiting = self.transfers.state(queue)
        return journal.ViewState(
            journal.FORMAT,
            [_lane_state(lane) for lane in queue.lanes],
            queue.timed,
            journal.history_state(queue.history),
            journal.attached_state(queue.attached),
            outbox,
            waiting,
        )

    async def _all_committed(self, logs: Iterable[PartitionLog]) -> None:
        """Wait until these are committed as far as they reach now. Asked of all at once: who comes later to a log
        than its publishers' tickets may only ask for more."""
        waiting = []
        for log in logs:
            done = trio.Event()
            log.when_committed(log.end, done.set)
            if not done.is_set():
                self.directory.committer.urgent(log)
                waiting.append(done)
        for done in waiting:
            await done.wait()

    async def wait_committed(self, log: PartitionLog, end: int) -> None:
        """Wait until the log is committed up to here."""
        done = trio.Event()
        log.when_committed(end, done.set)
        if not done.is_set():
            self.directory.committer.urgent(log)
            await done.wait()

    def _append_view(self, view_id: int, value: bytes) -> None:
        self._append_entry(journal.view_key(view_id), value)

    def _append_entry(self, key: bytes, value: bytes) -> None:
        self._views_log.append([key], [b""], [value], timestamp_us=self.env.clock.wall_us(), attributes=PERSISTENT)

    async def _drop_retired(self) -> None:
        if not self._retired:
            return
        for stream_id in sorted(self._retired - self._needed_streams()):
            self._retired.remove(stream_id)
            stream = self.directory.streams.get(stream_id)
            if stream is not None:
                await self._delete_stream(stream)

    def _pinned_from(self, log: PartitionLog) -> int | None:
        """The lowest offset of this log that some queue has not settled (so the journal says too), or some stream
        keeps."""
        if not self._loaded:
            # Who needs what is not known yet.
            return 0
        journalled_end = self._journalled_ends.get(log)
        lowest = journalled_end if journalled_end is not None and journalled_end < log.end else None
        for holder in self._holders:
            held = holder.pins.get(log)
            if held is not None and (lowest is None or held < lowest):
                lowest = held
        for queue in self._views.values():
            if queue.settings.stream:
                kept = queue.history.lowest_offset(log)
                if kept is not None and (lowest is None or kept < lowest):
                    lowest = kept
            for offsets in (
                self._kept.get(queue, {}),
                *(one.lowest_offsets() for one in queue.lanes if log in one.applied),
            ):
                found = offsets.get(log)
                if found is not None and (lowest is None or found < lowest):
                    lowest = found
        return lowest


@dataclass(slots=True)
class _Draft:
    """Entries for the journal, and what they must wait for."""

    entries: list[tuple[bytes, bytes]] = field(default_factory=list)
    # Logs whose records the entries speak of: no settlement is journalled before its record is safe (K3).
    logs: set[PartitionLog] = field(default_factory=set)
    # For each log, how far the entries say who got what of it.
    ends: dict[PartitionLog, int] = field(default_factory=dict)
    # Each queue with the reach of its history and the lowest offsets in the state that is written.
    queues: list[tuple[Queue, tuple[int, int], dict[Source, int]]] = field(default_factory=list)
    # What may be sent to other logs once the entries are safe, since their numbers are among them.
    transfers: list[tuple[Queue, Transfer[Move]]] = field(default_factory=list)


def _lowest_offsets(queue: Queue) -> dict[Source, int]:
    """For each log, the lowest offset that a queue has not settled."""
    lowest: dict[Source, int] = {}
    for lane in queue.lanes:
        for source, offset in lane.lowest_offsets().items():
            lowest[source] = min(offset, lowest.get(source, offset))
    return lowest


def _lane_state(lane: Lane) -> journal.LaneState:
    return journal.LaneState(
        lane.next_seq,
        lane.floor,
        list(lane.settled),
        [
            (one.seq, one.count, one.source.stream_id.bytes, one.source.partition, one.first, one.end)
            for one in lane.arrivals()
        ],
        [(source.stream_id.bytes, source.partition, end) for source, end in lane.applied.items()],
        lane.handed_out_below,
        [place for place, one in enumerate(lane.arrivals()) if one.exact],
        lane.failures(),
    )


def _restore(
    queue: Queue,
    state: journal.ViewState,
    blocks: Iterable[journal.BlockState],
    logs: dict[tuple[UUID, int], PartitionLog],
) -> None:
    queue.timed = state.timed
    queue.attached = journal.restored_attachments(state)
    for lane, kept in zip(queue.lanes, state.lanes, strict=False):
        arrivals = []
        exact = set(kept.exact)
        for place, (seq, count, stream, partition, first, end) in enumerate(kept.arrivals):
            log = logs.get((UUID(bytes=stream), partition))
            if log is None:
                raise NotFound(f"queue '{queue.name}' needs stream {UUID(bytes=stream)}, which is not there")
            arrivals.append(Extent(seq, count, log, first, end, exact=place in exact))
        lane.restore(kept.next_seq, kept.floor, kept.settled, arrivals)
        lane.delivered_below = kept.delivered_below
        for count, first, end in kept.failures:
            lane.note_failures(count, first, end)
        for stream, partition, end in kept.applied:
            log = logs.get((UUID(bytes=stream), partition))
            if log is not None:
                lane.applied[log] = end
    if state.history is None:
        queue.history.begin_at(sum(lane.next_seq for lane in queue.lanes))
    else:
        journal.restore_history(
            queue.history, state.history, blocks, lambda stream, partition: logs.get((UUID(bytes=stream), partition))
        )
