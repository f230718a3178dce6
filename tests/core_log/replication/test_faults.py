"""Whatever fails, and in whatever order: what was confirmed is there afterwards, once, at every replica."""

from random import Random

import pytest
import trio

from headrace.core_log.directory import Stream
from headrace.core_log.storage.memory import MemoryStorage

from .cluster import Cluster, Node, cluster, until


class Story:
    """A seeded run of writes and faults; what was confirmed is noted as it happens."""

    def __init__(self, three: Cluster, random: Random) -> None:
        self.three = three
        self.random = random
        self.streams: list[Stream] = []
        self.confirmed: set[bytes] = set()
        self.count = 0

    def write(self) -> None:
        three = self.three
        if three.row.leader not in three._active() or three.nodes[three.row.leader].served[-1:] != [three.row.stint]:
            return
        stream = self.random.choice(self.streams)
        if stream.spec.id not in three.leader.directory.streams:
            return
        for _ in range(self.random.randint(1, 4)):
            self.count += 1
            value = b"%d:%s" % (self.count, b"x" * self.random.randint(0, 300))
            log = three.log(three.row.leader, stream)
            appended = log.append([b"k"], [b""], [value], timestamp_us=1)
            log.when_committed(appended.next_offset, lambda value=value: self.confirmed.add(value))  # type: ignore[misc]
            three.leader.directory.committer.urgent(log)

    async def lose(self, node: Node) -> None:
        """Its process dies, and perhaps the power with it; then it comes back."""
        node.scope.cancel()
        await node.ended.wait()
        node.served.clear()
        assert isinstance(node.storage, MemoryStorage)
        if self.random.random() < 0.7:
            node.storage = node.storage.after_power_loss(lambda _: self.random.random() < 0.5)
        else:
            node.storage = node.storage.process_crash()
        if self.random.random() < 0.7:
            await self.change_leader()
        await trio.sleep(self.random.random() * 0.03)
        await self.three.start(node.number)
        await self.three.order()

    async def change_leader(self) -> None:
        active = [copy.node for copy in self.three.row.isr if copy.node in self.three._active()]
        if active:
            await self.three.elect(self.random.choice(active))

    async def run(self, steps: int) -> None:
        three = self.three
        for _ in range(steps):
            match self.random.random():
                case choice if choice < 0.80:
                    self.write()
                    await trio.sleep(self.random.random() * 0.004)
                case choice if choice < 0.87:
                    await self.lose(self.random.choice(three.nodes))
                case choice if choice < 0.94:
                    three.cut_off.clear()
                    three.disconnect(self.random.randrange(3))
                    if three.row.leader in three.cut_off and self.random.random() < 0.5:
                        await self.change_leader()
                    await trio.sleep(self.random.random() * 0.02)
                case _:
                    three.cut_off.clear()
                    await three.order()
                    await self.change_leader()

    async def end(self) -> None:
        """All faults stop."""
        three = self.three
        three.cut_off.clear()
        await three.order()
        await self.change_leader()
        await until(lambda: three.row.in_sync_nodes == {0, 1, 2})
        await until(lambda: three.nodes[three.row.leader].served[-1:] == [three.row.stint])
        for stream in self.streams:
            await three.write(stream, b"last").wait()
            await until(lambda: three.ends_equal(stream))  # noqa: B023


@pytest.mark.parametrize("seed", range(4))
async def test_nothing_confirmed_is_lost_and_replicas_end_alike(seed: int) -> None:
    async with cluster() as three:
        await three.found()
        story = Story(three, Random(seed))
        story.streams = [await three.create(name) for name in ("one", "two")]
        for stream in story.streams:
            await three.write(stream, b"first").wait()
        await until(lambda: all(three.ends_equal(stream) for stream in story.streams))
        await story.run(120)
        await story.end()
        found: list[bytes] = []
        for stream in story.streams:
            found += three.values(0, stream)
            assert three.batches(0, stream) == three.batches(1, stream) == three.batches(2, stream)
        assert len(found) == len(set(found)) + 2, "first and last are in both streams, all others once"
        assert story.confirmed <= set(found)
        assert len(story.confirmed) > 10, "a run that confirms nothing shows nothing"
        assert three.row.epoch > 3
