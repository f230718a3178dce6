"""The runner: hand-made claim files in, a verdict for each and an exit status out."""

import json
from pathlib import Path

import pytest
from bench import machine, run
from bench.claim import Claim, Verdict

MET = 'from bench.claim import Claim\ndef claim(): return [Claim("fast", 6.0, 5.0, detail="six times")]\n'
MISSED = 'from bench.claim import Claim\ndef claim(): return [Claim("slow", 4.0, 5.0)]\n'
NO_PEER = (
    "from bench.peers.peer import NotInstalled\n"
    'def claim(): raise NotInstalled("rabbitmq is not installed: apt-get install rabbitmq-server")\n'
)
BROKEN = 'def claim(): raise ValueError("no such thing")\n'
KILLED = "import os, signal\ndef claim(): os.kill(os.getpid(), signal.SIGKILL)\n"


@pytest.fixture
def bench(programs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> "Bench":
    for module in (machine, run):
        monkeypatch.setattr(module, "LIMITS", programs / "limits")
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # or the runner would set it, for all tests to come
    return Bench(tmp_path)


class Bench:
    def __init__(self, directory: Path) -> None:
        self.claims = directory / "claims"
        self.results = directory / "results"
        self.claims.mkdir()

    def run(self, files: dict[str, str], *flags: str) -> int:
        for name, source in files.items():
            (self.claims / f"{name}.py").write_text(source)
        fixed = ["--claims", str(self.claims), "--results", str(self.results), "--limits-seconds", "0.01"]
        return run.main([*fixed, *flags])


def test_every_target_met_is_status_0(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run({"quick": MET}, "--reps", "1") == 0
    shown = capsys.readouterr().out
    for word in ("quick: fast", "6x", "≥ 5x", "met", "six times", "memcpy", "loopback TCP", "fdatasync", "cores"):
        assert word in shown


def test_a_missed_target_is_status_1(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run({"quick": MET, "sluggish": MISSED}, "--reps", "1") == 1
    assert "missed" in capsys.readouterr().out


def test_a_missing_peer_is_not_run_names_its_package_and_is_status_3(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench.run({"quick": MET, "beside": NO_PEER}, "--reps", "1") == 3
    shown = capsys.readouterr().out
    assert "not run" in shown
    assert "apt-get install rabbitmq-server" in shown


@pytest.mark.parametrize(("source", "said"), [(BROKEN, "ValueError: no such thing"), (KILLED, "killed")])
def test_a_claim_that_breaks_is_status_1_and_the_others_still_run(
    bench: Bench, capsys: pytest.CaptureFixture[str], source: str, said: str
) -> None:
    assert bench.run({"broken": source, "quick": MET}, "--reps", "1") == 1
    shown = capsys.readouterr().out
    assert "failed" in shown
    assert said in shown
    assert "quick: fast" in shown


def test_results_are_kept_as_json_lines(bench: Bench) -> None:
    bench.run({"quick": MET}, "--reps", "2")
    (kept,) = bench.results.iterdir()
    where, claim = [json.loads(line) for line in kept.read_text().splitlines()]
    assert where["machine"]["limits"]["tcp_mb_s"] > 0
    assert (claim["file"], claim["name"], claim["figure"], claim["target"]) == ("quick", "fast", 6.0, 5.0)
    assert (claim["verdict"], claim["figures"], claim["better"]) == ("met", [6.0, 6.0], "at least")


def test_json_prints_what_is_kept(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    bench.run({"quick": MET}, "--reps", "1", "--json")
    (kept,) = bench.results.iterdir()
    assert capsys.readouterr().out == kept.read_text()


def test_only_runs_what_it_names(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run({"quick": MET, "sluggish": MISSED}, "--reps", "1", "--only", "quick") == 0
    assert "slow" not in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--only", "quick,nothing"], ["--reps", "0"]])
def test_wrong_usage_is_status_2(bench: Bench, flags: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        bench.run({"quick": MET}, *flags)
    assert ended.value.code == 2
    assert not bench.results.exists()


def test_only_files_that_define_claim_are_claims(tmp_path: Path) -> None:
    (tmp_path / "quick.py").write_text(MET)
    (tmp_path / "other.py").write_text('"""def claim() is only spoken of here."""\n')
    assert list(run.claim_files(tmp_path)) == ["quick"]


def test_the_median_of_the_repetitions_is_judged() -> None:
    figures = [9.0, 1.0, 4.0]
    (line,) = run.combine("file", [[Claim("a", figure, 5.0, detail=str(figure))] for figure in figures])
    assert (line.claim.figure, line.figures, line.verdict) == (4.0, (9.0, 1.0, 4.0), Verdict.MISSED)
    assert line.claim.detail == "4.0"


def test_a_claim_that_was_not_run_once_is_not_run() -> None:
    (line,) = run.combine("file", [[Claim("a", 9.0, 5.0)], [Claim("a", None, 5.0, detail="it went away")]])
    assert (line.verdict, line.claim.detail) == (Verdict.NOT_RUN, "it went away")


def test_a_claim_file_without_claims_has_failed() -> None:
    (line,) = run.combine("file", [[]])
    assert line.verdict is Verdict.FAILED


@pytest.mark.parametrize(
    ("verdicts", "status"),
    [
        ([Verdict.MET, Verdict.NO_TARGET], 0),
        ([Verdict.MET, Verdict.NOT_RUN], 3),
        ([Verdict.MISSED, Verdict.NOT_RUN], 1),
        ([Verdict.FAILED, Verdict.MET], 1),
    ],
)
def test_exit_status(verdicts: list[Verdict], status: int) -> None:
    assert run.exit_status(verdicts) == status


def test_every_claim_file_stands_in_the_table_of_claims() -> None:
    page = (run.HERE / "README.md").read_text()
    assert [name for name in run.claim_files(run.HERE) if f"| `{name}.py` |" not in page] == []
