"""A leader's side of the links to its followers: what each has, wants and is sent. Driver: trio.

One `FollowerSession` for each link. It answers a fetch as soon as there are records, and otherwise when a watermark, a
stream or the row has moved for a moment, or after a while with nothing. Small pieces are read in the loop (they are in
the page cache, as they were written a moment ago); large ones go by sendfile. A follower that is not in sync may be
throttled.
Neighbours: shard.py decides what counts (replica.py), records.py finds the batches, frames.py has the bytes.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from uuid import UUID

import trio

from headrace.core_log.errors import CorruptLog, Poisoned, StorageError
from headrace.core_log.log import PartitionLog, RawSlice
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.peer.link import PeerLink
from headrace.core_log.replication.assignment import Member, RowVersion
from headrace.core_log.replication.frames import (
    AnswerFrame,
    FetchFrame,
    Granted,
    Kind,
    RefusalFrame,
    decode_fetch,
    decode_suspect,
    encode,
)
from headrace.core_log.replication.messages import Answer, Begin, Cut, Explain, Fenced, Go, LogId, Suspect
from headrace.core_log.replication.records import next_records
from headrace.core_log.spec import StreamSpec

if TYPE_CHECKING:
    from headrace.core_log.replication.shard import ShardReplica

# Pieces up to this size are read in the loop and sent with the frame.
INLINE_BYTES = 128 * 1024


class FollowerSession:
    def __init__(self, shard: "ShardReplica", link: PeerLink) -> None:
        hello = link.hello
        self.member = Member(hello.node, hello.incarnation, hello.disk)
        self.sent_bytes = 0
        self.since_s = shard.env.clock.monotonic()
        self.scope = trio.CancelScope()
        self._shard = shard
        self._link = link
        # Since when the follower waits for an answer; None: it does not.
        self._asked_at: float | None = None
        # Set when there is something that is better told at once; else an answer is due at the deadline.
        self._due = trio.Event()
        self._deadline = float("inf")
        self._pause = trio.CancelScope()
        # Where the follower's next records begin, of logs that it holds as we do.
        self._ends: dict[LogId, int] = {}
        # The last of them that it was sent. To look the next ones up took 53 us an answer and takes 18: that was a
        # tenth of what a leader with two followers in the tail spends (bench/replication.py).
        self._sent: dict[LogId, RawSlice] = {}
        # Logs that may have something to tell of, and what was told last: watermark and start.
        self._fresh: set[LogId] = set()
        self._told: dict[LogId, tuple[int, int]] = {}
        self._corrections: dict[LogId, Cut | Begin | Explain] = {}
        # The row that the follower has been told of, and the one that it has heard of.
        self._version: RowVersion | None = None
        self._heard: RowVersion | None = None
        self._specs: dict[UUID, StreamSpec] = {}
        self._deleted: set[UUID] = set()
        self._directory_version = -1
        self.catalog = -1

    def notice(self, logs: "list[LogId] | set[LogId]") -> None:
        """These have new records, or another watermark or start."""
        self._fresh.update(logs)
        self.look()

    def look(self) -> None:
        """Whoever answers is woken once for each answer, when there is something to tell; until then only its deadline
        moves. Woken for whatever moved, it took most of a follower's cost to find out that it had to wait."""
        if self._asked_at is None or self._due.is_set():
            return
        if self._has_records():
            self._due.set()
            return
        config = self._shard.config
        deadline = self._asked_at + (config.watermark_s if self._has_news() else config.wait_s)
        if deadline != self._deadline:
            self._deadline = self._pause.deadline = deadline

    async def run(self) -> None:
        """Until the link ends, or a newer one of the same node takes its place."""
        with self.scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._answer)
                while True:
                    kind, data = await self._link.receive()
                    if kind == Kind.SUSPECT:
                        self._look_at(decode_suspect(data))
                    elif kind == Kind.FETCH:
                        await self._hear(decode_fetch(data))
                    else:
                        raise PeerGone(f"a frame of kind {kind} is none that a follower sends")

    async def _hear(self, frame: FetchFrame) -> None:
        fetch = frame.fetch
        # Its disk is the node's, or one that this shard has got since.
        if fetch.member[:2] != self.member[:2]:
            raise PeerGone(f"node {self.member.node} speaks for another: {fetch.member}")
        answer = self._shard.replica.serve(fetch)
        if not isinstance(answer, Answer):
            refusal = RefusalFrame(answer.stint, isinstance(answer, Fenced))
            await self._link.send(Kind.REFUSAL, encode(refusal))
            return
        promises = self._shard.promises
        promises.release(self.member.node)
        if frame.promised_s is not None:
            promises.hold(self.member.node, frame.promised_s)
        if frame.streams is not None:
            self._know(frame.streams)
        self.catalog = frame.catalog
        if frame.wants:
            for position, one in zip(
                (p for p in fetch.positions if p.log in self._shard.logs), answer.logs, strict=True
            ):
                if isinstance(one, Go):
                    self._corrections.pop(one.log, None)
                    self._ends[one.log] = position.end
                else:
                    self._ends.pop(one.log, None)
                    self._corrections[one.log] = one
                self._fresh.add(one.log)
            self._asked_at = trio.current_time()
        # What it has told before counts from now on, when it has heard of the present row only now.
        logs = [one.log for one in answer.logs] if fetch.version == self._heard else None
        self._heard = fetch.version
        self._shard.heard(self, logs)
        self.look()

    def _look_at(self, suspect: Suspect) -> None:
        log = self._shard.logs.get(suspect.log)
        if log is not None:
            with _damage_at(log, suspect.offset):
                log.check_stored(suspect.offset)

    def _know(self, streams: tuple[UUID, ...]) -> None:
        """What the follower holds: of streams that are deleted here it is told again."""
        self._deleted = set(self._shard.deletions.streams) - set(streams)

    async def _answer(self) -> None:
        clock, config = self._shard.env.clock, self._shard.config
        while True:
            with trio.CancelScope(deadline=self._deadline) as self._pause:
                await self._due.wait()
            self._due = trio.Event()
            self._asked_at, self._deadline = None, float("inf")
            frame, pieces = self._next()
            size = sum(one.size for one in frame.granted)
            await self._shard.keep()
            if frame.stint != self._shard.replica.kept.stint:
                raise PeerGone("led no longer")
            try:
                await self._link.send_followed_by(Kind.ANSWER, encode(frame), pieces, self._shard.env.worker)
            except StorageError as error:
                self._look_again(frame, pieces)
                raise PeerGone(f"what was to be sent is not there any more: {error}") from error
            self.sent_bytes += size
            if size and config.throttle_bytes_s is not None and not self._shard.is_in_sync(self.member.node):
                await clock.sleep(size / config.throttle_bytes_s)

    def _look_again(self, frame: AnswerFrame, pieces: list[bytes | RawSlice]) -> None:
        """Pieces could not be read while they were sent: whatever should be there still, and is not, is damage."""
        sent = (one for one in frame.granted if one.size)
        for one, piece in zip(sent, pieces, strict=True):
            log = self._shard.logs.get(one.log)
            if not isinstance(piece, RawSlice) or log is None or frame.stint != self._shard.replica.kept.stint:
                continue
            if piece.first_offset >= log.replica_start:
                with _damage_at(log, piece.first_offset):
                    for position, header in piece.segment.headers(piece.position):
                        if header.base_offset >= piece.next_offset:
                            break
                        piece.segment.read_whole(position, header)

    def _has_records(self) -> bool:
        """Something that is better told at once."""
        if self._corrections or self._shard.directory.version != self._directory_version:
            return True
        logs, ends = self._shard.logs, self._ends
        return any(log in ends and log in logs and logs[log].written_end > ends[log] for log in self._fresh)

    def _has_news(self) -> bool:
        if self._version != self._shard.replica.kept.version:
            return True
        logs, ends = self._shard.logs, self._ends
        return any(log in ends and log in logs and _state(logs[log]) != self._told.get(log) for log in self._fresh)

    def _next(self) -> tuple[AnswerFrame, list[bytes | RawSlice]]:
        shard = self._shard
        granted: list[Granted] = []
        pieces: list[bytes | RawSlice] = []
        left = shard.config.fetch_bytes_max
        if shard.config.throttle_bytes_s is not None and not shard.is_in_sync(self.member.node):
            # So little that the pause behind it is no silence.
            left = min(left, max(int(shard.config.throttle_bytes_s * shard.config.wait_s), 1))
        later: set[LogId] = set()
        for log_id in self._fresh:
            log, end = shard.logs.get(log_id), self._ends.get(log_id)
            if log is None or end is None:
                continue
            if end < log.replica_start:
                # Retention took it, since the follower told how far it is.
                del self._ends[log_id]
                self._corrections[log_id] = Begin(log_id, int(log.replica_start))
                continue
            if left <= 0:
                later.add(log_id)
                continue
            with _damage_at(log, end):
                found = next_records(log, end, left, self._sent.get(log_id))
                piece = None if found is None else _inline(found[0])
            size = 0
            if found is not None and piece is not None:
                following = found[1]
                if isinstance(found[0], RawSlice):
                    self._sent[log_id] = found[0]
                size = piece.length if isinstance(piece, RawSlice) else len(piece)
                pieces.append(piece)
                left -= size
                self._ends[log_id] = following
                if following < log.written_end:
                    later.add(log_id)
            if size or _state(log) != self._told.get(log_id):
                self._told[log_id] = _state(log)
                granted.append(Granted(log_id, *_state(log), size))
        self._fresh = later
        corrections = self._corrections.values()
        kept = shard.replica.kept
        specs, deleted = self._stream_changes()
        frame = AnswerFrame(
            kept.stint,
            kept.version,
            kept.isr,
            kept.eligible,
            tuple(granted),
            tuple(one for one in corrections if isinstance(one, Cut)),
            tuple(one for one in corrections if isinstance(one, Begin)),
            tuple(one for one in corrections if isinstance(one, Explain)),
            shard.catalog,
            specs,
            deleted,
            shard.env.clock.monotonic(),
        )
        self._corrections = {}
        self._version = kept.version
        return frame, pieces

    def _stream_changes(self) -> tuple[tuple[StreamSpec, ...], tuple[UUID, ...]]:
        directory = self._shard.directory
        if directory.version == self._directory_version:
            return (), ()
        self._directory_version = directory.version
        self._shard.note_streams()
        specs = [one.spec for one in list(directory.streams.values()) if self._specs.get(one.spec.id) != one.spec]
        for spec in specs:
            self._specs[spec.id] = spec
        deleted = self._shard.deletions.streams - self._deleted
        self._deleted |= deleted
        for stream in deleted:
            self._specs.pop(stream, None)
        return tuple(specs), tuple(sorted(deleted))


@contextmanager
def _damage_at(log: PartitionLog, offset: int) -> Iterator[None]:
    """What the disk refuses to give back is damage as much as what comes back as something else (D7): this replica
    ends, and not the node."""
    try:
        yield
    except (CorruptLog, Poisoned):
        raise
    except StorageError as error:
        raise CorruptLog(log.folder, 0, offset, f"what was written cannot be read ({error})") from error


def _state(log: PartitionLog) -> tuple[int, int]:
    return int(log.high_watermark), int(log.log_start)


def _inline(piece: RawSlice | bytes) -> RawSlice | bytes:
    if isinstance(piece, RawSlice) and piece.length <= INLINE_BYTES:
        data = piece.segment.file.read(piece.position, piece.length)
        if len(data) < piece.length:
            raise StorageError(f"{piece.segment.path} ends before byte {piece.position + piece.length}")
        return data
    return piece
