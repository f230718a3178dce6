"""The long proofs of the delay engine, from the command line. Driver.

python -m tests.delay.simulation run [--operations N] [--first SEED]   random lives until so many operations are done
python -m tests.delay.simulation seed SEED [--mutant NAME]             one run again, with what it did
python -m tests.delay.simulation mutants                               every planted mistake, and the seeds it took
"""

import argparse
import sys
import traceback
from collections.abc import Sequence
from random import SystemRandom

from .mutants import MUTANTS, find
from .world import Tally, World

OPERATIONS = 100_000


def run(first: int, operations: int) -> int:
    total = Tally()
    failed: list[int] = []
    seed = first
    while total.operations < operations and len(failed) < 10:
        try:
            total.add(World(seed).run())
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            traceback.print_exc()
            print(f"seed {seed} failed", flush=True)
            failed.append(seed)
        seed += 1
    print(f"delay engine against its oracle: seeds {first}..{seed - 1}")
    for name in ("operations", "parked", "arrived", "crashes", "power_losses", "steps", "passes"):
        print(f"  {name.replace('_', ' '):32}{getattr(total, name):>10,}")
    for name, count in sorted(total.outcomes.items()):
        print(f"  {name:32}{count:>10,}")
    print(f"  {'failed runs':32}{len(failed):>10,}")
    for one in failed:
        print(f"  again: python -m tests.delay.simulation seed {one}")
    return len(failed)


def one_seed(seed: int, mutant: str | None) -> int:
    planted = next((one for one in MUTANTS if one.name == mutant), None)
    if planted is not None:
        planted.run(seed)
        return 0
    world = World(seed)
    try:
        print(world.run())
    finally:
        print("\n".join(world.done))
    return 0


def mutants(first: int) -> int:
    print(f"{'mutant':52}{'seeds':>8}{'budget':>8}  caught as")
    survivors = 0
    for mutant in MUTANTS:
        seeds, how = find(mutant, first)
        survivors += seeds is None
        print(f"{mutant.name:52}{'alive' if seeds is None else seeds:>8}{mutant.budget:>8}  {how}", flush=True)
    return survivors


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.delay.simulation", description=__doc__)
    parser.add_argument("what", choices=("run", "seed", "mutants"))
    parser.add_argument("seed", type=int, nargs="?")
    parser.add_argument("--operations", type=int, default=OPERATIONS)
    parser.add_argument("--first", type=int, default=None, help="the first seed; drawn afresh when not given")
    parser.add_argument("--mutant")
    options = parser.parse_args(arguments)
    first = SystemRandom().randrange(1 << 40) if options.first is None else options.first
    match options.what:
        case "run":
            return 1 if run(first, options.operations) else 0
        case "mutants":
            return 1 if mutants(options.first or 0) else 0
        case _:
            return one_seed(options.seed, options.mutant)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
