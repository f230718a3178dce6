"""Stages over HTTP: checked and authorised as a publish, committed once over kills of the broker."""

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pika
import pytest
from interop.ports import free_ports
from tests.gateways.http.conftest import HttpBroker
from tests.running_broker import RunningBroker

CONFIG = """
[[users]]
name = "other"
password = "may write to one exchange"
[[permissions]]
user = "other"
configure = ""
write = "^(amq.topic|mine)$"
read = ""
[[topic_permissions]]
user = "other"
exchange = "amq.topic"
write = "^own[.]"
read = ""
"""
STAGES = "/api/v1/stages"


def stage(http: httpx.Client, topic: str, *values: str, query: str, batch: int = 0, **more: Any) -> httpx.Response:
    messages = [{"value": value, **more} for value in values]
    return http.post(f"/api/v1/topics/{topic}/stages", json={"query": query, "batch": batch, "messages": messages})


def commit(http: httpx.Client, *stages: httpx.Response, query: str, batch: int = 0) -> httpx.Response:
    ids = [one.raise_for_status().json()["id"] for one in stages]
    return http.post(f"{STAGES}/commit", json={"query": query, "batch": batch, "stages": ids})


def values(http: httpx.Client, topic: str, partition: int = 0) -> list[str]:
    found = http.get(f"/api/v1/topics/{topic}/partitions/{partition}/messages", params={"offset": 0, "limit": 1000})
    return [one["value"] for one in found.raise_for_status().json()["messages"]]


def test_batch_is_published_by_its_commit_and_once(http: httpx.Client, name: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    first = stage(http, name, "a", "b", query=name, tags=["eu"], headers={"h": "1"}, key="k")
    assert first.status_code == 201
    assert (first.json()["messages"], first.json()["topic"]) == (2, name)
    assert values(http, name) == []
    listed = http.get(STAGES, params={"query": name}).json()
    assert [one["id"] for one in listed["stages"]] == [first.json()["id"]]
    assert commit(http, first, query=name).json() == {"query": name, "batch": 0, "messages": 2, "repeated": False}
    again = commit(http, stage(http, name, "b", "a", query=name), query=name).json()
    assert (again["messages"], again["repeated"]) == (0, True)
    assert values(http, name) == ["a", "b"]
    assert http.get(f"{STAGES}/queries/{name}").json()["last_batch"] == 0


def test_exchanges_and_queues_get_what_amqp_clients_read(http: httpx.Client, broker: HttpBroker, name: str) -> None:
    channel = broker.connect().channel()
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, "amq.direct", name)
    staged = [
        stage(http, f"queue:{name}", "one", query=name, headers={"a": 1}),
        stage(http, "exchange:amq.direct", "two", query=name, key=name, tags=["eu"]),
    ]
    assert channel.basic_get(name) == (None, None, None)
    assert commit(http, *staged, query=name).json()["messages"] == 2
    got = [channel.basic_get(name, auto_ack=True) for _ in range(2)]
    assert sorted(body for _, _, body in got) == [b"one", b"two"]
    properties = {body: found for _, found, body in got}
    assert isinstance(properties[b"one"], pika.BasicProperties)
    assert properties[b"one"].headers == {"a": 1}


def test_delayed_messages_are_listed_once_they_are_committed(http: httpx.Client, broker: HttpBroker, name: str) -> None:
    broker.connect().channel().queue_declare(name, durable=True)
    staged = stage(http, f"queue:{name}", "later", query=name, delay_ms=3_600_000, schedule_id=name)
    assert http.get(f"/api/v1/delayed/messages/{name}").status_code == 404
    assert commit(http, staged, query=name).json()["messages"] == 1
    assert http.get(f"/api/v1/delayed/messages/{name}").status_code == 200


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ({"producer_id": "p", "sequence": 1}, "numbers of their own"),
        ({"partition": 7}, "no partition 7"),
        ({"encoding": "base64", "value": "?"}, "base64"),
        ({"headers": {"a": 1}}, "must be text"),
    ],
)
def test_unlawful_message_stages_nothing(http: httpx.Client, name: str, message: dict[str, Any], told: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    body = {"query": name, "batch": 0, "messages": [{"value": "fine"}, {"value": "x"} | message]}
    refused = http.post(f"/api/v1/topics/{name}/stages", json=body)
    assert refused.status_code in (404, 422)
    assert told in refused.json()["detail"]
    assert refused.json()["index"] == 1
    assert http.get(STAGES, params={"query": name}).json()["total"] == 0


def test_what_is_not_there_is_told(http: httpx.Client, name: str) -> None:
    assert stage(http, name, "a", query=name).status_code == 404
    unknown = {"query": name, "batch": 0, "stages": ["00000000-0000-4000-8000-000000000000"]}
    refused = http.post(f"{STAGES}/commit", json=unknown)
    assert (refused.status_code, refused.json()["code"]) == (404, "not_found")
    assert http.get(f"{STAGES}/queries/{name}").status_code == 404
    assert http.post(f"{STAGES}/abort", json={"stages": unknown["stages"]}).json() == {"aborted": 0}


def test_staging_needs_the_rights_of_a_publish_and_stages_are_their_users_own(
    http: httpx.Client, broker: HttpBroker, name: str
) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    with broker.client(("other", "may write to one exchange")) as other:
        assert stage(other, name, "a", query=name).status_code == 403
        assert stage(other, "exchange:amq.topic", "a", query=name, key="others.key").status_code == 403
        theirs = stage(other, "exchange:amq.topic", "a", query=name, key="own.key")
        assert theirs.status_code == 201
        assert commit(http, theirs, query=name).status_code == 404
        mine = stage(http, name, "a", query=name)
        assert commit(other, mine, query=name).status_code == 404
        abort = other.post(f"{STAGES}/abort", json={"stages": [mine.json()["id"]]})
        assert abort.json() == {"aborted": 0}
        # Neither spends the other's batches.
        assert commit(other, theirs, query=name, batch=0).json()["messages"] == 1
        assert commit(http, mine, query=name).json()["messages"] == 1


def test_full_queue_refuses_the_commit_with_its_code(http: httpx.Client, broker: HttpBroker, name: str) -> None:
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish"}
    broker.connect().channel().queue_declare(name, durable=True, arguments=arguments)
    refused = commit(http, stage(http, f"queue:{name}", "a", "b", query=name), query=name)
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")


def test_forgetting_a_query_is_audited(http: httpx.Client, name: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    commit(http, stage(http, name, "a", query=name), query=name).raise_for_status()
    assert http.delete(f"{STAGES}/queries/{name}").status_code == 204
    assert commit(http, stage(http, name, "a", query=name), query=name).json()["messages"] == 1
    assert values(http, name) == ["a", "a"]
    events = http.get("/api/v1/audit", params={"kind": "query-forgotten"}).json()["events"]
    assert events[0]["about"] == {"query": name, "last_batch": 0}


def test_metrics_tell_of_stages(http: httpx.Client, name: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    stage(http, name, "a", query=name).raise_for_status()
    told = http.get("/metrics").text
    assert 'headrace_staging_commits_total{outcome="repeated"}' in told
    assert "headrace_staged_bytes " in told


class Fixed(RunningBroker):
    """Its HTTP door is where it was before."""

    def __init__(self, folder: Path) -> None:
        (self.http_port,) = free_ports(1)
        # The last batch in whose commit it was killed.
        self.killed_in = 0
        super().__init__(folder, arguments=["--http", f"127.0.0.1:{self.http_port}"])

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"http://127.0.0.1:{self.http_port}", auth=("guest", "guest"), timeout=30)


@pytest.fixture
def killed(tmp_path: Path) -> Iterator[Fixed]:
    with Fixed(tmp_path) as running:
        yield running


def test_killed_broker_publishes_each_batch_once(killed: Fixed) -> None:
    """The driver brings its batch again whenever it does not know how the commit ended."""
    rows, batches = 400, 6
    with killed.client() as http:
        http.post("/api/v1/topics", json={"name": "t", "partitions": 2}).raise_for_status()
    done = 0
    for batch in range(batches):
        while done == batch:
            try:
                with killed.client() as http:
                    brought = [f"{batch}-{row}" for row in range(rows)]
                    half = rows // 2
                    parts = [
                        stage(http, "t", *part, query="q", batch=batch) for part in (brought[:half], brought[half:])
                    ]
                    if batch % 2 and killed.killed_in < batch:
                        # In the middle of the commit, as near as a thread comes to it.
                        killer = threading.Timer(0.002 * batch, killed.kill)
                        killer.start()
                        killed.killed_in = batch
                        try:
                            commit(http, *parts, query="q", batch=batch).raise_for_status()
                        finally:
                            killer.join()
                            killed.start()
                    else:
                        commit(http, *parts, query="q", batch=batch).raise_for_status()
                    done += 1
            except httpx.HTTPError:
                continue
    with killed.client() as http:
        http.post(f"{STAGES}/commit", json={"query": "q", "batch": batches, "stages": []}).raise_for_status()
        found = Counter(value for partition in range(2) for value in _all(http, partition))
    assert found == Counter(f"{batch}-{row}" for batch in range(batches) for row in range(rows))


def _all(http: httpx.Client, partition: int) -> Iterator[str]:
    offset = 0
    while True:
        path = f"/api/v1/topics/t/partitions/{partition}/messages"
        page = http.get(path, params={"offset": offset, "limit": 1000}).raise_for_status().json()["messages"]
        if not page:
            return
        yield from (one["value"] for one in page)
        offset = page[-1]["offset"] + 1
