"""Policies change what exists, vhosts come and go while the broker runs, and queues are counted."""

import pytest
import trio
from trio.testing import MockClock

from headrace.controller.changes import DeletePolicy, DeleteVhost, create_vhost
from headrace.controller.entities import ApplyTo, Binding, DestinationKind
from headrace.controller.errors import Invalid, LimitReached, NotFound
from headrace.controller.table import EMPTY, Table
from headrace.gateways.delivery.queue import Overflow

from .house import House, Taker


async def test_policy_limits_a_queue_that_exists_at_once_and_its_end_frees_it(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.publish("q", b"1", b"2", b"3")
        await running.policy({"max-length": 2})
        assert queue.ready_count == 2
        await running.metadata.commit(DeletePolicy("/", "p"))
        await running.publish("q", b"4")
        assert running.bodies("q") == [b"2", b"3", b"4"]


async def test_limit_in_bytes_counts_what_was_there_before_it(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.declare("q")
        await running.publish("q", b"x" * 60, b"y" * 60)
        await running.policy({"max-length-bytes": 100})
        assert running.bodies("q") == [b"y" * 60]


async def test_time_to_live_by_policy_counts_for_what_waits_already(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.declare("dead")
        await running.publish("q", b"old")
        await trio.sleep(5)
        definition = {"message-ttl": 8000, "dead-letter-exchange": "", "dead-letter-routing-key": "dead"}
        await running.policy(definition, pattern="^q$")
        await trio.sleep(2.9)
        assert queue.ready_count == 1
        await trio.sleep(0.2)
        assert running.bodies("dead") == [b"old"]


async def test_lease_by_policy_begins_with_the_policy(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await trio.sleep(100)
        await running.policy({"expires": 1000})
        await trio.sleep(0.9)
        assert not queue.deleted
        await trio.sleep(0.2)
        await running.until(lambda: queue.deleted)


async def test_lower_of_argument_and_policy_counts(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        strict, lax = await running.declare("strict", max_length=1), await running.declare("lax", max_length=9)
        await running.policy({"max-length": 5})
        assert (strict.settings.length_max, lax.settings.length_max) == (1, 5)


async def test_publishers_that_know_the_route_already_hear_of_reject_publish(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        await running.host.bind(Binding("/", "amq.fanout", DestinationKind.QUEUE, "q"))
        targets = [running.host.target(exchange, b"q", ["q"]) for exchange in ("", "amq.fanout")]
        assert all(running.host.is_current(target) for target in targets)
        await running.policy({"max-length": 1, "overflow": "reject-publish"})
        assert queue.settings.overflow is Overflow.REJECT_PUBLISH
        assert not any(running.host.is_current(target) for target in targets)
        assert running.host.target("amq.fanout", b"q", ["q"]).byte_limits == [queue]


async def test_policy_is_for_its_kind_of_queue(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.policy({"max-length": 5}, apply_to=ApplyTo.QUORUM_QUEUES)
        classic, quorum = await running.declare("c"), await running.declare("q", queue_type="quorum")
        assert (classic.settings.length_max, quorum.settings.length_max) == (None, 5)
        await running.policy({"max-length": 7}, apply_to=ApplyTo.CLASSIC_QUEUES)
        assert (classic.settings.length_max, quorum.settings.length_max) == (7, None)


async def test_alternate_exchange_by_policy_catches_and_its_end_no_longer(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("caught")
        await running.host.bind(Binding("/", "amq.fanout", DestinationKind.QUEUE, "caught"))
        assert running.host.target("amq.direct", b"nowhere", ["nowhere"]).queues == ()
        await running.policy({"alternate-exchange": "amq.fanout"}, pattern=r"^amq\.direct$")
        assert running.host.target("amq.direct", b"nowhere", ["nowhere"]).queues == (queue,)
        assert running.host.target("amq.topic", b"nowhere", ["nowhere"]).queues == ()
        await running.metadata.commit(DeletePolicy("/", "p"))
        assert running.host.target("amq.direct", b"nowhere", ["nowhere"]).queues == ()


async def test_policies_count_after_a_restart_too(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await running.declare("q")
        await running.policy({"max-length": 3, "alternate-exchange": "amq.fanout"})
    async with house.broker() as running:
        assert running.host.queue("q").settings.length_max == 3
        found = running.host.router.exchange("amq.direct")
        assert found is not None and found.alternate == "amq.fanout"


async def test_vhost_made_while_running_has_its_exchanges(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        await running.metadata.commit(*create_vhost("shop", running.metadata.new_stream))
        host = running.broker.vhosts["shop"]
        assert host.router.exchange("amq.topic") is not None
        await host.declare_queue("q", running.broker.settings_of("shop", "q", EMPTY), durable=True)
        assert ("shop", "q") in running.metadata.snapshot.queues


async def test_vhost_deleted_while_running_takes_everything_along(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        queue = await running.declare("q", message_ttl=60_000, expires=60_000)
        await running.publish("q", b"1", b"2")
        taker = running.consume(queue, Taker(no_ack=False))
        await running.declare("q2", durable=False)
        await running.metadata.commit(DeleteVhost("/"))
        assert taker.cancelled and queue.deleted
        assert "/" not in running.broker.vhosts
        assert not len(running.broker.timers)
        await trio.sleep(1)
        kinds = {stream.spec.kind for stream in running.broker.directory.streams.values()}
        assert kinds == {"internal"}
    async with house.broker() as running:
        assert running.broker.vhosts == {}


async def test_vhost_that_is_gone_takes_nothing_new(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        host = running.host
        queue = await running.declare("q")
        await running.metadata.commit(DeleteVhost("/"))
        with pytest.raises(NotFound, match="no vhost"):
            await host.declare_queue("late", queue.settings, durable=False)
        with pytest.raises(NotFound, match="no vhost"):
            await host.declare_exchange("late", "fanout", durable=False, auto_delete=False, internal=False)
        assert await host.delete_queue(queue) == 0


async def test_queue_deleted_in_the_same_moment_as_its_vhost_is_gone_once(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        queue = await running.declare("q")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(running.metadata.commit, DeleteVhost("/"))
            nursery.start_soon(running.host.delete_queue, queue)
        assert queue.deleted


@pytest.mark.parametrize("durable", [True, False])
async def test_one_queue_too_many_is_refused_and_declaring_again_is_not(
    durable: bool, autojump_clock: MockClock
) -> None:
    async with House().broker() as running:
        running.broker.queues_max = lambda vhost: 2
        await running.declare("one", durable=durable)
        await running.declare("two", durable=not durable)
        with pytest.raises(
            LimitReached, match=r"cannot declare queue 'three': queue limit in vhost '/' \(2\) is reached"
        ):
            await running.declare("three", durable=durable)
        assert await running.declare("one", durable=durable) is running.host.queue("one")


async def test_rules_of_a_policy_tag_by_key_and_go_with_it(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        assert running.host.target("amq.topic", b"fleet.eu.1", ["fleet.eu.1"]).tags == ()
        kept = running.host.target("amq.topic", b"fleet.eu.1", ["fleet.eu.1"])
        await running.policy({"tag-rules": {"fleet/{region}/#": "region={region}"}}, pattern=r"^amq\.topic$")
        assert not running.host.is_current(kept)
        target = running.host.target("amq.topic", b"fleet.eu.1", ["fleet.eu.1"], tags=("vip",))
        assert target.tags == ("region=eu", "vip")
        assert running.host.target("amq.direct", b"fleet.eu.1", ["fleet.eu.1"]).tags == ()
        await running.metadata.commit(DeletePolicy("/", "p"))
        assert running.host.target("amq.topic", b"fleet.eu.1", ["fleet.eu.1"]).tags == ()


async def test_rules_that_cannot_be_understood_are_refused(autojump_clock: MockClock) -> None:
    async with House().broker() as running:
        for rules in ({"a/#/b": "x"}, {"a/{b}": "{c}"}, {"a": 5}, {}, "a -> b"):
            with pytest.raises(Invalid, match="tag-rules"):
                await running.policy({"tag-rules": rules})


async def test_binding_with_an_unreadable_filter_is_not_written_down(autojump_clock: MockClock) -> None:
    house = House()
    async with house.broker() as running:
        await running.declare("q")
        with pytest.raises(Invalid, match="column 6"):
            await running.host.bind(
                Binding("/", "amq.topic", DestinationKind.QUEUE, "q", "#", Table({"x-filter": "eu ||"}))
            )
    async with house.broker() as running:
        assert running.host.target("amq.topic", b"a", ["a"]).queues == ()
