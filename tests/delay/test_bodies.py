"""Records read again by their places are written in another order, with all that is theirs."""

import numpy as np
import pytest
import trio

from headrace.core_log.log import TAGS_MAX
from headrace.core_log.record import Record
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.bodies import Bodies

from .house import house


def bodies_of(count: int, tags_each: int) -> Bodies:
    bodies = Bodies()
    bodies.keys, bodies.properties = [b"k"] * count, [b"p"] * count
    bodies.values = [b"%d" % number for number in range(count)]
    bodies.headers = [((b"h", b"%d" % number),) for number in range(count)]
    bodies.has_headers = True
    column = np.arange(count, dtype=np.int64)
    bodies.dues, bodies.numbers, bodies.timestamps, bodies.tags = column + 50, column, column + 70, column
    bodies.attributes = np.zeros(count, dtype=np.int64)
    bodies.tag_sets = [tuple(f"{number}-{tag}" for tag in range(tags_each)) for number in range(count)]
    return bodies


def records_of(bodies: Bodies, order: list[int]) -> list[list[Record]]:
    return [list(batch.records()) for batch in bodies.batches(np.array(order, dtype=np.intp))]


def test_batch_has_the_records_in_the_order_that_was_asked_for() -> None:
    bodies = bodies_of(4, 2)
    ((third, first),) = records_of(bodies, [3, 1])
    assert (third.value, third.expiry_us, third.timestamp_us, third.origin) == (b"3", 53, 73, 4)
    assert (third.tags, third.headers) == (("3-0", "3-1"), ((b"h", b"3"),))
    assert (first.value, first.expiry_us, first.origin, first.tags) == (b"1", 51, 2, ("1-0", "1-1"))


@pytest.mark.parametrize(("each", "batch_count"), [(TAGS_MAX // 8, 1), (TAGS_MAX // 8 + 1, 2), (TAGS_MAX // 2, 4)])
def test_records_with_too_many_tags_for_one_batch_become_several(each: int, batch_count: int) -> None:
    found = records_of(bodies_of(8, each), list(range(8)))
    assert len(found) == batch_count
    assert [record.value for batch in found for record in batch] == [b"%d" % number for number in range(8)]


async def test_block_may_be_emptied_while_it_is_sorted(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=3 * 86400)
        block = it.delays._engine.waiting.first_unsorted()
        assert block is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.delays._sorter.sort, block)
            while not block.is_sorted:
                await trio.lowlevel.checkpoint()
            # As by `tidy`, when all of it was decided meanwhile.
            block.keep(block.rows[:0])
        assert [(one.name, one.pending) for one in it.delays.buckets()] == [("near", 0), ("day", 1)]


async def test_sorted_records_keep_everything_over_a_crash(autojump_clock: object) -> None:
    storage = MemoryStorage()
    async with house(storage, stop=False) as it:
        values = [b"%d" % number for number in range(300)]
        dues = [it.clock.wall_us() + (2 + number % 40) * 86_400_000_000 for number in range(300)]
        headers = [((b"n", value),) for value in values]
        ids = await it.park_at(dues, values, tags=("red",), headers=headers)
        await it.sort()
        assert len(it.delays.buckets()) > 20
    async with house(storage.process_crash(), clock=it.clock) as it:
        for number in (0, 17, 299):
            found = await it.delays.inspect(ids[number])
            assert found is not None
            assert (found.value, found.due_us, found.tags) == (values[number], dues[number], ("red",))
            assert found.headers == headers[number]
