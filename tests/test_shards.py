"""Whole nodes and their shards: a replica that is damaged begins anew, and everything else goes on."""

import logging
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pika
import pytest
import trio

from headrace.core_log.log import PartitionLog
from headrace.core_log.replication.shard import ShardReplica
from headrace.kinds import Address
from tests.whole_cluster import QUICK, WholeCluster, WholeNode, until, whole_cluster

ORDERS = "/api/v1/topics/orders"


async def publish(node: WholeNode, *values: str) -> None:
    status, answer = await node.ask("POST", f"{ORDERS}/messages", [{"value": value} for value in values])
    assert status == 200, answer


async def values(node: WholeNode) -> list[str]:
    status, answer = await node.ask("GET", f"{ORDERS}/partitions/0/messages?offset=0")
    assert status == 200, answer
    return [one["value"] for one in answer["messages"]]


async def metric(node: WholeNode, name: str, shard: int) -> float | None:
    """None while it has no such replica."""
    text = await node.metrics()
    lines = (one for one in text.splitlines() if one.startswith(f'headrace_replica_{name}{{shard="{shard}"}}'))
    return next((float(line.rpartition(" ")[2]) for line in lines), None)


async def orders_on(three: WholeCluster) -> str:
    """A topic with records in it that all nodes know to be committed; its folder in each node's."""
    await three.start(1, 2, 3)
    assert (await three.nodes[1].ask("POST", "/api/v1/topics", {"name": "orders"}))[0] == 201
    await publish(three.nodes[1], "flat white", "espresso")
    await until(lambda: all(log_of(one).high_watermark == 2 for one in three.up()))
    return f"shards/0/{log_of(three.leader()).folder}"


def log_of(node: WholeNode) -> PartitionLog:
    replica = node.shards.replicas[0]
    assert isinstance(replica, ShardReplica)
    return next(one for one in replica.directory.streams.values() if one.spec.name == "orders").partitions[0]


def segment_in(folder: Path) -> Path:
    return min(folder.glob("*.log"))


def damage(segment: Path) -> None:
    """A bit of a record is another."""
    data = bytearray(segment.read_bytes())
    data[data.index(b"espresso")] ^= 1
    segment.write_bytes(data)


async def test_a_follower_that_is_damaged_fetches_everything_anew_and_keeps_the_damaged_files_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with whole_cluster(tmp_path) as three:
        orders = await orders_on(three)
        leader, hurt = three.leader(), three.other()
        await three.stop(hurt.number)
        segment_in(hurt.folder / orders).unlink()
        with caplog.at_level(logging.CRITICAL):
            await three.start(hurt.number)
            # It may count until it says that it is damaged, and has no replica until it begins anew.
            with trio.fail_after(60):
                while await metric(three.nodes[hurt.number], "set_aside", 0) != 1:
                    await trio.sleep(0.02)
            await until(lambda: hurt.number in three.in_sync(0))
        assert [one for one in caplog.messages if one.startswith("shard 0: this replica is damaged")]
        (aside,) = (hurt.folder / "shards" / "0" / "aside").iterdir()
        assert [one.name for one in aside.iterdir()] and (aside / orders.removeprefix("shards/0/")).is_dir()
        await publish(three.nodes[hurt.number], "americano")
        # It has all of it, and counts for what is confirmed.
        await three.kill(leader.number)
        await until(lambda: three.is_served(0))
        assert await values(three.leader()) == ["flat white", "espresso", "americano"]


async def test_a_leader_that_finds_its_records_damaged_hands_over_and_its_other_shards_are_served_on(
    tmp_path: Path,
) -> None:
    async with whole_cluster(tmp_path) as three:
        orders = await orders_on(three)
        await three.nodes[1].ask("PUT", "/api/v1/vhosts/second", {})
        hurt = three.leader()
        led_before = [number for number, _service in hurt.shards.services()]
        damage(segment_in(hurt.folder / orders))
        # As when it was written so long ago that it is read from the disk.
        log_of(hurt)._tail.clear()
        status, _answer = await hurt.ask("GET", f"{ORDERS}/partitions/0/messages?offset=0")
        assert status != 200
        await until(lambda: hurt.shards.here("/") is None and three.is_served(0))
        assert await values(hurt) == ["flat white", "espresso"]
        assert [number for number, _service in hurt.shards.services()] == [one for one in led_before if one != 0]
        await until(lambda: hurt.number in three.in_sync(0))


async def test_any_node_tells_how_far_a_replica_is_that_catches_up(tmp_path: Path) -> None:
    async with whole_cluster(tmp_path, more={"cluster.catch_up_bytes": "20000"}) as three:
        await orders_on(three)
        leader, hurt = three.leader(), three.other()
        await three.kill(hurt.number)
        for number in range(10):
            # What does not become small by being packed.
            await publish(leader, Random(number).randbytes(10_000).hex())
        await three.start(hurt.number)

        async def told() -> list[dict[str, Any]]:
            _status, answer = await three.nodes[hurt.number].ask("GET", "/api/v1/cluster")
            found: list[dict[str, Any]] = answer["shards"][0]["catching_up"]
            return found

        left: list[int] = []
        while len(left) < 2:
            for one in await told():
                assert one["node"] == hurt.number and one["records"]
                if one["seconds"] is not None and one["bytes"] not in left:
                    left.append(one["bytes"])
            await trio.sleep(0.01)
        assert left[0] > left[1]


async def test_e7_a_forced_election_is_in_the_audit_once_and_readers_of_a_topic_are_told_where(tmp_path: Path) -> None:
    async with whole_cluster(tmp_path) as three:
        await orders_on(three)
        forced = three.other()
        body = {"node": forced.number, "lose": True}
        status, answer = await forced.ask("POST", "/api/v1/cluster/shards/0/force", body)
        assert status in (200, 202), answer
        await until(lambda: forced.shards.here("/") is not None)
        epoch = three.store.snapshot().shards[0].forced_epoch
        await until(lambda: three.in_sync(0) == {1, 2, 3})

        async def events() -> list[dict[str, Any]]:
            _status, page = await three.up()[0].ask("GET", "/api/v1/audit?kind=forced-election")
            return [one["about"] for one in page["events"]]

        while not (found := await events()):
            await trio.sleep(0.02)
        assert found == [{"shard": 0, "node": forced.number, "epoch": epoch}]
        await publish(forced, "ristretto")
        _status, page = await three.up()[0].ask("GET", f"{ORDERS}/partitions/0/messages?offset=1")
        following = 2 + log_of(forced).config.offsets_reserved
        assert page["gaps"] == [{"offset": 2, "next_offset": following, "reason": "unclean_election"}]
        assert [one["offset"] for one in page["messages"]] == [1, following]
        # Whose cursor lies where records may have been is told too.
        _status, page = await three.up()[0].ask("GET", f"{ORDERS}/partitions/0/messages?offset=100")
        assert page["gaps"] == [{"offset": 100, "next_offset": following, "reason": "unclean_election"}]
        assert [one["value"] for one in page["messages"]] == ["ristretto"]
        # The next leader does not tell it again.
        await three.kill(forced.number)
        await until(lambda: three.is_served(0))
        assert await events() == found


def _published(address: Address, first: int, count: int) -> None:
    with closing(pika.BlockingConnection(pika.ConnectionParameters(address.host, address.port))) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare("jobs", durable=True)
        for number in range(first, first + count):
            channel.basic_publish("", "jobs", b"%d" % number, pika.BasicProperties(delivery_mode=2))


def _consumed(address: Address, until_body: bytes) -> list[bytes]:
    found = []
    with closing(pika.BlockingConnection(pika.ConnectionParameters(address.host, address.port))) as connection:
        channel = connection.channel()
        for method, _properties, body in channel.consume("jobs", inactivity_timeout=30):
            assert method is not None, f"nothing came behind {found}"
            found.append(body)
            channel.basic_ack(method.delivery_tag)
            if body == until_body:
                break
    return found


async def test_e7_a_queue_goes_on_behind_what_an_election_by_force_lost(tmp_path: Path) -> None:
    async with whole_cluster(tmp_path, timing=replace(QUICK, min_isr=1)) as three:
        await three.start(1, 2, 3)
        leader = three.leader()
        _status, told = await leader.ask("GET", "/api/v1/cluster")
        # With a minimum of one a new controller would wait for the answer of all three.
        behind = next(node for node in three.up() if node is not leader and node.number != told["controller"])
        await trio.to_thread.run_sync(_published, leader.doors["amqp"], 0, 5)
        await until(lambda: three.in_sync(0) == {1, 2, 3})
        await three.kill(behind.number)
        await trio.to_thread.run_sync(_published, leader.doors["amqp"], 5, 5)
        for node in three.up():
            await three.kill(node.number)
        await three.begin(behind.number)
        behind = three.nodes[behind.number]
        body = {"node": behind.number, "lose": True}
        while (await behind.ask("POST", "/api/v1/cluster/shards/0/force", body))[0] not in (200, 202):
            await trio.sleep(0.1)
        await until(lambda: behind.shards.here("/") is not None)
        await trio.to_thread.run_sync(_published, behind.doors["amqp"], 10, 3)
        found = await trio.to_thread.run_sync(_consumed, behind.doors["amqp"], b"12")
        # What was lost is not delivered, and nothing else in its place.
        assert found == [b"%d" % number for number in (0, 1, 2, 3, 4, 10, 11, 12)]
