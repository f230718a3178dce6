"""The cluster over HTTP: who is there, who leads what, how far the others are; and what operators do to it. Driver.

Answered by every node, from what the controller told it last. Neighbours: node_app.py has these beside a node's health.
"""

from typing import TYPE_CHECKING, Any, Protocol

from headrace.gateways.delivery.access import Tag
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code, Problem

if TYPE_CHECKING:
    from headrace.gateways.http.node_app import NodeDoor

PATH = "/api/v1/cluster"


class Cluster(Protocol):
    """What is needed of the node's part in its cluster. Each returns the version of the metadata that has it."""

    def status(self) -> dict[str, Any]: ...
    async def drain(self, node: int) -> int: ...
    async def undrain(self, node: int) -> int: ...
    async def remove(self, node: int) -> int: ...
    async def move(self, shard: int, nodes: list[int]) -> int: ...
    async def balance(self) -> int: ...
    async def force(self, shard: int, node: int) -> int: ...


class NodePlace(Parameters, frozen=True, kw_only=True):
    node: int


class ShardPlace(Parameters, frozen=True, kw_only=True):
    shard: int


class Move(Body, frozen=True, kw_only=True):
    """Where the replicas are to be; the first node leads."""

    nodes: list[int]


class Force(Body, frozen=True, kw_only=True):
    """A node that may lack what was confirmed. `lose` must be true: somebody has to want it."""

    node: int
    lose: bool


class Ordered(Answer, frozen=True, kw_only=True):
    """It is decided, and under way: GET /api/v1/cluster has the progress."""

    metadata_version: int


def _cluster(call: Call[Any, Any, Any], tag: Tag) -> Cluster:
    call.visitor.require_tag(tag)
    door: NodeDoor = call.door  # type: ignore[assignment]
    return door.cluster


async def get_cluster(call: Call[Parameters, Parameters, None]) -> Reply:
    cluster = _cluster(call, Tag.MONITORING)
    door: NodeDoor = call.door  # type: ignore[assignment]
    return Reply({**cluster.status(), "replicas_here": door.replicas()})


async def drain_node(call: Call[NodePlace, Parameters, None]) -> Reply:
    return _ordered(await _cluster(call, Tag.ADMINISTRATOR).drain(call.path.node))


async def undrain_node(call: Call[NodePlace, Parameters, None]) -> Reply:
    return _ordered(await _cluster(call, Tag.ADMINISTRATOR).undrain(call.path.node))


async def remove_node(call: Call[NodePlace, Parameters, None]) -> Reply:
    return _ordered(await _cluster(call, Tag.ADMINISTRATOR).remove(call.path.node))


async def move_shard(call: Call[ShardPlace, Parameters, Move]) -> Reply:
    return _ordered(await _cluster(call, Tag.ADMINISTRATOR).move(call.path.shard, call.body.nodes))


async def balance_cluster(call: Call[Parameters, Parameters, None]) -> Reply:
    return _ordered(await _cluster(call, Tag.ADMINISTRATOR).balance())


async def force_leader(call: Call[ShardPlace, Parameters, Force]) -> Reply:
    cluster = _cluster(call, Tag.ADMINISTRATOR)
    if not call.body.lose:
        raise Problem(Code.INVALID, "an election by force may lose what was confirmed: say so with lose = true")
    return _ordered(await cluster.force(call.path.shard, call.body.node))


def _ordered(version: int) -> Reply:
    return Reply(Ordered(metadata_version=version), status=202)


def operations() -> list[Operation]:
    refused = (Code.FORBIDDEN,)
    known = (Code.FORBIDDEN, Code.NOT_FOUND, Code.INVALID)
    ordered = {202: Ordered}
    return [
        Operation(
            "GET",
            PATH,
            get_cluster,
            "Nodes, shards, and who leads what",
            "`up`, `in_sync` and `target` tell how far a change is; `replicas_here` is about the node that answers.",
            answers={200: dict[str, Any]},
            problems=refused,
        ),
        Operation(
            "POST",
            f"{PATH}/nodes/{{node}}/drain",
            drain_node,
            "Let others take over what a node leads and holds",
            parameters=NodePlace,
            answers=ordered,
            problems=known,
        ),
        Operation(
            "POST",
            f"{PATH}/nodes/{{node}}/undrain",
            undrain_node,
            "Let a node lead and hold shards again",
            parameters=NodePlace,
            answers=ordered,
            problems=known,
        ),
        Operation(
            "DELETE",
            f"{PATH}/nodes/{{node}}",
            remove_node,
            "Forget a node that holds nothing",
            parameters=NodePlace,
            answers=ordered,
            problems=known,
        ),
        Operation(
            "POST",
            f"{PATH}/shards/{{shard}}/move",
            move_shard,
            "Put the replicas of a shard on other nodes",
            parameters=ShardPlace,
            body=Move,
            answers=ordered,
            problems=known,
        ),
        Operation(
            "POST",
            f"{PATH}/balance",
            balance_cluster,
            "Even shares of replicas and of leadership",
            answers=ordered,
            problems=refused,
        ),
        Operation(
            "POST",
            f"{PATH}/shards/{{shard}}/force",
            force_leader,
            "Let a node lead that may lack what was confirmed",
            "For when everybody who has it is gone for good. It is recorded, and what is lost stays lost.",
            parameters=ShardPlace,
            body=Force,
            answers=ordered,
            problems=known,
        ),
    ]
