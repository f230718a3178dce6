"""Producers as the log knows them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.errors import SequenceRefused
from headrace.gateways.delivery.producers import EPOCH_MAX, NAME_BYTES_MAX, SEQUENCE_MAX, producer

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def test_limits_themselves_are_lawful() -> None:
    found = producer("/", "guest", "p" * NAME_BYTES_MAX, EPOCH_MAX, SEQUENCE_MAX)
    assert (len(found.id), found.epoch, found.first_sequence) == (16, EPOCH_MAX, SEQUENCE_MAX)


@pytest.mark.parametrize(
    ("name", "epoch", "sequence"),
    [
        ("", 0, 0),
        ("p" * (NAME_BYTES_MAX + 1), 0, 0),
        ("p", -1, 0),
        ("p", EPOCH_MAX + 1, 0),
        ("p", 0, -1),
        ("p", 0, SEQUENCE_MAX + 1),
    ],
)
def test_what_lies_beyond_is_refused(name: str, epoch: int, sequence: int) -> None:
    with pytest.raises(SequenceRefused):
        producer("/", "guest", name, epoch, sequence)


@given(st.tuples(texts, texts, texts), st.tuples(texts, texts, texts))
def test_two_are_the_same_producer_exactly_when_host_user_and_name_are(
    one: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    assert (producer(*one, 0, 0).id == producer(*other, 0, 0).id) == (one == other)


def test_letters_cannot_be_moved_between_host_user_and_name() -> None:
    assert producer("ab", "c", "d", 0, 0).id != producer("a", "bc", "d", 0, 0).id
    assert producer("a", "bc", "d", 0, 0).id != producer("a", "b", "cd", 0, 0).id
