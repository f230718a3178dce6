"""Our properties as paho's, and the other way round: an oracle that was not written here."""

from typing import Any

from paho.mqtt.properties import Properties as PahoProperties

from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties

# Where paho's name is not ours without underscores.
_NAMES = {"subscription_identifiers": "SubscriptionIdentifier", "user_properties": "UserProperty"}
FIELDS = list(Properties.__dataclass_fields__)


def paho_name(field: str) -> str:
    return _NAMES.get(field, field.title().replace("_", "").replace("Qos", "QoS"))


def as_paho(properties: Properties, packet_type: int) -> PahoProperties:
    found = PahoProperties(packet_type)
    for field in FIELDS:
        value: Any = getattr(properties, field)
        if value is None or value == ():
            continue
        if field == "subscription_identifiers":
            for one in value:
                setattr(found, paho_name(field), one)
        else:
            setattr(found, paho_name(field), list(value) if isinstance(value, tuple) else value)
    return found


def from_paho(found: PahoProperties) -> Properties:
    values: dict[str, Any] = {}
    for field in FIELDS:
        value = getattr(found, paho_name(field), None)
        if value is None:
            continue
        if isinstance(getattr(NO_PROPERTIES, field), tuple):
            value = tuple(tuple(one) if isinstance(one, list) else one for one in value)
        values[field] = value
    return Properties(**values)
