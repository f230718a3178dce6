"""Tags: their bounds at the limit and one past it, lists as text and back, dimensions."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.filtering.tags import (
    TAG_BYTES_MAX,
    TAG_COUNT_MAX,
    InvalidTags,
    collect,
    dimension,
    from_dimensions,
    from_text,
    to_text,
)

TAGS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=20)


@pytest.mark.parametrize(
    ("text", "tags"),
    [
        ("eu,vip", ("eu", "vip")),
        (" vip , eu ,, eu", ("eu", "vip")),
        ("", ()),
        (" , ", ()),
        ("tier=gold,eu", ("eu", "tier=gold")),
        ('"a,b",c', ("a,b", "c")),
        (r'"say \"hi\" \\ bye"', ('say "hi" \\ bye',)),
        ('" padded " , plain text', (" padded ", "plain text")),
        ("größe=L,日本", ("größe=L", "日本")),
        (r"back\slash", ("back\\slash",)),
    ],
)
def test_list_of_tags_is_read(text: str, tags: tuple[str, ...]) -> None:
    assert from_text(text) == tags


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('"open', "column 1"),
        ('a,"open\\', "column 3"),
        ('"a"b', "column 4"),
        ('a"b', 'write it as "a'),
        ('""', "at least one character"),
        ("a\0b", "null character"),
        ("\udc80", "not UTF-8"),
        ("x" * (TAG_BYTES_MAX + 1), "longer than 255"),
        (",".join(map(str, range(TAG_COUNT_MAX + 1))), "more than 64"),
    ],
)
def test_list_that_cannot_be_kept_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidTags, match=reason):
        from_text(text)


def test_longest_tag_and_largest_number_of_tags_are_taken() -> None:
    assert from_text("x" * TAG_BYTES_MAX) == ("x" * TAG_BYTES_MAX,)
    assert len(from_text(",".join(map(str, range(TAG_COUNT_MAX))))) == TAG_COUNT_MAX


@given(st.lists(TAGS, max_size=10))
def test_every_list_is_read_back_as_it_was_written(tags: list[str]) -> None:
    assert from_text(to_text(tags)) == collect(tags)


def test_dimension_is_a_tag_with_an_equals_sign() -> None:
    assert from_dimensions({"tier": "gold", "region": "eu=west"}) == ("region=eu=west", "tier=gold")


@pytest.mark.parametrize(("name", "value"), [("a=b", "c"), ("", "c"), ("a", "")])
def test_dimension_without_a_plain_name_or_a_value_is_refused(name: str, value: str) -> None:
    with pytest.raises(InvalidTags):
        dimension(name, value)
