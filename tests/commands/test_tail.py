"""`headrace tail` and `headrace peek`: where reading begins, what is shown, how it ends."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from headrace.exits import Answered

from .conftest import Headrace


@pytest.fixture
def topic(headrace: Headrace, name: str) -> str:
    headrace.ok("topics", "create", name, "--partitions", 2)
    for partition in (0, 1):
        headrace.ok("publish", name, *(f"{partition}{letter}" for letter in "abc"), "--partition", partition)
    return name


def values(headrace: Headrace, *arguments: object) -> list[str]:
    return [one["value"] for one in headrace.lines(*arguments)]


def test_peek_begins_where_it_is_told_to(headrace: Headrace, topic: str) -> None:
    assert values(headrace, "peek", topic) == ["0a"]
    assert values(headrace, "peek", topic, "--count", 9) == ["0a", "0b", "0c", "1a", "1b", "1c"]
    assert values(headrace, "peek", topic, "--partition", 1, "--from", 1, "--count", 9) == ["1b", "1c"]
    assert values(headrace, "peek", topic, "--from=-1", "--count", 9) == ["0c", "1c"]
    assert values(headrace, "peek", topic, "--since", "2100-01-01T00:00:00Z", "--count", 9) == []
    assert values(headrace, "peek", topic, "--since", "0", "--count", 2) == ["0a", "0b"]


def test_filter_lets_through_what_matches(headrace: Headrace, topic: str) -> None:
    headrace.ok("publish", topic, "tagged", "--tag", "eu", "--partition", 0)
    assert values(headrace, "peek", topic, "--filter", "eu && !us", "--count", 9) == ["tagged"]
    with pytest.raises(Answered, match="column 6"):
        headrace("peek", topic, "--filter", "eu &&")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--from", "somewhere"), "expected first, next"),
        (("--from", "first", "--since", "0"), "cannot both be given"),
        (("--partition", "7"), "has 2 partitions"),
    ],
)
def test_place_that_makes_no_sense_is_a_usage_error(
    headrace: Headrace, topic: str, arguments: tuple[str, ...], told: str
) -> None:
    result = headrace("tail", topic, *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_tail_with_a_limit_ends_by_itself(headrace: Headrace, topic: str) -> None:
    assert values(headrace, "tail", topic, "--from", "first", "--limit", 5) == ["0a", "0b", "0c", "1a", "1b"]
    line, _ = headrace.ok("tail", topic, "--from", "first", "--limit", 2).splitlines()
    assert line.startswith(f"{topic}/0@0  20")
    assert line.endswith("Z  0a")


def test_tail_follows_until_it_is_interrupted(headrace: Headrace, topic: str) -> None:
    command = [sys.executable, "-m", "headrace", "tail", topic, "--url", headrace.url, "--json", "--from=-1"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    with ExitStack() as stack:
        # Where the suite runs in the background of a shell, SIGINT is ignored, and so it would be by the command.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        stack.callback(signal.signal, signal.SIGINT, before)
        process = stack.enter_context(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stderr is not None

        def next_value() -> str:
            return str(json.loads(process.stdout.readline())["value"])  # type: ignore[union-attr]

        assert [next_value(), next_value()] == ["0c", "1c"]
        for partition in (1, 0, 1):
            headrace.ok("publish", topic, f"late{partition}", "--partition", partition)
            assert next_value() == f"late{partition}"
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""


def test_control_characters_of_messages_reach_no_terminal(headrace: Headrace, name: str) -> None:
    headrace.ok("topics", "create", name)
    headrace.ok("publish", name, "a\x1b[2Jb", "--key", "k\x07", "--header", "h\x1b=v\x1b", "--tag", "t")
    for command in (("peek", name), ("tail", name, "--from", "first", "--limit", 1)):
        shown = headrace.ok(*command)
        assert "\x1b[2J" not in shown
        assert "a\\x1b[2Jb" in shown
