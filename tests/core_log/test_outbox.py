"""An outbox over real logs: whatever is sent again, and wherever it crashed, each record is in its target once."""

from random import Random
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.config import LogConfig
from headrace.core_log.directory import LogDirectory
from headrace.core_log.log import PartitionLog
from headrace.core_log.outbox import Outbox, TargetPartition, Transfer
from headrace.core_log.storage.memory import MemoryStorage

from .power.inline import commit, create_logs, open_directory

OWNER = b"owner of outbox1"
SMALL = LogConfig(segment_bytes_max=1024, offsets_reserved=100, compression="none")
HERE, THERE = TargetPartition(UUID(int=1)), TargetPartition(UUID(int=2))


def test_numbers_are_dense_for_each_target() -> None:
    box: Outbox[str] = Outbox(OWNER)
    firsts = [box.assign(target, count, "").first for target, count in ((HERE, 2), (THERE, 1), (HERE, 3), (HERE, 1))]
    assert firsts == [0, 0, 2, 5]
    assert (box.next_number(HERE), box.next_number(THERE)) == (6, 1)


def test_everything_below_the_first_pending_number_is_settled() -> None:
    box: Outbox[str] = Outbox(OWNER)
    first, second, third = (box.assign(HERE, 2, name) for name in "abc")
    box.settle(second)
    assert box.settled_below(HERE) == 0
    box.settle(first)
    assert box.settled_below(HERE) == 4
    box.settle(third)
    assert (box.settled_below(HERE), len(box)) == (6, 0)


def test_numbers_that_were_taken_back_are_assigned_anew() -> None:
    box: Outbox[str] = Outbox(OWNER)
    box.assign(HERE, 2, "sent")
    box.assign(HERE, 1, "goes elsewhere")
    box.assign(HERE, 1, "stays")
    assert [one.what for one in box.take_back(HERE, 2)] == ["goes elsewhere", "stays"]
    assert box.assign(HERE, 1, "stays").first == 2
    assert [one.what for one in box.pending(HERE)] == ["sent", "stays"]


def test_what_was_written_down_is_pending_again_in_the_order_of_its_numbers() -> None:
    box: Outbox[str] = Outbox(OWNER)
    box.restore(HERE, 10, [(7, 3, "later"), (2, 2, "first"), (4, 3, "second")])
    assert [one.what for one in box.pending(HERE)] == ["first", "second", "later"]
    assert box.settled_below(HERE) == 2
    assert box.assign(HERE, 1, "new").first == 10


class World:
    """An owner with a journal and two targets. It is told what to move, in an order of its own, and may die between
    any two steps; then it does what outbox.py says."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.storage = MemoryStorage()
        self.directory: LogDirectory = open_directory(self.storage)
        self.logs = create_logs(self.directory, 3, SMALL)
        self.wanted: dict[int, int] = {}
        self.start()

    def start(self) -> None:
        """What a restart does. The journal's records: "k" what is moved under which numbers, "s" what is settled."""
        self.box: Outbox[tuple[int, ...]] = Outbox(OWNER)
        self.journalled: list[Transfer[tuple[int, ...]]] = []
        self.sent: list[Transfer[tuple[int, ...]]] = []
        self.settled: set[int] = set()
        pending: dict[int, dict[int, tuple[int, ...]]] = {1: {}, 2: {}}
        following = {1: 0, 2: 0}
        for _offset, key, value in self.logs[0].entries():
            place, first, *what = map(int, value.split())
            if key == b"k":
                pending[place][first] = tuple(what)
                following[place] = first + len(what)
            else:
                self.settled.update(pending[place].pop(first))
        for place in (1, 2):
            self.box.restore(
                self.target(place),
                following[place],
                ((first, len(what), what) for first, what in pending[place].items()),
            )
            reached = self.logs[place].next_sequence(OWNER, 0)
            for one in self.box.pending(self.target(place)):
                (self.sent if one.end <= reached else self.journalled).append(one)
        under_way = {number for one in self.box.pending() for number in one.what}
        self.to_do = [number for number in self.wanted if number not in under_way | self.settled]

    def target(self, place: int) -> TargetPartition:
        return TargetPartition(self.logs[place].stream_id, self.logs[place].partition)

    def place(self, transfer: Transfer[tuple[int, ...]]) -> int:
        return transfer.target.partition

    def step(self) -> None:
        self.random.choice((self.want, self.assign, self.send, self.settle, self.commit, self.crash))()

    def want(self) -> None:
        for _ in range(self.random.randint(1, 5)):
            self.wanted[len(self.wanted)] = self.random.choice((1, 2))
            self.to_do.append(len(self.wanted) - 1)

    def note(self, key: bytes, transfer: Transfer[tuple[int, ...]]) -> None:
        value = " ".join(map(str, (self.place(transfer), transfer.first, *transfer.what))).encode()
        self.logs[0].append([key], [b""], [value], timestamp_us=1)

    def assign(self) -> None:
        self.random.shuffle(self.to_do)
        for place in (1, 2):
            mine = [number for number in self.to_do if self.wanted[number] == place][: self.random.randint(1, 4)]
            if mine:
                transfer = self.box.assign(self.target(place), len(mine), tuple(mine))
                self.note(b"k", transfer)
                self.logs[0].when_committed(self.logs[0].end, lambda one=transfer: self.journalled.append(one))
                self.to_do = [number for number in self.to_do if number not in mine]

    def send(self) -> None:
        while self.journalled and self.random.random() < 0.8:
            transfer = self.journalled.pop(0)
            values = [b"%d" % number for number in transfer.what]
            log = self.logs[self.place(transfer)]
            appended = log.append_dense(
                self.box.producer(transfer),
                [b""] * len(values),
                [b""] * len(values),
                values,
                settled=self.box.settled_below(transfer.target),
                timestamp_us=1,
            )
            log.when_committed(appended.next_offset, lambda one=transfer: self.sent.append(one))

    def settle(self) -> None:
        self.random.shuffle(self.sent)
        for transfer in self.sent[:3]:
            self.note(b"s", transfer)
            self.box.settle(transfer)
            self.settled.update(transfer.what)
        del self.sent[:3]

    def commit(self) -> None:
        for log in self.random.sample(self.logs, self.random.randint(1, 3)):
            commit(self.directory, log)

    def crash(self) -> None:
        power = self.random.random() < 0.5
        self.storage = self.storage.power_loss(self.random) if power else self.storage.process_crash()
        self.directory = open_directory(self.storage)
        (stream,) = self.directory.streams.values()
        self.logs = list(stream.partitions)
        self.start()

    def finish(self) -> None:
        while self.to_do or len(self.box):
            for step in (self.assign, self.commit, self.send, self.commit, self.settle):
                step()


def found(log: PartitionLog) -> list[int]:
    return sorted(int(value) for _offset, _key, value in log.entries())


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(5, 80))
def test_each_record_is_in_its_target_once_wherever_it_crashed(seed: int, steps: int) -> None:
    world = World(seed)
    for _ in range(steps):
        world.step()
    world.finish()
    commit(world.directory, world.logs[1])
    commit(world.directory, world.logs[2])
    for place in (1, 2):
        assert found(world.logs[place]) == [number for number, where in world.wanted.items() if where == place]


def test_transfers_do_not_begin_in_the_middle_of_what_is_kept() -> None:
    box: Outbox[str] = Outbox(OWNER)
    box.assign(HERE, 3, "whole")
    with pytest.raises(AssertionError, match="appended whole"):
        box.take_back(HERE, 1)
