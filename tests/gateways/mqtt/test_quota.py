"""How many messages may wait for a session when the newest beyond that are refused: the machine, and over the wire."""

from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest
from tests.running_broker import eventually

from headrace.gateways.mqtt.packets import Puback, Publish
from headrace.gateways.mqtt.quota import Hole, Overflow, Quota

from .conftest import MqttBroker
from .wire import Open, Wire

CONFIG = '[mqtt]\nsession_messages_max = 5\nsession_overflow = "refuse-newest"\n'
LASTING = {"clean_start": False, "session_expiry_interval": 600}


def quota() -> Quota:
    return Quota(5, Overflow.REFUSE_NEWEST)


# -- the machine ----------------------------------------------------------------------------------------------------


def test_as_many_are_taken_as_may_wait_and_the_window_has_room_for() -> None:
    assert quota().admitted(waiting_count=2, room=3, offset=10, count=9) == 6


def test_records_refused_one_after_the_other_are_one_hole() -> None:
    one = quota()
    for offset in (10, 20, 30):
        assert one.admitted(waiting_count=5, room=0, offset=offset, count=2) == 0
    assert list(one.holes) == [Hole(10, 32, 6)]


def test_record_taken_in_between_parts_two_holes() -> None:
    one = quota()
    one.admitted(waiting_count=5, room=0, offset=10, count=2)
    one.admitted(waiting_count=4, room=0, offset=20, count=2)
    assert list(one.holes) == [Hole(10, 12, 2), Hole(21, 22, 1)]
    assert list(one.outside(5, 30)) == [(5, 10), (12, 21), (22, 30)]
    assert list(one.outside(10, 12)) == []


def test_what_was_refused_takes_its_numbers_when_it_is_passed() -> None:
    one = quota()
    one.admitted(waiting_count=5, room=0, offset=10, count=2)
    one.admitted(waiting_count=4, room=0, offset=20, count=2)
    assert one.before(20) == (2, 20)
    assert one.before(11) == (0, 10), "whoever stands in a hole stands at its beginning"
    assert one.passed(11) == 0
    assert one.passed(21) == 2
    assert one.passed(40) == 1


def test_what_a_sleeping_session_missed_beyond_its_limit_is_one_hole() -> None:
    one = quota()
    one.begin_counting(100, awake_from=200)
    one.count_missed(100, 3)
    one.count_missed(150, 4)
    one.count_missed(190, 1)
    assert one.end_counting(200) == 3
    assert list(one.holes) == [Hole(152, 200, 3)]
    assert one.unread == 5


def test_holes_from_before_it_slept_stay_what_they_were() -> None:
    one = quota()
    one.admitted(waiting_count=5, room=0, offset=10, count=2)
    one.forget()
    one.begin_counting(5, awake_from=50)
    one.count_missed(40, 1)
    one.admitted(waiting_count=0, room=0, offset=60, count=1)
    one.end_counting(50)
    assert list(one.holes) == [Hole(10, 12, 2), Hole(60, 61, 1)]


# -- over the wire --------------------------------------------------------------------------------------------------


def publish(client: Open, name: str, numbers: range, size: int = 0) -> None:
    writer = client()
    for number in numbers:
        writer.publish(f"{name}/x", b"%03d" % number + bytes(size), 1)


def numbers(messages: list[Publish]) -> list[int]:
    return [int(one.payload[:3]) for one in messages]


def slow_reader(client: Open, name: str) -> Wire:
    """It has two in flight, and acknowledges when it is told to."""
    slow = client(name, receive_maximum=2, **LASTING)
    slow.subscribe(f"{name}/#", qos=1)
    return slow


def counted(client: Open) -> int:
    one = client()
    one.subscribe("$SYS/broker/publish/messages/dropped/refused")
    return int(one.expect(Publish).payload)


def test_session_that_missed_too_much_gets_the_oldest(client: Open, name: str) -> None:
    sleeper = client(name, **LASTING)
    sleeper.subscribe(f"{name}/#", qos=1)
    sleeper.disconnect()
    publish(client, name, range(40))
    awake = client(name, **LASTING)
    publish(client, name, range(40, 43))
    assert numbers(awake.take(8)) == [0, 1, 2, 3, 4, 40, 41, 42]


@pytest.mark.parametrize("size", [0, 300_000])
def test_connected_session_takes_no_more_than_may_wait_and_then_goes_on(client: Open, name: str, size: int) -> None:
    """Large messages wait in the log, small ones in memory."""
    slow = slow_reader(client, name)
    publish(client, name, range(20), size)
    found = [slow.expect(Publish), slow.expect(Publish)]
    slow.send(*[Puback(one.packet_id) for one in found])
    found += [slow.expect(Publish), slow.expect(Publish)]
    publish(client, name, range(20, 30), size)
    slow.send(*[Puback(one.packet_id) for one in found[2:]])
    assert numbers(found) + numbers(slow.take(5)) == [0, 1, 2, 3, 4, 5, 6, 20, 21]
    slow.expect_nothing()
    publish(client, name, range(30, 33), size)
    assert numbers(slow.take(3)) == [30, 31, 32]


def test_identifiers_follow_from_the_log_whatever_was_refused(client: Open, name: str) -> None:
    slow = slow_reader(client, name)
    publish(client, name, range(20))
    assert [one.packet_id for one in slow.take(7)] == [1, 2, 3, 4, 5, 6, 7]
    publish(client, name, range(20, 22))
    assert [one.packet_id for one in slow.take(2)] == [21, 22]


def test_what_was_refused_stays_refused_when_the_session_sleeps_and_wakes(client: Open, name: str) -> None:
    slow = slow_reader(client, name)
    publish(client, name, range(20))
    slow.cut()
    publish(client, name, range(20, 30))
    awake = client(name, **LASTING)
    # Two were in flight, five waited.
    assert numbers(awake.take(7)) == [0, 1, 2, 3, 4, 5, 6]
    awake.expect_nothing()


def test_what_was_refused_stays_refused_when_the_broker_starts_again(tmp_path: Path, name: str) -> None:
    with MqttBroker(tmp_path, config=CONFIG) as broker, ExitStack() as wires:

        def open_one(client_id: str = "", **settings: object) -> Wire:
            one = wires.enter_context(broker.wire())
            one.connect(client_id, **settings)  # type: ignore[arg-type]
            return one

        slow_reader(open_one, name)
        publish(open_one, name, range(20))
        broker.restart()
        slow = open_one(name, **LASTING)
        found = slow.take(7)
        assert numbers(found) == [0, 1, 2, 3, 4, 5, 6]
        assert [one.packet_id for one in found] == [1, 2, 3, 4, 5, 6, 7]
        publish(open_one, name, range(20, 21))
        assert [one.packet_id for one in slow.take(1)] == [21]


def test_refused_messages_are_counted(client: Open, name: str) -> None:
    before = counted(client)
    slow_reader(client, name)
    publish(client, name, range(20))
    eventually(lambda: counted(client) == before + 13)


def test_metrics_tell_what_was_refused(tmp_path: Path, name: str) -> None:
    with MqttBroker(tmp_path, config=CONFIG, http=True) as broker, ExitStack() as wires:

        def open_one(client_id: str = "", **settings: object) -> Wire:
            one = wires.enter_context(broker.wire())
            one.connect(client_id, **settings)  # type: ignore[arg-type]
            return one

        slow_reader(open_one, name)
        publish(open_one, name, range(20))
        with urlopen(f"http://127.0.0.1:{broker.ports['http']}/metrics") as answer:
            told = answer.read().decode()
    assert 'headrace_mqtt_dropped_total{reason="refused",vhost="/"} 13.0' in told
    assert 'headrace_mqtt_sessions{state="connected",vhost="/"} 2.0' in told
