"""Direct reply-to: answers go from connection to connection, in memory, and never meet the log. Machine over an outbox.

A client consumes from `amq.rabbitmq.reply-to` (no-ack) and publishes with that as its reply-to; the broker puts a name
in its place that nobody can guess. Whoever publishes to that name through the default exchange reaches the client's
channel, as long as it is there: an answer to one that has gone is dropped, as in RabbitMQ. So is an answer to a client
that has left REPLY_BYTES_MAX of earlier ones unread, since no queue stands between to hold them.
"""

from headrace.gateways.amqp.channel import Channel
from headrace.gateways.amqp.frames import encode_deliver_run
from headrace.gateways.delivery.outbox import Outbox

REPLY_TO = "amq.rabbitmq.reply-to"
PREFIX = REPLY_TO + "."
REPLY_BYTES_MAX = 64 * 1024 * 1024


class ReplyConsumer:
    """The end of a channel where its answers arrive."""

    def __init__(self, name: str, tag: str, channel: Channel, outbox: Outbox, frame_max: int) -> None:
        # What stands in the reply-to of this channel's requests.
        self.name = name
        self.tag = tag
        self.dropped_count = 0
        self._channel = channel
        self._outbox = outbox
        self._frame_max = frame_max
        self._tag_bytes = tag.encode("utf-8", "surrogateescape")
        self._name_bytes = name.encode()

    def receive(self, properties: bytes, body: bytes) -> None:
        if self._outbox.byte_count > REPLY_BYTES_MAX:
            self.dropped_count += 1
            return
        self._outbox.put(
            encode_deliver_run(
                self._channel.number,
                self._tag_bytes,
                self._channel.skip(1),
                [False],
                [b""],
                [self._name_bytes],
                [properties],
                [body],
                self._frame_max,
            )
        )
