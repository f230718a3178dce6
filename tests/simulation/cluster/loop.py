"""A trio loop that is driven by hand: one for each life of a node, so that a life can be stopped as by SIGSTOP, ended
as by kill -9 (no handler of it runs), and lived at a clock of its own. Driver for tests: no thread, no real time.

It leans on trio's own loop, which is a generator (`unrolled_run`); whatever is runnable runs in an order that the seed
draws. Neighbour: world.py has the time of the world, in which all loops take their turns.
"""

import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from random import Random
from typing import Any
from unittest.mock import patch

import trio
from outcome import Error, Outcome, Value
from trio._core import _run
from trio._core._entry_queue import EntryQueue
from trio._core._instrumentation import Instruments
from trio._core._ki import KIManager

# A loop that goes on for so many rounds without a wait is one that never ends.
ROUNDS_MAX = 20_000


@contextmanager
def deterministic(random: Random) -> Iterator[None]:
    """Whatever trio draws is drawn by this seed; tasks are put in order first."""
    with patch.object(_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True), patch.object(_run, "_r", random):
        yield


class LoopClock(trio.abc.Clock):
    """A node's monotonic clock, which is a little fast or slow."""

    def __init__(self, world_now: Callable[[], float], rate: float, start: float) -> None:
        self._world_now = world_now
        self._rate = rate
        self._began = world_now()
        self._start = start
        # Rounding must not leave a deadline, at which the loop was woken, a hair away.
        self._reached = start

    def start_clock(self) -> None:
        pass

    def current_time(self) -> float:
        now = self._start + (self._world_now() - self._began) * self._rate
        self._reached = max(self._reached, now)
        return self._reached

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()

    def world_seconds(self, seconds: float) -> float:
        return seconds / self._rate

    def reach(self, local: float) -> None:
        self._reached = max(self._reached, local)


class _NoIo:
    """There are no files and sockets: who waits for one waits for ever."""

    async def wait_readable(self, _file: object) -> None:
        await trio.lowlevel.wait_task_rescheduled(lambda _raise: trio.lowlevel.Abort.SUCCEEDED)

    wait_writable = wait_readable

    def notify_closing(self, _file: object) -> None:
        pass

    def process_events(self, events: object) -> None:
        pass

    def close(self) -> None:
        pass


class _Wakeup:
    """Of the entry queue, for `TrioToken.run_sync_soon`."""

    def __init__(self) -> None:
        self._is_woken = False
        self._task: trio.lowlevel.Task | None = None

    def wakeup_thread_and_signal_safe(self) -> None:
        self._is_woken = True
        if self._task is not None:
            task, self._task = self._task, None
            task._runner.reschedule(task)

    async def wait_woken(self) -> None:
        if not self._is_woken:
            self._task = trio.lowlevel.current_task()

            def abort(_raise: object) -> trio.lowlevel.Abort:
                self._task = None
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        else:
            await trio.lowlevel.checkpoint()
        self._is_woken = False

    def wakeup_on_signals(self) -> None:
        pass

    def close(self) -> None:
        pass


class Loop:
    def __init__(self, clock: LoopClock, main: Callable[[], Awaitable[object]]) -> None:
        self.clock = clock
        self.outcome: Outcome[Any] | None = None
        self.is_abandoned = False
        runner = self._runner = _run.Runner(
            clock=clock,
            instruments=Instruments([]),
            io_manager=_NoIo(),  # type: ignore[arg-type]
            ki_manager=KIManager(),
            strict_exception_groups=True,
            system_context=copy_context(),
            entry_queue=EntryQueue(wakeup=_Wakeup()),  # type: ignore[arg-type]
        )
        runner.asyncgens.install_hooks(runner)
        runner.asyncgens.close()
        self._generator = _run.unrolled_run(runner, main, (), host_uses_signal_set_wakeup_fd=True)
        self._events: Any = None

    def run(self) -> float | None:
        """Until nothing is runnable. Returns for how many seconds (of its own) nothing will be; None: it has ended."""
        context = _run.GLOBAL_RUN_CONTEXT
        context.runner = self._runner
        try:
            for _ in range(ROUNDS_MAX):
                timeout = self._generator.send(self._events)
                self._events = ()
                if timeout > 0:
                    return timeout
                if self.is_abandoned:
                    return None
        except StopIteration:
            self.outcome = self._runner.main_task_outcome or Value(None)
            return None
        except trio.TrioInternalError as error:
            self.outcome = Error(error)
            return None
        finally:
            context.__dict__.clear()
        raise AssertionError(f"a loop went {ROUNDS_MAX} rounds without a wait")

    def reschedule(self, task: trio.lowlevel.Task, value: Outcome[Any]) -> None:
        self._runner.reschedule(task, value)

    def bury(self) -> None:
        """Let go of what an abandoned life has left, when the world is over: nobody is there to see it."""
        if self.outcome is not None:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._generator.close()
        tasks = list(self._runner.tasks)
        nurseries = [nursery for task in tasks for nursery in task.child_nurseries]
        for task in tasks:
            for _ in range(3):
                try:
                    task.coro.close()
                except BaseException:
                    continue
                break
        for nursery in nurseries:
            nursery._children.clear()
        self._runner.tasks.clear()
