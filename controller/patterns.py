"""Regular expressions from users: permissions and policies. Machine: RE2, so time is linear in the text.

RabbitMQ's rules: a pattern matches anywhere unless it is anchored; the empty pattern matches only the empty name.
RE2 knows no look-around. The one form of it that people do use for names, a leading `^(?!...)` as in `^(?!amq\\.).*`,
is understood here by matching the two parts one after the other; everything else that RE2 lacks is refused with its
own words. `$` means the very end, never "before a last newline".
"""

from functools import lru_cache
from typing import Protocol

import re2

from headrace.controller.errors import Invalid

PATTERN_CHARACTERS_MAX = 4096

_OPTIONS = re2.Options()
# A bad pattern is the user's mistake, told to the user; RE2 would also print it.
_OPTIONS.log_errors = False
_OPTIONS.never_capture = True
# Per compiled pattern; a larger program or state cache is refused or done without.
_OPTIONS.max_mem = 1 << 20

_NEGATIVE = "^(?!"


class Pattern(Protocol):
    def matches(self, text: str) -> bool: ...


class _Plain:
    __slots__ = ("_search",)

    def __init__(self, pattern: str) -> None:
        try:
            self._search = re2.compile(pattern, options=_OPTIONS).search
        except re2.error as error:
            reason = error.args[0] if error.args else error
            told = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
            raise Invalid(f"the pattern '{pattern}' is not a regular expression that RE2 knows: {told}") from error

    def matches(self, text: str) -> bool:
        return self._search(text) is not None


class _Unless:
    """`^(?!unless)then`"""

    __slots__ = ("_then", "_unless")

    def __init__(self, unless: str, then: str) -> None:
        self._unless = _Plain(f"^(?:{unless})")
        self._then = _Plain(f"^(?:{then})")

    def matches(self, text: str) -> bool:
        return not self._unless.matches(text) and self._then.matches(text)


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> Pattern:
    """Invalid if the pattern is not one."""
    if len(pattern) > PATTERN_CHARACTERS_MAX:
        raise Invalid(f"a pattern of {len(pattern)} characters is longer than {PATTERN_CHARACTERS_MAX}")
    try:
        pattern.encode()
    except UnicodeEncodeError as error:
        raise Invalid("a pattern is not valid Unicode text") from error
    if not pattern:
        return _Plain("^$")
    if pattern.startswith(_NEGATIVE):
        end = _closing(pattern, len(_NEGATIVE))
        if end is not None and not _has_top_level_bar(pattern[end + 1 :]):
            return _Unless(pattern[len(_NEGATIVE) : end], pattern[end + 1 :])
    return _Plain(pattern)


def literal(text: str) -> str:
    """A pattern that matches exactly `text`."""
    return str(re2.escape(text))


def _closing(pattern: str, start: int) -> int | None:
    """Where the group that is open at `start` closes."""
    depth = 1
    for position, character in _structure(pattern, start):
        depth += (character == "(") - (character == ")")
        if depth == 0:
            return position
    return None


def _has_top_level_bar(pattern: str) -> bool:
    depth = 0
    for _, character in _structure(pattern, 0):
        depth += (character == "(") - (character == ")")
        if character == "|" and depth == 0:
            return True
    return False


def _structure(pattern: str, start: int) -> list[tuple[int, str]]:
    r"""The brackets and bars that mean something: not escaped, not inside `[...]` or `\Q...\E`."""
    found: list[tuple[int, str]] = []
    position = start
    while position < len(pattern):
        character = pattern[position]
        if pattern.startswith(r"\Q", position):
            end = pattern.find(r"\E", position)
            position = len(pattern) if end < 0 else end + 2
            continue
        if character == "\\":
            position += 2
            continue
        if character == "[":
            position = _class_end(pattern, position)
            continue
        if character in "()|":
            found.append((position, character))
        position += 1
    return found


def _class_end(pattern: str, start: int) -> int:
    """One past the `]` that ends the character class opened at `start`."""
    position = start + 1
    if pattern.startswith("^", position):
        position += 1
    if pattern.startswith("]", position):  # a `]` in first place stands for itself
        position += 1
    while position < len(pattern):
        if pattern.startswith("[:", position):
            end = pattern.find(":]", position + 2)
            if end >= 0:
                position = end + 2
                continue
        if pattern[position] == "\\":
            position += 2
            continue
        if pattern[position] == "]":
            return position + 1
        position += 1
    return len(pattern)
