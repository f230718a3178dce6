"""`headrace delayed`, and publishes that are to be delivered later, on a real broker."""

import re
from datetime import UTC, datetime, timedelta

import pytest
from tests.running_broker import RunningBroker

from headrace.exits import Answered

from .conftest import Headrace


@pytest.fixture
def queue(broker: RunningBroker, name: str) -> str:
    connection = broker.connect()
    connection.channel().queue_declare(name, durable=True)
    connection.close()
    return name


def parked(headrace: Headrace, queue: str, *values: str, delay: str = "30d", **more: object) -> None:
    options = [part for name, value in more.items() for part in (f"--{name.replace('_', '-')}", value)]
    headrace.ok("publish", f"queue:{queue}", *values, "--delay", delay, *options)


def pending(headrace: Headrace, key: str) -> list[str]:
    return [one["value"] for one in headrace.lines("delayed", "list", "--key", key)]


def test_delayed_message_is_listed_inspected_and_cancelled(headrace: Headrace, queue: str) -> None:
    parked(headrace, queue, "later", schedule_id=f"{queue}-1")
    assert pending(headrace, queue) == ["later"]
    assert f"{queue}-1" in headrace.ok("delayed", "list", "--exchange", "amq.default")
    shown = headrace.ok("delayed", "inspect", f"{queue}-1")
    for text in ("deliver_at: ", "name: amq.default", f"key: {queue}", "value: later"):
        assert text in shown
    assert headrace.ok("delayed", "cancel", f"{queue}-1", "--yes") == f"message {queue}-1 cancelled\n"
    assert pending(headrace, queue) == []
    with pytest.raises(Answered, match="has been cancelled"):
        headrace("delayed", "cancel", f"{queue}-1", "--yes")


def test_publish_tells_the_ids_of_what_comes_later(headrace: Headrace, queue: str) -> None:
    first, second, last = headrace.ok("publish", f"queue:{queue}", "a", "b", "--delay", "30d").splitlines()
    assert last == "2 messages published"
    for line in (first, second):
        told = re.fullmatch(r"message (\S+) is due at \S+Z", line)
        assert told is not None, line
        headrace.ok("delayed", "cancel", told[1], "--yes")
    assert pending(headrace, queue) == []


def test_pending_messages_are_counted(headrace: Headrace, queue: str) -> None:
    before = headrace.json("delayed", "count")["pending"]
    parked(headrace, queue, "a", "b", "c")
    assert headrace.json("delayed", "count")["pending"] == before + 3
    shown = headrace.ok("delayed", "count")
    for text in ("pending", "bucket", "publish", "amq.default"):
        assert text in shown


def test_more_than_a_page_is_listed_in_the_order_of_due_times(headrace: Headrace, queue: str) -> None:
    parked(headrace, queue, "last", delay="2d")
    parked(headrace, queue, *(str(number) for number in range(600)), delay="1d")
    listed = [one["value"] for one in headrace.lines("delayed", "list", "--key", queue, "--limit", 10_000)]
    assert len(listed) == 601
    assert listed[-1] == "last"
    assert len(headrace.lines("delayed", "list", "--key", queue, "--limit", 7)) == 7


def test_rescheduled_to_now_it_is_delivered(headrace: Headrace, queue: str) -> None:
    parked(headrace, queue, "soon", schedule_id=f"{queue}-2")
    next_year = (datetime.now(UTC) + timedelta(days=365)).isoformat(timespec="seconds")
    told = headrace.ok("delayed", "reschedule", f"{queue}-2", "--at", next_year)
    assert told.startswith(f"message {queue}-2 is due at {next_year[:19]}")
    headrace.ok("delayed", "reschedule", f"{queue}-2", "--delay", "0s")
    headrace.ok("tail", f"queue:{queue}", "--from", "first", "--limit", 1)
    with pytest.raises(Answered, match="has been delivered"):
        headrace("delayed", "cancel", f"{queue}-2", "--yes")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("reschedule", "x"), "say when"),
        (("reschedule", "x", "--delay", "1s", "--at", "0"), "say when"),
        (("reschedule", "x", "--delay", "soon"), "--delay"),
        (("reschedule", "x", "--at", "tomorrow"), "RFC 3339"),
        (("reschedule", "x", "--at", "2999-01-01T00:00:00"), "with its zone"),
        (("list", "--until", "soon"), "RFC 3339"),
        (("list", "--since", "soon"), "RFC 3339"),
        (("list", "--exchange", "a", "--queue", "b"), "only one of --exchange, --queue and --group"),
        (("cancel", "x"), "say --yes"),
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors(
    headrace: Headrace, arguments: tuple[str, ...], told: str
) -> None:
    result = headrace("delayed", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_time_beyond_ten_years_is_refused(headrace: Headrace, queue: str) -> None:
    with pytest.raises(Answered):
        headrace("publish", f"queue:{queue}", "x", "--at", "2999-01-01T00:00:00Z")
    assert pending(headrace, queue) == []
