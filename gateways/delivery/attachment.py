"""How far a binding to the past went. Value; the queue has it, the journal keeps it, past.py works with it."""

from dataclasses import dataclass, field
from uuid import UUID

from headrace.controller.table import Table
from headrace.core_log.intervals import Intervals


@dataclass(slots=True)
class Attachment:
    """A binding that was given the past of an exchange: these offsets of its stream are done."""

    stream: UUID
    key: str
    arguments: Table
    ranges: Intervals = field(default_factory=Intervals)
