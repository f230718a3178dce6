"""kill -9 under MQTT load, again and again, on one data directory. Driver: processes, threads, sockets.

    python -m interop.mqtt.kill_loop --seconds 60

Publishers with QoS 1 and QoS 2 (MQTT 5, lasting sessions, a window of messages on their way, packet identifiers used
again as soon as they are free) publish to topics that two lasting sessions of paho-mqtt are subscribed to, one with
QoS 2 and one with QoS 1. The broker is killed at random moments, some of them while it is still starting, and started
again; the clients come back as clients do, and publishers send again what was not acknowledged. At the end all is
acknowledged and delivered, the broker is killed once more, and a last message must come. What had to hold is in
ledger.py.

The publishers are not paho's: one whose connection breaks twice before a CONNACK forgets that it had a PUBREC, and
publishes again what it must only release (2.2.0, _messages_reconnect_reset_out). They speak by our codec, as the
standard says.
"""

import argparse
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Protocol

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes

from headrace.gateways.mqtt.cutter import AckRun, PacketCutter, PublishRun, Violation
from headrace.gateways.mqtt.encoder import encode_packet
from headrace.gateways.mqtt.packets import (
    Connack,
    Connect,
    Disconnect,
    Packet,
    Puback,
    Pubcomp,
    Publish,
    Pubrec,
    Pubrel,
    QoS,
)
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version
from interop.amqp.kill_loop import LIFE, STARTING_SECONDS, STILLBORN, any_seed
from interop.amqp.ledger import Kill
from interop.broker import Broker, running
from interop.mqtt.ledger import Arrival, Ledger, Number, Subscription
from interop.mqtt.paho_threads import properties

FILTER = "kill/#"
# Number -> QoS.
PUBLISHERS = {1: 1, 2: 1, 3: 2, 4: 2}
# The last message is of a publisher of its own.
LAST = Number(0, 1)
# Publishes of one publisher on their way.
WINDOW = 50
# How far the slower subscription may fall behind before publishers go slowly; what is left is drained at the end.
BEHIND_MAX = 2000
SLOW_WINDOW = 2
LASTING_SECONDS = 3600
DRAIN_SECONDS_MAX = 120
QUIET_SECONDS_MAX = 15
RECONNECT_SECONDS = 0.05
CONNACK_SECONDS_MAX = 15
# How often a client that hears nothing looks whether there is something to do.
LOOK_SECONDS = 0.02
# How much longer it goes on where a busy machine has not let it kill often enough.
LATE_SECONDS_MAX = 60
# A run of so many seconds must have at least one kill for each of these.
SECONDS_PER_KILL_MAX = 6
ACKNOWLEDGED_PER_KILL_MIN = 20


@dataclass(frozen=True, slots=True)
class Report:
    kills: int
    kills_starting: int
    confirmed: int
    republished: int
    delivered: int
    duplicates: int
    problems: list[str]

    def line(self) -> str:
        return (
            f"{self.kills} kills ({self.kills_starting} while starting), {self.confirmed} acknowledged, "
            f"{self.republished} sent again, {self.delivered} delivered, {self.duplicates} duplicates with QoS 1"
        )


class Place(Protocol):
    """Where publishers and subscribers connect to: a broker, or one node or another of a cluster."""

    @property
    def ports(self) -> dict[str, int]: ...

    def restart(self) -> None:
        """kill -9 and start again; it is ready when this returns."""


class Story:
    """What all threads share."""

    def __init__(self, broker: Place, ledger: Ledger) -> None:
        self.broker = broker
        self.ledger = ledger
        self.publishing = True
        self.running = True

    def behind(self) -> int:
        return len(self.ledger.acknowledged) - min(len(one.arrivals) for one in self.ledger.subscriptions)


class Publisher(threading.Thread):
    """Sends 1, 2, 3... until each is acknowledged, in its own words: what it has not is sent again, in order."""

    def __init__(self, story: Story, number: int, qos: int) -> None:
        super().__init__(name=f"publisher {number}", daemon=True)
        self._story = story
        self._number = number
        self._qos = QoS(qos)
        self._next = count(1)
        self._padding = random.Random(number)
        # By packet identifier, in the order of sending; None: it was received (PUBREC), and is being released.
        self.unconfirmed: dict[int, Publish | None] = {}
        # There is something in it that the broker may not forget.
        self._has_session = False

    def run(self) -> None:
        try:
            while not self._is_done():
                try:
                    self._talk()
                except OSError:
                    time.sleep(RECONNECT_SECONDS)
        except Exception as problem:
            self._story.ledger.failures.append(f"{self.name}: {problem!r}")

    def _is_done(self) -> bool:
        return not self._story.publishing and not self.unconfirmed

    def _talk(self) -> None:
        """One connection, until it breaks or all is done."""
        place = ("127.0.0.1", self._story.broker.ports["mqtt"])
        with socket.create_connection(place, CONNACK_SECONDS_MAX) as stream:
            cutter = PacketCutter(from_client=False, version=Version.V5)
            expiry = Properties(session_expiry_interval=LASTING_SECONDS)
            self._send(stream, Connect(self.name.replace(" ", "-"), clean_start=False, properties=expiry))
            connack, *early = self._receive(stream, cutter)
            assert isinstance(connack, Connack) and not connack.reason.failed and not early, (connack, early)
            if self._has_session and not connack.session_present:
                self._story.ledger.forgotten.append(self.name)
            self._send_again(stream)
            stream.settimeout(LOOK_SECONDS)
            while not self._is_done():
                self._top_up(stream)
                try:
                    packets = self._receive(stream, cutter)
                except TimeoutError:
                    continue
                for packet in packets:
                    self._answered(stream, packet)

    def _send(self, stream: socket.socket, *packets: Packet) -> None:
        stream.sendall(b"".join([encode_packet(packet, Version.V5) for packet in packets]))

    def _receive(self, stream: socket.socket, cutter: PacketCutter) -> list[Packet]:
        """At least one."""
        found: list[Packet] = []
        while not found:
            data = stream.recv(65_536)
            if not data:
                raise ConnectionResetError("the broker is gone")
            for event in cutter.receive(data):
                assert not isinstance(event, Violation | PublishRun | AckRun), event
                found.append(event)
        return found

    def _send_again(self, stream: socket.socket) -> None:
        for packet_id, message in self.unconfirmed.items():
            if message is None:
                self._send(stream, Pubrel(packet_id))
            else:
                self._story.ledger.resent[_number_of(message.payload)] += 1
                self._send(stream, replace(message, dup=True))

    def _top_up(self, stream: socket.socket) -> None:
        window = WINDOW if self._story.behind() < BEHIND_MAX else SLOW_WINDOW
        while self._story.publishing and len(self.unconfirmed) < window:
            body = b"%d %d " % (self._number, next(self._next)) + b"." * self._padding.randrange(400)
            packet_id = next(number for number in range(1, WINDOW + 1) if number not in self.unconfirmed)
            message = Publish(f"kill/{self._number}", body, self._qos, packet_id=packet_id)
            self.unconfirmed[packet_id] = message
            self._send(stream, message)

    def _answered(self, stream: socket.socket, packet: Packet) -> None:
        match packet:
            case Puback(packet_id, ReasonCode.SUCCESS) if self._qos == 1:
                self._acknowledged(packet_id)
                del self.unconfirmed[packet_id]
            case Pubrec(packet_id, ReasonCode.SUCCESS) if self._qos == 2:
                self._acknowledged(packet_id)
                self.unconfirmed[packet_id] = None
                self._has_session = True
                self._send(stream, Pubrel(packet_id))
            # To a PUBREL that is repeated the identifier may be known no more, which is an answer too.
            case Pubcomp(packet_id, ReasonCode.SUCCESS | ReasonCode.PACKET_IDENTIFIER_NOT_FOUND):
                assert self.unconfirmed.pop(packet_id) is None, "released before it was received"
            case Disconnect():
                raise ConnectionResetError("told to come again")
            case Puback(_, ReasonCode.QUOTA_EXCEEDED) | Pubrec(_, ReasonCode.QUOTA_EXCEEDED):
                # A cluster with too few replicas in sync takes nothing, and says so: it is sent again.
                raise ConnectionResetError("told to wait")
            case _:
                raise AssertionError(f"an answer to nothing: {packet}")

    def _acknowledged(self, packet_id: int) -> None:
        message = self.unconfirmed[packet_id]
        if message is not None:
            self._story.ledger.acknowledged.add(_number_of(message.payload))


def _number_of(body: bytes) -> Number:
    publisher, number, _ = body.split(b" ", 2)
    return Number(int(publisher), int(number))


class Subscriber(threading.Thread):
    """A lasting session of paho-mqtt, which connects again and again by the client's own loop."""

    def __init__(self, story: Story, subscription: Subscription) -> None:
        super().__init__(name=subscription.name, daemon=True)
        self._story = story
        self._subscription = subscription
        self._connection = 0
        self.is_subscribed = threading.Event()
        self._client = Client(CallbackAPIVersion.VERSION2, client_id=self.name.replace(" ", "-"), protocol=MQTTv5)
        self._client.connect_timeout = CONNACK_SECONDS_MAX
        self._client.on_connect = self._connected
        self._client.on_subscribe = lambda *_: self.is_subscribed.set()
        self._client.on_message = self._came

    def run(self) -> None:
        try:
            while self._story.running:
                if self._client.loop(LOOK_SECONDS) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                    self._connect()
            self._client.disconnect()
        except Exception as problem:
            self._story.ledger.failures.append(f"{self.name}: {problem!r}")

    def _connect(self) -> None:
        expiry = properties(PacketTypes.CONNECT, SessionExpiryInterval=LASTING_SECONDS)
        port = self._story.broker.ports["mqtt"]
        try:
            # Clean start is False each time: what there was before is asked for.
            self._client.connect("127.0.0.1", port, keepalive=30, clean_start=False, properties=expiry)
        except OSError:
            time.sleep(RECONNECT_SECONDS)

    def _connected(self, client: Client, data: object, flags: Any, reason: Any, told: object) -> None:
        assert not reason.is_failure, reason
        self._connection += 1
        if not self.is_subscribed.is_set():
            client.subscribe(FILTER, self._subscription.qos)
        elif not flags.session_present:
            self._story.ledger.forgotten.append(self.name)

    def _came(self, client: Client, data: object, message: MQTTMessage) -> None:
        self._subscription.arrivals.append(Arrival(_number_of(message.payload), self._connection))


def kill_again_and_again(
    story: Story, broker: Broker, publishers: list[Publisher], chance: random.Random, more: Callable[[], bool]
) -> None:
    kills = story.ledger.kills

    def kill(*, starting: bool) -> None:
        kills.append(Kill(sum(len(publisher.unconfirmed) for publisher in publishers), starting))
        broker.kill()

    while more():
        time.sleep(chance.uniform(*LIFE))
        kill(starting=False)
        while chance.random() < STILLBORN:
            broker.launch()
            time.sleep(chance.uniform(*STARTING_SECONDS))
            kill(starting=True)
        broker.start()


def wait_until_arrived(story: Story, messages: set[Number], last: float) -> None:
    """At each subscription; or until nothing has come for a while: what is missing then is lost."""
    arrived, since = -1, time.monotonic()
    while time.monotonic() < last:
        subscriptions = story.ledger.subscriptions
        if all(messages <= {arrival.message for arrival in list(one.arrivals)} for one in subscriptions):
            return
        found = sum(len(one.arrivals) for one in subscriptions)
        if found != arrived:
            arrived, since = found, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS_MAX:
            return
        time.sleep(0.1)


def run(seconds: float, seed: int, *, kills_min: int | None = None) -> Report:
    """Kills for that long; then drains and judges."""
    chance = random.Random(seed)
    wanted = max(2, int(seconds / SECONDS_PER_KILL_MAX)) if kills_min is None else kills_min
    subscriptions = [Subscription("reader 2", qos=2), Subscription("reader 1", qos=1)]
    ledger = Ledger(subscriptions, dict(PUBLISHERS))
    with running() as broker:
        story = Story(broker, ledger)
        readers = [Subscriber(story, one) for one in subscriptions]
        publishers = [Publisher(story, number, qos) for number, qos in PUBLISHERS.items()]
        for reader in readers:
            reader.start()
        for reader in readers:
            assert reader.is_subscribed.wait(DRAIN_SECONDS_MAX), f"{reader.name} could not subscribe"
        for publisher in publishers:
            publisher.start()
        begun = time.monotonic()

        def more() -> bool:
            spent = time.monotonic() - begun
            return spent < seconds or (ledger.kills_under_load() < wanted and spent < seconds + LATE_SECONDS_MAX)

        kill_again_and_again(story, broker, publishers, chance, more)
        finish(story, publishers, readers)
    return Report(
        kills=len(ledger.kills),
        kills_starting=sum(kill.starting for kill in ledger.kills),
        confirmed=len(ledger.acknowledged),
        republished=ledger.resent.total(),
        delivered=sum(len(one.arrivals) for one in subscriptions),
        duplicates=sum(one.duplicates() for one in subscriptions),
        problems=ledger.problems(kills_min=wanted, acknowledged_min=wanted * ACKNOWLEDGED_PER_KILL_MIN),
    )


def finish(story: Story, publishers: list[Publisher], readers: list[Subscriber]) -> None:
    """The last publishes are acknowledged, all arrives, and after one more kill only a new message comes."""
    last = time.monotonic() + DRAIN_SECONDS_MAX
    story.publishing = False
    for publisher in publishers:
        publisher.join(max(0, last - time.monotonic()))
        if publisher.is_alive():
            story.ledger.failures.append(f"{publisher.name} still waits for {len(publisher.unconfirmed)} answers")
    wait_until_arrived(story, set(story.ledger.acknowledged), last)
    story.broker.restart()
    publish_last(story)
    wait_until_arrived(story, {LAST}, last)
    story.running = False
    for reader in readers:
        reader.join(max(1, last - time.monotonic()))
        if reader.is_alive():
            story.ledger.failures.append(f"{reader.name} did not end")


def publish_last(story: Story) -> None:
    client = Client(CallbackAPIVersion.VERSION2, protocol=MQTTv5)
    client.connect("127.0.0.1", story.broker.ports["mqtt"])
    client.loop_start()
    try:
        client.publish("kill/last", b"%d %d " % LAST, 2).wait_for_publish(DRAIN_SECONDS_MAX)
        story.ledger.acknowledged.add(LAST)
    finally:
        client.disconnect()
        client.loop_stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.mqtt.kill_loop", description="kill -9 under MQTT load.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = any_seed() if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    report = run(asked.seconds, seed)
    print(report.line())
    for problem in report.problems:
        print(problem)
    return 1 if report.problems else 0


if __name__ == "__main__":
    # Being asked to end must end the broker too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
