"""Records between two offsets are counted right, whatever gaps crashes have left: against what was written."""

from random import Random

import pytest
from tests.core_log.directories import SMALL, add_stream, append, commit, only_log, open_directory

from headrace.core_log.log import PartitionLog
from headrace.core_log.storage.memory import MemoryStorage
from headrace.gateways.delivery.consumer_groups_lag import Gaps


def written(log: PartitionLog) -> list[int]:
    return [offset for offset, _key, _value in log.entries()]


def test_gap_of_a_crash_holds_no_records() -> None:
    storage = MemoryStorage()
    (log,) = add_stream(open_directory(storage), "orders", SMALL).partitions
    append(log, 5)
    commit(log)
    log = only_log(open_directory(storage.process_crash()))
    append(log, 3)
    commit(log)
    gaps = Gaps()
    end = int(log.high_watermark)
    assert end > 1000
    assert gaps.records_between(log, 0, end) == 8
    assert gaps.records_between(log, 4, end) == 4
    assert gaps.records_between(log, 500, end) == 3
    assert gaps.records_between(log, 0, 500) == 5
    assert gaps.records_between(log, end, end) == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_range_has_as_many_records_as_were_written_there(seed: int) -> None:
    random = Random(seed)
    storage = MemoryStorage()
    directory = open_directory(storage)
    (log,) = add_stream(directory, "orders", SMALL).partitions
    gaps = Gaps()
    for _ in range(30):
        match random.randrange(6):
            case 0:
                storage = storage.process_crash()
                log = only_log(open_directory(storage, seed=random.getrandbits(30)))
            case 1:
                log.delete_before(random.randint(0, int(log.high_watermark)))
            case _:
                append(log, random.randint(1, 10))
        commit(log)
        found = written(log)
        for _ in range(5):
            first, end = sorted(random.choices([*found, 0, int(log.high_watermark), 777], k=2))
            end = min(end, int(log.high_watermark))
            assert gaps.records_between(log, first, end) == sum(first <= offset < end for offset in found)
