"""`<queue>.retry` and `<group>.retry` as topics: what waits for another attempt, by when it comes back."""

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pika
import pytest

from .conftest import PATIENCE_S, HttpBroker
from .test_group_retries import commit, configure, failure, next_of
from .test_groups import CONFIG as GROUPS_CONFIG
from .test_groups import Group, Topic

CONFIG = GROUPS_CONFIG
TOPICS = "/api/v1/topics"


@pytest.fixture
def channel(broker: HttpBroker) -> Iterator[Any]:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    connection.close()


def waiting(http: httpx.Client, topic: str, count: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while http.get(f"{TOPICS}/{topic}").json()["partition_list"][0]["end_offset"] != count:
        assert time.monotonic() < until, "they do not wait"


def read(http: httpx.Client, topic: str, **query: Any) -> dict[str, Any]:
    answer = http.get(f"{TOPICS}/{topic}/partitions/0/messages", params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def rejected(channel: Any, name: str, *bodies: str, tags: str | None = None) -> None:
    properties = pika.BasicProperties(headers=None if tags is None else {"x-tags": tags})
    for body in bodies:
        channel.basic_publish("", name, body.encode(), properties)
        method = None
        while method is None:
            method, _properties, _body = channel.basic_get(name)
        channel.basic_nack(method.delivery_tag, requeue=False)


def test_queue_reads_what_waits_for_it_in_the_order_in_which_it_comes_back(
    channel: Any, http: httpx.Client, name: str
) -> None:
    arguments = {"x-retry-max": 3, "x-retry-backoff": "fixed", "x-retry-delay-ms": 3_600_000}
    channel.queue_declare(name, durable=True, arguments=arguments)
    topic = f"{name}.retry"
    assert http.get(f"{TOPICS}/{topic}").json()["kind"] == "retry"
    assert read(http, topic)["messages"] == []
    rejected(channel, name, "a", "b", "c")
    waiting(http, topic, 3)
    page = read(http, topic, limit=2)
    assert (page["offset"], page["next_offset"], page["end_offset"]) == (0, 2, 3)
    assert [one["value"] for one in page["messages"]] == ["a", "b"]
    first = page["messages"][0]
    assert (first["headers"]["x-attempt"], first["headers"]["x-reason"]) == (2, "rejected")
    assert first["headers"]["x-origin-offset"] == 0
    assert first["timestamp"] < first["deliver_at"]
    assert [one["value"] for one in read(http, topic, offset=2)["messages"]] == ["c"]
    assert [one["value"] for one in read(http, topic, offset=-2)["messages"]] == ["b", "c"]
    later = read(http, topic, timestamp=page["messages"][1]["deliver_at"])
    assert (later["offset"], [one["value"] for one in later["messages"]]) == (1, ["b", "c"])
    assert http.delete(f"/api/v1/delayed/messages/{first['schedule_id']}").is_success
    assert [one["value"] for one in read(http, topic)["messages"]] == ["b", "c"]


def test_what_waits_is_filtered_by_tags(channel: Any, http: httpx.Client, name: str) -> None:
    arguments = {"x-retry-max": 3, "x-retry-backoff": "fixed", "x-retry-delay-ms": 3_600_000}
    channel.queue_declare(name, durable=True, arguments=arguments)
    for body, tags in (("a", "red"), ("b", "red,large"), ("c", "blue")):
        rejected(channel, name, body, tags=tags)
    topic = f"{name}.retry"
    waiting(http, topic, 3)
    page = read(http, topic, filter="red")
    assert [(one["offset"], one["value"]) for one in page["messages"]] == [(0, "a"), (1, "b")]
    assert page["next_offset"] == 3
    assert [one["value"] for one in read(http, topic, filter="red && !large || blue")["messages"]] == ["a", "c"]
    page = read(http, topic, filter="red", limit=1)
    assert ([one["value"] for one in page["messages"]], page["next_offset"]) == (["a"], 1)
    assert read(http, topic, filter="green")["messages"] == []
    answer = http.get(f"{TOPICS}/{topic}/partitions/0/messages", params={"filter": "red &&"})
    assert answer.status_code == 400


def test_group_reads_what_waits_for_it(http: httpx.Client, name: str) -> None:
    topic, group = Topic(http, name, 2), Group(http, name)
    configure(group, retry_max=1, retry_delay_ms=3_600_000)
    topic.publish("a", "b")
    member = group.join()
    answer = next_of(member)
    commit(member, answer, failure(answer["messages"][1], "timeout")).raise_for_status()
    until = time.monotonic() + PATIENCE_S
    while group.described()["waiting"] == 0:
        assert time.monotonic() < until
    (one,) = read(http, f"{name}.retry")["messages"]
    assert (one["value"], one["headers"]["x-reason"]) == ("b", "timeout")


def test_what_cannot_be_read_is_refused(broker: HttpBroker, channel: Any, http: httpx.Client, name: str) -> None:
    channel.queue_declare(name, durable=True)
    url = f"{TOPICS}/{name}.retry/partitions"
    assert http.get(f"{url}/1/messages").status_code == 404
    assert http.get(f"{TOPICS}/{name}.nothing.retry").status_code == 404
    assert http.get(f"{TOPICS}/exchange:{name}.retry").status_code == 404
    with broker.client(("reader", "reading")) as reader:
        assert reader.get(f"{url}/0/messages").status_code == 403
        assert reader.get(f"{TOPICS}/{name}.retry").status_code == 403


def test_queue_that_is_called_so_comes_first(channel: Any, http: httpx.Client, name: str) -> None:
    channel.queue_declare(name, durable=True)
    channel.queue_declare(f"{name}.retry", durable=True)
    assert http.get(f"{TOPICS}/{name}.retry").json()["kind"] == "queue"
