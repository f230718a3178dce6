"""Lanes and their owners, by random comings and goings; and a partitioned queue against the order of each key."""

from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateways.delivery.groups import LaneGroup
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue, QueueSettings, View

from .logs import Logs, commit

VIEW = 7


@dataclass(eq=False)
class Worker:
    """A member of a group, and a consumer of a queue."""

    name: str = ""
    priority: int = 0
    prefetch: int = 5
    tag: str = ""
    no_ack: bool = False
    exclusive: bool = False
    held: list[Stretch] = field(default_factory=list)
    got: list[tuple[bytes, bytes]] = field(default_factory=list)

    def room(self) -> int:
        return self.prefetch - sum(stretch.count for stretch in self.held)

    def deliver(self, queue: View, stretch: Stretch) -> None:
        batch = stretch.loaded()
        for index in range(stretch.index, stretch.index + stretch.count):
            self.got.append((batch.keys[index], batch.values[index]))
        if not self.no_ack:
            self.held.append(stretch)

    def cancel(self) -> None: ...


def shares(group: LaneGroup[Worker], *members: Worker) -> list[int]:
    return [group.owners.count(member) for member in members]


def test_first_gets_all_and_the_second_half() -> None:
    group: LaneGroup[Worker] = LaneGroup(8)
    one, two = Worker(), Worker()
    group.share_out([one])
    assert shares(group, one) == [8]
    group.share_out([one, two])
    assert shares(group, one, two) == [4, 4]


def test_nobody_owns_lanes_when_all_have_gone() -> None:
    group: LaneGroup[Worker] = LaneGroup(3)
    group.share_out([Worker()])
    group.share_out([])
    assert group.owners == [None] * 3


def test_more_members_than_lanes_leave_some_waiting() -> None:
    group: LaneGroup[Worker] = LaneGroup(2)
    members = [Worker() for _ in range(5)]
    group.share_out(members)
    assert sorted(shares(group, *members)) == [0, 0, 0, 1, 1]


def test_lower_priority_waits_for_the_higher_to_go() -> None:
    group: LaneGroup[Worker] = LaneGroup(4)
    low, high = Worker(priority=0), Worker(priority=1)
    group.share_out([low])
    group.share_out([low, high])
    assert shares(group, low, high) == [0, 4]
    group.share_out([low])
    assert shares(group, low) == [4]


def test_idle_lanes_move_first() -> None:
    group: LaneGroup[Worker] = LaneGroup(4)
    one, two = Worker(), Worker()
    group.share_out([one])
    for lane in (0, 3):
        group.note_taken(lane, one, 1)
    group.share_out([one, two])
    assert group.owners == [one, two, two, one]


def test_lane_is_not_taken_from_while_the_former_owner_holds_something_of_it() -> None:
    group: LaneGroup[Worker] = LaneGroup(1)
    one, two = Worker(), Worker()
    group.share_out([one])
    group.note_taken(0, one, 2)
    group.share_out([two])
    assert group.owners == [two]
    assert not group.may_take(0, two) and not group.may_take(0, None)
    group.note_done(0, 1)
    assert not group.may_take(0, two)
    group.note_done(0, 1)
    assert group.may_take(0, two)


@settings(max_examples=100)
@given(st.integers(1, 40), st.lists(st.integers(0, 11), max_size=40))
def test_shares_are_even_and_no_more_lanes_move_than_must(lane_count: int, toggles: list[int]) -> None:
    everybody = [Worker(str(number)) for number in range(12)]
    group: LaneGroup[Worker] = LaneGroup(lane_count)
    members: list[Worker] = []
    for number in toggles:
        member = everybody[number]
        before = list(group.owners)
        joins = member not in members
        if joins:
            members.append(member)
        else:
            members.remove(member)
        group.share_out(members)
        if not members:
            continue
        found = shares(group, *members)
        assert sum(found) == lane_count and max(found) - min(found) <= 1
        moved = [lane for lane in range(lane_count) if before[lane] is not group.owners[lane]]
        if joins:
            # Only to the one who came.
            assert all(group.owners[lane] is member for lane in moved if before[lane] is not None)
        else:
            assert all(before[lane] in (member, None) for lane in moved)


# -- a partitioned queue -----------------------------------------------------------------------------------------------


class Site:
    """A partitioned queue over a log in memory, workers that come, go and crash, and what they saw."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.logs = Logs(seed)
        self.log = self.logs.create()
        self.queue = self.new_queue()
        self.workers: list[Worker] = []
        self.published: dict[bytes, list[bytes]] = {}
        self.done: dict[bytes, list[bytes]] = {}
        self.number = 0

    def new_queue(self) -> Queue:
        return Queue(
            "q",
            VIEW,
            QueueSettings(partition_count=4),
            durable=True,
            transfer=lambda queue, stretch, reason: stretch.lane.settle(stretch.seq, stretch.count),
            changed=lambda queue: None,
            now_us=self.logs.clock.wall_us,
            stream_id=self.log.stream_id,
        )

    def publish(self) -> None:
        keys = [b"k%d" % self.random.randrange(9) for _ in range(self.random.randint(1, 6))]
        values = [b"%d" % (self.number + place) for place in range(len(keys))]
        self.number += len(keys)
        run = self.log.append(keys, [b""] * len(keys), values, timestamp_us=1, route_set=(VIEW,)).run
        assert run is not None
        self.queue.arrive(self.log, run.batch, run.first, run.last)
        for key, value in zip(keys, values, strict=True):
            self.published.setdefault(key, []).append(value)
        commit(self.log)

    def join(self) -> None:
        worker = Worker(prefetch=self.random.randint(1, 6))
        self.workers.append(worker)
        self.queue.add_consumer(worker)

    def leave(self) -> None:
        """Cancels: what it holds is still to be acked."""
        if self.workers:
            worker = self.random.choice(self.workers)
            if self.queue.serves(worker):
                self.queue.remove_consumer(worker)

    def crash(self) -> None:
        if self.workers:
            worker = self.workers.pop(self.random.randrange(len(self.workers)))
            if self.queue.serves(worker):
                self.queue.remove_consumer(worker)
            self.queue.give_back(worker.held)

    def ack(self) -> None:
        if self.workers and (worker := self.random.choice(self.workers)).held:
            stretch = worker.held.pop(0)
            batch = stretch.loaded()
            for index in range(stretch.index, stretch.index + stretch.count):
                self.done.setdefault(batch.keys[index], []).append(batch.values[index])
            self.queue.settle(stretch)

    def requeue(self) -> None:
        if self.workers and (worker := self.random.choice(self.workers)).held:
            # All it has, so that nothing overtakes within the worker.
            held, worker.held = worker.held, []
            self.queue.give_back(held)

    def restart(self) -> None:
        old = self.queue
        self.workers.clear()
        self.queue = self.new_queue()
        for new, lane in zip(self.queue.lanes, old.lanes, strict=True):
            new.restore(lane.next_seq, lane.floor, list(lane.settled), [one.copy() for one in lane.arrivals()])
            new.applied.update(lane.applied)

    def check(self) -> None:
        self.queue.dispatch()
        holders: dict[int, Worker] = {}
        for worker in self.workers:
            for stretch in worker.held:
                assert holders.setdefault(stretch.lane.place, worker) is worker, "a lane is with one worker at a time"


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32))
def test_every_key_is_worked_on_in_order_whoever_comes_goes_or_crashes(seed: int) -> None:
    site = Site(seed)
    steps = {
        site.publish: 10,
        site.join: 3,
        site.leave: 1,
        site.crash: 1,
        site.ack: 10,
        site.requeue: 1,
        site.restart: 0.2,
    }
    for _ in range(150):
        site.random.choices(list(steps), list(steps.values()))[0]()
        site.check()
    site.restart()
    site.join()
    while site.queue.ready_count or site.workers[0].held:
        site.check()
        site.ack()
    assert site.done == site.published


def test_get_takes_from_lanes_that_nobody_holds_anything_of() -> None:
    site = Site(1)
    for _ in range(10):
        site.publish()
    worker = Worker(prefetch=1)
    site.queue.add_consumer(worker)
    site.queue.dispatch()
    (busy,) = (stretch.lane.place for stretch in worker.held)
    got: list[Stretch] = []
    while (stretch := site.queue.get()) is not None:
        got.append(stretch)
    assert sorted(stretch.lane.place for stretch in got) == sorted({0, 1, 2, 3} - {busy})
    site.queue.settle(got[0])
    again = site.queue.get()
    assert again is not None and again.lane.place == got[0].lane.place


def test_length_limit_drops_the_oldest_of_all_lanes() -> None:
    site = Site(1)
    site.queue.settings = QueueSettings(partition_count=4, length_max=3)
    for number in range(20):
        run = site.log.append(
            [b"k%d" % number], [b""], [b"%d" % number], timestamp_us=number + 1, route_set=(VIEW,)
        ).run
        assert run is not None
        site.queue.arrive(site.log, run.batch, run.first, run.last)
        commit(site.log)
        site.queue.keep_limits()
    left = sorted(
        int(value)
        for lane in site.queue.lanes
        for batch, low, high in lane.ready_runs()
        for value in batch.values[low:high]
    )
    assert left == [17, 18, 19]


@pytest.mark.parametrize("no_ack", [True, False])
def test_worker_gets_only_its_lanes(no_ack: bool) -> None:
    site = Site(3)
    one, two = Worker(prefetch=1000, no_ack=no_ack), Worker(prefetch=1000, no_ack=no_ack)
    for worker in (one, two):
        site.queue.add_consumer(worker)
    for _ in range(40):
        site.publish()
        site.queue.dispatch()
    assert one.got and two.got
    assert not {key for key, _value in one.got} & {key for key, _value in two.got}
    assert site.queue.ready_count == 0
