"""What a queue has not done with, over HTTP: ready and unacked, in order, page by page, and nothing is taken."""

from typing import Any

import httpx
from tests.gateways.http.conftest import HttpBroker


def pages(http: httpx.Client, queue: str, limit: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    query: dict[str, Any] = {"limit": limit}
    while True:
        page = http.get(f"/api/v1/queues/{queue}/unsettled", params=query).raise_for_status().json()
        assert len(page["messages"]) <= limit
        found += page["messages"]
        if page["cursor"] is None:
            return found
        query["after"] = page["cursor"]


def test_ready_and_unacked_are_listed_in_order_and_settled_ones_are_not(
    http: httpx.Client, broker: HttpBroker, name: str
) -> None:
    channel = broker.connect().channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    for number in range(25):
        channel.basic_publish("", name, b"%d" % number)
    taken = [channel.basic_get(name)[0] for _ in range(6)]
    for method in (taken[0], taken[3]):
        assert method is not None
        channel.basic_ack(method.delivery_tag)
    # An answer behind the acknowledgements.
    channel.queue_declare(name, passive=True)
    wanted = [(str(n), "unacked" if n < 6 else "ready") for n in range(25) if n not in (0, 3)]
    for limit in (1, 4, 1000):
        found = pages(http, name, limit)
        assert [(one["message"]["value"], one["state"]) for one in found] == wanted
    assert [one["sequence"] for one in found] == [int(value) for value, _ in wanted]
    assert http.get(f"/api/v1/queues/{name}").json()["ready"] == 19


def test_every_lane_of_a_queue_with_priorities_is_listed(http: httpx.Client, broker: HttpBroker, name: str) -> None:
    import pika

    channel = broker.connect().channel()
    channel.queue_declare(name, durable=True, arguments={"x-max-priority": 3})
    channel.confirm_delivery()
    for priority in (0, 1, 2, 3):
        channel.basic_publish("", name, b"%d" % priority, pika.BasicProperties(priority=priority))
    assert sorted(one["message"]["value"] for one in pages(http, name, 2)) == ["0", "1", "2", "3"]


def test_cursor_that_is_none_and_queue_that_is_none_are_told(http: httpx.Client, broker: HttpBroker, name: str) -> None:
    assert http.get(f"/api/v1/queues/{name}/unsettled").status_code == 404
    broker.connect().channel().queue_declare(name, durable=True)
    refused = http.get(f"/api/v1/queues/{name}/unsettled", params={"after": "x"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_parameter")
