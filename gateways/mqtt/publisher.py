"""What one client publishes: whether it may, and what it is answered. Driver.

Messages with QoS 0 and 1 go by way of the intake, with those of everybody else in this turn; with QoS 2 each is taken
once, under its packet identifier. PUBACK and PUBREC are sent when the log is committed. What is refused is refused
message by message. Neighbours: client.py hands runs over, publishes.py appends, delaying.py parks what comes later.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from headrace.core_log.errors import HeadraceError
from headrace.gateways.delivery.access import Operation
from headrace.gateways.delivery.delayed_when import HINT
from headrace.gateways.mqtt import delaying
from headrace.gateways.mqtt.cutter import PublishRun
from headrace.gateways.mqtt.delaying import Countdown
from headrace.gateways.mqtt.door import Line
from headrace.gateways.mqtt.encoder import encode_ack_run
from headrace.gateways.mqtt.hub import Hub
from headrace.gateways.mqtt.interest import KNOWN_TOPIC_BYTES_MAX
from headrace.gateways.mqtt.packets import Puback, Pubcomp, Pubrec
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import MqttError, PacketType, ReasonCode, Version
from headrace.gateways.mqtt.received import parked_at
from headrace.gateways.mqtt.session import Session
from headrace.gateways.mqtt.shared import EXCHANGE
from headrace.gateways.mqtt.sys_topics import PREFIX as SYS

_log = logging.getLogger(__name__)

# So many topics, one user may publish to, are remembered of a connection.
ALLOWED_MAX = 1024
# Nobody publishes there: what the broker says, how groups are named, and where other brokers take orders.
OURS = (SYS.encode(), b"$share/", b"$CONTROL/", b"$control/")


class Publisher:
    __slots__ = ("_allowed", "_door", "_hub", "_intake", "_line", "_unanswered", "gathering", "origin", "version")

    def __init__(self, line: Line, hub: Hub) -> None:
        self._line = line
        self._door = line.door
        self._hub = hub
        self._intake = hub.publishes.intake
        # Topics this user may publish to, as asked before.
        self._allowed: set[bytes] = set()
        # Publishes with QoS 1 and 2 that are not answered yet.
        self._unanswered = 0
        # As the intake sees it.
        self.version = line.version
        self.origin = 0
        self.gathering = -1

    def _may(self, topic: bytes) -> bool:
        if topic in self._allowed:
            return True
        line, access = self._line, self._door.access
        key = self._door.keys.key_of(topic).decode("utf-8", "surrogateescape")
        allowed = access.may(line.user, line.vhost, Operation.WRITE, EXCHANGE) and access.may_use_key(
            line.user, line.vhost, EXCHANGE, Operation.WRITE, key, line.client_id
        )
        if allowed and len(topic) <= KNOWN_TOPIC_BYTES_MAX:
            if len(self._allowed) >= ALLOWED_MAX:
                self._allowed.clear()
            self._allowed.add(topic)
        return allowed

    def check(self, topic: bytes) -> None:
        """Raises MqttError where the user may not publish."""
        if topic.startswith(OURS):
            name = topic[: topic.index(b"/")].decode()
            raise MqttError(ReasonCode.NOT_AUTHORIZED, f"topics below {name} are the broker's own")
        limit = self._door.config.topic_levels_max
        if topic.count(b"/") >= limit:
            raise MqttError(ReasonCode.TOPIC_NAME_INVALID, f"a topic has at most {limit} levels here")
        if not self._may(topic):
            text = f"publishing to '{topic.decode()}' refused for user '{self._line.user}'"
            raise MqttError(ReasonCode.NOT_AUTHORIZED, text)

    def rights_changed(self) -> None:
        """They are asked again."""
        self._allowed.clear()

    def publish(self, session: Session, run: PublishRun) -> None:
        """Raises MqttError where the connection must end."""
        reason = self._door.broker.unwritable()
        # What has been taken with QoS 2 is not refused when it comes again.
        if reason is not None and (run.qos < 2 or session.incoming.keys().isdisjoint(run.packet_ids)):
            self._refuse_some(session, run, MqttError(ReasonCode.QUOTA_EXCEEDED, f"publish refused: {reason}"))
            return
        if run.retain and self._is_one_too_many(run):
            text = f"there are {self._door.config.retained_count_max} retained messages already"
            self._refuse_some(session, run, MqttError(ReasonCode.QUOTA_EXCEEDED, text))
            return
        if not self._allowed.issuperset(run.topics):
            unknown = {*run.topics} - self._allowed
            if any(topic.startswith(delaying.TOPIC) for topic in unknown):
                self._publish_late(session, run)
                return
            try:
                for topic in unknown:
                    self.check(topic)
            except MqttError as error:
                self._refuse_some(session, run, error)
                return
        if self.version is Version.V5:
            for blob in filter(None, set(run.properties)):
                if HINT in blob:
                    self._publish_late(session, run)
                    return
                refusal = self._door.scans.of(blob).refusal
                if refusal:
                    self._refuse_some(session, run, MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, refusal))
                    return
        self._put_now(session, run)

    def _is_one_too_many(self, run: PublishRun) -> bool:
        """Whether one of them would be retained where there are as many as may be."""
        retained = self._hub.retained
        return len(retained) >= self._door.config.retained_count_max and any(
            payload and retained.get(topic) is None for topic, payload in zip(run.topics, run.payloads, strict=True)
        )

    def _put_now(self, session: Session, run: PublishRun) -> None:
        if run.qos == 2:
            self._publish_once(session, run)
            return
        if run.packet_ids:
            self._count_unanswered(len(run.packet_ids))
        self._intake.put(self, run)

    def _publish_late(self, session: Session, run: PublishRun) -> None:
        """A run in which something may be delivered later."""
        if len(run.topics) > 1:
            self._publish_each(session, run)
            return
        hub = self._hub
        try:
            topic, late = hub.parking.read(run.topics[0], run.properties[0])
            self.check(topic)
            scan = self._door.scans.of(run.properties[0])
            if scan.refusal:
                raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, scan.refusal)
        except MqttError as error:
            self._refuse_some(session, run, error)
            return
        if late is None:
            self._put_now(session, replace(run, topics=[topic]))
            return
        packet_id = run.packet_ids[0] if run.qos else 0
        kind = PacketType.PUBACK if run.qos == 1 else PacketType.PUBREC
        safe = Countdown(1, lambda: self._tell(kind, run.packet_ids) if run.qos else None)
        if run.qos < 2 or packet_id not in session.incoming:
            if run.qos:
                self._count_unanswered(1)
            if run.qos == 2:
                # It is written before the message, and counts only with it (received.py).
                session.incoming[packet_id] = parked_at(int(self._door.broker.delayed.delays.intake.end))
                if session.outlives:
                    safe.more()
                    hub.keep(session, safe, first=True)
            try:
                hub.parking.park(
                    late,
                    run.properties[0],
                    run.payloads[0],
                    qos=run.qos,
                    retain=run.retain,
                    version=self.version,
                    origin=session.origin,
                    tags=scan.tags,
                )
            except HeadraceError:
                session.incoming.pop(packet_id, None)
                raise
        # One that came before may still be on its way to the disk.
        hub.parking.when_parked(safe)

    def _publish_each(self, session: Session, run: PublishRun) -> None:
        for place in range(len(run.topics)):
            ids = run.packet_ids[place : place + 1]
            part = slice(place, place + 1)
            self.publish(
                session, PublishRun(run.first_byte, run.topics[part], run.properties[part], run.payloads[part], ids)
            )

    def flush(self) -> None:
        """What it published before stands in the log."""
        self._intake.flush()

    def appended(self, run: PublishRun) -> None:
        """Messages with QoS 1 are committed."""
        if not self._line.has_ended and run.packet_ids:
            self._unanswered -= len(run.packet_ids)
            self._line.outbox.put(encode_ack_run(PacketType.PUBACK, run.packet_ids))

    def turned_away(self, run: PublishRun, refused: Sequence[int]) -> PublishRun:
        """Some messages of a run with QoS 1 were refused by a full queue; returns what is left to be acknowledged."""
        try:
            full = set() if self._line.has_ended else self._refuse_full(run, refused)
        except MqttError as error:
            self.append_failed(error)
            return PublishRun(run.first_byte)
        self._unanswered -= len(full)
        left = [packet_id for packet_id in run.packet_ids if packet_id not in full]
        return PublishRun(run.first_byte, packet_ids=left)

    def append_failed(self, error: HeadraceError) -> None:
        """Something that this client sent was not taken, and its version has no other way to say so."""
        self._line.fail_soon(error)

    def _refuse_full(self, run: PublishRun, refused: Sequence[int]) -> set[int]:
        """A queue with reject-publish is full; returns the identifiers of what it did not take."""
        error = MqttError(ReasonCode.QUOTA_EXCEEDED, "a queue is full and refused the message")
        if self.version is not Version.V5:
            raise error
        full = {run.packet_ids[place] for place in refused}
        kind = Puback if run.qos == 1 else Pubrec
        properties = Properties(reason_string=error.text) if self._line.is_told_why else NO_PROPERTIES
        for packet_id in full:
            self._line.put(kind(packet_id, error.code, properties))
        return full

    def _refuse_some(self, session: Session, run: PublishRun, error: MqttError) -> None:
        """Not all of a run may be published: each for itself then."""
        if len(run.topics) > 1:
            self._publish_each(session, run)
            return
        if self.version is not Version.V5 or not run.qos:
            # [MQTT-3.3.5-2] There is no way to say no but to end the connection.
            if run.qos or self.version is not Version.V5:
                raise error
            _log.warning("a message was refused: %s", error, extra=self._line.who())
            return
        kind = Puback if run.qos == 1 else Pubrec
        properties = Properties(reason_string=error.text) if self._line.is_told_why else NO_PROPERTIES
        self._line.put(kind(run.packet_ids[0], error.code, properties))

    def _count_unanswered(self, count: int) -> None:
        self._unanswered += count
        if self.version is Version.V5 and self._unanswered > self._door.config.receive_max:
            text = f"more than {self._door.config.receive_max} publishes without an answer"
            raise MqttError(ReasonCode.RECEIVE_MAXIMUM_EXCEEDED, text, "MQTT-3.3.4-7")

    def _publish_once(self, session: Session, run: PublishRun) -> None:
        """[MQTT-4.3.3] A second PUBLISH with an identifier that was not released is the same message."""
        incoming = session.incoming
        packet_ids: Sequence[int] = run.packet_ids
        fresh = run
        if not incoming.keys().isdisjoint(packet_ids) or len(set(packet_ids)) < len(packet_ids):
            fresh = _only(run, incoming)
        if fresh.packet_ids:
            self._count_unanswered(len(fresh.packet_ids))
            refused: list[int] = []
            self._hub.publishes.publish_once(
                session,
                fresh.packet_ids,
                fresh.topics,
                fresh.properties,
                fresh.payloads,
                retain=fresh.retain,
                version=self.version,
                refused=refused,
            )
            if refused:
                full = self._refuse_full(fresh, refused)
                packet_ids = [packet_id for packet_id in packet_ids if packet_id not in full]
                self._unanswered -= len(full)
        hub = self._hub

        def answer() -> None:
            # What came before may still be on its way to the disk: whoever asks again is answered when it is there.
            self._answer(packet_ids, PacketType.PUBREC, int(hub.log.end))

        if session.outlives and not session.is_kept:
            # The log has the identifiers, but nobody would know whose.
            hub.keep(session, answer)
        else:
            answer()

    def _answer(self, packet_ids: Sequence[int], kind: PacketType, reached: int) -> None:
        """Once the log is committed up to there, and not before."""
        if not packet_ids:
            return
        self._hub.log.when_committed(reached, lambda: self._tell(kind, packet_ids))

    def _tell(self, kind: PacketType, packet_ids: Sequence[int]) -> None:
        if self._line.has_ended:
            return
        if kind is PacketType.PUBACK:
            self._unanswered -= len(packet_ids)
        self._line.outbox.put(encode_ack_run(kind, packet_ids))

    def release(self, session: Session, packet_ids: Sequence[int]) -> None:
        """PUBREL has come."""
        known = [packet_id for packet_id in packet_ids if packet_id in session.incoming]
        for packet_id in known:
            session.incoming.pop(packet_id, None)
        self._unanswered = max(0, self._unanswered - len(known))
        if known and session.outlives:
            # With PUBCOMP the identifier is free: were it still taken after a crash, the client's next message with it
            # would be answered as this one, and be lost.
            self._hub.keep(session, lambda: self._tell_released(packet_ids, known))
        else:
            self._tell_released(packet_ids, known)

    def _tell_released(self, packet_ids: Sequence[int], known: Sequence[int]) -> None:
        if len(known) == len(packet_ids):
            self._tell(PacketType.PUBCOMP, packet_ids)
        elif not self._line.has_ended:
            for packet_id in packet_ids:
                found = packet_id in known
                self._line.put(
                    Pubcomp(packet_id, ReasonCode.SUCCESS if found else ReasonCode.PACKET_IDENTIFIER_NOT_FOUND)
                )


def _only(run: PublishRun, known: Iterable[int]) -> PublishRun:
    """What of a run is new: the first with each identifier that is not known."""
    seen, places = set(known), []
    for place, packet_id in enumerate(run.packet_ids):
        if packet_id not in seen:
            seen.add(packet_id)
            places.append(place)
    return PublishRun(
        run.first_byte,
        [run.topics[place] for place in places],
        [run.properties[place] for place in places],
        [run.payloads[place] for place in places],
        [run.packet_ids[place] for place in places],
    )
