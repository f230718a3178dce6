"""Retained messages in `__retained`: written, read again one by one, and all at a start. Machine over the log.

The key is vhost, NUL, topic (state.py), the record is the message with its publisher in two headers; one without a
payload takes the topic's message away. The log keeps the last record of each key.
"""

from collections.abc import Iterator
from sys import intern

from headrace.core_log.errors import OffsetOutOfRange
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, QOS_MASK, QOS_SHIFT, Headers, Protocol, RecordBatch
from headrace.gateways.mqtt.retained import Retained
from headrace.gateways.mqtt.state import retained_key, split_key

USER = b"user"
CLIENT = b"client"


class RetainedLog:
    def __init__(self, log: PartitionLog) -> None:
        self.log = log

    def append(self, vhost: str, message: Retained) -> int:
        """Returns the offset of its record."""
        headers: Headers = ()
        if message.user:
            headers = ((USER, message.user.encode()), (CLIENT, message.client_id.encode()))
        appended = self.log.append(
            [retained_key(vhost, message.topic)],
            [message.blob],
            [message.payload],
            timestamp_us=message.timestamp_us,
            attributes=int(Protocol.MQTT_5) | message.qos << QOS_SHIFT | PERSISTENT,
            expiry_us=message.expiry_us,
            origin=message.origin,
            tags=message.tags,
            headers=[headers] if headers else None,
        )
        return int(appended.next_offset) - 1

    def payload(self, vhost: str, message: Retained) -> bytes | None:
        """Of a message that is not in memory; None: another has taken its place, and the log has let go of it."""
        try:
            runs = self.log.read(message.stored, bytes_max=1, end=self.log.end)
        except OffsetOutOfRange:
            return None
        if not runs or runs[0].first >= runs[0].last:
            return None
        batch, index = runs[0].batch, runs[0].first
        if batch.offset_at(index) != message.stored or batch.keys[index] != retained_key(vhost, message.topic):
            return None
        return batch.values[index]

    def entries(self) -> Iterator[tuple[str, Retained]]:
        """(vhost, message) in the order in which they came; those without a payload too."""
        for run in self.log.runs():
            for index in range(run.first, run.last):
                vhost, topic = split_key(run.batch.keys[index])
                yield vhost, _message(run.batch, index, topic)


def _message(batch: RecordBatch, index: int, topic: bytes) -> Retained:
    headers = dict(batch.headers[index]) if batch.headers is not None else {}
    return Retained(
        topic,
        batch.properties[index],
        batch.values[index],
        (batch.attributes.at(index) & QOS_MASK) >> QOS_SHIFT,
        batch.expiries.at(index),
        batch.timestamps.at(index),
        batch.origins.at(index),
        tags=batch.tags_at(index),
        user=intern(headers.get(USER, b"").decode()),
        client_id=headers.get(CLIENT, b"").decode(),
        stored=int(batch.offset_at(index)),
    )
