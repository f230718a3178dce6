"""A few seeds of the simulator of whole clusters; `make sim` runs many, `make mutants` shows what it would find."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from tests.simulation.cluster.checks import History, Place, check_queues
from tests.simulation.cluster.ledger import Tally, append, lines, ranges_to_run
from tests.simulation.cluster.town import Result
from tests.simulation.cluster.world import Violation, World

ROOT = Path(__file__).parents[2]
PLACE = Place(UUID(int=1), 0, 7)


def checked(seeds: str, hash_seed: int) -> list[str]:
    """A line for each seed, from a process of its own: what is simulated leaves no trace in this one."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.cluster", "check", "--seeds", seeds],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_a_sample_of_seeds_is_clean_and_a_seed_comes_to_the_same_in_every_process() -> None:
    """None is vacuous either; the hash of the trace is over every message, confirm and delivery."""
    found = checked("1-6", hash_seed=1)
    assert len(found) == 6
    assert checked("4-4", hash_seed=2) == [line for line in found if line.startswith("4 ")]


def history() -> tuple[World, History]:
    world = World(1)
    found = History(world)
    for body in (b"one", b"two"):
        found.attempt("p", "/", "orders", body)
    return world, found


def violation_of(world: World) -> str:
    """The first letters of what was violated; empty: nothing was."""
    try:
        world.raise_violation()
    except Violation as found:
        return str(found).partition(":")[0]
    return ""


def test_what_was_confirmed_and_is_nowhere_is_lost() -> None:
    world, found = history()
    found.confirmed(b"one", PLACE)
    check_queues(world, found)
    assert violation_of(world) == "Q1"


def test_what_was_confirmed_and_drained_once_is_fine() -> None:
    world, found = history()
    found.confirmed(b"one", PLACE)
    found.drained.add(("//orders", b"one"))
    check_queues(world, found)
    assert violation_of(world) == ""


def test_what_was_settled_for_good_and_is_drained_too_was_there_twice() -> None:
    world, found = history()
    found.settled["//orders", b"one"] = 1
    found.drained.add(("//dead", b"one"))
    check_queues(world, found)
    assert violation_of(world) == "Q1"


def settle(found: History, epoch: int) -> None:
    found.settled["q", b"one"] = epoch


@pytest.mark.parametrize(
    ("letter", "what"),
    [
        ("O1", lambda found: (found.read(PLACE, b"one"), found.read(PLACE, b"two"))),
        ("D5", lambda found: found.delivered("q", b"never published", None, 1, redelivered=False)),
        ("D3", lambda found: (found.refused.add(b"one"), found.delivered("q", b"one", None, 1, redelivered=False))),
        ("D3", lambda found: (found.refused.add(b"one"), found.confirmed(b"one", PLACE))),
        ("Q3", lambda found: (settle(found, 1), found.delivered("q", b"one", None, 2, redelivered=True))),
        ("", lambda found: (settle(found, 2), found.delivered("q", b"one", None, 1, redelivered=True))),
        ("Q4", lambda found: [found.delivered("q", b"one", None, epoch, redelivered=False) for epoch in (1, 2)]),
        ("", lambda found: [found.delivered("q", b"one", None, epoch, redelivered=epoch > 1) for epoch in (1, 2)]),
        # Who led before delivers without knowing what its follower delivered.
        ("", lambda found: [found.delivered("q", b"one", None, epoch, redelivered=False) for epoch in (2, 1)]),
    ],
)
def test_each_anomaly_of_a_history_is_found_when_it_happens(letter: str, what: object) -> None:
    world, found = history()
    assert callable(what)
    what(found)
    assert violation_of(world) == letter


def test_the_ledger_is_gone_on_with_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert list(ranges_to_run(1, 250, "these", lines(path))) == [(1, 100), (101, 200), (201, 250)]
    tally = Tally(1, 100)
    tally.add(Result(1, "", Counter({"acked": 60, "leader changes": 1, "fault kill": 2}), 10.0, None, ()), 0.5)
    tally.add(Result(2, "", Counter({"acked": 3}), 10.0, None, ()), 0.5)
    tally.add(Result(3, "", Counter(), 10.0, "D2: lost", ()), 0.5)
    append(tally.line("these", "abc"), path)
    (line,) = lines(path)
    assert (line["clean"], line["vacuous"], line["failed"]) == (1, [2], [3])
    assert line["faults"] == {"kill": 2}
    assert list(ranges_to_run(1, 250, "these", lines(path))) == [(101, 200), (201, 250)]
    assert list(ranges_to_run(50, 120, "other", lines(path))) == [(50, 120)], "other sources, other runs"
