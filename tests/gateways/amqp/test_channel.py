"""What a channel holds and what it tells, against a plain dict of tags and a plain list of publishes."""

from dataclasses import dataclass
from random import Random
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.amqp.channel import Channel, Confirm, HeldBy, Outcome
from headrace.gateways.amqp.errors import AmqpError, ReplyCode
from headrace.gateways.delivery.lane import Stretch
from headrace.gateways.delivery.queue import UNLIMITED, Queue


def queue_named(name: str) -> Queue:
    """A channel only carries queues about."""
    return cast(Queue, name)


def stretch_of(first: int, count: int) -> Stretch:
    return Stretch(cast(Any, None), first, count, cast(Any, None), first, None, 0)


def sequences(stretch: Stretch) -> list[int]:
    return list(range(stretch.seq, stretch.seq + stretch.count))


def test_tags_are_given_in_order_and_tags_without_acks_are_passed_over() -> None:
    channel = Channel(1)
    assert channel.hold(queue_named("q"), stretch_of(0, 3), HeldBy()) == 1
    assert channel.skip(2) == 4
    assert channel.hold(queue_named("q"), stretch_of(3, 1), HeldBy()) == 6


def test_basic_get_holds_a_delivery_but_does_not_count_for_the_prefetch() -> None:
    channel = Channel(1)
    channel.channel_prefetch = 5
    channel.hold(queue_named("q"), stretch_of(0, 3), None)
    assert (channel.outstanding, channel.room()) == (0, 5)
    channel.release(2, True)
    assert (channel.outstanding, channel.room()) == (0, 5)


def test_one_in_the_middle_of_a_run_leaves_the_others_held() -> None:
    channel = Channel(1)
    channel.hold(queue_named("q"), stretch_of(10, 5), None)
    [(queue, one)] = channel.release(3, False)
    assert (queue, sequences(one)) == ("q", [12])
    assert [sequences(stretch) for _queue, stretch in channel.release_all()] == [[10, 11], [13, 14]]


def test_tag_zero_with_multiple_means_everything_even_if_that_is_nothing() -> None:
    channel = Channel(1)
    assert channel.release(0, True) == []
    channel.hold(queue_named("q"), stretch_of(0, 3), None)
    assert [sequences(stretch) for _queue, stretch in channel.release(0, True)] == [[0, 1, 2]]
    assert channel.release_all() == []


@pytest.mark.parametrize(
    ("tag", "multiple"), [(0, False), (1, False), (1, True), (4, False), (4, True), (6, True), (7, True), (99, False)]
)
def test_tag_that_is_not_held_is_refused_and_nothing_is_released(tag: int, multiple: bool) -> None:
    """Settled before (1), sent to a consumer without acks (4), never given (6 and more)."""
    channel = Channel(1)
    consumer = HeldBy()
    channel.hold(queue_named("q"), stretch_of(0, 3), consumer)
    channel.skip(1)
    channel.hold(queue_named("q"), stretch_of(3, 1), consumer)
    channel.release(1, False)
    with pytest.raises(AmqpError) as refused:
        channel.release(tag, multiple)
    assert refused.value.code == ReplyCode.PRECONDITION_FAILED
    assert f"unknown delivery tag {tag}" in str(refused.value)
    assert channel.outstanding == 3


def test_room_of_a_channel_is_what_its_prefetch_leaves() -> None:
    channel = Channel(1)
    assert channel.room() == UNLIMITED
    channel.channel_prefetch = 5
    channel.hold(queue_named("q"), stretch_of(0, 3), HeldBy())
    assert channel.room() == 2
    channel.channel_prefetch = 2
    assert channel.room() <= 0


@dataclass(slots=True)
class Delivery:
    queue: str
    sequence: int
    consumer: HeldBy | None


@pytest.mark.parametrize("seed", range(150))
def test_channel_releases_what_a_dict_of_tags_would(seed: int) -> None:
    random = Random(seed)
    channel = Channel(1)
    consumers = [HeldBy(), HeldBy(), None]
    oracle: dict[int, Delivery] = {}
    sequence = 0
    # Long walks let many runs pile up and the front be trimmed.
    for _ in range(random.choice((50, 2000))):
        kind = random.randrange(10)
        if kind < 4:
            count = random.choice((1, 1, 2, 7))
            queue, consumer = random.choice("ab"), random.choice(consumers)
            first = channel.hold(queue_named(queue), stretch_of(sequence, count), consumer)
            for index in range(count):
                oracle[first + index] = Delivery(queue, sequence + index, consumer)
            sequence += count
        elif kind == 4:
            channel.skip(1)
        else:
            multiple = random.random() < 0.2
            tag = random.choice([*list(oracle)[:3], *list(oracle)[-2:], random.randrange(channel.next_tag + 2)])
            expected = [one for one in oracle if (one <= tag or tag == 0 if multiple else one == tag)]
            if tag not in oracle and not (multiple and tag == 0):
                with pytest.raises(AmqpError):
                    channel.release(tag, multiple)
                continue
            released = [(queue, one) for queue, run in channel.release(tag, multiple) for one in sequences(run)]
            assert released == [(oracle[one].queue, oracle[one].sequence) for one in expected]
            for one in expected:
                del oracle[one]
        assert channel.outstanding == sum(one.consumer is not None for one in oracle.values())
        for consumer in consumers[:2]:
            assert consumer is not None
            assert consumer.outstanding == sum(one.consumer is consumer for one in oracle.values())
    rest = [one for _queue, run in channel.release_all() for one in sequences(run)]
    assert rest == [one.sequence for one in oracle.values()]
    assert channel.outstanding == 0


# -- confirms ---------------------------------------------------------------------------------------------------


def test_confirms_wait_for_an_earlier_publish_that_is_not_safe_yet() -> None:
    channel = Channel(1)
    first, second = channel.expect(2), channel.expect(3)
    second.outcome = Outcome.ACK
    assert channel.told() == []
    first.outcome = Outcome.ACK
    assert channel.told() == [(5, Outcome.ACK)]
    assert (channel.told(), channel.unconfirmed) == ([], 0)


def test_nacks_are_told_apart_from_the_acks_around_them() -> None:
    channel = Channel(1)
    for outcome in (Outcome.ACK, Outcome.NACK, Outcome.NACK, Outcome.ACK):
        channel.expect(1).outcome = outcome
    assert channel.told() == [(1, Outcome.ACK), (3, Outcome.NACK), (4, Outcome.ACK)]


def test_expectation_may_be_replaced_by_finer_ones() -> None:
    channel = Channel(1)
    channel.expect(1).outcome = Outcome.ACK
    channel.unexpect(channel.expect(2))
    channel.expect(1).outcome = Outcome.NACK
    channel.expect(1)
    assert channel.told() == [(1, Outcome.ACK), (2, Outcome.NACK)]
    assert channel.unconfirmed == 1


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans()), max_size=30), st.randoms(use_true_random=False))
def test_every_publish_is_told_once_in_order_and_never_across_one_that_waits(
    publishes: list[tuple[int, bool]], random: Random
) -> None:
    channel = Channel(1)
    confirms: list[Confirm] = []
    outcomes: dict[int, Outcome] = {}
    tag = 0
    for count, safe in publishes:
        confirms.append(channel.expect(count))
        for _ in range(count):
            tag += 1
            outcomes[tag] = Outcome.ACK if safe else Outcome.NACK
    told: dict[int, Outcome] = {}
    for place in random.sample(range(len(confirms)), len(confirms)):
        confirms[place].outcome = Outcome.ACK if publishes[place][1] else Outcome.NACK
        for upto, outcome in channel.told():
            told.update(dict.fromkeys(range(len(told) + 1, upto + 1), outcome))
        waiting = next((at for at, one in enumerate(confirms) if one.outcome is Outcome.WAITING), len(confirms))
        assert len(told) == sum(one.count for one in confirms[:waiting])
        assert channel.unconfirmed == tag - len(told)
    assert told == outcomes


@dataclass(frozen=True)
class Patience:
    """As much of a queue as a look for overdue deliveries needs."""

    consumer_timeout_ms: int | None = None

    @property
    def settings(self) -> "Patience":
        return self


def test_delivery_is_overdue_once_it_was_held_for_the_timeout_since_it_was_first_seen() -> None:
    channel = Channel(1)
    channel.hold(cast(Queue, Patience()), stretch_of(0, 3), None)
    assert [channel.overdue(now, 10) for now in (100.0, 105.0, 109.9)] == [None] * 3
    found = channel.overdue(110.0, 10)
    assert found is not None and found.tag == 1
    channel.release(2, False)
    found = channel.overdue(110.0, 10)
    assert found is not None and found.tag == 1, "the rest of a split run has waited as long"
    channel.release(0, True)
    assert channel.overdue(200.0, 10) is None


def test_the_queues_own_timeout_wins_and_zero_is_for_ever() -> None:
    channel = Channel(1)
    channel.hold(cast(Queue, Patience()), stretch_of(0, 1), None)
    channel.hold(cast(Queue, Patience(2000)), stretch_of(1, 1), None)
    assert channel.overdue(0.0, 0) is None
    found = channel.overdue(2.0, 0)
    assert found is not None and found.tag == 2
    channel.release(2, False)
    assert channel.overdue(1e9, 0) is None
