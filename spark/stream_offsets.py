"""Where a stream of Spark stands: the next offset of each partition, and which topic it was. Format.

    {"topics": {"orders": {"0": 123, "1": 7, "id": "0b6e..."}}, "v": 1}

Spark keeps it in the checkpoint as text and compares it as text, so keys are sorted: the same place is the same text,
or an empty batch is run for the difference. The id of a topic tells it from one that was deleted and created again
under its name, whose offsets mean other records. A partition that is not there has not been seen yet: it is read from
0.

Spark does not keep where a query began. So the end of its first batch, which Spark does keep, says it as well: under
`began`, topics as under `topics`. Whoever runs that batch again reads from there, whatever `latest` is by then.
Neighbours: stream.py moves it, source_edges.py makes the first one.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

VERSION: Final = 1
ID: Final = "id"
BEGAN: Final = "began"


class InvalidOffsets(ValueError):
    """A text in a checkpoint, a cursor or an option that no stream of ours has written."""


@dataclass(frozen=True, slots=True)
class TopicOffsets:
    id: UUID
    # The next to be read, by partition.
    next: Mapping[int, int]


@dataclass(frozen=True, slots=True)
class Offsets:
    topics: Mapping[str, TopicOffsets] = field(default_factory=dict)
    # Of the end of a first batch: where that begins.
    began: Mapping[str, TopicOffsets] | None = None

    def to_json(self) -> dict[str, Any]:
        """Sorted by key as text, at each level: so does the checkpoint compare it."""
        began = {} if self.began is None else {BEGAN: _to_json(self.began)}
        return {**began, "topics": _to_json(self.topics), "v": VERSION}

    @classmethod
    def from_json(cls, document: object) -> "Offsets":
        """Raises InvalidOffsets; a version that is not known is one."""
        if not isinstance(document, dict) or document.get("v") != VERSION or set(document) - {BEGAN} != {"topics", "v"}:
            raise InvalidOffsets(f"offsets of version {VERSION} were expected, not {document!r}")
        return cls(_topics(document, "topics"), _topics(document, BEGAN) if BEGAN in document else None)


def _to_json(topics: Mapping[str, TopicOffsets]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, topic in sorted(topics.items()):
        numbers = sorted((str(partition), offset) for partition, offset in topic.next.items())
        found[name] = {**dict(numbers), ID: str(topic.id)}
    return found


def _topics(document: Mapping[str, object], name: str) -> dict[str, TopicOffsets]:
    topics = document[name]
    if not isinstance(topics, dict):
        raise InvalidOffsets(f"offsets without topics: {document!r}")
    return {topic: _topic(topic, given) for topic, given in topics.items()}


def _topic(name: str, given: object) -> TopicOffsets:
    if not isinstance(given, dict):
        raise InvalidOffsets(f"offsets of {name!r} were expected by partition, not {given!r}")
    try:
        id = UUID(given[ID])
        offsets = {int(number): offset for number, offset in given.items() if number != ID}
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidOffsets(f"{name!r} has no id, or a partition that is no number: {given!r}") from None
    wrong = [
        offset for offset in offsets.values() if not isinstance(offset, int) or isinstance(offset, bool) or offset < 0
    ]
    if wrong or any(number < 0 for number in offsets):
        raise InvalidOffsets(f"{name!r} has an offset or a partition that is none: {given!r}")
    return TopicOffsets(id, offsets)
