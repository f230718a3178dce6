"""What the broker holds for one MQTT client, connected or not. Machine: no I/O, no clock.

A session is a place in the log of `amq.topic` and what its client has not acknowledged. Records that its subscriptions
match come in log order, pushed while it keeps up (`offer`) or read by the hub when it does not; they wait in `pieces`
until the client's window, the socket and, for a session that outlives its connection, the commit let them go.

Packet identifiers of records follow from the log: the n-th record with QoS 1 or 2 gets 1 + n mod 32,767, so after a
crash the same records get the same identifiers with nothing written for each of them (M3). Whatever else is delivered
(retained messages, shared subscriptions) takes identifiers from the other half and is written out in the state.

Invariants: an identifier is in `flights` exactly while the client may still speak of it; everything before `position`
is in a flight, in `pieces`, or done. Neighbours: hub.py and catch_up.py feed it, client.py is its Link, quota.py says
how much may wait.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Protocol

from headrace.gateways.mqtt.encoder import encode_ack_run, encode_publish_run, publish_bytes, publish_first_byte
from headrace.gateways.mqtt.flights import Flight, Flights, Outcome, Settle
from headrace.gateways.mqtt.packets import RetainHandling, Will
from headrace.gateways.mqtt.properties import encode_topic_alias, with_message_expiry
from headrace.gateways.mqtt.quota import Overflow, Quota
from headrace.gateways.mqtt.reasons import PacketType, Version
from headrace.gateways.mqtt.tally import Tally

LOG_IDS = 32_767
EXTRA_IDS = range(32_768, 65_536)
# Pushed records that wait for their client; beyond this the session falls behind and reads the log when there is room.
PIECES_COUNT_MAX = 2_000
PIECES_BYTES_MAX = 1024 * 1024
# A run for one client is cut so that one send never holds much more than its buffer.
SEND_COUNT_MAX = 4_096


class Link(Protocol):
    """The connection of a session, as the session sees it."""

    version: Version
    # Larger packets are not sent; 0: no limit.
    packet_bytes_max: int
    # How many topics may be replaced by numbers on the way out.
    alias_max: int
    # Deliveries the client takes without having acknowledged the ones before.
    window: int

    @property
    def is_full(self) -> bool: ...

    def send(self, data: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Interest:
    """One subscription of a session."""

    filter: str
    qos: int
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: RetainHandling = RetainHandling.SEND
    identifier: int = 0
    # Where it stands in the log: what is older is not for it.
    since: int = 0
    # A tag expression: what it does not want is not for it; empty: everything.
    wants: str = ""


@dataclass(slots=True)
class Piece:
    """Matched records that lie next to each other in the log and go out alike."""

    offset: int
    qos: int
    retain: bool
    topics: Sequence[bytes]
    blobs: Sequence[bytes]
    payloads: Sequence[bytes]
    # Wall time after which nobody wants them; 0: never.
    expiry_us: int = 0
    # When they were published.
    timestamp_us: int = 0
    byte_count: int = 0


@dataclass(slots=True)
class Extra:
    """A message beside the log's order: retained, or from a shared subscription."""

    topic: bytes
    blob: bytes
    payload: bytes
    qos: int
    retain: bool
    expiry_us: int = 0
    timestamp_us: int = 0
    settle: Settle | None = None
    share: str = ""
    seq: int = -1
    lane: int = 0
    # Gets the payload when it is sent; None of it: the message is not there any more.
    load: Callable[[], bytes | None] | None = None


@dataclass(slots=True)
class Counts:
    """What a session could not deliver."""

    expired: int = 0
    too_large: int = 0
    # Taken by retention before the client could get it.
    lost: int = 0
    # More waited than may: the oldest were dropped, or the newest refused.
    dropped: int = 0
    refused: int = 0


class Session:
    def __init__(
        self, client_id: str, *, now_us: Callable[[], int], origin: int = 0, tally: Tally | None = None
    ) -> None:
        """`tally`: shared by the sessions of a vhost."""
        self.client_id = client_id
        self.user = ""
        # Marks its own publishes in the log, for subscriptions that do not want them.
        self.origin = origin
        # Seconds it outlives its connection; None: for ever.
        self.expiry_s: int | None = 0
        self.interests: dict[str, Interest] = {}
        self.will: Will | None = None
        self.link: Link | None = None
        # When the last connection ended.
        self.asleep_since_us = 0
        # True: it is pushed what is appended. False: it reads the log from `position` on.
        self.live = False
        self.position = 0
        # What the hub knows of the log ahead: the offsets (from, to) where something may match (None: everywhere), and
        # how far it knows that.
        self.ahead: tuple[Sequence[tuple[int, int]] | None, int] = (None, 0)
        # None: as much may wait for it as the log keeps.
        self.quota: Quota | None = None
        # Records with QoS 0 below this were published while nobody was there to get them.
        self.awake_from = 0
        self.pieces: deque[Piece] = deque()
        self.extras: deque[Extra] = deque()
        self.flights = Flights()
        # Received with QoS 2 and not released: a second PUBLISH with such an identifier is the same message.
        # The offset of its message stands beside each: without the message an identifier counts for nothing.
        self.incoming: dict[int, int] = {}
        # Of a session that was restored: `incoming` has what was received before this offset (received.py).
        self.noted_to = -1
        self.next_seq = 0
        # Messages of shared subscriptions that are complete here, by share, lane and number: after a crash their group
        # might not know it yet, and give them to somebody.
        self.handed: dict[tuple[str, int, int], None] = {}
        self.counts = Counts()
        self.tally = Tally() if tally is None else tally
        # Its state stands in the log.
        self.is_kept = False
        # Records below this may have been sent before the broker last ended without saying goodbye: they go out as
        # repeated ones.
        self.sent_below = 0
        # How many times the state that its numbers follow from is on its way to the disk: no record gets one meanwhile.
        self._hold_count = 0
        # How far the log is committed; the hub keeps it.
        self.committed: Callable[[], int] = lambda: 1 << 62
        # Called when something changed that must survive a crash. True: before the client may be told.
        self.changed: Callable[[bool], None] = lambda at_once: None
        # Called to write the state down; it calls back when that is safe.
        self.write: Callable[[Callable[[], None]], None] = lambda done: done()
        # Called when the records that wait are few and there is more to read.
        self.hungry: Callable[[], None] = lambda: None
        self._now_us = now_us
        # Records in `pieces`, of them those with QoS 1 and 2, and their bytes.
        self._waiting_count = self._tracked_count = self._waiting_bytes = 0
        # Flights of an earlier connection, to be sent again on this one.
        self._to_resend: deque[int] = deque()
        self._next_extra = 0
        self._aliases: dict[bytes, int] = {}
        # PUBREL, and deliveries of shared subscriptions, that wait for the state to be safe.
        self._to_release: list[int] = []
        self._to_deliver: list[int] = []

    # -- counts -------------------------------------------------------------------------------------------------

    @property
    def outlives(self) -> bool:
        """Whether it is kept when its connection ends."""
        return self.expiry_s is None or self.expiry_s > 0

    @property
    def waiting_count(self) -> int:
        return self._waiting_count

    @property
    def room(self) -> int:
        """How many more deliveries with QoS 1 or 2 the client takes now."""
        link = self.link
        return 0 if link is None else link.window - len(self.flights) + len(self._to_resend)

    @property
    def is_hungry(self) -> bool:
        return self._waiting_count < PIECES_COUNT_MAX // 2 and self._waiting_bytes < PIECES_BYTES_MAX // 2

    # -- coming and going ---------------------------------------------------------------------------------------

    def attach(self, link: Link, log_end: int) -> None:
        """A client is there. What it has not acknowledged is sent again, then what it missed."""
        self.link = link
        self._aliases = {}
        self._to_resend = deque(self.flights)
        self.awake_from = log_end

    def detach(self, log_end: int) -> None:
        """The client has gone: from here on the log keeps what it misses."""
        self.link = None
        self.position = self.unread_from(log_end)
        if self.quota is not None:
            self.quota.forget()
        self.live = False
        self.pieces.clear()
        self._waiting_count = self._tracked_count = self._waiting_bytes = 0
        extras, self.extras = self.extras, deque()
        for extra in extras:
            if extra.settle is not None:
                extra.settle(Outcome.RETURNED)
            elif self.outlives:
                self.extras.append(extra)
        self._to_resend.clear()
        self._to_release.clear()
        self._to_deliver.clear()

    def unread_from(self, log_end: int) -> int:
        """The first record that is in no flight and not done."""
        if self.pieces:
            return self.pieces[0].offset
        if self.quota is None:
            return log_end if self.live else self.position
        if self.quota.is_counting:
            return self.quota.counting_from
        return self.quota.before(log_end if self.live else self.position)[1]

    def number_at(self, offset: int) -> int:
        """The number of the first record with QoS 1 or 2 from this offset on, which is `unread_from`."""
        return self.next_seq if self.quota is None else self.next_seq + self.quota.before(offset)[0]

    # -- records come -------------------------------------------------------------------------------------------

    def offer(self, piece: Piece) -> bool:
        """Records of the log that match. False: no room, and from now on the hub must come back with them."""
        waiting = self._waiting_count
        if waiting and (waiting >= PIECES_COUNT_MAX or self._waiting_bytes >= PIECES_BYTES_MAX):
            if self.live:
                self.live = False
                self.position = piece.offset
            return False
        count = len(piece.payloads)
        if not piece.byte_count:
            piece.byte_count = sum(map(len, piece.payloads))
        self._waiting_count = waiting + count
        if piece.qos:
            self._tracked_count += count
        self._waiting_bytes += piece.byte_count
        self.pieces.append(piece)
        if not waiting:
            self.pump()
        return True

    def keep_extras(self, wanted: Callable[[bytes], bool]) -> None:
        """Of what waits beside the log's order while nobody is connected: the topics that are still wanted."""
        self.extras = deque(extra for extra in self.extras if wanted(extra.topic))

    def offer_extra(self, extra: Extra) -> None:
        self.extras.append(extra)

    # -- more than may wait -------------------------------------------------------------------------------------

    def admitted(self, offset: int, count: int) -> int:
        """How many of so many new records, with QoS 1 or 2, may come to wait. The rest is refused, and counted."""
        quota = self.quota
        if quota is None or quota.overflow is Overflow.DROP_OLDEST:
            return count
        taken = quota.admitted(self._tracked_count, max(0, self.room), offset, count)
        self.refused(count - taken)
        return taken

    def refused(self, count: int) -> None:
        self.counts.refused += count
        self.tally.refused += count
        self.tally.dropped += count

    def dropped(self, count: int) -> None:
        """The oldest were let go of. Nothing that is before them waits: their numbers are the next ones."""
        self.next_seq += count
        self.counts.dropped += count
        self.tally.overflowed += count
        self.tally.dropped += count

    def shed(self) -> None:
        """Let go of the oldest, if more wait than may."""
        quota = self.quota
        if quota is None or quota.overflow is Overflow.REFUSE_NEWEST or quota.is_counting:
            return
        ahead = quota.unread - quota.passing_over
        excess = self._tracked_count + ahead - quota.count_max - max(0, self.room)
        while excess > 0 and self._tracked_count:
            # What has QoS 0 and waits in front of them goes too: the oldest first.
            piece = self.pieces[0]
            taken = self._cut(piece, min(excess, len(piece.payloads)) if piece.qos else len(piece.payloads))
            if taken.qos:
                excess -= len(taken.payloads)
                self.dropped(len(taken.payloads))
            else:
                self.tally.dropped += len(taken.payloads)
        if excess > 0:
            quota.passing_over += excess

    # -- records go ---------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send what may go now."""
        link = self.link
        if link is None:
            return
        if self._to_resend:
            if self._hold_count:
                # Somebody else may lead by now and have gone on with it: a commit shows that nobody does. What was done
                # with there, and came again, would be taken for new.
                return
            self._resend(link)
        if self.extras:
            self._pump_extras(link)
        pieces = self.pieces
        while pieces and not link.is_full:
            piece = pieces[0]
            count = self._admitted(piece)
            if not count:
                break
            self._send(link, self._cut(piece, count))
        if not self.live and self.is_hungry:
            self.hungry()

    def _admitted(self, piece: Piece) -> int:
        """How many records of the first piece may go."""
        count = min(len(piece.payloads), SEND_COUNT_MAX)
        if not piece.qos:
            return count
        if self._hold_count:
            return 0
        if self.outlives:
            # The identifiers follow from the log, so what a crash could take back must not have one (M3).
            count = min(count, self.committed() - piece.offset)
        if piece.offset < self.sent_below:
            count = min(count, self.sent_below - piece.offset)
        if self.quota is not None:
            self.next_seq += self.quota.passed(piece.offset)
        count = min(count, self.room)
        if count <= 0:
            return 0
        first = self.next_seq
        if first + count > LOG_IDS:
            # They have all been used once: those that are still in flight must not be used again.
            ids = _ids_from(first, count)
            if self.flights.has_any(first, ids, LOG_IDS):
                free = next(place for place, packet_id in enumerate(ids) if packet_id in self.flights)
                return free or self._pass_used()
        return count

    def _pass_used(self) -> int:
        """The next number belongs to a message that is not acknowledged while thousands that came later were: it is
        left out. Then numbers no longer follow from the log before this place, so the state is written first."""
        while 1 + self.next_seq % LOG_IDS in self.flights:
            self.next_seq += 1
        if not self.outlives:
            return 1
        self.hold()
        return 0

    def hold(self) -> None:
        """No record gets a number, and nothing is sent again, before the state, as it is now, is safe."""
        self._hold_count += 1
        self.write(self._let_go_on)

    def _let_go_on(self) -> None:
        self._hold_count -= 1
        self.pump()

    def _cut(self, piece: Piece, count: int) -> Piece:
        """The first so many records, taken out of those that wait."""
        self._waiting_count -= count
        if piece.qos:
            self._tracked_count -= count
        if count == len(piece.payloads):
            self.pieces.popleft()
            self._waiting_bytes -= piece.byte_count
            return piece
        payloads = piece.payloads[:count]
        taken = Piece(
            piece.offset,
            piece.qos,
            piece.retain,
            piece.topics[:count],
            piece.blobs[:count],
            payloads,
            piece.expiry_us,
            piece.timestamp_us,
            sum(map(len, payloads)),
        )
        piece.offset += count
        piece.topics = piece.topics[count:]
        piece.blobs = piece.blobs[count:]
        piece.payloads = piece.payloads[count:]
        piece.byte_count -= taken.byte_count
        self._waiting_bytes -= taken.byte_count
        return taken

    def _send(self, link: Link, piece: Piece) -> None:
        qos, count = piece.qos, len(piece.payloads)
        first = self.next_seq
        if qos:
            # Also of those that do not go out: a number follows from the log alone.
            self.next_seq = first + count
        topics, blobs, payloads = piece.topics, piece.blobs, piece.payloads
        if piece.expiry_us:
            left_s = self._left_s(piece.expiry_us)
            if left_s <= 0:
                self.counts.expired += count
                self.tally.dropped += count
                self._note_progress()
                return
            blobs = [with_message_expiry(blob, left_s) for blob in blobs]
        ids: Sequence[int] = _ids_from(first, count) if qos else ()
        if link.packet_bytes_max or link.alias_max:
            self._send_singly(link, piece, blobs, ids)
            return
        if qos == 1:
            self.flights.add_run(first, ids, piece.offset, piece.retain, topics, blobs, payloads)
        elif qos:
            offset = piece.offset
            columns = (range(offset, offset + count), repeat(qos), repeat(piece.retain), topics, blobs, payloads)
            # A Flight for each, made in C: less than half of 0.8 us.
            rows = zip(*columns, *map(repeat, Flight._field_defaults.values()), strict=False)
            self.flights.update(zip(ids, map(tuple.__new__, repeat(Flight), rows), strict=True))
        if qos:
            self._note_progress()
        self.tally.delivered += count
        dup = qos > 0 and piece.offset < self.sent_below
        first_byte = publish_first_byte(qos, piece.retain, dup)
        link.send(encode_publish_run(first_byte, topics, blobs, payloads, ids, link.version))

    def _send_singly(self, link: Link, piece: Piece, blobs: Sequence[bytes], ids: Sequence[int]) -> None:
        """For clients with a largest packet, or with numbers for topics."""
        for place, (topic, blob, payload) in enumerate(zip(piece.topics, blobs, piece.payloads, strict=True)):
            packet_id = ids[place] if piece.qos else 0
            flight = Flight(piece.offset + place, piece.qos, piece.retain, topic, blob, payload)
            dup = piece.qos > 0 and flight.offset < self.sent_below
            if self._send_one(link, flight, packet_id, dup=dup) and packet_id:
                self.flights[packet_id] = flight
        self._note_progress()

    def _send_one(self, link: Link, flight: Flight, packet_id: int, *, dup: bool = False) -> bool:
        """False: it is too large for this client, and was not sent [MQTT-3.1.2-24]."""
        topic, blob, payload = flight.topic, flight.blob, flight.payload
        limit = link.packet_bytes_max
        if limit and publish_bytes(topic, blob, payload, flight.qos, link.version) > limit:
            self.counts.too_large += 1
            self.tally.dropped += 1
            return False
        self.tally.delivered += 1
        if link.alias_max:
            topic, blob = self._aliased(link, topic, blob, payload, flight.qos)
        first_byte = publish_first_byte(flight.qos, flight.retain, dup)
        ids = (packet_id,) if flight.qos else ()
        link.send(encode_publish_run(first_byte, (topic,), (blob,), (payload,), ids, link.version))
        return True

    def _aliased(self, link: Link, topic: bytes, blob: bytes, payload: bytes, qos: int) -> tuple[bytes, bytes]:
        """[MQTT-3.1.2-26] The first topics of a connection get numbers, as many as the client knows."""
        alias = self._aliases.get(topic)
        if alias is not None:
            return b"", blob + encode_topic_alias(alias)
        if len(self._aliases) >= link.alias_max:
            return topic, blob
        alias = len(self._aliases) + 1
        announced = blob + encode_topic_alias(alias)
        limit = link.packet_bytes_max
        if limit and publish_bytes(topic, announced, payload, qos, link.version) > limit:
            return topic, blob
        self._aliases[topic] = alias
        return topic, announced

    def _pump_extras(self, link: Link) -> None:
        extras = self.extras
        while extras and not link.is_full:
            extra = extras[0]
            if extra.qos and (self.room <= 0 or len(self.flights) >= len(EXTRA_IDS)):
                return
            extras.popleft()
            blob = extra.blob
            if extra.expiry_us:
                left_s = self._left_s(extra.expiry_us)
                if left_s <= 0:
                    self.counts.expired += 1
                    self.tally.dropped += 1
                    if extra.settle is not None:
                        extra.settle(Outcome.ACCEPTED)
                    continue
                blob = with_message_expiry(blob, left_s)
            payload = extra.payload if extra.load is None else extra.load()
            if payload is None:
                continue
            packet_id = self._extra_id() if extra.qos else 0
            flight = Flight(-1, extra.qos, extra.retain, extra.topic, blob, payload, False, extra.settle)
            if extra.share:
                flight = flight._replace(share=extra.share, seq=extra.seq, lane=extra.lane)
            if extra.share and extra.qos == 2 and self.outlives:
                # [MQTT-4.8.2-5] Nobody else may get it from here on, whatever happens: that must be known first.
                self.flights[packet_id] = flight
                self._to_deliver.append(packet_id)
            elif not self._send_one(link, flight, packet_id):
                if extra.settle is not None:
                    extra.settle(Outcome.ACCEPTED)
            elif packet_id:
                self.flights[packet_id] = flight
                self._note_progress()
            elif extra.settle is not None:
                extra.settle(Outcome.ACCEPTED)
        if self._to_deliver:
            self.changed(True)

    def _extra_id(self) -> int:
        while True:
            packet_id = EXTRA_IDS[self._next_extra % len(EXTRA_IDS)]
            self._next_extra += 1
            if packet_id not in self.flights:
                return packet_id

    def _resend(self, link: Link) -> None:
        """[MQTT-4.4.0-1] In the order in which they were sent first [MQTT-4.6.0-1]."""
        waiting = self._to_resend
        while waiting and not link.is_full and link.window > len(self.flights) - len(waiting):
            packet_id = waiting.popleft()
            flight = self.flights.get(packet_id)
            if flight is None:
                continue
            if flight.released:
                link.send(encode_ack_run(PacketType.PUBREL, (packet_id,)))
            elif not self._send_one(link, flight, packet_id, dup=True):
                self._finish(packet_id, flight, Outcome.ACCEPTED)

    def _left_s(self, expiry_us: int) -> int:
        """[MQTT-3.3.2-6] Whole seconds that are left, at least one while there is anything left."""
        left_us = expiry_us - self._now_us()
        return 0 if left_us <= 0 else max(1, (left_us + 500_000) // 1_000_000)

    # -- acknowledgements ---------------------------------------------------------------------------------------

    def acknowledge(self, packet_ids: Sequence[int], outcome: Outcome = Outcome.ACCEPTED) -> None:
        """PUBACK; with a failure code it is settled all the same [MQTT-4.4.0-2]."""
        for packet_id in packet_ids[self.flights.take_first(packet_ids) :]:
            flight = self.flights.get(packet_id)
            if flight is not None and flight.qos == 1:
                self._finish(packet_id, flight, outcome)
        self._note_progress()
        self.pump()

    def receive(self, packet_ids: Sequence[int]) -> Sequence[int]:
        """PUBREC: the client has them. Returns those that nobody knows of [MQTT-4.3.3]."""
        unknown = []
        for packet_id in packet_ids:
            flight = self.flights.get(packet_id)
            if flight is None or flight.qos != 2:
                unknown.append(packet_id)
                continue
            if not flight.released:
                self.flights[packet_id] = flight._replace(released=True, topic=b"", blob=b"", payload=b"")
            self._to_release.append(packet_id)
        if not self.outlives:
            self.to_release()()
        elif self._to_release:
            self.changed(True)
        return unknown

    def to_release(self) -> Callable[[], None]:
        """What may go out once the state as it is now is safe: to be called then. What comes meanwhile is not in that
        state, and waits for the next."""
        released, self._to_release = self._to_release, []
        delivered, self._to_deliver = self._to_deliver, []
        return partial(self._release, self.link, released, delivered)

    def _release(self, link: Link | None, released: Sequence[int], delivered: Sequence[int]) -> None:
        """Tell the client what may be forgotten (M2), and give it what nobody else may get. A client that has come back
        since is sent all of it anyway."""
        if link is None or link is not self.link:
            return
        if released:
            link.send(encode_ack_run(PacketType.PUBREL, released))
        for packet_id in delivered:
            flight = self.flights.get(packet_id)
            if flight is not None and not self._send_one(link, flight, packet_id):
                self._finish(packet_id, flight, Outcome.ACCEPTED)

    def refuse(self, packet_id: int) -> None:
        """PUBREC with a failure code: the client will never have it."""
        flight = self.flights.get(packet_id)
        if flight is not None and flight.qos == 2 and not flight.released:
            self._finish(packet_id, flight, Outcome.REFUSED)
            self._note_progress()
            self.pump()

    def complete(self, packet_ids: Sequence[int]) -> None:
        """PUBCOMP."""
        for packet_id in packet_ids:
            flight = self.flights.get(packet_id)
            if flight is not None and flight.released:
                self._finish(packet_id, flight, Outcome.ACCEPTED)
        self._note_progress()
        self.pump()

    def _finish(self, packet_id: int, flight: Flight, outcome: Outcome) -> None:
        del self.flights[packet_id]
        if outcome is Outcome.ACCEPTED and flight.share and flight.qos == 2 and self.outlives:
            self.handed[flight.share, flight.lane, flight.seq] = None
        if flight.settle is not None:
            flight.settle(outcome)

    def _note_progress(self) -> None:
        if self.outlives:
            self.changed(False)

    def end(self) -> None:
        """The session is over. [MQTT-4.8.2-5] What its client may have received is given to nobody else."""
        flights, self.flights = self.flights, Flights()
        for flight in flights.values():
            if flight.share and flight.qos == 2:
                self.handed[flight.share, flight.lane, flight.seq] = None
            if flight.settle is not None:
                flight.settle(Outcome.RETURNED if flight.qos == 1 else Outcome.ACCEPTED)


def _ids_from(number: int, count: int) -> Sequence[int]:
    """The identifiers of the records with these numbers."""
    start = number % LOG_IDS
    if start + count <= LOG_IDS:
        return range(1 + start, 1 + start + count)
    return [1 + (number + place) % LOG_IDS for place in range(count)]
