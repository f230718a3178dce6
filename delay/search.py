"""Finding parked records for people: by id, or by due time page by page. Driver.

An id is looked for in the rows of the intake, which are in memory, and in each run file, where one read leads to it;
the record itself says whether it is the one. A page is put together from the intake and from the buckets in question,
in the order of due time and then of parking, so a cursor stays true while records move from one to the other.
Neighbours: engine.py has the rows, delays.py decides about what was found.
"""

from functools import partial
from typing import NamedTuple

import numpy as np

from headrace.core_log.errors import Refused
from headrace.delay.bodies import Bodies
from headrace.delay.engine import Engine
from headrace.delay.marks import OFFSET_BITS, State
from headrace.delay.parked import Page, Pending
from headrace.delay.rows import PackedRows, Rows, by_due, id_hashes, joined, target_hash
from headrace.delay.run_file import RunFile
from headrace.delay.waiting import between

# Rows that are looked at before a page is given out short.
ROWS_PER_PAGE_MAX = 20_000
_ROWS_AT_ONCE = 512


class Match(NamedTuple):
    """A record with the id that was asked for, and what was known about its place when the search began."""

    place: int
    state: State
    record: Pending


class Wanted(NamedTuple):
    target: bytes | None
    key: bytes | None
    tag: str | None
    due_from_us: int
    due_until_us: int | None


class Search:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def by_id(self, id: bytes) -> list[Match]:
        """Every record with this id that a source still has, pending or not, by due time."""
        engine = self._engine
        hashes = id_hashes(id)
        # At this moment each record is either in the intake's rows or in one of these run files.
        near = engine.waiting.find(hashes)["place"].tolist()
        runs = list(engine.runs.values())
        far = await engine.env.worker.run(lambda: [place for run in runs for place in run.find(hashes)])
        places = np.array(
            [place for place in (*near, *far) if place >> OFFSET_BITS in engine.ledger.sources], dtype=np.int64
        )
        states = engine.ledger.states(places)
        bodies = await engine.bodies(places)
        found = [
            Match(place, State(state), _pending(bodies, index))
            for index, (place, state) in enumerate(zip(places.tolist(), states.tolist(), strict=True))
            if bodies.id(index) == id
        ]
        return sorted(found, key=lambda one: one.record.due_us)

    async def page(self, after: str | None, limit: int, wanted: Wanted) -> Page:
        due_us, number = (wanted.due_from_us, 0) if after is None else _read_cursor(after)
        due_us, number = max((due_us, number), (wanted.due_from_us, 0))
        records: list[Pending] = []
        looked_at = 0
        while len(records) < limit and looked_at < ROWS_PER_PAGE_MAX:
            rows = await self._next_rows(due_us, number, max(limit - len(records), _ROWS_AT_ONCE))
            if not len(rows):
                return Page(tuple(records), None)
            looked_at += len(rows)
            engine = self._engine
            which = engine.ledger.states(rows["place"]) == State.PENDING
            if wanted.target is not None:
                which &= rows["target"] == target_hash(wanted.target)
            chosen = rows[which]
            bodies = await engine.bodies(chosen["place"])
            for index, (due, parked) in enumerate(chosen[["due", "number"]].tolist()):
                if wanted.due_until_us is not None and due >= wanted.due_until_us:
                    return Page(tuple(records), None)
                record = _pending(bodies, index)
                if _fits(record, wanted):
                    records.append(record)
                    if len(records) == limit:
                        return Page(tuple(records), _cursor(due, parked + 1))
            due_us, number = int(rows["due"][-1]), int(rows["number"][-1]) + 1
            if wanted.due_until_us is not None and due_us >= wanted.due_until_us:
                return Page(tuple(records), None)
        return Page(tuple(records), _cursor(due_us, number))

    async def _next_rows(self, due_us: int, number: int, count: int) -> Rows:
        """The first rows from there on, decided or not; those of the buckets a bucket's time after the other."""
        engine = self._engine
        starts = sorted({one.start_us for one in engine.ledger.sources.values() if one.start_us > due_us})
        rows = joined([])
        for until_us in [*starts, _END_US]:
            parts = engine.waiting.snapshot()
            runs = list(engine.runs.values())
            spans = {one.number: (one.start_us, one.end_us) for one in engine.ledger.sources.values()}
            read = partial(_read_all, parts, runs, spans, due_us, number, until_us, count)
            rows = by_due(joined(await engine.env.worker.run(read)))
            rows = rows[(rows["due"] > due_us) | (rows["number"] >= number)]
            if len(rows) >= count:
                break
        return rows[:count]


_END_US = 1 << 62


def _read_all(
    near: list[Rows | PackedRows],
    runs: list[RunFile],
    spans: dict[int, tuple[int, int]],
    due_us: int,
    number: int,
    until_us: int,
    count: int,
) -> list[Rows]:
    """Rows of the intake, and of each source of each run file at most `count` from there on. Blocks."""
    parts = between(near, due_us, until_us)
    for run in runs:
        for source, (_first, end, _hash) in run.slices.items():
            start_us, end_us = spans.get(source, (0, 0))
            if end_us > due_us and start_us < until_us:
                at = run.first_from(source, due_us, number)
                rows = run.rows(at, min(count, end - at))
                parts.append(rows[rows["due"] < until_us])
    return parts


def _pending(bodies: Bodies, index: int) -> Pending:
    return Pending(
        id=bodies.id(index),
        target=bodies.target(index),
        due_us=int(bodies.dues[index]),
        parked_us=int(bodies.timestamps[index]),
        key=bodies.keys[index],
        properties=bodies.properties[index],
        value=bodies.values[index],
        attributes=int(bodies.attributes[index]),
        tags=bodies.tags_of(index),
        headers=bodies.headers_of(index),
    )


def _fits(record: Pending, wanted: Wanted) -> bool:
    return (
        (wanted.target is None or record.target == wanted.target)
        and (wanted.key is None or record.key == wanted.key)
        and (wanted.tag is None or wanted.tag in record.tags)
    )


def _cursor(due_us: int, number: int) -> str:
    return f"{due_us:x}-{number:x}"


def _read_cursor(text: str) -> tuple[int, int]:
    due, dash, number = text.partition("-")
    try:
        if not dash:
            raise ValueError(text)
        return int(due, 16), int(number, 16)
    except ValueError as error:
        raise Refused(f"{text[:64]!r} is not a cursor of this list") from error
