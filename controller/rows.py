"""Changes as rows, and rows as a snapshot. Driver: Core statements on a connection that the store hands in.

The rules have been applied before (snapshot.py): what comes here fits, so a constraint that still fails is our own
mistake and is loud. Whatever SQLite and PostgreSQL say alike stands here; what they say differently, in store.py.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, cast
from uuid import UUID

import msgspec
from sqlalchemy import ColumnElement, Connection, Executable, Table, and_, delete, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from headrace.controller import table
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
    ApplyTo,
    Binding,
    DestinationKind,
    Endpoint,
    Exchange,
    Node,
    NodeState,
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
from headrace.controller.models import (
    Base,
    BindingRow,
    ClusterRow,
    ExchangeRow,
    NodeRow,
    PermissionRow,
    PolicyRow,
    QueueRow,
    ShardRow,
    TopicPermissionRow,
    TopicRow,
    UserLimitsRow,
    UserRow,
    VhostLimitsRow,
    VhostRow,
)
from headrace.controller.snapshot import Snapshot, load
from headrace.core_log.ids import StreamId, ViewId
from headrace.core_log.replication.assignment import Assignment

_INSERT: Mapping[str, Callable[[Table], sqlite.Insert | postgresql.Insert]] = {
    "sqlite": sqlite.insert,
    "postgresql": postgresql.insert,
}
_Row = dict[str, Any]


def write(connection: Connection, version: Version, changes: Sequence[Change]) -> None:
    """All of `changes`, in their order, as part of `version`."""
    for kind, run in groupby(changes, key=type):
        if kind in _PUT_INTO:
            # A run of the same kind is one statement with many rows.
            rows = [_row(change, version) for change in run]
            connection.execute(_upsert(connection, _PUT_INTO[kind]), rows)
            if kind in (PutPermission, PutTopicPermission):
                _stamp(connection, version, UserRow.name.in_({row["user"] for row in rows}))
            if kind is PutQueue:
                _raise_next_view(connection, 1 + max(row["view_id"] for row in rows))
        else:
            for change in run:
                _perform(connection, version, change)


_PUT_INTO: Mapping[type[Change], type[Base]] = {
    PutVhost: VhostRow,
    PutUser: UserRow,
    PutPermission: PermissionRow,
    PutTopicPermission: TopicPermissionRow,
    PutExchange: ExchangeRow,
    PutQueue: QueueRow,
    PutBinding: BindingRow,
    PutTopic: TopicRow,
    PutPolicy: PolicyRow,
    PutVhostLimits: VhostLimitsRow,
    PutUserLimits: UserLimitsRow,
    PutNode: NodeRow,
    PutShard: ShardRow,
}


def _upsert(connection: Connection, model: type[Base]) -> Executable:
    target = cast(Table, model.__table__)
    statement = _INSERT[connection.dialect.name](target)
    keys = [column.name for column in target.primary_key]
    rest = {column.name: statement.excluded[column.name] for column in target.columns if column.name not in keys}
    if not rest:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=rest)


def _row(change: Change, version: Version) -> _Row:
    match change:
        case PutVhost(vhost):
            return {"name": vhost.name, "shard": vhost.shard}
        case PutUser(user):
            return {
                "name": user.name,
                "password_hash": user.password_hash,
                "tags": _json(user.tags),
                "version": version,
                "scram": user.scram or None,
            }
        case PutPermission(right):
            return {
                "user": right.user,
                "vhost": right.vhost,
                "configure": right.configure,
                "write": right.write,
                "read": right.read,
            }
        case PutTopicPermission(right):
            return {
                "user": right.user,
                "vhost": right.vhost,
                "exchange": right.exchange,
                "write": right.write,
                "read": right.read,
            }
        case PutExchange(exchange):
            return {
                "vhost": exchange.vhost,
                "name": exchange.name,
                "kind": exchange.kind,
                "stream_uuid": str(exchange.stream),
                "auto_delete": exchange.auto_delete,
                "internal": exchange.internal,
                "arguments": exchange.arguments.text,
            }
        case PutQueue(queue):
            return {
                "vhost": queue.vhost,
                "name": queue.name,
                "view_id": queue.view,
                "stream_uuid": str(queue.stream),
                "owner": queue.owner,
                "auto_delete": queue.auto_delete,
                "arguments": queue.arguments.text,
            }
        case PutBinding(binding):
            return {
                "vhost": binding.vhost,
                "source": binding.source,
                "destination_kind": binding.destination_kind.value,
                "destination": binding.destination,
                "routing_key": binding.routing_key,
                "arguments_digest": binding.arguments.digest,
                "arguments": binding.arguments.text,
            }
        case PutTopic(topic):
            return {
                "vhost": topic.vhost,
                "name": topic.name,
                "stream_uuid": str(topic.stream),
                "partition_count": topic.partition_count,
                "settings": topic.settings.text,
            }
        case PutPolicy(policy):
            return {
                "vhost": policy.vhost,
                "name": policy.name,
                "pattern": policy.pattern,
                "apply_to": policy.apply_to.value,
                "definition": policy.definition.text,
                "priority": policy.priority,
            }
        case PutVhostLimits(limits):
            return {
                "vhost": limits.vhost,
                "connections_max": limits.connections_max,
                "queues_max": limits.queues_max,
            }
        case PutUserLimits(limits):
            return {
                "user": limits.user,
                "connections_max": limits.connections_max,
                "channels_max": limits.channels_max,
            }
        case PutNode(node):
            return {
                "id": node.id,
                "incarnation": node.incarnation,
                "disk_uuid": str(node.disk),
                "state": node.state.value,
                "endpoints": _json(node.endpoints),
                "clean": node.clean,
            }
        case PutShard(shard):
            return {
                "number": shard.number,
                "leader": shard.assignment.leader,
                "epoch": shard.assignment.epoch,
                "assignment": _json(shard.assignment),
                "target": _json(shard.target),
                "forced_epoch": shard.forced_epoch,
            }
        case _:
            raise AssertionError(f"{type(change).__name__} puts no row")


def _perform(connection: Connection, version: Version, change: Change) -> None:
    match change:
        case DeleteVhost(name):
            with_rights = select(PermissionRow.user).where(PermissionRow.vhost == name)
            with_topic_rights = select(TopicPermissionRow.user).where(TopicPermissionRow.vhost == name)
            _stamp(connection, version, or_(UserRow.name.in_(with_rights), UserRow.name.in_(with_topic_rights)))
            # What points at others goes before what is pointed at.
            for model in (
                PermissionRow,
                TopicPermissionRow,
                BindingRow,
                QueueRow,
                ExchangeRow,
                TopicRow,
                PolicyRow,
                VhostLimitsRow,
            ):
                connection.execute(delete(model).where(model.vhost == name))
            connection.execute(delete(VhostRow).where(VhostRow.name == name))
        case DeleteUser(name):
            for owned in (PermissionRow, TopicPermissionRow, UserLimitsRow):
                connection.execute(delete(owned).where(owned.user == name))
            connection.execute(delete(UserRow).where(UserRow.name == name))
        case DeletePermission(user, vhost):
            connection.execute(
                delete(PermissionRow).where(PermissionRow.user == user, PermissionRow.vhost == vhost),
            )
            _stamp(connection, version, UserRow.name == user)
        case DeleteTopicPermission(user, vhost, exchange):
            connection.execute(
                delete(TopicPermissionRow).where(
                    TopicPermissionRow.user == user,
                    TopicPermissionRow.vhost == vhost,
                    TopicPermissionRow.exchange == exchange,
                )
            )
            _stamp(connection, version, UserRow.name == user)
        case DeleteExchange(vhost, name):
            connection.execute(
                delete(BindingRow).where(
                    BindingRow.vhost == vhost,
                    or_(BindingRow.source == name, _is_destination(DestinationKind.EXCHANGE, name)),
                )
            )
            connection.execute(delete(ExchangeRow).where(ExchangeRow.vhost == vhost, ExchangeRow.name == name))
        case DeleteQueue(vhost, name):
            connection.execute(
                delete(BindingRow).where(BindingRow.vhost == vhost, _is_destination(DestinationKind.QUEUE, name))
            )
            connection.execute(delete(QueueRow).where(QueueRow.vhost == vhost, QueueRow.name == name))
        case DeleteBinding(binding):
            connection.execute(
                delete(BindingRow).where(
                    BindingRow.vhost == binding.vhost,
                    BindingRow.source == binding.source,
                    _is_destination(binding.destination_kind, binding.destination),
                    BindingRow.routing_key == binding.routing_key,
                    BindingRow.arguments_digest == binding.arguments.digest,
                )
            )
        case DeleteTopic(vhost, name):
            connection.execute(delete(TopicRow).where(TopicRow.vhost == vhost, TopicRow.name == name))
        case DeletePolicy(vhost, name):
            connection.execute(delete(PolicyRow).where(PolicyRow.vhost == vhost, PolicyRow.name == name))
        case DeleteVhostLimits(vhost):
            connection.execute(delete(VhostLimitsRow).where(VhostLimitsRow.vhost == vhost))
        case DeleteUserLimits(user):
            connection.execute(delete(UserLimitsRow).where(UserLimitsRow.user == user))
        case ReserveViews(first, count):
            _raise_next_view(connection, first + count)
        case DeleteNode(number):
            connection.execute(delete(NodeRow).where(NodeRow.id == number))
        case _:
            raise AssertionError(f"{type(change).__name__} changes no row")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def _is_destination(kind: DestinationKind, name: str) -> ColumnElement[bool]:
    return and_(BindingRow.destination_kind == kind.value, BindingRow.destination == name)


def _stamp(connection: Connection, version: Version, which: ColumnElement[bool]) -> None:
    """The rights of these users have changed with this version."""
    connection.execute(update(UserRow).where(which).values(version=version))


def _raise_next_view(connection: Connection, free: int) -> None:
    connection.execute(
        update(ClusterRow).where(ClusterRow.id == 1, ClusterRow.next_view_id < free).values(next_view_id=free)
    )


def read(connection: Connection) -> Snapshot:
    """All rows, as of the transaction that is open."""
    cluster = connection.execute(select(ClusterRow.__table__)).one()
    # Thousands of queues have the same few argument tables: one object for each.
    tables: dict[str, table.Table] = {}

    def parsed(text: str) -> table.Table:
        known = tables.get(text)
        if known is None:
            known = tables[text] = table.Table.parse(text)
        return known

    def rows(model: type[Base]) -> Sequence[Any]:
        return connection.execute(select(model.__table__)).all()

    return load(
        UUID(cluster.cluster_uuid),
        Version(cluster.metadata_version),
        ViewId(cluster.next_view_id),
        vhosts=[Vhost(row.name, row.shard) for row in rows(VhostRow)],
        users=[
            User(
                row.name,
                row.password_hash,
                msgspec.json.decode(row.tags, type=tuple[str, ...]),
                row.version,
                row.scram or "",
            )
            for row in rows(UserRow)
        ],
        permissions=[
            Permission(row.user, row.vhost, row.configure, row.write, row.read) for row in rows(PermissionRow)
        ],
        topic_permissions=[
            TopicPermission(row.user, row.vhost, row.exchange, row.write, row.read) for row in rows(TopicPermissionRow)
        ],
        exchanges=[
            Exchange(
                row.vhost,
                row.name,
                row.kind,
                StreamId(UUID(row.stream_uuid)),
                row.auto_delete,
                row.internal,
                parsed(row.arguments),
            )
            for row in rows(ExchangeRow)
        ],
        queues=[
            Queue(
                row.vhost,
                row.name,
                ViewId(row.view_id),
                StreamId(UUID(row.stream_uuid)),
                row.owner,
                row.auto_delete,
                parsed(row.arguments),
            )
            for row in rows(QueueRow)
        ],
        bindings=[
            Binding(
                row.vhost,
                row.source,
                DestinationKind(row.destination_kind),
                row.destination,
                row.routing_key,
                parsed(row.arguments),
            )
            for row in rows(BindingRow)
        ],
        topics=[
            Topic(
                row.vhost,
                row.name,
                StreamId(UUID(row.stream_uuid)),
                row.partition_count,
                parsed(row.settings),
            )
            for row in rows(TopicRow)
        ],
        policies=[
            Policy(
                row.vhost,
                row.name,
                row.pattern,
                parsed(row.definition),
                ApplyTo(row.apply_to),
                row.priority,
            )
            for row in rows(PolicyRow)
        ],
        vhost_limits=[VhostLimits(row.vhost, row.connections_max, row.queues_max) for row in rows(VhostLimitsRow)],
        user_limits=[UserLimits(row.user, row.connections_max, row.channels_max) for row in rows(UserLimitsRow)],
        nodes=[
            Node(
                row.id,
                row.incarnation,
                UUID(row.disk_uuid),
                NodeState(row.state),
                msgspec.json.decode(row.endpoints, type=tuple[tuple[str, Endpoint], ...]),
                row.clean,
            )
            for row in rows(NodeRow)
        ],
        shards=[
            Shard(
                row.number,
                msgspec.json.decode(row.assignment, type=Assignment),
                msgspec.json.decode(row.target, type=tuple[int, ...]),
                row.forced_epoch,
            )
            for row in rows(ShardRow)
        ],
    )
