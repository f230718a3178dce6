"""docs/amqp-conformance.md as data: which rows there are, and whether the tests they name have shown them. Pure.

Neighbours: conftest.py feeds it with a run of pytest, test_conformance.py holds the page to its form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "amqp-conformance.md"
FOLDER = "tests/gateways/amqp"

_TEST = re.compile(r"`([\w/.]+\.py::\w+)`")
_NOT_YET = re.compile(r"not yet: .+; roadmap (\d+)")


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    feature: str
    # As pytest names them, without parameters; none for what is not there yet.
    tests: tuple[str, ...]
    # The step of the roadmap that brings it.
    roadmap: int | None = None


def read_rows(page: str) -> list[Row]:
    """Raises ValueError for a row that names neither a test nor a step of the roadmap."""
    rows: list[Row] = []
    section = ""
    for line in page.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3 or cells[0] in ("feature", "---"):
            continue
        tests = tuple(name if name.startswith("tests/") else f"{FOLDER}/{name}" for name in _TEST.findall(cells[2]))
        later = _NOT_YET.fullmatch(cells[2])
        if bool(tests) == bool(later):
            raise ValueError(f"{section}, {cells[0]}: name the tests, or 'not yet: why; roadmap N'")
        rows.append(Row(section, cells[0], tests, int(later[1]) if later is not None else None))
    return rows


def summary(rows: list[Row], passed: Mapping[str, bool]) -> tuple[str, list[str]]:
    """The line for people, and what is wrong. `passed`: each test that ran, True if all its parameters passed."""
    wrong: list[str] = []
    shown = 0
    promised = [row for row in rows if row.roadmap is None]
    for row in promised:
        problems = [
            f"{test} {'did not pass' if test in passed else 'was not collected'} ({row.section}, {row.feature})"
            for test in row.tests
            if not passed.get(test, False)
        ]
        wrong += problems
        shown += not problems
    not_yet = len(rows) - len(promised)
    return f"amqp conformance: {shown} of {len(promised)} rows shown by tests ({not_yet} not yet)", wrong
