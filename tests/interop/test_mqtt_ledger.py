"""The judge of the MQTT kill loop: what may not be is found, and a run in which nothing happened is no proof."""

import pytest
from interop.amqp.ledger import Kill
from interop.mqtt.ledger import Arrival, Ledger, Number, Subscription

# Publisher 1 has QoS 1, publisher 2 has QoS 2.
PUBLISHERS = {1: 1, 2: 2}
ONE, TWO, THREE = (Number(1, number) for number in (1, 2, 3))
EXACT = Number(2, 1)
AGAIN = "came again in one connection"


def ledger(*arrivals: Arrival, qos: int = 2, resent: tuple[Number, ...] = ()) -> Ledger:
    """One in which enough happened, beside these arrivals."""
    busy = Subscription("busy", 1, [Arrival(one, life) for one in (ONE, TWO, THREE, EXACT) for life in (1, 2)])
    made = Ledger([Subscription("s", qos, list(arrivals)), busy], dict(PUBLISHERS), {ONE, TWO, THREE, EXACT})
    made.resent.update([THREE, EXACT, *resent])
    made.kills.append(Kill(unconfirmed=5))
    return made


def problems(*messages: Number, qos: int = 2, resent: tuple[Number, ...] = ()) -> list[str]:
    """Of a subscription that these came to, in one connection."""
    run = ledger(*(Arrival(message, 1) for message in messages), qos=qos, resent=resent)
    return run.problems(kills_min=1, acknowledged_min=1)


@pytest.mark.parametrize("qos", [1, 2])
def test_everything_once_and_in_order_is_right(qos: int) -> None:
    assert problems(ONE, EXACT, TWO, THREE, qos=qos) == []


def test_acknowledged_and_never_delivered_is_lost() -> None:
    assert problems(ONE, THREE, EXACT) == [f"s: 1 acknowledged messages lost, the first {TWO}"]


def test_newer_before_older_is_out_of_order() -> None:
    (told,) = problems(ONE, THREE, TWO, EXACT)
    assert "after number 3" in told


def test_order_is_each_publishers_own() -> None:
    assert problems(ONE, TWO, EXACT, THREE) == []


def test_copy_that_the_publisher_made_is_right_with_qos_1() -> None:
    assert problems(ONE, TWO, TWO, THREE, EXACT, resent=(TWO,)) == []


def test_copy_that_nobody_made_is_wrong() -> None:
    (told,) = problems(ONE, TWO, TWO, THREE, EXACT)
    assert AGAIN in told


def test_what_a_qos_2_publisher_sent_again_is_the_same_message() -> None:
    twice, again = problems(ONE, TWO, THREE, EXACT, EXACT)
    assert "came twice with QoS 2" in twice and AGAIN in again


def across_connections(message: Number, qos: int) -> list[str]:
    first = [Arrival(one, 1) for one in (ONE, TWO, THREE, EXACT)]
    return ledger(*first, Arrival(message, 2), qos=qos).problems(kills_min=1, acknowledged_min=1)


@pytest.mark.parametrize(("message", "qos"), [(ONE, 1), (ONE, 2), (EXACT, 1)])
def test_delivery_with_qos_1_may_come_again_in_another_connection(message: Number, qos: int) -> None:
    assert across_connections(message, qos) == []


def test_delivery_with_qos_2_may_not() -> None:
    (told,) = across_connections(EXACT, 2)
    assert "came twice with QoS 2" in told


def test_forgotten_session_and_failed_thread_fail_the_run() -> None:
    run = ledger(*(Arrival(one, 1) for one in (ONE, TWO, THREE, EXACT)))
    run.forgotten.append("reader")
    run.failures.append("publisher 1: no")
    told = run.problems(kills_min=1, acknowledged_min=1)
    assert told == ["publisher 1: no", "1 sessions were forgotten, the first that of reader"]


def test_run_with_too_little_in_it_proves_nothing() -> None:
    told = Ledger([Subscription("s", 2)], dict(PUBLISHERS), kills=[Kill(unconfirmed=0)]).problems(
        kills_min=2, acknowledged_min=3
    )
    assert all(problem.startswith("this run proved nothing: ") for problem in told)
    assert len(told) == 6
