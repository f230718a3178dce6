"""Field tables keep AMQP's types exactly, through text and back."""

from datetime import UTC, datetime
from decimal import Decimal
from math import inf, isnan, nan

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.errors import Invalid
from headrace.controller.table import DEPTH_MAX, EMPTY, ByteArray, FieldIn, Table

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.binary(max_size=8)
    | st.binary(max_size=8).map(bytearray)
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.just(UTC))
)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))
tables = st.dictionaries(names, values, max_size=4)


@settings(deadline=None)
@given(tables)
def test_text_form_gives_the_same_table_back(fields: dict[str, FieldIn]) -> None:
    table = Table(fields)
    again = Table.parse(table.text)
    assert again == table
    assert hash(again) == hash(table)
    assert again.text == table.text
    assert Table(again.thaw()) == table


@settings(deadline=None)
@given(tables)
def test_order_of_names_does_not_matter(fields: dict[str, FieldIn]) -> None:
    assert Table(dict(reversed(fields.items()))).text == Table(fields).text


def test_values_of_different_types_are_different_arguments() -> None:
    kinds: list[FieldIn] = [1, 1.0, True, "1", b"1", bytearray(b"1"), Decimal(1), None, [1], {"1": 1}]
    assert len({Table({"x": value}) for value in kinds}) == len(kinds)


def test_nested_tables_that_look_like_tags_are_kept() -> None:
    fields: dict[str, FieldIn] = {"a": {"S": "AA=="}, "b": {"T": 5}, "c": [{"F": {}}], "d": {"x": bytearray(b"\xff")}}
    assert Table.parse(Table(fields).text).thaw() == fields


def test_times_without_zone_are_utc() -> None:
    assert Table({"t": datetime(2024, 1, 1)})["t"] == datetime(2024, 1, 1, tzinfo=UTC)


def test_odd_floats_survive() -> None:
    table = Table.parse(Table({"n": nan, "i": -inf}).text)
    value = table["n"]
    assert isinstance(value, float) and isnan(value)
    assert table["i"] == -inf


def test_values_handed_out_cannot_be_changed() -> None:
    given_list: list[FieldIn] = [1]
    table = Table({"l": given_list, "b": bytearray(b"x")})
    given_list.append(2)
    assert table["l"] == (1,)
    assert isinstance(table["b"], ByteArray)
    with pytest.raises(TypeError):
        table["l"] = 1  # type: ignore[index]


@pytest.mark.parametrize("value", [2**63, object(), "\ud800", {1: 2}, {"\ud800": 1}])
def test_what_amqp_cannot_carry_is_refused(value: FieldIn) -> None:
    with pytest.raises(Invalid):
        Table({"x": value})


def test_nesting_is_allowed_to_the_limit_and_refused_past_it() -> None:
    def nested(depth: int) -> FieldIn:
        value: FieldIn = "leaf"
        for _ in range(depth):
            value = [value]
        return value

    assert Table.parse(Table({"x": nested(DEPTH_MAX)}).text)
    with pytest.raises(Invalid, match="nested"):
        Table({"x": nested(DEPTH_MAX + 1)})


def test_empty_table_has_one_text() -> None:
    assert Table.parse("{}") is EMPTY
    assert Table({}) == EMPTY
    assert EMPTY.text == "{}"
