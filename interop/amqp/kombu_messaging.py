"""kombu, the messaging library under Celery: producers, consumers, pidbox, delayed delivery. Driver: sockets."""

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from amqp.exceptions import NotFound
from kombu import Connection, Consumer, Exchange, Message, Producer, Queue
from kombu.mixins import ConsumerMixin
from kombu.pidbox import Mailbox
from kombu.transport.native_delayed_delivery import (
    bind_queue_to_native_delayed_delivery_exchange,
    calculate_routing_key,
    declare_native_delayed_delivery_exchanges_and_queues,
)

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 20
# Long enough to miss two beats of a second.
BEAT_SECONDS = 3.5


def connect(broker: Broker, **settings: Any) -> Connection:
    return Connection(broker.url, transport_options={"confirm_publish": True}, **settings)


def drain(connection: Connection, until: Callable[[], bool]) -> None:
    last = time.monotonic() + WAIT_SECONDS
    while not until():
        assert time.monotonic() < last, "it did not come"
        try:
            connection.drain_events(timeout=1)
        except TimeoutError:
            continue


def confirms(broker: Broker) -> None:
    with connect(broker) as connection:
        queue = Queue("kombu.confirms", Exchange("kombu.direct"), routing_key="task")
        producer = connection.Producer(serializer="json")
        for number in range(100):
            producer.publish({"number": number}, exchange=queue.exchange, routing_key="task", declare=[queue])
        assert queue(connection.default_channel).queue_declare(passive=True).message_count == 100


def prefetch(broker: Broker) -> None:
    """What the first left."""
    with connect(broker) as connection:
        done: list[int] = []
        held: list[Message] = []

        def handle(body: dict[str, int], message: Message) -> None:
            held.append(message)
            assert len(held) <= 10
            done.append(body["number"])
            if len(held) == 10:
                for each in held:
                    each.ack()
                held.clear()

        queue = Queue("kombu.confirms", no_declare=True)
        with connection.Consumer([queue], callbacks=[handle], prefetch_count=10):
            drain(connection, lambda: len(done) == 100)
        assert done == list(range(100))


def requeue(broker: Broker) -> None:
    with connect(broker) as connection, connection.SimpleQueue("kombu.requeue") as queue:
        queue.put("a")
        queue.put("b")
        first = queue.get(timeout=WAIT_SECONDS)
        first.requeue()
        second = queue.get(timeout=WAIT_SECONDS)
        third = queue.get(timeout=WAIT_SECONDS)
        assert sorted([second.payload, third.payload]) == ["a", "b"]
        again = second if second.payload == "a" else third
        assert again.delivery_info["redelivered"]
        second.ack()
        third.reject()
        assert queue.qsize() == 0


def topic(broker: Broker) -> None:
    with connect(broker) as connection:
        exchange = Exchange("kombu.topic", type="topic")
        queue = Queue("kombu.topic", exchange, routing_key="stock.#", exclusive=True)
        came: list[str] = []
        with connection.Consumer([queue], callbacks=[lambda body, _: came.append(body)], no_ack=True):
            producer = connection.Producer(exchange=exchange)
            for key in ("stock.us.nyse", "weather.us", "stock"):
                producer.publish(key, routing_key=key)
            drain(connection, lambda: len(came) == 2)
        assert came == ["stock.us.nyse", "stock"]


def returns(broker: Broker) -> None:
    with connect(broker) as connection:
        returned: list[tuple[int, str, str]] = []
        producer = Producer(
            connection.default_channel,
            on_return=lambda error, exchange, key, message: returned.append((error.reply_code, key, message.body)),
        )
        producer.publish("lost", routing_key="kombu.nobody", mandatory=True, serializer="json")
        drain(connection, lambda: bool(returned))
        assert returned == [(312, "kombu.nobody", '"lost"')]


def dead_letter(broker: Broker) -> None:
    with connect(broker) as connection:
        dead = Queue("kombu.dead", Exchange("kombu.dlx", type="fanout"))
        mortal = Queue("kombu.mortal", message_ttl=0.1, queue_arguments={"x-dead-letter-exchange": "kombu.dlx"})
        came: list[Message] = []
        with connection.Consumer([dead], on_message=came.append, no_ack=True):
            connection.Producer().publish("late", routing_key="kombu.mortal", declare=[mortal])
            drain(connection, lambda: bool(came))
        (message,) = came
        assert message.payload == "late"
        (death,) = message.headers["x-death"]
        assert (death["queue"], death["reason"], death["count"]) == ("kombu.mortal", "expired", 1)


def rpc(broker: Broker) -> None:
    """A question with reply_to, answered into an exclusive queue that goes with its owner."""
    with connect(broker) as server, connect(broker) as client:
        answering = server.Producer()

        def answer(body: int, message: Message) -> None:
            properties = message.properties
            answering.publish(2 * body, routing_key=properties["reply_to"], correlation_id=properties["correlation_id"])
            message.ack()

        own = Queue("kombu.answers", exclusive=True, auto_delete=True)
        answers: dict[str, int] = {}

        def note(body: int, message: Message) -> None:
            answers[message.properties["correlation_id"]] = body

        with (
            server.Consumer([Queue("kombu.rpc", auto_delete=True)], callbacks=[answer]),
            client.Consumer([own], callbacks=[note], no_ack=True),
        ):
            asking = client.Producer()
            for number in range(5):
                asking.publish(number, routing_key="kombu.rpc", reply_to=own.name, correlation_id=str(number))
            last = time.monotonic() + WAIT_SECONDS
            while len(answers) < 5 and time.monotonic() < last:
                for side in (server, client):
                    try:
                        side.drain_events(timeout=0.05)
                    except TimeoutError:
                        continue
        assert answers == {str(number): 2 * number for number in range(5)}


def headers(broker: Broker) -> None:
    """py-amqp's own way of writing each type, and kombu's serializers and compression."""
    told = {
        "text": "šedá",
        "true": True,
        "int": -5,
        "long": 2**40,
        "float": 0.5,
        "decimal": Decimal("3.14"),
        "time": datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        "none": None,
        "list": [1, "two", {"three": 3}],
        "table": {"a": {"b": {}}},
    }
    with connect(broker) as connection:
        queue = Queue("kombu.headers", exclusive=True)
        came: list[Message] = []
        with connection.Consumer([queue], on_message=came.append, no_ack=True):
            producer = connection.Producer()
            producer.publish(
                {"a": [1, 2]},
                routing_key=queue.name,
                headers=dict(told),
                serializer="json",
                compression="zlib",
                priority=4,
            )
            drain(connection, lambda: bool(came))
        (message,) = came
        assert message.payload == {"a": [1, 2]}
        assert message.properties["priority"] == 4
        shown = {name: value for name, value in message.headers.items() if name != "compression"}
        shown["time"] = shown["time"].replace(tzinfo=UTC)
        assert shown == told


def large_body(broker: Broker) -> None:
    body = bytes(range(256)) * 4 * 4096
    with connect(broker) as connection:
        queue = Queue("kombu.large", exclusive=True)
        came: list[bytes] = []
        with connection.Consumer([queue], on_message=lambda message: came.append(message.body), no_ack=True):
            connection.Producer().publish(
                body, routing_key=queue.name, content_type="application/data", content_encoding="binary"
            )
            drain(connection, lambda: bool(came))
        assert bytes(came[0]) == body


def error(broker: Broker) -> None:
    with connect(broker) as connection:
        channel = connection.channel()
        try:
            Queue("kombu.nowhere")(channel).queue_declare(passive=True)
        except NotFound as told:
            assert told.code == 404
        else:
            raise AssertionError("a queue that is not there was found")
        Queue("kombu.error", exclusive=True)(connection.channel()).declare()


def fanout(broker: Broker) -> None:
    """pidbox: a fanout exchange to every node, answers through a direct one. `celery inspect` is made of it."""
    mailbox = Mailbox("kombu", type="fanout")
    with connect(broker) as asking:
        nodes: list[tuple[Connection, Any]] = []
        stopping = threading.Event()
        for number in range(2):
            connection = connect(broker)
            bound = mailbox(connection)
            node = bound.Node(f"node{number}", channel=connection.channel())
            node.handler(ping)
            node.listen(callback=node.handle_message)
            nodes.append((connection, node))

        def serve(connection: Connection) -> None:
            while not stopping.is_set():
                try:
                    connection.drain_events(timeout=0.1)
                except TimeoutError:
                    continue

        threads = [threading.Thread(target=serve, args=(connection,)) for connection, _ in nodes]
        for thread in threads:
            thread.start()
        try:
            told = mailbox(asking).multi_call("ping", timeout=WAIT_SECONDS, limit=2)
        finally:
            stopping.set()
            for thread in threads:
                thread.join()
            for connection, _ in nodes:
                connection.release()
        assert sorted(each for answer in told for each in answer) == ["node0", "node1"]


def ping(state: Any) -> str:
    return "pong"


def delay(broker: Broker) -> None:
    """28 levels of exchanges and queues with TTLs that hand a message down to its due time; Celery's ETA on quorum."""
    with connect(broker) as connection:
        queue = Queue("kombu.due", Exchange("kombu.due", type="topic"), routing_key="kombu.due")
        queue = Queue(queue.name, queue.exchange, queue.routing_key, queue_arguments={"x-queue-type": "quorum"})
        queue(connection.default_channel).declare()
        declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        bind_queue_to_native_delayed_delivery_exchange(connection, queue)
        came: list[tuple[str, float]] = []
        begun = time.monotonic()
        with connection.Consumer(
            [queue], callbacks=[lambda body, _: came.append((body, time.monotonic() - begun))], no_ack=True
        ):
            for seconds in (3, 1, 2):
                producer = connection.Producer()
                producer.publish(
                    f"{seconds} s",
                    exchange=Exchange("celery_delayed_27", type="topic"),
                    routing_key=calculate_routing_key(seconds, "kombu.due"),
                )
            drain(connection, lambda: len(came) == 3)
        assert [body for body, _ in came] == ["1 s", "2 s", "3 s"]
        # Never early.
        assert all(after >= int(body[0]) for body, after in came)


def heartbeat(broker: Broker) -> None:
    """kombu beats when it is asked to, between two looks at the socket."""
    with connect(broker, heartbeat=1) as connection:
        connection.connect()
        until = time.monotonic() + BEAT_SECONDS
        while time.monotonic() < until:
            connection.heartbeat_check(rate=4)
            try:
                connection.drain_events(timeout=0.2)
            except TimeoutError:
                continue
        Queue("kombu.beat", exclusive=True)(connection.default_channel).declare()


class Worker(ConsumerMixin):
    """What kombu's users write; it reconnects by itself."""

    connect_max_retries = 50

    def __init__(self, connection: Connection, queue: Queue, count: int) -> None:
        self.connection = connection
        self.queue = queue
        self.count = count
        self.done: list[int] = []
        self.died = False

    def get_consumers(self, consumer: type[Consumer], channel: Any) -> list[Consumer]:
        return [consumer([self.queue], callbacks=[self.handle], prefetch_count=1)]

    def handle(self, body: int, message: Message) -> None:
        self.done.append(body)
        message.ack()
        if len(set(self.done)) == self.count:
            self.should_stop = True

    def on_connection_error(self, exc: BaseException, interval: float) -> None:
        self.died = True


def restart(broker: Broker) -> None:
    """A worker and a producer both live through kill -9; the producer publishes again what was not confirmed."""
    queue = Queue("kombu.kept", Exchange("kombu.kept"), routing_key="kept")
    with connect(broker) as publishing, connect(broker) as consuming:
        worker = Worker(consuming, queue, 40)
        thread = threading.Thread(target=worker.run)
        thread.start()
        producer = publishing.Producer()
        for number in range(40):
            if number == 20:
                broker.restart()
            producer.publish(
                number,
                exchange=queue.exchange,
                routing_key="kept",
                declare=[queue],
                delivery_mode="persistent",
                retry=True,
                retry_policy={"max_retries": 50, "interval_start": 0, "interval_step": 0.1},
            )
        thread.join(WAIT_SECONDS)
        worker.should_stop = True
        thread.join()
    assert sorted(set(worker.done)) == list(range(40))


CLIENT = Driven(
    "kombu",
    python_version("kombu"),
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
        Feature.FANOUT: fanout,
        Feature.DELAY: delay,
        Feature.HEARTBEAT: heartbeat,
        Feature.RESTART: restart,
    },
    nullcontext,
)
