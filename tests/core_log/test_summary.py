"""The small Bloom filter of a batch: its numbers are fixed, and it never denies what is inside."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core_log.summary import ENTRIES_MAX, key_hash, may_hold, summarise, tag_hash

hashes = st.sets(st.integers(0, 2**64 - 1), max_size=60)


@given(hashes)
def test_what_is_inside_is_never_denied(entries: set[int]) -> None:
    summary = summarise(entries)
    assert all(may_hold(summary, entry) for entry in entries)


@given(hashes)
def test_order_of_entries_does_not_matter(entries: set[int]) -> None:
    assert summarise(sorted(entries)) == summarise(sorted(entries, reverse=True))


@pytest.mark.parametrize(("count", "bits"), [(0, 64), (1, 64), (8, 64), (9, 128), (17, 256), (512, 4096)])
def test_size_is_a_power_of_two_with_eight_bits_for_each(count: int, bits: int) -> None:
    assert 8 * len(summarise([key_hash(str(number).encode()) for number in range(count)])) == bits


def test_too_many_entries_give_no_summary_and_nothing_is_denied() -> None:
    assert summarise(range(ENTRIES_MAX + 1)) == b""
    assert may_hold(b"", 12345)


def test_most_of_what_is_not_inside_is_denied() -> None:
    summary = summarise([tag_hash(f"tag {number}") for number in range(512)])
    wrong = sum(may_hold(summary, tag_hash(f"other {number}")) for number in range(10_000))
    # Four probes at eight bits for each entry: 2.4 % by theory.
    assert wrong < 400


def test_numbers_of_the_format_are_fixed() -> None:
    assert tag_hash("eu") == 0xD7B3_9D21_8FF2_F1AF
    assert key_hash(b"eu") == 0xD58A_B842_EB27_AC93
    # Bits 5, 8, 11 and 14: the lower half says where to begin, the upper half (made odd) how far to step.
    assert summarise([0x0000_0002_0000_0005]).hex() == "2049000000000000"
