"""A fixed sample of random walks over the controller's brain, as it is and with planted mistakes."""

import pytest
from tests.simulation.brain_walk import MISTAKES, first_violation, walk

BUDGETS = {"unclean_election": 20, "born_blindly": 300}


@pytest.mark.parametrize("block", range(4))
def test_no_walk_breaks_a_rule_of_the_controller(block: int) -> None:
    led = 0
    for seed in range(block * 50, block * 50 + 50):
        led += len(walk(seed).leaders)
    assert led > 100, "the walks do nothing"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_is_found(mistake: str) -> None:
    assert first_violation(BUDGETS[mistake], mistake) is not None
