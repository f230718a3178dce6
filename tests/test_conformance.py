"""The pages of conformance name tests that exist, leave out no statement, and the check of them can fail."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

from .conformance import AMQP, MQTT, PAGES, ROOT, Page, Row, read_rows, rows_of, summary

ROWS = [row for page in PAGES for row in rows_of(page)]

# How many statements each section of the standards has. That of 5.0 on packet identifiers begins with its second.
STATEMENTS: Mapping[str, Mapping[str, int]] = {
    "MQTT 3.1.1": {
        "1.5.3": 3, "2.2.2": 2, "2.3.1": 7, "3.1.0": 2, "3.1.2": 24, "3.1.3": 11, "3.1.4": 5, "3.2.0": 1, "3.2.2": 6,
        "3.3.1": 12, "3.3.2": 3, "3.3.4": 1, "3.3.5": 2, "3.6.1": 1, "3.8.1": 1, "3.8.3": 4, "3.8.4": 6, "3.9.3": 2,
        "3.10.1": 1, "3.10.3": 2, "3.10.4": 6, "3.12.4": 1, "3.14.1": 1, "3.14.4": 3, "4.1.0": 2, "4.2.0": 1,
        "4.3.1": 1, "4.3.2": 2, "4.3.3": 2, "4.4.0": 1, "4.5.0": 2, "4.6.0": 6, "4.7.1": 3, "4.7.2": 1, "4.7.3": 4,
        "4.8.0": 2, "6.0.0": 4, "7.0.0": 2, "7.1.1": 1, "7.1.2": 1,
    },
    "MQTT 5.0": {
        "1.5.4": 3, "1.5.5": 1, "1.5.7": 1, "2.1.3": 1, "2.2.1": 6, "2.2.2": 1, "3.1.0": 2, "3.1.2": 30, "3.1.3": 12,
        "3.1.4": 6, "3.2.0": 2, "3.2.2": 22, "3.3.1": 13, "3.3.2": 20, "3.3.4": 10, "3.4.2": 3, "3.5.2": 3,
        "3.6.1": 1, "3.6.2": 3, "3.7.2": 3, "3.8.1": 1, "3.8.3": 5, "3.8.4": 8, "3.9.2": 2, "3.9.3": 2, "3.10.1": 1,
        "3.10.3": 2, "3.10.4": 6, "3.11.2": 2, "3.11.3": 2, "3.12.4": 1, "3.14.0": 1, "3.14.1": 1, "3.14.2": 4,
        "3.14.4": 3, "3.15.1": 1, "3.15.2": 3, "4.1.0": 2, "4.2.0": 1, "4.3.1": 1, "4.3.2": 5, "4.3.3": 13,
        "4.4.0": 2, "4.5.0": 2, "4.6.0": 6, "4.7.0": 1, "4.7.1": 2, "4.7.2": 1, "4.7.3": 4, "4.8.2": 6, "4.9.0": 3,
        "4.12.0": 7, "4.12.1": 2, "4.13.1": 1, "4.13.2": 1, "6.0.0": 4,
    },
}  # fmt: skip


@cache
def functions(file: Path) -> set[str]:
    found = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_rows_and_no_feature_stands_twice_in_a_section(page: Page) -> None:
    names = [(row.section, row.feature) for row in rows_of(page)]
    assert len(names) > 80
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(("standard", "count"), [("MQTT 3.1.1", 142), ("MQTT 5.0", 251)])
def test_every_statement_of_a_standard_has_its_row(standard: str, count: int) -> None:
    wanted = {
        f"MQTT-{section}-{number}" for section, most in STATEMENTS[standard].items() for number in range(1, most + 1)
    }
    if standard == "MQTT 5.0":
        wanted.remove("MQTT-2.2.1-1")
    assert {row.feature for row in rows_of(MQTT) if row.section == standard} == wanted
    assert len(wanted) == count


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_named_test_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert function in functions(ROOT / file)


def test_rows_that_are_not_yet_name_a_step_of_the_roadmap() -> None:
    steps = set(map(int, re.findall(r"^(\d+)\. ", (ROOT / "docs" / "roadmap.md").read_text(), re.MULTILINE)))
    assert {row.roadmap for row in ROWS if row.roadmap is not None} <= steps


@pytest.mark.parametrize("shown", ["soon", "not yet", "not yet: roadmap 2", "test_a.py::test_b", "not ours"])
def test_row_without_test_or_reason_is_refused(shown: str) -> None:
    with pytest.raises(ValueError, match="name the tests"):
        read_rows(f"| a | b | {shown} |", "t")


@pytest.mark.parametrize(
    ("passed", "count", "problem"),
    [
        ({"t::a": True, "t::b": True}, 1, None),
        ({"t::a": True}, 0, "t::b was not collected"),
        ({"t::a": True, "t::b": False}, 0, "t::b did not pass"),
    ],
)
def test_row_is_shown_when_all_its_tests_passed(passed: dict[str, bool], count: int, problem: str | None) -> None:
    rows = [Row("s", "f", ("t::a", "t::b")), Row("s", "g", (), 2)]
    line, wrong = summary(AMQP.name, rows, passed)
    assert line == f"amqp conformance: {count} of 1 rows shown by tests (1 not yet)"
    assert [one.partition(" (")[0] for one in wrong] == ([problem] if problem else [])


def test_rows_that_are_not_ours_are_counted_apart() -> None:
    rows = [Row("s", "f", ("t::a",)), *read_rows("| a | b | not ours: a duty of clients |", "t")]
    line, wrong = summary(MQTT.name, rows, {"t::a": True})
    assert (line, wrong) == ("mqtt conformance: 1 of 1 rows shown by tests (0 not yet, 1 not ours)", [])
