"""The pages of conformance as data: which rows there are, and whether the tests they name have shown them. Pure.

docs/amqp-conformance.md has a row for each feature, docs/mqtt-conformance.md one for each numbered statement of the
standards. Neighbours: conftest.py feeds it with a run of pytest, test_conformance.py holds the pages to their form.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

_TEST = re.compile(r"`([\w/.]+\.py::\w+)`")
_NOT_YET = re.compile(r"not yet: .+; roadmap (\d+)")
_NOT_OURS = re.compile(r"not ours: .+")


@dataclass(frozen=True, slots=True)
class Page:
    name: str
    path: Path
    # Where the tests are that its rows name; those of other folders are named with theirs.
    folder: str


AMQP = Page("amqp", ROOT / "docs" / "amqp-conformance.md", "tests/gateways/amqp")
MQTT = Page("mqtt", ROOT / "docs" / "mqtt-conformance.md", "tests/gateways/mqtt")
PAGES = (AMQP, MQTT)


@dataclass(frozen=True, slots=True)
class Row:
    section: str
    feature: str
    # As pytest names them, without parameters; none for what is not there yet, or not ours to do.
    tests: tuple[str, ...]
    # The step of the roadmap that brings it.
    roadmap: int | None = None


def rows_of(page: Page) -> list[Row]:
    return read_rows(page.path.read_text(), page.folder)


def read_rows(text: str, folder: str) -> list[Row]:
    """Raises ValueError for a row that names neither a test, nor a step of the roadmap, nor why it is not ours."""
    rows: list[Row] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) != 3 or cells[0] in ("feature", "statement", "---"):
            continue
        tests = tuple(name if name.startswith("tests/") else f"{folder}/{name}" for name in _TEST.findall(cells[2]))
        later = _NOT_YET.fullmatch(cells[2])
        if bool(tests) + bool(later) + bool(_NOT_OURS.fullmatch(cells[2])) != 1:
            raise ValueError(f"{section}, {cells[0]}: name the tests, or 'not yet: why; roadmap N', or 'not ours: why'")
        rows.append(Row(section, cells[0], tests, int(later[1]) if later is not None else None))
    return rows


def summary(name: str, rows: list[Row], passed: Mapping[str, bool]) -> tuple[str, list[str]]:
    """The line for people, and what is wrong. `passed`: each test that ran, True if all its parameters passed."""
    wrong: list[str] = []
    shown = 0
    promised = [row for row in rows if row.tests]
    for row in promised:
        problems = [
            f"{test} {'did not pass' if test in passed else 'was not collected'} ({row.section}, {row.feature})"
            for test in row.tests
            if not passed.get(test, False)
        ]
        wrong += problems
        shown += not problems
    not_yet = sum(row.roadmap is not None for row in rows)
    rest = f"{not_yet} not yet"
    if not_ours := len(rows) - len(promised) - not_yet:
        rest += f", {not_ours} not ours"
    return f"{name} conformance: {shown} of {len(promised)} rows shown by tests ({rest})", wrong
