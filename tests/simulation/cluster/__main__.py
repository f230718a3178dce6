"""The simulator of whole clusters, from the command line. Driver.

python -m tests.simulation.cluster run --seeds 1-500             what the ledger does not have yet; appends to it
python -m tests.simulation.cluster run --seed 7 --trace          one seed, with all that happened
python -m tests.simulation.cluster ledger                        what the ledger has of the sources as they are
python -m tests.simulation.cluster check --seeds 1-5             a range, with the hash of each trace, and no ledger
python -m tests.simulation.cluster mutants [--only NAME]         every planted mistake, and the seeds it took
"""

import argparse
import gc
import sys
from collections.abc import Sequence

from tests.simulation.cluster import ledger
from tests.simulation.cluster.children import outcomes
from tests.simulation.cluster.mutants import MUTANTS, find
from tests.simulation.cluster.town import Result, run


def one(seed: int, *, trace: bool, mutant: str | None) -> int:
    sys.unraisablehook = lambda _: None
    planted = next((each for each in MUTANTS if each.name.startswith(mutant)), None) if mutant else None
    result = planted.run(seed, keep_trace=trace) if planted else run(seed, keep_trace=trace)
    _tell(result, whole=trace)
    print(f"seed {seed}: trace {result.trace_hash}, {result.seconds:.0f} simulated seconds")
    for name, count in sorted(result.counts.items()):
        print(f"  {name:24}{count:>8,}")
    return 1 if result.violation else 0


def _tell(result: Result, *, whole: bool) -> None:
    print("\n".join(result.tail if whole else result.tail[-60:]))
    if result.violation is not None:
        print(f"seed {result.seed} VIOLATES {result.violation}")
        print(f"again: python -m tests.simulation.cluster run --seed {result.seed} --trace")
    elif result.is_vacuous:
        print(f"seed {result.seed} is vacuous: it shows nothing")


def many(text: str) -> int:
    """What the ledger lacks, range by range; whatever others append meanwhile is not run again."""
    seeds = _range(text)
    source, at = ledger.fingerprint(), ledger.commit()
    tried: set[int] = set()
    failed = 0
    while found := ledger.maybe_next_range(seeds[0], seeds[-1], source, ledger.lines(), tried):
        start, end = found
        tried.update(range(start, end + 1))
        tally = ledger.Tally(start, end)
        for result, cpu_s in outcomes(range(start, end + 1), run):
            tally.add(result, cpu_s)
            if result.violation is not None:
                _tell(result, whole=False)
        ledger.append(tally.line(source, at))
        failed += len(tally.failed)
        print(
            f"seeds {start}-{end}: {tally.clean} clean, {len(tally.vacuous)} vacuous, {len(tally.failed)} failed, "
            f"{tally.counts['acked']:,} acked, {tally.counts['leader changes']} leader changes, "
            f"{tally.cpu_s:.0f} CPU s",
            flush=True,
        )
    print(ledger.totals(ledger.lines(), source))
    return 1 if failed else 0


def tell_ledger() -> int:
    source = ledger.fingerprint()
    known = ledger.lines()
    print(ledger.totals(known, source))
    return 1 if ledger.count(known, source).failed else 0


def check(text: str) -> int:
    wrong = 0
    for result, _cpu_s in outcomes(_range(text), run):
        verdict = "clean"
        if result.violation is not None or result.is_vacuous:
            wrong += 1
            verdict = result.violation or "vacuous"
        print(result.seed, result.trace_hash, result.counts["acked"], result.counts["leader changes"], verdict)
    return 1 if wrong else 0


def _range(text: str) -> range:
    low, _, high = text.partition("-")
    return range(int(low), int(high or low) + 1)


def mutants(only: str | None) -> int:
    print(f"{'mutant':56}{'seeds':>7}{'budget':>8}  caught as")
    survivors = 0
    for mutant in MUTANTS:
        if only is not None and not mutant.name.startswith(only):
            continue
        seeds, how = find(mutant)
        survivors += seeds is None
        print(f"{mutant.name:56}{'alive' if seeds is None else seeds:>7}{mutant.budget:>8}  {how}", flush=True)
    return 1 if survivors else 0


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cluster", description=__doc__)
    parser.add_argument("what", choices=("run", "ledger", "check", "mutants"))
    parser.add_argument("--seeds", help="a range, as 1-500")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--trace", action="store_true")
    parser.add_argument("--mutant", help="with --seed: under this planted mistake")
    parser.add_argument("--only", help="of the mutants")
    options = parser.parse_args(arguments)
    gc.freeze()
    if options.what == "mutants":
        return mutants(options.only)
    if options.what == "ledger":
        return tell_ledger()
    if options.what == "check":
        return check(options.seeds or "1-5")
    if options.seed is not None:
        return one(options.seed, trace=options.trace, mutant=options.mutant)
    return many(options.seeds or "1-100")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
