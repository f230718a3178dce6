"""Random metadata for property tests: few names, so that changes meet each other."""

from uuid import UUID

from hypothesis import strategies as st

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
    Vhost,
    VhostLimits,
)
from headrace.controller.table import Table
from headrace.core_log.ids import StreamId, ViewId
from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Copy, RowVersion

vhosts = st.sampled_from(["/", "two"])
users = st.sampled_from(["ann", "bob"])
exchange_names = st.sampled_from(["", "amq.topic", "e"])
queue_names = st.sampled_from(["q", "p", "Ünï"])
patterns = st.sampled_from(["", ".*", "^a", r"^(?!amq\.)"])
streams = st.integers(0, 1).map(lambda number: StreamId(UUID(int=number)))
views = st.integers(1, 3).map(ViewId)
limits = st.none() | st.integers(0, 3)
tables = st.sampled_from([Table(), Table({"x-max-length": 3}), Table({"x": [1, b"\xff", {"y": None}]})])
definitions = st.sampled_from([Table({"max-length": 3}), Table({"message-ttl": 5, "overflow": "drop-head"})])

# Enough of everything that a delete has something to take along. Streams and views are those the strategies draw.
RICH: list[Change] = [
    *(PutVhost(Vhost(vhost)) for vhost in ("/", "two")),
    *(PutUser(User(user, "$h", ("a",))) for user in ("ann", "bob")),
    *(PutPermission(Permission(user, vhost, "", "^a", ".*")) for user in ("ann", "bob") for vhost in ("/", "two")),
    PutTopicPermission(TopicPermission("ann", "/", "e", ".*", ".*")),
    PutTopicPermission(TopicPermission("bob", "two", "e", ".*", ".*")),
    *(
        PutExchange(Exchange(vhost, name, "topic", StreamId(UUID(int=0))))
        for vhost in ("/", "two")
        for name in ("amq.topic", "e")
    ),
    PutQueue(Queue("/", "q", ViewId(1), StreamId(UUID(int=0)))),
    PutQueue(Queue("two", "q", ViewId(2), StreamId(UUID(int=1)))),
    PutQueue(Queue("/", "p", ViewId(3), StreamId(UUID(int=0)))),
    *(
        PutBinding(Binding(vhost, source, DestinationKind.QUEUE, "q", "a.b", arguments))
        for vhost in ("/", "two")
        for source in ("amq.topic", "e")
        for arguments in (Table(), Table({"x-max-length": 3}))
    ),
    PutBinding(Binding("/", "e", DestinationKind.EXCHANGE, "amq.topic", "")),
    PutBinding(Binding("/", "amq.topic", DestinationKind.EXCHANGE, "e", "")),
    *(PutTopic(Topic(vhost, "t", StreamId(UUID(int=0)), 2)) for vhost in ("/", "two")),
    *(PutPolicy(Policy(vhost, name, ".*", Table({"expires": 1}))) for vhost in ("/", "two") for name in ("p1", "p2")),
    *(PutVhostLimits(VhostLimits(vhost, 1, 9)) for vhost in ("/", "two")),
    *(PutUserLimits(UserLimits(user, 1, 2)) for user in ("ann", "bob")),
    PutNode(Node(1, 1, UUID(int=1), endpoints=(("peer", Endpoint("h", 1)),))),
    PutShard(Shard(0, Assignment((1,), 1, 1, 1, (Copy(1, UUID(int=1)),), RowVersion(1, Ballot(1, 1)), 1))),
]

disks = st.integers(0, 2).map(lambda number: UUID(int=number))
node_ids = st.integers(1, 3)
ballots = st.builds(Ballot, st.integers(0, 3), st.integers(0, 2**40))
copies = st.lists(st.builds(Copy, node_ids, disks), max_size=2).map(tuple)
assignments = st.builds(
    Assignment,
    replicas=st.sampled_from([(1,), (2, 1), (3, 1, 2)]),
    leader=st.just(NOBODY) | node_ids,
    leader_incarnation=st.integers(0, 2**40),
    epoch=st.integers(0, 2**40),
    isr=copies,
    version=st.builds(RowVersion, st.integers(0, 9), ballots),
    min_isr=st.just(1),
    eligible=copies,
)
nodes = st.builds(
    Node,
    node_ids,
    st.integers(0, 2**40),
    disks,
    st.sampled_from(NodeState),
    st.sampled_from([(), (("peer", Endpoint("::1", 7000)), ("amqp", Endpoint("host", 5672)))]),
    st.booleans(),
)
shards = st.builds(Shard, st.integers(0, 2), assignments, st.sampled_from([(), (2, 3)]), st.integers(0, 2**40))

bindings = st.builds(
    Binding,
    vhost=vhosts,
    source=exchange_names,
    destination_kind=st.sampled_from(DestinationKind),
    destination=queue_names | exchange_names,
    routing_key=st.sampled_from(["", "a.b"]),
    arguments=tables,
)
changes: st.SearchStrategy[Change] = st.one_of(
    st.builds(PutVhost, st.builds(Vhost, vhosts, st.integers(0, 2))),
    st.builds(DeleteVhost, vhosts),
    st.builds(
        PutUser,
        st.builds(User, users, st.sampled_from(["", "$h"]), st.sampled_from([(), ("b", "a")])),
        st.none() | st.integers(0, 3),
    ),
    st.builds(DeleteUser, users),
    st.builds(PutPermission, st.builds(Permission, users, vhosts, patterns, patterns, patterns)),
    st.builds(DeletePermission, users, vhosts),
    st.builds(PutTopicPermission, st.builds(TopicPermission, users, vhosts, exchange_names, patterns, patterns)),
    st.builds(DeleteTopicPermission, users, vhosts, exchange_names),
    st.builds(
        PutExchange,
        st.builds(
            Exchange,
            vhosts,
            exchange_names,
            st.sampled_from(["topic", "direct"]),
            streams,
            st.booleans(),
            st.booleans(),
            tables,
        ),
    ),
    st.builds(DeleteExchange, vhosts, exchange_names, streams, st.booleans()),
    st.builds(PutQueue, st.builds(Queue, vhosts, queue_names, views, streams, users, st.booleans(), tables)),
    st.builds(DeleteQueue, vhosts, queue_names, views),
    st.builds(PutBinding, bindings),
    st.builds(DeleteBinding, bindings),
    st.builds(PutTopic, st.builds(Topic, vhosts, st.sampled_from(["t", "u"]), streams, st.integers(1, 3), tables)),
    st.builds(DeleteTopic, vhosts, st.sampled_from(["t", "u"]), streams),
    st.builds(
        PutPolicy,
        st.builds(
            Policy,
            vhosts,
            st.sampled_from(["p1", "p2"]),
            patterns,
            definitions,
            st.sampled_from(ApplyTo),
            st.integers(-1, 2),
        ),
    ),
    st.builds(DeletePolicy, vhosts, st.sampled_from(["p1", "p2"])),
    st.builds(PutVhostLimits, st.builds(VhostLimits, vhosts, limits, limits)),
    st.builds(DeleteVhostLimits, vhosts),
    st.builds(PutUserLimits, st.builds(UserLimits, users, limits, limits)),
    st.builds(DeleteUserLimits, users),
    st.builds(ReserveViews, views, st.integers(0, 3)),
    st.builds(PutNode, nodes),
    st.builds(DeleteNode, node_ids),
    st.builds(PutShard, shards),
)
