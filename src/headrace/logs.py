"""Structured lines on stderr, for people or as JSON. Driver.

Rooms log through the standard library, with the facts beside the sentence and not inside it:

    _log = logging.getLogger(__name__)
    _log.info("segment rolled", extra={"stream": name, "partition": 3})

so that libraries we use come through the same handler. Every line is redacted and escaped here, once
(redaction.py), whatever its format; a line of text from outside can neither forge a second line nor show a password.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from headrace.redaction import printable, redacted, redacted_text

# What a bare LogRecord carries by itself; everything else came in `extra` and is a field.
_OWN_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure_logging(level: str, format: str, stream: TextIO = sys.stderr) -> None:
    """Send everything of at least `level` to the stream; called again, it replaces what it set before.

    Libraries are heard one level later than ours, unless all is asked for: their `info` is our `debug`.
    """
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonLines() if format == "json" else HumanLines())
    ours = logging.getLevelNamesMapping()[level.upper()]
    logging.basicConfig(handlers=[handler], level=ours if level == "debug" else max(ours, logging.WARNING), force=True)
    logging.getLogger("headrace").setLevel(ours)
    logging.captureWarnings(True)


class HumanLines(logging.Formatter):
    """`2026-01-31T12:00:00.123Z INFO headrace.node: opened the data directory path=/var/lib/headrace`"""

    def format(self, record: logging.LogRecord) -> str:
        line = f"{_time(record)} {record.levelname} {printable(record.name)}: {printable(_sentence(record))}"
        for name, value in _fields(record).items():
            line += f" {printable(name)}={_bare_or_quoted(value)}"
        # Indented, so that nothing inside a traceback can pass for a line of its own.
        return "".join((line, *(f"\n    {printable(row)}" for row in _traceback(record))))


class JsonLines(logging.Formatter):
    """One object a line: time, level, logger, message, fields, and traceback (a list of rows) where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _sentence(record),
        }
        if fields := _fields(record):
            line["fields"] = fields
        if rows := _traceback(record):
            line["traceback"] = rows
        # The one control character that JSON leaves as it is.
        return json.dumps(line).replace("\x7f", "\\u007f")


def _time(record: logging.LogRecord) -> str:
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _sentence(record: logging.LogRecord) -> str:
    return redacted_text(record.getMessage())


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: redacted(name, value) for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


def _traceback(record: logging.LogRecord) -> list[str]:
    text = ""
    if record.exc_info:
        text = logging.Formatter().formatException(record.exc_info)
    if record.stack_info:
        text += record.stack_info
    return [redacted_text(row) for row in text.splitlines()]


def _bare_or_quoted(value: object) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    plain = text and text.isprintable() and not any(c in text for c in " =\"'")
    return text if plain or not isinstance(value, str) else json.dumps(text)
