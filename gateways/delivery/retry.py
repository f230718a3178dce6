"""How often and after how long a record that failed is tried again, and what it carries along. Machine; pure.

The first delivery is attempt 1. After attempt n has failed, n - 1 retries were used; if the policy has one left, the
record waits `delay_ms(n)` and comes back as attempt n + 1. What it carries stands in its neutral headers: where it was
first (`x-origin-*`), which attempt this is (`x-attempt`), why the last one failed (`x-reason`), and, for whoever lists
dead letters, when and why each one failed (`attempts`), its first time (`timestamp`) and expiry (`expiry`).
Neighbours: transfers.py parks and buries, returns.py brings back, gateways/amqp/settings.py reads policies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from headrace.core_log.record import Headers

# RocketMQ's, in its order.
LEVELS_MS = tuple(
    seconds * 1000
    for seconds in (1, 5, 10, 30, 60, 120, 180, 240, 300, 360, 420, 480, 540, 600, 1200, 1800, 3600, 7200)
)
DELAY_MS = 1000
DELAY_MAX_MS = 3_600_000

ATTEMPT = b"x-attempt"
REASON = b"x-reason"
ATTEMPTS = b"attempts"
TIMESTAMP = b"timestamp"
EXPIRY = b"expiry"
_NUMBERS = frozenset((b"x-origin-partition", b"x-origin-offset", ATTEMPT))
_TOLD = _NUMBERS | {b"x-origin-stream", REASON}
# Of a record that was tried more often, the first attempt and the newest ones are told.
ATTEMPTS_TOLD_MAX = 64


class Backoff(StrEnum):
    FIXED = "fixed"
    EXPONENTIAL = "exponential"
    LEVELS = "levels"


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """`retries_max` times after the first attempt."""

    retries_max: int
    backoff: Backoff = Backoff.EXPONENTIAL
    delay_ms: int = DELAY_MS
    delay_max_ms: int = DELAY_MAX_MS
    # Each delay is taken from its upper half by chance, so that what failed together does not come back together.
    jitter: bool = False

    def retries(self, attempt: int) -> bool:
        """There is another attempt after this one."""
        return attempt <= self.retries_max

    def wait_ms(self, attempt: int, chance: float) -> int:
        """How long to wait after this attempt; `chance` is from 0 up to, not including, 1."""
        match self.backoff:
            case Backoff.FIXED:
                wait = self.delay_ms
            case Backoff.EXPONENTIAL:
                # Beyond 2**40 every delay is over its limit, and the number would only get longer.
                wait = min(self.delay_ms << min(attempt - 1, 40), self.delay_max_ms)
            case Backoff.LEVELS:
                wait = LEVELS_MS[min(attempt, len(LEVELS_MS)) - 1]
        return wait - int(wait / 2 * chance) if self.jitter else wait


def attempt_of(headers: Headers) -> int:
    """Which attempt at a record its delivery was."""
    return int(dict(headers).get(ATTEMPT, b"1"))


def after_failure(headers: Headers, attempt: int, reason: str, time_us: int) -> Headers:
    """Headers of a record whose last attempt failed now: it is this attempt from here on."""
    kept = [(name, value) for name, value in headers if name not in (ATTEMPT, REASON, ATTEMPTS)]
    told = dict(headers).get(ATTEMPTS, b"")
    entries = [*(told.split(b",") if told else ()), b"%d %s" % (time_us, reason.encode())]
    if len(entries) > ATTEMPTS_TOLD_MAX:
        del entries[1 : -ATTEMPTS_TOLD_MAX + 1]
    return (*kept, (ATTEMPT, b"%d" % attempt), (REASON, reason.encode()), (ATTEMPTS, b",".join(entries)))


def with_times(headers: Headers, timestamp_us: int, expiry_us: int) -> Headers:
    """Headers with the times that a record first had; they stay what they are."""
    if any(name == TIMESTAMP for name, _value in headers):
        return headers
    times = ((TIMESTAMP, b"%d" % timestamp_us),)
    return (*headers, *times, (EXPIRY, b"%d" % expiry_us)) if expiry_us else (*headers, *times)


def times_in(headers: Headers) -> tuple[int, int]:
    """(timestamp, expiry) that a record first had; 0: it has none."""
    found = dict(headers)
    return int(found.get(TIMESTAMP, b"0")), int(found.get(EXPIRY, b"0"))


def alike_in_time(headers: Sequence[Headers] | None, count: int) -> Iterator[tuple[int, int, int | None, int]]:
    """(from, to, time, expiry) of neighbours among `count` records that first had both in common."""
    if headers is None:
        yield 0, count, None, 0
        return
    times = [times_in(one) for one in headers]
    first = 0
    for index in range(1, count + 1):
        if index == count or times[index] != times[first]:
            timestamp_us, expiry_us = times[first]
            yield first, index, timestamp_us or None, expiry_us
            first = index


def told(headers: Headers) -> dict[str, str | int]:
    """What consumers are told of all that, by its name on the wire."""
    return {
        name.decode(): int(value) if name in _NUMBERS else value.decode() for name, value in headers if name in _TOLD
    }


def attempts_in(headers: Mapping[bytes, bytes]) -> list[tuple[int, str]]:
    """(when, why) of the attempts that failed, the first first."""
    found = []
    for entry in headers.get(ATTEMPTS, b"").split(b","):
        if entry:
            time_us, reason = entry.split(b" ", 1)
            found.append((int(time_us), reason.decode()))
    return found
