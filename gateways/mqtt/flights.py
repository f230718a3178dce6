"""What one client was sent and has not acknowledged, by packet identifier, in the order in which it was sent. Machine.

Records of the log that go out together with QoS 1 are kept as the run that they are, and are acknowledged from its
front, which is how clients answer. Only who looks at one of them by its identifier makes all of them single flights. An
object made, found and thrown away for each message took a tenth of what one costs in M2 (bench/mqtt_throughput.py).

Invariant: the single flights were sent before the runs. Neighbours: session.py sends and settles, state.py keeps.
"""

from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, Sequence, ValuesView
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class Outcome(Enum):
    """What became of a message that somebody waits to hear of."""

    ACCEPTED = auto()
    REFUSED = auto()
    # Nobody has it: its session ended, or never got to it.
    RETURNED = auto()


Settle = Callable[[Outcome], None]


class Flight(NamedTuple):
    """Sent and not acknowledged; of QoS 2 also what is received and not complete."""

    # Of the record in the log; -1: it is no record of this session's log.
    offset: int
    qos: int
    retain: bool
    topic: bytes
    blob: bytes
    payload: bytes
    # [MQTT-4.3.3] the client has it (PUBREC); what it is told from now on is PUBREL.
    released: bool = False
    settle: Settle | None = None
    # The shared subscription it comes from, and its lane and number there.
    share: str = ""
    seq: int = -1
    lane: int = 0


@dataclass(slots=True)
class _Run:
    """Neighbours in the log, sent with QoS 1."""

    # The session's number of the first.
    number: int
    ids: Sequence[int]
    offset: int
    retain: bool
    topics: Sequence[bytes]
    blobs: Sequence[bytes]
    payloads: Sequence[bytes]
    # So many from the first on are acknowledged.
    done: int = 0

    def take(self, count: int) -> None:
        self.done += count
        if 2 * self.done >= len(self.ids):
            # What is acknowledged must not lie in memory because its neighbour is not.
            done = self.done
            self.number += done
            self.offset += done
            self.ids = self.ids[done:]
            self.topics, self.blobs, self.payloads = self.topics[done:], self.blobs[done:], self.payloads[done:]
            self.done = 0

    def singly(self) -> Iterator[tuple[int, Flight]]:
        for place in range(self.done, len(self.ids)):
            yield (
                self.ids[place],
                Flight(
                    self.offset + place, 1, self.retain, self.topics[place], self.blobs[place], self.payloads[place]
                ),
            )


class Flights:
    __slots__ = ("_run_count", "_runs", "_single")

    def __init__(self) -> None:
        self._single: dict[int, Flight] = {}
        self._runs: deque[_Run] = deque()
        # Messages in them.
        self._run_count = 0

    def __len__(self) -> int:
        return len(self._single) + self._run_count

    # -- as runs ------------------------------------------------------------------------------------------------

    def add_run(
        self,
        number: int,
        ids: Sequence[int],
        offset: int,
        retain: bool,
        topics: Sequence[bytes],
        blobs: Sequence[bytes],
        payloads: Sequence[bytes],
    ) -> None:
        """Sent with QoS 1; `number` is the session's of the first, and grows from run to run."""
        self._runs.append(_Run(number, ids, offset, retain, topics, blobs, payloads))
        self._run_count += len(ids)

    def take_first(self, packet_ids: Sequence[int]) -> int:
        """Messages are acknowledged. As long as they are those of the runs that were sent first, they are done with;
        returns how many."""
        runs = self._runs
        taken, count = 0, len(packet_ids)
        while taken < count and runs:
            run = runs[0]
            wanted = run.ids[run.done : run.done + count - taken]
            found = len(wanted)
            if [*wanted] != [*packet_ids[taken : taken + found]]:
                break
            taken += found
            run.take(found)
            if not run.ids:
                runs.popleft()
        self._run_count -= taken
        return taken

    def has_any(self, number: int, ids: Sequence[int], ids_count: int) -> bool:
        """Whether one of these identifiers is in use. They are those of the session's numbers from this one on, which
        come round after `ids_count`."""
        runs = self._runs
        if runs and number + len(ids) - ids_count > runs[0].number + runs[0].done:
            # Perhaps, and it must be looked at closely.
            self._unfold()
        return bool(self._single) and not self._single.keys().isdisjoint(ids)

    # -- one by one ---------------------------------------------------------------------------------------------

    def _unfold(self) -> dict[int, Flight]:
        single = self._single
        if self._runs:
            for run in self._runs:
                single.update(run.singly())
            self._runs.clear()
            self._run_count = 0
        return single

    def get(self, packet_id: int) -> Flight | None:
        return self._unfold().get(packet_id)

    def update(self, flights: Iterable[tuple[int, Flight]]) -> None:
        self._unfold().update(flights)

    def items(self) -> ItemsView[int, Flight]:
        return self._unfold().items()

    def values(self) -> ValuesView[Flight]:
        return self._unfold().values()

    def __iter__(self) -> Iterator[int]:
        return iter(self._unfold())

    def __contains__(self, packet_id: int) -> bool:
        return packet_id in self._unfold()

    def __getitem__(self, packet_id: int) -> Flight:
        return self._unfold()[packet_id]

    def __setitem__(self, packet_id: int, flight: Flight) -> None:
        self._unfold()[packet_id] = flight

    def __delitem__(self, packet_id: int) -> None:
        del self._unfold()[packet_id]
