"""Who tries to be the controller, by nobody's clock but its own."""

from random import Random
from uuid import UUID

import trio
from tests.core_log.power.inline import InlineWorker, SeededIds

from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.errors import Unreachable
from headrace.controller.lease import LeaseWatch
from headrace.controller.store import Lease, Lost, MemoryStore, MetaStore
from headrace.core_log.env import Env
from headrace.core_log.replication.assignment import Ballot
from headrace.core_log.storage.memory import MemoryStorage

from .cluster_house import TrioClock

CONFIG = ClusterConfig()
NEVER = trio.Event()


def watch(store: MemoryStore, node: int, incarnation: int = 1) -> LeaseWatch:
    random = Random(node)
    env = Env(TrioClock(), MemoryStorage(), InlineWorker(), SeededIds(random), random)  # type: ignore[arg-type]
    return LeaseWatch(env, lambda: store, node, incarnation, CONFIG)


async def won(watching: LeaseWatch) -> tuple[Lease, float]:
    """The lease, and how long that took."""
    begun_s = trio.current_time()
    with trio.fail_after(1000):
        lease, _since_s = await watching.win(lambda: NEVER)
    return lease, trio.current_time() - begun_s


async def test_a_lease_that_nobody_ever_had_is_taken_at_once(autojump_clock: object) -> None:
    lease, waited_s = await won(watch(MemoryStore(UUID(int=1)), 1))
    assert (lease.ballot, lease.node) == (Ballot(1, 1), 1) and waited_s == 0


async def test_a_lease_is_left_alone_while_it_is_renewed_and_for_its_time_after(autojump_clock: object) -> None:
    store = MemoryStore(UUID(int=1))
    first, second = watch(store, 1), watch(store, 2)
    lease, _ = await won(first)
    async with trio.open_nursery() as nursery:

        @nursery.start_soon
        async def renew() -> None:
            held = lease
            for _ in range(20):
                await trio.sleep(CONFIG.renew_s)
                renewed = await first.renew(held)
                assert isinstance(renewed, Lease)
                held = renewed

        taken, waited_s = await won(second)
    assert taken.ballot == Ballot(2, 1)
    last_renewal_s = 20 * CONFIG.renew_s
    assert last_renewal_s + CONFIG.lease_ttl_s <= waited_s <= last_renewal_s + CONFIG.lease_ttl_s + 2 * CONFIG.renew_s
    assert isinstance(await first.renew(lease), Lost)


async def test_a_holder_at_whose_door_nobody_listens_is_not_waited_for_as_long(autojump_clock: object) -> None:
    store = MemoryStore(UUID(int=1))
    await won(watch(store, 1))
    second = watch(store, 2)
    with trio.move_on_after(CONFIG.renew_s / 2):
        await second.win(lambda: NEVER)
    second.doubt(1)
    _lease, waited_s = await won(second)
    assert waited_s < CONFIG.lease_ttl_s / 2


async def test_a_node_takes_over_from_its_own_earlier_life_at_once(autojump_clock: object) -> None:
    store = MemoryStore(UUID(int=1))
    await won(watch(store, 1, 1))
    lease, waited_s = await won(watch(store, 1, 2))
    assert lease.ballot == Ballot(2, 2) and waited_s == 0


async def test_of_two_who_try_at_once_one_wins(autojump_clock: object) -> None:
    store = MemoryStore(UUID(int=1))
    winners: list[int] = []

    async def run(node: int) -> None:
        with trio.move_on_after(CONFIG.renew_s):
            lease, _since_s = await watch(store, node).win(lambda: NEVER)
            winners.append(lease.node)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, 1)
        nursery.start_soon(run, 2)
    assert len(winners) == 1


async def test_a_store_that_cannot_be_asked_is_asked_again_and_says_why(autojump_clock: object) -> None:
    store = MemoryStore(UUID(int=1))
    failures = [Unreachable("it is away")] * 3

    def opened() -> MetaStore:
        if failures:
            raise failures.pop()
        return store

    watching = watch(store, 1)
    watching._open_store = opened
    with trio.move_on_after(CONFIG.renew_s):
        await watching.win(lambda: NEVER)
    assert watching.problem == "it is away"
    await won(watching)
    assert watching.problem == ""
