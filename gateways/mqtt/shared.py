"""What the hubs of all vhosts share: the broker, its settings, its logs, what is cached. Value."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.core_log.log import PartitionLog
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.mqtt.catch_up import Translated
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.properties import PublishScans
from headrace.gateways.mqtt.retained_log import RetainedLog
from headrace.gateways.mqtt.routingkeys import RoutingKeys

# Where all MQTT messages of a vhost are published.
EXCHANGE = "amq.topic"


@dataclass(frozen=True, slots=True)
class Shared:
    """What the hubs of all vhosts share."""

    broker: Broker
    config: MqttConfig
    keys: RoutingKeys
    scans: PublishScans
    # The properties of a record from AMQP.
    to_mqtt: Callable[[bytes], Translated]
    sessions_log: PartitionLog
    retained: RetainedLog
    # Whether a user may publish in a vhost to a topic, as a client of this identifier.
    may_publish: Callable[[str, str, str, str], bool]
    # Has something called with the end of the turn.
    before_end: Callable[[Callable[[], None]], None]
    # What $SYS/broker/version says.
    version: str = "headrace"
