"""A lane against a plain list of records: nothing lost, nothing twice, every count exact, whatever happens when."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from random import Random

import pytest

from headrace.core_log.config import LogConfig
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import RecordBatch
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery import release as releases
from headrace.gateways.delivery.lane import Extent, Lane, Stretch, spans_of
from headrace.gateways.delivery.release import Release

from .logs import Logs, commit

OURS, THEIRS = 7, 8
ROUTES: Sequence[tuple[int, ...]] = ((OURS,), (OURS,), (OURS, THEIRS), (THEIRS,), ())


class State(Enum):
    READY = auto()
    UNACKED = auto()
    SETTLED = auto()


@dataclass(slots=True, eq=False)
class Known:
    """What the list knows of one record that was routed to the lane."""

    source: PartitionLog
    offset: int
    value: bytes
    state: State = State.READY
    deliveries: int = 0

    @property
    def is_gone(self) -> bool:
        """Its log has let go of it; a lane may still have it in memory, or find that it is lost."""
        return self.offset < self.source.log_start


def new_lane() -> Lane:
    return Lane(partial(spans_of, view_id=OURS))


def publish(lane: Lane | None, log: PartitionLog, values: Sequence[bytes], routes: tuple[int, ...] = (OURS,)) -> int:
    """Append, tell the lane if the records are for it, and return the first offset."""
    count = len(values)
    appended = log.append([b"key"] * count, [b""] * count, values, timestamp_us=1, route_set=routes)
    run = appended.run
    assert run is not None
    if lane is not None and OURS in routes:
        lane.arrive(log, run.batch, run.first, run.last)
    return int(appended.next_offset) - count


def values_of(stretch: Stretch) -> list[bytes]:
    batch = stretch.loaded()
    return batch.values[stretch.index : stretch.index + stretch.count]


def restarted(lane: Lane, found: PartitionLog | None = None) -> Lane:
    """A lane that knows only what the journal would; `found` is what its only log is now."""
    heir = new_lane()
    extents = [
        Extent(one.seq, one.count, found or one.source, one.first, one.end, exact=one.exact) for one in lane.arrivals()
    ]
    heir.restore(lane.next_seq, lane.floor, list(lane.settled), extents)
    heir.applied.update({found or log: end for log, end in lane.applied.items()})
    return heir


def drained(lane: Lane) -> Iterator[bytes]:
    while (stretch := lane.take(1000)) is not None:
        yield from values_of(stretch)


def check_counts(lane: Lane) -> None:
    assert lane.ready_count >= 0 and lane.unacked_count >= 0
    assert lane.floor + lane.settled.count + lane.ready_count + lane.unacked_count == lane.next_seq
    assert lane.floor not in lane.settled and all(first > lane.floor for first, _end in lane.settled)


@dataclass
class Walk:
    """Random steps over a lane and the list."""

    random: Random
    # False when extents are folded: then the order holds per source only.
    total_order: bool
    logs: list[PartitionLog] = field(default_factory=list)
    known: list[Known] = field(default_factory=list)
    held: list[tuple[Stretch, list[Known]]] = field(default_factory=list)
    # Logs that only copies are written to.
    others: list[PartitionLog] = field(default_factory=list)
    number: int = 0

    def __post_init__(self) -> None:
        shared = Logs(self.random.randrange(1 << 30), tail_bytes=self.random.choice((500, 4000, 100_000)))
        self.logs = [shared.create() for _ in range(self.random.choice((1, 2, 3)))]
        self.shared = shared
        self.lane = new_lane()

    def run(self, steps: int) -> None:
        # Some walks mostly publish, some mostly take; a lane that is never empty has its own mistakes.
        kinds = {
            self.publish: self.random.choice((5, 10, 20)),
            self.extend: 1,
            self.copy: 1,
            self.seal: 3,
            self.commit: self.random.choice((1, 5)),
            self.take: self.random.choice((5, 10)),
            self.settle: self.random.choice((2, 8)),
            self.give_back: self.random.choice((1, 4)),
            self.drop_head: 1,
            self.purge: self.random.choice((0, 0, 2)),
            self.restart: self.random.choice((0, 1, 2)),
            self.retain: self.random.choice((0, 0, 1)),
            self.move: self.random.choice((0, 1, 3)),
        }
        for step in self.random.choices(list(kinds), list(kinds.values()), k=steps):
            step()
            self.check()
        self.finish()

    # -- steps --------------------------------------------------------------------------------------------------

    def _values(self) -> list[bytes]:
        count = self.random.choice((1, 1, 2, 5, 20))
        self.number += count
        size = self.random.choice((0, 10, 10, 300))
        return [f"{self.number - count + one} ".encode().ljust(size, b".") for one in range(count)]

    def publish(self) -> None:
        log, routes, values = self.random.choice(self.logs), self.random.choice(ROUTES), self._values()
        first = publish(self.lane, log, values, routes)
        if OURS in routes:
            self.known += [Known(log, first + index, value) for index, value in enumerate(values)]

    def extend(self) -> None:
        """Records that the lane hears of only after they were written, as at a start."""
        log, values = self.random.choice(self.logs), self._values()
        first = publish(None, log, values)
        publish(None, log, [b"between"], (THEIRS,))
        commit(log)
        self.lane.extend(log, len(values), first, first + len(values))
        self.known += [Known(log, first + index, value) for index, value in enumerate(values)]

    def copy(self) -> None:
        """Copies that are routed to nobody; only the lane is told, and sometimes after others arrived behind them."""
        log, values = self.random.choice(self.logs), self._values()
        first = publish(None, log, values, ())
        if self.random.random() < 0.5:
            self.publish()
        commit(log)
        self.lane.extend(log, len(values), first, first + len(values), exact=True)
        self.known += [Known(log, first + index, value) for index, value in enumerate(values)]

    def seal(self) -> None:
        self.random.choice(self.logs).seal()

    def commit(self) -> None:
        commit(self.random.choice(self.logs))

    def take(self) -> None:
        early = self.random.random() < 0.7
        count_max = self.random.choice((1, 2, 7, 1000))
        stretch = self.lane.take(count_max, early=early)
        if stretch is None:
            self._check_nothing_to_see(early)
            return
        assert 1 <= stretch.count <= count_max
        visible = stretch.source.early_end if early else stretch.source.high_watermark
        assert stretch.offset + stretch.count <= visible
        self.held.append((stretch, self._taken(stretch)))

    def _taken(self, stretch: Stretch) -> list[Known]:
        """The list's records for what the lane gave, which must be the very next ones."""
        values = values_of(stretch)
        found = [self._next(stretch.source, stretch.offset + index) for index in range(stretch.count)]
        assert [one.value for one in found] == values
        assert {one.deliveries for one in found} == {stretch.deliveries}
        return found

    def _next(self, source: object, offset: int) -> Known:
        """The first that is ready; only what a log has let go of may have been passed over, and never comes again."""
        for one in self.known:
            if one.state is not State.READY or not (self.total_order or one.source is source):
                continue
            if (one.source, one.offset) == (source, offset):
                one.state = State.UNACKED
                return one
            assert one.is_gone
            one.state = State.SETTLED
        raise AssertionError(f"offset {offset} is not ready")

    def _check_nothing_to_see(self, early: bool) -> None:
        """Nothing is ready, or the first of all may not be seen yet (folded: the first of some source)."""
        heads: dict[PartitionLog, Known] = {}
        for one in self.known:
            if one.state is State.READY and not one.is_gone:
                heads.setdefault(one.source, one)
        hidden = [
            one.offset >= (one.source.early_end if early else one.source.high_watermark) for one in heads.values()
        ]
        assert not hidden or (hidden[0] if self.total_order else any(hidden))

    def settle(self) -> None:
        if not self.held:
            return
        stretch, records = self._part()
        self.lane.settle(stretch.seq, stretch.count)
        for one in records:
            one.state = State.SETTLED

    def give_back(self) -> None:
        if not self.held:
            return
        stretch, records = self._part()
        for one in records:
            one.state = State.READY
            one.deliveries += 1
        self.lane.give_back(stretch)

    def _part(self) -> tuple[Stretch, list[Known]]:
        """Some of what is held: whole, a first part, or one in the middle."""
        place = self.random.randrange(len(self.held))
        stretch, records = self.held.pop(place)
        if stretch.count > 1 and self.random.random() < 0.5:
            count = self.random.randrange(1, stretch.count)
            self.held.append((stretch, records[count:]))
            return stretch.split(count), records[:count]
        return stretch, records

    def drop_head(self) -> None:
        count = self.random.choice((1, 3, 30))
        for stretch in self.lane.drop_head(count):
            assert stretch.count <= count
            count -= stretch.count
            for one in self._taken(stretch):
                one.state = State.SETTLED
            self.lane.settle(stretch.seq, stretch.count)
        if count:
            assert all(one.state is not State.READY or one.is_gone for one in self.known)

    def purge(self) -> None:
        expected = self.lane.ready_count
        assert self.lane.purge() == expected
        for one in self.known:
            if one.state is State.READY:
                one.state = State.SETTLED

    def restart(self) -> None:
        for log in (*self.logs, *self.others):
            commit(log)
        self.lane = restarted(self.lane)
        self.held.clear()
        for one in self.known:
            one.deliveries = 0
            if one.state is State.UNACKED:
                one.state = State.READY

    def retain(self) -> None:
        """Retention (or a truncation) takes what lies before some offset, wanted or not."""
        log = self.random.choice((*self.logs, *self.others))
        commit(log)
        log.delete_before(self.random.randint(int(log.log_start), int(log.high_watermark)))
        commit(log)

    def move(self) -> None:
        """What is unsettled of a log is copied to the end of another, or of the same; the lane is used meanwhile."""
        source = self.random.choice((*self.logs, *self.others))
        commit(source)
        if len(source.segments) < 2:
            return
        target = self.random.choice((*self.logs, self._other()) if self.total_order else (self._other(),))
        release = Release([self.lane], source)
        release.begin(target, b"x")
        meanwhile = (self.publish, self.copy, self.take, self.settle, self.give_back, self.drop_head, self.purge)
        while (found := release.read()) is not None:
            for one in found:
                release.copy(one)
            self.random.choices((*meanwhile, self.commit), (5, 1, 5, 5, 5, 1, 1, 3))[0]()
            self.check()
        commit(target)
        if release.has_lost:
            return
        release.finish()
        by_value = {one.value: one for one in self.known}
        for moved in release._moves[0].moved:
            offset = moved.offset
            while offset < moved.offset + moved.count:
                for run in target.read(offset, end=moved.offset + moved.count):
                    for index in range(run.first, run.last):
                        one = by_value[run.batch.values[index]]
                        one.source, one.offset = target, run.batch.offset_at(index)
                    offset = run.batch.next_offset

    def _other(self) -> PartitionLog:
        self.others.append(self.shared.create())
        return self.others[-1]

    # -- checks -------------------------------------------------------------------------------------------------

    def check(self) -> None:
        check_counts(self.lane)
        ready = [one for one in self.known if one.state is State.READY]
        certain = sum(not one.is_gone for one in ready)
        assert certain <= self.lane.ready_count <= len(ready)
        assert self.lane.unacked_count == sum(one.state is State.UNACKED for one in self.known)
        lowest = self.lane.lowest_offsets()
        for one in self.known:
            if one.state is not State.SETTLED and not one.is_gone:
                assert lowest[one.source] <= one.offset

    def finish(self) -> None:
        """After one more restart exactly the unsettled come, in order, each once."""
        self.restart()
        while (stretch := self.lane.take(1000)) is not None:
            self._taken(stretch)
        assert all(one.state is not State.READY or one.is_gone for one in self.known)
        assert self.lane.ready_count == 0
        check_counts(self.lane)


@pytest.fixture(params=["roomy", "tiny"])
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The limits as they are, and so tiny that windows overflow and refill all the time."""
    if request.param == "tiny":
        monkeypatch.setattr(lanes, "WINDOW_BYTES_MAX", 400)
        monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 10)
        monkeypatch.setattr(lanes, "REFILL_BYTES", 100)
        monkeypatch.setattr(lanes, "TAKE_BYTES", 200)
        monkeypatch.setattr(lanes, "ANCHORS_MAX", 3)
        monkeypatch.setattr(lanes, "EXTENT_GAP_MAX", 3)
        monkeypatch.setattr(releases, "SLICE_BYTES", 1)
    return str(request.param)


@pytest.mark.parametrize("seed", range(150))
def test_lane_hands_out_what_a_plain_list_would(seed: int, limits: str) -> None:
    Walk(Random(seed), total_order=True).run(60)


@pytest.mark.parametrize("seed", range(100))
def test_lane_with_folded_extents_keeps_the_order_of_each_source(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "EXTENTS_MAX", 4)
    monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 5)
    monkeypatch.setattr(lanes, "REFILL_BYTES", 100)
    Walk(Random(seed), total_order=False).run(80)


# -- one thing at a time ----------------------------------------------------------------------------------------


def settle(lane: Lane, stretch: Stretch | None) -> None:
    assert stretch is not None
    lane.settle(stretch.seq, stretch.count)


def test_what_came_back_is_handed_out_before_what_is_new_and_counts_its_deliveries() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a", b"b", b"c"])
    commit(log)
    first = lane.take(2)
    assert first is not None
    lane.give_back(first)
    again = lane.take(10)
    assert again is not None and values_of(again) == [b"a", b"b"]
    assert (again.deliveries, again.failures) == (1, 1)


def test_return_without_a_failure_is_a_delivery_but_no_failure() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a"])
    commit(log)
    taken = lane.take(1)
    assert taken is not None
    lane.give_back(taken, failed=False)
    again = lane.take(1)
    assert again is not None and (again.deliveries, again.failures) == (1, 0)


def test_head_that_may_not_be_seen_yet_names_the_log_that_must_be_committed() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a"])
    assert lane.take(1) is None
    assert lane.hidden_in is log
    commit(log)
    assert list(drained(lane)) == [b"a"]


def test_record_beyond_the_watermark_is_seen_early_only_by_who_may() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"committed"])
    commit(log)
    publish(lane, log, [b"early"])
    strict = lane.take(10, early=False)
    assert strict is not None and values_of(strict) == [b"committed"]
    assert lane.take(10, early=False) is None
    assert list(drained(lane)) == [b"early"]


def test_head_is_dropped_though_nobody_may_see_it_yet() -> None:
    """A length limit holds while the first commit of a log is still under way."""
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a", b"b"])
    assert [values_of(one) for one in lane.drop_head(1)] == [[b"a"]]


def test_window_weighs_the_batches_it_holds_not_the_records_it_wants_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """One wanted record in each batch: the rest of the batch is in memory all the same."""
    monkeypatch.setattr(lanes, "WINDOW_BYTES_MAX", 10_000)
    lane, log = new_lane(), Logs(config=LogConfig()).create()
    for number in range(100):
        publish(lane, log, [b"%d" % number])
        publish(None, log, [b"x" * 2000], (THEIRS,))
        log.seal()
    commit(log)
    held = {one.batch for one in lane._ready}
    assert sum(batch.byte_count for batch in held if batch is not None) < 15_000
    assert list(drained(lane)) == [b"%d" % number for number in range(100)]


def test_two_logs_in_turn_and_one_record_unacked_need_no_memory_for_what_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lanes, "EXTENTS_MAX", 10)
    lane, shared = new_lane(), Logs()
    logs = [shared.create(), shared.create()]
    publish(lane, logs[0], [b"kept"])
    commit(logs[0])
    kept = lane.take(1)
    assert kept is not None
    for number in range(500):
        log = logs[number % 2]
        publish(lane, log, [b"%d" % number])
        commit(log)
        settle(lane, lane.take(1))
    assert len(lane.arrivals()) < 30
    assert list(drained(restarted(lane))) == [b"kept"]


def test_purge_in_the_middle_of_a_sparse_extent_moves_the_place_to_start_from_rightly() -> None:
    lane, log = new_lane(), Logs().create()
    for value in (b"held", b"purged", b"purged too"):
        publish(lane, log, [value])
        publish(None, log, [b"between"], (THEIRS,))
    commit(log)
    held = lane.take(1)
    lane.purge()
    for value in (b"new", b"newer"):
        publish(lane, log, [value])
        publish(None, log, [b"between"], (THEIRS,))
    settle(lane, held)
    commit(log)
    assert list(drained(restarted(lane))) == [b"new", b"newer"]


def test_lane_with_everything_settled_needs_nothing_of_any_log() -> None:
    lane, shared = new_lane(), Logs()
    logs = [shared.create(), shared.create()]
    for log in logs * 3:
        publish(lane, log, [b"a", b"b"])
    for log in logs:
        commit(log)
    taken = [lane.take(1) for _ in range(12)]
    for stretch in reversed(taken):
        assert lane.lowest_offsets()[logs[0]] == 0
        settle(lane, stretch)
    assert (lane.floor, len(lane.settled), lane.lowest_offsets(), lane.arrivals()) == (12, 0, {}, [])


def test_long_way_without_a_record_of_the_lane_is_not_read_again() -> None:
    lane, log = new_lane(), Logs(config=LogConfig()).create()
    publish(lane, log, [b"first"])
    for _ in range(3):
        publish(None, log, [b"x"] * lanes.EXTENT_GAP_MAX, (THEIRS,))
        commit(log)
    publish(lane, log, [b"last"])
    commit(log)
    assert [(one.first, one.end) for one in lane.arrivals()] == [
        (0, 1),
        (3 * lanes.EXTENT_GAP_MAX + 1, 3 * lanes.EXTENT_GAP_MAX + 2),
    ]


def test_records_that_came_back_one_by_one_are_read_again_together(monkeypatch: pytest.MonkeyPatch) -> None:
    lane, log = new_lane(), Logs(config=LogConfig()).create()
    publish(lane, log, [b"%d" % number for number in range(100)])
    commit(log)
    for stretch in [lane.take(1) for _ in range(100)]:
        assert stretch is not None
        lane.give_back(stretch)
    reads = []
    read = log.read

    def counted(offset: int, *, bytes_max: int = 1, end: int | None = None) -> object:
        reads.append(offset)
        return read(offset, bytes_max=bytes_max, end=end)

    monkeypatch.setattr(log, "read", counted)
    assert list(drained(lane)) == [b"%d" % number for number in range(100)]
    assert len(reads) == 1


def test_lost_tail_of_a_log_takes_no_later_record_with_it() -> None:
    """What the journal knows as settled did not outlive the power; new records are numbered behind it (K3)."""
    lane, logs = new_lane(), Logs()
    log = logs.create()
    publish(lane, log, [b"kept", b"kept too"])
    commit(log)
    publish(lane, log, [b"lost", b"lost too", b"lost unsettled"])
    log.seal()
    kept, lost = lane.take(2), lane.take(2)
    assert kept is not None and lost is not None
    settle(lane, lost)
    (found,) = logs.lose_power(log)
    heir = restarted(lane, found)
    publish(heir, found, [b"new", b"newer"])
    commit(found)
    assert list(drained(heir)) == [b"kept", b"kept too", b"new", b"newer"]
    assert heir.lost_count == 1
    check_counts(heir)


def test_log_that_lost_its_tail_twice_brings_back_no_settled_record() -> None:
    lane, logs = new_lane(), Logs()
    log = logs.create()
    publish(lane, log, [b"kept"])
    commit(log)
    publish(lane, log, [b"lost"])
    log.seal()
    (log,) = logs.lose_power(log)
    lane = restarted(lane, log)
    publish(lane, log, [b"settled", b"kept too"])
    commit(log)
    publish(lane, log, [b"lost too"])
    log.seal()
    taken = {values_of(one)[0]: one for one in iter(lambda: lane.take(1), None) if one is not None}
    settle(lane, taken[b"settled"])
    (log,) = logs.lose_power(log)
    heir = restarted(lane, log)
    assert list(drained(heir)) == [b"kept", b"kept too"]
    # The first was noticed before the second power loss.
    assert (lane.lost_count, heir.lost_count) == (1, 1)


def test_records_that_retention_took_are_counted_and_the_settled_ones_behind_stay_settled() -> None:
    lane, log = new_lane(), Logs().create()
    for number in range(10):
        publish(lane, log, [b"%d" % number])
        publish(None, log, [b"between"], (THEIRS,))
        commit(log)
    taken = [lane.take(1) for _ in range(8)]
    settle(lane, taken[6])
    settle(lane, taken[7])
    lane = restarted(lane)
    log.delete_before(7)
    assert list(drained(lane)) == [b"4", b"5", b"8", b"9"]
    assert lane.lost_count == 4
    check_counts(lane)


def test_retention_past_a_whole_extent_leaves_the_lane_empty_not_stuck() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a"])
    publish(None, log, [b"x"] * 5, (THEIRS,))
    commit(log)
    lane = restarted(lane)
    log.delete_before(5)
    assert lane.take(1) is None
    assert (lane.ready_count, lane.lost_count, lane.floor) == (0, 1, 1)


def test_record_that_came_back_and_is_gone_meanwhile_is_counted_as_lost() -> None:
    lane, log = new_lane(), Logs().create()
    publish(lane, log, [b"a", b"b", b"c"])
    commit(log)
    stretch = lane.take(3)
    assert stretch is not None
    lane.give_back(stretch)
    log.delete_before(2)
    assert list(drained(lane)) == [b"c"]
    assert lane.lost_count == 2
    check_counts(lane)


def test_routes_that_change_within_a_batch_are_found_as_spans() -> None:
    log = Logs().create()
    for routes in ((OURS,), (OURS, THEIRS), (THEIRS,), (), (OURS,)):
        publish(None, log, [b"v", b"v"], routes)
    commit(log)
    batch: RecordBatch = log.read(0)[0].batch
    assert list(spans_of(batch, 0, batch.count, OURS)) == [(0, 4), (8, 10)]
    assert list(spans_of(batch, 1, 9, OURS)) == [(1, 4), (8, 9)]
    assert list(spans_of(batch, 0, batch.count, 99)) == []
