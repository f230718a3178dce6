"""Which seeds were run, on which sources, and what came of it: bench/sim-ledger.jsonl, a line for each range. Driver.

A line counts for the sources that it was run on: their hash is in it, and a range that the ledger has for the same
sources is not run again.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.simulation.cluster.town import Result

ROOT = Path(__file__).parents[3]
LEDGER = ROOT / "bench" / "sim-ledger.jsonl"
# So many seeds make one line, and are run again when they were interrupted.
RANGE = 100
# Of the simulator's files: a seed comes to the same whatever they are.
_NOT_OF_IT = ("ledger", "mutants", "children", "partition_walk", "__main__", "conftest")


def fingerprint() -> str:
    """Of what is simulated, which is all of Headrace that is loaded, and of what simulates it."""
    simulated = {
        Path(module.__file__)
        for name, module in sys.modules.items()
        if name.startswith(("headrace", "tests.")) and module.__file__ and Path(module.__file__).stem not in _NOT_OF_IT
    }
    found = blake2b(digest_size=8)
    for path in sorted(path.relative_to(ROOT) for path in simulated):
        found.update(path.as_posix().encode() + b"\0" + (ROOT / path).read_bytes() + b"\0")
    return found.hexdigest()


def commit() -> str:
    """With a plus sign when something is not committed."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--", "src", "tests/simulation")
    return git("rev-parse", "--short=10", "HEAD") + ("+" if changed else "")


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


def ranges_to_run(first: int, last: int, source: str, known: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
    """Ranges of a-b that the ledger does not have for these sources."""
    done: set[int] = set()
    for line in known:
        if line["fingerprint"] == source:
            low, high = map(int, line["seeds"].split("-"))
            done.update(range(low, high + 1))
    start: int | None = None
    for seed in range(first, last + 2):
        if seed > last or seed in done:
            if start is not None:
                yield start, seed - 1
            start = None
        elif start is None:
            start = seed
        elif seed - start == RANGE:
            yield start, seed - 1
            start = seed


def append(line: dict[str, Any], path: Path = LEDGER) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line, separators=(",", ":")) + "\n")


def totals(known: list[dict[str, Any]]) -> str:
    """All that the ledger holds, in words."""
    clean = sum(line["clean"] for line in known)
    acked = sum(line["acked"] for line in known)
    faults = sum(sum(line["faults"].values()) for line in known)
    hours = sum(line["simulated_hours"] for line in known)
    failed = sum(len(line["failed"]) for line in known)
    return f"{clean:,} clean seeds, {failed:,} failed, {acked:,} acked, {faults:,} faults, {hours:,.1f} simulated hours"
