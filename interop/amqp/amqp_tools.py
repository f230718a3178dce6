"""Debian's amqp-tools: amqp-declare-queue, -publish, -get, -consume, -delete-queue, for shells. Driver: processes.

They stand on librabbitmq, the client in C that many others are made of.
"""

import subprocess
from contextlib import nullcontext

import pika

from interop.broker import Broker
from interop.client import Driven, Feature, debian_version

COMMAND_SECONDS_MAX = 30
# What amqp-get ends with when there is nothing to get.
EMPTY = 2


def run(broker: Broker, tool: str, *arguments: str, stdin: bytes = b"", status: int = 0) -> bytes:
    command = [f"amqp-{tool}", f"--url={broker.url}", *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, timeout=COMMAND_SECONDS_MAX)
    assert done.returncode == status, (command, done.returncode, done.stderr)
    return done.stdout


def get(broker: Broker) -> None:
    assert run(broker, "declare-queue", "--queue=tools.get") == b"tools.get\n"
    assert run(broker, "get", "--queue=tools.get", status=EMPTY) == b""
    run(broker, "publish", "--routing-key=tools.get", "--body=hello", "--content-type=text/plain", "--header=a: b")
    assert run(broker, "get", "--queue=tools.get") == b"hello"
    run(broker, "publish", "--routing-key=tools.get", "--line-buffered", stdin=b"1\n2\n3\n")
    assert run(broker, "delete-queue", "--queue=tools.get") == b"3\n"


def prefetch(broker: Broker) -> None:
    """A command for each message, which is acknowledged when the command ends well."""
    run(broker, "declare-queue", "--queue=tools.work", "--durable")
    run(broker, "publish", "--routing-key=tools.work", "--persistent", "--line-buffered", stdin=b"a\nb\nc\nd\n")
    done = run(broker, "consume", "--queue=tools.work", "--prefetch-count=2", "--count=3", "cat")
    assert done == b"a\nb\nc\n"
    assert run(broker, "get", "--queue=tools.work") == b"d\n"
    run(broker, "delete-queue", "--queue=tools.work", "--if-empty", "--if-unused")


def topic(broker: Broker) -> None:
    """A consumer with an exclusive queue of its own on an exchange."""
    command = [
        *("amqp-consume", f"--url={broker.url}", "--exchange=amq.topic", "--routing-key=tools.#"),
        *("--exclusive", "--queue=tools.topic", "--count=3", "cat"),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as consumer:
        assert consumer.stdout is not None and consumer.stderr is not None
        try:
            probe(broker)
            for key in ("tools.a", "other", "tools.b.c"):
                run(broker, "publish", "--exchange=amq.topic", f"--routing-key={key}", f"--body={key} ")
            told, problems = consumer.communicate(timeout=COMMAND_SECONDS_MAX)
        finally:
            consumer.kill()
    assert told == b"probe tools.a tools.b.c ", problems


def probe(broker: Broker) -> None:
    """Publishes until somebody has bound a queue for it: the consumer is a process, and is there when it is there."""
    with pika.BlockingConnection(pika.URLParameters(broker.url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for _ in range(100 * COMMAND_SECONDS_MAX):
            try:
                channel.basic_publish("amq.topic", "tools", b"probe ", mandatory=True)
            except pika.exceptions.UnroutableError:
                connection.sleep(0.01)
            else:
                return
    raise AssertionError("the consumer did not bind its queue")


def large_body(broker: Broker) -> None:
    body = bytes(range(256)) * 4 * 1024
    run(broker, "declare-queue", "--queue=tools.large")
    run(broker, "publish", "--routing-key=tools.large", stdin=body)
    assert run(broker, "get", "--queue=tools.large") == body


def error(broker: Broker) -> None:
    """Errors of the broker are told, and the status says so."""
    command = ["amqp-get", f"--url={broker.url}", "--queue=tools.nowhere"]
    done = subprocess.run(command, capture_output=True, timeout=COMMAND_SECONDS_MAX)
    assert done.returncode == 1
    assert b"404" in done.stderr and b"tools.nowhere" in done.stderr, done.stderr


def restart(broker: Broker) -> None:
    run(broker, "declare-queue", "--queue=tools.kept", "--durable")
    run(broker, "publish", "--routing-key=tools.kept", "--persistent", "--line-buffered", stdin=b"1\n2\n")
    broker.restart()
    assert run(broker, "consume", "--queue=tools.kept", "--count=2", "cat") == b"1\n2\n"
    run(broker, "delete-queue", "--queue=tools.kept")


CLIENT = Driven(
    "amqp-tools",
    debian_version("amqp-tools", "amqp-declare-queue", "amqp-publish", "amqp-get", "amqp-consume", "amqp-delete-queue"),
    {
        Feature.GET: get,
        Feature.PREFETCH: prefetch,
        Feature.TOPIC: topic,
        Feature.BODY: large_body,
        Feature.ERROR: error,
        Feature.RESTART: restart,
    },
    nullcontext,
)
