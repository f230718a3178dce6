"""The one place where secrets and control characters are taken out of what people will read. Machine: pure.

Everything that reaches a log line or an error text passes here: values whose name tells a secret, credentials inside
URLs, `name=secret` and `name: secret` inside running text, and characters that could forge a line or move a
terminal's cursor. It would rather hide too much than show one password.
"""

import re
from collections.abc import Mapping

HIDDEN = "***"
_SECRET_WORDS = ("password", "passwd", "passphrase", "secret", "token", "authorization", "cookie", "credential")
_SECRET_NAME = re.compile("|".join(_SECRET_WORDS), re.IGNORECASE)
# `password=x`, `"token": "x"`, `Authorization: Bearer x`: the name, then what stands after it, quoted or up to a break.
_SECRET_IN_TEXT = re.compile(
    rf"""((?:{"|".join(_SECRET_WORDS)})[\w-]{{0,32}}["']?\s?[=:]\s?)"""
    r"""("[^"]*"|'[^']*'|(?:basic|bearer|plain)\s+[^\s,;&"']+|[^\s,;&"']+)""",
    re.IGNORECASE,
)
_WORD = re.compile(r"\S+")


def redacted(name: str, value: object) -> object:
    """The value of a field, without what must not be read; containers are walked by their own names."""
    if _SECRET_NAME.search(name):
        return HIDDEN
    match value:
        case str():
            return redacted_text(value)
        case Mapping():
            return {str(key): redacted(str(key), inner) for key, inner in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redacted(name, inner) for inner in value]
        case bool() | int() | float() | None:
            return value
        case _:
            return redacted_text(str(value))


def redacted_text(text: str) -> str:
    """Running text without credentials in URLs and without values that follow a secret's name."""
    if "://" in text and "@" in text:
        text = _WORD.sub(_url_without_credentials, text)
    return _SECRET_IN_TEXT.sub(rf"\1{HIDDEN}", text)


def printable(text: str) -> str:
    """The text with everything that is not a plain printable character written as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _url_without_credentials(word: re.Match[str]) -> str:
    # Up to the last @ and not the first: an unescaped @ or / in a password must not let its end through.
    scheme, separator, rest = word.group().partition("://")
    _, at, host = rest.rpartition("@")
    return f"{scheme}{separator}{HIDDEN}@{host}" if at else word.group()
