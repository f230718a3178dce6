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

from bench.peers.peer import NotInstalled, Running, private_directory, process
from headrace import __version__
from headrace.local_postgres import LocalPostgres, NoPostgres


@dataclass(frozen=True, slots=True)
class HeadraceCluster:
    name: str = "headrace"
    proto: str = "amqp"
    count: int = 3
    relayed: bool = False

    @contextmanager
    def start(self) -> Iterator[Running]:
        with _postgres() as store, private_directory(self.name) as home:
            log = home / "log"
            command = [sys.executable, "-m", "headrace", "cluster", "up", "--nodes", str(self.count)]
            command += ["--free-ports", "--store", store, "--data", str(home / "data")]
            with process(command, log, lambda: self._port(log) is not None) as nodes:
                port = self._port(log)
                assert port is not None
                yield Running(self.name, self.proto, port, nodes.pid, __version__, log)

    def _port(self, log: Path) -> int | None:
        told = log.read_text(errors="replace")
        ports = {int(node): int(port) for node, port in re.findall(r"node (\d+): ready .*\bamqp=\S+:(\d+)", told)}
        leader = re.findall(r"node (\d+): .*: shard 0 is served", told)
        if "cluster ready" not in told or not leader:
            return None
        wanted = [node for node in sorted(ports) if (node == int(leader[-1])) is not self.relayed]
        return ports[wanted[0]]


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
