"""Claims: what is parked costs neither memory nor punctuality, however much it is. Driver: processes, a loop, files.

The delay engine by itself, on a real disk, in a process that is killed: plain durable publishing and parking in runs
of 500 with a window of unconfirmed ones, as a publisher of AMQP would; lateness at 1,000 due in a second, from the due
time to the commit at the target; 100,000 due within one second; and the same after kill -9 and a restart, when all is
sorted and when nothing is. Few pending and many are measured by one program, one after the other:
`python -m bench.delay 10000000`, or `make bench-delay`.
"""

import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Self

import numpy as np
import trio

from bench.claim import Better, Claim
from bench.scratch import new_logs, scratch_folder
from bench.steps import Steps
from headrace.core_log.config import DirectoryConfig, LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.real import real_env
from headrace.core_log.record import Numbers
from headrace.delay.config import DelayConfig
from headrace.delay.delays import Delays
from headrace.delay.fire import DueRun
from headrace.node import GARBAGE_THRESHOLDS

FEW = 1_000
MANY = 200_000
VALUE_BYTES = 200
RUN = 500
WINDOW = 40
# Runs of different waits.
WAITS = 1000
BURST = 100_000
LATE_RATE = 1_000
LATE_SECONDS = 20
FLOOR_COUNT = 300
HOUR_US = 3600 * 1_000_000
MONTH_US = 30 * 24 * HOUR_US
TARGET = b"orders"


class Goal:
    """One log; notes how late each record is when it is committed there."""

    def __init__(self, directory: LogDirectory) -> None:
        self._directory = directory
        found = [stream for stream in directory.streams.values() if stream.spec.name == "bench"]
        logs = found[0].partitions if found else new_logs(directory, 1, LogConfig())
        self.log: PartitionLog = logs[0]
        self.late_us: list[int] = []
        self.last_us = 0

    def places(self, target: bytes, keys: Sequence[bytes]) -> Sequence[TargetPartition | None]:
        return [TargetPartition(self.log.stream_id, self.log.partition)] * len(keys)

    def fire(self, run: DueRun, done: Callable[[], None]) -> None:
        assert run.producer is not None
        now_us = time.time_ns() // 1000
        appended = self.log.append_dense(
            run.producer, run.keys, run.properties, run.values, settled=run.settled, timestamp_us=now_us
        )

        def committed() -> None:
            self.last_us = time.time_ns() // 1000
            self.late_us += [self.last_us - due for due in run.due_us]
            done()

        self._directory.committer.urgent(self.log)
        self.log.when_committed(appended.next_offset, committed)

    def count(self) -> int:
        return sum(last - first for _batch, first, last in self.log.runs())


class Bench:
    """What the child does; each answer is a line of JSON."""

    def __init__(self, env: Env, folder: Path, directory: LogDirectory, delays: Delays, goal: Goal) -> None:
        self._env = env
        self._folder = folder
        self._directory = directory
        self._delays = delays
        self._goal = goal
        random = Random(1)
        self._values = [random.randbytes(VALUE_BYTES) for _ in range(RUN)]

    async def _publish(self, count: int, append: Callable[[int], tuple[PartitionLog, int]]) -> dict[str, float]:
        """Runs with a window of unconfirmed ones; records per second, and what each took of the processor meanwhile: of
        the loop, and of all threads."""
        window = trio.Semaphore(WINDOW)
        begun, loop, process = time.perf_counter(), time.thread_time(), time.process_time()
        for at in range(0, count, RUN):
            await window.acquire()
            log, end = append(min(RUN, count - at))
            log.when_committed(end, window.release)
        for _ in range(WINDOW):
            await window.acquire()
        return {
            "rate": count / (time.perf_counter() - begun),
            "loop_us": (time.thread_time() - loop) / count * 1e6,
            "process_us": (time.process_time() - process) / count * 1e6,
        }

    async def plain(self, count: int) -> dict[str, float]:
        log = self._goal.log
        before = self._goal.count()

        def append(size: int) -> tuple[PartitionLog, int]:
            blank = [b""] * size
            appended = log.append([b"key"] * size, blank, self._values[:size], timestamp_us=time.time_ns() // 1000)
            self._directory.committer.urgent(log)
            return log, appended.next_offset

        published = await self._publish(count, append)
        log.delete_before(int(log.high_watermark))
        assert self._goal.count() == 0, before
        return published

    async def park(self, count: int) -> dict[str, float]:
        """Spread over thirty days, in no order."""
        # Drawn beforehand: what the publisher does to make up its messages is not the engine's.
        waits = np.random.default_rng(2).integers(HOUR_US, MONTH_US, (WAITS, RUN))
        turns = itertools.cycle(range(WAITS))

        def append(size: int) -> tuple[PartitionLog, int]:
            return self._delays.intake, self._park(waits[next(turns)][:size] + time.time_ns() // 1000)

        return {**await self._publish(count, append), **self.memory()}

    def _park(self, dues: Numbers) -> int:
        size = len(dues)
        return self._delays.park(TARGET, [b"key"] * size, [b""] * size, self._values[:size], due_us=dues)

    def memory(self) -> dict[str, float]:
        text = Path("/proc/self/status").read_text()
        found = {
            line.split(":")[0]: line.split()[1] for line in text.splitlines() if line.startswith(("VmRSS", "VmHWM"))
        }
        return {"rss_mb": int(found["VmRSS"]) / 1000, "peak_mb": int(found["VmHWM"]) / 1000}

    async def sorted(self) -> dict[str, float]:
        """Wait until the sorter has nothing to do, and then the file system: what is pending for weeks was written long
        ago, and what it costs to have it written just now is no part of what it costs to have it."""
        begun = time.perf_counter()
        waiting, config = self._delays._engine.waiting, self._delays._config
        while waiting.unsorted_bytes >= config.sort_bytes or any(block.is_moving for block in waiting):
            await trio.sleep(0.1)
        seconds = time.perf_counter() - begun
        # Intake and run files that nobody needs any more are let go of.
        await trio.sleep(5)
        await trio.to_thread.run_sync(os.sync)
        return {"seconds": seconds, **self.memory()}

    async def floor(self) -> list[float]:
        """What the machine lets anybody do at this moment: wake at a time and sync 4 KB of a file that is there."""
        path = self._folder / "floor"
        path.write_bytes(bytes(4096))
        number = os.open(path, os.O_RDWR)
        late: list[float] = []
        due = trio.current_time()
        for _ in range(FLOOR_COUNT):
            due = max(due + 0.01, trio.current_time())
            await trio.sleep_until(due)
            os.pwrite(number, bytes(4096), 0)
            await self._env.worker.run(lambda: os.fdatasync(number))
            late.append((trio.current_time() - due) * 1000)
        os.close(number)
        return late

    async def lateness(self) -> dict[str, float]:
        """So many due in each second, parked a few seconds ahead, while the loop is watched for stalls; before it and
        behind it the machine's own lateness."""
        floor = await self.floor()
        goal = self._goal
        goal.late_us.clear()
        begun_us = time.time_ns() // 1000 + 3_000_000
        stall = 0.0
        for at in range(0, LATE_RATE * LATE_SECONDS, LATE_RATE // 20):
            self._park([begun_us + (at + one) * 1_000_000 // LATE_RATE for one in range(LATE_RATE // 20)])
            before = time.perf_counter()
            await trio.sleep(0.05)
            stall = max(stall, time.perf_counter() - before - 0.05)
        while len(goal.late_us) < LATE_RATE * LATE_SECONDS:
            await trio.sleep(0.01)
        late = sorted(goal.late_us)
        floor = sorted(floor + await self.floor())
        return {
            "p50_ms": late[len(late) // 2] / 1000,
            "p99_ms": late[len(late) * 99 // 100] / 1000,
            "floor_p50_ms": floor[len(floor) // 2],
            "floor_p99_ms": floor[len(floor) * 99 // 100],
            "stall_ms": stall * 1000,
            **self.memory(),
        }

    async def burst(self) -> dict[str, float]:
        """All within one second; the time from the beginning of that second to the last commit at the target."""
        goal = self._goal
        goal.late_us.clear()
        begun_us = time.time_ns() // 1000 + 10_000_000
        random = Random(3)
        for _ in range(0, BURST, RUN):
            self._park([begun_us + random.randrange(1_000_000) for _ in range(RUN)])
            await trio.sleep(0)
        while len(goal.late_us) < BURST:
            await trio.sleep(0.01)
        return {"seconds": (goal.last_us - begun_us) / 1e6, **self.memory()}

    async def kill_me(self) -> dict[str, float]:
        """A burst under way when the process ends."""
        begun_us = time.time_ns() // 1000 + 1_000_000
        end = 0
        for _ in range(0, BURST, RUN):
            end = self._park([begun_us] * RUN)
        done = trio.Event()
        self._delays.intake.when_committed(end, done.set)
        await done.wait()
        while time.time_ns() // 1000 < begun_us + 200_000:
            await trio.sleep(0.01)
        return {"arrived": float(self._goal.count())}

    async def survivors(self, pending: int) -> dict[str, float]:
        """How much of all that was due has arrived, when no more is pending than should be."""
        begun = time.perf_counter()
        while self._delays.count() > pending and time.perf_counter() - begun < 120:
            await trio.sleep(0.05)
        await trio.sleep(1)
        arrived, left = float(self._goal.count()), float(self._delays.count())
        return {"arrived": arrived, "pending": left, "seconds": time.perf_counter() - begun - 1}


async def child(folder: Path) -> None:
    """Serve the parent's commands, one on each line of standard input."""
    begun = time.perf_counter()
    env = real_env(folder)
    directory = await LogDirectory.open(env, DirectoryConfig(), clean=False)
    goal = Goal(directory)
    delays = Delays(env, directory, DelayConfig(), goal)
    opened = time.perf_counter()
    await delays.load()
    loaded = time.perf_counter()
    steps = Steps(where="WHERE" in os.environ)
    bench = Bench(env, folder, directory, delays, goal)
    # As a node does (src/headrace/node.py).
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GARBAGE_THRESHOLDS)
    async with trio.open_nursery() as nursery:
        with steps.watching():
            nursery.start_soon(directory.run)
            nursery.start_soon(delays.run)
            opened_s, loaded_s = opened - begun, loaded - begun
            _say({"opened_s": opened_s, "loaded_s": loaded_s, "pending": delays.count(), **bench.memory()})
            while line := await trio.to_thread.run_sync(sys.stdin.readline):
                name, *arguments = line.split()
                steps.clear()
                answer = await getattr(bench, name)(*map(int, arguments))
                longest = steps.longest
                _say(
                    {
                        **answer,
                        "step_ms": longest.cpu * 1000,
                        "collecting_ms": longest.collecting * 1000,
                    }
                )
            nursery.cancel_scope.cancel()


def _say(answer: dict[str, float]) -> None:
    print(json.dumps(answer), flush=True)


class Child:
    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.delay", "--child", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.started = self._answer()

    def ask(self, command: str) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the child ended with {self._process.wait()}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """kill -9, in any case."""
        self._process.kill()
        self._process.wait()


def measure(count: int, tell: Callable[[str, dict[str, float]], None]) -> dict[str, dict[str, float]]:
    """Everything, few pending beside many; `tell` is called as figures come."""
    found: dict[str, dict[str, float]] = {}

    def note(name: str, answer: dict[str, float]) -> dict[str, float]:
        found[name] = answer
        tell(name, answer)
        return answer

    with scratch_folder() as folder, Child(folder) as few:
        few.ask(f"park {FEW}")
        # Before lateness: a log's first files grow in steps that double, and each step makes a sync slow. With many
        # pending they have long grown.
        note(f"{BURST:,} in a second, {FEW:,} pending", few.ask("burst"))
        note(f"lateness, {FEW:,} pending", few.ask("lateness"))
    with scratch_folder() as folder:
        with Child(folder) as many:
            # As many as are parked: a file system that has to write gigabytes is not that of the first moments.
            note("plain", many.ask(f"plain {count}"))
            note("park", many.ask(f"park {count}"))
            note("sorted", many.ask("sorted"))
            note("lateness", many.ask("lateness"))
            note("burst", many.ask("burst"))
            note("killed while firing", many.ask("kill_me"))
        with Child(folder) as many:
            note("restart", many.started)
            after = note("after kill -9", many.ask(f"survivors {count}"))
            assert after["arrived"] == LATE_RATE * LATE_SECONDS + 2 * BURST, "each exactly once"
            note("lateness after kill -9", many.ask("lateness"))
            note("burst after kill -9", many.ask("burst"))
    with scratch_folder() as folder:
        with Child(folder) as many:
            many.ask(f"park {count}")
        with Child(folder) as many:
            note("restart, nothing sorted", many.started)
            assert many.started["pending"] == count, "nothing that was confirmed is lost"
    return found


def claim() -> list[Claim]:
    count = int(os.environ.get("N", MANY))
    found = measure(count, lambda _name, _answer: None)
    return claims_of(found, count)


def claims_of(found: dict[str, dict[str, float]], count: int) -> list[Claim]:
    few, many = found[f"lateness, {FEW:,} pending"], found["lateness"]
    plain, park = found["plain"], found["park"]
    peak = max(answer.get("peak_mb", 0.0) for answer in found.values())
    restart = max(found[name]["loaded_s"] for name in ("restart", "restart, nothing sorted"))
    longest = max(found.values(), key=lambda answer: answer.get("step_ms", 0.0))
    return [
        Claim(
            "accepted beside plain durable publishing",
            park["rate"] / plain["rate"],
            0.5,
            detail=f"{park['rate']:,.0f}/s of {plain['rate']:,.0f}/s",
        ),
        Claim(
            "the same by the processor's time of the loop, with what is sorted meanwhile",
            plain["loop_us"] / park["loop_us"],
            None,
            detail=f"{park['loop_us']:.2f} us for each, plain {plain['loop_us']:.2f}; "
            f"of all threads {park['process_us']:.2f} and {plain['process_us']:.2f}",
        ),
        Claim(f"peak RSS with {count:,} pending", peak, 400, Better.LESS, "MB"),
        Claim(f"lateness p99 at 1,000/s, {count:,} pending", many["p99_ms"], 20, Better.LESS, "ms"),
        Claim(
            "the same beside waking at a time and one sync",
            many["p99_ms"] / many["floor_p99_ms"],
            None,
            Better.LESS,
            detail=f"of which 99 in 100 took {many['floor_p99_ms']:.1f} ms in the same run, the median "
            f"{many['floor_p50_ms']:.1f} ms against {many['p50_ms']:.1f} ms",
        ),
        Claim("lateness p99, many beside few pending", many["p99_ms"] / few["p99_ms"], 1.5, Better.LESS),
        Claim(f"{BURST:,} due in one second", found["burst"]["seconds"], 3, Better.LESS, "s"),
        Claim("the same after kill -9", found["burst after kill -9"]["seconds"], 3, Better.LESS, "s"),
        Claim(f"restart with {count:,} pending after kill -9", restart, 10, Better.LESS, "s"),
        Claim(
            "lateness p99, many beside few pending, each beside its own floor",
            many["p99_ms"] / many["floor_p99_ms"] / (few["p99_ms"] / few["floor_p99_ms"]),
            None,
            Better.LESS,
        ),
        Claim("lateness p99 after kill -9", found["lateness after kill -9"]["p99_ms"], 20, Better.LESS, "ms"),
        Claim(
            "longest step of the loop, by its processor's time, over everything here",
            longest["step_ms"],
            10,
            Better.LESS,
            "ms",
            f"{longest['collecting_ms']:.1f} ms of it collecting garbage; by the clock, with who else runs "
            f"and what the disk holds up, {many['stall_ms']:.0f} ms with {count:,} pending",
        ),
    ]


def main(arguments: list[str]) -> Any:
    if arguments[:1] == ["--child"]:
        return trio.run(child, Path(arguments[1]))
    count = int(arguments[0]) if arguments else MANY

    def tell(name: str, answer: dict[str, float]) -> None:
        print(f"{name:40}" + "  ".join(f"{key} {value:,.3f}" for key, value in answer.items()), flush=True)

    for one in claims_of(measure(count, tell), count):
        promise = one.detail if one.target is None else f"{one.better.value} {one.target} {one.detail}"
        print(f"{one.verdict.value:10}{one.name:72}{one.figure:12,.2f} {one.unit:3}{promise}")


if __name__ == "__main__":
    main(sys.argv[1:])
