"""Python's MQTT clients, unmodified, against a running broker: a test for each feature that interop/ shows."""

from collections.abc import Iterator
from typing import Any

import pytest
from interop.broker import Broker
from interop.client import Driven, Feature
from interop.mqtt.clients import PACKAGES

SHOWN = [(client, feature) for client in PACKAGES for feature in client.shows]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.mark.parametrize(("client", "feature"), SHOWN, ids=[f"{client.name} {feature}" for client, feature in SHOWN])
def test_python_client(client: Driven[Any], feature: Feature, broker: Broker) -> None:
    with client.stage(broker) as stage:
        client.features[feature](stage)
