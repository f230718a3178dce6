"""What is to happen later, on this node: doors park here, and whoever does a kind of duty is found here. Driver.

    door, retry, schedule -> park -> delay/delays.py ... due ... -> Carrier.fire -> the log that the duty leads to

There is one carrier for each kind of duty (delayed_duty.py): delayed_publish.py for messages, the MQTT door for wills,
the retries for returns. A carrier names the log that a record will be appended to before the firing is decided, and
gets the numbers to append it with; so each record arrives exactly once, whatever happens in between (K7, T3).
Neighbours: delays.py below, node.py puts the two together.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.core_log.directory import LogDirectory
from headrace.core_log.env import Env
from headrace.core_log.outbox import TargetPartition
from headrace.core_log.record import Headers, Numbers, Producer
from headrace.delay.config import DelayConfig
from headrace.delay.delays import Delays
from headrace.delay.fire import DueRun
from headrace.delay.parked import DelayRefused
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, decode_duty, encode_duty

_log = logging.getLogger(__name__)


class Carrier(Protocol):
    """Does the duties of one kind."""

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        """The log that a record with this key is appended to; None: to none, or there is none any more."""

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        """Do it, and call `done` when that is safe, or when there is nothing to be done any more. Raises DiskFull, and
        is called again later. Where `run.where` is None this may come again after a crash."""


class Delayed:
    """`Fire` for the engine; `park` for everybody else."""

    def __init__(self) -> None:
        self._carriers: dict[DutyKind, Carrier] = {}
        self.config = DelayConfig()
        self.delays: Delays
        # Messages whose exchange or queue was gone when they were due.
        self.dropped_count = 0

    def open(self, env: Env, directory: LogDirectory, config: DelayConfig) -> None:
        """The engine is made, with this as its Fire."""
        self.config = config
        self.delays = Delays(env, directory, config, self)

    def carry(self, kind: DutyKind, carrier: Carrier) -> None:
        """Before the engine loads."""
        self._carriers[kind] = carrier

    # -- parking ------------------------------------------------------------------------------------------------

    def check(self, due_us: int, now_us: int) -> None:
        """Raises DelayRefused for a time that is further away than can be promised."""
        if due_us > self.latest_us(now_us):
            days = self.config.delay_s_max // 86_400
            raise DelayRefused(f"due in {(due_us - now_us) // 86_400_000_000} days: the longest delay is {days} days")

    def latest_us(self, now_us: int) -> int:
        """The latest due time that is not refused."""
        return now_us + self.config.delay_s_max * 1_000_000

    def park(
        self,
        duty: Duty,
        keys: Sequence[bytes],
        properties: Sequence[bytes],
        values: Sequence[bytes],
        *,
        due_us: Numbers,
        ids: Sequence[bytes | None] | None = None,
        attributes: int = 0,
        tags: tuple[str, ...] = (),
        headers: Sequence[Headers] | None = None,
        producer: Producer | None = None,
    ) -> int:
        """Take records in one append; returns the offset that `when_parked` waits for. DelayRefused: none was taken.

        With a producer, what was parked under its numbers before is not parked again; SequenceRefused as for a publish.
        """
        return self.delays.park(
            encode_duty(duty),
            keys,
            properties,
            values,
            due_us=due_us,
            ids=ids,
            attributes=attributes,
            tags=tags,
            headers=headers,
            producer=producer,
        )

    def when_parked(self, reached: int, done: Callable[[], None]) -> None:
        """Call it when everything parked up to there is safe: as a commit, it means no less."""
        self.delays.intake.when_committed(reached, done)

    # -- firing -------------------------------------------------------------------------------------------------

    def places(self, target: bytes, keys: Sequence[bytes]) -> Sequence[TargetPartition | None]:
        duty, carrier = self._found(target)
        if carrier is None:
            return [None] * len(keys)
        known: dict[bytes, TargetPartition | None] = {}
        for key in keys:
            if key not in known:
                known[key] = carrier.place(duty, key)
        return [known[key] for key in keys]

    def fire(self, run: DueRun, done: Callable[[], None]) -> None:
        duty, carrier = self._found(run.target)
        if carrier is None:
            _log.error("%d parked records are for nobody on this node", len(run), extra={"duty": duty})
            done()
        else:
            carrier.fire(duty, run, done)

    def _found(self, target: bytes) -> tuple[Duty, Carrier | None]:
        duty = decode_duty(target)
        return duty, self._carriers.get(duty.kind)
