"""What fails alone too has failed, whatever it did beside others."""

from pathlib import Path

import pytest

from .unsteady import TRIED_MAX, passes_alone

TWO = """
def test_that_passes_alone():
    pass

def test_that_fails_alone():
    assert False
"""


@pytest.fixture
def two(tmp_path: Path) -> Path:
    (tmp_path / "test_two.py").write_text(TWO)
    return tmp_path


def test_what_passes_alone_is_told_from_what_fails_alone(two: Path) -> None:
    assert passes_alone(["test_two.py::test_that_passes_alone"], two)
    assert not passes_alone(["test_two.py::test_that_fails_alone"], two)
    assert not passes_alone(["test_two.py::test_that_passes_alone", "test_two.py::test_that_fails_alone"], two)


def test_many_failures_are_no_accident(two: Path) -> None:
    assert not passes_alone([], two)
    assert not passes_alone(["test_two.py::test_that_passes_alone"] * (TRIED_MAX + 1), two)
