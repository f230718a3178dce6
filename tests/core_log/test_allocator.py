"""Giving memory back is safe at any time, and tells whether it could."""

from headrace.core_log import allocator


def test_trim_tells_whether_something_was_given_back_and_may_be_called_again() -> None:
    held = [bytes(10_000) for _ in range(1_000)]
    del held
    assert allocator.trim() in (True, False)
    assert allocator.trim() in (True, False)
