"""Groups through many lives of a broker, each ended by a loss of power at a random moment.

Whatever was answered holds: no committed offset falls, no slot has two holders who got it in the same generation, and
every record reaches somebody.
"""

from random import Random

import pytest
import trio
from trio.testing import MockClock

from headrace.core_log.errors import HeadraceError, Refused
from headrace.gateways.delivery.consumer_groups import Standing
from headrace.gateways.delivery.consumer_groups_assignment import Slot
from headrace.gateways.delivery.consumer_groups_journal import restored

from .house import House
from .test_consumer_groups_coordinator import GROUP, TOPIC, Client, Groups, doomed, opened

PARTITIONS = 3
LIVES = 4
STEPS = 15


class Checker:
    """What clients were told, over all lives."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.clients: list[Client] = []
        self.committed: dict[Slot, int] = {}
        self.holders: dict[tuple[Slot, int], str] = {}
        self.published: dict[int, int] = dict.fromkeys(range(PARTITIONS), 0)
        self.seen: set[tuple[int, bytes]] = set()
        self.generation = 0

    def hear(self, client: Client, told: Standing) -> None:
        on_disk = restored(client.coordinator.journal.entries(), 0)
        assert on_disk[GROUP].generation >= told.generation
        self.generation = max(self.generation, told.generation)
        for slot, since in told.holds:
            assert self.holders.setdefault((slot, since), client.id) == client.id
        client.generation = max(client.generation, told.generation)

    async def step(self, groups: Groups) -> None:
        random = self.random
        client = random.choice(self.clients) if self.clients else None
        match random.randrange(8):
            case 0 | 1:
                partition = random.randrange(PARTITIONS)
                number = self.published[partition]
                self.published[partition] += 1
                await groups.publish(partition, b"%d" % number)
            case 2 if len(self.clients) < 4:
                joined = await groups.join(session_ms=1_800_000)
                self.clients.append(joined)
            case 3 if client is not None and len(self.clients) > 1:
                self.clients.remove(client)
                await groups.coordinator.leave(GROUP, client.id, client.user)
            case 4 | 5 if client is not None:
                await self.poll(client)
            case 6 | 7 if client is not None:
                await self.commit(client)
            case _:
                pass

    async def poll(self, client: Client) -> None:
        polled = await client.coordinator.poll(GROUP, client.id, client.user, client.generation, count_max=3)
        self.hear(client, polled.standing)
        for slot, batch, index in polled.records:
            self.seen.add((slot.partition, batch.values[index]))
        client.places = {slot: place.offset for slot, place in polled.places.items()}

    async def commit(self, client: Client) -> None:
        places, client.places = client.places, {}
        for slot, offset in places.items():
            await client.coordinator.commit(
                GROUP, {slot: offset}, member_id=client.id, user=client.user, generation=client.generation
            )
            self.committed[slot] = max(offset, self.committed.get(slot, 0))

    def check(self, groups: Groups) -> None:
        """At the beginning of a life."""
        group = groups.coordinator.groups.get(GROUP)
        if group is None:
            assert not self.committed
            assert not self.generation
            return
        assert group.generation >= self.generation
        for slot, offset in self.committed.items():
            assert group.committed[slot].offset >= offset
        for client in self.clients:
            client.coordinator = groups.coordinator


@pytest.mark.parametrize("seed", range(8))
async def test_what_was_answered_outlives_every_loss_of_power(seed: int, autojump_clock: MockClock) -> None:
    house = House(seed)
    checker = Checker(Random(seed))
    async with opened(house) as groups:
        await groups.create(PARTITIONS)
    for _ in range(LIVES):
        async with doomed(house, "power loss", clean=False) as groups:
            checker.check(groups)
            for _ in range(STEPS):
                async with trio.open_nursery() as nursery:
                    for _ in range(checker.random.randint(1, 3)):
                        nursery.start_soon(lawful, checker, groups)
            # Some more, in the midst of which the power goes.
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(lawful, checker, groups)
                for _ in range(checker.random.randrange(12)):
                    await trio.lowlevel.checkpoint()
                nursery.cancel_scope.cancel()
    async with opened(house, clean=False) as groups:
        checker.check(groups)
        for member_id in list(groups.coordinator.groups[GROUP].members) if GROUP in groups.coordinator.groups else ():
            await groups.coordinator.leave(GROUP, member_id, "eve")
        last = await groups.join()
        while (polled := await last.poll(after=last.after)).records or polled.missing:
            for slot, batch, index in polled.records:
                checker.seen.add((slot.partition, batch.values[index]))
        every = {
            (log.partition, value) for log in groups.logs_of(TOPIC) if log for _offset, _key, value in log.entries()
        }
        assert checker.seen == every


async def lawful(checker: Checker, groups: Groups) -> None:
    """A step may be refused: partitions change hands. What a dead disk says is the end of this life."""
    try:
        await checker.step(groups)
    except Refused:
        return
    except HeadraceError:
        await trio.sleep_forever()
