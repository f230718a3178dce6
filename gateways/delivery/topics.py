"""Topics: streams by their public names, and those that were created by name. Driver.

A name means, in this order, a created topic, an exchange, a queue of vhost `/`:

    orders                      whichever of the three there is
    exchange:orders             the stream of the exchange; queue:orders the queue's own
    orders.dlq, orders.retry    ordinary names, kept free for what belongs to the queue `orders`
    vhost|orders                the same in another vhost

A created topic is in the metadata before its files are made and after they are gone, so a start finds what a crash left
undone: it makes what is missing and takes away what nobody knows. A topic may grow: records stay where they are, and
keys are dealt out anew over all partitions from then on. No view reads a topic's logs; readers keep their own places.
Neighbours: consumer_groups.py reads by stream ids, the HTTP door speaks of names.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import trio
from xxhash import xxh3_64_intdigest

from headrace.controller.changes import Change, DeleteTopic, DeleteVhost, PutTopic
from headrace.controller.entities import Topic, check_name
from headrace.controller.errors import AlreadyExists, Invalid, NotFound
from headrace.controller.snapshot import Snapshot
from headrace.controller.table import Table
from headrace.core_log.config import LogConfig
from headrace.core_log.directory import Stream
from headrace.core_log.errors import StorageError
from headrace.core_log.ids import StreamId
from headrace.core_log.log import PartitionLog
from headrace.core_log.spec import StreamSpec
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.logsettings import log_settings
from headrace.gateways.delivery.routing import DEFAULT_EXCHANGE
from headrace.gateways.delivery.vhost import VirtualHost

_log = logging.getLogger(__name__)

DEFAULT_VHOST = "/"
KIND = "topic"
_VHOST_MARK = "|"
# What would be taken for something else than a created topic.
_RESERVED_STARTS = ("exchange:", "queue:", "__", "amq.")
_RESERVED_ENDS = (".dlq", ".retry")


class TopicKind(StrEnum):
    TOPIC = "topic"
    EXCHANGE = "exchange"
    QUEUE = "queue"


@dataclass(frozen=True, slots=True)
class TopicName:
    """A public name, taken apart. `kind` is None where the name does not say."""

    vhost: str
    kind: TopicKind | None
    name: str

    @property
    def text(self) -> str:
        """The name in one piece; with a kind it leads to the same whatever else there is."""
        named = self.name if self.kind in (None, TopicKind.TOPIC) else f"{self.kind}:{self.name}"
        return named if self.vhost == DEFAULT_VHOST and _VHOST_MARK not in named else f"{self.vhost}|{named}"


@dataclass(frozen=True, slots=True)
class Place:
    """The stream that a public name leads to now."""

    vhost: str
    kind: TopicKind
    name: str
    stream_id: StreamId

    @property
    def public_name(self) -> str:
        """A name that leads here whatever else there is."""
        return TopicName(self.vhost, self.kind, self.name).text


def parse_name(text: str) -> TopicName:
    vhost, mark, rest = text.partition(_VHOST_MARK)
    if not mark:
        vhost, rest = DEFAULT_VHOST, text
    for kind in (TopicKind.EXCHANGE, TopicKind.QUEUE):
        if rest.startswith(f"{kind}:"):
            return TopicName(vhost, kind, rest[len(kind) + 1 :])
    return TopicName(vhost, None, rest)


def check_new_name(name: str) -> None:
    """Raise Invalid for what a created topic cannot be called."""
    check_name("the topic's name", name)
    if _VHOST_MARK in name:
        raise Invalid(f"a topic's name must not contain '{_VHOST_MARK}'")
    for start in _RESERVED_STARTS:
        if name.startswith(start):
            raise Invalid(f"names that begin with '{start}' are reserved")
    for end in _RESERVED_ENDS:
        if name.endswith(end):
            raise Invalid(f"names that end with '{end}' are reserved for queues")


def partition_of(key: bytes, count: int) -> int:
    """Where a record with this key goes in a topic of so many partitions."""
    return xxh3_64_intdigest(key) % count if count > 1 else 0


class Topics:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._directory = broker.directory
        # One change of topics at a time.
        self._changing = trio.Lock()
        # The partition that the next records without a key go to, for each topic.
        self._turns: dict[StreamId, int] = {}
        # Streams of vhosts that are gone.
        self._orphans: list[StreamId] = []
        self._orphan_came = trio.Event()

    # -- starting -------------------------------------------------------------------------------------------------

    async def load(self) -> None:
        """Files as the metadata has it. Before the broker loads, which then leaves these logs alone."""
        known = {topic.stream: topic for topic in self._broker.metadata.snapshot.topics.values()}
        for stream in list(self._directory.streams.values()):
            if stream.spec.kind == KIND and stream.spec.id not in known:
                await self._directory.delete_stream(stream)
        for topic in known.values():
            await self._make(topic)
        self._broker.metadata.listen(self._metadata_changed)

    async def run(self) -> None:
        """Take away what deleted vhosts leave, until cancelled."""
        while True:
            await self._orphan_came.wait()
            self._orphan_came = trio.Event()
            async with self._changing:
                while self._orphans:
                    stream_id = self._orphans.pop()
                    self._turns.pop(stream_id, None)
                    stream = self._directory.streams.get(stream_id)
                    if stream is not None:
                        await self._drop(stream)

    async def _make(self, topic: Topic) -> None:
        """Whatever of a topic's files is missing."""
        config = self._config_of(topic)
        stream = self._directory.streams.get(topic.stream)
        if stream is None:
            spec = StreamSpec(
                id=topic.stream,
                name=topic.name,
                kind=KIND,
                vhost=topic.vhost,
                partition_count=topic.partition_count,
                created_us=self._broker.env.clock.wall_us(),
                config=config,
            )
            stream = await self._broker.env.worker.run(lambda: self._directory.create_now(spec))
        elif stream.spec.partition_count < topic.partition_count:
            await self._directory.grow_stream(stream, topic.partition_count)
        if stream.partitions[-1].config != config:
            await self._directory.configure_stream(stream, config)
        self._broker.leave_alone(stream.partitions)

    def _config_of(self, topic: Topic) -> LogConfig:
        return self._broker.log_config(log_settings(topic.settings))

    def _metadata_changed(self, snapshot: Snapshot, changes: Sequence[Change]) -> None:
        gone = [change.name for change in changes if isinstance(change, DeleteVhost)]
        if gone:
            self._orphans += [
                StreamId(stream.spec.id)
                for stream in self._directory.streams.values()
                if stream.spec.kind == KIND and stream.spec.vhost in gone
            ]
            self._orphan_came.set()

    # -- finding --------------------------------------------------------------------------------------------------

    def resolve(self, name: TopicName) -> Place:
        """What a name leads to now. Raises NotFound."""
        host = self._broker.vhosts.get(name.vhost)
        if host is not None:
            for kind in TopicKind if name.kind is None else (name.kind,):
                stream_id = self._stream_of(host, kind, name.name)
                if stream_id is not None:
                    return Place(name.vhost, kind, name.name, stream_id)
        what = "topic, exchange or queue" if name.kind is None else name.kind
        raise NotFound(f"no {what} '{name.name}' in vhost '{name.vhost}'")

    def _stream_of(self, host: VirtualHost, kind: TopicKind, name: str) -> StreamId | None:
        match kind:
            case TopicKind.TOPIC:
                topic = self._broker.metadata.snapshot.topics.get((host.name, name))
                return None if topic is None else topic.stream
            case TopicKind.EXCHANGE:
                return None if name == DEFAULT_EXCHANGE else host.exchange_stream(name)
            case TopicKind.QUEUE:
                queue = host.queues.get(name)
                return None if queue is None else queue.stream_id

    def exists(self, name: TopicName) -> bool:
        host = self._broker.vhosts.get(name.vhost)
        kinds = TopicKind if name.kind is None else (name.kind,)
        return host is not None and any(self._stream_of(host, kind, name.name) is not None for kind in kinds)

    def names(self, kinds: Iterable[TopicKind], vhosts: Iterable[str] | None = None) -> list[TopicName]:
        """Every name of these kinds, in these vhosts or in all."""
        found: list[TopicName] = []
        for vhost in self._broker.vhosts if vhosts is None else vhosts:
            host = self._broker.vhosts.get(vhost)
            if host is not None:
                found += [TopicName(vhost, kind, name) for kind in kinds for name in self._names_in(host, kind)]
        return found

    def _names_in(self, host: VirtualHost, kind: TopicKind) -> Iterable[str]:
        match kind:
            case TopicKind.TOPIC:
                topics = self._broker.metadata.snapshot.topics
                return [name for vhost, name in topics if vhost == host.name]
            case TopicKind.EXCHANGE:
                return [one.name for one in host.router.exchanges() if one.name != DEFAULT_EXCHANGE]
            case TopicKind.QUEUE:
                return list(host.queues)

    def config_of(self, place: Place) -> LogConfig:
        """How a stream is kept, or will be once something is written to it."""
        host = self._broker.vhosts[place.vhost]
        match place.kind:
            case TopicKind.TOPIC:
                return self._config_of(self.topic(place))
            case TopicKind.EXCHANGE:
                return host.exchange_config(place.name)
            case TopicKind.QUEUE:
                return self._broker.own_config(host.queue(place.name))

    def is_there(self, place: Place) -> bool:
        """Whether the name still leads to the same stream."""
        host = self._broker.vhosts.get(place.vhost)
        return host is not None and self._stream_of(host, place.kind, place.name) == place.stream_id

    def logs_of(self, stream_id: StreamId) -> Sequence[PartitionLog]:
        """The partitions of a stream; none while nothing was ever written to an exchange's or queue's."""
        stream = self._directory.streams.get(stream_id)
        return () if stream is None else stream.partitions

    def partition_count(self, place: Place) -> int:
        return len(self.logs_of(place.stream_id)) or 1

    def log_at(self, place: Place, partition: int) -> PartitionLog | None:
        """One partition; None for one that will be there once something is written. Raises NotFound."""
        logs = self.logs_of(place.stream_id)
        if not 0 <= partition < (len(logs) or 1):
            raise NotFound(f"'{place.public_name}' has {len(logs) or 1} partitions, and no partition {partition}")
        return logs[partition] if logs else None

    def topic(self, place: Place) -> Topic:
        """The entity of a created topic. Raises NotFound."""
        found = self._broker.metadata.snapshot.topics.get((place.vhost, place.name))
        if place.kind is not TopicKind.TOPIC or found is None:
            raise NotFound(f"no topic '{place.name}' in vhost '{place.vhost}' that was created as one")
        return found

    # -- changing -------------------------------------------------------------------------------------------------

    async def create(self, vhost: str, name: str, partition_count: int, settings: Table) -> Topic:
        """A new topic; it takes records when this returns. Raises AlreadyExists."""
        check_new_name(name)
        async with self._changing:
            if (vhost, name) in self._broker.metadata.snapshot.topics:
                raise AlreadyExists(f"topic '{name}' in vhost '{vhost}' exists already")
            topic = Topic(vhost, name, self._broker.metadata.new_stream(), partition_count, settings)
            with trio.CancelScope(shield=True):
                await self._broker.metadata.commit(PutTopic(topic))
                try:
                    await self._make(topic)
                except StorageError:
                    # A topic without files would take nothing.
                    await self._broker.metadata.commit(DeleteTopic(vhost, name, topic.stream))
                    raise
            return topic

    async def change(self, vhost: str, name: str, changed: Callable[[Topic], Topic]) -> Topic:
        """Other settings or more partitions. Raises NotFound, and Invalid for fewer partitions."""
        async with self._changing:
            found = self._broker.metadata.snapshot.topics.get((vhost, name))
            if found is None:
                raise NotFound(f"no topic '{name}' in vhost '{vhost}'")
            topic = changed(found)
            # What a full disk leaves undone the next start makes, or the same change once more.
            with trio.CancelScope(shield=True):
                await self._broker.metadata.commit(PutTopic(topic))
                await self._make(topic)
            return topic

    async def delete(self, vhost: str, name: str) -> None:
        """Its records are gone for everybody; the files lie in the trash for a day."""
        async with self._changing:
            found = self._broker.metadata.snapshot.topics.get((vhost, name))
            if found is None:
                raise NotFound(f"no topic '{name}' in vhost '{vhost}'")
            with trio.CancelScope(shield=True):
                await self._broker.metadata.commit(DeleteTopic(vhost, name, found.stream))
                self._turns.pop(found.stream, None)
                stream = self._directory.streams.get(found.stream)
                if stream is not None:
                    await self._drop(stream)

    async def _drop(self, stream: Stream) -> None:
        _log.info("a topic is deleted", extra={"topic": stream.spec.name, "vhost": stream.spec.vhost})
        self._broker.take_back(stream.partitions)
        await self._directory.delete_stream(stream)
        # Whoever waits for more of it looks again, and finds it gone.
        for log in stream.partitions:
            for tell in list(log.advanced):
                tell(log)

    # -- writing --------------------------------------------------------------------------------------------------

    def partition_for(self, place: Place, key: bytes) -> int:
        """Where a record with this key goes: the same partition for the same key, until the topic grows."""
        return partition_of(key, self.partition_count(place))

    def next_partition(self, place: Place) -> int:
        """Where the next records without a key go: to one partition after the other."""
        turn = self._turns.get(place.stream_id, 0)
        self._turns[place.stream_id] = turn + 1
        return turn % self.partition_count(place)
