"""Delayed messages of created topics: where they go when due, and what becomes of them when nobody is there."""

from tests.gateways.delivery.house import House

from headrace.controller.entities import Topic
from headrace.controller.table import EMPTY
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import PERSISTENT, Producer
from headrace.delay.fire import DueRun
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, decode_duty, encode_duty
from headrace.gateways.delivery.delayed_topics import DelayedTopics
from headrace.gateways.delivery.topics import Topics

DUTY = Duty(DutyKind.TOPIC, "/", "t")


def due(where: TargetPartition | None, *values: bytes, number: int = 0) -> DueRun:
    count = len(values)
    return DueRun(
        target=encode_duty(DUTY),
        where=where,
        producer=None if where is None else Producer(b"o" * 16, 1, number),
        settled=0,
        ids=[b"i"] * count,
        due_us=[1] * count,
        keys=[b"k"] * count,
        properties=[b""] * count,
        values=list(values),
        attributes=PERSISTENT,
        tags=("eu",),
        headers=[((b"a", b"b"),)] * count,
    )


def test_duty_of_a_topic_has_its_own_kind() -> None:
    assert decode_duty(encode_duty(DUTY)) == DUTY


async def test_messages_are_appended_once_with_tags_and_headers_and_done_when_committed() -> None:
    async with House().broker() as running:
        topics = Topics(running.broker)
        await topics.load()
        topic = await topics.create("/", "t", 2, EMPTY)
        carrier = DelayedTopics(running.broker, topics)
        where = carrier.place(DUTY, b"k")
        assert where is not None and where.stream == topic.stream
        done: list[int] = []
        for _ in range(2):
            carrier.fire(DUTY, due(where, b"one", b"two"), lambda: done.append(1))
        log = topics.logs_of(topic.stream)[where.partition]
        assert done == []
        await running.broker.wait_committed(log, log.end)
        assert done == [1, 1]
        assert carrier.appended_count == log.end == 2
        record = log.read(0)[0].batch.record(1)
        assert (record.value, record.tags, record.headers) == (b"two", ("eu",), ((b"a", b"b"),))


async def test_topic_that_has_grown_gives_a_key_its_new_partition() -> None:
    async with House().broker() as running:
        topics = Topics(running.broker)
        await topics.load()
        await topics.create("/", "t", 1, EMPTY)
        carrier = DelayedTopics(running.broker, topics)
        keys = [b"%d" % number for number in range(50)]
        assert {carrier.place(DUTY, key) for key in keys} == {carrier.place(DUTY, b"k")}
        await topics.change("/", "t", lambda topic: Topic("/", "t", topic.stream, 4, topic.settings))
        assert len({carrier.place(DUTY, key) for key in keys}) == 4


async def test_messages_of_a_topic_that_is_gone_are_dropped_and_counted() -> None:
    async with House().broker() as running:
        topics = Topics(running.broker)
        await topics.load()
        await topics.create("/", "t", 1, EMPTY)
        carrier = DelayedTopics(running.broker, topics)
        where = carrier.place(DUTY, b"k")
        await topics.delete("/", "t")
        assert carrier.place(DUTY, b"k") is None
        done: list[int] = []
        carrier.fire(DUTY, due(where, b"x"), lambda: done.append(1))
        carrier.fire(DUTY, due(None, b"x", b"y"), lambda: done.append(2))
        assert (done, carrier.dropped_count) == ([1, 2], 3)
