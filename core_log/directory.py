"""All streams of a data directory: open, create, retire, keep in order. Driver.

    streams/<uuid>/stream.json          name, kind, settings: readable without the broker
    streams/<uuid>/<partition>/         a PartitionLog
    trash/<uuid>.<ms>/                  a deleted stream, kept for a day (E8)
    journal, recycled/                  see journal.py, pool.py

The directory's lock, identity and clean-shutdown marker are the node's (headrace/node.py).
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Lock
from uuid import UUID

import msgspec
import trio

from headrace.core_log.committer import Committer
from headrace.core_log.compaction import compact
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, DiskFull, Refused, StorageError
from headrace.core_log.ids import StreamId
from headrace.core_log.journal import CommitJournal, replay
from headrace.core_log.key_index import KeyIndex
from headrace.core_log.log import PartitionLog, Shared
from headrace.core_log.pool import SegmentPool
from headrace.core_log.segment import Segment
from headrace.core_log.spec import SPEC, STREAMS, StreamSpec, folder_of, list_streams
from headrace.core_log.storage.contract import Storage
from headrace.core_log.tail import TailCache

TRASH = "trash"
MAINTENANCE_S = 1.0
# So many logs are looked after in one step: what was written to is told to offline readers, which takes 10 to 20 us.
LOGS_IN_ONE_STEP = 64


@dataclass(slots=True)
class Stream:
    spec: StreamSpec
    partitions: list[PartitionLog]


# The lowest offset that somebody still needs of a partition, or None: nobody does (R1, R4).
PinnedFrom = Callable[[PartitionLog], int | None]


class LogDirectory:
    def __init__(self, env: Env, config: DirectoryConfig) -> None:
        """Not for callers: `await LogDirectory.open(...)`."""
        self.env = env
        self.config = config
        self.streams: dict[UUID, Stream] = {}
        # Moves with each stream that comes, changes or goes.
        self.version = 0
        self.replayed_count = 0
        self.pinned_from: PinnedFrom = lambda log: None
        self._shared = Shared(
            storage=env.storage,
            clock=env.clock,
            ids=env.ids,
            tails=TailCache(config.tail_cache_bytes_max),
            pool=SegmentPool(env.storage, config.recycled_count_max),
            indexed_max=config.index_cache_count_max,
        )
        self._journal = CommitJournal(env.storage, env.ids, config.journal_bytes_max)
        self.committer = Committer(env, self._journal, config)
        # Held while a stream's spec is read, changed and saved: of two changes at once neither is lost.
        self._editing = Lock()

    @classmethod
    async def open(cls, env: Env, config: DirectoryConfig, *, clean: bool) -> "LogDirectory":
        """Open every stream. Not clean: replay the commit journal, then find each log's end.

        Raises CorruptLog when committed records cannot be read back; `headrace log repair` is the way out.
        """
        return await env.worker.run(lambda: cls.open_now(env, config, clean=clean))

    @classmethod
    def open_now(cls, env: Env, config: DirectoryConfig, *, clean: bool) -> "LogDirectory":
        """The same, in this thread."""
        storage = env.storage
        for folder in (STREAMS, TRASH):
            storage.make_dir(folder)
        directory = cls(env, config)
        specs = list_streams(storage)
        if not clean:
            # A process that crashed may have left names that only the page cache has; from here on they are relied on.
            for folder in (STREAMS, TRASH, *(folder_of(spec.id) for spec in specs)):
                storage.sync_dir(folder)
            known = {spec.id: spec for spec in specs}

            def place(stream_id: UUID, partition: int) -> str | None:
                spec = known.get(stream_id)
                return folder_of(stream_id, partition) if spec and partition < spec.partition_count else None

            directory.replayed_count = replay(storage, place)
        for spec in specs:
            directory.streams[spec.id] = Stream(
                spec,
                [
                    PartitionLog.open(
                        directory._shared,
                        folder_of(spec.id, partition),
                        StreamId(spec.id),
                        partition,
                        spec.config,
                        clean=clean,
                    )
                    for partition in range(spec.partition_count)
                ],
            )
        storage.sync_dir("")
        return directory

    def on_damage(self, tell: Callable[[CorruptLog], None]) -> None:
        """`tell` hears of what was committed and no longer reads back, whoever found that."""
        self._shared.on_damage = tell

    def begin_stint(self, epoch: int, leader_id: int) -> None:
        """Logs that are created from now on belong to this leader's stint."""
        self._shared.epoch, self._shared.leader_id = epoch, leader_id

    # -- streams ------------------------------------------------------------------------------------------------

    async def create_stream(
        self,
        name: str,
        *,
        kind: str,
        vhost: str = "/",
        partition_count: int = 1,
        config: LogConfig | None = None,
        stream_id: UUID | None = None,
    ) -> Stream:
        """A new, empty stream; it is on the disk when this returns."""
        if partition_count < 1:
            raise Refused(f"a stream has at least one partition, not {partition_count}")
        spec = StreamSpec(
            id=stream_id or self.env.ids.uuid(),
            name=name,
            kind=kind,
            vhost=vhost,
            partition_count=partition_count,
            created_us=self.env.clock.wall_us(),
            config=config or LogConfig(),
        )
        # Known on the loop only, where streams are gone through.
        return self._know(await self.env.worker.run(lambda: self._make(spec)))

    def create_now(self, spec: StreamSpec) -> Stream:
        """The same, in this thread."""
        return self._know(self._make(spec))

    def _know(self, stream: Stream) -> Stream:
        self.streams[stream.spec.id] = stream
        self.version += 1
        return stream

    def _make(self, spec: StreamSpec) -> Stream:
        """In any thread."""
        storage = self.env.storage
        spec = self._replicated(spec)
        if spec.config.replica_count > 1 and not spec.born:
            spec = msgspec.structs.replace(spec, born=(self._shared.epoch,) * spec.partition_count)
        partitions = self._create_partitions(spec, 0)
        # The spec comes last: a folder without one does not count as a stream.
        storage.sync_dir(folder_of(spec.id))
        storage.replace_file(f"{folder_of(spec.id)}/{SPEC}", _encode(spec))
        storage.sync_dir(STREAMS)
        return Stream(spec, partitions)

    def replicated(self, config: LogConfig) -> LogConfig:
        """As logs of this directory are kept: those of a shard are replicated, whoever asked for the stream."""
        return replace(config, replica_count=max(config.replica_count, self.config.replica_count))

    def _replicated(self, spec: StreamSpec) -> StreamSpec:
        return msgspec.structs.replace(spec, config=self.replicated(spec.config))

    def _create_partitions(self, spec: StreamSpec, first: int) -> list[PartitionLog]:
        return [
            PartitionLog.create(self._shared, folder_of(spec.id, partition), StreamId(spec.id), partition, spec.config)
            for partition in range(first, spec.partition_count)
        ]

    async def grow_stream(self, stream: Stream, partition_count: int, *, born: tuple[int, ...] | None = None) -> None:
        """Add partitions; those that exist stay as they are. `born`: as the leader's spec has it, if there is one."""
        if partition_count < stream.spec.partition_count:
            raise Refused(
                f"stream {stream.spec.name!r} has {stream.spec.partition_count} partitions and cannot shrink "
                f"to {partition_count}"
            )

        def grow() -> list[PartitionLog]:
            with self._editing:
                told = self._born(stream.spec, partition_count) if born is None else born
                spec = msgspec.structs.replace(stream.spec, partition_count=partition_count, born=told)
                added = self._create_partitions(spec, stream.spec.partition_count)
                self.env.storage.sync_dir(folder_of(spec.id))
                self._save(stream, spec)
            return added

        stream.partitions += await self.env.worker.run(grow)
        self.version += 1

    def _born(self, spec: StreamSpec, partition_count: int) -> tuple[int, ...]:
        if spec.config.replica_count == 1:
            return ()
        before = tuple(spec.born_in(partition) for partition in range(spec.partition_count))
        return (*before, *(self._shared.epoch,) * (partition_count - spec.partition_count))

    async def configure_stream(self, stream: Stream, config: LogConfig) -> None:
        """Other settings from now on; what is written stays as it was written."""

        def configure() -> None:
            with self._editing:
                self._save(stream, msgspec.structs.replace(stream.spec, config=config))

        await self.env.worker.run(configure)
        for log in stream.partitions:
            log.config = stream.spec.config

    async def rename_stream(self, stream: Stream, *, kind: str, vhost: str, name: str) -> None:
        """The same records under another name."""

        def rename() -> None:
            with self._editing:
                self._save(stream, msgspec.structs.replace(stream.spec, kind=kind, vhost=vhost, name=name))

        await self.env.worker.run(rename)

    def _save(self, stream: Stream, spec: StreamSpec) -> None:
        spec = self._replicated(spec)
        self.env.storage.replace_file(f"{folder_of(spec.id)}/{SPEC}", _encode(spec))
        stream.spec = spec
        self.version += 1

    async def delete_stream(self, stream: Stream) -> None:
        """Take a stream out of service; its files lie in the trash for a day."""
        await self.committer.flush()
        del self.streams[stream.spec.id]
        self.version += 1
        when_ms = self.env.clock.wall_us() // 1000
        source, target = folder_of(stream.spec.id), f"{TRASH}/{stream.spec.id}.{when_ms}"

        def move() -> None:
            self.env.storage.rename(source, target)
            self.env.storage.sync_dir(STREAMS)
            self.env.storage.sync_dir(TRASH)

        await self.env.worker.run(move)

    # -- keeping in order ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commit and maintain until cancelled. Raises when the disk can no longer be trusted."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.committer.run)
            nursery.start_soon(self._retain)
            nursery.start_soon(self._maintain)

    async def _retain(self) -> None:
        """Beside the rest, which may take long when much is written."""
        while True:
            await self.env.clock.sleep(MAINTENANCE_S)
            await self.retain()

    async def _maintain(self) -> None:
        while True:
            await self.env.clock.sleep(MAINTENANCE_S)
            await self.maintain()

    async def retain(self) -> None:
        """Let go of what retention allows, and of files that were let go of."""
        await trio.lowlevel.checkpoint()
        await self._with_each_log(self._retain_log)

    async def _with_each_log(self, work: Callable[[PartitionLog, int], Awaitable[None]]) -> None:
        """Others get their turns in between: there may be thousands."""
        now_us = self.env.clock.wall_us()
        left = LOGS_IN_ONE_STEP
        for stream in list(self.streams.values()):
            for log in stream.partitions:
                if stream.spec.id not in self.streams:
                    break
                # What a full disk does not allow for can wait, and the next log may have something to give back.
                try:
                    with suppress(DiskFull):
                        await work(log, now_us)
                except FileNotFoundError:
                    if stream.spec.id in self.streams:
                        raise
                left -= 1
                if left == 0:
                    await trio.lowlevel.checkpoint()
                    left = LOGS_IN_ONE_STEP

    async def _retain_log(self, log: PartitionLog, now_us: int) -> None:
        if log.has_removed:
            await self.env.worker.run(lambda: log.recycle(now_us // 1000 - self.config.removal_delay_ms))
            if log.stream_id not in self.streams:
                return
        before = log.log_start
        # Who pins what is asked only when there is something to be had: that looks at every view.
        if log.expired(now_us) > before and log.delete_before(log.expired(now_us, self.pinned_from(log))) > before:
            self.committer.urgent(log)

    async def maintain(self) -> None:
        """One round: retention, watermarks for offline readers, files to recycle, key indexes, compaction, trash."""
        now_us = self.env.clock.wall_us()
        await self._with_each_log(self._maintain_log)
        await self.env.worker.run(lambda: self._empty_trash(now_us // 1000 - self.config.trash_ms))

    async def _maintain_log(self, log: PartitionLog, now_us: int) -> None:
        log.note_watermark()
        await self._retain_log(log, now_us)
        if len(log.segments) < 2:
            return
        for segment in log.segments[:-1] if log.config.key_index else ():
            if log.log_start < segment.end_offset <= log.synced_end and not KeyIndex.exists(self.env.storage, segment):
                await self._index_keys(log, segment)
        if log.config.cleanup == "compact":
            await compact(self.env, log)

    async def _index_keys(self, log: PartitionLog, segment: Segment) -> None:
        try:
            await self.env.worker.run(lambda: KeyIndex.build(self.env.storage, segment))
        except FileNotFoundError:
            if segment in log.segments:
                raise
        if segment not in log.segments:
            # It was removed meanwhile, with the indexes it had.
            segment.remove_indexes()

    def _empty_trash(self, before_ms: int) -> None:
        storage = self.env.storage
        for name in storage.list(TRASH):
            if int(name.rsplit(".", 1)[1]) <= before_ms:
                remove_tree(storage, f"{TRASH}/{name}")

    async def close(self) -> None:
        """Everything is safe and the next start need not scan. The committer must still be running, or be idle."""
        await self.committer.flush()
        await self.env.worker.run(self.close_now)

    def close_now(self) -> None:
        self._journal.empty()
        for stream in self.streams.values():
            for log in stream.partitions:
                log.close()


def _encode(spec: StreamSpec) -> bytes:
    return msgspec.json.format(msgspec.json.encode(spec)) + b"\n"


def remove_tree(storage: Storage, path: str) -> None:
    for name in storage.list(path):
        child = f"{path}/{name}"
        try:
            storage.list(child)
        except StorageError:
            # Not a folder.
            storage.remove(child)
        else:
            remove_tree(storage, child)
    storage.remove_dir(path)
