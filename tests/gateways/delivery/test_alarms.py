"""Alarms are raised at their limits, stay until it is clearly over, and say what is scarce."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.delivery.alarms import GIB, Alarm, Alarms, AlarmsConfig, Measured, Turned

PLENTY = Measured(memory_bytes=100, memory_bytes_max=1000, disk_free_bytes=50 * GIB, disk_bytes=100 * GIB)


def test_nothing_is_raised_while_there_is_plenty() -> None:
    alarms = Alarms()
    assert alarms.measure(PLENTY) == []
    assert not alarms.active and not alarms.refusing


def test_memory_alarm_is_raised_once_at_its_share_and_cleared_once_when_clearly_below() -> None:
    alarms = Alarms()
    story = [alarms.measure(replace(PLENTY, memory_bytes=used)) for used in (599, 600, 700, 590, 571, 569, 599)]
    assert story == [
        [],
        [Turned(Alarm.MEMORY, True, 600, 600)],
        [],
        [],
        [],
        [Turned(Alarm.MEMORY, False, 569, 600)],
        [],
    ]


def test_new_connections_are_refused_at_a_higher_share_of_memory() -> None:
    alarms = Alarms()
    seen = []
    for used in (799, 800, 780, 759):
        alarms.measure(replace(PLENTY, memory_bytes=used))
        seen.append(alarms.refusing)
    assert seen == [False, True, True, False]


@pytest.mark.parametrize(("disk", "floor"), [(10 * GIB, 2 * GIB), (100 * GIB, 5 * GIB), (1000 * GIB, 50 * GIB)])
def test_disk_floor_is_the_greater_of_share_and_size(disk: int, floor: int) -> None:
    alarms = Alarms()
    assert alarms.measure(replace(PLENTY, disk_bytes=disk, disk_free_bytes=floor)) == []
    [raised] = alarms.measure(replace(PLENTY, disk_bytes=disk, disk_free_bytes=floor - 1))
    assert raised == Turned(Alarm.DISK, True, floor - 1, floor)
    assert alarms.measure(replace(PLENTY, disk_bytes=disk, disk_free_bytes=floor)) == []
    [cleared] = alarms.measure(replace(PLENTY, disk_bytes=disk, disk_free_bytes=floor + floor // 10))
    assert not cleared.raised


def test_clients_are_told_what_is_scarce_in_the_words_they_know() -> None:
    alarms = Alarms()
    alarms.measure(replace(PLENTY, memory_bytes=900))
    assert alarms.reason == "low on memory"
    alarms.measure(replace(PLENTY, memory_bytes=900, disk_free_bytes=0))
    assert alarms.reason == "low on memory & disk"
    alarms.measure(replace(PLENTY, disk_free_bytes=0))
    assert alarms.reason == "low on disk"


def test_shares_and_sizes_of_zero_switch_an_alarm_off() -> None:
    alarms = Alarms(AlarmsConfig(memory_share=0, refuse_share=0, disk_free_share=0, disk_free_bytes=0))
    assert alarms.measure(Measured(1000, 1000, 0, 100)) == []
    assert not alarms.refusing


def test_a_new_configuration_counts_with_the_next_measurement() -> None:
    alarms = Alarms()
    alarms.measure(replace(PLENTY, memory_bytes=700))
    alarms.config = AlarmsConfig(memory_share=0.9)
    [cleared] = alarms.measure(replace(PLENTY, memory_bytes=700))
    assert cleared == Turned(Alarm.MEMORY, False, 700, 900)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 10 * GIB))))
def test_what_turned_is_what_is_active(measurements: list[tuple[int, int]]) -> None:
    alarms = Alarms()
    active: set[Alarm] = set()
    for memory, free in measurements:
        for one in alarms.measure(replace(PLENTY, memory_bytes=memory, disk_free_bytes=free)):
            assert (one.alarm in active) is not one.raised
            (active.add if one.raised else active.discard)(one.alarm)
        assert alarms.active == active
        assert (memory < 600) or Alarm.MEMORY in active
        assert (memory >= 570) or Alarm.MEMORY not in active
