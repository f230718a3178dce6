"""Offsets of a stream: one text for one place, and nothing read that was not written."""

import json
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.spark.stream_offsets import InvalidOffsets, Offsets, TopicOffsets

ID = UUID("0b6e4f0e-6f2d-4b43-9d2c-8f4f0a6a0c11")

topics = st.builds(
    TopicOffsets,
    st.uuids(),
    st.dictionaries(st.integers(0, 1000), st.integers(0, 2**63 - 1), max_size=20),
)
offsets = st.builds(Offsets, st.dictionaries(st.text(max_size=20), topics, max_size=5))


@given(offsets)
def test_what_is_written_is_read(found: Offsets) -> None:
    assert Offsets.from_json(json.loads(json.dumps(found.to_json()))) == found


@given(offsets)
def test_same_place_is_same_text_in_whatever_order_it_was_put_together(found: Offsets) -> None:
    """Spark compares texts: a flipped order would run an empty batch."""
    flipped = Offsets(
        {
            name: TopicOffsets(topic.id, dict(reversed(topic.next.items())))
            for name, topic in reversed(found.topics.items())
        }
    )
    text = json.dumps(found.to_json())
    assert json.dumps(flipped.to_json()) == text
    assert json.dumps(json.loads(text), sort_keys=True) == text


def test_text_is_the_one_that_checkpoints_hold() -> None:
    found = Offsets({"orders": TopicOffsets(ID, {10: 3, 0: 123, 2: 7})})
    text = f'{{"topics": {{"orders": {{"0": 123, "10": 3, "2": 7, "id": "{ID}"}}}}, "v": 1}}'
    assert json.dumps(found.to_json()) == text


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"v": 1},
        {"v": 2, "topics": {}},
        {"v": 1, "topics": []},
        {"v": 1, "topics": {}, "more": 1},
        {"v": 1, "topics": {"a": {"0": 1}}},
        {"v": 1, "topics": {"a": {"id": "none"}}},
        {"v": 1, "topics": {"a": {"id": 7}}},
        {"v": 1, "topics": {"a": 7}},
        {"v": 1, "topics": {"a": {"id": str(ID), "x": 1}}},
        {"v": 1, "topics": {"a": {"id": str(ID), "0": -1}}},
        {"v": 1, "topics": {"a": {"id": str(ID), "0": "1"}}},
        {"v": 1, "topics": {"a": {"id": str(ID), "0": True}}},
        {"v": 1, "topics": {"a": {"id": str(ID), "-1": 1}}},
    ],
    ids=str,
)
def test_what_no_stream_has_written_is_refused(document: object) -> None:
    with pytest.raises(InvalidOffsets):
        Offsets.from_json(document)


def test_two_topics_of_one_name_are_not_the_same_place() -> None:
    assert Offsets({"a": TopicOffsets(ID, {0: 1})}) != Offsets({"a": TopicOffsets(uuid4(), {0: 1})})
