"""Every MQTT client, and every pair of AMQP and MQTT clients, with a broker of its own: `pytest interop -k MQTT.js`.

Beside test_amqp.py, and like it not among the tests of `make test`. A client that is not installed fails here.
"""

from pathlib import Path

import pytest

from interop.broker import Broker
from interop.client import Client, Feature
from interop.cross import clients as cross
from interop.mqtt import clients as mqtt


@pytest.mark.parametrize("client", (*mqtt.CLIENTS, *cross.CLIENTS), ids=lambda client: client.name)
def test_client_shows_all_it_should(client: Client, tmp_path: Path) -> None:
    assert client.version()
    shown: list[Feature] = []
    with Broker(tmp_path) as broker:
        client.run(broker, shown.append)
    assert tuple(shown) == client.shows
