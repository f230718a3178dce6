"""A view's history and its readers, against what is in the logs; and through the journal, after a loss of power."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import RecordBatch
from headrace.gateways.delivery import history as histories
from headrace.gateways.delivery import journal
from headrace.gateways.delivery.history import Block, History
from headrace.gateways.delivery.lane import Stretch, spans_of
from headrace.gateways.delivery.queue import Queue, QueueSettings, View
from headrace.gateways.delivery.reading import ReadingView, sequence_at

from .logs import Logs, commit

VIEW, OTHER = 7, 8


class Reader:
    """A consumer that notes what it is handed under which number."""

    def __init__(self, room: int = 1 << 30) -> None:
        self.tag = "reader"
        self.no_ack = self.exclusive = False
        self.priority = 0
        self.left = room
        self.got: dict[int, bytes] = {}
        self.held: list[Stretch] = []

    def room(self) -> int:
        return self.left

    def deliver(self, queue: View, stretch: Stretch) -> None:
        batch = stretch.loaded()
        for place in range(stretch.count):
            assert stretch.seq + place not in self.got
            self.got[stretch.seq + place] = batch.values[stretch.index + place]
        self.left -= stretch.count
        self.held.append(stretch)

    def cancel(self) -> None: ...


@contextmanager
def small(count: int = 5, offsets: int = 12, block: int = 3) -> Iterator[None]:
    """Entries of a few records, so that small tests have many."""
    names = ("ENTRY_COUNT_MAX", "ENTRY_OFFSETS_MAX", "BLOCK_COUNT")
    before = [getattr(histories, name) for name in names]
    try:
        for name, value in zip(names, (count, offsets, block), strict=True):
            setattr(histories, name, value)
        yield
    finally:
        for name, value in zip(names, before, strict=True):
            setattr(histories, name, value)


class World:
    """A queue fed from some logs, its journal, and everything that readers ever saw of it."""

    def __init__(self, seed: int = 1, *, stream: bool = False, log_count: int = 2) -> None:
        self.logs = Logs(seed)
        self.sources = [self.logs.create() for _ in range(log_count)]
        self.stream = stream
        self.queue = self.new_queue()
        self.journalled: dict[bytes, bytes] = {}
        self.seen: dict[int, bytes] = {}
        self.number = 0
        self.waiting: list[tuple[PartitionLog, RecordBatch, int, int, set[bytes]]] = []
        self.copies: set[bytes] = set()
        self.keep()

    def new_queue(self) -> Queue:
        return Queue(
            "q",
            VIEW,
            QueueSettings(stream=self.stream),
            durable=True,
            transfer=lambda queue, stretch, reason: None,
            changed=lambda queue: None,
            now_us=self.logs.clock.wall_us,
            stream_id=self.sources[0].stream_id,
        )

    @property
    def history(self) -> History:
        return self.queue.history

    def publish(self, source: int = 0, count: int = 1, *, mine: bool = True) -> None:
        log = self.sources[source]
        self.logs.clock.now_us += 1_000_000
        values = [b"%d" % (self.number + place) for place in range(count)]
        self.number += count
        run = log.append(
            [b"k"] * count,
            [b""] * count,
            values,
            timestamp_us=self.logs.clock.now_us,
            route_set=(VIEW, OTHER) if mine else (OTHER,),
        ).run
        assert run is not None
        if mine:
            self.queue.arrive(log, run.batch, run.first, run.last)

    def copy(self, source: int = 0, count: int = 1) -> None:
        """Copies for the view: nobody is routed to, and only the view knows of them."""
        log = self.sources[source]
        values = [b"c%d" % (self.number + place) for place in range(count)]
        self.number += count
        run = log.append([b"k"] * count, [b""] * count, values, timestamp_us=self.logs.clock.now_us).run
        assert run is not None
        self.waiting.append((log, run.batch, run.first, run.last, set(values)))

    def tell(self) -> None:
        """Copies are told of some time after they were made."""
        for log, batch, first, last, values in self.waiting:
            newest_us, base = self.logs.clock.now_us, batch.base_offset
            self.queue.history.arrive_copied(log, base + first, base + last, newest_us, sum(map(len, values)))
            self.copies |= values
        self.waiting.clear()

    def commit(self) -> None:
        for log in self.sources:
            commit(log)

    def keep(self) -> None:
        """As the broker writes it: the logs first, then blocks and state."""
        self.commit()
        for number, block in self.history.changed_blocks():
            self.journalled[journal.block_key(VIEW, number)] = b"" if block is None else journal.encode_block(block)
        state = journal.ViewState(journal.FORMAT, [], history=journal.history_state(self.history))
        self.journalled[journal.view_key(VIEW)] = journal.encode_view(state)
        self.history.note_kept(self.history.mark)
        self.kept_copies = set(self.copies)
        self.kept_ends = {log.stream_id: int(log.high_watermark) for log in self.sources}

    def lose_power(self) -> None:
        self.sources = self.logs.lose_power(*self.sources)
        self.queue = self.new_queue()
        self.copies = set(self.kept_copies)
        self.waiting.clear()
        restored = journal.Restored((0, key, value) for key, value in self.journalled.items())
        state = restored.views[VIEW].history
        assert state is not None
        logs = {log.stream_id.bytes: log for log in self.sources}
        journal.restore_history(
            self.history, state, restored.blocks.get(VIEW, ()), lambda stream, _partition: logs.get(stream)
        )
        last_source = self.history.last_source
        for log in sorted(self.sources, key=lambda log: log is not last_source):
            for batch in batches_from(log, max(self.history.applied.get(log, 0), log.log_start)):
                first = batch.index_of(self.history.applied.get(log, 0))
                for low, high in spans_of(batch, first, batch.count, VIEW):
                    self.history.arrive(log, batch, low, high)

    def read(self, start: int, *, room: int = 1 << 30) -> dict[int, bytes]:
        """What a reader from there on sees now. Whatever anybody saw under a number must be there again."""
        reader = Reader(room)
        ReadingView(self.queue, reader, start).dispatch()
        for seq, value in reader.got.items():
            assert self.seen.setdefault(seq, value) == value
        return reader.got

    def in_logs(self) -> set[bytes]:
        """All that is committed and routed to the view."""
        found: set[bytes] = set()
        for log in self.sources:
            for batch in batches_from(log, log.log_start):
                first = batch.index_of(log.log_start)
                for low, high in spans_of(batch, first, batch.index_of(log.high_watermark), VIEW):
                    found.update(batch.values[low:high])
                found.update(self.copies & set(batch.values[first:]))
        return found


def batches_from(log: PartitionLog, offset: int) -> Iterator[RecordBatch]:
    while runs := log.read(offset):
        for run in runs:
            yield run.batch
        offset = runs[-1].batch.next_offset


def values(first: int, end: int) -> dict[int, bytes]:
    return {number: b"%d" % number for number in range(first, end)}


def test_reader_sees_what_was_routed_under_dense_numbers() -> None:
    with small():
        world = World(log_count=1)
        for _ in range(40):
            world.publish(count=3)
        world.keep()
        for start in (0, 1, 4, 5, 50, 119):
            assert world.read(start) == values(start, 120)
        assert world.read(120) == {}


def test_records_of_others_between_are_passed_over() -> None:
    with small():
        world = World(log_count=1)
        mine: list[bytes] = []
        for number in range(60):
            is_mine = number % 7 in (1, 2)
            if is_mine:
                mine.append(b"%d" % world.number)
            world.publish(mine=is_mine)
        world.keep()
        assert world.read(3) == dict(list(enumerate(mine))[3:])


def test_nothing_is_seen_before_it_is_committed() -> None:
    world = World(log_count=1)
    world.publish()
    world.keep()
    world.publish(count=3)
    reader = Reader()
    view = ReadingView(world.queue, reader, 1)
    view.dispatch()
    assert reader.got == {} and view.lane.hidden_in is world.sources[0]
    world.commit()
    view.dispatch()
    assert reader.got == values(1, 4)


def test_where_logs_alternate_nothing_is_seen_before_the_order_is_journalled() -> None:
    world = World()
    world.publish(0)
    world.keep()
    world.publish(1)
    world.publish(0)
    world.commit()
    assert world.read(0) == values(0, 1)
    world.keep()
    assert world.read(0) == values(0, 3)


def test_reader_without_room_waits_and_goes_on_where_it_was() -> None:
    with small():
        world = World(log_count=1)
        world.publish(count=20)
        world.keep()
        reader = Reader(room=7)
        view = ReadingView(world.queue, reader, 2)
        view.dispatch()
        assert reader.got == values(2, 9)
        world.publish(count=10)
        world.keep()
        for stretch in reader.held:
            view.settle(stretch)
        reader.left = 100
        view.dispatch()
        assert reader.got == values(2, 30)


def test_reader_at_the_end_gets_what_comes_only() -> None:
    world = World(log_count=1)
    world.publish(count=5)
    world.keep()
    reader = Reader()
    view = ReadingView(world.queue, reader, 5)
    view.dispatch()
    for _ in range(3):
        world.publish(count=2)
    world.publish(mine=False)
    world.publish()
    world.keep()
    view.dispatch()
    assert list(reader.got) == list(range(5, 12))
    assert reader.got[11] == b"12"


def test_what_retention_took_is_passed_over_and_the_rest_keeps_its_numbers() -> None:
    with small():
        world = World(log_count=1)
        for _ in range(60):
            world.publish(count=2)
            world.keep()
        log = world.sources[0]
        log.delete_before(33)
        commit(log)
        assert world.read(0) == values(33, 120)
        world.history.forget_lost()
        assert 0 < world.history.first_seq <= 33
        assert world.read(0) == values(33, 120)


def test_log_that_is_gone_leaves_numbers_without_records() -> None:
    with small():
        world = World()
        world.publish(0, count=4)
        world.publish(1, count=4)
        world.publish(0, count=4)
        world.keep()
        world.history.forget_source(world.sources[1])
        assert world.read(0) == values(0, 4) | values(8, 12)
        assert world.read(5) == values(8, 12)
        world.keep()
        world.lose_power()
        assert world.read(0) == values(0, 4) | values(8, 12)


@pytest.mark.parametrize("count", [1, 3])
def test_time_leads_to_the_first_record_of_it_or_later(count: int) -> None:
    with small():
        world = World(log_count=1)
        times: list[int] = []
        for number in range(30):
            world.publish(count=count, mine=number % 3 != 0)
            if number % 3 != 0:
                times += [world.logs.clock.now_us] * count
        world.keep()
        for time_us in range(times[0] - 2_000_000, times[-1] + 2_000_000, 500_000):
            expected = sum(one < time_us for one in times)
            assert sequence_at(world.history, VIEW, time_us) == expected


def test_time_is_found_before_the_journal_has_it() -> None:
    world = World()
    for source in (0, 1, 0):
        world.publish(source)
    now_us = world.logs.clock.now_us
    assert [sequence_at(world.history, VIEW, now_us - ago * 1_000_000) for ago in (-1, 0, 1, 2, 3)] == [3, 2, 1, 0, 0]


def test_stream_lets_go_by_age_and_by_size() -> None:
    with small():
        world = World(stream=True, log_count=1)
        for _ in range(40):
            world.publish(count=1)
        world.keep()
        assert not world.history.expire(before_us=None, bytes_max=None)
        # Ten records have one digit, thirty have two.
        assert world.history.byte_count == 70
        assert world.history.expire(before_us=None, bytes_max=30)
        assert world.history.first_seq == 25 and world.history.lowest_offset(world.sources[0]) == 25
        assert world.history.expire(before_us=world.logs.clock.now_us - 7_000_000, bytes_max=None)
        assert world.history.first_seq == 30
        assert world.history.expire(before_us=world.logs.clock.now_us + 1, bytes_max=0)
        # The newest entry stays.
        assert world.history.count == 5
        assert world.read(0) == values(35, 40)


def test_history_of_a_queue_is_bounded() -> None:
    with small(count=1, block=4):
        histories.ENTRIES_MAX, before = 10, histories.ENTRIES_MAX
        try:
            world = World(log_count=1)
            for _ in range(50):
                world.publish()
            world.keep()
            assert len(world.history) <= 14
            assert world.read(0) == values(world.history.first_seq, 50)
            world.keep()
            world.lose_power()
            assert world.read(0) == values(world.history.first_seq, 50)
        finally:
            histories.ENTRIES_MAX = before


def changed(world: World) -> list[int]:
    return [number for number, _block in world.history.changed_blocks()]


def test_journal_writes_only_blocks_that_changed() -> None:
    with small(block=2):
        world = World(log_count=1)
        for _ in range(20):
            world.publish(count=5)
        assert changed(world) == list(range(10))
        assert changed(world) == []
        world.publish(count=1)
        assert changed(world) == [9, 10]
        world.publish(count=1)
        assert changed(world) == []


def test_blocks_newer_than_the_state_are_cut_back_to_it() -> None:
    with small(block=2):
        world = World(log_count=1)
        world.publish(count=7)
        world.keep()
        state = world.journalled[journal.view_key(VIEW)]
        for _ in range(5):
            world.publish(count=5)
        world.keep()
        world.journalled[journal.view_key(VIEW)] = state
        world.lose_power()
        assert world.read(0) == values(0, 32)


def test_block_form_is_its_own_inverse() -> None:
    block = Block(5, [histories.Entry(1, None, 2, 3, 4, 5, True)])
    key, value = journal.block_key(VIEW, 5 // histories.BLOCK_COUNT), journal.encode_block(block)
    (found,) = journal.Restored([(0, key, value)]).blocks[VIEW]
    assert found == journal.BlockState(5, [(1, b"", 0, 2, 3, 4, 5, True)])


def test_gap_after_a_crash_holds_no_number() -> None:
    world = World(log_count=1)
    world.publish(count=3)
    world.keep()
    world.publish(count=3)
    world.lose_power()
    world.number = 3
    world.publish(count=2)
    world.keep()
    assert world.read(0) == values(0, 5)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_number_once_seen_stays_with_its_record(seed: int) -> None:
    random = Random(seed)
    with small(count=random.randint(1, 6), offsets=random.randint(3, 15), block=random.randint(1, 4)):
        world = World(seed, stream=random.random() < 0.5, log_count=random.randint(1, 3))
        steps: list[tuple[int, Callable[[], object]]] = [
            (
                12,
                lambda: world.publish(
                    random.randrange(len(world.sources)), random.randint(1, 4), mine=random.random() < 0.7
                ),
            ),
            (2, lambda: world.copy(random.randrange(len(world.sources)), random.randint(1, 4))),
            (2, world.tell),
            (4, world.commit),
            (3, world.keep),
            (6, lambda: world.read(random.randint(0, world.history.next_seq + 2), room=random.choice((3, 1000)))),
            (1, world.lose_power),
            (1, lambda: trim(world, random)),
        ]
        for _ in range(80):
            _weight, step = random.choices(steps, [weight for weight, _step in steps])[0]
            step()
        world.tell()
        world.keep()
        everything = world.read(0)
        assert set(everything.values()) == world.in_logs()
        numbers = list(everything)
        assert numbers == sorted(numbers)


def trim(world: World, random: Random) -> None:
    log = random.choice(world.sources)
    if log.high_watermark > log.log_start:
        # As the broker's pins have it: nothing that the journal does not know of.
        log.delete_before(random.randint(log.log_start, max(log.log_start, world.kept_ends[log.stream_id])))
        commit(log)
