"""What a node that accepted a client tells the leader of its vhost, before the client's octets follow. Format; pure.

    caller                               leader
    hello, with `Destination`       ->
    frame OPENING, the door's own   ->
                                    <-   frame READY, or REFUSED with the reason
    octets of the client           <->   octets for the client

Everything is msgpack. The leader trusts it: the link has proven to be another node's of the cluster.
Neighbours: dialing.py is the caller, answering.py the leader; each door has its part of the openings here.
"""

from enum import IntEnum, StrEnum

import msgspec


class Kind(IntEnum):
    """Frames of a relay link, before it is one for plain octets."""

    OPENING = 1
    READY = 2
    REFUSED = 3


class DoorName(StrEnum):
    AMQP = "amqp"
    MQTT = "mqtt"
    HTTP = "http"


class Destination(msgspec.Struct, frozen=True):
    """In the hello of the link: small, whatever the client said."""

    vhost: str
    door: DoorName


class Client(msgspec.Struct, frozen=True):
    """Where a client is, and how it came."""

    host: str
    port: int
    tls: bool = False
    # From a certificate that the accepting node has checked.
    certified_name: str | None = None


class Opened(msgspec.Struct, frozen=True):
    """An AMQP connection that has logged in and asked for a vhost it may enter: all that its session has to know."""

    client: Client
    user: str
    vhost: str
    channel_max: int
    frame_max: int
    heartbeat_s: int
    # The client's properties, as a table of AMQP's.
    properties: bytes


class ResumedConsumer(msgspec.Struct, frozen=True):
    # The payload of basic.consume, with the tag and the queue's name filled in.
    consume: bytes
    # What basic.qos had set when it came.
    prefetch: int


class ResumedChannel(msgspec.Struct, frozen=True):
    number: int
    # Delivery tags below were given out by an earlier leader.
    next_tag: int
    confirming: bool
    # Publishes so far: all of them were confirmed, or nobody waits for it.
    published: int
    transactional: bool
    consumer_prefetch: int
    channel_prefetch: int
    flowing: bool
    last_queue: str
    consumers: list[ResumedConsumer]


class Resumed(msgspec.Struct, frozen=True):
    """An AMQP connection that an earlier leader served: what of it lived only there."""

    channels: list[ResumedChannel]
    # Channels that were told closed and have not answered: what they still send is void.
    closing: list[int]
    # Payloads of the methods that declare and bind what no other node knows, in an order that works.
    topology: list[bytes]


class AmqpOpening(msgspec.Struct, frozen=True):
    # Of the client's connection, on whichever leader it is.
    connection: bytes
    opened: Opened
    resumed: Resumed | None = None


class MqttOpening(msgspec.Struct, frozen=True):
    client: Client


class HttpOpening(msgspec.Struct, frozen=True):
    client: Client
