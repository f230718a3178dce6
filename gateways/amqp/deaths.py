"""x-death: how a dead-lettered message tells its story. Format; pure.

One entry for each (queue, reason), the newest first: count, reason, queue, time, exchange, routing-keys and the
expiration it had, all but the count as they were at the first of those deaths. x-first-death-* are set once,
x-last-death-* each time. With a dead-letter routing key the header CC goes, else its keys route again. A queue where
the message died before, with no rejection since, would close a cycle and does not get it. All as in RabbitMQ.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.gateways.amqp import properties
from headrace.gateways.amqp.fields import U32, FieldTable, FieldValue, Int64, Timestamp, entries_of, parted
from headrace.gateways.delivery.queue import Reason
from headrace.gateways.delivery.transfers import Death, Stamped


def stamp(props: bytes, death: Death) -> Stamped:
    """Properties with this death added, and where else they lead."""
    decoded = properties.decode(props)
    headers = decoded.headers or {}
    copies = _copies(headers)
    known = headers.get("x-death")
    queue = _text(death.queue.encode("utf-8", "surrogateescape"))
    reason, exchange = str(death.reason), _text(death.exchange)
    # What is no array was put there by a client and tells nothing.
    deaths: list[FieldValue] = list(known) if isinstance(known, list) else []
    place = next((at for at, one in enumerate(deaths) if _is_of(one, queue, reason)), None)
    found: FieldTable
    if place is None:
        found = {
            "count": Int64(1),
            "reason": reason,
            "queue": queue,
            "time": Timestamp(death.time_us // 1_000_000),
            "exchange": exchange,
            "routing-keys": [_text(death.routing_key), *copies],
        }
        if decoded.expiration is not None:
            found["original-expiration"] = _text(decoded.expiration.encode("utf-8", "surrogateescape"))
    else:
        before = deaths.pop(place)
        assert isinstance(before, dict)
        count = before.get("count")
        found = before | {"count": Int64(count + 1 if isinstance(count, int) and 0 < count < 1 << 62 else 1)}
    deaths.insert(0, found)
    changes: dict[str, FieldValue] = {"x-death": deaths}
    for which in ("last",) if "x-death" in headers else ("first", "last"):
        changes |= {
            f"x-{which}-death-exchange": exchange,
            f"x-{which}-death-queue": queue,
            f"x-{which}-death-reason": reason,
        }
    stamped = properties.with_expiration(properties.with_headers(props, changes), None)
    if death.rerouted:
        stamped = properties.without_header(stamped, "CC")
    return Stamped(
        properties=stamped,
        copies=() if death.rerouted else [one for one in copies if isinstance(one, str)],
        headers=lambda: properties.decode(stamped).headers,
        cycling=_cycling(deaths),
    )


# Fewer of one size are looked at one by one, and so are longer ones, and what has more shapes.
COUNT_MIN = 8
SIZE_MAX = 2048
SHAPES_MAX = 8
_TELLS = frozenset(
    (
        b"x-death",
        *(
            b"x-%s-death-%s" % (which, what)
            for which in (b"first", b"last")
            for what in (b"exchange", b"queue", b"reason")
        ),
        b"x-attempt",
        b"x-reason",
    )
)


def aparts(props: Sequence[bytes]) -> list[tuple[bytes, bytes]]:
    """What tells of each record's deaths, and its properties without that: tried anew, no death of it closes a cycle.

    What stands beside it differs from message to message, as ids of traces do. Messages of one application have it in
    the same places, so those of one size are a matrix of bytes: one is looked at, the others are compared with it.
    """
    found: list[tuple[bytes, bytes] | None] = [None] * len(props)
    sizes = np.fromiter(map(len, props), dtype=np.int64, count=len(props))
    alike, counts = np.unique(sizes, return_counts=True)
    for size, count in zip(alike.tolist(), counts.tolist(), strict=True):
        if count >= COUNT_MIN and size <= SIZE_MAX:
            _compare(props, np.flatnonzero(sizes == size), size, found)
    return [apart(one) if parts is None else parts for one, parts in zip(props, found, strict=True)]


def _compare(props: Sequence[bytes], indices: npt.NDArray[np.intp], size: int, found: list[Any]) -> None:
    """Take apart those at these indices, which have one size, as far as they have few shapes."""
    rows = np.frombuffer(b"".join([props[index] for index in indices.tolist()]), dtype=np.uint8).reshape(-1, size)
    for _ in range(SHAPES_MAX):
        shape = _Shape(rows[0].tobytes())
        fits = shape.fits(rows)
        mine = indices[fits].tolist()
        lefts = (props[index] for index in mine) if not shape.told else shape.without(rows[fits])
        for index, left in zip(mine, lefts, strict=True):
            found[index] = shape.told, left
        indices, rows = indices[~fits], rows[~fits]
        if not len(indices):
            return


class _Shape:
    """Where properties tell of deaths, and what others must have in common with them to tell the same there."""

    __slots__ = ("_cuts", "_mask", "_pattern", "_table", "told")

    def __init__(self, props: bytes) -> None:
        start, end = properties.headers_place(props)
        # What follows the headers does not matter, nor the flags that speak of it.
        mask = np.zeros(len(props), dtype=np.uint8)
        mask[0] = 0xFF
        mask[2 : start + 4 if end else 2] = 0xFF
        told: list[bytes] = []
        # What is left out: the pieces between these places stay.
        cuts = []
        size = 0
        for name, first, last in entries_of(props, start + 4, end) if end else ():
            is_ours = name in _TELLS
            if is_ours:
                told.append(props[first:last])
                cuts.append((first, last))
                size += last - first
            value = first + 1 + len(name)
            letter = props[value]
            # Of others, where they end; inside of tables and arrays nothing is looked at.
            mask[first : last if is_ours else value + (5 if letter in b"SxAF" else 1)] = 0xFF
        self.told = b"".join(told)
        self._mask = mask
        self._pattern = np.frombuffer(props, dtype=np.uint8) & mask
        self._table = slice(start, start + 4), np.frombuffer(U32.pack(max(end - start - 4 - size, 0)), dtype=np.uint8)
        self._cuts = cuts

    def fits(self, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        return np.asarray(((rows ^ self._pattern) & self._mask).max(axis=1) == 0)

    def without(self, rows: npt.NDArray[np.uint8]) -> list[bytes]:
        """Rows that fit, without what tells of deaths."""
        place, size = self._table
        pieces = [rows[:, : place.start], np.broadcast_to(size, (len(rows), 4))]
        low = place.stop
        for first, last in self._cuts:
            pieces.append(rows[:, low:first])
            low = last
        pieces.append(rows[:, low:])
        left = np.concatenate(pieces, axis=1)
        cells: list[bytes] = left.view(f"V{left.shape[1]}").ravel().tolist()
        return cells


def apart(props: bytes) -> tuple[bytes, bytes]:
    """The same of one."""
    start, end = properties.headers_place(props)
    table = props[start:end]
    told, left = _apart(table) if len(table) > 4 else (b"", table)
    return (told, b"".join((props[:start], left, props[end:]))) if told else (b"", props)


@lru_cache(maxsize=1024)
def _apart(table: bytes) -> tuple[bytes, bytes]:
    """The same of a table; those of messages without headers of their own are often alike."""
    told, kept = parted(table, 4, len(table), _TELLS)
    return told, U32.pack(len(kept)) + kept


def mark(props: bytes, told: Mapping[str, str | int]) -> bytes:
    """Properties of a record that failed, with what its consumers are told of that."""
    return properties.with_headers(
        props, {name: Int64(value) if isinstance(value, int) else value for name, value in told.items()}
    )


def _text(raw: bytes) -> str | bytes:
    """As a field value: names from clients need not be UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw


def _is_of(entry: FieldValue, queue: str | bytes, reason: str) -> bool:
    return isinstance(entry, dict) and entry.get("queue") == queue and entry.get("reason") == reason


def _copies(headers: FieldTable) -> list[FieldValue]:
    found = headers.get("CC")
    return [one for one in found if isinstance(one, str | bytes)] if isinstance(found, list) else []


def _cycling(deaths: Sequence[FieldValue]) -> frozenset[str]:
    """The queues in which the message died before and was not rejected there or since."""
    queues: set[str] = set()
    for one in deaths:
        if not isinstance(one, dict) or one.get("reason") == Reason.REJECTED:
            # What is no table was put there by a client: no cycle that turns by itself.
            break
        queue = one.get("queue")
        if isinstance(queue, str):
            queues.add(queue)
        elif isinstance(queue, bytes):
            queues.add(queue.decode("utf-8", "surrogateescape"))
    return frozenset(queues)
