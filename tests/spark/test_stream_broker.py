"""A stream and a running broker: cursors, leases, progress, and topics that change underneath. No JVM."""

import json
import threading
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pika
import pytest
from pyspark.sql.datasource import CaseInsensitiveDict
from pyspark.sql.streaming.datasource import ReadAllAvailable
from tests.running_broker import eventually

from headrace.client import Client, Login
from headrace.spark.access import DataLoss, NotAllowed
from headrace.spark.source import HeadraceSource, TaskPartition
from headrace.spark.stream import StreamReader
from headrace.spark.stream_broker import StreamBroker
from headrace.spark.stream_offsets import Offsets
from headrace.testing import EmbeddedBroker

ALL = ReadAllAvailable()
_numbers = count(1)


class Topic:
    """A topic of its own for each test, and a client that writes into it."""

    def __init__(self, broker: EmbeddedBroker, client: Client) -> None:
        self.name = f"t{next(_numbers)}"
        self.url = broker.http_url("")
        self.client = client
        self.create()

    def create(self, partitions: int = 2) -> None:
        self.client.request("POST", "/api/v1/topics", body={"name": self.name, "partitions": partitions})

    def delete(self) -> None:
        self.client.request("DELETE", f"/api/v1/topics/{self.name}")

    def grow(self, partitions: int) -> None:
        self.client.request("PATCH", f"/api/v1/topics/{self.name}", body={"partitions": partitions})

    def publish(self, *values: str) -> None:
        for value in values:
            self.client.request("POST", f"/api/v1/topics/{self.name}/messages", body={"key": value, "value": value})

    def reader(self, columns: str = "value", **options: str) -> StreamReader:
        given = {"url": self.url, "subscribe": self.name, "tokenName": "test", "columns": columns} | options
        source = HeadraceSource(CaseInsensitiveDict(given))
        return source.streamReader(source.schema())

    def leases(self) -> list[Any]:
        found: list[Any] = self.client.get(f"/api/v1/topics/{self.name}/leases")["leases"]
        return found


@pytest.fixture(scope="module")
def broker() -> Iterator[EmbeddedBroker]:
    with EmbeddedBroker(doors=("amqp", "http")) as broker:
        yield broker


@pytest.fixture
def topic(broker: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch) -> Iterator[Topic]:
    monkeypatch.setenv("HEADRACE_TOKEN_TEST", "guest:guest")
    with Client(broker.http_url(""), Login("guest", "guest")) as client:
        yield Topic(broker, client)


@pytest.fixture
def streams(topic: Topic) -> Iterator[Callable[..., StreamReader]]:
    """Readers that are stopped at the end."""
    made: list[StreamReader] = []

    def reader(**options: str) -> StreamReader:
        made.append(topic.reader(**options))
        return made[-1]

    yield reader
    for one in made:
        one.stop()


def values(one: StreamReader, start: dict[str, Any], end: dict[str, Any]) -> list[str]:
    batches = [batch for part in one.partitions(start, end) for batch in one.read(part)]
    return sorted(value.decode() for batch in batches for value in batch["value"].to_pylist())


def test_cursor_says_the_same_to_everybody_who_comes_later(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    topic.publish("before")
    first = streams(cursor="job").initialOffset()
    topic.publish("a", "b", "c")
    again = streams(cursor="job")
    assert again.initialOffset() == first
    assert values(again, first, again.latestOffset(first, ALL)) == ["a", "b", "c"]
    assert streams(cursor="another", startingOffsets="earliest").initialOffset() != first


def test_cursor_that_is_there_counts_whatever_the_options_have_come_to_mean(
    topic: Topic, streams: Callable[..., StreamReader]
) -> None:
    topic.publish("a")
    first = streams(cursor=f"c-{topic.name}", startingOffsets="earliest").initialOffset()
    # A time after the last record is an error where there is no cursor.
    again = streams(cursor=f"c-{topic.name}", startingTimestamp="9000000000000")
    assert again.initialOffset() == first


def test_first_batch_that_failed_is_run_again_from_where_it_began(
    topic: Topic, streams: Callable[..., StreamReader]
) -> None:
    """The trial that lost rows: batch 0 was planned and failed, more came, and `latest` was asked for anew."""
    failed = streams(cursor="nightly")
    start = failed.initialOffset()
    topic.publish("a", "b")
    end = failed.latestOffset(start, ALL)
    topic.publish("c")
    again = streams(cursor="nightly")
    assert values(again, again.initialOffset(), end) == ["a", "b"]
    assert values(again, end, again.latestOffset(end, ALL)) == ["c"]


def test_without_a_cursor_too_once_it_was_planned(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    failed = streams()
    with pytest.warns(UserWarning, match="nobody keeps"):
        start = failed.initialOffset()
    topic.publish("a", "b")
    end = failed.latestOffset(start, ALL)
    for more in ((), tuple("cdefghij")):
        topic.publish(*more)
        again = streams()
        with pytest.warns(UserWarning, match="nobody keeps"):
            moved = again.initialOffset()
        assert moved != start
        assert values(again, moved, end) == ["a", "b"]


def test_stream_holds_a_lease_on_what_it_has_not_read(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    topic.publish("a", "b", "c")
    one = streams(cursor=f"lease-{topic.name}", startingOffsets="earliest")
    start = one.initialOffset()
    (lease,) = topic.leases()
    assert lease["lease"] == f"spark-lease-{topic.name}"
    assert [held["offset"] for held in lease["partitions"]] == [0, 0]
    end = one.latestOffset(start, ALL)
    one.partitions(start, end)
    one._broker._held_at_s = 0.0  # type: ignore[union-attr]
    one.commit(end)
    (lease,) = topic.leases()
    assert sum(held["offset"] for held in lease["partitions"]) == 3
    one.stop()
    assert topic.leases() == []


def test_lease_is_renewed_while_a_batch_takes_long(
    topic: Topic, streams: Callable[..., StreamReader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.spark.stream_broker.RENEW_S", 0.01)
    renewed = threading.Event()
    asked = StreamBroker._renew

    def renew(self: StreamBroker) -> None:
        asked(self)
        if threading.current_thread().name == "headrace-lease":
            renewed.set()

    monkeypatch.setattr(StreamBroker, "_renew", renew)
    topic.publish("a")
    streams(startingOffsets="earliest").initialOffset()
    assert renewed.wait(30)
    assert len(topic.leases()) == 1


def test_progress_is_shown_as_a_group(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    topic.publish("a", "b", "c")
    one = streams(startingOffsets="earliest", **{"kafka.group.id": f"g-{topic.name}"})
    start = one.initialOffset()
    end = one.latestOffset(start, ALL)
    one.commit(end)
    shown = topic.client.get(f"/api/v1/consumer-groups/g-{topic.name}")
    assert json.dumps(shown).count('"lag": 0') >= 1
    # Spark says it again after a restart, and from before: nothing of that fails the query.
    one.commit(end)
    one.commit(start)


def test_broker_that_is_away_fails_no_query_over_a_lease(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.spark.access_http.PAUSE_S", 0.0)
    away = StreamBroker("http://127.0.0.1:1", token_name="test")
    away.hold(Offsets.from_json({"topics": {"a": {"0": 1, "id": "0b6e4f0e-6f2d-4b43-9d2c-8f4f0a6a0c11"}}, "v": 1}))
    away.publish("g", Offsets())
    away.close()


def test_token_that_this_machine_does_not_know_is_an_error(topic: Topic) -> None:
    with pytest.raises(NotAllowed, match="knows no token 'other'"):
        topic.reader(tokenName="other").initialOffset()


def test_partition_that_was_added_is_read_from_its_beginning(
    topic: Topic, streams: Callable[..., StreamReader]
) -> None:
    topic.publish(*"abcdef")
    one = streams(startingOffsets="earliest")
    start = one.initialOffset()
    end = one.latestOffset(start, ALL)
    topic.grow(8)
    more = [f"m{number}" for number in range(40)]
    topic.publish(*more)
    last = one.latestOffset(end, ALL)
    assert len(last["topics"][topic.name]) > len(end["topics"][topic.name])
    assert values(one, end, last) == sorted(more)


def test_growth_between_the_two_first_calls_loses_nothing(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    one = streams(cursor=f"grow-{topic.name}")
    first = one.initialOffset()
    topic.grow(5)
    more = [f"m{number}" for number in range(30)]
    topic.publish(*more)
    assert one.initialOffset() == first
    assert values(one, first, one.latestOffset(first, ALL)) == sorted(more)


def test_topic_that_was_deleted_and_created_again_is_noticed(
    topic: Topic, streams: Callable[..., StreamReader]
) -> None:
    topic.publish(*"abc")
    one = streams(startingOffsets="earliest")
    start = one.initialOffset()
    end = one.latestOffset(start, ALL)
    topic.delete()
    topic.create()
    topic.publish(*"vwxyz")
    with pytest.raises(DataLoss, match="deleted and created again"):
        one.latestOffset(end, ALL)
    with pytest.raises(DataLoss, match="gone with it"):
        one.partitions(start, end)
    lenient = streams(startingOffsets="earliest", failOnDataLoss="false")
    assert lenient.partitions(start, end) == []
    assert values(lenient, end, lenient.latestOffset(end, ALL)) == list("vwxyz")


def test_nothing_is_read_of_an_empty_topic(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    one = streams(startingOffsets="earliest")
    start = one.initialOffset()
    end = one.latestOffset(start, ALL)
    assert (end["topics"], end["began"]) == (start["topics"], start["topics"])
    assert json.dumps(one.latestOffset(end, ALL)) == json.dumps(end)
    assert one.partitions(start, end) == []
    one.commit(end)


def test_tasks_hold_the_name_of_a_token_and_not_the_token(topic: Topic, streams: Callable[..., StreamReader]) -> None:
    import pickle

    topic.publish("a")
    one = streams(startingOffsets="earliest")
    start = one.initialOffset()
    (part,) = one.partitions(start, one.latestOffset(start, ALL))
    assert isinstance(part, TaskPartition)
    carried = pickle.dumps(part) + repr(part).encode()
    assert b"guest" not in carried
    assert b"test" in carried


def test_amqp_clients_write_while_it_streams(
    broker: EmbeddedBroker, topic: Topic, streams: Callable[..., StreamReader]
) -> None:
    """Batch by batch until all that was confirmed is there: each once, none missing."""
    queue = f"q{topic.name}"
    connection = pika.BlockingConnection(pika.URLParameters(broker.amqp_url()))
    channel = connection.channel()
    channel.queue_declare(queue, durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", queue, b"0", pika.BasicProperties(delivery_mode=2))
    confirmed = {"0"}
    done = threading.Event()

    def write() -> None:
        for number in range(1, 400):
            channel.basic_publish("", queue, str(number).encode(), pika.BasicProperties(delivery_mode=2))
            confirmed.add(str(number))
        done.set()

    one = streams(subscribe=queue, startingOffsets="earliest", maxOffsetsPerTrigger="37")
    place = one.initialOffset()
    writer = threading.Thread(target=write)
    writer.start()
    found: list[str] = []
    while True:
        was_done = done.is_set()
        next = one.latestOffset(place, one.getDefaultReadLimit())
        if next == place and was_done:
            break
        found += values(one, place, next)
        place = next
    writer.join()
    connection.close()
    assert len(found) == len(set(found))
    assert set(found) == confirmed


def test_retention_that_overtakes_a_stream_is_an_error_or_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TOKEN_TEST", "guest:guest")
    with (
        EmbeddedBroker(doors=("http",)) as broker,
        Client(broker.http_url(""), Login("guest", "guest")) as client,
    ):
        topic = Topic(broker, client)
        topic.publish(*"abc")
        strict = topic.reader(startingOffsets="earliest")
        start = strict.initialOffset()
        end = strict.latestOffset(start, ALL)
        strict.stop()
        # Sealed after a day, taken after a week.
        for value in ("later", "late"):
            broker.clock.advance(days=8)
            topic.publish(*(f"{value}{number}" for number in range(20)))

        def firsts() -> list[int]:
            found = client.get(f"/api/v1/topics/{topic.name}")["partition_list"]
            return [one["first_offset"] for one in found]

        eventually(lambda: all(firsts()))
        with pytest.raises(DataLoss, match="would go on at"):
            strict.latestOffset(start, ALL)
        with pytest.raises(DataLoss, match="were to be read"):
            strict.partitions(start, end)
        lenient = topic.reader(startingOffsets="earliest", failOnDataLoss="false")
        found = values(lenient, start, lenient.latestOffset(start, ALL))
        assert "a" not in found
        assert {value for value in found if value.startswith("late") and not value.startswith("later")} == {
            f"late{number}" for number in range(20)
        }
        strict.stop()
        lenient.stop()
