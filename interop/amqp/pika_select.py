"""pika's SelectConnection: callbacks on one loop, for services that publish and consume at once. Driver: sockets."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pika
from pika.channel import Channel
from pika.frame import Method
from pika.spec import Basic, BasicProperties

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 20
# Long enough to miss two beats of a second.
BEAT_SECONDS = 3.5
PERSISTENT = BasicProperties(delivery_mode=pika.DeliveryMode.Persistent.value)


class Session:
    """One connection with one channel, from its opening to its end; `on_channel` takes over once it is open."""

    def __init__(self, broker: Broker, on_channel: Callable[["Session", Channel], None], **settings: Any) -> None:
        self.why: BaseException | None = None
        self._on_channel = on_channel
        parameters = pika.URLParameters(broker.url)
        for name, value in settings.items():
            setattr(parameters, name, value)
        self.connection = pika.SelectConnection(
            parameters,
            on_open_callback=self._opened,
            on_open_error_callback=self._failed,
            on_close_callback=self._closed,
        )
        self._timeout = self.connection.ioloop.call_later(WAIT_SECONDS, self._too_late)

    def run(self) -> BaseException | None:
        """Until the connection has ended; says why it did."""
        try:
            self.connection.ioloop.start()
        finally:
            self.connection.ioloop.close()
        return self.why

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self.connection.ioloop.call_later(seconds, call)

    def finish(self) -> None:
        self.connection.close()

    def _opened(self, connection: pika.SelectConnection) -> None:
        connection.channel(on_open_callback=lambda channel: self._on_channel(self, channel))

    def _failed(self, _: pika.SelectConnection, error: BaseException) -> None:
        self._end(error)

    def _closed(self, _: pika.SelectConnection, why: BaseException) -> None:
        self._end(why)

    def _too_late(self) -> None:
        self._end(TimeoutError("the session did not end"))

    def _end(self, why: BaseException) -> None:
        self.why = why
        self.connection.ioloop.remove_timeout(self._timeout)
        self.connection.ioloop.stop()


def finished(session: Session) -> None:
    """Runs it to the end that the client itself asked for."""
    why = session.run()
    if not isinstance(why, pika.exceptions.ConnectionClosedByClient):
        raise AssertionError(f"the session ended otherwise: {why!r}") from why


def confirms(broker: Broker) -> None:
    """A thousand publishes on the way at once; every one is told of exactly once."""
    told: list[int] = []

    def on_channel(session: Session, channel: Channel) -> None:
        unconfirmed = set(range(1, 1001))

        def on_confirm(frame: Method) -> None:
            assert isinstance(frame.method, Basic.Ack)
            tag = frame.method.delivery_tag
            done = {each for each in unconfirmed if each <= tag} if frame.method.multiple else {tag}
            assert done <= unconfirmed
            unconfirmed.difference_update(done)
            told.extend(sorted(done))
            if not unconfirmed:
                session.finish()

        def publish(_: Method) -> None:
            channel.confirm_delivery(on_confirm, callback=lambda _: publish_all())

        def publish_all() -> None:
            for number in range(1000):
                channel.basic_publish("", "select.confirms", b"%d" % number, PERSISTENT)

        channel.queue_declare("select.confirms", durable=True, callback=publish)

    finished(Session(broker, on_channel))
    assert sorted(told) == list(range(1, 1001))


def prefetch(broker: Broker) -> None:
    """What the first left is consumed, at most 50 at a time, in order."""
    done: list[int] = []

    def on_channel(session: Session, channel: Channel) -> None:
        held: list[int] = []

        def on_message(channel: Channel, method: Basic.Deliver, _: BasicProperties, body: bytes) -> None:
            held.append(method.delivery_tag)
            assert len(held) <= 50
            done.append(int(body))
            if len(held) == 50:
                channel.basic_ack(held[-1], multiple=True)
                held.clear()
            if len(done) == 1000:
                channel.queue_delete("select.confirms", callback=lambda _: session.finish())

        def consume(_: Method) -> None:
            channel.basic_consume("select.confirms", on_message)

        channel.basic_qos(prefetch_count=50, callback=consume)

    finished(Session(broker, on_channel))
    assert done == list(range(1000))


def returns(broker: Broker) -> None:
    events: list[str] = []

    def on_channel(session: Session, channel: Channel) -> None:
        def on_return(_: Channel, method: Basic.Return, properties: BasicProperties, body: bytes) -> None:
            events.append(f"{method.reply_code} {properties.message_id} {body.decode()}")

        def on_confirm(frame: Method) -> None:
            events.append(frame.method.NAME)
            session.finish()

        def publish(_: Method) -> None:
            properties = BasicProperties(message_id="m")
            channel.basic_publish("amq.topic", "select.nobody", b"body", properties, mandatory=True)

        channel.add_on_return_callback(on_return)
        channel.confirm_delivery(on_confirm, callback=publish)

    finished(Session(broker, on_channel))
    assert events == ["312 m body", "Basic.Ack"]


def error(broker: Broker) -> None:
    """A channel that the broker closes says why; another goes on."""
    why: list[BaseException] = []

    def on_channel(session: Session, channel: Channel) -> None:
        def on_close(_: Channel, reason: BaseException) -> None:
            why.append(reason)
            session.connection.channel(on_open_callback=lambda _: session.finish())

        channel.add_on_close_callback(on_close)
        channel.basic_consume("select.nowhere", lambda *_: None)

    finished(Session(broker, on_channel))
    (reason,) = why
    assert isinstance(reason, pika.exceptions.ChannelClosedByBroker)
    assert reason.reply_code == 404


def cancel(broker: Broker) -> None:
    cancelled: list[str] = []

    def on_channel(session: Session, channel: Channel) -> None:
        def on_cancel(frame: Method) -> None:
            cancelled.append(frame.method.consumer_tag)
            session.finish()

        channel.add_on_cancel_callback(on_cancel)
        channel.queue_declare("select.cancel", callback=lambda _: consume())

        def consume() -> None:
            channel.basic_consume("select.cancel", lambda *_: None, consumer_tag="mine", callback=lambda _: delete())

        def delete() -> None:
            channel.queue_delete("select.cancel", callback=lambda _: None)

    finished(Session(broker, on_channel))
    assert cancelled == ["mine"]


def heartbeat(broker: Broker) -> None:
    """Nothing but beats for a while, and the connection is still good."""
    finished(Session(broker, lambda session, _: session.later(BEAT_SECONDS, session.finish), heartbeat=1))


def restart(broker: Broker) -> None:
    """The broker dies under a consumer; a new session finds what was confirmed."""

    def die(session: Session, channel: Channel) -> None:
        def publish(_: Method) -> None:
            for number in range(100):
                channel.basic_publish("", "select.kept", b"%d" % number, PERSISTENT)

        def on_confirm(frame: Method) -> None:
            if frame.method.delivery_tag == 100:
                broker.restart()

        channel.queue_declare("select.kept", durable=True)
        channel.confirm_delivery(on_confirm, callback=publish)

    why = Session(broker, die).run()
    assert isinstance(why, pika.exceptions.AMQPConnectionError), repr(why)
    found: list[int] = []

    def find(session: Session, channel: Channel) -> None:
        def on_message(_: Channel, method: Basic.Deliver, __: BasicProperties, body: bytes) -> None:
            found.append(int(body))
            if len(found) == 100:
                session.finish()

        channel.basic_consume("select.kept", on_message)

    finished(Session(broker, find))
    assert found == list(range(100))


CLIENT = Driven(
    "pika SelectConnection",
    python_version("pika"),
    {
        Feature.CONFIRMS: confirms,
        Feature.PREFETCH: prefetch,
        Feature.RETURN: returns,
        Feature.ERROR: error,
        Feature.CANCEL: cancel,
        Feature.HEARTBEAT: heartbeat,
        Feature.RESTART: restart,
    },
    nullcontext,
)
