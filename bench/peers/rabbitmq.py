"""RabbitMQ from Debian's rabbitmq-server: a node of its own with no plugins. Driver: processes.

Debian's /usr/sbin/rabbitmq-server insists on the user rabbitmq and on /var/lib; the package's inner script does
not, so that one is started, with every path, port and name of the node set to a private one. It runs as whoever
we are, root or not. Erlang's port mapper, which a node would leave behind as a daemon, is started and stopped here.
"""

import os
import secrets
import shlex
from collections.abc import Iterator, Sequence
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
            env = prepared(home, f"bench{port}@localhost", port, distribution, mapper)
            with (
                process(mapping(epmd, mapper), home / "epmd.log", lambda: accepts(mapper), env),
                process([str(SERVER)], log, lambda: answers(self.proto, port), env) as server,
            ):
                version = debian_version(PACKAGE)
                yield Running(self.name, self.proto, port, server.pid, version, log, ("--queue-type", self.queue_type))


@dataclass(frozen=True, slots=True)
class RabbitMQCluster:
    """Nodes that form a cluster; a quorum queue has a member on each. The load goes to the first."""

    count: int = 3
    proto: str = "amqp"
    name: str = "rabbitmq-quorum-cluster"

    @contextmanager
    def start(self) -> Iterator[Running]:
        if not SERVER.exists():
            raise NotInstalled(f"RabbitMQ is not installed: apt-get install {PACKAGE}")
        epmd = program("epmd", "erlang-base")
        mapper, *ports = free_ports(1 + 2 * self.count)
        doors, distributions = ports[: self.count], ports[self.count :]
        names = [f"bench{port}@localhost" for port in doors]
        with private_directory(self.name) as home:
            log = home / "log"
            cookie = secrets.token_hex(16)
            lines = []
            for name, port, distribution in zip(names, doors, distributions, strict=True):
                node = home / name
                node.mkdir()
                env = prepared(node, name, port, distribution, mapper, cookie=cookie, others=names)
                words = [f"{key}={shlex.quote(value)}" for key, value in env.items()]
                lines.append(f"env -i {' '.join(words)} {SERVER} &\n")
                # The first forms the cluster, the others join it: no race for who is first.
                lines.append("sleep 8\n" if name == names[0] else "")
            script = home / "nodes.sh"
            # A signal that ends the shell ends its nodes.
            script.write_text("trap 'kill $(jobs -p); wait' TERM INT\n" + "".join(lines) + "wait\n")

            def ready() -> bool:
                told = log.read_text(errors="replace")
                joined = all(f"node '{name}' up" in told or f"node {name} up" in told for name in names[1:])
                return joined and all(answers(self.proto, port) for port in doors)

            with (
                process(mapping(epmd, mapper), home / "epmd.log", lambda: accepts(mapper), env),
                process(["/bin/sh", str(script)], log, ready) as shell,
            ):
                version = debian_version(PACKAGE)
                yield Running(self.name, self.proto, doors[0], shell.pid, version, log, ("--queue-type", "quorum"))


def mapping(epmd: str, port: int) -> list[str]:
    return [epmd, "-port", str(port), "-address", "127.0.0.1"]


def prepared(
    home: Path,
    name: str,
    port: int,
    distribution: int,
    mapper: int,
    *,
    cookie: str | None = None,
    others: Sequence[str] = (),
) -> dict[str, str]:
    """Writes a node's files; returns its environment. `others`: nodes that it forms a cluster with, itself included."""
    formation = [f"cluster_formation.classic_config.nodes.{place} = {one}" for place, one in enumerate(others, 1)]
    if formation:
        formation.insert(0, "cluster_formation.peer_discovery_backend = classic_config")
    lines = [f"listeners.tcp.1 = 127.0.0.1:{port}", *formation]
    (home / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
    (home / "plugins").write_text("[].\n")
    kept = home / ".erlang.cookie"
    kept.write_text(cookie or secrets.token_hex(16))
    kept.chmod(0o400)
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(home),
        "ERL_EPMD_PORT": str(mapper),
        "ERL_EPMD_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODENAME": name,
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
