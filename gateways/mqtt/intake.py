"""What the clients of one vhost publish in a turn, with QoS 0 and 1, as few appends. Driver.

Thousands of devices send one message each: to route, append, fan out and acknowledge them one by one costs many times
what it costs for all together. So a turn's publishes lie here until its end, or until something comes that must stand
behind them in the log. Messages of one client keep their order: they lie in one gathering, and a client whose next
message belongs to another one (another QoS, say) has the first appended before.

Invariant: nothing lies here between two turns. Neighbours: publisher.py puts in, publishes.py appends, turn.py ends it.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from headrace.core_log.errors import HeadraceError
from headrace.gateways.mqtt.cutter import PublishRun
from headrace.gateways.mqtt.reasons import Version

Call = Callable[[], None]


class Publisher(Protocol):
    """A connection whose publishes are gathered."""

    version: Version
    # Marks its messages in the log.
    origin: int
    # What its last message was gathered with; -1: there was none.
    gathering: int

    def appended(self, run: PublishRun) -> None:
        """A run is committed: it may be acknowledged."""

    def turned_away(self, run: PublishRun, refused: Sequence[int]) -> PublishRun:
        """Queues that are full did not take the messages at these places; what is left is acknowledged later."""

    def append_failed(self, error: HeadraceError) -> None:
        """The log took nothing."""


class Append(Protocol):
    def __call__(
        self,
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
        *,
        qos: int,
        retain: bool,
        version: Version,
        origin: int | Sequence[int],
        refused: list[int],
    ) -> int | None: ...


_Gathered = list[tuple[Publisher, PublishRun]]


class Intake:
    def __init__(
        self,
        append: Append,
        when_committed: Callable[[int, Call], None],
        before_end: Callable[[Call], None],
    ) -> None:
        """`when_committed`: of the log; `before_end`: of the turn, once for each in which there is something."""
        self._append = append
        self._when_committed = when_committed
        self._before_end = before_end
        # By version, QoS and retain flag.
        self._gathered: dict[int, _Gathered] = {}

    def put(self, publisher: Publisher, run: PublishRun) -> None:
        """Append it soon; the publisher hears what came of it."""
        gathering = publisher.version << 3 | run.first_byte & 7
        if publisher.gathering != gathering:
            if publisher.gathering >= 0:
                self.flush()
            publisher.gathering = gathering
        gathered = self._gathered.get(gathering)
        if gathered is not None:
            gathered.append((publisher, run))
            return
        if not self._gathered:
            self._before_end(self.flush)
        self._gathered[gathering] = [(publisher, run)]

    def flush(self) -> None:
        """Append what lies here."""
        if self._gathered:
            gathered, self._gathered = self._gathered, {}
            for runs in gathered.values():
                self._append_runs(runs)

    def _append_runs(self, gathered: _Gathered) -> None:
        publisher, first = gathered[0]
        origin: int | Sequence[int] = publisher.origin
        topics, blobs, payloads = first.topics, first.properties, first.payloads
        if len(gathered) > 1:
            runs = [run for _publisher, run in gathered]
            topics = [*chain.from_iterable([run.topics for run in runs])]
            blobs = [*chain.from_iterable([run.properties for run in runs])]
            payloads = [*chain.from_iterable([run.payloads for run in runs])]
            origin = [one.origin for one, run in gathered for _payload in run.payloads]
        refused: list[int] = []
        qos = first.qos
        try:
            reached = self._append(
                topics,
                blobs,
                payloads,
                qos=qos,
                retain=first.retain,
                version=publisher.version,
                origin=origin,
                refused=refused,
            )
        except HeadraceError as error:
            for one, _run in gathered:
                one.append_failed(error)
            return
        if not qos:
            return
        if refused:
            gathered = _without(gathered, refused)
        if reached is None:
            _tell(gathered)
        else:
            self._when_committed(reached, lambda: _tell(gathered))


def _tell(gathered: _Gathered) -> None:
    for publisher, run in gathered:
        publisher.appended(run)


def _without(gathered: _Gathered, refused: Sequence[int]) -> _Gathered:
    left: _Gathered = []
    start = 0
    for publisher, run in gathered:
        end = start + len(run.payloads)
        places = [place - start for place in refused if start <= place < end]
        left.append((publisher, publisher.turned_away(run, places) if places else run))
        start = end
    return left
