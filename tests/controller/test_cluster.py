"""Nodes that take part in a cluster: who is the controller, what everybody knows, and what goes on without either."""

from collections.abc import Callable, Sequence
from unittest.mock import patch
from uuid import UUID

import pytest
import trio
import trio.testing

from headrace.controller.changes import Change, DeleteVhost, PutExchange, PutNode, PutUser, PutVhost
from headrace.controller.cluster import ClusterAgent
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.config import Definitions
from headrace.controller.entities import Endpoint, Exchange, Node, User, Version, Vhost
from headrace.controller.errors import AlreadyExists, Invalid, NotFound, OutcomeUnknown, Unreachable
from headrace.controller.snapshot import Snapshot
from headrace.controller.store import Committed, Lease, Lost, MemoryStore, MetaStore, NotCommitted, Unknown
from headrace.core_log.errors import Poisoned
from headrace.core_log.ids import StreamId
from headrace.core_log.peer.errors import PeerGone
from headrace.core_log.replication.assignment import Ballot
from headrace.core_log.replication.messages import AlterIsr
from headrace.exits import causes

from .cluster_house import House, HouseNode, cluster

CONFIG = ClusterConfig(shards=3)
VHOST = PutVhost(Vhost("/"))


class Database:
    """One store for all nodes, which may be away, lose answers, or go back in time."""

    def __init__(self) -> None:
        self.memory = MemoryStore(UUID(int=77))
        self.is_away = False
        # Does the next commit, and loses the answer to it and to the questions about it.
        self.loses_answer = False

    def open(self) -> "Connection":
        connection = Connection(self)
        connection.check()
        return connection


class Connection:
    """A MetaStore."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Cut off from it, alone.
        self.is_cut = False

    def check(self) -> MemoryStore:
        if self._database.is_away or self.is_cut:
            raise Unreachable("the database is away")
        return self._database.memory

    def snapshot(self) -> Snapshot:
        return self.check().snapshot()

    def commit(
        self, seen: Version, changes: Sequence[Change], txn: UUID, ballot: Ballot | None = None
    ) -> Committed | Lost | Unknown:
        outcome = self.check().commit(seen, changes, txn, ballot)
        if self._database.loses_answer:
            self._database.loses_answer = False
            self._database.is_away = True
            return Unknown()
        return outcome

    def resolve(self, seen: Version, txn: UUID) -> Committed | NotCommitted | Lost:
        return self.check().resolve(seen, txn)

    def feed(self, after: Version) -> list[tuple[Version, tuple[Change, ...]]] | None:
        return self.check().feed(after)

    def observe(self) -> Lease:
        return self.check().observe()

    def acquire(self, seen: Lease, node: int, incarnation: int, txn: UUID) -> Lease | Lost:
        return self.check().acquire(seen, node, incarnation, txn)

    def renew(self, held: Lease) -> Lease | Lost:
        return self.check().renew(held)

    def risk(self) -> str:
        return self.check().risk()

    def close(self) -> None:
        pass


@pytest.fixture
def database() -> Database:
    return Database()


def opening(database: Database) -> Callable[[], MetaStore]:
    return database.open


async def settled(house: House, *nodes: int) -> None:
    """Each shard has a leader among these nodes, and all of them know."""
    agents = [house.node(one).agent for one in nodes]

    def is_so() -> bool:
        shards = agents[0].metadata.snapshot.shards
        led = sorted(shard for one in nodes for shard in house.node(one).replicas.leads())
        return led == [0, 1, 2] and all(agent.metadata.snapshot.shards == shards for agent in agents)

    await house.until(is_so)


def only_controller(house: House) -> HouseNode:
    (number,) = house.controllers
    return house.node(number)


def others(house: House, but: HouseNode) -> list[int]:
    return [number for number in house.nodes if number != but.number]


async def test_three_nodes_agree_on_one_controller_and_share_out_the_shards(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        assert len(house.controllers) == 1
        assert [len(house.node(one).replicas.leads()) for one in (1, 2, 3)] == [1, 1, 1]
        assert all(house.node(one).agent.metadata.snapshot == database.memory.snapshot() for one in (1, 2, 3))


async def test_a_commit_on_any_node_is_known_there_when_it_returns_and_soon_everywhere(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        for one in (1, 2, 3):
            metadata = house.node(one).agent.metadata
            heard: list[Change] = []
            metadata.listen(lambda snapshot, changes, heard=heard: heard.extend(changes))  # type: ignore[misc]
            await metadata.commit(PutVhost(Vhost(f"from {one}")))
            assert f"from {one}" in metadata.snapshot.vhosts and heard
        names = {"from 1", "from 2", "from 3"}
        await house.until(
            lambda: all(set(house.node(one).agent.metadata.snapshot.vhosts) == names for one in (1, 2, 3))
        )
        placed = [vhost.shard for vhost in database.memory.snapshot().vhosts.values()]
        assert sorted(placed) == [0, 1, 2]


async def test_a_refusal_comes_back_as_the_error_it_is(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        for node in (1, 2, 3):
            with pytest.raises(NotFound, match="no vhost 'x'"):
                await house.node(node).agent.metadata.commit(DeleteVhost("x"))
        one, two = (PutExchange(Exchange("/", "e", "topic", StreamId(UUID(int=number)))) for number in (1, 2))
        await house.node(1).agent.metadata.commit(VHOST, one)
        with pytest.raises(AlreadyExists):
            await house.node(2).agent.metadata.commit(two)


async def test_nodes_and_shards_are_for_the_controller_alone(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        with pytest.raises(Invalid, match="controller alone"):
            await house.node(2).agent.metadata.commit(PutNode(Node(7, 1, UUID(int=7))))


async def test_seeds_of_all_nodes_at_once_appear_on_every_node(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        async with trio.open_nursery() as nursery:
            for one in (1, 2, 3):
                nursery.start_soon(house.node(one).agent.metadata.seed, Definitions(vhosts=(Vhost("shop"),)))
        await house.until(
            lambda: all(
                set(house.node(one).agent.metadata.snapshot.vhosts) == {"/", "shop"}
                and set(house.node(one).agent.metadata.snapshot.users) == {"guest"}
                for one in (1, 2, 3)
            )
        )
        assert database.memory.snapshot().vhosts["/"].shard == 0


async def test_two_nodes_never_give_out_the_same_view_id(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), ClusterConfig(views=64)) as house:
        await house.start(1, 2, 3)
        given: list[int] = []
        for _ in range(200):
            for one in (1, 2, 3):
                given.append(house.node(one).agent.metadata.new_view())
            await trio.sleep(0.5)
        assert len(set(given)) == len(given) == 600
        assert max(given) < database.memory.snapshot().next_view


# -- a controller is lost


async def test_a_killed_controller_is_followed_by_another_within_the_time_of_its_lease(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        before = only_controller(house)
        ballot = database.memory.observe().ballot
        await before.kill()
        killed_s = trio.current_time()
        left = others(house, before)
        await house.until(lambda: house.controllers)
        assert trio.current_time() - killed_s < CONFIG.lease_ttl_s + CONFIG.renew_s
        await settled(house, *left)
        assert database.memory.observe().ballot > ballot
        for one in left:
            await house.node(one).agent.metadata.commit(PutVhost(Vhost(f"after {one}")))


async def test_a_killed_leader_is_followed_at_once_when_the_controller_lives(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        victim = house.node(others(house, only_controller(house))[0])
        await victim.kill()
        killed_s = trio.current_time()
        await settled(house, *others(house, victim))
        assert trio.current_time() - killed_s < 1


async def test_a_node_that_comes_back_is_told_who_leads_now(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        victim = house.node(others(house, only_controller(house))[0])
        await victim.kill()
        await settled(house, *others(house, victim))
        await victim.start()
        rows = database.memory.snapshot().shards
        await house.until(lambda: victim.replicas.rows == {number: shard.assignment for number, shard in rows.items()})
        assert victim.replicas.leads() == []


async def test_a_controller_that_lost_the_database_steps_down_and_another_may_try(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        connections: list[Connection] = []

        def opened() -> Connection:
            connections.append(database.open())
            return connections[-1]

        house.node(1).open_store = opened
        await house.node(1).start()
        await house.start(2, 3)
        await settled(house, 1, 2, 3)
        assert house.controllers == [1]
        for connection in connections:
            connection.is_cut = True
        house.node(1).open_store = _unreachable
        cut_s = trio.current_time()
        await house.until(lambda: house.controllers not in ([], [1]))
        assert 1 not in house.controllers
        assert trio.current_time() - cut_s < CONFIG.lease_ttl_s + 2 * CONFIG.renew_s
        # Node 1 cannot ask the database, and is told by the new controller.
        await house.node(1).agent.metadata.commit(PutVhost(Vhost("by way of another")))


def _unreachable() -> MetaStore:
    raise Unreachable("the database is away")


async def test_of_two_controllers_at_once_only_the_later_one_counts(database: Database, autojump_clock: object) -> None:
    """One that slept through its lease wakes, and finds that nobody listens to it."""
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        old = only_controller(house)
        old_ballot = database.memory.observe().ballot
        reign = old.agent._reign
        assert reign is not None
        # Somebody else takes the lease behind its back, as after a pause of its whole machine.
        taken = database.memory.acquire(database.memory.observe(), 9, 123, UUID(int=5))
        assert isinstance(taken, Lease)
        with pytest.raises((Unreachable, OutcomeUnknown)):
            with trio.fail_after(1):
                await reign._commit(reign.brain.snapshot.version, [VHOST])
        assert not database.memory.snapshot().vhosts
        assert "moved the metadata" in str(reign.ended)
        await house.until(lambda: database.memory.observe().ballot > taken.ballot)
        assert taken.ballot > old_ballot


async def test_a_node_that_promised_a_later_controller_ends_the_term_of_an_earlier_one(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        old = only_controller(house)
        other = house.node(others(house, old)[0])
        for shard in range(3):
            other.replicas.ballots[shard] = Ballot(99, 1)
        ballot = database.memory.observe().ballot
        shard = other.replicas.leads()[0]
        row = other.replicas.rows[shard]
        shrunk = tuple(copy for copy in row.isr if copy.node in (other.number, old.number))
        other.agent.alter(shard, AlterIsr(row.stint, row.leader_incarnation, row.version, shrunk, None))
        await house.until(lambda: database.memory.observe().ballot > ballot)


# -- the database is lost


async def test_without_the_database_the_snapshot_is_served_and_commits_fail_clearly(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        await house.node(1).agent.metadata.commit(VHOST, PutUser(User("ann")))
        await trio.sleep(5)
        database.is_away = True
        for one in (1, 2, 3):
            with pytest.raises(Unreachable, match="nothing was changed"):
                await house.node(one).agent.metadata.commit(PutVhost(Vhost("x")))
            assert "ann" in house.node(one).agent.metadata.snapshot.users
            assert house.node(one).agent.leader_of("/") is not None
        assert house.controllers == []
        assert "away" in house.node(2).agent.status()["metadata_store"]
        database.is_away = False
        await house.node(3).agent.metadata.commit(PutVhost(Vhost("y")))
        assert "x" not in database.memory.snapshot().vhosts


async def test_a_node_starts_with_what_it_kept_while_the_database_is_away(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await house.node(1).agent.metadata.commit(VHOST, PutUser(User("ann")))
        await trio.sleep(5)
        for one in (1, 2, 3):
            await house.node(one).kill()
        database.is_away = True
        await house.node(2).start()
        assert set(house.node(2).agent.metadata.snapshot.users) == {"ann"}
        assert house.node(2).replicas.leads() == [], "and leads nothing: nobody has elected it"
        database.is_away = False
        await house.start(1, 3)
        await settled(house, 1, 2, 3)


async def test_a_commit_whose_answer_was_lost_is_resolved_when_the_database_is_back(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        database.loses_answer = True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(house.node(2).agent.metadata.commit, VHOST)
            await house.until(lambda: database.is_away)
            await trio.sleep(2)
            database.is_away = False
        assert "/" in house.node(2).agent.metadata.snapshot.vhosts


async def test_a_commit_whose_answer_stays_lost_is_unknown_and_never_guessed(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        database.loses_answer = True
        with pytest.raises(OutcomeUnknown):
            await house.node(2).agent.metadata.commit(VHOST)
        assert "/" in database.memory.snapshot().vhosts, "it did count"
        database.is_away = False
        await house.until(lambda: "/" in house.node(2).agent.metadata.snapshot.vhosts)


async def test_a_commit_is_unknown_when_the_controller_dies_with_it(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        controller = only_controller(house)
        node = house.node(others(house, controller)[0])
        database.loses_answer = True
        with pytest.raises(ExceptionGroup) as caught:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(node.agent.metadata.commit, VHOST)
                await house.until(lambda: database.is_away)
                await controller.kill()
        assert caught.group_contains(OutcomeUnknown)
        database.is_away = False


async def test_a_node_that_can_keep_nothing_any_more_ends(database: Database, autojump_clock: object) -> None:
    """The simulator of clusters, seed 556: it ruled on, and heard no orders itself."""
    with pytest.raises(ExceptionGroup) as caught:
        async with cluster(opening(database), CONFIG) as house:
            await house.start(1, 2, 3)
            await settled(house, 1, 2, 3)
            first = only_controller(house)
            house.node(others(house, first)[0]).storage.fail("sync", times=1000)
            await first.kill()
            await trio.sleep(60)
    assert caught.group_contains(Poisoned)


async def test_a_node_whose_disk_and_link_fail_together_tells_of_the_disk(
    database: Database, autojump_clock: object
) -> None:
    async def fails(_agent: ClusterAgent) -> None:
        raise ExceptionGroup("both", [PeerGone("the other side closed the link"), Poisoned("a sync failed")])

    with pytest.raises(ExceptionGroup) as caught, patch.object(ClusterAgent, "_attend_once", fails):
        async with cluster(opening(database), CONFIG) as house:
            await house.start(1)
            await trio.sleep(60)
    assert [str(error) for error in causes(caught.value)] == ["a sync failed"]


async def test_what_a_store_has_forgotten_is_put_back_by_the_nodes(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        old = database.memory.snapshot()
        await house.node(1).agent.metadata.commit(VHOST, PutUser(User("ann")))
        before = database.memory.snapshot()
        await trio.sleep(3)
        told: list[Change] = []
        for one in (1, 2, 3):
            house.node(one).agent.metadata.listen(lambda _snapshot, changes: told.extend(changes))
        database.memory._snapshot = old
        await house.until(lambda: "/" in database.memory.snapshot().vhosts)
        # Whoever serves the vhost would have let go of its records.
        assert not any(isinstance(change, DeleteVhost) for change in told)
        await house.until(lambda: "ann" in database.memory.snapshot().users)
        await settled(house, 1, 2, 3)
        now = database.memory.snapshot()
        assert now.next_view >= before.next_view
        for one in (1, 2, 3):
            await house.until(lambda one=one: house.node(one).agent.metadata.snapshot.version >= now.version)


async def test_a_store_that_forgot_an_election_gets_another_with_a_higher_epoch(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        old = database.memory.snapshot()
        victim = house.node(others(house, only_controller(house))[0])
        shard = victim.replicas.leads()[0]
        await victim.kill()
        await settled(house, *others(house, victim))
        epoch = database.memory.snapshot().shards[shard].assignment.epoch
        database.memory._snapshot = old
        await house.until(lambda: database.memory.snapshot().shards[shard].assignment.epoch > epoch)
        await settled(house, *others(house, victim))
        row = database.memory.snapshot().shards[shard].assignment
        assert row.leader != victim.number and row.version.ballot == database.memory.observe().ballot


# -- operators


async def test_operators_ask_any_node(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        asked = house.node(others(house, only_controller(house))[0]).agent
        await asked.drain(3)
        await house.until(lambda: house.node(3).replicas.leads() == [])
        await settled(house, 1, 2)
        await house.until(lambda: all(node["up"] for node in asked.status()["nodes"]))
        status = asked.status()
        assert [node["state"] for node in status["nodes"]] == ["active", "active", "draining"]
        assert [shard["row"] for shard in status["shards"]] == ["proven"] * 3
        with pytest.raises(NotFound, match="no node 9"):
            await asked.drain(9)
        with pytest.raises(Invalid, match="needs 2 nodes"):
            await asked.move(0, [1])
        await asked.undrain(3)
        await asked.balance()
        await house.until(lambda: len(house.node(3).replicas.leads()) == 1)


async def test_a_fourth_node_joins_and_takes_over_from_one_that_is_drained(
    database: Database, autojump_clock: object
) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        await house.node(4).start()
        assert house.node(4).agent.endpoint(1, "peer") == Endpoint("memory", 1)
        await house.node(1).agent.move(0, [4, 2, 3])
        await house.until(lambda: 4 in house.node(2).agent.metadata.snapshot.shards[0].assignment.replicas)
        row = house.node(2).agent.metadata.snapshot.shards[0].assignment
        member = house.node(4).agent.member
        isr = tuple(sorted((*row.isr, member.copy)))
        leader = house.node(row.leader).agent
        leader.alter(0, AlterIsr(row.stint, row.leader_incarnation, row.version, isr, member))
        await house.until(lambda: house.node(4).replicas.leads() == [0])
        assert house.node(4).agent.metadata.snapshot.shards[0].assignment.replicas == (4, 2, 3)


async def test_changes_of_rows_are_told_to_whoever_wants_to_know(database: Database, autojump_clock: object) -> None:
    async with cluster(opening(database), CONFIG) as house:
        await house.start(1, 2, 3)
        await settled(house, 1, 2, 3)
        told: list[int] = []
        agent = house.node(2).agent
        agent.changed.append(lambda: told.append(agent.metadata.snapshot.version))
        await agent.metadata.commit(VHOST)
        assert not told
        await agent.drain(1)
        assert told
