"""What of MQTT survives a stop and a kill -9 of the broker, and that it survives exactly. Over the wire.

Most stories share one life: each does its part before the broker ends, in good order or killed, and looks at what is
left when the broker is back. What is promised was acknowledged before.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from threading import Thread

import pytest

from headrace.gateways.mqtt.packets import (
    Disconnect,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
    Subscription,
    Will,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Wire

LASTING = {"clean_start": False, "session_expiry_interval": 3000}

_stories: list[Callable[[MqttBroker], Iterator[None]]] = []


def story(tell: Callable[[MqttBroker], Iterator[None]]) -> Callable[[MqttBroker, str], None]:
    """A generator: up to its yield before the broker ends, the rest after."""
    _stories.append(tell)

    def test(again: dict[str, BaseException | None], end: str) -> None:
        error = again[tell.__name__]
        if error is not None:
            raise error

    return test


@pytest.fixture(scope="module", params=["stopped", "killed"])
def end(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def again(end: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BaseException | None]:
    """What each story found wrong."""
    found: dict[str, BaseException | None] = {}
    with MqttBroker(tmp_path_factory.mktemp(end)) as broker:
        told = {one.__name__: one(broker) for one in _stories}
        _told(found, told)
        if end == "stopped":
            broker.stop()
        else:
            broker.kill()
        broker.start()
        _told(found, told)
        broker.stop()
    return found


def _told(found: dict[str, BaseException | None], told: dict[str, Iterator[None]]) -> None:
    for name, one in told.items():
        if found.get(name) is None:
            try:
                next(one, None)
                found[name] = None
            except Exception as error:
                found[name] = error


def opened(broker: MqttBroker, client_id: str = "", version: Version = Version.V5, **settings: object) -> Wire:
    one = broker.wire(version)
    assert one.connect(client_id, **settings).reason == 0  # type: ignore[arg-type]
    return one


def resumed(broker: MqttBroker, client_id: str, **settings: object) -> Wire:
    one = broker.wire()
    assert one.connect(client_id, **(LASTING | settings)).session_present  # type: ignore[arg-type]
    return one


def publish_some(broker: MqttBroker, topic: str, payloads: list[bytes], qos: int = 1) -> None:
    with opened(broker) as writer:
        for payload in payloads:
            writer.publish(topic, payload, qos)


# -- sessions -------------------------------------------------------------------------------------------------------


@story
def test_subscriptions_and_what_waits_survive(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "waits", **LASTING) as one:
        one.subscribe(Subscription("waits/1", QoS(1)), Subscription("waits/2", QoS(2), retain_as_published=True))
        one.disconnect()
    publish_some(broker, "waits/1", [b"1"], 1)
    publish_some(broker, "waits/2", [b"2"], 2)
    yield
    with resumed(broker, "waits") as one:
        assert [(message.payload, message.qos) for message in one.take(2)] == [(b"1", 1), (b"2", 2)]
        publish_some(broker, "waits/1", [b"live"], 1)
        assert one.payloads(1) == [b"live"]


@story
def test_session_of_3_1_1_survives(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "old", Version.V3_1_1, clean_start=False) as one:
        one.subscribe("old", qos=1)
        one.disconnect()
    publish_some(broker, "old", [b"x"])
    yield
    with broker.wire(Version.V3_1_1) as one:
        assert one.connect("old", clean_start=False).session_present
        assert one.payloads(1) == [b"x"]


@story
def test_session_that_ended_with_its_connection_does_not_come_back(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "clean") as one:
        one.subscribe("clean", qos=1)
    yield
    with broker.wire() as one:
        assert not one.connect("clean", **LASTING).session_present  # type: ignore[arg-type]


@story
def test_unacknowledged_deliveries_come_again_with_their_identifiers(broker: MqttBroker) -> Iterator[None]:
    one = opened(broker, "flights", **LASTING)
    one.subscribe("flights", qos=2, subscription_identifiers=(7,))
    publish_some(broker, "flights", [b"0", b"1", b"2"], 1)
    publish_some(broker, "flights", [b"3", b"4"], 2)
    sent = [one.expect(Publish) for _ in range(5)]
    yield
    one.close()
    with resumed(broker, "flights") as again:
        found = [again.expect(Publish) for _ in range(5)]
        assert [message.packet_id for message in found] == [message.packet_id for message in sent]
        assert [message.payload for message in found] == [message.payload for message in sent]
        assert {message.properties.subscription_identifiers for message in found} == {(7,)}
        for message in found:
            again.acknowledge(message)
        again.expect_nothing()


@story
def test_qos_2_delivery_that_was_received_is_never_sent_again(broker: MqttBroker) -> Iterator[None]:
    one = opened(broker, "received", **LASTING)
    one.subscribe("received", qos=2)
    publish_some(broker, "received", [b"once"], 2)
    message = one.expect(Publish)
    one.send(Pubrec(message.packet_id))
    one.expect(Pubrel)
    yield
    one.close()
    with resumed(broker, "received") as again:
        assert again.expect(Pubrel).packet_id == message.packet_id
        again.send(Pubcomp(message.packet_id))
        again.expect_nothing()


@story
def test_qos_2_publish_that_was_received_is_not_published_twice(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "once-reader", **LASTING) as reader:
        reader.subscribe("once", qos=2)
        reader.disconnect()
    one = opened(broker, "once-writer", **LASTING)
    one.send(Publish("once", b"once", QoS(2), packet_id=7))
    one.expect(Pubrec)
    yield
    one.close()
    with resumed(broker, "once-writer") as again, resumed(broker, "once-reader") as reader:
        again.send(Publish("once", b"once", QoS(2), dup=True, packet_id=7))
        assert again.expect(Pubrec).packet_id == 7
        again.send(Pubrel(7))
        again.expect(Pubcomp)
        again.publish("once", b"end", 2)
        assert reader.payloads(2) == [b"once", b"end"]


@story
def test_expired_session_stays_gone_and_the_clock_goes_on(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "short", clean_start=False, session_expiry_interval=1) as one:
        one.subscribe("short", qos=1)
        one.disconnect()
    yield
    # A will that waits a second tells that it is over.
    with opened(broker) as reader:
        reader.subscribe("short-clock")
        will = Will("short-clock", b"tick", properties=Properties(will_delay_interval=1))
        opened(broker, "short-clock", session_expiry_interval=300, will=will).cut()
        assert reader.payloads(1) == [b"tick"]
    with broker.wire() as one:
        assert not one.connect("short", **LASTING).session_present  # type: ignore[arg-type]


# -- retained messages and wills ------------------------------------------------------------------------------------


@story
def test_retained_messages_survive(broker: MqttBroker) -> Iterator[None]:
    with opened(broker) as writer:
        for qos in (1, 2):
            writer.publish(f"kept/{qos}", b"first", qos, retain=True)
            writer.publish(f"kept/{qos}", b"last", qos, retain=True, content_type="text/plain")
        writer.publish("kept/gone", b"first", 1, retain=True)
        writer.publish("kept/gone", b"", 1, retain=True)
        writer.publish("kept/short", b"x", 1, retain=True, message_expiry_interval=1)
        writer.publish("kept/long", b"x", 1, retain=True, message_expiry_interval=10_000)
    yield
    with opened(broker) as reader:
        reader.subscribe("kept/1", "kept/2", "kept/gone", "kept/long", qos=2)
        found = {one.topic: one for one in reader.seen_all() if isinstance(one, Publish)}
        for qos in (1, 2):
            one = found[f"kept/{qos}"]
            assert (one.payload, one.qos, one.properties.content_type) == (b"last", qos, "text/plain")
            assert one.retain
        assert "kept/gone" not in found
        left = found["kept/long"].properties.message_expiry_interval
        assert left is not None and left <= 10_000


@story
def test_will_that_waits_for_its_delay_is_published(broker: MqttBroker) -> Iterator[None]:
    with opened(broker, "heirs", **LASTING) as reader:
        reader.subscribe("heritage", qos=1)
        reader.disconnect()
    will = Will("heritage", b"gone", QoS(1), properties=Properties(will_delay_interval=1))
    one = opened(broker, "testator", session_expiry_interval=300, will=will)
    # A subscription waits until the session is written down, and its will with it.
    one.subscribe("testator", qos=1)
    one.cut()
    yield
    with resumed(broker, "heirs") as reader:
        assert reader.payloads(1) == [b"gone"]
        reader.expect_nothing()


# -- shared subscriptions -------------------------------------------------------------------------------------------


@story
def test_group_of_lasting_members_goes_on(broker: MqttBroker) -> Iterator[None]:
    for name in ("group-1", "group-2"):
        with opened(broker, name, **LASTING) as member:
            member.subscribe("$share/g/group/#", qos=1)
            member.disconnect()
    sent = [b"%d" % number for number in range(10)]
    publish_some(broker, "group/a", sent)
    yield
    with resumed(broker, "group-1") as one:
        assert sorted(one.payloads(10)) == sorted(sent)
        # The other is in the group though it sleeps: the group goes on when the first leaves.
        one.unsubscribe("$share/g/group/#")
        publish_some(broker, "group/a", [b"more"])
        with resumed(broker, "group-2") as two:
            assert two.payloads(1) == [b"more"]
        one.expect_nothing()


def _held_by_a_member(broker: MqttBroker, name: str, *, received: bool) -> Iterator[None]:
    one = opened(broker, name, **LASTING)
    one.subscribe(f"$share/g/{name}", qos=2)
    publish_some(broker, name, [b"mine"], 2)
    held = one.expect(Publish)
    if received:
        one.send(Pubrec(held.packet_id))
        one.expect(Pubrel)
    yield
    one.close()
    with opened(broker) as other:
        other.subscribe(f"$share/g/{name}", qos=2)
        other.expect_nothing()
        with resumed(broker, name) as one:
            if received:
                assert one.expect(Pubrel).packet_id == held.packet_id
                one.send(Pubcomp(held.packet_id))
            else:
                found = one.expect(Publish)
                assert (found.packet_id, found.payload, found.dup) == (held.packet_id, b"mine", True)
                one.acknowledge(found)
            one.expect_nothing()
            other.expect_nothing()
            publish_some(broker, name, [b"%d" % number for number in range(4)], 2)
            assert sorted(one.payloads(2) + other.payloads(2)) == [b"0", b"1", b"2", b"3"]


@story
def test_shared_qos_2_message_on_its_way_stays_with_its_member(broker: MqttBroker) -> Iterator[None]:
    return _held_by_a_member(broker, "held", received=False)


@story
def test_shared_qos_2_message_that_was_received_is_given_to_nobody(broker: MqttBroker) -> Iterator[None]:
    return _held_by_a_member(broker, "had", received=True)


# -- the end of the broker ------------------------------------------------------------------------------------------


def test_broker_that_stops_says_so_and_publishes_the_wills(own_broker: MqttBroker) -> None:
    with opened(own_broker, "reader", **LASTING) as reader:
        reader.subscribe("will/#", qos=1)
        reader.disconnect()
    five = opened(own_broker, "five", will=Will("will/5", b"gone", QoS(1)))
    three = opened(own_broker, "three", Version.V3_1_1, will=Will("will/3", b"gone", QoS(1)))
    own_broker.stop()
    assert five.expect(Disconnect).reason is ReasonCode.SERVER_SHUTTING_DOWN
    five.expect_end()
    three.expect_end()
    own_broker.start()
    with resumed(own_broker, "reader") as reader:
        assert sorted(message.topic for message in reader.take(2)) == ["will/3", "will/5"]
        reader.expect_nothing()
    for one in (five, three):
        one.close()


class _Publisher(Thread):
    """Publishes 0, 1, 2, ... as a good client does: what was not acknowledged is sent again after a reconnect."""

    def __init__(self, broker: MqttBroker, qos: int, total: int) -> None:
        super().__init__(daemon=True)
        self.broker = broker
        self.qos = qos
        self.total = total
        self.acknowledged = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._publish()
        except BaseException as error:
            self.error = error

    def _publish(self) -> None:
        # Packet identifier -> message; True: the broker has it, and is told to release it.
        waiting: dict[int, tuple[bytes, bool]] = {}
        numbers = iter(range(self.total))
        ids = count()
        first = True
        while self.acknowledged < self.total:
            try:
                with self.broker.wire() as one:
                    present = one.connect(f"load-{self.qos}", **LASTING).session_present  # type: ignore[arg-type]
                    assert present is not first
                    first = False
                    for packet_id, (payload, received) in waiting.items():
                        if received:
                            one.send(Pubrel(packet_id))
                        else:
                            one.send(Publish(f"load/{self.qos}", payload, QoS(self.qos), dup=True, packet_id=packet_id))
                    while self.acknowledged < self.total:
                        while len(waiting) < 50 and (number := next(numbers, None)) is not None:
                            packet_id = 1 + next(ids) % 60_000
                            waiting[packet_id] = (b"%d" % number, False)
                            payload = waiting[packet_id][0]
                            one.send(Publish(f"load/{self.qos}", payload, QoS(self.qos), packet_id=packet_id))
                        match one.receive():
                            case Puback(packet_id) | Pubcomp(packet_id):
                                if waiting.pop(packet_id, None) is not None:
                                    self.acknowledged += 1
                            case Pubrec(packet_id):
                                waiting[packet_id] = (waiting[packet_id][0], True)
                                one.send(Pubrel(packet_id))
                            case None:
                                break
            except (OSError, AssertionError):
                if first:
                    raise
                time.sleep(0.05)  # between one try and the next, as clients do


@pytest.mark.parametrize("qos", [1, 2])
def test_kill_under_load_loses_nothing_and_qos_2_doubles_nothing(own_broker: MqttBroker, qos: int) -> None:
    """Kills come in the middle of the work, which goes on until everything is acknowledged."""
    total = 3_000
    with opened(own_broker, "reader", **LASTING) as reader:
        reader.subscribe("load/#", qos=2)
        reader.disconnect()
    publisher = _Publisher(own_broker, qos, total)
    publisher.start()
    for part in (1, 2):
        while publisher.acknowledged < part * total // 3 and publisher.error is None:
            publisher.join(0.01)
        own_broker.kill()
        own_broker.start()
    publisher.join(60)
    assert publisher.error is None and publisher.acknowledged == total
    with resumed(own_broker, "reader") as reader:
        found: list[int] = []
        seen: set[int] = set()
        while len(seen) < total:
            number = int(reader.take()[0].payload)
            found.append(number)
            seen.add(number)
        rest = [packet for packet in reader.seen_all() if isinstance(packet, Publish)]
    assert seen == set(range(total))
    if qos == 2:
        assert not rest and found == list(range(total))


def test_what_is_delivered_again_after_a_kill_is_marked_and_what_was_never_sent_is_not(own_broker: MqttBroker) -> None:
    with opened(own_broker, "awake", **LASTING) as awake, opened(own_broker, "asleep", **LASTING) as asleep:
        awake.subscribe("t", qos=1)
        asleep.subscribe("t", qos=1)
    # Now it is known that both sleep.
    own_broker.restart()
    with resumed(own_broker, "awake") as awake:
        publish_some(own_broker, "t", [b"%d" % number for number in range(20)])
        sent = awake.take(20)
        assert not any(message.dup for message in sent)
        own_broker.restart(kill=True)
    publish_some(own_broker, "t", [b"new"])
    with resumed(own_broker, "awake") as awake, resumed(own_broker, "asleep") as asleep:
        again = []
        while (message := awake.take(1)[0]).payload != b"new":
            again.append(message)
        assert again == [replace(message, dup=True) for message in sent[20 - len(again) :]]
        assert not message.dup
        assert not any(message.dup for message in asleep.take(21))


def test_clean_start_ends_a_session_for_good_whatever_comes(own_broker: MqttBroker) -> None:
    with opened(own_broker, "one", **LASTING) as one:
        one.subscribe("t", qos=1)
        one.disconnect()
    with opened(own_broker, "one", clean_start=True):
        own_broker.restart(kill=True)
    with own_broker.wire() as one:
        assert not one.connect("one", **LASTING).session_present  # type: ignore[arg-type]


def test_identifier_that_was_released_is_free_after_a_kill(own_broker: MqttBroker) -> None:
    """Many clients take the lowest that is free: a new message with it is no repetition of the old one."""
    with opened(own_broker, "reader", **LASTING) as reader:
        reader.subscribe("t", qos=2)
        reader.disconnect()
    with opened(own_broker, "writer", **LASTING) as writer:
        writer.send(Publish("t", b"first", QoS(2), packet_id=1))
        writer.expect(Pubrec)
        writer.send(Pubrel(1))
        writer.expect(Pubcomp)
        own_broker.kill()
    own_broker.start()
    with resumed(own_broker, "writer") as writer:
        writer.send(Publish("t", b"second", QoS(2), packet_id=1))
        writer.expect(Pubrec)
        writer.send(Pubrel(1))
        writer.expect(Pubcomp)
    with resumed(own_broker, "reader") as reader:
        assert reader.payloads(2) == [b"first", b"second"]


def test_qos_2_reader_gets_each_message_once_through_kills(own_broker: MqttBroker) -> None:
    """The reader stores what it received before it says PUBREC, as the standard asks, and forgets it at PUBREL."""
    total = 300
    with opened(own_broker, "reader", **LASTING) as reader:
        reader.subscribe("t", qos=2)
        reader.disconnect()
    publish_some(own_broker, "t", [b"%d" % number for number in range(total)], 2)
    found: list[int] = []
    stored: set[int] = set()
    for stop_at in (100, 200, total):
        with resumed(own_broker, "reader", receive_maximum=20) as reader:
            while len(found) < stop_at or (stop_at == total and stored):
                match reader.receive():
                    case Publish(payload=payload, packet_id=packet_id):
                        if packet_id not in stored:
                            stored.add(packet_id)
                            found.append(int(payload))
                        reader.send(Pubrec(packet_id))
                    case Pubrel(packet_id):
                        stored.discard(packet_id)
                        reader.send(Pubcomp(packet_id))
            if stop_at < total:
                own_broker.kill()
        if stop_at < total:
            own_broker.start()
    assert found == list(range(total))
