"""What a session gets of what it missed, with a limit and without. Over the wire."""

import pytest

from headrace.gateways.mqtt.packets import Publish

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
