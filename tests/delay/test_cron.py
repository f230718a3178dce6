"""Schedules come round when their wall clock says so, over summer time and back; what was missed goes as asked."""

from datetime import UTC, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.delay.cron import MISSED_AFTER_US, Cron, CronRefused, Missed, Step


def us(text: str, zone: str = "UTC") -> int:
    moment = datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone))
    return round(moment.timestamp()) * 1_000_000


def runs(cron: Cron, after_us: int, count: int) -> list[str]:
    """In UTC."""
    found = []
    for _ in range(count):
        next_us = cron.next_us(after_us)
        assert next_us is not None
        after_us = next_us
        found.append(datetime.fromtimestamp(next_us / 1e6, UTC).strftime("%m-%d %H:%M:%S"))
    return found


def test_five_fields_count_minutes_and_six_seconds() -> None:
    assert runs(Cron("*/20 * * * *"), us("2026-01-01 00:10"), 3) == [
        "01-01 00:20:00",
        "01-01 00:40:00",
        "01-01 01:00:00",
    ]
    assert runs(Cron("*/30 * * * * *"), us("2026-01-01 00:00"), 2) == ["01-01 00:00:30", "01-01 00:01:00"]


@pytest.mark.parametrize(
    ("name", "first"), [("@hourly", "01-01 01:00:00"), ("@daily", "01-02 00:00:00"), ("@weekly", "01-04 00:00:00")]
)
def test_the_usual_ones_have_names(name: str, first: str) -> None:
    assert runs(Cron(name), us("2026-01-01 00:30"), 1) == [first]


def test_a_zone_has_its_own_midnight() -> None:
    assert runs(Cron("0 0 * * *", "Asia/Tokyo"), us("2026-01-01 00:00"), 1) == ["01-01 15:00:00"]


def test_a_time_that_does_not_exist_in_spring_comes_once_that_day() -> None:
    # In Berlin 02:30 of 29 March 2026 does not exist: 02:00 is followed by 03:00 summer time, which is 01:00 UTC.
    cron = Cron("30 2 * * *", "Europe/Berlin")
    found = runs(cron, us("2026-03-28 00:00"), 3)
    assert found == ["03-28 01:30:00", "03-29 01:00:00", "03-30 00:30:00"]


def test_a_time_that_exists_twice_in_autumn_comes_once() -> None:
    # In Berlin 02:30 of 25 October 2026 is 00:30 and 01:30 UTC.
    cron = Cron("30 2 * * *", "Europe/Berlin")
    found = runs(cron, us("2026-10-24 00:00"), 4)
    assert found == ["10-24 00:30:00", "10-25 00:30:00", "10-26 01:30:00", "10-27 01:30:00"]


def test_what_comes_every_half_hour_goes_by_the_time_that_passes() -> None:
    for day in ("2026-03-29 00:00", "2026-10-25 00:00"):
        cron = Cron("*/30 * * * *", "Europe/Berlin")
        start, moments = us(day), []
        for _ in range(8):
            following = cron.next_us(start if not moments else moments[-1])
            assert following is not None
            moments.append(following)
        assert {later - earlier for earlier, later in pairwise(moments)} == {1_800_000_000}


@pytest.mark.parametrize("expression", ["", "* * * *", "61 * * * *", "a b c d e", "@often", "* " * 200])
def test_an_expression_that_makes_no_sense_is_refused(expression: str) -> None:
    with pytest.raises(CronRefused, match="cron expression"):
        Cron(expression).check(0)


def test_one_that_never_comes_is_refused() -> None:
    with pytest.raises(CronRefused, match=r"never comes|makes no sense"):
        Cron("0 0 30 2 *").check(us("2026-01-01"))


@pytest.mark.parametrize("zone", ["Mars/Base", "", "../etc/passwd", "/etc/localtime", "a\0b"])
def test_a_zone_that_is_none_is_refused(zone: str) -> None:
    with pytest.raises(CronRefused, match="time zone"):
        Cron("@daily", zone).check(0)


NOON = us("2026-01-01 12:00")
HOUR = 3_600_000_000


@pytest.mark.parametrize(
    ("missed", "step"),
    [
        (Missed.SKIP, Step(False, NOON + 6 * HOUR)),
        (Missed.ONCE, Step(True, NOON + 6 * HOUR)),
        (Missed.ALL, Step(True, NOON + HOUR)),
    ],
)
def test_after_five_hours_down_the_policy_decides(missed: Missed, step: Step) -> None:
    assert Cron("@hourly").step(NOON, NOON + 5 * HOUR + HOUR // 2, missed) == step


@pytest.mark.parametrize("missed", list(Missed))
def test_a_run_that_is_a_little_late_is_not_missed(missed: Missed) -> None:
    assert Cron("@hourly").step(NOON, NOON + MISSED_AFTER_US, missed) == Step(True, NOON + HOUR)


@given(
    st.sampled_from(["*/7 * * * *", "15 3 * * *", "0 0 1 * *", "30 2 * * 1-5", "0 */6 * * *", "10 30 2 * * *"]),
    st.sampled_from(["UTC", "Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu"]),
    st.datetimes(min_value=datetime(2024, 1, 1), max_value=datetime(2030, 1, 1)),
)
def test_the_next_run_is_always_later_and_on_a_whole_second(expression: str, zone: str, after: datetime) -> None:
    after_us = round(after.replace(tzinfo=UTC).timestamp() * 1e6)
    cron = Cron(expression, zone)
    first_us = cron.next_us(after_us)
    assert first_us is not None and first_us > after_us and first_us % 1_000_000 == 0
    second_us = cron.next_us(first_us)
    assert second_us is not None and second_us > first_us
    # Nothing was passed over: asked from just before it, the answer is the same.
    assert cron.next_us(first_us - 1) == first_us
