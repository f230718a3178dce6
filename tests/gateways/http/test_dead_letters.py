"""Dead letters over HTTP, beside the AMQP clients that make them: listed, chosen, sent back, over a kill too."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pika
import pytest

from .conftest import HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "reader"
password = "otherwise"

[[permissions]]
user = "reader"
vhost = "/"
configure = ""
write = ""
read = ".*"
"""
REDRIVES = "/api/v1/redrives"


@pytest.fixture
def channel(broker: HttpBroker) -> Iterator[Any]:
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    yield channel
    if connection.is_open:
        connection.close()


def declare(channel: Any, name: str, **arguments: Any) -> str:
    """The queue `name`, whose dead letters end in what is returned."""
    dead = f"{name}.dead"
    channel.queue_declare(dead, durable=True)
    settings = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead} | arguments
    channel.queue_declare(name, durable=True, arguments=settings)
    return dead


def die(channel: Any, http: httpx.Client, name: str, *bodies: str, **properties: Any) -> None:
    """Published, taken, rejected, and arrived where dead letters go."""
    before = count(http, f"{name}.dead")
    for body in bodies:
        channel.basic_publish("", name, body.encode(), pika.BasicProperties(delivery_mode=2, **properties))
    for _ in bodies:
        method, _properties, _body = channel.basic_get(name)
        channel.basic_reject(method.delivery_tag, requeue=False)
    channel.queue_declare(name, passive=True)
    while count(http, f"{name}.dead") < before + len(bodies):
        pass


def count(http: httpx.Client, queue: str) -> int:
    found: int = http.get(f"/api/v1/queues/{queue}").json()["ready"]
    return found


def listed(http: httpx.Client, queue: str, **query: Any) -> list[dict[str, Any]]:
    answer = http.get(f"/api/v1/queues/{queue}/dead-letters", params=query)
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["dead_letters"]
    return found


def redriven(http: httpx.Client, queue: str, **asked: Any) -> dict[str, Any]:
    answer = http.post(REDRIVES, json={"queue": queue, **asked})
    assert answer.status_code == 202, answer.text
    assert answer.headers["location"] == f"{REDRIVES}/{answer.json()['id']}"
    while (found := http.get(answer.headers["location"]).json())["state"] == "running":
        pass
    return dict(found)


def taken(channel: Any, queue: str) -> list[str]:
    found = []
    while (got := channel.basic_get(queue, auto_ack=True))[0] is not None:
        found.append(got[2].decode())
    return found


def test_dead_letters_tell_where_when_and_why_they_died(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name)
    die(channel, http, name, "1", "2", headers={"x-tags": "gold"})
    channel.basic_publish("", dead, b"never died")
    first, second = listed(http, dead)
    assert (first["died_in"], first["reason"], first["attempts"]) == (name, "rejected", 1)
    assert first["died_at"].startswith("20")
    assert (first["message"]["value"], first["message"]["tags"]) == ("1", ["gold"])
    assert [one["id"] for one in listed(http, dead, after=first["id"])] == [second["id"]]
    page = http.get(f"/api/v1/queues/{dead}/dead-letters", params={"limit": 1}).json()
    assert page["more"] is True and len(page["dead_letters"]) == 1


def test_headers_of_a_dead_letter_are_those_its_consumers_see(channel: Any, http: httpx.Client, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-retry-max": 0})
    given = {"timestamp": "mine", "attempts": 7, "expiry": "mine too", "x-origin-exchange": "somewhere"}
    channel.basic_publish("", name, b"x", pika.BasicProperties(delivery_mode=2, headers=given))
    method, _properties, _body = channel.basic_get(name)
    channel.basic_reject(method.delivery_tag, requeue=False)
    while http.get(f"/api/v1/queues/{name}.dlq").status_code == 404 or not count(http, f"{name}.dlq"):
        pass
    (letter,) = listed(http, f"{name}.dlq")
    headers = letter["message"]["headers"]
    assert {key: headers[key] for key in given} == given
    assert (headers["x-attempt"], headers["x-reason"]) == (1, "rejected")
    assert {type(headers[f"x-origin-{key}"]) for key in ("partition", "offset")} == {int}
    _method, properties, _body = channel.basic_get(f"{name}.dlq")
    assert headers.keys() == properties.headers.keys()


def test_metrics_count_deaths_and_redrives_by_reasons_that_can_occur(
    channel: Any, http: httpx.Client, name: str
) -> None:
    def counted(metric: str) -> float:
        (found,) = [line for line in http.get("/metrics").text.splitlines() if line.startswith(f"{metric} ")]
        return float(found.split()[1])

    dead = declare(channel, name)
    died, moved = counted('headrace_dead_letters_total{reason="rejected"}'), counted("headrace_redriven_total")
    die(channel, http, name, "1", "2")
    assert redriven(http, dead)["moved"] == 2
    assert counted('headrace_dead_letters_total{reason="rejected"}') == died + 2
    assert (counted("headrace_redriven_total"), counted("headrace_redrives_running")) == (moved + 2, 0)
    told = http.get("/metrics").text
    assert 'reason="redriven"' not in told
    for metric in ("headrace_retries_total", "headrace_retries_exhausted_total"):
        assert set(re.findall(rf'^{metric}{{reason="(\w+)"', told, re.MULTILINE)) == {"rejected", "delivery_limit"}


def test_they_are_chosen_and_sent_back(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name)
    die(channel, http, name, "1", "2", "3", headers={"x-tags": "gold"})
    die(channel, http, name, "4", headers={"x-tags": "silver"})
    assert [one["message"]["value"] for one in listed(http, dead, filter="silver")] == ["4"]
    assert listed(http, dead, reason="expired") == []
    (second,) = [one for one in listed(http, dead) if one["message"]["value"] == "2"]
    assert redriven(http, dead, ids=[second["id"]])["moved"] == 1
    assert redriven(http, dead, filter="silver")["targets"] == {name: 1}
    assert redriven(http, dead, reason="rejected", died_after="2020-01-01T00:00:00Z", key=name)["moved"] == 2
    assert sorted(taken(channel, name)) == ["1", "2", "3", "4"]
    assert count(http, dead) == 0


def test_dry_run_counts_and_changes_nothing(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name)
    die(channel, http, name, "1", "2")
    answer = http.post(REDRIVES, json={"queue": dead, "dry_run": True})
    assert answer.status_code == 200
    assert (answer.json()["targets"], answer.json()["moved"]) == ({name: 2}, 0)
    assert count(http, dead) == 2


def test_what_was_redriven_can_die_again(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name, **{"x-message-ttl": 60_000})
    for _ in range(3):
        die(channel, http, name, "1") if count(http, dead) == 0 and count(http, name) == 0 else None
        assert redriven(http, dead)["moved"] == 1
        method, properties, _body = channel.basic_get(name)
        assert "x-death" not in (properties.headers or {})
        channel.basic_reject(method.delivery_tag, requeue=False)
        while count(http, dead) < 1:
            pass


def test_redrives_are_listed_and_stopped(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name)
    die(channel, http, name, *map(str, range(20)))
    slow = http.post(REDRIVES, json={"queue": dead, "rate": 0.01}).json()
    again = http.post(REDRIVES, json={"queue": dead})
    assert (again.status_code, code(again)) == (409, "refused")
    assert slow["id"] in [one["id"] for one in http.get(REDRIVES).json()["redrives"]]
    assert http.delete(f"{REDRIVES}/{slow['id']}").status_code == 202
    while http.get(f"{REDRIVES}/{slow['id']}").json()["state"] == "running":
        pass
    assert http.get(f"{REDRIVES}/{slow['id']}").json()["state"] == "cancelled"
    assert count(http, dead) + count(http, name) == 20


def test_bad_requests_are_refused(channel: Any, http: httpx.Client, name: str) -> None:
    dead = declare(channel, name)
    channel.queue_declare(f"{name}.stream", durable=True, arguments={"x-queue-type": "stream"})
    for body, status in (
        ({"queue": f"{name}.nowhere"}, 404),
        ({"queue": dead, "to": f"{name}.nowhere"}, 404),
        ({"queue": dead, "to": dead}, 409),
        ({"queue": f"{name}.stream"}, 409),
        ({"queue": dead, "ids": ["nonsense"]}, 422),
        ({"queue": dead, "filter": "gold &&"}, 400),
        ({"queue": dead, "died_before": "yesterday"}, 422),
        ({"queue": dead, "rate": 0}, 422),
        ({"queue": dead, "reson": "typo"}, 422),
    ):
        answer = http.post(REDRIVES, json=body)
        assert answer.status_code == status, (body, answer.text)
    assert http.get(f"{REDRIVES}/00000000-0000-0000-0000-000000000000").status_code == 404


def test_a_filter_that_is_none_is_told_with_its_column_wherever_it_is_asked_for(
    channel: Any, http: httpx.Client, name: str
) -> None:
    dead = declare(channel, name)
    text = "gold && && silver"
    member = http.post(f"/api/v1/consumer-groups/{name}/members", json={"topics": [f"queue:{dead}"]}).json()
    polled = f"/api/v1/consumer-groups/{name}/members/{member['member_id']}/messages"
    for answer in (
        http.get(f"/api/v1/topics/{dead}/partitions/0/messages", params={"filter": text}),
        http.get(f"/api/v1/queues/{dead}/dead-letters", params={"filter": text}),
        http.get(polled, params={"filter": text, "generation": member["generation"]}),
        http.post(REDRIVES, json={"queue": dead, "filter": text}),
    ):
        assert (answer.status_code, code(answer)) == (400, "invalid_parameter"), answer.text
        assert "column 9" in answer.json()["detail"]


def test_sending_back_needs_the_right_to_publish(broker: HttpBroker, channel: Any, name: str) -> None:
    dead = declare(channel, name)
    with broker.client(("reader", "otherwise")) as reader:
        assert reader.get(f"/api/v1/queues/{dead}/dead-letters").status_code == 200
        answer = reader.post(REDRIVES, json={"queue": dead})
        assert (answer.status_code, code(answer)) == (403, "forbidden")


def test_interrupted_by_a_kill_it_goes_on_when_it_is_asked_for_again(own_broker: HttpBroker, name: str) -> None:
    broker = own_broker
    values = [str(number) for number in range(1200)]
    connection = broker.connect()
    channel = connection.channel()
    channel.confirm_delivery()
    dead = declare(channel, name)
    with broker.client() as http:
        die(channel, http, name, *values)
        id = http.post(REDRIVES, json={"queue": dead, "rate": 1200}).json()["id"]
        while http.get(f"{REDRIVES}/{id}").json()["moved"] < 100:
            pass
    broker.restart(kill=True)
    with broker.client() as http:
        (earlier,) = http.get(REDRIVES).json()["earlier"]
        assert (earlier["id"], earlier["state"], earlier["user"]) == (id, "interrupted", "guest")
        left = count(http, dead)
        assert 0 < left < 1200 and left + count(http, name) == 1200
        assert redriven(http, dead)["moved"] == left
    connection = broker.connect()
    assert sorted(taken(connection.channel(), name), key=int) == values
    connection.close()
