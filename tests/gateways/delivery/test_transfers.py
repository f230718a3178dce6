"""Dead letters: each is in its target once, whenever the broker dies, whatever changes on their way."""

from collections.abc import Awaitable, Callable

import pytest
import trio

from headrace.core_log.errors import DiskFull
from headrace.core_log.log import PartitionLog
from headrace.gateways.delivery.queue import Reason
from headrace.gateways.delivery.rewind import Rewind

from .test_broker import NO_PROPERTIES, Machine, Running, bodies


async def declared(running: Running, **arguments: object) -> None:
    await running.exchange("dlx")
    await running.declare("dead")
    await running.bind("dlx", "dead")
    await running.declare("work", dead_letter_exchange="dlx", **arguments)


async def reject(running: Running, *values: bytes, queue: str = "work") -> None:
    """Take everything, reject these in this order, and give back the rest."""
    found = {}
    while (stretch := running.queue(queue).get()) is not None:
        found[stretch.loaded().values[stretch.index]] = stretch
    for value in values:
        running.queue(queue).reject(found.pop(value))
    for stretch in found.values():
        running.queue(queue).give_back([stretch])


async def arrived(running: Running) -> None:
    """What is on its way has arrived when this returns."""
    for _ in range(2):
        await running.broker.write_journal()
        await running.commit()


async def test_dead_letter_is_settled_in_its_queue_only_when_its_copy_is_safe() -> None:
    """MUT18: at no moment is it in neither."""
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", b"0")
        await running.commit()
        await reject(running, b"0")
        assert (running.queue("work").unacked_count, running.queue("dead").ready_count) == (1, 0)
        await running.broker.write_journal()
        # In its target's log, which is not committed.
        assert (running.queue("work").unacked_count, running.queue("dead").ready_count) == (1, 1)
        await running.commit()
        assert running.queue("work").message_count == 0
        machine.lose_power()
    async with machine.start() as running:
        await arrived(running)
        assert (running.ready("work"), running.ready("dead")) == ([], [b"0"])


@pytest.mark.parametrize("power", [False, True])
@pytest.mark.parametrize("turns", range(36))
async def test_each_dead_letter_is_there_once_wherever_it_died(turns: int, power: bool) -> None:
    """Rejected in an order of their own (10 before 5), one by one, over restarts, until all have died."""
    machine = Machine(turns, turns=turns % 3)
    async with machine.start() as running:
        await declared(running)
    values = bodies(12)
    async with machine.start() as running:
        running.publish("", "work", *values)
        await running.commit()
        await reject(running, *(values[at] for at in (10, 5, 6, 7, 0, 11)))

        async def journal() -> None:
            for _ in range(3):
                await running.broker.write_journal()

        running.nursery.start_soon(journal)
        for _ in range(turns):
            await trio.lowlevel.checkpoint()
        machine.lose_power() if power else machine.crash()
    async with machine.start() as running:
        await arrived(running)
        assert sorted(running.ready("work") + running.ready("dead")) == sorted(values)
        await reject(running, *running.ready("work"))
        await running.broker.write_journal()
        machine.crash()
    async with machine.start() as running:
        await arrived(running)
        assert sorted(running.ready("dead")) == sorted(values)
        assert running.queue("work").message_count == 0


async def test_two_queues_that_reject_the_same_record_send_two() -> None:
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        await running.exchange("fan")
        await running.declare("other", dead_letter_exchange="dlx")
        for name in ("work", "other"):
            await running.bind("fan", name)
        running.publish("fan", "", b"0")
        await running.commit()
        for name in ("work", "other"):
            await reject(running, b"0", queue=name)
        await arrived(running)
        assert running.ready("dead") == [b"0", b"0"]


async def test_record_of_a_rewound_queue_dies_again() -> None:
    """What is moved has a number of its own, not that of the record."""
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", b"0")
        await running.commit()
        for count in (1, 2, 3):
            await reject(running, b"0")
            await arrived(running)
            assert running.ready("dead") == [b"0"] * count
            await Rewind(running.broker, running.queue("work"), 0).run()


async def test_neighbours_that_die_together_travel_in_one_batch() -> None:
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", *bodies(20))
        await running.commit()
        await reject(running, *bodies(20))
        await arrived(running)
        (run,) = running.log("dlx").read(0)
        assert run.batch.count == 20
        assert running.ready("dead") == bodies(20)


async def test_numbers_go_on_after_a_restart() -> None:
    machine = Machine()
    for count in (1, 2, 3):
        async with machine.start() as running:
            if count == 1:
                await declared(running)
            running.publish("", "work", b"%d" % count)
            await running.commit()
            await reject(running, b"%d" % count)
            await arrived(running)
            queue, log = running.queue("work"), running.log("dlx")
            assert log.next_sequence(queue.stream_id.bytes, 0) == count
            assert len(running.ready("dead")) == count


async def replaced(running: Running) -> None:
    await running.broker.vhosts["/"].delete_exchange("dlx")
    await running.exchange("dlx")
    await running.bind("dlx", "dead")


async def unbound(running: Running) -> None:
    await running.declare("later")
    await running.bind("dlx", "later")


@pytest.mark.parametrize("change", [replaced, unbound])
async def test_way_that_changes_while_it_is_journalled_is_no_loss(
    change: Callable[[Running], Awaitable[None]],
) -> None:
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", *bodies(3))
        await running.commit()
        await reject(running, *bodies(3))
        queue, transfers = running.queue("work"), running.broker.transfers
        numbered = transfers.number(queue)
        await change(running)
        transfers.journalled((queue, one) for one in numbered)
        await arrived(running)
        assert running.ready("dead") == bodies(3)
        assert running.queue("work").message_count == 0


@pytest.mark.parametrize("journal_first", [False, True])
async def test_dead_letters_of_a_queue_that_is_deleted_arrive(journal_first: bool) -> None:
    machine = Machine(turns=5)
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", *bodies(3))
        await running.commit()
        await reject(running, *bodies(3))
        if journal_first:
            running.nursery.start_soon(running.broker.write_journal)
            await trio.lowlevel.checkpoint()
        await running.broker.vhosts["/"].delete_queue(running.queue("work"))
        await arrived(running)
        assert running.ready("dead") == bodies(3)
        machine.crash()
    async with machine.start() as running:
        assert running.ready("dead") == bodies(3)


async def test_queue_that_is_not_durable_needs_no_journal() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("dead")
        await running.declare("work", durable=False, dead_letter_exchange="", dead_letter_routing_key="dead")
        running.publish("", "work", b"0", persistent=False)
        await running.commit()
        await reject(running, b"0")
        assert running.ready("dead") == [b"0"]
        await running.commit()
        assert running.queue("work").message_count == 0


async def test_full_disk_keeps_a_dead_letter_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    async with machine.start() as running:
        await declared(running)
        running.publish("", "work", *bodies(3))
        await running.commit()
        await reject(running, b"2", b"0", b"1")

        def full(*_arguments: object, **_more: object) -> None:
            raise DiskFull("no room")

        with monkeypatch.context() as patched:
            patched.setattr(PartitionLog, "append_dense", full)
            await arrived(running)
        assert (running.queue("work").unacked_count, running.ready("dead")) == (3, [])
        running.broker.transfers.try_again()
        await arrived(running)
        assert running.ready("dead") == [b"2", b"0", b"1"]
        assert running.queue("work").message_count == 0


# -- at least once ----------------------------------------------------------------------------------------------

QUORUM = {"queue_type": "quorum", "overflow": "reject-publish", "dead_letter_strategy": "at-least-once"}


async def test_at_least_once_keeps_what_has_no_way_until_it_has_one() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("work", dead_letter_exchange="dlx", **QUORUM)
        running.publish("", "work", *bodies(2))
        await running.commit()
        await reject(running, *bodies(2))
        await arrived(running)
        assert (running.queue("work").ready_count, running.queue("work").unacked_count) == (0, 2)
        machine.crash()
    async with machine.start() as running:
        assert (running.queue("work").ready_count, running.queue("work").unacked_count) == (0, 2)
        await running.exchange("dlx")
        running.broker.transfers.try_again()
        await arrived(running)
        # Nothing is bound to it.
        assert running.queue("work").unacked_count == 2
        await running.declare("dead")
        await running.bind("dlx", "dead")
        running.broker.transfers.try_again()
        await arrived(running)
        assert (running.ready("dead"), running.queue("work").message_count) == (bodies(2), 0)


@pytest.mark.parametrize("missing", QUORUM)
async def test_at_least_once_is_for_quorum_queues_that_refuse_when_full(missing: str) -> None:
    machine = Machine()
    async with machine.start() as running:
        arguments = {name: value for name, value in QUORUM.items() if name != missing}
        if missing == "queue_type":
            arguments = {"overflow": "reject-publish"}
        await running.declare("work", dead_letter_exchange="nowhere", **arguments)
        running.publish("", "work", b"0")
        await running.commit()
        await reject(running, b"0")
        assert running.queue("work").message_count == 0


# -- RabbitMQ's rules -------------------------------------------------------------------------------------------


async def test_only_the_queue_that_closes_a_cycle_is_left_out() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("dlx")
        await running.declare("work", message_ttl=10, dead_letter_exchange="dlx")
        await running.declare("archive")
        await running.bind("dlx", "work")
        await running.bind("dlx", "archive")
        running.publish("", "work", b"0")
        await running.commit()
        machine.clock.now_us += 20_000
        running.queue("work").expire_heads()
        await arrived(running)
        assert (running.ready("work"), running.ready("archive")) == ([], [b"0"])
        assert running.broker.transfers.dead_letters == {Reason.EXPIRED: 1}


async def test_record_that_only_goes_round_is_dropped_and_counted() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("work", message_ttl=10, dead_letter_exchange="", dead_letter_routing_key="work")
        running.publish("", "work", b"0")
        await running.commit()
        machine.clock.now_us += 20_000
        running.queue("work").expire_heads()
        assert running.queue("work").message_count == 0
        assert running.broker.dropped_death_count == 1


async def test_dead_letter_exchange_that_does_not_exist_drops() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("work", dead_letter_exchange="nowhere")
        running.publish("", "work", b"0")
        await running.commit()
        await reject(running, b"0")
        assert running.queue("work").message_count == 0


async def test_full_queue_that_refuses_gets_no_dead_letters_and_they_are_counted() -> None:
    """So does RabbitMQ, whose dead letters are published at most once."""
    machine = Machine()
    async with machine.start() as running:
        await running.exchange("dlx")
        for name, arguments in (("small", {"max_length": 1, "overflow": "reject-publish"}), ("large", {})):
            await running.declare(name, **arguments)
            await running.bind("dlx", name)
        await running.declare("work", dead_letter_exchange="dlx")
        running.publish("", "work", *bodies(3))
        await running.commit()
        await reject(running, *bodies(3))
        await arrived(running)
        running.broker.dispatch()
        assert (running.ready("small"), running.ready("large")) == ([b"0"], bodies(3))
        assert running.broker.transfers.refused == {Reason.REJECTED: 2}
        assert running.queue("work").message_count == 0


async def test_dead_letter_whose_only_queue_is_full_is_dropped_and_counted() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("dead", max_length=1, overflow="reject-publish")
        await running.declare("work", dead_letter_exchange="", dead_letter_routing_key="dead")
        running.publish("", "work", *bodies(3))
        await running.commit()
        await reject(running, *bodies(3))
        await arrived(running)
        assert (running.ready("dead"), running.queue("work").message_count) == ([b"0"], 0)
        assert running.broker.transfers.refused == {Reason.REJECTED: 2}
        assert running.broker.transfers.dead_letters == {Reason.REJECTED: 1}


async def test_at_least_once_waits_for_room_in_a_full_queue() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("dead", max_length=1, overflow="reject-publish")
        await running.declare("work", dead_letter_exchange="", dead_letter_routing_key="dead", **QUORUM)
        running.publish("", "work", *bodies(2))
        await running.commit()
        await reject(running, *bodies(2))
        await arrived(running)
        assert (running.ready("dead"), running.queue("work").unacked_count) == ([b"0"], 1)
        running.settle("dead")
        running.broker.transfers.try_again()
        await arrived(running)
        assert (running.ready("dead"), running.queue("work").message_count) == ([b"1"], 0)


async def test_refused_publish_is_no_dead_letter_of_a_queue_that_is_full_itself() -> None:
    machine = Machine()
    async with machine.start() as running:
        await running.declare("dead", max_length=0, overflow="reject-publish")
        arguments = {"max_length": 0, "overflow": "reject-publish-dlx", "dead_letter_routing_key": "dead"}
        work = await running.declare("work", dead_letter_exchange="", **arguments)
        host = running.broker.vhosts["/"]
        running.broker.refuse(host, work, host.target("", b"work", ["work"]), NO_PROPERTIES, b"0")
        assert running.queue("dead").ready_count == 0
        assert running.broker.transfers.refused == {Reason.MAXLEN: 1}
