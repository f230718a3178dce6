"""`make interop` says plainly what failed and what is not installed, and its status does too."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
from interop import run
from interop.amqp.kill_loop import Report
from interop.broker import Broker
from interop.client import Driven, Feature, NotInstalled

PAGE = Path(__file__).parent.parent.parent / "docs" / "interop.md"


def missing() -> str:
    raise NotInstalled("apt-get install it")


def show(_: Broker) -> None:
    pass


def fail(_: Broker) -> None:
    raise AssertionError("it does not")


GOOD = Driven("good", lambda: "1.0", {Feature.CONFIRMS: show, Feature.TOPIC: show}, nullcontext)
BAD = Driven("bad", lambda: "1.0", {Feature.CONFIRMS: show, Feature.TOPIC: fail}, nullcontext)
ABSENT = Driven("absent", missing, {Feature.CONFIRMS: show}, nullcontext)


@contextmanager
def no_broker() -> Iterator[None]:
    yield None


@pytest.fixture(autouse=True)
def nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "running", no_broker)
    monkeypatch.setenv("COLUMNS", "200")


def interop(monkeypatch: pytest.MonkeyPatch, clients: list[Driven[Broker]], *arguments: str) -> int:
    monkeypatch.setattr(run, "CLIENTS", clients)
    return run.main(["--kill-seconds", "0", *arguments])


def test_all_that_showed_all_is_fine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert interop(monkeypatch, [GOOD]) == 0
    assert re.search(r"good +1\.0 +confirms, topic +0 +ok", capsys.readouterr().out)


def test_failure_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert interop(monkeypatch, [GOOD, BAD, ABSENT]) == run.FAILED
    told = capsys.readouterr().out
    assert "bad failed after: confirms" in told
    assert "it does not" in told
    assert "failed: bad" in told


def test_client_that_is_not_installed_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interop(monkeypatch, [GOOD, ABSENT]) == run.MISSING
    assert "not installed here, so nothing is known of it: absent (apt-get install it)" in capsys.readouterr().out


def test_client_may_be_missing_when_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert interop(monkeypatch, [GOOD, ABSENT], "--allow-missing") == 0
    assert "not installed here" in capsys.readouterr().out


@pytest.mark.parametrize(("problems", "status"), [([], 0), (["one was lost"], run.FAILED)])
def test_kill_loop_counts_too(monkeypatch: pytest.MonkeyPatch, problems: list[str], status: int) -> None:
    asked: list[float] = []

    def kill(seconds: float, seed: int) -> Report:
        asked.append(seconds)
        return Report(9, 2, 1000, 10, 2000, 20, problems)

    monkeypatch.setattr(run, "KILL_LOOPS", {"one loop": kill, "another": kill})
    monkeypatch.setattr(run, "CLIENTS", [GOOD])
    assert run.main([]) == status
    assert asked == [60, 60]


def test_name_that_no_client_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        interop(monkeypatch, [GOOD], "--only", "nobody")


def test_page_tells_of_each_client_what_it_shows() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.read_text(), re.MULTILINE)
    told = {client: tuple(shown.split(", ")) for client, shown in rows}
    assert {client.name: client.shows for client in run.CLIENTS}.items() <= told.items()
