"""What the controller decides about a partition."""

from dataclasses import replace
from uuid import UUID

import pytest

from headrace.controller.elections import (
    Verdict,
    altered,
    answers_needed,
    elected,
    fencing_epoch,
    is_orderly,
    judge,
    recovered,
    without_disk,
)
from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Member, RowVersion, Stint
from headrace.core_log.replication.messages import AlterIsr, Report

FIRST, SECOND = Ballot(1, 0), Ballot(2, 1)
MEMBERS = {node: Member(node, 1, UUID(int=node + 1)) for node in range(3)}
COPIES = tuple(member.copy for member in MEMBERS.values())
ROW = Assignment((0, 1, 2), 0, 1, 4, COPIES, RowVersion(7, FIRST), 2)


def report(node: int, **changes: object) -> Report:
    found = Report(MEMBERS[node], ROW.stint, ROW.version, ROW.stint, 10, False, False, ROW.isr)
    return found._replace(**changes)  # type: ignore[arg-type]


def test_a_row_is_proven_by_as_many_answers_as_must_meet_every_set_that_acknowledged() -> None:
    assert answers_needed(ROW) == 2
    assert judge(ROW, [report(1)]) is Verdict.UNPROVEN
    assert judge(ROW, [report(1), report(2)]) is Verdict.PROVEN


@pytest.mark.parametrize(
    "later",
    [
        {"stint": Stint(5, 1)},
        {"stint": Stint(4, 2)},
        {"version": RowVersion(8, FIRST)},
        {"version": RowVersion(7, SECOND)},
        {"version": RowVersion(7, Ballot(0, 5))},
    ],
)
def test_a_replica_that_knows_of_something_else_contradicts_the_row(later: dict[str, object]) -> None:
    assert judge(ROW, [report(0), report(1, **later)]) is Verdict.CONTRADICTED


def test_a_replica_that_is_behind_contradicts_nothing() -> None:
    behind = report(1, stint=Stint(3, 2), version=RowVersion(5, FIRST))
    assert judge(ROW, [report(0), behind]) is Verdict.PROVEN


def test_a_blank_replica_proves_nothing() -> None:
    elsewhere = MEMBERS[1]._replace(disk=UUID(int=77))
    assert judge(ROW, [report(0), report(1, member=elsewhere, is_blank=True)]) is Verdict.UNPROVEN


def test_a_replica_that_never_held_anything_proves_a_row_that_has_its_disk_in_sync() -> None:
    unheard = report(1, is_blank=True, stint=Stint(0, -1), version=RowVersion(0, Ballot(0, 0)), isr=())
    assert judge(ROW, [report(0), unheard]) is Verdict.PROVEN


def test_a_recovery_elects_one_alone_and_above_every_epoch_that_was_heard_of() -> None:
    replies = [
        report(0, last=Stint(4, 0), end=10),
        report(1, stint=Stint(6, 1), last=Stint(6, 1), end=8, version=RowVersion(9, FIRST)),
    ]
    fence = fencing_epoch(ROW, replies)
    assert fence == 7
    row = recovered(ROW, replies, fence, SECOND, MEMBERS)
    assert row is not None
    assert (row.stint, row.isr) == (Stint(8, 1), (COPIES[1],))
    assert row.version == RowVersion(10, SECOND)


def test_a_recovery_elects_who_was_in_sync_by_the_latest_row_though_another_holds_more() -> None:
    latest = {"version": RowVersion(9, FIRST), "isr": (COPIES[0], COPIES[1])}
    replies = [report(1, **latest, end=8), report(2, **latest, end=12)]
    row = recovered(ROW, replies, 5, SECOND, MEMBERS)
    assert row is not None and row.leader == 1
    assert recovered(ROW, [report(2, **latest, end=12), report(0, is_corrupt=True)], 5, SECOND, MEMBERS) is None


def test_the_latest_row_is_that_of_the_latest_controller_whatever_its_number() -> None:
    unused = report(2, version=RowVersion(9, FIRST), isr=(COPIES[2],))
    acted_on = report(1, version=RowVersion(8, SECOND), isr=(COPIES[0], COPIES[1]))
    row = recovered(ROW, [unused, acted_on], 5, Ballot(3, 0), MEMBERS)
    assert row is not None and row.leader == 1
    assert row.version == RowVersion(10, Ballot(3, 0))


def test_a_recovery_waits_for_enough_answers_and_elects_nobody_corrupt() -> None:
    assert recovered(ROW, [report(0)], 5, SECOND, MEMBERS) is None
    row = recovered(ROW, [report(0, end=99, is_corrupt=True), report(1, end=3)], 5, SECOND, MEMBERS)
    assert row is not None and row.leader == 1


def test_a_recovery_elects_nobody_who_has_gone_since_the_answer() -> None:
    replies = [report(0, end=99), report(1, end=3)]
    row = recovered(ROW, replies, 5, SECOND, {1: MEMBERS[1], 2: MEMBERS[2]})
    assert row is not None and row.leader == 1
    assert recovered(ROW, replies, 5, SECOND, {2: MEMBERS[2]}) is None


def test_an_election_takes_the_in_sync_members_that_are_up_and_a_new_epoch() -> None:
    row = elected(ROW, {1: MEMBERS[1], 2: MEMBERS[2]}, FIRST, prefer=(2,))
    assert row is not None
    assert (row.leader, row.leader_incarnation, row.epoch) == (2, 1, 5)
    assert row.isr == COPIES[1:]
    assert row.version == RowVersion(8, FIRST)


def test_e7_nobody_is_elected_who_is_not_known_to_hold_everything() -> None:
    row = replace(ROW, isr=COPIES[:1])
    assert elected(row, {1: MEMBERS[1], 2: MEMBERS[2]}, FIRST) is None
    assert elected(ROW, {1: MEMBERS[1]._replace(disk=UUID(int=77))}, FIRST) is None


def test_who_left_when_too_few_remained_may_still_be_elected() -> None:
    alone = elected(ROW, {0: MEMBERS[0]}, FIRST)
    assert alone is not None
    assert alone.eligible == COPIES[1:]
    row = elected(alone, {2: MEMBERS[2]}, FIRST)
    assert row is not None
    assert (row.leader, row.isr) == (2, (COPIES[2],))


def request(**changes: object) -> AlterIsr:
    found = AlterIsr(ROW.stint, 1, ROW.version, COPIES[:2], None)
    return found._replace(**changes)  # type: ignore[arg-type]


def test_a_leader_may_leave_one_out() -> None:
    row = altered(ROW, request(), MEMBERS, FIRST)
    assert row is not None
    assert (row.isr, row.eligible, row.version.number) == (COPIES[:2], (), 8)


@pytest.mark.parametrize(
    "stale",
    [
        {"stint": Stint(3, 0)},
        {"stint": Stint(4, 1)},
        {"leader_incarnation": 2},
        {"version": RowVersion(6, FIRST)},
        {"version": RowVersion(7, SECOND)},
    ],
)
def test_a_request_that_was_made_on_another_row_is_not_answered_by_a_change(stale: dict[str, object]) -> None:
    assert altered(ROW, request(**stale), MEMBERS, FIRST) is None


@pytest.mark.parametrize("life", [MEMBERS[2]._replace(incarnation=2), MEMBERS[2]._replace(disk=UUID(int=9))])
def test_e5_a_request_for_a_life_that_is_over_only_moves_the_version(life: Member) -> None:
    row = replace(ROW, isr=COPIES[:2])
    wanted = request(isr=tuple(sorted((*COPIES[:2], life.copy))), joining=life)
    found = altered(row, wanted, MEMBERS, FIRST)
    assert found == replace(row, version=RowVersion(8, FIRST))


def test_a_request_cannot_bring_in_somebody_it_does_not_name() -> None:
    row = replace(ROW, isr=COPIES[:2])
    found = altered(row, request(isr=COPIES), MEMBERS, FIRST)
    assert found is not None and found.isr == row.isr


def test_e6_a_node_that_lost_its_disk_is_in_sync_with_nothing_and_leads_nothing() -> None:
    row = without_disk(replace(ROW, eligible=()), 0, FIRST)
    assert row.leader == NOBODY
    assert row.isr == COPIES[1:]
    assert is_orderly(row)
