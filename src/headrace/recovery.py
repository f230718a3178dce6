"""What is done once when a node goes on with metadata that are older than its log. Driver.

Somebody has put an older copy of meta.sqlite into the data directory, and said --recover-metadata. Exchanges, queues
and topics that were made since are not in it, but their streams are on the disk. None is deleted for that (E8): those
that hold anything become created topics, under their own name if they were topics, else as `recovered.queue.NAME` and
the like, so that what they hold can be read, and published again. Which of it a queue had settled is not known any
more. Neighbours: controller/sqlite_store.py finds out; node.py calls this before the topics are loaded.
"""

import logging
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from uuid import UUID

from headrace.controller.changes import PutTopic
from headrace.controller.entities import Topic
from headrace.controller.errors import MetadataRegressed
from headrace.controller.metadata import Metadata
from headrace.controller.snapshot import Snapshot
from headrace.controller.sqlite_store import SqliteStore
from headrace.controller.table import Table
from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory, Stream
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.journal import STREAM_NAME, Restored
from headrace.gateways.delivery.topics import DEFAULT_VHOST, KIND

_log = logging.getLogger(__name__)

NAME_BYTES_MAX = 255
# As good as for ever, where a stream has no limit.
NO_LIMIT = 2**53


class RecoveringStore:
    """Opens the metadata; older ones than the node has acted on only if that is allowed."""

    def __init__(self, path: Path, new_uuid: Callable[[], UUID], *, allowed: bool) -> None:
        self._path = path
        self._new_uuid = new_uuid
        self._allowed = allowed
        # Older ones were found.
        self.recovered = False

    def open(self) -> SqliteStore:
        try:
            return SqliteStore(self._path, new_uuid=self._new_uuid)
        except MetadataRegressed as error:
            if not self._allowed:
                raise
            _log.warning("going on with older metadata", extra={"found": error.found, "expected": error.expected})
        self.recovered = True
        return SqliteStore(self._path, new_uuid=self._new_uuid, recover=True)


async def adopt_streams(directory: LogDirectory, metadata: Metadata) -> list[str]:
    """Make topics of the streams that the metadata do not know; returns their names."""
    names = []
    needed = await directory.env.worker.run(lambda: _needed_by_queues(directory, metadata.snapshot))
    for stream in list(_unknown(directory, metadata.snapshot)):
        if stream.spec.id in needed:
            # Of an exchange that was deleted; a queue has something to settle in it, and it goes when that is done.
            continue
        topic = _topic_of(stream, metadata.snapshot)
        await metadata.commit(PutTopic(topic))
        await directory.rename_stream(stream, kind=KIND, vhost=topic.vhost, name=topic.name)
        told = {"topic": topic.name, "vhost": topic.vhost, "stream": str(topic.stream)}
        _log.warning("a stream that the metadata had forgotten is kept as a topic", extra=told)
        names.append(topic.name)
    return names


def _unknown(directory: LogDirectory, snapshot: Snapshot) -> Iterator[Stream]:
    known = {
        one.stream for entities in (snapshot.exchanges, snapshot.queues, snapshot.topics) for one in entities.values()
    }
    for stream in directory.streams.values():
        holds_something = any(log.end > log.log_start for log in stream.partitions)
        if stream.spec.kind in (KIND, "exchange", "queue") and stream.spec.id not in known and holds_something:
            yield stream


def _needed_by_queues(directory: LogDirectory, snapshot: Snapshot) -> set[UUID]:
    found = [one for one in directory.streams.values() if one.spec.kind == "internal" and one.spec.name == STREAM_NAME]
    if not found:
        return set()
    restored = Restored(found[0].partitions[0].entries())
    views = {queue.view for queue in snapshot.queues.values()}
    arrivals = (
        arrival[2]
        for view in views & restored.views.keys()
        for lane in restored.views[view].lanes
        for arrival in lane.arrivals
    )
    history = (entry[1] for view in views for block in restored.blocks.get(view, ()) for entry in block.entries)
    return {UUID(bytes=stream) for stream in chain(arrivals, history) if stream}


def _topic_of(stream: Stream, snapshot: Snapshot) -> Topic:
    spec = stream.spec
    vhost = spec.vhost if spec.vhost in snapshot.vhosts else DEFAULT_VHOST
    name = spec.name if spec.kind == KIND and spec.vhost == vhost else f"recovered.{spec.kind}.{spec.name}"
    # What a topic cannot be called, or another is called: the stream's own id says which it is.
    name = "".join(c if c.isprintable() and c != "|" else "_" for c in name)
    if (vhost, name) in snapshot.topics or len(name.encode()) > NAME_BYTES_MAX:
        name = f"recovered.{spec.kind}.{spec.id}"
    return Topic(vhost, name, StreamId(spec.id), spec.partition_count, _settings(spec.config))


def _settings(config: LogConfig) -> Table:
    """Kept as it was kept."""
    return Table(
        {
            "x-durability": config.durability,
            "x-compression": config.compression,
            "x-retention-ms": NO_LIMIT if config.retention_ms is None else config.retention_ms,
            "x-retention-bytes": NO_LIMIT if config.retention_bytes is None else config.retention_bytes,
        }
    )
