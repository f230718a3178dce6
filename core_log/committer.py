"""Decides "confirmed": one sync for all who wait, then the tickets. Driver.

Group commit: whatever was appended while the last sync ran is the next group. Only this file lets a log's synced
end move, so a confirm, a PUBACK and a 200 mean one and the same thing (P10). A sync that fails poisons the
directory: nothing of its group is ever acknowledged, `run` raises, and the process is expected to stop (D6).
"""

from collections.abc import Callable, Sequence

import trio

from headrace.core_log.config import DirectoryConfig
from headrace.core_log.env import Env
from headrace.core_log.errors import DiskFull
from headrace.core_log.ids import Offset
from headrace.core_log.journal import CommitJournal
from headrace.core_log.log import PartitionLog, SyncJob

# How long a full disk is left alone before the same batches are tried again.
FULL_DISK_PAUSE_S = 1.0
# A group of so few records may wait so long for company.
GATHER_COUNT_MAX = 16
GATHER_S = 0.002
PAUSES_SKIPPED = 64
# Of what many logs have gathered, so much is encoded in one step: a millisecond or two.
STEP_BYTES = 512 * 1024


class Committer:
    """One for a data directory. `urgent` and `lazy` are called on the loop, by whoever appended."""

    def __init__(self, env: Env, journal: CommitJournal, config: DirectoryConfig) -> None:
        self._env = env
        self._journal = journal
        self._config = config
        # What the next group commits, and whether it has to be synced.
        self._urgent: dict[PartitionLog, bool] = {}
        self._lazy: dict[PartitionLog, None] = {}
        self._wake = trio.Event()
        self._lazy_wake = trio.Event()
        self._idle = trio.Event()
        self._idle.set()
        self.group_count = 0
        self.journalled_count = 0
        self.disk_full = False
        # Called after each group, when its tickets have been told: whoever gathered answers sends them now.
        self.telling = False
        # How often somebody asked for a commit, and how many pauses would be in vain.
        self._asked_count = 0
        self._pauses_to_skip = 0
        self.on_commit: Callable[[], None] = lambda: None
        # For the replicas of these logs: what can be read by them now, and what is synced here now. A replicated log is
        # committed when its replicas say so, by `tell`.
        self.on_written: Callable[[Sequence[PartitionLog]], None] = lambda logs: None
        self.on_synced: Callable[[Sequence[PartitionLog]], None] = lambda logs: None
        self._cuts: list[tuple[Callable[[], None], trio.Event]] = []

    def urgent(self, log: PartitionLog) -> None:
        """Somebody waits for these records: commit as soon as the sync under way is done.

        A stream that promises less than a sync is only written by then; its sync is due at the next interval.
        """
        self._asked_count += 1
        if not self._urgent:
            self._wake.set()
        if log.config.durability == "sync" or log.is_replicated:
            self._urgent[log] = True
        else:
            self._urgent.setdefault(log, False)
            self.lazy(log)

    def lazy(self, log: PartitionLog) -> None:
        """Nobody waits (transient records): at the next interval. But nobody sees what is replicated before it is."""
        if log.is_replicated:
            self.urgent(log)
            return
        if not self._lazy:
            self._lazy_wake.set()
        self._lazy[log] = None

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._run_lazy)
            while True:
                await self._wake.wait()
                self._idle = trio.Event()
                await self._gather()
                self._wake = trio.Event()
                if self._cuts:
                    await self._make_cuts()
                group, self._urgent = self._urgent, {}
                written = [log for log, has_to in group.items() if not has_to]
                try:
                    await self.commit([log for log, has_to in group.items() if has_to], written)
                finally:
                    self._idle.set()

    async def _gather(self) -> None:
        """Let a trickle of small groups become fewer, larger ones.

        A pause that brought nothing is not tried again for a while: somebody who waits for each answer before the next
        publish is hardly held up. A5-1k: 1.7 times the messages per CPU second (bench/amqp_throughput.py).
        """
        if self._pauses_to_skip:
            self._pauses_to_skip -= 1
            return
        pending = sum(log.end - (log.synced_end if has_to else log.written_end) for log, has_to in self._urgent.items())
        if pending > GATHER_COUNT_MAX:
            return
        asked = self._asked_count
        await self._env.clock.sleep(GATHER_S)
        if self._asked_count == asked:
            self._pauses_to_skip = PAUSES_SKIPPED

    async def _run_lazy(self) -> None:
        while True:
            await self._lazy_wake.wait()
            # What is due by the interval joins the next group; `os` streams are only written.
            await self._env.clock.sleep(self._config.interval_ms / 1000)
            self._lazy_wake = trio.Event()
            logs, self._lazy = list(self._lazy), {}
            for log in logs:
                try:
                    log.seal()
                except DiskFull:
                    # The next group tries again, and pauses if it must.
                    self._urgent[log] = True
                log.advance()
                if log.config.durability != "os" or log.needs_checkpoint:
                    self._urgent[log] = True
            if self._urgent:
                self._wake.set()

    async def flush(self) -> None:
        """Everything appended so far is safe when this returns."""
        while self._urgent or self._lazy or not self._idle.is_set():
            self._urgent.update(dict.fromkeys(self._lazy, True))
            self._lazy = {}
            if self._urgent:
                self._wake.set()
            await self._idle.wait()
            await trio.lowlevel.checkpoint()

    async def synced(self, log: PartitionLog) -> None:
        """What is in this log now is on the disk when this returns, whatever durability it promises."""
        end = log.end
        while log.synced_end < end:
            self._urgent[log] = True
            self._wake.set()
            await self._idle.wait()
            await trio.lowlevel.checkpoint()

    async def commit_apart(self, logs: Sequence[PartitionLog]) -> None:
        """Commit what was written in bulk, beside the groups: fifty files must not hold up those who publish.

        The caller alone asks for these logs' commits meanwhile. A full disk, or replicas that are behind, it waits for.
        """
        self.on_written(logs)
        jobs = [job for job in (log.begin_sync() for log in logs) if job is not None]
        while True:
            try:
                await self._env.worker.run(lambda: _run_syncs(jobs))
                break
            except DiskFull:
                await self._env.clock.sleep(FULL_DISK_PAUSE_S)
        for job in jobs:
            job.log.finish_sync(job, files_later=True)
        self.on_synced([job.log for job in jobs])
        await self._remove_files(jobs)
        for job in jobs:
            told = trio.Event()
            job.log.when_committed(job.end_offset, told.set)
            await told.wait()

    async def cut(self, log: PartitionLog, offset: int) -> None:
        """A follower's records from this offset on are gone when this returns, also for a start after a crash."""
        await self._between_groups(lambda: log.cut_from(offset))

    async def begin_at(self, log: PartitionLog, offset: int) -> None:
        """A follower has let go of its records, and begins here, when this returns."""
        await self._between_groups(lambda: log.begin_at(offset))

    async def _between_groups(self, cut: Callable[[], None]) -> None:
        done = trio.Event()
        self._cuts.append((cut, done))
        self._wake.set()
        await done.wait()

    async def _make_cuts(self) -> None:
        """The journal is emptied first: it would put back what is cut. A cut that meets a full disk is made again from
        its beginning, which it bears at each of its steps; whoever asked for it lets nothing else be done meanwhile."""
        while self._cuts:
            try:
                await self._env.worker.run(self._journal.empty)
                while self._cuts:
                    cut, done = self._cuts[0]
                    cut()
                    del self._cuts[0]
                    done.set()
            except DiskFull:
                self.disk_full = True
                await self._env.clock.sleep(FULL_DISK_PAUSE_S)

    def tell(self, moves: Sequence[tuple[PartitionLog, int]]) -> None:
        """The replicas of these logs have committed so far: who waits is told, and who gathered answers sends them."""
        self.telling = True
        for log, reached in moves:
            log.advance_to(Offset(reached))
        self.telling = False
        self.on_commit()

    async def commit(self, logs: Sequence[PartitionLog], written: Sequence[PartitionLog] = ()) -> None:
        """Seal, write, sync and acknowledge one group; what is in `written` is not synced unless it must be."""
        jobs: list[SyncJob] = []
        told: list[PartitionLog] = []
        unsynced = set(written)
        full = False
        gathered = 0
        for log in (*logs, *written):
            if gathered >= STEP_BYTES:
                # Others have their turns between; what they append is for the next group, or for this one.
                await trio.lowlevel.cancel_shielded_checkpoint()
                gathered = 0
            gathered += log.gathered_bytes
            try:
                log.seal()
            except DiskFull:
                # Nothing of the batch counts yet and nothing is lost: its publishers wait.
                full = self.disk_full = True
                self._urgent[log] = True
            if log in unsynced and not log.needs_checkpoint:
                told.append(log)
            elif (job := log.begin_sync()) is not None:
                jobs.append(job)
        if told:
            self._tell(told)
        self.on_written(logs)
        if jobs:
            await self._sync_when_there_is_room(jobs)
            self.group_count += 1
            self.telling = True
            for job in jobs:
                job.log.finish_sync(job, files_later=True)
            self.telling = False
            self.on_synced([job.log for job in jobs])
            self.on_commit()
        await self._remove_files(jobs)
        # It stands until a whole group finds room.
        self.disk_full = full
        if full:
            await self._env.clock.sleep(FULL_DISK_PAUSE_S)
        if self._urgent:
            self._wake.set()

    async def _remove_files(self, jobs: Sequence[SyncJob]) -> None:
        """Beside the loop: to free files takes milliseconds each, on a busy disk much more."""
        logs = [job.log for job in jobs if job.log.has_files_to_remove]
        if logs:
            await self._env.worker.run(lambda: _remove_all(logs))

    def _tell(self, logs: Sequence[PartitionLog]) -> None:
        """These are written, and promise no more."""
        self.telling = True
        for log in logs:
            log.advance()
        self.telling = False
        self.on_commit()

    async def _sync_when_there_is_room(self, jobs: Sequence[SyncJob]) -> None:
        """The data is in its files already; the journal or a small file may have to wait for space."""
        while True:
            try:
                return await self._env.worker.run(lambda: self._sync(jobs))
            except DiskFull:
                self.disk_full = True
                await self._env.clock.sleep(FULL_DISK_PAUSE_S)

    def _sync(self, jobs: Sequence[SyncJob]) -> None:
        """In the worker: one or two dirty files are synced as they are, more go through the journal (K4)."""
        journalled = [job for job in jobs if job.journallable]
        if sum(len(job.segments) for job in journalled) < self._config.journal_from_files:
            journalled = []
        if journalled:
            self._journal.commit(journalled)
            self.journalled_count += 1
        for job in jobs:
            job.log.run_sync(job, journalled=bool(journalled) and job.journallable)


def _run_syncs(jobs: Sequence[SyncJob]) -> None:
    for job in jobs:
        job.log.run_sync(job)


def _remove_all(logs: Sequence[PartitionLog]) -> None:
    for log in logs:
        log.remove_files()
