"""A line is a line: structured, redacted, escaped, in both formats and for libraries too."""

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from headrace.logs import HumanLines, JsonLines, configure_logging

CANARY = "c4n4ry"
BOTH = pytest.mark.parametrize("formatter", [HumanLines(), JsonLines()], ids=["human", "json"])


def record(message: str = "opened", *args: object, **fields: object) -> logging.LogRecord:
    made = logging.getLogger("headrace.test").makeRecord(
        "headrace.test", logging.INFO, __file__, 1, message, args, None, extra=fields
    )
    made.created = 0.5
    return made


@pytest.fixture
def restored_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before = root.handlers[:], root.level, ours.level
    yield
    root.handlers[:], root.level, ours.level = before
    logging.captureWarnings(False)


def test_human_line_is_time_level_place_sentence_and_fields() -> None:
    assert (
        HumanLines().format(record(path="/data", count=3, name_of="two words", empty=""))
        == '1970-01-01T00:00:00.500Z INFO headrace.test: opened path=/data count=3 name_of="two words" empty=""'
    )


def test_json_line_holds_the_same() -> None:
    assert json.loads(JsonLines().format(record("opened %s", "now", path="/data", count=3))) == {
        "time": "1970-01-01T00:00:00.500Z",
        "level": "info",
        "logger": "headrace.test",
        "message": "opened now",
        "fields": {"path": "/data", "count": 3},
    }


@BOTH
def test_secrets_are_hidden_in_sentence_fields_and_traceback(formatter: logging.Formatter) -> None:
    line = record(f"at amqp://u:{CANARY}@h", password=CANARY, url=f"amqp://u:{CANARY}@h", at={"token": CANARY})
    try:
        raise ValueError(f"password={CANARY}")
    except ValueError as error:
        line.exc_info = (ValueError, error, error.__traceback__)
        text = formatter.format(line)
    assert CANARY not in text
    assert "ValueError: password=***" in text


@given(message=st.text(), field=st.text(), name=st.text(min_size=1))
@example(message="\x7f", field="\x1b\x7f", name="\x7f")
@BOTH
def test_nothing_in_a_line_can_begin_another(formatter: logging.Formatter, message: str, field: str, name: str) -> None:
    line = record()
    line.msg = message
    line.name = name
    vars(line)["client"] = field
    vars(line)[f"x{name}"] = field
    text = formatter.format(line)
    assert text.isprintable()


@given(message=st.text(), field=st.text())
def test_json_line_reads_back(message: str, field: str) -> None:
    line = record()
    line.msg = message.replace("%", "")
    vars(line)["client"] = field
    assert isinstance(json.loads(JsonLines().format(line)), dict)


def test_human_traceback_is_indented_and_escaped() -> None:
    line = record()
    try:
        raise ValueError("bad\n1970-01-01T00:00:00.500Z INFO forged: \x1b[2J")
    except ValueError as error:
        line.exc_info = (ValueError, error, error.__traceback__)
        first, *rows = HumanLines().format(line).split("\n")
    assert first.isprintable()
    assert all(row.startswith("    ") and row.isprintable() for row in rows)


def test_level_is_ours_and_libraries_are_heard_from_warning_on(restored_logging: None) -> None:
    stream = io.StringIO()
    configure_logging("info", "human", stream)
    for name in ("headrace.node", "library"):
        logging.getLogger(name).debug("d")
        logging.getLogger(name).info("i")
        logging.getLogger(name).warning("w")
    told = [row.split(" ", 2)[2] for row in stream.getvalue().splitlines()]
    assert told == ["headrace.node: i", "headrace.node: w", "library: w"]


def test_configuring_again_replaces_format_and_level(restored_logging: None) -> None:
    stream = io.StringIO()
    configure_logging("error", "human", stream)
    configure_logging("debug", "json", stream)
    logging.getLogger("headrace").debug("once")
    assert [json.loads(row)["message"] for row in stream.getvalue().splitlines()] == ["once"]
