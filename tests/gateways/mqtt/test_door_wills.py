"""Wills: when they are published, delayed and dropped. Over the wire."""

import pytest

from headrace.gateways.mqtt.packets import QoS, Will
from headrace.gateways.mqtt.properties import Properties
from headrace.gateways.mqtt.reasons import ReasonCode, Version

from .conftest import MqttBroker
from .wire import Open, wait_seconds

CONFIG = """
[[users]]
name = "mortal"
password = "secret"

[[permissions]]
user = "mortal"
vhost = "/"
configure = ".*"
write = ".*"
read = ".*"
"""

both_versions = pytest.mark.parametrize("version", [Version.V3_1_1, Version.V5], ids=lambda one: one.name)


@both_versions
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_will_is_published_when_the_connection_breaks(client: Open, name: str, version: Version, qos: int) -> None:
    reader = client()
    reader.subscribe(f"{name}/will", qos=2)
    one = client(name, version, will=Will(f"{name}/will", b"gone", QoS(qos)))
    one.close()
    (message,) = reader.take()
    assert (message.payload, message.qos, message.retain) == (b"gone", qos, False)


@both_versions
def test_will_is_dropped_by_a_goodbye(client: Open, name: str, version: Version) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    client(name, version, will=Will(f"{name}/will", b"gone")).disconnect()
    reader.expect_nothing()


@both_versions
def test_client_without_a_will_leaves_none(client: Open, name: str, version: Version) -> None:
    reader = client()
    reader.subscribe(f"{name}/#")
    client(name, version).cut()
    reader.expect_nothing()


def test_goodbye_with_will_publishes_it(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    client(name, will=Will(f"{name}/will", b"gone")).disconnect(ReasonCode.DISCONNECT_WITH_WILL)
    assert reader.payloads(1) == [b"gone"]


@both_versions
def test_will_is_published_when_the_protocol_is_broken(client: Open, name: str, version: Version) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    client(name, version, will=Will(f"{name}/will", b"gone")).send_octets(b"\x00\x00")
    assert reader.payloads(1) == [b"gone"]


@both_versions
def test_retained_will_is_retained_and_another_is_not(client: Open, name: str, version: Version) -> None:
    for retain in (True, False):
        client(name, version, will=Will(f"{name}/{retain}", b"gone", QoS(1), retain)).cut()
    reader = client()
    reader.subscribe(f"{name}/+", qos=1)
    assert [(message.topic, message.retain) for message in reader.take()] == [(f"{name}/True", True)]
    reader.expect_nothing()


def test_will_comes_with_its_properties_in_their_order(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    pairs = (("z", "1"), ("a", "2"), ("z", "3"))
    sent = Properties(content_type="a", response_topic="b", correlation_data=b"c", user_properties=pairs)
    client(name, will=Will(f"{name}/will", b"gone", properties=sent)).cut()
    assert reader.take()[0].properties == sent


def test_delayed_will_comes_after_its_delay(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    will = Will(f"{name}/will", b"gone", properties=Properties(will_delay_interval=1))
    client(name, session_expiry_interval=300, will=will).cut()
    reader.expect_nothing()
    assert reader.payloads(1) == [b"gone"]


def test_delayed_will_is_dropped_when_the_client_comes_back(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    will = Will(f"{name}/will", b"gone", properties=Properties(will_delay_interval=1))
    client(name, session_expiry_interval=300, will=will).cut()
    client(name, clean_start=False, session_expiry_interval=300)
    wait_seconds(client(), name, 2)
    reader.expect_nothing()


def test_delayed_will_comes_when_the_session_ends_before_the_delay(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    will = Will(f"{name}/will", b"gone", properties=Properties(will_delay_interval=1000))
    client(name, session_expiry_interval=0, will=will).cut()
    assert reader.payloads(1) == [b"gone"]
    client(name, session_expiry_interval=1, will=will).cut()
    assert reader.payloads(1) == [b"gone"]
    client(name, session_expiry_interval=300, will=will).cut()
    reader.expect_nothing()
    client(name, clean_start=True)
    assert reader.payloads(1) == [b"gone"]


@both_versions
def test_will_is_published_by_a_take_over(client: Open, name: str, version: Version) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    client(name, version, will=Will(f"{name}/will", b"gone"))
    second = client(name, version)
    assert reader.payloads(1) == [b"gone"]
    second.disconnect()
    reader.expect_nothing()


def test_delayed_will_is_not_published_by_a_take_over_that_resumes(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    will = Will(f"{name}/will", b"gone", properties=Properties(will_delay_interval=1))
    client(name, session_expiry_interval=300, will=will)
    client(name, clean_start=False, session_expiry_interval=300)
    wait_seconds(client(), name, 2)
    reader.expect_nothing()


def test_will_of_the_newest_connection_counts(client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    client(name, session_expiry_interval=300, will=Will(f"{name}/will", b"first")).disconnect()
    kept = {"clean_start": False, "session_expiry_interval": 300}
    client(name, will=Will(f"{name}/will", b"second"), **kept).cut()
    assert reader.payloads(1) == [b"second"]
    client(name, **kept).cut()
    reader.expect_nothing()


def test_will_of_a_user_who_lost_the_right_is_not_published(broker: MqttBroker, client: Open, name: str) -> None:
    reader = client()
    reader.subscribe(f"{name}/will")
    will = Will(f"{name}/will", b"gone", properties=Properties(will_delay_interval=1))
    client(name, user="mortal", password=b"secret", session_expiry_interval=300, will=will).cut()
    broker.reload(CONFIG.replace('write = ".*"', 'write = "^$"'))
    wait_seconds(client(), name, 2)
    reader.expect_nothing()
