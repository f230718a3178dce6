"""Mistakes planted in the cluster, each one line or few, to show that the simulator would find them. Driver for tests.

A mutant is caught when a run of the ordinary simulation fails under it. The mistake stands here, never in the product.
Numbers are those of the known mistakes of other systems that the design lists; mistakes of the protocol that take tens
of thousands of runs are planted in the walks (tests/simulation/partition_walk.py), which are cheaper.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from tests.core_log.power.mutants import _forget_producers, _retry_sync
from tests.simulation.cluster.children import outcomes
from tests.simulation.cluster.town import Result, Town
from tests.simulation.partition_walk import (
    IgnoresWhoIsAboutToJoin,
    ObeysForItsFormerLife,
    ShrinksBeforeTheCommit,
    TrustsAKnownLeader,
)

from headrace.controller import brain as brain_module
from headrace.controller import elections
from headrace.controller.brain import Brain, ToOrder, Trust
from headrace.controller.elections import Verdict
from headrace.core_log.committer import Committer
from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog, SyncJob
from headrace.core_log.producers import ProducerTable
from headrace.core_log.replication import shard as shard_module
from headrace.core_log.replication.assignment import Assignment, Ballot, Member
from headrace.core_log.replication.messages import AlterIsr, Fetch, Report
from headrace.core_log.replication.replica import Replica
from headrace.core_log.replication.shard import ShardReplica
from headrace.core_log.storage.memory import MemoryStorage, Planted
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.consumer_groups import ConsumerGroup
from headrace.gateways.delivery.journal import OutboxState
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.transfers import Transfers

Patch = tuple[object, str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    budget: int
    patches: tuple[Patch, ...] = ()
    planted: Planted | None = None
    # The faults that matter to it; empty: drawn by the seed, as always.
    kinds: tuple[str, ...] = ()

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, wrong in self.patches:
                stack.enter_context(patch.object(target, name, wrong))
            yield

    def run(self, seed: int, *, keep_trace: bool = False) -> Result:
        with self.in_place():
            town = Town(seed, keep_trace=keep_trace, kinds=self.kinds)
            if self.planted is not None:
                for machine in town.machines:
                    machine.disk = MemoryStorage(planted=self.planted)
            return town.run()


def find(mutant: Mutant) -> tuple[int | None, str]:
    """How many seeds it takes to catch it, None if its budget does not do; and how it shows."""
    for result, _cpu_s in outcomes(range(1, mutant.budget + 1), mutant.run):
        if result.violation is not None:
            return result.seed, result.violation.partition("\n")[0][:110]
    return None, ""


# -- disks -----------------------------------------------------------------------------------------------------------

_sync = Committer._sync
_open = ShardReplica.open


def _sync_with_the_next(self: Committer, jobs: Sequence[SyncJob]) -> None:
    """A group counts as synced, and is synced with the one behind it."""
    late: list[SyncJob] = self.__dict__.setdefault("late", [])
    before, late[:] = list(late), jobs
    _sync(self, before)


async def _open_and_cut(self: ShardReplica, *, clean: bool) -> None:
    """What lies beyond the watermark that this replica knows of is cut at a start."""
    await _open(self, clean=clean)
    for log in self.logs.values():
        if log.high_watermark < log.written_end:
            log.cut_from(int(log.high_watermark))


def _nothing(*_arguments: object, **_options: object) -> None:
    return None


# -- replicas --------------------------------------------------------------------------------------------------------


class CountsAnyLife(Replica):
    """What a node has told in another life of it, maybe on another disk, counts for this one."""

    def serve(self, fetch: Fetch) -> Any:
        known = self._followers.get(fetch.member.node)
        if known is not None:
            known.member = fetch.member
        return super().serve(fetch)

    def _counts(self, node: int, follower: Any) -> bool:
        return bool(follower.version == self.kept.version)


class CountsWhatIsWritten(Replica):
    """A follower's position counts up to what it has written, not to what it has synced."""

    def _position(self, log_id: Any) -> Any:
        found = super()._position(log_id)
        return found._replace(synced_end=found.end)

    def _committed_to(self, log_id: Any, log: Any, counted: Any) -> int:
        return min([log.written_end, *(one.synced.get(log_id, 0) for one in counted)])


# -- the controller --------------------------------------------------------------------------------------------------

_begin = Brain.__init__


def _proven_by_anything(row: Assignment, reports: Sequence[Report]) -> Verdict:
    return Verdict.PROVEN if reports else Verdict.UNPROVEN


def _proven_from_the_start(self: Brain, *arguments: Any, **options: Any) -> None:
    _begin(self, *arguments, **options)
    for watch in self._watches.values():
        watch.trust = Trust.PROVEN


def _alter_before_the_sweep(self: Brain, shard: int, request: AlterIsr) -> None:
    watch = self._watches.get(shard)
    if watch is not None:
        watch.request = request
        if watch.trust is Trust.ASKING:
            watch.trust = Trust.PROVEN


def _keeps_lost_disks(row: Assignment, node: int, ballot: Ballot) -> Assignment:
    return row


def _is_there_on_any_disk(copy: Any, active: Mapping[int, Member]) -> bool:
    return copy.node in active


def _is_always_sound(report: Report, isr: object) -> bool:
    return True


def _order_whoever_is_there(self: Brain, number: int, row: Assignment, nodes: Collection[int]) -> None:
    """Orders go to whoever has a session, and whichever life the row names."""
    self._effects += [ToOrder(node, number, row) for node in sorted(nodes) if node in self._sessions]


def _elects_anybody(
    row: Assignment, active: Mapping[int, Member], ballot: Ballot, *, prefer: Sequence[int] = ()
) -> Assignment | None:
    everybody = tuple(sorted(member.copy for node, member in active.items() if node in row.replicas))
    return elections.elected(elections.replace(row, isr=everybody), active, ballot, prefer=prefer)


# -- queues ----------------------------------------------------------------------------------------------------------

_number = Transfers.number
_state = Transfers.state
_settle = Transfers._settle
_publish = Broker.publish
_write_journal = Broker.write_journal


def _number_and_settle(self: Transfers, queue: Queue) -> Any:
    """What is on its way to another log is settled in the state that numbers it, before it is sent."""
    found = _number(self, queue)
    for transfer in found:
        stretch = transfer.what.stretch
        stretch.lane.settle(stretch.seq, stretch.count)
    return found


def _state_of_nothing_sent(self: Transfers, queue: Queue) -> Any:
    boxes, waiting = _state(self, queue)
    return [OutboxState(one.stream, one.partition, one.next_number, []) for one in boxes], waiting


def _settle_numbers(self: Transfers, queue: Queue, move: Any, transfer: Any) -> None:
    if transfer is None:
        _settle(self, queue, move, transfer)
    else:
        self._outbox(queue).settle(transfer)


def _refuse_what_was_appended(self: Broker, *arguments: Any, **options: Any) -> int | None:
    reached = _publish(self, *arguments, **options)
    if self.env.random.random() < 0.05:
        raise DiskFull("refused, though it was appended")
    return reached


async def _journal_later(self: Broker, only: Any = None) -> int:
    """What was settled is said to be safe before it is."""
    return 0 if only is None and self.env.random.random() < 0.3 else await _write_journal(self, only)


# -- consumer groups -------------------------------------------------------------------------------------------------

_check_commit = ConsumerGroup.check_commit


def _any_generation(self: ConsumerGroup, member_id: str, generation: int, offsets: Any) -> None:
    """Whoever holds a partition may commit, in whichever generation it believes to be."""
    _check_commit(self, member_id, self.generation, offsets)


_IN_SYNC = ("rejoin", "straggler", "slownet", "kill", "nodatabase")
_REGRESSION = ("forget", "regress", "straggler", "isolate", "kill")

MUTANTS = (
    Mutant("MUT1 acknowledged before the sync", 500, ((Committer, "_sync", _sync_with_the_next),)),
    Mutant("MUT1 what is written counts", 500, ((shard_module, "Replica", CountsWhatIsWritten),)),
    Mutant("MUT2 cut to the watermark at a start", 500, ((ShardReplica, "open", _open_and_cut),)),
    Mutant("MUT3 a known leader's log is not compared", 3000, ((shard_module, "Replica", TrustsAKnownLeader),)),
    Mutant(
        "MUT4 who is about to join does not count",
        5000,
        ((shard_module, "Replica", IgnoresWhoIsAboutToJoin),),
        kinds=_IN_SYNC,
    ),
    Mutant(
        "MUT5 a shrink counts before its commit",
        1000,
        ((shard_module, "Replica", ShrinksBeforeTheCommit),),
        kinds=_IN_SYNC,
    ),
    Mutant(
        "MUT6 a wiped disk keeps its place",
        500,
        (
            (brain_module, "without_disk", _keeps_lost_disks),
            (Brain, "_without_lost_copies", _nothing),
            (elections, "_is_there", _is_there_on_any_disk),
            (elections, "_is_sound", _is_always_sound),
            (shard_module, "Replica", CountsAnyLife),
        ),
    ),
    Mutant(
        "MUT8 a database that went back is believed",
        2000,
        ((brain_module, "judge", _proven_by_anything), (Brain, "_take_evidence", _nothing)),
        kinds=_REGRESSION,
    ),
    Mutant(
        "MUT9 rows are ordered before the sweep",
        5000,
        ((Brain, "__init__", _proven_from_the_start),),
        kinds=_REGRESSION,
    ),
    Mutant(
        "MUT10 in-sync sets change before the sweep",
        10000,
        ((Brain, "alter", _alter_before_the_sweep),),
        kinds=_REGRESSION,
    ),
    Mutant(
        "MUT11c orders for a former life are obeyed",
        500,
        ((Brain, "_order", _order_whoever_is_there), (shard_module, "Replica", ObeysForItsFormerLife)),
        kinds=("wipe", "kill"),
    ),
    Mutant(
        "MUT12 a failed sync is tried again",
        500,
        ((Committer, "_sync", _retry_sync),),
        planted="no-poison",
        kinds=("badsync", "power"),
    ),
    Mutant("MUT14 folders are not synced", 1000, planted="no-dir-sync"),
    Mutant(
        "MUT15 producers are forgotten with their segment",
        2000,
        ((PartitionLog, "_producer_snapshot", _forget_producers),),
    ),
    Mutant(
        "MUT16 numbers that were cut count as taken",
        2000,
        ((ProducerTable, "withdraw", _nothing),),
        kinds=("depose", "isolate"),
    ),
    Mutant(
        "MUT18 a dead letter's source is settled first",
        500,
        (
            (Transfers, "number", _number_and_settle),
            (Transfers, "state", _state_of_nothing_sent),
            (Transfers, "_settle", _settle_numbers),
        ),
    ),
    Mutant("MUT20 commits of an old generation count", 500, ((ConsumerGroup, "check_commit", _any_generation),)),
    Mutant("MUT24 refused after it was appended", 1000, ((Broker, "publish", _refuse_what_was_appended),)),
    Mutant("no sync does anything", 500, planted="no-sync"),
    Mutant("anybody may be elected", 500, ((brain_module, "elected", _elects_anybody),)),
    Mutant("settled before it is journalled", 500, ((Broker, "write_journal", _journal_later),)),
)
