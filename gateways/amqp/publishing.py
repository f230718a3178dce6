"""Publishes of one connection: from a run of frames to one append. Machine over the broker.

The bytes of a method frame (exchange, key, flags) are the key of a cache whose value is the resolved target; most
publishes cost one look-up. Properties are scanned, not parsed; only what may concern the broker is decoded.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from pamqp import commands

from headrace.controller.errors import NotFound
from headrace.core_log.errors import SequenceRefused
from headrace.core_log.record import PERSISTENT, PRIORITY_SHIFT, Producer, Protocol
from headrace.filtering.tags import NO_TAGS, InvalidTags, Tags, is_small
from headrace.gateways.amqp import properties
from headrace.gateways.amqp.channel import Channel, Confirm, Outcome
from headrace.gateways.amqp.errors import ReplyCode, amqp_error
from headrace.gateways.amqp.fields import FieldTable, FieldValue, Timestamp
from headrace.gateways.amqp.frames import PublishRun, encode_ack, encode_nack, encode_return
from headrace.gateways.amqp.methods import Publish, decode_publish
from headrace.gateways.amqp.parking import Parcel, Parking
from headrace.gateways.amqp.properties import PropertyScan
from headrace.gateways.amqp.replyto import PREFIX as REPLY_PREFIX
from headrace.gateways.amqp.replyto import REPLY_TO
from headrace.gateways.amqp.shapes import Group, Integers, Shapes
from headrace.gateways.amqp.tags import tagged_runs, tags_of
from headrace.gateways.delivery import producers
from headrace.gateways.delivery.access import Access, Operation, Tag
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_when import HINT
from headrace.gateways.delivery.outbox import Outbox
from headrace.gateways.delivery.vhost import Target, VirtualHost

TARGETS_MAX = 1024
# Of one exchange and key, with different tags.
TAGGED_MAX = 32
_PUBLISH_IDS = (commands.Basic.Publish.index >> 16, commands.Basic.Publish.index & 0xFFFF)


@dataclass(slots=True)
class _Resolved:
    publish: Publish
    target: Target
    # The user's rights were checked at this version of the user; None for one who is gone.
    rights: int | None
    # The same for messages with tags.
    tagged: dict[Tags, Target] = field(default_factory=dict)

    @property
    def answers(self) -> bool:
        """A direct reply: the routing key is the name of somebody who asked."""
        return self.publish.exchange == "" and self.publish.routing_key.startswith(REPLY_PREFIX)

    @property
    def is_usual(self) -> bool:
        """Where it goes does not depend on the message."""
        return not self.target.route.reads_message and not self.answers


@dataclass(slots=True)
class _Numbered:
    """Publishes of an idempotent producer whose numbers follow each other and that go the same way: one append."""

    publish: Publish
    target: Target
    scan: PropertyScan
    producer: Producer
    props: list[bytes]
    bodies: list[bytes]

    def goes_on_with(self, target: Target, producer: Producer) -> bool:
        following = self.producer._replace(first_sequence=self.producer.first_sequence + len(self.bodies))
        mine = self.target
        same_way = target.route is mine.route and target.key == mine.key and target.tags == mine.tags
        return same_way and producer == following


class Publisher:
    def __init__(self, broker: Broker, host: VirtualHost, access: Access, user: str, outbox: Outbox) -> None:
        self._broker = broker
        self._host = host
        self._access = access
        self._user = user
        self._outbox = outbox
        self._targets: dict[bytes, _Resolved] = {}
        # What an idempotent producer sent in this read and is not yet published.
        self._numbered: _Numbered | None = None
        self._parking = Parking(broker, host.name)
        self._shapes = Shapes()
        # What is to be delivered later, came in this read and is not yet parked.
        self._parcel: Parcel | None = None
        self.frame_max = 131_072

    def publish(self, channel: Channel, run: PublishRun) -> None:
        """Take one run. Raises AmqpError (soft or hard) for what is not allowed; what stands before it is kept."""
        reason = self._broker.unwritable()
        if reason is not None:
            self._refuse_all(channel, len(run.bodies), reason)
            return
        resolved = self._resolve(run.method_payload)
        for group in self._shapes.groups(run.properties):
            first, last, scan = group[:3]
            if scan.interesting:
                try:
                    if group.delays_ms is not None and resolved.is_usual:
                        self._publish_later(channel, resolved, run, group, group.delays_ms)
                    else:
                        self._publish_interesting(channel, resolved, run, first, last, scan)
                finally:
                    self._publish_gathered(channel)
            elif resolved.target.route.unroutable and resolved.answers:
                for index in range(first, last):
                    self._reply(channel, resolved.publish, run.properties[index], run.bodies[index])
            else:
                self._append(channel, resolved, run.properties[first:last], run.bodies[first:last], scan)

    def _refuse_all(self, channel: Channel, count: int, reason: str) -> None:
        """Nothing is appended, so that a nack is true."""
        if not channel.confirming:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, f"publish refused: {reason}", *_PUBLISH_IDS)
        channel.expect(count).outcome = Outcome.NACK

    def _publish_interesting(
        self, channel: Channel, resolved: _Resolved, run: PublishRun, first: int, last: int, scan: PropertyScan
    ) -> None:
        usual = resolved.is_usual
        for start, end, tags in tagged_runs(run.properties, first, last):
            if usual and tags is not None:
                self._publish_gathered(channel)
                target = self._tagged(resolved, tags)
                self._keep(channel, resolved.publish, target, run.properties[start:end], run.bodies[start:end], scan)
                continue
            for index in range(start, end):
                props, body = run.properties[index], run.bodies[index]
                due_us = self._parking.quick_due(props) if usual and HINT in props else None
                if due_us is None:
                    self._publish_special(channel, resolved, props, body, scan)
                else:
                    parcel = self._gathering(channel, resolved.publish, resolved.target, scan)
                    parcel.add([props], [body], [due_us])

    def _tagged(self, resolved: _Resolved, tags: Tags) -> Target:
        if not tags:
            return resolved.target
        target = resolved.tagged.get(tags)
        if target is None:
            publish = resolved.publish
            target = self._host.target(publish.exchange, publish.routing_key_bytes, [publish.routing_key], tags=tags)
            if is_small(tags):
                if len(resolved.tagged) >= TAGGED_MAX:
                    resolved.tagged.clear()
                resolved.tagged[tags] = target
        return target

    def _resolve(self, payload: bytes) -> _Resolved:
        resolved = self._targets.get(payload)
        user = self._broker.metadata.snapshot.users.get(self._user)
        version = user.version if user is not None else None
        if resolved is not None and resolved.rights == version and self._host.is_current(resolved.target):
            return resolved
        publish = decode_publish(payload)
        if publish.immediate:
            raise amqp_error(ReplyCode.NOT_IMPLEMENTED, "immediate=true", *_PUBLISH_IDS)
        self._check_rights(publish.exchange, publish.routing_key)
        exchange = self._host.router.exchange(publish.exchange)
        if exchange is None:
            text = f"no exchange '{publish.exchange}' in vhost '{self._host.name}'"
            raise amqp_error(ReplyCode.NOT_FOUND, text, *_PUBLISH_IDS)
        if exchange.internal:
            text = f"cannot publish to internal exchange '{publish.exchange}' in vhost '{self._host.name}'"
            raise amqp_error(ReplyCode.ACCESS_REFUSED, text, *_PUBLISH_IDS)
        target = self._host.target(publish.exchange, publish.routing_key_bytes, [publish.routing_key])
        resolved = _Resolved(publish, target, version)
        if not target.route.reads_message:
            if len(self._targets) >= TARGETS_MAX:
                self._targets.clear()
            self._targets[payload] = resolved
        return resolved

    def _check_rights(self, exchange: str, key: str) -> None:
        user, host = self._user, self._host.name
        allowed = self._access.may(user, host, Operation.WRITE, exchange)
        if allowed and exchange:
            found = self._host.router.exchange(exchange)
            if found is not None and found.kind == "topic":
                allowed = self._access.may_use_key(user, host, exchange, Operation.WRITE, key, None)
        if not allowed:
            name = exchange or "amq.default"
            text = f"write access to exchange '{name}' in vhost '{host}' refused for user '{user}'"
            raise amqp_error(ReplyCode.ACCESS_REFUSED, text, *_PUBLISH_IDS)

    # -- the usual --------------------------------------------------------------------------------------------------

    def _append(
        self,
        channel: Channel,
        resolved: _Resolved,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        scan: PropertyScan,
    ) -> None:
        target = resolved.target
        if target.route.reads_message and not scan.interesting:
            for one, body in zip(props, bodies, strict=True):
                routed = self._route_by_message(resolved.publish, one)
                self._keep(channel, resolved.publish, routed, [one], [body], scan)
            return
        self._keep(channel, resolved.publish, target, props, bodies, scan)

    def _route_by_message(
        self, publish: Publish, props: bytes, keys: Sequence[str] = (), tags: Tags = NO_TAGS
    ) -> Target:
        decoded = properties.decode(props)
        return self._host.target(
            publish.exchange,
            publish.routing_key_bytes,
            [publish.routing_key, *keys],
            lambda: decoded.headers,
            lambda: {
                "correlation_id": decoded.correlation_id,
                "message_id": decoded.message_id,
                "timestamp": decoded.timestamp,
            },
            tags,
        )

    def _keep(
        self,
        channel: Channel,
        publish: Publish,
        target: Target,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        scan: PropertyScan,
    ) -> None:
        if channel.transactional:
            channel.pending.append(
                lambda: self._keep_now(channel, publish, self._host.now(target), props, bodies, scan)
            )
        else:
            self._keep_now(channel, publish, target, props, bodies, scan)

    def _keep_now(
        self,
        channel: Channel,
        publish: Publish,
        target: Target,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        scan: PropertyScan,
    ) -> None:
        confirm = channel.expect(len(bodies)) if channel.confirming else None
        if publish.mandatory and not target.queues and not self._broker.is_heard(target):
            self._return(channel, publish, props, bodies)
            _tell(confirm, Outcome.ACK)
            return
        if target.byte_limits and not self._admitted(target, bodies):
            self._store_one_by_one(channel, publish, target, props, bodies, scan, confirm)
            return
        self._store(target, props, bodies, scan, confirm, channel)

    def _store(
        self,
        target: Target,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        scan: PropertyScan,
        confirm: Confirm | None,
        channel: Channel | None = None,
    ) -> None:
        attributes, expiry_us = self._stored_as(scan)
        broker = self._broker
        broker.speaker = self._user
        try:
            reached = broker.publish(target, props, bodies, attributes=attributes, expiry_us=expiry_us)
        finally:
            broker.speaker = ""
        if confirm is not None:
            assert channel is not None
            self._confirm_when_safe(channel, confirm, target, scan, reached)

    def _stored_as(self, scan: PropertyScan) -> tuple[int, int]:
        """Attributes and expiry of a record with these properties."""
        attributes = int(Protocol.AMQP) | (PERSISTENT if scan.persistent else 0)
        if scan.priority:
            attributes |= min(scan.priority, 255) << PRIORITY_SHIFT
        expiry_us = 0
        if scan.expiration_ms is not None:
            # 0 is a lawful expiration (deliver now or never), and 0 means none in the log.
            expiry_us = self._broker.env.clock.wall_us() + scan.expiration_ms * 1000
        return attributes, expiry_us

    def _confirm_when_safe(
        self, channel: Channel, confirm: Confirm, target: Target, scan: PropertyScan, reached: int | None
    ) -> None:
        if reached is None or not scan.persistent or target.log is None:
            _tell(confirm, Outcome.ACK)
        else:
            target.log.when_committed(reached, _Confirmed(confirm, channel, self._outbox))

    def _admitted(self, target: Target, bodies: Sequence[bytes]) -> bool:
        size = sum(map(len, bodies))
        return all(queue.admits(len(bodies), size) for queue in target.byte_limits)

    def _store_one_by_one(
        self,
        channel: Channel,
        publish: Publish,
        target: Target,
        props: Sequence[bytes],
        bodies: Sequence[bytes],
        scan: PropertyScan,
        confirm: Confirm | None,
    ) -> None:
        """A queue is nearly full: whoever still has room gets each message, the publisher hears of those refused."""
        if confirm is not None:
            channel.unexpect(confirm)
        for one, body in zip(props, bodies, strict=True):
            full = [queue for queue in target.byte_limits if not queue.admits(1, len(body))]
            single = channel.expect(1) if confirm is not None else None
            if not full:
                self._store(target, [one], [body], scan, single, channel)
                continue
            left = tuple(queue for queue in target.queues if queue not in full)
            if left:
                self._store(target.only(left), [one], [body], scan, None)
            for queue in full:
                self._broker.refuse(self._host, queue, target, one, body)
            _tell(single, Outcome.NACK)

    def _return(self, channel: Channel, publish: Publish, props: Sequence[bytes], bodies: Sequence[bytes]) -> None:
        exchange = publish.exchange.encode("utf-8", "surrogateescape")
        for one, body in zip(props, bodies, strict=True):
            self._outbox.put(
                encode_return(
                    channel.number,
                    ReplyCode.NO_ROUTE,
                    "NO_ROUTE",
                    exchange,
                    publish.routing_key_bytes,
                    one,
                    body,
                    self.frame_max,
                )
            )

    # -- what may concern the broker ----------------------------------------------------------------------------

    def _publish_special(
        self, channel: Channel, resolved: _Resolved, props: bytes, body: bytes, scan: PropertyScan
    ) -> None:
        decoded = properties.decode(props)
        publish = resolved.publish
        foreign = decoded.user_id is not None and decoded.user_id != self._user
        if foreign and not self._access.has(self._user, Tag.IMPERSONATOR):
            text = f"user_id property set to '{decoded.user_id}' but authenticated user was '{self._user}'"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
        headers = decoded.headers or {}
        copies: list[str] = []
        for name in ("CC", "BCC"):
            found = headers.get(name)
            if found is None:
                continue
            if not isinstance(found, list):
                text = f"invalid type for header '{name}': expected an array of strings"
                raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
            copies += [one for one in found if isinstance(one, str)]
        asked = self._parking.asked(headers) if HINT in props else None
        # One that is delivered later is routed to them then.
        if "BCC" in headers and asked is None:
            props = properties.without_header(props, "BCC")
        if decoded.reply_to == REPLY_TO:
            if channel.reply_consumer is None:
                text = "fast reply consumer does not exist"
                raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
            props = properties.with_reply_to(props, channel.reply_consumer.name)
        if resolved.answers and not copies:
            if asked is not None:
                text = "a direct reply goes from connection to connection and cannot be delivered later"
                raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
            self._publish_gathered(channel)
            self._reply(channel, publish, props, body)
            return
        try:
            tags = tags_of(headers)
        except InvalidTags as error:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *_PUBLISH_IDS) from error
        target = self._tagged(resolved, tags)
        if copies or target.route.reads_message:
            try:
                target = self._route_by_message(publish, props, copies, tags)
            except NotFound as error:
                raise amqp_error(ReplyCode.NOT_FOUND, str(error), *_PUBLISH_IDS) from error
        if "x-producer-id" not in headers:
            if asked is not None:
                self._gathering(channel, publish, target, scan).add([props], [body], [asked.due_us], [asked.id])
                return
            self._publish_gathered(channel)
            self._keep(channel, publish, target, [props], [body], scan)
            return
        if channel.transactional:
            text = "x-producer-id on a transactional channel: numbered publishes are confirmed, not committed"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
        producer = self._producer(headers)
        if asked is not None:
            parcel = self._gathering(channel, publish, target, scan, producer)
            parcel.add([props], [body], [asked.due_us], [asked.id])
            return
        numbered = self._numbered
        if numbered is None or not numbered.goes_on_with(target, producer):
            self._publish_gathered(channel)
            numbered = self._numbered = _Numbered(publish, target, scan, producer, [], [])
        numbered.props.append(props)
        numbered.bodies.append(body)

    def _publish_gathered(self, channel: Channel) -> None:
        self._park_gathered(channel)
        self._publish_numbered(channel)

    # -- delivered later ----------------------------------------------------------------------------------------

    def _publish_later(
        self, channel: Channel, resolved: _Resolved, run: PublishRun, group: Group, delays_ms: Integers
    ) -> None:
        """Publishes in which a delay is all that concerns the broker."""
        dues, later = self._parking.dues_of(delays_ms)
        start = group.first
        # Those that are due now, or too far away, are looked at one by one.
        for end in [*(np.flatnonzero(~later) + group.first).tolist(), group.last]:
            if start < end:
                ids = None if group.ids is None else group.ids[start - group.first : end - group.first]
                parcel = self._gathering(channel, resolved.publish, resolved.target, group.scan)
                part = array("q", dues[start - group.first : end - group.first].tobytes())
                parcel.add(run.properties[start:end], run.bodies[start:end], part, ids)
            if end < group.last:
                self._publish_special(channel, resolved, run.properties[end], run.bodies[end], group.scan)
            start = end + 1

    def _gathering(
        self,
        channel: Channel,
        publish: Publish,
        target: Target,
        scan: PropertyScan,
        producer: Producer | None = None,
    ) -> Parcel:
        """What the next publish goes into; what it does not go with is published or parked first."""
        self._publish_numbered(channel)
        attributes, _expiry_us = self._stored_as(scan)
        parcel = self._parcel
        if parcel is None or not parcel.goes_on_with(publish, target, attributes, producer):
            self._park_gathered(channel)
            parcel = self._parcel = Parcel(publish, target, attributes, producer)
        return parcel

    def _park_gathered(self, channel: Channel) -> None:
        parcel, self._parcel = self._parcel, None
        if parcel is None:
            return
        if channel.transactional:
            channel.pending.append(lambda: self._park(channel, parcel))
        else:
            self._park(channel, parcel)

    def _park(self, channel: Channel, parcel: Parcel) -> None:
        confirm = channel.expect(len(parcel.bodies)) if channel.confirming else None
        target = parcel.target
        if parcel.publish.mandatory and not target.queues and not self._broker.is_heard(target):
            self._return(channel, parcel.publish, parcel.props, parcel.bodies)
            _tell(confirm, Outcome.ACK)
            return
        try:
            reached = self._parking.park(parcel)
        except SequenceRefused as error:
            if confirm is None:
                raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *_PUBLISH_IDS) from error
            _tell(confirm, Outcome.NACK)
            return
        if confirm is not None:
            if parcel.attributes & PERSISTENT:
                self._parking.when_parked(reached, _Confirmed(confirm, channel, self._outbox))
            else:
                _tell(confirm, Outcome.ACK)

    # -- idempotent producers -----------------------------------------------------------------------------------

    def _producer(self, headers: FieldTable) -> Producer:
        name, epoch = headers["x-producer-id"], headers.get("x-producer-epoch", 0)
        sequence = headers.get("x-sequence")
        if not isinstance(name, str) or not _is_integer(epoch) or not _is_integer(sequence):
            text = "x-producer-id must be a string and come with x-sequence, an integer; x-producer-epoch is an integer"
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, text, *_PUBLISH_IDS)
        assert isinstance(epoch, int) and isinstance(sequence, int)
        try:
            return producers.producer(self._host.name, self._user, name, epoch, sequence)
        except SequenceRefused as error:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *_PUBLISH_IDS) from error

    def _publish_numbered(self, channel: Channel) -> None:
        """Publish what has gathered. A number that may not be confirmed is nacked, or 406 where nobody hears nacks."""
        numbered, self._numbered = self._numbered, None
        if numbered is None:
            return
        target, bodies = numbered.target, numbered.bodies
        if numbered.publish.mandatory and not target.queues and not self._broker.is_heard(target):
            confirm = channel.expect(len(bodies)) if channel.confirming else None
            self._return(channel, numbered.publish, numbered.props, bodies)
            _tell(confirm, Outcome.ACK)
            return
        if not target.byte_limits or self._admitted(target, bodies):
            try:
                self._store_once(channel, numbered)
                return
            except SequenceRefused as error:
                if len(bodies) == 1:
                    self._refuse_number(channel, error)
                    return
        elif len(bodies) == 1:
            # Kept by none: had another queue got it, the number would count as seen when it is sent again.
            for queue in target.byte_limits:
                if not queue.admits(1, len(bodies[0])):
                    self._broker.refuse(self._host, queue, target, numbered.props[0], bodies[0])
            _tell(channel.expect(1) if channel.confirming else None, Outcome.NACK)
            return
        # Not all of them can be published: each for itself then.
        first = numbered.producer.first_sequence
        for place, (props, body) in enumerate(zip(numbered.props, bodies, strict=True)):
            producer = numbered.producer._replace(first_sequence=first + place)
            self._numbered = _Numbered(numbered.publish, target, numbered.scan, producer, [props], [body])
            self._publish_numbered(channel)

    def _store_once(self, channel: Channel, numbered: _Numbered) -> None:
        target, scan = numbered.target, numbered.scan
        attributes, expiry_us = self._stored_as(scan)
        broker = self._broker
        broker.speaker = self._user
        try:
            reached = broker.publish_once(
                target, numbered.producer, numbered.props, numbered.bodies, attributes=attributes, expiry_us=expiry_us
            )
        finally:
            broker.speaker = ""
        if channel.confirming:
            self._confirm_when_safe(channel, channel.expect(len(numbered.bodies)), target, scan, reached)

    def _refuse_number(self, channel: Channel, error: SequenceRefused) -> None:
        if not channel.confirming:
            raise amqp_error(ReplyCode.PRECONDITION_FAILED, str(error), *_PUBLISH_IDS) from error
        channel.expect(1).outcome = Outcome.NACK

    def _reply(self, channel: Channel, publish: Publish, props: bytes, body: bytes) -> None:
        """From connection to connection; a name is no queue, so a mandatory answer is returned as well (RabbitMQ's)."""
        receiver = self._host.replies.get(publish.routing_key)
        if receiver is not None:
            if channel.transactional:
                channel.pending.append(lambda: receiver.receive(props, body))
            else:
                receiver.receive(props, body)
        confirm = channel.expect(1) if channel.confirming else None
        if publish.mandatory:
            self._return(channel, publish, [props], [body])
        _tell(confirm, Outcome.ACK)


class _Confirmed:
    """The log has passed a run: its confirm goes out with the next flush. A plain callback."""

    __slots__ = ("_channel", "_confirm", "_outbox")

    def __init__(self, confirm: Confirm, channel: Channel, outbox: Outbox) -> None:
        self._confirm = confirm
        self._channel = channel
        self._outbox = outbox

    def __call__(self) -> None:
        self._confirm.outcome = Outcome.ACK
        send_confirms(self._channel, self._outbox)


def send_confirms(channel: Channel, outbox: Outbox) -> None:
    """Tell the publisher whatever can be told."""
    for tag, outcome in channel.told():
        encode = encode_ack if outcome is Outcome.ACK else encode_nack
        outbox.put(encode(channel.number, tag, True))


def _is_integer(value: FieldValue) -> bool:
    return isinstance(value, int) and not isinstance(value, bool | Timestamp)


def _tell(confirm: Confirm | None, outcome: Outcome) -> None:
    if confirm is not None:
        confirm.outcome = outcome
