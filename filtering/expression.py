"""Tag expressions: which records does somebody want? Machine: no I/O.

    eu || (vip && !test)                 tags
    region in (eu, us) && tier = gold    dimensions; tier != gold is !(tier = gold), so no tier at all matches too

`!` binds closest, then `&&`, then `||`. A word ends at space or at one of `( ) ! & | = , " '`; any other tag stands in
quotes, double or single, inside which a backslash takes the next character as it is. A dimension is the tag
`name=value` (tags.py), so `region = eu` and `"region=eu"` ask for the same.

An expression is kept with its negations pushed down to single tags, its parts sorted and each once: two texts that
differ in nothing else are equal, and `canonical` is the text of that form.

Over a batch it is asked in three steps, each of which may only say no for certain: the summary in the batch's header
(`may_match`), the hashes of its tags (`may_hold`), the tags themselves (`spans`, `select`). The last decides, so two
tags with one hash cost a comparison and never let a record through.
Bounds: TEXT_CHARACTERS_MAX, TERMS_MAX, DEPTH_MAX; an evaluation costs no more than the terms there are.
Neighbours: tags.py; core_log/summary.py and format.py for summaries and columns; the delivery room above.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np

from headrace.core_log.errors import Refused
from headrace.core_log.record import RecordBatch, Runs
from headrace.core_log.summary import may_hold, tag_hash
from headrace.filtering.tags import InvalidTags, Tags, check_tag, dimension, in_quotes, is_small

TEXT_CHARACTERS_MAX: Final = 4096
TERMS_MAX: Final = 256
DEPTH_MAX: Final = 32
# Answers kept by one expression: tag sets repeat from batch to batch.
KNOWN_MAX: Final = 256
# From so many runs on numpy is quicker than a loop over them (bench/filter.py).
RUNS_FEW: Final = 32

Spans: TypeAlias = list[tuple[int, int]]


class ExpressionError(Refused):
    """A text that is no expression. `column` counts characters from 1."""

    def __init__(self, reason: str, column: int) -> None:
        super().__init__(f"filter expression, column {column}: {reason}")
        self.reason = reason
        self.column = column


@dataclass(frozen=True, slots=True)
class Has:
    """The record has this tag, or (not wanted) it has not."""

    tag: str
    wanted: bool = True


@dataclass(frozen=True, slots=True)
class All:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class AnyOf:
    parts: "tuple[Node, ...]"


Node: TypeAlias = Has | All | AnyOf
# Whether a record has a tag, or may have it.
Holds: TypeAlias = Callable[[str], bool]


class Expression:
    """Made by `parse`. Equal when the canonical texts are."""

    __slots__ = ("_hash_of", "_hashes", "_known", "canonical", "root", "tags")

    def __init__(self, root: Node, *, hash_of: Callable[[str], int] = tag_hash) -> None:
        """`hash_of`: the hash in the batches that are asked; another one for tests of collisions."""
        self.root = root
        self.canonical = _written(root)
        self.tags = tuple(sorted(set(_tags_in(root))))
        self._hash_of = hash_of
        self._hashes: dict[str, int] = {tag: hash_of(tag) for tag in self.tags}
        self._known: dict[Tags, bool] = {}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and self.canonical == other.canonical

    def __hash__(self) -> int:
        return hash(self.canonical)

    def __repr__(self) -> str:
        return f"parse({self.canonical!r})"

    # -- one record ---------------------------------------------------------------------------------------------

    def matches(self, tags: Tags) -> bool:
        """Whether a record with exactly these tags is wanted."""
        known = self._known.get(tags)
        if known is None:
            known = _holds(self.root, frozenset(tags).__contains__)
            if is_small(tags):
                if len(self._known) >= KNOWN_MAX:
                    self._known.clear()
                self._known[tags] = known
        return known

    # -- a batch ------------------------------------------------------------------------------------------------

    def may_match(self, summary: bytes) -> bool:
        """False only if no record of a batch with this summary matches."""
        hashes = self._hashes
        return _possible(self.root, lambda tag: may_hold(summary, hashes[tag]))

    def may_hold(self, tag_hashes: Sequence[int], tag_sets: Iterable[Sequence[int]]) -> bool:
        """False only if no record matches that has one of these sets of tags, each a tag's place among the hashes."""
        hashes = self._hashes
        for places in tag_sets:
            found = {tag_hashes[place] for place in places}
            if _possible(self.root, lambda tag, found=found: hashes[tag] in found):  # type: ignore[misc]
                return True
        return False

    def spans(self, batch: RecordBatch, first: int, last: int) -> Spans:
        """The index ranges of matching records among first..last-1, in order, with something between any two."""
        if first >= last:
            return []
        sets = batch.tag_sets
        matches = self.matches
        if len(sets) == 1:
            return [(first, last)] if matches(()) else []
        wanted = [matches(tags) for tags in sets]
        if not any(wanted):
            return []
        return _spans(batch.tags, wanted, first, last)

    def select(self, batch: RecordBatch, first: int, last: int) -> list[int]:
        """The indices of matching records among first..last-1."""
        return [index for low, high in self.spans(batch, first, last) for index in range(low, high)]


def _spans(runs: Runs, wanted: Sequence[bool], first: int, last: int) -> Spans:
    if len(runs.values) > RUNS_FEW:
        return _spans_by_column(runs, wanted, first, last)
    found: Spans = []
    for place, low, high in runs.spans(first, last):
        if not wanted[place]:
            continue
        if found and found[-1][1] == low:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def _spans_by_column(runs: Runs, wanted: Sequence[bool], first: int, last: int) -> Spans:
    mask = np.asarray(wanted, dtype=np.int8)[np.asarray(runs.values, dtype=np.int64)]
    # Where the answer changes from one run to the next; those places, from 0 to the end, bound the spans.
    edges = np.flatnonzero(np.diff(mask, prepend=0, append=0))
    ends = np.concatenate(([0], np.asarray(runs.ends, dtype=np.int64)))
    bounds = np.clip(ends[edges], first, last)
    return [(low, high) for low, high in zip(bounds[::2].tolist(), bounds[1::2].tolist(), strict=True) if low < high]


# -- evaluation ---------------------------------------------------------------------------------------------------


def _holds(node: Node, has: Holds) -> bool:
    match node:
        case Has(tag, wanted):
            return has(tag) is wanted
        case All(parts):
            return all(_holds(part, has) for part in parts)
        case AnyOf(parts):
            return any(_holds(part, has) for part in parts)


def _possible(node: Node, may: Holds) -> bool:
    """An upper bound: what somebody else has, or another tag with the same hash, says nothing against a `not`."""
    match node:
        case Has(tag, wanted):
            return not wanted or may(tag)
        case All(parts):
            return all(_possible(part, may) for part in parts)
        case AnyOf(parts):
            return any(_possible(part, may) for part in parts)


def _tags_in(node: Node) -> Iterable[str]:
    if isinstance(node, Has):
        return (node.tag,)
    return [tag for part in node.parts for tag in _tags_in(part)]


# -- building -----------------------------------------------------------------------------------------------------


def _joined(kind: type[All] | type[AnyOf], parts: Collection[Node]) -> Node:
    """Flat, sorted, each once."""
    flat: dict[str, Node] = {}
    for part in parts:
        for inner in part.parts if isinstance(part, kind) else (part,):
            flat[_written(inner, nested=True)] = inner
    if len(flat) == 1:
        return next(iter(flat.values()))
    return kind(tuple(flat[text] for text in sorted(flat)))


def _negated(node: Node) -> Node:
    match node:
        case Has(tag, wanted):
            return Has(tag, not wanted)
        case All(parts):
            return _joined(AnyOf, [_negated(part) for part in parts])
        case AnyOf(parts):
            return _joined(All, [_negated(part) for part in parts])


_ENDS_WORD: Final = frozenset("()!&|=,\"'\\")


def quoted(tag: str) -> str:
    """A tag as it is written in an expression: bare where that is possible."""
    bare = tag and not any(character.isspace() or character in _ENDS_WORD for character in tag)
    if bare:
        return tag
    escaped = tag.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _written(node: Node, *, nested: bool = False) -> str:
    match node:
        case Has(tag, wanted):
            return quoted(tag) if wanted else f"!{quoted(tag)}"
        case All(parts):
            text = " && ".join(_written(part, nested=True) for part in parts)
        case AnyOf(parts):
            text = " || ".join(_written(part, nested=True) for part in parts)
    return f"({text})" if nested else text


def any_of(tags: Iterable[str], *, or_without: str | None = None) -> Expression:
    """One of these tags; or also any record that has not the tag `or_without`."""
    parts: list[Node] = [Has(tag) for tag in tags]
    if or_without is not None:
        parts.append(Has(or_without, wanted=False))
    if not parts or len(parts) > TERMS_MAX:
        raise ExpressionError(f"{len(parts)} terms, expected 1 to {TERMS_MAX}", 1)
    return Expression(_joined(AnyOf, parts))


def both(first: Expression, second: Expression) -> Expression:
    return Expression(_joined(All, [first.root, second.root]))


# -- parsing ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def parse(text: str) -> Expression:
    """Raises ExpressionError."""
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ExpressionError(f"{len(text)} characters, at most {TEXT_CHARACTERS_MAX}", TEXT_CHARACTERS_MAX + 1)
    return Expression(_Parser(_cut(text), len(text) + 1).whole())


@dataclass(frozen=True, slots=True)
class _Token:
    """A sign, as itself; or a word, bare or out of quotes."""

    text: str
    column: int
    is_word: bool = False
    is_bare: bool = False

    def is_sign(self, text: str) -> bool:
        return not self.is_word and self.text == text

    def __str__(self) -> str:
        return f"'{self.text}'"


_SIGNS: Final = ("&&", "||", "!=", "!", "(", ")", "=", ",")


def _cut(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    at = 0
    while at < len(text):
        character = text[at]
        if character.isspace():
            at += 1
        elif character in "\"'":
            word, end = _quoted_word(text, at)
            tokens.append(_Token(word, at + 1, is_word=True))
            at = end
        elif character in _ENDS_WORD:
            sign = next((one for one in _SIGNS if text.startswith(one, at)), None)
            if sign is None:
                hint = f", write {character * 2}" if character in "&|" else ", a backslash stands in quotes only"
                raise ExpressionError(f"unexpected '{character}'{hint}", at + 1)
            tokens.append(_Token(sign, at + 1))
            at += len(sign)
        else:
            end = at
            while end < len(text) and not text[end].isspace() and text[end] not in _ENDS_WORD:
                end += 1
            tokens.append(_Token(text[at:end], at + 1, is_word=True, is_bare=True))
            at = end
    return tokens


def _quoted_word(text: str, start: int) -> tuple[str, int]:
    found = in_quotes(text, start)
    if found is None:
        raise ExpressionError("a quote that is not closed", start + 1)
    return found


class _Parser:
    """Recursive descent; each level of recursion is a bracket or a `!`, and those are counted."""

    def __init__(self, tokens: Sequence[_Token], end_column: int) -> None:
        self._tokens = tokens
        self._at = 0
        self._end_column = end_column
        self._depth = 0
        self._terms = 0

    def whole(self) -> Node:
        node = self._any()
        token = self._next()
        if token is not None:
            raise ExpressionError(f"expected && or ||, found {token}", token.column)
        return node

    def _next(self) -> _Token | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self, sign: str) -> bool:
        token = self._next()
        if token is None or not token.is_sign(sign):
            return False
        self._at += 1
        return True

    def _fail(self, expected: str) -> ExpressionError:
        token = self._next()
        if token is None:
            return ExpressionError(f"expected {expected}, found the end", self._end_column)
        return ExpressionError(f"expected {expected}, found {token}", token.column)

    def _any(self) -> Node:
        parts = [self._all()]
        while self._take("||"):
            parts.append(self._all())
        return _joined(AnyOf, parts)

    def _all(self) -> Node:
        parts = [self._one()]
        while self._take("&&"):
            parts.append(self._one())
        return _joined(All, parts)

    def _one(self) -> Node:
        token = self._next()
        if token is None or token.is_word:
            return self._term()
        if not token.is_sign("!") and not token.is_sign("("):
            raise self._fail("a tag, ! or (")
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise ExpressionError(f"more than {DEPTH_MAX} brackets and negations inside each other", token.column)
        self._at += 1
        if token.text == "!":
            node = _negated(self._one())
        else:
            node = self._any()
            if not self._take(")"):
                raise self._fail(f"a ) for the ( at column {token.column}")
        self._depth -= 1
        return node

    def _term(self) -> Node:
        name = self._word("a tag")
        if self._take("="):
            return self._dimension(name, self._word("a value"))
        if self._take("!="):
            return _negated(self._dimension(name, self._word("a value")))
        token = self._next()
        if token is not None and token.is_bare and token.text.lower() == "in":
            self._at += 1
            return self._listed(name)
        return self._has(name, lambda: check_tag(name.text))

    def _listed(self, name: _Token) -> Node:
        if not self._take("("):
            raise self._fail("( and a list of values")
        values = [self._dimension(name, self._word("a value"))]
        while self._take(","):
            values.append(self._dimension(name, self._word("a value")))
        if not self._take(")"):
            raise self._fail(", or )")
        return _joined(AnyOf, values)

    def _word(self, what: str) -> _Token:
        token = self._next()
        if token is None or not token.is_word:
            raise self._fail(what)
        self._at += 1
        return token

    def _dimension(self, name: _Token, value: _Token) -> Node:
        return self._has(name, lambda: dimension(name.text, value.text))

    def _has(self, token: _Token, tag: Callable[[], str]) -> Node:
        self._terms += 1
        if self._terms > TERMS_MAX:
            raise ExpressionError(f"more than {TERMS_MAX} terms", token.column)
        try:
            return Has(tag())
        except InvalidTags as error:
            raise ExpressionError(str(error), token.column) from None
