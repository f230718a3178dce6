"""`headrace schedules` on a real broker."""

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


def test_schedule_is_made_shown_changed_and_deleted(headrace: Headrace, queue: str) -> None:
    made = headrace.ok(
        "schedules", "set", queue, "{}", "--cron", "0 3 * * *", "--zone", "Europe/Berlin", "--queue", queue
    )
    assert made.startswith(f"schedule {queue} runs next at 20")
    (listed,) = [one for one in headrace.json("schedules", "list")["schedules"] if one["name"] == queue]
    assert (listed["cron"], listed["zone"], listed["missed"]) == ("0 3 * * *", "Europe/Berlin", "skip")
    assert queue in headrace.ok("schedules", "list")
    headrace.ok("schedules", "set", queue, "[]", "--cron", "@daily", "--queue", queue, "--missed", "all", "--tag", "eu")
    shown = headrace.ok("schedules", "describe", queue)
    for text in ("@daily", "all", "[]", "amq.default", "eu"):
        assert text in shown
    assert headrace.ok("schedules", "delete", queue, "--yes") == f"schedule {queue} deleted\n"
    with pytest.raises(Answered):
        headrace("schedules", "describe", queue)


def test_schedule_runs_when_it_is_told_to_and_rests_when_paused(headrace: Headrace, queue: str) -> None:
    headrace.ok("schedules", "set", queue, "tick", "--cron", "0 0 1 1 *", "--queue", queue, "--paused")
    assert headrace.json("schedules", "describe", queue)["paused"] is True
    assert headrace.ok("schedules", "resume", queue).startswith(f"schedule {queue} runs next at 20")
    assert headrace.ok("schedules", "pause", queue) == f"schedule {queue} is paused\n"
    headrace.ok("schedules", "run", queue)
    (message,) = headrace.lines("tail", f"queue:{queue}", "--from", "first", "--limit", 1)
    assert message["value"] == "tick"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("set", "x", "v", "--cron", "@daily"), "say where to"),
        (("set", "x", "v", "--queue", "q"), "--cron"),
        (("set", "x", "v", "--cron", "@daily", "--queue", "q", "--key", "k"), "--key belongs to --exchange"),
        (("delete", "x"), "say --yes"),
    ],
)
def test_arguments_that_make_no_sense_are_usage_errors(
    headrace: Headrace, arguments: tuple[str, ...], told: str
) -> None:
    result = headrace("schedules", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr


def test_expression_that_is_none_is_refused(headrace: Headrace, queue: str) -> None:
    with pytest.raises(Answered):
        headrace("schedules", "set", queue, "x", "--cron", "every day", "--queue", queue)
