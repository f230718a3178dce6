"""A sample of the long proofs of the log core: `make crash` and `make mutants` run all of it.

A run that fails names its seed: python -m tests.core_log.power seed SEED
"""

from collections.abc import Iterator
from random import SystemRandom

import pytest

from . import directed
from .mutants import MUTANTS, Mutant, find
from .states import WORKLOADS, Workload, explore
from .world import World, small_segments

FIXED_SEEDS = range(150)
FRESH_COUNT = 150
# What a budget of seeds must do in the suite; the slower ones wait for `make mutants`.
QUICK = [mutant for mutant in MUTANTS if mutant.name.startswith("MUT") or mutant.directed is not None]


@pytest.fixture(autouse=True)
def small_files() -> Iterator[None]:
    with small_segments():
        yield


def run(seeds: range) -> None:
    outcomes = [World(seed).run() for seed in seeds]
    assert sum(one.vacuous for one in outcomes) < len(seeds) // 2
    assert sum(one.acked_count for one in outcomes) > len(seeds)


def test_d1_d2_o1_o2_o4_nothing_promised_is_lost_over_fixed_seeds() -> None:
    run(FIXED_SEEDS)


def test_d1_d2_o1_o2_o4_nothing_promised_is_lost_over_fresh_seeds() -> None:
    first = SystemRandom().randrange(1 << 40)
    run(range(first, first + FRESH_COUNT))


def test_a_run_follows_from_its_seed() -> None:
    for seed in range(20):
        one, other = World(seed), World(seed)
        assert one.run() == other.run()
        assert one.done == other.done


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.__name__)
def test_no_crash_state_loses_what_was_promised(workload: Workload) -> None:
    _prefixes, states, problems = explore(workload, 16, every=13)
    assert problems == []
    assert states > 10


@pytest.mark.parametrize("mutant", QUICK, ids=lambda mutant: mutant.name)
def test_planted_mistake_is_found_within_its_budget(mutant: Mutant) -> None:
    seeds, _how = find(mutant, 0)
    assert seeds is not None


def test_batch_in_a_recycled_file_is_not_taken_over() -> None:
    directed.batch_in_recycled_file_is_not_taken_over()


def test_d6_checkpoint_of_a_failed_sync_is_not_built_upon() -> None:
    directed.checkpoint_of_a_failed_sync_is_not_built_upon()
