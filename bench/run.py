"""Runs the claims and says which are kept: `python -m bench.run`, or `make bench`. Driver: processes, files.

A claim file is any .py beside this one that defines `claim()`. Each call gets a fresh process, so that no claim
measures what another left in memory, and every repetition goes through all claims before the next begins, so that a
noisy minute does not fall on one claim only. README.md tells what the output means.

Exit status: 0 every target met; 1 a target missed, or a claim broke; 2 wrong usage; 3 nothing missed, but something
could not be run here.
"""

import argparse
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import re
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.claim import Better, Claim, NotRun, Verdict
from bench.machine import LIMITS, Machine, describe

HERE = Path(__file__).parent
COLOURS = {
    Verdict.MET: "green",
    Verdict.MISSED: "red",
    Verdict.FAILED: "red",
    Verdict.NOT_RUN: "yellow",
    Verdict.NO_TARGET: "dim",
}


@dataclass(frozen=True, slots=True)
class Missing:
    """A claim file said that it cannot be measured on this machine."""

    why: str


@dataclass(frozen=True, slots=True)
class Broken:
    """A claim file ended with an error."""

    trace: str


Outcome = list[Claim] | Missing | Broken


@dataclass(frozen=True, slots=True)
class Line:
    """One claim over all repetitions; the claim's figure is the median of `figures`."""

    file: str
    claim: Claim
    figures: tuple[float, ...]
    verdict: Verdict


def claim_files(directory: Path) -> dict[str, Path]:
    found = sorted(directory.glob("*.py"))
    return {path.stem: path for path in found if re.search(r"^def claim\(", path.read_text(), re.MULTILINE)}


def call(path: Path) -> Outcome:
    """Loads a claim file and measures once. Runs in a process of its own."""
    try:
        spec = importlib.util.spec_from_file_location(f"bench.{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        claims: list[Claim] = module.claim()
        return claims
    except NotRun as missing:
        return Missing(str(missing))
    except Exception:
        return Broken(traceback.format_exc())


def measure(path: Path) -> Outcome:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as fresh:
        try:
            return fresh.submit(call, path).result()
        except BrokenProcessPool:
            return Broken("its process was killed")


def combine(file: str, outcomes: Sequence[Outcome]) -> list[Line]:
    """The repetitions of one claim file as one line per claim."""
    by_name: dict[str, list[Claim]] = {}
    for outcome in outcomes:
        match outcome:
            case Broken(trace):
                return [Line(file, Claim(file, None, None, detail=trace), (), Verdict.FAILED)]
            case Missing(why):
                return [Line(file, Claim(file, None, None, detail=why), (), Verdict.NOT_RUN)]
            case claims:
                for claim in claims:
                    by_name.setdefault(claim.name, []).append(claim)
    if not by_name:
        return [Line(file, Claim(file, None, None, detail="claim() returned no claims"), (), Verdict.FAILED)]
    return [median(file, claims) for claims in by_name.values()]


def median(file: str, claims: Sequence[Claim]) -> Line:
    for claim in claims:
        if claim.figure is None:
            return Line(file, claim, (), claim.verdict)
    figures = tuple(claim.figure for claim in claims if claim.figure is not None)
    middle = statistics.median(figures)
    # The detail belongs to a run: show that of the one in the middle.
    nearest = min(claims, key=lambda claim: abs((claim.figure or 0.0) - middle))
    claim = dataclasses.replace(nearest, figure=middle)
    return Line(file, claim, figures, claim.verdict)


def exit_status(verdicts: Iterable[Verdict]) -> int:
    seen = set(verdicts)
    if seen & {Verdict.MISSED, Verdict.FAILED}:
        return 1
    return 3 if Verdict.NOT_RUN in seen else 0


# ---- what is shown


def amount(value: float, unit: str) -> str:
    digits = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{digits}{unit}" if unit == "x" else f"{digits} {unit}".strip()


def table_of_claims(lines: Sequence[Line]) -> Table:
    table = Table(title="Claims")
    table.add_column("claim", no_wrap=True)
    table.add_column("figure", justify="right", no_wrap=True)
    table.add_column("target", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("detail", overflow="fold")
    for line in lines:
        claim = line.claim
        sign = "≥" if claim.better is Better.MORE else "≤"
        detail = claim.detail.strip().splitlines() or [""]
        table.add_row(
            escape(claim.name if claim.name.startswith(line.file) else f"{line.file}: {claim.name}"),
            "-" if claim.figure is None else amount(claim.figure, claim.unit),
            "-" if claim.target is None else f"{sign} {amount(claim.target, claim.unit)}",
            f"[{COLOURS[line.verdict]}]{line.verdict.value}[/]",
            escape(detail[-1] if line.verdict is Verdict.FAILED else " ".join(detail)),
        )
    return table


def table_of_limits(machine: Machine) -> Table:
    limits = machine.limits
    table = Table(title="This machine", show_header=False)
    rows = {
        "processor": f"{machine.processor}, {machine.cores} cores, load {machine.load:.2f} at the start",
        "software": f"Linux {machine.kernel}, Python {machine.python}",
        "memcpy": f"{limits.memcpy_cached_mb_s:,.0f} MB/s in cache, {limits.memcpy_memory_mb_s:,.0f} MB/s in memory",
        "loopback TCP": (
            f"{limits.tcp_mb_s:,.0f} MB/s in 64 KB writes ({limits.tcp_mb_per_cpu_s:,.0f} MB per CPU-s, both ends), "
            f"{limits.tcp_small_writes_s:,.0f} writes/s of 128 B, round trip {limits.tcp_round_trip_us:.0f} us"
        ),
        "sequential write": (
            f"{limits.write_cached_mb_s:,.0f} MB/s into the page cache, "
            f"{limits.write_synced_mb_s:,.0f} MB/s with fdatasync every 16 MB"
        ),
        "fdatasync": (
            f"p50 {limits.fdatasync_growing_us:.0f} us of a growing file, "
            f"{limits.fdatasync_preallocated_us:.0f} us of a preallocated one"
        ),
        "directory": f"{machine.directory} on {machine.file_system}",
    }
    for name, value in rows.items():
        table.add_row(name, escape(value))
    return table


def commit() -> str:
    try:
        describe = ["git", "-C", str(HERE), "describe", "--always", "--dirty", "--abbrev=12"]
        return subprocess.run(describe, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def records(machine: Machine, lines: Sequence[Line], reps: int) -> Iterator[str]:
    """JSON lines: first where and how it was measured, then one object for each claim."""
    now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    where = {"time": now, "commit": commit(), "reps": reps, "machine": dataclasses.asdict(machine)}
    yield json.dumps(where)
    for line in lines:
        claim = dataclasses.asdict(line.claim) | {"better": line.claim.better.value}
        yield json.dumps({"file": line.file, "verdict": line.verdict.value, "figures": line.figures} | claim)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.run", description="Measure claims against their targets.")
    parser.add_argument("--only", metavar="FILE,...", help="claim files to run, by name without .py")
    parser.add_argument("--reps", type=int, default=3, help="the median of so many is judged (3)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of tables")
    parser.add_argument("--claims", type=Path, default=HERE, metavar="DIR", help="where the claim files are")
    parser.add_argument("--results", type=Path, default=HERE / "results", metavar="DIR", help="where results are kept")
    parser.add_argument("--limits-seconds", type=float, default=0.3, metavar="S", help="for each limit (0.3)")
    options = parser.parse_args(arguments)
    if options.reps < 1:
        parser.error("--reps must be at least 1")
    known = claim_files(options.claims)
    chosen = options.only.split(",") if options.only else list(known)
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"no claim {', '.join(unknown)}; there are {', '.join(known) or 'none'}")
    if not chosen:
        parser.error(f"no claim files in {options.claims}")
    if not LIMITS.exists():
        parser.error(f"{LIMITS.name} is not built: make -C {HERE.name}")

    # Debian keeps /tmp in memory on some machines, where a sync costs nothing; /var/tmp is always on a disk.
    os.environ.setdefault("TMPDIR", "/var/tmp")
    progress = Console(stderr=True)
    with progress.status("limits of the machine"):
        machine = describe(options.limits_seconds)
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    for rep in range(options.reps):
        for name in chosen:
            with progress.status(f"{name} ({rep + 1} of {options.reps})"):
                outcomes[name].append(measure(known[name]))
    lines = [line for name in chosen for line in combine(name, outcomes[name])]

    kept = list(records(machine, lines, options.reps))
    options.results.mkdir(parents=True, exist_ok=True)
    file = options.results / time.strftime("%Y%m%d-%H%M%S.jsonl")
    file.write_text("".join(f"{record}\n" for record in kept))
    if options.json:
        print("\n".join(kept))
    else:
        out = Console(width=None if sys.stdout.isatty() else 160)
        out.print(table_of_claims(lines), table_of_limits(machine), sep="\n")
        for line in lines:
            if line.verdict is Verdict.FAILED:
                out.print(f"{line.file}:\n{escape(line.claim.detail)}")
        if machine.file_system == "tmpfs":
            out.print("These files are in memory, where a sync costs nothing: set TMPDIR to a directory on a disk.")
        out.print(f"Kept in {file}")
    return exit_status(line.verdict for line in lines)


if __name__ == "__main__":
    sys.exit(main())
