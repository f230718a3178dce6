"""What a broker keeps for a stream: its first offsets, a lease on what is unread, its progress. Driver: HTTP, threads.

Only the first of them matters to what is read, and fails the query when it cannot be had. A lease and the progress are
a courtesy: what goes wrong with them is logged, and the query goes on. A lease is renewed by a thread, because a batch
may take longer than it lasts; one that lags behind the query keeps too much, never too little.
Neighbours: stream.py asks; gateways/http/cursors.py, leases.py and groups.py answer.
"""

import logging
import threading
import time
import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from headrace.core_log.errors import HeadraceError
from headrace.spark.access import TopicNotFound
from headrace.spark.access_http import Door
from headrace.spark.stream_offsets import Offsets

_log = logging.getLogger(__name__)

LEASE_S = 60.0
RENEW_S = LEASE_S / 3
# A lease that moves with every small batch would be a write for each.
MOVE_S = 5.0


class StreamBroker:
    def __init__(self, url: str, *, token_name: str | None = None, name: str | None = None) -> None:
        """`name`: under which others see it; one that is the same after a restart takes up its lease again."""
        self._door = Door(url, token_name)
        self._lease = f"spark-{name or uuid.uuid4().hex[:12]}"
        # One connection, which the thread uses too.
        self._asking = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._needed = Offsets()
        self._held: dict[str, Mapping[int, int]] = {}
        self._held_at_s = 0.0
        self._has_warned = False

    def maybe_begun(self, cursor: str) -> Offsets | None:
        """Where the stream of this name began, if it did."""
        try:
            return _read(self._ask("GET", _path("cursors", cursor), None))
        except TopicNotFound:
            return None

    def begin(self, cursor: str, offsets: Offsets) -> Offsets:
        """Where the stream of this name began, which is here if nobody has said so before."""
        asked = {
            name: {"id": str(topic.id), "offsets": _by_number(topic.next)} for name, topic in offsets.topics.items()
        }
        return _read(self._ask("PUT", _path("cursors", cursor), {"topics": asked}))

    def publish(self, group: str, offsets: Offsets) -> None:
        """For people who look how far behind it is."""
        positions = [
            {"topic": name, "partition": number, "offset": offset}
            for name, topic in offsets.topics.items()
            for number, offset in sorted(topic.next.items())
        ]
        if positions:
            self._try(
                "its progress is not shown", "POST", _path("consumer-groups", group, "offsets"), {"offsets": positions}
            )

    def hold(self, offsets: Offsets) -> None:
        """What lies at or behind these is still needed."""
        self._needed = offsets
        now_s = time.monotonic()
        if not self._held or (self._has_moved() and now_s - self._held_at_s >= MOVE_S):
            self._renew()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep, name="headrace-lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._closing.set()
        for topic in self._held:
            self._try("its lease runs out by itself", "DELETE", _path("topics", topic, "leases", self._lease), None)
        self._held = {}
        with self._asking:
            self._door.close()

    def _has_moved(self) -> bool:
        return self._held != {name: topic.next for name, topic in self._needed.topics.items() if topic.next}

    def _keep(self) -> None:
        while not self._closing.wait(RENEW_S):
            self._renew()

    def _renew(self) -> None:
        held = {name: topic.next for name, topic in self._needed.topics.items() if topic.next}
        for name, next in held.items():
            body = {"offsets": _by_number(next), "ttl_ms": int(LEASE_S * 1000)}
            self._try("retention does not wait for it", "PUT", _path("topics", name, "leases", self._lease), body)
        self._held, self._held_at_s = dict(held), time.monotonic()

    def _ask(self, method: str, target: str, body: object) -> Any:
        with self._asking:
            return self._door.json(method, target, body=body)

    def _try(self, consequence: str, method: str, target: str, body: object) -> None:
        try:
            self._ask(method, target, body)
        except (HeadraceError, ValueError) as error:
            # Once is enough: it is tried with every batch.
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the broker keeps nothing for this stream (%s): %s", error, consequence)


def _read(cursor: Any) -> Offsets:
    topics = {name: {**topic["offsets"], "id": topic["id"]} for name, topic in cursor["topics"].items()}
    return Offsets.from_json({"topics": topics, "v": 1})


def _by_number(next: Mapping[int, int]) -> dict[str, int]:
    return {str(number): offset for number, offset in sorted(next.items())}


def _path(*segments: str) -> str:
    return "/api/v1/" + "/".join(quote(one, safe="") for one in segments)
