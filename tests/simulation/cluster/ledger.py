"""Which seeds were run, on which sources, and what came of it: bench/sim-ledger.jsonl, a line for each range. Driver.

A line counts for the sources that it was run on: their hash is in it, and a range that the ledger has for the same
sources is not run again. Several processes may append to it, and one that is killed leaves whole lines.
"""

import fcntl
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.simulation.cluster.town import Result

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "bench" / "sim-ledger.jsonl"
# So many seeds make one line, and are run again when they were interrupted.
RANGE = 100
# Loaded beside the simulator: a seed comes to the same whatever they are.
_BESIDE = (
    *(
        f"tests.simulation.{name}"
        for name in ("cluster.ledger", "cluster.mutants", "cluster.children", "partition_walk")
    ),
    *(f"tests.core_log.power.{name}" for name in ("directed", "fuse", "ledger", "mutants", "world")),
)


def sources() -> dict[str, Path]:
    """What is simulated, which is all of Headrace that is loaded, and what simulates it: its names and places."""
    found = {
        Path(module.__file__)
        for name, module in sys.modules.items()
        if name.startswith(("headrace", "tests.")) and name not in _BESIDE and module.__file__
    }
    # The rooms are links in src: what lies behind them has another path, by which git knows it.
    return {path.relative_to(ROOT).as_posix(): path.resolve() for path in sorted(found)}


def fingerprint() -> str:
    found = blake2b(digest_size=8)
    for name, path in sources().items():
        found.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return found.hexdigest()


def commit(files: Iterable[Path] | None = None, root: Path = ROOT) -> str:
    """With a plus sign when one of these (of the sources, unless said otherwise) is not as it was committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--no-renames", "--untracked-files=all", "-z").split("\0")
    dirty = {root / line[3:] for line in changed if line}
    is_dirty = not dirty.isdisjoint(sources().values() if files is None else files)
    return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if is_dirty else "")


@dataclass(slots=True)
class Tally:
    """What a range of seeds came to."""

    first: int
    last: int
    clean: int = 0
    vacuous: list[int] = field(default_factory=list)
    failed: list[int] = field(default_factory=list)
    seconds: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result, cpu_s: float) -> None:
        self.counts.update(result.counts)
        self.seconds += result.seconds
        self.cpu_s += cpu_s
        if result.violation is not None:
            self.failed.append(result.seed)
        elif result.is_vacuous:
            self.vacuous.append(result.seed)
        else:
            self.clean += 1

    def line(self, source: str, at: str) -> dict[str, Any]:
        faults = {name[6:]: count for name, count in sorted(self.counts.items()) if name.startswith("fault ")}
        return {
            "seeds": f"{self.first}-{self.last}",
            "clean": self.clean,
            "vacuous": self.vacuous,
            "failed": self.failed,
            "acked": self.counts["acked"],
            "delivered": self.counts["delivered"],
            "leader_changes": self.counts["leader changes"],
            "unknown_commits": self.counts["unknown commits"],
            "faults": faults,
            "simulated_hours": round(self.seconds / 3600, 3),
            "cpu_s": round(self.cpu_s, 1),
            "fingerprint": source,
            "commit": at,
        }


def lines(path: Path = LEDGER) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def seeds_of(line: Mapping[str, Any]) -> range:
    low, high = map(int, line["seeds"].split("-"))
    return range(low, high + 1)


def maybe_next_range(
    first: int, last: int, source: str, known: Iterable[Mapping[str, Any]], tried: Collection[int] = ()
) -> tuple[int, int] | None:
    """The first of a-b that the ledger does not have for these sources, and that was not tried."""
    done = {seed for line in known if line["fingerprint"] == source for seed in seeds_of(line)} | set(tried)
    start = next((seed for seed in range(first, last + 1) if seed not in done), None)
    if start is None:
        return None
    end = start
    while end < min(last, start + RANGE - 1) and end + 1 not in done:
        end += 1
    return start, end


def append(line: Mapping[str, Any], path: Path = LEDGER) -> None:
    """A whole line or nothing, in one write behind whatever others have written."""
    text = json.dumps(line, separators=(",", ":")) + "\n"
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b"\n":
            raise ValueError(f"{path}: does not end with a whole line")
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Count:
    """Seeds, each once, however often it was run: one that ever failed has failed."""

    clean: int
    vacuous: int
    failed: tuple[int, ...]
    # Of the clean ones: run on sources that no commit has.
    uncommitted: int


def count(known: Iterable[Mapping[str, Any]], source: str) -> Count:
    """What the ledger says of these sources."""
    run: set[int] = set()
    failed: set[int] = set()
    vacuous: set[int] = set()
    committed: set[int] = set()
    for line in known:
        if line["fingerprint"] == source:
            run.update(seeds_of(line))
            failed.update(line["failed"])
            vacuous.update(line["vacuous"])
            if not line["commit"].endswith("+"):
                committed.update(seeds_of(line))
    clean = run - failed - vacuous
    return Count(len(clean), len(vacuous - failed), tuple(sorted(failed)), len(clean - committed))


def totals(known: Iterable[Mapping[str, Any]], source: str) -> str:
    """What the ledger holds of these sources, in words."""
    found = count(known, source)
    own = [line for line in known if line["fingerprint"] == source]
    acked, changes = (sum(line[name] for line in own) for name in ("acked", "leader_changes"))
    faults = sum(sum(line["faults"].values()) for line in own)
    hours = sum(line["simulated_hours"] for line in own)
    uncommitted = f" ({found.uncommitted:,} of them on sources that are not committed)" if found.uncommitted else ""
    failed = f"{len(found.failed):,} failed{' ' + str(list(found.failed)) if found.failed else ''}"
    return (
        f"of these sources ({source}): {found.clean:,} clean seeds{uncommitted}, {found.vacuous:,} vacuous, {failed}; "
        f"{acked:,} acked, {changes:,} leader changes, {faults:,} faults, {hours:,.1f} simulated hours"
    )
