"""How commands show messages that a broker answers with, and write those that it is sent. Format: no I/O.

A line for each: place, time, key, tags, value. Values and keys are what clients sent: shown as text without control
characters, or as base64, and never decoded further.
"""

from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress

import click

from headrace.commands.asking import Json, shown
from headrace.redaction import printable


def message_line(topic: str, message: Json) -> str:
    parts = [f"{printable(topic)}/{message['partition']}@{message['offset']}", message["timestamp"]]
    if message["key"]:
        parts.append(f"key={marked(message['key'], message.get('key_encoding'))}")
    if message.get("tags"):
        parts.append(f"tags={printable(','.join(message['tags']))}")
    return "  ".join((*parts, value_text(message)))


def value_text(message: Json) -> str:
    return marked(message["value"], message.get("encoding"))


def marked(text: str, encoding: str | None) -> str:
    return f"base64:{text}" if encoding == "base64" else printable(text)


def value_of(body: bytes) -> Json:
    """A value for the broker: text where it is that, else base64."""
    with suppress(UnicodeDecodeError):
        return {"value": body.decode(), "encoding": "text"}
    return {"value": b64encode(body).decode(), "encoding": "base64"}


def message_lines(topic: str, message: Json) -> Iterator[str]:
    """Everything that is known of one."""
    yield click.style(f"{printable(topic)}/{message['partition']}@{message['offset']}", bold=True)
    for name, value in message.items():
        if name in ("partition", "offset", "key", "key_encoding", "value", "encoding", "topic"):
            continue
        if isinstance(value, dict):
            for inner, one in value.items():
                yield f"  {name}.{printable(str(inner))}: {shown(one)}"
        elif value not in (None, []):
            yield f"  {name}: {shown(value)}"
    if message["key"]:
        yield f"  key: {marked(message['key'], message.get('key_encoding'))}"
    yield f"  value: {value_text(message)}"
