"""Direct reply-to, driven by pika against a running broker."""

from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, UnroutableError

from .serving import Reader, Served, served

PSEUDO = "amq.rabbitmq.reply-to"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("replyto")) as running:
        yield running


@pytest.fixture
def channel(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        yield opened


@pytest.fixture
def server(broker: Served) -> Iterator[BlockingChannel]:
    with broker.channel() as opened:
        opened.queue_declare("requests")
        opened.queue_purge("requests")
        yield opened


def ask(channel: BlockingChannel, body: bytes = b"question", **properties: object) -> None:
    channel.basic_publish("", "requests", body, pika.BasicProperties(reply_to=PSEUDO, **properties))
    channel.queue_declare("requests", passive=True)  # so that it is there for the server's connection


def reply_to(server: BlockingChannel) -> str:
    _method, properties, _body = server.basic_get("requests", auto_ack=True)
    assert properties is not None
    return str(properties.reply_to)


def closes(code: int, text: str) -> "pytest.RaisesContext[ChannelClosedByBroker]":
    return pytest.raises(ChannelClosedByBroker, match=rf"\({code}, .*{text}")


def test_answer_reaches_the_one_who_asked(channel: BlockingChannel, server: BlockingChannel) -> None:
    answers = Reader(channel, PSEUDO, no_ack=True)
    ask(channel, correlation_id="7")
    server.basic_publish("", reply_to(server), b"answer", pika.BasicProperties(correlation_id="7"))
    ((method, properties, body),) = answers.wait(1)
    assert (body, properties.correlation_id, method.exchange, method.redelivered) == (b"answer", "7", "", False)
    assert method.consumer_tag == answers.tag


def test_each_channel_gets_only_its_own_answers(broker: Served, server: BlockingChannel) -> None:
    with broker.connected() as connection:
        first, second = connection.channel(), connection.channel()
        answers = [Reader(one, PSEUDO, no_ack=True) for one in (first, second)]
        for name, one in ((b"first", first), (b"second", second)):
            ask(one, name)
            _method, properties, body = server.basic_get("requests", auto_ack=True)
            server.basic_publish("", properties.reply_to, body)
        assert [reader.bodies(1) for reader in answers] == [[b"first"], [b"second"]]


def test_the_name_cannot_be_guessed_from_an_earlier_one(channel: BlockingChannel, server: BlockingChannel) -> None:
    Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    name = reply_to(server)
    assert name.startswith(PSEUDO + ".")
    assert len(name) >= len(PSEUDO) + 1 + 32


def test_other_properties_of_the_request_stay_as_they_were(channel: BlockingChannel, server: BlockingChannel) -> None:
    Reader(channel, PSEUDO, no_ack=True)
    ask(channel, headers={"x-a": 1}, content_type="text/plain", expiration="60000", message_id="m", app_id="a")
    _method, found, _body = server.basic_get("requests", auto_ack=True)
    assert (found.headers, found.content_type, found.expiration) == ({"x-a": 1}, "text/plain", "60000")
    assert (found.message_id, found.app_id) == ("m", "a")


def test_answer_larger_than_a_frame_arrives_whole(channel: BlockingChannel, server: BlockingChannel) -> None:
    answers = Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    body = bytes(range(256)) * 2000
    server.basic_publish("", reply_to(server), body)
    assert answers.bodies(1) == [body]


def test_consuming_with_acknowledgements_is_refused(channel: BlockingChannel) -> None:
    with closes(406, "reply consumer cannot acknowledge"):
        channel.basic_consume(PSEUDO, lambda *_: None)


def test_second_reply_consumer_of_a_channel_is_refused(channel: BlockingChannel) -> None:
    Reader(channel, PSEUDO, no_ack=True)
    with closes(406, "reply consumer already set"):
        Reader(channel, PSEUDO, no_ack=True)


def test_asking_before_consuming_is_refused(channel: BlockingChannel, server: BlockingChannel) -> None:
    with closes(406, "fast reply consumer does not exist"):
        ask(channel)
    assert server.basic_get("requests")[0] is None


def test_cancelled_consumer_can_be_set_again(channel: BlockingChannel, server: BlockingChannel) -> None:
    first = Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    old = reply_to(server)
    channel.basic_cancel(first.tag)
    second = Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    server.basic_publish("", old, b"late")
    server.basic_publish("", reply_to(server), b"in time")
    assert second.bodies(1) == [b"in time"]
    assert first.got == []


def test_declaring_the_name_tells_whether_the_asker_is_there(broker: Served, server: BlockingChannel) -> None:
    with broker.channel() as channel:
        Reader(channel, PSEUDO, no_ack=True)
        ask(channel)
        name = reply_to(server)
        found = server.queue_declare(name).method
        assert (found.queue, found.message_count, found.consumer_count) == (name, 0, 1)
    with closes(404, "no queue"):
        server.queue_declare(name)


def test_answer_to_one_who_has_gone_is_dropped_and_confirmed(broker: Served, server: BlockingChannel) -> None:
    with broker.channel() as channel:
        Reader(channel, PSEUDO, no_ack=True)
        ask(channel)
        name = reply_to(server)
    server.confirm_delivery()
    server.basic_publish("", name, b"too late")


def test_mandatory_answer_is_returned_since_a_name_is_no_queue(
    channel: BlockingChannel, server: BlockingChannel
) -> None:
    answers = Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    server.confirm_delivery()
    with pytest.raises(UnroutableError):
        server.basic_publish("", reply_to(server), b"answer", mandatory=True)
    assert answers.bodies(1) == [b"answer"]


def test_answer_in_a_transaction_is_sent_by_the_commit(channel: BlockingChannel, server: BlockingChannel) -> None:
    answers = Reader(channel, PSEUDO, no_ack=True)
    ask(channel)
    name = reply_to(server)
    server.tx_select()
    server.basic_publish("", name, b"rolled back")
    server.tx_rollback()
    server.basic_publish("", name, b"committed")
    server.tx_commit()
    assert answers.bodies(1) == [b"committed"]


def test_server_says_that_it_can(broker: Served) -> None:
    with broker.connected() as connection:
        capabilities = connection._impl.server_capabilities
        assert capabilities["direct_reply_to"] is True


def test_answers_are_not_in_the_log(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        with broker.channel() as channel, broker.channel() as server:
            server.queue_declare("requests")
            answers = Reader(channel, PSEUDO, no_ack=True)
            ask(channel)
            server.basic_publish("", reply_to(server), b"seen by nobody else", pika.BasicProperties(delivery_mode=2))
            answers.wait(1)
        broker.stop()
        found = [path for path in (tmp_path / "data").rglob("*.log") if b"seen by nobody else" in path.read_bytes()]
    assert found == []
