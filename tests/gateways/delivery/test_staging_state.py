"""Entries and chunks of staging come back as they were written, and what was not written here is refused."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import UnknownFormat
from headrace.core_log.outbox import TargetPartition
from headrace.gateways.delivery.staging_state import (
    Chosen,
    Chunk,
    Pending,
    Query,
    Stage,
    decode_chunk,
    decode_entry,
    encode_chunk,
    encode_query,
    encode_stage,
    query_key,
    stage_key,
)

numbers = st.integers(0, 2**63 - 1)
names = st.text(max_size=20)
stages = st.builds(
    Stage,
    st.uuids(),
    names,
    names,
    numbers,
    numbers,
    numbers,
    names,
    st.sampled_from(["topic", "exchange", "queue"]),
    names,
    st.uuids(),
    numbers,
    numbers,
    numbers,
    numbers,
    numbers,
)
pendings = st.builds(Pending, numbers, st.lists(st.builds(Chosen, st.uuids(), numbers, numbers)).map(tuple))
queries = st.builds(
    Query,
    names,
    names,
    st.uuids(),
    numbers,
    st.none() | numbers,
    st.dictionaries(st.builds(TargetPartition, st.uuids(), numbers), numbers, max_size=5),
    st.none() | pendings,
)


@given(stages)
def test_stage_comes_back_as_it_was(stage: Stage) -> None:
    assert decode_entry(stage_key(stage.id), encode_stage(stage)) == stage


@given(queries)
def test_query_comes_back_as_it_was(query: Query) -> None:
    assert decode_entry(query_key(query.user, query.name), encode_query(query)) == query


@given(st.lists(st.tuples(st.binary(), st.binary(), st.lists(st.text(max_size=5)), numbers), max_size=5))
def test_chunk_comes_back_as_it_was(rows: list[tuple[bytes, bytes, list[str], int]]) -> None:
    chunk = Chunk(
        keys=[key for key, _, _, _ in rows],
        properties=[b""] * len(rows),
        values=[value for _, value, _, _ in rows],
        headers=[[(b"a", value)] for _, value, _, _ in rows],
        tags=[tags for _, _, tags, _ in rows],
        attributes=[1] * len(rows),
        partitions=[-1] * len(rows),
        due_us=[due for _, _, _, due in rows],
        ids=[b""] * len(rows),
    )
    assert decode_chunk(encode_chunk(chunk)) == chunk


@given(st.binary())
def test_what_was_not_written_here_is_refused(data: bytes) -> None:
    for key in (stage_key(UUID(int=1)), query_key("u", "q")):
        with pytest.raises(UnknownFormat):
            decode_entry(key, data)


def test_format_of_a_later_release_is_refused() -> None:
    with pytest.raises(UnknownFormat, match="reads format 1, not 2"):
        decode_chunk(encode_chunk(Chunk(format=2)))
