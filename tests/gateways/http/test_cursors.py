"""Cursors over HTTP: created once, the same ever after, also after a crash."""

import httpx

from .conftest import HttpBroker
from .test_app import code

CURSORS = "/api/v1/cursors"


def topic(http: httpx.Client, name: str) -> str:
    made = http.post("/api/v1/topics", json={"name": name})
    made.raise_for_status()
    found: str = made.json()["stream"]
    return found


def test_cursor_is_created_once_and_stays_what_it_was(http: httpx.Client, name: str) -> None:
    stream = topic(http, name)
    first = http.put(f"{CURSORS}/{name}", json={"topics": {name: {"offsets": {"0": 50}}}})
    assert first.status_code == 201
    again = http.put(f"{CURSORS}/{name}", json={"topics": {name: {"offsets": {"0": 200}}}})
    assert again.status_code == 200
    assert again.json() == first.json() == http.get(f"{CURSORS}/{name}").json()
    assert first.json()["topics"] == {name: {"id": stream, "offsets": {"0": 50}}}
    assert name in [one["cursor"] for one in http.get(CURSORS).json()["cursors"]]


def test_cursor_survives_a_crash(own_broker: HttpBroker) -> None:
    with own_broker.client() as http:
        topic(http, "t")
        made = http.put(f"{CURSORS}/c", json={"topics": {"t": {"offsets": {"0": 7}}}}).json()
        http.put(f"{CURSORS}/gone", json={"topics": {"t": {"offsets": {"0": 1}}}}).raise_for_status()
        assert http.delete(f"{CURSORS}/gone").status_code == 204
    own_broker.restart(kill=True)
    with own_broker.client() as http:
        assert http.get(f"{CURSORS}/c").json() == made
        assert code(http.get(f"{CURSORS}/gone")) == "not_found"


def test_cursor_on_nothing_or_with_what_is_no_offset_is_refused(http: httpx.Client, name: str) -> None:
    assert code(http.put(f"{CURSORS}/{name}", json={"topics": {name: {"offsets": {"0": 5}}}})) == "not_found"
    topic(http, name)
    for topics in ({}, {name: {"offsets": {"x": 1}}}, {name: {"offsets": {"0": -1}}}, {name: {"offset": {"0": 1}}}):
        assert code(http.put(f"{CURSORS}/{name}", json={"topics": topics})) == "invalid"
    assert code(http.get(f"{CURSORS}/{name}")) == "not_found"
