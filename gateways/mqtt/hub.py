"""MQTT in one vhost: its sessions, and their place in the log of `amq.topic`. Driver.

The way of a message: client -> `publishes` (route and append, as an AMQP publish to `amq.topic` does) -> `fan_out`,
which hears of every append to that log, whichever door it came through -> the sessions that keep up. A session that
does not keep up, or wakes, is fed from the log by `run`, all of them together in one pass, until it has caught up.
Sessions that sleep cost nothing here: no publish looks at them, and nothing is written for what they miss.
Neighbours: retaining.py and wills.py hold the messages that wait, keeping.py writes sessions down.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import trio

from headrace.core_log.config import LogConfig
from headrace.core_log.errors import OffsetOutOfRange
from headrace.core_log.log import PartitionLog
from headrace.core_log.record import PROTOCOL_MASK
from headrace.core_log.record import Protocol as Vocabulary
from headrace.delay.wheel import Timer
from headrace.filtering.tags import NO_TAGS
from headrace.gateways.delivery.vhost import VirtualHost
from headrace.gateways.mqtt import state
from headrace.gateways.mqtt.catch_up import CatchUp, Progress
from headrace.gateways.mqtt.delaying import Parking
from headrace.gateways.mqtt.fan_out import FanOut
from headrace.gateways.mqtt.flights import Flight
from headrace.gateways.mqtt.interest import Topic
from headrace.gateways.mqtt.keeping import SessionStates
from headrace.gateways.mqtt.origin import origin_of
from headrace.gateways.mqtt.packets import Will
from headrace.gateways.mqtt.properties import encode_subscription_identifiers
from headrace.gateways.mqtt.publishes import Publishes
from headrace.gateways.mqtt.quota import Quota
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.received import find_unnoted, forget_unwritten
from headrace.gateways.mqtt.retained import RetainedMessages
from headrace.gateways.mqtt.retaining import Retaining
from headrace.gateways.mqtt.session import Extra, Interest, Link, Session
from headrace.gateways.mqtt.shared import EXCHANGE, Shared
from headrace.gateways.mqtt.sys_topics import Figures, SysTopics
from headrace.gateways.mqtt.tally import Tally
from headrace.gateways.mqtt.topics import filter_matches, is_shared
from headrace.gateways.mqtt.wills import Wills

GATHER_S = 0.05
GATHERS_MAX = 40
COMPACTED = LogConfig(cleanup="compact", retention_ms=None, segment_bytes_max=16 * 1024 * 1024)


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
        self.tally = Tally()
        self.retained = RetainedMessages(shared.config.retained_bytes_max)
        self.retaining = Retaining(shared, host.name, self.retained)
        if shared.config.sys_period_s:
            now = self.broker.env.clock.monotonic()
            self.retaining.sys_topics = SysTopics(shared.version, self.tally, self._figures, now)
        self.parking = Parking(self.broker, EXCHANGE, host.name, shared.keys.key_of)
        self.states = SessionStates(self.broker, host.name, self.log, shared.sessions_log)
        self.publishes = Publishes(shared, host, self.log, self.states, self.tally)
        self.wills = Wills(self.publishes, self.parking, self.states.changed)
        self.fan_out = FanOut(shared, self.tally, retain=self.retaining.retain, fall_behind=self._fall_behind)
        self._catch_up = CatchUp(
            self.log,
            self.broker.env.storage,
            shared.keys,
            shared.to_mqtt,
            self.fan_out.offer,
            self.tally,
        )
        self._wake = trio.Event()
        # What happens to sleeping sessions when their time has come.
        self._expiries: dict[Session, Timer[Callable[[], None]]] = {}
        # Told of sessions that are over, before what they held is given back.
        self.ended: Callable[[Session], None] = lambda session: None
        self.broker.taps[self.log] = self.fan_out
        self.log.advanced.append(self._advanced)

    def _advanced(self, log: PartitionLog) -> None:
        """The log is committed further."""
        self.states.advanced()
        self.fan_out.advanced(log)

    # -- $SYS ---------------------------------------------------------------------------------------------------

    def _figures(self) -> Figures:
        return Figures(len(self.owners), len(self.sessions), len(self.retained))

    def tell_sys(self) -> None:
        """Once in a period: what has changed, to those who are connected, keep up, and want to know."""
        if self.retaining.sys_topics is None:
            return
        for message in self.retaining.sys_topics.changed(self.broker.env.clock.monotonic()):
            for delivery in self.fan_out.interests.plan(Topic(message.topic)).tagged(NO_TAGS).deliveries:
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
        self._cancel_expiry(session)
        # [MQTT-3.1.3-9] A client that is back in time takes back what was to be published for it.
        self.wills.cancel(session)
        session.will = None
        session.expiry_s = expiry_s
        session.asleep_since_us = 0
        self.retaining.publishers[session.origin] = (user, client_id)
        self.owners[session] = owner
        self.tally.connections += 1
        self.tally.clients_max = max(self.tally.clients_max, len(self.owners))
        session.attach(link, self.log.end)
        if session.is_kept and session.outlives:
            # That it is connected must be known before it is sent anything, see `restore`.
            session.hold()
        for interest in session.interests.values():
            if not is_shared(interest.filter):
                self.fan_out.interests.add(session, interest, link.version)
        if not session.live:
            self._fall_behind(session)
        if session.outlives:
            self.states.changed(session)
        else:
            # From now on it ends with its connection, and so with the broker.
            self.states.forget(session)
        return session, present

    def is_of_another(self, client_id: str, user: str) -> bool:
        """Whether there is a session of this identifier that belongs to another user, who is still there."""
        session = self.sessions.get(client_id)
        return session is not None and session.user != user and session.user in self.broker.metadata.snapshot.users

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
        self.fan_out.leave(session)
        self._catch_up.leave(session)
        session.detach(self.log.end)
        session.will = will
        if will is not None and not (will.properties.will_delay_interval and session.outlives):
            self.wills.publish(session)
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
        if session.will is not None:
            delay_s = session.will.properties.will_delay_interval or 0
            self.wills.after(session, max(0.0, delay_s - slept_s))
        if session.expiry_s is not None:
            left_s = max(0.0, session.expiry_s - slept_s)
            self._expiries[session] = self.broker.timers.after(left_s, lambda: self.end(session))

    def end(self, session: Session) -> None:
        """The session is over, and its will with it [MQTT-3.1.2-10]."""
        self._cancel_expiry(session)
        if session in self.wills:
            self.wills.publish(session)
        self.ended(session)
        session.end()
        if self.sessions.get(session.client_id) is session:
            del self.sessions[session.client_id]
            self.retaining.publishers.pop(session.origin, None)
            self.tally.subscriptions -= len(session.interests)
        self.states.forget(session)

    def _cancel_expiry(self, session: Session) -> None:
        timer = self._expiries.pop(session, None)
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
        self.fan_out.interests.add(session, interest, version)
        self._catch_up.subscribe(session, interest, version)
        return is_new

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Whether there was one."""
        if session.interests.pop(topic_filter, None) is None:
            return False
        self.tally.subscriptions -= 1
        self.fan_out.interests.remove(session, topic_filter)
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
        if session not in self._catch_up:
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
        self.retaining.publishers[session.origin] = (session.user, client_id)
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
