"""What the controller of a cluster decides, rule by rule, against a store in memory."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from uuid import UUID

import pytest

from headrace.controller.brain import Arrival, Brain, Effect, Note, ToAsk, ToFence, ToOrder, Trust
from headrace.controller.changes import Change, PutNode, PutShard, PutVhost, ReserveViews
from headrace.controller.cluster_config import ClusterConfig
from headrace.controller.entities import Endpoint, Node, NodeState, Shard, Version, Vhost
from headrace.controller.errors import Invalid, NotFound
from headrace.controller.snapshot import Snapshot, apply, load
from headrace.core_log.ids import ViewId
from headrace.core_log.replication.assignment import (
    NO_STINT,
    NO_VERSION,
    NOBODY,
    Assignment,
    Ballot,
    Copy,
    Member,
    RowVersion,
    Stint,
)
from headrace.core_log.replication.messages import AlterIsr, OwnCopy, Report

FIRST, SECOND = Ballot(1, 100), Ballot(2, 200)
CONFIG = ClusterConfig(shards=1, replicas=3, min_isr=2)
PEER = (("peer", Endpoint("host", 1)),)


def member(node: int, life: int = 1, disk: int | None = None) -> Member:
    return Member(node, life, UUID(int=disk or node))


def arrival(who: Member, **more: object) -> Arrival:
    return Arrival(who, PEER, **more)  # type: ignore[arg-type]


def copies(*members: Member) -> tuple[Copy, ...]:
    return tuple(sorted(one.copy for one in members))


ONE, TWO, THREE, FOUR = (member(node) for node in range(1, 5))
ROW = Assignment((1, 2, 3), 1, 1, 4, copies(ONE, TWO, THREE), RowVersion(7, FIRST), 2)


def stored(*rows: Assignment, members: Iterable[Member] = (ONE, TWO, THREE), version: int = 10) -> Snapshot:
    return load(
        UUID(int=9),
        Version(version),
        ViewId(5),
        nodes=[Node(one.node, one.incarnation, one.disk, endpoints=PEER) for one in members],
        shards=[Shard(number, row) for number, row in enumerate(rows)],
    )


class Term:
    """A brain, and the store that takes whatever it decides."""

    def __init__(self, snapshot: Snapshot, *, ballot: Ballot = SECOND, config: ClusterConfig = CONFIG) -> None:
        self.brain = Brain(ballot, snapshot, config, 0.0)
        self.now_s = 0.0
        self.sent: list[Effect] = []

    def join(self, *members: Member, **more: object) -> None:
        for one in members:
            assert self.brain.joined(arrival(one, **more), self.now_s) is None
        self.sent += self.brain.effects()

    def commit(self, changes: Sequence[Change]) -> list[Change]:
        self.brain.committed(apply(self.brain.snapshot, changes))
        self.sent += self.brain.effects()
        return list(changes)

    def settle(self) -> list[Change]:
        """Decide and commit until there is nothing more to do."""
        done: list[Change] = []
        for _ in range(20):
            changes = self.brain.decide(self.now_s)
            self.sent += self.brain.effects()
            if not changes:
                return done
            done += self.commit(changes)
        raise AssertionError(f"it never ends: {done[-3:]}")

    def answer_nothing(self, *members: Member) -> None:
        """There is nothing of any shard on these nodes."""
        for one in members:
            for number in range(3):
                self.brain.reported(number, nothing(one))

    def report(self, who: Member, shard: int = 0, **changes: object) -> None:
        self.brain.reported(shard, told(who, **changes))
        self.sent += self.brain.effects()

    def prove(self, *members: Member) -> None:
        self.join(*members)
        for one in members[:2]:
            self.report(one)
        assert self.brain.trust(0) is Trust.PROVEN

    def row(self, shard: int = 0) -> Assignment:
        return self.brain.snapshot.shards[shard].assignment

    def take(self) -> list[Effect]:
        found, self.sent = self.sent, []
        return found


def nothing(who: Member) -> Report:
    return Report(who, NO_STINT, NO_VERSION, NO_STINT, 0, True, False)


def told(who: Member, **changes: object) -> Report:
    found = Report(who, ROW.stint, ROW.version, ROW.stint, 10, False, False, ROW.isr, ROW.eligible)
    return found._replace(**changes)  # type: ignore[arg-type]


def orders(effects: Iterable[Effect]) -> list[ToOrder]:
    return [one for one in effects if isinstance(one, ToOrder)]


# -- birth and registration


def test_shards_are_born_when_there_are_nodes_enough() -> None:
    term = Term(stored(members=()), config=ClusterConfig(shards=3, replicas=3, min_isr=2))
    term.join(ONE, TWO)
    term.settle()
    assert not term.brain.snapshot.shards
    assert set(term.brain.snapshot.nodes) == {1, 2}
    term.join(THREE)
    term.settle()
    assert len([effect for effect in term.sent if isinstance(effect, ToAsk)]) == 9
    term.answer_nothing(ONE, TWO, THREE)
    term.settle()
    rows = [term.row(number) for number in range(3)]
    assert {row.leader for row in rows} == {1, 2, 3}
    assert all(row.isr == copies(ONE, TWO, THREE) and row.min_isr == 2 for row in rows)
    assert len(orders(term.sent)) == 9


def test_no_shard_is_born_where_there_are_records_of_it() -> None:
    term = Term(stored(members=()))
    term.join(ONE, TWO, THREE)
    term.settle()
    term.answer_nothing(ONE, TWO)
    term.report(THREE)
    term.settle()
    assert not term.brain.snapshot.shards
    assert any(isinstance(effect, Note) and "forgotten the shards" in effect.text for effect in term.take())


def test_a_controller_that_died_after_the_birth_leaves_shards_that_can_be_proven() -> None:
    born = Term(stored(members=()))
    born.join(ONE, TWO, THREE)
    born.settle()
    born.answer_nothing(ONE, TWO, THREE)
    born.settle()
    row = born.row()
    term = Term(born.brain.snapshot, ballot=Ballot(3, 1))
    term.join(ONE, TWO, THREE)
    for one in (ONE, TWO):
        term.brain.reported(0, nothing(one))
    assert term.brain.trust(0) is Trust.PROVEN and term.row() == row


def test_a_new_life_is_registered_and_leads_nothing_until_it_is_elected() -> None:
    term = Term(stored(ROW))
    again = member(1, 2)
    term.prove(TWO, THREE, again)
    term.settle()
    assert term.brain.snapshot.nodes[1].incarnation == 2
    row = term.row()
    assert row.epoch == 5 and row.version.ballot == SECOND
    assert row.leader_incarnation == (2 if row.leader == 1 else 1)
    assert row.isr == ROW.isr


def test_e6_an_empty_disk_leaves_every_set_in_the_transaction_that_registers_it() -> None:
    term = Term(stored(ROW))
    wiped = member(3, 2, disk=33)
    term.prove(ONE, TWO)
    term.settle()
    term.join(wiped)
    changes = term.brain.decide(term.now_s)
    assert {type(change) for change in changes} == {PutNode, PutShard}
    term.commit(changes)
    assert term.row().isr == copies(ONE, TWO)


def test_c4_a_disk_that_came_back_empty_in_a_life_of_the_same_number_is_never_ordered_to_lead() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.brain.left(1, 0.0)
    term.take()
    wiped = member(1, ROW.leader_incarnation, disk=11)
    term.join(wiped)
    assert not orders(term.take()), "the row still names its former life"
    term.settle()
    assert term.row().leader == 2 and term.row().isr == copies(TWO, THREE)
    told = [order for order in orders(term.take()) if order.node == 1]
    assert told and all(order.assignment.leader != 1 for order in told)


def test_c4_nor_when_the_row_is_proven_by_others_after_it_came() -> None:
    term = Term(stored(ROW))
    term.join(member(1, ROW.leader_incarnation, disk=11), TWO, THREE)
    term.report(TWO)
    term.report(THREE)
    assert {order.node for order in orders(term.take())} == {2, 3}


def test_what_is_not_sure_of_its_records_leaves_every_set_too() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO)
    term.join(member(3, 2), clean=False)
    term.settle()
    assert term.row().isr == copies(ONE, TWO)
    # The same life on a new link has not lost anything more.
    term.commit([PutShard(replace(term.brain.snapshot.shards[0], assignment=replace(term.row(), isr=ROW.isr)))])
    term.join(member(3, 2), clean=False)
    assert term.settle() == []


def test_c2_an_empty_disk_is_not_registered_before_the_sweep_of_its_shards() -> None:
    term = Term(stored(ROW))
    term.join(member(3, 2, disk=33))
    assert term.settle() == []
    assert term.brain.snapshot.nodes[3].incarnation == 1


def test_an_earlier_life_is_not_taken_in() -> None:
    term = Term(stored(ROW, members=(member(1, 5), TWO, THREE)))
    assert "life 5" in str(term.brain.joined(arrival(member(1, 4)), 0.0))
    assert 1 not in term.brain.active


def test_a_number_that_is_used_twice_is_refused_while_the_first_is_there() -> None:
    term = Term(stored(ROW))
    term.join(ONE)
    assert "used twice" in str(term.brain.joined(arrival(member(1, 9, disk=99)), 0.0))
    term.brain.left(1, 0.0)
    assert term.brain.joined(arrival(member(1, 9, disk=99)), 0.0) is None


# -- the sweep


def test_c1_nothing_is_ordered_before_the_sweep() -> None:
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    assert term.settle() == []
    assert {type(effect) for effect in term.take()} == {ToAsk}


def test_m11b_one_answer_proves_nothing() -> None:
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    term.report(ONE)
    assert term.brain.trust(0) is Trust.ASKING and not orders(term.sent)
    term.report(TWO)
    assert term.brain.trust(0) is Trust.PROVEN
    assert [order.node for order in orders(term.sent)] == [1, 2, 3]


def test_a_blank_answer_does_not_count() -> None:
    term = Term(stored(ROW))
    term.join(ONE, member(2, 2, disk=22))
    term.report(ONE)
    term.report(member(2, 2, disk=22), is_blank=True)
    assert term.brain.trust(0) is Trust.ASKING


def test_an_answer_of_an_earlier_life_is_none() -> None:
    term = Term(stored(ROW))
    term.join(ONE, member(2, 2))
    term.report(ONE)
    term.report(TWO)
    assert term.brain.trust(0) is Trust.ASKING


def test_c2_a_request_before_the_sweep_changes_nothing() -> None:
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    term.brain.alter(0, AlterIsr(ROW.stint, 1, ROW.version, copies(ONE, TWO), None))
    assert term.settle() == []
    term.report(ONE)
    term.report(TWO)
    assert term.settle() == []


def test_a_replica_that_knows_of_something_later_leads_to_a_recovery() -> None:
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    later = RowVersion(8, FIRST)
    term.report(TWO, version=later, isr=copies(ONE, TWO))
    assert term.brain.trust(0) is Trust.RECOVERING
    assert [(one.node, one.epoch) for one in term.take() if isinstance(one, ToFence)] == [(1, 5), (2, 5), (3, 5)]
    assert term.settle() == []
    term.brain.fenced(0, 5, told(THREE))
    assert term.settle() == [], "one reply is not enough"
    term.brain.fenced(0, 5, told(TWO, version=later, isr=copies(ONE, TWO)))
    term.settle()
    row = term.row()
    # Node 3 was not in sync by the latest row that anybody knows.
    assert (row.leader, row.epoch, row.isr, row.version) == (2, 6, copies(TWO), RowVersion(9, SECOND))
    assert term.brain.trust(0) is Trust.PROVEN
    assert {order.node for order in orders(term.take())} == {1, 2, 3}


def test_a_replica_that_was_in_a_later_epoch_still_is_fenced_above_it() -> None:
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    term.report(TWO, stint=Stint(5, 2))
    term.take()
    term.brain.fenced(0, 6, told(THREE, stint=Stint(9, 3)))
    fences = [one for one in term.brain.effects() if isinstance(one, ToFence)]
    assert {fence.epoch for fence in fences} == {10}


def test_a_node_whose_new_disk_the_store_has_forgotten_may_lead_after_a_recovery() -> None:
    """The simulator of clusters, seed 128: it was to lead once it was registered, and to be registered once it led."""
    renewed = member(1, life=2, disk=11)
    later = {"stint": Stint(5, 1), "version": RowVersion(9, FIRST), "isr": copies(renewed)}
    term = Term(stored(ROW))
    term.join(renewed, TWO, THREE)
    term.report(renewed, **later)
    assert term.brain.trust(0) is Trust.RECOVERING
    fence = next(effect.epoch for effect in term.take() if isinstance(effect, ToFence))
    term.brain.fenced(0, fence, told(renewed, **later))
    term.brain.fenced(0, fence, told(TWO))
    term.settle()
    row = term.row()
    assert (row.leader, row.leader_incarnation, row.isr) == (1, 2, copies(renewed))
    assert term.brain.active[1] == renewed


def test_a_replica_that_dies_after_it_was_fenced_leads_in_its_next_life() -> None:
    """The simulator of clusters, seed 1225: the shard waited for a life that was over."""
    later = {"stint": Stint(5, 1), "version": RowVersion(8, FIRST), "isr": copies(ONE, THREE)}
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    term.report(ONE, **later)
    fence = next(effect.epoch for effect in term.take() if isinstance(effect, ToFence))
    term.brain.fenced(0, fence, told(ONE, **later))
    term.brain.left(1, term.now_s)
    again = member(1, life=2)
    term.join(again)
    term.settle()
    term.brain.fenced(0, fence, told(again, **later))
    term.brain.fenced(0, fence, told(TWO))
    term.settle()
    row = term.row()
    assert (row.leader, row.leader_incarnation) == (1, 2)


def test_what_a_replica_knew_of_the_row_counts_though_it_came_back_without_its_disk() -> None:
    later = {"stint": Stint(5, 1), "version": RowVersion(8, FIRST), "isr": copies(ONE, THREE)}
    term = Term(stored(ROW))
    term.join(ONE, TWO, THREE)
    term.report(ONE, **later)
    fence = next(effect.epoch for effect in term.take() if isinstance(effect, ToFence))
    term.brain.fenced(0, fence, told(ONE, **later))
    term.brain.left(1, term.now_s)
    blank = member(1, life=2, disk=11)
    term.join(blank)
    term.brain.fenced(0, fence, told(blank, is_blank=True, version=RowVersion(0, Ballot(0, 0)), isr=()))
    term.brain.fenced(0, fence, told(TWO))
    term.settle()
    assert term.brain.trust(0) is Trust.RECOVERING, "node 2 was not in sync by the latest row, and may lack records"
    term.brain.fenced(0, fence, told(THREE))
    term.settle()
    assert term.row().leader == 3


def test_a_node_without_its_disk_waits_for_the_sweep_and_leaves_every_row_then() -> None:
    renewed = member(1, life=2, disk=11)
    term = Term(stored(ROW))
    term.join(renewed, TWO, THREE)
    assert term.settle() == [], "nothing is written before the sweep"
    term.report(TWO)
    term.report(THREE)
    term.settle()
    assert term.brain.active[1] == renewed
    assert term.row().in_sync_nodes == {2, 3}


def test_rows_that_nodes_kept_are_evidence_wherever_the_replicas_are_by_now() -> None:
    """Replicas were moved from node 1 to node 4 since, and the store has forgotten that."""
    moved = replace(
        ROW, replicas=(2, 3, 4), leader=2, epoch=6, isr=copies(TWO, FOUR), version=RowVersion(20, Ballot(1, 101))
    )
    term = Term(stored(ROW))
    term.join(ONE)
    term.join(FOUR, version=15, shards=(Shard(0, moved),))
    assert any(isinstance(effect, Note) and "back in time" in effect.text for effect in term.take())
    term.join(THREE)
    term.report(ONE)
    term.report(THREE)
    assert term.brain.trust(0) is Trust.RECOVERING
    fence = next(effect.epoch for effect in term.take() if isinstance(effect, ToFence))
    term.settle()
    for one in (THREE, FOUR):
        term.brain.fenced(0, fence, told(one, stint=moved.stint, version=moved.version, isr=moved.isr))
    term.settle()
    assert (term.row().leader, term.row().replicas) == (4, (2, 3, 4))


def test_a_store_that_forgot_the_birth_of_the_shards_gets_them_back() -> None:
    term = Term(stored(members=()))
    for one in (ONE, TWO, THREE):
        term.join(one, version=50, next_view=700, shards=(Shard(0, ROW),))
    term.settle()
    assert not term.brain.snapshot.shards and term.brain.snapshot.next_view == 700
    term.report(ONE)
    fence = next(effect.epoch for effect in term.take() if isinstance(effect, ToFence))
    term.brain.fenced(0, fence, told(ONE))
    term.brain.fenced(0, fence, told(TWO))
    term.settle()
    assert term.row().epoch > ROW.epoch and term.row().leader in (1, 2)


# -- elections


def test_a_leader_that_is_gone_is_followed_by_one_in_sync() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.take()
    term.brain.left(1, 1.0)
    term.settle()
    row = term.row()
    assert (row.leader, row.epoch, row.isr) == (2, 5, copies(TWO, THREE))
    assert [order.node for order in orders(term.take())] == [2, 3]


def test_e7_nobody_leads_who_was_not_in_sync() -> None:
    row = replace(ROW, isr=copies(ONE, TWO))
    term = Term(stored(row))
    term.join(ONE, TWO, THREE)
    for one in (ONE, TWO):
        term.report(one)
    term.brain.left(1, 1.0)
    term.brain.left(2, 1.0)
    term.settle()
    assert term.row() == row
    assert any(isinstance(effect, Note) and "no leader" in effect.text for effect in term.take())
    term.join(TWO)
    term.settle()
    assert term.row().leader == 2


def test_a_new_controller_waits_a_moment_for_a_leader_that_it_has_not_heard_of() -> None:
    term = Term(stored(ROW))
    term.prove(TWO, THREE)
    assert term.settle() == []
    term.now_s = CONFIG.grace_s
    term.settle()
    assert term.row().leader == 2


def test_a_leader_at_whose_door_nobody_answers_is_not_waited_for() -> None:
    term = Term(stored(ROW))
    term.prove(TWO, THREE)
    term.brain.left(1, 0.0)
    term.settle()
    assert term.row().leader == 2


def test_a_leader_that_comes_back_in_the_same_life_goes_on() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.join(ONE)
    assert term.settle() == []
    assert term.row() == ROW


@pytest.mark.parametrize("stint", [Stint(ROW.epoch, NOBODY), Stint(ROW.epoch + 2, NOBODY), Stint(ROW.epoch, 3)])
def test_a_replica_that_was_fenced_for_an_election_never_held_is_led_in_an_epoch_that_it_can_follow(
    stint: Stint,
) -> None:
    """It answers after the row is proven by the others (seed 481 of the simulator)."""
    term = Term(stored(ROW))
    term.prove(ONE, TWO)
    term.join(THREE)
    assert ToAsk(3, 0) in term.take()
    term.report(THREE, stint=stint)
    term.settle()
    row = term.row()
    assert (row.leader, row.leader_incarnation, row.isr) == (ROW.leader, ROW.leader_incarnation, ROW.isr)
    assert row.epoch == stint.epoch + 1
    assert {order.node for order in orders(term.take()) if order.assignment == row} == {1, 2, 3}


def test_whoever_is_elected_leads_above_a_replica_that_was_fenced() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO)
    term.join(THREE)
    term.report(THREE, stint=Stint(ROW.epoch + 2, NOBODY))
    term.brain.left(1, 1.0)
    term.settle()
    assert (term.row().leader, term.row().epoch) == (2, ROW.epoch + 3)


# -- the in-sync set


def test_a_request_of_the_leader_is_granted_and_ordered() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.take()
    term.brain.alter(0, AlterIsr(ROW.stint, 1, ROW.version, copies(ONE, TWO), None))
    term.settle()
    assert term.row().isr == copies(ONE, TWO) and term.row().version == RowVersion(8, SECOND)
    assert {order.node for order in orders(term.take())} == {1, 2, 3}


def test_a_request_on_a_row_that_has_passed_is_answered_with_the_row() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.take()
    term.brain.alter(0, AlterIsr(ROW.stint, 1, RowVersion(6, FIRST), copies(ONE), None))
    assert term.settle() == []
    assert [(order.node, order.assignment) for order in orders(term.take())] == [(1, ROW)]


def test_e5_a_member_joins_in_the_life_whose_position_justified_it() -> None:
    row = replace(ROW, isr=copies(ONE, TWO))
    term = Term(stored(row))
    term.join(ONE, TWO)
    for one in (ONE, TWO):
        term.report(one)
    term.join(member(3, 2))
    term.settle()
    now = term.row()
    term.brain.alter(0, AlterIsr(now.stint, 1, now.version, copies(ONE, TWO, THREE), THREE))
    term.settle()
    # Refused for good: the version has moved, so that it can never be granted later.
    assert term.row().isr == copies(ONE, TWO) and term.row().version.number == now.version.number + 1
    now = term.row()
    term.brain.alter(0, AlterIsr(now.stint, 1, now.version, copies(ONE, TWO, THREE), member(3, 2)))
    term.settle()
    assert term.row().isr == copies(ONE, TWO, THREE)


# -- operators


def test_a_drained_node_leads_nothing_and_its_replicas_go_elsewhere() -> None:
    term = Term(stored(ROW, members=(ONE, TWO, THREE, FOUR)))
    term.prove(ONE, TWO, THREE, FOUR)
    term.commit(term.brain.drain(1))
    term.settle()
    row, shard = term.row(), term.brain.snapshot.shards[0]
    assert row.leader != 1 and ONE.copy in row.isr
    assert set(shard.target) == {2, 3, 4} and set(row.replicas) == {1, 2, 3, 4}
    term.brain.alter(0, AlterIsr(row.stint, 1, row.version, copies(ONE, TWO, THREE, FOUR), FOUR))
    term.settle()
    assert set(term.row().replicas) == {2, 3, 4} and not term.brain.snapshot.shards[0].target
    assert 1 in {order.node for order in orders(term.take())}, "the one that has to let go is told"
    with pytest.raises(Invalid, match="is up"):
        term.brain.remove(1)
    term.brain.left(1, 0.0)
    term.commit(term.brain.remove(1))
    assert set(term.brain.snapshot.nodes) == {2, 3, 4}


def test_a_drained_node_keeps_its_replicas_when_there_is_no_room() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.commit(term.brain.drain(1))
    term.settle()
    assert term.row().leader == 2 and set(term.row().replicas) == {1, 2, 3}
    term.commit(term.brain.undrain(1))
    term.now_s = CONFIG.balance_s + 1
    term.settle()
    assert term.row().leader == 1


def test_a_drained_leader_goes_on_while_nobody_else_is_in_sync() -> None:
    row = replace(ROW, isr=copies(ONE), eligible=copies(TWO))
    term = Term(stored(row))
    term.join(ONE, TWO, THREE)
    for one in (ONE, TWO):
        term.report(one)
    term.commit(term.brain.drain(1))
    term.settle()
    assert term.row() == row


def test_a_move_fills_the_new_replica_before_the_old_one_goes() -> None:
    term = Term(stored(ROW, members=(ONE, TWO, THREE, FOUR)))
    term.prove(ONE, TWO, THREE, FOUR)
    term.commit(term.brain.move(0, [4, 2, 3]))
    term.settle()
    row = term.row()
    assert row.replicas == (1, 2, 3, 4) and row.isr == ROW.isr and row.leader == 1
    term.brain.alter(0, AlterIsr(row.stint, 1, row.version, copies(ONE, TWO, THREE, FOUR), FOUR))
    term.settle()
    row = term.row()
    assert row.replicas == (4, 2, 3) and row.leader == 4 and row.isr == copies(TWO, THREE, FOUR)


@pytest.mark.parametrize(
    ("nodes", "wrong"), [([1, 2, 9], "no node 9"), ([1], "needs 2 nodes"), ([1, 2, 2], "two replicas")]
)
def test_a_move_to_where_it_cannot_go_is_refused(nodes: list[int], wrong: str) -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    with pytest.raises((Invalid, NotFound), match=wrong):
        term.brain.move(0, nodes)


def test_what_a_lost_node_held_is_copied_elsewhere_after_a_while() -> None:
    term = Term(stored(ROW, members=(ONE, TWO, THREE, FOUR)))
    term.prove(ONE, TWO, FOUR)
    term.settle()
    assert term.row() == ROW
    term.now_s = CONFIG.lost_s
    term.settle()
    row = term.row()
    assert set(row.replicas) == {1, 2, 4} and set(term.brain.snapshot.shards[0].target) == {1, 2, 4}
    term.brain.alter(0, AlterIsr(row.stint, 1, row.version, copies(ONE, TWO, FOUR), FOUR))
    term.settle()
    assert term.row().isr == copies(ONE, TWO, FOUR) and not term.brain.snapshot.shards[0].target


def test_balance_spreads_leaders_over_the_nodes_that_are_there() -> None:
    rows = [ROW, ROW, ROW]
    term = Term(stored(*rows))
    term.join(ONE, TWO, THREE)
    for number in range(3):
        for one in (ONE, TWO):
            term.report(one, number)
    term.commit(term.brain.balance())
    term.settle()
    assert {term.row(number).leader for number in range(3)} == {1, 2, 3}
    assert all(term.row(number).isr == ROW.isr for number in range(3))


def test_leadership_comes_back_to_whoever_should_have_it() -> None:
    term = Term(stored(replace(ROW, leader=2)))
    term.join(ONE, TWO, THREE)
    for one in (ONE, TWO):
        term.report(one, stint=Stint(4, 2), last=Stint(4, 2))
    assert term.settle() == []
    term.now_s = CONFIG.balance_s
    term.settle()
    assert term.row().leader == 1 and term.row().isr == ROW.isr


def test_e7_a_forced_election_is_recorded() -> None:
    row = replace(ROW, isr=copies(ONE))
    term = Term(stored(row))
    term.join(THREE)
    term.report(THREE, version=RowVersion(6, FIRST))
    with pytest.raises(Invalid, match="not there"):
        term.brain.force(0, 2)
    term.commit(term.brain.force(0, 3))
    shard = term.brain.snapshot.shards[0]
    assert shard.assignment.leader == 3 and shard.forced_epoch == shard.assignment.epoch > row.epoch
    # Its leader, and those after it, are told, too.
    assert shard.assignment.forced_epoch == shard.forced_epoch
    assert shard.assignment.isr == copies(THREE)
    assert any(isinstance(effect, Note) and "lost" in effect.text for effect in term.take())


# -- vhosts and views


def test_a_new_vhost_goes_to_the_shard_that_has_the_fewest_and_stays() -> None:
    term = Term(stored(ROW, ROW, ROW))
    changes = term.brain.placed([PutVhost(Vhost("/")), *(PutVhost(Vhost(name)) for name in "abc")])
    assert [change.vhost.shard for change in changes if isinstance(change, PutVhost)] == [0, 1, 2, 0]
    term.commit(changes)
    assert term.brain.placed([PutVhost(Vhost("b"))]) == [PutVhost(Vhost("b", 2))]


def test_view_ids_that_a_node_has_seen_are_never_given_out_again() -> None:
    term = Term(stored(ROW))
    term.join(ONE, next_view=4000)
    assert term.settle() == [ReserveViews(ViewId(5), 3995)]


def test_draining_is_remembered_over_a_restart() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.commit(term.brain.drain(2))
    term.join(member(2, 2))
    term.settle()
    assert term.brain.snapshot.nodes[2].state is NodeState.DRAINING


# -- damage


def test_d7_a_damaged_replica_leaves_the_in_sync_set_and_its_shard_has_another_leader() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.brain.copied(1, [OwnCopy(0, ONE.disk, True)])
    term.settle()
    assert term.row().leader == 2
    assert term.row().isr == copies(TWO, THREE)
    assert [one for one in term.take() if isinstance(one, Note) and "node 1 is damaged" in one.text]


def test_d7_one_that_is_the_only_one_with_everything_stays_for_an_operator_to_repair() -> None:
    alone = replace(ROW, isr=copies(ONE), eligible=())
    term = Term(stored(alone))
    term.join(ONE, TWO, THREE)
    for one in (ONE, TWO):
        term.report(one, isr=alone.isr)
    term.brain.copied(1, [OwnCopy(0, ONE.disk, True)])
    term.settle()
    assert term.row() == alone
    assert [one for one in term.take() if isinstance(one, Note) and "no leader" in one.text]
    with pytest.raises(Invalid, match="damaged"):
        term.brain.force(0, 1)
    term.brain.copied(1, [])
    term.commit(term.brain.force(0, 1))
    assert term.row().leader == 1


def test_d7_the_damage_of_all_but_one_leaves_that_one() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    for one in (ONE, TWO, THREE):
        term.brain.copied(one.node, [OwnCopy(0, one.disk, True)])
    term.settle()
    assert term.row() == ROW
    term.brain.copied(3, [])
    term.settle()
    assert (term.row().leader, term.row().isr) == (3, copies(THREE))


def test_e6_what_was_set_aside_is_not_what_a_row_names_even_in_the_same_life() -> None:
    term = Term(stored(ROW))
    # The store has forgotten that node 2 left the in-sync set, and node 1 is away.
    term.join(TWO, copies=(OwnCopy(0, UUID(int=22), False),))
    term.join(THREE)
    again = TWO._replace(disk=UUID(int=22))
    term.report(again, is_blank=True)
    assert term.brain.trust(0) is Trust.ASKING
    term.report(THREE)
    assert term.brain.trust(0) is Trust.ASKING, "a replica that begins anew proves nothing"
    term.join(ONE)
    term.report(ONE)
    term.settle()
    assert term.row().isr == copies(ONE, THREE)
    # It joins as what it is now, once it has everything.
    row = term.row()
    for joining, is_granted in ((TWO, False), (again, True)):
        request = AlterIsr(row.stint, 1, row.version, copies(ONE, joining, THREE), joining)
        term.brain.alter(0, request)
        term.settle()
        assert (2 in term.row().in_sync_nodes) is is_granted
        row = term.row()


def test_a_damaged_replica_is_handed_nothing_before_it_begins_anew() -> None:
    term = Term(stored(ROW))
    term.prove(ONE, TWO, THREE)
    term.brain.copied(1, [OwnCopy(0, ONE.disk, True)])
    term.settle()
    row = term.row()
    joining = AlterIsr(row.stint, 1, row.version, copies(ONE, TWO, THREE), ONE)
    term.brain.alter(0, joining)
    term.now_s = CONFIG.balance_s + 1
    term.settle()
    assert (term.row().leader, term.row().isr) == (2, copies(TWO, THREE))
