"""A real broker for tests: `headrace serve` as a process, with its data in a folder of its own. Driver: processes.

    with RunningBroker(folder) as broker:
        connection = broker.connect()           # pika
        broker.kill()                           # as the power would
        broker.start()                          # the same data, the same port

Its log is in `broker.log_path`; a test that fails because the broker ended gets its last lines.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pika
from interop.ports import free_ports
from pika.exceptions import AMQPError

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 60


class RunningBroker:
    def __init__(
        self, folder: Path, *, config: str = "", arguments: Sequence[str] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        """`config` is the text of a TOML file."""
        self.folder = folder
        self.data = folder / "data"
        self.log_path = folder / "broker.log"
        # One that nobody else is given while the broker is down.
        (self.port,) = free_ports(1)
        # Of every open door, by its name.
        self.ports: dict[str, int] = {}
        self.process: subprocess.Popen[str] | None = None
        self._connections: list[pika.BlockingConnection] = []
        self._arguments = list(arguments)
        self._environ = dict(environ or {})
        self.config_path = folder / "headrace.toml"
        if config:
            self.config_path.write_text(config)
            self._arguments += ["--config", str(self.config_path)]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.process is not None:
            self.kill()

    @property
    def pid(self) -> int:
        assert self.process is not None, "the broker runs"
        return self.process.pid

    def start(self) -> None:
        """Returns once it accepts connections. Every start takes the same port."""
        assert self.process is None, "the broker runs already"
        others = [flag for door in ("mqtt", "ws", "http") for flag in (f"--{door}", "off")]
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(self.data)]
        command += ["--amqp", f"127.0.0.1:{self.port}", *others, *self._arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ | self._environ
            )
        # A broker that never gets ready is ended, and then its stdout is.
        watch = threading.Timer(START_SECONDS_MAX, self.process.kill)
        watch.start()
        try:
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
        finally:
            watch.cancel()
        self.ports = {name: int(port) for name, port in re.findall(r"\b(\w+)=\S+:(\d+)", line)}
        if "amqp" not in self.ports:
            self.kill()
            raise AssertionError(f"the broker did not get ready: {line!r}\n{self.last_lines()}")
        self.port = self.ports["amqp"]

    def reload(self, config: str) -> None:
        """SIGHUP with another configuration; it must have been given one at its start. Returns when it is in effect."""
        taken, refused = self._told("configuration read again"), self._told("configuration refused")
        self.config_path.write_text(config)
        assert self.process is not None, "the broker runs"
        self.process.send_signal(signal.SIGHUP)
        eventually(
            lambda: self._told("configuration read again") > taken or self._told("configuration refused") > refused
        )
        assert self._told("configuration refused") == refused, self.last_lines()

    def _told(self, message: str) -> int:
        return self.log_path.read_text(errors="replace").count(message)

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)
        self._close_connections()

    def stop(self) -> None:
        """A clean stop, after the connections made by `connect` were closed; it must end with status 0."""
        self._close_connections()
        status = self._end(signal.SIGTERM)
        assert status == 0, f"the broker ended with status {status}\n{self.last_lines()}"

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        assert process is not None, "the broker runs"
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS_MAX)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _close_connections(self) -> None:
        """pika closes a socket when it is closed itself, or when it finds that the other side is gone."""
        connections, self._connections = self._connections, []
        for connection in connections:
            if connection.is_open:
                with suppress(AMQPError):
                    connection.close()

    def last_lines(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-25:])

    def parameters(self, *, user: str = "guest", password: str = "guest", **settings: Any) -> pika.ConnectionParameters:
        settings = {"heartbeat": 0, "blocked_connection_timeout": 60, "socket_timeout": 30} | settings
        credentials = pika.PlainCredentials(user, password)
        return pika.ConnectionParameters("127.0.0.1", self.port, credentials=credentials, **settings)

    def connect(self, **settings: Any) -> pika.BlockingConnection:
        """With pika. Closed with the broker at the latest."""
        self._connections.append(pika.BlockingConnection(self.parameters(**settings)))
        return self._connections[-1]

    def open_socket(self) -> socket.socket:
        """For those who speak octets."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=30)

    def url(self, vhost: str = "%2F") -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/{vhost}"

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024


def eventually(holds: Callable[[], bool], seconds: float = 30) -> None:
    """Waits until `holds()` is true, for what a broker does in its own time; fails when it never is."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
