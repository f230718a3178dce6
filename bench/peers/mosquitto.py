"""Mosquitto from Debian's mosquitto: in memory only, as it is by default. Driver: processes.

Its other defaults stay too. The one that shows is max_queued_messages, 1000: what a subscriber is behind by more than
that is dropped, acknowledged or not. The unbounded variant sets it to 0 (no limit), so that the same work is compared.
"""

import getpass
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interop.ports import free_ports

from bench.peers.peer import Running, answers, debian_version, private_directory, process, program

PACKAGE = "mosquitto"


@dataclass(frozen=True, slots=True)
class Mosquitto:
    unbounded: bool = False
    proto: str = "mqtt"

    @property
    def name(self) -> str:
        return "mosquitto-unbounded" if self.unbounded else "mosquitto"

    @contextmanager
    def start(self) -> Iterator[Running]:
        mosquitto = program("mosquitto", PACKAGE)
        (port,) = free_ports(1)
        with private_directory(self.name) as home:
            config = [
                f"listener {port} 127.0.0.1",
                "allow_anonymous true",
                "persistence false",
                "log_dest stderr",
                # Started as root it would become the user mosquitto, who may not read this directory.
                f"user {getpass.getuser()}",
            ]
            if self.unbounded:
                config.append("max_queued_messages 0")
            (home / "mosquitto.conf").write_text("\n".join(config) + "\n")
            log = home / "log"
            command = [mosquitto, "-c", str(home / "mosquitto.conf")]
            with process(command, log, lambda: answers(self.proto, port)) as server:
                yield Running(self.name, self.proto, port, server.pid, debian_version(PACKAGE), log)
