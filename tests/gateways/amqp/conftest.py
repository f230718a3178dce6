"""What the client-driven tests of the AMQP door (test_door_*.py) share: a broker per file, connections that end.

With AMQP_PEER=host:port in the environment the tests drive that broker instead, so that what they expect can be held
against RabbitMQ itself; those that start, stop or look into our own are skipped then.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from tests.running_broker import RunningBroker

from .wire import Wire

PEER = os.environ.get("AMQP_PEER", "")
# For what RabbitMQ 3.10 does otherwise; the reason says how.
unlike_rabbitmq = partial(pytest.mark.skipif, bool(PEER))


class _Peer(RunningBroker):
    """Somebody else's broker, already running."""

    def start(self) -> None:
        self.port = int(PEER.rpartition(":")[2])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    """One for all tests of a file; names from `name` keep them apart."""
    folder = tmp_path_factory.mktemp("broker")
    with (_Peer if PEER else RunningBroker)(folder) as running:
        yield running
        if not PEER:
            assert running.is_running(), f"the broker ended by itself\n{running.last_lines()}"
            running.stop()
            told = running.log_path.read_text()
            assert "Traceback" not in told, told


@pytest.fixture
def own_broker(tmp_path: Path) -> Iterator[RunningBroker]:
    """One for this test alone, to be stopped, killed and started again."""
    if PEER:
        pytest.skip("needs a broker of its own")
    with RunningBroker(tmp_path) as running:
        yield running


_numbers = count(1)


@pytest.fixture
def name() -> str:
    """A name that no other test uses."""
    return f"t{os.getpid()}.{next(_numbers)}"


Connect = Callable[..., pika.BlockingConnection]


@pytest.fixture
def connect(broker: RunningBroker) -> Iterator[Connect]:
    """Opens connections; what is still open when the test ends is closed."""
    opened: list[pika.BlockingConnection] = []

    def open_one(**settings: Any) -> pika.BlockingConnection:
        opened.append(broker.connect(**settings))
        return opened[-1]

    yield open_one
    for one in opened:
        if one.is_open:
            one.close()


@pytest.fixture
def channel(connect: Connect) -> BlockingChannel:
    return connect().channel()


@pytest.fixture
def wire(broker: RunningBroker) -> Iterator[Wire]:
    """A client that sends what it likes; logged in, channel 1 open."""
    with Wire(broker.port) as speaking:
        speaking.log_in()
        speaking.open_channel(1)
        yield speaking
