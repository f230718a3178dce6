"""The rules of replication and of the controller: each is shown by a test that is named after it."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
RULES = re.findall(r"^\| ([EV]\d) \|", (ROOT / "docs" / "rules.md").read_text(), re.MULTILINE)
# What a new controller and its replicas owe each other, by the numbers that the code cites.
CONTROLLER = [f"C{number}" for number in range(1, 8)]


@pytest.mark.parametrize("rule", [*RULES, *CONTROLLER])
def test_a_test_is_named_after_the_rule(rule: str) -> None:
    named = re.compile(rf"def test_(\w+_)?{rule.lower()}_")
    assert any(named.search(path.read_text()) for path in (ROOT / "tests").rglob("test_*.py")), rule


def test_all_rules_of_the_page_are_looked_for() -> None:
    assert set(RULES) >= {*(f"E{number}" for number in range(1, 9)), "V1", "V2", "V3"}
