"""Seeds run in processes of their own, some at a time: what dead lives leave behind goes with them. Driver.

In the parent nothing ever runs, so that a seed comes to the same whichever seeds ran before it.
"""

import gc
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice

from tests.simulation.cluster.town import Result

TOGETHER = 8


def outcomes(seeds: Sequence[int] | range, run: Callable[[int], Result]) -> Iterator[tuple[Result, float]]:
    """For each seed what came of it, and the seconds of a processor that it took."""
    waiting = iter(seeds)
    while some := list(islice(waiting, TOGETHER)):
        yield from _elsewhere(some, run)


def _elsewhere(seeds: Sequence[int], run: Callable[[int], Result]) -> list[tuple[Result, float]]:
    reader, writer = os.pipe()
    # The child would write once more what is printed and not written yet.
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reader)
            # Lives that were killed are thrown away in the middle of things, which trio and others complain of.
            sys.unraisablehook = lambda _: None
            gc.disable()
            found = []
            for seed in seeds:
                began = time.process_time()
                result = run(seed)
                found.append(({**asdict(result), "counts": dict(result.counts)}, time.process_time() - began))
            with os.fdopen(writer, "w") as file:
                json.dump(found, file)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    os.close(writer)
    with os.fdopen(reader) as file:
        data = file.read()
    _, status = os.waitpid(child, 0)
    if status != 0:
        raise RuntimeError(f"the simulator itself has failed in one of the seeds {list(seeds)}")
    return [(Result(**{**told, "counts": Counter(told["counts"])}), cpu_s) for told, cpu_s in json.loads(data)]
