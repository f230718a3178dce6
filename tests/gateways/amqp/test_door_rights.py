"""What a user may not do is 403 on the channel and nothing else: every method asks, in RabbitMQ's words. By pika."""

from collections.abc import Callable, Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPConnectionError
from tests.running_broker import RunningBroker

from .conftest import PEER
from .pika_client import bodies, publish, refused

pytestmark = pytest.mark.skipif(bool(PEER), reason="needs users of its own")

# ann has all of /, bob only what begins with "bob", carol nothing, dan reads and writes but configures nothing.
DEFINITIONS = """
[[vhosts]]
name = "shop"

[[users]]
name = "ann"
password = "ann-secret"
[[users]]
name = "bob"
password = "bob-secret"
[[users]]
name = "carol"
password = "carol-secret"
[[users]]
name = "dan"
password = "dan-secret"
tags = ["impersonator"]

[[permissions]]
user = "ann"
configure = ".*"
write = ".*"
read = ".*"
[[permissions]]
user = "ann"
vhost = "shop"
configure = ".*"
write = ".*"
read = ".*"
[[permissions]]
user = "bob"
configure = "^bob|^exact$"
write = "^bob"
read = "^bob"
[[permissions]]
user = "dan"
configure = ""
write = ".*"
read = ".*"

[[topic_permissions]]
user = "dan"
exchange = "amq.topic"
write = "^dan\\\\."
read = "^dan\\\\."
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with RunningBroker(tmp_path_factory.mktemp("rights"), config=DEFINITIONS) as running:
        yield running
        running.stop()


Open = Callable[..., pika.BlockingConnection]


@pytest.fixture
def as_user(served: RunningBroker) -> Iterator[Open]:
    opened: list[pika.BlockingConnection] = []

    def connect(user: str, vhost: str = "/") -> pika.BlockingConnection:
        opened.append(served.connect(user=user, password=f"{user}-secret", virtual_host=vhost))
        return opened[-1]

    yield connect
    for one in opened:
        if one.is_open:
            one.close()


def test_user_without_rights_in_a_vhost_does_not_enter_it(as_user: Open) -> None:
    with pytest.raises(AMQPConnectionError, match=r"530.*access to vhost '/' refused for user 'carol'"):
        as_user("carol")
    with pytest.raises(AMQPConnectionError, match="530"):
        as_user("bob", "shop")


Act = Callable[[BlockingChannel], object]
QUEUE, EXCHANGE = "queue 'ann.q' in vhost '/'", "exchange 'ann.x' in vhost '/'"


@pytest.mark.parametrize(
    ("act", "text"),
    [
        pytest.param(lambda one: one.queue_declare("ann.new"), "configure access to queue 'ann.new'", id="declare"),
        pytest.param(lambda one: one.queue_delete("ann.q"), f"configure access to {QUEUE}", id="delete"),
        pytest.param(lambda one: one.exchange_declare("ann.n"), "configure access to exchange 'ann.n'", id="exchange"),
        pytest.param(lambda one: one.exchange_delete("ann.x"), f"configure access to {EXCHANGE}", id="exchange delete"),
        pytest.param(lambda one: one.queue_bind("ann.q", "bob.x"), f"write access to {QUEUE}", id="bind queue"),
        pytest.param(lambda one: one.queue_bind("bob.q", "ann.x"), f"read access to {EXCHANGE}", id="bind from"),
        pytest.param(lambda one: one.queue_unbind("bob.q", "ann.x"), f"read access to {EXCHANGE}", id="unbind"),
        pytest.param(
            lambda one: one.exchange_bind("ann.x", "bob.x"), f"write access to {EXCHANGE}", id="bind exchange"
        ),
        pytest.param(
            lambda one: one.exchange_bind("bob.x", "ann.x"), f"read access to {EXCHANGE}", id="bind exchange 2"
        ),
        pytest.param(lambda one: one.basic_consume("ann.q", print), f"read access to {QUEUE}", id="consume"),
        pytest.param(lambda one: one.basic_get("ann.q"), f"read access to {QUEUE}", id="get"),
        pytest.param(lambda one: one.queue_purge("ann.q"), f"read access to {QUEUE}", id="purge"),
        pytest.param(lambda one: send(one, "ann.x"), f"write access to {EXCHANGE}", id="publish"),
        pytest.param(lambda one: send(one, ""), "write access to exchange 'amq.default'", id="publish to the default"),
        pytest.param(
            lambda one: one.queue_declare("bob.2", arguments={"x-dead-letter-exchange": "ann.x"}),
            f"write access to {EXCHANGE}",
            id="dead-letter exchange",
        ),
        pytest.param(
            lambda one: one.queue_declare("exact", arguments={"x-retry-max": 1}),
            "configure access to queue 'exact.dlq'",
            id="dead-letter queue",
        ),
        pytest.param(
            lambda one: one.exchange_declare("bob.x2", arguments={"alternate-exchange": "ann.x"}),
            f"write access to {EXCHANGE}",
            id="alternate exchange",
        ),
    ],
)
def test_method_without_the_right_is_403(as_user: Open, act: Act, text: str) -> None:
    anns = as_user("ann").channel()
    anns.queue_declare("ann.q")
    anns.exchange_declare("ann.x")
    connection = as_user("bob")
    other = connection.channel()
    other.queue_declare("bob.q")
    other.exchange_declare("bob.x")
    with refused(403, text):
        act(connection.channel())
    other.queue_bind("bob.q", "bob.x", routing_key="k")


def send(channel: BlockingChannel, exchange: str) -> None:
    channel.basic_publish(exchange, "k", b"x")
    channel.basic_qos(prefetch_count=1)


def test_right_is_asked_before_existence_is_told(as_user: Open) -> None:
    connection = as_user("bob")
    with refused(403):
        connection.channel().basic_get("there is none of this name")
    with refused(403):
        connection.channel().queue_delete("nor of this")


def test_passive_declare_needs_no_right(as_user: Open) -> None:
    as_user("ann").channel().queue_declare("ann.passive")
    as_user("dan").channel().queue_declare("ann.passive", passive=True)


def test_topic_permission_narrows_the_keys(as_user: Open) -> None:
    anns = as_user("ann").channel()
    anns.queue_declare("topics")
    anns.queue_bind("topics", "amq.topic", routing_key="#")
    connection = as_user("dan")
    channel = connection.channel()
    channel.basic_publish("amq.topic", "dan.news", b"mine")
    channel.queue_bind("topics", "amq.topic", routing_key="dan.*")
    assert bodies(anns, "topics") == [b"mine"]
    with refused(403, "refused for user 'dan'"):
        channel.basic_publish("amq.topic", "ann.news", b"not mine")
        channel.basic_qos(prefetch_count=1)
    with refused(403, "refused for user 'dan'"):
        connection.channel().queue_bind("topics", "amq.topic", routing_key="#")


def test_impersonator_may_use_another_user_id(as_user: Open) -> None:
    anns = as_user("ann").channel()
    anns.queue_declare("letters")
    channel = as_user("dan").channel()
    publish(channel, "letters", b"x", user_id="ann")
    channel.basic_qos(prefetch_count=1)
    assert bodies(anns, "letters") == [b"x"]


def test_vhosts_do_not_see_each_other(as_user: Open) -> None:
    here, there = as_user("ann").channel(), as_user("ann", "shop").channel()
    here.queue_declare("same")
    there.queue_declare("same", durable=True)
    publish(here, "same", b"here")
    publish(there, "same", b"there")
    assert (bodies(here, "same"), bodies(there, "same")) == ([b"here"], [b"there"])
    there.queue_bind("same", "amq.fanout")
    here.basic_publish("amq.fanout", "", b"x")
    assert bodies(there, "same") == []
