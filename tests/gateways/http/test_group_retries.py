"""Messages that a member of a consumer group fails with, over HTTP on a real broker: again, dead, redriven."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from .conftest import PATIENCE_S, HttpBroker
from .test_groups import CONFIG as GROUPS_CONFIG
from .test_groups import Group, Member, Topic

CONFIG = GROUPS_CONFIG


@pytest.fixture
def topic(http: httpx.Client, name: str) -> Topic:
    return Topic(http, name, 2)


@pytest.fixture
def group(http: httpx.Client, topic: Topic) -> Group:
    return Group(http, topic.name)


def configure(group: Group, **settings: Any) -> dict[str, Any]:
    answer = group.http.put(group.url, json=settings)
    assert answer.is_success, answer.text
    found: dict[str, Any] = answer.json()
    return found


def next_of(member: Member) -> dict[str, Any]:
    """The next message; gaps and generations make answers without one."""
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        answer = member.poll(wait_ms=1000)
        if answer["messages"]:
            return answer
    raise AssertionError("nothing came")


def commit(member: Member, answer: dict[str, Any], *failed: dict[str, Any]) -> httpx.Response:
    body = {
        "offsets": answer["positions"],
        "failed": failed,
        "member_id": member.id,
        "generation": member.generation,
    }
    return member.http.post(f"{member.group.url}/offsets", json=body)


def failure(message: dict[str, Any], reason: str) -> dict[str, Any]:
    return {**{name: message[name] for name in ("topic", "partition", "offset")}, "reason": reason}


def eventually(look: Callable[[], Any]) -> Any:
    until = time.monotonic() + PATIENCE_S
    while not (found := look()):
        assert time.monotonic() < until, "it did not happen"
    return found


def test_message_that_fails_comes_back_then_it_is_dead_and_redriven_it_is_tried_anew(
    http: httpx.Client, topic: Topic, group: Group
) -> None:
    name = topic.name
    assert configure(group, retry_max=1, retry_delay_ms=50)["retry_max"] == 1
    http.post(
        f"/api/v1/topics/{name}/messages",
        json=[
            {"value": "good", "partition": 1},
            {"value": "bad", "partition": 1, "headers": {"a": "b"}, "tags": ["eu"]},
        ],
    ).raise_for_status()
    member = group.join()
    answer = next_of(member)
    assert [one["value"] for one in answer["messages"]] == ["good", "bad"]
    assert commit(member, answer, failure(answer["messages"][1], "timeout")).status_code == 200
    answer = next_of(member)
    (again,) = answer["messages"]
    assert (again["topic"], again["partition"], again["value"]) == (f"{name}.retry", 0, "bad")
    assert (again["headers"]["a"], again["headers"]["x-attempt"], again["tags"]) == ("b", 2, ["eu"])
    told = again["retried"]
    assert (told["attempt"], told["topic"], told["partition"], told["offset"]) == (2, name, 1, 1)
    assert [one["reason"] for one in told["history"]] == ["timeout"]
    assert commit(member, answer, failure(again, "schema")).status_code == 200
    dead = f"/api/v1/queues/{name}.dlq/dead-letters"
    eventually(lambda: http.get(dead).is_success and http.get(dead).json()["dead_letters"])
    (letter,) = http.get(dead, params={"reason": "schema"}).json()["dead_letters"]
    assert (letter["died_in"], letter["kind"], letter["attempts"]) == (name, "group", 2)
    assert [one["reason"] for one in letter["history"]] == ["timeout", "schema"]
    assert letter["message"]["headers"]["a"] == "b"
    started = http.post("/api/v1/redrives", json={"queue": f"{name}.dlq"})
    assert started.status_code == 202, started.text
    answer = next_of(member)
    (anew,) = answer["messages"]
    assert (anew["topic"], anew["value"], anew["retried"]["attempt"]) == (f"{name}.retry", "bad", 1)
    assert commit(member, answer).status_code == 200
    assert group.described()["lag"] == 0


def test_what_waits_is_counted_listed_and_can_be_cancelled(http: httpx.Client, topic: Topic, group: Group) -> None:
    configure(group, retry_max=1, retry_backoff="fixed", retry_delay_ms=3_600_000)
    topic.publish("a", "b")
    member = group.join()
    answer = next_of(member)
    commit(member, answer, *(failure(one, "timeout") for one in answer["messages"])).raise_for_status()
    eventually(lambda: group.described()["waiting"] == 2)
    query = {"kind": "group", "name": topic.name}
    listed = http.get("/api/v1/delayed/messages", params=query).json()["messages"]
    assert [(one["value"], one["kind"], one["name"]) for one in listed] == [
        ("a", "group", topic.name),
        ("b", "group", topic.name),
    ]
    assert listed[0]["headers"]["x-attempt"] == 2
    assert http.delete(f"/api/v1/delayed/messages/{listed[0]['id']}").json()["outcome"] == "cancelled"
    assert group.described()["waiting"] == 1
    assert http.put(f"/api/v1/delayed/messages/{listed[1]['id']}", json={"delay_ms": 0}).is_success
    (back,) = next_of(member)["messages"]
    assert back["value"] == "b"


def test_settings_that_make_no_sense_are_refused(http: httpx.Client, group: Group, name: str) -> None:
    for body, status, text in (
        ({"retry_max": -1}, 422, "retry_max"),
        ({"retry_delay_ms": 5}, 422, "without retry_max"),
        ({"retry_max": 1, "retry_backoff": "levels", "retry_delay_ms": 5}, 422, "levels"),
        ({"retry_max": 1, "retry_delay_ms": 10, "retry_delay_max_ms": 5}, 422, "less than the delay"),
        ({"retry_max": 1, "retry_delay_ms": 2**52, "retry_delay_max_ms": 2**52}, 422, "can be kept"),
        ({"retry_max": 1, "dead_letter_exchange": f"{name}.nowhere"}, 404, "no exchange"),
        ({"retry_maxx": 1}, 422, "retry_maxx"),
    ):
        answer = http.put(group.url, json=body)
        assert answer.status_code == status, (body, answer.text)
        assert text in answer.json()["detail"], answer.text
    assert http.get(group.url).status_code == 404
    long = "g" * 253
    assert http.put(f"/api/v1/consumer-groups/{long}", json={"retry_max": 1}).status_code == 409


def test_failures_that_cannot_be_are_refused_and_nothing_is_committed(topic: Topic, group: Group) -> None:
    topic.publish("a", "b")
    member = group.join()
    answer = next_of(member)
    first = answer["messages"][0]
    refused = commit(member, answer, failure(first, "timeout"))
    assert (refused.status_code, refused.json()["code"]) == (409, "refused")
    configure(group, retry_max=1)
    for failed, status in (
        ([failure(first, "two words")], 422),
        ([failure(first, "x"), failure(first, "y")], 422),
        ([failure(first, "x") | {"offset": 2}], 409),
        ([failure(first, "x") | {"partition": 7}], 409),
    ):
        refused = commit(member, answer, *failed)
        assert refused.status_code == status, refused.text
    outside = {"offsets": answer["positions"], "failed": [failure(first, "x")]}
    assert member.http.post(f"{group.url}/offsets", json=outside).status_code == 422
    assert [one["committed"] for one in group.described()["partitions"]] == [0, 0]


def test_group_is_set_up_and_deleted_by_who_may_configure_it(
    broker: HttpBroker, http: httpx.Client, topic: Topic, group: Group
) -> None:
    with broker.client(("reader", "reading")) as reader:
        assert reader.put(group.url, json={"retry_max": 1}).status_code == 403
        assert reader.delete(group.url).status_code == 403
    assert http.put(group.url, json={"retry_max": 1}).status_code == 201
    assert http.put(group.url, json={"retry_max": 2}).status_code == 200
    assert group.described()["settings"]["retry_max"] == 2
    member = group.join()
    assert (http.delete(group.url).status_code, http.delete(member.url).status_code) == (409, 204)
    assert http.delete(group.url).status_code == 204
    assert http.get(group.url).status_code == 404
    assert http.delete(group.url).status_code == 404


def test_what_failed_comes_back_after_a_kill(own_broker: HttpBroker, name: str) -> None:
    with own_broker.client() as http:
        topic, group = Topic(http, name, 2), Group(http, name)
        configure(group, retry_max=1, retry_delay_ms=300)
        topic.publish("a", "b", "c")
        member = group.join()
        answer = next_of(member)
        commit(member, answer, failure(answer["messages"][1], "timeout")).raise_for_status()
    own_broker.restart(kill=True)
    with own_broker.client() as http:
        member.http = member.group.http = http
        (again,) = next_of(member)["messages"]
        assert (again["value"], again["retried"]["attempt"]) == ("b", 2)
