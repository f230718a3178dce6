"""Mistakes planted in the log core, each one line, to show that the power-loss test would find them. Driver.

A mutant is caught when a run of the ordinary test fails under it: a promise is broken, or the log no longer opens.
The mistake stands here, never in the product: a patch for the length of a run, or one of the switches that
MemoryStorage has for this. Those with a number are the known mistakes of other systems.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from headrace.core_log import directory as directory_module
from headrace.core_log import log as log_module
from headrace.core_log import segment as segment_module
from headrace.core_log.checkpoint import Checkpoint, CheckpointFile
from headrace.core_log.committer import Committer
from headrace.core_log.errors import Poisoned
from headrace.core_log.format import SEGMENT_HEAD_SIZE, BatchHeader, maybe_header, maybe_segment_head
from headrace.core_log.ids import Offset
from headrace.core_log.journal import CommitJournal
from headrace.core_log.log import PartitionLog, SyncJob
from headrace.core_log.producers import ProducerTable
from headrace.core_log.segment import Segment
from headrace.core_log.storage.contract import File
from headrace.core_log.storage.memory import Planted

from .directed import batch_in_recycled_file_is_not_taken_over, checkpoint_of_a_failed_sync_is_not_built_upon
from .fuse import FusedStorage
from .world import World

Patch = tuple[object, str, Callable[..., Any] | property]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    budget: int
    patches: tuple[Patch, ...] = ()
    planted: Planted | None = None
    # For what chance meets too rarely: a story that fails under it.
    directed: Callable[[], None] | None = None

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, wrong in self.patches:
                stack.enter_context(patch.object(target, name, wrong))
            yield

    def run(self, seed: int) -> None:
        with self.in_place():
            if self.directed is not None:
                return self.directed()
            World(seed, planted=self.planted).run()


def find(mutant: Mutant, first: int) -> tuple[int | None, str]:
    """How many seeds it takes to catch it, None if its budget does not do; and how it shows."""
    for count in range(mutant.budget):
        try:
            mutant.run(first + count)
        except Exception as error:
            return count + 1, f"{type(error).__name__}: {error}"[:100]
    return None, ""


# -- the mistakes ----------------------------------------------------------------------------------------------------

_sync = Committer._sync
_run_sync = PartitionLog.run_sync
_recover = PartitionLog._recover
_write_checkpoint = CheckpointFile.write
_anchor = CheckpointFile.anchor
_sync_dir = FusedStorage.sync_dir


def _acknowledge_first(self: Committer, jobs: Sequence[SyncJob]) -> None:
    for job in jobs:
        job.log.synced_end = Offset(job.end_offset)
        job.log.advance()
    _sync(self, jobs)


def _retry_sync(self: Committer, jobs: Sequence[SyncJob]) -> None:
    try:
        _sync(self, jobs)
    except Poisoned:
        _sync(self, jobs)


def _checkpoint_first(self: PartitionLog, job: SyncJob, *, journalled: bool = False) -> None:
    if job.checkpoint is not None:
        self._checkpoint.write(job.checkpoint, sync=True)
    _run_sync(self, job, journalled=journalled)


def _sync_no_segments(self: FusedStorage, path: str) -> None:
    if not any(name.endswith(".log") for name in self.list(path)):
        _sync_dir(self, path)


def _write_same_slot(self: CheckpointFile, value: Checkpoint, *, sync: bool) -> None:
    _write_checkpoint(self, value, sync=sync)
    if sync:
        self._loose_slot = 1 - self._loose_slot


def _anchor_only(self: CheckpointFile) -> File:
    if not self._anchored:
        self._storage.open(self.path).sync()
        self._anchored, self.synced = True, self.value
    return _anchor(self)


def _recover_below_ceiling(self: PartitionLog, found: Checkpoint | None) -> None:
    _recover(self, None if found is None else found._replace(ceiling=0))


def _any_salt(data: bytes, position: int, salt: int) -> BatchHeader | None:
    own = int.from_bytes(data[position + 8 : position + 16], "little")
    return maybe_header(data, position, own)


def _any_head(self: PartitionLog, segment: Segment) -> bool:
    return maybe_segment_head(segment.file.read(0, SEGMENT_HEAD_SIZE)) is not None


def _only_sync(self: Segment, position: int) -> None:
    self.file.sync()


def _forget_producers(self: PartitionLog) -> bytes:
    empty = ProducerTable(expiry_us=1, count_max=1)
    empty.next_offset = self.written_end
    return empty.encode(0)


def _snapshot_at_once(self: PartitionLog, job: SyncJob, *, journalled: bool = False) -> None:
    if job.checkpoint is not None:
        self._save_producers()
    _run_sync(self, job, journalled=journalled)


def _nothing(*_arguments: object, **_options: object) -> None:
    return None


def _zero(*_arguments: object, **_options: object) -> int:
    return 0


MUTANTS = (
    Mutant("MUT1 acknowledged before the sync", 500, ((Committer, "_sync", _acknowledge_first),)),
    Mutant("MUT12 a failed sync is tried again", 500, ((Committer, "_sync", _retry_sync),), planted="no-poison"),
    Mutant(
        "MUT13 the log is cut at damage in its middle",
        500,
        ((Segment, "_claimed_beyond", _zero), (PartitionLog, "_refuse_loss", _nothing)),
    ),
    Mutant("MUT14 folders are not synced", 1000, planted="no-dir-sync"),
    Mutant("MUT14 a folder of segments is not synced", 1000, ((FusedStorage, "sync_dir", _sync_no_segments),)),
    Mutant(
        "MUT15 producers are forgotten with their segment",
        2000,
        ((PartitionLog, "_producer_snapshot", _forget_producers),),
    ),
    Mutant("no sync does anything", 500, planted="no-sync"),
    Mutant("the checkpoint is written before the data", 1000, ((PartitionLog, "run_sync", _checkpoint_first),)),
    Mutant("the synced slot of the checkpoint is overwritten", 1000, ((CheckpointFile, "write", _write_same_slot),)),
    Mutant(
        "a checkpoint that was read is not written again",
        1,
        ((CheckpointFile, "anchor", _anchor_only),),
        directed=checkpoint_of_a_failed_sync_is_not_built_upon,
    ),
    Mutant("the journal is not replayed", 500, ((directory_module, "replay", _zero),)),
    Mutant("the journal starts over without settling", 2000, ((CommitJournal, "settle", _nothing),)),
    Mutant("offsets above the ceiling are issued again", 500, ((PartitionLog, "_recover", _recover_below_ceiling),)),
    Mutant(
        "batches of any salt are taken",
        1,
        ((segment_module, "maybe_header", _any_salt), (log_module, "maybe_header", _any_salt)),
        directed=batch_in_recycled_file_is_not_taken_over,
    ),
    Mutant("a recycled file's old head is taken", 2000, ((PartitionLog, "_has_head", _any_head),)),
    Mutant("recovered batches are not synced", 1000, ((Segment, "write_again", _nothing),)),
    Mutant("recovered batches are synced, not written again", 2000, ((Segment, "write_again", _only_sync),)),
    Mutant("producers are saved before their records", 3000, ((PartitionLog, "run_sync", _snapshot_at_once),)),
)
