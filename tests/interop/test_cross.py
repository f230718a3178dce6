"""AMQP clients and MQTT clients through one running broker: what one publishes, the other reads."""

from collections.abc import Iterator
from typing import Any

import pytest
from interop.broker import Broker
from interop.client import Driven, Feature
from interop.cross.clients import CLIENTS

SHOWN = [(pair, feature) for pair in CLIENTS for feature in pair.shows]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.mark.parametrize(("pair", "feature"), SHOWN, ids=[f"{pair.name} {feature}" for pair, feature in SHOWN])
def test_pair(pair: Driven[Any], feature: Feature, broker: Broker) -> None:
    with pair.stage(broker) as stage:
        pair.features[feature](stage)
