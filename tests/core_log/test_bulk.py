"""What is moved in bulk is written as if each record had been looked at."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.bulk import BulkBatch, Cells, encode_bulk, pick, placed
from headrace.core_log.format import decode, decode_columns, encode, maybe_header
from headrace.core_log.record import RecordBatch

from .batches import COMPRESSIONS, record_batches, stored


def cells_of(column: list[bytes]) -> Cells:
    """As a batch with this column says it when it is read."""
    batch = RecordBatch(0, 1)
    batch.add([b""] * len(column), column, [b""] * len(column), timestamp_us=0)
    data = stored(batch)
    header = maybe_header(data, 0, 1)
    assert header is not None
    found = decode_columns(data, 0, header)
    return Cells.of(found.properties, found.properties_sizes, len(column), found.properties_shared)


def bulk_of(batch: RecordBatch) -> BulkBatch:
    columns = (one.expand() for one in (batch.timestamps, batch.expiries, batch.attributes, batch.origins, batch.tags))
    cells = (cells_of(batch.keys), cells_of(batch.properties), cells_of(batch.values))
    return BulkBatch(*columns, batch.tag_sets, *cells, batch.headers)


@given(record_batches(references=False))
def test_bulk_batch_is_read_as_the_records_that_it_was_made_of(batch: RecordBatch) -> None:
    plain = RecordBatch(batch.base_offset, batch.epoch)
    plain.add_columns(
        batch.keys,
        batch.properties,
        batch.values,
        timestamps=batch.timestamps.expand().tolist(),
        expiries=batch.expiries.expand().tolist(),
        attributes=batch.attributes.expand().tolist(),
        origins=batch.origins.expand().tolist(),
        tags=[batch.tags_at(index) for index in range(batch.count)],
        headers=batch.headers,
    )
    bulk = bulk_of(plain)
    for compress in COMPRESSIONS:
        body = encode_bulk(bulk, compress=compress)
        expected = encode(plain, compress=compress)
        assert (body.size, body.summary, body[:12]) == (expected.size, expected.summary, expected[:12])
        data = stored(plain, compress=compress)
        header = maybe_header(data, 0, 1)
        assert header is not None
        again = decode(b"".join((data[: 128 + header.summary_size], body.fixed, *body.blobs)), 0, header)
        assert list(again.records()) == list(plain.records())


@given(st.data())
def test_cells_are_put_where_they_are_wanted(data: st.DataObject) -> None:
    alike = st.binary(min_size=3, max_size=3)
    entry = data.draw(st.sampled_from([st.just(b"same"), alike, st.binary(max_size=4), st.just(b"")]))
    columns = data.draw(st.lists(st.lists(entry, min_size=1, max_size=5), min_size=1, max_size=4))
    count = sum(map(len, columns))
    places = np.array(data.draw(st.permutations(range(count))), dtype=np.intp)
    wanted = [b""] * count
    parts, at = [], 0
    for column in columns:
        here = places[at : at + len(column)]
        parts.append((cells_of(column), here))
        for place, cell in zip(here.tolist(), column, strict=True):
            wanted[place] = cell
        at += len(column)
    found = placed(parts)
    assert found.count == count
    assert found.byte_count == sum(map(len, wanted))
    order = np.array(data.draw(st.permutations(range(count))), dtype=np.intp)
    low, high = sorted(data.draw(st.tuples(st.integers(0, count), st.integers(0, count))))
    assert entries(found) == wanted
    assert entries(found.part(low, high)) == wanted[low:high]
    assert entries(found.take(order)) == [wanted[place] for place in order.tolist()]


def entries(cells: Cells) -> list[bytes]:
    if not cells.count:
        return []
    fixed: list[bytes] = []
    blob, word = cells.encode(fixed, share=False)
    sizes = np.frombuffer(fixed[0], dtype="<u4").tolist()
    bounds = np.cumsum([0, *(sizes if word != 1 else sizes * cells.count)]).tolist()
    return [bytes(blob[low:high]) for low, high in pairwise(bounds)]


@given(st.lists(st.integers(0, 9), max_size=6))
def test_pick_takes_the_entries_at_these_places(places: list[int]) -> None:
    assert pick("abcdefghij", places) == ["abcdefghij"[place] for place in places]
