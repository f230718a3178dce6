"""What is to happen when a parked record is due: the `target` of delay/delays.py. Format; pure.

     0      1         9            11
     | kind | view id | vhost size | vhost ... | name ...

The engine counts, lists and shards by these bytes and knows nothing else of them, so whatever differs from record to
record stands in the record: its key, properties, value, attributes and headers. The view id tells a queue from a later
one of the same name (0: not about a view). Neighbours: delayed.py has somebody for each kind.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

_HEAD = struct.Struct(">BQH")
assert _HEAD.size == 11


class DutyKind(IntEnum):
    # Publish to the exchange `name`; the record is the message.
    PUBLISH = 1
    # Bring the record back to the queue `name`, which is the view `view`, and to nobody else.
    RETRY = 2
    # A run of the schedule `name`: publish, and park the next run.
    SCHEDULE = 6
    # Append to the created topic `name`; the record is the message.
    TOPIC = 7
    # Bring the record back to the consumer group `name`, by its stream whose id ends with `view`, and to nobody else.
    GROUP = 8


@dataclass(frozen=True, slots=True)
class Duty:
    kind: DutyKind
    vhost: str
    name: str = ""
    view: int = 0


@lru_cache(maxsize=4096)
def encode_duty(duty: Duty) -> bytes:
    vhost = duty.vhost.encode("utf-8", "surrogateescape")
    return _HEAD.pack(duty.kind, duty.view, len(vhost)) + vhost + duty.name.encode("utf-8", "surrogateescape")


@lru_cache(maxsize=4096)
def decode_duty(target: bytes) -> Duty:
    """ValueError for bytes that are none: they were not written by this release, or not by us."""
    try:
        kind, view, size = _HEAD.unpack_from(target)
        if len(target) < _HEAD.size + size:
            raise ValueError("the vhost is cut short")
        vhost = target[_HEAD.size : _HEAD.size + size].decode("utf-8", "surrogateescape")
        return Duty(DutyKind(kind), vhost, target[_HEAD.size + size :].decode("utf-8", "surrogateescape"), view)
    except (struct.error, ValueError) as error:
        raise ValueError(f"not a duty: {target[:64]!r}: {error}") from error
