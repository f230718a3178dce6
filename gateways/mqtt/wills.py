"""Wills of one vhost: published once when a connection ends, after their delay (M7). Driver.

Whether the client may still publish there is asked when the will is published. One with a delay stands in the session's
state and may come up again after a crash: it is published under a number of its own, which the log takes once.
Neighbours: hub.py says when a session ends or is resumed, publishes.py appends, delaying.py parks what comes later.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b

from headrace.core_log.errors import DiskFull, HeadraceError
from headrace.core_log.record import Producer
from headrace.delay.wheel import Timer
from headrace.gateways.mqtt.delaying import Parking
from headrace.gateways.mqtt.properties import encode_blob
from headrace.gateways.mqtt.publishes import Publishes
from headrace.gateways.mqtt.reasons import Version
from headrace.gateways.mqtt.session import Session

_log = logging.getLogger(__name__)

WILL_RETRY_S = 5.0


class Wills:
    def __init__(self, publishes: Publishes, parking: Parking, changed: Callable[[Session], None]) -> None:
        """`changed`: a session's state is to be written down."""
        self._publishes = publishes
        self._parking = parking
        self._changed = changed
        self._shared = publishes.shared
        self._vhost = publishes.host.name
        self._broker = publishes.broker
        self._timers: dict[Session, Timer[Callable[[], None]]] = {}

    def __contains__(self, session: Session) -> bool:
        """Whether one waits for its time."""
        return session in self._timers

    def after(self, session: Session, seconds: float) -> None:
        """Publish it then."""
        self._timers[session] = self._broker.timers.after(seconds, lambda: self.publish(session))

    def cancel(self, session: Session) -> None:
        timer = self._timers.pop(session, None)
        if timer is not None:
            self._broker.timers.cancel(timer)

    def publish(self, session: Session) -> None:
        self.cancel(session)
        will, session.will = session.will, None
        if will is None:
            return
        if session.outlives:
            self._changed(session)
        # Rights may have been taken since CONNECT (M7).
        try:
            blob = encode_blob(replace(will.properties, will_delay_interval=None))
            topic, late = self._parking.read(will.topic.encode(), blob)
            if not self._shared.may_publish(session.user, self._vhost, topic.decode(), session.client_id):
                _log.warning("a will was not published: its client may no longer", extra={"client": session.client_id})
                return
            if late is not None:
                self._parking.park(
                    late,
                    blob,
                    will.payload,
                    qos=int(will.qos),
                    retain=will.retain,
                    version=Version.V5,
                    origin=session.origin,
                    tags=self._shared.scans.of(blob).tags,
                )
            elif session.asleep_since_us:
                moment = f"{self._vhost}\0{session.client_id}\0{session.asleep_since_us}"
                # Client ids are the clients' to choose: a hash that cannot be made to collide.
                producer = Producer(blake2b(moment.encode(), digest_size=16).digest(), 0, 0)
                self._publishes.publish_numbered(
                    producer, topic, blob, will.payload, qos=int(will.qos), retain=will.retain
                )
            else:
                self._publishes.publish(
                    [topic],
                    [blob],
                    [will.payload],
                    qos=int(will.qos),
                    retain=will.retain,
                    version=Version.V5,
                    origin=session.origin,
                )
        except DiskFull:
            session.will = will
            self.after(session, WILL_RETRY_S)
        except HeadraceError as error:
            _log.warning("a will was not published: %s", error, extra={"client": session.client_id})
        self._broker.on_ready()
