"""amqtt from PyPI: the other broker in pure Python. Driver: processes.

Its packet-logging plugins are left out, only anonymous login is loaded.
"""

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interop.ports import free_ports

from bench.peers.peer import NotInstalled, Running, answers, private_directory, process

PACKAGE = "amqtt"


@dataclass(frozen=True, slots=True)
class Amqtt:
    name: str = "amqtt"
    proto: str = "mqtt"

    @contextmanager
    def start(self) -> Iterator[Running]:
        try:
            version = importlib.metadata.version(PACKAGE)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalled("amqtt is not installed: pip install amqtt, from PyPI") from None
        (port,) = free_ports(1)
        with private_directory(self.name) as home:
            (home / "amqtt.yaml").write_text(
                "listeners:\n"
                "  default:\n"
                "    type: tcp\n"
                f"    bind: 127.0.0.1:{port}\n"
                "plugins:\n"
                "  amqtt.plugins.authentication.AnonymousAuthPlugin:\n"
                "    allow_anonymous: true\n"
            )
            log = home / "log"
            command = [sys.executable, "-m", "amqtt.scripts.broker_script", "-c", str(home / "amqtt.yaml")]
            with process(command, log, lambda: answers(self.proto, port)) as server:
                yield Running(self.name, self.proto, port, server.pid, version, log)
