"""How the log behind an exchange or a queue is kept, by argument and policy, as its files show it afterwards."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.running_broker import RunningBroker, eventually

from .conftest import Connect
from .pika_client import PERSISTENT, bodies, counts, refused

CONFIG = """
[storage]
segment_bytes = "1MiB"
"""
SETTINGS: list[dict[str, Any]] = [
    {"x-durability": "interval"},
    {"x-durability": "os"},
    {"x-compression": "none"},
    {"x-retention-ms": 1000},
    {"x-retention-bytes": 1 << 20},
]


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path, config=CONFIG) as running:
        yield running


def policy(definition: dict[str, Any], pattern: str = ".*") -> str:
    values = ", ".join(f"{name} = {json.dumps(value)}" for name, value in definition.items())
    return f"{CONFIG}\n[[policies]]\nname = 'p'\npattern = '{pattern}'\ndefinition = {{ {values} }}\n"


def log_command(broker: RunningBroker, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "headrace", "log", *words, "--json", str(broker.data)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def codecs(broker: RunningBroker, stream: str) -> set[str]:
    return {batch["codec"] for batch in log_command(broker, "dump", "--batches", "--stream", stream)}


def exchange(channel: BlockingChannel, name: str, **arguments: Any) -> None:
    channel.exchange_declare(name, "fanout", durable=True, arguments=arguments)


def log_start(broker: RunningBroker, name: str) -> int:
    """The oldest offset that a stream still has."""
    (path,) = [
        path.parent
        for path in broker.data.glob("streams/*/stream.json")
        if json.loads(path.read_text())["name"] == name
    ]
    return min(int(segment.stem) for segment in (path / "0").glob("*.log"))


def test_compression_shows_in_the_log_of_an_exchange_and_of_a_queue(own_broker: RunningBroker) -> None:
    channel = own_broker.connect().channel()
    for word in ("none", "lz4"):
        exchange(channel, f"x-{word}", **{"x-compression": word})
        channel.queue_declare(f"q-{word}", durable=True, arguments={"x-compression": word})
        for _ in range(20):
            channel.basic_publish(f"x-{word}", "", b"a" * 1000, PERSISTENT)
            channel.basic_publish("", f"q-{word}", b"a" * 1000, PERSISTENT)
        assert bodies(channel, f"q-{word}") == [b"a" * 1000] * 20
    own_broker.stop()
    assert codecs(own_broker, "exchange:x-none") == codecs(own_broker, "queue:q-none") == {"none"}
    assert codecs(own_broker, "exchange:x-lz4") == codecs(own_broker, "queue:q-lz4") == {"lz4"}


def test_what_was_confirmed_outlives_kill_9_whatever_the_durability(own_broker: RunningBroker) -> None:
    channel = own_broker.connect().channel()
    channel.confirm_delivery()
    kinds = ("sync", "interval", "os")
    for word in kinds:
        exchange(channel, f"x-{word}", **{"x-durability": word})
        channel.queue_declare(word, durable=True, arguments={"x-durability": word})
        channel.queue_bind(word, f"x-{word}")
        for number in range(3):
            channel.basic_publish(f"x-{word}", "", b"x%d" % number, PERSISTENT)
            channel.basic_publish("", word, b"q%d" % number, PERSISTENT)
    own_broker.kill()
    own_broker.start()
    channel = own_broker.connect().channel()
    for word in kinds:
        found = bodies(channel, word)
        assert [one for one in found if one.startswith(b"x")] == [b"x0", b"x1", b"x2"]
        assert [one for one in found if one.startswith(b"q")] == [b"q0", b"q1", b"q2"]


def test_retention_of_an_exchange_frees_its_log_down_to_what_a_queue_needs(own_broker: RunningBroker) -> None:
    channel = own_broker.connect().channel()
    channel.exchange_declare(
        "x", "direct", durable=True, arguments={"x-retention-bytes": 1 << 20, "x-compression": "none"}
    )
    channel.queue_declare("q", durable=True)
    channel.queue_bind("q", "x", "wanted")
    channel.confirm_delivery()
    for number in range(64):
        channel.basic_publish("x", "passing", bytes(64 * 1024), PERSISTENT)
        if number == 40:
            channel.basic_publish("x", "wanted", b"wanted", PERSISTENT)
    eventually(lambda: 0 < log_start(own_broker, "x") <= 41)
    assert bodies(channel, "q") == [b"wanted"]
    eventually(lambda: log_start(own_broker, "x") > 41)


def test_policy_reaches_a_log_that_exists_and_holds_after_a_restart(
    own_broker: RunningBroker,
) -> None:
    channel = own_broker.connect().channel()
    exchange(channel, "x", **{"x-compression": "none"})
    exchange(channel, "y", **{"x-compression": "none"})
    channel.confirm_delivery()
    for name in ("x", "y"):
        for _ in range(40):
            channel.basic_publish(name, "", bytes(64 * 1024), PERSISTENT)
    assert log_start(own_broker, "x") == log_start(own_broker, "y") == 0
    own_broker.reload(policy({"retention-bytes": 1 << 20}, "^x$"))
    eventually(lambda: log_start(own_broker, "x") > 0)
    assert log_start(own_broker, "y") == 0
    own_broker.stop()
    own_broker.start()
    channel = own_broker.connect().channel()
    channel.confirm_delivery()
    before = log_start(own_broker, "x")
    for _ in range(40):
        channel.basic_publish("x", "", bytes(64 * 1024), PERSISTENT)
    eventually(lambda: log_start(own_broker, "x") > before)
    assert log_start(own_broker, "y") == 0


def test_max_age_by_policy_lets_go_of_what_a_stream_has(own_broker: RunningBroker) -> None:
    channel = own_broker.connect().channel()
    channel.queue_declare("s", durable=True, arguments={"x-queue-type": "stream"})
    channel.confirm_delivery()
    for _ in range(3):
        channel.basic_publish("", "s", bytes(1 << 20), PERSISTENT)
    assert counts(channel, "s")[0] == 3
    own_broker.reload(policy({"max-age": "1s"}))
    # The newest piece of a stream stays.
    eventually(lambda: counts(channel, "s")[0] == 1)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_declared_otherwise_is_406_and_so_is_a_queue_without_a_log(
    connect: Connect, name: str, setting: dict[str, Any]
) -> None:
    connection = connect()
    (argument,) = setting
    for declare in (
        lambda channel, **more: channel.exchange_declare(name, "fanout", durable=True, **more),
        lambda channel, **more: channel.queue_declare(name, durable=True, **more),
    ):
        declare(connection.channel(), arguments=setting)
        declare(connection.channel(), arguments=setting)
        with refused(406, f"inequivalent arg '{argument}'"):
            declare(connection.channel())
    for more in ({"durable": False}, {"durable": True, "exclusive": True}):
        with refused(406, f"invalid arg '{argument}' for queue 'other-{name}' in vhost '/'"):
            connection.channel().queue_declare(f"other-{name}", arguments=setting, **more)


@pytest.mark.parametrize(
    "wrong",
    [{"x-durability": "fast"}, {"x-compression": "zip"}, {"x-retention-ms": -1}, {"x-retention-bytes": "much"}],
    ids=str,
)
def test_setting_that_makes_no_sense_is_406(connect: Connect, name: str, wrong: dict[str, Any]) -> None:
    connection = connect()
    with refused(406):
        connection.channel().exchange_declare(name, "fanout", durable=True, arguments=wrong)
    with refused(406):
        connection.channel().queue_declare(name, durable=True, arguments=wrong)
