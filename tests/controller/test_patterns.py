"""Users' regular expressions: RabbitMQ's meaning, and never more than linear time."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.controller.patterns import PATTERN_CHARACTERS_MAX, compile_pattern, literal

# Each takes exponential or high polynomial time in a backtracking engine.
REDOS = [
    r"^(a+)+$",
    r"^([a-zA-Z]+)*$",
    r"^(a|aa)+$",
    r"^(a|a?)+$",
    r"^(.*a){12}$",
    r"^((ab)*)*c$",
    r"(x+x+)+y",
    r"^(([a-z])+.)+[A-Z]([a-z])+$",
]


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("", "", True),
        ("", "q", False),
        (".*", "anything", True),
        ("ann", "joanna", True),
        ("^ann", "joanna", False),
        ("^ann$", "ann", True),
        ("^ann$", "ann\n", False),
        ("^(amq\\.gen.*|amq\\.default)$", "amq.default", True),
        ("^(?!amq\\.).*", "orders", True),
        ("^(?!amq\\.).*", "amq.topic", False),
        ("^(?!amq\\.)", "amq", True),
        ("^(?!(amq|sys)\\.)[a-z]+$", "sys.x", False),
        ("^(?![)]x)a", "a", True),
        ("^(?![^]x)]y)a", "a", True),
        ("^(?!\\Q)\\E)(a|b)$", "b", True),
        ("^(?![[:alpha:])])..", ")x", False),
        ("^q.$", "qü", True),
    ],
)
def test_pattern_means_what_it_means_in_rabbitmq(pattern: str, name: str, expected: bool) -> None:
    assert compile_pattern(pattern).matches(name) is expected


@pytest.mark.parametrize("pattern", ["(", "(?=a)", "(?<!a)b", r"(a)\1", "a(?!b)", "^(?!a)b|c", "^(?!a", "*", "\ud800"])
def test_what_the_engine_lacks_is_refused_in_words(pattern: str) -> None:
    with pytest.raises(Invalid, match="pattern"):
        compile_pattern(pattern)


def test_pattern_is_accepted_at_the_length_limit_and_refused_past_it() -> None:
    compile_pattern("a" * PATTERN_CHARACTERS_MAX)
    with pytest.raises(Invalid, match="longer"):
        compile_pattern("a" * (PATTERN_CHARACTERS_MAX + 1))


@pytest.mark.parametrize("pattern", REDOS)
def test_hostile_pattern_on_a_hostile_name_is_harmless(pattern: str) -> None:
    # A backtracking engine would not come back from these within the age of the universe.
    compiled = compile_pattern(pattern)
    for name in ("a" * 255 + "!", "ab" * 127 + "!", "x" * 255):
        compiled.matches(name)


@settings(deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])), st.text(st.characters(exclude_categories=["Cs"])))
def test_literal_matches_itself_and_nothing_else(text: str, other: str) -> None:
    pattern = compile_pattern(f"^{literal(text)}$")
    assert pattern.matches(text)
    assert pattern.matches(other) == (text == other)


@settings(deadline=None)
@given(
    st.text("ab.(", max_size=3).map(re.escape),
    st.text("ab.(|", max_size=3).map(re.escape) | st.sampled_from(["(a|b)*", "[ab|)]+$", "a?$"]),
    st.text("ab.(|)", max_size=6),
)
def test_leading_negative_lookahead_agrees_with_a_backtracking_engine(unless: str, then: str, name: str) -> None:
    pattern = f"^(?!{unless}){then}"
    assert compile_pattern(pattern).matches(name) == (re.search(pattern, name) is not None)
