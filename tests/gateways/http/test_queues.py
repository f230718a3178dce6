"""Queues, exchanges and bindings over HTTP, beside AMQP clients that use them."""

from collections.abc import Iterator
from typing import Any

import httpx
import pika
import pytest

from .conftest import HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "other"
password = "otherwise"

[[permissions]]
user = "other"
vhost = "/"
configure = ""
write = ""
read = "^public"

[[vhosts]]
name = "two"

[[permissions]]
user = "guest"
vhost = "two"
configure = ".*"
write = ".*"
read = ".*"

[[policies]]
name = "short"
vhost = "/"
pattern = "^limited"
definition = { max-length = 3 }
"""
QUEUES = "/api/v1/queues"


@pytest.fixture
def channel(broker: HttpBroker) -> Iterator[Any]:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    if connection.is_open:
        connection.close()


@pytest.fixture
def other(broker: HttpBroker) -> Iterator[httpx.Client]:
    with broker.client(("other", "otherwise")) as client:
        yield client


def fill(channel: Any, queue: str, *bodies: str, **arguments: Any) -> None:
    channel.queue_declare(queue, durable=True, arguments=arguments or None)
    for body in bodies:
        channel.basic_publish("", queue, body.encode(), pika.BasicProperties(delivery_mode=2))


def take_all(channel: Any, queue: str) -> list[str]:
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got[2].decode())
    return found


def values(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [one["value"] for one in answer.json()["messages"]]


def test_queue_is_described_with_counts_consumers_policy_and_bindings(
    http: httpx.Client, channel: Any, name: str
) -> None:
    queue = f"limited-{name}"
    fill(channel, queue, "a", "b", "c")
    channel.queue_bind(queue, "amq.topic", "a.#", {"x": 1})
    channel.basic_get(queue)
    found = http.get(f"{QUEUES}/{queue}").json()
    assert {key: found[key] for key in ("name", "vhost", "type", "state", "ready", "unacked", "consumers")} == {
        "name": queue,
        "vhost": "/",
        "type": "classic",
        "state": "idle",
        "ready": 2,
        "unacked": 1,
        "consumers": 0,
    }
    assert (found["policy"], found["policy_definition"]) == ("short", {"max-length": 3})
    assert (found["first_offset"], found["next_offset"], found["delivered"]) == (0, 3, 1)
    assert found["bindings"] == [
        {
            "source": "amq.topic",
            "destination": queue,
            "destination_kind": "queue",
            "routing_key": "a.#",
            "arguments": {"x": 1},
        }
    ]
    channel.basic_consume(queue, lambda *_: None)
    assert http.get(f"{QUEUES}/{queue}").json()["state"] == "running"


def test_list_has_every_queue_once_page_by_page(http: httpx.Client, channel: Any, name: str) -> None:
    for number in range(5):
        channel.queue_declare(f"{name}-{number}")
    found: list[str] = []
    after = name
    while True:
        page = http.get(QUEUES, params={"after": after, "limit": 2}).json()
        found += [one["name"] for one in page["queues"] if one["name"].startswith(name)]
        if not page["more"]:
            break
        after = page["queues"][-1]["name"]
    assert found == [f"{name}-{number}" for number in range(5)]


def test_peek_shows_what_is_ready_and_takes_nothing(http: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, name, *"abcdef")
    channel.basic_get(name, auto_ack=True)
    for _ in range(2):
        assert values(http.get(f"{QUEUES}/{name}/messages", params={"limit": 3})) == ["b", "c", "d"]
    assert take_all(channel, name) == list("bcdef")
    assert values(http.get(f"{QUEUES}/{name}/messages")) == []


def test_peek_at_any_number_shows_what_was_received_done_with_or_not(
    http: httpx.Client, channel: Any, name: str
) -> None:
    fill(channel, name, *"abcdef")
    take_all(channel, name)
    answer = http.get(f"{QUEUES}/{name}/messages", params={"offset": 2, "limit": 2})
    assert values(answer) == ["c", "d"]
    assert (answer.json()["offset"], answer.json()["next_offset"]) == (2, 4)
    assert values(http.get(f"{QUEUES}/{name}/messages", params={"offset": -1})) == ["f"]
    assert values(http.get(f"{QUEUES}/{name}/messages", params={"offset": 100})) == []


def test_peek_at_the_highest_priority_comes_first(http: httpx.Client, channel: Any, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-priority": 5})
    for priority in (1, 5, 3):
        channel.basic_publish("", name, str(priority).encode(), pika.BasicProperties(priority=priority))
    assert values(http.get(f"{QUEUES}/{name}/messages")) == ["5", "3", "1"]
    assert values(http.get(f"{QUEUES}/{name}/messages", params={"offset": 0})) == ["1", "5", "3"]


def test_peek_at_a_stream_reads_it(http: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, name, *"abc", **{"x-queue-type": "stream"})
    assert values(http.get(f"{QUEUES}/{name}/messages")) == ["a", "b", "c"]
    assert http.get(f"{QUEUES}/{name}").json()["type"] == "stream"
    assert code(http.delete(f"{QUEUES}/{name}/messages")) == "refused"
    assert code(http.post(f"{QUEUES}/{name}/rewind", json={"offset": 0})) == "refused"


def test_rewound_queue_gives_its_messages_to_consumers_again(http: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, name, *"abcdef")
    assert take_all(channel, name) == list("abcdef")
    answer = http.post(f"{QUEUES}/{name}/rewind", json={"offset": 2})
    assert answer.json() == {"offset": 2, "ready": 4}
    method, _properties, body = channel.basic_get(name, auto_ack=True)
    assert (body, method.redelivered) == (b"c", True)
    assert take_all(channel, name) == list("def")
    assert http.post(f"{QUEUES}/{name}/rewind", json={"timestamp": "0"}).json()["ready"] == 6
    assert http.post(f"{QUEUES}/{name}/rewind", json={"offset": -1}).json() == {"offset": 5, "ready": 1}
    assert http.post(f"{QUEUES}/{name}/rewind", json={"timestamp": "2100-01-01T00:00:00Z"}).json()["ready"] == 0


@pytest.mark.parametrize("body", [{}, {"offset": 1, "timestamp": "0"}, {"timestamp": "soon"}, {"offset": "first"}])
def test_rewind_to_nowhere_is_refused(http: httpx.Client, channel: Any, name: str, body: dict[str, Any]) -> None:
    fill(channel, name, "a")
    assert code(http.post(f"{QUEUES}/{name}/rewind", json=body)) == "invalid"
    assert take_all(channel, name) == ["a"]


def test_rewind_outlives_a_kill(own_broker: HttpBroker) -> None:
    with own_broker.connect() as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        fill(channel, "q", *"abcd")
        assert take_all(channel, "q") == list("abcd")
    with own_broker.client() as client:
        client.post(f"{QUEUES}/q/rewind", json={"offset": 1})
    own_broker.restart(kill=True)
    with own_broker.connect() as connection:
        assert take_all(connection.channel(), "q") == list("bcd")


def test_purge_takes_what_is_ready(http: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, name, *"abc")
    channel.basic_get(name)
    assert http.delete(f"{QUEUES}/{name}/messages").json() == {"purged": 2}
    found = http.get(f"{QUEUES}/{name}").json()
    assert (found["ready"], found["unacked"]) == (0, 1)


def test_delete_keeps_to_its_conditions(http: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, name, "a")
    assert code(http.delete(f"{QUEUES}/{name}", params={"if_empty": "true"})) == "in_use"
    tag = channel.basic_consume(name, lambda *_: None)
    assert code(http.delete(f"{QUEUES}/{name}", params={"if_unused": "true"})) == "in_use"
    channel.basic_cancel(tag)
    assert http.delete(f"{QUEUES}/{name}").status_code == 204
    for gone in (
        http.get(f"{QUEUES}/{name}"),
        http.delete(f"{QUEUES}/{name}"),
        http.get(f"{QUEUES}/{name}/messages"),
        http.post(f"{QUEUES}/{name}/rewind", json={"offset": 0}),
    ):
        assert code(gone) == "not_found"


def test_exclusive_queue_is_its_connection_s_alone(http: httpx.Client, channel: Any, name: str) -> None:
    channel.queue_declare(name, exclusive=True)
    assert http.get(f"{QUEUES}/{name}").json()["exclusive"]
    for refused in (
        http.delete(f"{QUEUES}/{name}"),
        http.delete(f"{QUEUES}/{name}/messages"),
        http.get(f"{QUEUES}/{name}/messages"),
    ):
        assert code(refused) == "in_use"


def test_rights_are_those_of_amqp(http: httpx.Client, other: httpx.Client, channel: Any, name: str) -> None:
    fill(channel, f"public-{name}", "a")
    fill(channel, f"secret-{name}", "a")
    assert values(other.get(f"{QUEUES}/public-{name}/messages")) == ["a"]
    listed = [one["name"] for one in other.get(QUEUES).json()["queues"]]
    assert f"public-{name}" in listed
    assert f"secret-{name}" not in listed
    for refused in (
        other.delete(f"{QUEUES}/public-{name}"),
        other.post(f"{QUEUES}/public-{name}/rewind", json={"offset": 0}),
        other.get(f"{QUEUES}/secret-{name}"),
        other.get(f"{QUEUES}/secret-{name}/messages"),
        other.delete(f"{QUEUES}/secret-{name}/messages"),
        other.get(f"{QUEUES}/two%7Cq"),
        other.get(QUEUES, params={"vhost": "two"}),
        other.get("/api/v1/exchanges", params={"vhost": "two"}),
        other.get("/api/v1/bindings", params={"vhost": "nowhere"}),
    ):
        assert code(refused) == "forbidden"


def test_exchanges_and_bindings_are_listed(http: httpx.Client, other: httpx.Client, channel: Any, name: str) -> None:
    channel.exchange_declare(name, "topic", durable=True, arguments={"alternate-exchange": "amq.fanout"})
    channel.exchange_declare(f"{name}-2", "fanout", auto_delete=True)
    channel.exchange_bind(f"{name}-2", name, "x")
    channel.queue_declare(name)
    channel.queue_bind(name, name, "k")
    exchanges = {one["name"]: one for one in http.get("/api/v1/exchanges").json()["exchanges"]}
    assert "amq.topic" in exchanges
    assert exchanges[name] == {
        "name": name,
        "vhost": "/",
        "type": "topic",
        "durable": True,
        "auto_delete": False,
        "internal": False,
        "arguments": {"alternate-exchange": "amq.fanout"},
    }
    bindings = http.get("/api/v1/bindings", params={"source": name}).json()["bindings"]
    assert {(one["destination"], one["destination_kind"], one["routing_key"]) for one in bindings} == {
        (f"{name}-2", "exchange", "x"),
        (name, "queue", "k"),
    }
    assert name not in [one["name"] for one in other.get("/api/v1/exchanges").json()["exchanges"]]
    assert code(other.get("/api/v1/bindings", params={"source": name})) == "forbidden"
