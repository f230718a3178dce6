"""Charts as one HTML file with the drawing inside: no script, nothing from elsewhere. Format; pure.

Stacked bars (traffic by tag and minute), lines (lag over time), a calendar (what is due when). Every mark says its
numbers when pointed at, and the table below a drawing has them all, for those who do not see it.
"""

from collections.abc import Mapping, Sequence
from datetime import date, datetime, timedelta
from html import escape

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 360, 64, 40
# Distinguishable without seeing all colours (Okabe and Ito).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#666666")
SERIES_MAX = len(COLOURS)
REST = "others"
ROWS_MAX = 2000

_STYLE = (
    "body{font:14px system-ui,sans-serif;margin:2em;color:#222;background:#fff}svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse;margin-top:1em}td,th{padding:.2em .8em;border-bottom:1px solid #ddd}"
    "th{text-align:left}"
    "td.n{text-align:right;font-variant-numeric:tabular-nums}.key span{display:inline-block;margin-right:1.2em}"
    "@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}td,th{border-color:#444}}"
)

Points = Mapping[datetime, float]


def page(title: str, parts: Sequence[str]) -> str:
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>{''.join(parts)}</html>\n"
    )


def bars(series: Mapping[str, Points], *, unit: str = "messages") -> str:
    """Stacked, one bar for each time; the largest series have colours of their own."""
    shown = _largest(series)
    times = sorted({time for points in shown.values() for time in points})
    if not times:
        return _nothing()
    totals = [sum(points.get(time, 0) for points in shown.values()) for time in times]
    top = max(max(totals), 1e-9)
    width = max((WIDTH - LEFT) / len(times), 0.5)
    drawn: list[str] = []
    for place, time in enumerate(times):
        y = float(HEIGHT)
        for (name, points), colour in zip(shown.items(), COLOURS, strict=False):
            value = points.get(time, 0)
            if not value:
                continue
            height = value / top * (HEIGHT - 10)
            y -= height
            x = LEFT + place * width
            told = f"{_moment(time)}  {name}: {_number(value)} {unit}"
            drawn.append(
                f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width - 0.5, 0.5):.1f}" height="{height:.1f}" '
                f'fill="{colour}"><title>{escape(told)}</title></rect>'
            )
    return _key(list(shown)) + _drawing("".join(drawn) + _axes(times, top, unit))


def lines(series: Mapping[str, Points], *, unit: str) -> str:
    shown = _largest(series, sums=False)
    times = sorted({time for points in shown.values() for time in points})
    if not times:
        return _nothing()
    top = max((value for points in shown.values() for value in points.values()), default=0) or 1e-9
    span = max((times[-1] - times[0]).total_seconds(), 1e-9)

    def place(time: datetime, value: float) -> tuple[float, float]:
        x = LEFT + (time - times[0]).total_seconds() / span * (WIDTH - LEFT - 8)
        return x, HEIGHT - value / top * (HEIGHT - 10)

    drawn: list[str] = []
    for (name, points), colour in zip(shown.items(), COLOURS, strict=False):
        places = [place(time, points[time]) for time in sorted(points)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        for time, (x, y) in zip(sorted(points), places, strict=True):
            told = f"{_moment(time)}  {name}: {_number(points[time])} {unit}"
            drawn.append(
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"><title>{escape(told)}</title></circle>'
            )
    return _key(list(shown)) + _drawing("".join(drawn) + _axes(times, top, unit))


def calendar(counts: Mapping[date, float], *, unit: str = "messages") -> str:
    """A square for each day, in columns of weeks."""
    if not counts:
        return _nothing()
    first, last = min(counts), max(counts)
    begin = first - timedelta(days=first.weekday())
    top = max(max(counts.values()), 1e-9)
    size = max(6.0, min(18.0, (WIDTH - LEFT) / ((last - begin).days // 7 + 1)))
    drawn: list[str] = []
    for place, name in enumerate(("Mon", "Wed", "Fri")):
        drawn.append(f'<text x="4" y="{(place * 2 + 0.8) * size + 20:.1f}" font-size="11">{name}</text>')
    day = begin
    while day <= last:
        column, row = divmod((day - begin).days, 7)
        value = counts.get(day, 0)
        told = f"{day.isoformat()}: {_number(value)} {unit}"
        fill = COLOURS[0] if value else "#8883"
        strength = 0.25 + 0.75 * value / top if value else 1
        x, y = LEFT + column * size, 20 + row * size
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{size - 1.5:.1f}" height="{size - 1.5:.1f}" fill="{fill}" '
            f'fill-opacity="{strength:.2f}"><title>{escape(told)}</title></rect>'
        )
        if day.day == 1 or day == begin:
            drawn.append(f'<text x="{x:.1f}" y="14" font-size="11">{day:%Y-%m}</text>')
        day += timedelta(days=1)
    return _drawing("".join(drawn), height=round(30 + 7 * size))


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows[:ROWS_MAX])
    more = f"<p>and {len(rows) - ROWS_MAX} more rows</p>" if len(rows) > ROWS_MAX else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def _cell(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f'<td class="n">{_number(value)}</td>'
    text = _moment(value) if isinstance(value, datetime) else "" if value is None else _text(value)
    return f"<td>{escape(text)}</td>"


def _text(value: object) -> str:
    return bytes(value).decode("utf-8", "replace") if isinstance(value, bytes | bytearray) else str(value)


def _largest(series: Mapping[str, Points], *, sums: bool = True) -> dict[str, Points]:
    """As many as have colours, the largest first; what is left of summable ones is one more."""
    ordered = sorted(series.items(), key=lambda one: -sum(one[1].values()))
    if len(ordered) <= SERIES_MAX:
        return dict(ordered)
    kept = dict(ordered[: SERIES_MAX - 1])
    if sums:
        rest: dict[datetime, float] = {}
        for _, points in ordered[SERIES_MAX - 1 :]:
            for time, value in points.items():
                rest[time] = rest.get(time, 0) + value
        kept[REST] = rest
    return kept


def _axes(times: Sequence[datetime], top: float, unit: str) -> str:
    found = [f'<line x1="{LEFT}" y1="{HEIGHT}" x2="{WIDTH}" y2="{HEIGHT}" stroke="#888"/>']
    for share in (0, 0.5, 1):
        y = HEIGHT - share * (HEIGHT - 10)
        found.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" font-size="11">{_number(top * share)}</text>'
        )
    for place, anchor in ((0, "start"), (len(times) // 2, "middle"), (len(times) - 1, "end")):
        x = LEFT + place / max(len(times) - 1, 1) * (WIDTH - LEFT)
        found.append(
            f'<text x="{x:.1f}" y="{HEIGHT + 16}" text-anchor="{anchor}" font-size="11">{_moment(times[place])}</text>'
        )
    return "".join(found) + f'<text x="{LEFT}" y="{HEIGHT + 34}" font-size="11">{escape(unit)}</text>'


def _drawing(inside: str, height: int = HEIGHT + BOTTOM) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'fill="currentColor">{inside}</svg>'
    )


def _key(names: Sequence[str]) -> str:
    parts = [
        f'<span><svg width="12" height="12"><rect width="12" height="12" fill="{colour}"/></svg> {escape(name)}</span>'
        for name, colour in zip(names, COLOURS, strict=False)
    ]
    return f'<p class="key">{"".join(parts)}</p>'


def _nothing() -> str:
    return "<p>There is nothing to show.</p>"


def _moment(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M}" if not time.second else f"{time:%Y-%m-%d %H:%M:%S}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() or abs(value) >= 1000 else f"{value:,.2f}"
