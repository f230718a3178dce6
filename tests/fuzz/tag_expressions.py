"""Hostile text for tag lists and tag expressions: `python tests/fuzz/tag_expressions.py -max_total_time=60`.

The oracle: a text is refused with a column inside it, or what was read can be written and means the same again.
"""

import sys
from contextlib import nullcontext

try:
    import atheris
except ImportError:
    atheris = None

with atheris.instrument_imports(include=["headrace"]) if __name__ == "__main__" else nullcontext():
    from headrace.filtering.expression import TEXT_CHARACTERS_MAX, Expression, ExpressionError, parse
    from headrace.filtering.tags import InvalidTags, from_text, to_text

WORDS = [
    "eu",
    "us",
    " ",
    "&&",
    "||",
    "!",
    "(",
    ")",
    "=",
    "!=",
    " in (",
    ",",
    '"',
    "'",
    "\\",
    "é",
    "a b",
    "\0",
    "x" * 90,
]


def check(data: bytes) -> None:
    """The first octet says whether the rest is text, or chooses among the words of the language."""
    if not data:
        return
    text = data[1:].decode("utf-8", "surrogateescape")
    if data[0] & 1:
        text = "".join(WORDS[octet % len(WORDS)] for octet in data[1:])
    _check_expression(text)
    try:
        tags = from_text(text)
    except InvalidTags:
        return
    assert from_text(to_text(tags)) == tags


def _check_expression(text: str) -> None:
    try:
        expression = parse(text)
    except ExpressionError as error:
        assert 1 <= error.column <= len(text) + 1
        return
    answers = [expression.matches(tags) for tags in ((), expression.tags, expression.tags[:1])]
    if len(expression.canonical) <= TEXT_CHARACTERS_MAX:
        again = parse(expression.canonical)
        assert isinstance(again, Expression)
        assert again == expression
        assert answers == [again.matches(tags) for tags in ((), expression.tags, expression.tags[:1])]


if __name__ == "__main__":
    if atheris is None:
        sys.exit("atheris is not installed")
    atheris.Setup(sys.argv, check)
    atheris.Fuzz()
