"""A sample of the walks over one shard; `make walks` takes many more."""

import pytest
from tests.simulation.partition_stories import STORIES, tell
from tests.simulation.partition_walk import BUDGETS, MISTAKES, first_violation, walk


@pytest.mark.parametrize("budget", BUDGETS)
def test_no_walk_loses_what_was_acknowledged(budget: str) -> None:
    acked = sum(len(walk(seed, budget=BUDGETS[budget]).acked) for seed in range(200))
    assert acked > 200, "walks that acknowledge nothing show nothing"


@pytest.mark.parametrize(
    ("mistake", "walks"),
    [
        ("obeys_for_its_former_life", 100),
        ("ignores_who_is_about_to_join", 100),
        ("cuts_to_its_watermark", 400),
        ("trusts_a_known_leader", 100),
    ],
)
def test_a_planted_mistake_is_found(mistake: str, walks: int) -> None:
    assert first_violation(mistake, walks) is not None


@pytest.mark.parametrize("mistake", STORIES)
def test_a_story_goes_wrong_under_its_mistake_and_only_then(mistake: str) -> None:
    assert tell(STORIES[mistake]) is None
    assert tell(STORIES[mistake], MISTAKES[mistake].mistakes) is not None


def test_every_mistake_is_met_by_walks_or_has_a_story() -> None:
    assert {name for name, planted in MISTAKES.items() if not planted.walks} == STORIES.keys()
