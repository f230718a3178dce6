"""What is parked, over HTTP: counted, listed by due time, cancelled and rescheduled with definite answers."""

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

import httpx
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from headrace.testing import EmbeddedBroker

HOUR_MS = 3_600_000
CONFIG = """
[[users]]
name = "other"
password = "sees little and writes less"
[[permissions]]
user = "other"
configure = ""
write = ""
read = "^public$"
"""
DELAYED = "/api/v1/delayed"
MESSAGES = f"{DELAYED}/messages"


@pytest.fixture
def broker(request: pytest.FixtureRequest) -> Iterator[EmbeddedBroker]:
    """With the users of CONFIG where a test asks for them: to hash a password takes longer than to start."""
    asked = request.node.get_closest_marker("usefixtures")
    config = CONFIG if asked is not None and "users" in asked.args else ""
    with EmbeddedBroker(doors=("amqp", "http"), config=config) as broker:
        yield broker


@pytest.fixture
def users() -> None:
    """Makes `broker` know them."""


@pytest.fixture
def channel(broker: EmbeddedBroker) -> Iterator[BlockingChannel]:
    connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
    channel = connection.channel()
    channel.confirm_delivery()
    for name in ("public", "private"):
        channel.exchange_declare(name, "fanout", durable=True)
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, name)
    yield channel
    with suppress(AMQPError):
        connection.close()


@pytest.fixture
def http(broker: EmbeddedBroker) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as client:
        yield client


def park(channel: BlockingChannel, exchange: str, body: str, hours: float, key: str = "key", **headers: Any) -> None:
    headers = {"x-delay": round(hours * HOUR_MS), **{name.replace("_", "-"): value for name, value in headers.items()}}
    channel.basic_publish(exchange, key, body.encode(), pika.BasicProperties(headers=headers, delivery_mode=2))


def listed(http: httpx.Client, **query: Any) -> list[str]:
    answer = http.get(MESSAGES, params=query)
    assert answer.status_code == 200, answer.text
    return [one["value"] for one in answer.json()["messages"]]


def taken(channel: BlockingChannel, queue: str) -> list[str]:
    bodies = []
    while (found := channel.basic_get(queue, auto_ack=True))[2] is not None:
        bodies.append(found[2].decode())
    return bodies


def test_counts_go_by_target_and_by_bucket(http: httpx.Client, channel: BlockingChannel) -> None:
    for hours in (1, 2, 30):
        park(channel, "public", "x", hours)
    park(channel, "private", "x", 1)
    counts = http.get(DELAYED).json()
    assert counts["pending"] == 4
    assert [(one["kind"], one["name"], one["pending"]) for one in counts["targets"]] == [
        ("publish", "private", 1),
        ("publish", "public", 3),
    ]
    assert sum(one["pending"] for one in counts["buckets"]) == 4


def test_messages_are_listed_by_due_time_page_by_page(http: httpx.Client, channel: BlockingChannel) -> None:
    for hours in (5, 1, 4, 2, 3):
        park(channel, "public", str(hours), hours)
    assert listed(http) == ["1", "2", "3", "4", "5"]
    page = http.get(MESSAGES, params={"limit": 2}).json()
    assert [one["value"] for one in page["messages"]] == ["1", "2"]
    assert listed(http, after=page["cursor"]) == ["3", "4", "5"]
    until = datetime.fromisoformat(page["messages"][1]["deliver_at"]) + timedelta(minutes=1)
    assert listed(http, until=until.isoformat()) == ["1", "2"]
    assert listed(http, **{"from": until.isoformat()}) == ["3", "4", "5"]


def test_messages_are_found_by_exchange_key_and_tag(http: httpx.Client, channel: BlockingChannel) -> None:
    park(channel, "public", "a", 1, key="a")
    park(channel, "public", "b", 1, key="b", x_tags="vip,eu")
    park(channel, "private", "c", 1, key="a")
    park(channel, "", "d", 1, key="public")
    assert listed(http, name="public") == ["a", "b"]
    assert listed(http, key="a") == ["a", "c"]
    assert listed(http, tag="vip") == ["b"]
    assert listed(http, name="amq.default") == ["d"]
    assert listed(http, name="public", key="b", tag="eu") == ["b"]
    assert listed(http, name="nobody") == []


def test_one_is_shown_with_all_that_is_known_of_it(
    broker: EmbeddedBroker, http: httpx.Client, channel: BlockingChannel
) -> None:
    park(channel, "public", "body", 24, x_schedule_id="order/17", kind="order")
    one = http.get(f"{MESSAGES}/{quote('order/17', safe='')}").json()
    assert (one["id"], one["name"], one["vhost"], one["key"], one["value"]) == (
        "order/17",
        "public",
        "/",
        "key",
        "body",
    )
    assert one["headers"]["kind"] == "order"
    due = datetime.fromisoformat(one["deliver_at"]) - broker.clock.now()
    assert timedelta(hours=23, minutes=59) < due <= timedelta(hours=24)


def test_cancelling_has_a_definite_answer(broker: EmbeddedBroker, http: httpx.Client, channel: BlockingChannel) -> None:
    for name in ("cancelled", "delivered"):
        park(channel, "public", name, 1, x_schedule_id=name)
    done = http.delete(f"{MESSAGES}/cancelled")
    assert (done.status_code, done.json()["outcome"]) == (200, "cancelled")
    broker.clock.advance(hours=1)
    assert taken(channel, "public") == ["delivered"]
    fired = http.delete(f"{MESSAGES}/delivered")
    assert (fired.status_code, fired.json()["code"]) == (409, "already_fired")
    again = http.delete(f"{MESSAGES}/cancelled")
    assert (again.status_code, again.json()["code"]) == (409, "already_cancelled")
    unknown = http.delete(f"{MESSAGES}/never")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "not_found")


def test_rescheduling_moves_it_both_ways(broker: EmbeddedBroker, http: httpx.Client, channel: BlockingChannel) -> None:
    park(channel, "public", "sooner", 48, x_schedule_id="sooner")
    park(channel, "public", "later", 1, x_schedule_id="later")
    at = (broker.clock.now() + timedelta(hours=3)).isoformat()
    assert http.put(f"{MESSAGES}/later", json={"deliver_at": at}).json()["outcome"] == "rescheduled"
    assert http.put(f"{MESSAGES}/sooner", json={"delay_ms": HOUR_MS}).status_code == 200
    broker.clock.advance(hours=1, seconds=1)
    assert taken(channel, "public") == ["sooner"]
    broker.clock.advance(hours=2)
    assert taken(channel, "public") == ["later"]


@pytest.mark.parametrize(
    "when", [{}, {"delay_ms": 1, "deliver_at": 1}, {"deliver_at": "soon"}, {"deliver_at": "9999-01-01T00:00:00Z"}]
)
def test_a_time_that_cannot_be_is_refused(http: httpx.Client, channel: BlockingChannel, when: dict[str, Any]) -> None:
    park(channel, "public", "kept", 1, x_schedule_id="kept")
    answer = http.put(f"{MESSAGES}/kept", json=when)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid")
    assert listed(http) == ["kept"]


@pytest.mark.usefixtures("users")
def test_others_see_and_change_what_their_rights_allow(broker: EmbeddedBroker, channel: BlockingChannel) -> None:
    park(channel, "public", "seen", 1, x_schedule_id="seen")
    park(channel, "private", "hidden", 1, x_schedule_id="hidden")
    login = ("other", "sees little and writes less")
    with httpx.Client(base_url=broker.http_url(""), auth=login, timeout=30) as other:
        assert listed(other) == ["seen"]
        assert [one["name"] for one in other.get(DELAYED).json()["targets"]] == ["public"]
        assert other.get(f"{MESSAGES}/hidden").status_code == 404
        assert other.delete(f"{MESSAGES}/seen").status_code == 403
        assert other.put(f"{MESSAGES}/seen", json={"delay_ms": 0}).status_code == 403
        assert other.get(MESSAGES, params={"name": "private"}).status_code == 403
        assert other.delete(f"{MESSAGES}/hidden").status_code == 404
        # Somebody else's is not cancelled by having chosen the same id.
        park(channel, "public", "also seen", 0.5, x_schedule_id="hidden")
        assert other.delete(f"{MESSAGES}/hidden").status_code in (403, 404)
    broker.clock.advance(hours=1)
    assert (taken(channel, "public"), taken(channel, "private")) == (["also seen", "seen"], ["hidden"])


def test_a_kill_and_a_restart_lose_and_double_nothing(
    broker: EmbeddedBroker, http: httpx.Client, channel: BlockingChannel
) -> None:
    for hours in range(1, 7):
        park(channel, "public", str(hours), hours, x_schedule_id=str(hours))
    http.delete(f"{MESSAGES}/2")
    broker.clock.advance(hours=1)
    broker.kill()
    broker.clock.advance(hours=2)
    broker.start()
    broker.clock.advance(seconds=1)
    with httpx.Client(base_url=broker.http_url(""), auth=("guest", "guest"), timeout=30) as again:
        assert listed(again) == ["4", "5", "6"]
    broker.restart()
    broker.clock.advance(hours=4)
    connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
    assert taken(connection.channel(), "public") == ["1", "3", "4", "5", "6"]
    connection.close()


def test_metrics_count_what_was_parked_fired_cancelled_and_dropped(
    broker: EmbeddedBroker, http: httpx.Client, channel: BlockingChannel
) -> None:
    for name in ("fired", "cancelled", "waiting"):
        park(channel, "public", name, 48 if name == "waiting" else 1, x_schedule_id=name)
    channel.queue_declare("gone")
    park(channel, "", "dropped", 1, key="gone")
    channel.queue_delete("gone")
    http.delete(f"{MESSAGES}/cancelled")
    broker.clock.advance(hours=1)
    told = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line.startswith("headrace_"))
    counts = {name: float(told[f"headrace_delayed_{name}"]) for name in ("messages", "parked_total", "fired_total")}
    assert counts == {"messages": 1, "parked_total": 4, "fired_total": 2}
    assert float(told["headrace_delayed_cancelled_total"]) == float(told["headrace_delayed_dropped_total"]) == 1
    assert float(told["headrace_delayed_lateness_seconds_count"]) == 2
