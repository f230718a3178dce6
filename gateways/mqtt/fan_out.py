"""Messages on their way out of the log of `amq.topic`, to the sessions that keep up. Driver.

It hears of every append, whichever door it came through. One look-up per topic gives a plan of who gets it; those to
whom a message looks the same, and who need not acknowledge it, share its bytes. A session that takes no more falls
behind, and is fed from the log (catch_up.py). Neighbours: interest.py plans, session.py takes, retaining.py keeps what
is retained.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PROTOCOL_MASK, QOS_MASK, QOS_SHIFT, RETAIN, RecordBatch
from headrace.core_log.record import Protocol as Vocabulary
from headrace.filtering.tags import Tags
from headrace.gateways.mqtt.encoder import encode_publish_run, publish_first_byte
from headrace.gateways.mqtt.interest import Delivery, Interests, Plan, Shape, Topics
from headrace.gateways.mqtt.quota import Quota
from headrace.gateways.mqtt.session import Piece, Session
from headrace.gateways.mqtt.shared import Shared
from headrace.gateways.mqtt.sys_topics import PREFIX
from headrace.gateways.mqtt.tally import Tally

SYS = PREFIX.encode()


class Retain(Protocol):
    """Told of messages with the retain flag: the first of them stands at `low` in the batch."""

    def __call__(
        self, batch: RecordBatch, low: int, names: Sequence[bytes], blobs: Sequence[bytes], qos: int
    ) -> None: ...


class FanOut:
    wants_copies = True

    def __init__(self, shared: Shared, tally: Tally, *, retain: Retain, fall_behind: Callable[[Session], None]) -> None:
        """`fall_behind`: told, perhaps again, of a session that took not all."""
        self.shared = shared
        self.tally = tally
        self._retain = retain
        self._fall_behind = fall_behind
        # Of those who are connected.
        self.interests = Interests()
        self._topics = Topics(shared.keys.topic_of)
        # Sessions with something that must be committed before it may go out.
        self._uncommitted: dict[Session, None] = {}

    def wants(self, key: bytes, tags: Tags) -> bool:
        """Whether somebody who is connected would get a message with this key and these tags."""
        return bool(self.interests.plan(self._topics[key]).tagged(tags).deliveries)

    def take(self, batch: RecordBatch, first: int, last: int) -> None:
        """Records were appended to the log, over whichever door."""
        keys = batch.keys
        plan_of = self.interests.plan
        while first < last:
            key = keys[first]
            topic = self._topics[key]
            plan = plan_of(topic)
            count = last - first
            alike = keys[last - 1] is key and keys[first:last].count(key) == count
            end = last
            if not alike:
                end = first + 1
                while end < last and (keys[end] is key or plan_of(self._topics[keys[end]]) is plan):
                    end += 1
            for part, start, stop in plan.by_tags(batch, first, end) if plan.has_filters else ((plan, first, end),):
                for attributes, low, high in batch.attributes.spans(start, stop):
                    if attributes & PROTOCOL_MASK == Vocabulary.AMQP:
                        self._take_amqp(part, batch, low, high)
                        continue
                    names = [topic.name] * (high - low) if alike else self.shared.keys.topics_of(keys[low:high])
                    self._take(
                        part,
                        batch,
                        low,
                        names,
                        batch.properties[low:high],
                        (attributes & QOS_MASK) >> QOS_SHIFT,
                        attributes & RETAIN != 0,
                    )
            first = end

    def _take_amqp(self, plan: Plan, batch: RecordBatch, low: int, high: int) -> None:
        for index in range(low, high):
            properties = batch.properties[index]
            message = self.shared.to_mqtt(properties)
            name = self._topics[batch.keys[index]].name
            if name.startswith(SYS):
                # Nobody speaks for the broker, over no door.
                continue
            self._take(plan, batch, index, [name], [message.blob], message.qos, message.retain)

    def _take(
        self,
        plan: Plan,
        batch: RecordBatch,
        low: int,
        names: Sequence[bytes],
        blobs: Sequence[bytes],
        qos: int,
        retain: bool,
    ) -> None:
        """Messages that differ in topic, properties and payload at most; by their time to live and publisher."""
        high = low + len(names)
        if retain:
            self._retain(batch, low, names, blobs, qos)
        for expiry_us, start, end in batch.expiries.spans(low, high):
            spans = batch.origins.spans(start, end) if plan.has_no_local else ((0, start, end),)
            for origin, first, last in spans:
                whole = last - first == len(names)
                self._fan_out(
                    plan.without(origin) if plan.has_no_local else plan,
                    batch,
                    first,
                    names if whole else names[first - low : last - low],
                    blobs if whole else blobs[first - low : last - low],
                    batch.values[first:last],
                    qos,
                    retain,
                    expiry_us,
                )

    def _fan_out(
        self,
        plan: Plan,
        batch: RecordBatch,
        first: int,
        names: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        qos: int,
        retain: bool,
        expiry_us: int,
    ) -> None:
        offset = batch.offset_at(first)
        for shape, sessions in plan.plain[qos]:
            flag = retain and shape.retain_as_published
            marked = _marked(blobs, shape)
            data = b""
            sent_count = len(sessions)
            for session in sessions:
                link = session.link
                if not session.live or link is None:
                    sent_count -= 1
                    continue
                if session.pieces or session.extras or link.is_full or link.packet_bytes_max or link.alias_max:
                    # It counts what it sends.
                    sent_count -= 1
                    session.offer(Piece(offset, 0, flag, names, marked, payloads, expiry_us))
                    self._note_behind(session)
                    continue
                if not data:
                    data = encode_publish_run(publish_first_byte(0, flag), names, marked, payloads, (), shape.version)
                link.send(data)
            self.tally.delivered += sent_count * len(names)
        for delivery in plan.tracked[qos]:
            session = delivery.session
            if session.quota is not None:
                self._offer_within(session.quota, delivery, offset, names, blobs, payloads, qos, retain, expiry_us)
            elif session.live:
                self.offer(delivery, offset, names, blobs, payloads, qos, retain, expiry_us)
                self._note_behind(session)

    def _offer_within(
        self,
        quota: Quota,
        delivery: Delivery,
        offset: int,
        names: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        qos: int,
        retain: bool,
        expiry_us: int,
    ) -> None:
        """The same where only so many may wait: also what a session that is behind will read later is counted."""
        session = delivery.session
        count = session.admitted(offset, len(names))
        if not count:
            return
        if session.live and self.offer(
            delivery, offset, names[:count], blobs[:count], payloads[:count], qos, retain, expiry_us
        ):
            session.shed()
            return
        quota.unread += count
        session.shed()
        self._note_behind(session)

    def offer(
        self,
        delivery: Delivery,
        offset: int,
        names: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        qos: int,
        retain: bool,
        expiry_us: int,
    ) -> bool:
        shape, session = delivery.shape, delivery.session
        flag = retain and shape.retain_as_published
        piece = Piece(offset, min(qos, delivery.qos), flag, names, _marked(blobs, shape), payloads, expiry_us)
        taken = session.offer(piece)
        if session.pieces and session.outlives:
            self._uncommitted[session] = None
        return taken

    def _note_behind(self, session: Session) -> None:
        if not session.live:
            self._fall_behind(session)

    def advanced(self, log: PartitionLog) -> None:
        """The log is committed further."""
        waiting, self._uncommitted = self._uncommitted, {}
        for session in waiting:
            session.pump()
            if session.pieces and session.link is not None and session.pieces[0].offset >= log.high_watermark:
                self._uncommitted[session] = None

    def leave(self, session: Session) -> None:
        """Its connection has ended."""
        self.interests.remove_all(session)
        self._uncommitted.pop(session, None)


def _marked(blobs: Sequence[bytes], shape: Shape) -> Sequence[bytes]:
    """With the identifiers of the subscriptions that matched."""
    if not shape.identifiers:
        return blobs
    if blobs.count(blobs[0]) == len(blobs):
        return [blobs[0] + shape.identifiers] * len(blobs)
    return [blob + shape.identifiers for blob in blobs]
