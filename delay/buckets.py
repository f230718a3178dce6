"""The outer rings: which bucket a due time belongs to. Machine; pure.

    now |-- hours (24) --|------------ days (31) ------------|---- months of 30 days ...

A bucket is a span of due time, aligned to whole spans since 1970, whose records lie together in one internal stream.
Buckets are made when the first record needs one and dropped when the last has gone, so rings of other sizes than before
disturb nothing. Neighbours: sorter.py fills them.
"""

import numpy as np
import numpy.typing as npt

from headrace.delay.config import DelayConfig
from headrace.delay.marks import Places

HOUR_US = 3600 * 1_000_000
DAY_US = 24 * HOUR_US
MONTH_US = 30 * DAY_US
NAMES = {HOUR_US: "hour", DAY_US: "day", MONTH_US: "month"}


def spans_of(dues: Places, now_us: int, config: DelayConfig) -> npt.NDArray[np.int64]:
    """How long the bucket of each due time is: the farther away, the longer."""
    ahead = dues - now_us
    near, middle = config.hour_bucket_count * HOUR_US, config.day_bucket_count * DAY_US
    return np.where(ahead < near, HOUR_US, np.where(ahead < middle, DAY_US, MONTH_US)).astype(np.int64)


def coarser(dues: Places, spans: npt.NDArray[np.int64], count_min: int) -> npt.NDArray[np.int64]:
    """The same, where whoever is among few in an hour goes to the bucket of the day: a batch, a file and a sync of
    their own would cost as much as those of many."""
    hours = spans == HOUR_US
    _starts, which, counts = np.unique(starts_of(dues[hours], HOUR_US), return_inverse=True, return_counts=True)
    found = spans.copy()
    found[hours] = np.where(counts[which.reshape(-1)] < count_min, DAY_US, HOUR_US)
    return found


def starts_of(dues: Places, spans: npt.NDArray[np.int64] | int) -> npt.NDArray[np.int64]:
    return dues // spans * spans


def name_of(span_us: int) -> str:
    return NAMES.get(span_us, "bucket")
