"""Retained messages of MQTT over HTTP: by filter, page by page, and only what a user may read."""

from typing import Any

import httpx
from paho.mqtt.client import CallbackAPIVersion
from paho.mqtt.client import Client as MqttClient
from tests.gateways.http.conftest import HttpBroker

CONFIG = """
[[users]]
name = "other"
password = "may read one room"
[[permissions]]
user = "other"
configure = ""
write = ""
read = "^amq[.]topic$"
[[topic_permissions]]
user = "other"
exchange = "amq.topic"
write = ""
read = "^house[.]kitchen"
"""


def retain(broker: HttpBroker, messages: dict[str, bytes]) -> None:
    mqtt = MqttClient(CallbackAPIVersion.VERSION2)
    mqtt.username_pw_set("guest", "guest")
    mqtt.connect("127.0.0.1", broker.ports["mqtt"])
    mqtt.loop_start()
    for topic, payload in messages.items():
        mqtt.publish(topic, payload, qos=1, retain=True).wait_for_publish(30)
    mqtt.disconnect()
    mqtt.loop_stop()


def listed(http: httpx.Client, **query: Any) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while True:
        page = http.get("/api/v1/retained", params=query).raise_for_status().json()
        found += [(one["topic"], one["value"]) for one in page["messages"]]
        if not page["more"]:
            return found
        query["after"] = found[-1][0]


def test_last_value_of_each_topic_is_listed_by_filter_and_right(http: httpx.Client, broker: HttpBroker) -> None:
    rooms = {f"house/{room}/{number}": b"%d" % number for room in ("kitchen", "attic") for number in range(5)}
    retain(broker, {**rooms, "house/attic/0": b"new", "elsewhere": b"\xff"})
    retain(broker, {"house/attic/1": b""})
    attic = [("house/attic/0", "new"), *((f"house/attic/{n}", str(n)) for n in (2, 3, 4))]
    kitchen = [(f"house/kitchen/{n}", str(n)) for n in range(5)]
    assert listed(http, filter="house/attic/+", limit=3) == attic
    assert listed(http, limit=2) == [("elsewhere", "/w=="), *attic, *kitchen]
    with broker.client(("other", "may read one room")) as other:
        assert listed(other) == kitchen
    refused = http.get("/api/v1/retained", params={"filter": "a/#/b"})
    assert (refused.status_code, refused.json()["code"]) == (400, "invalid_parameter")
