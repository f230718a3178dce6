"""The OpenAPI 3.1 document of the door, made from the same declarations that check its requests. Format; pure."""

from collections.abc import Sequence
from typing import Any

import msgspec

from headrace.gateways.http.operations import Operation, Parameters
from headrace.gateways.http.problems import MEDIA_TYPE, Code, ProblemDocument

PATH = "/api/v1/openapi.json"
_REFERENCE = "#/components/schemas/{name}"
_COMMON = (Code.MALFORMED, Code.INVALID_PARAMETER, Code.INTERNAL_ERROR)
_OF_LOGIN = (Code.UNAUTHORIZED, Code.FORBIDDEN, Code.TOO_MANY_FAILURES)
_OF_BODY = (Code.REQUEST_TIMEOUT, Code.BODY_TOO_LARGE, Code.UNSUPPORTED_MEDIA_TYPE, Code.INVALID)


def document(operations: Sequence[Operation], *, version: str) -> dict[str, Any]:
    kinds = _kinds(operations)
    schemas, components = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schema_of = dict(zip(map(_key, kinds), schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": version,
            "description": "Topics, messages, queues, consumer groups and metrics of a broker.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"basic": []}],
        "tags": [{"name": name} for name in sorted({one.tag for one in operations})],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
    }


def _key(kind: Any) -> str:
    return repr(kind)


def _kinds(operations: Sequence[Operation]) -> list[Any]:
    found: dict[str, Any] = {_key(ProblemDocument): ProblemDocument}
    for one in operations:
        for kind in (one.body, *one.answers.values()):
            if kind is not None:
                found[_key(kind)] = kind
    return list(found.values())


def _operation(one: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": one.id,
        "summary": one.summary,
        "tags": [one.tag],
        "responses": _responses(one, schema_of),
    }
    if one.description:
        described["description"] = one.description
    if parameters := [*_parameters(one.parameters, "path"), *_parameters(one.query, "query")]:
        described["parameters"] = parameters
    if one.body is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema_of[_key(one.body)]}},
        }
    if not one.login:
        described["security"] = []
    return described


def _parameters(kind: type[Parameters], place: str) -> list[dict[str, Any]]:
    (_schema,), components = msgspec.json.schema_components([kind], ref_template=_REFERENCE)
    found = components[kind.__name__]
    described: list[dict[str, Any]] = []
    for name, schema in found["properties"].items():
        text = schema.pop("description", "")
        schema.pop("default", None) if schema.get("default", ...) is None else None
        if options := schema.get("anyOf"):
            # A parameter that may be left out is never null.
            left = [option for option in options if option != {"type": "null"}]
            if len(left) == 1:
                schema.pop("anyOf")
                text = text or left[0].pop("description", "")
                schema |= left[0]
        described.append(
            {"name": name, "in": place, "required": place == "path" or name in found["required"], "schema": schema}
            | ({"description": text} if text else {})
        )
    return described


def _responses(one: Operation, schema_of: dict[str, Any]) -> dict[str, Any]:
    responses: dict[str, Any] = {}
    for status, kind in one.answers.items():
        responses[str(status)] = {"description": "Done"}
        if kind is not None:
            responses[str(status)]["content"] = {one.media_type: {"schema": schema_of[_key(kind)]}}
        elif one.media_type != "application/json":
            responses[str(status)]["content"] = {one.media_type: {"schema": {"type": "string"}}}
    codes = [*_COMMON, *one.problems]
    codes += _OF_LOGIN if one.login else ()
    codes += _OF_BODY if one.body is not None else ()
    problem = {MEDIA_TYPE: {"schema": schema_of[_key(ProblemDocument)]}}
    for code in sorted(set(codes), key=lambda code: (code.status, code.code)):
        known = responses.get(str(code.status))
        text = f"`{code.code}`: {code.title}"
        if known is None:
            responses[str(code.status)] = {"description": text, "content": problem}
        else:
            known["description"] += f"; {text}"
    responses["default"] = {"description": "A problem", "content": problem}
    return responses
