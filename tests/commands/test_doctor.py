"""What `headrace doctor` finds, on machines that are well and on those that are not."""

import json
import os
import resource
import socket
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner, Result
from tests.core_log.directories import add_stream, open_directory

from headrace.cli import commands
from headrace.commands import doctor
from headrace.core_log.config import LogConfig
from headrace.core_log.storage.disk import DiskStorage

DOORS_SHUT = {f"HEADRACE_DOORS__{name}": "off" for name in ("AMQP", "MQTT", "WS", "HTTP")}


def run(*arguments: object, **environ: str) -> Result:
    result = CliRunner().invoke(commands, ["doctor", *map(str, arguments)], env=DOORS_SHUT | environ)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def findings(*arguments: object, **environ: str) -> dict[tuple[str, str], str]:
    """By check and level."""
    lines = run(*arguments, "--json", **environ).stdout.splitlines()
    return {(one["check"], one["level"]): one["text"] for one in map(json.loads, lines)}


def test_machine_that_is_well_gets_status_0_and_nothing_is_made(tmp_path: Path) -> None:
    data = tmp_path / "data"
    result = run("--data", data)
    assert result.exit_code == 0, result.output
    for check in ("version", "configuration", "open files", "memory", "clock", "data directory", "disk"):
        assert check in result.stdout
    assert not data.exists()


def test_problem_gets_status_1(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = run("--data", tmp_path / "file")
    assert result.exit_code == 1
    assert "cannot be read and written" in result.stdout


def test_every_problem_of_the_configuration_is_told(tmp_path: Path) -> None:
    file = tmp_path / "headrace.toml"
    file.write_text("[storage]\nsegmnt_bytes = 1\nhandles_max = 'x'\n")
    result = run("--config", file)
    assert result.exit_code == 1
    assert "segmnt_bytes" in result.stdout
    assert "handles_max" in result.stdout


def test_too_few_open_files_are_a_warning_with_a_way_out(tmp_path: Path) -> None:
    with patch.object(resource, "getrlimit", lambda _what: (1024, 1 << 20)):
        found = findings("--data", tmp_path / "data")
    assert "1,024 open files are allowed" in found["open files", "warning"]
    assert "ulimit -n 10612" in found["open files", "warning"]


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="the kernel lists no locks here")
def test_directory_in_use_is_told_without_being_disturbed(tmp_path: Path) -> None:
    storage = DiskStorage(tmp_path)
    storage.lock()
    try:
        assert f"in use by process {os.getpid()}" in findings("--data", tmp_path)["data directory", "ok"]
    finally:
        storage.unlock()
    assert "not in use" in findings("--data", tmp_path)["data directory", "ok"]


def test_directory_that_others_can_look_into_is_a_warning(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    assert "chmod 700" in findings("--data", tmp_path)["data directory", "warning"]
    tmp_path.chmod(0o700)
    assert ("data directory", "warning") not in findings("--data", tmp_path)


def test_what_streams_may_lose_is_told_and_one_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    directory = open_directory(DiskStorage(tmp_path))
    add_stream(directory, "safe", LogConfig())
    add_stream(directory, "quick", LogConfig(durability="os"))
    directory.close_now()
    found = findings("--data", tmp_path)
    assert found["durability", "warning"].startswith("quick: durability os, a loss of power may take seconds")
    bad = next(iter(directory.streams))
    (tmp_path / "streams" / str(bad) / "stream.json").write_text("{")
    assert f"streams/{bad}/stream.json" in findings("--data", tmp_path)["streams", "problem"]


def test_port_that_somebody_else_has_is_a_problem(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        found = findings("--data", tmp_path / "data", HEADRACE_DOORS__AMQP=address)
    assert f"amqp {address}: Address already in use" in found["ports", "problem"]
    assert findings("--data", tmp_path / "data", HEADRACE_DOORS__AMQP=address)["ports", "ok"].endswith("is free")


@pytest.mark.parametrize(("kind", "level"), [("tmpfs", "problem"), ("nfs4", "warning")])
def test_disk_that_does_not_keep_its_word_is_told(tmp_path: Path, kind: str, level: str) -> None:
    with patch.object(doctor, "_file_system", lambda _at: kind):
        assert f"is on {kind}" in findings("--data", tmp_path)["disk", level]


def test_file_system_is_that_of_the_nearest_mount() -> None:
    assert doctor._file_system(Path("/proc/self")) == "proc"


def test_clock_of_another_age_is_a_problem(tmp_path: Path) -> None:
    with patch.object(doctor.time, "time", lambda: 0.0):
        assert "times of messages would lie" in findings("--data", tmp_path)["clock", "problem"]


def test_clock_that_nobody_keeps_right_is_a_warning(tmp_path: Path) -> None:
    with patch.object(doctor, "_is_synchronised", lambda: False):
        assert "NTP" in findings("--data", tmp_path)["clock", "warning"]
