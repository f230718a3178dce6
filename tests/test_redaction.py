"""No secret and no control character gets through, and the rest stays as it was."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.redaction import HIDDEN, printable, redacted, redacted_text

CANARY = "c4n4ry"


@pytest.mark.parametrize("name", ["password", "PASSWORD", "db_password", "client-secret", "token", "Authorization"])
@pytest.mark.parametrize("value", [CANARY, CANARY.encode(), [CANARY], {"x": CANARY}, 5, None])
def test_field_with_a_secret_name_is_hidden_whatever_it_holds(name: str, value: object) -> None:
    assert redacted(name, value) == HIDDEN


@pytest.mark.parametrize(
    "text",
    [
        f"amqp://user:{CANARY}@host:5672/vhost",
        f"connecting to postgresql://user:{CANARY}@db/headrace now",
        f"amqp://user:a@{CANARY}@host",
        f"amqp://user:a/{CANARY}@host",
        f"amqp://{CANARY}@host",
        f"amqp://a:b@one,amqp://a:{CANARY}@two",
        f"amqp://a:b@one amqp://a:{CANARY}@two",
        f"http://host/path?token={CANARY}&x=1",
        f"password={CANARY}",
        f"password: {CANARY}",
        f"'password': '{CANARY}'",
        f'{{"secret": "{CANARY} and more"}}',
        f"Authorization: Bearer {CANARY}",
        f"authorization: Basic {CANARY}",
        f"Cookie: session={CANARY}",
    ],
)
def test_secret_inside_text_is_hidden(text: str) -> None:
    assert CANARY not in redacted_text(text)
    assert HIDDEN in redacted_text(text)


@pytest.mark.parametrize("text", ["plain words", "a@b.example", "http://host/path", "x://", "password was wrong", ""])
def test_text_without_a_secret_stays_as_it_was(text: str) -> None:
    assert redacted_text(text) == text


def test_containers_are_walked_by_their_own_names() -> None:
    got = redacted("fields", {"user": "ann", "login": {"password": CANARY, "urls": [f"amqp://a:{CANARY}@h"]}})
    assert got == {"user": "ann", "login": {"password": HIDDEN, "urls": ["amqp://***@h"]}}


def test_other_objects_are_told_by_their_text() -> None:
    class Link:
        def __str__(self) -> str:
            return f"amqp://a:{CANARY}@h"

    assert redacted("link", Link()) == "amqp://***@h"


@given(st.text())
def test_printable_text_has_no_character_that_could_forge_a_line(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text).splitlines()) <= 1


@pytest.mark.parametrize(
    ("text", "escaped"),
    [("a\nb", "a\\nb"), ("\x1b[31m", "\\x1b[31m"), ("\u2028", "\\u2028"), ("\u202e", "\\u202e"), ("ü", "ü")],
)
def test_control_characters_are_written_as_escapes(text: str, escaped: str) -> None:
    assert printable(text) == escaped
