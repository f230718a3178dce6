"""A consumer group whose members are connected to different nodes, while the leader is lost and members come and go."""

from pathlib import Path
from typing import Any

import trio

from tests.whole_cluster import WholeCluster, WholeNode, whole_cluster

GROUP = "/api/v1/consumer-groups/shipping"
PARTITIONS = 4


class Worker:
    """One member, over the door of one node, as docs/consumer-groups.md has it: what is unknown is asked again."""

    def __init__(self, node: WholeNode, seen: list[tuple[int, int, str]]) -> None:
        self.node = node
        self.me: dict[str, Any] = {}
        # By all members, in this order.
        self.seen = seen

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        while True:
            status, answer = await self.node.ask(method, GROUP + path, body)
            if status != 503:
                return status, answer
            await trio.sleep(0.02)

    async def join(self) -> None:
        status, self.me = await self.ask("POST", "/members", {"topics": ["orders"], "session_timeout_ms": 30_000})
        assert status == 201, self.me

    @property
    def id(self) -> str:
        return str(self.me["member_id"])

    async def commit(self, offsets: object, generation: int) -> tuple[int, Any]:
        body = {"offsets": offsets, "member_id": self.id, "generation": generation}
        return await self.ask("POST", "/offsets", body)

    async def read(self) -> dict[str, Any]:
        status, answer = await self.ask("GET", f"/members/{self.id}/messages?generation={self.me['generation']}")
        assert status == 200, answer
        self.seen += [(one["partition"], one["offset"], one["value"]) for one in answer["messages"]]
        found: dict[str, Any] = answer
        return found

    async def work(self) -> int:
        """One poll, and its commit. Returns how many messages there were."""
        answer = await self.read()
        if answer["positions"]:
            status, said = await self.commit(answer["positions"], answer["generation"])
            # One that was lost on the way may have counted.
            assert status in (200, 204) or said["code"] == "offset_behind", said
        self.me = {**self.me, "generation": answer["generation"]}
        return len(answer["messages"])


async def publish(node: WholeNode, first: int, count: int) -> None:
    messages = [{"value": str(number), "partition": number % PARTITIONS} for number in range(first, first + count)]
    status, answer = await node.ask("POST", "/api/v1/topics/orders/messages", messages)
    assert status == 200, answer


async def committed(three: WholeCluster) -> dict[int, int]:
    while True:
        status, answer = await three.up()[0].ask("GET", GROUP)
        if status == 200:
            return {one["partition"]: one["committed"] for one in answer["partitions"]}
        await trio.sleep(0.02)


async def test_a_group_goes_on_over_a_failover_without_a_skip_and_an_older_generation_commits_nothing(
    tmp_path: Path,
) -> None:
    async with whole_cluster(tmp_path) as three:
        await three.start(1, 2, 3)
        leader = three.leader()
        survivors = [node for node in three.up() if node is not leader]
        made = await leader.ask("POST", "/api/v1/topics", {"name": "orders", "partitions": PARTITIONS})
        assert made[0] == 201
        seen: list[tuple[int, int, str]] = []
        first, second = (Worker(node, seen) for node in survivors)
        await first.join()
        await second.join()
        await publish(leader, 0, 40)
        while len(seen) < 20:
            await first.work()
            await second.work()
        before = await committed(three)
        # What was read and not committed when the leader is lost comes again; what was committed does not.
        await publish(leader, 40, 40)
        held = await first.read()
        await three.kill(leader.number)
        third = Worker(survivors[0], seen)
        await third.join()
        workers = [first, second, third]
        after = await committed(three)
        assert all(after[partition] >= offset for partition, offset in before.items())
        # The generation in which it was read goes on, unless the partition was given up meanwhile.
        status, said = await first.commit(held["positions"], held["generation"])
        assert status in (200, 204), said
        while {value for _partition, _offset, value in seen} != {str(number) for number in range(80)}:
            for one in workers:
                await one.work()
        # A partition that went to the third: whoever had it cannot commit it, in whatever generation.
        while not (taken := await _assigned(three, third)):
            for one in workers:
                await one.work()
        for generation in (held["generation"], first.me["generation"]):
            offsets = [{"topic": "orders", "partition": partition, "offset": 0} for partition in sorted(taken)[:1]]
            status, said = await first.commit(offsets, generation)
            assert status == 409 and said["code"] in ("not_held", "fenced"), said
        # Whoever read it: no offset of a partition was seen before those below it.
        for partition in range(PARTITIONS):
            offsets_seen = dict.fromkeys(offset for at, offset, _value in seen if at == partition)
            assert list(offsets_seen) == list(range(20))
        assert await committed(three) == dict.fromkeys(range(PARTITIONS), 20)


async def _assigned(three: WholeCluster, worker: Worker) -> set[int]:
    _status, answer = await worker.ask("GET", "")
    return {one["partition"] for one in answer["partitions"] if one["member_id"] == worker.id}
