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
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pika

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
        self.port = 0
        self.process: subprocess.Popen[str] | None = None
        self._arguments = list(arguments)
        self._environ = dict(environ or {})
        if config:
            path = folder / "headrace.toml"
            path.write_text(config)
            self._arguments += ["--config", str(path)]

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
        """Returns once it accepts connections. A second start takes the port of the first."""
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
        ready = re.search(r"\bamqp=127\.0\.0\.1:(\d+)", line)
        if ready is None:
            self.kill()
            raise AssertionError(f"the broker did not get ready: {line!r}\n{self.last_lines()}")
        self.port = int(ready[1])

    def kill(self) -> None:
        """kill -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """A clean stop; it must end with status 0."""
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

    def last_lines(self) -> str:
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-25:])

    def parameters(self, *, user: str = "guest", password: str = "guest", **settings: Any) -> pika.ConnectionParameters:
        settings = {"heartbeat": 0, "blocked_connection_timeout": 60, "socket_timeout": 30} | settings
        credentials = pika.PlainCredentials(user, password)
        return pika.ConnectionParameters("127.0.0.1", self.port, credentials=credentials, **settings)

    def connect(self, **settings: Any) -> pika.BlockingConnection:
        return pika.BlockingConnection(self.parameters(**settings))

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


def eventually(holds: "Any", seconds: float = 30) -> None:
    """Waits until `holds()` is true, for what a broker does in its own time; fails when it never is."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)
