"""Topics over HTTP: created, described, configured, grown, deleted, listed; and who may."""

from collections.abc import Iterator

import httpx
import pytest

from .conftest import HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "reader"
password = "reading"

[[permissions]]
user = "reader"
vhost = "/"
configure = "^mine"
write = "^mine"
read = "^(mine|public)"

[[vhosts]]
name = "two"

[[permissions]]
user = "guest"
vhost = "two"
configure = ".*"
write = ".*"
read = ".*"
"""
TOPICS = "/api/v1/topics"


@pytest.fixture
def reader(broker: HttpBroker) -> Iterator[httpx.Client]:
    with broker.client(("reader", "reading")) as client:
        yield client


def test_topic_is_created_described_and_deleted(http: httpx.Client, name: str) -> None:
    made = http.post(TOPICS, json={"name": name, "partitions": 3, "retention_ms": 5000, "durability": "interval"})
    assert made.status_code == 201
    described = http.get(f"{TOPICS}/{name}").json()
    assert made.json() == described
    assert described["partitions"] == 3
    assert described["kind"] == "topic"
    assert described["topic"] == name
    assert described["settings"] == {
        "durability": "interval",
        "compression": "auto",
        "retention_ms": 5000,
        "retention_bytes": None,
    }
    nothing = {"first_offset": 0, "end_offset": 0, "byte_count": 0}
    assert described["partition_list"] == [{"partition": number} | nothing for number in range(3)]
    assert http.delete(f"{TOPICS}/{name}").status_code == 204
    assert code(http.get(f"{TOPICS}/{name}")) == "not_found"
    assert code(http.delete(f"{TOPICS}/{name}")) == "not_found"


def test_topic_that_exists_is_a_conflict(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name})
    answer = http.post(TOPICS, json={"name": name})
    assert (answer.status_code, code(answer)) == (409, "already_exists")


def test_settings_that_are_left_out_stay_and_null_gives_back_the_default(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "retention_ms": 5000, "retention_bytes": 70_000})
    changed = http.patch(f"{TOPICS}/{name}", json={"retention_bytes": 80_000}).json()["settings"]
    assert (changed["retention_ms"], changed["retention_bytes"]) == (5000, 80_000)
    changed = http.patch(f"{TOPICS}/{name}", json={"retention_ms": None}).json()["settings"]
    assert (changed["retention_ms"], changed["retention_bytes"]) == (7 * 24 * 3_600_000, 80_000)


def test_topic_grows_and_does_not_shrink(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "partitions": 2})
    assert http.patch(f"{TOPICS}/{name}", json={"partitions": 4}).json()["partitions"] == 4
    answer = http.patch(f"{TOPICS}/{name}", json={"partitions": 3})
    assert (answer.status_code, code(answer)) == (422, "invalid")
    assert http.get(f"{TOPICS}/{name}").json()["partitions"] == 4


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"name": ""},
        {"name": "x" * 256},
        {"name": "a|b"},
        {"name": "queue:a"},
        {"name": "a.dlq"},
        {"name": 5},
        {"name": "a", "partitions": 0},
        {"name": "a", "partitions": 100_000},
        {"name": "a", "durability": "never"},
        {"name": "a", "retention_ms": -1},
        {"name": "a", "misspelt": 1},
        [],
    ],
)
def test_topic_that_cannot_be_is_refused_with_the_reason(http: httpx.Client, body: object) -> None:
    answer = http.post(TOPICS, json=body)
    assert (answer.status_code, code(answer)) in {(422, "invalid"), (400, "malformed")}
    assert answer.json()["detail"]


def test_vhost_that_is_not_there_is_refused_as_one_that_may_not_be_entered(http: httpx.Client) -> None:
    assert code(http.post(TOPICS, json={"name": "a", "vhost": "nowhere"})) == "forbidden"
    assert code(http.get(f"{TOPICS}/nowhere%7Ca")) == "forbidden"


def test_body_that_is_no_json_is_400_and_one_that_is_a_form_415(http: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    assert code(http.post(TOPICS, content=b"{", headers=headers)) == "malformed"
    deep = b'{"name": "a", "x": ' + b"[" * 100_000
    assert code(http.post(TOPICS, content=deep, headers=headers)) in ("malformed", "invalid")
    assert code(http.post(TOPICS, content=b'{"name": "\\ud800"}', headers=headers)) in ("malformed", "invalid")
    assert code(http.post(TOPICS, data={"name": "a"})) == "unsupported_media_type"


def test_exchanges_and_queues_are_topics_too(broker: HttpBroker, http: httpx.Client, name: str) -> None:
    with broker.connect() as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "fanout")
        channel.queue_declare(name)
        assert http.get(f"{TOPICS}/{name}").json()["topic"] == f"exchange:{name}"
        assert http.get(f"{TOPICS}/queue:{name}").json()["kind"] == "queue"
        assert code(http.patch(f"{TOPICS}/{name}", json={"partitions": 2})) == "not_found"
        assert code(http.delete(f"{TOPICS}/{name}")) == "not_found"


def test_names_of_any_kind_are_found_by_their_encoded_paths(broker: HttpBroker, http: httpx.Client, name: str) -> None:
    for odd in (f"{name}/a/b", f"{name}%2F", f"{name} ü?#", f"{name}/messages"):
        assert http.post(TOPICS, json={"name": odd}).status_code == 201
        path = httpx.URL(f"{broker.url}{TOPICS}/{_quoted(odd)}")
        assert http.get(path).json()["name"] == odd


def _quoted(text: str) -> str:
    return "".join(f"%{octet:02X}" for octet in text.encode())


def test_list_has_all_kinds_in_order_and_goes_on_behind_a_name(http: httpx.Client, name: str) -> None:
    for number in range(5):
        http.post(TOPICS, json={"name": f"{name}-{number}"})
    found: list[str] = []
    after = f"{name}-"
    while True:
        answer = http.get(TOPICS, params={"limit": 2, "kind": "topic", "after": after}).json()
        found += [one["topic"] for one in answer["topics"] if one["topic"].startswith(name)]
        if not answer["more"]:
            break
        after = answer["topics"][-1]["topic"]
    assert found == [f"{name}-{number}" for number in range(5)]
    kinds = {one["kind"] for one in http.get(TOPICS).json()["topics"]}
    assert {"topic", "exchange"} <= kinds


def test_topic_of_another_vhost_is_another(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name, "vhost": "two", "partitions": 2})
    assert http.get(f"{TOPICS}/two%7C{name}").json()["topic"] == f"two|{name}"
    assert code(http.get(f"{TOPICS}/{name}")) == "not_found"
    assert [one["name"] for one in http.get(TOPICS, params={"vhost": "two", "kind": "topic"}).json()["topics"]] == [
        name
    ]


def test_rights_are_those_of_amqp(http: httpx.Client, reader: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": f"public-{name}"})
    http.post(TOPICS, json={"name": f"secret-{name}"})
    assert reader.get(f"{TOPICS}/public-{name}").status_code == 200
    for refused in (
        reader.delete(f"{TOPICS}/public-{name}"),
        reader.patch(f"{TOPICS}/public-{name}", json={}),
        reader.post(TOPICS, json={"name": f"public-{name}-2"}),
        reader.get(f"{TOPICS}/secret-{name}"),
        reader.get(f"{TOPICS}/secret-that-is-not-there"),
        reader.post(TOPICS, json={"name": f"mine-{name}", "vhost": "two"}),
        reader.get(TOPICS, params={"vhost": "two"}),
    ):
        assert (refused.status_code, code(refused)) == (403, "forbidden")
    assert reader.post(TOPICS, json={"name": f"mine-{name}"}).status_code == 201
    listed = [one["name"] for one in reader.get(TOPICS).json()["topics"]]
    assert f"public-{name}" in listed
    assert f"secret-{name}" not in listed


def test_topics_outlive_the_broker(own_broker: HttpBroker) -> None:
    with own_broker.client() as client:
        client.post(TOPICS, json={"name": "kept", "partitions": 2})
    for kill in (False, True):
        own_broker.restart(kill=kill)
        with own_broker.client() as client:
            assert client.get(f"{TOPICS}/kept").json()["partitions"] == 2
