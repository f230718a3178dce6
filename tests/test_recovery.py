"""An older meta.sqlite in the data directory: refused, and with --recover-metadata no message is lost by it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

from headrace.client import Client, Login, path
from tests.running_broker import RunningBroker


def client_of(broker: RunningBroker) -> Client:
    return Client(f"http://127.0.0.1:{broker.ports['http']}", Login("guest", "guest"))


def serve(broker: RunningBroker, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "serve", "--data", str(broker.data)]
    for door in ("amqp", "mqtt", "ws", "http"):
        command += [f"--{door}", "off"]
    return subprocess.run([*command, *flags], capture_output=True, text=True, timeout=60)


def put_back(kept: Path, data: Path) -> None:
    """As an operator would restore a backup: the file, without what SQLite keeps beside it."""
    for extra in data.glob("meta.sqlite-*"):
        extra.unlink()
    shutil.copy(kept, data / "meta.sqlite")


def values(client: Client, topic: str) -> list[str]:
    page = client.get(path("topics", topic, "partitions", 0, "messages"))
    return [one["value"] for one in page["messages"]]


def test_older_metadata_are_refused_and_recovered_when_asked_to(tmp_path: Path) -> None:
    broker = RunningBroker(tmp_path, arguments=["--http", "127.0.0.1:0"])
    with broker:
        with broker.connect() as connection:
            channel = connection.channel()
            channel.queue_declare("kept", durable=True)
            channel.basic_publish("", "kept", b"in kept")
        broker.stop()
    kept = tmp_path / "backup.sqlite"
    shutil.copy(broker.data / "meta.sqlite", kept)
    with broker:
        with broker.connect() as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            channel.queue_declare("new", durable=True)
            channel.basic_publish("", "new", b"in new")
            channel.exchange_declare("gone", "fanout", durable=True)
            channel.queue_bind("kept", "gone")
            channel.basic_publish("gone", "", b"by gone")
            channel.exchange_delete("gone")
        with client_of(broker) as client:
            client.request("POST", path("topics"), body={"name": "events", "partitions": 2})
            body = [{"value": "an event", "partition": 0}]
            client.request("POST", path("topics", "events", "messages"), body=body)
        broker.stop()
    put_back(kept, broker.data)

    refused = serve(broker)
    assert refused.returncode == 74
    assert "the file was replaced by an older one" in refused.stderr
    assert "headrace serve --recover-metadata" in refused.stderr

    recovering = RunningBroker(tmp_path, arguments=["--http", "127.0.0.1:0", "--recover-metadata"])
    with recovering:
        check(recovering)
        recovering.stop()
    # Once is enough.
    with broker:
        check(broker)
        broker.stop()


def check(broker: RunningBroker) -> None:
    with client_of(broker) as client:
        assert values(client, "events") == ["an event"]
        assert values(client, "recovered.queue.new") == ["in new"]
        ready = client.get(path("queues", "kept", "messages"))["messages"]
        assert [one["value"] for one in ready] == ["in kept", "by gone"]
    told = [line for line in broker.log_path.read_text().splitlines() if "kept as a topic" in line]
    assert len(told) == 2, json.dumps(told)
