"""What the delay engine asks of whoever carries a due record to its target. Values and a protocol.

The engine decides a moment ahead that records fire, writes that down with the numbers of its outbox
(core_log/outbox.py), waits for the commit and for the due time, and only then calls `fire`. After a crash it calls
`fire` again with the same numbers, in the same order, for whatever was not known to be done;
PartitionLog.append_dense writes each once.
Neighbours: delays.py calls; gateways/delivery has somebody for each kind of target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import Headers, Producer


@dataclass(frozen=True, slots=True, eq=False)
class DueRun:
    """Due records of one target that go to one partition (or to none) and share attributes and tags; by due time."""

    target: bytes
    # None: there is no log to append to; the duty is done by `fire` itself, and perhaps again after a crash.
    where: TargetPartition | None
    # Number of the first record: for append_dense, with `settled`. None exactly when `where` is.
    producer: Producer | None
    settled: int
    ids: Sequence[bytes]
    due_us: Sequence[int]
    keys: Sequence[bytes]
    properties: Sequence[bytes]
    values: Sequence[bytes]
    attributes: int
    tags: tuple[str, ...]
    headers: Sequence[Headers] | None

    def __len__(self) -> int:
        return len(self.values)


class Fire(Protocol):
    def places(self, target: bytes, keys: Sequence[bytes]) -> Sequence[TargetPartition | None]:
        """The partition that each record of a target with this key will be appended to; None: to no log.

        Asked once, before the firing is decided. None also for a target that is gone.
        """

    def fire(self, run: DueRun, done: Callable[[], None]) -> None:
        """Carry it to its target; call `done` once, when it is committed there (or there is nothing left to do).

        Runs of one partition come in the order of their numbers. DiskFull: the engine calls again later. A target
        that is gone meanwhile is no error: `done` is called.
        """
