"""Records on their way into buckets are written in another order, with all that is theirs."""

import numpy as np
import pytest
import trio

from headrace.core_log.bulk import Cells, encode_bulk
from headrace.core_log.format import decode, maybe_header, stamp
from headrace.core_log.log import TAGS_MAX
from headrace.core_log.record import Record
from headrace.core_log.storage.memory import MemoryStorage
from headrace.delay.freight import Freight
from headrace.delay.rows import ROW

from .house import house


def freight_of(count: int, tags_each: int) -> Freight:
    column = np.arange(count, dtype=np.int64)
    return Freight(
        Cells(count, shared=b"k"),
        Cells(count, shared=b"p"),
        Cells(count, various=[b"%d" % number for number in range(count)]),
        column + 70,
        np.zeros(count, dtype=np.int64),
        column,
        [tuple(f"{number}-{tag}" for tag in range(tags_each)) for number in range(count)],
        [((b"h", b"%d" % number),) for number in range(count)],
    )


def records_of(freight: Freight, first: int, last: int) -> list[list[Record]]:
    rows = np.zeros(len(freight), dtype=ROW)
    rows["due"], rows["number"] = np.arange(len(freight)) + 50, np.arange(len(freight))
    found = []
    for batch in freight.batches(rows[first:last], first, last):
        data = b"".join(stamp(encode_bulk(batch), salt=1, base_offset=0, leader_epoch=1, durable_offset=0))
        header = maybe_header(data, 0, 1)
        assert header is not None
        found.append(list(decode(data, 0, header).records()))
    return found


def test_batch_has_some_neighbours_with_all_that_is_theirs() -> None:
    ((second, third),) = records_of(freight_of(4, 2), 1, 3)
    assert (third.value, third.expiry_us, third.timestamp_us, third.origin) == (b"2", 52, 72, 3)
    assert (third.tags, third.headers) == (("2-0", "2-1"), ((b"h", b"2"),))
    assert (second.value, second.expiry_us, second.origin, second.tags) == (b"1", 51, 2, ("1-0", "1-1"))


@pytest.mark.parametrize(("each", "batch_count"), [(TAGS_MAX // 8, 1), (TAGS_MAX // 8 + 1, 2), (TAGS_MAX // 2, 4)])
def test_records_with_too_many_tags_for_one_batch_become_several(each: int, batch_count: int) -> None:
    found = records_of(freight_of(8, each), 0, 8)
    assert len(found) == batch_count
    assert [record.value for batch in found for record in batch] == [b"%d" % number for number in range(8)]


async def test_one_by_one_what_differs_in_everything_is_sorted_as_it_was(autojump_clock: object) -> None:
    async with house() as it:
        now_us = it.clock.wall_us()
        for number in range(40):
            # Each of its own size, some with headers, some with tags, parked in any order.
            due_us = now_us + (2 + number * 7 % 40) * 86_400_000_000
            more: dict[str, object] = {"keys": [b"k" * (number % 3)], "properties": [b"p" * number]}
            if number % 2:
                more |= {"tags": (f"t{number % 5}",), "headers": [((b"n", b"%d" % number),)]}
            await it.park_at([due_us], [b"v" * number], target=b"t%d" % (number % 3), **more)
        before = await it.delays.list(limit=100)
        await it.sort()
        assert [one.pending for one in it.delays.buckets() if one.name == "near"] == [0]
        after = await it.delays.list(limit=100)
        assert after.records == before.records
        assert [len(one.value) * 7 % 40 for one in after.records] == sorted(number * 7 % 40 for number in range(40))


async def test_block_may_be_emptied_while_it_is_sorted(autojump_clock: object) -> None:
    async with house() as it:
        await it.park(b"a", in_s=3 * 86400)
        block = it.delays._engine.waiting.first_unsorted()
        assert block is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(it.delays._sorter.sort, block)
            while not it.delays._sorter._passes:
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
