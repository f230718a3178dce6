"""Sessions that do not keep up, or wake: they are fed from the log, all of them in one pass. Machine over the log.

The pass goes round and round: each read is given to all who stand in it and have room, whoever wakes later joins where
it is, and who has caught up leaves. Where the key indexes say that nothing matches, nothing is read.
Where there is a limit of messages for one session, what it missed is counted when it wakes: such a session goes round
twice. What is passed over takes its packet identifier all the same.
Neighbours: quota.py knows what is passed over, hub.py says who is behind, fan_out.py delivers what is found,
core_log/key_scan.py knows where keys are.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from typing import Protocol

from headrace.core_log.key_scan import KeyScan, Wish
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PROTOCOL_MASK, QOS_MASK, QOS_SHIFT, RETAIN, RecordBatch
from headrace.core_log.record import Protocol as Vocabulary
from headrace.core_log.storage.contract import Storage
from headrace.gateways.mqtt.interest import Delivery, Interests, Plan, Topics
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.session import Interest, Session
from headrace.gateways.mqtt.sys_topics import PREFIX
from headrace.gateways.mqtt.tally import Tally
from headrace.gateways.mqtt.topics import filter_matches, is_shared, literal_beginning

_logger = logging.getLogger(__name__)

SYS = PREFIX.encode()
READ_BYTES = 512 * 1024
# To look at so many sessions costs as much as such a read: the more are behind, the more is read at once.
LOOKED_AT = 250
# A round over more records than this is worth waiting for company.
FAR_COUNT = 20_000


class Progress(Enum):
    # Something was read, and handed to those who wanted it.
    FED = auto()
    # The next round is a long one: whoever comes before it begins takes part in it.
    ROUND = auto()
    # Nobody is behind, or nobody can take more for now.
    IDLE = auto()


class Translated(Protocol):
    """A message from AMQP, as MQTT sees it."""

    @property
    def blob(self) -> bytes: ...
    @property
    def qos(self) -> int: ...
    @property
    def retain(self) -> bool: ...


# (delivery, offset, topics, blobs, payloads, qos, retain, expiry_us) -> whether the session took them.
Offer = Callable[[Delivery, int, Sequence[bytes], Sequence[bytes], Sequence[bytes], int, bool, int], bool]


class CatchUp:
    def __init__(
        self,
        log: PartitionLog,
        storage: Storage,
        keys: RoutingKeys,
        to_mqtt: Callable[[bytes], Translated],
        offer: Offer,
        tally: Tally,
    ) -> None:
        self._log = log
        self._keys = keys
        self._to_mqtt = to_mqtt
        self._offer = offer
        self._tally = tally
        self._key_scan = KeyScan(storage, log)
        self._behind: dict[Session, None] = {}
        self._interests = Interests()
        self._topics = Topics(keys.topic_of)
        # Where the pass is.
        self._from = 0
        self.joined_count = 0

    def __contains__(self, session: Session) -> bool:
        return session in self._behind

    def join(self, session: Session) -> None:
        self._behind[session] = None
        self.joined_count += 1
        link = session.link
        assert link is not None
        for interest in session.interests.values():
            self.subscribe(session, interest, link.version)
        if session.quota is not None and session.position < session.awake_from:
            session.quota.begin_counting(session.position, session.awake_from)

    def leave(self, session: Session) -> None:
        if session in self._behind:
            del self._behind[session]
            self._interests.remove_all(session)

    def subscribe(self, session: Session, interest: Interest, version: Version) -> None:
        if session in self._behind and not is_shared(interest.filter):
            self._interests.add(session, interest, version)

    def unsubscribe(self, session: Session, topic_filter: str) -> None:
        self._interests.remove(session, topic_filter)

    def feed(self) -> Progress:
        """One read of the log, for all who have room and stand in it."""
        hungry = [session for session in self._behind if session.is_hungry]
        if not hungry:
            return Progress.IDLE
        log = self._log
        for session in hungry:
            if session.position < log.log_start:
                _logger.warning(
                    "retention took records before a session could read them",
                    extra={"client": session.client_id, "offsets": log.log_start - session.position},
                )
                session.counts.lost += log.log_start - session.position
                self._tally.dropped += log.log_start - session.position
                session.position = log.log_start
            self._pass_over(session)
        # Round and round: whoever wakes later joins where the others are, and is served on the next round.
        start = min((one.position for one in hungry if one.position >= self._from), default=log.end)
        if start >= log.end and self._from:
            self._from = 0
            lowest = min(session.position for session in hungry)
            if log.end - lowest > FAR_COUNT:
                return Progress.ROUND
            start = lowest
        if start < log.end:
            # Who stands before that has its turn on the next round, and who has no more room goes on from what it
            # refused: neither has anything to do with the rest of this read.
            taking = [session for session in hungry if session.position >= start]
            eager = set(taking)
            runs = log.read(start, bytes_max=READ_BYTES * (1 + len(hungry) // LOOKED_AT), end=log.end)
            for run in runs:
                self._feed_run(eager, run.batch, run.first, run.last)
            reached = min(int(runs[-1].batch.next_offset), int(log.end))
            for session in eager:
                if session.position < reached:
                    session.position = reached
            # Where nobody had room for all of it the pass stays with those who got furthest: a single session goes on
            # from there, and not with another round.
            self._from = max(session.position for session in taking)
        for session in hungry:
            quota = session.quota
            if quota is not None and quota.is_counting and session.position >= session.awake_from:
                # Counted: once more from where it slept, now for good.
                session.position = quota.counting_from
                session.refused(quota.end_counting(session.awake_from))
                session.shed()
                session.ahead = (None, 0)
            if session.position >= log.end and session in self._behind:
                self.leave(session)
                if quota is not None:
                    quota.forget()
                session.live = True
                session.pump()
        return Progress.FED

    def _pass_over(self, session: Session) -> None:
        """Where the key indexes say that nothing matches, nothing is read."""
        end = int(self._log.end)
        while session.position < end:
            ranges, known_to = session.ahead
            if session.position >= known_to:
                session.ahead = self._key_scan.find(session.position, self._wishes(session))
                continue
            if ranges is None:
                return
            place = bisect_right(ranges, session.position, key=lambda one: one[1])
            if place < len(ranges):
                session.position = max(session.position, ranges[place][0])
                return
            session.position = min(known_to, end)

    def _wishes(self, session: Session) -> list[Wish]:
        keys = self._keys
        wishes = []
        for text in session.interests:
            if is_shared(text):
                continue
            literal, wildcard = literal_beginning(text)
            if not wildcard:
                wishes.append(Wish(keys.key_of(text.encode())))
            else:
                wishes.append(Wish(keys.key_of(literal.encode()), partial(self._wants, text)))
        return wishes

    def _wants(self, topic_filter: str, key: bytes) -> bool:
        return filter_matches(topic_filter, self._keys.topic_of(key).decode())

    def _feed_run(self, eager: set[Session], batch: RecordBatch, first: int, last: int) -> None:
        """Whoever has no more room leaves the set, with the place to go on from."""
        if not eager or first >= last:
            return
        start, keys, plan_of = batch.offset_at(first), batch.keys, self._plan
        for attributes, low, high in batch.attributes.spans(first, last):
            index = low
            while index < high:
                plan = plan_of(keys[index])
                stop = index + 1
                # Neighbours that go to the same sessions go together.
                while stop < high and plan_of(keys[stop]) is plan:
                    stop += 1
                if plan.deliveries:
                    if plan.since > start:
                        for place in range(index, stop):
                            self._feed_some(plan.at(batch.offset_at(place)), eager, batch, place, place + 1, attributes)
                    else:
                        self._feed_some(plan, eager, batch, index, stop, attributes)
                index = stop

    def _plan(self, key: bytes) -> Plan:
        return self._interests.plan(self._topics[key])

    def _feed_some(
        self,
        plan: Plan,
        feeding: set[Session],
        batch: RecordBatch,
        first: int,
        last: int,
        attributes: int,
    ) -> None:
        if plan.has_filters:
            for part, low, high in plan.by_tags(batch, first, last):
                self._feed_some(part, feeding, batch, low, high, attributes)
            return
        if plan.has_no_local:
            pieces: Iterable[tuple[int, int, int]] = list(batch.origins.spans(first, last))
        else:
            pieces = ((0, first, last),)
        for origin, low, high in pieces:
            blobs: Sequence[bytes] = batch.properties[low:high]
            qos, retain = (attributes & QOS_MASK) >> QOS_SHIFT, attributes & RETAIN != 0
            if attributes & PROTOCOL_MASK == Vocabulary.AMQP:
                messages = [self._to_mqtt(one) for one in blobs]
                for place, message in enumerate(messages):
                    if self._keys.topic_of(batch.keys[low + place]).startswith(SYS):
                        continue
                    self._feed_piece(
                        plan.without(origin),
                        feeding,
                        batch,
                        low + place,
                        [message.blob],
                        message.qos,
                        message.retain,
                    )
                continue
            self._feed_piece(plan.without(origin), feeding, batch, low, blobs, qos, retain)

    def _feed_piece(
        self,
        plan: Plan,
        feeding: set[Session],
        batch: RecordBatch,
        low: int,
        blobs: Sequence[bytes],
        qos: int,
        retain: bool,
    ) -> None:
        high = low + len(blobs)
        for expiry_us, start, end in batch.expiries.spans(low, high):
            for delivery in plan.deliveries:
                session = delivery.session
                if session not in feeding:
                    continue
                first = start
                offset = batch.offset_at(first)
                if offset < session.position:
                    first = max(first, batch.index_of(session.position))
                    if first >= end:
                        continue
                    offset = batch.offset_at(first)
                if not min(qos, delivery.qos) and offset < session.awake_from:
                    # Nobody was there to get those.
                    first = max(first, batch.index_of(session.awake_from))
                    if first >= end:
                        continue
                tracked = session.quota is not None and min(qos, delivery.qos) > 0
                if session.quota is not None and session.quota.is_counting:
                    if tracked:
                        _count_missed(session, batch, first, end)
                    continue
                for one, last in _within_quota(session, batch, first, end) if tracked else ((first, end),):
                    names = self._keys.topics_of(batch.keys[one:last])
                    payloads = batch.values[one:last]
                    part = blobs[one - low : last - low]
                    if not self._offer(delivery, batch.offset_at(one), names, part, payloads, qos, retain, expiry_us):
                        session.position = batch.offset_at(one)
                        feeding.discard(session)
                        break
                    # At once: whoever writes the session down must not find it before what it was given.
                    session.position = batch.offset_at(last - 1) + 1
                    if tracked and session.quota is not None:
                        session.quota.unread = max(0, session.quota.unread - (last - one))


def _count_missed(session: Session, batch: RecordBatch, first: int, end: int) -> None:
    assert session.quota is not None
    end = min(end, batch.index_of(session.awake_from))
    if first < end:
        for low, high in session.quota.outside(batch.offset_at(first), batch.offset_at(end - 1) + 1):
            session.quota.count_missed(low, high - low)


def _within_quota(session: Session, batch: RecordBatch, first: int, end: int) -> Iterable[tuple[int, int]]:
    """The parts of some records, with QoS 1 or 2, that the session is to have. What is dropped is counted."""
    quota = session.quota
    assert quota is not None
    dropped = min(end - first, quota.passing_over)
    if dropped:
        quota.passing_over -= dropped
        quota.unread -= dropped
        first += dropped
        session.position = batch.offset_at(first - 1) + 1
        session.dropped(dropped)
    if first == end or not quota.holes:
        return ((first, end),) if first < end else ()
    found = quota.outside(batch.offset_at(first), batch.offset_at(end - 1) + 1)
    return [(batch.index_of(low), batch.index_of(high)) for low, high in found]
