"""Topics: what a name leads to, and topics that are created, grow, and go."""

import pytest
import trio
from tests.gateways.delivery.house import House, Running

from headrace.controller.changes import DeleteVhost, PutTopic, create_vhost
from headrace.controller.entities import Topic
from headrace.controller.errors import AlreadyExists, Invalid, NotFound
from headrace.controller.table import EMPTY, Table
from headrace.core_log.errors import DiskFull
from headrace.core_log.ids import StreamId
from headrace.core_log.record import PERSISTENT
from headrace.gateways.delivery.topics import TopicKind, TopicName, Topics, check_new_name, parse_name


def leads_to(topics: Topics, text: str) -> TopicKind:
    return topics.resolve(parse_name(text)).kind


async def with_topics(running: Running) -> Topics:
    topics = Topics(running.broker)
    await topics.load()
    return topics


def write(topics: Topics, text: str, partition: int, *values: bytes) -> None:
    log = topics.log_at(topics.resolve(parse_name(text)), partition)
    assert log is not None
    log.append([b""] * len(values), [b""] * len(values), values, timestamp_us=1, attributes=PERSISTENT)
    topics._directory.committer.urgent(log)


def read(topics: Topics, text: str, partition: int) -> list[bytes]:
    log = topics.log_at(topics.resolve(parse_name(text)), partition)
    assert log is not None
    return [value for run in log.read(log.log_start, end=log.end) for value in run.batch.values]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("orders", TopicName("/", None, "orders")),
        ("exchange:orders", TopicName("/", TopicKind.EXCHANGE, "orders")),
        ("queue:a.dlq", TopicName("/", TopicKind.QUEUE, "a.dlq")),
        ("other|orders", TopicName("other", None, "orders")),
        ("other|queue:a|b", TopicName("other", TopicKind.QUEUE, "a|b")),
        ("/|a", TopicName("/", None, "a")),
        ("exchange:", TopicName("/", TopicKind.EXCHANGE, "")),
    ],
)
def test_name_is_taken_apart(text: str, name: TopicName) -> None:
    assert parse_name(text) == name


@pytest.mark.parametrize(
    "name", ["", "a|b", "exchange:x", "queue:x", "__views", "amq.x", "a.dlq", "a.retry", "x" * 256, "a\0"]
)
def test_topic_cannot_have_a_name_that_leads_elsewhere(name: str) -> None:
    with pytest.raises(Invalid):
        check_new_name(name)


async def test_name_leads_to_a_topic_before_an_exchange_before_a_queue() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        with pytest.raises(NotFound, match="no topic, exchange or queue 'orders'"):
            topics.resolve(parse_name("orders"))
        await running.declare("orders")
        assert leads_to(topics, "orders") is TopicKind.QUEUE
        await running.host.declare_exchange("orders", "topic", durable=True, auto_delete=False, internal=False)
        assert leads_to(topics, "orders") is TopicKind.EXCHANGE
        await topics.create("/", "orders", 1, EMPTY)
        assert leads_to(topics, "orders") is TopicKind.TOPIC
        assert leads_to(topics, "exchange:orders") is TopicKind.EXCHANGE
        assert leads_to(topics, "queue:orders") is TopicKind.QUEUE
        for text in ("orders", "exchange:orders", "queue:orders"):
            assert topics.resolve(parse_name(text)).public_name == text
        for text in ("other|orders", "exchange:", "queue:nothing"):
            with pytest.raises(NotFound):
                topics.resolve(parse_name(text))


async def test_created_topic_is_there_after_a_restart_with_its_records_partitions_and_settings() -> None:
    house = House()
    async with house.broker() as running:
        topics = await with_topics(running)
        await topics.create("/", "t", 3, Table({"x-retention-ms": 5000, "x-durability": "interval"}))
        write(topics, "t", 2, b"a", b"b")
    async with house.broker() as running:
        topics = await with_topics(running)
        place = topics.resolve(parse_name("t"))
        assert topics.partition_count(place) == 3
        assert read(topics, "t", 2) == [b"a", b"b"]
        assert topics.logs_of(place.stream_id)[0].config.retention_ms == 5000
        assert topics.logs_of(place.stream_id)[0].config.durability == "interval"


async def test_topic_that_exists_is_not_created_again() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        await topics.create("/", "t", 1, EMPTY)
        with pytest.raises(AlreadyExists):
            await topics.create("/", "t", 1, EMPTY)


async def test_topic_that_grows_keeps_its_records_and_deals_keys_over_all_partitions() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        await topics.create("/", "t", 1, EMPTY)
        place = topics.resolve(parse_name("t"))
        write(topics, "t", 0, b"old")
        await topics.change("/", "t", lambda topic: Topic("/", "t", topic.stream, 4, topic.settings))
        assert read(topics, "t", 0) == [b"old"]
        keys = [b"%d" % number for number in range(100)]
        assert {topics.partition_for(place, key) for key in keys} == {0, 1, 2, 3}
        assert [topics.partition_for(place, key) for key in keys] == [topics.partition_for(place, key) for key in keys]
        with pytest.raises(Invalid, match="cannot have 2"):
            await topics.change("/", "t", lambda topic: Topic("/", "t", topic.stream, 2, topic.settings))


async def test_records_without_a_key_go_round() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        await topics.create("/", "t", 3, EMPTY)
        place = topics.resolve(parse_name("t"))
        assert [topics.next_partition(place) for _ in range(5)] == [0, 1, 2, 0, 1]


async def test_other_settings_count_at_once_and_stand_in_the_file() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        topic = await topics.create("/", "t", 2, EMPTY)
        settings = Table({"x-retention-bytes": 1_000_000})
        await topics.change("/", "t", lambda found: Topic("/", "t", found.stream, 2, settings))
        stream = running.broker.directory.streams[topic.stream]
        assert {log.config.retention_bytes for log in stream.partitions} == {1_000_000}
        assert stream.spec.config.retention_bytes == 1_000_000


async def test_deleted_topic_is_gone_and_its_readers_are_woken() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        await topics.create("/", "t", 1, EMPTY)
        place = topics.resolve(parse_name("t"))
        woken = []
        topics.logs_of(place.stream_id)[0].advanced.append(woken.append)
        await topics.delete("/", "t")
        assert woken
        assert not topics.is_there(place)
        assert topics.logs_of(place.stream_id) == ()
        with pytest.raises(NotFound):
            await topics.delete("/", "t")
        again = await topics.create("/", "t", 1, EMPTY)
        assert again.stream != place.stream_id


async def test_start_makes_what_a_crash_left_undone_and_takes_away_what_nobody_knows() -> None:
    house = House()
    async with house.broker() as running:
        await running.metadata.commit(PutTopic(Topic("/", "unmade", StreamId(running.broker.env.ids.uuid()), 2)))
        await running.broker.directory.create_stream("forgotten", kind="topic")
    async with house.broker() as running:
        topics = await with_topics(running)
        assert topics.partition_count(topics.resolve(parse_name("unmade"))) == 2
        assert "forgotten" not in [stream.spec.name for stream in running.broker.directory.streams.values()]


async def test_topic_for_which_the_disk_has_no_room_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    async with House().broker() as running:
        topics = await with_topics(running)

        def full(spec: object) -> None:
            raise DiskFull("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(running.broker.directory, "create_now", full)
            with pytest.raises(DiskFull):
                await topics.create("/", "t", 1, EMPTY)
        with pytest.raises(NotFound):
            topics.resolve(parse_name("t"))
        await topics.create("/", "t", 1, EMPTY)


async def test_topics_go_with_their_vhost() -> None:
    async with House().broker() as running:
        topics = await with_topics(running)
        await running.metadata.commit(*create_vhost("two", running.metadata.new_stream))
        topic = await topics.create("two", "t", 1, EMPTY)
        assert leads_to(topics, "two|t") is TopicKind.TOPIC
        async with trio.open_nursery() as nursery:
            nursery.start_soon(topics.run)
            await running.metadata.commit(DeleteVhost("two"))
            with pytest.raises(NotFound):
                topics.resolve(parse_name("two|t"))
            await running.until(lambda: topic.stream not in running.broker.directory.streams)
            nursery.cancel_scope.cancel()
