"""What is in flight is the same, whether it lies there as runs or one by one."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from headrace.gateways.mqtt.flights import Flight, Flights

IDS = 20


def ids_from(number: int, count: int) -> Sequence[int]:
    start = number % IDS
    if start + count <= IDS:
        return range(1 + start, 1 + start + count)
    return [1 + (number + place) % IDS for place in range(count)]


def add(flights: Flights, number: int, count: int) -> None:
    """Payloads are the session's numbers; offsets are a hundred more."""
    payloads = [b"%d" % one for one in range(number, number + count)]
    flights.add_run(number, ids_from(number, count), 100 + number, False, [b"t"] * count, [b""] * count, payloads)


def flight(number: int) -> Flight:
    return Flight(100 + number, 1, False, b"t", b"", b"%d" % number)


def test_messages_acknowledged_in_the_order_in_which_they_were_sent_are_done_with_over_the_ends_of_runs() -> None:
    flights = Flights()
    add(flights, 0, 3)
    add(flights, 3, 3)
    assert flights.take_first([1, 2, 3, 4]) == 4
    assert len(flights) == 2
    assert dict(flights.items()) == {5: flight(4), 6: flight(5)}


def test_one_that_is_not_the_first_is_left_to_whoever_looks_at_single_ones() -> None:
    flights = Flights()
    add(flights, 0, 3)
    assert flights.take_first([2]) == 0
    del flights[2]
    assert [*flights] == [1, 3]


def test_an_identifier_that_nobody_was_sent_is_not_taken() -> None:
    flights = Flights()
    assert flights.take_first([7]) == 0
    assert flights.get(7) is None


def test_what_is_acknowledged_does_not_lie_in_memory_because_its_neighbour_is_not() -> None:
    flights = Flights()
    add(flights, 0, 20)
    assert flights.take_first(range(1, 16)) == 15
    (run,) = flights._runs
    assert len(run.payloads) == 5


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = st.sampled_from(["send", "in order", "any", "single", "look", "twice"])
    return draw(st.lists(st.tuples(kinds, st.integers(1, 8)), max_size=40))


@given(stories())
def test_whatever_is_sent_and_acknowledged_it_is_what_a_plain_table_would_have(story: list[tuple[str, int]]) -> None:
    flights = Flights()
    plain: dict[int, Flight] = {}
    number = 0
    for kind, count in story:
        match kind:
            case "send":
                ids = ids_from(number, count)
                used = not plain.keys().isdisjoint(ids)
                assert flights.has_any(number, ids, IDS) == used
                if not used:
                    add(flights, number, count)
                    plain.update(zip(ids, map(flight, range(number, number + count)), strict=True))
                    number += count
            case "single":
                # A retained message, say: its identifier is of the other half.
                flights[IDS + count] = flight(1_000 + count)
                plain[IDS + count] = flight(1_000 + count)
            case "look":
                assert [*flights.items()] == [*plain.items()]
            case _:
                order = [*plain]
                ids = [*order[:count]] if kind != "any" else [*order[count:]][:count]
                if kind == "twice":
                    ids = [*ids, *ids]
                for packet_id in ids[flights.take_first(ids) :]:
                    if flights.get(packet_id) is not None:
                        del flights[packet_id]
                for packet_id in ids:
                    plain.pop(packet_id, None)
        assert len(flights) == len(plain)
    assert [*flights.items()] == [*plain.items()]
