"""Every AMQP client with a broker of its own: `python -m pytest interop -k bunny`. `make interop` makes a table of it.

Not among the tests of `make test`: a machine need not have PHP, Ruby, Go, Java and Node. A client that is not installed
fails here.
"""

from pathlib import Path

import pytest

from interop.amqp.clients import CLIENTS
from interop.broker import Broker
from interop.client import Client, Feature


@pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)
def test_client_shows_all_it_should(client: Client, tmp_path: Path) -> None:
    assert client.version()
    shown: list[Feature] = []
    with Broker(tmp_path) as broker:
        client.run(broker, shown.append)
    assert tuple(shown) == client.shows
