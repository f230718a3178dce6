"""Parked records find whoever does their kind of duty, and what is for nobody holds nobody up."""

from collections.abc import Callable
from uuid import UUID

import pytest

from headrace.controller.policies import RETRY_DELAY_MS_MAX
from headrace.core_log.outbox import TargetPartition
from headrace.delay.config import DelayConfig
from headrace.delay.fire import DueRun
from headrace.delay.parked import DelayRefused
from headrace.gateways.delivery.delayed import Delayed
from headrace.gateways.delivery.delayed_duty import Duty, DutyKind, encode_duty

DUTY = Duty(DutyKind.PUBLISH, "/", "orders")
HERE = TargetPartition(UUID(int=1))


class Noting:
    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.fired: list[tuple[Duty, int]] = []

    def place(self, duty: Duty, key: bytes) -> TargetPartition | None:
        self.asked.append(key)
        return HERE if key == b"here" else None

    def fire(self, duty: Duty, run: DueRun, done: Callable[[], None]) -> None:
        self.fired.append((duty, len(run)))
        done()


def due(duty: Duty, *keys: bytes) -> DueRun:
    columns = [list(keys)] * 4
    return DueRun(encode_duty(duty), None, None, 0, columns[0], [0] * len(keys), *columns[1:], 0, (), None)


def test_each_kind_has_its_carrier_and_each_key_is_asked_once() -> None:
    delayed, carrier = Delayed(), Noting()
    delayed.carry(DutyKind.PUBLISH, carrier)
    assert delayed.places(encode_duty(DUTY), [b"here", b"gone", b"here"]) == [HERE, None, HERE]
    assert carrier.asked == [b"here", b"gone"]
    done: list[bool] = []
    delayed.fire(due(DUTY, b"here"), lambda: done.append(True))
    assert (carrier.fired, done) == ([(DUTY, 1)], [True])


def test_what_is_for_nobody_is_done_with_and_told(caplog: pytest.LogCaptureFixture) -> None:
    delayed, done = Delayed(), list[bool]()
    assert delayed.places(encode_duty(DUTY), [b"a", b"b"]) == [None, None]
    delayed.fire(due(DUTY, b"a", b"b"), lambda: done.append(True))
    assert done == [True]
    assert "2 parked records are for nobody" in caplog.text


def test_longest_delay_of_a_retry_is_what_can_be_promised() -> None:
    assert DelayConfig().delay_s_max * 1000 == RETRY_DELAY_MS_MAX


def test_a_time_that_cannot_be_promised_is_refused() -> None:
    delayed = Delayed()
    limit_us = delayed.config.delay_s_max * 1_000_000
    delayed.check(limit_us, 0)
    with pytest.raises(DelayRefused, match="the longest delay is 3650 days"):
        delayed.check(limit_us + 1, 0)
