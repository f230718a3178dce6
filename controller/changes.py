"""Every change the metadata knows, and its form in the change feed. Values and format.

A Put of a vhost, user, right, policy or limit creates it or replaces it. A Put of an exchange, queue or binding
creates it: an equal one that is already there is left as it is, an unequal one is refused (X3: of two racing
declares one wins, and the other looks again). A Put of a topic creates it, or changes the one that has its stream.
A Delete takes along all that hangs on the thing, in the same change. Deleting an exchange, queue or topic names its
stream or view, so that a late delete never hits a successor of the same name. Nodes and shards are put by the
controller of a cluster alone (brain.py).

One transaction = one version = one line of the feed: a JSON array of [name of the change, its fields].
Neighbours: snapshot.py applies changes to memory, rows.py to the database; a property test holds the two together.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from headrace.controller.entities import (
    Binding,
    Exchange,
    Node,
    Permission,
    Policy,
    Queue,
    Shard,
    Topic,
    TopicPermission,
    User,
    UserLimits,
    Version,
    Vhost,
    VhostLimits,
)
from headrace.controller.table import Table
from headrace.core_log.errors import UnknownFormat
from headrace.core_log.ids import StreamId, ViewId


@dataclass(frozen=True, slots=True)
class PutVhost:
    vhost: Vhost


@dataclass(frozen=True, slots=True)
class DeleteVhost:
    """With its exchanges, queues, bindings, topics, policies, limits and every right in it."""

    name: str


@dataclass(frozen=True, slots=True)
class PutUser:
    """`user.version` is not taken from here: it is stamped with the version of the transaction."""

    user: User
    # Refused if the user's version is another one by then: a rehash must not bring an old password back.
    if_version: Version | None = None


@dataclass(frozen=True, slots=True)
class DeleteUser:
    """With its rights and limits. What it declared stays."""

    name: str


@dataclass(frozen=True, slots=True)
class PutPermission:
    permission: Permission


@dataclass(frozen=True, slots=True)
class DeletePermission:
    user: str
    vhost: str


@dataclass(frozen=True, slots=True)
class PutTopicPermission:
    permission: TopicPermission


@dataclass(frozen=True, slots=True)
class DeleteTopicPermission:
    user: str
    vhost: str
    exchange: str


@dataclass(frozen=True, slots=True)
class PutExchange:
    exchange: Exchange


@dataclass(frozen=True, slots=True)
class DeleteExchange:
    """With the bindings from it and to it."""

    vhost: str
    name: str
    stream: StreamId
    # Refused while anything is bound from it.
    if_unused: bool = False


@dataclass(frozen=True, slots=True)
class PutQueue:
    queue: Queue


@dataclass(frozen=True, slots=True)
class DeleteQueue:
    """With its bindings."""

    vhost: str
    name: str
    view: ViewId


@dataclass(frozen=True, slots=True)
class PutBinding:
    binding: Binding


@dataclass(frozen=True, slots=True)
class DeleteBinding:
    binding: Binding


@dataclass(frozen=True, slots=True)
class PutTopic:
    topic: Topic


@dataclass(frozen=True, slots=True)
class DeleteTopic:
    vhost: str
    name: str
    stream: StreamId


@dataclass(frozen=True, slots=True)
class PutPolicy:
    policy: Policy


@dataclass(frozen=True, slots=True)
class DeletePolicy:
    vhost: str
    name: str


@dataclass(frozen=True, slots=True)
class PutVhostLimits:
    limits: VhostLimits


@dataclass(frozen=True, slots=True)
class DeleteVhostLimits:
    vhost: str


@dataclass(frozen=True, slots=True)
class PutUserLimits:
    limits: UserLimits


@dataclass(frozen=True, slots=True)
class DeleteUserLimits:
    user: str


@dataclass(frozen=True, slots=True)
class ReserveViews:
    """So many view ids are somebody's to give out, from `first` on; refused if that one is not the next any more."""

    first: ViewId
    count: int


@dataclass(frozen=True, slots=True)
class PutNode:
    node: Node


@dataclass(frozen=True, slots=True)
class DeleteNode:
    """Refused while a shard has a replica there."""

    id: int


@dataclass(frozen=True, slots=True)
class PutShard:
    shard: Shard


Change: TypeAlias = (
    PutVhost
    | DeleteVhost
    | PutUser
    | DeleteUser
    | PutPermission
    | DeletePermission
    | PutTopicPermission
    | DeleteTopicPermission
    | PutExchange
    | DeleteExchange
    | PutQueue
    | DeleteQueue
    | PutBinding
    | DeleteBinding
    | PutTopic
    | DeleteTopic
    | PutPolicy
    | DeletePolicy
    | PutVhostLimits
    | DeleteVhostLimits
    | PutUserLimits
    | DeleteUserLimits
    | ReserveViews
    | PutNode
    | DeleteNode
    | PutShard
)

CHANGES: tuple[type[Change], ...] = Change.__args__
_BY_NAME: dict[str, type[Change]] = {kind.__name__: kind for kind in CHANGES}


# Name and type of the exchanges that every vhost is born with; the nameless one is the default exchange.
DEFAULT_EXCHANGES = (
    ("", "direct"),
    ("amq.direct", "direct"),
    ("amq.fanout", "fanout"),
    ("amq.topic", "topic"),
    ("amq.headers", "headers"),
    ("amq.match", "headers"),
)


def create_vhost(name: str, new_stream: Callable[[], StreamId]) -> list[Change]:
    """A new vhost with its exchanges, for one transaction."""
    exchanges = [PutExchange(Exchange(name, exchange, kind, new_stream())) for exchange, kind in DEFAULT_EXCHANGES]
    return [PutVhost(Vhost(name)), *exchanges]


def encode_changes(changes: Sequence[Change]) -> str:
    return msgspec.json.encode([(type(change).__name__, change) for change in changes], enc_hook=encode_table).decode()


def decode_changes(text: str) -> tuple[Change, ...]:
    """UnknownFormat for a change that this release does not know."""
    changes: list[Change] = []
    for name, fields in msgspec.json.decode(text, type=list[tuple[str, object]]):
        kind = _BY_NAME.get(name)
        if kind is None:
            raise UnknownFormat(f"the change feed holds a '{name}', which this release does not know")
        changes.append(msgspec.convert(fields, kind, dec_hook=decode_table))
    return tuple(changes)


def replaces_secret(changes: Sequence[Change]) -> bool:
    """Whether the feed up to here may hold a password hash that these changes make obsolete.

    The feed before such a version is dropped with it, so that an old or weak hash does not outlive its user.
    """
    return any(isinstance(change, PutUser | DeleteUser) for change in changes)


def encode_table(value: object) -> object:
    if isinstance(value, Table):
        return msgspec.Raw(value.text.encode())
    raise NotImplementedError(f"{type(value).__name__} does not belong in a change")


def decode_table(kind: type, value: object) -> object:
    if kind is Table:
        return Table.from_json(value)
    raise NotImplementedError(f"{kind.__name__} does not belong in a change")
