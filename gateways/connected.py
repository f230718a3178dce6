"""Who is connected through the AMQP and MQTT doors, and what MQTT counts, for those who look over HTTP. Driver.

Stands above the doors, like mapping.py; the broker's composition hands it to the HTTP door.
"""

from collections.abc import Iterable, Iterator

from headrace.gateways.amqp.server import AmqpDoor
from headrace.gateways.amqp.session import Session
from headrace.gateways.http.connections import Connected
from headrace.gateways.http.metrics import MqttCounts
from headrace.gateways.mqtt.client import Client
from headrace.gateways.mqtt.reasons import ReasonCode, Version
from headrace.gateways.mqtt.server import MqttDoor

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
