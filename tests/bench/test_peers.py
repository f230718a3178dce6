"""Starting and stopping brokers: readiness, failure, absence, and the peers that this machine has."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from bench.claim import NotRun
from bench.peers import PEERS, peer
from bench.peers.headrace import Headrace, doors_of
from bench.peers.mosquitto import Mosquitto
from bench.peers.nats import Nats

ROOT = Path(__file__).parent.parent.parent
SERVE = """
import signal, socket, sys
with socket.create_server(("127.0.0.1", 0)) as door:
    print("starting", file=sys.stderr, flush=True)
    print(f"ready amqp=127.0.0.1:{door.getsockname()[1]} http=127.0.0.1:1", flush=True)
    while True:
        connection, _ = door.accept()
        with connection:
            connection.recv(8)
            connection.sendall(b"\\x01\\x00\\x00rest of connection.start")
"""


def is_gone(pid: int) -> bool:
    """Ended; whether its parent has asked for its status yet is not ours to say."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def written(file: Path) -> str:
    """Waits for a program to write its first line."""
    while not (file.exists() and file.read_text().endswith("\n")):
        os.sched_yield()
    return file.read_text()


@pytest.mark.parametrize("name", ["rabbitmq-classic", "mosquitto", "mosquitto-unbounded", "nats", "amqtt"])
def test_an_installed_peer_answers_while_the_block_runs_and_is_gone_after_it(name: str) -> None:
    with ExitStack() as up:
        try:
            running = up.enter_context(PEERS[name].start())
        except peer.NotInstalled as missing:
            pytest.skip(str(missing))
        assert peer.answers(running.proto, running.port)
        assert (running.name, running.version == "unknown") == (name, False)
        assert running.log.exists()
    assert is_gone(running.pid)
    assert not peer.accepts(running.port)
    assert not running.log.parent.exists()


@pytest.mark.parametrize(("absent", "package"), [(Mosquitto(), "mosquitto"), (Nats(), "nats-server")])
def test_a_peer_that_is_not_installed_is_named_with_its_package(
    absent: peer.Peer, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda *_, **__: None)
    with pytest.raises(peer.NotInstalled, match=f"apt-get install {package}$"), absent.start():
        pass


def test_a_missing_package_ends_the_command_with_status_2_and_no_traceback() -> None:
    missing = "import bench.peers.rabbitmq as r, pathlib, runpy, sys; r.SERVER = pathlib.Path('/nowhere');"
    missing += "sys.argv[1:] = ['rabbitmq-quorum']; runpy.run_module('bench.peers', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", missing], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "RabbitMQ is not installed: apt-get install rabbitmq-server\n"


def test_a_program_that_ends_at_once_fails_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('this port is taken')"]
    with (
        pytest.raises(peer.StartFailed, match="this port is taken"),
        peer.process(command, tmp_path / "log", lambda: False),
    ):
        pass


def test_a_program_that_never_gets_ready_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "START_SECONDS_MAX", 0.0)
    log = tmp_path / "log"
    with (
        pytest.raises(peer.StartFailed, match="was not ready"),
        peer.process(["/bin/sh", "-c", "echo $$; exec sleep 60"], log, lambda: not written(log)),
    ):
        pass
    assert is_gone(int(log.read_text()))


def test_a_program_that_ignores_being_asked_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "STOP_SECONDS_MAX", 0.1)
    log = tmp_path / "log"
    script = "trap '' TERM; sleep 60 & echo $!; wait"
    with peer.process(["/bin/sh", "-c", script], log, lambda: bool(written(log))):
        child = int(log.read_text())
        assert not is_gone(child)
    until = time.monotonic() + 20
    while not is_gone(child):  # the kill is under way
        assert time.monotonic() < until
        os.sched_yield()


def test_headrace_is_up_when_its_ready_line_says_so() -> None:
    with Headrace("amqp", command=[sys.executable, "-c", SERVE]).start() as running:
        assert (running.name, running.proto) == ("headrace", "amqp")
        assert peer.answers("amqp", running.port)
    assert is_gone(running.pid)


def test_a_door_that_headrace_did_not_open_cannot_be_measured() -> None:
    absent = Headrace("mqtt", command=[sys.executable, "-c", SERVE])
    with pytest.raises(NotRun, match="opened no mqtt door"), absent.start():
        pass


def test_a_headrace_that_does_not_start_is_a_failure_and_not_an_absence() -> None:
    broken = Headrace("amqp", command=[sys.executable, "-c", "raise SystemExit('data directory is locked')"])
    with pytest.raises(peer.StartFailed, match="data directory is locked"), broken.start():
        pass


@pytest.mark.parametrize(
    ("output", "doors"),
    [
        ("", None),
        ("ready amqp=127.0.0.1:56", None),  # the line is still being written
        ("ready\n", {}),
        ("starting\nready amqp=127.0.0.1:5672 ws=[::1]:8083\n", {"amqp": 5672, "ws": 8083}),
        ("already up\n", None),
    ],
)
def test_ready_line(output: str, doors: dict[str, int] | None) -> None:
    assert doors_of(output) == doors


def test_being_told_to_end_stops_the_peers(tmp_path: Path) -> None:
    """`python -m bench.peers` with a peer of ours in place of an installed one."""
    script = (
        "import runpy, sys; from bench import peers; from bench.peers.headrace import Headrace;"
        f"peers.PEERS['headrace-amqp'] = Headrace('amqp', command=[sys.executable, '-c', {SERVE!r}]);"
        "sys.argv[1:] = ['headrace-amqp']; runpy.run_module('bench.peers', run_name='__main__')"
    )
    env = os.environ | {"TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=env) as held:
        assert held.stdout is not None
        listed = ""
        while not listed.endswith("]\n"):
            listed += held.stdout.readline()
        (pid,) = [int(line.strip(" ,\n").partition(": ")[2]) for line in listed.splitlines() if '"pid"' in line]
        held.send_signal(signal.SIGTERM)
        assert held.wait(20) == 0
    assert is_gone(pid)
    assert list(tmp_path.iterdir()) == []
