"""The brokers that claims are measured beside, each started in a private directory on free loopback ports."""

from bench.peers.amqtt import Amqtt
from bench.peers.headrace import Headrace
from bench.peers.mosquitto import Mosquitto
from bench.peers.nats import Nats
from bench.peers.peer import Peer
from bench.peers.rabbitmq import RabbitMQ

PEERS: dict[str, Peer] = {
    "rabbitmq-classic": RabbitMQ("classic"),
    "rabbitmq-quorum": RabbitMQ("quorum"),
    "mosquitto": Mosquitto(),
    "mosquitto-unbounded": Mosquitto(unbounded=True),
    "nats": Nats(),
    "amqtt": Amqtt(),
    "headrace-amqp": Headrace("amqp"),
    "headrace-mqtt": Headrace("mqtt"),
}
