"""A replica whose files are not what was written: it keeps its word, and waits to begin anew. Driver.

What was committed no longer reads back (D7). Nothing is cut: the file `damaged` says what was found, by which the next
start knows of it too, and until the controller has taken this copy out of the in-sync set the files stay as they are,
since they may be all that there is. The replica promises and obeys as before, reports that it is corrupt, and neither
leads nor follows. Once another one leads without it, everything lies `aside` for a day, the disk of this shard gets
another identity (file `disk`), and the replica is one that has nothing: rows that name what it had mean another (E6).

    damaged -> told -> out of the in-sync set -> aside, another identity -> ShardReplica, empty, fetches everything

Neighbours: shard.py is a replica that is sound; shards.py of the node turns one into the other.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import msgspec

from headrace.core_log.committer import FULL_DISK_PAUSE_S
from headrace.core_log.directory import remove_tree
from headrace.core_log.env import Env
from headrace.core_log.errors import CorruptLog, DiskFull, UnknownFormat
from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Member
from headrace.core_log.replication.kept import PATH as KEPT
from headrace.core_log.replication.kept import read_kept, write_kept
from headrace.core_log.replication.messages import Report
from headrace.core_log.replication.replica import Kept, Replica
from headrace.core_log.replication.status import Role, ShardStatus
from headrace.core_log.storage.contract import Storage

MARK = "damaged"
DISK = "disk"
ASIDE = "aside"
_STAYING = {KEPT, MARK, DISK, ASIDE}

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _Mark(msgspec.Struct, frozen=True):
    path: str
    position: int
    offset: int
    what: str


def read_disk(storage: Storage) -> UUID | None:
    """The identity of this shard's disk, if it is not the node's. Raises UnknownFormat."""
    if not storage.exists(DISK):
        return None
    try:
        return UUID(storage.read_file(DISK).decode().strip())
    except ValueError as error:
        raise UnknownFormat(f"{DISK}: {error}") from error


def read_mark(storage: Storage) -> CorruptLog | None:
    """What was found to be damaged. Raises UnknownFormat."""
    if not storage.exists(MARK):
        return None
    try:
        found = msgspec.json.decode(storage.read_file(MARK), type=_Mark)
    except (msgspec.DecodeError, ValueError) as error:
        raise UnknownFormat(f"{MARK}: {error}") from error
    return CorruptLog(found.path, found.position, found.offset, found.what)


def write_mark(storage: Storage, error: CorruptLog) -> None:
    storage.replace_file(MARK, msgspec.json.encode(_Mark(error.path, error.position, error.offset, error.what)) + b"\n")


def aside_count(storage: Storage) -> int:
    return len(storage.list(ASIDE)) if storage.exists(ASIDE) else 0


def remove_aside(storage: Storage, before_ms: int) -> None:
    """Blocks."""
    for name in storage.list(ASIDE) if storage.exists(ASIDE) else ():
        if name.isdigit() and int(name) <= before_ms:
            remove_tree(storage, f"{ASIDE}/{name}")


class DamagedReplica:
    def __init__(self, env: Env, shard: int, member: Member, error: CorruptLog) -> None:
        """`env.storage` is rooted in the shard's folder; nothing else is at work there."""
        self.shard = shard
        self.member = member
        self.error = error
        # Others have all that there is: the files may go.
        self.is_superfluous = False
        self._env = env
        self._replica: Replica
        self._saved: Kept | None = None

    async def open(self) -> None:
        """From here on the next start knows of it, too. Raises UnknownFormat."""
        storage = self._env.storage

        def begin() -> Kept | None:
            if not storage.exists(MARK):
                write_mark(storage, self.error)
            return read_kept(storage)

        kept = await self._when_there_is_room(begin)
        _log.critical(
            "shard %d: this replica is damaged (%s); it leads and follows nothing until others have taken over, and "
            "is then fetched anew",
            self.shard,
            self.error,
        )
        self._replica = Replica(self.member, {}, Kept(is_blank=True) if kept is None else kept, is_corrupt=True)
        self._saved = kept
        await self._keep()

    async def promise(self, ballot: Ballot) -> Report | None:
        report = self._replica.promise(ballot)
        await self._keep()
        return report

    async def fence(self, ballot: Ballot, epoch: int) -> Report | None:
        report = self._replica.fence(ballot, epoch)
        await self._keep()
        return report

    async def obey(self, ballot: Ballot, assignment: Assignment) -> bool:
        """Kept when this returns; `is_superfluous` says whether it may be set aside then."""
        is_obeyed = self._replica.obey(ballot, assignment)
        await self._keep()
        counted = {copy.node for copy in (*assignment.isr, *assignment.eligible)}
        is_led_elsewhere = assignment.leader not in (NOBODY, self.member.node)
        self.is_superfluous = is_obeyed and is_led_elsewhere and self.member.node not in counted
        return is_obeyed

    def status(self) -> ShardStatus:
        kept = self._replica.kept
        return ShardStatus(self.shard, Role.DAMAGED, kept.stint, kept.version, kept.isr, 0, 0, (), 0)

    async def _keep(self) -> None:
        kept = self._replica.kept
        if kept != self._saved:
            await self._when_there_is_room(lambda: write_kept(self._env.storage, kept))
            self._saved = kept

    async def _when_there_is_room(self, call: Callable[[], T]) -> T:
        """A full disk is waited for, as by a replica that is sound: the node and its other shards serve on."""
        while True:
            try:
                return await self._env.worker.run(call)
            except DiskFull:
                _log.warning("shard %d: the disk is full, and what its damaged replica must keep waits", self.shard)
                await self._env.clock.sleep(FULL_DISK_PAUSE_S)

    async def set_aside(self) -> None:
        """The folder is that of a replica that has nothing, on a disk that nobody knows, and remembers its promises."""
        assert self.is_superfluous, "the files may be all that there is"
        storage, now_ms = self._env.storage, self._env.clock.wall_us() // 1000
        disk, kept = self._env.ids.uuid(), replace(self._replica.kept, is_blank=True)
        await self._when_there_is_room(lambda: _set_aside(storage, disk, kept, now_ms))
        _log.critical(
            "shard %d: the damaged files lie in %s/%d for a day; everything is fetched from the leader",
            self.shard,
            ASIDE,
            now_ms,
        )


def _set_aside(storage: Storage, disk: UUID, kept: Kept, now_ms: int) -> None:
    """The identity first: whatever is half done after a crash, nobody takes it for the copy that was in sync."""
    storage.replace_file(DISK, f"{disk}\n".encode())
    write_kept(storage, kept)
    target = f"{ASIDE}/{now_ms}"
    storage.make_dir(ASIDE)
    storage.make_dir(target)
    for name in storage.list(""):
        if name not in _STAYING:
            storage.rename(name, f"{target}/{name}")
    storage.sync_dir(target)
    storage.sync_dir(ASIDE)
    storage.sync_dir("")
    storage.remove(MARK)
    storage.sync_dir("")
