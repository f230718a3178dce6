"""Sessions that do not keep up, or wake: they are fed from the log, all of them in one pass. Machine over the log.

The pass goes round and round: each read is given to all who stand in it and have room, whoever wakes later joins where
it is, and who has caught up leaves. Where the key indexes say that nothing matches, nothing is read.
A limit of messages for one session is kept when it wakes: it gets the newest of what it missed. They must be counted
for that, so such a session goes round twice. What is passed over takes its packet identifier all the same.
Neighbours: hub.py says who is behind and delivers what is found; core_log/key_scan.py knows where keys are.
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
        *,
        messages_max: int = 0,
    ) -> None:
        """`messages_max`: of those that a session missed, with QoS 1 and 2; 0: all."""
        self._log = log
        self._keys = keys
        self._to_mqtt = to_mqtt
        self._offer = offer
        self._tally = tally
        self._messages_max = messages_max
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
        if self._messages_max and session.position < session.awake_from:
            session.missed_from = session.position
            session.missed_count = 0

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
            eager = {session for session in hungry if session.position >= start}
            runs = log.read(start, bytes_max=READ_BYTES, end=log.end)
            for run in runs:
                self._feed_run(eager, run.batch, run.first, run.last)
            self._from = int(runs[-1].batch.next_offset)
            reached = min(self._from, int(log.end))
            for session in eager:
                if session.position < reached:
                    session.position = reached
        for session in hungry:
            if session.missed_from >= 0 and session.position >= session.awake_from:
                # Counted: once more from where it slept, now for good.
                session.passing_over = max(0, session.missed_count - self._messages_max)
                session.position, session.missed_from = session.missed_from, -1
                session.ahead = (None, 0)
            if session.position >= log.end and session in self._behind:
                self.leave(session)
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
                    offset = batch.offset_at(first)
                if self._messages_max and min(qos, delivery.qos) and offset < session.awake_from:
                    first = self._limited(session, batch, first, end)
                    if first >= end:
                        continue
                    offset = batch.offset_at(first)
                names = self._keys.topics_of(batch.keys[first:end])
                payloads = batch.values[first:end]
                part = blobs[first - low : end - low]
                if self._offer(delivery, offset, names, part, payloads, qos, retain, expiry_us):
                    # At once: whoever writes the session down must not find it before what it was given.
                    session.position = batch.offset_at(end - 1) + 1
                else:
                    session.position = offset
                    feeding.discard(session)

    def _limited(self, session: Session, batch: RecordBatch, first: int, end: int) -> int:
        """Of records that a session missed: from which on they are delivered; `end` if none of them is."""
        count = min(end, batch.index_of(session.awake_from)) - first
        if session.missed_from >= 0:
            session.missed_count += count
            return end
        dropped = min(count, session.passing_over)
        session.passing_over -= dropped
        # Nothing is before them that has not gone out: their numbers are the next ones.
        session.next_seq += dropped
        session.counts.dropped += dropped
        self._tally.dropped += dropped
        return first + dropped
