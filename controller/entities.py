"""What the metadata is about: vhosts, users and rights, exchanges, queues, bindings, topics, policies, limits; of a
cluster, its nodes and shards. Values.

Only what is durable stands here: exclusive, server-named and non-durable things live in memory elsewhere (K6).
A name is UTF-8 of at most 255 bytes without NUL, as AMQP's short strings are; it never becomes a file name.
Neighbours: changes.py changes them, snapshot.py holds them, models.py stores them.
"""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, NewType
from uuid import UUID

from headrace.controller.errors import Invalid
from headrace.controller.table import EMPTY, Table
from headrace.core_log.ids import StreamId, ViewId
from headrace.core_log.replication.assignment import Assignment, Member

# Counts the committed transactions of the metadata; moves by one with each, and never back.
Version = NewType("Version", int)

NAME_BYTES_MAX = 255


def check_name(what: str, name: str, *, may_be_empty: bool = False) -> None:
    """Raise Invalid unless `name` fits an AMQP short string."""
    if not name and not may_be_empty:
        raise Invalid(f"{what} must not be empty")
    try:
        encoded = name.encode()
    except UnicodeEncodeError as error:
        raise Invalid(f"{what} is not valid Unicode text") from error
    if len(encoded) > NAME_BYTES_MAX:
        raise Invalid(f"{what} is {len(encoded)} bytes long, more than {NAME_BYTES_MAX}")
    if "\0" in name:
        raise Invalid(f"{what} must not contain a NUL character")


@dataclass(frozen=True, slots=True)
class Vhost:
    name: str
    # Which shard of a cluster has its streams; never another one. A node alone has no shards, and this says nothing.
    shard: int = 0

    def __post_init__(self) -> None:
        check_name("the vhost's name", self.name)
        if self.shard < 0:
            raise Invalid(f"vhost '{self.name}': {self.shard} is not a shard")


@dataclass(frozen=True, slots=True)
class User:
    name: str
    # As controller/passwords.py writes it; empty = no password will do (certificates only).
    password_hash: str = field(default="", repr=False)
    # Sorted, each once. Any word is lawful; administrator, monitoring, policymaker, management and impersonator
    # mean something.
    tags: tuple[str, ...] = ()
    # The metadata version in which this user or any of its rights last changed. Stamped when the change is applied;
    # what is cached about a user is good for exactly one value of it.
    version: Version = Version(0)
    # Of the same password, as controller/verifiers.py writes it; empty = it cannot be proven by SCRAM. Whoever gives a
    # user another password gives it another verifier, or none.
    scram: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        check_name("the user's name", self.name)
        for tag in self.tags:
            check_name(f"a tag of user '{self.name}'", tag)
        object.__setattr__(self, "tags", tuple(sorted(set(self.tags))))


@dataclass(frozen=True, slots=True)
class Permission:
    """What a user may do in a vhost: three regular expressions over names of exchanges and queues."""

    user: str
    vhost: str
    configure: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class TopicPermission:
    """Narrows publishing to, and binding from, one topic exchange by regular expressions over routing keys."""

    user: str
    vhost: str
    exchange: str
    write: str
    read: str


@dataclass(frozen=True, slots=True)
class Exchange:
    vhost: str
    name: str
    kind: str
    # The log it owns; the same name declared anew is another stream.
    stream: StreamId
    auto_delete: bool = False
    internal: bool = False
    arguments: Table = EMPTY

    def __post_init__(self) -> None:
        check_name("the exchange's name", self.name, may_be_empty=True)
        check_name("the exchange's type", self.kind)


@dataclass(frozen=True, slots=True)
class Queue:
    vhost: str
    name: str
    # Stands in the route sets of batches, so it is never given to another queue, not even after a delete.
    view: ViewId
    # The queue's own log; its files are born with the first append to it.
    stream: StreamId
    # The user who declared it.
    owner: str = ""
    auto_delete: bool = False
    arguments: Table = EMPTY

    def __post_init__(self) -> None:
        check_name("the queue's name", self.name)


PARTITIONS_MAX = 1024


@dataclass(frozen=True, slots=True)
class Topic:
    """A stream that was created by its name, and belongs to no exchange or queue."""

    vhost: str
    name: str
    # Its log; the same name created anew is another stream.
    stream: StreamId
    # Never fewer than before: records lie where they were written.
    partition_count: int = 1
    # How its log is kept, in the words of an exchange's arguments; what does not stand here is the node's default.
    settings: Table = EMPTY

    def __post_init__(self) -> None:
        check_name("the topic's name", self.name)
        if not 1 <= self.partition_count <= PARTITIONS_MAX:
            raise Invalid(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {self.partition_count}")


class DestinationKind(StrEnum):
    QUEUE = "queue"
    EXCHANGE = "exchange"


# Routing key and arguments: what tells apart two bindings between the same two ends.
BindingKey = tuple[str, DestinationKind, str, str, str]


@dataclass(frozen=True, slots=True)
class Binding:
    vhost: str
    source: str
    destination_kind: DestinationKind
    destination: str
    routing_key: str = ""
    arguments: Table = EMPTY

    def __post_init__(self) -> None:
        check_name("the routing key", self.routing_key, may_be_empty=True)

    @property
    def key(self) -> BindingKey:
        """Unique within the vhost."""
        return (self.source, self.destination_kind, self.destination, self.routing_key, self.arguments.text)


class ApplyTo(StrEnum):
    """Which things a policy may match, in RabbitMQ's words."""

    ALL = "all"
    QUEUES = "queues"
    CLASSIC_QUEUES = "classic_queues"
    QUORUM_QUEUES = "quorum_queues"
    STREAMS = "streams"
    EXCHANGES = "exchanges"


@dataclass(frozen=True, slots=True)
class Policy:
    vhost: str
    name: str
    pattern: str
    definition: Table
    apply_to: ApplyTo = ApplyTo.ALL
    priority: int = 0

    def __post_init__(self) -> None:
        check_name("the policy's name", self.name)


@dataclass(frozen=True, slots=True)
class VhostLimits:
    """None = no limit."""

    vhost: str
    connections_max: int | None = None
    queues_max: int | None = None

    def __post_init__(self) -> None:
        _check_limit(f"vhost '{self.vhost}', max-connections", self.connections_max)
        _check_limit(f"vhost '{self.vhost}', max-queues", self.queues_max)


@dataclass(frozen=True, slots=True)
class UserLimits:
    """None = no limit."""

    user: str
    connections_max: int | None = None
    channels_max: int | None = None

    def __post_init__(self) -> None:
        _check_limit(f"user '{self.user}', max-connections", self.connections_max)
        _check_limit(f"user '{self.user}', max-channels", self.channels_max)


def _check_limit(what: str, limit: int | None) -> None:
    if limit is not None and not 0 <= limit < 2**31:
        raise Invalid(f"{what}: {limit} is not a limit (0 up to {2**31 - 1}, or none)")


class NodeState(StrEnum):
    # It takes part; whether it is up is known by its session, not from here.
    ACTIVE = "active"
    # It leads nothing that others can lead, and what it holds goes elsewhere.
    DRAINING = "draining"


class Endpoint(NamedTuple):
    """Where one door of a node is reached."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Node:
    """A node of a cluster, in the life in which it registered last."""

    id: int
    incarnation: int
    disk: UUID
    state: NodeState = NodeState.ACTIVE
    # By door: peer, amqp, mqtt, http, ... Sorted, each once.
    endpoints: tuple[tuple[str, Endpoint], ...] = ()
    # What it held when it registered is all that it ever confirmed.
    clean: bool = True

    def __post_init__(self) -> None:
        if self.id < 1:
            raise Invalid(f"a node's number is 1 or more, not {self.id}")
        object.__setattr__(self, "endpoints", tuple(sorted(dict(self.endpoints).items())))

    @property
    def member(self) -> Member:
        return Member(self.id, self.incarnation, self.disk)

    def endpoint(self, door: str) -> Endpoint | None:
        return next((where for name, where in self.endpoints if name == door), None)


@dataclass(frozen=True, slots=True)
class Shard:
    """Some vhosts, and who has their streams: led as one."""

    number: int
    assignment: Assignment
    # Where the replicas are to be, while that is under way; the first should lead. Empty: where they are.
    target: tuple[int, ...] = ()
    # The last epoch that was begun by force, with a replica that may lack what was confirmed (E7); 0: none ever.
    forced_epoch: int = 0

    def __post_init__(self) -> None:
        if self.number < 0:
            raise Invalid(f"{self.number} is not a shard")
        row = self.assignment
        if not 1 <= row.min_isr <= len(row.replicas):
            raise Invalid(f"shard {self.number}: {row.min_isr} in sync of {len(row.replicas)} replicas")
        for nodes in (row.replicas, self.target):
            if len(set(nodes)) != len(nodes):
                raise Invalid(f"shard {self.number}: a node has two replicas of it")
