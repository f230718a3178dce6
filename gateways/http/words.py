"""What the HTTP door asks of those who know the other doors' words. Values and a protocol; gateways/plain.py keeps it.

The log keeps a message's properties in its publisher's own bytes. Over HTTP they are read in plain words, whichever
protocol they came by; and what is published to an exchange or a queue is written in AMQP's, so that AMQP's and MQTT's
consumers get it like any other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

Json = Any


@dataclass(frozen=True, slots=True)
class Plain:
    """Properties as JSON can say them; headers are AMQP's headers or MQTT's user properties."""

    properties: Mapping[str, Json] = field(default_factory=dict)
    headers: Mapping[str, Json] = field(default_factory=dict)


class Words(Protocol):
    def read(self, key: bytes, properties: bytes, attributes: int) -> Plain:
        """What a record of AMQP's or MQTT's says besides key and value."""

    def write(
        self, headers: Mapping[str, Json], *, content_type: str | None, tags: tuple[str, ...], persistent: bool
    ) -> bytes:
        """Properties in AMQP's words. Raises Invalid for what they cannot hold."""
