"""Nodes come and go, shards move and topics grow while all is served, and what was confirmed stays readable."""

from pathlib import Path

import trio

from tests.whole_cluster import WholeCluster, WholeNode, until, whole_cluster

ORDERS = "/api/v1/topics/orders"
CLUSTER = "/api/v1/cluster"


async def publish(node: WholeNode, partition: int, *values: str) -> None:
    messages = [{"value": value, "partition": partition} for value in values]
    status, answer = await node.ask("POST", f"{ORDERS}/messages", messages)
    assert status == 200, answer


async def values(node: WholeNode, partition: int) -> list[str]:
    status, answer = await node.ask("GET", f"{ORDERS}/partitions/{partition}/messages?offset=0")
    assert status == 200, answer
    return [one["value"] for one in answer["messages"]]


def replicas(three: WholeCluster, shard: int) -> tuple[int, ...]:
    return three.store.snapshot().shards[shard].assignment.replicas


async def test_a_node_joins_takes_over_and_another_leaves_for_good(tmp_path: Path) -> None:
    async with whole_cluster(tmp_path) as three:
        await three.start(1, 2, 3)
        assert (await three.nodes[1].ask("POST", "/api/v1/topics", {"name": "orders"}))[0] == 201
        await publish(three.nodes[1], 0, "before")
        await three.start(4)
        asked = three.nodes[4]

        # What cannot be is said so, and nothing is changed.
        for where, body, said in (
            ("shards/0/move", {"nodes": [4, 9]}, "no node 9"),
            ("shards/0/move", {"nodes": [4]}, "needs 2 nodes"),
            ("shards/7/move", {"nodes": [1, 2]}, "no shard 7"),
            ("nodes/9/drain", None, "no node 9"),
        ):
            status, answer = await asked.ask("POST", f"{CLUSTER}/{where}", body)
            assert status in (404, 409, 422) and said in answer["detail"], answer
        assert not three.store.snapshot().shards[0].target and set(replicas(three, 0)) == {1, 2, 3}

        # A move: the new node has everything before it leads.
        status, answer = await asked.ask("POST", f"{CLUSTER}/shards/0/move", {"nodes": [4, 2, 3]})
        assert status in (200, 202), answer
        await until(lambda: replicas(three, 0) == (4, 2, 3) and asked.shards.here("/") is not None)
        assert await values(three.nodes[1], 0) == ["before"]
        await publish(three.nodes[1], 0, "after the move")

        # A drained node ends up with nothing, and can be forgotten once it is stopped.
        assert (await asked.ask("POST", f"{CLUSTER}/nodes/2/drain"))[0] in (200, 202)
        await until(lambda: all(2 not in replicas(three, shard) for shard in (0, 1)))
        status, answer = await asked.ask("DELETE", f"{CLUSTER}/nodes/2")
        assert status in (409, 422) and "stop it first" in answer["detail"], answer
        await three.stop(2)

        # More partitions, on every replica; the old ones stay as they are.
        status, answer = await asked.ask("PATCH", ORDERS, {"partitions": 3})
        assert status == 200, answer
        for partition in (1, 2):
            await publish(three.nodes[3], partition, f"in {partition}")
        await until(lambda: three.in_sync(0) == {1, 3, 4})
        await three.kill(4)
        await until(lambda: three.is_served(0))
        survivor = three.leader()
        assert await values(survivor, 0) == ["before", "after the move"]
        assert [await values(survivor, partition) for partition in (1, 2)] == [["in 1"], ["in 2"]]
        while (await survivor.ask("DELETE", f"{CLUSTER}/nodes/2"))[0] not in (200, 202):
            await trio.sleep(0.02)
        assert 2 not in three.store.snapshot().nodes
