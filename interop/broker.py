"""A broker for the programs of this folder: `headrace serve` as a process on free loopback ports. Driver: processes.

    with Broker(folder) as broker:      # or running(), in a folder that goes with it
        connect_to(broker.url)          # or mqtt_url, ws_url
        broker.restart()                # kill -9, then the same data on the same ports

The end of the block is a clean stop. A broker that ended by itself, that ends with another status than 0, or that wrote
a traceback to its log fails the program, whatever the client saw.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from interop.ports import free_ports

START_SECONDS_MAX = 60
STOP_SECONDS_MAX = 60
DOORS = ("amqp", "mqtt", "ws")


class BrokerFailed(Exception):
    """The broker did something that no broker should; with the last lines of its log."""


class Broker:
    def __init__(self, folder: Path, *, arguments: Sequence[str] = ()) -> None:
        self.data = folder / "data"
        self.log_path = folder / "broker.log"
        self.ports = dict(zip(DOORS, free_ports(len(DOORS)), strict=True))
        self._arguments = list(arguments)
        self._environ: dict[str, str] = {}
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.ports['amqp']}/%2F"

    @property
    def mqtt_url(self) -> str:
        return f"mqtt://127.0.0.1:{self.ports['mqtt']}"

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.ports['ws']}/mqtt"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is not None:
            self.kill()
            return
        self.stop()
        self.check_log()

    def check_log(self) -> None:
        """BrokerFailed if it wrote something there that no broker should."""
        if "Traceback" in self.log_path.read_text(errors="replace"):
            raise self._failed("the broker wrote a traceback to its log")

    def start(self) -> None:
        """Returns once it accepts connections. Every start takes the same ports."""
        process = self.launch()
        # A broker that never gets ready is ended, and then its stdout is.
        watch = threading.Timer(START_SECONDS_MAX, process.kill)
        watch.start()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
        finally:
            watch.cancel()
        found = {door: int(port) for door, port in re.findall(r"\b(\w+)=\S+:(\d+)", line)}
        if found != self.ports:
            self.kill()
            raise self._failed(f"the broker did not get ready: {line!r}")

    def launch(self) -> subprocess.Popen[str]:
        """Begins to start, and does not wait for it."""
        assert self.process is None, "the broker runs already"
        doors = [flag for door, port in self.ports.items() for flag in (f"--{door}", f"127.0.0.1:{port}")]
        command = [sys.executable, "-m", "headrace", "serve", "--data", str(self.data)]
        command += [*doors, "--http", "off", *self._arguments]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ |= self._environ
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environ)
        return self.process

    def kill(self) -> None:
        """kill -9; nothing to do when it is down."""
        if self.process is not None:
            self._end(signal.SIGKILL)

    def restart(self) -> None:
        """kill -9 and start again, as after a crash."""
        self._must_run()
        self.kill()
        self.start()

    def stop(self) -> None:
        """A clean stop."""
        self._must_run()
        status = self._end(signal.SIGTERM)
        if status != 0:
            raise self._failed(f"the broker ended with status {status}")

    def _must_run(self) -> None:
        if self.process is None or self.process.poll() is not None:
            self.kill()
            raise self._failed("the broker ended by itself")

    def _end(self, number: signal.Signals) -> int:
        process, self.process = self.process, None
        assert process is not None
        process.send_signal(number)
        try:
            return process.wait(STOP_SECONDS_MAX)
        finally:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _failed(self, what: str) -> BrokerFailed:
        last = self.log_path.read_text(errors="replace").splitlines()[-25:]
        return BrokerFailed("\n".join([what, *last]))


@contextmanager
def running(*, arguments: Sequence[str] = ()) -> Iterator[Broker]:
    """A broker in a temporary folder."""
    with (
        tempfile.TemporaryDirectory(prefix="headrace-interop-") as folder,
        Broker(Path(folder), arguments=arguments) as broker,
    ):
        yield broker
