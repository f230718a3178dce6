"""All durable metadata at one version, as the data plane reads it. Value; applying changes to it is a machine.

A snapshot never changes; `apply` gives the next one, which shares all that did not change (frozenmap.py): one declare
among 100,000 bindings copies a few hundred references. Hold on to a snapshot for as long as one decision lasts, and
take the current one for the next decision.

`apply` is also where the rules stand: a change that does not fit the snapshot raises a refusal (errors.py) and leaves
nothing behind. Whatever it accepts, the store can take; a property test holds memory and database together.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, assert_never
from uuid import UUID

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
    ReserveViews,
)
from headrace.controller.entities import (
    Binding,
    BindingKey,
    DestinationKind,
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
from headrace.controller.errors import AlreadyExists, Changed, InUse, Invalid, LimitReached, NotFound
from headrace.controller.frozenmap import FrozenMap
from headrace.controller.patterns import compile_pattern
from headrace.controller.policies import Resource, check_definition, effective_policy
from headrace.core_log.ids import ViewId

K = TypeVar("K")
V = TypeVar("V")

Bindings = FrozenMap[BindingKey, Binding]
_NO_BINDINGS: Bindings = FrozenMap()


@dataclass(frozen=True, slots=True)
class Snapshot:
    cluster: UUID
    version: Version
    # The lowest view id that no queue has ever had. Invariant: above every queue's view.
    next_view: ViewId
    vhosts: FrozenMap[str, Vhost]
    users: FrozenMap[str, User]
    # By (user, vhost) and (user, vhost, exchange).
    permissions: FrozenMap[tuple[str, str], Permission]
    topic_permissions: FrozenMap[tuple[str, str, str], TopicPermission]
    # By (vhost, name).
    exchanges: FrozenMap[tuple[str, str], Exchange]
    queues: FrozenMap[tuple[str, str], Queue]
    # The same queues by view id, and how many a vhost has.
    views: FrozenMap[ViewId, Queue]
    queue_counts: FrozenMap[str, int]
    # The same bindings twice: by (vhost, source) and by (vhost, kind of destination, destination). No empty entries.
    bindings_from: FrozenMap[tuple[str, str], Bindings]
    bindings_to: FrozenMap[tuple[str, DestinationKind, str], Bindings]
    # By (vhost, name).
    topics: FrozenMap[tuple[str, str], Topic]
    # By vhost, highest priority first, then by name. No empty entries.
    policies: FrozenMap[str, tuple[Policy, ...]]
    vhost_limits: FrozenMap[str, VhostLimits]
    user_limits: FrozenMap[str, UserLimits]
    # Of a cluster, by number.
    nodes: FrozenMap[int, Node]
    shards: FrozenMap[int, Shard]

    def bindings_of(self, vhost: str, source: str) -> Bindings:
        """What is bound from the exchange `source`."""
        return self.bindings_from.get((vhost, source), _NO_BINDINGS)

    def bindings_into(self, vhost: str, kind: DestinationKind, destination: str) -> Bindings:
        return self.bindings_to.get((vhost, kind, destination), _NO_BINDINGS)

    def policy(self, vhost: str, name: str) -> Policy | None:
        return next((policy for policy in self.policies.get(vhost, ()) if policy.name == name), None)

    def effective_policy(self, vhost: str, name: str, resource: Resource) -> Policy | None:
        """The one policy that applies to the exchange or queue, or None. Costs a match per policy of the vhost: keep
        the answer, and ask again when a policy of the vhost changes."""
        return effective_policy(self.policies.get(vhost, ()), name, resource)


def load(
    cluster: UUID,
    version: Version,
    next_view: ViewId,
    *,
    vhosts: Iterable[Vhost] = (),
    users: Iterable[User] = (),
    permissions: Iterable[Permission] = (),
    topic_permissions: Iterable[TopicPermission] = (),
    exchanges: Iterable[Exchange] = (),
    queues: Iterable[Queue] = (),
    bindings: Iterable[Binding] = (),
    topics: Iterable[Topic] = (),
    policies: Iterable[Policy] = (),
    vhost_limits: Iterable[VhostLimits] = (),
    user_limits: Iterable[UserLimits] = (),
    nodes: Iterable[Node] = (),
    shards: Iterable[Shard] = (),
) -> Snapshot:
    """A snapshot of what a store has kept, taken as it is; with nothing, an empty one."""
    bindings_from: dict[tuple[str, str], dict[BindingKey, Binding]] = {}
    bindings_to: dict[tuple[str, DestinationKind, str], dict[BindingKey, Binding]] = {}
    for binding in bindings:
        bindings_from.setdefault((binding.vhost, binding.source), {})[binding.key] = binding
        bindings_to.setdefault(_destination(binding), {})[binding.key] = binding
    by_vhost: dict[str, list[Policy]] = {}
    for policy in policies:
        by_vhost.setdefault(policy.vhost, []).append(policy)
    queue_list = list(queues)
    queue_counts: dict[str, int] = {}
    for queue in queue_list:
        queue_counts[queue.vhost] = queue_counts.get(queue.vhost, 0) + 1
    return Snapshot(
        cluster=cluster,
        version=version,
        next_view=next_view,
        vhosts=FrozenMap((vhost.name, vhost) for vhost in vhosts),
        users=FrozenMap((user.name, user) for user in users),
        permissions=FrozenMap(((right.user, right.vhost), right) for right in permissions),
        topic_permissions=FrozenMap(((right.user, right.vhost, right.exchange), right) for right in topic_permissions),
        exchanges=FrozenMap(((exchange.vhost, exchange.name), exchange) for exchange in exchanges),
        queues=FrozenMap(((queue.vhost, queue.name), queue) for queue in queue_list),
        views=FrozenMap((queue.view, queue) for queue in queue_list),
        queue_counts=FrozenMap(queue_counts),
        bindings_from=FrozenMap((source, FrozenMap(found)) for source, found in bindings_from.items()),
        bindings_to=FrozenMap((destination, FrozenMap(found)) for destination, found in bindings_to.items()),
        topics=FrozenMap(((topic.vhost, topic.name), topic) for topic in topics),
        policies=FrozenMap((vhost, _ranked(found)) for vhost, found in by_vhost.items()),
        vhost_limits=FrozenMap((limits.vhost, limits) for limits in vhost_limits),
        user_limits=FrozenMap((limits.user, limits) for limits in user_limits),
        nodes=FrozenMap((node.id, node) for node in nodes),
        shards=FrozenMap((shard.number, shard) for shard in shards),
    )


def apply(snapshot: Snapshot, changes: Sequence[Change], version: Version | None = None) -> Snapshot:
    """The snapshot after `changes`, all of them in one `version` (the next one unless given), or a refusal."""
    snapshot = replace(snapshot, version=Version(snapshot.version + 1) if version is None else version)
    for change in changes:
        snapshot = _apply(snapshot, change)
    return snapshot


def _apply(snapshot: Snapshot, change: Change) -> Snapshot:
    match change:
        case PutVhost(vhost):
            return replace(snapshot, vhosts=snapshot.vhosts.put(vhost.name, vhost))
        case DeleteVhost(name):
            return _delete_vhost(snapshot, name)
        case PutUser(user, if_version):
            existing = snapshot.users.get(user.name)
            if if_version is not None and (existing is None or existing.version != if_version):
                raise Changed(f"user '{user.name}' has changed meanwhile")
            stamped = replace(user, version=snapshot.version)
            return replace(snapshot, users=snapshot.users.put(user.name, stamped))
        case DeleteUser(name):
            return _delete_user(snapshot, name)
        case PutPermission(right):
            _check_vhost(snapshot, right.vhost)
            for pattern in (right.configure, right.write, right.read):
                compile_pattern(pattern)
            snapshot = _stamp(snapshot, right.user)
            return replace(snapshot, permissions=snapshot.permissions.put((right.user, right.vhost), right))
        case DeletePermission(user, vhost):
            if (user, vhost) not in snapshot.permissions:
                raise NotFound(f"user '{user}' has no permissions in vhost '{vhost}'")
            snapshot = _stamp(snapshot, user)
            return replace(snapshot, permissions=snapshot.permissions.drop((user, vhost)))
        case PutTopicPermission(right):
            _check_vhost(snapshot, right.vhost)
            for pattern in (right.write, right.read):
                compile_pattern(pattern)
            snapshot = _stamp(snapshot, right.user)
            key = (right.user, right.vhost, right.exchange)
            return replace(snapshot, topic_permissions=snapshot.topic_permissions.put(key, right))
        case DeleteTopicPermission(user, vhost, exchange):
            if (user, vhost, exchange) not in snapshot.topic_permissions:
                raise NotFound(f"user '{user}' has no topic permissions for exchange '{exchange}' in vhost '{vhost}'")
            snapshot = _stamp(snapshot, user)
            return replace(snapshot, topic_permissions=snapshot.topic_permissions.drop((user, vhost, exchange)))
        case PutExchange(exchange):
            return _put_exchange(snapshot, exchange)
        case DeleteExchange():
            return _delete_exchange(snapshot, change)
        case PutQueue(queue):
            return _put_queue(snapshot, queue)
        case DeleteQueue():
            return _delete_queue(snapshot, change)
        case PutBinding(binding):
            return _put_binding(snapshot, binding)
        case DeleteBinding(binding):
            if binding.key not in snapshot.bindings_of(binding.vhost, binding.source):
                raise NotFound(
                    f"no such binding from exchange '{binding.source}' to {binding.destination_kind} "
                    f"'{binding.destination}' in vhost '{binding.vhost}'"
                )
            return _drop_bindings(snapshot, [binding])
        case PutTopic(topic):
            return _put_topic(snapshot, topic)
        case DeleteTopic(vhost, name, stream):
            existing_topic = snapshot.topics.get((vhost, name))
            if existing_topic is None or existing_topic.stream != stream:
                raise NotFound(f"no topic '{name}' in vhost '{vhost}'")
            return replace(snapshot, topics=snapshot.topics.drop((vhost, name)))
        case PutPolicy(policy):
            _check_vhost(snapshot, policy.vhost)
            compile_pattern(policy.pattern)
            check_definition(policy.definition)
            if not -(2**31) <= policy.priority < 2**31:
                raise Invalid(f"{policy.priority} is not a policy's priority")
            others = [other for other in snapshot.policies.get(policy.vhost, ()) if other.name != policy.name]
            ranked = _ranked([*others, policy])
            return replace(snapshot, policies=snapshot.policies.put(policy.vhost, ranked))
        case DeletePolicy(vhost, name):
            if snapshot.policy(vhost, name) is None:
                raise NotFound(f"no policy '{name}' in vhost '{vhost}'")
            left = tuple(policy for policy in snapshot.policies[vhost] if policy.name != name)
            return replace(snapshot, policies=_put_or_drop(snapshot.policies, vhost, left))
        case PutVhostLimits(limits):
            _check_vhost(snapshot, limits.vhost)
            return replace(snapshot, vhost_limits=snapshot.vhost_limits.put(limits.vhost, limits))
        case DeleteVhostLimits(vhost):
            if vhost not in snapshot.vhost_limits:
                raise NotFound(f"vhost '{vhost}' has no limits")
            return replace(snapshot, vhost_limits=snapshot.vhost_limits.drop(vhost))
        case PutUserLimits(limits):
            _check_user(snapshot, limits.user)
            return replace(snapshot, user_limits=snapshot.user_limits.put(limits.user, limits))
        case DeleteUserLimits(user):
            if user not in snapshot.user_limits:
                raise NotFound(f"user '{user}' has no limits")
            return replace(snapshot, user_limits=snapshot.user_limits.drop(user))
        case ReserveViews(first, count):
            if first != snapshot.next_view:
                raise Changed(f"the next view is {snapshot.next_view} by now, and no longer {first}")
            if count < 1:
                raise Invalid(f"{count} views cannot be reserved")
            return replace(snapshot, next_view=ViewId(first + count))
        case PutNode(node):
            return replace(snapshot, nodes=snapshot.nodes.put(node.id, node))
        case DeleteNode(number):
            return _delete_node(snapshot, number)
        case PutShard(shard):
            return replace(snapshot, shards=snapshot.shards.put(shard.number, shard))
        case _:
            assert_never(change)


def _check_vhost(snapshot: Snapshot, name: str) -> None:
    if name not in snapshot.vhosts:
        raise NotFound(f"no vhost '{name}'")


def _check_user(snapshot: Snapshot, name: str) -> None:
    if name not in snapshot.users:
        raise NotFound(f"no user '{name}'")


def _stamp(snapshot: Snapshot, *names: str) -> Snapshot:
    """Their rights have changed: what is cached about them is no longer good."""
    for name in names:
        _check_user(snapshot, name)
    stamped = {name: replace(snapshot.users[name], version=snapshot.version) for name in names}
    return replace(snapshot, users=snapshot.users.changed(stamped))


def _delete_vhost(snapshot: Snapshot, name: str) -> Snapshot:
    _check_vhost(snapshot, name)
    users = {key[0] for key in snapshot.permissions if key[1] == name}
    users |= {key[0] for key in snapshot.topic_permissions if key[1] == name}
    snapshot = _stamp(snapshot, *sorted(users))
    queues = [queue for queue in snapshot.queues.values() if queue.vhost == name]
    return replace(
        snapshot,
        vhosts=snapshot.vhosts.drop(name),
        permissions=snapshot.permissions.drop(*(key for key in snapshot.permissions if key[1] == name)),
        topic_permissions=snapshot.topic_permissions.drop(
            *(key for key in snapshot.topic_permissions if key[1] == name)
        ),
        exchanges=snapshot.exchanges.drop(*(key for key in snapshot.exchanges if key[0] == name)),
        queues=snapshot.queues.drop(*((name, queue.name) for queue in queues)),
        views=snapshot.views.drop(*(queue.view for queue in queues)),
        queue_counts=snapshot.queue_counts.drop(name),
        bindings_from=snapshot.bindings_from.drop(*(key for key in snapshot.bindings_from if key[0] == name)),
        bindings_to=snapshot.bindings_to.drop(*(key for key in snapshot.bindings_to if key[0] == name)),
        topics=snapshot.topics.drop(*(key for key in snapshot.topics if key[0] == name)),
        policies=snapshot.policies.drop(name),
        vhost_limits=snapshot.vhost_limits.drop(name),
    )


def _delete_user(snapshot: Snapshot, name: str) -> Snapshot:
    _check_user(snapshot, name)
    return replace(
        snapshot,
        users=snapshot.users.drop(name),
        permissions=snapshot.permissions.drop(*(key for key in snapshot.permissions if key[0] == name)),
        topic_permissions=snapshot.topic_permissions.drop(
            *(key for key in snapshot.topic_permissions if key[0] == name)
        ),
        user_limits=snapshot.user_limits.drop(name),
    )


def _delete_node(snapshot: Snapshot, number: int) -> Snapshot:
    if number not in snapshot.nodes:
        raise NotFound(f"no node {number}")
    for shard in snapshot.shards.values():
        if number in shard.assignment.replicas or number in shard.target:
            raise InUse(f"node {number} has a replica of shard {shard.number}: drain it first")
    return replace(snapshot, nodes=snapshot.nodes.drop(number))


def _put_exchange(snapshot: Snapshot, exchange: Exchange) -> Snapshot:
    _check_vhost(snapshot, exchange.vhost)
    existing = snapshot.exchanges.get((exchange.vhost, exchange.name))
    if existing == exchange:
        return snapshot
    if existing is not None:
        raise AlreadyExists(f"exchange '{exchange.name}' in vhost '{exchange.vhost}' exists already")
    return replace(snapshot, exchanges=snapshot.exchanges.put((exchange.vhost, exchange.name), exchange))


def _delete_exchange(snapshot: Snapshot, change: DeleteExchange) -> Snapshot:
    vhost, name = change.vhost, change.name
    existing = snapshot.exchanges.get((vhost, name))
    if existing is None or existing.stream != change.stream:
        raise NotFound(f"no exchange '{name}' in vhost '{vhost}'")
    leaving = snapshot.bindings_of(vhost, name)
    if change.if_unused and leaving:
        raise InUse(f"exchange '{name}' in vhost '{vhost}' in use")
    arriving = snapshot.bindings_into(vhost, DestinationKind.EXCHANGE, name)
    snapshot = _drop_bindings(snapshot, [*leaving.values(), *arriving.values()])
    return replace(snapshot, exchanges=snapshot.exchanges.drop((vhost, name)))


def _put_queue(snapshot: Snapshot, queue: Queue) -> Snapshot:
    _check_vhost(snapshot, queue.vhost)
    existing = snapshot.queues.get((queue.vhost, queue.name))
    if existing == queue:
        return snapshot
    if existing is not None:
        raise AlreadyExists(f"queue '{queue.name}' in vhost '{queue.vhost}' exists already")
    if queue.view < 1 or queue.view in snapshot.views:
        raise Invalid(f"view {queue.view} cannot be given to queue '{queue.name}': it is another queue's or none")
    count = snapshot.queue_counts.get(queue.vhost, 0)
    limits = snapshot.vhost_limits.get(queue.vhost)
    if limits is not None and limits.queues_max is not None and count >= limits.queues_max:
        raise LimitReached(
            f"cannot declare queue '{queue.name}': vhost '{queue.vhost}' has reached its limit of {limits.queues_max}"
        )
    return replace(
        snapshot,
        next_view=ViewId(max(snapshot.next_view, queue.view + 1)),
        queues=snapshot.queues.put((queue.vhost, queue.name), queue),
        views=snapshot.views.put(queue.view, queue),
        queue_counts=snapshot.queue_counts.put(queue.vhost, count + 1),
    )


def _delete_queue(snapshot: Snapshot, change: DeleteQueue) -> Snapshot:
    vhost, name = change.vhost, change.name
    existing = snapshot.queues.get((vhost, name))
    if existing is None or existing.view != change.view:
        raise NotFound(f"no queue '{name}' in vhost '{vhost}'")
    arriving = snapshot.bindings_into(vhost, DestinationKind.QUEUE, name)
    snapshot = _drop_bindings(snapshot, list(arriving.values()))
    left = snapshot.queue_counts[vhost] - 1
    return replace(
        snapshot,
        queues=snapshot.queues.drop((vhost, name)),
        views=snapshot.views.drop(change.view),
        queue_counts=_put_or_drop(snapshot.queue_counts, vhost, left),
    )


def _put_binding(snapshot: Snapshot, binding: Binding) -> Snapshot:
    _check_vhost(snapshot, binding.vhost)
    if (binding.vhost, binding.source) not in snapshot.exchanges:
        raise NotFound(f"no exchange '{binding.source}' in vhost '{binding.vhost}'")
    destinations = snapshot.queues if binding.destination_kind is DestinationKind.QUEUE else snapshot.exchanges
    if (binding.vhost, binding.destination) not in destinations:
        raise NotFound(f"no {binding.destination_kind} '{binding.destination}' in vhost '{binding.vhost}'")
    source = (binding.vhost, binding.source)
    destination = _destination(binding)
    leaving = snapshot.bindings_from.get(source, _NO_BINDINGS)
    if binding.key in leaving:
        return snapshot
    arriving = snapshot.bindings_to.get(destination, _NO_BINDINGS)
    return replace(
        snapshot,
        bindings_from=snapshot.bindings_from.put(source, leaving.put(binding.key, binding)),
        bindings_to=snapshot.bindings_to.put(destination, arriving.put(binding.key, binding)),
    )


def _put_topic(snapshot: Snapshot, topic: Topic) -> Snapshot:
    _check_vhost(snapshot, topic.vhost)
    existing = snapshot.topics.get((topic.vhost, topic.name))
    if existing is not None and existing.stream != topic.stream:
        raise AlreadyExists(f"topic '{topic.name}' in vhost '{topic.vhost}' exists already")
    if existing is not None and topic.partition_count < existing.partition_count:
        raise Invalid(
            f"topic '{topic.name}' has {existing.partition_count} partitions, and cannot have {topic.partition_count}: "
            "records lie where they were written"
        )
    return replace(snapshot, topics=snapshot.topics.put((topic.vhost, topic.name), topic))


def _drop_bindings(snapshot: Snapshot, bindings: Sequence[Binding]) -> Snapshot:
    """All at once: each map of bindings that is touched is copied once, however many go."""
    sources: dict[tuple[str, str], list[BindingKey]] = {}
    destinations: dict[tuple[str, DestinationKind, str], list[BindingKey]] = {}
    for binding in bindings:
        sources.setdefault((binding.vhost, binding.source), []).append(binding.key)
        destinations.setdefault(_destination(binding), []).append(binding.key)
    bindings_from = snapshot.bindings_from
    for source, keys in sources.items():
        bindings_from = _put_or_drop(bindings_from, source, bindings_from[source].drop(*keys))
    bindings_to = snapshot.bindings_to
    for destination, keys in destinations.items():
        bindings_to = _put_or_drop(bindings_to, destination, bindings_to[destination].drop(*keys))
    return replace(snapshot, bindings_from=bindings_from, bindings_to=bindings_to)


def _put_or_drop(entries: FrozenMap[K, V], key: K, value: V) -> FrozenMap[K, V]:
    """No entry for nothing: an empty collection or a count of zero is not kept."""
    return entries.put(key, value) if value else entries.drop(key)


def _destination(binding: Binding) -> tuple[str, DestinationKind, str]:
    return (binding.vhost, binding.destination_kind, binding.destination)


def _ranked(policies: Iterable[Policy]) -> tuple[Policy, ...]:
    return tuple(sorted(policies, key=lambda policy: (-policy.priority, policy.name)))
