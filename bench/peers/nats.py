"""NATS from Debian's nats-server: its MQTT door, sessions and QoS 1 in JetStream files. Driver: processes.

This version grants QoS 1 at most; loadgen reports a QoS 2 run against it as downgraded.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interop.ports import free_ports

from bench.peers.peer import Running, answers, debian_version, private_directory, process, program

PACKAGE = "nats-server"


@dataclass(frozen=True, slots=True)
class Nats:
    name: str = "nats"
    proto: str = "mqtt"

    @contextmanager
    def start(self) -> Iterator[Running]:
        nats_server = program("nats-server", PACKAGE)
        port, clients = free_ports(2)
        with private_directory(self.name) as home:
            (home / "nats.conf").write_text(
                "server_name: bench\n"
                f"host: 127.0.0.1\nport: {clients}\n"
                f'jetstream {{ store_dir: "{home / "jetstream"}" }}\n'
                f"mqtt {{ host: 127.0.0.1, port: {port} }}\n"
            )
            log = home / "log"
            command = [nats_server, "-c", str(home / "nats.conf")]
            with process(command, log, lambda: answers(self.proto, port)) as server:
                yield Running(self.name, self.proto, port, server.pid, debian_version(PACKAGE), log)
