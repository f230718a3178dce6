"""One replica: whom it obeys, what it counts, when it cuts its log."""

from dataclasses import replace
from uuid import UUID

import pytest
from tests.simulation.partition_walk import Entry, MemoryLog, empty_logs

from headrace.core_log.replication.assignment import NOBODY, Assignment, Ballot, Copy, Member, RowVersion, Stint
from headrace.core_log.replication.messages import Answer, Begin, Cut, Explain, Fenced, Go, LogId, Stale
from headrace.core_log.replication.replica import CutBelowWatermark, Kept, Replica

FIRST, SECOND = Ballot(1, 0), Ballot(2, 1)
MEMBERS = [Member(node, 1, UUID(int=node + 1)) for node in range(3)]
ROW = Assignment((0, 1, 2), 0, 1, 1, tuple(member.copy for member in MEMBERS), RowVersion(1, FIRST), 2)


# Most tests are about one log of the shard; the other one is empty.
ONE, OTHER = LogId(UUID(int=1), 0), LogId(UUID(int=2), 0)


def log_of(replica: Replica) -> MemoryLog:
    found = replica.logs[ONE]
    assert isinstance(found, MemoryLog)
    return found


def committed(leader: Replica) -> int:
    leader.advance()
    return log_of(leader).high_watermark


def replicas(row: Assignment = ROW) -> list[Replica]:
    found = [Replica(member, empty_logs()) for member in MEMBERS]
    for one in found:
        one.obey(FIRST, row)
    return found


def write(replica: Replica, *values: int, log: LogId = ONE) -> None:
    found = replica.logs[log]
    assert isinstance(found, MemoryLog)
    found.entries += [Entry(replica.kept.stint, value) for value in values]
    found.synced_end = found.written_end


def follow(follower: Replica, leader: Replica, *, sync: bool = True, logs: tuple[LogId, ...] = (ONE, OTHER)) -> None:
    """Ask until there is nothing more to get, and once more to tell so."""
    for _ in range(10):
        fetch = follower.fetch(logs)
        assert fetch is not None
        answer = leader.serve(fetch)
        assert isinstance(answer, Answer)
        taken = follower.take(answer)
        assert taken is not None
        for cut in taken.cuts:
            follower.logs[cut.log].cut(cut.offset)  # type: ignore[attr-defined]
        for go in taken.goes:
            ours, theirs = follower.logs[go.log], leader.logs[go.log]
            assert isinstance(ours, MemoryLog) and isinstance(theirs, MemoryLog)
            ours.entries += theirs.entries[ours.written_end :]
            if sync:
                ours.synced_end = ours.written_end
            follower.follow_watermark(answer.stint, go)


def test_d1_a_record_is_committed_once_every_member_of_the_in_sync_set_has_synced_it() -> None:
    leader, first, second = replicas()
    write(leader, 7)
    follow(first, leader)
    assert committed(leader) == 0
    follow(second, leader)
    assert committed(leader) == 1


def test_d1_what_a_follower_has_not_synced_does_not_count() -> None:
    leader, first, second = replicas()
    write(leader, 7)
    follow(first, leader, sync=False)
    follow(second, leader)
    assert committed(leader) == 0


def test_d1_what_the_leader_has_not_synced_does_not_count() -> None:
    leader, first, second = replicas()
    write(leader, 7)
    log_of(leader).synced_end = 0
    follow(first, leader)
    follow(second, leader)
    assert committed(leader) == 0


def test_v3_nothing_is_committed_while_too_few_are_in_sync() -> None:
    leader = replicas(replace(ROW, isr=ROW.isr[:1]))[0]
    write(leader, 7)
    assert committed(leader) == 0


def test_c5_a_position_counts_only_under_the_version_of_the_row_that_the_follower_has_kept() -> None:
    leader, first, _second = replicas()
    write(leader, 7)
    later = replace(ROW, isr=ROW.isr[:2], version=RowVersion(2, FIRST))
    fetch = first.fetch()
    assert fetch is not None
    leader.obey(FIRST, later)
    (position, _other) = fetch.positions
    leader.serve(fetch._replace(positions=(position._replace(end=1, synced_end=1),)))
    assert committed(leader) == 0
    follow(first, leader)
    assert first.kept.version == later.version
    assert committed(leader) == 1


def test_c6_a_follower_does_not_take_a_version_stamped_below_the_ballot_it_has_promised() -> None:
    leader, first, _second = replicas()
    first.promise(SECOND)
    leader.obey(FIRST, replace(ROW, isr=ROW.isr[:2], version=RowVersion(2, FIRST)))
    write(leader, 7)
    follow(first, leader)
    assert first.kept.version == ROW.version
    assert committed(leader) == 0


def test_e6_a_position_from_another_disk_than_the_one_in_sync_does_not_count() -> None:
    leader, _first, second = replicas(replace(ROW, isr=ROW.isr[:2]))
    other = Replica(Member(1, 2, UUID(int=99)), empty_logs())
    other.obey(FIRST, replace(ROW, isr=ROW.isr[:2]))
    write(leader, 7)
    follow(other, leader)
    follow(second, leader)
    assert committed(leader) == 0


def test_e4_who_is_about_to_join_counts_at_once() -> None:
    leader, first, second = replicas(replace(ROW, isr=ROW.isr[:2]))
    follow(first, leader)
    follow(second, leader)
    leader.expand(2)
    write(leader, 7)
    follow(first, leader)
    assert committed(leader) == 0
    follow(second, leader)
    assert committed(leader) == 1


def test_e4_who_is_about_to_leave_counts_until_that_is_committed() -> None:
    leader, first, _second = replicas()
    write(leader, 7)
    follow(first, leader)
    request = leader.shrink(2)
    assert committed(leader) == 0
    leader.obey(FIRST, replace(ROW, isr=request.isr, version=RowVersion(2, FIRST)))
    follow(first, leader)
    assert committed(leader) == 1


def test_e5_a_request_names_the_life_of_the_follower_that_has_caught_up() -> None:
    leader, _first, second = replicas(replace(ROW, isr=ROW.isr[:2]))
    follow(second, leader)
    second.member = second.member._replace(incarnation=2)
    assert leader.expand(2).joining == MEMBERS[2]


def test_one_that_lacks_what_the_leader_began_with_may_not_join() -> None:
    leader, first, second = replicas(replace(ROW, isr=ROW.isr[:2]))
    write(leader, 7)
    follow(first, leader)
    fetch = second.fetch()
    assert fetch is not None
    leader.serve(fetch)
    log_of(leader).high_watermark = 0
    assert leader.caught_up() == []


def test_c3_an_order_of_a_controller_before_the_one_promised_is_refused() -> None:
    follower = replicas()[1]
    assert follower.promise(SECOND) is not None
    assert not follower.obey(FIRST, replace(ROW, leader=1, epoch=2))
    assert not follower.is_leader


def test_c3_a_promise_to_an_older_controller_is_refused() -> None:
    follower = replicas()[1]
    follower.promise(SECOND)
    assert follower.promise(FIRST) is None
    assert follower.fence(FIRST, 9) is None


def test_c4_an_order_for_a_former_life_is_dropped() -> None:
    restarted = Replica(Member(1, 2, UUID(int=2)), empty_logs(), replicas()[1].kept)
    restarted.obey(FIRST, replace(ROW, leader=1, leader_incarnation=1, epoch=2))
    assert not restarted.is_leader


def test_e1_a_restarted_leader_leads_nothing_until_it_is_elected_anew() -> None:
    leader = replicas()[0]
    restarted = Replica(Member(0, 2, UUID(int=1)), leader.logs, leader.kept)
    restarted.obey(FIRST, ROW)
    assert not restarted.is_leader
    restarted.obey(FIRST, replace(ROW, leader_incarnation=2, epoch=2, version=RowVersion(2, FIRST)))
    assert restarted.is_leader


def test_a_blank_replica_counts_for_something_once_an_in_sync_set_has_its_new_disk() -> None:
    blank = Replica(Member(1, 2, UUID(int=50)), empty_logs(), Kept(is_blank=True))
    blank.obey(FIRST, replace(ROW, epoch=2))
    assert blank.kept.is_blank
    blank.obey(FIRST, replace(ROW, epoch=3, isr=(*ROW.isr[:1], Copy(1, UUID(int=50)))))
    assert not blank.kept.is_blank


def test_e3_a_follower_with_other_records_is_cut_where_their_lineages_part() -> None:
    leader, first, second = replicas()
    write(leader, 1)
    follow(first, leader)
    follow(second, leader)
    write(leader, 2, 3)
    new = replace(ROW, leader=1, leader_incarnation=1, epoch=2, version=RowVersion(2, FIRST))
    first.obey(FIRST, new)
    write(first, 9)
    leader.obey(FIRST, new)
    follow(leader, first)
    assert [entry.value for entry in log_of(leader).entries] == [1, 9]


def test_e3_a_follower_is_cut_also_when_its_leader_stays_and_only_the_epoch_moves() -> None:
    leader, first, _second = replicas()
    follow(first, leader)
    write(first, 5)
    new = replace(ROW, epoch=2, version=RowVersion(2, FIRST))
    leader.obey(FIRST, new)
    write(leader, 6)
    first.obey(FIRST, new)
    follow(first, leader)
    assert [entry.value for entry in log_of(first).entries] == [6]


def test_c7_two_leaders_of_one_epoch_number_are_told_apart() -> None:
    leader, first, _second = replicas()
    write(leader, 1)
    log_of(first).entries.append(Entry(Stint(1, 1), 2))
    log_of(first).synced_end = 1
    follow(first, leader)
    assert [entry.value for entry in log_of(first).entries] == [1]


def test_e3_a_log_is_never_cut_below_its_high_watermark() -> None:
    leader, first, _second = replicas()
    write(leader, 1)
    write(first, 1)
    log_of(first).entries[0] = Entry(Stint(0, 2), 5)
    log_of(first).high_watermark = 1
    with pytest.raises(CutBelowWatermark, match="committed"):
        follow(first, leader)


def test_e2_who_asks_in_an_older_epoch_is_fenced_and_who_is_asked_in_a_newer_one_is_stale() -> None:
    leader, first, second = replicas()
    new = replace(ROW, epoch=2, version=RowVersion(2, FIRST))
    old = first.fetch()
    assert old is not None
    leader.obey(FIRST, new)
    assert leader.serve(old) == Fenced(Stint(2, 0))
    second.obey(FIRST, replace(new, epoch=3))
    late = second.fetch()
    assert late is not None
    assert leader.serve(late) == Stale(Stint(2, 0))


def test_a_fenced_replica_neither_leads_nor_follows() -> None:
    leader, first, _second = replicas()
    report = leader.fence(SECOND, 5)
    assert report is not None and report.stint == Stint(1, 0)
    assert not leader.is_leader
    assert leader.kept.stint == Stint(5, NOBODY)
    first.fence(SECOND, 5)
    assert first.fetch() is None


def test_a_corrupt_replica_asks_for_nothing_and_says_so() -> None:
    broken = Replica(MEMBERS[1], empty_logs(), is_corrupt=True)
    broken.obey(FIRST, ROW)
    assert broken.fetch() is None
    assert broken.report().is_corrupt


def test_each_log_is_committed_as_far_as_all_have_it() -> None:
    leader, first, second = replicas()
    write(leader, 1)
    write(leader, 2, 3, log=OTHER)
    follow(first, leader)
    follow(second, leader, logs=(OTHER,))
    assert leader.advance() == [OTHER]
    assert (leader.logs[ONE].high_watermark, leader.logs[OTHER].high_watermark) == (0, 2)


def test_nothing_in_a_newborn_log_is_committed_before_every_member_has_told_of_it() -> None:
    leader, first, second = replicas()
    for one in (first, second):
        del one.logs[OTHER]  # type: ignore[attr-defined]
    write(leader, 1, log=OTHER)
    follow(first, leader)
    follow(second, leader)
    assert leader.advance() == []
    for one in (first, second):
        one.logs[OTHER] = MemoryLog()  # type: ignore[index]
        follow(one, leader)
    assert leader.advance() == [OTHER]


def test_one_that_lacks_records_in_any_log_may_not_join() -> None:
    leader, first, second = replicas(replace(ROW, isr=ROW.isr[:2]))
    write(leader, 1)
    write(leader, 2, log=OTHER)
    follow(first, leader)
    follow(second, leader, logs=(ONE,))
    assert leader.caught_up() == []
    follow(second, leader, logs=(OTHER,))
    assert leader.caught_up() == [2]


def test_to_ask_who_may_join_moves_no_watermark_that_somebody_waits_for() -> None:
    """The simulator of clusters, seed 4503: a leader waited for good to hear of what was committed when it looked."""
    leader, first, _second = replicas(replace(ROW, isr=ROW.isr[:2]))
    write(leader, 1)
    follow(first, leader)
    leader.caught_up()
    assert leader.advance() == [ONE]


def test_a_log_that_the_leader_does_not_have_is_not_answered() -> None:
    leader, first, _second = replicas()
    del leader.logs[OTHER]  # type: ignore[attr-defined]
    fetch = first.fetch()
    assert fetch is not None
    answer = leader.serve(fetch)
    assert isinstance(answer, Answer)
    assert answer.logs == (Go(ONE, 0),)


def test_a_position_without_its_history_is_asked_for_it_again_after_a_new_connection() -> None:
    leader, first, _second = replicas()
    write(leader, 1)
    follow(first, leader)
    fetch = first.fetch((ONE,))
    assert fetch is not None and fetch.positions[0].history is None
    again = Replica(leader.member._replace(incarnation=2), leader.logs)
    again.obey(FIRST, replace(ROW, leader_incarnation=2))
    answer = again.serve(fetch)
    assert isinstance(answer, Answer)
    assert answer.logs == (Explain(ONE),)
    first.explain_again()
    fetch = first.fetch((ONE,))
    assert fetch is not None and fetch.positions[0].history is not None


def test_a_follower_whose_next_records_are_deleted_at_the_leader_begins_anew() -> None:
    leader, first, _second = replicas()
    write(leader, 1, 2, 3)
    log_of(leader).replica_start = 2
    fetch = first.fetch((ONE,))
    assert fetch is not None
    answer = leader.serve(fetch)
    assert isinstance(answer, Answer)
    assert answer.logs == (Begin(ONE, 2),)
    taken = first.take(answer)
    assert taken is not None and taken.begins == (Begin(ONE, 2),)


def test_a_follower_that_ends_where_its_leader_begins_begins_anew_as_no_history_tells_them_apart() -> None:
    leader, first, _second = replicas()
    write(leader, 1, 2)
    follow(first, leader)
    log_of(first).high_watermark = 2
    log_of(leader).replica_start = 2
    first.explain_again()
    answer = leader.serve(first.fetch())  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    assert Begin(ONE, 2) in answer.logs
    taken = first.take(answer)
    assert taken is not None and taken.begins == (Begin(ONE, 2),)


def test_a_follower_is_not_cut_within_what_its_leader_has_deleted() -> None:
    leader, first, _second = replicas()
    write(leader, 1, 2)
    follow(first, leader)
    log_of(first).entries.append(Entry(Stint(1, MEMBERS[1].node), 9))
    log_of(leader).entries.append(Entry(Stint(2, leader.member.node), 3))
    log_of(leader).replica_start = 2
    first.explain_again()
    answer = leader.serve(first.fetch())  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    assert Cut(ONE, 2) in answer.logs
    taken = first.take(answer)
    assert taken is not None and taken.cuts == (Cut(ONE, 2),)


def test_a_follower_that_holds_what_was_committed_does_not_begin_anew_within_it() -> None:
    leader, first, _second = replicas()
    write(leader, 1, 2)
    follow(first, leader)
    log_of(first).high_watermark = 2
    answer = leader.serve(first.fetch())  # type: ignore[arg-type]
    assert isinstance(answer, Answer)
    with pytest.raises(CutBelowWatermark):
        first.take(answer._replace(logs=(Begin(ONE, 1),)))


def test_a_late_position_does_not_take_back_a_later_one() -> None:
    leader, first, second = replicas()
    write(leader, 1)
    early = first.fetch()
    follow(first, leader)
    follow(second, leader)
    assert early is not None
    leader.serve(early)
    assert committed(leader) == 1


def test_a_replica_remembers_the_row_under_which_it_followed() -> None:
    leader, first, _second = replicas()
    later = replace(ROW, isr=ROW.isr[:2], eligible=ROW.isr[2:], version=RowVersion(2, FIRST))
    leader.obey(FIRST, later)
    follow(first, leader)
    report = first.report()
    assert (report.version, report.isr, report.eligible) == (later.version, later.isr, later.eligible)
