"""`headrace groups` on a real broker, with a member that joined over HTTP."""

from typing import Any

import pytest

from headrace.client import Client, Login, path
from headrace.exits import Answered

from .conftest import Headrace


@pytest.fixture
def topic(headrace: Headrace, name: str) -> str:
    headrace.ok("topics", "create", name, "--partitions", 2)
    headrace.ok("publish", name, "a", "b", "c", "--partition", 0)
    return name


def ask(headrace: Headrace, method: str, *where: str, body: object = None) -> Any:
    with Client(headrace.url, Login("guest", "guest")) as client:
        return client.request(method, path("consumer-groups", *where), body=body)


def commit(headrace: Headrace, topic: str, offset: int) -> None:
    position = {"topic": topic, "partition": 0, "offset": offset}
    ask(headrace, "POST", topic, "offsets", body={"offsets": [position]})


def test_groups_are_listed_with_their_lag(headrace: Headrace, topic: str) -> None:
    commit(headrace, topic, 1)
    (found,) = [one for one in headrace.json("groups", "list")["groups"] if one["group"] == topic]
    assert (found["lag"], found["state"], found["topics"]) == (2, "empty", [topic])
    shown = headrace.ok("groups", "list")
    for text in ("generation", "members", topic):
        assert text in shown


def test_group_is_described_with_members_and_partitions(headrace: Headrace, topic: str) -> None:
    joined = ask(headrace, "POST", topic, "members", body={"topics": [topic], "name": "worker-1"})
    shown = headrace.ok("groups", "describe", topic)
    for text in (joined["member_id"], "worker-1", f"{topic}/0, {topic}/1", "committed", "stable"):
        assert text in shown
    assert headrace.json("groups", "describe", topic)["lag"] == 3
    with pytest.raises(Answered, match="no consumer group 'nobody'"):
        headrace("groups", "describe", "nobody")


def test_reset_can_be_tried_first_and_then_done(headrace: Headrace, topic: str) -> None:
    commit(headrace, topic, 3)
    where = ("groups", "reset", topic, "--topic", topic, "--partition", 0)
    tried = headrace.ok(*where, "--to", "first", "--dry-run")
    assert "nothing was changed" in tried
    assert headrace.json("groups", "describe", topic)["lag"] == 0
    assert "done; the group is at generation" in headrace.ok(*where, "--to", "first", "--yes")
    assert headrace.json("groups", "describe", topic)["lag"] == 3
    for option, offset in ((("--offset", 1), 1), (("--to", "last"), 2), (("--time", "2100-01-01T00:00:00Z"), 3)):
        answer = headrace.json(*where, *option, "--yes")
        assert answer["offsets"] == [
            {"topic": topic, "partition": 0, "was": answer["offsets"][0]["was"], "offset": offset}
        ]


def test_reset_of_a_group_with_members_needs_force(headrace: Headrace, topic: str) -> None:
    ask(headrace, "POST", topic, "members", body={"topics": [topic]})
    assert "nothing was changed" in headrace.ok("groups", "reset", topic, "--topic", topic, "--to", "next", "--dry-run")
    with pytest.raises(Answered, match=r"members of the group hold partitions \[0, 1\]"):
        headrace("groups", "reset", topic, "--topic", topic, "--to", "next", "--yes")
    headrace.ok("groups", "reset", topic, "--topic", topic, "--to", "next", "--yes", "--force")
    assert headrace.json("groups", "describe", topic)["lag"] == 0


def test_reset_wants_to_know_where_to(headrace: Headrace, topic: str) -> None:
    for options in ((), ("--to", "first", "--offset", "1")):
        result = headrace("groups", "reset", topic, "--topic", topic, *options)
        assert result.exit_code == 2
        assert "say where to go on" in result.stderr


def test_reset_asks_first(headrace: Headrace, topic: str) -> None:
    commit(headrace, topic, 3)
    result = headrace("groups", "reset", topic, "--topic", topic, "--to", "first")
    assert result.exit_code == 2
    assert "say --yes" in result.stderr
    assert headrace.json("groups", "describe", topic)["lag"] == 0


def test_retry_policy_is_set_shown_and_taken_away(headrace: Headrace, topic: str) -> None:
    policy = ("--retry-max", 3, "--retry-delay", "500ms", "--retry-jitter")
    assert "retry: 3 times, exponential from 500 ms to 3600000 ms, with jitter" in headrace.ok(
        "groups", "configure", topic, *policy
    )
    assert "3 times, exponential" in headrace.ok("groups", "describe", topic)
    assert headrace.json("groups", "describe", topic)["settings"]["retry_max"] == 3
    assert headrace.json("groups", "configure", topic, "--no-retry")["retry_max"] is None
    assert headrace("groups", "configure", topic).exit_code == 2
    assert headrace("groups", "configure", topic, "--retry-max", 1, "--no-retry").exit_code == 2


def test_what_waits_for_a_group_is_listed_and_goes_with_it(headrace: Headrace, topic: str) -> None:
    headrace.ok("groups", "configure", topic, "--retry-max", 1, "--retry-backoff", "fixed", "--retry-delay", "1h")
    joined = ask(headrace, "POST", topic, "members", body={"topics": [topic]})
    position = {"topic": topic, "partition": 0}
    body = {"offsets": [position | {"offset": 3}], "failed": [position | {"offset": 1, "reason": "timeout"}]}
    who = {"member_id": joined["member_id"], "generation": joined["generation"]}
    ask(headrace, "POST", topic, "offsets", body=body | who)
    while headrace.json("groups", "describe", topic)["waiting"] == 0:
        pass
    assert topic in headrace.ok("delayed", "list", "--group", topic)
    with pytest.raises(Answered, match="members"):
        headrace("groups", "delete", topic, "--yes")
    ask(headrace, "DELETE", topic, "members", joined["member_id"])
    assert "is deleted" in headrace.ok("groups", "delete", topic, "--yes")
    with pytest.raises(Answered, match="no consumer group"):
        headrace("groups", "describe", topic)
