"""Comparing brokers: two that run side by side, and the judgement of results made by hand."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from bench import amqp_throughput, mqtt_throughput, scenarios
from bench.claim import Verdict
from bench.comparison import OURS, Measure, Pass, Promise, judge, play_all, wanted_by
from bench.peers import PEERS
from bench.peers.peer import NotInstalled, Running
from bench.scenarios import BY_NAME

GOOD: dict[str, Any] = {
    "exit": 0,
    "errors": 0,
    "confirm_window": 1000,
    "lost": 0,
    "received": 100,
    "received_per_s": 50.0,
    "confirmed_per_s": 70.0,
    "received_per_server_cpu_s": 600.0,
    "sent_per_server_cpu_s": 700.0,
    "e2e_us": {"n": 100, "p50": 500.0, "p99": 900.0},
}


def done(ours: dict[str, Any], theirs: dict[str, Any], result: str = "A1-100") -> Pass:
    results = {(result, OURS): GOOD | ours, (result, "them"): GOOD | theirs}
    return Pass(results, {OURS: "0", "them": "9"})


@pytest.mark.parametrize(
    ("measure", "theirs", "figure"),
    [
        (Measure.EFFICIENCY, {"received_per_server_cpu_s": 100.0}, 6.0),
        (Measure.RATE, {"received_per_s": 100.0}, 0.5),
        (Measure.SPEED, {"e2e_us": {"n": 1, "p50": 1500.0, "p99": 2000.0}}, 3.0),
    ],
)
def test_figure_is_ours_over_theirs(measure: Measure, theirs: dict[str, Any], figure: float) -> None:
    claim = judge(Promise("A1-100", "them", measure, 1.0), done({}, theirs))
    assert claim.figure == pytest.approx(figure)


def test_publishing_is_judged_by_what_was_sent_and_confirmed() -> None:
    theirs = {"sent_per_server_cpu_s": 100.0, "confirmed_per_s": 10.0}
    publishing = done({}, theirs, "A3-publish")
    assert judge(Promise("A3-publish", "them", Measure.EFFICIENCY, 5.0), publishing).figure == pytest.approx(7.0)
    assert judge(Promise("A3-publish", "them", Measure.RATE, 5.0), publishing).figure == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ({"lost": 3}, "3 confirmed messages lost"),
        ({"confirm_window": 0, "mode": "consume", "lost": 3}, "3 confirmed messages lost"),
        ({"confirm_window": 0, "qos": 1, "lost": 3}, "3 confirmed messages lost"),
        ({"confirm_window": 0, "qos": 2, "duplicated": 1}, "1 QoS 2 messages delivered twice"),
        ({"exit": 1, "errors": 1, "error_text": "connection lost"}, "connection lost"),
    ],
)
def test_a_broken_run_of_ours_misses_whatever_its_figures(ours: dict[str, Any], said: str) -> None:
    claim = judge(Promise("A1-100", "them", Measure.EFFICIENCY, 1.0), done(ours, {}))
    assert claim.verdict is Verdict.MISSED
    assert said in claim.detail


def test_unconfirmed_messages_may_be_lost() -> None:
    claim = judge(Promise("M1", "them", Measure.EFFICIENCY, 1.0), done({"confirm_window": 0, "lost": 3}, {}, "M1"))
    assert claim.verdict is Verdict.MET


def test_what_a_peer_lost_is_told() -> None:
    claim = judge(Promise("A1-100", "them", Measure.EFFICIENCY, 1.0), done({}, {"lost": 300}))
    assert claim.detail.endswith("it lost 75 %")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"exit": 1, "errors": 1, "error_text": "connection lost"}, "them: connection lost"),
        ({"received_per_server_cpu_s": 0.0}, "them: nothing was measured"),
    ],
)
def test_a_broken_run_of_a_peer_is_nothing_to_compare_with(theirs: dict[str, Any], said: str) -> None:
    claim = judge(Promise("A1-100", "them", Measure.EFFICIENCY, 1.0), done({}, theirs))
    assert (claim.verdict, claim.detail) == (Verdict.NOT_RUN, said)


@dataclass(frozen=True)
class Up:
    """A peer that is running already."""

    running: Running

    @property
    def name(self) -> str:
        return self.running.name

    @property
    def proto(self) -> str:
        return self.running.proto

    def start(self) -> AbstractContextManager[Running]:
        return nullcontext(self.running)


@dataclass(frozen=True)
class Absent:
    name: str = "absent"
    proto: str = "mqtt"

    def start(self) -> AbstractContextManager[Running]:
        raise NotInstalled("absent is not installed: apt-get install absent")


def test_a_pass_plays_each_scenario_on_ours_and_on_the_peers_that_are_there(
    programs: Path, null_broker: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scenarios, "LOADGEN", programs / "loadgen")
    ours, twin = (Up(replace(null_broker, name=name)) for name in (OURS, "twin"))
    promises = [Promise("M2", peer, Measure.RATE, 0.0001) for peer in ("twin", "absent")]
    played = play_all(ours, [twin, Absent()], wanted_by(promises), 0.2)
    assert played.results.keys() == {("M2", OURS), ("M2", "twin")}
    beside, alone = (judge(promise, played) for promise in promises)
    assert (beside.name, beside.verdict) == ("M2 vs twin, rate", Verdict.MET)
    assert (alone.verdict, alone.detail) == (Verdict.NOT_RUN, "absent: absent is not installed: apt-get install absent")


@pytest.mark.parametrize("claims", [amqp_throughput, mqtt_throughput], ids=["amqp", "mqtt"])
def test_every_promise_names_a_scenario_and_a_peer_that_exist(claims: Any) -> None:
    assert {promise.scenario for promise in claims.PROMISES} <= BY_NAME.keys()
    assert {promise.peer for promise in claims.PROMISES} == {peer.name for peer in claims.PEERS} <= PEERS.keys()
    assert set(claims.PLAYED) <= BY_NAME.keys()


@pytest.mark.parametrize(
    ("result", "verdicts"),
    [
        ({"rss_per_connection_kb": 14.0, "connections_per_server_cpu_s": 2000.0}, [Verdict.MET, Verdict.MET]),
        ({"rss_per_connection_kb": 16.0, "connections_per_server_cpu_s": 900.0}, [Verdict.MISSED, Verdict.MISSED]),
        ({"exit": 1, "errors": 1, "error_text": "refused"}, [Verdict.MISSED, Verdict.MISSED]),
    ],
)
def test_idle_connections_are_judged_by_memory_and_by_cpu(result: dict[str, Any], verdicts: list[Verdict]) -> None:
    held = Pass({("M7", OURS): {"exit": 0, "errors": 0, "connections": 5000} | result})
    assert [claim.verdict for claim in mqtt_throughput.idle_claims(held)] == verdicts
