"""A cluster for the programs of this folder: a PostgreSQL, nodes as processes, a proxy before each peer door. Driver.

    with running_cluster() as cluster:
        connect_to(cluster.url)             # of one node or another that lives
        cluster.nodes[0].kill()
        cluster.nodes[0].start()

The end of the block is a clean stop of all nodes; one that ended by itself, or that wrote a traceback to its log, fails
the program, whatever the client saw.
"""

import base64
import json
import random
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from headrace.local_postgres import LocalPostgres
from interop.broker import Broker
from interop.ports import free_ports

WHOLE_SECONDS_MAX = 90


class Proxy:
    """Passes connections on to a port, until it is told that the network is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._is_cut = False
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        """Nothing goes through, and nobody is told: what is sent is never answered."""
        self._is_cut = True

    def heal(self) -> None:
        """What hung ends, and new connections go through."""
        self._is_cut = False
        for sock in list(self._sockets):
            _close(sock)

    def close(self) -> None:
        _close(self._listener)
        self.heal()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                accepted, _peer = self._listener.accept()
                threading.Thread(target=self._connect, args=(accepted,), daemon=True).start()

    def _connect(self, accepted: socket.socket) -> None:
        self._sockets.add(accepted)
        if self._is_cut:
            return
        try:
            onward = socket.create_connection(("127.0.0.1", self._target))
        except OSError:
            _close(accepted)
            return
        self._sockets.add(onward)
        for source, target in ((accepted, onward), (onward, accepted)):
            with suppress(OSError):
                source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(256 * 1024):
                while self._is_cut:
                    # Held, not lost: a cut that ends in time is a delay.
                    time.sleep(0.05)
                target.sendall(data)
        for sock in (source, target):
            self._sockets.discard(sock)
            _close(sock)


def _close(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


class Node(Broker):
    def __init__(
        self, folder: Path, number: int, store: str, secret: Path, more: Sequence[str], *, is_proxied: bool
    ) -> None:
        super().__init__(folder)
        folder.mkdir()
        self.number = number
        self.is_paused = False
        self.ports["http"], self.ports["peer"] = free_ports(2)
        self.proxy = Proxy(self.ports["peer"])
        self._arguments = ["--http", f"127.0.0.1:{self.ports['http']}", "--cluster", store, "--node-id", str(number)]
        self._arguments += ["--secret-file", str(secret), *more]
        if is_proxied:
            self._environ["HEADRACE_CLUSTER__ADVERTISE"] = f"127.0.0.1:{self.proxy.port}"

    @property
    def is_up(self) -> bool:
        return self.process is not None and self.process.poll() is None and not self.is_paused

    def pause(self) -> None:
        """SIGSTOP: it is there, and says nothing."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        self.is_paused = True

    def resume(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.is_paused = False

    def ask(self, path: str, body: object = None) -> Any:
        """An answer of its HTTP door, to a POST if there is a body. OSError if there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.ports['http']}{path}", data)
        request.add_header("content-type", "application/json")
        request.add_header("authorization", "Basic " + base64.b64encode(b"guest:guest").decode())
        with urllib.request.urlopen(request, timeout=5) as answer:
            return json.loads(answer.read())


class Cluster:
    def __init__(self, folder: Path, count: int, more: Sequence[str] = (), *, is_proxied: bool = True) -> None:
        self._folder = folder
        (port,) = free_ports(1)
        # Where an unprivileged user may enter.
        self._database_folder = Path(tempfile.mkdtemp(prefix="headrace-postgres-"))
        self.database = LocalPostgres(self._database_folder, port, {"max_connections": "40", "shared_buffers": "16MB"})
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_urlsafe(32))
        url = self.database.url()
        self.nodes = [
            Node(folder / f"node-{number}", number, url, secret, more, is_proxied=is_proxied)
            for number in range(1, count + 1)
        ]

    def start(self) -> None:
        self.database.create(sync=False)
        self.database.start()
        processes = [threading.Thread(target=node.start) for node in self.nodes]
        for one in processes:
            one.start()
        for one in processes:
            one.join()
        self.wait_whole()

    def stop(self) -> None:
        """All of them cleanly, one after the other; then the database."""
        try:
            for node in self.nodes:
                node.stop()
        finally:
            self.kill()

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()
            node.proxy.close()
        with suppress(Exception):
            self.database.stop("immediate")
        shutil.rmtree(self._database_folder, ignore_errors=True)

    @property
    def up(self) -> list[Node]:
        return [node for node in self.nodes if node.is_up]

    # -- as a place for clients to connect to -------------------------------------------------------------------

    def _any(self) -> Node:
        return random.choice(self.up or self.nodes)

    @property
    def url(self) -> str:
        return self._any().url

    @property
    def ports(self) -> dict[str, int]:
        return self._any().ports

    def restart(self) -> None:
        """What was acknowledged a moment ago has reached the others; then the leader of vhost / dies."""
        time.sleep(2)
        node = self.leader()
        node.restart()
        self.wait_whole()

    # -- how it is ----------------------------------------------------------------------------------------------

    def status(self) -> Any:
        """As the first node that answers says. OSError if none does."""
        for node in self.up:
            with suppress(OSError):
                return node.ask("/api/v1/cluster")
        raise OSError("no node answers")

    def leader(self, shard: int = 0) -> Node:
        """Who leads the shard, waited for."""
        return self._told(lambda status: next(one["leader"] for one in status["shards"] if one["shard"] == shard))

    def controller(self) -> Node:
        """Waited for, too."""
        return self._told(lambda status: status["controller"])

    def _told(self, which: Callable[[Any], int | None]) -> Node:
        last = time.monotonic() + WHOLE_SECONDS_MAX
        while time.monotonic() < last:
            with suppress(OSError, StopIteration):
                found = which(self.status())
                if found is not None:
                    return self.nodes[found - 1]
            time.sleep(0.1)
        raise TimeoutError("nobody leads, or nobody says who")

    def move_leader(self, to: Node, shard: int = 0) -> None:
        """Let this node lead the shard; returns when it does."""
        others = [node.number for node in self.nodes if node is not to]
        self._any().ask(f"/api/v1/cluster/shards/{shard}/move", {"nodes": [to.number, *others]})
        last = time.monotonic() + WHOLE_SECONDS_MAX
        while self.leader(shard) is not to:
            assert time.monotonic() < last, f"node {to.number} does not get to lead shard {shard}"
            time.sleep(0.1)
        self.wait_whole()

    def wait_whole(self) -> None:
        """Until every shard has a leader, and all of its replicas are in sync."""
        last = time.monotonic() + WHOLE_SECONDS_MAX
        status: Any = None
        while time.monotonic() < last:
            with suppress(OSError, ValueError):
                status = self.status()
                shards = status["shards"]
                is_led = all(one["leader"] and len(one["in_sync"]) == len(one["replicas"]) for one in shards)
                if shards and is_led and status["controller"] and all(node["up"] for node in status["nodes"]):
                    return
            time.sleep(0.1)
        raise TimeoutError(f"the cluster is not whole after {WHOLE_SECONDS_MAX} s: {json.dumps(status)}")


@contextmanager
def running_cluster(count: int = 3, more: Sequence[str] = (), *, is_proxied: bool = True) -> Iterator[Cluster]:
    """`is_proxied`: the network before each peer door can be cut; who connects to a dead node is not refused then."""
    with tempfile.TemporaryDirectory(prefix="headrace-cluster-") as folder:
        cluster = Cluster(Path(folder), count, more, is_proxied=is_proxied)
        try:
            cluster.start()
            yield cluster
            cluster.stop()
        finally:
            cluster.kill()
        for node in cluster.nodes:
            node.check_log()
