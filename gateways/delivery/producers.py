"""Who an idempotent publisher is to the log. Format; pure.

A client names itself (`x-producer-id`) and numbers what it publishes (`x-sequence`). The log knows sixteen bytes: the
hash of virtual host, user and name. The user is part of it, so that nobody can use up another's numbers and have
their messages taken for repetitions; the hash is one that cannot be made to collide on purpose, for the same reason.
Numbers count for each log (the exchange's, or the queue's with the default exchange) on its own, so one counter may
serve for all that a client publishes: where some are missing, nothing is wrong. Neighbours: core_log/producers.py has
the window of what was seen; each door reads the three fields from its own headers.
"""

from functools import lru_cache
from hashlib import blake2b

from headrace.core_log.errors import SequenceRefused
from headrace.core_log.record import Producer

NAME_BYTES_MAX = 255
EPOCH_MAX = 2**32 - 1
SEQUENCE_MAX = 2**63 - 2


def producer(vhost: str, user: str, name: str, epoch: int, sequence: int) -> Producer:
    """Raises SequenceRefused for what cannot be a name, an epoch or a number."""
    if not name or len(name.encode("utf-8", "surrogateescape")) > NAME_BYTES_MAX:
        raise SequenceRefused(f"x-producer-id must have 1 to {NAME_BYTES_MAX} bytes")
    if not 0 <= epoch <= EPOCH_MAX:
        raise SequenceRefused(f"x-producer-epoch must be 0 to {EPOCH_MAX}, not {epoch}")
    if not 0 <= sequence <= SEQUENCE_MAX:
        raise SequenceRefused(f"x-sequence must be 0 to {SEQUENCE_MAX}, not {sequence}")
    return Producer(_identity(vhost, user, name), epoch, sequence)


@lru_cache(maxsize=4096)
def _identity(vhost: str, user: str, name: str) -> bytes:
    parts = [part.encode("utf-8", "surrogateescape") for part in (vhost, user, name)]
    return blake2b(b"".join(len(part).to_bytes(4, "big") + part for part in parts), digest_size=16).digest()
