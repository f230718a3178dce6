"""The audit over HTTP: who sees it, and that it pages from the newest back."""

from typing import Any

import httpx

from .conftest import HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "plain"
password = "plainly"

[[users]]
name = "watcher"
password = "watching"
tags = ["monitoring"]
"""
AUDIT = "/api/v1/audit"


def reset(http: httpx.Client, name: str, offset: int) -> None:
    body = {"topic": name, "offset": offset}
    http.put(f"/api/v1/consumer-groups/{name}/offsets", json=body).raise_for_status()


def events(http: httpx.Client, **query: Any) -> dict[str, Any]:
    answer = http.get(AUDIT, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_was_done_is_told_the_newest_first_page_by_page(http: httpx.Client, name: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    http.post(f"/api/v1/topics/{name}/messages", json=[{"value": "a"}, {"value": "b"}]).raise_for_status()
    for offset in (0, 1, 2):
        reset(http, name, offset)
    page = events(http, limit=2)
    assert [one["about"]["offsets"][0]["now"] for one in page["events"]] == [2, 1]
    newest = page["events"][0]
    assert (newest["kind"], newest["user"], newest["about"]["group"]) == ("group-reset", "guest", name)
    assert newest["time"].startswith("20")
    rest = events(http, limit=2, after=page["cursor"])
    assert (rest["events"][0]["about"]["offsets"][0]["now"], rest["cursor"]) == (0, None)


def test_a_kind_is_picked_out(http: httpx.Client, name: str) -> None:
    http.post("/api/v1/topics", json={"name": name}).raise_for_status()
    reset(http, name, 0)
    assert {one["kind"] for one in events(http, kind="group-reset")["events"]} == {"group-reset"}
    assert events(http, kind="nothing") == {"events": [], "cursor": None}


def test_it_is_for_those_who_watch(broker: HttpBroker) -> None:
    with broker.client(("watcher", "watching")) as watcher, broker.client(("plain", "plainly")) as plain:
        assert watcher.get(AUDIT).status_code == 200
        assert code(plain.get(AUDIT)) == "forbidden"


def test_what_is_no_number_is_refused(http: httpx.Client) -> None:
    for query in ({"after": "-1"}, {"after": "x"}, {"limit": "0"}, {"limit": "1001"}):
        assert code(http.get(AUDIT, params=query)) == "invalid_parameter"
