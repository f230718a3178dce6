"""The judge of the kill loop: each thing that may not be is found, and a run in which nothing happened is no proof."""

import pytest
from interop.amqp.ledger import Copy, Delivery, Kill, Ledger, QueueLedger

# Of one publisher, sent once.
ONE, TWO, THREE = (Copy(0, number, 0) for number in (1, 2, 3))
CONFIRMED = {(0, 1), (0, 2), (0, 3)}


def first(copy: Copy, life: int = 0) -> Delivery:
    return Delivery(copy, redelivered=False, life=life)


def again(copy: Copy, life: int = 1) -> Delivery:
    return Delivery(copy, redelivered=True, life=life)


def problems(*deliveries: Delivery, ordered: bool = True, settled: tuple[Copy, ...] = (), after: int = 0) -> list[str]:
    """Of a queue with these deliveries; `settled` were acknowledged for good after the first few of them."""
    queue = QueueLedger("q", ordered, left_over=0)
    queue.deliveries.extend(deliveries[:after])
    queue.settle(list(settled), 0)
    queue.deliveries.extend(deliveries[after:])
    return queue.problems(CONFIRMED)


def test_everything_once_and_in_order_is_right() -> None:
    assert problems(first(ONE), first(TWO), first(THREE)) == []


def test_flagged_repetitions_are_right() -> None:
    assert problems(first(ONE), first(TWO), again(ONE), again(TWO), first(THREE, 1), again(THREE)) == []


def test_copies_that_were_sent_again_are_right() -> None:
    second = Copy(0, 2, 1)
    assert problems(first(ONE), first(TWO), first(second), first(THREE)) == []


def test_first_delivery_may_be_flagged() -> None:
    assert problems(first(ONE), again(TWO), again(THREE)) == []


def test_confirmed_and_never_delivered_is_lost() -> None:
    assert problems(first(ONE), first(THREE)) == ["q: 1 confirmed messages lost, the first (0, 2)"]


def test_queue_that_gets_few_misses_only_those() -> None:
    queue = QueueLedger("q", ordered=True, every=2, left_over=0)
    assert queue.problems(CONFIRMED) == ["q: 1 confirmed messages lost, the first (0, 2)"]
    queue.deliveries.append(first(TWO))
    assert queue.problems(CONFIRMED) == []


def test_newer_before_older_is_out_of_order() -> None:
    (told,) = problems(first(ONE), first(THREE), first(TWO))
    assert "after number 3" in told


def test_order_is_each_publishers_own() -> None:
    other = Copy(1, 1, 0)
    assert problems(first(ONE), first(TWO), first(other), first(THREE)) == []


def test_order_is_not_looked_at_where_several_read() -> None:
    assert problems(first(TWO), first(ONE), first(THREE), ordered=False) == []


@pytest.mark.parametrize("ordered", [True, False])
def test_repetition_without_the_flag_is_wrong(ordered: bool) -> None:
    (told,) = problems(first(ONE), first(TWO), first(THREE), first(TWO, 1), ordered=ordered)
    assert "without the flag" in told


@pytest.mark.parametrize("life", [0, 1])
def test_what_was_settled_may_not_come_back(life: int) -> None:
    (told,) = problems(first(ONE), first(TWO), first(THREE), again(ONE, life), settled=(ONE,), after=3)
    assert "came back though acknowledged" in told


def test_what_came_before_it_was_settled_did_not_come_back() -> None:
    assert problems(first(ONE), again(ONE, 0), first(TWO), first(THREE), settled=(ONE,), after=2) == []


@pytest.mark.parametrize(("left_over", "told"), [(None, "nobody looked"), (2, "2 messages came back")])
def test_queue_must_be_empty_at_the_end(left_over: int | None, told: str) -> None:
    queue = QueueLedger("q", ordered=True, left_over=left_over)
    assert [told in problem for problem in queue.problems(set())] == [True]


def whole_run() -> Ledger:
    queue = QueueLedger("q", ordered=True, left_over=0)
    queue.deliveries += [first(ONE), first(TWO), first(THREE), again(THREE)]
    queue.settle([ONE], 0)
    return Ledger([queue], set(CONFIRMED), republished=1, kills=[Kill(unconfirmed=5)])


def test_run_in_which_enough_happened_is_a_proof() -> None:
    assert whole_run().problems(kills_min=1, confirmed_min=3) == []


def test_run_with_too_little_in_it_proves_nothing() -> None:
    empty = QueueLedger("q", ordered=True, left_over=0)
    told = Ledger([empty], kills=[Kill(unconfirmed=0)]).problems(kills_min=2, confirmed_min=3)
    assert all(problem.startswith("this run proved nothing: ") for problem in told)
    assert len(told) == 5


@pytest.mark.parametrize(("kills_min", "confirmed_min"), [(2, 3), (1, 4)])
def test_one_short_of_what_was_wanted_proves_nothing(kills_min: int, confirmed_min: int) -> None:
    assert whole_run().problems(kills_min=kills_min, confirmed_min=confirmed_min)


def test_thread_that_failed_fails_the_run() -> None:
    run = whole_run()
    run.failures.append("publisher 0: no")
    assert run.problems(kills_min=1, confirmed_min=3) == ["publisher 0: no"]
