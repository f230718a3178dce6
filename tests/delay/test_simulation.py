"""A short sample of the delay engine against its oracle; `make sim-delay` runs 100,000 operations."""

import pytest

from .simulation.mutants import MUTANTS, Mutant
from .simulation.world import World


@pytest.mark.parametrize("seed", range(3))
def test_t1_t2_t3_t4_hold_through_crashes_and_clocks_that_are_set(seed: int) -> None:
    tally = World(seed, lives=3).run()
    assert tally.operations and tally.parked and tally.arrived


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.budget <= 10], ids=lambda one: one.name)
def test_mistake_that_shows_at_once_is_caught(mutant: Mutant) -> None:
    with pytest.raises(ExceptionGroup):
        mutant.run(0)
