"""MQTT in one vhost: its sessions, their place in the log of `amq.topic`, retained messages, wills. Driver.

The way of a message: client -> `publish` (route and append, as an AMQP publish to `amq.topic` does) -> `take`, which
hears of every append to that log, whichever door it came through -> the sessions that keep up. A session that does not
keep up, or wakes, is fed from the log by `run`, all of them together in one pass, until it has caught up.
Sessions that sleep cost nothing here: no publish looks at them, and nothing is written for what they miss.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from typing import Protocol

import trio

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import DiskFull, HeadraceError, OffsetOutOfRange
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PERSISTENT, PROTOCOL_MASK, QOS_MASK, QOS_SHIFT, RETAIN, Producer, RecordBatch
from headrace.core_log.record import Protocol as Vocabulary
from headrace.delay.wheel import Timer
from headrace.filtering.expression import parse
from headrace.filtering.tags import NO_TAGS, Tags, is_small
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.queue import Queue
from headrace.gateways.delivery.vhost import Target, VirtualHost
from headrace.gateways.mqtt import state
from headrace.gateways.mqtt.catch_up import CatchUp, Progress, Translated
from headrace.gateways.mqtt.config import MqttConfig
from headrace.gateways.mqtt.delaying import Parking
from headrace.gateways.mqtt.encoder import encode_publish_run, publish_first_byte
from headrace.gateways.mqtt.intake import Intake
from headrace.gateways.mqtt.interest import (
    KNOWN_TOPIC_BYTES_MAX,
    TOPICS_MAX,
    Delivery,
    Interests,
    Plan,
    Shape,
    Topic,
    Topics,
    identifiers_of,
)
from headrace.gateways.mqtt.keeping import SessionStates
from headrace.gateways.mqtt.origin import origin_of, publisher, with_ids
from headrace.gateways.mqtt.packets import RetainHandling, Will
from headrace.gateways.mqtt.properties import PublishScans, encode_blob, encode_subscription_identifiers
from headrace.gateways.mqtt.quota import Quota
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.received import find_unnoted, forget_unwritten
from headrace.gateways.mqtt.retained import Retained, RetainedMessages
from headrace.gateways.mqtt.retained_log import RetainedLog
from headrace.gateways.mqtt.routingkeys import RoutingKeys
from headrace.gateways.mqtt.session import Extra, Flight, Interest, Link, Piece, Session
from headrace.gateways.mqtt.sys_topics import PREFIX, Figures, SysTopics
from headrace.gateways.mqtt.tally import Tally
from headrace.gateways.mqtt.topics import filter_matches, is_shared

_log = logging.getLogger(__name__)

EXCHANGE = "amq.topic"
SYS = PREFIX.encode()
WILL_RETRY_S = 5.0
GATHER_S = 0.05
GATHERS_MAX = 40
COMPACTED = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the hubs of all vhosts share."""

    broker: Broker
    config: MqttConfig
    keys: RoutingKeys
    scans: PublishScans
    # The properties of a record from AMQP.
    to_mqtt: Callable[[bytes], Translated]
    sessions_log: PartitionLog
    retained: RetainedLog
    # Whether a user may publish in a vhost to a topic, as a client of this identifier.
    may_publish: Callable[[str, str, str, str], bool]
    # Has something called with the end of the turn.
    before_end: Callable[[Callable[[], None]], None]
    # What $SYS/broker/version says.
    version: str = "headrace"


class Owner(Protocol):
    """The connection of a session, as the hub sees it."""

    def take_over(self) -> None:
        """Somebody else has connected with the same client id."""


class Hub:
    def __init__(self, shared: Shared, host: VirtualHost) -> None:
        self.shared = shared
        self.host = host
        self.broker = shared.broker
        self.log = host.exchange_log(EXCHANGE)
        self.sessions: dict[str, Session] = {}
        self.owners: dict[Session, Owner] = {}
        self.retained = RetainedMessages(shared.config.retained_bytes_max)
        # By origin: user and client id of each session.
        self._publishers: dict[int, tuple[str, str]] = {}
        self.tally = Tally()
        self.sys_topics: SysTopics | None = None
        if shared.config.sys_period_s:
            now = self.broker.env.clock.monotonic()
            self.sys_topics = SysTopics(shared.version, self.tally, self._figures, now)
        self._interests = Interests()
        self._topics = Topics(shared.keys.topic_of)
        # By key; with tags, by both.
        self.parking = Parking(self.broker, EXCHANGE, host.name, shared.keys.key_of)
        self._targets: dict[bytes | tuple[bytes, Tags], Target] = {}
        self.states = SessionStates(self.broker, host.name, self.log, shared.sessions_log)
        self._catch_up = CatchUp(
            self.log,
            self.broker.env.storage,
            shared.keys,
            shared.to_mqtt,
            self._offer,
            self.tally,
        )
        self._wake = trio.Event()
        # Sessions with something that must be committed before it may go out.
        self._uncommitted: dict[Session, None] = {}
        # What happens to sleeping sessions when their time has come.
        self._expiries: dict[Session, Timer[Callable[[], None]]] = {}
        self._wills: dict[Session, Timer[Callable[[], None]]] = {}
        # Told of sessions that are over, before what they held is given back.
        self.ended: Callable[[Session], None] = lambda session: None
        # What clients publish with QoS 0 and 1, until the turn ends.
        self.intake = Intake(self.publish, self.log.when_committed, shared.before_end)
        self.broker.taps[self.log] = self
        self.log.advanced.append(self._advanced)

    # -- publishing ---------------------------------------------------------------------------------------------

    def publish(
        self,
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        qos: int,
        retain: bool,
        version: Version,
        origin: int | Sequence[int] = 0,
        refused: list[int] | None = None,
    ) -> int | None:
        """Append messages, behind what was gathered before; returns the offset that a commit must pass before they may
        be acknowledged.

        `origin`: of all, or of each. `refused` gets the places of those that a full queue did not take
        (reject-publish); everybody else has them.
        """
        self.intake.flush()
        vocabulary = Vocabulary.MQTT_5 if version is Version.V5 else Vocabulary.MQTT_3
        attributes = int(vocabulary) | qos << QOS_SHIFT | (RETAIN if retain else 0) | (PERSISTENT if qos else 0)
        keys = self.shared.keys.keys_of(topics)
        reached: int | None = None
        for first, last, target, expiry_us in self._groups(keys, blobs, attributes):
            if target.byte_limits:
                for index in range(first, last):
                    full = [queue for queue in target.byte_limits if not queue.admits(1, len(payloads[index]))]
                    one = origin if isinstance(origin, int) else origin[index]
                    reached = self.broker.publish(
                        _not_for(target, full) if full else target,
                        blobs[index : index + 1],
                        payloads[index : index + 1],
                        attributes=attributes,
                        expiry_us=expiry_us,
                        keys=keys[index : index + 1],
                        # What is refused was not received: its identifier is free.
                        origin=publisher(one) if full else one,
                    )
                    for queue in full:
                        restated = self.broker.restated(keys[index], blobs[index], attributes)
                        self.broker.refuse(self.host, queue, target, restated, payloads[index])
                    if full and refused is not None:
                        refused.append(index)
                continue
            whole = last - first == len(keys)
            reached = self.broker.publish(
                target,
                blobs if whole else blobs[first:last],
                payloads if whole else payloads[first:last],
                attributes=attributes,
                expiry_us=expiry_us,
                keys=keys if whole else keys[first:last],
                origin=origin if whole or isinstance(origin, int) else origin[first:last],
            )
        self.tally.published += len(keys)
        return reached

    def publish_once(
        self,
        session: Session,
        packet_ids: Sequence[int],
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        retain: bool,
        version: Version,
        refused: list[int],
    ) -> None:
        """The same with QoS 2, for identifiers that are free: they are taken with that, also after a crash."""
        self.intake.flush()
        self.states.noted_to = int(self.log.end)
        try:
            origin = with_ids(session.origin, packet_ids) if session.outlives else session.origin
            self.publish(topics, blobs, payloads, qos=2, retain=retain, version=version, origin=origin, refused=refused)
            end = int(self.log.end)
            session.incoming.update(zip(packet_ids, range(end - len(packet_ids), end), strict=True))
            for place in refused:
                del session.incoming[packet_ids[place]]
        finally:
            self.states.noted_to = None
        if session.outlives:
            self.states.changed(session)

    def _groups(
        self, keys: Sequence[bytes], blobs: Sequence[bytes], attributes: int
    ) -> Iterable[tuple[int, int, Target, int]]:
        """Neighbours that go the same way for the same time."""
        count = len(keys)
        if keys[-1] is keys[0] and keys.count(keys[0]) == count and blobs.count(blobs[0]) == count:
            return ((0, count, self._target(keys[0], blobs[0], attributes), self._expiry_us(blobs[0])),)
        groups: list[tuple[int, int, Target, int]] = []
        start, target, expiry_us = 0, self._target(keys[0], blobs[0], attributes), self._expiry_us(blobs[0])
        for index in range(1, count):
            other = self._target(keys[index], blobs[index], attributes)
            other_us = self._expiry_us(blobs[index])
            if other.route_set != target.route_set or other_us != expiry_us or other.tags != target.tags:
                groups.append((start, index, target, expiry_us))
                start, target, expiry_us = index, other, other_us
        groups.append((start, count, target, expiry_us))
        return groups

    def _expiry_us(self, blob: bytes) -> int:
        if not blob:
            return 0
        seconds = self.shared.scans.of(blob).message_expiry_interval
        return 0 if seconds is None else self.broker.env.clock.wall_us() + seconds * 1_000_000

    def _target(self, key: bytes, blob: bytes, attributes: int) -> Target:
        tags = self.shared.scans.of(blob).tags if blob else NO_TAGS
        known = (key, tags) if tags else key
        target = self._targets.get(known)
        if target is None or not self.host.is_current(target):

            def headers() -> Mapping[str, object]:
                return self.broker.fields_of(self.broker.restated(key, blob, attributes))[0]

            target = self.host.target(EXCHANGE, key, [key.decode("utf-8", "surrogateescape")], headers, tags=tags)
            if target.route.reads_message or len(key) > KNOWN_TOPIC_BYTES_MAX or not is_small(tags):
                return target
            if len(self._targets) >= TOPICS_MAX:
                self._targets.clear()
            self._targets[known] = target
        return target

    # -- what was appended --------------------------------------------------------------------------------------

    def wants(self, key: bytes, tags: Tags) -> bool:
        """Whether somebody who is connected would get a message with this key and these tags."""
        return bool(self._interests.plan(self._topics[key]).tagged(tags).deliveries)

    def take(self, batch: RecordBatch, first: int, last: int) -> None:
        """Records were appended to the log, over whichever door."""
        keys = batch.keys
        plan_of = self._interests.plan
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
                self._offer(delivery, offset, names, blobs, payloads, qos, retain, expiry_us)
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
        if session.live and self._offer(
            delivery, offset, names[:count], blobs[:count], payloads[:count], qos, retain, expiry_us
        ):
            session.shed()
            return
        quota.unread += count
        session.shed()
        self._note_behind(session)

    def _offer(
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
        if not session.live and session not in self._catch_up:
            self._fall_behind(session)

    def _advanced(self, log: PartitionLog) -> None:
        """The log is committed further."""
        self.states.advanced()
        waiting, self._uncommitted = self._uncommitted, {}
        for session in waiting:
            session.pump()
            if session.pieces and session.link is not None and session.pieces[0].offset >= log.high_watermark:
                self._uncommitted[session] = None

    # -- retained messages --------------------------------------------------------------------------------------

    def _retain(self, batch: RecordBatch, low: int, names: Sequence[bytes], blobs: Sequence[bytes], qos: int) -> None:
        """[MQTT-3.3.1-5] The last one of each topic is kept; one without a payload takes it away [MQTT-3.3.1-6]."""
        for place, (name, blob) in enumerate(zip(names, blobs, strict=True)):
            index = low + place
            origin = publisher(batch.origins.at(index))
            user, client_id = self._publishers.get(origin, ("", ""))
            message = Retained(
                name,
                blob,
                batch.values[index],
                qos,
                batch.expiries.at(index),
                batch.timestamps.at(index),
                origin,
                batch.offset_at(index),
                batch.tags_at(index),
                user,
                client_id,
            )
            if not message.payload and not self.retained.remove(name):
                continue
            stored = self.shared.retained.append(self.host.name, message)
            if message.payload:
                self.retained.put(replace(message, stored=stored))
            # In the group of the message itself, or with the next one.
            committer, log = self.broker.directory.committer, self.shared.retained.log
            committer.urgent(log) if qos else committer.lazy(log)

    def send_retained(self, session: Session, interest: Interest, *, is_new: bool, below: int) -> None:
        """What a subscription is answered with besides SUBACK: as it was at `below`, where the subscription stands in
        the log. What came behind that goes out as a message like others, and not twice."""
        if interest.retain_handling is RetainHandling.DO_NOT_SEND:
            return
        if interest.retain_handling is RetainHandling.SEND_IF_NEW and not is_new:
            return
        link = session.link
        if link is None:
            return
        identifiers = identifiers_of(interest, link.version)
        found = self.retained.matching(interest.filter, self.broker.env.clock.wall_us())
        if self.sys_topics is not None:
            found += self.sys_topics.matching(interest.filter, self.broker.env.clock.monotonic())
        for message in found:
            if message.offset >= below or (interest.no_local and message.origin == session.origin):
                continue
            if interest.wants and not parse(interest.wants).matches(message.tags):
                continue
            if message.user and not self._may_still_publish(message):
                continue
            session.offer_extra(
                Extra(
                    message.topic,
                    message.blob + identifiers,
                    message.payload,
                    min(message.qos, interest.qos),
                    True,
                    message.expiry_us,
                    load=None if message.is_loaded else partial(self.shared.retained.payload, self.host.name, message),
                )
            )
        session.pump()

    def _may_still_publish(self, message: Retained) -> bool:
        """M6: who has lost the right to publish there speaks to nobody new."""
        return self.shared.may_publish(message.user, self.host.name, message.topic.decode(), message.client_id)

    # -- $SYS ---------------------------------------------------------------------------------------------------

    def _figures(self) -> Figures:
        return Figures(len(self.owners), len(self.sessions), len(self.retained))

    def tell_sys(self) -> None:
        """Once in a period: what has changed, to those who are connected, keep up, and want to know."""
        if self.sys_topics is None:
            return
        for message in self.sys_topics.changed(self.broker.env.clock.monotonic()):
            for delivery in self._interests.plan(Topic(message.topic)).tagged(NO_TAGS).deliveries:
                session, shape = delivery.session, delivery.shape
                if session.link is None or session.extras or session.link.is_full:
                    continue
                session.offer_extra(
                    Extra(message.topic, shape.identifiers, message.payload, 0, shape.retain_as_published)
                )
                session.pump()

    # -- sessions -----------------------------------------------------------------------------------------------

    def connect(
        self, client_id: str, owner: Owner, link: Link, *, user: str, clean_start: bool, expiry_s: int | None
    ) -> tuple[Session, bool]:
        """The session of a client, and whether it was there already. Whoever had it is told that it is taken over."""
        session = self.sessions.get(client_id)
        if session is not None and session in self.owners:
            self.owners[session].take_over()
            assert session not in self.owners, "whoever is taken over has let go"
            session = self.sessions.get(client_id)
        if session is not None and (clean_start or session.user != user):
            self.end(session)
            session = None
        present = session is not None
        if session is None:
            session = self._new_session(client_id)
            session.live = True
            session.user = user
            self.sessions[client_id] = session
        self._cancel_timer(self._expiries, session)
        # [MQTT-3.1.3-9] A client that is back in time takes back what was to be published for it.
        self._cancel_timer(self._wills, session)
        session.will = None
        session.expiry_s = expiry_s
        session.asleep_since_us = 0
        self._publishers[session.origin] = (user, client_id)
        self.owners[session] = owner
        self.tally.connections += 1
        self.tally.clients_max = max(self.tally.clients_max, len(self.owners))
        session.attach(link, self.log.end)
        if session.is_kept and session.outlives:
            # That it is connected must be known before it is sent anything, see `restore`.
            session.hold()
        for interest in session.interests.values():
            if not is_shared(interest.filter):
                self._interests.add(session, interest, link.version)
        if not session.live:
            self._fall_behind(session)
        if session.outlives:
            self.states.changed(session)
        else:
            # From now on it ends with its connection, and so with the broker.
            self.states.forget(session)
        return session, present

    async def make_way(self, client_id: str, user: str, *, clean_start: bool) -> None:
        """Before `connect`: sessions of this identifier that have ended, or are not wanted, will not come back after a
        crash. What a client is told of its session in CONNACK stays true."""
        while True:
            session = self.sessions.get(client_id)
            # Another user's session is nobody else's, whatever its client id.
            if session is not None and (clean_start or session.user != user):
                if session in self.owners:
                    self.owners[session].take_over()
                    assert session not in self.owners, "whoever is taken over has let go"
                if self.sessions.get(client_id) is session:
                    self.end(session)
            if not await self.states.gone(client_id):
                return

    def _new_session(self, client_id: str) -> Session:
        clock = self.broker.env.clock
        session = Session(client_id, now_us=clock.wall_us, origin=origin_of(client_id), tally=self.tally)
        session.position = self.log.end
        session.committed = lambda: int(self.log.high_watermark)
        session.changed = lambda at_once: self.states.changed(session, at_once)
        session.hungry = lambda: self._feed_soon(session)
        session.write = lambda done: self.states.write(session, done)
        config = self.shared.config
        if config.session_messages_max:
            session.quota = Quota(config.session_messages_max, config.session_overflow)
        return session

    def disconnect(self, session: Session, *, will: Will | None) -> None:
        """Its connection has ended. `will`: what is to be published for it, now or later."""
        self.owners.pop(session, None)
        self._interests.remove_all(session)
        self._catch_up.leave(session)
        self._uncommitted.pop(session, None)
        session.detach(self.log.end)
        session.will = will
        if will is not None and not (will.properties.will_delay_interval and session.outlives):
            self._publish_will(session)
        if not session.outlives:
            self.end(session)
            return
        session.asleep_since_us = self.broker.env.clock.wall_us()
        self.states.changed(session)
        self._wake_later(session)

    def _wake_later(self, session: Session) -> None:
        """A session fell asleep, perhaps before the broker was down: its will and its end come at their times, or now
        where those have passed."""
        slept_s = (self.broker.env.clock.wall_us() - session.asleep_since_us) / 1_000_000
        after = self.broker.timers.after
        if session.will is not None:
            delay_s = session.will.properties.will_delay_interval or 0
            self._wills[session] = after(max(0.0, delay_s - slept_s), lambda: self._publish_will(session))
        if session.expiry_s is not None:
            self._expiries[session] = after(max(0.0, session.expiry_s - slept_s), lambda: self.end(session))

    def end(self, session: Session) -> None:
        """The session is over, and its will with it [MQTT-3.1.2-10]."""
        self._cancel_timer(self._expiries, session)
        if session in self._wills:
            self._publish_will(session)
        self.ended(session)
        session.end()
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
            self._publishers.pop(session.origin, None)
            self.tally.subscriptions -= len(session.interests)
        self.states.forget(session)

    def _publish_will(self, session: Session) -> None:
        self._cancel_timer(self._wills, session)
        will, session.will = session.will, None
        if will is None:
            return
        if session.outlives:
            self.states.changed(session)
        # Rights may have been taken since CONNECT (M7).
        try:
            blob = encode_blob(replace(will.properties, will_delay_interval=None))
            topic, late = self.parking.read(will.topic.encode(), blob)
            if not self.shared.may_publish(session.user, self.host.name, topic.decode(), session.client_id):
                _log.warning("a will was not published: its client may no longer", extra={"client": session.client_id})
                return
            if late is not None:
                self.parking.park(
                    late,
                    blob,
                    will.payload,
                    qos=int(will.qos),
                    retain=will.retain,
                    version=Version.V5,
                    origin=session.origin,
                    tags=self.shared.scans.of(blob).tags,
                )
            elif session.asleep_since_us:
                self._publish_kept_will(session, topic, blob, will)
            else:
                self.publish(
                    [topic],
                    [blob],
                    [will.payload],
                    qos=int(will.qos),
                    retain=will.retain,
                    version=Version.V5,
                    origin=session.origin,
                )
        except DiskFull:
            session.will = will
            self._wills[session] = self.broker.timers.after(WILL_RETRY_S, lambda: self._publish_will(session))
        except HeadraceError as error:
            _log.warning("a will was not published: %s", error, extra={"client": session.client_id})
        self.broker.on_ready()

    def _publish_kept_will(self, session: Session, topic: bytes, blob: bytes, will: Will) -> None:
        """One that stands in the session's state: it may come up again after a crash, and is published once (M7)."""
        moment = f"{self.host.name}\0{session.client_id}\0{session.asleep_since_us}"
        # Client ids are the clients' to choose: a hash that cannot be made to collide.
        producer = Producer(blake2b(moment.encode(), digest_size=16).digest(), 0, 0)
        attributes = int(Vocabulary.MQTT_5) | int(will.qos) << QOS_SHIFT | (RETAIN if will.retain else 0)
        attributes |= PERSISTENT if will.qos else 0
        target = self._target(self.shared.keys.key_of(topic), blob, attributes)
        full = [queue for queue in target.byte_limits if not queue.admits(1, len(will.payload))]
        self.broker.publish_once(
            _not_for(target, full) if full else target,
            producer,
            [blob],
            [will.payload],
            attributes=attributes,
            expiry_us=self._expiry_us(blob),
        )
        self.tally.published += 1

    def _cancel_timer(self, timers: dict[Session, Timer[Callable[[], None]]], session: Session) -> None:
        timer = timers.pop(session, None)
        if timer is not None:
            self.broker.timers.cancel(timer)

    # -- subscriptions ------------------------------------------------------------------------------------------

    def subscribe(self, session: Session, interest: Interest, version: Version) -> bool:
        """From here on it gets what matches, and nothing from before. Whether there was none with this filter."""
        known = session.interests.get(interest.filter)
        is_new = known is None
        self.tally.subscriptions += is_new
        interest = replace(interest, since=int(self.log.end) if known is None else known.since)
        session.interests[interest.filter] = interest
        session.ahead = (None, 0)
        if is_shared(interest.filter):
            return is_new
        self._interests.add(session, interest, version)
        self._catch_up.subscribe(session, interest, version)
        return is_new

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Whether there was one."""
        if session.interests.pop(topic_filter, None) is None:
            return False
        self.tally.subscriptions -= 1
        self._interests.remove(session, topic_filter)
        self._catch_up.unsubscribe(session, topic_filter)
        return True

    async def run(self) -> None:
        """Feed those who are behind, and write down sessions, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.states.run)
            while True:
                await self._wake.wait()
                self._wake = trio.Event()
                while (progress := self._catch_up.feed()) is not Progress.IDLE:
                    if progress is Progress.ROUND:
                        await self._gather()
                    self.broker.on_ready()
                    await trio.lowlevel.checkpoint()

    async def _gather(self) -> None:
        """After a cut all devices come back at once, and a round for a thousand of them costs little more than for one
        (bench/mqtt_sessions.py). So a long one begins when nobody has come for a moment."""
        for _ in range(GATHERS_MAX):
            count = self._catch_up.joined_count
            await self.broker.env.clock.sleep(GATHER_S)
            if self._catch_up.joined_count == count:
                return

    def _fall_behind(self, session: Session) -> None:
        self._catch_up.join(session)
        self._wake.set()

    def _feed_soon(self, session: Session) -> None:
        if session in self._catch_up:
            self._wake.set()

    # -- what is written down -----------------------------------------------------------------------------------

    def keep(self, session: Session, done: Callable[[], None], *, first: bool = False) -> None:
        """See keeping.py."""
        self.states.keep(session, done, first=first)

    def restore(self, client_id: str, kept: state.SessionState) -> Session:
        """A session as the log has it, asleep."""
        session = self._new_session(client_id)
        in_log = state.restore_session(session, kept)
        self._publishers[session.origin] = (session.user, client_id)
        session.is_kept = True
        self.sessions[client_id] = session
        self.tally.subscriptions += len(session.interests)
        forget_unwritten(self.log, self.broker.delayed.delays.intake, session)
        for one in in_log:
            flight = self._read_flight(session, one)
            if flight is None:
                session.counts.lost += 1
                self.tally.dropped += 1
                del session.flights[one.packet_id]
            else:
                session.flights[one.packet_id] = flight
        if not session.asleep_since_us:
            # It was connected when the broker ended: nobody knows how much of the log it was sent. [MQTT-3.3.1-1] What
            # may be a repetition must say so, and may say so if it is none.
            session.sent_below = int(self.log.end)
            session.asleep_since_us = self.broker.env.clock.wall_us()
            self.states.changed(session)
        self._wake_later(session)
        return session

    def set_right(self, noted_to: int) -> None:
        """All sessions are restored: what they received after their states were written is found in the log."""
        for session in find_unnoted(self.log, self.sessions.values(), noted_to):
            self.states.changed(session)

    def _read_flight(self, session: Session, kept: state.FlightState) -> Flight | None:
        try:
            runs = self.log.read(kept.offset, bytes_max=1)
        except OffsetOutOfRange:
            return None
        if not runs or runs[0].first >= runs[0].last or runs[0].batch.offset_at(runs[0].first) != kept.offset:
            return None
        batch, index = runs[0].batch, runs[0].first
        blob = batch.properties[index]
        if batch.attributes.at(index) & PROTOCOL_MASK == Vocabulary.AMQP:
            blob = self.shared.to_mqtt(blob).blob
        topic = self.shared.keys.topic_of(batch.keys[index])
        # [MQTT-3.3.4-3] It comes with the same identifiers as the first time.
        name = topic.decode()
        identifiers = {
            one.identifier
            for one in session.interests.values()
            if one.identifier and one.since <= kept.offset and filter_matches(one.filter, name)
        }
        if identifiers:
            blob += encode_subscription_identifiers(tuple(sorted(identifiers)))
        return Flight(kept.offset, kept.qos, kept.retain, topic, blob, batch.values[index], kept.released)

    def close(self) -> None:
        """The broker ends: what is to be kept is written down."""
        self.broker.taps.pop(self.log, None)
        for session in self.sessions.values():
            if session.outlives:
                self.states.changed(session)
        self.states.close()


def _not_for(target: Target, full: Sequence[Queue]) -> Target:
    return target.only(tuple(queue for queue in target.queues if queue not in full))


def _marked(blobs: Sequence[bytes], shape: Shape) -> Sequence[bytes]:
    """With the identifiers of the subscriptions that matched."""
    if not shape.identifiers:
        return blobs
    if blobs.count(blobs[0]) == len(blobs):
        return [blobs[0] + shape.identifiers] * len(blobs)
    return [blob + shape.identifiers for blob in blobs]
