"""Consumer groups as an HTTP client meets them, on a real broker: sharing, polling, fencing, lag, rights, a kill."""

import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import HttpBroker

CONFIG = """
[[vhosts]]
name = "shop"

[[users]]
name = "reader"
password = "reading"

[[permissions]]
user = "reader"
vhost = "/"
configure = ""
write = ""
read = "^open.*"

[[users]]
name = "guest"
password = "guest"
tags = ["administrator"]

[[permissions]]
user = "guest"
vhost = "/"
configure = ".*"
write = ".*"
read = ".*"

[[permissions]]
user = "guest"
vhost = "shop"
configure = ".*"
write = ".*"
read = ".*"
"""
GROUPS = "/api/v1/consumer-groups"


class Topic:
    def __init__(self, http: httpx.Client, name: str, partitions: int) -> None:
        self.http = http
        self.name = name
        http.post("/api/v1/topics", json={"name": name, "partitions": partitions}).raise_for_status()

    def publish(self, *values: str, partition: int = 0) -> None:
        messages = [{"value": value, "partition": partition} for value in values]
        answer = self.http.post(f"/api/v1/topics/{self.name}/messages", json=messages)
        assert answer.is_success, answer.text


class Group:
    """A group called as its topic is."""

    def __init__(self, http: httpx.Client, topic: str, name: str | None = None) -> None:
        self.http = http
        self.topic = topic
        self.url = f"{GROUPS}/{name or topic}"

    def join(self, **more: Any) -> "Member":
        answer = self.http.post(f"{self.url}/members", json={"topics": [self.topic]} | more)
        assert answer.status_code == 201, answer.text
        return Member(self, answer.json())

    def described(self) -> dict[str, Any]:
        answer = self.http.get(self.url)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def reset(self, **body: Any) -> httpx.Response:
        return self.http.put(f"{self.url}/offsets", json={"topic": self.topic} | body)


class Member:
    def __init__(self, group: Group, told: dict[str, Any]) -> None:
        self.group = group
        self.http = group.http
        self.id = told["member_id"]
        self.url = f"{group.url}/members/{self.id}"
        self.hear(told)

    def hear(self, told: dict[str, Any]) -> dict[str, Any]:
        self.generation = told["generation"]
        self.partitions = [one["partition"] for one in told["assignment"]]
        self.give_up = [one["partition"] for one in told["give_up"]]
        return told

    def beat(self, **more: Any) -> httpx.Response:
        answer = self.http.put(self.url, json={"generation": self.generation} | more)
        if answer.is_success:
            self.hear(answer.json())
        return answer

    def poll(self, **query: Any) -> dict[str, Any]:
        answer = self.http.get(f"{self.url}/messages", params={"generation": self.generation} | query)
        assert answer.status_code == 200, answer.text
        return self.hear(answer.json())

    def values(self, **query: Any) -> list[str]:
        return [one["value"] for one in self.poll(**query)["messages"]]

    def commit(self, offset: int, partition: int = 0, **more: Any) -> httpx.Response:
        where = {"topic": self.group.topic, "partition": partition, "offset": offset}
        body = {"offsets": [where], "member_id": self.id, "generation": self.generation} | more
        return self.http.post(f"{self.group.url}/offsets", json=body)


@pytest.fixture
def topic(http: httpx.Client, name: str) -> Topic:
    return Topic(http, name, 2)


@pytest.fixture
def group(http: httpx.Client, topic: Topic) -> Group:
    return Group(http, topic.name)


@pytest.fixture
def reader(broker: HttpBroker) -> Iterator[httpx.Client]:
    """Somebody who may read what is called open..., and nothing else."""
    with broker.client(("reader", "reading")) as client:
        yield client


def code(answer: httpx.Response) -> str:
    return str(answer.json()["code"])


def test_loop_on_the_page_reads_everything_once_and_commits_it(topic: Topic, group: Group) -> None:
    page = (Path(__file__).parents[3] / "docs" / "consumer-groups.md").read_text()
    loop, _failing = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    topic.publish("a", "b")
    topic.publish("c", partition=1)
    seen: list[str] = []

    def work(messages: list[dict[str, Any]]) -> None:
        seen.extend(one["value"] for one in messages)
        if group.described()["lag"] == 0:
            raise StopIteration

    def answered(method: str, path: str, body: object = None) -> Any:
        return group.http.request(method, group.url + path.replace("20000", "50"), json=body).raise_for_status().json()

    names = {"get": partial(answered, "GET"), "post": partial(answered, "POST"), "work": work}
    with pytest.raises(StopIteration):
        exec(loop.replace('"orders"', f'"{topic.name}"'), names)
    assert sorted(seen) == ["a", "b", "c"]


# -- the life of a group --------------------------------------------------------------------------------------------


def test_member_polls_works_and_commits_what_it_was_given(topic: Topic, group: Group) -> None:
    topic.publish("a", "b")
    topic.publish("c", partition=1)
    member = group.join(name="worker-1")
    assert (member.partitions, member.give_up) == ([0, 1], [])
    polled = member.poll()
    assert {(one["topic"], one["partition"], one["offset"], one["value"]) for one in polled["messages"]} == {
        (topic.name, 0, 0, "a"),
        (topic.name, 0, 1, "b"),
        (topic.name, 1, 0, "c"),
    }
    body = {"offsets": polled["positions"], "member_id": member.id, "generation": member.generation}
    assert group.http.post(f"{group.url}/offsets", json=body).status_code == 200
    assert member.values() == []
    assert group.described()["lag"] == 0


def test_second_member_gets_half_once_the_first_has_given_it_up(topic: Topic, group: Group) -> None:
    topic.publish("a", partition=1)
    one = group.join()
    two = group.join()
    assert two.partitions == []
    assert one.poll()["give_up"] == [{"topic": topic.name, "partition": 1}]
    assert two.values() == []
    one.poll()
    two.beat()
    assert (one.partitions, two.partitions) == ([0], [1])
    assert two.values() == ["a"]
    late = one.commit(1, partition=1)
    assert (late.status_code, code(late)) == (409, "not_held")
    assert two.commit(1, partition=1).status_code == 200


def test_who_leaves_is_unknown_and_its_partitions_go_on(group: Group) -> None:
    one, two = group.join(), group.join()
    assert group.http.delete(one.url).status_code == 204
    two.beat()
    assert two.partitions == [0, 1]
    for answer in (one.beat(), group.http.delete(one.url), one.commit(0)):
        assert (answer.status_code, code(answer)) == (404, "unknown_member")


def test_member_that_falls_silent_is_put_out(group: Group) -> None:
    one = group.join(session_timeout_ms=1000)
    two = group.join()
    while len(two.partitions) < 2:
        two.poll(wait_ms=1000)
    assert code(one.beat()) == "unknown_member"


def test_poll_behind_the_answer_that_was_received_reads_on_without_a_commit(topic: Topic, group: Group) -> None:
    topic.publish("a", "b", "c")
    member = group.join()
    first = member.poll(limit=1)
    second = member.poll(limit=1, after=first["poll"])
    assert [one["value"] for one in second["messages"]] == ["b"]
    assert member.values(limit=1, after=first["poll"]) == ["b"]
    assert member.values(after=second["poll"]) == ["c"]


def test_long_poll_is_answered_when_a_message_comes(topic: Topic, group: Group) -> None:
    member = group.join()
    publisher = threading.Timer(0.2, topic.publish, ["late"])
    publisher.start()
    try:
        assert member.values(wait_ms=20_000) == ["late"]
    finally:
        publisher.join()


def test_filter_lets_through_what_matches(topic: Topic, group: Group) -> None:
    messages = [{"value": value, "tags": tags, "partition": 0} for value, tags in (("a", ["eu"]), ("b", ["us"]))]
    topic.http.post(f"/api/v1/topics/{topic.name}/messages", json=messages).raise_for_status()
    member = group.join()
    polled = member.poll(filter="us && !eu")
    assert [one["value"] for one in polled["messages"]] == ["b"]
    assert polled["positions"][0]["offset"] == 2
    refused = group.http.get(f"{member.url}/messages", params={"generation": member.generation, "filter": "us &&"})
    assert (refused.status_code, code(refused)) == (400, "invalid_parameter")
    assert "column 6" in refused.json()["detail"]


def test_member_may_change_its_topics(http: httpx.Client, topic: Topic, group: Group, name: str) -> None:
    other = Topic(http, f"{name}-other", 1)
    member = group.join()
    assert member.beat(topics=[other.name]).status_code == 200
    assert (member.partitions, member.give_up) == ([0], [0, 1])
    member.beat()
    assert member.give_up == []


def test_added_partitions_are_given_out(http: httpx.Client, topic: Topic, group: Group) -> None:
    member = group.join()
    http.patch(f"/api/v1/topics/{topic.name}", json={"partitions": 3}).raise_for_status()
    member.beat()
    assert member.partitions == [0, 1, 2]


def test_new_group_may_begin_with_what_comes(topic: Topic, group: Group) -> None:
    topic.publish("old")
    member = group.join(start="next")
    topic.publish("new")
    assert member.values() == ["new"]


# -- offsets --------------------------------------------------------------------------------------------------------


def test_commit_that_goes_back_is_refused(topic: Topic, group: Group) -> None:
    topic.publish("a", "b")
    member = group.join()
    assert member.commit(2).status_code == 200
    assert code(member.commit(1)) == "offset_behind"
    beyond = member.commit(3)
    assert (beyond.status_code, code(beyond)) == (409, "refused")
    assert "outside 0..2" in beyond.json()["detail"]


def test_commit_without_membership_counts_where_nobody_reads(topic: Topic, group: Group) -> None:
    topic.publish("a")
    position = {"topic": topic.name, "partition": 0, "offset": 1}
    url = f"{group.url}/offsets"
    assert group.http.post(url, json={"offsets": [position]}).status_code == 200
    assert code(group.http.post(url, json={"offsets": [position], "generation": 1})) == "invalid"
    assert code(group.http.post(url, json={"offsets": [position, position]})) == "invalid"
    member = group.join()
    assert member.values() == []
    assert code(group.http.post(url, json={"offsets": [position]})) == "in_use"


def test_reset_moves_a_group_that_nobody_reads_with(topic: Topic, group: Group) -> None:
    topic.publish("a", "b", "c")
    member = group.join()
    member.commit(3)
    group.http.delete(member.url)
    for body, offset in (
        ({"to": "first"}, 0),
        ({"to": "last"}, 2),
        ({"to": "next"}, 3),
        ({"offset": 1}, 1),
        ({"timestamp": "0"}, 0),
        ({"timestamp": "2100-01-01T00:00:00Z"}, 3),
    ):
        answer = group.reset(partition=0, **body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["offsets"][0]["offset"] == offset
    group.reset(to="first")
    assert group.join().values() == ["a", "b", "c"]


def test_reset_of_what_members_hold_needs_force_and_fences_them(topic: Topic, group: Group) -> None:
    topic.publish("a", "b")
    member = group.join()
    member.poll()
    member.commit(2)
    refused = group.reset(to="first")
    assert (refused.status_code, code(refused)) == (409, "in_use")
    tried = group.reset(to="first", dry_run=True)
    assert tried.json()["offsets"][0] == {"topic": topic.name, "partition": 0, "was": 2, "offset": 0}
    assert group.described()["partitions"][0]["committed"] == 2
    assert group.reset(to="first", force=True).status_code == 200
    assert code(member.commit(2)) == "fenced"
    assert member.values() == ["a", "b"]
    assert member.commit(1).status_code == 200


def test_reset_says_one_way_to_go_on(group: Group) -> None:
    assert code(group.reset()) == "invalid"
    assert code(group.reset(to="first", offset=0)) == "invalid"
    assert code(group.reset(timestamp="yesterday")) == "invalid"


def test_group_is_described_with_members_and_lag(topic: Topic, group: Group) -> None:
    topic.publish("a", "b")
    member = group.join(name="worker-1")
    member.commit(1)
    found = group.described()
    assert (found["state"], found["member_count"], found["lag"]) == ("stable", 1, 1)
    (shown,) = found["members"]
    assert (shown["member_id"], shown["name"], shown["user"]) == (member.id, "worker-1", "guest")
    assert shown["partitions"] == [{"topic": topic.name, "partition": number} for number in (0, 1)]
    assert found["partitions"][0] == {
        "topic": topic.name,
        "partition": 0,
        "committed": 1,
        "first_offset": 0,
        "end_offset": 2,
        "lag": 1,
        "lost": 0,
        "member_id": member.id,
    }
    (listed,) = [one for one in group.http.get(GROUPS).json()["groups"] if one["group"] == topic.name]
    assert (listed["lag"], listed["topics"], listed["vhost"]) == (1, [topic.name], "/")
    group.join()
    assert group.described()["state"] == "rebalancing"


def test_lag_is_told_to_prometheus(topic: Topic, group: Group) -> None:
    topic.publish("a", "b", "c")
    group.join().commit(1)
    told = group.http.get("/metrics").text
    assert f'headrace_consumer_group_lag{{group="{topic.name}",topic="{topic.name}",vhost="/"}} 2.0' in told
    assert f'headrace_consumer_group_members{{group="{topic.name}",vhost="/"}} 1.0' in told


# -- what cannot be -------------------------------------------------------------------------------------------------


def test_unknown_group_topic_and_partition_are_told(http: httpx.Client, group: Group) -> None:
    assert code(http.get(f"{GROUPS}/nobody-knows")) == "not_found"
    assert code(http.post(f"{group.url}/members", json={"topics": ["nobody-knows"]})) == "not_found"
    assert code(group.reset(partition=7, to="first")) == "not_found"
    member = group.join()
    assert code(member.commit(0, partition=7)) == "refused"


def test_groups_of_vhosts_are_apart(http: httpx.Client, topic: Topic, group: Group) -> None:
    group.join()
    elsewhere = Group(http, topic.name, f"shop|{topic.name}")
    assert code(http.get(elsewhere.url)) == "not_found"
    answer = http.post(f"{elsewhere.url}/members", json={"topics": [topic.name]})
    assert (answer.status_code, code(answer)) == (422, "invalid")
    assert "is in vhost '/', and the group in 'shop'" in answer.json()["detail"]


def test_who_may_not_read_a_topic_has_no_part_in_its_groups(
    http: httpx.Client, reader: httpx.Client, topic: Topic, group: Group
) -> None:
    member = group.join()
    theirs = Group(reader, topic.name)
    position = {"topic": topic.name, "partition": 0, "offset": 0}
    for answer in (
        reader.post(f"{theirs.url}/members", json={"topics": [topic.name]}),
        reader.post(f"{theirs.url}/offsets", json={"offsets": [position]}),
        theirs.reset(to="first", force=True),
        reader.get(theirs.url),
        reader.get(f"{GROUPS}/shop|x"),
    ):
        assert (answer.status_code, code(answer)) == (403, "forbidden")
    assert topic.name not in [one["group"] for one in reader.get(GROUPS).json()["groups"]]
    assert reader.put(member.url, json={"generation": 0}).status_code == 404


def test_who_may_read_takes_part_but_not_as_somebody_else(http: httpx.Client, reader: httpx.Client, name: str) -> None:
    topic = Topic(http, f"open-{name}", 1)
    topic.publish("a")
    theirs = Group(reader, topic.name).join()
    assert theirs.values() == ["a"]
    mine = Group(http, topic.name)
    answer = http.get(f"{theirs.url}/messages", params={"generation": theirs.generation})
    assert (answer.status_code, code(answer)) == (404, "unknown_member")
    assert mine.described()["members"][0]["user"] == "reader"


@pytest.mark.parametrize("bad", [{"topics": []}, {}, {"topics": ["x"], "session_timeout_ms": 0}, {"topics": "x"}])
def test_join_that_makes_no_sense_is_refused(http: httpx.Client, bad: dict[str, Any]) -> None:
    answer = http.post(f"{GROUPS}/some/members", json=bad)
    assert (answer.status_code, code(answer)) == (422, "invalid")


# -- lasting --------------------------------------------------------------------------------------------------------


def test_member_goes_on_after_a_kill_where_it_has_committed(own_broker: HttpBroker) -> None:
    with own_broker.client() as http:
        topic = Topic(http, "orders", 1)
        topic.publish("a", "b")
        member = Group(http, "orders").join()
        member.poll()
        assert member.commit(1).status_code == 200
    generation = member.generation
    own_broker.restart(kill=True)
    with own_broker.client() as http:
        member.http = member.group.http = http
        assert member.values() == ["b"]
        assert member.generation == generation
        assert code(member.commit(0)) == "offset_behind"
        assert member.commit(2).status_code == 200
        assert member.group.described()["lag"] == 0
