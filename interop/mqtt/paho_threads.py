"""paho-mqtt with its network thread and callbacks of version 2, for 3.1.1 and 5 and over WebSocket. Driver: sockets."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from queue import Queue
from typing import Any

from paho.mqtt.client import Client, MQTTMessage, MQTTv5, MQTTv311
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from interop.broker import Broker
from interop.client import Driven, Feature, python_version

WAIT_SECONDS = 20
LASTING_SECONDS = 600
# Longer than one and a half times a keep alive of a second.
QUIET_SECONDS = 2.5
RECONNECT_SECONDS = 0.1


def properties(kind: int, **values: Any) -> Properties:
    made = Properties(kind)
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Peer:
    """One client; what its callbacks are told waits in queues."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.messages: Queue[MQTTMessage] = Queue()
        # (session present, reason, properties) of each CONNACK.
        self.connacks: Queue[tuple[bool, ReasonCode, Properties]] = Queue()
        self.ends: Queue[ReasonCode] = Queue()
        self._answers: Queue[tuple[int, list[ReasonCode]]] = Queue()
        client.on_message = lambda client, data, message: self.messages.put(message)
        client.on_connect = lambda client, data, flags, reason, told: self.connacks.put(
            (flags.session_present, reason, told)
        )
        client.on_disconnect = lambda client, data, flags, reason, told: self.ends.put(reason)
        client.on_subscribe = lambda client, data, mid, reasons, told: self._answers.put((mid, reasons))
        client.on_unsubscribe = lambda client, data, mid, reasons, told: self._answers.put((mid, reasons))

    def subscribe(self, *arguments: Any, **settings: Any) -> list[int]:
        """The reasons of SUBACK, once it is there."""
        return self._answer(self.client.subscribe(*arguments, **settings))

    def unsubscribe(self, topic: str) -> list[int]:
        return self._answer(self.client.unsubscribe(topic))

    def _answer(self, asked: tuple[Any, int | None]) -> list[int]:
        mid, reasons = self._answers.get(timeout=WAIT_SECONDS)
        assert mid == asked[1]
        return [reason.value for reason in reasons]

    def publish(self, topic: str, payload: str | bytes, qos: int = 1, **settings: Any) -> None:
        """Returns once it is acknowledged; with QoS 0, once it is sent."""
        info = self.client.publish(topic, payload, qos, **settings)
        info.wait_for_publish(WAIT_SECONDS)
        assert info.is_published()

    def take(self, count: int) -> list[MQTTMessage]:
        return [self.messages.get(timeout=WAIT_SECONDS) for _ in range(count)]

    def texts(self, count: int) -> list[str]:
        return [message.payload.decode() for message in self.take(count)]

    def break_off(self) -> None:
        """Ends the connection without a DISCONNECT, as a device without power does."""
        self.client.loop_stop()
        self.client.socket().close()


@dataclass(frozen=True, slots=True)
class Paho:
    broker: Broker
    # The first level of all topics and the beginning of all names of one run.
    root: str
    protocol: Any
    transport: Any = "tcp"

    @contextmanager
    def connected(
        self, name: str = "", *, lasting: bool = False, keep_alive: int = 60, **settings: Any
    ) -> Iterator[Peer]:
        peer = self.peer(name, lasting=lasting)
        if "will" in settings:
            peer.client.will_set(f"{self.root}/{settings.pop('will')}", "gone", qos=1)
        try:
            self.connect(peer, lasting=lasting, keep_alive=keep_alive, **settings)
            yield peer
        finally:
            peer.client.disconnect()
            peer.client.loop_stop()

    def peer(self, name: str = "", *, lasting: bool = False) -> Peer:
        options = {} if self.protocol == MQTTv5 else {"clean_session": not lasting}
        client = Client(
            CallbackAPIVersion.VERSION2,
            client_id=f"{self.root}-{name}" if name else "",
            protocol=self.protocol,
            transport=self.transport,
            **options,
        )
        if self.transport == "websockets":
            client.ws_set_options(path="/mqtt")
        client.reconnect_delay_set(RECONNECT_SECONDS, 2 * RECONNECT_SECONDS)  # type: ignore[arg-type]
        return Peer(client)

    def connect(self, peer: Peer, *, lasting: bool = False, keep_alive: int = 60, **asked: Any) -> None:
        options: dict[str, Any] = {}
        if self.protocol == MQTTv5:
            expiry = {"SessionExpiryInterval": LASTING_SECONDS} if lasting else {}
            options = {
                "clean_start": not lasting,
                "properties": properties(PacketTypes.CONNECT, **expiry, **asked),
            }
        port = self.broker.ports["ws" if self.transport == "websockets" else "mqtt"]
        peer.client.connect("127.0.0.1", port, keep_alive, **options)
        peer.client.loop_start()

    def topic(self, rest: str) -> str:
        return f"{self.root}/{rest}"

    @property
    def is_v5(self) -> bool:
        return bool(self.protocol == MQTTv5)


def _qos(stage: Paho, qos: int) -> None:
    """Both ways with the same QoS, in order; a subscription with less gets less."""
    numbers = [str(number) for number in range(100)]
    topic = stage.topic(f"qos/{qos}")
    with stage.connected() as reader, stage.connected() as lesser, stage.connected() as writer:
        assert reader.subscribe(topic, qos) == [qos]
        assert lesser.subscribe(topic, 0) == [0]
        sent = [writer.client.publish(topic, number, qos) for number in numbers]
        for info in sent:
            info.wait_for_publish(WAIT_SECONDS)
        for one, granted in ((reader, qos), (lesser, 0)):
            came = one.take(len(numbers))
            assert [message.payload.decode() for message in came] == numbers
            assert {(message.topic, message.qos, message.retain) for message in came} == {(topic, granted, False)}


def qos_0(stage: Paho) -> None:
    _qos(stage, 0)


def qos_1(stage: Paho) -> None:
    _qos(stage, 1)


def qos_2(stage: Paho) -> None:
    _qos(stage, 2)


def wildcards(stage: Paho) -> None:
    with stage.connected() as reader, stage.connected() as writer:
        assert reader.subscribe([(stage.topic("w/+/temp"), 1), (stage.topic("w/all/#"), 2)]) == [1, 2]
        for rest in ("w/kitchen/temp", "w/kitchen/light", "w/all", "w/all/a/b", "w//temp", "w/a/b/temp"):
            writer.publish(stage.topic(rest), rest)
        assert reader.texts(4) == ["w/kitchen/temp", "w/all", "w/all/a/b", "w//temp"]
        reader.unsubscribe(stage.topic("w/+/temp"))
        writer.publish(stage.topic("w/kitchen/temp"), "unwanted")
        writer.publish(stage.topic("w/all"), "end")
        assert reader.texts(1) == ["end"]


def retained(stage: Paho) -> None:
    with stage.connected() as writer:
        for room in ("kitchen", "hall"):
            writer.publish(stage.topic(f"kept/{room}"), room, retain=True)
        with stage.connected() as reader:
            reader.subscribe(stage.topic("kept/#"), 1)
            came = reader.take(2)
            assert sorted(message.payload.decode() for message in came) == ["hall", "kitchen"]
            assert all(message.retain for message in came)
            # One that is new to all does not say so to those who were there.
            writer.publish(stage.topic("kept/attic"), "attic", retain=True)
            (fresh,) = reader.take(1)
            assert not fresh.retain
        writer.publish(stage.topic("kept/hall"), "", retain=True)
        with stage.connected() as reader:
            reader.subscribe(stage.topic("kept/#"), 1)
            assert sorted(reader.texts(2)) == ["attic", "kitchen"]
            if stage.is_v5:
                _retained_v5(stage, reader, writer)
            for room in ("kitchen", "attic"):
                writer.publish(stage.topic(f"kept/{room}"), "", retain=True)


def _retained_v5(stage: Paho, reader: Peer, writer: Peer) -> None:
    """Subscribing again without wanting what is kept, and with the flag as it was published."""
    options = SubscribeOptions(qos=1, retainAsPublished=True, retainHandling=SubscribeOptions.RETAIN_SEND_IF_NEW_SUB)
    reader.subscribe(stage.topic("kept/#"), options=options)
    writer.publish(stage.topic("kept/attic"), "again", retain=True)
    (message,) = reader.take(1)
    assert (message.payload, message.retain) == (b"again", True)


def will(stage: Paho) -> None:
    """Not after a DISCONNECT; after a connection that breaks off."""
    with stage.connected() as reader:
        reader.subscribe(stage.topic("will/#"), 1)
        with stage.connected(will="will/polite") as polite:
            connack(polite)
        with stage.connected(will="will/dead") as dead:
            connack(dead)
            dead.break_off()
            (message,) = reader.take(1)
        assert (message.topic, message.payload) == (stage.topic("will/dead"), b"gone")


def connack(peer: Peer) -> bool:
    """Whether the broker had a session."""
    present, reason, _ = peer.connacks.get(timeout=WAIT_SECONDS)
    assert reason.value == 0, reason
    return present


def session(stage: Paho) -> None:
    """What was published while the client was away, in order, once; also when the broker was killed meanwhile."""
    topic = stage.topic("session")
    with stage.connected("sleeper", lasting=True) as sleeper:
        assert not connack(sleeper)
        assert sleeper.subscribe([(f"{topic}/1", 1), (f"{topic}/2", 2)]) == [1, 2]
    done: set[bytes] = set()
    for life in range(2):
        with stage.connected() as writer:
            for number in range(6):
                writer.publish(f"{topic}/{1 + number % 2}", f"{life} {number}", qos=1 + number % 2)
        if life:
            stage.broker.restart()
        with stage.connected("sleeper", lasting=True) as sleeper:
            assert connack(sleeper)
            came = _new(sleeper, 6, done)
            done |= {message.payload for message in came}
            # paho hands a message with QoS 2 on when it is released, so later than its neighbours with QoS 1.
            for qos in (1, 2):
                sent = [f"{life} {number}" for number in range(6) if 1 + number % 2 == qos]
                assert [message.payload.decode() for message in came if message.qos == qos] == sent
            sleeper.publish(f"{topic}/2", "end", 2)
            assert sleeper.texts(1) == ["end"]
    with stage.connected("sleeper") as sleeper:
        assert not connack(sleeper)


def _new(peer: Peer, count: int, known: set[bytes]) -> list[MQTTMessage]:
    """The next that are not known; those that are may come again, with QoS 1 alone."""
    fresh: list[MQTTMessage] = []
    while len(fresh) < count:
        (message,) = peer.take(1)
        if message.payload not in known:
            fresh.append(message)
        else:
            assert message.qos == 1
    return fresh


def take_over(stage: Paho) -> None:
    """The same name again: the session goes to the newer connection, and the older one is told why."""
    old = stage.peer("twin", lasting=True)
    stage.connect(old, lasting=True)
    try:
        connack(old)
        old.subscribe(stage.topic("twin"), 1)
        with stage.connected("twin", lasting=True) as new:
            assert connack(new)
            reason = old.ends.get(timeout=WAIT_SECONDS)
            # Its thread would connect again, and take over in turn.
            old.client.disconnect()
            if stage.is_v5:
                assert reason.getName() == "Session taken over"
            new.publish(stage.topic("twin"), "to the new one")
            assert new.texts(1) == ["to the new one"]
    finally:
        old.client.loop_stop()


def shared(stage: Paho) -> None:
    """Each message goes to one member, and all members get some."""
    numbers = [str(number) for number in range(40)]
    group = "$share/group/" + stage.topic("shared/#")
    with stage.connected() as one, stage.connected() as two, stage.connected() as writer:
        for member in (one, two):
            assert member.subscribe(group, 1) == [1]
        for number in numbers:
            writer.publish(stage.topic("shared/jobs"), number)
        came: list[str] = []
        until = time.monotonic() + WAIT_SECONDS
        while len(came) < len(numbers) and time.monotonic() < until:
            came += [member.texts(1)[0] for member in (one, two) if not member.messages.empty()]
            time.sleep(0.001)
        assert sorted(came) == sorted(numbers)
        # The last ones are there: whoever has none of the forty never will.
        writer.publish(stage.topic("shared/jobs"), "more")
        writer.publish(stage.topic("shared/jobs"), "more")
        assert [member.texts(1) for member in (one, two)] == [["more"], ["more"]]


def message_properties(stage: Paho) -> None:
    sent = {
        "PayloadFormatIndicator": 1,
        "ContentType": "application/json",
        "ResponseTopic": "answers/here",
        "CorrelationData": b"\x00\xff",
        "UserProperty": [("a", "1"), ("b", "šedá"), ("a", "2")],
    }
    with stage.connected() as reader, stage.connected() as writer:
        asked = properties(PacketTypes.SUBSCRIBE, SubscriptionIdentifier=77)
        reader.subscribe(stage.topic("properties"), 2, properties=asked)
        told = properties(PacketTypes.PUBLISH, MessageExpiryInterval=300, **sent)
        writer.publish(stage.topic("properties"), "{}", 2, properties=told)
        (message,) = reader.take(1)
        assert {name: getattr(message.properties, name) for name in sent} == sent
        assert message.properties.SubscriptionIdentifier == [77]
        assert 0 < message.properties.MessageExpiryInterval <= 300


def topic_alias(stage: Paho) -> None:
    """A topic is said once, and by its number from then on."""
    with stage.connected() as reader, stage.connected() as writer:
        *_, told = writer.connacks.get(timeout=WAIT_SECONDS)
        assert told.TopicAliasMaximum >= 2
        reader.subscribe(stage.topic("alias/#"), 1)
        for number, (topic, alias) in enumerate(
            ((stage.topic("alias/a"), 1), (stage.topic("alias/b"), 2), ("", 1), ("", 2))
        ):
            writer.publish(topic, str(number), properties=properties(PacketTypes.PUBLISH, TopicAlias=alias))
        assert [message.topic for message in reader.take(4)] == [stage.topic(f"alias/{name}") for name in "abab"]


def large_body(stage: Paho) -> None:
    # Over WebSocket paho forgets a packet of which the socket takes only a part (2.2.0, _packet_write).
    body = bytes(range(256)) * 4 * (4096 if stage.transport == "tcp" else 64)
    with stage.connected() as peer:
        peer.subscribe(stage.topic("large"), 1)
        peer.publish(stage.topic("large"), body)
        assert peer.take(1)[0].payload == body


def error(stage: Paho) -> None:
    """A wrong password is refused, with the reason, and others are not harmed."""
    peer = stage.peer()
    peer.client.username_pw_set("guest", "wrong")
    stage.connect(peer)
    _, reason, _ = peer.connacks.get(timeout=WAIT_SECONDS)
    peer.client.disconnect()
    peer.client.loop_stop()
    assert reason.is_failure and reason.value in (134, 135), reason
    peer = stage.peer()
    peer.client.username_pw_set("guest", "guest")
    stage.connect(peer)
    connack(peer)
    peer.client.disconnect()
    peer.client.loop_stop()


def keep_alive(stage: Paho) -> None:
    """A connection with nothing but pings lives."""
    with stage.connected(keep_alive=1) as peer:
        connack(peer)
        time.sleep(QUIET_SECONDS)
        assert peer.client.is_connected() and peer.ends.empty()


def restart(stage: Paho) -> None:
    """kill -9 with both connected: they come back by themselves, and what was published meanwhile comes once."""
    topic = stage.topic("restart")
    with stage.connected("reader", lasting=True) as reader, stage.connected("writer", lasting=True) as writer:
        for peer in (reader, writer):
            assert not connack(peer)
        reader.subscribe(topic, 2)
        writer.publish(topic, "before", 2)
        assert reader.texts(1) == ["before"]
        stage.broker.kill()
        for number in range(10):
            writer.client.publish(topic, str(number), 2)
        stage.broker.start()
        assert connack(reader) and connack(writer)
        writer.publish(topic, "end", 2)
        assert reader.texts(11) == [*(str(number) for number in range(10)), "end"]


V311 = {
    Feature.QOS_0: qos_0,
    Feature.QOS_1: qos_1,
    Feature.QOS_2: qos_2,
    Feature.WILDCARDS: wildcards,
    Feature.RETAINED: retained,
    Feature.WILL: will,
    Feature.SESSION: session,
    Feature.TAKE_OVER: take_over,
    Feature.SHARED: shared,
    Feature.BODY: large_body,
    Feature.ERROR: error,
    Feature.RESTART: restart,
}
WEBSOCKET = V311 | {Feature.PROPERTIES: message_properties, Feature.TOPIC_ALIAS: topic_alias}
V5 = WEBSOCKET | {Feature.KEEP_ALIVE: keep_alive}


def _staged(root: str, protocol: Any, transport: str = "tcp") -> Callable[[Broker], Any]:
    @contextmanager
    def stage(broker: Broker) -> Iterator[Paho]:
        yield Paho(broker, root, protocol, transport)

    return stage


CLIENTS = (
    Driven("paho-mqtt, 3.1.1", python_version("paho-mqtt"), V311, _staged("paho3", MQTTv311)),
    Driven("paho-mqtt, 5", python_version("paho-mqtt"), V5, _staged("paho5", MQTTv5)),
    Driven("paho-mqtt, WebSocket", python_version("paho-mqtt"), WEBSOCKET, _staged("pahows", MQTTv5, "websockets")),
)
