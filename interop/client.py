"""What a client shows against a broker, and how a program shows it. Driver: processes.

A client is either driven by functions of ours (`Driven`: Python packages, and commands) or by a program in its own
language (`Program`). Both say one by one what they have shown; what a run is silent about, it has not shown.

A program is given the broker's URLs in AMQP_URL, MQTT_URL and WS_URL, and speaks lines on stdout: `shown <feature>`
after each feature, and `restart` to have the broker killed and started again, which is answered with `restarted` on its
stdin. It ends with status 0 when all went well; what it writes to stderr is shown when it did not.
"""

import importlib.metadata
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from tempfile import TemporaryFile
from typing import IO, Generic, Protocol, TypeVar

from interop.broker import Broker

PROGRAM_SECONDS_MAX = 300


class Feature(StrEnum):
    """What applications do with a broker, in the words of the tables."""

    CONFIRMS = "confirms"
    PREFETCH = "prefetch"
    REQUEUE = "requeue"
    TOPIC = "topic"
    RETURN = "return"
    DEAD_LETTER = "dead-letter"
    RPC = "rpc"
    HEADERS = "headers"
    BODY = "large-body"
    ERROR = "error"
    CANCEL = "cancel"
    GET = "get"
    HEARTBEAT = "heartbeat"
    RESTART = "restart"
    FANOUT = "fanout"
    DELAY = "delay"
    TASK = "task"
    RETRY = "retry"
    ETA = "eta"
    GROUP = "group"
    CHORD = "chord"
    REVOKE = "revoke"
    INSPECT = "inspect"
    EVENTS = "events"
    SUITE = "own-suite"
    # MQTT
    QOS_0 = "qos-0"
    QOS_1 = "qos-1"
    QOS_2 = "qos-2"
    WILDCARDS = "wildcards"
    RETAINED = "retained"
    WILL = "will"
    SESSION = "session"
    TAKE_OVER = "take-over"
    SHARED = "shared"
    PROPERTIES = "properties"
    TOPIC_ALIAS = "topic-alias"
    KEEP_ALIVE = "keep-alive"
    # AMQP meets MQTT
    TO_MQTT = "to-mqtt"
    TO_AMQP = "to-amqp"
    REQUEST = "request"
    RESPONSE = "response"
    QOS = "qos"
    TOPICS = "topics"
    WORKER_DOWN = "worker-down"


class NotInstalled(Exception):
    """The client is not on this machine; the text says how to get it."""


class ProgramFailed(Exception):
    """A program in another language ended badly; with what it wrote."""


Shown = Callable[[Feature], None]
Stage = TypeVar("Stage")


class Client(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def shows(self) -> tuple[Feature, ...]: ...

    @property
    def version(self) -> Callable[[], str]:
        """Of the client on this machine. Raises NotInstalled."""

    def run(self, broker: Broker, shown: Shown) -> None:
        """Shows every feature of `shows`, in that order, or raises."""


@dataclass(frozen=True, slots=True)
class Driven(Generic[Stage]):
    """A client that functions of ours drive, one for each feature: a Python package, or commands."""

    name: str
    version: Callable[[], str]
    features: Mapping[Feature, Callable[[Stage], None]]
    # What the functions are given; it is made once for all of them.
    stage: Callable[[Broker], AbstractContextManager[Stage]]

    @property
    def shows(self) -> tuple[Feature, ...]:
        return tuple(self.features)

    def run(self, broker: Broker, shown: Shown) -> None:
        with self.stage(broker) as stage:
            for feature, show in self.features.items():
                show(stage)
                shown(feature)


@dataclass(frozen=True, slots=True)
class Program:
    """A client in another language, with a program of ours in that language."""

    name: str
    version: Callable[[], str]
    shows: tuple[Feature, ...]
    # Makes the program ready to run, which may take a while the first time, and says how to run it.
    command: Callable[[], Sequence[str]]
    environ: Mapping[str, str] = field(default_factory=dict)

    def run(self, broker: Broker, shown: Shown) -> None:
        environ = {**os.environ, **self.environ, **_urls(broker)}
        with TemporaryFile("w+") as notes, _started(self.command(), environ, notes) as process:
            said = self._listen(process, broker, notes, shown)
            status = process.wait()
            notes.seek(0)
            if status != 0:
                raise ProgramFailed(f"{self.name} ended with status {status} after {said}\n{notes.read()}")
            if tuple(said) != self.shows:
                raise ProgramFailed(f"{self.name} was to show {list(self.shows)} and showed {said}\n{notes.read()}")

    def _listen(self, process: subprocess.Popen[str], broker: Broker, notes: IO[str], shown: Shown) -> list[Feature]:
        assert process.stdin is not None and process.stdout is not None
        said: list[Feature] = []
        for line in process.stdout:
            match line.split():
                case ["shown", word]:
                    said.append(Feature(word))
                    shown(said[-1])
                case ["restart"]:
                    broker.restart()
                    _tell(process.stdin, "restarted")
                case _:
                    # Somebody's library talks; it is wanted only when the program fails.
                    notes.write(line)
                    notes.flush()
        return said


def _urls(broker: Broker) -> dict[str, str]:
    return {"AMQP_URL": broker.url, "MQTT_URL": broker.mqtt_url, "WS_URL": broker.ws_url}


def _tell(stdin: IO[str], line: str) -> None:
    """One that has ended meanwhile is told nothing; its status will say why."""
    try:
        stdin.write(f"{line}\n")
        stdin.flush()
    except BrokenPipeError:
        with suppress(BrokenPipeError):
            stdin.close()


@contextmanager
def _started(command: Sequence[str], environ: Mapping[str, str], stderr: IO[str]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environ
    )
    # A program that hangs is ended, and then its stdout is.
    watch = threading.Timer(PROGRAM_SECONDS_MAX, process.kill)
    watch.start()
    try:
        with process:
            try:
                yield process
            finally:
                process.kill()
    finally:
        watch.cancel()


def python_version(distribution: str) -> Callable[[], str]:
    """The version of a Python package."""

    def find() -> str:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            raise NotInstalled(f"pip install {distribution}") from None

    return find


def find_program(name: str, package: str) -> str:
    """Where a program lies. Raises NotInstalled with the Debian package that holds it."""
    found = shutil.which(name)
    if found is None:
        raise NotInstalled(f"apt-get install {package}")
    return found


def debian_version(package: str, *programs: str) -> Callable[[], str]:
    """The upstream version of a Debian package, given that these programs are there too."""

    def find() -> str:
        for program in programs:
            find_program(program, package)
        query = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev} ${source:Upstream-Version}", package]
        try:
            told = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError):
            told = []
        if told[:1] != ["ii"]:
            raise NotInstalled(f"apt-get install {package}")
        return told[1]

    return find
