"""All MQTT clients that are run here. Those that are Python packages are part of `make test` too."""

from typing import Any

from interop.client import Client, Driven
from interop.mqtt import aiomqtt_tasks, amqtt_session, gmqtt_callbacks, mosquitto_tools, paho_threads
from interop.mqtt.programs import PROGRAMS

PACKAGES: tuple[Driven[Any], ...] = (
    *paho_threads.CLIENTS,
    aiomqtt_tasks.CLIENT,
    gmqtt_callbacks.CLIENT,
    amqtt_session.CLIENT,
)
OTHERS: tuple[Client, ...] = (mosquitto_tools.CLIENT, *PROGRAMS)
CLIENTS: tuple[Client, ...] = (*PACKAGES, *OTHERS)
