"""MQTT.js, over TCP and over WebSocket: how its program is made ready, and what it shows. Driver: processes, files."""

from collections.abc import Callable, Sequence
from pathlib import Path

from interop.amqp.programs import CACHE, npm_version
from interop.client import Feature, Program, find_program

SOURCE = Path(__file__).parent / "node"
NODE = CACHE / "node-mqtt"
ALL = (
    Feature.QOS_0,
    Feature.QOS_1,
    Feature.QOS_2,
    Feature.WILDCARDS,
    Feature.RETAINED,
    Feature.WILL,
    Feature.SESSION,
    Feature.SHARED,
    Feature.PROPERTIES,
    Feature.TOPIC_ALIAS,
    Feature.BODY,
    Feature.ERROR,
    Feature.RESTART,
)


def mqttjs_version() -> str:
    return npm_version("mqtt", SOURCE, NODE)


def mqttjs_command(*arguments: str) -> Callable[[], Sequence[str]]:
    def command() -> Sequence[str]:
        mqttjs_version()
        return [find_program("node", "nodejs"), str(SOURCE / "mqttjs.js"), *arguments]

    return command


ENVIRON = {"NODE_PATH": str(NODE / "node_modules")}
PROGRAMS = (
    Program("MQTT.js (Node)", mqttjs_version, ALL, mqttjs_command(), ENVIRON),
    Program("MQTT.js, WebSocket", mqttjs_version, ALL, mqttjs_command("ws"), ENVIRON),
)
