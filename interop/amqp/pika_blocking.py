"""pika's BlockingConnection, as most Python scripts use it. Driver: sockets."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError, ChannelClosedByBroker, UnroutableError
from pika.spec import Basic, BasicProperties

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 20
# Long enough to miss two beats of a second.
BEAT_SECONDS = 3.5
PERSISTENT = BasicProperties(delivery_mode=pika.DeliveryMode.Persistent.value)
Delivery = tuple[Basic.Deliver, BasicProperties, bytes]


@contextmanager
def connected(broker: Broker, **settings: Any) -> Iterator[pika.BlockingConnection]:
    parameters = pika.URLParameters(broker.url)
    for name, value in settings.items():
        setattr(parameters, name, value)
    with pika.BlockingConnection(parameters) as connection:
        yield connection


def take(channel: BlockingChannel, queue: str, count: int, **settings: Any) -> list[Delivery]:
    """The next deliveries, not acknowledged."""
    taken: list[Delivery] = []
    for method, properties, body in channel.consume(queue, inactivity_timeout=WAIT_SECONDS, **settings):
        assert method is not None, f"{count - len(taken)} of {count} did not come"
        taken.append((method, properties, body))
        if len(taken) == count:
            break
    return taken


def bodies(taken: list[Delivery]) -> list[bytes]:
    return [body for _, _, body in taken]


def confirms(broker: Broker) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.confirms", durable=True)
        channel.confirm_delivery()
        for number in range(100):
            channel.basic_publish("", "blocking.confirms", b"%d" % number, PERSISTENT, mandatory=True)
        assert channel.queue_declare("blocking.confirms", passive=True).method.message_count == 100


def prefetch(broker: Broker) -> None:
    """Two workers of one queue, each with at most ten at a time; every task is done once."""
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.tasks", durable=True)
        for number in range(100):
            channel.basic_publish("", "blocking.tasks", b"%d" % number, PERSISTENT)
        workers = [connection.channel(), connection.channel()]
        done: list[bytes] = []
        held: dict[int, int] = {0: 0, 1: 0}
        for index, worker in enumerate(workers):
            worker.basic_qos(prefetch_count=10)

            def work(
                where: BlockingChannel, method: Basic.Deliver, _: BasicProperties, body: bytes, index: int = index
            ) -> None:
                held[index] += 1
                assert held[index] <= 10
                done.append(body)
                if held[index] == 10:
                    where.basic_ack(method.delivery_tag, multiple=True)
                    held[index] = 0

            worker.basic_consume("blocking.tasks", work)
        until = time.monotonic() + WAIT_SECONDS
        while len(done) < 100 and time.monotonic() < until:
            connection.process_data_events(time_limit=0.1)
        assert sorted(map(int, done)) == list(range(100))


def requeue(broker: Broker) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.requeue")
        for body in (b"1", b"2", b"3"):
            channel.basic_publish("", "blocking.requeue", body)
        first = take(channel, "blocking.requeue", 3)
        channel.basic_nack(first[0][0].delivery_tag, requeue=True)
        channel.basic_reject(first[1][0].delivery_tag, requeue=False)
        channel.basic_ack(first[2][0].delivery_tag)
        ((method, _, body),) = take(channel, "blocking.requeue", 1)
        assert (body, method.redelivered) == (b"1", True)
        channel.basic_ack(method.delivery_tag)
        assert channel.cancel() == 0


def topic(broker: Broker) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.exchange_declare("blocking.logs", pika.exchange_type.ExchangeType.topic)
        queue = channel.queue_declare("", exclusive=True).method.queue
        for pattern in ("*.critical", "kern.#"):
            channel.queue_bind(queue, "blocking.logs", pattern)
        for key in ("kern.critical", "auth.info", "auth.critical", "kern", "kern.a.b"):
            channel.basic_publish("blocking.logs", key, key.encode())
        assert bodies(take(channel, queue, 4, auto_ack=True)) == [
            b"kern.critical",
            b"auth.critical",
            b"kern",
            b"kern.a.b",
        ]
        channel.cancel()


def returns(broker: Broker) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        try:
            channel.basic_publish("amq.direct", "nobody", b"lost", BasicProperties(message_id="m"), mandatory=True)
        except UnroutableError as unroutable:
            (returned,) = unroutable.messages
            assert returned.method.reply_code == 312
            assert (returned.properties.message_id, returned.body) == ("m", b"lost")
        else:
            raise AssertionError("an unroutable message was taken")


def dead_letter(broker: Broker) -> None:
    with connected(broker) as connection:
        channel = connection.channel()
        channel.exchange_declare("blocking.dlx", "fanout")
        channel.queue_declare("blocking.dead")
        channel.queue_bind("blocking.dead", "blocking.dlx")
        arguments = {"x-message-ttl": 100, "x-dead-letter-exchange": "blocking.dlx"}
        channel.queue_declare("blocking.short", arguments=arguments)
        channel.basic_publish("", "blocking.short", b"late")
        ((_, properties, body),) = take(channel, "blocking.dead", 1, auto_ack=True)
        channel.cancel()
        (death,) = properties.headers["x-death"]
        assert body == b"late"
        assert (death["queue"], death["reason"], death["count"]) == ("blocking.short", "expired", 1)
        assert death["routing-keys"] == ["blocking.short"]
        assert isinstance(death["time"], datetime)


def rpc(broker: Broker) -> None:
    """The tutorial's: an exclusive queue for the answers, and direct reply-to."""
    with connected(broker) as server, connected(broker) as client:
        serving = server.channel()
        serving.queue_declare("blocking.rpc")

        def double(channel: BlockingChannel, method: Basic.Deliver, asked: BasicProperties, body: bytes) -> None:
            answer = BasicProperties(correlation_id=asked.correlation_id)
            channel.basic_publish("", asked.reply_to, b"%d" % (2 * int(body)), answer)
            channel.basic_ack(method.delivery_tag)

        serving.basic_consume("blocking.rpc", double)
        asking = client.channel()
        own = asking.queue_declare("", exclusive=True).method.queue
        for reply_to in (own, "amq.rabbitmq.reply-to"):
            answers: dict[str, bytes] = {}
            asking.basic_consume(
                reply_to, lambda _c, _m, told, body, to=answers: to.update({told.correlation_id: body}), auto_ack=True
            )
            for number in range(5):
                asked = BasicProperties(reply_to=reply_to, correlation_id=str(number))
                asking.basic_publish("", "blocking.rpc", b"%d" % number, asked)
            until = time.monotonic() + WAIT_SECONDS
            while len(answers) < 5 and time.monotonic() < until:
                server.process_data_events(time_limit=0.05)
                client.process_data_events(time_limit=0.05)
            assert answers == {str(number): b"%d" % (2 * number) for number in range(5)}


def headers(broker: Broker) -> None:
    told = {
        "text": "šedá",
        "bytes": b"\x00\xff",
        "true": True,
        "int": -5,
        "long": 2**40,
        "decimal": Decimal("3.14"),
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "none": None,
        "list": [1, "two", {"three": 3}],
        "table": {"a": {"b": {}}},
    }
    properties = BasicProperties(
        content_type="application/json",
        content_encoding="utf-8",
        headers=told,
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to="r",
        expiration="60000",
        message_id="m",
        timestamp=int(datetime(2026, 1, 2, tzinfo=UTC).timestamp()),
        type="t",
        user_id="guest",
        app_id="a",
    )
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.headers")
        channel.basic_publish("", "blocking.headers", json.dumps({"a": 1}), properties)
        ((_, came, body),) = take(channel, "blocking.headers", 1, auto_ack=True)
        channel.cancel()
        assert came == properties
        assert json.loads(body) == {"a": 1}


def large_body(broker: Broker) -> None:
    """Many frames in, many frames out, also when the client wants them small."""
    body = bytes(range(256)) * 4 * 4096
    for frame_max in (131072, 4096):
        with connected(broker, frame_max=frame_max) as connection:
            channel = connection.channel()
            channel.queue_declare("blocking.large")
            channel.confirm_delivery()
            channel.basic_publish("", "blocking.large", body)
            _, _, came = channel.basic_get("blocking.large", auto_ack=True)
            assert came == body


def error(broker: Broker) -> None:
    """A soft error ends its channel; the connection goes on."""
    with connected(broker) as connection:
        channel = connection.channel()
        try:
            channel.queue_declare("blocking.nowhere", passive=True)
        except ChannelClosedByBroker as closed:
            assert closed.reply_code == 404
        else:
            raise AssertionError("a queue that is not there was found")
        again = connection.channel()
        again.queue_declare("blocking.error", durable=True)
        try:
            again.queue_declare("blocking.error", durable=False)
        except ChannelClosedByBroker as closed:
            assert closed.reply_code == 406
        else:
            raise AssertionError("a queue was declared again, otherwise")
        connection.channel().queue_delete("blocking.error")


def cancel(broker: Broker) -> None:
    """A consumer is told when its queue goes."""
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.cancel")
        channel.basic_publish("", "blocking.cancel", b"1")
        came = []
        for delivery in channel.consume("blocking.cancel", auto_ack=True, inactivity_timeout=WAIT_SECONDS):
            came.append(delivery)
            connection.channel().queue_delete("blocking.cancel")
        assert len(came) == 1


def heartbeat(broker: Broker) -> None:
    """A connection that is looked at lives on the beats of both sides; one that sleeps is let go meanwhile."""
    with connected(broker, heartbeat=1) as awake:
        sleeping = pika.URLParameters(broker.url)
        sleeping.heartbeat = 1
        asleep = pika.BlockingConnection(sleeping)
        channel = asleep.channel()
        awake.sleep(BEAT_SECONDS)
        awake.channel().queue_declare("", exclusive=True)
        try:
            channel.queue_declare("", exclusive=True)
        except AMQPConnectionError:
            return
        raise AssertionError("a client that missed its heartbeats was kept")


def restart(broker: Broker) -> None:
    """What was confirmed is there after kill -9; what was not persistent need not be."""
    with connected(broker) as connection:
        channel = connection.channel()
        channel.queue_declare("blocking.kept", durable=True)
        channel.confirm_delivery()
        for number in range(50):
            channel.basic_publish("", "blocking.kept", b"%d" % number, PERSISTENT)
        held = take(channel, "blocking.kept", 10)
        broker.restart()
        try:
            channel.basic_ack(held[0][0].delivery_tag)
            connection.process_data_events(time_limit=WAIT_SECONDS)
        except AMQPConnectionError:
            pass
        else:
            raise AssertionError("the connection outlived its broker")
    with connected(broker) as connection:
        channel = connection.channel()
        assert bodies(take(channel, "blocking.kept", 50)) == [b"%d" % number for number in range(50)]


CLIENT = Driven(
    "pika BlockingConnection",
    python_version("pika"),
    {
        Feature.CONFIRMS: confirms,
        Feature.PREFETCH: prefetch,
        Feature.REQUEUE: requeue,
        Feature.TOPIC: topic,
        Feature.RETURN: returns,
        Feature.DEAD_LETTER: dead_letter,
        Feature.RPC: rpc,
        Feature.HEADERS: headers,
        Feature.BODY: large_body,
        Feature.ERROR: error,
        Feature.CANCEL: cancel,
        Feature.HEARTBEAT: heartbeat,
        Feature.RESTART: restart,
    },
    nullcontext,
)
