"""A few seeds of the simulator of whole clusters; `make sim` runs many, `make mutants` shows what it would find."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from uuid import UUID

import pytest
from tests.simulation.cluster import ledger
from tests.simulation.cluster.checks import History, Place, check_queues
from tests.simulation.cluster.ledger import Count, Tally, append, commit, count, lines, maybe_next_range, totals
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
    found = checked("1-20", hash_seed=1)
    assert len(found) == 20
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


def tally(first: int, last: int, *results: Result) -> Tally:
    found = Tally(first, last)
    for result in results:
        found.add(result, 0.5)
    return found


def clean(seed: int) -> Result:
    return Result(seed, "", Counter({"acked": 60, "leader changes": 1, "fault kill": 2}), 10.0, None, ())


def vacuous(seed: int) -> Result:
    return Result(seed, "", Counter({"acked": 3}), 10.0, None, ())


def failed(seed: int) -> Result:
    return Result(seed, "", Counter(), 10.0, "D2: lost", ())


def test_the_ledger_is_gone_on_with_where_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    assert maybe_next_range(1, 250, "these", lines(path)) == (1, 100)
    append(tally(1, 100, clean(1), vacuous(2), failed(3)).line("these", "abc"), path)
    (line,) = lines(path)
    assert (line["clean"], line["vacuous"], line["failed"]) == (1, [2], [3])
    assert line["faults"] == {"kill": 2}
    assert maybe_next_range(1, 250, "these", lines(path)) == (101, 200)
    assert maybe_next_range(50, 120, "these", lines(path)) == (101, 120)
    assert maybe_next_range(50, 120, "other", lines(path)) == (50, 120), "other sources, other runs"
    append(tally(151, 160).line("these", "abc"), path)
    assert maybe_next_range(1, 250, "these", lines(path)) == (101, 150), "another process has run what follows"
    assert maybe_next_range(1, 250, "these", lines(path), range(101, 151)) == (161, 250)
    assert maybe_next_range(1, 100, "these", lines(path)) is None


def test_a_seed_that_was_run_twice_is_one_seed_and_one_that_ever_failed_has_failed() -> None:
    known = [
        tally(1, 3, clean(1), clean(2), vacuous(3)).line("these", "abc"),
        tally(2, 5, failed(2), clean(3), clean(4), clean(5)).line("these", "abc+"),
        tally(6, 9, clean(6), clean(7), clean(8), clean(9)).line("other", "abc"),
    ]
    assert count(known, "these") == Count(clean=3, vacuous=1, failed=(2,), uncommitted=2)
    told = totals(known, "these").partition(";")[0]
    assert told == (
        "of these sources (these): 3 clean seeds (2 of them on sources that are not committed), 1 vacuous, 1 failed [2]"
    )


def test_several_processes_append_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    program = (
        "import sys; from pathlib import Path; from tests.simulation.cluster.ledger import append\n"
        "for number in range(200): append({'who': sys.argv[1], 'number': number, 'x': 'x' * 5000}, Path(sys.argv[2]))"
    )
    several = [subprocess.Popen([sys.executable, "-c", program, who, str(path)], cwd=ROOT) for who in "abc"]
    assert [one.wait() for one in several] == [0, 0, 0]
    found = lines(path)
    assert len(found) == 600
    for who in "abc":
        assert [line["number"] for line in found if line["who"] == who] == list(range(200))


def test_nothing_is_appended_to_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"seeds": "1-1')
    with pytest.raises(ValueError, match="whole line"):
        append({}, path)


def test_a_run_on_sources_that_are_not_committed_says_so_also_behind_the_links_of_the_rooms(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.com")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    room, link, beside = tmp_path / "room", tmp_path / "src" / "room", tmp_path / "notes"
    room.mkdir()
    link.parent.mkdir()
    link.symlink_to("../room")
    for path in (room / "a.py", beside):
        path.write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "all")
    sources = [(link / "a.py").resolve()]
    at = commit(sources, tmp_path)
    beside.write_text("2")
    assert commit(sources, tmp_path) == at and not at.endswith("+")
    (link / "a.py").write_text("2")
    assert commit(sources, tmp_path) == at + "+"
    git("checkout", "room/a.py")
    (link / "b.py").write_text("new")
    assert commit([*sources, (link / "b.py").resolve()], tmp_path) == at + "+"


def test_what_is_simulated_has_a_place_that_git_knows() -> None:
    found = ledger.sources()
    assert found["src/headrace/core_log/replication/replica.py"] == ROOT / "core_log" / "replication" / "replica.py"
    assert "src/headrace/delay/ledger.py" in found, "not the ledger of the simulator"
    assert "tests/simulation/cluster/ledger.py" not in found
