"""Charts: every number is in them, nothing from elsewhere, and whatever a name holds does no harm."""

import re
from datetime import UTC, date, datetime, timedelta
from xml.etree import ElementTree

from headrace.spark.jobs.chart import REST, SERIES_MAX, bars, calendar, lines, page, table

START = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def drawings(text: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg xmlns.*?</svg>", text, re.DOTALL)]


def titles(text: str) -> list[str]:
    space = "{http://www.w3.org/2000/svg}"
    return [one.text or "" for drawing in drawings(text) for one in drawing.iter(f"{space}title")]


def test_bars_say_their_numbers_and_stand_on_each_other() -> None:
    series = {"eu": {START: 3.0, START + timedelta(minutes=1): 1.0}, "us": {START: 2.0}}
    drawn = bars(series)
    assert sorted(titles(drawn)) == [
        "2026-01-31 12:00  eu: 3 messages",
        "2026-01-31 12:00  us: 2 messages",
        "2026-01-31 12:01  eu: 1 messages",
    ]
    space = "{http://www.w3.org/2000/svg}"
    rects = [one for drawing in drawings(drawn) for one in drawing.iter(f"{space}rect")]
    first, second = rects[:2]
    assert float(first.attrib["y"]) == float(second.attrib["y"]) + float(second.attrib["height"])


def test_more_series_than_colours_are_summed_into_one() -> None:
    series = {f"tag{n}": {START: float(n + 1)} for n in range(20)}
    drawn = bars(series)
    assert f"{REST}: {sum(range(1, 20 - SERIES_MAX + 2))} messages" in drawn


def test_lines_and_calendar_have_a_mark_for_each_number() -> None:
    points = {START + timedelta(seconds=n): float(n) for n in range(5)}
    assert len(titles(lines({"workers": points}, unit="seconds"))) == 5
    days = {date(2026, 2, 1): 4.0, date(2026, 3, 1): 1.0}
    told = titles(calendar(days))
    assert "2026-02-01: 4 messages" in told
    assert "2026-02-15: 0 messages" in told


def test_names_are_texts_whatever_they_hold() -> None:
    evil = '<script>alert(1)</script>&"'
    written = page(evil, [bars({evil: {START: 1.0}}), table([evil], [[evil], [b"\xff"], [None]])])
    assert "<script" not in written
    assert titles(written) == [f"2026-01-31 12:00  {evil}: 1 messages"]
    assert "http" not in written.replace("http://www.w3.org/2000/svg", "")


def test_nothing_is_said_where_there_is_nothing() -> None:
    for drawn in (bars({}), lines({}, unit="s"), calendar({})):
        assert "nothing to show" in drawn
