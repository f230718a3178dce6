"""Shared subscriptions: `$share/<group>/<filter>` is a queue bound to `amq.topic`, its members are consumers. Driver.

A group with a member that outlives its connection is a durable queue, else one that ends with its last member. What a
member does not acknowledge goes back to the group when its session ends; with QoS 2 it is never given to another
[MQTT-4.8.2-4, MQTT-4.8.2-5]: a lasting session writes down which ones it has before it sends them, and keeps them there
until the group's own journal has that they are settled; the group passes over them when it meets them again after a
restart. So a crash at no moment gives one of them to two. An ephemeral group that gets a lasting member goes on in a
durable queue; what the old one holds is still handed out, and then it goes.
Members take turns; with `mqtt.shared_lanes` each topic sticks to one of them while it is there.
Neighbours: delivery/queue.py deals out and remembers, session.py delivers, fan_out.py everything that is not shared.
"""

from collections.abc import Callable, Iterable
from functools import partial

from headrace.controller.entities import Binding, DestinationKind
from headrace.controller.table import FieldIn, Table
from headrace.core_log.record import PROTOCOL_MASK, QOS_MASK, QOS_SHIFT, RETAIN
from headrace.core_log.record import Protocol as Vocabulary
from headrace.filtering.expression import Expression, parse
from headrace.gateways.delivery.filters import TooManyFilters
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import Queue, View
from headrace.gateways.mqtt.flights import Outcome
from headrace.gateways.mqtt.hub import Hub
from headrace.gateways.mqtt.interest import identifiers_of
from headrace.gateways.mqtt.session import Extra, Interest, Session
from headrace.gateways.mqtt.shared import EXCHANGE
from headrace.gateways.mqtt.topics import is_shared, parse_filter

# Behind the name of a queue that ends with the last member of its group.
PASSING = " (passing)"


class Member:
    """A session's part in a group: a consumer of its queues."""

    def __init__(self, hub: Hub, session: Session, interest: Interest, taken: set[tuple[int, int]]) -> None:
        self.tag = session.client_id
        # Lanes and numbers of messages that a session has, or had, and no other may get.
        self._taken = taken
        self.priority = 0
        self.no_ack = False
        self.exclusive = False
        self.session = session
        self.interest = interest
        self._hub = hub
        _group, self._filter = parse_filter(interest.filter)

    def room(self) -> int:
        session = self.session
        link = session.link
        if link is None or link.is_full:
            return 0
        return session.room - len(session.extras)

    def deliver(self, queue: View, stretch: Stretch) -> None:
        assert isinstance(queue, Queue)
        shared = self._hub.shared
        batch = stretch.loaded()
        link = self.session.link
        identifiers = b"" if link is None else identifiers_of(self.interest, link.version)
        hides_dollar = self._filter[:1] in ("+", "#")
        while stretch.count:
            index = stretch.index
            one = stretch.split(1)
            topic = shared.keys.topic_of(batch.keys[index])
            if hides_dollar and topic.startswith(b"$"):
                # [MQTT-4.7.2-1] The binding's language does not know this rule.
                queue.settle(one)
                continue
            if self._taken and queue.durable and (one.lane.place, one.seq) in self._taken:
                queue.settle(one)
                self._taken.discard((one.lane.place, one.seq))
                continue
            attributes = batch.attributes.at(index)
            blob = batch.properties[index]
            qos, retain = (attributes & QOS_MASK) >> QOS_SHIFT, attributes & RETAIN != 0
            if attributes & PROTOCOL_MASK == Vocabulary.AMQP:
                message = shared.to_mqtt(blob)
                blob, qos, retain = message.blob, message.qos, message.retain
            self.session.offer_extra(
                Extra(
                    topic,
                    blob + identifiers,
                    batch.values[index],
                    min(qos, self.interest.qos),
                    retain and self.interest.retain_as_published,
                    batch.expiries.at(index),
                    settle=partial(self._settle, queue, one),
                    share=self.interest.filter if queue.durable else "",
                    seq=one.seq,
                    lane=one.lane.place,
                )
            )
        self.session.pump()

    def _settle(self, queue: Queue, stretch: Stretch, outcome: Outcome) -> None:
        if queue.deleted:
            return
        match outcome:
            case Outcome.ACCEPTED:
                queue.settle(stretch)
            case Outcome.REFUSED:
                queue.reject(stretch)
            case Outcome.RETURNED:
                queue.give_back([stretch])
        self._hub.broker.wake(queue)
        self._hub.broker.on_ready()

    def cancel(self) -> None:
        """The queue is gone."""


class Shares:
    """The groups of one vhost."""

    def __init__(self, hub: Hub, start_soon: Callable[[Callable[[], object]], None]) -> None:
        self._hub = hub
        self._start_soon = start_soon
        # By filter as subscribed, then by session; also of sessions that are asleep.
        self._members: dict[str, dict[Session, Member]] = {}
        # By filter, the lanes and numbers of QoS 2 messages that were with a session when the broker ended.
        self._taken: dict[str, set[tuple[int, int]]] = {}
        hub.ended = self._session_ended
        hub.states.is_taken = self._is_taken

    def _member(self, session: Session, interest: Interest) -> Member:
        members = self._members.setdefault(interest.filter, {})
        members[session] = Member(self._hub, session, interest, self._taken.setdefault(interest.filter, set()))
        return members[session]

    def restore(self, session: Session) -> None:
        """A session from before this start: it is in its groups, asleep."""
        for interest in session.interests.values():
            if is_shared(interest.filter):
                member = self._member(session, interest)
                for queue in self._queues(interest.filter):
                    queue.note_away(member, _wants(interest))
        for flight in session.flights.values():
            if flight.share:
                self._take(flight.share, flight.lane, flight.seq)
        for share, lane, seq in session.handed:
            self._take(share, lane, seq)

    def _take(self, share: str, lane: int, seq: int) -> None:
        queue = self._hub.host.queues.get(share)
        if queue is None or lane >= len(queue.lanes):
            return
        known = queue.lanes[lane]
        if seq >= known.floor and seq not in known.settled:
            self._taken.setdefault(share, set()).add((lane, seq))

    def _is_taken(self, share: str, lane: int, seq: int) -> bool:
        """Whether the group has still to learn that it must not give it to anybody."""
        return (lane, seq) in self._taken.get(share, ())

    def _session_ended(self, session: Session) -> None:
        for topic_filter in session.interests:
            if is_shared(topic_filter):
                self.leave_now(session, topic_filter)
                self._start_soon(partial(self._end_if_empty, topic_filter))

    async def join(self, session: Session, interest: Interest) -> None:
        """Raises TooManyFilters; then it is no member."""
        self.leave_now(session, interest.filter)
        queue = await self._queue(interest.filter, durable=session.outlives)
        try:
            self._consume(self._member(session, interest), self._queues(interest.filter))
        except TooManyFilters:
            await self.leave(session, interest.filter)
            raise
        self._hub.broker.touch(queue)

    def resume(self, session: Session) -> None:
        """A session is connected again: it takes part in its groups."""
        for interest in session.interests.values():
            if is_shared(interest.filter):
                member = self._members.get(interest.filter, {}).get(session) or self._member(session, interest)
                self._consume(member, self._queues(interest.filter))

    def pause(self, session: Session) -> None:
        """Its connection has ended; what it holds stays its own."""
        for topic_filter in session.interests if self._members else ():
            member = self._members.get(topic_filter, {}).get(session)
            if member is not None:
                for queue in self._queues(topic_filter):
                    if member in queue.consumers:
                        queue.remove_consumer(member)
                        queue.note_away(member, _wants(member.interest))
                        self._hub.broker.wake(queue)

    def wake(self, session: Session) -> None:
        """It has room again."""
        for topic_filter in session.interests if self._members else ():
            if is_shared(topic_filter):
                for queue in self._queues(topic_filter):
                    self._hub.broker.wake(queue)

    def leave_now(self, session: Session, topic_filter: str) -> None:
        members = self._members.get(topic_filter, {})
        member = members.pop(session, None)
        if member is None:
            return
        for queue in self._queues(topic_filter):
            if member in queue.consumers:
                queue.remove_consumer(member)
            queue.forget_away(member)
            self._hub.broker.wake(queue)
        if not members:
            self._members.pop(topic_filter, None)

    async def leave(self, session: Session, topic_filter: str) -> None:
        """It has unsubscribed."""
        self.leave_now(session, topic_filter)
        await self._end_if_empty(topic_filter)

    async def _end_if_empty(self, topic_filter: str) -> None:
        """A group that nobody is in ends."""
        if topic_filter not in self._members:
            self._taken.pop(topic_filter, None)
            for queue in self._queues(topic_filter):
                await self._hub.host.delete_queue(queue, lambda: topic_filter not in self._members)

    # -- queues -------------------------------------------------------------------------------------------------

    def _queues(self, topic_filter: str) -> list[Queue]:
        found = (self._hub.host.queues.get(name) for name in (topic_filter, _ephemeral(topic_filter)))
        return [queue for queue in found if queue is not None]

    async def _queue(self, topic_filter: str, *, durable: bool) -> Queue:
        """The queue that gets what the group is to have from now on."""
        hub = self._hub
        lasting = hub.host.queues.get(topic_filter)
        if lasting is not None:
            return lasting
        passing = hub.host.queues.get(_ephemeral(topic_filter))
        if passing is not None and not durable:
            return passing
        name = topic_filter if durable else _ephemeral(topic_filter)
        lanes = hub.shared.config.shared_lanes
        # What no member wants is not the group's, as what no subscription matches is not a session's.
        asked: dict[str, FieldIn] = {"x-filter-unmatched": "drop"}
        if lanes:
            asked["x-partitions"] = lanes
        if durable:
            # Members write down which ones they have, and a number must be that of the same message after a crash.
            asked["x-dispatch"] = "committed"
        arguments = Table(asked)
        settings = hub.broker.settings_of(hub.host.name, name, arguments)
        queue = await hub.host.declare_queue(name, settings, durable=durable, arguments=arguments)
        _group, plain = parse_filter(topic_filter)
        key = hub.shared.keys.binding_key(plain)
        await hub.host.bind(Binding(hub.host.name, EXCHANGE, DestinationKind.QUEUE, name, key))
        if passing is not None:
            await hub.host.unbind(Binding(hub.host.name, EXCHANGE, DestinationKind.QUEUE, passing.name, key))
            for member in self._members.get(topic_filter, {}).values():
                self._consume(member, [queue])
        return queue

    def _consume(self, member: Member, queues: Iterable[Queue]) -> None:
        for queue in queues:
            if member not in queue.consumers:
                queue.add_consumer(member, _wants(member.interest))
            self._hub.broker.wake(queue)


def _wants(interest: Interest) -> Expression | None:
    return parse(interest.wants) if interest.wants else None


def _ephemeral(topic_filter: str) -> str:
    return topic_filter + PASSING
