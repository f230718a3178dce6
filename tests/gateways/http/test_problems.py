"""Problem documents: every error of the broker has a code, and a document is always JSON."""

import msgspec
import pytest

from headrace.controller import errors as metadata_errors
from headrace.core_log import errors as log_errors
from headrace.core_log.errors import HeadraceError
from headrace.gateways.http.problems import Code, Problem, problem_of

STATUSES = {400, 401, 403, 404, 405, 408, 409, 412, 413, 415, 416, 422, 429, 431, 500, 503, 507}
# Roots of families, and what never reaches a door.
UNMAPPED = {"HeadraceError", "PeerError"}


def test_codes_are_unlike_and_their_statuses_are_http_s() -> None:
    assert len({one.code for one in Code}) == len(Code)
    assert {one.status for one in Code} == STATUSES


ERRORS = sorted(
    {
        kind
        for module in (log_errors, metadata_errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, HeadraceError) and kind.__name__ not in UNMAPPED
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_of_ours_has_a_code_and_keeps_its_words(kind: type[HeadraceError]) -> None:
    error = kind.__new__(kind)
    error.args = ("these words",)
    problem = problem_of(error)
    assert problem.code is not Code.INTERNAL_ERROR
    assert problem.detail == "these words"


def test_refusals_are_the_caller_s_affair_and_failures_ours() -> None:
    for kind in ERRORS:
        error = kind.__new__(kind)
        error.args = ("",)
        assert (problem_of(error).code.status < 500) == issubclass(kind, log_errors.Refused), kind


def test_document_of_a_name_that_is_no_utf_8_is_json_all_the_same() -> None:
    document = Problem(Code.NOT_FOUND, "no queue 'a\udcff'").document()
    assert msgspec.json.decode(msgspec.json.encode(document)) == {
        "type": "/api/v1/problems#not_found",
        "title": Code.NOT_FOUND.title,
        "status": 404,
        "code": "not_found",
        "detail": "no queue 'a\\udcff'",
    }
