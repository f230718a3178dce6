"""One filter's way through a lane: over several logs, lost records and records that moved."""

import pytest

from headrace.core_log.config import LogConfig
from headrace.filtering.expression import parse
from headrace.gateways.delivery import lane as lanes
from headrace.gateways.delivery.lane import Extent, Lane, Stretch, spans_of
from headrace.gateways.delivery.scan import Patience, Scan

from .logs import Logs, commit
from .test_queue import values_of

VIEW = 5


class House:
    def __init__(self) -> None:
        self.logs = Logs(config=LogConfig())
        self.sources = [self.logs.create(), self.logs.create()]
        self.lane = Lane(lambda batch, first, last: spans_of(batch, first, last, VIEW))
        self.number = 0

    def send(self, source: int, *tags: str, routed: bool = True, commits: bool = True) -> None:
        log = self.sources[source]
        for tag in tags:
            run = log.append(
                [b"k"],
                [b""],
                [b"%d" % self.number],
                timestamp_us=1,
                route_set=(VIEW,) if routed else (),
                tags=(tag,),
            ).run
            self.number += 1
            assert run is not None
            if routed:
                self.lane.arrive(log, run.batch, run.first, run.last)
        if commits:
            commit(log)

    def take_all(self, scan: Scan, count_max: int = 100, *, early: bool = True) -> list[bytes]:
        found = []
        while (stretch := self.take(scan, count_max, early=early)) is not None:
            found += values_of(stretch)
        return found

    def take(self, scan: Scan, count_max: int = 100, *, early: bool = True) -> Stretch | None:
        return scan.take(count_max, early=early, patience=Patience(1 << 30))


def test_scan_goes_over_several_logs_in_the_order_of_arrival() -> None:
    house = House()
    for source in (0, 1, 0, 1):
        house.send(source, "eu", "us", "eu")
        house.send(source, "eu", routed=False)
    assert house.take_all(Scan(house.lane, parse("eu"))) == [b"0", b"2", b"4", b"6", b"8", b"10", b"12", b"14"]
    assert house.take_all(Scan(house.lane, parse("us"))) == [b"1", b"5", b"9", b"13"]
    assert house.lane.ready_count == 0


def test_neighbours_are_handed_out_together_up_to_the_number_asked_for() -> None:
    house = House()
    house.send(0, "eu", "eu", "eu", "us", "eu")
    scan = Scan(house.lane, parse("eu"))
    assert [(one.seq, one.count) for one in iter(lambda: house.take(scan, 2), None)] == [(0, 2), (2, 1), (4, 1)]


def test_nothing_is_seen_before_its_commit_by_whoever_waits_for_it() -> None:
    house = House()
    house.send(0, "us", "eu")
    house.send(0, "eu", commits=False)
    scan = Scan(house.lane, parse("eu"))
    assert house.take_all(scan, early=False) == [b"1"]
    assert house.lane.hidden_in is house.sources[0]
    commit(house.sources[0])
    assert house.take_all(scan, early=False) == [b"2"]


def test_what_retention_took_is_passed_over() -> None:
    house = House()
    for _ in range(5):
        house.send(0, "eu", "us")
        house.send(0, "eu", routed=False)
    house.sources[0].delete_before(7)
    commit(house.sources[0])
    scan = Scan(house.lane, parse("eu || us"))
    assert house.take_all(scan) == [b"7", b"9", b"10", b"12", b"13"]
    assert (house.lane.ready_count, house.lane.unacked_count) == (5, 5)


def test_records_that_moved_to_another_log_are_found_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "WINDOW_COUNT_MAX", 2)
    house = House()
    lane = house.lane
    house.send(0, "eu", "us", "eu", "us", "eu", "us", "eu")
    scan = Scan(lane, parse("eu"))
    first = house.take(scan, 1)
    second = house.take(scan, 1)
    assert first is not None and second is not None
    lane.give_back(second)
    source, target = house.sources
    below = lane.hold_places()
    moved = []
    batch = source.read(0, end=below)[0].batch
    for seq in range(below):
        appended = target.append([b"k"], [b""], [batch.values[seq]], timestamp_us=1, tags=batch.tags_at(seq))
        moved.append((seq, 1, int(appended.next_offset) - 1))
    commit(target)
    lane.move(source, below, below, target, moved, [])
    assert house.take_all(scan) == [b"2", b"4", b"6"]
    lane.give_back(first)
    assert house.take_all(scan) == [b"0"]
    us = Scan(lane, parse("us"))
    assert house.take_all(us) == [b"1", b"3", b"5"]
    assert (lane.ready_count, lane.unacked_count) == (0, 7)


def test_records_known_from_the_journal_are_scanned_without_the_settled_ones() -> None:
    house = House()
    house.send(0, "eu", "us", "eu", "eu", "us")
    lane = Lane(lambda batch, first, last: spans_of(batch, first, last, VIEW))
    lane.restore(5, 1, [(2, 3)], [Extent(0, 5, house.sources[0], 0, 5)])
    scan = Scan(lane, parse("eu"))
    house.lane = lane
    assert house.take_all(scan) == [b"3"]
    assert lane.ready_count == 2
    assert scan.is_done


def test_patience_ends_a_search_and_the_next_one_goes_on() -> None:
    house = House()
    house.send(0, *["us"] * 50, "eu")
    scan = Scan(house.lane, parse("eu"))
    tries = 0
    while (found := scan.take(1, early=True, patience=Patience(1))) is None:
        tries += 1
        assert tries < 100
    assert values_of(found) == [b"50"]


def test_records_that_a_lane_is_told_of_again_are_found_again() -> None:
    house = House()
    house.send(0, "eu", "us", "eu")
    scan = Scan(house.lane, parse("eu"))
    assert house.take_all(scan) == [b"0", b"2"]
    house.lane.purge()
    house.lane.extend(house.sources[0], 3, 0, 3)
    assert house.take_all(scan) == [b"0", b"2"]
    house.send(0, "eu")
    assert house.take_all(scan) == [b"3"]
