"""The page of AMQP conformance names tests that exist, and the check of it can fail."""

import ast
import re
from pathlib import Path

import pytest

from .conformance import PAGE, ROOT, Row, read_rows, summary

ROWS = read_rows(PAGE.read_text())


def functions(file: Path) -> set[str]:
    found = ast.walk(ast.parse(file.read_text()))
    return {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_page_has_rows_and_no_feature_stands_twice_in_a_section() -> None:
    names = [(row.section, row.feature) for row in ROWS]
    assert len(names) > 80
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_named_test_exists(test: str) -> None:
    file, _, function = test.partition("::")
    assert function in functions(ROOT / file)


def test_rows_that_are_not_yet_name_a_step_of_the_roadmap() -> None:
    steps = set(map(int, re.findall(r"^(\d+)\. ", (ROOT / "docs" / "roadmap.md").read_text(), re.MULTILINE)))
    assert {row.roadmap for row in ROWS if row.roadmap is not None} <= steps


@pytest.mark.parametrize("shown", ["soon", "not yet", "not yet: roadmap 2", "test_a.py::test_b"])
def test_row_without_test_or_roadmap_is_refused(shown: str) -> None:
    with pytest.raises(ValueError, match="name the tests"):
        read_rows(f"| a | b | {shown} |")


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
    line, wrong = summary(rows, passed)
    assert line == f"amqp conformance: {count} of 1 rows shown by tests (1 not yet)"
    assert [one.partition(" (")[0] for one in wrong] == ([problem] if problem else [])
