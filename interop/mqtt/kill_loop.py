"""kill -9 under MQTT load, again and again, on one data directory. Driver: processes, threads, sockets.

    python -m interop.mqtt.kill_loop --seconds 60

Publishers with QoS 1 and QoS 2 (paho-mqtt, MQTT 5, lasting sessions, a window of messages on their way) publish to
topics that two lasting sessions are subscribed to, one with QoS 2 and one with QoS 1. The broker is killed at random
moments, some of them while it is still starting, and started again; the clients come back as clients do, and publishers
send again what was not acknowledged. At the end all is acknowledged and delivered, the broker is killed once more, and
a last message must come with nothing new before it. What had to hold is in ledger.py.
"""

import argparse
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from paho.mqtt.client import Client, MQTTMessage, MQTTv5
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode
from paho.mqtt.packettypes import PacketTypes

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
# How far the slower subscription may fall behind before publishers wait; what is left is drained at the end.
BEHIND_MAX = 2000
LASTING_SECONDS = 3600
DRAIN_SECONDS_MAX = 120
QUIET_SECONDS_MAX = 15
RECONNECT_SECONDS = 0.05
IDENTIFIER_NOT_FOUND = 0x92
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


class Story:
    """What all threads share."""

    def __init__(self, broker: Broker, ledger: Ledger) -> None:
        self.broker = broker
        self.ledger = ledger
        self.publishing = True
        self.running = True

    def behind(self) -> int:
        return len(self.ledger.acknowledged) - min(len(one.arrivals) for one in self.ledger.subscriptions)


class Device(threading.Thread):
    """One client with a lasting session, which connects again and again by paho's own loop."""

    def __init__(self, story: Story, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self.story = story
        self.client = Client(CallbackAPIVersion.VERSION2, client_id=name.replace(" ", "-"), protocol=MQTTv5)
        self.client.on_connect = self._connected
        self.client.connect_timeout = 15
        # There is something in it that the broker may not forget.
        self.has_session = False
        self.is_open = False

    def run(self) -> None:
        try:
            while not self.is_done():
                if self.client.loop(0.02) != MQTTErrorCode.MQTT_ERR_SUCCESS:
                    self.is_open = False
                    self._connect()
                elif self.is_open:
                    self.work()
            self.client.disconnect()
        except Exception as problem:
            self.story.ledger.failures.append(f"{self.name}: {problem!r}")

    def _connect(self) -> None:
        expiry = properties(PacketTypes.CONNECT, SessionExpiryInterval=LASTING_SECONDS)
        port = self.story.broker.ports["mqtt"]
        try:
            # Clean start is False each time: what there was before is asked for.
            self.client.connect("127.0.0.1", port, keepalive=30, clean_start=False, properties=expiry)
        except OSError:
            time.sleep(RECONNECT_SECONDS)

    def _connected(self, client: Client, data: object, flags: object, reason: object, told: object) -> None:
        assert not reason.is_failure, reason  # type: ignore[attr-defined]
        if self.has_session and not flags.session_present:  # type: ignore[attr-defined]
            self.story.ledger.forgotten.append(self.name)
        self.begun()
        self.is_open = True

    def begun(self) -> None:
        """There is a connection; paho has not yet sent again what was on its way."""

    def work(self) -> None:
        """Some of what there is to do; the connection is open."""

    def is_done(self) -> bool:
        raise NotImplementedError


class Publisher(Device):
    """Sends 1, 2, 3... until each is acknowledged: by PUBACK, or with QoS 2 by PUBCOMP."""

    def __init__(self, story: Story, number: int, qos: int) -> None:
        super().__init__(story, f"publisher {number}")
        self._number = number
        self._qos = qos
        self._next = count(1)
        # By packet identifier.
        self.unconfirmed: dict[int, Number] = {}
        self._padding = random.Random(number)
        self.client.max_inflight_messages_set(WINDOW)
        self.client.on_publish = self._acknowledged

    def is_done(self) -> bool:
        return not self.story.publishing and not self.unconfirmed

    def begun(self) -> None:
        self.story.ledger.resent.update(self.unconfirmed.values())

    def work(self) -> None:
        while self.story.publishing and len(self.unconfirmed) < WINDOW and self.story.behind() < BEHIND_MAX:
            message = Number(self._number, next(self._next))
            body = b"%d %d " % message + b"." * self._padding.randrange(400)
            info = self.client.publish(f"kill/{self._number}", body, self._qos)
            self.unconfirmed[info.mid] = message

    def _acknowledged(self, client: Client, data: object, mid: int, reason: object, told: object) -> None:
        # To a PUBREL that is repeated after a restart the identifier may be known no more, which is an answer too.
        assert reason.value in (0, IDENTIFIER_NOT_FOUND), reason  # type: ignore[attr-defined]
        self.story.ledger.acknowledged.add(self.unconfirmed.pop(mid))
        # Nothing of a publisher with QoS 1 is kept, so its session may be as lazily.
        self.has_session = self._qos == 2


class Subscriber(Device):
    def __init__(self, story: Story, subscription: Subscription) -> None:
        super().__init__(story, subscription.name)
        self._subscription = subscription
        self._connection = 0
        self.is_subscribed = threading.Event()
        self.client.on_message = self._came
        self.client.on_subscribe = self._subscribed

    def is_done(self) -> bool:
        return not self.story.running

    def begun(self) -> None:
        self._connection += 1
        if not self.is_subscribed.is_set():
            self.client.subscribe(FILTER, self._subscription.qos)

    def _subscribed(self, *_: object) -> None:
        self.has_session = True
        self.is_subscribed.set()

    def _came(self, client: Client, data: object, message: MQTTMessage) -> None:
        publisher, number, _ = message.payload.split(b" ", 2)
        self._subscription.arrivals.append(Arrival(Number(int(publisher), int(number)), self._connection))


def kill_again_and_again(
    story: Story, publishers: list[Publisher], chance: random.Random, more: Callable[[], bool]
) -> None:
    broker, kills = story.broker, story.ledger.kills

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
        until = time.monotonic() + seconds
        kill_again_and_again(story, publishers, chance, lambda: time.monotonic() < until)
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
