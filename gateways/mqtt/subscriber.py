"""What one client subscribes to: whether it may, and what it is answered. Driver.

SUBACK is sent when the subscription is written down, then the retained messages as they were where it stands in the
log. Neighbours: client.py hands packets over, hub.py and shares.py keep subscriptions, retaining.py sends what is
retained.
"""

import logging

from headrace.controller.entities import NAME_BYTES_MAX
from headrace.gateways.delivery.access import Operation
from headrace.gateways.delivery.filters import TooManyFilters
from headrace.gateways.mqtt.door import Ended, Line, Place
from headrace.gateways.mqtt.packets import Suback, Subscribe, Subscription, Unsuback, Unsubscribe
from headrace.gateways.mqtt.properties import NO_PROPERTIES, Properties
from headrace.gateways.mqtt.reasons import ReasonCode
from headrace.gateways.mqtt.session import Interest, Session
from headrace.gateways.mqtt.shared import EXCHANGE
from headrace.gateways.mqtt.shares import PASSING
from headrace.gateways.mqtt.sys_topics import PREFIX as SYS
from headrace.gateways.mqtt.topics import filter_matches, is_shared, parse_filter
from headrace.gateways.mqtt.wanted import wanted_by

_log = logging.getLogger(__name__)

# Retained and shared messages that may wait for a client before it may make another subscription.
EXTRAS_MAX = 20_000


def may_subscribe(line: Line, topic_filter: str) -> bool:
    """Whether the user of this connection may read what the filter matches; of a group, what its filter matches."""
    _group, plain = parse_filter(topic_filter)
    access, key = line.door.access, line.door.keys.binding_key(plain)
    return access.may(line.user, line.vhost, Operation.READ, EXCHANGE) and access.may_use_key(
        line.user, line.vhost, EXCHANGE, Operation.READ, key, line.client_id
    )


async def drop_unreadable(line: Line, session: Session, place: Place) -> None:
    """A session is about to be resumed: what its user may not read any more is no subscription of it."""
    lost = [topic_filter for topic_filter in session.interests if not may_subscribe(line, topic_filter)]
    for topic_filter in lost:
        _log.warning("a subscription ended: its user may no longer read that", extra=line.who())
        place.hub.unsubscribe(session, topic_filter)
        if is_shared(topic_filter):
            await place.shares.leave(session, topic_filter)
    if lost:
        session.keep_extras(lambda topic: any(filter_matches(one, topic.decode()) for one in session.interests))
        place.hub.states.changed(session)


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
        if group is not None and (plain.startswith(SYS) or not self._fits_a_queue(one.filter, plain)):
            # Nothing of $SYS is in the log, which is what a group shares.
            return ReasonCode.TOPIC_FILTER_INVALID
        line = self._line
        if plain.count("/") >= line.door.config.topic_levels_max:
            return ReasonCode.TOPIC_FILTER_INVALID
        if not may_subscribe(line, one.filter):
            return ReasonCode.NOT_AUTHORIZED
        if one.filter not in session.interests and len(session.interests) >= line.door.config.subscriptions_max:
            return ReasonCode.QUOTA_EXCEEDED
        if len(session.extras) >= EXTRAS_MAX:
            # Each would add all retained messages that match to those that the client has not taken yet.
            return ReasonCode.QUOTA_EXCEEDED
        return ReasonCode(int(one.qos))

    def _fits_a_queue(self, shared_filter: str, plain: str) -> bool:
        """A group is a queue with the name of its filter, bound with a routing key."""
        key = self._line.door.keys.binding_key(plain)
        return (
            max(len((shared_filter + PASSING).encode()), len(key.encode("utf-8", "surrogateescape"))) <= NAME_BYTES_MAX
        )

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
