"""Messages over MQTT that are to be delivered later: what they ask for, how they are parked, what they fire as. Pure.

Any version: the topic `$delayed/<seconds>/<topic>`, as in EMQX; it is authorised as `<topic>`, which readers see.
MQTT 5 also: the user properties x-delay, x-deliver-at, x-delay-level and x-schedule-id (delivery/delayed_when.py);
readers get them as they were sent [MQTT-3.3.2-17]. Message expiry counts from the moment the message is due.
Neighbours: publisher.py asks and answers its client, delivery/delayed.py parks, delivery/delayed_publish.py fires.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from headrace.core_log.record import PERSISTENT, QOS_SHIFT, RETAIN
from headrace.core_log.record import Protocol as Vocabulary
from headrace.delay.parked import DelayRefused
from headrace.filtering.tags import Tags
from headrace.gateways.delivery.broker import Broker
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind
from headrace.gateways.delivery.delayed_publish import Fired, origin_headers
from headrace.gateways.delivery.delayed_when import (
    DELAY,
    DELAY_LEVEL,
    DELIVER_AT,
    HINT,
    SCHEDULE_ID,
    due_us_of,
    schedule_id_of,
)
from headrace.gateways.mqtt.properties import PublishScans, decode_blob
from headrace.gateways.mqtt.reasons import MqttError, ReasonCode, Version

TOPIC = b"$delayed/"
_NAMES = frozenset((DELAY, DELIVER_AT, DELAY_LEVEL, SCHEDULE_ID))


@dataclass(frozen=True, slots=True)
class Late:
    """One message that is to be delivered later."""

    topic: bytes
    due_us: int
    id: bytes | None


def read(topic: bytes, blob: bytes, now_us: int) -> tuple[bytes, Late | None]:
    """The topic a message is for, and when it is due; None: now. Raises MqttError."""
    asked = _asked(blob) if HINT in blob else {}
    delay: object = asked.get(DELAY)
    if topic.startswith(TOPIC):
        seconds, topic = _split(topic)
        if delay is not None:
            raise MqttError(
                ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, f"the topic and {DELAY} both delay it: give one of them"
            )
        delay = seconds * 1000
    try:
        due_us = due_us_of(now_us, delay, asked.get(DELIVER_AT), asked.get(DELAY_LEVEL))
        return topic, None if due_us is None else Late(topic, due_us, schedule_id_of(asked.get(SCHEDULE_ID)))
    except DelayRefused as error:
        raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, str(error)) from error


def _asked(blob: bytes) -> Mapping[str, str]:
    """What the user properties ask for; one that is given twice must say the same twice."""
    asked: dict[str, str] = {}
    for name, value in decode_blob(blob).user_properties:
        if name in _NAMES and asked.setdefault(name, value) != value:
            text = f"{name} is given twice, with different values: give one of them"
            raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, text)
    return asked


def _split(topic: bytes) -> tuple[int, bytes]:
    seconds, _, inner = topic[len(TOPIC) :].partition(b"/")
    if not seconds.isdigit() or len(seconds) > 12 or not inner or inner.startswith(TOPIC):
        text = f"'{topic.decode()}' is not $delayed/<seconds>/<topic>"
        raise MqttError(ReasonCode.TOPIC_NAME_INVALID, text)
    return int(seconds), inner


class Parking:
    """Parks for one vhost."""

    def __init__(self, broker: Broker, duty_exchange: str, vhost: str, key_of: Callable[[bytes], bytes]) -> None:
        self._broker = broker
        self._duty = Duty(DutyKind.PUBLISH, vhost, duty_exchange)
        self._key_of = key_of

    def read(self, topic: bytes, blob: bytes) -> tuple[bytes, Late | None]:
        now_us = self._broker.env.clock.wall_us()
        topic, late = read(topic, blob, now_us)
        if late is not None:
            try:
                self._broker.delayed.check(late.due_us, now_us)
            except DelayRefused as error:
                raise MqttError(ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR, str(error)) from error
        return topic, late

    def park(
        self,
        late: Late,
        blob: bytes,
        payload: bytes,
        *,
        qos: int,
        retain: bool,
        version: Version,
        origin: int,
        tags: Tags,
    ) -> None:
        vocabulary = Vocabulary.MQTT_5 if version is Version.V5 else Vocabulary.MQTT_3
        headers = origin_headers(origin)
        self._broker.delayed.park(
            self._duty,
            [self._key_of(late.topic)],
            [blob],
            [payload],
            due_us=[late.due_us],
            ids=[late.id],
            attributes=int(vocabulary) | qos << QOS_SHIFT | (RETAIN if retain else 0) | (PERSISTENT if qos else 0),
            tags=tags,
            headers=[headers] if headers else None,
        )

    def when_parked(self, done: Callable[[], None]) -> None:
        """Call it when everything that is parked now is safe."""
        intake = self._broker.delayed.delays.intake
        intake.when_committed(int(intake.end), done)


class Countdown:
    """Calls `done` with the last of so many calls."""

    __slots__ = ("_count", "_done")

    def __init__(self, count: int, done: Callable[[], None]) -> None:
        self._count = count
        self._done = done

    def more(self) -> None:
        self._count += 1

    def __call__(self) -> None:
        self._count -= 1
        if not self._count:
            self._done()


class FiredWords:
    """What parked messages are published as."""

    def __init__(self, broker: Broker, scans: PublishScans) -> None:
        self._broker = broker
        self._scans = scans

    def __call__(self, key: bytes, blob: bytes, attributes: int) -> Fired:
        seconds = self._scans.of(blob).message_expiry_interval if blob else None

        def headers() -> Mapping[str, object]:
            return self._broker.fields_of(self._broker.restated(key, blob, attributes))[0]

        return Fired(blob, (), headers, None, None if seconds is None else seconds * 1_000_000)
