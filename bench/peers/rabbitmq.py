"""RabbitMQ from Debian's rabbitmq-server: a node of its own with no plugins. Driver: processes.

Debian's /usr/sbin/rabbitmq-server insists on the user rabbitmq and on /var/lib; the package's inner script does
not, so that one is started, with every path, port and name of the node set to a private one. It runs as whoever
we are, root or not. Erlang's port mapper, which a node would leave behind as a daemon, is started and stopped here.
"""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from interop.ports import free_ports

from bench.peers.peer import (
    NotInstalled,
    Running,
    accepts,
    answers,
    debian_version,
    private_directory,
    process,
    program,
)

PACKAGE = "rabbitmq-server"
SERVER = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


@dataclass(frozen=True, slots=True)
class RabbitMQ:
    queue_type: str = "classic"  # classic | quorum: what loadgen asks for as x-queue-type
    proto: str = "amqp"

    @property
    def name(self) -> str:
        return f"rabbitmq-{self.queue_type}"

    @contextmanager
    def start(self) -> Iterator[Running]:
        if not SERVER.exists():
            raise NotInstalled(f"RabbitMQ is not installed: apt-get install {PACKAGE}")
        epmd = program("epmd", "erlang-base")
        port, distribution, mapper = free_ports(3)
        with private_directory(self.name) as home:
            log = home / "log"
            (home / "rabbitmq.conf").write_text(f"listeners.tcp.1 = 127.0.0.1:{port}\n")
            (home / "plugins").write_text("[].\n")
            cookie = home / ".erlang.cookie"
            cookie.write_text(secrets.token_hex(16))
            cookie.chmod(0o400)
            env = {
                "PATH": os.environ.get("PATH", os.defpath),
                "HOME": str(home),
                "ERL_EPMD_PORT": str(mapper),
                "ERL_EPMD_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODENAME": f"bench{port}@localhost",
                "RABBITMQ_DIST_PORT": str(distribution),
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
                "RABBITMQ_CONF_ENV_FILE": str(home / "rabbitmq-env.conf"),
                "RABBITMQ_CONFIG_FILE": str(home / "rabbitmq.conf"),
                "RABBITMQ_ADVANCED_CONFIG_FILE": str(home / "advanced.config"),
                "RABBITMQ_ENABLED_PLUGINS_FILE": str(home / "plugins"),
                "RABBITMQ_MNESIA_BASE": str(home / "mnesia"),
                "RABBITMQ_LOG_BASE": str(home),
                "RABBITMQ_LOGS": "-",
                "RABBITMQ_PID_FILE": str(home / "pid"),
            }
            map_nodes = [epmd, "-port", str(mapper), "-address", "127.0.0.1"]
            with (
                process(map_nodes, home / "epmd.log", lambda: accepts(mapper), env),
                process([str(SERVER)], log, lambda: answers(self.proto, port), env) as server,
            ):
                version = debian_version(PACKAGE)
                yield Running(self.name, self.proto, port, server.pid, version, log, ("--queue-type", self.queue_type))
