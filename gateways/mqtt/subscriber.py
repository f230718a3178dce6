"""What one client subscribes to: whether it may, and what it is answered. Driver.

SUBACK is sent when the subscription is written down, then the retained messages as they were where it stands in the
log. Neighbours: client.py hands packets over, hub.py and shares.py keep subscriptions, retaining.py sends what is
retained.
"""

from headrace.gateways.delivery.access import Operation
from headrace.gateways.delivery.filters import TooManyFilters
from headrace.gateways.mqtt.door import Ended, Line, Place
from headrace.gateways.mqtt.packets import Suback, Subscribe, Subscription, Unsuback, Unsubscribe
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import ReasonCode
from headrace.gateways.mqtt.session import Interest, Session
from headrace.gateways.mqtt.shared import EXCHANGE
from headrace.gateways.mqtt.sys_topics import PREFIX as SYS
from headrace.gateways.mqtt.topics import is_shared, parse_filter
from headrace.gateways.mqtt.wanted import wanted_by

# Retained and shared messages that may wait for a client before it may make another subscription.
EXTRAS_MAX = 20_000


class Subscriber:
    __slots__ = ("_line", "_link", "_place", "_session")

    def __init__(self, line: Line, session: Session, place: Place) -> None:
        self._line = line
        self._session = session
        self._place = place
        # Its session is this connection's as long as it has this one.
        self._link = session.link

    async def subscribe(self, packet: Subscribe) -> None:
        session, place, line = self._session, self._place, self._line
        hub = place.hub
        identifier = packet.properties.subscription_identifiers[:1]
        reasons: list[ReasonCode] = []
        granted: list[tuple[Interest, bool, int]] = []
        wants, unreadable = wanted_by(packet.properties)
        refusal = unreadable
        for one in packet.subscriptions:
            reason = self._subscribable(session, one) if not unreadable else ReasonCode.TOPIC_FILTER_INVALID
            reasons.append(reason)
            if reason.failed:
                continue
            interest = Interest(
                one.filter,
                int(one.qos),
                one.no_local,
                one.retain_as_published,
                one.retain_handling,
                identifier[0] if identifier else 0,
                wants=wants,
            )
            if is_shared(one.filter):
                try:
                    await place.shares.join(session, interest)
                except TooManyFilters as error:
                    reasons[-1], refusal = ReasonCode.QUOTA_EXCEEDED, str(error)
                    hub.unsubscribe(session, one.filter)
                    continue
                if session.link is not self._link:
                    raise Ended
                hub.subscribe(session, interest, line.version)
                continue
            granted.append((interest, hub.subscribe(session, interest, line.version), int(hub.log.end)))
        told = refusal and line.is_told_why
        suback = Suback(packet.packet_id, tuple(reasons), Properties(reason_string=refusal) if told else NO_PROPERTIES)

        def done() -> None:
            if session.link is not self._link:
                return
            line.put(suback)
            for interest, is_new, below in granted:
                hub.retaining.send(session, interest, is_new=is_new, below=below)

        hub.keep(session, done)

    def _subscribable(self, session: Session, one: Subscription) -> ReasonCode:
        """The QoS granted, or why not."""
        group, plain = parse_filter(one.filter)
        if group is not None and plain.startswith(SYS):
            # Nothing of it is in the log, which is what a group shares.
            return ReasonCode.TOPIC_FILTER_INVALID
        line, access = self._line, self._line.door.access
        key = line.door.keys.binding_key(plain)
        if not (
            access.may(line.user, line.vhost, Operation.READ, EXCHANGE)
            and access.may_use_key(line.user, line.vhost, EXCHANGE, Operation.READ, key, line.client_id)
        ):
            return ReasonCode.NOT_AUTHORIZED
        if one.filter not in session.interests and len(session.interests) >= line.door.config.subscriptions_max:
            return ReasonCode.QUOTA_EXCEEDED
        if len(session.extras) >= EXTRAS_MAX:
            # Each would add all retained messages that match to those that the client has not taken yet.
            return ReasonCode.QUOTA_EXCEEDED
        return ReasonCode(int(one.qos))

    async def unsubscribe(self, packet: Unsubscribe) -> None:
        session, place = self._session, self._place
        reasons = []
        for topic_filter in packet.filters:
            found = place.hub.unsubscribe(session, topic_filter)
            reasons.append(ReasonCode.SUCCESS if found else ReasonCode.NO_SUBSCRIPTION_EXISTED)
            if found and is_shared(topic_filter):
                await place.shares.leave(session, topic_filter)
        unsuback = Unsuback(packet.packet_id, tuple(reasons))
        place.hub.keep(session, lambda: self._line.put(unsuback))
