"""Who asks which broker, and what happens when that fails: the same for every command."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gateways.delivery.certificates import Authority
from tests.running_broker import RunningBroker

from headrace.exits import BrokerAway, NotAllowed

from .conftest import Headrace


def test_guest_needs_no_password_on_this_machine(headrace: Headrace) -> None:
    assert headrace.json("topics", "list")["topics"]


def test_password_comes_from_the_environment(headrace: Headrace) -> None:
    headrace.ok("topics", "list", "--user", "ann", HEADRACE_PASSWORD="right")
    headrace.ok("topics", "list", HEADRACE_USER="ann", HEADRACE_PASSWORD="right")
    with pytest.raises(NotAllowed):
        headrace("topics", "list", "--user", "ann", HEADRACE_PASSWORD="wrong")


def test_without_a_terminal_a_missing_password_is_a_usage_error(headrace: Headrace) -> None:
    result = headrace("topics", "list", "--user", "ann")
    assert result.exit_code == 2
    assert "set HEADRACE_PASSWORD" in result.stderr


def test_on_a_terminal_the_password_is_asked_for_and_not_shown(headrace: Headrace) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "headrace", "topics", "list", "--url", headrace.url, "--user", "ann", "--json"]
    try:
        with subprocess.Popen(
            command, stdin=end, stdout=subprocess.PIPE, stderr=end, env=environ, start_new_session=True
        ) as process:
            asked = b""
            while b"password of ann: " not in asked:
                asked += os.read(terminal, 4096)
            os.write(terminal, b"right\n")
            assert process.stdout is not None
            assert process.stdout.read().startswith(b'{"topics": ')
            assert process.wait(60) == 0
        assert b"right" not in os.read(terminal, 4096)
    finally:
        os.close(terminal)
        os.close(end)


def test_password_in_the_url_is_refused_before_anything_is_sent(headrace: Headrace) -> None:
    result = headrace("topics", "list", "--url", "http://guest:guest@127.0.0.1:1")
    assert result.exit_code == 2
    assert "no user or password in the URL" in result.stderr


def test_broker_that_is_away_is_one_line_and_status_69(headrace: Headrace) -> None:
    with pytest.raises(BrokerAway, match=r"no broker answers at http://127\.0\.0\.1:1: Connection refused"):
        headrace("health", "--url", "http://127.0.0.1:1")
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "health", "--url", "http://127.0.0.1:1"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (69, "")
    assert done.stderr.startswith("headrace: no broker answers at http://127.0.0.1:1: ")


def test_other_door_of_the_broker_is_no_http_door(headrace: Headrace, broker: RunningBroker) -> None:
    with pytest.raises(BrokerAway):
        headrace("health", "--url", f"http://127.0.0.1:{broker.port}")


def test_health_is_told(headrace: Headrace) -> None:
    assert headrace.json("health") == {"status": "ok", "alarms": []}
    assert "status  ok" in headrace.ok("health")


def test_health_of_a_broker_with_an_alarm_is_status_1(tmp_path: Path) -> None:
    config = "[alarms]\nmemory_share = 0.0001\n"
    with RunningBroker(tmp_path, config=config, arguments=["--http", "127.0.0.1:0"]) as broker:
        result = Headrace(broker)("health")
    assert result.exit_code == 1
    assert "degraded" in result.stdout


def test_certificate_of_the_broker_is_checked_against_the_given_authority(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.server()
    config = f"[tls]\ncertificate = '{certificate}'\nkey = '{key}'\n"
    with RunningBroker(tmp_path, config=config, arguments=["--http", "off", "--https", "127.0.0.1:0"]) as broker:
        headrace = Headrace(broker, "https")
        assert headrace.json("topics", "list", "--ca-file", authority.file)["topics"]
        headrace.ok("health", HEADRACE_CA_FILE=str(authority.file))
        with pytest.raises(BrokerAway, match="TLS fails"):
            headrace("health")
