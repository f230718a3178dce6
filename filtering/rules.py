"""Tags by rule, for publishers that cannot send any: a pattern over keys, with captures. Machine: no I/O.

    fleet/{region}/#   ->  region={region},mobile

A level of a pattern is a word, `+` or `*` (any one), `{name}` (any one, which the tags may name) or, as the last, `#`
(any number). A pattern with a `/` is over MQTT topics, else over routing keys: `fleet.{region}.#` means the same, but
a capture of a topic is the level as its publisher wrote it (`v1.0`), of a key the word as it is stored (`v1%2E0`).
What the rules that match give is put together. A capture that makes no tag (it is empty or too long) gives none.
Bounds: RULES_MAX rules, and of their tags the first TAG_COUNT_MAX. Neighbours: tags.py; controller/policies.py checks
rules (`tag-rules`), gateways/delivery/vhost.py asks them once per exchange and key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from headrace.core_log.errors import Refused
from headrace.filtering.tags import NO_TAGS, TAG_COUNT_MAX, InvalidTags, Tags, check_tag, from_text

RULES_MAX: Final = 256
PATTERN_CHARACTERS_MAX: Final = 1024

_CAPTURE = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)\}")
# How a level of a topic is written as a word of a key.
_ESCAPES: Final = {"%": "%25", ".": "%2E", "*": "%2A", "#": "%23"}
_ESCAPED = re.compile("|".join(_ESCAPES.values()))
_PLAIN: Final = {code: character for character, code in _ESCAPES.items()}


class InvalidRule(Refused):
    """A rule that cannot be understood. Nothing was changed."""


@dataclass(frozen=True, slots=True)
class _Capture:
    name: str


class _One:
    """Any one level."""


_ONE: Final = _One()


@dataclass(frozen=True, slots=True)
class _Rule:
    levels: tuple[str | _Capture | _One, ...]
    # Behind the levels anything may follow.
    open_end: bool
    of_topics: bool
    templates: tuple[str, ...]

    def tags_of(self, words: list[str]) -> list[str]:
        count = len(self.levels)
        if len(words) < count or (len(words) > count and not self.open_end):
            return []
        captured: dict[str, str] = {}
        for level, word in zip(self.levels, words, strict=False):
            if isinstance(level, _Capture):
                captured[level.name] = _unescaped(word) if self.of_topics else word
            elif isinstance(level, str) and level != word:
                return []
        found = []
        for template in self.templates:
            names = _CAPTURE.findall(template)
            if all(captured[name] for name in names):
                tag = _CAPTURE.sub(lambda one: captured[one[1]], template)
                try:
                    found.append(check_tag(tag))
                except InvalidTags:
                    # Its publisher knows nothing of tags, and could not be told.
                    continue
        return found


class TagRules:
    def __init__(self, rules: Mapping[str, str]) -> None:
        """Patterns, each with the list of tags it gives. Raises InvalidRule."""
        if len(rules) > RULES_MAX:
            raise InvalidRule(f"{len(rules)} rules for tags are more than {RULES_MAX}")
        self._rules = [_rule(pattern, tags) for pattern, tags in rules.items()]

    def tags_of(self, key: str) -> Tags:
        """The tags of a record with this routing key."""
        words = key.split(".")
        found = {tag for rule in self._rules for tag in rule.tags_of(words)}
        return tuple(sorted(found)[:TAG_COUNT_MAX]) if found else NO_TAGS


def _rule(pattern: str, tags: str) -> _Rule:
    if not pattern or len(pattern) > PATTERN_CHARACTERS_MAX:
        raise InvalidRule(f"the pattern of a rule has 1 to {PATTERN_CHARACTERS_MAX} characters, not {len(pattern)}")
    of_topics = "/" in pattern
    levels = pattern.split("/" if of_topics else ".")
    open_end = levels[-1] == "#"
    if open_end:
        levels.pop()
    names: list[str] = []
    read: list[str | _Capture | _One] = []
    for level in levels:
        capture = _CAPTURE.fullmatch(level)
        if capture is not None:
            names.append(capture[1])
            read.append(_Capture(capture[1]))
        elif level in ("+", "*"):
            read.append(_ONE)
        elif level == "#":
            raise InvalidRule(f"# stands last in a rule's pattern, not as in '{pattern}'")
        elif "{" in level or "}" in level:
            raise InvalidRule(f"'{level}' in the rule '{pattern}': a capture is a whole level, such as {{region}}")
        else:
            read.append(_escaped(level) if of_topics else level)
    if len(set(names)) < len(names):
        raise InvalidRule(f"the rule '{pattern}' captures one name twice")
    try:
        templates = from_text(tags)
    except InvalidTags as error:
        raise InvalidRule(f"the rule '{pattern}': {error}") from None
    if not templates:
        raise InvalidRule(f"the rule '{pattern}' gives no tags")
    for template in templates:
        unknown = [name for name in _CAPTURE.findall(template) if name not in names]
        if unknown:
            raise InvalidRule(f"the tag '{template}' of the rule '{pattern}': nothing is captured as {unknown[0]}")
    return _Rule(tuple(read), open_end, of_topics, templates)


def _escaped(level: str) -> str:
    return "".join(_ESCAPES.get(character, character) for character in level)


def _unescaped(word: str) -> str:
    return _ESCAPED.sub(lambda one: _PLAIN[one[0]], word)
