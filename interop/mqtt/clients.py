"""All MQTT clients that are run here. Those that are Python packages are part of `make test` too."""

from typing import Any

from interop.client import Client, Driven
from interop.mqtt import paho_threads

PACKAGES: tuple[Driven[Any], ...] = (*paho_threads.CLIENTS,)
OTHERS: tuple[Client, ...] = ()
CLIENTS: tuple[Client, ...] = (*PACKAGES, *OTHERS)
