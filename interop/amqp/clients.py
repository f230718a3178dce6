"""All AMQP clients that are run here. Those that are Python packages are part of `make test` too."""

from typing import Any

from interop.amqp import aio_pika_robust, amqp_tools, celery_worker, kombu_messaging, pika_blocking, pika_select
from interop.amqp.programs import PROGRAMS
from interop.client import Client, Driven

PACKAGES: tuple[Driven[Any], ...] = (
    pika_blocking.CLIENT,
    pika_select.CLIENT,
    aio_pika_robust.CLIENT,
    kombu_messaging.CLIENT,
    celery_worker.CLIENT,
)
OTHERS: tuple[Client, ...] = (amqp_tools.CLIENT, *PROGRAMS)
CLIENTS: tuple[Client, ...] = (*PACKAGES, *OTHERS)
