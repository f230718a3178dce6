"""A program that says less than it should, or ends badly, has shown nothing; one that asks for a restart gets one."""

import sys
from pathlib import Path

import pytest
from interop.broker import Broker, BrokerFailed
from interop.client import Feature, NotInstalled, Program, ProgramFailed, debian_version, find_program, python_version


class StoodIn(Broker):
    """Not started: a program of this file never connects."""

    restarts = 0

    def restart(self) -> None:
        self.restarts += 1


@pytest.fixture
def broker(tmp_path: Path) -> StoodIn:
    return StoodIn(tmp_path)


def program(script: str, *shows: Feature) -> Program:
    return Program("it", lambda: "1", shows, lambda: [sys.executable, "-c", script])


def test_program_says_what_it_has_shown(broker: StoodIn) -> None:
    shown: list[Feature] = []
    script = "print('shown confirms'); print('a library talks'); print('shown topic')"
    program(script, Feature.CONFIRMS, Feature.TOPIC).run(broker, shown.append)
    assert shown == [Feature.CONFIRMS, Feature.TOPIC]


def test_program_is_given_the_url(broker: StoodIn) -> None:
    program(f"import os; assert os.environ['AMQP_URL'] == {broker.url!r}").run(broker, lambda _: None)


def test_silence_about_a_feature_is_a_failure(broker: StoodIn) -> None:
    with pytest.raises(ProgramFailed, match="was to show"):
        program("print('shown confirms')", Feature.CONFIRMS, Feature.TOPIC).run(broker, lambda _: None)


def test_bad_status_is_a_failure_with_what_it_wrote(broker: StoodIn) -> None:
    script = "import sys; print('shown confirms'); print('told'); sys.exit('because')"
    with pytest.raises(ProgramFailed, match="status 1") as failed:
        program(script, Feature.CONFIRMS).run(broker, lambda _: None)
    assert "told" in str(failed.value)
    assert "because" in str(failed.value)


def test_program_may_have_the_broker_restarted(broker: StoodIn) -> None:
    script = "print('restart', flush=True); assert input() == 'restarted'; print('shown restart')"
    program(script, Feature.RESTART).run(broker, lambda _: None)
    assert broker.restarts == 1


@pytest.mark.parametrize(
    "find",
    [
        python_version("no-such-package"),
        debian_version("no-such-package"),
        debian_version("bash", "no-such-program"),
        lambda: find_program("no-such-program", "its-package"),
    ],
)
def test_what_is_not_installed_says_how_to_get_it(find: object) -> None:
    assert callable(find)
    with pytest.raises(NotInstalled, match="install "):
        find()


def test_broker_that_ended_by_itself_fails_the_program(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailed, match="ended by itself"), Broker(tmp_path) as broker:
        process = broker.process
        assert process is not None
        process.kill()
        process.wait()


def test_broker_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailed, match="no-such-flag"), Broker(tmp_path, arguments=["--no-such-flag"]):
        pass


def test_traceback_in_the_log_fails_the_program(tmp_path: Path) -> None:
    with pytest.raises(BrokerFailed, match="traceback"), Broker(tmp_path) as broker, broker.log_path.open("a") as log:
        log.write("Traceback (most recent call last):\n")
