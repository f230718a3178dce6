"""What people see of parked records: one of them, a page, the counts, the answers. Values.

Neighbours: delays.py answers with these; the HTTP door and the command line show them.
"""

from dataclasses import dataclass
from enum import Enum

from headrace.core_log.errors import Refused
from headrace.core_log.record import Headers


class DelayRefused(Refused):
    """Due later than can be promised."""


class Outcome(Enum):
    """The definite answer to cancel and reschedule."""

    DONE = "done"
    ALREADY_FIRED = "already fired"
    ALREADY_CANCELLED = "already cancelled"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Pending:
    """One parked record, for those who look at single ones."""

    id: bytes
    target: bytes
    due_us: int
    parked_us: int
    key: bytes
    properties: bytes
    value: bytes
    attributes: int
    tags: tuple[str, ...]
    headers: Headers


@dataclass(frozen=True, slots=True)
class Page:
    """Some of what is parked, by due time. A page may be short, even empty, and still have a cursor: there is more."""

    records: tuple[Pending, ...]
    # Give it to `list` as `after`; None: this was the last page.
    cursor: str | None


@dataclass(frozen=True, slots=True)
class BucketCount:
    """How many records wait in one bucket. The first, `near`, is the intake: what is not sorted, or due soon."""

    name: str
    start_us: int
    end_us: int
    pending: int
    byte_count: int


def made_id(offset: int) -> bytes:
    """The id of a record that was parked without one, from its offset in the intake."""
    return b"hd-%016x" % offset
