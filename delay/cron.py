"""When a schedule runs: cron expressions in a time zone, and what becomes of runs that were missed. Machine; pure.

    minute hour day month weekday        five fields, as in Debian's cron; six with seconds before them
    @hourly @daily @weekly @monthly @yearly

A wall clock that is set forward or back by summer time is met as Debian's cron meets it: a run at a certain time of the
day happens once on the day with 23 hours (at the next moment that exists) and once on the day with 25; one that comes
round every so many minutes goes by the time that really passes. The zone is a name of the IANA database.
Neighbours: gateways/delivery/schedules.py asks when, and publishes.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from functools import lru_cache
from zoneinfo import ZoneInfo

from cronsim import CronSim, CronSimError

from headrace.core_log.errors import Refused

EXPRESSION_CHARS_MAX = 256
# A run that is later than this was missed: the broker was down, or its clock was set.
MISSED_AFTER_US = 60 * 1_000_000
_NAMED = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class CronRefused(Refused):
    """An expression or a zone that is none, or one that never comes."""


class Missed(StrEnum):
    """What becomes of the runs whose time passed without them."""

    SKIP = "skip"
    ONCE = "once"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Step:
    """What to do when a run comes up: whether to run it, and when the next one is (None: never again)."""

    runs: bool
    next_us: int | None


@dataclass(frozen=True, slots=True)
class Cron:
    expression: str
    zone: str = "UTC"

    def check(self, now_us: int) -> int:
        """The first run after now. Raises CronRefused where there is something wrong, or no such run."""
        first_us = self.next_us(now_us)
        if first_us is None:
            raise CronRefused(f"cron expression '{self.expression}' never comes")
        return first_us

    def next_us(self, after_us: int) -> int | None:
        """The first run after a moment, in microseconds since 1970; None: there is none in the next fifty years."""
        after = (_EPOCH + timedelta(microseconds=after_us)).astimezone(_zone(self.zone))
        try:
            runs = CronSim(_fields(self.expression), after)
        except CronSimError as error:
            raise CronRefused(f"cron expression '{self.expression}' makes no sense: {error}") from None
        for run in runs:
            found_us: int = (run.astimezone(UTC) - _EPOCH) // timedelta(microseconds=1)
            if found_us > after_us:
                return found_us
        return None

    def step(self, due_us: int, now_us: int, missed: Missed) -> Step:
        """A run that was due comes up now, on time or not."""
        if now_us - due_us <= MISSED_AFTER_US or missed is Missed.ALL:
            return Step(True, self.next_us(due_us))
        return Step(missed is Missed.ONCE, self.next_us(now_us))


def _fields(expression: str) -> str:
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise CronRefused(f"a cron expression has at most {EXPRESSION_CHARS_MAX} characters")
    if not expression.startswith("@"):
        return expression
    if expression not in _NAMED:
        raise CronRefused(f"cron expression '{expression}' is none of {', '.join(_NAMED)}")
    return _NAMED[expression]


@lru_cache(maxsize=512)
def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise CronRefused(f"time zone '{name}' is not known") from None
