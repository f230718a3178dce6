"""Answers of several leaders, put together as one of a node alone would be."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.http.gathering import (
    is_by_id,
    is_list_of_all,
    limit_of,
    merged,
    merged_events,
    split_cursor,
)


@pytest.mark.parametrize(
    ("method", "path", "query", "is_list", "by_id"),
    [
        ("GET", "queues", b"", True, False),
        ("GET", "queues", b"limit=3", True, False),
        ("GET", "queues", b"vhost=shop", False, False),
        ("POST", "topics", b"", False, False),
        ("GET", "queues/q", b"", False, False),
        ("GET", "bindings", b"", False, False),
        ("DELETE", "redrives/7", b"", False, True),
        ("GET", "redrives", b"", True, False),
        ("GET", "delayed/messages", b"name=x", False, False),
        ("PUT", "delayed/messages/7", b"", False, True),
        ("POST", "stages/commit", b"", False, True),
        ("GET", "queues", b"\xff", True, False),
    ],
)
def test_which_requests_are_about_all(method: str, path: str, query: bytes, is_list: bool, by_id: bool) -> None:
    words = path.split("/")
    assert (is_list_of_all(method, words, query), is_by_id(words, query)) == (is_list, by_id)


def test_how_many_are_wanted() -> None:
    assert limit_of("queues", b"limit=7") == 7
    assert limit_of("queues", b"") == 1000
    assert limit_of("cursors", b"") is None
    assert limit_of("queues", b"limit=-1") == 1000


def test_lists_are_in_the_order_of_each_and_cut_at_the_limit() -> None:
    def queue(name: str, vhost: str = "/") -> dict[str, Any]:
        return {"name": name, "vhost": vhost}

    one = {"queues": [queue("b"), queue("c")], "more": True}
    two = {"queues": [queue("a", "shop"), queue("z", "shop")], "more": False}
    assert [found["name"] for found in merged("queues", [one, two], 3)["queues"]] == ["b", "c", "a"]
    assert merged("queues", [one, two], 3)["more"]
    assert merged("queues", [one | {"more": False}, two], 4)["more"] is False


def test_counts_are_added_up_and_the_newest_come_first() -> None:
    stages = merged("stages", [{"stages": [{"created_at": "2"}], "total": 4}, {"stages": [], "total": 3}], 100)
    assert stages == {"stages": [{"created_at": "2"}], "total": 7}
    redrives = [{"redrives": [{"started_at": time}], "earlier": []} for time in ("1", "2")]
    assert [one["started_at"] for one in merged("redrives", redrives, None)["redrives"]] == ["2", "1"]


@given(
    st.lists(st.lists(st.integers(0, 9), max_size=8), min_size=2, max_size=3),
    st.integers(1, 4),
    st.integers(1, 3),
)
def test_pages_of_the_audit_have_each_event_once_in_the_order_of_its_leader(
    times: list[list[int]], limit: int, window: int
) -> None:
    """Whatever the leaders' clocks did. A leader may answer with fewer than were asked for."""
    logs = [[{"id": offset, "time": str(time)} for offset, time in enumerate(one)] for one in times]

    def page(log: list[dict[str, Any]], before: int | None) -> dict[str, Any]:
        there = [one for one in reversed(log) if before is None or one["id"] < before][: min(limit, window)]
        is_last = not there or there[-1]["id"] == 0
        return {"events": there, "cursor": None if is_last else there[-1]["id"]}

    seen: list[dict[str, Any]] = []
    cursor: int | None = None
    for _ in range(100):
        asked = split_cursor(cursor, len(logs))
        pages = [None if one == 0 else page(log, one) for log, one in zip(logs, asked, strict=True)]
        found = merged_events(pages, asked, limit)
        assert len(found["events"]) <= limit
        seen += found["events"]
        cursor = found["cursor"]
        if cursor is None:
            break
    for log in logs:
        ids = [one["id"] for one in seen if any(one is other for other in log)]
        assert ids == sorted(range(len(log)), reverse=True)
