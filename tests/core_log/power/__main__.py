"""The long proofs of the log core, from the command line. Driver.

python -m tests.core_log.power crash [--runs N] [--first SEED]    random runs and every crash state
python -m tests.core_log.power seed SEED [--mutant NAME]          one run again, with what it did
python -m tests.core_log.power mutants                            every planted mistake, and the seeds it took
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from random import SystemRandom

from .mutants import MUTANTS, find
from .states import WORKLOADS, explore
from .world import Outcome, World, small_segments

RUNS = 10_000
STATES_PER_PREFIX = 32


def crash(first: int, runs: int) -> int:
    outcomes: list[Outcome] = []
    failed: list[int] = []
    with small_segments():
        for seed in range(first, first + runs):
            world = World(seed)
            try:
                outcomes.append(world.run())
            except Exception:
                traceback.print_exc()
                failed.append(seed)
                if len(failed) == 10:
                    print("too many failures, stopped", file=sys.stderr)
                    break
    print(f"power loss: seeds {first}..{first + runs - 1}")
    for name, count in (
        ("runs", len(outcomes) + len(failed)),
        ("vacuous runs", sum(one.vacuous for one in outcomes)),
        ("starts", sum(one.starts for one in outcomes)),
        ("losses of power", sum(one.power_losses for one in outcomes)),
        ("  with unsynced data", sum(one.losses_with_unsynced for one in outcomes)),
        ("crashes of the process", sum(one.process_crashes for one in outcomes)),
        ("crashes in recovery", sum(one.crashes_in_recovery for one in outcomes)),
        ("failed syncs", sum(one.sync_failures for one in outcomes)),
        ("damage refused", sum(one.refused for one in outcomes)),
        ("journalled commits", sum(one.journalled_count for one in outcomes)),
        ("compactions", sum(one.compacted_count for one in outcomes)),
        ("acked records", sum(one.acked_count for one in outcomes)),
        ("failed runs", len(failed)),
    ):
        print(f"  {name:24}{count:>10,}")
    for seed in failed:
        print(f"  again: python -m tests.core_log.power seed {seed}")
    return len(failed)


def crash_states() -> int:
    print(f"crash states, up to {STATES_PER_PREFIX} for each prefix of a trace")
    failures = 0
    for workload in WORKLOADS:
        with small_segments():
            prefixes, states, problems = explore(workload, STATES_PER_PREFIX)
        print(f"  {workload.__name__:24}{prefixes:>6} prefixes{states:>8} states{len(problems):>6} failed", flush=True)
        for problem in problems[:3]:
            print(f"    {problem}")
        failures += len(problems)
    return failures


def one_seed(seed: int, mutant: str | None) -> int:
    planted = next((one for one in MUTANTS if one.name == mutant), None)
    with small_segments():
        if planted is None:
            world = World(seed)
            try:
                print(world.run())
            finally:
                print("\n".join(world.done))
        else:
            planted.run(seed)
    return 0


def mutants(first: int) -> int:
    print(f"{'mutant':48}{'seeds':>8}{'budget':>8}  caught as")
    survivors = 0
    with small_segments():
        for mutant in MUTANTS:
            seeds, how = find(mutant, first)
            survivors += seeds is None
            print(f"{mutant.name:48}{'alive' if seeds is None else seeds:>8}{mutant.budget:>8}  {how}", flush=True)
    return survivors


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.core_log.power", description=__doc__)
    parser.add_argument("what", choices=("crash", "seed", "mutants"))
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--first", type=int, default=None, help="the first seed; drawn afresh when not given")
    parser.add_argument("--mutant")
    options = parser.parse_args(arguments)
    first = SystemRandom().randrange(1 << 40) if options.first is None else options.first
    match options.what:
        case "crash":
            return 1 if crash(first, options.runs) + crash_states() else 0
        case "mutants":
            return 1 if mutants(options.first or 0) else 0
        case _:
            return one_seed(options.seed, options.mutant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
