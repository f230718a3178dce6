"""What a message says about its time is understood in all its spellings, or refused with the name of what is wrong."""

from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delay.parked import DelayRefused
from headrace.gateways.delivery.delayed_when import LEVELS, due_us_of, schedule_id_of

NOW_US = 1_700_000_000_000_000


@pytest.mark.parametrize(
    ("delay", "wait_us"),
    [
        (1, 1_000),
        (5000, 5_000_000),
        (2**33, 2**33 * 1000),
        ("5000", 5_000_000),
        ("+5000", 5_000_000),
        (1500.9, 1_500_000),
        (Decimal("1500.9"), 1_500_000),
        (0, None),
        (-5000, None),
        ("-5000", None),
        (0.9, None),
        (None, None),
    ],
)
def test_a_delay_is_read_as_the_plugin_reads_it(delay: object, wait_us: int | None) -> None:
    assert due_us_of(NOW_US, delay=delay) == (None if wait_us is None else NOW_US + wait_us)


@pytest.mark.parametrize(
    "delay", ["", "soon", "5 s", "5e3", "٣", True, b"5000", [5000], {"ms": 5}, float("inf"), "9" * 25]
)
def test_a_delay_that_is_no_number_is_refused(delay: object) -> None:
    with pytest.raises(DelayRefused, match=r"^x-delay must be milliseconds, not "):
        due_us_of(NOW_US, delay=delay)


@given(st.datetimes(min_value=datetime(2024, 1, 1), max_value=datetime(2033, 1, 1)), st.integers(-14 * 60, 14 * 60))
def test_a_time_of_rfc_3339_is_the_same_moment_in_every_zone(moment: datetime, offset_minutes: int) -> None:
    moment = moment.replace(tzinfo=UTC)
    local = moment.astimezone(timezone(timedelta(minutes=offset_minutes)))
    due_us = due_us_of(NOW_US, deliver_at=local.isoformat())
    assert due_us == round(moment.timestamp() * 1e6)


@pytest.mark.parametrize(
    "when",
    [1_700_000_001_500, "1700000001500", "2023-11-14T22:13:21.500Z", "2023-11-14T23:13:21.5+01:00"],
)
def test_a_time_may_be_written_in_several_ways(when: object) -> None:
    assert due_us_of(NOW_US, deliver_at=when) == NOW_US + 1_500_000


@pytest.mark.parametrize("when", [0, -1, 1_699_999_999_999, "2001-01-01T00:00:00Z", datetime(2001, 1, 1, tzinfo=UTC)])
def test_a_time_that_has_passed_means_now(when: object) -> None:
    assert due_us_of(NOW_US, deliver_at=when) is None


@pytest.mark.parametrize("when", ["tomorrow", "2030-01-01T00:00:00", datetime(2030, 1, 1), True, "", b"1"])
def test_a_time_without_zone_or_sense_is_refused(when: object) -> None:
    with pytest.raises(DelayRefused, match="x-deliver-at"):
        due_us_of(NOW_US, deliver_at=when)


def test_the_eighteen_levels_go_by_number_and_by_name() -> None:
    seconds = [1, 5, 10, 30, *(60 * minutes for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30)), 3600, 7200]
    assert len(LEVELS) == len(seconds) == 18
    for number, (name, wait_s) in enumerate(zip(LEVELS, seconds, strict=True), 1):
        for level in (number, str(number), name):
            assert due_us_of(NOW_US, level=level) == NOW_US + wait_s * 1_000_000


@pytest.mark.parametrize("level", [19, "19", "15m", "1S", True, [1]])
def test_a_level_that_is_none_is_refused(level: object) -> None:
    with pytest.raises(DelayRefused, match="x-delay-level"):
        due_us_of(NOW_US, level=level)


@pytest.mark.parametrize("level", [0, -3])
def test_no_level_means_now(level: int) -> None:
    assert due_us_of(NOW_US, level=level) is None


def test_two_times_at_once_are_refused_and_one_that_means_now_does_not_count() -> None:
    with pytest.raises(DelayRefused, match="x-delay and x-delay-level say different things"):
        due_us_of(NOW_US, delay=1000, level=1)
    assert due_us_of(NOW_US, delay=-5000, level=1) == NOW_US + 1_000_000


@pytest.mark.parametrize("value", ["", "x" * 256, 17, None])
def test_an_id_is_a_short_string(value: object) -> None:
    if value is None:
        assert schedule_id_of(value) is None
    else:
        with pytest.raises(DelayRefused, match="x-schedule-id"):
            schedule_id_of(value)
    assert schedule_id_of("order-17") == schedule_id_of(b"order-17") == b"order-17"


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(max_size=30), st.binary(max_size=9), st.booleans()))
def test_anything_is_understood_or_refused(value: object) -> None:
    for name in ("delay", "deliver_at", "level"):
        try:
            due_us = due_us_of(NOW_US, **{name: value})
        except DelayRefused:
            continue
        assert due_us is None or due_us > NOW_US
