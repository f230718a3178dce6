"""A cluster of agents on a real PostgreSQL: it is stopped, comes back, and its controllers die."""

from uuid import uuid4

import pytest
import trio
from tests.postgres_server import PostgresServer

from headrace.controller.changes import PutUser, PutVhost
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import User, Vhost
from headrace.controller.errors import Unreachable
from headrace.controller.postgres_store import PostgresStore
from headrace.controller.store import MetaStore
from headrace.core_log.real import ThreadWorker

from .cluster_house import House, cluster

# Short, since this runs in real time; long enough for a machine that has other things to do.
CONFIG = ClusterConfig(
    lease_ttl_s=3.0,
    renew_s=0.3,
    self_deadline_s=1.5,
    heartbeat_s=0.1,
    session_s=3.0,
    commit_s=2.0,
    grace_s=1.0,
    start_s=60.0,
)


async def commit(house: House, node: int, name: str) -> None:
    """A controller may be on its way: tries until it is there."""
    with trio.fail_after(60):
        while name not in house.node(node).agent.metadata.snapshot.vhosts:
            try:
                await house.node(node).agent.metadata.commit(PutVhost(Vhost(name)))
            except Unreachable:
                await trio.sleep(0.1)


async def test_a_cluster_outlives_its_controller_and_serves_without_its_database(postgres: PostgresServer) -> None:
    url = postgres.emptied()

    def opened() -> MetaStore:
        return PostgresStore(url, new_uuid=uuid4)

    async with cluster(opened, CONFIG) as house:
        for number in (1, 2, 3):
            house.node(number).worker = ThreadWorker(4)
        await house.start(1, 2, 3)
        agents = {number: house.node(number).agent for number in (1, 2, 3)}
        await agents[2].metadata.commit(PutUser(User("ann")))
        await commit(house, 1, "/")
        await house.until(lambda: all(agent.leader_of("/") is not None for agent in agents.values()))

        postgres.stop("immediate")
        with pytest.raises(Unreachable, match="nothing was changed"):
            await agents[3].metadata.commit(PutVhost(Vhost("refused")))
        assert all("ann" in agent.metadata.snapshot.users for agent in agents.values())
        await house.until(lambda: not house.controllers)
        postgres.start()
        await commit(house, 3, "database is back")
        assert "refused" not in agents[3].metadata.snapshot.vhosts

        await house.until(lambda: house.controllers)
        (controller,) = house.controllers
        left = [number for number in (1, 2, 3) if number != controller]
        ballot = agents[left[0]].status()["ballot"]
        await house.node(controller).kill()
        for number in left:
            await commit(house, number, f"after the death, from {number}")
        assert agents[left[0]].status()["ballot"] > ballot
        await house.until(
            lambda: sorted(shard for number in left for shard in house.node(number).replicas.leads()) == [0, 1, 2]
        )
