"""`headrace cluster up`, as somebody who tries it out."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pika
import pytest

from headrace.commands.cluster_up import launches


@pytest.fixture
def folder() -> Iterator[Path]:
    """Where an unprivileged user may enter, as PostgreSQL's must."""
    with TemporaryDirectory(prefix="headrace-up-") as name:
        Path(name).chmod(0o711)
        yield Path(name)


def test_each_node_gets_its_number_its_folder_and_its_ports() -> None:
    ports = [{"amqp": 1, "peer": 2}, {"amqp": 3, "peer": 4}]
    first, second = launches(2, Path("/data"), "postgresql://db", Path("/data/secret"), ports, ["--log-level", "debug"])
    assert first[first.index("--node-id") + 1] == "1" and second[second.index("--node-id") + 1] == "2"
    assert second[second.index("--data") + 1] == "/data/node-2"
    assert second[second.index("--peer") + 1] == "127.0.0.1:4"
    assert second[-2:] == ["--log-level", "debug"]


def test_three_nodes_come_up_take_a_message_outlive_one_and_stop_together(folder: Path) -> None:
    command = [sys.executable, "-m", "headrace", "cluster", "up", "--data", str(folder / "c"), "--free-ports"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout is not None
        ports: dict[int, int] = {}
        for line in process.stdout:
            if found := re.match(r"node (\d): ready .*\bamqp=127\.0\.0\.1:(\d+)", line):
                ports[int(found[1])] = int(found[2])
            if line.startswith("cluster ready"):
                break
        assert sorted(ports) == [1, 2, 3], (folder / "log").read_text()
        told = (folder / "log").read_text()
        leader = _leader_of_shard_0(told) or _wait_for_leader(folder / "log")
        other = next(node for node in ports if node != leader)
        with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", ports[other])) as connection:
            channel = connection.channel()
            channel.queue_declare("orders", durable=True)
            channel.confirm_delivery()
            channel.basic_publish("", "orders", b"one flat white", pika.BasicProperties(delivery_mode=2))
            pids = dict(re.findall(r"node (\d): .* starting .*pid=(\d+)", (folder / "log").read_text()))
            os.kill(int(pids[str(leader)]), signal.SIGKILL)
            assert channel.basic_get("orders", auto_ack=True)[2] == b"one flat white"
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0, rest
        assert f"node {leader} ended with status -9" in rest
    finally:
        process.kill()
        process.communicate()


def _leader_of_shard_0(told: str) -> int | None:
    found = re.findall(r"node (\d): .*: shard 0 is served", told)
    return int(found[-1]) if found else None


def _wait_for_leader(log: Path) -> int:
    with subprocess.Popen(["tail", "-n", "+1", "-f", str(log)], stdout=subprocess.PIPE, text=True) as tail:
        assert tail.stdout is not None
        try:
            for line in tail.stdout:
                if (found := _leader_of_shard_0(line)) is not None:
                    return found
        finally:
            tail.kill()
    raise AssertionError("nobody leads shard 0")
