"""Which subscriptions a topic matches: one trie for AMQP (`*`, `#`) and MQTT (`+`, `#`). Machine: no I/O.

A pattern is a tuple of levels; a level is a word or one of two wildcards. The trie walks all patterns at once, level
by level, with the set of nodes that are still possible; a node behind `#` stays possible to the end of the key. So a
match costs at most (words of the key) x (nodes that can still match), whatever `a.#.b.#` is written, and for exact
levels it costs one look-up per level however many subscriptions there are.

Answers are cached per key. Adding or removing a pattern drops the cached keys which that pattern matches and no
others: the cached keys stand in a second trie, down which the pattern is walked.

Invariants: a node without values has something below it (the root excepted); every cached key is in the index of
cached keys and the other way round; the cache never holds more than `cached_keys_max` keys, and none that is long.
Neighbours: gateways/delivery/routing.py (topic exchanges) and the MQTT door (subscriptions) above; nothing below.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, Generic, TypeAlias, TypeVar

from headrace.core_log.errors import Refused

V = TypeVar("V", bound=Hashable)


class Wildcard(Enum):
    ONE = "exactly one level"
    MANY = "any number of levels, none included"


# Longer keys are searched for each time, so that what is cached is bounded in bytes too.
CACHED_CHARS_MAX: Final = 256

ONE: Final = Wildcard.ONE
MANY: Final = Wildcard.MANY

Level: TypeAlias = str | Wildcard
Pattern: TypeAlias = tuple[Level, ...]


class InvalidTopicFilter(Refused):
    """A topic filter that the MQTT standard does not allow. Nothing was subscribed."""


@dataclass(frozen=True, slots=True)
class Language:
    """How a protocol writes topics. The two values below are all there are."""

    name: str
    separator: str
    one: str
    many: str
    # [MQTT-4.7.2-1] a wildcard at the first level does not match a topic that begins with `$`.
    hides_dollar: bool

    def words(self, key: str) -> tuple[str, ...]:
        """The words of a key or topic name. The empty key has no words, as in RabbitMQ; `.` has two empty ones."""
        return tuple(key.split(self.separator)) if key else ()

    def pattern(self, text: str) -> Pattern:
        """The levels of a binding key or topic filter. Any AMQP key is lawful; MQTT may raise InvalidTopicFilter."""
        if self is MQTT:
            _check_topic_filter(text)
        one, many = self.one, self.many
        return tuple(ONE if word == one else MANY if word == many else word for word in self.words(text))


AMQP: Final = Language("AMQP", separator=".", one="*", many="#", hides_dollar=False)
MQTT: Final = Language("MQTT", separator="/", one="+", many="#", hides_dollar=True)


def _check_topic_filter(text: str) -> None:
    if not text:
        raise InvalidTopicFilter("a topic filter has at least one character [MQTT-4.7.3-1]")
    if "\0" in text:
        raise InvalidTopicFilter("a topic filter holds no null character [MQTT-4.7.3-2]")
    levels = text.split("/")
    for number, level in enumerate(levels, start=1):
        if "#" in level and (level != "#" or number != len(levels)):
            raise InvalidTopicFilter(f"# stands alone and last, not as in {text!r} [MQTT-4.7.1-1]")
        if "+" in level and level != "+":
            raise InvalidTopicFilter(f"+ stands alone in its level, not as in {text!r} [MQTT-4.7.1-2]")


class _Nothing(Enum):
    NOTHING = 0


_NOTHING: Final = _Nothing.NOTHING


class _Values(dict[V, None]):
    """Two or more values of one node. A type of its own, for a node with one value holds it bare (200 bytes less)."""

    __slots__ = ()


class _Node(Generic[V]):
    """One level of one or more patterns.

    Most nodes of a million subscriptions have one child and one value, so both are held without a container.
    """

    __slots__ = ("children", "many", "one", "only_child", "only_word", "values")

    def __init__(self) -> None:
        # Literal children: none; one, in only_word and only_child; or more, all of them in `children`.
        self.only_word: str | None = None
        self.only_child: _Node[V] | None = None
        self.children: dict[str, _Node[V]] | None = None
        self.one: _Node[V] | None = None
        self.many: _Node[V] | None = None
        self.values: V | _Values[V] | _Nothing = _NOTHING

    def child(self, level: Level) -> "_Node[V] | None":
        if level is ONE:
            return self.one
        if level is MANY:
            return self.many
        if self.children is not None:
            return self.children.get(level)
        return self.only_child if self.only_word == level else None

    def add_child(self, level: Level) -> "_Node[V]":
        node: _Node[V] = _Node()
        if level is ONE:
            self.one = node
        elif level is MANY:
            self.many = node
        elif self.children is not None:
            self.children[level] = node
        elif self.only_word is None or self.only_child is None:
            self.only_word, self.only_child = level, node
        else:
            self.children = {self.only_word: self.only_child, level: node}
            self.only_word = self.only_child = None
        return node

    def remove_child(self, level: Level) -> None:
        if level is ONE:
            self.one = None
        elif level is MANY:
            self.many = None
        elif self.children is None:
            self.only_word = self.only_child = None
        else:
            del self.children[level]
            if len(self.children) == 1:
                ((self.only_word, self.only_child),) = self.children.items()
                self.children = None

    def consumes(self) -> bool:
        """Whether a further word of the key can lead anywhere from here."""
        return self.only_child is not None or self.one is not None or self.children is not None

    def is_needless(self) -> bool:
        return self.values is _NOTHING and self.many is None and not self.consumes()

    def add_value(self, value: V) -> bool:
        values = self.values
        if values is _NOTHING:
            self.values = value
        elif isinstance(values, _Values):
            if value in values:
                return False
            values[value] = None
        elif values is value or values == value:
            return False
        else:
            self.values = _Values(((values, None), (value, None)))
        return True

    def remove_value(self, value: V) -> bool:
        values = self.values
        if values is _NOTHING:
            return False
        if isinstance(values, _Values):
            if value not in values:
                return False
            del values[value]
            if len(values) == 1:
                (self.values,) = values
        elif values is not value and values != value:
            return False
        else:
            self.values = _NOTHING
        return True


class TopicTrie(Generic[V]):
    """Patterns with values; which values does a key match?

    A pair (pattern, value) is held once, however often it is added. An answer holds each value once, in an order that
    depends on nothing but the calls made before.
    """

    def __init__(self, language: Language, *, cached_keys_max: int = 8192) -> None:
        self._language = language
        self._root: _Node[V] = _Node()
        self._count = 0
        self._cached_keys_max = cached_keys_max
        self._cache: dict[str, tuple[V, ...]] = {}
        self._cached_keys = _KeyIndex()
        # Nodes looked at by all matches that the cache did not answer: what a match costs, free of the clock.
        self.nodes_visited = 0

    def __len__(self) -> int:
        """The number of (pattern, value) pairs."""
        return self._count

    @property
    def cached_keys(self) -> tuple[str, ...]:
        return tuple(self._cache)

    def add(self, pattern: Pattern, value: V) -> bool:
        """Whether the pair is new."""
        node = self._root
        for level in pattern:
            node = node.child(level) or node.add_child(level)
        if not node.add_value(value):
            return False
        self._count += 1
        self._forget(pattern)
        return True

    def remove(self, pattern: Pattern, value: V) -> bool:
        """Whether the pair was there."""
        path = [self._root]
        for level in pattern:
            node = path[-1].child(level)
            if node is None:
                return False
            path.append(node)
        if not path[-1].remove_value(value):
            return False
        self._count -= 1
        for level in reversed(pattern):
            if not path.pop().is_needless():
                break
            path[-1].remove_child(level)
        self._forget(pattern)
        return True

    def match(self, key: str) -> tuple[V, ...]:
        """The values of all patterns that match the key, each once."""
        values = self._cache.get(key)
        if values is None:
            words = self._language.words(key)
            values = self._search(words)
            if self._cached_keys_max and len(key) <= CACHED_CHARS_MAX:
                self._remember(key, words, values)
        return values

    def _search(self, words: tuple[str, ...]) -> tuple[V, ...]:
        root = self._root
        active = [root]
        # Nodes behind `#` swallow any word, so once reached they stay reached: they are entered once and never leave.
        looping: list[_Node[V]] = []
        matched: dict[_Node[V], None] = {}
        visited = 1
        hidden = self._language.hides_dollar and bool(words) and words[0].startswith("$")
        if root.many is not None and not hidden:
            _enter_many(root.many, looping, matched)
        for word in words:
            following: list[_Node[V]] = []
            for node in active + looping if looping else active:
                if node.children is not None:
                    child = node.children.get(word)
                else:
                    child = node.only_child if node.only_word == word else None
                if child is not None:
                    following.append(child)
                if node.one is not None and not hidden:
                    following.append(node.one)
            hidden = False
            # A node has one parent and its parent is looked at once per word, so `following` holds no node twice.
            visited += len(following)
            for node in following:
                if node.many is not None:
                    _enter_many(node.many, looping, matched)
            active = following
            if not active and not looping:
                break
        self.nodes_visited += visited + len(matched)
        for node in active:
            matched[node] = None
        found: dict[V, None] = {}
        for node in matched:
            values = node.values
            if isinstance(values, _Values):
                found.update(values)
            elif values is not _NOTHING:
                found[values] = None
        return tuple(found)

    def _remember(self, key: str, words: tuple[str, ...], values: tuple[V, ...]) -> None:
        # Full means start again: the keys in use are back after one search each, and no hit pays for an order of use.
        if len(self._cache) >= self._cached_keys_max:
            self._cache.clear()
            self._cached_keys = _KeyIndex()
        self._cache[key] = values
        self._cached_keys.add(words, key)

    def _forget(self, pattern: Pattern) -> None:
        if not self._cache:
            return
        blind_to_dollar = self._language.hides_dollar and bool(pattern) and isinstance(pattern[0], Wildcard)
        for key in self._cached_keys.matching(pattern):
            if not (blind_to_dollar and key.startswith("$")):
                del self._cache[key]
                self._cached_keys.remove(self._language.words(key))


def _enter_many(node: _Node[V] | None, looping: list[_Node[V]], matched: dict[_Node[V], None]) -> None:
    while node is not None and node not in matched:
        matched[node] = None
        if node.consumes():
            looping.append(node)
        node = node.many


# A trie of words; the key that ends at a node stands there under None.
_Branch: TypeAlias = dict[str | None, Any]


class _KeyIndex:
    """The cached keys, in a trie, so that a pattern finds those it matches without looking at all."""

    __slots__ = ("_root",)

    def __init__(self) -> None:
        self._root: _Branch = {}

    def add(self, words: tuple[str, ...], key: str) -> None:
        branch = self._root
        for word in words:
            branch = branch.setdefault(word, {})
        branch[None] = key

    def remove(self, words: tuple[str, ...]) -> None:
        path = [self._root]
        for word in words:
            path.append(path[-1][word])
        del path[-1][None]
        for word in reversed(words):
            if path.pop():
                break
            del path[-1][word]

    def matching(self, pattern: Pattern) -> list[str]:
        keys: list[str] = []
        # (branch, level) is looked at once, so `#.a.#.b` costs no more than branches x levels.
        seen: set[tuple[int, int]] = set()
        waiting: list[tuple[_Branch, int]] = [(self._root, 0)]
        while waiting:
            branch, index = waiting.pop()
            if (id(branch), index) in seen:
                continue
            seen.add((id(branch), index))
            if index == len(pattern):
                if None in branch:
                    keys.append(branch[None])
                continue
            level = pattern[index]
            if level is MANY:
                waiting.append((branch, index + 1))
                waiting.extend((below, index) for word, below in branch.items() if word is not None)
            elif level is ONE:
                waiting.extend((below, index + 1) for word, below in branch.items() if word is not None)
            elif level in branch:
                waiting.append((branch[level], index + 1))
        return keys
