"""Dead letters that go back: which of them, where to, how fast, and each once whenever the broker dies."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import trio

from headrace.controller.errors import NotFound
from headrace.core_log.errors import Refused
from headrace.core_log.record import PERSISTENT, Protocol
from headrace.filtering.expression import parse
from headrace.gateways.amqp.deaths import aparts, mark
from headrace.gateways.amqp.fields import encode_table
from headrace.gateways.amqp.properties import Properties, decode, encode, routing_fields
from headrace.gateways.delivery.dead_letters import Wanted, read
from headrace.gateways.delivery.redrive import Redrive, Request, State, ready_in

from .test_broker import Machine, Running, bodies
from .test_transfers import arrived, declared, reject


def ready(running: Running) -> None:
    """What the whole node does besides."""
    broker = running.broker
    broker.fields_of = routing_fields
    broker.transfers.marks = {Protocol.AMQP: mark}
    broker.redrives.aparts = {Protocol.AMQP: aparts}
    running.nursery.start_soon(broker.redrives.run)
    running.nursery.start_soon(broker.transfers.run)


async def dead(running: Running, *values: bytes) -> None:
    """These were published to `work`, and rejected there."""
    ready(running)
    running.publish("", "work", *values)
    await running.commit()
    await reject(running, *values)
    await arrived(running)


async def ended(redrive: Redrive) -> Redrive:
    while redrive.state is State.RUNNING:
        await trio.lowlevel.checkpoint()
    return redrive


async def redriven(running: Running, queue: str = "dead", **asked: object) -> Redrive:
    return await ended(running.broker.redrives.start(Request("/", queue, **asked), "ann"))  # type: ignore[arg-type]


async def test_dead_letters_go_back_to_the_queue_they_died_in() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, b"1", b"2", b"3")
        found = await redriven(running)
        assert (found.state, found.progress.moved, found.progress.total) == (State.DONE, 3, 3)
        assert (running.ready("work"), running.ready("dead")) == ([b"1", b"2", b"3"], [])


async def test_full_queue_that_refuses_publishes_takes_them_and_drops_nothing() -> None:
    async with Machine().start() as running:
        await declared(running, max_length=1, overflow="reject-publish")
        await dead(running, b"1")
        running.publish("", "work", b"2")
        await running.commit()
        assert (await redriven(running)).progress.moved == 1
        running.broker.dispatch()
        assert (running.ready("work"), running.ready("dead")) == ([b"2", b"1"], [])


async def test_they_come_back_with_nothing_that_tells_of_a_death_and_as_they_were_published() -> None:
    async with Machine().start() as running:
        await declared(running)
        await running.exchange("orders")
        await running.bind("orders", "work", "eu.new")
        ready(running)
        running.publish("orders", "eu.new", b"1")
        await running.commit()
        await reject(running, b"1")
        await arrived(running)
        await redriven(running)
        (stretch,) = ready_in(running.queue("work"))
        batch = stretch.loaded()
        assert batch.keys[stretch.index] == b"eu.new"
        assert decode(batch.properties[stretch.index]).headers in (None, {})
        assert running.broker.exchanges_of(stretch) == [b"orders"]


async def test_each_keeps_the_properties_that_are_its_own() -> None:
    async with Machine().start() as running:
        await declared(running)
        ready(running)
        host = running.broker.vhosts["/"]
        table = encode_table({"app": "shop"})
        sent = [
            encode(Properties(content_type=kind, headers_bytes=headers, delivery_mode=2, message_id=f"id-{number}"))
            for number, (kind, headers) in enumerate(
                [(None, None), ("text/plain", table), (None, table), ("a/b", None)]
            )
        ]
        values = [b"%d" % number for number in range(len(sent))]
        target = host.target("", b"work", ["work"])
        running.broker.publish(target, sent, values, attributes=int(Protocol.AMQP) | PERSISTENT)
        await running.commit()
        await reject(running, *values)
        await arrived(running)
        assert (await redriven(running)).progress.moved == len(sent)
        found = [
            decode(stretch.loaded().properties[index])
            for stretch in ready_in(running.queue("work"))
            for index in range(stretch.index, stretch.index + stretch.count)
        ]
        assert [(one.content_type, one.headers or None, one.delivery_mode, one.message_id) for one in found] == [
            (one.content_type, one.headers, one.delivery_mode, one.message_id) for one in map(decode, sent)
        ]


async def test_one_is_sent_back_by_its_place() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(5))
        stretches = list(ready_in(running.queue("dead")))
        (source,) = {(str(one.source.stream_id), one.source.partition) for one in stretches}
        offset = stretches[0].offset + 2
        found = await redriven(running, wanted=Wanted(places=frozenset([(*source, offset)])))
        assert found.progress.moved == 1
        assert running.ready("work") == [bodies(5)[2]]
        assert len(running.ready("dead")) == 4


async def test_they_are_chosen_by_reason_age_key_and_tags() -> None:
    async with Machine().start() as running:
        await declared(running)
        await running.exchange("orders")
        ready(running)
        for key in ("eu", "us"):
            await running.bind("orders", "work", key)
            running.publish("orders", key, key.encode(), tags=(key, "gold"))
        await running.commit()
        now_us = running.broker.env.clock.wall_us()
        await reject(running, b"eu", b"us")
        await arrived(running)
        for wanted in (
            Wanted(reason="expired"),
            Wanted(died_before_us=now_us - 10_000_000),
            Wanted(died_after_us=now_us + 10_000_000),
            Wanted(key="asia"),
            Wanted(queue="other"),
            Wanted(tags=parse("gold && silver")),
        ):
            assert (await redriven(running, wanted=wanted)).progress.moved == 0
        for wanted in (Wanted(key="us", reason="rejected"), Wanted(tags=parse("eu && gold"), queue="work")):
            assert (await redriven(running, wanted=wanted)).progress.moved == 1
        assert sorted(running.ready("work")) == [b"eu", b"us"]


async def test_a_dry_run_counts_and_moves_nothing() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(7))
        found = await running.broker.redrives.dry_run(Request("/", "dead"), "ann")
        assert (found.progress.by_queue, found.progress.moved) == ({"work": 7}, 0)
        assert len(running.ready("dead")) == 7
        assert running.broker.redrives.list() == []


async def test_those_without_a_way_stay_and_are_counted() -> None:
    async with Machine().start() as running:
        await declared(running)
        await running.declare("other", dead_letter_exchange="dlx")
        await dead(running, b"1")
        running.publish("", "other", b"2")
        running.publish("", "dead", b"never died")
        await running.commit()
        await reject(running, b"2", queue="other")
        await arrived(running)
        await running.broker.vhosts["/"].delete_queue(running.queue("other"))
        found = await redriven(running)
        assert (found.progress.moved, found.progress.without_way) == (1, 1)
        assert sorted(running.ready("dead")) == [b"2", b"never died"]
        everything = await redriven(running, to="work")
        assert everything.progress.moved == 2
        assert sorted(running.ready("work")) == [b"1", b"2", b"never died"]


async def test_a_limit_is_kept_and_the_next_goes_on() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(10))
        assert (await redriven(running, limit=4)).progress.moved == 4
        assert running.ready("work") == bodies(10)[:4]
        assert (await redriven(running)).progress.moved == 6
        assert running.ready("work") == bodies(10)


async def test_what_fails_again_meanwhile_stays_for_the_next() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(3))
        redrive = running.broker.redrives.start(Request("/", "dead", rate=1000), "ann")
        while redrive.state is State.RUNNING:
            await reject(running, *running.ready("work"))
            await trio.lowlevel.checkpoint()
        await arrived(running)
        assert redrive.progress.moved == 3
        assert sorted(running.ready("dead") + running.ready("work")) == sorted(bodies(3))


async def test_consumers_hold_what_they_hold() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(4))
        held = running.queue("dead").get()
        assert held is not None
        assert (await redriven(running)).progress.moved == 3
        assert running.queue("dead").unacked_count == 1


async def test_of_one_queue_one_redrive_runs_at_a_time_and_it_can_be_cancelled() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(50))
        redrive = running.broker.redrives.start(Request("/", "dead", rate=0.001), "ann")
        with pytest.raises(Refused, match="still running"):
            running.broker.redrives.start(Request("/", "dead"), "ann")
        while not redrive.progress.moved:
            await trio.lowlevel.checkpoint()
        redrive.cancel()
        await ended(redrive)
        assert redrive.state is State.CANCELLED
        assert 0 < redrive.progress.moved == 50 - len(running.ready("dead"))
        assert len(running.ready("work")) == redrive.progress.moved


async def test_a_rate_is_kept() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, *bodies(20))
        clock = running.broker.env.clock
        begun = clock.monotonic()
        await redriven(running, rate=10)
        assert clock.monotonic() - begun >= 1.9


async def test_what_cannot_be_redriven_is_refused() -> None:
    async with Machine().start() as running:
        await declared(running)
        await running.declare("stream", queue_type="stream")
        redrives = running.broker.redrives
        with pytest.raises(NotFound):
            redrives.start(Request("/", "nowhere"), "ann")
        with pytest.raises(NotFound):
            redrives.start(Request("/", "dead", to="nowhere"), "ann")
        for asked in (Request("/", "stream"), Request("/", "dead", to="dead"), Request("other", "dead")):
            with pytest.raises(Refused):
                redrives.start(asked, "ann")


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("turns", range(0, 120, 4))
async def test_each_is_in_one_of_the_two_queues_whenever_the_broker_dies(turns: int, power: bool) -> None:
    machine = Machine(turns, turns=turns % 3)
    async with machine.start() as running:
        await declared(running)
        await dead(running, *bodies(20))
    async with machine.start() as running:
        ready(running)
        running.broker.redrives.start(Request("/", "dead"), "ann")
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        machine.lose_power() if power else machine.crash()
    async with machine.start() as running:
        ready(running)
        await arrived(running)
        assert sorted(running.ready("work") + running.ready("dead")) == sorted(bodies(20))
        await redriven(running)
        assert sorted(running.ready("work")) == sorted(bodies(20))
        assert running.queue("dead").message_count == 0


async def test_the_audit_tells_who_did_what_over_restarts() -> None:
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        await dead(running, *bodies(3))
        done = await redriven(running, wanted=Wanted(reason="rejected"))
        interrupted = running.broker.redrives.start(Request("/", "work", to="dead", rate=0.001), "bob")
        while not interrupted.progress.moved:
            await trio.lowlevel.checkpoint()
        machine.crash()
    async with machine.start() as running:
        told = {event["id"]: event for event in running.broker.redrives.earlier}
        assert told[str(done.id)]["state"] == "done"
        assert (told[str(done.id)]["who"], told[str(done.id)]["moved"], told[str(done.id)]["reason"]) == (
            "ann",
            3,
            "rejected",
        )
        assert (told[str(interrupted.id)]["who"], told[str(interrupted.id)]["state"]) == ("bob", "interrupted")


@contextmanager
def letters(running: Running, queue: str) -> Iterator[list[object]]:
    yield [
        read(one.loaded(), one.index + at, running.broker.redrives.headers_of)
        for one in ready_in(running.queue(queue))
        for at in range(one.count)
    ]


async def test_a_dead_letter_tells_where_when_and_why_it_died() -> None:
    async with Machine().start() as running:
        await declared(running)
        await dead(running, b"1")
        with letters(running, "dead") as (letter,):
            assert letter is not None
            assert (letter.queue, letter.reason, letter.attempts, letter.key) == ("work", "rejected", 1, "work")
            assert abs(letter.died_us - running.broker.env.clock.wall_us()) < 60_000_000


async def test_what_retries_gave_up_tells_of_every_attempt() -> None:
    async with Machine().start() as running:
        await running.declare("work", retry_max=0)
        await dead(running, b"1")
        while "work.dlq" not in running.broker.vhosts["/"].queues or not running.ready("work.dlq"):
            await trio.lowlevel.checkpoint()
        with letters(running, "work.dlq") as (letter,):
            assert letter is not None
            assert (letter.queue, letter.reason, letter.attempts) == ("work", "rejected", 1)
            assert [reason for _time, reason in letter.history] == ["rejected"]
            assert letter.origin is not None
        assert (await redriven(running, "work.dlq")).progress.moved == 1
        assert running.ready("work") == [b"1"]
