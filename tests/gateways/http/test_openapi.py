"""The OpenAPI document is true: what is generated from it meets no error of ours, and no answer that it has not."""

import os
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.gateways.http.app import all_operations
from headrace.gateways.http.operations import Operation

from .conftest import GUEST, HttpBroker

CONFIG = """
[http]
poll_s_max = 1
"""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
# Lawful answers of this node as it is, which are no mistakes of the door's.
NOT_OURS = {503, 507}
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "8"))
KNOWN = {"topic": "t", "queue": "q", "partition": 0, "group": "g"}


@pytest.fixture(scope="module")
def api(broker: HttpBroker) -> Any:
    with broker.client() as client:
        loaded = schemathesis.openapi.from_dict(client.get("/api/v1/openapi.json").json())
    loaded.config.update(base_url=broker.url)
    return loaded


@pytest.fixture(autouse=True)
def known_things(broker: HttpBroker) -> None:
    """Each test finds them, whatever the one before has deleted."""
    with broker.connect() as connection:
        connection.channel().queue_declare("q", durable=True)
    with broker.client() as client:
        client.post("/api/v1/topics", json={"name": "t", "partitions": 2})
        client.post("/api/v1/topics/t/messages", json=[{"key": str(n), "value": "v", "tags": ["a"]} for n in range(9)])


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", all_operations(), ids=lambda one: one.id)
def test_generated_requests_meet_what_the_document_names(api: Any, operation: Operation, mode: GenerationMode) -> None:
    if mode is GenerationMode.NEGATIVE and operation.body is None and operation.query is operation.parameters:
        pytest.skip("nothing about it can be wrong")

    @given(case=api[operation.path][operation.method].as_strategy(generation_mode=mode), known=st.booleans())
    @settings(
        max_examples=EXAMPLES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    def ask(case: schemathesis.Case, known: bool) -> None:
        if known:
            # What is there, so that more than 404 is met.
            found = {name: value for name, value in KNOWN.items() if name in case.path_parameters}
            case.path_parameters.update(found)
        answer = case.call(auth=GUEST)
        if answer.status_code not in NOT_OURS:
            case.validate_response(answer, checks=CHECKS)

    ask()


def test_every_operation_has_a_name_of_its_own_and_every_path_parameter_a_meaning(http: httpx.Client) -> None:
    document = http.get("/api/v1/openapi.json").json()
    operations = [one for path in document["paths"].values() for one in path.values()]
    names = [one["operationId"] for one in operations]
    assert len(set(names)) == len(names)
    for path, methods in document["paths"].items():
        for one in methods.values():
            declared = {item["name"] for item in one.get("parameters", ()) if item["in"] == "path"}
            assert declared == {part[1:-1] for part in path.split("/") if part.startswith("{")}, path


def test_document_names_every_schema_that_it_refers_to(http: httpx.Client) -> None:
    text = http.get("/api/v1/openapi.json").text
    known = http.get("/api/v1/openapi.json").json()["components"]["schemas"]
    referred = {part.partition('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    assert referred <= set(known)
    # Two types of one name would be two schemas under long names.
    assert not [name for name in known if "." in name or "_" in name]
