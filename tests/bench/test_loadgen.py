"""The load generator: its command line, a round trip over MQTT, and what it puts on the wire over AMQP."""

import json
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from bench.peers.peer import Running
from pamqp import base, body, commands, frame, header

Decoded = base.Frame | header.ContentHeader | body.ContentBody


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(program), *arguments], capture_output=True, text=True, timeout=60)


def load(programs: Path, *arguments: str) -> dict[str, Any]:
    """Runs loadgen to its end, which must be a good one, and returns what it reports."""
    done = run(programs / "loadgen", "--quiet", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("program", ["loadgen", "limits", "nullbroker"])
def test_help_goes_to_stdout_and_is_no_error(programs: Path, program: str) -> None:
    done = run(programs / program, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {program}")


@pytest.mark.parametrize(
    ("program", "arguments", "said"),
    [
        ("loadgen", ["--no-such-flag"], "--no-such-flag"),
        ("loadgen", ["stray"], "usage"),
        ("loadgen", ["--proto", "stomp"], "usage"),
        ("loadgen", ["--size", "big"], "--size: not a number"),
        ("loadgen", ["--size", "23"], "--size must be at least 24"),
        ("loadgen", ["--publishers", "1.5"], "--publishers: not a whole number"),
        ("loadgen", ["--seconds", "-1"], "--seconds: not a number of 0 or more"),
        ("loadgen", ["--proto", "mqtt", "--unique-properties"], "are for amqp"),
        ("loadgen", ["--proto", "mqtt", "--single-ack"], "are for amqp"),
        ("loadgen", ["--single-ack", "--autoack"], "exclude each other"),
        ("limits", [], "usage"),
        ("limits", ["--no-such-flag"], "usage"),
        ("limits", ["/no/such/directory"], "/no/such/directory"),
        ("limits", [".", "long"], "not a number of seconds"),
        ("nullbroker", [], "usage"),
        ("nullbroker", ["65536"], "usage"),
    ],
)
def test_wrong_usage_is_named_and_ends_with_status_2(
    programs: Path, program: str, arguments: list[str], said: str
) -> None:
    done = run(programs / program, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr


def test_a_server_that_is_not_there_is_an_error_in_the_result(programs: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        done = run(programs / "loadgen", "--proto", "mqtt", "--port", str(taken.getsockname()[1]), "--count", "1")
    assert done.returncode == 1
    assert "Connection refused" in json.loads(done.stdout.splitlines()[-1])["error_text"]


# ---- MQTT, against the smallest server


@pytest.mark.parametrize("qos", ["0", "1"])
def test_round_trip_counts_every_message_once(programs: Path, null_broker: Running, qos: str) -> None:
    flags = ["--qos", qos, "--count", "5000", "--verify"]
    result = load(programs, "--proto", "mqtt", "--port", str(null_broker.port), *flags)
    assert [result[key] for key in ("sent", "confirmed", "received")] == [5000, 5000 if qos == "1" else 0, 5000]
    assert [result[key] for key in ("lost", "duplicated", "out_of_order", "corrupt", "errors")] == [0] * 5


def test_many_hundred_connections_publish_to_one_subscriber(programs: Path, null_broker: Running) -> None:
    flags = ["--qos", "1", "--publishers", "600", "--rate", "5", "--count", "1800"]
    result = load(programs, "--proto", "mqtt", "--port", str(null_broker.port), *flags)
    assert (result["publishers"], result["confirmed"], result["received"], result["lost"]) == (600, 1800, 1800, 0)


# ---- AMQP, against an echo


class Echo:
    """The least that loadgen needs of an AMQP server: what is published to a queue goes to its one consumer."""

    def __init__(self) -> None:
        self.published: list[header.ContentHeader] = []
        self.acks: list[commands.Basic.Ack] = []
        self._consumers: dict[str, socket.socket] = {}
        self._lock = threading.Lock()

    @contextmanager
    def serving(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            threading.Thread(target=self._accept, args=[listener]).start()
            try:
                yield str(listener.getsockname()[1])
            finally:
                listener.shutdown(socket.SHUT_RDWR)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=[connection]).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as stream:
            assert stream.read(8) == b"AMQP\x00\x00\x09\x01"
            connection.sendall(frame.marshal(commands.Connection.Start(server_properties={}), 0))
            delivery_tag = 0
            for channel, each in frames(stream):
                match each:
                    case commands.Basic.Publish():
                        queue = each.routing_key
                    case header.ContentHeader():
                        properties = each
                    case body.ContentBody():
                        delivery_tag += 1
                        deliver = commands.Basic.Deliver("c0", delivery_tag, False, "", queue)
                        parts = [frame.marshal(part, 1) for part in (deliver, properties, each)]
                        with self._lock:
                            self.published.append(properties)
                            self._consumers[queue].sendall(b"".join(parts))
                        connection.sendall(frame.marshal(commands.Basic.Ack(delivery_tag, False), 1))
                    case commands.Basic.Ack():
                        self.acks.append(each)
                    case commands.Basic.Consume():
                        self._consumers[each.queue] = connection
                        connection.sendall(frame.marshal(commands.Basic.ConsumeOk("c0"), 1))
                    case _:
                        for answer in ANSWERS[each.name]:
                            connection.sendall(frame.marshal(answer, channel))
                        if each.name == "Connection.Close":
                            return


ANSWERS: dict[str, Sequence[base.Frame]] = {
    "Connection.StartOk": [commands.Connection.Tune(2047, 131072, 0)],
    "Connection.TuneOk": [],
    "Connection.Open": [commands.Connection.OpenOk()],
    "Connection.Close": [commands.Connection.CloseOk()],
    "Channel.Open": [commands.Channel.OpenOk()],
    "Queue.Delete": [commands.Queue.DeleteOk(0)],
    "Queue.Declare": [commands.Queue.DeclareOk("q", 0, 0)],
    "Confirm.Select": [commands.Confirm.SelectOk()],
    "Basic.Qos": [commands.Basic.QosOk()],
}


def frames(stream: Any) -> Iterator[tuple[int, Any]]:
    while start := stream.read(7):
        whole = start + stream.read(int.from_bytes(start[3:], "big") + 1)
        _, channel, decoded = frame.unmarshal(whole)
        yield channel, decoded


AMQP = ["--proto", "amqp", "--confirm", "10", "--prefetch", "50", "--count", "200", "--verify"]


def test_unique_properties_differ_in_every_message(programs: Path) -> None:
    echo = Echo()
    with echo.serving() as port:
        result = load(programs, *AMQP, "--port", port, "--unique-properties", "--persistent", "1")
    assert (result["received"], result["lost"], result["corrupt"]) == (200, 0, 0)
    properties = [each.properties for each in echo.published]
    assert len({each.message_id for each in properties}) == 200
    assert [each.headers["id"] for each in properties if each.headers] == [each.message_id for each in properties]
    assert all(each.timestamp is not None and each.delivery_mode == 2 for each in properties)


def test_single_ack_acknowledges_each_delivery_by_itself(programs: Path) -> None:
    echo = Echo()
    with echo.serving() as port:
        load(programs, *AMQP, "--port", port, "--single-ack")
    assert [(each.delivery_tag, each.multiple) for each in echo.acks] == [(tag, False) for tag in range(1, 201)]


def test_without_single_ack_half_a_prefetch_is_acknowledged_at_once(programs: Path) -> None:
    echo = Echo()
    with echo.serving() as port:
        load(programs, *AMQP, "--port", port)
    assert [(each.delivery_tag, each.multiple) for each in echo.acks] == [(tag, True) for tag in range(25, 201, 25)]
