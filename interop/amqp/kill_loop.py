"""kill -9 under load, again and again, on one data directory. Driver: processes, threads, sockets.

    python -m interop.amqp.kill_loop --seconds 60

Publishers (pika's SelectConnection, confirms, a window of messages on their way) send to a topic exchange with three
durable queues. Two get all messages, with prefetch and acks: one is read by one consumer at a time, the other by two at
once. The third gets one message in fifty and is read only at the end. The broker is killed at random moments, some of
them while it is still starting, and started again. Publishers send again what was not confirmed; consumers close and
open their channels now and then. At the end everything is drained and acknowledged, the broker is killed once more, and
all queues must be empty. What had to hold is in ledger.py.
"""

import argparse
import random
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from typing import Protocol

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.adapters.utils.connection_workflow import AMQPConnectorException
from pika.channel import Channel
from pika.exceptions import AMQPError
from pika.frame import Method
from pika.spec import Basic, BasicProperties

from interop.amqp.ledger import Copy, Delivery, Kill, Ledger, QueueLedger
from interop.broker import Broker, running

EXCHANGE = "kill.all"
RARE_EVERY = 50
PUBLISHERS = 3
SHARING = 2
# Publishes of one publisher on their way.
WINDOW = 100
PREFETCH = 100
# How far the slower queue may fall behind before publishers wait; what is left is drained at the end.
BEHIND_MAX = 4000
PERSISTENT = BasicProperties(delivery_mode=pika.DeliveryMode.Persistent.value)
# How long the broker lives between two kills, in seconds.
LIFE = (0.2, 2.5)
# The share of starts that are killed too, before they are ready.
STILLBORN = 0.2
STARTING_SECONDS = (0.0, 1.0)
# How much longer it goes on where a busy machine has not let it kill often enough.
LATE_SECONDS_MAX = 60
DRAIN_SECONDS_MAX = 120
QUIET_SECONDS_MAX = 10
# A run of so many seconds must have at least one kill for each of these.
SECONDS_PER_KILL_MAX = 6
CONFIRMED_PER_KILL_MIN = 100


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
            f"{self.kills} kills ({self.kills_starting} while starting), {self.confirmed} confirmed, "
            f"{self.republished} sent again, {self.delivered} delivered, {self.duplicates} duplicates"
        )


class Place(Protocol):
    """Where publishers and consumers connect to: a broker, or one node or another of a cluster."""

    @property
    def url(self) -> str: ...

    def restart(self) -> None:
        """kill -9 and start again; it is ready when this returns."""


class Story:
    """What all threads share."""

    def __init__(self, broker: Place, ledger: Ledger) -> None:
        self.broker = broker
        self.ledger = ledger
        self.life = 0
        self.publishing = True
        self.consuming = True

    def parameters(self) -> pika.URLParameters:
        parameters = pika.URLParameters(self.broker.url)
        parameters.heartbeat = 30
        parameters.socket_timeout = parameters.stack_timeout = 15
        parameters.connection_attempts = 1
        return parameters

    def behind(self) -> int:
        return len(self.ledger.confirmed) - min(
            len(queue.deliveries) for queue in self.ledger.queues if queue.every == 1
        )


class Publisher(threading.Thread):
    """Sends 1, 2, 3... and keeps at it until each is confirmed."""

    def __init__(self, story: Story, number: int) -> None:
        super().__init__(name=f"publisher {number}", daemon=True)
        self._story = story
        self._number = number
        self._next = count(1)
        # Sent and not confirmed, oldest first: (number, attempt).
        self.unconfirmed: deque[tuple[int, int]] = deque()
        self._padding = random.Random(number)

    def run(self) -> None:
        try:
            while self._story.publishing or self.unconfirmed:
                _Session(self._story, self).run()
                time.sleep(0.02)
        except Exception as problem:
            self._story.ledger.failures.append(f"{self.name}: {problem!r}")

    def again(self) -> list[tuple[int, int]]:
        """What was not confirmed by the last broker, with the next attempt."""
        self.unconfirmed = deque((number, attempt + 1) for number, attempt in self.unconfirmed)
        self._story.ledger.republished += len(self.unconfirmed)
        return list(self.unconfirmed)

    def new(self) -> tuple[int, int] | None:
        """One more, when there is room for it."""
        if not self._story.publishing or len(self.unconfirmed) >= WINDOW or self._story.behind() > BEHIND_MAX:
            return None
        fresh = (next(self._next), 0)
        self.unconfirmed.append(fresh)
        return fresh

    def body(self, number: int, attempt: int) -> bytes:
        return b"%d %d %d " % (self._number, number, attempt) + b"." * self._padding.randrange(800)

    def confirm(self, number: int) -> None:
        assert self.unconfirmed and self.unconfirmed[0][0] == number, "confirms come in order"
        self.unconfirmed.popleft()
        self._story.ledger.confirmed.add((self._number, number))


class _Session:
    """One connection of a publisher, until the broker dies or all is done."""

    def __init__(self, story: Story, publisher: Publisher) -> None:
        self._publisher = publisher
        self._story = story
        self._sent: deque[int] = deque()  # numbers on their way, in the order of their delivery tags
        self._first_tag = 1
        self._channel: Channel | None = None
        self._connection = pika.SelectConnection(
            story.parameters(), self._opened, on_open_error_callback=self._ended, on_close_callback=self._ended
        )

    def run(self) -> None:
        try:
            self._connection.ioloop.start()
        finally:
            self._connection.ioloop.close()

    def _opened(self, connection: pika.SelectConnection) -> None:
        connection.channel(on_open_callback=self._channel_opened)

    def _channel_opened(self, channel: Channel) -> None:
        # A cluster closes a channel whose publishes have an unknown outcome, and leaves the connection open.
        channel.add_on_close_callback(self._channel_closed)
        channel.confirm_delivery(self._told, callback=lambda _: self._begin(channel))

    def _begin(self, channel: Channel) -> None:
        self._channel = channel
        for number, attempt in self._publisher.again():
            self._send(number, attempt)
        self._fill()

    def _fill(self) -> None:
        """Tops the window up, now and a little later; ends when nothing is left to do."""
        self._top_up()
        if not self._story.publishing and not self._publisher.unconfirmed:
            if self._connection.is_open:
                self._connection.close()
            return
        self._connection.ioloop.call_later(0.02, self._fill)

    def _top_up(self) -> None:
        if self._channel is None or not self._channel.is_open:
            return
        while (fresh := self._publisher.new()) is not None:
            self._send(*fresh)

    def _send(self, number: int, attempt: int) -> None:
        assert self._channel is not None
        self._sent.append(number)
        key = "rare" if number % RARE_EVERY == 0 else "common"
        self._channel.basic_publish(EXCHANGE, key, self._publisher.body(number, attempt), PERSISTENT, mandatory=True)

    def _told(self, frame: Method) -> None:
        if isinstance(frame.method, Basic.Nack):
            # A cluster with too few replicas in sync takes nothing, and says so: it is sent again.
            self._connection.close()
            return
        assert isinstance(frame.method, Basic.Ack), f"{frame.method} for a persistent message"
        last = frame.method.delivery_tag
        # One at a time or up to a tag: either way in order here, as nothing is refused.
        assert frame.method.multiple or last == self._first_tag, "a confirm was left out"
        while self._first_tag <= last:
            self._publisher.confirm(self._sent.popleft())
            self._first_tag += 1
        self._top_up()

    def _channel_closed(self, _: Channel, why: BaseException) -> None:
        if self._connection.is_open:
            self._connection.close()

    def _ended(self, _: pika.SelectConnection, why: BaseException) -> None:
        self._connection.ioloop.stop()


class Consumer(threading.Thread):
    """Reads one queue through one broker after the other."""

    def __init__(self, story: Story, queue: QueueLedger, seed: int) -> None:
        super().__init__(name=f"consumer of {queue.name}", daemon=True)
        self._story = story
        self._queue = queue
        self._chance = random.Random(seed)

    def run(self) -> None:
        try:
            while self._story.consuming:
                life = self._story.life
                # A node that is cut off keeps a client waiting for a leader; pika's own patience ends with an error
                # that is none of its AMQPErrors.
                with suppress(AMQPError, AMQPConnectorException, OSError):
                    self._connect(life)
                time.sleep(0.02)
        except Exception as problem:
            self._story.ledger.failures.append(f"{self.name}: {problem!r}")

    def _connect(self, life: int) -> None:
        connection = pika.BlockingConnection(self._story.parameters())
        try:
            while self._story.consuming:
                self._queue.settle(self._read(connection.channel(), life), life)
        finally:
            if connection.is_open:
                connection.close()

    def _read(self, channel: BlockingChannel, life: int) -> list[Copy]:
        """Until the channel has been closed in good order: the copies that were acknowledged on it."""
        channel.basic_qos(prefetch_count=PREFETCH)
        many = self._chance.randrange(200, 2000)
        held: list[tuple[int, Copy]] = []
        acked: list[Copy] = []

        def ack() -> None:
            if held:
                channel.basic_ack(held[-1][0], multiple=True)
                acked.extend(copy for _, copy in held)
                held.clear()

        for method, _, body in channel.consume(self._queue.name, inactivity_timeout=0.1):
            if method is not None:
                publisher, number, attempt, _ = body.split(b" ", 3)
                copy = Copy(int(publisher), int(number), int(attempt))
                self._queue.deliveries.append(Delivery(copy, bool(method.redelivered), life))
                held.append((method.delivery_tag, copy))
            if method is None or len(held) >= 10:
                ack()
            if len(acked) >= many or not self._story.consuming:
                break
        ack()
        channel.close()
        return acked


def any_seed() -> int:
    return random.SystemRandom().randrange(2**32)


def kill_again_and_again(
    story: Story, broker: Broker, publishers: list[Publisher], chance: random.Random, more: Callable[[], bool]
) -> None:
    while more():
        time.sleep(chance.uniform(*LIFE))
        kill(story, broker, publishers, starting=False)
        while chance.random() < STILLBORN:
            broker.launch()
            time.sleep(chance.uniform(*STARTING_SECONDS))
            kill(story, broker, publishers, starting=True)
        broker.start()


def kill(story: Story, broker: Broker, publishers: list[Publisher], *, starting: bool) -> None:
    process = broker.process
    assert process is not None
    status = process.poll()
    if status is not None:
        story.ledger.failures.append(f"the broker ended by itself in life {story.life}, with status {status}")
    story.ledger.kills.append(Kill(sum(len(publisher.unconfirmed) for publisher in publishers), starting))
    broker.kill()
    story.life += 1


def drained(story: Story) -> bool:
    """Everything confirmed has been delivered, and nothing waits."""
    with pika.BlockingConnection(story.parameters()) as connection:
        waiting = ready(connection, story.ledger.queues)
    missing = [queue.missing(story.ledger.confirmed) for queue in story.ledger.queues]
    return not any(missing) and not any(waiting.values())


def wait_until_drained(story: Story, last: float) -> None:
    """Or until nothing has come for a while: what is missing then is lost."""
    count, since = -1, time.monotonic()
    while not drained(story) and time.monotonic() < last:
        delivered = sum(len(queue.deliveries) for queue in story.ledger.queues)
        if delivered != count:
            count, since = delivered, time.monotonic()
        elif time.monotonic() - since > QUIET_SECONDS_MAX:
            return
        time.sleep(0.1)


def ready(connection: pika.BlockingConnection, queues: list[QueueLedger]) -> dict[str, int]:
    channel = connection.channel()
    names = [queue.name for queue in queues]
    return {name: channel.queue_declare(name, passive=True).method.message_count for name in names}


def run(seconds: float, seed: int, *, kills_min: int | None = None) -> Report:
    """Kills for that long, and until there were enough of them; then drains and judges."""
    chance = random.Random(seed)
    wanted = max(2, int(seconds / SECONDS_PER_KILL_MAX)) if kills_min is None else kills_min
    one, many = QueueLedger("kill.one", ordered=True), QueueLedger("kill.many", ordered=False)
    last = QueueLedger("kill.last", ordered=True, every=RARE_EVERY)
    queues = [one, many, last]
    ledger = Ledger(queues)
    with running() as broker:
        story = Story(broker, ledger)
        with pika.BlockingConnection(story.parameters()) as connection:
            channel = connection.channel()
            channel.exchange_declare(EXCHANGE, "topic", durable=True)
            for queue in queues:
                channel.queue_declare(queue.name, durable=True)
                channel.queue_bind(queue.name, EXCHANGE, "#" if queue.every == 1 else "rare")
        publishers = [Publisher(story, number) for number in range(PUBLISHERS)]
        consumers = [Consumer(story, queue, chance.randrange(2**32)) for queue in (one, *[many] * SHARING)]
        for thread in (*publishers, *consumers):
            thread.start()
        begun = time.monotonic()

        def more() -> bool:
            spent = time.monotonic() - begun
            return spent < seconds or (ledger.kills_under_load() < wanted and spent < seconds + LATE_SECONDS_MAX)

        kill_again_and_again(story, broker, publishers, chance, more)
        consumers.append(Consumer(story, last, chance.randrange(2**32)))
        consumers[-1].start()
        finish(story, publishers, consumers)
    duplicates = sum(queue.duplicates() for queue in queues)
    return Report(
        kills=len(ledger.kills),
        kills_starting=sum(kill.starting for kill in ledger.kills),
        confirmed=len(ledger.confirmed),
        republished=ledger.republished,
        delivered=sum(len(queue.deliveries) for queue in queues),
        duplicates=duplicates,
        problems=ledger.problems(kills_min=wanted, confirmed_min=wanted * CONFIRMED_PER_KILL_MIN),
    )


def finish(story: Story, publishers: list[Publisher], consumers: list[Consumer]) -> None:
    """The last publishes are confirmed, everything is consumed, and one more kill brings nothing back."""
    last = time.monotonic() + DRAIN_SECONDS_MAX
    story.publishing = False
    for publisher in publishers:
        publisher.join(max(0, last - time.monotonic()))
        if publisher.is_alive():
            story.ledger.failures.append(f"{publisher.name} still waits for {len(publisher.unconfirmed)} confirms")
    wait_until_drained(story, last)
    story.consuming = False
    for consumer in consumers:
        consumer.join(max(1, last - time.monotonic()))
        if consumer.is_alive():
            story.ledger.failures.append(f"{consumer.name} did not end")
    story.broker.restart()
    with pika.BlockingConnection(story.parameters()) as connection:
        left = ready(connection, story.ledger.queues)
    for queue in story.ledger.queues:
        queue.left_over = left[queue.name]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m interop.amqp.kill_loop", description="kill -9 under load.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=None)
    asked = parser.parse_args()
    seed = any_seed() if asked.seed is None else asked.seed
    print(f"seed {seed}", flush=True)
    report = run(asked.seconds, seed)
    print(report.line())
    for problem in report.problems:
        print(problem)
    print("FAILED" if report.problems else "ok: no confirmed message lost, order kept, every repetition flagged")
    return 1 if report.problems else 0


if __name__ == "__main__":
    # Being asked to end must end the broker too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
