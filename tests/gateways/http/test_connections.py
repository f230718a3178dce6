"""Connections of AMQP and MQTT clients over HTTP: who sees them, who may close them."""

import threading
from typing import Any

import httpx
import paho.mqtt.client as mqtt
import pytest
from pika.exceptions import ConnectionClosedByBroker
from tests.running_broker import eventually

from .conftest import PATIENCE_S, HttpBroker
from .test_app import code

CONFIG = """
[[users]]
name = "plain"
password = "plainly"

[[permissions]]
user = "plain"
configure = ".*"
write = ".*"
read = ".*"
"""
CONNECTIONS = "/api/v1/connections"


def named(http: httpx.Client, name: str) -> list[dict[str, Any]]:
    return [one for one in http.get(CONNECTIONS).json()["connections"] if one["name"] == name]


def test_amqp_connection_is_listed_and_closed_with_a_reason(broker: HttpBroker, http: httpx.Client, name: str) -> None:
    connection = broker.connect(client_properties={"connection_name": name})
    connection.channel()
    (found,) = named(http, name)
    assert (found["protocol"], found["user"], found["vhost"], found["channels"]) == ("amqp 0-9-1", "guest", "/", 1)
    assert (found["host"], found["tls"]) == ("127.0.0.1", False)
    assert http.delete(f"{CONNECTIONS}/{found['id']}").status_code == 204
    with pytest.raises(ConnectionClosedByBroker, match="closed by user 'guest'"):
        connection.process_data_events(PATIENCE_S)
    eventually(lambda: named(http, name) == [])
    assert code(http.delete(f"{CONNECTIONS}/{found['id']}")) == "not_found"


def test_mqtt_connection_is_listed_by_its_client_id_and_closed(
    broker: HttpBroker, http: httpx.Client, name: str
) -> None:
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2, client_id=name, protocol=mqtt.MQTTv5)
    connected, gone = threading.Event(), threading.Event()
    reasons: list[int] = []
    client.on_connect = lambda *_: connected.set()

    def on_disconnect(_client: Any, _data: Any, _flags: Any, reason: Any, _properties: Any) -> None:
        reasons.append(reason.value)
        client.loop_stop()
        gone.set()

    client.on_disconnect = on_disconnect
    client.connect("127.0.0.1", broker.ports["mqtt"])
    client.loop_start()
    assert connected.wait(PATIENCE_S)
    (found,) = named(http, name)
    assert found["protocol"] == "mqtt 5"
    assert http.delete(f"{CONNECTIONS}/{found['id']}").status_code == 204
    assert gone.wait(PATIENCE_S)
    assert reasons[0] == 0x98  # administrative action
    client.disconnect()
    client.loop_stop()


def test_everybody_sees_and_closes_their_own_and_nobody_else_s(
    broker: HttpBroker, http: httpx.Client, name: str
) -> None:
    mine = broker.connect(user="plain", password="plainly", client_properties={"connection_name": f"mine-{name}"})
    other = broker.connect(client_properties={"connection_name": f"other-{name}"})
    with broker.client(("plain", "plainly")) as plain:
        (theirs,) = named(http, f"other-{name}")
        assert named(plain, f"other-{name}") == []
        assert code(plain.delete(f"{CONNECTIONS}/{theirs['id']}")) == "not_found"
        (own,) = named(plain, f"mine-{name}")
        assert plain.delete(f"{CONNECTIONS}/{own['id']}").status_code == 204
    with pytest.raises(ConnectionClosedByBroker):
        mine.process_data_events(PATIENCE_S)
    assert other.is_open
    other.close()


def test_list_goes_on_behind_an_id(broker: HttpBroker, http: httpx.Client, name: str) -> None:
    opened = [broker.connect(client_properties={"connection_name": f"{name}-{number}"}) for number in range(3)]
    found: list[str] = []
    after = ""
    while True:
        page = http.get(CONNECTIONS, params={"limit": 1, "after": after}).json()
        found += [one["name"] for one in page["connections"]]
        if not page["more"]:
            break
        after = page["connections"][-1]["id"]
    assert {f"{name}-{number}" for number in range(3)} <= set(found)
    for one in opened:
        one.close()


def test_what_was_changed_is_logged_with_who_and_messages_are_not(
    broker: HttpBroker, http: httpx.Client, name: str
) -> None:
    http.post("/api/v1/topics", json={"name": name})
    http.post(f"/api/v1/topics/{name}/messages", json={"value": "canary-5521"})
    http.delete(f"/api/v1/topics/{name}")
    http.delete(f"/api/v1/topics/{name}")
    told = broker.log_path.read_text()
    changes = [line for line in told.splitlines() if "changed over HTTP" in line and name in line]
    assert len(changes) == 1
    assert "operation=delete_topic" in changes[0]
    assert "user=guest" in changes[0]
    assert "operation=create_topic" in told
    assert "canary-5521" not in told
