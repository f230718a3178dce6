"""The standard scenarios: every one is a command line that loadgen takes, and a run of one is a result."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench import scenarios
from bench.claim import NotRun
from bench.peers.peer import Running
from bench.scenarios import BY_NAME, SCENARIOS, Kind, Scenario
from interop.ports import free_ports

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def loadgen(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "LOADGEN", programs / "loadgen")


def test_names_are_distinct() -> None:
    assert len(BY_NAME) == len(SCENARIOS)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_loadgen_takes_the_flags(scenario: Scenario) -> None:
    nobody = Running("nobody", scenario.proto, free_ports(1)[0], 1, "0", Path("/dev/null"))
    fewer = ["--idle-connections", "1", "--hold", "0"] if scenario.kind is Kind.IDLE else ["--publishers", "1"]
    result = scenarios.load(nobody, scenario.name, [*scenario.flags, *fewer])
    assert result["exit"] == 1  # 2 would be wrong usage
    assert "Connection refused" in str(scenarios.failure(result))


def test_a_run_is_what_loadgen_reports_and_its_status(null_broker: Running) -> None:
    ((name, result),) = scenarios.play(BY_NAME["M2"], null_broker, 0.2).items()
    assert (name, result["exit"], result["label"], result["lost"]) == ("M2", 0, "M2", 0)
    assert result["received"] > 0
    assert scenarios.failure(result) is None


def test_a_load_generator_that_is_not_built_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenarios, "LOADGEN", Path("nothing here"))
    nobody = Running("nobody", "mqtt", 1, 1, "0", Path("/dev/null"))
    with pytest.raises(NotRun, match="make -C bench"):
        scenarios.load(nobody, "M2", [])


@pytest.mark.parametrize(
    ("result", "why"),
    [
        ({"exit": 0, "errors": 0, "lost": 7}, None),
        ({"exit": 1, "errors": 1, "error_text": "connection lost"}, "connection lost"),
        ({"exit": 1, "errors": 0, "error_text": "", "nacked": 3, "unconfirmed": 0}, "3 nacked"),
        ({"exit": 1, "errors": 0}, "exit status 1"),
    ],
)
def test_failure_says_what_went_wrong(result: scenarios.Result, why: str | None) -> None:
    assert scenarios.failure(result) == why


def test_report_shows_medians_and_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = {"exit": 0, "received_per_s": 1000.0, "received_per_server_cpu_s": 2000.0, "received": 10, "lost": 0}
    bad = {"exit": 1, "errors": 1, "error_text": "connection lost"}
    lines = [
        {"peer": "one", "scenario": "A1-100", "rep": rep, "time": "", "result": result}
        for rep, result in enumerate([good, good | {"received_per_s": 3000.0}, good | {"received_per_s": 2000.0}, bad])
    ]
    (tmp_path / "results.jsonl").write_text("\n".join(map(json.dumps, lines)))
    scenarios.report([str(tmp_path / "results.jsonl")])
    shown = capsys.readouterr().out
    assert "### A1-100" in shown
    assert "| one | 2,000 (1,000–3,000) | 2,000 (2,000–2,000) |" in shown
    assert "3 (1 failed: connection lost)" in shown


def test_an_unknown_scenario_is_refused() -> None:
    command = [sys.executable, "-m", "bench.scenarios", "run", "--peers", "p", "--out", "o", "--only", "A1-100,Z9"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no scenario Z9" in done.stderr
