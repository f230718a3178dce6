"""`headrace queues` on a real broker; the queue is declared over AMQP."""

from collections.abc import Iterator

import pytest
from tests.running_broker import RunningBroker

from headrace.exits import Answered

from .conftest import Headrace


@pytest.fixture
def queue(broker: RunningBroker, headrace: Headrace, name: str) -> Iterator[str]:
    """With three messages in it."""
    connection = broker.connect()
    connection.channel().queue_declare(name, durable=True, arguments={"x-max-priority": 3})
    headrace.ok("publish", f"queue:{name}", "a", "b", "c")
    yield name
    connection.close()


def ready(headrace: Headrace, queue: str) -> int:
    return int(headrace.json("queues", "describe", queue)["ready"])


def test_queues_are_listed_and_described(headrace: Headrace, queue: str) -> None:
    (found,) = [one for one in headrace.json("queues", "list")["queues"] if one["name"] == queue]
    assert (found["ready"], found["consumers"], found["type"]) == (3, 0, "classic")
    assert queue in headrace.ok("queues", "list", "--vhost", "/")
    shown = headrace.ok("queues", "describe", queue)
    for text in (queue, "ready", "x-max-priority=3"):
        assert text in shown
    with pytest.raises(Answered, match="no queue 'nobody'"):
        headrace("queues", "describe", "nobody")


def test_peek_takes_nothing(headrace: Headrace, queue: str) -> None:
    assert [one["value"] for one in headrace.lines("queues", "peek", queue, "--count", 2)] == ["a", "b"]
    assert [one["value"] for one in headrace.lines("queues", "peek", queue, "--offset", -1)] == ["c"]
    assert "value: a" in headrace.ok("queues", "peek", queue)
    assert ready(headrace, queue) == 3


def test_queue_is_purged_and_rewound(headrace: Headrace, queue: str) -> None:
    assert headrace.ok("queues", "purge", queue, "--yes") == "3 messages purged\n"
    assert ready(headrace, queue) == 0
    assert (
        headrace.ok("queues", "rewind", queue, "--offset", 1, "--yes")
        == f"queue {queue} rewound to 1: 2 messages ready\n"
    )
    assert headrace.json("queues", "rewind", queue, "--time", "0", "--yes") == {"offset": 0, "ready": 3}


def test_queue_is_deleted_unless_it_holds_something(headrace: Headrace, queue: str) -> None:
    with pytest.raises(Answered, match="3 messages"):
        headrace("queues", "delete", queue, "--if-empty", "--yes")
    assert headrace.ok("queues", "delete", queue, "--yes") == f"queue {queue} deleted\n"
    with pytest.raises(Answered):
        headrace("queues", "describe", queue)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("purge",), "say --yes"),
        (("delete",), "say --yes"),
        (("rewind", "--offset", "0"), "say --yes"),
        (("rewind",), "say where to"),
        (("rewind", "--offset", "0", "--time", "0"), "say where to"),
    ],
)
def test_nothing_is_lost_by_mistake(headrace: Headrace, queue: str, arguments: tuple[str, ...], told: str) -> None:
    command, *options = arguments
    result = headrace("queues", command, queue, *options)
    assert result.exit_code == 2
    assert told in result.stderr
    assert ready(headrace, queue) == 3
