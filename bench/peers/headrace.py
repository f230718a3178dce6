"""Our own broker, started the way a user starts it: `headrace serve` on any free ports. Driver: processes.

Up is what its ready line says, `ready amqp=127.0.0.1:40001 mqtt=...`: one word for each open door.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.claim import NotRun
from bench.peers.peer import Running, answers, private_directory, process
from headrace import __version__

DOORS = ("amqp", "mqtt", "ws", "http")  # those that are open by default


def doors_of(output: str) -> dict[str, int] | None:
    """Door -> port from the ready line, or None when that line is not whole yet."""
    for line in output.splitlines(keepends=True):
        words = line.split()
        if words[:1] == ["ready"] and line.endswith("\n"):
            pairs = (word.partition("=") for word in words[1:])
            return {door: int(address.rpartition(":")[2]) for door, _, address in pairs}
    return None


@dataclass(frozen=True, slots=True)
class Headrace:
    proto: str  # amqp | mqtt: the door that is measured
    name: str = "headrace"
    command: Sequence[str] = (sys.executable, "-m", "headrace", "serve")

    @contextmanager
    def start(self) -> Iterator[Running]:
        with private_directory(self.name) as home:
            log = home / "log"
            flags = [flag for door in DOORS for flag in (f"--{door}", "127.0.0.1:0")]
            command = [*self.command, "--data", str(home / "data"), *flags]
            with process(command, log, lambda: doors_of(log.read_text()) is not None) as server:
                yield Running(self.name, self.proto, self.door(log), server.pid, __version__, log)

    def door(self, log: Path) -> int:
        port = (doors_of(log.read_text()) or {}).get(self.proto)
        if port is None:
            raise NotRun(f"headrace serve opened no {self.proto} door")
        if not answers(self.proto, port):
            raise NotRun(f"headrace serve does not answer on its {self.proto} door")
        return port
