"""Which QoS 2 messages were received and not released, after a start: what states say, set right by the log. Machine.

A session's state is written now and then, its messages when they are acknowledged. So a state may know of a message
that the log does not have: it was never acknowledged, and its identifier counts for nothing. And the log may have
messages that came after the state was written: they carry their identifiers (origin.py).
"""

from collections.abc import Iterable

from headrace.core_log.errors import OffsetOutOfRange
from headrace.core_log.log import PartitionLog
from headrace.gateways.mqtt.origin import packet_id_in, publisher
from headrace.gateways.mqtt.session import Session


def parked_at(offset: int) -> int:
    """What stands in `Session.incoming` for a message that is delivered later: its offset among the parked ones."""
    return -2 - offset


def forget_unwritten(log: PartitionLog, parked: PartitionLog, session: Session) -> None:
    """Identifiers whose messages neither log has; they were the last before a crash."""
    complete: set[PartitionLog] = set()
    for packet_id, offset in reversed([*session.incoming.items()]):
        where, at = (parked, -2 - offset) if offset <= parked_at(0) else (log, offset)
        if where in complete:
            continue
        if at < where.log_start or has_record(where, at):
            complete.add(where)
        else:
            del session.incoming[packet_id]


def has_record(log: PartitionLog, offset: int) -> bool:
    try:
        runs = log.read(offset, bytes_max=1)
    except OffsetOutOfRange:
        return False
    return bool(runs) and runs[0].first < runs[0].last and runs[0].batch.offset_at(runs[0].first) == offset


def find_unnoted(log: PartitionLog, sessions: Iterable[Session], noted_to: int) -> list[Session]:
    """Those whose state was behind the log, set right. `noted_to`: what is before that is in everybody's state."""
    by_origin = {one.origin: one for one in sessions if one.noted_to >= 0}
    if not by_origin:
        return []
    found: dict[Session, None] = {}
    start = max(noted_to, min(one.noted_to for one in by_origin.values()), log.log_start)
    for run in log.runs(start):
        for origin, low, _high in run.batch.origins.spans(run.first, run.last):
            packet_id = packet_id_in(origin)
            if not packet_id:
                continue
            session = by_origin.get(publisher(origin))
            offset = run.batch.offset_at(low)
            if session is not None and offset >= session.noted_to:
                session.incoming[packet_id] = offset
                found[session] = None
    return list(found)
