"""All pairs of an AMQP and an MQTT client. They are Python packages, and part of `make test` too."""

from typing import Any

from interop.client import Driven
from interop.cross import kombu_paho, pika_paho

CLIENTS: tuple[Driven[Any], ...] = (pika_paho.CLIENT, kombu_paho.CLIENT)
