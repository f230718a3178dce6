"""The limits of the machine, from the real program."""

import dataclasses
from pathlib import Path

import pytest
from bench import machine


@pytest.fixture
def limits(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "LIMITS", programs / "limits")


def test_every_limit_is_found_in_what_the_program_prints(limits: None, tmp_path: Path) -> None:
    found = dataclasses.asdict(machine.measure(tmp_path, 0.01))
    assert found.keys() == machine.LINES.keys()
    assert [name for name, value in found.items() if not value > 0] == []


def test_nothing_is_left_in_the_directory(limits: None, tmp_path: Path) -> None:
    machine.measure(tmp_path, 0.01)
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="tcp_round_trip_us"):
        machine.parse("memcpy 64 KB blocks (in cache): 55343 MB/s\n")


def test_the_machine_is_described_beside_its_limits(limits: None) -> None:
    described = machine.describe(0.01)
    assert described.cores >= 1
    assert described.processor
    assert described.limits.tcp_mb_s > 0


def test_the_file_system_of_proc_is_proc() -> None:
    assert machine.file_system(Path("/proc/self")) == "proc"
