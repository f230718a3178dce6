"""What the tests of the MQTT door (test_door_*.py) share: a broker per file, clients that end, names of their own."""

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from tests.running_broker import RunningBroker

from headrace.gateways.mqtt.reasons import Version

from .wire import Open, Wire

MQTT = ("--mqtt", "127.0.0.1:0")
HTTP = ("--http", "127.0.0.1:0")


class MqttBroker(RunningBroker):
    def __init__(self, folder: Path, *, config: str = "", http: bool = False) -> None:
        super().__init__(folder, config=config, arguments=(*MQTT, *(HTTP if http else ())))

    @property
    def mqtt_port(self) -> int:
        return self.ports["mqtt"]

    def wire(self, version: Version = Version.V5) -> Wire:
        return Wire(self.mqtt_port, version)

    def restart(self, *, kill: bool = False) -> None:
        self.kill() if kill else self.stop()
        self.start()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[MqttBroker]:
    """One for all tests of a file, with the file's CONFIG if it has one; names from `name` keep tests apart."""
    config = getattr(request.module, "CONFIG", "")
    with MqttBroker(tmp_path_factory.mktemp("broker"), config=config) as running:
        yield running
        assert running.is_running(), f"the broker ended by itself\n{running.last_lines()}"
        running.stop()
        told = running.log_path.read_text()
        assert "Traceback" not in told, told


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[MqttBroker]:
    """One for this test alone, to be stopped, killed and started again."""
    with MqttBroker(tmp_path) as running:
        yield running


_numbers = count(1)


@pytest.fixture
def name() -> str:
    """A name that no other test uses: of a client, or the first level of topics."""
    return f"t{os.getpid()}-{next(_numbers)}"


@pytest.fixture
def wire(broker: MqttBroker) -> Iterator[Open]:
    """Opens connections, on which nothing was sent yet; they are closed when the test ends."""
    opened: list[Wire] = []

    def open_one(version: Version = Version.V5) -> Wire:
        opened.append(broker.wire(version))
        return opened[-1]

    yield open_one
    for one in opened:
        one.close()


@pytest.fixture
def client(wire: Open) -> Open:
    """Opens connections and logs in."""

    def open_one(client_id: str = "", version: Version = Version.V5, **settings: object) -> Wire:
        one = wire(version)
        connack = one.connect(client_id, **settings)
        assert connack.reason == 0, connack
        return one

    return open_one
