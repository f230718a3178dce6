"""Read leases over HTTP: retention waits for who is at work on a topic. Driver; delivery/read_leases.py keeps them.

    PUT /api/v1/topics/{topic}/leases/{lease}     take or renew, with the lowest offset that is still needed

A lease is its user's own. To take one needs the right to read the topic. Neighbours: segments.py, cursors.py.
"""

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from headrace.gateways.delivery.access import Operation as Right
from headrace.gateways.delivery.read_leases import Lease
from headrace.gateways.http.cursors import Offsets
from headrace.gateways.http.operations import Answer, Body, Call, Operation, Parameters, Reply
from headrace.gateways.http.problems import Code
from headrace.gateways.http.records import time_text
from headrace.gateways.http.topics import PATH, TopicPath, found

if TYPE_CHECKING:
    from headrace.gateways.http.server import HttpDoor

TTL_MS = 60_000


class LeasePath(TopicPath, frozen=True, kw_only=True):
    lease: Annotated[str, Meta(min_length=1, max_length=255, description="who reads: the name of a query")]


class NewLease(Body, frozen=True, kw_only=True):
    offsets: Offsets
    ttl_ms: Annotated[int, Meta(ge=1, description="counts so long unless it is renewed (at most an hour)")] = TTL_MS


class HeldOut(Answer, frozen=True, kw_only=True):
    partition: int
    offset: Annotated[int, Meta(description="nothing from here on is removed by retention")]
    since: Annotated[str, Meta(description="when it became the lowest one")]
    overdue: Annotated[bool, Meta(description="it has not moved for too long: retention waits no more")]


class LeaseOut(Answer, frozen=True, kw_only=True):
    lease: str
    user: str
    topic: str
    expires_at: str
    partitions: list[HeldOut]


class LeaseList(Answer, frozen=True, kw_only=True):
    leases: list[LeaseOut]


async def put_lease(call: Call[LeasePath, Parameters, NewLease]) -> Reply:
    door = call.door
    place = found(door, call.visitor, Right.READ, call.path.topic)
    offsets = {int(partition): offset for partition, offset in call.body.offsets.items()}
    lease, is_new = await door.read_leases.put(
        door.topics.logs_of(place.stream_id),
        place.stream_id,
        call.visitor.name,
        call.path.lease,
        offsets,
        call.body.ttl_ms / 1000,
    )
    return Reply(_shown(door, place.public_name, lease), status=201 if is_new else 200)


async def list_leases(call: Call[TopicPath, Parameters, None]) -> Reply:
    door = call.door
    place = found(door, call.visitor, Right.READ, call.path.topic)
    leases = [_shown(door, place.public_name, one) for one in door.read_leases.list(place.stream_id)]
    return Reply(LeaseList(leases=leases))


async def delete_lease(call: Call[LeasePath, Parameters, None]) -> Reply:
    place = found(call.door, call.visitor, Right.READ, call.path.topic)
    await call.door.read_leases.release(place.stream_id, call.visitor.name, call.path.lease)
    return Reply(status=204)


def _shown(door: "HttpDoor", topic: str, lease: Lease) -> LeaseOut:
    return LeaseOut(
        lease=lease.name,
        user=lease.user,
        topic=topic,
        expires_at=time_text(lease.expires_us),
        partitions=[
            HeldOut(
                partition=partition,
                offset=held.offset,
                since=time_text(held.since_us),
                overdue=door.read_leases.is_overdue(held),
            )
            for partition, held in sorted(lease.held.items())
        ],
    )


def operations() -> list[Operation]:
    path = f"{PATH}/{{topic}}/leases"
    return [
        Operation(
            "GET",
            path,
            list_leases,
            "List read leases of a topic",
            parameters=TopicPath,
            answers={200: LeaseList},
            problems=(Code.NOT_FOUND,),
        ),
        Operation(
            "PUT",
            f"{path}/{{lease}}",
            put_lease,
            "Take or renew a read lease",
            "Retention leaves what lies at or above these offsets alone, while the lease is renewed and as long as its "
            "offsets move at least once in `leases.hold_s_max`. Partitions that a renewal does not name are let go of.",
            parameters=LeasePath,
            body=NewLease,
            answers={200: LeaseOut, 201: LeaseOut},
            problems=(Code.NOT_FOUND, Code.LIMIT_REACHED),
            is_logged=False,
        ),
        Operation(
            "DELETE",
            f"{path}/{{lease}}",
            delete_lease,
            "Give a read lease back",
            parameters=LeasePath,
            answers={204: None},
            problems=(Code.NOT_FOUND,),
            is_logged=False,
        ),
    ]
