"""Members, generations and commits of one group, step by step; then by random comings, goings and commits."""

from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core_log.errors import Refused
from headrace.core_log.ids import StreamId
from headrace.gateways.delivery.consumer_groups import (
    ConsumerGroup,
    Fenced,
    GroupInUse,
    Held,
    Member,
    NotHeld,
    OffsetBehind,
    Start,
    UnknownMember,
)
from headrace.gateways.delivery.consumer_groups_assignment import Slot

A, B = (StreamId(UUID(int=number)) for number in (1, 2))
COUNTS = {A: 4, B: 2}
SESSION_MS = 1000
REBALANCE_MS = 5000


def member(name: str, *topics: StreamId, start: Start = Start.FIRST) -> Member:
    return Member(name, "user", frozenset(topics or (A,)), SESSION_MS, REBALANCE_MS, start)


def slot(number: int, stream: StreamId = A) -> Slot:
    return Slot(stream, number)


def held(group: ConsumerGroup, name: str) -> list[int]:
    return [one.slot.partition for one in group.standing(name).holds]


def two_members() -> ConsumerGroup:
    """x has everything of A; y has come, and x is asked to give up half."""
    group = ConsumerGroup()
    group.join(member("x"), COUNTS, 0)
    group.join(member("y"), COUNTS, 0)
    return group


def shared() -> ConsumerGroup:
    """x has given it up."""
    group = two_members()
    group.heartbeat("x", group.standing("x").generation, 0)
    return group


def test_first_member_holds_everything_from_its_first_generation_on() -> None:
    group = ConsumerGroup()
    told = group.join(member("x"), COUNTS, 0)
    assert told.generation == 1
    assert told.holds == tuple(Held(slot(number), 1) for number in range(4))
    assert told.give_up == ()


def test_second_member_gets_nothing_before_the_first_has_given_it_up() -> None:
    group = two_members()
    assert held(group, "y") == []
    told = group.heartbeat("x", 1, 0)
    assert [one.slot.partition for one in told.holds] == [0, 1]
    assert told.give_up == (slot(2), slot(3))
    assert held(group, "y") == []
    group.heartbeat("x", told.generation, 0)
    assert group.standing("y").holds == (Held(slot(2), 2), Held(slot(3), 2))
    assert group.standing("x").give_up == ()


def test_generation_that_was_never_told_cannot_be_acted_upon() -> None:
    group = two_members()
    with pytest.raises(Refused, match="generation 2 was never told to this member; the last one was 1"):
        group.heartbeat("x", 2, 0)


def test_who_is_not_heard_of_loses_everything_to_the_others() -> None:
    group = two_members()
    group.touch(group.member("y"), 500)
    assert group.expire(999, 0) == {}
    assert group.next_deadline_ms() == 1000
    assert group.expire(1000, 0) == {"x": "not heard of for 1000 ms"}
    assert held(group, "y") == [0, 1, 2, 3]
    with pytest.raises(UnknownMember, match="no member 'x'"):
        group.heartbeat("x", 1, 1000)


def test_who_lives_but_gives_nothing_up_is_put_out() -> None:
    group = two_members()
    for now in range(0, REBALANCE_MS, 500):
        for name in ("x", "y"):
            group.heartbeat(name, 1 if name == "x" else 2, now)
        assert group.expire(now, 0) == {}
    assert group.expire(REBALANCE_MS, 0) == {"x": "did not give up what it was asked for in 5000 ms"}
    assert held(group, "y") == [0, 1, 2, 3]


def test_what_one_leaves_goes_to_the_others_at_once() -> None:
    group = shared()
    group.leave("x", 0, 7)
    assert held(group, "y") == [0, 1, 2, 3]
    group.leave("y", 0, 8)
    assert (group.tenures, group.empty_since_us) == ({}, 8)


def test_member_keeps_what_it_was_not_told_of_yet_when_the_other_goes_again() -> None:
    group = two_members()
    group.leave("y", 0, 0)
    assert group.standing("x").holds == tuple(Held(slot(number), 1) for number in range(4))


def test_what_it_was_told_to_give_up_comes_back_as_a_new_tenure() -> None:
    group = two_members()
    group.standing("x")
    group.leave("y", 0, 0)
    assert [one.since for one in group.standing("x").holds] == [1, 1, 3, 3]


def test_member_that_wants_another_topic_gives_up_the_old_one_first() -> None:
    group = shared()
    group.ask_for("x", frozenset([B]), COUNTS, 0)
    told = group.standing("x")
    assert told.holds == (Held(slot(0, B), 3), Held(slot(1, B), 3))
    assert told.give_up == (slot(0), slot(1))
    assert group.streams() == {A, B}
    group.heartbeat("x", told.generation, 0)
    assert held(group, "y") == [0, 1, 2, 3]


def test_added_partitions_are_given_out_and_those_of_a_deleted_stream_are_gone() -> None:
    group = ConsumerGroup()
    group.join(member("x", A, B), COUNTS, 0)
    assert not group.lay_out(COUNTS, 0)
    assert group.lay_out({A: 5, B: 2}, 0)
    assert held(group, "x") == [0, 1, 2, 3, 4, 0, 1]
    assert group.lay_out({A: 5}, 0)
    assert held(group, "x") == [0, 1, 2, 3, 4]


# -- offsets ----------------------------------------------------------------------------------------------------


def commit(group: ConsumerGroup, name: str, generation: int, offsets: dict[Slot, int]) -> None:
    group.check_commit(name, generation, offsets)
    group.commit(offsets, 0)


def test_holder_commits_forward() -> None:
    group = shared()
    commit(group, "x", 2, {slot(0): 5})
    commit(group, "x", 2, {slot(0): 5, slot(1): 3})
    assert {one.partition: found.offset for one, found in group.committed.items()} == {0: 5, 1: 3}
    assert group.changed_offsets == {slot(0), slot(1)}


def test_commit_behind_what_is_committed_is_refused() -> None:
    group = shared()
    commit(group, "x", 2, {slot(0): 5})
    with pytest.raises(OffsetBehind, match="offset 4 of partition 0 is behind 5"):
        commit(group, "x", 2, {slot(0): 4})


def test_commit_for_what_another_holds_is_refused_and_nothing_of_it_counts() -> None:
    group = shared()
    with pytest.raises(NotHeld, match="partition 2 is not held by this member"):
        commit(group, "x", 2, {slot(0): 5, slot(2): 5})
    assert group.committed == {}


def test_who_keeps_a_partition_while_others_come_may_commit_with_its_old_generation() -> None:
    group = shared()
    group.join(member("z"), COUNTS, 0)
    commit(group, "x", 2, {slot(0): 5})


def test_what_is_to_be_given_up_can_still_be_committed() -> None:
    group = two_members()
    told = group.standing("x")
    commit(group, "x", 1, {told.give_up[0]: 5})
    commit(group, "x", told.generation, {told.give_up[0]: 6})


def test_commit_of_a_tenure_that_is_over_is_refused_even_if_the_member_got_the_partition_back() -> None:
    group = two_members()
    group.standing("x")
    group.leave("y", 0, 0)
    with pytest.raises(Fenced, match="generation 2 is over for partition 3"):
        commit(group, "x", 2, {slot(3): 5})
    commit(group, "x", 3, {slot(3): 5})


def test_commit_of_a_generation_to_come_is_refused() -> None:
    with pytest.raises(Refused, match="generation 9 is not there yet; the group is at 2"):
        commit(shared(), "x", 9, {slot(0): 5})


def test_outsider_commits_only_where_no_member_reads() -> None:
    group = shared()
    with pytest.raises(GroupInUse, match=r"members of the group hold partitions \[0\]"):
        group.check_commit_from_outside({slot(0): 5, slot(0, B): 5})
    group.check_commit_from_outside({slot(0, B): 5})
    group.commit({slot(0, B): 5}, 0)
    with pytest.raises(OffsetBehind):
        group.check_commit_from_outside({slot(0, B): 4})


def test_reset_moves_back_and_fences_what_was_read_before() -> None:
    group = shared()
    commit(group, "x", 2, {slot(0): 5})
    with pytest.raises(GroupInUse, match="cannot be reset"):
        group.reset({slot(0): 1}, 0)
    group.reset({slot(0): 1}, 0, force=True)
    assert group.committed[slot(0)].offset == 1
    with pytest.raises(Fenced):
        commit(group, "x", 2, {slot(0): 6})
    commit(group, "x", 2, {slot(1): 6})
    assert group.standing("x").holds == (Held(slot(0), 3), Held(slot(1), 1))


def test_new_group_begins_where_its_member_wants_and_added_partitions_begin_at_their_first() -> None:
    group = ConsumerGroup()
    group.join(member("x", start=Start.NEXT), {A: 1}, 0)
    assert group.unplaced() == [(slot(0), Start.NEXT)]
    group.place(slot(0), 17, 0)
    assert group.unplaced() == []
    group.lay_out({A: 2}, 0)
    assert group.unplaced() == [(slot(1), Start.FIRST)]


def test_group_is_over_when_it_had_neither_members_nor_commits_for_so_long() -> None:
    group = shared()
    commit(group, "x", 2, {slot(0): 5})
    assert not group.is_over(1_000_000)
    group.leave("x", 0, 10)
    group.leave("y", 0, 20)
    assert not group.is_over(19)
    assert group.is_over(20)
    group.commit({slot(0): 6}, 30)
    assert not group.is_over(29)


# -- by chance --------------------------------------------------------------------------------------------------


class Life(RuleBasedStateMachine):
    """Whatever members do: one holder at a time, nobody unserved, no offset backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.group = ConsumerGroup()
        self.counts = dict(COUNTS)
        self.now = 0
        self.names = 0
        # What each client believes: the last generation it acted upon, and what it works on.
        self.acted: dict[str, int] = {}
        self.works_on: dict[str, set[Slot]] = {}
        self.granted: dict[tuple[Slot, int], str] = {}
        self.high: dict[Slot, int] = {}

    def _hear(self, name: str, *, act: bool) -> None:
        told = self.group.standing(name)
        if act:
            self.works_on[name] = {one.slot for one in told.holds}
            self.acted[name] = told.generation

    def _forget(self, name: str) -> None:
        """It knows, or the broker waited long enough for it to have noticed."""
        self.acted.pop(name, None)
        self.works_on.pop(name, None)

    @rule(topics=st.sampled_from([(A,), (B,), (A, B)]))
    def join(self, topics: tuple[StreamId, ...]) -> None:
        self.names += 1
        name = f"m{self.names}"
        self.group.join(member(name, *topics), self.counts, self.now)
        self._hear(name, act=True)

    @precondition(lambda self: self.acted)
    @rule(data=st.data(), act=st.booleans())
    def heartbeat(self, data: st.DataObject, act: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.acted)))
        self.group.heartbeat(name, self.acted[name], self.now)
        self._hear(name, act=act)

    @precondition(lambda self: self.acted)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.acted)))
        self.group.leave(name, self.now, self.now)
        self._forget(name)

    @rule(step=st.integers(1, 600))
    def time_passes(self, step: int) -> None:
        self.now += step
        for name in self.group.expire(self.now, self.now):
            self._forget(name)

    @rule()
    def stream_grows(self) -> None:
        self.counts[A] += 1
        self.group.lay_out(self.counts, self.now)

    @precondition(lambda self: self.acted)
    @rule(data=st.data(), offset=st.integers(0, 50))
    def commit(self, data: st.DataObject, offset: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.acted)))
        at = data.draw(st.sampled_from([slot(0), slot(1), slot(0, B)]))
        generation = data.draw(st.integers(0, self.acted[name]))
        tenure = self.group.tenures.get(at)
        lawful = tenure is not None and tenure.member == name and generation >= tenure.since
        try:
            commit(self.group, name, generation, {at: offset})
        except (NotHeld, Fenced):
            assert not lawful
        except OffsetBehind:
            assert offset < self.high[at]
        else:
            assert lawful
            assert offset >= self.high.get(at, 0)
            self.high[at] = offset

    @rule(offset=st.integers(0, 50))
    def reset(self, offset: int) -> None:
        self.group.reset({slot(0): offset}, self.now, force=True)
        self.high[slot(0)] = offset

    @invariant()
    def one_holder_of_a_slot_begins_in_a_generation(self) -> None:
        for at, tenure in self.group.tenures.items():
            assert self.granted.setdefault((at, tenure.since), tenure.member) == tenure.member
            assert tenure.since <= self.group.generation

    @invariant()
    def nobody_works_on_what_another_was_given(self) -> None:
        for name, works_on in self.works_on.items():
            others = {at for at, tenure in self.group.tenures.items() if tenure.member != name}
            assert not works_on & others

    @invariant()
    def every_slot_that_somebody_asks_for_is_held_by_one_who_does(self) -> None:
        for stream, count in self.counts.items():
            wish = {name for name, one in self.group.members.items() if stream in one.topics}
            for number in range(count):
                tenure = self.group.tenures.get(Slot(stream, number))
                if wish:
                    assert tenure is not None
                    assert tenure.member in (wish if tenure.revoked is None else self.group.members)

    @invariant()
    def committed_is_what_was_committed_last(self) -> None:
        assert {at: one.offset for at, one in self.group.committed.items()} == self.high


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
