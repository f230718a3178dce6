"""Filters that spare reading: narrower only where that is certain."""

from datetime import UTC, datetime, timedelta, timezone

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from headrace.filtering.expression import parse
from headrace.spark.source_filters import Bounds, bounds

RANGES = {("a", 0): (0, 100), ("a", 1): (50, 80), ("b", 0): (10, 20)}


def left(*filters: Filter) -> dict[tuple[str, int], tuple[int, int]]:
    return bounds(filters).within(RANGES)


def test_no_filter_leaves_all() -> None:
    assert left() == RANGES


def test_offsets() -> None:
    assert left(GreaterThanOrEqual(("offset",), 60), LessThan(("offset",), 70)) == {
        ("a", 0): (60, 70),
        ("a", 1): (60, 70),
    }
    assert left(GreaterThan(("offset",), 60), LessThanOrEqual(("offset",), 70))["a", 0] == (61, 71)
    assert left(EqualTo(("offset",), 15)) == {("a", 0): (15, 16), ("b", 0): (15, 16)}
    assert left(In(("offset",), (12, 18, 15)))["b", 0] == (12, 19)


def test_partitions_and_topics() -> None:
    assert set(left(EqualTo(("partition",), 1))) == {("a", 1)}
    assert set(left(In(("partition",), (1, 2)), EqualTo(("topic",), "b"))) == set()
    assert set(left(GreaterThan(("partition",), 0))) == {("a", 1)}
    assert set(left(LessThanOrEqual(("partition",), 0))) == {("a", 0), ("b", 0)}
    assert set(left(EqualNullSafe(("topic",), "a"), EqualTo(("partition",), 0))) == {("a", 0)}


def test_times_are_compared_as_moments() -> None:
    noon = datetime(2026, 5, 1, 12, tzinfo=UTC)
    elsewhere = noon.astimezone(timezone(timedelta(hours=5)))
    us = 1_777_636_800_000_000
    assert bounds([GreaterThanOrEqual(("timestamp",), elsewhere)]).since_us == us
    assert bounds([GreaterThan(("timestamp",), noon)]).since_us == us + 1
    assert bounds([LessThan(("timestamp",), noon)]).until_us == us
    assert bounds([LessThanOrEqual(("timestamp",), noon)]).until_us == us + 1
    found = bounds([EqualTo(("timestamp",), noon)])
    assert (found.since_us, found.until_us) == (us, us + 1)


def test_time_without_a_zone_is_left_to_spark() -> None:
    assert bounds([GreaterThan(("timestamp",), datetime(2026, 5, 1))]) == Bounds()


def test_tags_join_the_expression_that_was_asked_for() -> None:
    assert bounds([EqualTo(("tag",), "eu")]).tags == parse("eu").canonical
    assert bounds([In(("tag",), ("eu", "us"))], "!test").tags == parse("!test && (eu || us)").canonical


@given(st.text(min_size=1, max_size=20))
def test_tag_of_any_letters_is_quoted(tag: str) -> None:
    found = bounds([EqualTo(("tag",), tag)]).tags
    assert found is None or parse(found).matches((tag,))


def test_more_tags_than_an_expression_takes_are_left_to_spark() -> None:
    assert bounds([In(("tag",), tuple(f"t{number}" for number in range(1000)))]) == Bounds()


def test_what_is_not_understood_is_left_to_spark() -> None:
    strange = [
        Not(EqualTo(("offset",), 5)),
        IsNotNull(("offset",)),
        StringStartsWith(("topic",), "a"),
        EqualTo(("amqp", "type"), "x"),
        EqualTo(("value",), b"x"),
        EqualTo(("partition",), "one"),
        GreaterThan(("offset",), None),
        EqualTo(("tag",), None),
        In(("offset",), (1, "x")),
        EqualTo(("offset",), True),
    ]
    assert bounds(strange) == Bounds()
