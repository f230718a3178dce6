"""A follower's side of the link to its leader: asks, appends, syncs, tells. Driver: trio.

Tail: an answer is appended, synced as one group with all its logs (K4), and the next fetch tells so. Far behind: the
next fetch goes out while the sync runs, and what was synced is told in between; at most one answer is then unsynced.
What the leader says is done only while it leads in the stint that is kept here; that is looked at behind every wait.
Neighbours: replica.py says what may be done, shard.py owns the logs, leader.py is the other end.
"""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import trio

from headrace.core_log.errors import DamagedBatch
from headrace.core_log.log import PartitionLog
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.replication.frames import (
    AnswerFrame,
    FetchFrame,
    Granted,
    Kind,
    decode_answer,
    decode_refusal,
    encode,
)
from headrace.core_log.replication.messages import Go, LogId, Suspect
from headrace.core_log.replication.records import in_portions
from headrace.core_log.spec import StreamSpec

if TYPE_CHECKING:
    from headrace.core_log.replication.shard import ShardReplica

APPEND_BYTES = 512 * 1024

_log = logging.getLogger(__name__)


class Following:
    def __init__(self, shard: "ShardReplica", link: PeerLink) -> None:
        self._shard = shard
        self._link = link
        # Of which the leader is told with the next fetch.
        self._changed: set[LogId] | None = None
        self._catalog = 0
        self._is_far_behind = False
        self._promised_s: float | None = None
        self._unsynced: dict[PartitionLog, int] = {}
        # Synced since it was told last.
        self._to_tell: set[LogId] = set()
        self._progress = trio.Event()
        self.received_bytes = 0

    def synced(self, logs: Iterable[LogId]) -> None:
        self._to_tell.update(logs)
        self._progress.set()

    async def run(self) -> None:
        """Until the link ends. Raises LinkError, or CutBelowWatermark."""
        self._shard.replica.explain_again()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell)
            while True:
                await self._ask()
                await self._hear()

    async def _ask(self) -> None:
        shard = self._shard
        await shard.keep()
        fetch = shard.replica.fetch(None if self._changed is None else self._changed | self._to_tell)
        if fetch is None:
            raise PeerGone("there is no leader to follow")
        streams = tuple(shard.directory.streams) if self._changed is None else None
        self._changed = set()
        self._to_tell = set()
        await self._link.send(Kind.FETCH, encode(FetchFrame(fetch, True, self._catalog, streams, self._promised_s)))

    async def _tell(self) -> None:
        """What was synced while an answer is under way."""
        while True:
            await self._progress.wait()
            self._progress = trio.Event()
            if not self._is_far_behind or not self._to_tell:
                continue
            await self._shard.keep()
            fetch = self._shard.replica.fetch(self._to_tell)
            # A log that has to be explained first is told of by the next question, and the others with it.
            if fetch is not None and not any(position.history for position in fetch.positions):
                self._to_tell = set()
                await self._link.send(Kind.FETCH, encode(FetchFrame(fetch, False, self._catalog)))

    async def _hear(self) -> None:
        try:
            with trio.fail_after(self._shard.config.silence_s):
                kind, data = await self._link.receive()
        except trio.TooSlowError:
            raise PeerGone("the leader says nothing") from None
        if kind == Kind.REFUSAL:
            refusal = decode_refusal(data)
            raise PeerGone(f"node {self._link.hello.node} does not lead this epoch: it knows of {refusal.stint}")
        if kind != Kind.ANSWER:
            raise PeerGone(f"a frame of kind {kind} is none that a leader sends")
        frame = decode_answer(data)
        self._refuse_old(frame)
        self._shard.promises.make(frame.stint.leader, self._shard.env.clock.monotonic())
        self._promised_s = frame.sent_s
        await self._take(frame)

    async def _take(self, frame: AnswerFrame) -> None:
        shard = self._shard
        async with shard.changing:
            self._refuse_old(frame)
            await self._take_streams(frame)
            taken = shard.replica.take(frame.answer)
            if taken is None:
                raise PeerGone("the answer is of an older stint")
            for cut in taken.cuts:
                await shard.directory.committer.cut(shard.logs[cut.log], cut.offset)
            for begin in taken.begins:
                await shard.directory.committer.begin_at(shard.logs[begin.log], begin.offset)
        changed = {one.log for one in taken.cuts} | {one.log for one in taken.begins}
        changed |= {one.log for one in frame.explains}
        # Also of streams that came just now.
        changed |= {log_id for log_id in shard.logs if log_id.stream in {spec.id for spec in frame.specs}}
        size = 0
        for granted in frame.granted:
            await self._append(frame, granted)
            size += granted.size
            if granted.size:
                changed.add(granted.log)
        assert self._changed is not None
        self._changed |= changed
        self.received_bytes += size
        self._is_far_behind = size >= shard.config.fetch_bytes_max // 2
        await self._wait_for_sync(frame)

    def _refuse_old(self, frame: AnswerFrame) -> None:
        replica = self._shard.replica
        if frame.stint != replica.kept.stint or replica.is_leader:
            raise PeerGone("the answer is of an older stint")

    async def _append(self, frame: AnswerFrame, granted: Granted) -> None:
        shard = self._shard
        data = await self._link.receive_exactly(granted.size) if granted.size else b""
        for portion in in_portions(data, APPEND_BYTES):
            # Nothing is appended behind the back of a new leader, who may be this node.
            self._refuse_old(frame)
            log = shard.logs.get(granted.log)
            if log is None:
                return
            try:
                log.append_stored(portion)
            except DamagedBatch as error:
                _log.error("shard %d: %s; its leader is asked to look", shard.shard, error)
                await self._link.send(Kind.SUSPECT, encode(Suspect(granted.log, int(log.written_end))))
                raise
            if len(data) > APPEND_BYTES:
                await trio.lowlevel.checkpoint()
        self._refuse_old(frame)
        log = shard.logs.get(granted.log)
        if log is None:
            return
        shard.replica.follow_watermark(frame.stint, Go(granted.log, granted.high_watermark))
        if log.follow_start(granted.log_start) or data:
            shard.directory.committer.urgent(log)

    async def _wait_for_sync(self, frame: AnswerFrame) -> None:
        """In the tail: for this answer. Far behind: for the one before."""
        before, self._unsynced = self._unsynced, {}
        for granted in frame.granted:
            log = self._shard.logs.get(granted.log)
            if granted.size and log is not None:
                self._unsynced[log] = int(log.written_end)
        if not self._is_far_behind:
            before, self._unsynced = {**before, **self._unsynced}, {}
        while any(log.synced_end < end for log, end in before.items()):
            self._refuse_old(frame)
            await self._shard.synced.wait()

    # -- streams ------------------------------------------------------------------------------------------------

    async def _take_streams(self, frame: AnswerFrame) -> None:
        shard, directory = self._shard, self._shard.directory
        for stream_id in frame.deleted:
            stream = directory.streams.get(stream_id)
            if stream is not None:
                await directory.delete_stream(stream)
            shard.deletions.note(stream_id)
        for spec in frame.specs:
            await self._take_spec(spec)
        if frame.specs or frame.deleted:
            shard.note_streams()
            await shard.env.worker.run(shard.deletions.save)
        self._catalog = frame.catalog

    async def _take_spec(self, spec: StreamSpec) -> None:
        directory = self._shard.directory
        found = directory.streams.get(spec.id)
        if found is None:
            self._shard.deletions.forget([spec.id])
            # Its leader knows since when it is there, or nobody does.
            born = spec.born or (0,) * spec.partition_count
            await self._shard.env.worker.run(lambda: directory.create_now(msgspec.structs.replace(spec, born=born)))
            return
        here = found.spec
        if spec.partition_count > here.partition_count:
            await directory.grow_stream(found, spec.partition_count, born=spec.born)
        if spec.config != here.config:
            await directory.configure_stream(found, spec.config)
        if (spec.kind, spec.vhost, spec.name) != (here.kind, here.vhost, here.name):
            await directory.rename_stream(found, kind=spec.kind, vhost=spec.vhost, name=spec.name)
