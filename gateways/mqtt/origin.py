"""Who published a record, as the log has it: a hash of the client id, and the identifier of a QoS 2 PUBLISH. Format.

    origin   | 47 bits: hash of the client id | 16 bits: packet identifier, 0: none |

A message and the identifier under which it was received are one record, so neither a crash nor a loss of power can part
them: whoever has the message in its log knows that it was received (M1). Only sessions that outlive their connection
need that, so only their messages carry one. Neighbours: publishes.py writes it, received.py finds it again.
"""

from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

_ID_MASK = 0xFFFF
_CLIENT_MASK = 0x7FFF_FFFF_FFFF_0000


def origin_of(client_id: str) -> int:
    return xxh3_64_intdigest(client_id.encode()) & _CLIENT_MASK


def with_ids(origin: int, packet_ids: Sequence[int]) -> list[int]:
    return [origin | packet_id for packet_id in packet_ids]


def publisher(origin: int) -> int:
    """The client alone: what `origin_of` says."""
    return origin & _CLIENT_MASK


def packet_id_in(origin: int) -> int:
    return origin & _ID_MASK
