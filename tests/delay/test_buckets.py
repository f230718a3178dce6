"""Buckets: how long each is, and when an hour is worth one of its own."""

import numpy as np

from headrace.delay.buckets import DAY_US, HOUR_US, coarser, spans_of
from headrace.delay.config import DelayConfig

NOON = 1_000 * DAY_US + 12 * HOUR_US


def test_few_of_one_hour_go_to_the_bucket_of_their_day_and_many_do_not() -> None:
    dues = np.array([NOON + HOUR_US] * 3 + [NOON + 2 * HOUR_US] * 2 + [NOON + 3 * DAY_US], dtype=np.int64)
    spans = spans_of(dues, NOON, DelayConfig())
    assert spans.tolist() == [HOUR_US] * 5 + [DAY_US]
    assert coarser(dues, spans, 3).tolist() == [HOUR_US] * 3 + [DAY_US] * 3


def test_with_nothing_due_within_hours_nothing_changes() -> None:
    dues = np.array([NOON + 3 * DAY_US], dtype=np.int64)
    spans = spans_of(dues, NOON, DelayConfig())
    assert coarser(dues, spans, 3).tolist() == [DAY_US]
