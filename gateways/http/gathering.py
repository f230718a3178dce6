"""One answer out of those of several leaders: lists, counts, and things that are found by an id. Machine; pure.

A node alone answers for all vhosts. In a cluster each leader knows of its own, so a list that names no vhost is asked
of all, with the same query, and put together in the order that each of them keeps. What is found by an id is asked of
each until one knows it. Neighbours: front.py asks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from urllib.parse import parse_qsl

# What JSON has.
Document: TypeAlias = dict[str, Any]
Key = Callable[[Document], Any]

_VHOST_MARK = "|"
# A cursor of the audit says how far each leader's pages went, in so many bits each.
CURSOR_BITS = 48


def _text(one: Document) -> str:
    name, vhost = one["name"], one["vhost"]
    return str(name) if vhost == "/" and _VHOST_MARK not in name else f"{vhost}{_VHOST_MARK}{name}"


def _place(one: Document) -> tuple[str, str]:
    return one["vhost"], one.get("group") or one.get("name") or ""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    key: Key
    newest_first: bool = False


# Lists of these, by the word of the path: the fields to be put together, and the order of what is in them.
_FIELDS: Mapping[str, Sequence[_Field]] = {
    "queues": (_Field("queues", _text),),
    "topics": (_Field("topics", lambda one: one["topic"]),),
    "connections": (_Field("connections", lambda one: one["id"]),),
    "consumer-groups": (_Field("groups", _place),),
    "schedules": (_Field("schedules", _place),),
    "cursors": (_Field("cursors", lambda one: one["cursor"]),),
    "stages": (_Field("stages", lambda one: one["created_at"]),),
    "redrives": (
        _Field("redrives", lambda one: one["started_at"], newest_first=True),
        _Field("earlier", lambda one: one["noted_at"], newest_first=True),
    ),
    "delayed": (
        _Field("targets", lambda one: (one["vhost"], one["kind"], one["name"])),
        _Field("buckets", lambda one: (one["start"] or "", one["name"])),
    ),
    "audit": (_Field("events", lambda one: one["time"], newest_first=True),),
}
# Counts that are added up.
_SUMS = {"stages": "total", "delayed": "pending"}
_LIMITS = {"queues": 1000, "topics": 1000, "connections": 1000, "stages": 100, "audit": 100}
# What these words are followed by in a path is an id, which says nothing of where it is.
FOUND_BY_ID = frozenset(("redrives", "cursors", "connections", "delayed", "stages"))


def is_list_of_all(method: str, words: Sequence[str], query: bytes) -> bool:
    """It names no vhost, and is about all of them."""
    if method not in ("GET", "HEAD") or len(words) != 1 or words[0] not in _FIELDS:
        return False
    return all(name != "vhost" for name, _value in _parameters(query))


def is_by_id(words: Sequence[str], query: bytes) -> bool:
    if words[:2] == ["delayed", "messages"]:
        # Without an id it is a list, which says of what.
        return len(words) > 2
    return len(words) > 1 and words[0] in FOUND_BY_ID


def _parameters(query: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query.decode("ascii"), keep_blank_values=True, errors="surrogateescape")
    except ValueError:
        return []


def limit_of(word: str, query: bytes) -> int | None:
    """How many the caller wants at most; None: all. What is no number the leaders refuse."""
    found = next((value for name, value in _parameters(query) if name == "limit"), "")
    return int(found) if found.isascii() and found.isdigit() else _LIMITS.get(word)


def merged(word: str, answers: Sequence[Document], limit: int | None) -> Document:
    """`answers`: of each leader, to the same question."""
    result: Document = {}
    for one in answers:
        result = {**one, **result}
    is_cut = False
    for field in _FIELDS[word]:
        together = [item for one in answers for item in one[field.name]]
        together.sort(key=field.key, reverse=field.newest_first)
        is_cut = is_cut or (limit is not None and len(together) > limit)
        result[field.name] = together[:limit]
    if "more" in result:
        result["more"] = is_cut or any(one["more"] for one in answers)
    total = _SUMS.get(word)
    if total is not None:
        result[total] = sum(one[total] for one in answers)
    return result


# -- pages of the audit ---------------------------------------------------------------------------------------------


def cursor_of(query: bytes) -> int | None:
    found = next((value for name, value in _parameters(query) if name == "after"), "")
    return int(found) if found.isascii() and found.isdigit() else None


def split_cursor(cursor: int | None, count: int) -> list[int | None]:
    """Where each leader's page begins: 0 for one that has come to its end, None for its newest."""
    if cursor is None:
        return [None] * count
    return [(cursor >> (CURSOR_BITS * place)) & ((1 << CURSOR_BITS) - 1) for place in range(count)]


def merged_events(pages: Sequence[Document | None], asked: Sequence[int | None], limit: int) -> Document:
    """A page of all, out of the leaders' pages (None: that one was not asked, since it had come to its end). What does
    not fit is asked for again with the next page."""
    events: list[tuple[str, int, Document]] = []
    for place, page in enumerate(pages):
        time = "~"
        for one in page["events"] if page is not None else ():
            # Those of one leader stay in its order, whatever its clock did.
            time = min(time, one["time"])
            events.append((time, place, one))
    events.sort(key=lambda one: one[0], reverse=True)
    shown, left = events[:limit], events[limit:]
    cursors = []
    for place, page in enumerate(pages):
        if page is None:
            cursors.append(0)
            continue
        is_cut = any(one[1] == place for one in left)
        lowest = min((one[2]["id"] for one in shown if one[1] == place), default=None)
        if not is_cut:
            cursors.append(page["cursor"] or 0)
        elif lowest is not None:
            cursors.append(lowest)
        else:
            # Nothing of it was shown: the same page again.
            before = asked[place]
            cursors.append(1 + max(one["id"] for one in page["events"]) if before is None else before)
    cursor = sum(found << (CURSOR_BITS * place) for place, found in enumerate(cursors))
    return {"events": [one[2] for one in shown], "cursor": cursor or None}
