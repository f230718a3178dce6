"""`headrace dlq`, `redrive` and `redrives` on a real broker."""

import pika
import pytest
from tests.running_broker import RunningBroker

from .conftest import Headrace


@pytest.fixture
def dead(broker: RunningBroker, headrace: Headrace, name: str) -> str:
    """A queue with three dead letters; they died in `name`."""
    found = f"{name}.dead"
    connection = broker.connect()
    channel = connection.channel()
    channel.queue_declare(found, durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": found}
    channel.queue_declare(name, durable=True, arguments=arguments)
    for body in (b"1", b"2", b"3"):
        channel.basic_publish("", name, body, pika.BasicProperties(delivery_mode=2))
        method, _, _ = channel.basic_get(name)
        channel.basic_reject(method.delivery_tag, requeue=False)
    while headrace.json("queues", "describe", found)["ready"] < 3:
        pass
    connection.close()
    return found


def test_dead_letters_are_listed(headrace: Headrace, dead: str, name: str) -> None:
    found = headrace.json("dlq", "list", dead)["dead_letters"]
    assert [one["message"]["value"] for one in found] == ["1", "2", "3"]
    table = headrace.ok("dlq", "list", dead, "--reason", "rejected", "--newer-than", "1h", "--limit", 2)
    assert name in table and "rejected" in table
    assert headrace.json("dlq", "list", dead, "--older-than", "1h")["dead_letters"] == []


def test_dry_run_tells_and_changes_nothing(headrace: Headrace, dead: str, name: str) -> None:
    assert f"3 of 3 messages in {dead}: 3 to {name}" in headrace.ok("redrive", dead, "--dry-run")
    assert headrace.json("queues", "describe", dead)["ready"] == 3


def test_they_are_sent_back(headrace: Headrace, dead: str, name: str) -> None:
    (first, *_rest) = headrace.json("dlq", "list", dead)["dead_letters"]
    assert "1 sent back" in headrace.ok("redrive", dead, "--id", first["id"], "--yes")
    assert headrace.json("redrive", dead, "--limit", 1, "--yes")["moved"] == 1
    assert headrace.json("redrive", dead, "--yes")["moved"] == 1
    assert headrace.json("queues", "describe", name)["ready"] == 3
    assert dead in headrace.ok("redrives", "list")


def test_without_a_terminal_it_has_to_be_meant(headrace: Headrace, dead: str) -> None:
    assert headrace("redrive", dead).exit_code == 2
    assert headrace.json("queues", "describe", dead)["ready"] == 3


def test_one_that_runs_can_be_stopped(headrace: Headrace, dead: str) -> None:
    started = headrace.json("redrive", dead, "--rate", 0.01, "--no-wait", "--yes")
    assert "stops" in headrace.ok("redrives", "cancel", started["id"])
