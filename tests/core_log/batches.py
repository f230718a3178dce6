"""Random batches with every column there is, for tests of the formats."""

from hypothesis import strategies as st

from headrace.core_log.format import encode, stamp
from headrace.core_log.record import Gap, Producer, RecordBatch, RouteReference, RouteSet, gap_batch

U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
OFFSET = st.integers(0, 2**62)
COMPRESSIONS = ("none", "lz4", "auto")

blob = st.binary(max_size=20) | st.just(b"") | st.binary(min_size=5, max_size=5) | st.just(b"compressible " * 60)
small_set = st.lists(U32, max_size=5, unique=True).map(tuple)
large_set: st.SearchStrategy[RouteSet] = st.integers(0, 1000).map(lambda first: tuple(range(first, first + 70)))
tags = st.lists(st.text(max_size=8), max_size=4, unique=True).map(tuple)
header = st.tuples(st.binary(max_size=6), st.binary(max_size=12))
producers = st.none() | st.builds(
    Producer, st.binary(min_size=16, max_size=16), U32, st.integers(0, 2**63 - 1), st.booleans()
)


@st.composite
def record_batches(draw: st.DrawFn, *, references: bool = True) -> RecordBatch:
    """A batch of one or more runs, with or without each of the columns; perhaps a compacted one."""
    batch = RecordBatch(draw(OFFSET), draw(U32), draw(producers))
    key = draw(blob)
    same_keys = draw(st.booleans())
    for _ in range(draw(st.integers(1, 4))):
        count = draw(st.integers(1, 5))
        exactly = {"min_size": count, "max_size": count}
        batch.add(
            [key] * count if same_keys else draw(st.lists(blob, **exactly)),
            draw(st.lists(blob, **exactly) | st.just([b""] * count)),
            draw(st.lists(blob, **exactly) | st.lists(st.binary(min_size=7, max_size=7), **exactly)),
            timestamp_us=draw(I64),
            attributes=draw(st.integers(0, 2**24 - 1)),
            expiry_us=draw(st.just(0) | I64),
            route_set=draw(st.just(()) | small_set | large_set),
            origin=draw(st.just(0) | I64),
            tags=draw(st.just(()) | tags),
            headers=draw(st.none() | st.lists(st.lists(header, max_size=3).map(tuple), **exactly)),
        )
    if references and draw(st.booleans()):
        # An entry that stands for what an earlier batch of the segment spells out.
        batch.route_sets.append(RouteReference(draw(OFFSET), draw(st.integers(0, 100))))
        batch.routes.values[-1] = len(batch.route_sets) - 1
    if draw(st.booleans()):
        steps = draw(st.lists(st.integers(1, 50), min_size=batch.count, max_size=batch.count))
        offset = int(batch.base_offset) - 1
        batch.offsets = []
        for step in steps:
            offset += step
            batch.offsets.append(offset)
        batch.span = offset + draw(st.integers(1, 50)) - batch.base_offset
    return batch


gaps = st.builds(
    lambda base, span, epoch, reason: gap_batch(base, base + span, epoch, reason),
    OFFSET,
    st.integers(1, 2**32 - 1),
    U32,
    st.sampled_from(Gap),
)


def stored(batch: RecordBatch, *, compress: str = "none", salt: int = 1, durable_offset: int = 0) -> bytes:
    body = encode(batch, compress=compress)
    return b"".join(
        stamp(
            body,
            salt=salt,
            base_offset=batch.base_offset,
            leader_epoch=batch.epoch,
            durable_offset=durable_offset,
            leader_id=3,
        )
    )
