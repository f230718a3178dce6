"""Changes applied to a snapshot: what they do, what they take along, and what they refuse."""

from collections.abc import Sequence
from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.controller.changes import (
    Change,
    DeleteBinding,
    DeleteExchange,
    DeletePermission,
    DeletePolicy,
    DeleteQueue,
    DeleteTopic,
    DeleteUser,
    DeleteVhost,
    PutBinding,
    PutExchange,
    PutPermission,
    PutPolicy,
    PutQueue,
    PutTopic,
    PutTopicPermission,
    PutUser,
    PutUserLimits,
    PutVhost,
    PutVhostLimits,
    create_vhost,
)
from headrace.controller.entities import (
    Binding,
    DestinationKind,
    Exchange,
    Permission,
    Policy,
    Queue,
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
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.controller.table import Table
from headrace.core_log.errors import Refused
from headrace.core_log.ids import StreamId, ViewId

from .strategies import changes

EMPTY = load(UUID(int=9), Version(0), ViewId(1))
QUEUE, EXCHANGE = DestinationKind.QUEUE, DestinationKind.EXCHANGE


def stream(number: int) -> StreamId:
    return StreamId(UUID(int=number))


def queue(name: str, view: int, vhost: str = "/") -> PutQueue:
    return PutQueue(Queue(vhost, name, ViewId(view), stream(100 + view)))


def exchange(name: str, number: int = 1, vhost: str = "/") -> PutExchange:
    return PutExchange(Exchange(vhost, name, "topic", stream(number)))


def bound(source: str, destination: str, key: str = "", kind: DestinationKind = QUEUE) -> Binding:
    return Binding("/", source, kind, destination, key)


SMALL = apply(
    EMPTY,
    [
        PutVhost(Vhost("/")),
        PutUser(User("ann")),
        PutPermission(Permission("ann", "/", ".*", ".*", ".*")),
        exchange("e", 1),
        exchange("f", 2),
        queue("q", 1),
        queue("p", 2),
        PutBinding(bound("e", "q", "a")),
        PutBinding(bound("e", "p", "a")),
        PutBinding(bound("f", "q", "b")),
        PutBinding(bound("e", "f", "c", EXCHANGE)),
    ],
)


def check_invariants(snapshot: Snapshot) -> None:
    by_source = [binding for found in snapshot.bindings_from.values() for binding in found.values()]
    by_destination = [binding for found in snapshot.bindings_to.values() for binding in found.values()]
    assert sorted(by_source, key=lambda b: (b.vhost, *b.key)) == sorted(by_destination, key=lambda b: (b.vhost, *b.key))
    assert all(snapshot.bindings_from.values()) and all(snapshot.bindings_to.values())
    for binding in by_source:
        assert (binding.vhost, binding.source) in snapshot.exchanges
        ends = snapshot.queues if binding.destination_kind is QUEUE else snapshot.exchanges
        assert (binding.vhost, binding.destination) in ends
    assert list(snapshot.views.values()) == sorted(snapshot.queues.values(), key=lambda found: found.view)
    assert all(found.view < snapshot.next_view for found in snapshot.queues.values())
    counts: dict[str, int] = {}
    for vhost, _ in snapshot.queues:
        counts[vhost] = counts.get(vhost, 0) + 1
    assert snapshot.queue_counts == FrozenMap(counts)
    things = [*snapshot.exchanges, *snapshot.queues, *snapshot.topics, *snapshot.bindings_from]
    assert {vhost for vhost, *_ in things} <= set(snapshot.vhosts)
    assert {key[0] for key in (*snapshot.permissions, *snapshot.topic_permissions)} <= set(snapshot.users)
    assert all(user.version <= snapshot.version for user in snapshot.users.values())


@settings(deadline=None)
@given(st.lists(changes, max_size=30))
def test_any_accepted_changes_keep_the_metadata_whole(batch: Sequence[Change]) -> None:
    snapshot = apply(SMALL, [queue("ü", 9)])
    for change in batch:
        before = repr(snapshot)
        try:
            after = apply(snapshot, [change])
        except Refused:
            assert repr(snapshot) == before
            continue
        assert repr(snapshot) == before
        assert after.version == snapshot.version + 1
        assert after.next_view >= snapshot.next_view
        check_invariants(after)
        snapshot = after


def test_many_changes_are_one_version() -> None:
    assert SMALL.version == 1
    assert apply(SMALL, []).version == 2


def test_deleting_a_queue_takes_its_bindings_along() -> None:
    after = apply(SMALL, [DeleteQueue("/", "q", ViewId(1))])
    assert list(after.bindings_of("/", "e").values()) == [bound("e", "f", "c", EXCHANGE), bound("e", "p", "a")]
    assert not after.bindings_of("/", "f")
    assert not after.bindings_into("/", QUEUE, "q")
    assert ViewId(1) not in after.views


def test_deleting_an_exchange_takes_bindings_from_and_to_it_along() -> None:
    after = apply(SMALL, [DeleteExchange("/", "f", stream(2))])
    assert not after.bindings_of("/", "f")
    assert not after.bindings_into("/", EXCHANGE, "f")
    assert list(after.bindings_into("/", QUEUE, "q").values()) == [bound("e", "q", "a")]


def test_exchange_bound_to_itself_can_be_deleted() -> None:
    looped = apply(SMALL, [PutBinding(bound("f", "f", "x", EXCHANGE))])
    check_invariants(apply(looped, [DeleteExchange("/", "f", stream(2))]))


def test_unused_exchange_only() -> None:
    with pytest.raises(InUse):
        apply(SMALL, [DeleteExchange("/", "e", stream(1), if_unused=True)])
    freed = apply(SMALL, [DeleteQueue("/", "q", ViewId(1))])
    assert ("/", "f") not in apply(freed, [DeleteExchange("/", "f", stream(2), if_unused=True)]).exchanges


def test_late_delete_never_hits_a_successor_of_the_same_name() -> None:
    again = apply(SMALL, [DeleteQueue("/", "q", ViewId(1)), queue("q", 7), exchange("g", 3)])
    with pytest.raises(NotFound):
        apply(again, [DeleteQueue("/", "q", ViewId(1))])
    with pytest.raises(NotFound):
        apply(again, [DeleteExchange("/", "g", stream(4))])


def test_x3_second_of_two_racing_declares_is_told_to_look_again() -> None:
    with pytest.raises(AlreadyExists):
        apply(SMALL, [queue("q", 3)])
    with pytest.raises(AlreadyExists):
        apply(SMALL, [exchange("e", 9)])
    assert apply(SMALL, [queue("q", 1), exchange("e", 1)]) == replace(SMALL, version=Version(2))


def test_view_id_of_a_living_queue_is_never_given_again() -> None:
    with pytest.raises(Invalid, match="view 1"):
        apply(SMALL, [queue("new", 1)])


def test_next_view_stays_above_ids_of_deleted_queues() -> None:
    after = apply(SMALL, [queue("new", 40), DeleteQueue("/", "new", ViewId(40))])
    assert after.next_view == 41


def test_deleting_a_vhost_takes_everything_in_it_along_and_leaves_the_rest() -> None:
    two = apply(
        SMALL,
        [
            PutVhost(Vhost("two")),
            exchange("e", 8, "two"),
            queue("q", 8, "two"),
            PutBinding(Binding("two", "e", QUEUE, "q")),
            PutPermission(Permission("ann", "two", "", "", "")),
            PutTopicPermission(TopicPermission("ann", "two", "e", "", "")),
            PutPolicy(Policy("two", "p", "", Table({"expires": 1}))),
            PutVhostLimits(VhostLimits("two", 1, 1)),
        ],
    )
    after = apply(two, [DeleteVhost("two")])
    check_invariants(after)
    assert after.users["ann"].version == after.version
    assert replace(after, version=SMALL.version, next_view=SMALL.next_view, users=SMALL.users) == SMALL


def test_deleting_a_user_takes_its_rights_and_limits_along() -> None:
    rich = apply(
        SMALL,
        [PutTopicPermission(TopicPermission("ann", "/", "e", "", "")), PutUserLimits(UserLimits("ann", 1, 1))],
    )
    after = apply(rich, [DeleteUser("ann")])
    assert not after.users and not after.permissions and not after.topic_permissions and not after.user_limits


def test_user_version_moves_with_every_change_of_its_rights_and_with_no_other() -> None:
    version = SMALL.users["ann"].version
    assert apply(SMALL, [queue("x", 5)]).users["ann"].version == version
    for change in (
        PutUser(User("ann", tags=("t",))),
        PutPermission(Permission("ann", "/", "", "", "")),
        DeletePermission("ann", "/"),
        PutTopicPermission(TopicPermission("ann", "/", "e", "", "")),
    ):
        assert apply(SMALL, [change]).users["ann"].version == SMALL.version + 1


def test_user_put_on_a_version_that_has_passed_is_refused() -> None:
    version = SMALL.users["ann"].version
    changed = apply(SMALL, [PutUser(User("ann", "new password"), if_version=version)])
    with pytest.raises(Changed):
        apply(changed, [PutUser(User("ann", "old password"), if_version=version)])
    with pytest.raises(Changed):
        apply(SMALL, [PutUser(User("bob"), if_version=version)])


def test_new_vhost_is_born_with_its_exchanges() -> None:
    numbers = iter(range(50, 60))
    after = apply(SMALL, create_vhost("new", lambda: stream(next(numbers))))
    kinds = {name: found.kind for (vhost, name), found in after.exchanges.items() if vhost == "new"}
    assert kinds == {
        "": "direct",
        "amq.direct": "direct",
        "amq.fanout": "fanout",
        "amq.topic": "topic",
        "amq.headers": "headers",
        "amq.match": "headers",
    }
    assert len({found.stream for found in after.exchanges.values()}) == len(after.exchanges)


def test_queue_limit_of_a_vhost_holds_at_the_limit_and_one_past_it() -> None:
    limited = apply(SMALL, [PutVhostLimits(VhostLimits("/", queues_max=3))])
    full = apply(limited, [queue("third", 3)])
    with pytest.raises(LimitReached, match="limit"):
        apply(full, [queue("fourth", 4)])
    apply(full, [DeleteQueue("/", "third", ViewId(3)), queue("fourth", 4)])


@pytest.mark.parametrize(
    "change",
    [
        DeleteVhost("none"),
        DeleteUser("none"),
        PutPermission(Permission("none", "/", "", "", "")),
        PutPermission(Permission("ann", "none", "", "", "")),
        DeletePermission("ann", "none"),
        exchange("x", 1, "none"),
        queue("x", 5, "none"),
        PutBinding(bound("none", "q")),
        PutBinding(bound("e", "none")),
        PutBinding(bound("e", "q", "", EXCHANGE)),
        DeleteBinding(bound("e", "q", "other key")),
        PutPolicy(Policy("none", "p", "", Table({"expires": 1}))),
        DeletePolicy("/", "none"),
        PutVhostLimits(VhostLimits("none")),
        PutUserLimits(UserLimits("none")),
    ],
    ids=repr,
)
def test_change_of_what_is_not_there_is_refused(change: Change) -> None:
    with pytest.raises(NotFound):
        apply(SMALL, [change])


@pytest.mark.parametrize(
    "change",
    [
        PutPermission(Permission("ann", "/", "(", "", "")),
        PutPermission(Permission("ann", "/", "", "(", "")),
        PutTopicPermission(TopicPermission("ann", "/", "e", "", "(")),
        PutPolicy(Policy("/", "p", "(", Table({"expires": 1}))),
        PutPolicy(Policy("/", "p", "", Table({"expire": 1}))),
        PutPolicy(Policy("/", "p", "", Table({"expires": 1}), priority=2**31)),
    ],
    ids=repr,
)
def test_bad_pattern_or_setting_is_refused(change: Change) -> None:
    with pytest.raises(Invalid):
        apply(SMALL, [change])


def test_topic_is_changed_by_its_own_stream_and_by_no_other() -> None:
    made = apply(SMALL, [PutTopic(Topic("/", "t", stream(1), 2))])
    kept = apply(made, [PutTopic(Topic("/", "t", stream(1), 3, Table({"x-retention-ms": 5})))])
    assert kept.topics["/", "t"].partition_count == 3
    with pytest.raises(AlreadyExists):
        apply(made, [PutTopic(Topic("/", "t", stream(2), 2))])
    with pytest.raises(NotFound):
        apply(made, [DeleteTopic("/", "t", stream(2))])
    assert not apply(made, [DeleteTopic("/", "t", stream(1))]).topics


def test_topic_does_not_shrink() -> None:
    made = apply(SMALL, [PutTopic(Topic("/", "t", stream(1), 2))])
    with pytest.raises(Invalid, match="has 2 partitions, and cannot have 1"):
        apply(made, [PutTopic(Topic("/", "t", stream(1), 1))])


@pytest.mark.parametrize("count", [0, -1, 1025])
def test_topic_has_a_lawful_number_of_partitions(count: int) -> None:
    with pytest.raises(Invalid):
        Topic("/", "t", stream(1), count)


def test_topics_go_with_their_vhost() -> None:
    made = apply(SMALL, [PutTopic(Topic("/", "t", stream(1)))])
    assert not apply(made, [DeleteVhost("/")]).topics


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128, "a\0b", "\ud800"])
def test_name_that_amqp_cannot_carry_is_refused(name: str) -> None:
    with pytest.raises(Invalid):
        queue(name, 1)
    with pytest.raises(Invalid):
        Vhost(name)
    with pytest.raises(Invalid):
        User(name)


def test_name_of_255_bytes_is_accepted() -> None:
    assert queue("x" * 255, 1).queue.name == "x" * 255


def test_one_declare_among_many_bindings_copies_few_of_them() -> None:
    many = load(
        EMPTY.cluster,
        Version(1),
        ViewId(20_001),
        vhosts=[Vhost("/")],
        exchanges=[Exchange("/", "e", "fanout", stream(1))],
        queues=[Queue("/", f"q{number}", ViewId(number), stream(number)) for number in range(1, 20_001)],
        bindings=[bound("e", f"q{number}") for number in range(1, 20_001)],
    )
    after = apply(many, [queue("new", 20_001), PutBinding(bound("e", "new"))])
    old = {id(shard) for shard in many.bindings_of("/", "e")._shards}
    copied = [shard for shard in after.bindings_of("/", "e")._shards if id(shard) not in old]
    assert sum(map(len, copied)) < 1_000
    assert len(after.bindings_of("/", "e")) == 20_001


def test_deleting_a_queue_with_many_bindings_is_one_change() -> None:
    many = apply(SMALL, [PutBinding(bound("e", "p", f"k{number}")) for number in range(2_000)])
    after = apply(many, [DeleteQueue("/", "p", ViewId(2))])
    assert list(after.bindings_of("/", "e").values()) == [bound("e", "f", "c", EXCHANGE), bound("e", "q", "a")]
