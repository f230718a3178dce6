"""Retries: what fails comes back to its queue alone, after its delay, and dies after its last attempt, each once."""

from random import Random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.entities import Binding, DestinationKind
from headrace.core_log.errors import Refused
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import RELOCATED, Producer, Record
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.config import DelayConfig
from headrace.delay.fire import DueRun
from headrace.filtering.expression import parse
from headrace.gateways.amqp import properties
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue, Reason
from headrace.gateways.delivery.redrive import Request
from headrace.gateways.delivery.retry import attempts_in

from .house import START_US, House, Running, Taker

FIXED = {"retry_max": 2, "retry_backoff": "fixed", "retry_delay_ms": 10_000}


def record_of(stretch: Stretch) -> Record:
    return stretch.loaded().record(stretch.index)


def got(queue: Queue) -> Stretch:
    stretch = queue.get()
    assert stretch is not None
    return stretch


def headers_of(record: Record) -> dict[str, Any]:
    return properties.decode(record.properties).headers or {}


async def in_fanout(running: Running, *queues: str) -> None:
    await running.host.declare_exchange("fan", "fanout", durable=True, auto_delete=False, internal=False)
    for queue in queues:
        await running.host.bind(
            Binding(vhost="/", source="fan", destination_kind=DestinationKind.QUEUE, destination=queue, routing_key="")
        )


async def publish_to_fan(running: Running, *bodies: bytes) -> None:
    target = running.host.target("fan", b"jobs.eu", ["jobs.eu"])
    running.broker.publish(target, [b"\0\0"] * len(bodies), bodies, attributes=1 | 16)
    running.broker.dispatch()
    await running.broker.committed()


def buried(running: Running, name: str) -> list[Record]:
    history = running.host.queue(name).history
    source = history.last_source
    return [] if source is None else [one for run in source.read(0) for one in run.batch.records()]


async def test_failure_comes_back_after_its_delay_to_its_queue_alone(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work, other = await running.declare("work", **FIXED), await running.declare("other")
        await in_fanout(running, "work", "other")
        await publish_to_fan(running, b"job")
        work.reject(got(work))
        await trio.sleep(9.9)
        assert (work.message_count, other.ready_count) == (0, 1)
        await trio.sleep(0.2)
        assert (work.ready_count, other.ready_count) == (1, 1)
        record = record_of(got(work))
        assert (record.value, record.key, record.timestamp_us) == (b"job", b"jobs.eu", START_US)
        assert record.attributes & RELOCATED
        assert running.broker.transfers.retries == {Reason.REJECTED: 1}
        assert running.broker.returns.returned_count == 1


async def test_consumer_is_told_attempt_reason_and_origin(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", **FIXED)
        await in_fanout(running, "work")
        await publish_to_fan(running, b"zero", b"one")
        stream = work.history.last_source
        assert stream is not None
        for _ in range(2):
            work.reject(got(work))
        await trio.sleep(11)
        first, second = got(work), got(work)
        assert [one.decode() for one in running.broker.exchanges_of(first)] == ["fan"]
        assert headers_of(record_of(second)) == {
            "x-attempt": 2,
            "x-reason": "rejected",
            "x-origin-stream": str(stream.stream_id),
            "x-origin-partition": 0,
            "x-origin-offset": 1,
        }
        work.reject(second)
        await trio.sleep(11)
        again = record_of(got(work))
        assert (headers_of(again)["x-attempt"], headers_of(again)["x-origin-offset"]) == (3, 1)
        times = [(when, why) for when, why in attempts_in(dict(again.headers))]
        assert [why for _when, why in times] == ["rejected", "rejected"]
        assert times[1][0] - times[0][0] >= 10_000_000


async def test_last_attempt_leads_to_the_dead_letter_exchange(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        dead = await running.declare("dead")
        arguments = FIXED | {"dead_letter_exchange": "", "dead_letter_routing_key": "dead"}
        work = await running.declare("work", **arguments)
        await running.publish("work", b"job")
        for _ in range(3):
            work.reject(got(work))
            await trio.sleep(11)
        record = record_of(got(dead))
        headers = headers_of(record)
        assert (headers["x-attempt"], headers["x-reason"], headers["x-death"][0]["count"]) == (3, "rejected", 1)
        assert headers["x-death"][0]["queue"] == "work"
        assert work.message_count == 0
        transfers = running.broker.transfers
        assert (transfers.retries, transfers.exhausted) == ({Reason.REJECTED: 2}, {Reason.REJECTED: 1})
        assert transfers.dead_letters == {Reason.REJECTED: 1}


async def test_last_attempt_leads_to_the_queues_own_dead_letter_queue_where_no_exchange_is_named(
    autojump_clock: MockClock,
) -> None:
    house = House()
    async with house.broker() as running:
        work = await running.declare("work", retry_max=0)
        await in_fanout(running, "work")
        await publish_to_fan(running, b"0", b"1")
        for _ in range(2):
            work.reject(got(work))
        await trio.sleep(1)
        found = running.host.queue("work.dlq")
        assert (found.settings.stream, found.durable, found.ready_count) == (False, True, 2)
        record, _other = buried(running, "work.dlq")
        assert (record.value, record.key) == (b"0", b"jobs.eu")
        headers = headers_of(record)
        assert (headers["x-attempt"], headers["x-reason"], headers["x-origin-offset"]) == (1, "rejected", 0)
        assert headers["x-death"][0]["exchange"] == "fan"
        assert work.message_count == 0
        await running.host.delete_queue(work)
        assert running.host.queue("work.dlq").ready_count == 2
    async with house.broker() as running:
        assert running.host.queue("work.dlq").ready_count == 2


async def test_delivery_limit_ends_in_the_queues_own_dead_letter_queue_and_never_nowhere(
    autojump_clock: MockClock,
) -> None:
    async with House().broker() as running:
        work = await running.declare("work", queue_type="quorum", delivery_limit=1)
        await running.publish("work", b"poison")
        for _ in range(2):
            work.give_back([got(work)])
        await trio.sleep(1)
        (record,) = buried(running, "work.dlq")
        assert headers_of(record)["x-reason"] == "delivery_limit"


async def test_deliveries_in_vain_are_counted_over_a_restart(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        work = await running.declare("work", queue_type="quorum", delivery_limit=2)
        await running.publish("work", b"0", b"1", b"2")
        stretches = [got(work) for _ in range(3)]
        work.give_back([stretches[1]])
        work.give_back([got(work)])
    async with house.broker() as running:
        work = running.host.queue("work")
        found = [got(work) for _ in range(3)]
        assert [(record_of(one).value, one.failures) for one in found] == [(b"0", 0), (b"1", 2), (b"2", 0)]
        work.give_back(found)
        await trio.sleep(1)
        assert (work.ready_count, [one.value for one in buried(running, "work.dlq")]) == (2, [b"1"])


async def test_delivery_limit_under_a_policy_has_another_attempt(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", queue_type="quorum", delivery_limit=0, retry_max=1)
        await running.publish("work", b"poison")
        work.give_back([got(work)])
        assert work.ready_count == 0
        await trio.sleep(2)
        stretch = got(work)
        assert headers_of(record_of(stretch))["x-reason"] == "delivery_limit"
        work.give_back([stretch])
        await trio.sleep(2)
        assert len(buried(running, "work.dlq")) == 1


async def test_what_expires_or_overflows_has_not_failed(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", message_ttl=1000, max_length=2, **FIXED)
        await running.publish("work", b"0", b"1", b"2")
        await trio.sleep(60)
        assert work.message_count == 0
        assert running.broker.transfers.retries.total() == 0
        assert "work.dlq" not in running.host.queues


async def test_policy_of_the_operator_counts_from_when_it_is_set(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work")
        await running.policy({"retry-max": 1, "retry-backoff": "levels"})
        await running.publish("work", b"job")
        work.reject(got(work))
        await trio.sleep(0.9)
        assert work.message_count == 0
        await trio.sleep(0.2)
        assert work.ready_count == 1


async def test_record_of_a_queue_that_was_deleted_meanwhile_does_not_come_back(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", **FIXED)
        await running.publish("work", b"job")
        work.reject(got(work))
        await trio.sleep(1)
        await running.host.delete_queue(work)
        again = await running.declare("work", **FIXED)
        await trio.sleep(60)
        assert again.message_count == 0
        assert running.broker.returns.dropped_count == 1


async def test_queue_that_is_not_durable_retries_too(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", durable=False, **FIXED)
        await running.publish("work", b"job", persistent=False)
        work.reject(got(work))
        await trio.sleep(11)
        assert headers_of(record_of(got(work)))["x-attempt"] == 2


async def test_what_waits_is_counted_and_listed_by_its_queue(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work, other = await running.declare("work", **FIXED), await running.declare("other", **FIXED)
        await running.publish("work", b"0", b"1")
        await running.publish("other", b"2")
        for queue in (work, work, other):
            queue.reject(got(queue))
        await trio.sleep(1)
        returns = running.broker.returns
        assert (returns.waiting_count("/", work), returns.waiting_count("/", other)) == (2, 1)
        page = await returns.waiting("/", work)
        assert sorted(one.value for one in page.records) == [b"0", b"1"]
        await trio.sleep(11)
        assert returns.waiting_count("/", work) == 0


async def test_dead_letter_queue_that_cannot_be_made_yet_keeps_its_dead_waiting(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        work = await running.declare("work", retry_max=0)
        running.broker.queues_max = lambda vhost: 1
        await running.publish("work", b"job")
        work.reject(got(work))
        await trio.sleep(30)
        assert (work.unacked_count, list(running.host.queues)) == (1, ["work"])
        running.broker.queues_max = lambda vhost: None
        await trio.sleep(30)
        assert (work.unacked_count, running.host.queue("work.dlq").ready_count) == (0, 1)


async def test_delay_beyond_what_can_be_kept_is_cut_and_not_the_end_of_the_broker(autojump_clock: MockClock) -> None:
    """Arguments that were declared before there was a limit, and a limit that is lower since."""
    house = House()
    arguments: dict[str, Any] = {"retry_max": 1, "retry_backoff": "fixed", "retry_delay_ms": 2**53}
    async with house.broker() as running:
        work = await running.declare("work", **arguments)
        await running.publish("work", b"job")
        work.reject(got(work))
        await trio.sleep(1)
        assert running.broker.returns.waiting_count("/", work) == 1
    async with house.broker() as running:
        (found,) = (await running.broker.returns.waiting("/", running.host.queue("work"))).records
        assert found.due_us - START_US <= DelayConfig().delay_s_max * 1_000_000 + 1_000_000


async def test_return_for_a_queue_that_is_gone_leaves_no_gap_for_those_behind_it(autojump_clock: MockClock) -> None:
    """Queues that are not durable share a log, and so the numbers in it."""
    async with House().broker() as running:
        work = await running.declare("work", durable=False, **FIXED)
        log = running.broker.transient_log
        for number, name in enumerate(("work", "gone", "work")):
            duty = Duty(DutyKind.RETRY, "/", name, work.view_id)
            run = DueRun(
                target=encode_duty(duty),
                where=TargetPartition(log.stream_id, log.partition),
                producer=Producer(bytes(16), 0, number, dense=True),
                # The first one is not committed yet.
                settled=0,
                ids=[b"%d" % number],
                due_us=[START_US],
                keys=[b"work"],
                properties=[b"\0\0"],
                values=[b"%d" % number],
                attributes=1,
                tags=(),
                headers=None,
            )
            running.broker.returns.fire(duty, run, lambda: None)
        await running.broker.committed()
        assert running.bodies("work") == [b"0", b"2"]
        assert running.broker.returns.dropped_count == 1


@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
async def test_return_drops_nothing_from_a_full_queue_that_refuses_publishes(
    overflow: str, autojump_clock: MockClock
) -> None:
    async with House().broker() as running:
        work = await running.declare("work", max_length=2, overflow=overflow, **FIXED)
        await running.publish("work", b"0")
        work.reject(got(work))
        await running.publish("work", b"1", b"2")
        await trio.sleep(11)
        assert running.bodies("work") == [b"1", b"2", b"0"]
        assert work.dropped_count == 0


# -- dead-letter queues that take none --------------------------------------------------------------------------


async def test_full_dead_letter_queue_that_refuses_keeps_its_dead_waiting_until_there_is_room(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    house = House()
    values = [b"%d" % number for number in range(5)]
    async with house.broker() as running:
        dead = await running.declare("work.dlq", max_length=2, overflow="reject-publish")
        work = await running.declare("work", retry_max=0)
        await running.publish("work", *values)
        for stretch in [got(work) for _ in values]:
            work.reject(stretch)
        await trio.sleep(10)
        assert (dead.ready_count, work.unacked_count, dead.dropped_count) == (2, 3, 0)
        assert [one.getMessage() for one in caplog.records if "is full" in one.getMessage()] == [
            "a dead-letter queue is full and refuses more: its dead letters stay where they are"
        ]
    async with house.broker() as running:
        await trio.sleep(10)
        assert (running.host.queue("work.dlq").ready_count, running.host.queue("work").unacked_count) == (2, 3)
        found: list[bytes] = []
        for _ in range(3):
            found += running.bodies("work.dlq")
            await trio.sleep(10)
        assert sorted(found) == values
        assert running.host.queue("work").message_count == 0


async def test_dead_letters_fill_up_a_dead_letter_queue_exactly_while_others_publish_to_it(
    autojump_clock: MockClock,
) -> None:
    async with House().broker() as running:
        dead = await running.declare("work.dlq", max_length=3, overflow="reject-publish")
        work = await running.declare("work", retry_max=0)
        await running.publish("work", *(b"%d" % number for number in range(5)))
        work.reject(work._take(5) or got(work))
        # It was planned while there was room for three.
        await running.publish("work.dlq", b"mine")
        await trio.sleep(10)
        assert (dead.ready_count, work.unacked_count) == (3, 3)


async def test_queue_that_is_deleted_leaves_its_dead_in_a_full_dead_letter_queue(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        dead = await running.declare("work.dlq", max_length=1, overflow="reject-publish")
        work = await running.declare("work", retry_max=0)
        await running.publish("work", b"0", b"1")
        for _ in range(2):
            work.reject(got(work))
        await trio.sleep(10)
        await running.host.delete_queue(work)
        await trio.sleep(10)
        assert dead.ready_count == 2


async def test_dead_letter_queue_that_cannot_be_made_holds_up_no_other(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with House().broker() as running:
        declare = running.host.declare_queue

        async def only_others(name: str, *arguments: Any, **more: Any) -> Queue:
            if name == "bad.dlq":
                raise Refused("not this one")
            return await declare(name, *arguments, **more)

        monkeypatch.setattr(running.host, "declare_queue", only_others)
        bad, good = await running.declare("bad", retry_max=0), await running.declare("good", retry_max=0)
        await running.publish("bad", b"0")
        await running.publish("good", b"1")
        bad.reject(got(bad))
        await trio.sleep(1)
        good.reject(got(good))
        await trio.sleep(1)
        assert (bad.unacked_count, running.host.queue("good.dlq").ready_count) == (1, 1)
        monkeypatch.undo()
        await trio.sleep(30)
        assert running.host.queue("bad.dlq").ready_count == 1


@pytest.mark.parametrize("cause", ["policy", "delivery limit"])
async def test_dead_letters_of_a_queue_with_too_long_a_name_stay_until_they_have_an_exchange(
    cause: str, autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    name = "q" * 252
    house = House()
    async with house.broker() as running:
        if cause == "policy":
            work = await running.declare(name)
            await running.policy({"retry-max": 0})
            await running.publish(name, b"job")
            work.reject(got(work))
        else:
            work = await running.declare(name, queue_type="quorum", delivery_limit=0)
            await running.publish(name, b"job")
            work.give_back([got(work)])
        await trio.sleep(60)
        assert (work.unacked_count, list(running.host.queues)) == (1, [name])
        assert [one.getMessage() for one in caplog.records if "too long" in one.getMessage()] == [
            "the name of a dead-letter queue is too long: its dead letters stay where they are"
        ]
    async with house.broker() as running:
        dead = await running.declare("dead")
        await running.policy({"retry-max": 0, "dead-letter-exchange": "", "dead-letter-routing-key": "dead"})
        await trio.sleep(10)
        assert (running.host.queue(name).message_count, dead.ready_count) == (0, 1)


@pytest.mark.parametrize("durable", [True, False])
async def test_what_no_filter_wants_is_in_the_dead_letter_queue_where_no_exchange_is_named(
    durable: bool, autojump_clock: MockClock
) -> None:
    async with House().broker() as running:
        work = await running.declare("work", durable=durable, filter_unmatched="dead-letter")
        work.add_consumer(Taker(), parse("eu"))
        await running.publish("work", b"job", persistent=durable)
        await trio.sleep(1)
        (record,) = buried(running, "work.dlq")
        assert (record.value, headers_of(record)["x-reason"], work.message_count) == (b"job", "unmatched", 0)
        assert headers_of(record)["x-death"][0]["reason"] == "unmatched"


@pytest.mark.parametrize("seed", range(12))
async def test_each_record_fails_its_attempts_and_dies_once_over_crashes(seed: int, autojump_clock: MockClock) -> None:
    """Whatever a crash brings back is delivered again; what was journalled is neither lost nor doubled."""
    random, house = Random(seed), House(seed)
    values = [b"%d" % number for number in range(6)]
    async with house.broker() as running:
        await running.declare("work", retry_max=2, retry_backoff="fixed", retry_delay_ms=500)
        await running.publish("work", *values)
    for life in range(8):
        try:
            async with house.broker(clean=False) as running:
                work = running.host.queue("work")
                taker = running.consume(work, Taker(no_ack=False))
                until = trio.current_time() + (random.random() * 2 if life < 7 else 30)
                while trio.current_time() < until:
                    await trio.sleep(random.random() * 0.01)
                    for stretch in taker.held:
                        work.reject(stretch)
                    taker.held.clear()
                    running.broker.dispatch()
                if life < 7:
                    assert isinstance(house.storage, MemoryStorage)
                    house.storage = house.storage.power_loss(random)
                    raise KeyboardInterrupt
                dead = [record.value for record in buried(running, "work.dlq")]
                assert sorted(dead) == values
                assert work.message_count == 0
        except BaseExceptionGroup as error:
            if error.split(KeyboardInterrupt)[0] is None:
                raise


@pytest.mark.parametrize("seed", range(8))
async def test_each_record_dies_once_though_its_dead_letter_queue_is_mostly_full(
    seed: int, autojump_clock: MockClock
) -> None:
    """Over crashes, while others publish to it and somebody takes out what is there."""
    random, house = Random(seed), House(seed)
    values = [b"%d" % number for number in range(12)]
    async with house.broker() as running:
        await running.declare("work", retry_max=0)
        await running.declare("work.dlq", max_length=2, overflow="reject-publish")
        await running.publish("work", *values)
    for life in range(8):
        try:
            async with house.broker(clean=False) as running:
                work, dead = running.host.queue("work"), running.host.queue("work.dlq")
                taker = running.consume(work, Taker(no_ack=False))
                until = trio.current_time() + (random.random() * 3 if life < 7 else 60)
                while trio.current_time() < until:
                    await trio.sleep(random.random())
                    for stretch in taker.held:
                        work.reject(stretch)
                    taker.held.clear()
                    if dead.admits(1, 0):
                        await running.publish("work.dlq", b"other")
                    if random.random() < 0.5:
                        running.bodies("work.dlq")
                    running.broker.dispatch()
                    assert (dead.ready_count <= 2, dead.dropped_count) == (True, 0)
                if life < 7:
                    assert isinstance(house.storage, MemoryStorage)
                    house.storage = house.storage.power_loss(random)
                    raise KeyboardInterrupt
                found = [record.value for record in buried(running, "work.dlq") if record.value != b"other"]
                assert sorted(found) == sorted(values)
                assert work.message_count == 0
        except BaseExceptionGroup as error:
            if error.split(KeyboardInterrupt)[0] is None:
                raise


async def test_redriven_record_that_fails_again_does_not_get_the_time_to_live_of_its_first_life(
    autojump_clock: MockClock,
) -> None:
    async with House().broker() as running:
        work = await running.declare("work", retry_max=1, retry_backoff="fixed", retry_delay_ms=1000)
        await running.publish("work", b"job", ttl_ms=20_000)
        for _ in range(2):
            work.reject(got(work))
            await trio.sleep(2)
        assert running.host.queue("work.dlq").ready_count == 1
        await trio.sleep(60)
        running.broker.fields_of = properties.routing_fields
        redrive = running.broker.redrives.start(Request("/", "work.dlq"), "ann")
        await trio.sleep(1)
        assert redrive.progress.moved == 1
        work.reject(got(work))
        await trio.sleep(5)
        assert record_of(got(work)).value == b"job"
