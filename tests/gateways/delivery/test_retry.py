"""Delays of a retry policy, and the headers that tell of attempts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.delivery.retry import (
    ATTEMPTS_TOLD_MAX,
    LEVELS_MS,
    Backoff,
    RetryPolicy,
    after_failure,
    attempt_of,
    attempts_in,
)

policies = st.builds(
    RetryPolicy,
    retries_max=st.integers(0, 1000),
    backoff=st.sampled_from(Backoff),
    delay_ms=st.integers(0, 10**9),
    delay_max_ms=st.integers(10**9, 10**12),
    jitter=st.booleans(),
)


def waits(policy: RetryPolicy, count: int) -> list[int]:
    return [policy.wait_ms(attempt, 0.0) for attempt in range(1, count + 1)]


def test_fixed_waits_are_all_alike() -> None:
    assert waits(RetryPolicy(3, Backoff.FIXED, delay_ms=500), 4) == [500] * 4


def test_exponential_waits_double_up_to_the_longest() -> None:
    assert waits(RetryPolicy(9, delay_ms=100, delay_max_ms=1000), 6) == [100, 200, 400, 800, 1000, 1000]


def test_levels_are_those_of_rocketmq_and_the_last_one_stays() -> None:
    found = waits(RetryPolicy(30, Backoff.LEVELS), 20)
    assert found[:5] == [1000, 5000, 10_000, 30_000, 60_000]
    assert found[17:] == [7_200_000] * 3
    assert len(LEVELS_MS) == 18


def test_last_retry_is_used_up_by_one_attempt_more_than_there_are_retries() -> None:
    policy = RetryPolicy(2)
    assert [policy.retries(attempt) for attempt in (1, 2, 3)] == [True, True, False]
    assert not RetryPolicy(0).retries(1)


@given(policies, st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_jitter_stays_in_the_upper_half_of_the_wait(policy: RetryPolicy, attempt: int, chance: float) -> None:
    plain = RetryPolicy(policy.retries_max, policy.backoff, policy.delay_ms, policy.delay_max_ms)
    whole = plain.wait_ms(attempt, chance)
    found = policy.wait_ms(attempt, chance)
    assert whole // 2 <= found <= whole if policy.jitter else found == whole


def test_record_that_never_failed_is_at_its_first_attempt() -> None:
    assert attempt_of(()) == attempt_of(((b"other", b"x"),)) == 1


@given(st.lists(st.tuples(st.integers(0, 2**62), st.sampled_from(("rejected", "delivery_limit"))), max_size=100))
def test_headers_tell_each_attempt_in_order(story: list[tuple[int, str]]) -> None:
    headers = ((b"trace", b"1"),)
    for place, (time_us, reason) in enumerate(story):
        headers = after_failure(headers, place + 2, reason, time_us)
    assert headers[0] == (b"trace", b"1")
    assert attempt_of(headers) == len(story) + 1
    if len(story) > ATTEMPTS_TOLD_MAX:
        story = [story[0], *story[1 - ATTEMPTS_TOLD_MAX :]]
    assert attempts_in(dict(headers)) == story


@pytest.mark.parametrize("count", [ATTEMPTS_TOLD_MAX, ATTEMPTS_TOLD_MAX + 1, 3 * ATTEMPTS_TOLD_MAX])
def test_very_long_stories_keep_their_beginning_and_their_end(count: int) -> None:
    headers: tuple[tuple[bytes, bytes], ...] = ()
    for number in range(count):
        headers = after_failure(headers, number + 2, "rejected", number)
    told = [time_us for time_us, _reason in attempts_in(dict(headers))]
    assert (len(told), told[0], told[-1]) == (ATTEMPTS_TOLD_MAX, 0, count - 1)
