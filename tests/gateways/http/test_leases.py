"""Read leases over HTTP: retention waits for who is at work, for as long as they come on."""

import time
from pathlib import Path

import httpx

from .conftest import PATIENCE_S, HttpBroker
from .test_app import code

TOPICS = "/api/v1/topics"
# A broker whose retention takes what is older than this.
AGE_MS = 1000


def put(http: httpx.Client, topic: str, lease: str, offset: int, ttl_ms: int = 60_000) -> httpx.Response:
    return http.put(f"{TOPICS}/{topic}/leases/{lease}", json={"offsets": {"0": offset}, "ttl_ms": ttl_ms})


def first_offset(http: httpx.Client, topic: str) -> int:
    found: int = http.get(f"{TOPICS}/{topic}").json()["partition_list"][0]["first_offset"]
    return found


def aging(http: httpx.Client, name: str) -> None:
    """A topic whose records are due for retention."""
    http.post(TOPICS, json={"name": name, "retention_ms": AGE_MS}).raise_for_status()
    for number in range(3):
        http.post(f"{TOPICS}/{name}/messages", json={"value": f"{number}"}).raise_for_status()


def wait_removed(http: httpx.Client, name: str, upto: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while first_offset(http, name) < upto:
        assert time.monotonic() < deadline, "retention takes nothing"
        time.sleep(0.05)


def test_lease_is_taken_renewed_shown_and_given_back(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name}).raise_for_status()
    http.post(f"{TOPICS}/{name}/messages", json={"value": "v"}).raise_for_status()
    taken = put(http, name, "q", 0)
    assert taken.status_code == 201
    (held,) = taken.json()["partitions"]
    assert (held["partition"], held["offset"], held["overdue"]) == (0, 0, False)
    same = put(http, name, "q", 0)
    assert same.status_code == 200
    # It has not moved: renewing it does not begin its time anew.
    assert same.json()["partitions"][0]["since"] == held["since"]
    moved = put(http, name, "q", 1).json()["partitions"][0]
    assert moved["offset"] == 1 and moved["since"] > held["since"]
    assert [one["lease"] for one in http.get(f"{TOPICS}/{name}/leases").json()["leases"]] == ["q"]
    assert http.delete(f"{TOPICS}/{name}/leases/q").status_code == 204
    assert code(http.delete(f"{TOPICS}/{name}/leases/q")) == "not_found"
    assert http.get(f"{TOPICS}/{name}/leases").json()["leases"] == []


def test_lease_on_what_is_not_there_is_refused(http: httpx.Client, name: str) -> None:
    http.post(TOPICS, json={"name": name}).raise_for_status()
    assert code(put(http, name, "q", 1)) == "invalid_parameter"
    assert code(put(http, f"{name}-other", "q", 0)) == "not_found"
    other = http.put(f"{TOPICS}/{name}/leases/q", json={"offsets": {"3": 0}})
    assert code(other) == "not_found"


def test_retention_waits_for_a_lease_and_not_for_ever(tmp_path: Path) -> None:
    with HttpBroker(tmp_path, config="[leases]\nhold_s_max = 4\n") as broker, broker.client() as http:
        for name in ("returned", "expiring", "stuck"):
            aging(http, name)
            assert put(http, name, "q", 1, ttl_ms=4000 if name == "expiring" else 60_000).status_code == 201
        # Another topic tells when retention has been at work.
        aging(http, "taken")
        wait_removed(http, "taken", 3)
        assert [first_offset(http, name) for name in ("returned", "expiring", "stuck")] == [0, 0, 0]
        http.delete(f"{TOPICS}/returned/leases/q").raise_for_status()
        for name in ("returned", "expiring", "stuck"):
            wait_removed(http, name, 3)
        # The one that does not move is still there, and says that nobody waits for it.
        (lease,) = http.get(f"{TOPICS}/stuck/leases").json()["leases"]
        assert lease["partitions"][0]["overdue"]


def test_lease_survives_a_crash(tmp_path: Path) -> None:
    with HttpBroker(tmp_path) as broker:
        with broker.client() as http:
            aging(http, "kept")
            put(http, "kept", "q", 0).raise_for_status()
        broker.restart(kill=True)
        with broker.client() as http:
            aging(http, "taken")
            wait_removed(http, "taken", 3)
            assert first_offset(http, "kept") == 0
            assert [one["lease"] for one in http.get(f"{TOPICS}/kept/leases").json()["leases"]] == ["q"]
