"""`headrace publish`, and what is then read back, byte by byte."""

import base64
import json
from pathlib import Path

import pytest

from headrace.exits import Answered, BrokerAway

from .conftest import Headrace


@pytest.fixture
def topic(headrace: Headrace, name: str) -> str:
    headrace.ok("topics", "create", name)
    return name


def values(headrace: Headrace, topic: str) -> list[str]:
    return [one["value"] for one in headrace.lines("peek", topic, "--count", 100_000)]


def test_values_are_published_in_order(headrace: Headrace, topic: str) -> None:
    assert headrace.ok("publish", topic, "one", "two", "drei ü") == "3 messages published\n"
    assert values(headrace, topic) == ["one", "two", "drei ü"]


def test_time_that_is_none_is_a_usage_error(headrace: Headrace, topic: str) -> None:
    result = headrace("publish", topic, "x", "--at", "noon")
    assert result.exit_code == 2
    assert "'noon' is neither ms since 1970 nor a time of RFC 3339 with its zone" in result.stderr
    assert values(headrace, topic) == []


def test_lines_of_stdin_are_messages(headrace: Headrace, topic: str) -> None:
    assert headrace.ok("publish", topic, input="a\nb\r\n\nlast") == "4 messages published\n"
    assert values(headrace, topic) == ["a", "b", "", "last"]


def test_lines_of_a_file_are_messages_in_many_batches(headrace: Headrace, topic: str, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_text("".join(f"{number}\n" for number in range(2500)))
    results = headrace.lines("publish", topic, "--lines", file)
    assert [len(batch["results"]) for batch in results] == [1000, 1000, 500]
    assert values(headrace, topic) == [str(number) for number in range(2500)]


def test_file_is_one_message_whatever_is_in_it(headrace: Headrace, topic: str, tmp_path: Path) -> None:
    data = bytes(range(256))
    (tmp_path / "body").write_bytes(data)
    headrace.ok("publish", topic, "--file", tmp_path / "body")
    (message,) = headrace.lines("peek", topic)
    assert (message["encoding"], base64.b64decode(message["value"])) == ("base64", data)
    assert f"base64:{base64.b64encode(data).decode()}" in headrace.ok("peek", topic)


def test_key_headers_tags_and_content_type_travel_along(headrace: Headrace, topic: str) -> None:
    options = ("--key", "k", "--header", "a=1", "--header", "b=x=y", "--tag", "eu", "--tag", "vip")
    headrace.ok("publish", topic, "{}", *options, "--content-type", "application/json")
    (message,) = headrace.lines("peek", topic)
    assert (message["key"], message["headers"], sorted(message["tags"])) == ("k", {"a": "1", "b": "x=y"}, ["eu", "vip"])
    assert message["properties"] == {"content_type": "application/json"}
    shown = headrace.ok("peek", topic)
    for text in ("key: k", "headers.b: x=y", "properties.content_type: application/json", "value: {}"):
        assert text in shown


def test_queue_gets_what_is_published_to_it(headrace: Headrace, topic: str) -> None:
    headrace.ok("publish", "exchange:amq.topic", "hello", "--key", "a.b")
    with pytest.raises(Answered, match="no queue"):
        headrace("publish", f"queue:{topic}-none", "x")


def test_numbered_messages_are_published_once_however_often_they_are_sent(headrace: Headrace, topic: str) -> None:
    for _ in range(2):
        headrace.ok("publish", topic, "a", "b", "--producer-id", "me", "--sequence", 10)
    assert values(headrace, topic) == ["a", "b"]


def test_partition_can_be_chosen(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name, "--partitions", 3)
    headrace.ok("publish", name, "x", "--partition", 2)
    assert [one["partition"] for one in headrace.lines("peek", name, "--partition", 2)] == [2]
    assert headrace.lines("peek", name, "--partition", 1) == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [(("v", "--lines", "-"), "not several"), (("v", "--header", "novalue"), "expected NAME=VALUE")],
)
def test_arguments_that_make_no_sense_are_usage_errors(
    headrace: Headrace, topic: str, arguments: tuple[str, ...], told: str
) -> None:
    result = headrace("publish", topic, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_when_the_broker_is_away_it_is_said_how_many_were_confirmed(headrace: Headrace, topic: str) -> None:
    with pytest.raises(BrokerAway) as raised:
        headrace("publish", topic, "x", "--url", "http://127.0.0.1:1")
    assert raised.value.__notes__ == ["0 messages were confirmed before"]


def test_json_answers_where_each_message_is(headrace: Headrace, topic: str) -> None:
    (batch,) = headrace.lines("publish", topic, "a", "b")
    assert json.loads(json.dumps(batch)) == {
        "results": [{"partition": 0, "offset": 0}, {"partition": 0, "offset": 1}],
    }
