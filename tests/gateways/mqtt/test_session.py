"""The session of one client, as a machine: what goes round and what is left out among its packet identifiers."""

from collections.abc import Callable

import pytest

from headrace.gateways.mqtt.cutter import PacketCutter
from headrace.gateways.mqtt.encoder import encode_ack_run
from headrace.gateways.mqtt.packets import Publish
from headrace.gateways.mqtt.reasons import PacketType, Version
from headrace.gateways.mqtt.session import LOG_IDS, Piece, Session


class Link:
    """A connection whose client has got everything that was sent."""

    version = Version.V5
    packet_bytes_max = 0
    alias_max = 0
    is_full = False

    def __init__(self, window: int) -> None:
        self.window = window
        self._cutter = PacketCutter(from_client=False, version=Version.V5)
        self.came: list[Publish] = []

    def send(self, data: bytes) -> None:
        self.came += [one for one in self._cutter.receive(data) if isinstance(one, Publish)]

    def take(self) -> list[Publish]:
        found, self.came = self.came, []
        return found


class Story:
    def __init__(self, window: int = 1000, *, lasting: bool = False) -> None:
        self.session = Session("reader", now_us=lambda: 0)
        self.session.expiry_s = 60 if lasting else 0
        self.session.live = True
        self.unwritten: list[Callable[[], None]] = []
        self.session.write = self.unwritten.append
        self.link = Link(window)
        self.session.attach(self.link, 0)
        self._offset = 0

    def offer(self, number: int) -> None:
        self.session.offer(Piece(self._offset, 1, False, [b"t"] * number, [b""] * number, [b"x"] * number))
        self._offset += number

    def deliver(self, number: int) -> list[int]:
        """Delivered and acknowledged, as many at a time as the window has room for."""
        ids: list[int] = []
        while len(ids) < number:
            self.offer(min(self.session.room, number - len(ids)))
            found = [one.packet_id for one in self.link.take()]
            self.session.acknowledge(found)
            # What was held up by an identifier in use came now.
            more = [one.packet_id for one in self.link.take()]
            self.session.acknowledge(more)
            ids += found + more
        return ids


def test_identifiers_go_round() -> None:
    story = Story()
    assert story.deliver(LOG_IDS + 2) == [*range(1, LOG_IDS + 1), 1, 2]


def test_message_that_is_never_acknowledged_keeps_its_identifier_and_the_others_go_round_it() -> None:
    story = Story()
    story.offer(2)
    assert [one.packet_id for one in story.link.take()] == [1, 2]
    assert story.deliver(LOG_IDS) == [*range(3, LOG_IDS + 1), 3, 4]
    assert sorted(story.session.flights) == [1, 2]


@pytest.mark.parametrize("lasting", [False, True])
def test_messages_that_are_never_acknowledged_cost_their_place_in_the_window_and_no_more(lasting: bool) -> None:
    story = Story(lasting=lasting)
    story.offer(2)
    story.link.take()
    for number in (LOG_IDS - 2, LOG_IDS - 3, LOG_IDS - 3):
        story.deliver(number)
        if lasting:
            story.offer(1)
            assert story.link.take() == [], "the numbers are about to change, which is written down first"
            story.unwritten.pop()()
            (message,) = story.link.take()
            story.session.acknowledge([message.packet_id])
    story.offer(1_500)
    assert len(story.link.take()) == 998
    assert len(story.session.flights) == 1_000


def test_record_that_may_have_been_sent_before_a_crash_is_marked_and_those_behind_it_are_not() -> None:
    story = Story()
    story.session.sent_below = 3
    story.session.offer(Piece(0, 1, False, [b"t"] * 5, [b""] * 5, [b"x"] * 5))
    assert [one.dup for one in story.link.take()] == [True, True, True, False, False]


def test_message_with_qos_0_is_never_marked() -> None:
    story = Story()
    story.session.sent_below = 3
    story.session.offer(Piece(0, 0, False, [b"t"] * 2, [b""] * 2, [b"x"] * 2))
    assert [one.dup for one in story.link.take()] == [False, False]


# -- what waits for the state to be safe -----------------------------------------------------------------------------


class Wire:
    """A connection that takes everything."""

    version = Version.V3_1_1
    packet_bytes_max = 0
    alias_max = 0
    window = 100
    is_full = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def send(self, data: bytes) -> None:
        self.sent.append(data)


def with_messages(count: int) -> tuple[Session, Wire, list[Callable[[], None]]]:
    """A lasting session that has sent so many messages with QoS 2; and what waits for each state to be safe."""
    session, wire = Session("c", now_us=lambda: 0), Wire()
    written: list[Callable[[], None]] = []
    session.expiry_s = None
    session.live = True
    session.changed = lambda at_once: written.append(session.to_release()) if at_once else None
    session.attach(wire, 0)
    session.offer(Piece(0, 2, False, [b"t"] * count, [b""] * count, [b"x"] * count))
    wire.sent.clear()
    return session, wire, written


def pubrel(*packet_ids: int) -> bytes:
    return encode_ack_run(PacketType.PUBREL, packet_ids)


def test_pubrel_tells_only_of_what_is_in_the_state_that_is_safe() -> None:
    session, wire, written = with_messages(3)
    session.receive([1])
    session.receive([2, 3])
    assert wire.sent == []
    written[0]()
    assert wire.sent == [pubrel(1)]
    written[1]()
    assert wire.sent == [pubrel(1), pubrel(2, 3)]


def test_a_client_that_came_back_is_sent_pubrel_once_by_its_new_connection() -> None:
    session, wire, written = with_messages(1)
    session.receive([1])
    session.detach(1)
    again = Wire()
    session.attach(again, 1)
    session.pump()
    written[0]()
    assert (wire.sent, again.sent) == ([], [pubrel(1)])


def test_nothing_is_sent_again_before_it_is_known_that_nobody_else_has_gone_on_with_the_session() -> None:
    story = Story(lasting=True)
    session = story.session
    session.committed = lambda: 100
    story.offer(3)
    assert [one.packet_id for one in story.link.take()] == [1, 2, 3]
    session.detach(3)
    again = Link(1000)
    session.attach(again, 3)
    session.hold()
    session.pump()
    assert not again.take()
    (safe,) = story.unwritten
    safe()
    assert [(one.packet_id, one.dup) for one in again.take()] == [(1, True), (2, True), (3, True)]
