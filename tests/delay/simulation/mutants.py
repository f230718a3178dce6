"""Mistakes planted in the delay engine, each one line, to show that the simulation would find them. Driver for tests.

A mutant is caught when a run of the simulation fails under it. The mistake stands here, never in the product.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import trio

from headrace.delay import firing as firing_module
from headrace.delay.decisions import Decision, Snapshot
from headrace.delay.engine import Engine
from headrace.delay.firing import Firing
from headrace.delay.ledger import Ledger, Source
from headrace.delay.marks import INTAKE, State
from headrace.delay.rows import Rows
from headrace.delay.sorter import Sorter
from headrace.delay.waiting import Waiting

from .world import World

Patch = tuple[object, str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    budget: int
    patches: tuple[Patch, ...]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        with ExitStack() as stack:
            for target, name, wrong in self.patches:
                stack.enter_context(patch.object(target, name, wrong))
            yield

    def run(self, seed: int) -> None:
        with self.in_place():
            World(seed).run()


def find(mutant: Mutant, first: int) -> tuple[int | None, str]:
    """How many seeds it takes to catch it, None if its budget does not do; and how it shows."""
    for count in range(mutant.budget):
        try:
            mutant.run(first + count)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            return count + 1, f"{type(error).__name__}: {error}"[:90]
    return None, ""


_snapshot = Ledger.snapshot


async def _not_durable(self: Engine, *_ends: object) -> None:
    """Whoever should wait for a commit goes on after a moment."""
    await trio.sleep(0.0001)


def _durable_at_once(self: Firing, one: Any) -> bool:
    """Fires before the decision is durable."""
    return True


def _decide_lazily(self: Engine, *made: Decision, urgent: bool = True) -> int:
    """Decisions reach the disk some time after what they are about."""
    return _decide(self, *made, urgent=False)


_decide = Engine.decide


def _hand_at_once(self: Firing, one: Any) -> None:
    _hand(self, one)
    self._hand_wake.set()


_hand = Firing._hand


def _due_at_once(self: Firing, one: Any) -> int:
    """Fires what is decided, due or not."""
    return len(one.bodies) - one.head


def _floor_forgotten(self: Waiting, end: int) -> int:
    """Lets go of the intake as far as it was sorted, whatever was kept back."""
    unsorted = self.first_unsorted()
    return end if unsorted is None else unsorted.first


def _all_count(self: Engine, rows: Rows) -> Any:
    """Forgets what was sorted away when the intake is read again."""
    return self.ledger.states(rows["place"]) == State.PENDING


def _snapshot_without_moves(self: Ledger) -> Snapshot:
    return msgspec.structs.replace(_snapshot(self), unsettled=[])


def _snapshot_without_marks(self: Ledger) -> Snapshot:
    return msgspec.structs.replace(_snapshot(self), intake_marks=[])


def _idle_though_unsettled(self: Ledger) -> list[Source]:
    return [one for one in self.sources.values() if one.number != INTAKE and not one.pending]


def _settle_at_once(self: Firing, one: Any, count: int) -> Callable[[], None]:
    done = _done(self, one, count)
    done()
    return lambda: None


_done = Firing._done


def _cut_short(self: Waiting, low_us: int, high_us: int) -> list[Rows]:
    """The edge passes over what the intake holds."""
    return []


async def _finish_without_decided(self: Sorter, one: Any) -> None:
    """What was cancelled while a pass was under way comes back in its bucket."""
    with patch.object(Ledger, "states", lambda _ledger, places: np.zeros(len(places), dtype=np.uint8)):
        await _finish(self, one)


_finish = Sorter._finish


MUTANTS = (
    Mutant(
        "fires before the decision is durable",
        60,
        (
            (Firing, "is_durable", _durable_at_once),
            (Firing, "_hand", _hand_at_once),
            (Engine, "decide", _decide_lazily),
        ),
    ),
    Mutant("fires what is due a moment later", 40, ((Firing, "_due_count", _due_at_once),)),
    Mutant("forgets the floor of what was kept back", 40, ((Waiting, "floor", _floor_forgotten),)),
    Mutant("settles before the target has committed", 60, ((Firing, "_done", _settle_at_once),)),
    Mutant("answers and moves before anything is durable", 120, ((Engine, "durable", _not_durable),)),
    Mutant("reads what was sorted away again", 40, ((Engine, "_counting", _all_count),)),
    Mutant("a snapshot forgets what is under way", 80, ((Ledger, "snapshot", _snapshot_without_moves),)),
    Mutant("a snapshot forgets what was decided", 40, ((Ledger, "snapshot", _snapshot_without_marks),)),
    Mutant("the edge passes over the intake", 20, ((Waiting, "between", _cut_short),)),
    Mutant("a pass brings back what was cancelled meanwhile", 80, ((Sorter, "_finish", _finish_without_decided),)),
    Mutant("drops a bucket that a firing still needs", 120, ((Ledger, "idle_sources", _idle_though_unsettled),)),
    Mutant("reads no further ahead than is due", 20, ((firing_module, "AHEAD_US", -2_000_000_000_000_000),)),
)
