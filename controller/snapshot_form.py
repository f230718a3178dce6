"""A snapshot as bytes, and what leads from one to another. Format; pure.

The bytes are what a controller sends to a node that cannot follow its deltas, and what a node keeps on its disk to
start from while the database is away: a line that says what it is, the xxh3 of the rest, JSON.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar
from uuid import UUID

import msgspec
from xxhash import xxh3_64_hexdigest

from headrace.controller.changes import (
    Change,
    DeleteBinding,
    DeleteExchange,
    DeleteNode,
    DeletePermission,
    DeletePolicy,
    DeleteQueue,
    DeleteTopic,
    DeleteTopicPermission,
    DeleteUser,
    DeleteUserLimits,
    DeleteVhost,
    DeleteVhostLimits,
    PutBinding,
    PutExchange,
    PutNode,
    PutPermission,
    PutPolicy,
    PutQueue,
    PutShard,
    PutTopic,
    PutTopicPermission,
    PutUser,
    PutUserLimits,
    PutVhost,
    PutVhostLimits,
    decode_table,
    encode_table,
)
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
from headrace.controller.frozenmap import FrozenMap
from headrace.controller.snapshot import Snapshot, load
from headrace.core_log.errors import UnknownFormat
from headrace.core_log.ids import ViewId

_FIRST_LINE = b"headrace metadata 1 "

K = TypeVar("K")
V = TypeVar("V")


class _Form(msgspec.Struct):
    cluster: UUID
    version: int
    next_view: int
    vhosts: list[Vhost]
    users: list[User]
    permissions: list[Permission]
    topic_permissions: list[TopicPermission]
    exchanges: list[Exchange]
    queues: list[Queue]
    bindings: list[Binding]
    topics: list[Topic]
    policies: list[Policy]
    vhost_limits: list[VhostLimits]
    user_limits: list[UserLimits]
    nodes: list[Node]
    shards: list[Shard]


def encode_snapshot(snapshot: Snapshot) -> bytes:
    body = msgspec.json.encode(
        _Form(
            snapshot.cluster,
            snapshot.version,
            snapshot.next_view,
            list(snapshot.vhosts.values()),
            list(snapshot.users.values()),
            list(snapshot.permissions.values()),
            list(snapshot.topic_permissions.values()),
            list(snapshot.exchanges.values()),
            list(snapshot.queues.values()),
            list(_bindings(snapshot)),
            list(snapshot.topics.values()),
            [policy for ranked in snapshot.policies.values() for policy in ranked],
            list(snapshot.vhost_limits.values()),
            list(snapshot.user_limits.values()),
            list(snapshot.nodes.values()),
            list(snapshot.shards.values()),
        ),
        enc_hook=encode_table,
    )
    return _FIRST_LINE + xxh3_64_hexdigest(body).encode() + b"\n" + body


def decode_snapshot(data: bytes) -> Snapshot:
    """UnknownFormat for anything but what `encode_snapshot` made."""
    head, _, body = data.partition(b"\n")
    if head != _FIRST_LINE + xxh3_64_hexdigest(body).encode():
        raise UnknownFormat("these are not metadata as this release keeps them, or they are damaged")
    try:
        form = msgspec.json.decode(body, type=_Form, dec_hook=decode_table)
    except msgspec.MsgspecError as error:
        raise UnknownFormat(f"metadata that this release cannot read: {error}") from error
    return load(
        form.cluster,
        Version(form.version),
        ViewId(form.next_view),
        vhosts=form.vhosts,
        users=form.users,
        permissions=form.permissions,
        topic_permissions=form.topic_permissions,
        exchanges=form.exchanges,
        queues=form.queues,
        bindings=form.bindings,
        topics=form.topics,
        policies=form.policies,
        vhost_limits=form.vhost_limits,
        user_limits=form.user_limits,
        nodes=form.nodes,
        shards=form.shards,
    )


def _bindings(snapshot: Snapshot) -> Iterable[Binding]:
    return (binding for found in snapshot.bindings_from.values() for binding in found.values())


def difference(before: Snapshot, after: Snapshot) -> list[Change]:
    """Changes that lead from one to the other, for those who follow changes. What is gone goes first; what was replaced
    by another of its name goes, and comes."""
    gone: list[Change] = []
    come: list[Change] = []

    def left(old: FrozenMap[K, V], new: FrozenMap[K, V]) -> list[V]:
        return [value for key, value in old.items() if key not in new]

    def new_in(old: FrozenMap[K, V], new: FrozenMap[K, V]) -> list[V]:
        return [value for key, value in new.items() if old.get(key) != value]

    # A vhost or user takes along what hangs on it.
    vhosts_gone = {vhost.name for vhost in left(before.vhosts, after.vhosts)}
    users_gone = {user.name for user in left(before.users, after.users)}
    gone += [DeleteVhost(name) for name in sorted(vhosts_gone)]
    gone += [DeleteUser(name) for name in sorted(users_gone)]
    come += [PutVhost(vhost) for vhost in new_in(before.vhosts, after.vhosts)]
    come += [
        PutUser(user)
        for user in after.users.values()
        if (old := before.users.get(user.name)) is None or replace(old, version=user.version) != user
    ]
    come += [PutPermission(right) for right in new_in(before.permissions, after.permissions)]
    come += [PutTopicPermission(right) for right in new_in(before.topic_permissions, after.topic_permissions)]
    gone += [
        DeletePermission(right.user, right.vhost)
        for right in left(before.permissions, after.permissions)
        if right.user not in users_gone and right.vhost not in vhosts_gone
    ]
    gone += [
        DeleteTopicPermission(right.user, right.vhost, right.exchange)
        for right in left(before.topic_permissions, after.topic_permissions)
        if right.user not in users_gone and right.vhost not in vhosts_gone
    ]
    # Another exchange or queue of the same name takes the place of the first, and that one's bindings went with it.
    exchanges_gone = {
        key
        for key, exchange in before.exchanges.items()
        if key[0] not in vhosts_gone and after.exchanges.get(key) != exchange
    }
    queues_gone = {
        key for key, queue in before.queues.items() if key[0] not in vhosts_gone and after.queues.get(key) != queue
    }
    kept_after = {(binding.vhost, binding.key): binding for binding in _bindings(after)}
    still: set[object] = set()
    for binding in _bindings(before):
        if binding.vhost in vhosts_gone:
            continue
        ends_gone = (
            (binding.vhost, binding.source) in exchanges_gone
            or (binding.destination_kind == "queue" and (binding.vhost, binding.destination) in queues_gone)
            or (binding.destination_kind == "exchange" and (binding.vhost, binding.destination) in exchanges_gone)
        )
        if (binding.vhost, binding.key) not in kept_after and not ends_gone:
            gone.append(DeleteBinding(binding))
        elif not ends_gone:
            still.add((binding.vhost, binding.key))
    gone += [DeleteQueue(*key, before.queues[key].view) for key in sorted(queues_gone)]
    gone += [DeleteExchange(*key, before.exchanges[key].stream) for key in sorted(exchanges_gone)]
    come += [PutExchange(exchange) for exchange in new_in(before.exchanges, after.exchanges)]
    come += [PutQueue(queue) for queue in new_in(before.queues, after.queues)]
    come += [PutBinding(binding) for key, binding in kept_after.items() if key not in still]
    for topic_key, topic in before.topics.items():
        now = after.topics.get(topic_key)
        shrunk = now is not None and now.partition_count < topic.partition_count
        if topic_key[0] not in vhosts_gone and (now is None or now.stream != topic.stream or shrunk):
            gone.append(DeleteTopic(*topic_key, topic.stream))
    come += [PutTopic(topic) for topic in new_in(before.topics, after.topics)]
    for vhost, ranked in before.policies.items():
        names = {policy.name for policy in after.policies.get(vhost, ())}
        gone += [
            DeletePolicy(vhost, policy.name)
            for policy in ranked
            if vhost not in vhosts_gone and policy.name not in names
        ]
    come += [
        PutPolicy(policy)
        for ranked in after.policies.values()
        for policy in ranked
        if before.policy(policy.vhost, policy.name) != policy
    ]
    gone += [
        DeleteVhostLimits(limits.vhost)
        for limits in left(before.vhost_limits, after.vhost_limits)
        if limits.vhost not in vhosts_gone
    ]
    gone += [
        DeleteUserLimits(limits.user)
        for limits in left(before.user_limits, after.user_limits)
        if limits.user not in users_gone
    ]
    come += [PutVhostLimits(limits) for limits in new_in(before.vhost_limits, after.vhost_limits)]
    come += [PutUserLimits(limits) for limits in new_in(before.user_limits, after.user_limits)]
    come += [PutNode(node) for node in new_in(before.nodes, after.nodes)]
    come += [PutShard(shard) for shard in new_in(before.shards, after.shards)]
    # After the shards, which may have been there.
    come += [DeleteNode(node.id) for node in left(before.nodes, after.nodes)]
    return gone + come
