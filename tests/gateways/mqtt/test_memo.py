"""A memo gives what its function gives, and never grows past its bounds."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.mqtt.memo import Memo


@given(st.lists(st.binary(max_size=6), max_size=40))
def test_a_memo_gives_what_its_function_gives(keys: list[bytes]) -> None:
    memo: Memo[bytes] = Memo(lambda key: key * 2, count_max=3, bytes_max=8)
    for key in keys:
        assert memo[key] == key * 2
        assert len(memo) <= 3
        assert all(len(value) <= 8 for value in memo.values())


def test_what_is_known_is_not_worked_out_again() -> None:
    asked: list[int] = []

    def compute(key: int) -> bytes:
        asked.append(key)
        return bytes((key,))

    memo: Memo[int] = Memo(compute)
    assert memo[1] is memo[1]
    assert asked == [1]


def test_what_is_long_is_worked_out_each_time() -> None:
    memo: Memo[bytes] = Memo(lambda key: key * 100, bytes_max=100)
    assert memo[b"ab"] == b"ab" * 100
    assert not memo
