"""Python's AMQP clients, unmodified, against a running broker: a test for each feature that interop/ shows."""

from collections.abc import Iterator

import pytest
from interop.amqp import aio_pika_robust, celery_worker, kombu_messaging, pika_blocking, pika_select
from interop.amqp.celery_worker import Workshop
from interop.broker import Broker
from interop.client import Feature


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    """Celery's workers, started once, with a broker that nobody else kills."""
    with Broker(tmp_path_factory.mktemp("celery")) as broker, celery_worker.workshop(broker) as shop:
        yield shop


@pytest.mark.parametrize("feature", pika_blocking.CLIENT.shows)
def test_pika_blocking(feature: Feature, broker: Broker) -> None:
    pika_blocking.CLIENT.features[feature](broker)


@pytest.mark.parametrize("feature", pika_select.CLIENT.shows)
def test_pika_select(feature: Feature, broker: Broker) -> None:
    pika_select.CLIENT.features[feature](broker)


@pytest.mark.parametrize("feature", aio_pika_robust.CLIENT.shows)
def test_aio_pika(feature: Feature, broker: Broker) -> None:
    aio_pika_robust.CLIENT.features[feature](broker)


@pytest.mark.parametrize("feature", kombu_messaging.CLIENT.shows)
def test_kombu(feature: Feature, broker: Broker) -> None:
    kombu_messaging.CLIENT.features[feature](broker)


@pytest.mark.parametrize("feature", celery_worker.CLIENT.shows)
def test_celery(feature: Feature, workshop: Workshop) -> None:
    celery_worker.CLIENT.features[feature](workshop)
