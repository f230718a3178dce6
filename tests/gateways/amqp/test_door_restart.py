"""What survives a stop and a kill -9, in which order, and what does not. Driven by pika against a broker that dies.

Most stories share one life: each prepares its own queues, then the broker ends (in good order, or killed) and comes
back, then each looks at what is left of its own.
"""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pika
import pytest
from tests.running_broker import RunningBroker, eventually

from .conftest import PEER
from .pika_client import PERSISTENT, Inbox, bodies, counts, get, get_all, is_there, publish, refused

pytestmark = pytest.mark.skipif(bool(PEER), reason="needs a broker of its own")

Connection = pika.BlockingConnection
_stories: list[Callable[[Connection], None]] = []


def before(prepare: Callable[[Connection], None]) -> Callable[[Connection], None]:
    """This is done before the broker ends. What it must keep is confirmed by then."""
    _stories.append(prepare)
    return prepare


@pytest.fixture(scope="module", params=["stopped", "killed"])
def end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def again(end: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Connection]:
    """A connection to the broker that came back."""
    with RunningBroker(tmp_path_factory.mktemp(end)) as broker:
        for prepare in _stories:
            prepare(broker.connect())
        if end == "stopped":
            broker.stop()
        else:
            broker.kill()
        broker.start()
        yield broker.connect()


def numbers(first: int, last: int) -> list[bytes]:
    return [b"%d" % number for number in range(first, last + 1)]


# -- topology -----------------------------------------------------------------------------------------------------

KEPT: dict[str, Any] = {"x-max-length": 50, "x-dead-letter-exchange": "kept.x", "own": [1, {"a": True}]}
ALTERNATE = {"alternate-exchange": "kept.alternate"}


@before
def topology(connection: Connection) -> None:
    channel = connection.channel()
    channel.exchange_declare("kept.alternate", "fanout", durable=True)
    channel.exchange_declare("kept.x", "topic", durable=True, arguments=ALTERNATE)
    channel.exchange_declare("gone.x", "topic", durable=False)
    channel.exchange_bind("kept.x", "amq.direct", routing_key="e2e")
    channel.queue_declare("kept", durable=True, arguments=KEPT)
    channel.queue_declare("kept.auto", durable=True, auto_delete=True)
    channel.queue_declare("gone.transient")
    channel.queue_declare("gone.exclusive", durable=True, exclusive=True)
    for queue in ("kept", "gone.transient", "gone.exclusive"):
        channel.queue_bind(queue, "kept.x", routing_key="a.*", arguments={"mine": 1})
    channel.queue_bind("kept", "gone.x", routing_key="#")
    channel.queue_declare("kept.fallback", durable=True)
    channel.queue_bind("kept.fallback", "kept.alternate")


def test_durable_topology_comes_back_and_the_rest_does_not(again: Connection) -> None:
    for queue in ("gone.transient", "gone.exclusive"):
        assert not is_there(again, queue)
    with refused(404):
        again.channel().exchange_declare("gone.x", passive=True)
    channel = again.channel()
    channel.exchange_declare("kept.x", "topic", durable=True, arguments=ALTERNATE)
    channel.queue_declare("kept", durable=True, arguments=KEPT)
    channel.queue_declare("kept.auto", durable=True, auto_delete=True)
    channel.confirm_delivery()
    channel.basic_publish("amq.direct", "e2e", b"to the alternate", mandatory=True)
    channel.basic_publish("kept.x", "a.b", b"to the queue", mandatory=True)
    assert bodies(channel, "kept") == [b"to the queue"]
    assert bodies(channel, "kept.fallback") == [b"to the alternate"]
    channel.exchange_declare("gone.x", "topic", durable=False)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish("gone.x", "k", b"its bindings are gone too", mandatory=True)


@before
def deletions(connection: Connection) -> None:
    channel = connection.channel()
    channel.exchange_declare("deletions", "fanout", durable=True)
    for queue in ("deleted", "unbound"):
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "deletions")
        channel.basic_publish("deletions", "", b"1", PERSISTENT)
    channel.queue_delete("deleted")
    channel.queue_unbind("unbound", "deletions")


def test_deleted_things_stay_deleted(again: Connection) -> None:
    channel = again.channel()
    assert not is_there(again, "deleted")
    channel.basic_publish("deletions", "", b"2", PERSISTENT)
    assert bodies(channel, "unbound") == [b"1"]


# -- messages -----------------------------------------------------------------------------------------------------


@before
def confirmed(connection: Connection) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.exchange_declare("confirmed", "fanout", durable=True)
    for queue in ("direct", "bound", "bound too"):
        channel.queue_declare(queue, durable=True)
    for queue in ("bound", "bound too"):
        channel.queue_bind(queue, "confirmed")
    for number in numbers(1, 100):
        channel.basic_publish("", "direct", number, PERSISTENT)
        channel.basic_publish("confirmed", number.decode(), number, PERSISTENT)


@pytest.mark.parametrize("queue", ["direct", "bound", "bound too"])
def test_confirmed_persistent_messages_come_back_in_order(again: Connection, queue: str) -> None:
    channel = again.channel()
    assert counts(channel, queue) == (100, 0)
    found = get_all(channel, queue)
    assert [one.body for one in found] == numbers(1, 100)
    if queue != "direct":
        assert [one.routing_key for one in found] == [number.decode() for number in numbers(1, 100)]
        assert {one.exchange for one in found} == {"confirmed"}


@before
def acknowledged(connection: Connection) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("acknowledged", durable=True)
    publish(channel, "acknowledged", *numbers(1, 100), delivery_mode=2)
    acking = connection.channel()
    held = [one for one in (get(acking, "acknowledged", auto_ack=False) for _ in range(60)) if one is not None]
    for one in held[:50:2]:
        acking.basic_ack(one.tag)
    for one in held[1:50:2]:
        acking.basic_reject(one.tag, requeue=False)
    acking.close()


def test_acked_before_close_ok_never_returns_and_the_delivered_is_flagged(again: Connection) -> None:
    found = get_all(again.channel(), "acknowledged")
    assert [one.body for one in found] == numbers(51, 100)
    assert all(one.redelivered for one in found[:10]), "delivered before, never settled"


@before
def out_of_order(connection: Connection) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("out of order", durable=True)
    publish(channel, "out of order", *numbers(1, 150), delivery_mode=2)
    inbox = Inbox(channel, "out of order")
    for one in inbox.wait(150)[::3]:
        inbox.ack(one)
    channel.close()


def test_acked_out_of_order_leaves_exactly_the_rest(again: Connection) -> None:
    expected = [body for place, body in enumerate(numbers(1, 150)) if place % 3]
    assert bodies(again.channel(), "out of order") == expected


@before
def transactions(connection: Connection) -> None:
    channel = connection.channel()
    channel.queue_declare("transactions", durable=True)
    channel.tx_select()
    publish(channel, "transactions", b"1", b"2", delivery_mode=2)
    channel.tx_commit()
    held = get(channel, "transactions", auto_ack=False)
    assert held is not None
    channel.basic_ack(held.tag)
    channel.tx_commit()
    publish(channel, "transactions", b"3", delivery_mode=2)


def test_committed_transactions_come_back_and_open_ones_do_not(again: Connection) -> None:
    assert bodies(again.channel(), "transactions") == [b"2"]


@before
def settings(connection: Connection) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("ranked", durable=True, arguments={"x-max-priority": 3})
    for number, priority in enumerate([1, 3, 2, 3]):
        publish(channel, "ranked", b"%d" % number, priority=priority, delivery_mode=2)
    channel.queue_declare("dead", durable=True)
    limited: dict[str, Any] = {"x-max-length": 2, "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    channel.queue_declare("limited", durable=True, arguments=limited)
    publish(channel, "limited", *numbers(1, 3), delivery_mode=2)
    channel.queue_declare("timed", durable=True, arguments={"x-message-ttl": 600_000})
    publish(channel, "timed", b"short", delivery_mode=2, expiration="1")
    publish(channel, "timed", b"long", delivery_mode=2)
    eventually(lambda: counts(channel, "dead") == (1, 0))


def test_priorities_lengths_and_times_hold_after_a_restart(again: Connection) -> None:
    channel = again.channel()
    assert bodies(channel, "ranked") == [b"1", b"3", b"2", b"0"]
    publish(channel, "limited", b"4", delivery_mode=2)
    assert bodies(channel, "limited") == [b"3", b"4"]
    assert bodies(channel, "timed") == [b"long"]


def test_dead_letters_survive_and_none_comes_twice_after_a_clean_stop(again: Connection, end: str) -> None:
    dead = bodies(again.channel(), "dead")
    assert b"1" in dead
    if end == "stopped":
        assert dead.count(b"1") == 1


@before
def several_sources(connection: Connection) -> None:
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare("several sources", durable=True)
    for exchange, durable in (("source.deleted", True), ("source.transient", False)):
        channel.exchange_declare(exchange, "fanout", durable=durable)
        channel.queue_bind("several sources", exchange)
        for number in numbers(1, 3):
            channel.basic_publish(exchange, "", number, PERSISTENT)
    channel.exchange_delete("source.deleted")


def test_messages_of_exchanges_that_are_gone_survive_with_their_queue(again: Connection, end: str) -> None:
    found = get_all(again.channel(), "several sources")
    by_source = [[one.body for one in found if one.exchange == f"source.{kind}"] for kind in ("deleted", "transient")]
    assert by_source == [numbers(1, 3), numbers(1, 3)]
    if end == "stopped":
        # Between exchanges AMQP promises no order; a clean stop keeps it all the same.
        assert [one.exchange for one in found[:3]] == ["source.deleted"] * 3


@before
def transient(connection: Connection) -> None:
    channel = connection.channel()
    channel.queue_declare("transient", durable=True)
    publish(channel, "transient", b"transient", delivery_mode=1)
    channel.confirm_delivery()
    publish(channel, "transient", b"persistent", delivery_mode=2)


def test_transient_message_in_a_durable_queue_survives_a_clean_stop(again: Connection, end: str) -> None:
    found = bodies(again.channel(), "transient")
    assert b"persistent" in found
    if end == "stopped":
        assert found == [b"transient", b"persistent"]


def test_several_lives_add_up(own_broker: RunningBroker) -> None:
    for life in range(4):
        connection = own_broker.connect()
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("q", durable=True)
        publish(channel, "q", *numbers(10 * life, 10 * life + 9), delivery_mode=2)
        held = get(channel, "q", auto_ack=False)
        assert held is not None
        assert held.body == b"%d" % life
        channel.basic_ack(held.tag)
        channel.close()
        if life % 2:
            own_broker.kill()
        else:
            own_broker.stop()
        own_broker.start()
    assert bodies(own_broker.connect().channel(), "q") == numbers(4, 39)


# -- what never touches the store ---------------------------------------------------------------------------------


def stored(data: Path) -> tuple[int, int, int]:
    """The metadata's version, and how many queues and bindings it holds."""
    with closing(sqlite3.connect(f"file:{data / 'meta.sqlite'}?mode=ro", uri=True)) as store:

        def number(question: str) -> int:
            return int(store.execute(question).fetchone()[0])

        return (
            number("SELECT max(version) FROM metadata_log"),
            number("SELECT count(*) FROM queues"),
            number("SELECT count(*) FROM bindings"),
        )


def test_ten_thousand_reply_queues_leave_no_row_and_no_file(own_broker: RunningBroker) -> None:
    channel = own_broker.connect().channel()
    channel.queue_declare("durable", durable=True)
    before = stored(own_broker.data)
    assert before[1] == 1
    streams = sorted((own_broker.data / "streams").iterdir())
    settled = 0
    for batch in range(100):
        queues = [channel.queue_declare("", exclusive=True, auto_delete=True).method.queue for _ in range(100)]
        for queue in queues[:5]:
            channel.queue_bind(queue, "amq.direct", routing_key=queue)
            channel.basic_publish("amq.direct", queue, b"answer")
            assert get(channel, queue) is not None
        for queue in queues:
            channel.queue_delete(queue)
        if batch == 10:
            settled = own_broker.resident_bytes()
    assert stored(own_broker.data) == before
    assert own_broker.resident_bytes() - settled < 32 * 1024 * 1024
    # amq.direct was published to for the first time; no queue made a stream.
    assert len(sorted((own_broker.data / "streams").iterdir())) <= len(streams) + 1
