"""One pass of scenarios over several brokers, and how ours compares with each of the others. Driver: processes.

All brokers are up for the whole pass, and each scenario goes through all that it compares before the next begins.
Neighbours: peers/ starts the brokers, scenarios.py runs the load, amqp_throughput.py and mqtt_throughput.py promise.
"""

import argparse
import enum
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from bench.claim import Claim, NotRun
from bench.peers.peer import NotInstalled, Peer, StartFailed
from bench.scenarios import SCENARIOS, Result, failure, play

OURS = "headrace"


class Measure(enum.Enum):
    """What is compared, and what is called better; more is better in each."""

    EFFICIENCY = "messages per server-CPU-s"
    RATE = "messages/s"
    SPEED = "1 / p50 of the end-to-end latency"


@dataclass(frozen=True, slots=True)
class Promise:
    """In this result of a scenario our measure is at least `target` times the peer's."""

    result: str  # the scenario's name; A3 has two results, A3-publish and A3-drain
    peer: str
    measure: Measure
    target: float | None  # None: shown, promised by nobody

    @property
    def scenario(self) -> str:
        return scenario_of(self.result)


def scenario_of(result: str) -> str:
    return result.removesuffix("-publish").removesuffix("-drain")


@dataclass(slots=True)
class Pass:
    """What came of one pass."""

    results: dict[tuple[str, str], Result] = field(default_factory=dict)  # (result, broker)
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)  # peer -> why it is not up


def play_all(ours: Peer, peers: Sequence[Peer], wanted: Iterable[tuple[str, str]], seconds: float) -> Pass:
    """Plays every wanted (scenario, broker) once. A peer that cannot be started is left out; ours must start."""
    done = Pass()
    asked = set(wanted)
    with ExitStack() as up:
        running = [up.enter_context(ours.start())]
        for peer in peers:
            try:
                running.append(up.enter_context(peer.start()))
            except (NotInstalled, StartFailed) as problem:
                done.absent[peer.name] = str(problem)
        done.versions = {server.name: server.version for server in running}
        for scenario in SCENARIOS:
            for server in running:
                if (scenario.name, server.name) in asked:
                    for name, result in play(scenario, server, seconds).items():
                        done.results[name, server.name] = result
    return done


def wanted_by(promises: Iterable[Promise]) -> set[tuple[str, str]]:
    return {(promise.scenario, broker) for promise in promises for broker in (OURS, promise.peer)}


def judge(promise: Promise, done: Pass) -> Claim:
    name = f"{promise.result} vs {promise.peer}, {promise.measure.name.lower()}"
    why_not = done.absent.get(promise.peer)
    ours = done.results.get((promise.result, OURS))
    theirs = done.results.get((promise.result, promise.peer))
    if why_not is None:
        if ours is None or (broken := broken_promise(ours)):
            # Nobody is fast who loses messages: a broken run of ours is a missed target, whatever its figures.
            return Claim(name, 0.0, promise.target, detail=f"{OURS}: {broken if ours else 'nothing was published'}")
        why_not = "nothing was published" if theirs is None else failure(theirs)
    if theirs is None or ours is None or why_not is not None:
        return Claim(name, None, promise.target, detail=f"{promise.peer}: {why_not}")
    our_value, their_value = (measured(promise, result) for result in (ours, theirs))
    if not their_value:
        return Claim(name, None, promise.target, detail=f"{promise.peer}: nothing was measured")
    shown = [f"{OURS} {text(promise, ours)}", f"{promise.peer} {done.versions[promise.peer]} {text(promise, theirs)}"]
    if theirs.get("lost"):
        shown.append(f"it lost {100 * theirs['lost'] / (theirs['lost'] + theirs['received']):.0f} %")
    return Claim(name, our_value / their_value, promise.target, detail=", ".join(shown))


def broken_promise(result: Result) -> str | None:
    """What no run of ours may show: an error, a confirmed message that did not come, QoS 2 delivered twice."""
    if (why := failure(result)) is not None:
        return why
    confirms = result.get("confirm_window") or result.get("qos") or result.get("mode") == "consume"
    if confirms and result.get("lost"):
        return f"{result['lost']} confirmed messages lost"
    if result.get("qos") == 2 and result.get("duplicated"):
        return f"{result['duplicated']} QoS 2 messages delivered twice"
    return None


def measured(promise: Promise, result: Result) -> float:
    publishing = promise.result.endswith("-publish")
    match promise.measure:
        case Measure.EFFICIENCY:
            return float(result["sent_per_server_cpu_s" if publishing else "received_per_server_cpu_s"])
        case Measure.RATE:
            return float(result["confirmed_per_s" if publishing else "received_per_s"])
        case Measure.SPEED:
            p50_us = float(result["e2e_us"]["p50"])
            return 1e6 / p50_us if p50_us else 0.0


def text(promise: Promise, result: Result) -> str:
    if promise.measure is Measure.SPEED:
        return f"p50 {result['e2e_us']['p50'] / 1000:.2f} ms, p99 {result['e2e_us']['p99'] / 1000:.2f} ms"
    return f"{measured(promise, result):,.0f} {promise.measure.value}"


def try_out(measure: Callable[[Collection[str], float], list[Claim]], scenarios: Sequence[str]) -> None:
    """The command line of a claim file: some of its scenarios, once, for as long as asked."""
    parser = argparse.ArgumentParser(description="Measure once and print the figures; `make bench` judges them.")
    parser.add_argument("--only", default=",".join(scenarios), metavar="SCENARIO,...")
    parser.add_argument("--seconds", type=float, default=3.0)
    options = parser.parse_args()
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in scenarios]:
        parser.error(f"no scenario {', '.join(unknown)}; there are {', '.join(scenarios)}")
    try:
        claims = measure(chosen, options.seconds)
    except (NotRun, StartFailed) as problem:
        sys.exit(str(problem))
    for each in claims:
        figure = "not run" if each.figure is None else f"{each.figure:.2f}"
        print(f"{each.name}: {figure} (target {each.target}); {each.detail}")
