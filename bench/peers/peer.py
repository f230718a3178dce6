"""What every peer looks like from outside, and how its process is started, awaited and stopped. Driver: processes.

A peer is started by its own module and is up when it answers a handshake of its protocol, not merely when its port
accepts. Whatever happens inside the `with`, its process is stopped by its own pid before the block is left, and its
directory is removed. Neighbours: one module per broker in this folder; scenarios.py above.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bench.claim import NotRun

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 30.0


class NotInstalled(NotRun):
    """A peer's program is missing; the text names the package that holds it."""


class StartFailed(Exception):
    """A broker ended or stayed mute instead of getting ready; the text holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Running:
    """A broker that is up. `pid` and its children are what its CPU time and memory are read from."""

    name: str
    proto: str  # amqp | mqtt
    port: int
    pid: int
    version: str
    log: Path
    args: tuple[str, ...] = ()  # flags that loadgen needs for this peer


class Peer(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def proto(self) -> str: ...

    def start(self) -> AbstractContextManager[Running]: ...


def program(name: str, package: str) -> str:
    """Where a program of a Debian package lies; daemons are in sbin, which is not on everybody's PATH."""
    found = shutil.which(
        name, path=os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/usr/local/sbin"])
    )
    if found is None:
        raise NotInstalled(f"{name} is not installed: apt-get install {package}")
    return found


def debian_version(package: str) -> str:
    try:
        query = ["dpkg-query", "--show", "--showformat=${Version}", package]
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


@contextmanager
def private_directory(name: str) -> Iterator[Path]:
    """Under TMPDIR, so that all brokers of a run write to the same disk."""
    with tempfile.TemporaryDirectory(prefix=f"bench-{name}-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)


@contextmanager
def process(
    command: Sequence[str],
    log: Path,
    ready: Callable[[], bool],
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program until the block is left, its output in `log`; enters the block once `ready` holds."""
    with log.open("ab") as output:
        # A session of its own: a ^C at the terminal reaches us alone, and we stop it in order.
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
    try:
        until = time.monotonic() + START_SECONDS_MAX
        while not ready():
            if child.poll() is not None:
                raise StartFailed(f"{command[0]} ended with status {child.returncode}{last_lines(log)}")
            if time.monotonic() > until:
                raise StartFailed(f"{command[0]} was not ready after {START_SECONDS_MAX:.0f} s{last_lines(log)}")
            time.sleep(0.05)
        yield child
    finally:
        stop(child)


def stop(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_SECONDS_MAX)
    except subprocess.TimeoutExpired:
        # The group is the session that `process` made: nothing in it is not ours.
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def last_lines(log: Path) -> str:
    text = log.read_text(errors="replace").strip().splitlines()[-12:]
    return "; its last lines:\n  " + "\n  ".join(text) if text else "; it printed nothing"


# MQTT 3.1.1 CONNECT: clean session, no keep-alive, client id "probe".
MQTT_CONNECT = b"\x10\x11\x00\x04MQTT\x04\x02\x00\x00\x00\x05probe"
# What a client says first, and how an answer of a broker that is up begins.
HANDSHAKES = {
    "amqp": (b"AMQP\x00\x00\x09\x01", b"\x01\x00\x00"),
    "mqtt": (MQTT_CONNECT, b"\x20\x02\x00\x00"),
}


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
    except OSError:
        return False
    return True


def answers(proto: str, port: int) -> bool:
    """Whether a broker on this port answers the first words of its protocol."""
    hello, answer = HANDSHAKES[proto]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
            connection.sendall(hello)
            return connection.recv(len(answer), socket.MSG_WAITALL) == answer
    except OSError:
        return False
