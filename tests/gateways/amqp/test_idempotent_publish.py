"""x-producer-id and x-sequence, driven by pika against a running broker."""

from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker, NackError

from .serving import Served, ready_count, served


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("idempotent")) as running:
        yield running


@pytest.fixture
def channel(broker: Served, request: pytest.FixtureRequest) -> Iterator[BlockingChannel]:
    """In confirm mode, with a durable queue of the test's own."""
    with broker.channel() as opened:
        opened.confirm_delivery()
        yield opened


@pytest.fixture
def queue(channel: BlockingChannel, request: pytest.FixtureRequest) -> str:
    name = request.node.name
    channel.queue_declare(name, durable=True)
    return name


def publish(
    channel: BlockingChannel,
    queue: str,
    sequence: object,
    body: bytes | None = None,
    *,
    exchange: str = "",
    producer: object = "p",
    mandatory: bool = False,
    **headers: object,
) -> None:
    named = {"x-producer-id": producer, "x-sequence": sequence, **headers}
    properties = pika.BasicProperties(delivery_mode=2, headers={k: v for k, v in named.items() if v is not None})
    channel.basic_publish(exchange, queue, b"%d" % sequence if body is None else body, properties, mandatory=mandatory)


def taken(channel: BlockingChannel, queue: str) -> list[bytes]:
    bodies = []
    while (found := channel.basic_get(queue, auto_ack=True))[0] is not None:
        bodies.append(found[2])
    return bodies


def test_message_sent_twice_is_confirmed_twice_and_delivered_once(channel: BlockingChannel, queue: str) -> None:
    for sequence in (0, 1, 1, 0, 2):
        publish(channel, queue, sequence)
    assert taken(channel, queue) == [b"0", b"1", b"2"]


def test_resent_message_that_was_consumed_does_not_come_back(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, 0)
    assert taken(channel, queue) == [b"0"]
    publish(channel, queue, 0)
    assert taken(channel, queue) == []


def test_gaps_are_accepted_and_may_be_filled_later(channel: BlockingChannel, queue: str) -> None:
    for sequence in (5, 9, 7, 5, 6, 9):
        publish(channel, queue, sequence)
    assert taken(channel, queue) == [b"5", b"9", b"7", b"6"]


def test_producers_do_not_share_their_numbers(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, 0, b"one", producer="one")
    publish(channel, queue, 0, b"two", producer="two")
    assert taken(channel, queue) == [b"one", b"two"]


def test_each_exchange_and_queue_counts_for_itself(channel: BlockingChannel, queue: str) -> None:
    channel.exchange_declare("counts", "fanout", durable=True)
    channel.queue_bind(queue, "counts")
    publish(channel, queue, 3, b"to the queue")
    publish(channel, "", 3, b"to the exchange", exchange="counts")
    publish(channel, "", 3, b"again", exchange="counts")
    assert taken(channel, queue) == [b"to the queue", b"to the exchange"]


def test_fan_out_is_repeated_for_no_queue(channel: BlockingChannel, queue: str) -> None:
    channel.exchange_declare("fan", "fanout", durable=True)
    for name in (queue, queue + ".2"):
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, "fan")
    for _ in range(2):
        publish(channel, "", 0, exchange="fan")
    assert [taken(channel, name) for name in (queue, queue + ".2")] == [[b"0"], [b"0"]]


def test_number_below_the_window_is_nacked(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, 10_000)
    publish(channel, queue, 10_001 - 4096)
    with pytest.raises(NackError):
        publish(channel, queue, 10_000 - 4096)
    assert taken(channel, queue) == [b"10000", b"5905"]


def test_number_below_the_window_closes_a_channel_without_confirms(
    broker: Served, channel: BlockingChannel, queue: str
) -> None:
    publish(channel, queue, 10_000)
    with broker.channel() as plain:
        publish(plain, queue, 1)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*sequence 1 is below the window"):
            plain.basic_qos(0)
    assert taken(channel, queue) == [b"10000"]


def test_newer_epoch_starts_anew_and_fences_the_older(channel: BlockingChannel, queue: str) -> None:
    publish(channel, queue, 0, b"old")
    publish(channel, queue, 0, b"new", **{"x-producer-epoch": 1})
    with pytest.raises(NackError):
        publish(channel, queue, 1, b"zombie")
    assert taken(channel, queue) == [b"old", b"new"]


@pytest.mark.parametrize(
    ("sequence", "headers"),
    [
        (None, {}),
        ("1", {}),
        (True, {}),
        (-1, {}),
        (2**63 - 1, {}),
        (1, {"producer": 7}),
        (1, {"producer": ""}),
        (1, {"producer": "p" * 256}),
        (1, {"x-producer-epoch": "1"}),
        (1, {"x-producer-epoch": -1}),
        (1, {"x-producer-epoch": 2**32}),
    ],
)
def test_what_is_no_number_is_refused(broker: Served, sequence: object, headers: dict[str, object]) -> None:
    with broker.channel() as channel:
        channel.queue_declare("refusals", durable=True)
        publish(channel, "refusals", sequence, b"?", **headers)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*x-(producer|sequence)"):
            channel.basic_qos(0)
    with broker.channel() as channel:
        assert ready_count(channel, "refusals") == 0


def test_sequence_without_a_producer_is_a_header_like_any_other(channel: BlockingChannel, queue: str) -> None:
    for _ in range(2):
        publish(channel, queue, 4, producer=None)
    assert taken(channel, queue) == [b"4", b"4"]


def test_full_queue_refuses_the_number_for_all_and_takes_it_when_there_is_room(
    channel: BlockingChannel, queue: str
) -> None:
    channel.exchange_declare("limits", "fanout", durable=True)
    small = queue + ".small"
    channel.queue_declare(small, durable=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    for name in (queue, small):
        channel.queue_bind(name, "limits")
    publish(channel, "", 0, exchange="limits")
    with pytest.raises(NackError):
        publish(channel, "", 1, exchange="limits")
    assert taken(channel, small) == [b"0"]
    publish(channel, "", 1, exchange="limits")
    assert (taken(channel, queue), taken(channel, small)) == ([b"0", b"1"], [b"1"])


def test_transactional_channel_refuses_numbers(broker: Served) -> None:
    with broker.channel() as channel:
        channel.queue_declare("tx", durable=True)
        channel.tx_select()
        publish(channel, "tx", 0)
        with pytest.raises(ChannelClosedByBroker, match=r"406, .*transactional"):
            channel.tx_commit()


def test_unroutable_mandatory_number_is_returned_and_may_be_used_again(channel: BlockingChannel, queue: str) -> None:
    channel.exchange_declare("nowhere", "direct", durable=True)
    with pytest.raises(pika.exceptions.UnroutableError):
        publish(channel, queue, 0, exchange="nowhere", mandatory=True)
    channel.queue_bind(queue, "nowhere", queue)
    publish(channel, queue, 0, exchange="nowhere", mandatory=True)
    assert taken(channel, queue) == [b"0"]


@pytest.mark.parametrize("kill", [False, True], ids=["stopped", "killed"])
def test_resending_after_a_restart_adds_nothing(tmp_path: Path, kill: bool) -> None:
    with served(tmp_path) as broker:
        for _attempt in range(2):
            with broker.channel() as channel:
                channel.queue_declare("orders", durable=True)
                channel.confirm_delivery()
                for sequence in range(20):
                    publish(channel, "orders", sequence)
            broker.restart(kill=kill)
        with broker.channel() as channel:
            assert taken(channel, "orders") == [b"%d" % sequence for sequence in range(20)]
        broker.stop()
        # A kill leaves a gap behind the offsets that may have been seen; it holds no record.
        assert len([one for one in broker.dumped("queue:orders") if "gap" not in one]) == 20


def test_numbers_that_come_together_are_written_together(tmp_path: Path) -> None:
    with served(tmp_path) as broker:
        with broker.connected() as connection:
            channel = connection.channel()
            channel.queue_declare("orders", durable=True)
            # Without confirms pika leaves them in its buffer until it is asked to work.
            for sequence in range(100):
                publish(channel, "orders", sequence)
            assert ready_count(channel, "orders") == 100
            for sequence in (*range(90, 100), *range(100, 110)):
                publish(channel, "orders", sequence)
            assert taken(channel, "orders") == [b"%d" % sequence for sequence in range(110)]
        broker.stop()
        batches = broker.dumped("queue:orders", batches=True)
    assert len(batches) < 30
