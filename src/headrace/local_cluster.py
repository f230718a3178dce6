"""Some nodes of a cluster as processes of this machine, until they are stopped together. Driver: processes, signals.

Neighbours: commands/cluster_up.py says which.
"""

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from subprocess import PIPE
from typing import TextIO

import trio

STOP_SECONDS_MAX = 30


@dataclass(frozen=True, slots=True)
class Launch:
    """One node, and what runs it."""

    number: int
    command: tuple[str, ...]

    @property
    def line(self) -> str:
        return shlex.join(self.command)


def run(commands: Sequence[Sequence[str]]) -> None:
    """A node for each command, the first is number 1, until they end or a signal ends them."""
    trio.run(_run, [Launch(number, tuple(command)) for number, command in enumerate(commands, 1)])


async def _run(nodes: Sequence[Launch]) -> None:
    ready = {node.number: trio.Event() for node in nodes}
    stop = trio.Event()
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as running:
                for node in nodes:
                    running.start_soon(_keep, node, ready[node.number], stop)
                nursery.start_soon(_tell_when_ready, list(ready.values()), len(nodes))
                async for _number in signals:
                    stop.set()
                    break
            nursery.cancel_scope.cancel()


async def _tell_when_ready(all_ready: Sequence[trio.Event], count: int) -> None:
    for one in all_ready:
        await one.wait()
    print(f"cluster ready nodes={count}", flush=True)


async def _keep(node: Launch, ready: trio.Event, stop: trio.Event) -> None:
    """One node, until it ends or all are stopped. A node that dies is not started again: that is for you to try."""
    # In a session of its own, so that a Ctrl-C reaches it once, through us.
    process = await trio.lowlevel.open_process(list(node.command), stdout=PIPE, stderr=PIPE, start_new_session=True)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_copy, process.stdout, node.number, sys.stdout, ready)
        nursery.start_soon(_copy, process.stderr, node.number, sys.stderr, None)
        nursery.start_soon(_end, process, stop)
        status = await process.wait()
        if not stop.is_set():
            print(f"node {node.number} ended with status {status}; to start it again: {node.line}", flush=True)
        nursery.cancel_scope.cancel()


async def _copy(source: trio.abc.ReceiveStream | None, number: int, target: TextIO, ready: trio.Event | None) -> None:
    assert source is not None
    rest = b""
    async for data in source:
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            text = line.decode("utf-8", "replace")
            print(f"node {number}: {text}", file=target, flush=True)
            if ready is not None and text.startswith("ready"):
                ready.set()


async def _end(process: trio.Process, stop: trio.Event) -> None:
    await stop.wait()
    process.terminate()
    with trio.move_on_after(STOP_SECONDS_MAX):
        await process.wait()
        return
    process.kill()
