"""Declarations of the door: what texts become, and what is told of those that cannot."""

from typing import Annotated

import pytest
from msgspec import Meta

from headrace.gateways.http.openapi import document
from headrace.gateways.http.operations import Body, Call, Operation, Parameters, Reply, body_from, parameters_from
from headrace.gateways.http.problems import Code, Problem


class Wanted(Parameters, frozen=True, kw_only=True):
    count: Annotated[int, Meta(ge=1, le=9, description="how many")] = 3
    flag: bool = False
    name: Annotated[str | None, Meta(description="whose")] = None


class Thing(Body, frozen=True, kw_only=True):
    size: int


async def make_thing(call: Call[Parameters, Wanted, Thing]) -> Reply:
    return Reply(call.body)


def test_texts_become_what_they_are_declared_as() -> None:
    assert parameters_from(Wanted, {"count": "5", "flag": "true", "name": "7"}) == Wanted(count=5, flag=True, name="7")
    assert parameters_from(Wanted, {}) == Wanted()


@pytest.mark.parametrize("values", [{"count": "0"}, {"count": "x"}, {"flag": "perhaps"}, {"other": "1"}])
def test_text_that_cannot_be_is_told_with_its_name(values: dict[str, str]) -> None:
    with pytest.raises(Problem) as caught:
        parameters_from(Wanted, values)
    assert caught.value.code is Code.INVALID_PARAMETER
    assert next(iter(values)) in caught.value.detail


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", Code.MALFORMED),
        (b"{", Code.MALFORMED),
        (b'{"size": 1}x', Code.MALFORMED),
        (b"[]", Code.INVALID),
        (b'{"size": "1"}', Code.INVALID),
        (b'{"size": 1, "sice": 1}', Code.INVALID),
    ],
)
def test_body_that_cannot_be_read_is_malformed_and_one_that_says_other_things_invalid(data: bytes, code: Code) -> None:
    with pytest.raises(Problem) as caught:
        body_from(Thing, data)
    assert caught.value.code is code


def test_document_is_made_of_the_same_declarations() -> None:
    path = "/api/v1/things/{thing}"

    class Path(Parameters, frozen=True, kw_only=True):
        thing: str

    operation = Operation(
        "POST", path, make_thing, "Make a thing", parameters=Path, query=Wanted, body=Thing, problems=(Code.IN_USE,)
    )
    made = document([operation], version="1")
    told = made["paths"][path]["post"]
    assert told["operationId"] == "make_thing"
    assert told["tags"] == ["things"]
    assert told["parameters"] == [
        {"name": "thing", "in": "path", "required": True, "schema": {"type": "string"}},
        {
            "name": "count",
            "in": "query",
            "required": False,
            "schema": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "description": "how many",
        },
        {"name": "flag", "in": "query", "required": False, "schema": {"type": "boolean", "default": False}},
        {"name": "name", "in": "query", "required": False, "schema": {"type": "string"}, "description": "whose"},
    ]
    assert made["components"]["schemas"]["Thing"]["additionalProperties"] is False
    assert "`in_use`" in told["responses"]["409"]["description"]
    assert {"200", "400", "401", "403", "413", "415", "422", "500", "default"} <= set(told["responses"])
