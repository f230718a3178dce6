"""The clients in other languages: how each program is made ready, and what it shows. Driver: processes, files.

Debian has them all but amqplib, which npm fetches once, by the lock file beside its program, into a folder of the
virtual environment. Nothing is written into the repository.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from interop.broker import Broker
from interop.client import (
    Driven,
    Feature,
    NotInstalled,
    Program,
    ProgramFailed,
    debian_version,
    find_program,
)

HERE = Path(__file__).parent
CACHE = Path(sys.prefix) / "interop"
NODE = CACHE / "node"
GO_SOURCES = Path("/usr/share/gocode")
GO_CLIENT = GO_SOURCES / "src/github.com/rabbitmq/amqp091-go"
GO_ENVIRON = {"GO111MODULE": "off", "GOPATH": str(GO_SOURCES), "GOCACHE": str(CACHE / "go-cache")}
GO_PACKAGE = "golang-github-rabbitmq-amqp091-go-dev"
SUITE_SECONDS_MAX = 300
GO_LEFT_OUT = {
    # It takes for granted that channel.flow is refused, as RabbitMQ does, and panics where it works.
    "TestIntegrationConsumeFlow",
    # It asks ten times in a row, without a pause, whether a dead letter has arrived through an exchange that is new;
    # here the first message of an exchange makes a file, and that is sometimes too late.
    "TestDeclareArgsRejectToDeadLetterQueue",
    # They look only at brokers whose product is "RabbitMQ", and leave their connections to all others open.
    "TestIntegrationRecoverNotImplemented",
    "TestRabbitMQQueueNackMultipleRequeue",
    "TestRabbitMQQueueTTLGet",
}
GO_TESTS_MIN = 50
JARS = [Path("/usr/share/java/amqp-client.jar"), Path("/usr/share/java/slf4j-api.jar")]
# What every program here shows, in this order.
ALL = (
    Feature.CONFIRMS,
    Feature.PREFETCH,
    Feature.REQUEUE,
    Feature.TOPIC,
    Feature.RETURN,
    Feature.DEAD_LETTER,
    Feature.RPC,
    Feature.HEADERS,
    Feature.BODY,
    Feature.ERROR,
    Feature.CANCEL,
    Feature.HEARTBEAT,
    Feature.RESTART,
)


def npm_version(package: str, source: Path, home: Path) -> str:
    """Of a package in `home`; it is installed when the lock file in `source` asks for another one than is there."""
    find_program("node", "nodejs")
    npm = find_program("npm", "npm")
    lock = source / "package-lock.json"
    installed = home / "package-lock.json"
    if not installed.exists() or installed.read_bytes() != lock.read_bytes():
        shutil.rmtree(home, ignore_errors=True)
        draft = home.with_suffix(".new")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, draft)
        command = [npm, "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
        done = subprocess.run(command, cwd=draft, capture_output=True, text=True)
        if done.returncode != 0:
            raise NotInstalled(f"npm could not fetch it: {done.stderr.strip()}")
        draft.rename(home)
    told = json.loads((home / "node_modules" / package / "package.json").read_text())
    return str(told["version"])


def amqplib_version() -> str:
    return npm_version("amqplib", HERE / "node", NODE)


def amqplib_command() -> Sequence[str]:
    amqplib_version()
    return [find_program("node", "nodejs"), str(HERE / "node" / "amqplib.js")]


def php_command() -> Sequence[str]:
    return [find_program("php", "php-cli"), str(HERE / "php" / "php_amqplib.php")]


def ruby_command() -> Sequence[str]:
    return [find_program("ruby", "ruby"), str(HERE / "ruby" / "bunny.rb")]


def go_command() -> Sequence[str]:
    program = CACHE / "amqp091"
    CACHE.mkdir(parents=True, exist_ok=True)
    build = [find_program("go", "golang-go"), "build", "-o", str(program), str(HERE / "go" / "amqp091.go")]
    done = subprocess.run(build, env={**os.environ, **GO_ENVIRON}, capture_output=True, text=True)
    if done.returncode != 0:
        raise ProgramFailed(f"it does not build:\n{done.stderr}")
    return [str(program)]


def java_version() -> str:
    # The source is run as it is, and that needs the compiler.
    find_program("javac", "default-jdk-headless")
    return debian_version("librabbitmq-client-java")()


def java_command() -> Sequence[str]:
    path = os.pathsep.join(map(str, JARS))
    return [find_program("java", "default-jdk-headless"), "-cp", path, str(HERE / "java" / "AmqpClient.java")]


def go_suite(broker: Broker) -> None:
    """The client's own tests against a broker, as its authors run them, but for those that cannot pass here."""
    go = [find_program("go", "golang-go"), "test", "-tags=integration"]
    environ = {**os.environ, **GO_ENVIRON, "AMQP_URL": broker.url}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*go, *arguments], cwd=GO_CLIENT, env=environ, capture_output=True, text=True, timeout=SUITE_SECONDS_MAX
        )

    listed = run("-list", "^Test").stdout.split()
    chosen = sorted({name for name in listed if name.startswith("Test")} - GO_LEFT_OUT)
    done = run("-count=1", "-v", "-run", f"^({'|'.join(chosen)})$")
    passed = set(re.findall(r"^--- PASS: (\w+)", done.stdout, re.MULTILINE))
    if done.returncode != 0 or len(chosen) < GO_TESTS_MIN or passed != set(chosen):
        raise ProgramFailed(f"its own suite: {len(passed)} of {len(chosen)} passed\n{done.stdout}\n{done.stderr}")


PROGRAMS = (
    Program("amqplib (Node)", amqplib_version, ALL, amqplib_command, {"NODE_PATH": str(NODE / "node_modules")}),
    Program("php-amqplib", debian_version("php-amqplib", "php"), ALL, php_command),
    Program("bunny (Ruby)", debian_version("ruby-bunny", "ruby"), ALL, ruby_command),
    Program("amqp091-go", debian_version(GO_PACKAGE, "go"), ALL, go_command),
    Program("RabbitMQ's Java client", java_version, ALL, java_command),
    Driven("amqp091-go's own tests", debian_version(GO_PACKAGE, "go"), {Feature.SUITE: go_suite}, nullcontext),
)
