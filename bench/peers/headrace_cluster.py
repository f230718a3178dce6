"""Our own cluster on one machine: a PostgreSQL and three nodes, as `headrace cluster up` has them. Driver: processes.

The load goes to the node that leads vhost `/`, or, relayed, to another one.
"""

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from interop.ports import free_ports

from bench.peers.peer import NotInstalled, Running, StartFailed, private_directory, process
from headrace import __version__
from headrace.local_postgres import LocalPostgres, NoPostgres


@dataclass(frozen=True, slots=True)
class HeadraceCluster:
    name: str = "headrace"
    proto: str = "amqp"
    count: int = 3
    relayed: bool = False
    # CPU time is that of the node that the load goes to, not that of all of them.
    is_one_node: bool = False

    @contextmanager
    def start(self) -> Iterator[Running]:
        with _postgres() as store, private_directory(self.name) as home:
            log = home / "log"
            command = [sys.executable, "-m", "headrace", "cluster", "up", "--nodes", str(self.count)]
            command += ["--free-ports", "--store", store, "--data", str(home / "data")]
            with process(command, log, lambda: self._node(log) is not None) as nodes:
                found = self._node(log)
                assert found is not None
                number, port = found
                pid = _process_of(nodes.pid, number) if self.is_one_node else nodes.pid
                yield Running(self.name, self.proto, port, pid, __version__, log)

    def _node(self, log: Path) -> tuple[int, int] | None:
        """Where the load goes, and its port; None: not everything is up yet."""
        told = log.read_text(errors="replace")
        ports = {int(node): int(port) for node, port in re.findall(r"node (\d+): ready .*\bamqp=\S+:(\d+)", told)}
        leader = re.findall(r"node (\d+): .*: shard 0 is served", told)
        if "cluster ready" not in told or not leader:
            return None
        wanted = [node for node in sorted(ports) if (node == int(leader[-1])) is not self.relayed]
        return wanted[0], ports[wanted[0]]


def _process_of(parent: int, number: int) -> int:
    """The process of one node among those that `headrace cluster up` has started."""
    # Each is listed with the thread that started it.
    children = " ".join(path.read_text() for path in Path(f"/proc/{parent}/task").glob("*/children"))
    for pid in map(int, children.split()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"--node-id" in words and words[words.index(b"--node-id") + 1] == b"%d" % number:
            return pid
    raise StartFailed(f"node {number} is not there")


@contextmanager
def _postgres() -> Iterator[str]:
    # Not in the private directory: an unprivileged user must be able to enter.
    folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
    try:
        (port,) = free_ports(1)
        database = LocalPostgres(folder, port)
        database.create(sync=False)
        database.start()
    except NoPostgres as error:
        shutil.rmtree(folder)
        raise NotInstalled(str(error)) from error
    try:
        yield database.url()
    finally:
        database.stop()
        shutil.rmtree(folder)
