"""What holds the loop: each step of a task by its processor's time, by the clock, and by what the collector took of it.

A step is what a task does between two waits: for so long nobody else has a turn. Others on the machine lengthen it by
the clock, and not by the processor's time of the loop's thread, which is what a step is judged by. A collection of
garbage falls into whichever step happens to allocate: what it took is told apart. With `where`, the stack of a step
that lasts is looked at every few milliseconds, by a signal: for finding the place, not for figures, as setting the
timer costs two system calls for each step.
"""

import gc
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import trio

# Longer steps are told of as they happen.
STEP_S = 0.01
# With `where`: the first look at a step, and the next ones.
_LOOK_S = 0.006
_AGAIN_S = 0.001
_DEPTH = 7


@dataclass(slots=True)
class Step:
    """The longest of a task's, in seconds; how many were too long."""

    cpu: float = 0.0
    clock: float = 0.0
    collecting: float = 0.0
    long: int = 0


class Steps(trio.abc.Instrument):
    """Steps of the tasks whose name holds none of `others`: what a bench does itself is not the engine's."""

    def __init__(self, others: tuple[str, ...] = ("child",), *, where: bool = False) -> None:
        self.others = others
        self.tasks: dict[str, Step] = {}
        self._stacks: Counter[str] = Counter()
        self._where = where
        self._cpu = 0.0
        self._clock = 0.0
        self._collecting = 0.0
        self._began = 0.0
        self._loop = threading.get_ident()
        if where:
            signal.signal(signal.SIGALRM, self._look)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """From now on, in this run of trio."""
        gc.callbacks.append(self._collect)
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)
            gc.callbacks.remove(self._collect)

    @property
    def longest(self) -> Step:
        return max(self.tasks.values(), key=lambda one: one.cpu, default=Step())

    def clear(self) -> None:
        self.tasks.clear()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._collecting = 0.0
        if self._where:
            self._stacks.clear()
            signal.setitimer(signal.ITIMER_REAL, _LOOK_S, _AGAIN_S)
        self._clock = time.perf_counter()
        self._cpu = time.thread_time()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        cpu = time.thread_time() - self._cpu
        clock = time.perf_counter() - self._clock
        if self._where:
            signal.setitimer(signal.ITIMER_REAL, 0)
        name = task.name
        if any(one in name for one in self.others):
            return
        known = self.tasks.get(name)
        if known is None:
            known = self.tasks[name] = Step()
        if cpu > known.cpu:
            known.cpu, known.clock, known.collecting = cpu, clock, self._collecting
        if cpu > STEP_S:
            known.long += 1
            self._tell(name, cpu, clock)

    def _tell(self, name: str, cpu: float, clock: float) -> None:
        told = f"{name} kept the loop for {cpu * 1000:.1f} ms ({clock * 1000:.1f} by the clock"
        told += f", {self._collecting * 1000:.1f} collecting garbage)" if self._collecting else ")"
        for stack, count in self._stacks.most_common(4):
            told += f"\n    {count:3} {stack}"
        print(told, file=sys.stderr, flush=True)

    def _collect(self, phase: str, info: Mapping[str, int]) -> None:
        if threading.get_ident() != self._loop:
            return
        if phase == "start":
            self._began = time.thread_time()
        else:
            self._collecting += time.thread_time() - self._began

    def _look(self, _number: int, frame: FrameType | None) -> None:
        stack: list[str] = []
        while frame is not None and len(stack) < _DEPTH:
            stack.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
        self._stacks[" < ".join(stack)] += 1
