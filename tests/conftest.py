"""At the end of a full run: how many rows of the pages of conformance its tests have shown. Driver of pytest.

A full run is one that was not narrowed by paths, -k, -m or the like; it fails when a test that a page names is
missing, was skipped, or did not pass. A few tests that fail in it are tried once more alone (unsteady.py).
"""

import os
from typing import Any

import pytest
from _pytest.config import Config

from tests.conformance import PAGES, rows_of, summary
from tests.unsteady import passes_alone

# What fails in a program of interop/ is told as well as what fails in a test.
pytest.register_assert_rewrite("interop")

_passed: dict[str, bool] = {}
# As pytest names them, with parameters, in the order in which they failed.
_failed: dict[str, None] = {}
_unsteady: list[str] = []


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: Config, log: Any) -> Any:
    """A file is run by one worker, and all files of Spark by one: a session is a JVM, which takes long to get going."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/spark" if nodeid.startswith("tests/spark/") else str(super()._split_scope(nodeid))

    return Scheduling(config, log)


def _is_full(config: Config) -> bool:
    option = config.option
    narrowed = option.keyword or option.markexpr or option.deselect or option.lf or option.collectonly
    paths = config.args_source is not Config.ArgsSource.TESTPATHS
    return not (narrowed or paths or os.environ.get("AMQP_PEER"))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    test = report.nodeid.partition("[")[0]
    if report.failed:
        _failed[report.nodeid] = None
    elif report.skipped:
        _passed[test] = False
    elif report.when == "call":
        _passed.setdefault(test, True)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    # A worker of xdist has run a share of the tests: the whole is judged by the process that sent them out.
    if hasattr(session.config, "workerinput"):
        return
    if not _is_full(session.config) or exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return
    if _failed and passes_alone(list(_failed), session.config.rootpath):
        _unsteady.extend(_failed)
        _failed.clear()
        session.exitstatus = pytest.ExitCode.OK
    for test in _unsteady:
        _passed.setdefault(test.partition("[")[0], True)
    for test in _failed:
        _passed[test.partition("[")[0]] = False
    if any(summary(page.name, rows_of(page), _passed)[1] for page in PAGES):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _is_full(terminalreporter.config):
        return
    for test in _unsteady:
        terminalreporter.write_line(f"unsteady, failed beside others and passed alone: {test}", yellow=True)
    for page in PAGES:
        line, wrong = summary(page.name, rows_of(page), _passed)
        for problem in wrong:
            terminalreporter.write_line(f"{page.name} conformance: {problem}", red=True)
        terminalreporter.write_line(line)
