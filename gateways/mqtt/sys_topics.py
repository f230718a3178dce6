"""The topics below $SYS: what the broker says of itself in one vhost. Machine; the time is handed in.

They behave as retained messages that change: a new subscription gets them all, and then what has changed, once in
`mqtt.sys_period_s`. They are in memory alone and never in the log, only filters that begin with $SYS find them, and
clients may not publish there. Names and texts are Mosquitto's; the figures are those of the vhost.

    $SYS/broker/version, uptime
    $SYS/broker/clients/connected, disconnected, total, maximum
    $SYS/broker/publish/messages/received, sent, dropped
    $SYS/broker/bytes/received, sent
    $SYS/broker/subscriptions/count, retained messages/count
    $SYS/broker/load/<what>/1min, 5min, 15min      what: publish/received, publish/sent, publish/dropped,
                                                    bytes/received, bytes/sent, connections

Neighbours: tally.py has the figures, hub.py and retaining.py deliver, retained.py finds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import exp

from headrace.gateways.mqtt.retained import Retained, RetainedMessages
from headrace.gateways.mqtt.tally import Tally

PREFIX = "$SYS/"
_MINUTES = (1, 5, 15)
# How old the figures may be that a new subscription gets.
FRESH_S = 1.0


@dataclass(frozen=True, slots=True)
class Figures:
    """What there is now, besides what is counted."""

    connected: int
    sessions: int
    retained: int


class SysTopics:
    def __init__(self, version: str, tally: Tally, measure: Callable[[], Figures], now: float) -> None:
        """`now`: seconds that never go back, as everywhere here."""
        self._version = version
        self._tally = tally
        self._measure = measure
        self._started = now
        self._messages = RetainedMessages()
        self._measured: float | None = None
        # What everybody has been told.
        self._told: dict[bytes, bytes] = {}
        self._counted_at = now
        self._counted = _rates(tally)
        self._loads = {(name, minutes): 0.0 for name in self._counted for minutes in _MINUTES}

    def matching(self, topic_filter: str, now: float) -> list[Retained]:
        """What a new subscription gets."""
        if not topic_filter.startswith(PREFIX):
            return []
        if self._measured is None or now - self._measured >= FRESH_S:
            self._refresh(now)
        return self._messages.matching(topic_filter, 0)

    def changed(self, now: float) -> list[Retained]:
        """Once in a period: what has changed since the last one."""
        self._average(now)
        self._refresh(now)
        found = [one for one in self._messages.messages() if self._told.get(one.topic) != one.payload]
        self._told.update((one.topic, one.payload) for one in found)
        return found

    def _average(self, now: float) -> None:
        """Per minute, with the weight of what is past falling by e in 1, 5 and 15 minutes: as loads of a system are."""
        passed_s = now - self._counted_at
        if passed_s <= 0:
            return
        counted = _rates(self._tally)
        for name, count in counted.items():
            rate = (count - self._counted[name]) * 60 / passed_s
            for minutes in _MINUTES:
                old = self._loads[name, minutes]
                self._loads[name, minutes] = rate + exp(-passed_s / (60 * minutes)) * (old - rate)
        self._counted, self._counted_at = counted, now

    def _refresh(self, now: float) -> None:
        self._measured = now
        tally, figures = self._tally, self._measure()
        texts = {
            "version": self._version,
            "uptime": f"{int(now - self._started)} seconds",
            "clients/connected": figures.connected,
            "clients/disconnected": figures.sessions - figures.connected,
            "clients/total": figures.sessions,
            "clients/maximum": tally.clients_max,
            "publish/messages/received": tally.published,
            "publish/messages/sent": tally.delivered,
            "publish/messages/dropped": tally.dropped,
            "publish/messages/dropped/oldest": tally.overflowed,
            "publish/messages/dropped/refused": tally.refused,
            "bytes/received": tally.bytes_received,
            "bytes/sent": tally.bytes_sent,
            "subscriptions/count": tally.subscriptions,
            "retained messages/count": figures.retained,
        }
        for name, value in texts.items():
            self._put(name, str(value))
        for (name, minutes), load in self._loads.items():
            self._put(f"load/{name}/{minutes}min", f"{load:.2f}")

    def _put(self, name: str, text: str) -> None:
        self._messages.put(Retained(f"{PREFIX}broker/{name}".encode(), b"", text.encode(), 0))


def _rates(tally: Tally) -> dict[str, int]:
    return {
        "publish/received": tally.published,
        "publish/sent": tally.delivered,
        "publish/dropped": tally.dropped,
        "bytes/received": tally.bytes_received,
        "bytes/sent": tally.bytes_sent,
        "connections": tally.connections,
    }
