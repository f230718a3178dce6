"""A broker in a thread of the test: real clients, time by the day, restarts, and no trace when it is over."""

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import paho.mqtt.client as mqtt
import pika
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from tests.running_broker import eventually

from headrace.settings import ConfigError
from headrace.testing import EmbeddedBroker

DAY_MS = 86_400_000


@pytest.fixture
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp", "mqtt")) as broker:
        yield broker


def channel_of(broker: EmbeddedBroker) -> pika.adapters.blocking_connection.BlockingChannel:
    return pika.BlockingConnection(pika.URLParameters(broker.amqp_url())).channel()


def count_of(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def test_a_message_expires_after_three_days_that_take_no_time(broker: EmbeddedBroker) -> None:
    channel = channel_of(broker)
    channel.queue_declare("dead")
    to_dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    channel.queue_declare("waiting", arguments={"x-message-ttl": 3 * DAY_MS, **to_dead})
    channel.confirm_delivery()
    channel.basic_publish("", "waiting", b"old")
    broker.clock.advance(days=2, hours=23)
    assert (count_of(channel, "waiting"), count_of(channel, "dead")) == (1, 0)
    broker.clock.advance(hours=2)
    assert (count_of(channel, "waiting"), count_of(channel, "dead")) == (0, 1)
    channel.connection.close()


def test_a_chain_of_expiries_ends_in_one_advance(broker: EmbeddedBroker) -> None:
    channel = channel_of(broker)
    channel.queue_declare("end")
    for name, behind in (("third", "end"), ("second", "third"), ("first", "second")):
        arguments = {"x-message-ttl": DAY_MS, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": behind}
        channel.queue_declare(name, arguments=arguments)
    channel.confirm_delivery()
    channel.basic_publish("", "first", b"far")
    broker.clock.advance(days=2.9)
    assert count_of(channel, "third") == 1
    broker.clock.advance(days=0.2)
    assert count_of(channel, "end") == 1
    channel.connection.close()


def test_an_unused_queue_expires(broker: EmbeddedBroker) -> None:
    channel = channel_of(broker)
    channel.queue_declare("forgotten", arguments={"x-expires": DAY_MS})
    broker.clock.advance(hours=23)
    channel.queue_declare("forgotten", passive=True)
    broker.clock.advance(hours=25)
    with pytest.raises(pika.exceptions.ChannelClosedByBroker, match="no queue 'forgotten'"):
        channel.queue_declare("forgotten", passive=True)
    channel.connection.close()


def test_clients_stay_connected_over_days_unless_they_are_silent(broker: EmbeddedBroker) -> None:
    client = mqtt.Client(CallbackAPIVersion.VERSION2, client_id="device")
    ended: list[object] = []
    client.on_disconnect = lambda *arguments: ended.append(arguments)
    client.connect(broker.host, broker.mqtt_port, keepalive=60)

    def reads_until(holds: Callable[[], bool]) -> None:
        def look() -> bool:
            client.loop(0.01)
            return holds()

        eventually(look)

    reads_until(client.is_connected)
    broker.clock.advance(days=3)
    for _ in range(10):
        client.loop(0.01)
    assert client.is_connected() and not ended
    broker.clock.advance(seconds=95, silent=True)
    reads_until(lambda: bool(ended))


def test_a_restart_keeps_what_is_durable_and_the_ports(broker: EmbeddedBroker) -> None:
    channel = channel_of(broker)
    channel.queue_declare("kept", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "kept", b"one", pika.BasicProperties(delivery_mode=2))
    ports = dict(broker.ports)
    for end in (broker.kill, broker.stop):
        end()
        assert not broker.is_running
        with suppress(pika.exceptions.AMQPError):
            channel.connection.close()
        broker.clock.advance(days=1)
        broker.start()
        assert broker.ports == ports
        channel = channel_of(broker)
        assert count_of(channel, "kept") == 1
    channel.connection.close()


def test_nothing_is_left_of_it_in_the_process() -> None:
    before, threshold = set(threading.enumerate()), gc.get_threshold()
    broker = EmbeddedBroker(doors=("amqp",))
    with broker:
        assert gc.get_threshold() == threshold
        assert broker.data.is_dir()
    assert not broker.data.exists()
    assert not [one for one in set(threading.enumerate()) - before if one.name == "headrace-broker"]
    broker.close()


def test_two_at_a_time_know_nothing_of_each_other(broker: EmbeddedBroker) -> None:
    with EmbeddedBroker(doors=("amqp",)) as other:
        other.clock.advance(days=1)
        assert (other.clock.now() - broker.clock.now()).days in (0, 1)
        channel = channel_of(other)
        channel.queue_declare("here")
        elsewhere = channel_of(broker)
        with pytest.raises(pika.exceptions.ChannelClosedByBroker):
            elsewhere.queue_declare("here", passive=True)
        channel.connection.close()
        elsewhere.connection.close()


def test_it_is_configured_as_any_broker(tmp_path: Path) -> None:
    config = '[[users]]\nname = "ann"\npassword = "a good long secret"\n'
    config += '[[permissions]]\nuser = "ann"\nconfigure = ".*"\nwrite = ".*"\nread = ".*"\n'
    with EmbeddedBroker(data=tmp_path / "data", config=config, settings={"amqp.channel_max": "7"}) as broker:
        url = broker.amqp_url(user="ann", password="a good long secret")
        connection = pika.BlockingConnection(pika.URLParameters(url))
        assert connection._impl.params.channel_max == 7
        connection.close()
    assert (tmp_path / "data" / "node.json").is_file()


def test_a_wrong_setting_is_told_where_it_is_started() -> None:
    with pytest.raises(ConfigError, match="durability"):
        EmbeddedBroker(settings={"storage.durability": "maybe"}).start()


def test_a_second_start_is_refused(broker: EmbeddedBroker) -> None:
    with pytest.raises(RuntimeError, match="runs already"):
        broker.start()
