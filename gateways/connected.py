"""Who is connected through the AMQP and MQTT doors, and what MQTT counts, for those who look over HTTP. Driver.

Stands above the doors, like mapping.py; the broker's composition hands it to the HTTP door.
"""

from collections.abc import Iterable, Iterator
from functools import partial

from headrace.gateways.amqp.server import AmqpDoor
from headrace.gateways.amqp.session import Session
from headrace.gateways.http.connections import Connected
from headrace.gateways.http.metrics import MqttCounts
from headrace.gateways.http.retained import RetainedOne
from headrace.gateways.mqtt.client import Client
from headrace.gateways.mqtt.hub import Hub
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version
from headrace.gateways.mqtt.retained import Retained
from headrace.gateways.mqtt.server import MqttDoor
from headrace.gateways.mqtt.topics import check_topic_filter

_MQTT_VERSIONS = {Version.V3_1_1: "mqtt 3.1.1", Version.V5: "mqtt 5"}


def mqtt_counts(mqtt: MqttDoor) -> list[MqttCounts]:
    """Of each vhost in which there is MQTT."""
    found = []
    for hub in mqtt.hubs():
        tally, connected = hub.tally, len(hub.owners)
        found.append(
            MqttCounts(
                hub.host.name,
                connected,
                len(hub.sessions) - connected,
                tally.subscriptions,
                len(hub.retained),
                tally.published,
                tally.delivered,
                tally.dropped,
                tally.overflowed,
                tally.refused,
            )
        )
    return found


def retained(mqtt: MqttDoor, vhost: str, topic_filter: str) -> Iterator[RetainedOne]:
    """What a new subscription would be sent, by topic. ValueError for a filter that is none."""
    try:
        check_topic_filter(topic_filter, Version.V5)
    except MqttError as error:
        raise ValueError(str(error)) from None
    hubs = [hub for hub in mqtt.hubs() if hub.host.name == vhost]
    return (_retained(hub, message) for hub in hubs for message in _by_topic(hub, topic_filter))


def _by_topic(hub: Hub, topic_filter: str) -> list[Retained]:
    return sorted(hub.retained.matching(topic_filter, hub.broker.env.clock.wall_us()), key=lambda one: one.topic)


def _retained(hub: Hub, message: Retained) -> RetainedOne:
    load = partial(hub.shared.retained.payload, hub.host.name, message)
    return RetainedOne(
        topic=message.topic.decode(),
        key=hub.shared.keys.key_of(message.topic).decode("utf-8", "surrogateescape"),
        qos=message.qos,
        timestamp_us=message.timestamp_us,
        expiry_us=message.expiry_us,
        tags=message.tags,
        user=message.user,
        client_id=message.client_id,
        payload=(lambda: message.payload) if message.is_loaded else load,
    )


class OpenConnections:
    def __init__(self, amqp: AmqpDoor, mqtt: MqttDoor) -> None:
        self._amqp = amqp
        self._mqtt = mqtt

    def list(self) -> Iterable[Connected]:
        """Those who have logged in."""
        return [told for told, _one in self._all() if told.user]

    def _all(self) -> Iterator[tuple[Connected, Session | Client]]:
        for session in self._amqp.sessions:
            name = session.properties.get("connection_name")
            told = Connected(
                f"amqp-{session.connection.host}-{session.connection.port}",
                "amqp 0-9-1",
                session.user,
                session.vhost,
                session.connection.host,
                session.connection.port,
                session.connection.tls,
                name if isinstance(name, str) else "",
                len(session.channels),
            )
            yield told, session
        for client in self._mqtt.clients:
            told = Connected(
                f"mqtt-{client.connection.host}-{client.connection.port}",
                _MQTT_VERSIONS[client.version],
                client.user,
                client.vhost,
                client.connection.host,
                client.connection.port,
                client.connection.tls,
                client.client_id,
            )
            yield told, client

    def close(self, wanted: Connected, reason: str) -> bool:
        """False: it is gone already. The client is told, where its protocol can."""
        for told, one in self._all():
            if told.id == wanted.id and told.user == wanted.user:
                if isinstance(one, Session):
                    one.expel(reason)
                else:
                    one.dismiss(ReasonCode.ADMINISTRATIVE_ACTION)
                return True
        return False
