"""What a session gets of what waits for it when that is limited and the oldest are dropped. Over the wire."""

import pytest
from tests.running_broker import eventually

from headrace.gateways.mqtt.packets import Publish, QoS

from .wire import Open

CONFIG = "[mqtt]\nsession_messages_max = 5\n"


def missed(client: Open, name: str, count: int) -> None:
    sleeper = client(name, session_expiry_interval=600)
    sleeper.subscribe(f"{name}/#", qos=1)
    sleeper.disconnect()
    writer = client()
    for number in range(count):
        writer.publish(f"{name}/{number % 3}", b"%d" % number, 1)


@pytest.mark.parametrize("count", [3, 5, 6, 40])
def test_session_that_missed_too_much_gets_the_newest(client: Open, name: str, count: int) -> None:
    missed(client, name, count)
    awake = client(name, clean_start=False, session_expiry_interval=600)
    first = max(0, count - 5)
    assert [int(awake.expect(Publish).payload) for _ in range(count - first)] == list(range(first, count))


def test_what_comes_after_it_woke_is_not_limited(client: Open, name: str) -> None:
    missed(client, name, 9)
    awake = client(name, clean_start=False, session_expiry_interval=600)
    writer = client()
    for number in range(9, 30):
        writer.publish(f"{name}/x", b"%d" % number, 1)
    assert [int(awake.expect(Publish).payload) for _ in range(26)] == list(range(4, 30))


def test_the_rest_of_what_it_missed_is_limited_again_at_the_next_wake(client: Open, name: str) -> None:
    missed(client, name, 9)
    client(name, clean_start=False, session_expiry_interval=600, receive_maximum=2).cut()
    awake = client(name, clean_start=False, session_expiry_interval=600)
    found = [int(awake.expect(Publish).payload) for _ in range(5)]
    assert found == [4, 5, 6, 7, 8]


def counted(client: Open, name: str) -> int:
    """What the broker has dropped so far because too much waited."""
    one = client()
    one.subscribe(f"$SYS/broker/publish/messages/dropped/{name}")
    return int(one.expect(Publish).payload)


@pytest.mark.parametrize("size", [10, 300_000])
def test_connected_session_keeps_the_newest_of_what_waits(client: Open, name: str, size: int) -> None:
    """Large messages wait in the log, small ones in memory."""
    slow, writer = client(name, receive_maximum=2), client()
    slow.subscribe(f"{name}/#", qos=1)
    for number in range(20):
        writer.publish(f"{name}/x", b"%03d" % number + bytes(size), 1)
    assert [int(one.payload[:3]) for one in slow.take(7)] == [0, 1, *range(15, 20)]
    slow.expect_nothing()


def test_messages_that_were_dropped_are_counted(client: Open, name: str) -> None:
    slow, writer = client(name, receive_maximum=2), client()
    slow.subscribe(f"{name}/#", qos=1)
    before = counted(client, "oldest")
    # The figures of $SYS may be a second old.
    for number in range(20):
        writer.publish(f"{name}/x", b"%d" % number, 1)
    eventually(lambda: counted(client, "oldest") == before + 13)
    assert counted(client, "refused") == 0


def test_client_that_keeps_up_is_not_limited_by_how_much_comes_at_once(client: Open, name: str) -> None:
    """What the disk is waited for, and the window has room for, does not wait for the client."""
    lasting, writer = client(name, session_expiry_interval=600), client()
    lasting.subscribe(f"{name}/#", qos=2)
    writer.send(*[Publish(f"{name}/x", b"%d" % number, QoS(1), packet_id=number + 1) for number in range(300)])
    assert [int(one.payload) for one in lasting.take(300)] == list(range(300))


def test_qos_0_is_not_limited(client: Open, name: str) -> None:
    slow, writer = client(name, receive_maximum=1), client()
    slow.subscribe(f"{name}/#", qos=1)
    writer.publish(f"{name}/x", b"held", 1)
    for number in range(20):
        writer.publish(f"{name}/x", b"%d" % number, 0)
    assert slow.payloads(21) == [b"held", *(b"%d" % number for number in range(20))]
